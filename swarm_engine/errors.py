"""What can go wrong in the engine, as one tree. Each kind knows the HTTP status and code it is answered with.

SwarmEngineError
├── BadRequestError            400  a request that can't be served as it is
│   ├── UnsupportedError            a field or value this server doesn't take
│   └── ContextLengthError          the prompt leaves no room for a reply
├── TemplateBoundError         400  the chat template makes more of the messages than it may
├── UnauthorizedError          401  no key, or a wrong one
├── ForbiddenError             403  the key's role may not do this
├── NotFoundError              404  no such thing
├── MethodNotAllowedError      405  the route has other methods
├── ConflictError              409  it contradicts what happened before
├── EpisodeLostError           410  the episode is gone; claim its task again
├── TooLargeError              413  the request's body is too long
├── UnsupportedEncodingError   415  the request's body is packed in a way that is not unpacked
├── WrongHostError             421  the Host header names another server
├── InvalidError               422  well-formed, but a value makes no sense
├── InternalError              500  a fault of the server's own
├── EngineUnavailableError     503  the engine is off or failed
│   └── ServerClosingError          the server is going down
├── CrowdedError               503  the server has no room for another connection
├── JournalError               507  the journal can't be written, so nothing can be promised
│   ├── JournalLockedError     503  another program holds it locked
│   └── JournalDamagedError    500  something in it is not as it was written
├── TokenizerError                  a tokenizer or chat template this engine can't be faithful to
├── ModelError                 422  a policy that can't be found, read or run
├── CheckpointError                 a checkpoint could not be written; those before it stand
├── WorkerError                     the worker can't go on, and says why
├── WorkerDiedError                 the worker ended before it answered
├── TeacherError                    the teacher can't be asked, or doesn't say what was asked
└── RunDirError                     the run folder can't be used
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection

MAX_SHOWN_CHARS = 80
"""Of a caller's value in a message: it may be the whole of a megabyte that was sent by mistake."""

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = MAX_SHOWN_CHARS


def shown(value: object) -> str:
    """A value as an error shows it: the whole of a short one, the beginning of a long one."""
    return shortened(_BRIEF.repr(value))


def shortened(text: str) -> str:
    """A text as an error shows it, without quotes."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " …"


class SwarmEngineError(Exception):
    """Base of every error of the engine."""

    status = 500
    code = "internal"

    def __init__(self, message: str, hint: str = "", *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        """What is wrong, with the value and the limit."""
        self.hint = hint
        """The way out."""
        self.param = param
        """The field of the request that is to blame, where there is one."""
        if code is not None:
            self.code = code


class BadRequestError(SwarmEngineError):
    """A request that can't be served as it is."""

    status = 400
    code = "bad_request"


class UnsupportedError(BadRequestError):
    """A field or value of a request that this server doesn't take; none is silently ignored."""

    code = "unsupported_parameter"


class ContextLengthError(BadRequestError):
    """The prompt leaves no room for a reply."""

    code = "context_length_exceeded"

    def __init__(self, count: str, limit: int, param: str) -> None:
        super().__init__(
            f"prompt is too long: it has {count} tokens, prompt and reply together may have {limit}",
            "shorten the messages, or end the episode as truncated",
            param=param,
        )


class TemplateBoundError(SwarmEngineError):
    """The chat template makes more of the messages than it may; no other form of them helps, so nobody tries one."""

    status = 400
    code = "template_refused"


class UnauthorizedError(SwarmEngineError):
    """No key, or a wrong one."""

    status = 401
    code = "unauthorized"


class ForbiddenError(SwarmEngineError):
    """The key's role may not do this."""

    status = 403
    code = "forbidden"


class NotFoundError(SwarmEngineError):
    """No such thing."""

    status = 404
    code = "not_found"


class MethodNotAllowedError(SwarmEngineError):
    """The route has other methods."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: Collection[str]) -> None:
        self.allow = ", ".join(sorted(allowed))
        """As the `Allow` header, which every such answer must have, writes it."""
        super().__init__(f"{method} is not a method of {path}", f"use {self.allow}")


class ConflictError(SwarmEngineError):
    """It contradicts what happened before."""

    status = 409
    code = "conflict"


class EpisodeLostError(SwarmEngineError):
    """The episode was this server's and is gone: its lease ran out, it was aborted, or the engine went down."""

    status = 410
    code = "episode_lost"


class TooLargeError(SwarmEngineError):
    """The request's body is longer than this server reads."""

    status = 413
    code = "request_too_large"


class UnsupportedEncodingError(SwarmEngineError):
    """The request's body is packed in a way that this server does not unpack."""

    status = 415
    code = "unsupported_encoding"


class WrongHostError(SwarmEngineError):
    """The Host header names another server: a page in a browser that was led here, or a proxy set up wrongly."""

    status = 421
    code = "wrong_host"


class InvalidError(SwarmEngineError):
    """Well-formed, but a value makes no sense."""

    status = 422
    code = "invalid"


class InternalError(SwarmEngineError):
    """A fault of the server's own. What it was stands in the server's log and is nothing that a caller should see."""

    def __init__(self) -> None:
        super().__init__("the server failed to answer this request", "its log says how; it is a bug, please report it")


class EngineUnavailableError(SwarmEngineError):
    """The engine is off or failed."""

    status = 503
    code = "engine_unavailable"


class ServerClosingError(EngineUnavailableError):
    """The server is going down; clients wait for it to come back."""

    code = "server_closing"

    def __init__(self) -> None:
        super().__init__("the server is going down", "start it again")


class CrowdedError(SwarmEngineError):
    """The server has no room for another connection."""

    status = 503
    code = "too_many_connections"

    def __init__(self, limit: int | None) -> None:
        super().__init__(
            f"all of the {limit} connections that the server's limit of open files leaves room for are busy",
            "ask again later with fewer at once, or raise the limit of open files and start the server again",
        )


class JournalError(SwarmEngineError):
    """The journal can't be written, so nothing can be promised."""

    status = 507
    code = "journal_full"


class JournalLockedError(JournalError):
    """Another program holds the journal locked."""

    status = 503
    code = "journal_locked"


class JournalDamagedError(JournalError):
    """Something in the journal is not as it was written."""

    status = 500
    code = "journal_damaged"


class TokenizerError(SwarmEngineError):
    """A tokenizer or chat template this engine can't be faithful to."""

    code = "tokenizer"


class ModelError(SwarmEngineError):
    """A policy that can't be found, read or run."""

    status = 422
    code = "model"


class CheckpointError(SwarmEngineError):
    """A checkpoint or an export could not be written, and what was there stands; or one can't be used."""

    status = 507
    code = "checkpoint"


class WorkerError(SwarmEngineError):
    """The worker can't go on; the front is told why."""

    code = "worker"


class WorkerDiedError(SwarmEngineError):
    """The worker ended before it answered."""

    status = 503
    code = "worker_died"


class TeacherError(SwarmEngineError):
    """The teacher can't be asked, or doesn't say what was asked."""

    code = "teacher"


class RunDirError(SwarmEngineError):
    """The run folder can't be used."""

    code = "run_dir"
