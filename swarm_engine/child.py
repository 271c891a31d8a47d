"""How processes of ours are started: they import nothing from the current folder, and end with whoever started them.

    python -P -m swarm_engine.child MODULE WORD…
    python -I child.py FILE.py WORD…

runs a module or a file, having asked the kernel first to end the process when the thread that started it ends. What was
started has seconds of imports before it and can't look after itself meanwhile. Linux alone can be asked; elsewhere a
child ends when it first looks at its standard input or its socket.

At the top nothing is imported but what the interpreter has loaded already: a user's file may have any module's name.
"""

from __future__ import annotations

import os
import sys

PR_SET_PDEATHSIG = 1
KILL = 9


def command(target: str, *words: str, flags: tuple[str, ...] = ("-P",)) -> tuple[str, ...]:
    """What starts a module, or a file by its path, as a child. Its standard input is a pipe that only the parent holds.

    Args:
        flags: of the interpreter, among them `-P` or `-I`; a file is run without packages, so it gets this one by its
            path.
    """
    here = (__file__,) if target.endswith(".py") else ("-m", "swarm_engine.child")
    return (sys.executable, *flags, *here, target, *words)


def end_with_parent() -> None:
    """Be killed when the thread that started this process ends; end now where that came first."""
    _ask(KILL)
    # The parent may have ended before the kernel was asked, and then holds the pipe no more.
    if _has_ended(0):
        os._exit(1)


def outlive_parent() -> None:
    """Take that back: from here on the process looks after itself."""
    _ask(0)


def forget_current_folder(package: str) -> None:
    """Take the current folder, where `python -m` looks first, off the path, unless the package itself lies there.

    Args:
        package: `__file__` of a module in it.
    """
    try:
        here = os.getcwd()
    except OSError:
        return  # it was removed, so nothing is imported from it
    if not sys.flags.safe_path and sys.path[:1] == [here] and os.path.dirname(os.path.dirname(package)) != here:
        del sys.path[0]


def _ask(signal: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0)


def _has_ended(descriptor: int) -> bool:
    """Whether it is a pipe or a socket whose other end is closed."""
    if sys.platform != "linux":
        return False
    import select

    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is told without being asked for
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def main() -> None:
    """Become what the words say."""
    end_with_parent()
    import runpy

    target = sys.argv[1]
    del sys.argv[0]
    if target.endswith(".py"):
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
