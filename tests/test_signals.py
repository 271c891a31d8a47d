"""Programs that are asked to end, in a terminal that closes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import signal, sys
from swarm_engine.signals import ending_signals, leave_dead_terminal

def end(number, _):
    leave_dead_terminal()
    print("an orderly end says something", flush=True)
    open(sys.argv[1], "w").write(signal.Signals(number).name)
    sys.exit(3)

for number in ending_signals():
    signal.signal(number, end)
print("ready", flush=True)
signal.pause()
"""


def test_a_program_whose_terminal_closes_ends_in_order(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM, str(tmp_path / "ended")])
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert (tmp_path / "ended").read_text() == "SIGHUP"


def test_a_program_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-c", PROGRAM, str(tmp_path / "ended")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3
    assert (tmp_path / "ended").read_text() == "SIGTERM"
