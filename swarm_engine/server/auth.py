"""Who may do what: three tokens in a 0600 file, a key for each episode, and a Host header that names this server."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from swarm_engine.errors import ForbiddenError, RunDirError, UnauthorizedError, WrongHostError, shown


class Role(StrEnum):
    """What a token's bearer may do; each role may do what the ones before it may."""

    OBSERVER = "observer"
    """Read status, events, episodes and checkpoints."""
    SAMPLER = "sampler"
    """Claim episodes and end them."""
    OPERATOR = "operator"
    """Start and stop the engine, save and export."""


MIN_TOKEN_CHARS = 16
"""Of a token in the file; one that is made has more. An empty one would let in whoever sends none."""
RANK = {role: rank for rank, role in enumerate(Role)}


@dataclass(frozen=True, slots=True)
class Tokens:
    """The server's tokens by role."""

    by_role: dict[Role, str]

    @staticmethod
    def load(path: Path) -> Tokens:
        """The tokens of a run folder, made at its first start; clients keep theirs over a restart.

        Raises:
            RunDirError: the file is there and can't be used.
        """
        if not os.path.lexists(path):
            made = {str(role): f"swarm-{secrets.token_urlsafe(32)}" for role in reversed(Role)}
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(made, file)
        try:
            if not path.is_file():
                raise ValueError("it is no regular file")  # a pipe would be waited for without end
            found = json.loads(path.read_text(encoding="utf-8"))
            for role in Role:
                if not isinstance(found[role], str) or len(found[role]) < MIN_TOKEN_CHARS or not found[role].isascii():
                    raise ValueError(f"its {role} is no token of at least {MIN_TOKEN_CHARS} ASCII characters")
            return Tokens({role: found[role] for role in Role})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunDirError(
                f"the token file {path} can't be used ({error})", "delete it, and the next start makes new tokens"
            ) from error

    def check(self, header: str | None, needed: Role) -> Role:
        """The role of an `Authorization` header, which must be at least `needed`.

        Raises:
            UnauthorizedError: no token, or an unknown one.
            ForbiddenError: the role is too low.
        """
        token = bearer(header)
        if token is None:
            raise UnauthorizedError("no token", "send Authorization: Bearer TOKEN; the server's token file holds it")
        given = token.encode()
        roles = [role for role, known in self.by_role.items() if hmac.compare_digest(known.encode(), given)]
        if not roles:
            raise UnauthorizedError("the token is not one of this server", "its token file holds the right ones")
        if RANK[roles[0]] < RANK[needed]:
            raise ForbiddenError(f"a token of role {roles[0]} may not do this", f"it takes the role {needed}")
        return roles[0]


def bearer(header: str | None) -> str | None:
    """The token of an `Authorization` header."""
    kind, _, token = (header or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" and token.strip() else None


class KeyRing:
    """Ids and keys that this run folder gave out, told from others without a list of them.

    So an episode that was running when the server was killed is known as lost, not as unknown.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def _mac(self, purpose: str, text: str, length: int) -> str:
        return hmac.new(self._secret, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()[:length]

    def new_episode_id(self) -> str:
        """An id nobody can guess."""
        body = secrets.token_hex(8)
        return f"e{body}{self._mac('id', body, 8)}"

    def is_ours(self, episode_id: str) -> bool:
        """Whether this run folder gave the id out, at whatever time."""
        body, mac = episode_id[1:17], episode_id[17:]
        return episode_id[:1] == "e" and hmac.compare_digest(self._mac("id", body, 8).encode(), mac.encode())

    def key_of(self, episode_id: str) -> str:
        """The key that opens an episode's inference routes."""
        return f"sk-{self._mac('key', episode_id, 40)}"


HOST = re.compile(r"(?:\[([0-9a-f:.%]+)\]|([^\s\[\]:/?#@\\]+))(?::[0-9]{1,5})?", re.IGNORECASE)
"""A Host header: a name or address, and the port. Clients are told URLs with it, so nothing else may stand there."""


class HostCheck:
    """Lets through requests that name this server, so that no page elsewhere can reach it by rebinding its own name."""

    def __init__(self, bound: str, extra: Collection[str] = ()) -> None:
        self._is_public = bound in ("0.0.0.0", "::", "")
        names = {bound, *extra}
        if self._is_public:
            names |= {socket.gethostname(), socket.getfqdn(), "localhost"}
        elif _is_loopback(bound):
            names |= {"localhost", "127.0.0.1", "::1"}
        self._names = {name.lower().rstrip(".") for name in names if name}
        self._known: set[str] = set()

    def check(self, header: str) -> None:
        """Look at a Host header.

        Raises:
            WrongHostError: it names another server.
        """
        if header in self._known:
            return
        name = _host_of(header)
        if name is None:
            raise WrongHostError(f"Host {shown(header)} is no host with or without a port", "send the server's address")
        if name not in self._names and not (self._is_public and _is_address(name)):
            raise WrongHostError(
                f"this server does not answer for host {name!r}",
                "use the address it printed, or start it with --allow-host NAME",
            )
        if len(self._known) < 1000 and len(header) < 300:
            self._known.add(header)


def _host_of(header: str) -> str | None:
    """The host of a Host header, without port and brackets; None where it is none."""
    found = HOST.fullmatch(header)
    return (found[1] or found[2]).lower().rstrip(".") if found else None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
