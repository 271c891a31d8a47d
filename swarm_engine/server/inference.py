"""The inference routes of an episode, as a plain ASGI application: every millisecond here is paid once a call.

`/e/EPISODE[/agents/AGENT][/v1]/ROUTE`, for the routes of OpenAI and Anthropic in `dialects`. A caller that goes away is
noticed, its calls are cancelled and never trained.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from swarm_engine.errors import (
    BadRequestError,
    EpisodeLostError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    SwarmEngineError,
    UnauthorizedError,
    UnsupportedError,
)
from swarm_engine.server.auth import bearer
from swarm_engine.server.dialects import DIALECTS, messages, models
from swarm_engine.server.dialects.protocol import Dialect, Request
from swarm_engine.server.dialects.writing import encode, openai_error
from swarm_engine.server.engine import Engine
from swarm_engine.server.episodes import LiveEpisode, RunningAsk, RunningCall
from swarm_engine.types import DEFAULT_AGENT

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREFIX = "/e/"
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_AGENT_CHARS = 200
JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
MODELS = "models"
COUNT = "messages/count_tokens"
ROUTES = (*DIALECTS, COUNT, MODELS)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names."""

    episode_id: str
    agent: str | None
    route: str


def parse_path(raw_path: str) -> Target:
    """Read an inference path; its parts are still percent-encoded, for an agent's name may hold a slash.

    Raises:
        NotFoundError: it has another form.
    """
    parts = raw_path[len(PREFIX) :].rstrip("/").split("/")
    episode_id, rest = parts[0], parts[1:]
    agent = None
    if len(rest) >= 2 and rest[0] == "agents":
        agent, rest = unquote(rest[1]), rest[2:]
    if rest and rest[0] == "v1":
        rest = rest[1:]
    if not episode_id or not rest:
        raise NotFoundError(f"there is no route {raw_path!r}", "use BASE_URL/chat/completions or BASE_URL/models")
    return Target(unquote(episode_id), agent, "/".join(rest))


class InferenceApp:
    """ASGI application of the routes under `/e/`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        error_body = openai_error
        try:
            raw_path = scope.get("raw_path") or scope["path"].encode()
            target = parse_path(raw_path.decode("ascii", "replace"))
            if is_anthropic(target.route, scope["headers"]):
                error_body = messages.error_body
            episode = self._authorize(target, scope["headers"])
            method, route = scope["method"], target.route
            if dialect := DIALECTS.get(route):
                check_method(method, "POST", route)
                await self._ask(dialect, episode, target, receive, send)
            elif route == COUNT:
                check_method(method, "POST", route)
                await self._count(episode, target, receive, send)
            elif route == MODELS or route.startswith(MODELS + "/"):
                check_method(method, "GET", route)
                await send_json(send, 200, self._models(route, error_body is messages.error_body))
            else:
                raise NotFoundError(
                    f"there is no route {route!r} under an episode's base_url", f"there are {', '.join(ROUTES)}"
                )
        except SwarmEngineError as error:
            await send_json(send, error.status, error_body(error))
        except Exception:
            log.exception("%s %s could not be answered", scope["method"], scope["path"])
            fault = InternalError()
            await send_json(send, fault.status, error_body(fault))

    def _authorize(self, target: Target, headers: Sequence[tuple[bytes, bytes]]) -> LiveEpisode:
        episode = self._engine.roster.find(target.episode_id)
        key = None
        for name, value in headers:
            if name == b"authorization":
                key = bearer(value.decode("latin-1"))
            elif name == b"x-api-key":
                key = value.decode("latin-1")
        if key is None or not hmac.compare_digest(key.encode(), episode.api_key.encode()):
            raise UnauthorizedError(
                "the key does not open this episode", "send the api_key that its claim returned", code="invalid_api_key"
            )
        if episode.ending is not None:
            raise EpisodeLostError(f"episode {episode.episode_id!r} has ended", code="episode_ended")
        return episode

    def _models(self, route: str, is_anthropic: bool) -> Mapping[str, Any]:
        created, policy = self._engine.created, self._engine.loaded.policy
        model = models.anthropic(policy, created) if is_anthropic else models.openai(policy, created)
        if route != MODELS:
            return model
        return models.anthropic_list([model]) if is_anthropic else models.openai_list([model])

    async def _count(self, episode: LiveEpisode, target: Target, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        model, asked, tools = messages.parse_count(read_json(body))
        agent = choose_agent(target.agent, model)
        episode.check_agent(agent)
        await send_json(send, 200, {"input_tokens": episode.tracker.count_prompt(agent, asked, tools)})

    async def _ask(self, dialect: Dialect, episode: LiveEpisode, target: Target, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        request = dialect.parse(read_json(body), episode)
        agent = choose_agent(target.agent, request.model)
        ask = episode.begin(self._engine.loaded, agent, request.call, follow=request.is_stream)
        gone = asyncio.create_task(wait_until_gone(receive))
        gone.add_done_callback(lambda _: ask.has_news.set())
        try:
            if request.is_stream:
                await self._stream(ask, request, gone, send)
            else:
                await self._reply(ask, request, gone, send)
        finally:
            gone.cancel()
            # Anything that leaves a call open here was an error or a caller that went away.
            ask.cancel()

    async def _reply(self, ask: RunningAsk, request: Request, gone: asyncio.Task[None], send: Send) -> None:
        while not ask.is_done:
            await ask.has_news.wait()
            ask.has_news.clear()
            if gone.done() and not ask.is_done:
                return
        for call in ask.calls:
            self._conclude(call)
        await send_json(send, 200, request.whole(ask), call_header(ask))

    async def _stream(self, ask: RunningAsk, request: Request, gone: asyncio.Task[None], send: Send) -> None:
        # The status line waits for the first token: until then a refusal can still be a proper error.
        await ask.has_news.wait()
        if gone.done():
            return
        for call in ask.calls:
            if call.generation.done.done() and call.generation.done.exception() is not None:
                self._conclude(call)
        writer = request.writer(ask)
        opening: list[tuple[bytes, bytes]] = [*STREAM_HEADERS, *call_header(ask)]
        await send({"type": "http.response.start", "status": 200, "headers": opening})
        pending = writer.start()
        left = list(ask.calls)
        try:
            while left:
                ask.has_news.clear()
                for call in left.copy():
                    is_last = call.generation.done.done()
                    if is_last:
                        self._conclude(call)
                    pending += writer.more(call, call.news())
                    if is_last:
                        pending += writer.finish(call)
                        left.remove(call)
                if pending:
                    await send_bytes(send, pending)
                    pending = b""
                if left:
                    await ask.has_news.wait()
                if gone.done() and left:
                    return
        except SwarmEngineError as error:
            await send_bytes(send, pending + writer.fail(error), is_last=True)
            return
        except Exception:
            log.exception("the reply to ask %s could not be streamed to its end", ask.call_id)
            await send_bytes(send, pending + writer.fail(InternalError()), is_last=True)
            return
        await send_bytes(send, writer.end(), is_last=True)

    def _conclude(self, call: RunningCall) -> None:
        """Record a call whose sampling has ended.

        Raises:
            EpisodeLostError: its episode ended while it ran.
            SwarmEngineError: the sampler could not serve it.
        """
        episode = call.episode
        if call.is_closed and episode.ending is None:
            raise self._engine.roster.gone(episode.episode_id)
        if call.is_closed:
            raise EpisodeLostError(
                f"episode {episode.episode_id!r} ended while this call ran",
                "end an episode after its calls",
                code="episode_ended",
            )
        try:
            reason = call.generation.done.result()
        except SwarmEngineError:
            call.fail()
            raise
        call.finish(reason)


def is_anthropic(route: str, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a caller expects Anthropic's shapes: by its route, or where both have it, by its SDK's header."""
    if route == MODELS or route.startswith(MODELS + "/"):
        return any(name == b"anthropic-version" for name, _ in headers)
    return route in ("messages", COUNT)


def check_method(method: str, known: str, route: str) -> None:
    """See that a route has a method.

    Raises:
        MethodNotAllowedError: it hasn't.
    """
    if method != known:
        raise MethodNotAllowedError(f"{method} is not a method of {route}", f"use {known}")


def read_json(body: bytes) -> Mapping[str, Any]:
    """A body as the object it must be.

    Raises:
        BadRequestError: it is none.
    """
    try:
        raw = json.loads(body)
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON ({error})") from error
    except RecursionError as error:
        raise BadRequestError("the body is nested too deeply", "send flat messages") from error
    if not isinstance(raw, dict):
        raise BadRequestError("the body must be a JSON object")
    return raw


def choose_agent(from_path: str | None, model: str) -> str:
    """The agent of a call: from `…/agents/AGENT`, from `POLICY@AGENT`, or the default one.

    Raises:
        BadRequestError: the two name different agents, or the name is no name.
    """
    _, at, from_model = model.rpartition("@")
    if at and from_path is not None and from_path != from_model:
        raise BadRequestError(
            f"the path names agent {from_path!r}, the model {from_model!r}", "name it in one place", param="model"
        )
    agent = from_path if from_path is not None else from_model if at else DEFAULT_AGENT
    if not agent or len(agent) > MAX_AGENT_CHARS or not agent.isprintable():
        raise BadRequestError(
            f"agent {agent[:50]!r} is no name; it must have 1 to {MAX_AGENT_CHARS} printable characters", param="model"
        )
    return agent


def call_header(ask: RunningAsk) -> list[tuple[bytes, bytes]]:
    """Names the call of each choice, in order, so that a step reward can."""
    return [(b"x-call-id", ",".join(call.draft.call_id for call in ask.calls).encode())]


async def read_body(receive: Receive) -> bytes | None:
    """The request's body; None where the caller went away.

    Raises:
        UnsupportedError: it is too large.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise UnsupportedError(f"the body has more than {MAX_BODY_BYTES} bytes", "shorten the messages")
        if not message.get("more_body"):
            return b"".join(parts)


async def wait_until_gone(receive: Receive) -> None:
    """Return when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(
    send: Send, status: int, body: Mapping[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """A whole JSON response."""
    payload = encode(body)
    length = (b"content-length", str(len(payload)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*JSON_HEADERS, length, *headers]})
    await send({"type": "http.response.body", "body": payload})


async def send_bytes(send: Send, payload: bytes, *, is_last: bool = False) -> None:
    """A piece of a stream."""
    await send({"type": "http.response.body", "body": payload, "more_body": not is_last})
