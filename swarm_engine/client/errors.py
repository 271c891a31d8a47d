"""What can go wrong between a client and a swarm.

SwarmError
├── AddressError               an address that says more than where the swarm is
├── SwarmUnavailableError      the engine is off or failed
│   └── NoAnswerError          nobody answers
├── SwarmRequestError          the server refused a request: code, message, hint
│   ├── ContextLengthError     the prompt leaves no room for a reply; end the episode as truncated
│   └── EpisodeLostError       the episode is gone; claim its task again
├── ReplayLimitError           a run's episodes of one place were lost again and again
├── ClaimTimeoutError          no episode was free in time; `reason` says why
├── GroupSizeError             a run plays its tasks as often as no group of the server has places
├── EpisodeNotEndedError       a rollout left its episode without `end`
├── NotFiniteError             a reward or metric is no finite number
└── SwarmProtocolError         the answer is not one of a swarm's
"""

from __future__ import annotations

from swarm_engine.types import ClaimReason


class SwarmError(Exception):
    """Base of every error of the client."""


class AddressError(SwarmError):
    """An address holds a user name, a password or a query."""


class SwarmUnavailableError(SwarmError):
    """Nobody answers at the address, or the engine behind it is off or failed."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        """The server's name for the problem; None where it is the client's own view."""


class NoAnswerError(SwarmUnavailableError):
    """Nobody answers at the address."""

    def __init__(self, message: str, *, is_sent: bool = True) -> None:
        super().__init__(message)
        self.is_sent = is_sent
        """Whether the server may have the request."""


class SwarmRequestError(SwarmError):
    """The server refused a request."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.status = status
        """HTTP status."""
        self.code = code
        """The server's name for the problem."""
        self.hint = hint


class ContextLengthError(SwarmRequestError):
    """The prompt leaves no room for a reply; end the episode as truncated."""


class EpisodeLostError(SwarmRequestError):
    """The episode is gone: its lease or time ran out, or the engine went down. Claim its task again."""


class ReplayLimitError(SwarmError):
    """The episodes of one place of a run were lost again and again."""


class ClaimTimeoutError(SwarmError):
    """No episode was free in time."""

    def __init__(self, task_id: str, reason: ClaimReason, wait_s: float) -> None:
        super().__init__(
            f"no episode of task {task_id!r} was free within {wait_s:g} s ({reason}); claim again, or wait longer"
        )
        self.reason = reason
        """What the server was doing."""


class GroupSizeError(SwarmError):
    """A train run would fill no group: the server's have another size."""


class EpisodeNotEndedError(SwarmError):
    """A rollout left its episode without a reward, so it was aborted."""


class NotFiniteError(SwarmError):
    """A reward or metric is no finite number. The episode still runs and can be ended with another."""


class TokenFileError(SwarmError):
    """A file holds no token."""


class SwarmProtocolError(SwarmError):
    """The answer is not one of a swarm's; is the address right?"""
