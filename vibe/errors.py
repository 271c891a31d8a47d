"""Everything that can go wrong between a sentence and a trained policy, as one tree.

The message is for the person who typed the command: the value, the limit, the way out.
"""

from __future__ import annotations

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 and the signal's number."""


class VibeError(Exception):
    """Base of what vibe raises on purpose; the command prints it and ends with `exit_code`."""

    exit_code = 1


class UsageError(VibeError, ValueError):
    """The user asked for something that can't be: a wrong flag, value or folder."""

    exit_code = 2


class NoTemplateError(UsageError):
    """No template fits the description."""

    def __init__(self, message: str, nearest: str) -> None:
        super().__init__(message)
        self.nearest = nearest
        """Name of the template that came closest."""


class ProjectError(UsageError):
    """A project folder that can't be written or read."""


class TooSmallError(VibeError):
    """The start policy gives a group nothing to compare, so training could not move it."""

    exit_code = 3


class EnvError(VibeError):
    """The game's own code is at fault; the message says where, and may quote what it raised and printed."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, but="\n\t"))


class EditedError(UsageError):
    """The code of a project is no longer what its run was begun with."""


class StuckError(VibeError):
    """The policy has collapsed and nothing can be learned any more, so training ended."""

    exit_code = 4


class GameError(VibeError):
    """The games end without anybody being judged, or pay the same whatever is played."""


class SwarmFailedError(VibeError):
    """The engine can't be reached, does not come up, or fails again after a new start."""


class TrainingFailedError(VibeError):
    """The project's training ended with an error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StoppedError(VibeError):
    """The user, or whoever runs the machine, asked it to stop, and it did."""

    exit_code = INTERRUPTED


def printable(text: str, but: str = "") -> str:
    """Text without characters that would steer a terminal.

    Args:
        but: of these, those that stay.
    """
    return "".join(char if char.isprintable() or char in but else "�" for char in text)
