"""The process that games run in: JSON lines in, JSON lines out, and nothing of the machine beyond them.

Run as a script, `envhost.py PROJECT LIMITS` under `python -I -S -B`, by `vibe.envs`. Standard library only, for the
interpreter sees no packages. Limits are set before the game is imported; what the game prints goes to standard error,
never into the protocol.

    {"id": 1, "op": "reset", "env": "e1", "rules": {...}, "seed": 7}    ->  {"id": 1, "ok": {...}}
                                                                        or  {"id": 1, "error": {"code": ..., "message":
                                                                        ...}}
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from types import ModuleType
from typing import Any, BinaryIO

try:
    import resource
except ImportError:  # not a Unix; the parent's wall clock still ends an endless game
    resource = None  # type: ignore[assignment]

MAX_REPLY_BYTES = 1_000_000
MAX_MESSAGE = 2000
"""Characters of an error message."""


REFUSED_EVENTS = (
    *("subprocess.", "os.system", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "pty."),
    *("socket.", "ctypes."),
)
"""Beginnings of audit events that a game has no use for: processes, sockets, foreign code."""
PATH_EVENTS = (
    *("open", "os.listdir", "os.scandir", "os.chdir", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link"),
    *("os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime"),
)
READ_EVENTS = ("os.listdir", "os.scandir")
TWO_PATH_EVENTS = ("os.rename", "os.link", "os.symlink")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class RequestError(Exception):
    """A request that is answered with an error; the process goes on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def limit(limits: dict[str, int]) -> None:
    """Set the limits that hold for the whole life of the process, those that this system has."""
    if resource is None:
        return
    for name, value in (
        ("RLIMIT_AS", limits["memory_bytes"]),
        ("RLIMIT_FSIZE", limits["file_bytes"]),
        ("RLIMIT_NOFILE", limits["open_files"]),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_CORE", 0),
    ):
        which = getattr(resource, name, None)
        if which is None:
            continue
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS knows RLIMIT_AS but may refuse it
            resource.setrlimit(which, (value, value))


def allow_cpu(seconds: int) -> None:
    """Let the next request use this much processor time; the kernel ends the process that takes more."""
    if resource is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def guard(project: str) -> None:
    """Refuse what no game needs: processes, sockets, foreign code, and files outside its folders.

    This catches what a game's author did without thinking. It is no jail: whoever means harm gets past an audit hook.
    """
    scratch = os.path.realpath(os.getcwd())
    readable = (scratch, os.path.realpath(project), os.path.dirname(os.path.realpath(os.__file__)), os.devnull)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED_EVENTS):
            raise PermissionError(f"a game may not do this ({event}); it gets replies and gives observations")
        if event not in PATH_EVENTS:
            return
        is_reading = event in READ_EVENTS or (event == "open" and not arguments[2] & WRITING)
        for name in arguments[: 2 if event in TWO_PATH_EVENTS else 1]:
            if not isinstance(name, str | bytes):
                continue
            path = os.path.realpath(os.fsdecode(name))
            if not any(
                path == root or path.startswith(root + os.sep) for root in (readable if is_reading else (scratch,))
            ):
                raise PermissionError(f"a game may not touch {path} ({event}); its folder is {scratch}")

    # What started this process asked the kernel for something by it. Imported again it is refused.
    for name in [name for name in sys.modules if name.startswith(("ctypes", "_ctypes"))]:
        del sys.modules[name]
    sys.addaudithook(refuse)


def load(project: str) -> Any:
    """The `Game` class of a project; its flat files are imported as the package `game`."""
    package = ModuleType("game")
    package.__path__ = [project]
    sys.modules["game"] = package
    return importlib.import_module("game.env").Game


class Host:
    """The games of one process, by the name the parent gave them."""

    def __init__(self, project: str) -> None:
        self.project = project
        self.make: Any = None
        self.games: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        """Do what a request asks.

        Raises:
            RequestError: it asks for something that is not there.
        """
        name, op = request.get("env"), request.get("op")
        if op == "about":
            return self._about()
        if not isinstance(name, str):
            raise RequestError("bad_request", f"env is {name!r}, it must be a string")
        if op == "reset":
            return self._reset(name, request)
        game = self.games.get(name)
        if game is None:
            raise RequestError("unknown_env", f"there is no env {name!r}; reset it first")
        match op:
            case "step":
                return game.step(request["text"])
            case "legal":
                return game.legal()
            case "suggest":
                return game.suggest(request["player"])
            case "snapshot":
                return game.snapshot()
            case "close":
                del self.games[name]
                return {}
        raise RequestError(
            "bad_request", f"op is {op!r}, known are about, reset, legal, step, suggest, snapshot, close"
        )

    def _game(self) -> Any:
        """The project's class; its code is loaded once."""
        if self.make is None:
            self.make = load(self.project)
        return self.make

    def _about(self) -> dict[str, Any]:
        """What the game says of itself; None where it says nothing."""
        self._game()
        has_rewards = importlib.util.find_spec("game.rewards") is not None
        rewards = importlib.import_module("game.rewards") if has_rewards else None
        return {
            "lowest": getattr(rewards, "LOWEST", None),
            "highest": getattr(rewards, "HIGHEST", None),
            "max_turns": getattr(sys.modules["game.env"], "MAX_TURNS", None),
        }

    def _reset(self, name: str, request: dict[str, Any]) -> Any:
        make = self._game()
        if name not in self.games:
            try:
                self.games[name] = make(**request["rules"])
            except (TypeError, ValueError) as error:
                raise RequestError("bad_rules", str(error)) from error
        return self.games[name].reset(request["seed"])


def respond(host: Host, line: bytes) -> bytes:
    """One line of reply to one line of request, without the newline."""
    request: Any = None
    op = "the request"
    try:
        request = json.loads(line)
        op = f"{request.get('op')}()"
        ok = host.answer(request)
    except RequestError as error:
        return refusal(request, error.code, str(error))
    except BaseException as error:  # noqa: BLE001  a game is somebody else's code: what it raises is a reply
        return refusal(request, "game_error", f"{op} raised {error_text(error, host.project)}")
    try:
        # NaN is for the parent to name: it knows whose reward it is.
        reply = json.dumps({"id": request.get("id"), "ok": ok}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return refusal(request, "not_json", f"what {op} gave can't be written as JSON: {error}")
    if len(reply) > MAX_REPLY_BYTES:
        return refusal(
            request, "too_large", f"what {op} gave has {len(reply)} bytes as JSON, the limit is {MAX_REPLY_BYTES}"
        )
    return reply


def refusal(request: Any, code: str, message: str) -> bytes:
    """The reply to a request that can't be answered."""
    number = request.get("id") if isinstance(request, dict) else None
    message = message[:MAX_MESSAGE].encode(errors="replace").decode()  # what is raised may quote half a surrogate pair
    return json.dumps({"id": number, "error": {"code": code, "message": message}}).encode()


def error_text(error: BaseException, project: str) -> str:
    """What was raised and where in the project: `KeyError: 'nothing' (env.py, line 74, in fail)`."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    what = " ".join(line.strip() for line in lines)
    root = os.path.realpath(project)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = os.path.realpath(frame.f_code.co_filename)
        if path.startswith(root + os.sep):
            return f"{what} ({os.path.relpath(path, root)}, line {line}, in {frame.f_code.co_name})"
    return what


def serve(host: Host, requests: BinaryIO, replies: BinaryIO, cpu_seconds: int) -> None:
    """Answer until the requests end."""
    for line in requests:
        allow_cpu(cpu_seconds)
        replies.write(respond(host, line) + b"\n")
        replies.flush()


def main() -> None:
    """Keep the protocol's pipes to ourselves, set the limits, serve."""
    project, limits = sys.argv[1], json.loads(sys.argv[2])
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the game prints
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    limit(limits)
    replies.write(b"{}\n")  # ready
    replies.flush()
    guard(project)
    serve(Host(project), requests, replies, limits["cpu_seconds"])


if __name__ == "__main__":
    main()
