"""The inference routes of an episode, as a plain ASGI application: every millisecond here is paid once a call.

`/e/EPISODE[/agents/AGENT][/v1]/ROUTE`, for the routes of OpenAI and Anthropic in `dialects`. A caller that goes away is
noticed, its calls are cancelled and never trained, complete choices included.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

from swarm_engine.errors import (
    BadRequestError,
    EpisodeLostError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    SwarmEngineError,
    UnauthorizedError,
    shown,
)
from swarm_engine.server.auth import bearer
from swarm_engine.server.bodies import MAX_BODY_BYTES, Receive, parse_json, read_body
from swarm_engine.server.connection import EXTENSION, Connection
from swarm_engine.server.dialects import DIALECTS, messages, models, responses
from swarm_engine.server.dialects.fields import overridden
from swarm_engine.server.dialects.protocol import Request
from swarm_engine.server.dialects.writing import encode, openai_error
from swarm_engine.server.engine import Engine
from swarm_engine.server.episodes import LiveEpisode, RunningAsk, RunningCall
from swarm_engine.server.loaded import ServedPolicy
from swarm_engine.tracker.messages import load_json
from swarm_engine.tracker.tracker import Draft
from swarm_engine.types import DEFAULT_AGENT
from swarm_engine.waiting import TakesLongError

Read = TypeVar("Read")
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREFIX = "/e/"
MAX_INLINE_BYTES = 32 * 1024
"""A longer body is read on another thread; with a slow tokenizer one of this length takes 50 ms."""
MAX_READERS = 4
"""Threads for long bodies, and as many for short ones that ask for much."""
ENDINGS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""That are no fault of a request."""
MAX_AGENT_CHARS = 200
MAX_UNREAD_BYTES = 64 * 1024
"""More than this goes out before the end of a stream, so that the end is held back where nobody reads."""
HANG_UP_AFTER_S = 1.0
"""A caller whose request was cancelled has this long to read the error."""
JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
MODELS = "models"
COUNT = "messages/count_tokens"
RESPONSE = "responses/"
"""Before the id of a stored response."""
ROUTES = (*DIALECTS, COUNT, MODELS)
READING = ("GET", "HEAD", "OPTIONS")

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
    while rest and rest[0] == "v1":  # an SDK adds its own to a URL that has one
        rest = rest[1:]
    if not episode_id or not rest:
        raise NotFoundError(f"there is no route {raw_path!r}", "use BASE_URL/chat/completions or BASE_URL/models")
    return Target(unquote(episode_id), agent, "/".join(rest))


def stray_route(scope: Scope) -> str | None:
    """The inference route that a path outside of every episode asks for; None where it is no such path."""
    route: str = re.sub(r"^(v1/)*", "", scope["path"].strip("/"))
    return route if route in ROUTES or route.startswith(MODELS + "/") else None


async def refuse_stray(scope: Scope, send: Send) -> None:
    """Answer an inference request at the server's own address, as a client set to it sends."""
    error = NotFoundError(
        f"{scope['path']} is a route of an episode, and this address names none",
        "claim an episode with POST /swarm/v1/episodes and use the base_url and api_key that it returns",
        code="no_episode",
    )
    await send_json(send, error.status, error_shape(scope)(error))


class InferenceApp:
    """ASGI application of the routes under `/e/`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Not the threads that the journal works on: whoever sends bodies that take long keeps these busy. And not the
        # same for both: schemas wait for llguidance, one after another, and long bodies should not wait with them.
        self._readers = ThreadPoolExecutor(MAX_READERS, "long body")
        self._slow_readers = ThreadPoolExecutor(MAX_READERS, "slow body")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        error_body = error_shape(scope)
        episode: LiveEpisode | None = None
        try:
            target = parse_path(raw_path(scope))
            episode = self._authorize(target, scope["headers"])
            method, route = scope["method"], target.route
            check_method(method, route)
            if method == "OPTIONS":
                known = (b"allow", ", ".join(methods(route)).encode())
                await send({"type": "http.response.start", "status": 204, "headers": [known]})
                await send_bytes(send, b"", is_last=True)
            elif method == "POST":
                body = await read_body(receive, scope["headers"], MAX_BODY_BYTES)
                if body is None:
                    return
                # The episode may have ended while the body came in.
                episode = self._authorize(target, scope["headers"])
                episode.touch()
                if route == COUNT:
                    counted = await self._off_loop(body, lambda: self._count(body, episode, target), target, scope)
                    await send_json(send, 200, {"input_tokens": counted})
                else:
                    request, draft = await self._off_loop(
                        body, lambda: self._draft(body, episode, target), target, scope
                    )
                    connection = scope["extensions"][EXTENSION]["connection"]
                    await self._ask(request, draft, episode, receive, send, connection)
            elif route.startswith(RESPONSE):
                name = unquote(route.removeprefix(RESPONSE))
                await send_json(send, 200, responses.stored(name, episode).body)
            else:
                await send_json(send, 200, self._models(route, episode, error_body is messages.error_body))
        except SwarmEngineError as error:
            self._count_refusal(episode, error)
            allow = [(b"allow", error.allow.encode())] if isinstance(error, MethodNotAllowedError) else []
            await send_json(send, error.status, error_body(error), allow)
        except ENDINGS:
            raise
        except BaseException:
            # Not `Exception` alone: what native code panics with is none, and ends one request like any other fault.
            log.exception("%s %s could not be answered", scope["method"], scope["path"])
            fault = InternalError()
            self._count_refusal(episode, fault)
            await send_json(send, fault.status, error_body(fault))

    def _count_refusal(self, episode: LiveEpisode | None, error: SwarmEngineError) -> None:
        """Count what a caller with an episode's key is refused, unless it is that the episode is over."""
        if episode is not None and not isinstance(error, EpisodeLostError):
            self._engine.roster.count_refusal(episode, error)

    def _authorize(self, target: Target, headers: Sequence[tuple[bytes, bytes]]) -> LiveEpisode:
        episode = self._engine.roster.find(target.episode_id)
        # An SDK may send a key of its own in one header and be told this one for the other.
        keys = [bearer(value.decode("latin-1")) or "" for name, value in headers if name == b"authorization"]
        keys += [value.decode("latin-1") for name, value in headers if name == b"x-api-key"]
        if not any(hmac.compare_digest(key.encode(), episode.api_key.encode()) for key in keys):
            raise UnauthorizedError(
                "the key does not open this episode", "send the api_key that its claim returned", code="invalid_api_key"
            )
        if episode.ending is not None:
            raise EpisodeLostError(f"episode {episode.episode_id!r} has ended", code="episode_ended")
        return episode

    def _models(self, route: str, episode: LiveEpisode, is_anthropic: bool) -> Mapping[str, Any]:
        created, served = self._engine.created, episode.policies
        describe = models.anthropic if is_anthropic else models.openai
        if route != MODELS:
            name = choose_policy(unquote(route.removeprefix(MODELS + "/")), served, episode.models)
            return describe(served[name].ready, created)
        all_of_them = [describe(policy.ready, created) for policy in served.values()]
        return models.anthropic_list(all_of_them) if is_anthropic else models.openai_list(all_of_them)

    async def _off_loop(self, body: bytes, read: Callable[[], Read], target: Target, scope: Scope) -> Read:
        """Read a body: a short one at once; on a thread one that is long or asks for much, so that others are answered
        meanwhile.

        Raises:
            EpisodeLostError: its episode was gone when it was read.
            SwarmEngineError: what `read` raises.
        """
        readers = self._readers
        if len(body) <= MAX_INLINE_BYTES:
            with contextlib.suppress(TakesLongError):
                return read()
            readers = self._slow_readers
        found = await asyncio.get_running_loop().run_in_executor(readers, read)
        self._authorize(target, scope["headers"])
        return found

    def _count(self, body: bytes, episode: LiveEpisode, target: Target) -> int:
        model, asked, tools = messages.parse_count(read_json(body))
        policy = choose_policy(model, episode.policies, episode.models)
        agent = choose_agent(target.agent, model, episode.models)
        episode.check_agent(agent)
        return len(episode.trackers[policy].draft(agent, asked, tools).prompt_ids)

    def _draft(self, body: bytes, episode: LiveEpisode, target: Target) -> tuple[Request, Draft]:
        raw = overridden(read_json(body), episode.sampling)
        request = DIALECTS[target.route].parse(raw, episode)
        policy = choose_policy(request.model, episode.policies, episode.models)
        agent = choose_agent(target.agent, request.model, episode.models)
        return request, episode.draft(policy, agent, request.call)

    async def _ask(
        self,
        request: Request,
        draft: Draft,
        episode: LiveEpisode,
        receive: Receive,
        send: Send,
        connection: Connection,
    ) -> None:
        ask = episode.begin(self._engine.loaded, draft, request.call, follow=request.is_stream)
        gone = asyncio.create_task(wait_until_gone(receive))
        gone.add_done_callback(lambda _: ask.has_news.set())
        patience: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        ask.on_cancel = lambda: patience.append(loop.call_later(HANG_UP_AFTER_S, connection.hang_up))
        try:
            if request.is_stream:
                await self._stream(ask, request, gone, send, connection)
            else:
                await self._reply(ask, request, gone, send)
        finally:
            gone.cancel()
            # What is not settled here was an error or a caller that went away.
            ask.cancel()
            for timer in patience:
                timer.cancel()

    async def _reply(self, ask: RunningAsk, request: Request, gone: asyncio.Task[None], send: Send) -> None:
        while not ask.is_done and not gone.done():
            await ask.has_news.wait()
            ask.has_news.clear()
        if gone.done():
            return
        for call in ask.calls:
            self._conclude(call)
        body = request.whole(ask)
        ask.settle()
        await send_json(send, 200, body, call_header(ask))

    async def _stream(
        self, ask: RunningAsk, request: Request, gone: asyncio.Task[None], send: Send, connection: Connection
    ) -> None:
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
        pending = b""
        left = list(ask.calls)
        try:
            pending += writer.start()
            while True:
                ask.has_news.clear()
                for call in left.copy():
                    is_last = call.generation.done.done()
                    if is_last:
                        self._conclude(call)
                    pending += writer.more(call, call.news())
                    if is_last:
                        left.remove(call)
                        if not left and len(pending) > MAX_UNREAD_BYTES:
                            await send_bytes(send, pending)
                            pending = b""
                        pending += writer.finish(call)
                if not left:
                    break
                if pending:
                    await send_bytes(send, pending)
                    pending = b""
                await ask.has_news.wait()
                if gone.done():
                    return
            pending += writer.end()
            # Waits where the caller does not read: what it never takes is not trained.
            await send_bytes(send, b"")
            if gone.done() or connection.is_lost:
                return
            for call in ask.calls:
                self._check_open(call)
            # Before it is sent: a caller may end its episode as soon as it has read this.
            ask.settle()
        except SwarmEngineError as error:
            self._count_refusal(ask.episode, error)
            await send_bytes(send, pending + writer.fail(error), is_last=True)
            return
        except Exception:
            log.exception("the reply to ask %s could not be streamed to its end", ask.call_id)
            fault = InternalError()
            self._count_refusal(ask.episode, fault)
            await send_bytes(send, pending + writer.fail(fault), is_last=True)
            return
        await send_bytes(send, pending, is_last=True)

    def _conclude(self, call: RunningCall) -> None:
        """Record a call whose sampling has ended.

        Raises:
            EpisodeLostError: its episode ended while it ran.
            SwarmEngineError: the sampler could not serve it.
        """
        self._check_open(call)
        try:
            reason = call.generation.done.result()
        except SwarmEngineError:
            call.fail()
            raise
        call.finish(reason)

    def _check_open(self, call: RunningCall) -> None:
        """See that a call has not been ended by something else.

        Raises:
            EpisodeLostError: its episode ended while it ran.
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


def raw_path(scope: Scope) -> str:
    """The path of a request, still percent-encoded."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path.decode("ascii", "replace")


def error_shape(scope: Scope) -> Callable[[SwarmEngineError], Mapping[str, Any]]:
    """How the caller of an inference path expects errors: by its route, or where both APIs have it, by its header."""
    try:
        route = stray_route(scope) or parse_path(raw_path(scope)).route
    except NotFoundError:
        return openai_error
    first = route.partition("/")[0]
    has_header = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return messages.error_body if first == "messages" or (first == MODELS and has_header) else openai_error


def methods(route: str) -> Sequence[str]:
    """What a route can be asked with; nothing where there is no such route."""
    if route in DIALECTS or route == COUNT:
        return ("OPTIONS", "POST")
    is_response = route.startswith(RESPONSE) and "/" not in route.removeprefix(RESPONSE)
    return READING if is_response or route == MODELS or route.startswith(MODELS + "/") else ()


def check_method(method: str, route: str) -> None:
    """See that a route has a method.

    Raises:
        NotFoundError: there is no such route.
        MethodNotAllowedError: it hasn't.
    """
    known = methods(route)
    if not known:
        raise NotFoundError(
            f"there is no route {route!r} under an episode's base_url", f"there are {', '.join(ROUTES)}"
        )
    if method not in known:
        raise MethodNotAllowedError(method, route, known)


def read_json(body: bytes) -> Mapping[str, Any]:
    """A body as the object it must be.

    Raises:
        BadRequestError: it is none.
    """
    raw = parse_json(body, load_json)
    if not isinstance(raw, dict):
        raise BadRequestError("the body must be a JSON object")
    return raw


def choose_policy(model: str, served: Mapping[str, ServedPolicy], routed: Mapping[str, str]) -> str:
    """The policy that a call's `model` names, as `POLICY` or `POLICY@AGENT`. Where one only is not routed to, any other
    name means that one.

    Args:
        routed: policy by each name that the claim routes.
    Raises:
        NotFoundError: there are several, and it names none of them.
    """
    name = model.rpartition("@")[0] if "@" in model else model
    if (route := routed.get(model, routed.get(name))) is not None:
        return route
    if name in served:
        return name
    others = [policy for policy in served if policy not in routed.values()] or list(served)
    if len(others) == 1:
        return others[0]
    what = f"model {shown(model)} names no policy of this episode" if model else "the request names no model"
    way_out = f"it has {', '.join(served)}; name one of them, or say in its claim's models which one this name means"
    raise NotFoundError(what, way_out, code="model_not_found", param="model")


def choose_agent(from_path: str | None, model: str, routed: Mapping[str, str]) -> str:
    """The agent of a call: from `…/agents/AGENT`, from `POLICY@AGENT`, or the default one.

    Args:
        routed: policy by each name that the claim routes; an @ in one of these is part of the name, as in vendors'.
    Raises:
        BadRequestError: the two name different agents, or the name is no name.
    """
    _, at, from_model = ("" if model in routed else model).rpartition("@")
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
