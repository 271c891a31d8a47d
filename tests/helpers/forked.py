"""Programs that are forked from a process that has imported the worker, for torch takes two seconds of each start.

    serve_thread(run_dir, worker=forked_worker())

The process that such a command starts has a fork run the program with its files, folder and environment, and ends as
the fork ends. A signal ends it like any process, and the fork a moment later; so what a kill leaves behind, and how a
worker starts, are tested with the command itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from itertools import dropwhile
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import selectors

ADDRESS = "s"
HEADER = 8
"""Bytes of a number: how long a message is, or how a fork ended."""

_source = ""
"""Where this process's own source of forks listens, once there is one."""


def forked(*command: str) -> tuple[str, ...]:
    """The command that does what `command` does, a Python program by its file or by `-m`."""
    words = dropwhile(lambda word: word.startswith("-") and word != "-m", command[1:])
    return (command[0], "-I", "-S", __file__, _start(), *words)


def forked_worker() -> tuple[str, ...]:
    """The command of the engine worker as a fork."""
    return forked(sys.executable, "-m", "swarm_engine.worker")


def _start() -> str:
    """Start the process that forks, where there is none yet; returns where it listens."""
    global _source
    if not _source:
        import atexit
        import subprocess
        import tempfile

        folder = tempfile.TemporaryDirectory(prefix="forked-")
        process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, cwd=folder.name)
        assert process.stdin is not None

        @atexit.register
        def end() -> None:
            process.communicate()
            folder.cleanup()

        _source = f"{folder.name}/{ADDRESS}"
        while not os.path.exists(_source):
            assert process.poll() is None, "it could not be started"
            time.sleep(0.02)
    return _source


def ask(address: str, words: list[str]) -> int:
    """Have a program run with this process's files; returns its exit code, below 0 for a signal."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        asked = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(line, [len(asked).to_bytes(HEADER, "big")], [0, 1, 2])
        line.sendall(asked)
        return int.from_bytes(line.recv(HEADER), "big", signed=True)


def serve() -> None:
    """Fork whenever somebody asks, until the standard input closes."""
    import selectors

    import swarm_engine.worker  # noqa: F401  # what every fork begins with

    ended, tells = socket.socketpair()
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener, ready = socket.socket(socket.AF_UNIX), selectors.DefaultSelector()
    listener.bind("new")
    listener.listen()
    os.rename("new", ADDRESS)
    forks: dict[int, socket.socket] = {}
    """By process id, who asked for it."""
    for one in (sys.stdin, listener, ended):
        ready.register(one, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                for pid in forks:
                    os.kill(pid, signal.SIGKILL)
                return
            if key.fileobj is listener:
                line, _ = listener.accept()
                words, folder, environment, files = _read(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (line, *forks.values(), listener, ready, ended, tells):
                        other.close()
                    _run(words, folder, environment, files)
                for file in files:
                    os.close(file)
                forks[pid] = line
                ready.register(line, selectors.EVENT_READ)
            elif key.fileobj is ended:
                ended.recv(1 << 10)
                _bury(forks, ready)
            else:  # who asked is gone; its line closes when the fork is buried
                ready.unregister(key.fileobj)
                os.kill(next(pid for pid, line in forks.items() if line is key.fileobj), signal.SIGKILL)


def _bury(forks: dict[int, socket.socket], ready: selectors.BaseSelector) -> None:
    """Tell of every fork that has ended."""
    for pid, line in [*forks.items()]:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with contextlib.suppress(OSError):
                line.sendall(os.waitstatus_to_exitcode(status).to_bytes(HEADER, "big", signed=True))
            with contextlib.suppress(KeyError):
                ready.unregister(line)
            line.close()
            del forks[pid]


def _read(line: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """What is asked for: the program with its arguments, its folder, environment and open files."""
    size, files, _, _ = socket.recv_fds(line, HEADER, 3)
    with line.makefile("rb") as stream:
        words, folder, environment = json.loads(stream.read(int.from_bytes(size, "big")))
    return words, folder, environment, files


def _run(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> NoReturn:
    """Be the program."""
    import runpy
    import traceback

    code = 1
    try:
        os.setsid()
        for place, file in enumerate(files):
            os.dup2(file, place)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(words[0]))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:  # noqa: BLE001  # whatever it is, the fork ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
        os._exit(0)
    code = ask(sys.argv[1], sys.argv[2:])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)
