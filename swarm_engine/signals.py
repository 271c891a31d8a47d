"""The signals that ask a program to end, and the dead terminal that one of them comes with."""

from __future__ import annotations

import errno
import os
import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, a polite kill, and the closing of the terminal; not that one where `nohup` has it ignored."""
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, hangup)


def leave_dead_terminal() -> None:
    """Print to nowhere from now on where the terminal is gone: writing to it fails, and would break an orderly end."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
