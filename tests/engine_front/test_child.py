"""How processes of ours are started: nothing is imported from the current folder, and nothing outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from conftest import log_of, serve_process, wait_until
from test_lifecycle import wait_for_state

from swarm_engine import child
from swarm_engine.server.worker_link import WORKER_COMMAND, WorkerLink, _listen
from swarm_engine.types import EngineState

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked, and Linux alone can be")

PARENT = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); time.sleep(60)"


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def started_by_another(tmp_path: Path, code: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process, and the child that it started; the child has run some code."""
    file, told = tmp_path / "child_code.py", tmp_path / "pid"
    file.write_text(f"import os, time\n{code}\nopen({str(told)!r}, 'w').write(f'{{os.getpid()}} ')\ntime.sleep(60)")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *child.command(str(file))])
    wait_until(lambda: told.exists() and told.read_text().endswith(" "))
    return parent, int(told.read_text())


def test_a_child_is_killed_with_its_parent(tmp_path: Path) -> None:
    parent, pid = started_by_another(tmp_path, "")
    assert is_running(pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(pid))


def test_a_child_that_looks_after_itself_is_not(tmp_path: Path) -> None:
    asked, answered = tmp_path / "asked", tmp_path / "answered"
    answer = f"""
import threading
from swarm_engine.child import outlive_parent

outlive_parent()

def answer():
    while not os.path.exists({str(asked)!r}):
        time.sleep(0.01)
    open({str(answered)!r}, "w")

threading.Thread(target=answer).start()
"""
    parent, pid = started_by_another(tmp_path, answer)
    parent.kill()
    parent.wait()
    # What the kernel does at the end of a parent is done: whoever was to be killed runs no more code.
    asked.touch()
    wait_until(answered.exists)
    os.kill(pid, signal.SIGKILL)


def test_a_child_whose_parent_has_ended_before_its_first_instruction_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "child_code.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    ours, theirs = os.pipe()
    os.close(theirs)
    assert subprocess.run(child.command(str(file)), stdin=ours).returncode == 1
    os.close(ours)
    assert not (tmp_path / "ran").exists()


def test_each_start_has_an_address_of_its_own_and_removes_what_a_killed_one_left() -> None:
    async def main(run_dir: Path) -> None:
        loop = asyncio.get_running_loop()
        addresses = []
        for _ in range(2):
            # Left as a kill leaves it: its way out is not taken.
            server, address = await _listen(loop, WorkerLink(lambda _: None), run_dir, contextlib.ExitStack())
            assert stat.S_IMODE(os.stat(address).st_mode) == 0o600
            addresses.append(Path(address))
            server.close()
        assert addresses[0] != addresses[1]
        assert [*run_dir.iterdir()] == [addresses[1]]

    # Short, for the socket of a longer one lies elsewhere.
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder).resolve()))


HOSTILE = ("random", "queue", "secrets", "numpy", "logging", "typing", "asyncio", "torch", "ctypes", "runpy")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, whose files have names of modules and say so where they are imported."""
    folder = tmp_path / "current"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write('{name} '); 1 / 0")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("package", ["vibe", "a3r"])
def test_python_m_imports_nothing_of_ours_from_the_current_folder(hostile: Path, package: str) -> None:
    said = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")
    assert not (hostile / "imported").exists()


def test_a_front_that_was_killed_in_its_workers_first_second_starts_again_and_imports_nothing_from_here(
    hostile: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = serve_process(run_dir, "--start", worker=WORKER_COMMAND)
    wait_until(lambda: len(psutil.Process(first.pid).children()) == 1)
    (worker,) = psutil.Process(first.pid).children()
    wait_until(lambda: "libtorch" in Path(f"/proc/{worker.pid}/maps").read_text())  # the midst of its imports
    first.stop(signal.SIGKILL)
    wait_until(lambda: not is_running(worker.pid))
    again = serve_process(run_dir, "--start", worker=WORKER_COMMAND)
    with again.client() as client:
        wait_for_state(client, EngineState.ROLLING, limit_s=60)
    assert again.stop() == 0
    assert "no front listens" not in (run_dir / "worker.log").read_text(), "the old worker lived on for a while"
    assert "Traceback" not in log_of(run_dir).read_text()
    assert not (hostile / "imported").exists()


@pytest.mark.parametrize("package", ["a3r", "vibe"])
def test_a_command_by_its_package_runs_in_a_folder_that_was_removed(tmp_path: Path, package: str) -> None:
    told = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, "-m", package, "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "a3r", "runs"),
        ("-m", "vibe", "new", "Play tic-tac-toe against a random opponent"),
        ("-m", "swarm_engine.cli", "serve"),
    ],
    ids=lambda words: words[1],
)
def test_a_home_in_a_folder_that_was_removed_is_nowhere(tmp_path: Path, words: tuple[str, ...]) -> None:
    told = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "A3R_HOME"},
    )
    assert told.returncode in (1, 2)
    assert re.search(r"the current folder was removed, so \.a3r\S* is nowhere.* go to a folder that is", told.stderr)
    assert "Traceback" not in told.stderr


def test_a_worker_starts_where_the_current_folder_of_its_front_was_removed(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    enter = 'cd "$0" && rmdir "$0" && exec "$@"'
    served = serve_process(tmp_path / "run", "--start", prefix=("sh", "-c", enter, str(tmp_path / "gone")))
    with served.client() as client:
        wait_for_state(client, EngineState.ROLLING, limit_s=60)
    assert served.stop() == 0
