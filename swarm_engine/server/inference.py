"""The inference routes of an episode, as a plain ASGI application: every millisecond here is paid once a call.

`/e/EPISODE[/agents/AGENT][/v1]/chat/completions` and `…/models`. A caller that goes away is noticed, its call is
cancelled and never trained.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from swarm_engine.errors import (
    BadRequestError,
    EpisodeLostError,
    MethodNotAllowedError,
    NotFoundError,
    SwarmEngineError,
    UnauthorizedError,
    UnsupportedError,
)
from swarm_engine.server.auth import bearer
from swarm_engine.server.engine import Engine
from swarm_engine.server.episodes import LiveEpisode, RunningCall
from swarm_engine.server.openai import FINISH, ChatRequest, error_body, parse_chat, token_logprobs, usage
from swarm_engine.tracker.replies import TextDelta
from swarm_engine.types import DEFAULT_AGENT, FinishReason

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREFIX = "/e/"
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_AGENT_CHARS = 200
JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


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
        try:
            raw_path = scope.get("raw_path") or scope["path"].encode()
            target = parse_path(raw_path.decode("ascii", "replace"))
            episode = self._authorize(target, scope["headers"])
            match (target.route, scope["method"]):
                case ("chat/completions", "POST"):
                    await self._chat(episode, target, receive, send)
                case ("models", "GET"):
                    await send_json(send, 200, self._models())
                case ("chat/completions" | "models", method):
                    raise MethodNotAllowedError(f"{method} is not a method of {target.route}")
                case _:
                    raise NotFoundError(
                        f"there is no route {target.route!r} under an episode's base_url",
                        "there are chat/completions and models",
                    )
        except SwarmEngineError as error:
            await send_json(send, error.status, error_body(error))

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

    def _models(self) -> Mapping[str, Any]:
        policy = self._engine.loaded.policy
        model = {
            "id": policy.name,
            "object": "model",
            "created": int(self._engine.created.timestamp()),
            "owned_by": "swarm",
            "max_model_len": policy.max_context,
        }
        return {"object": "list", "data": [model]}

    async def _chat(self, episode: LiveEpisode, target: Target, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        request = parse_chat(body)
        agent = choose_agent(target.agent, request.model)
        running = episode.begin_call(self._engine.loaded, agent, request.call, follow=request.is_stream)
        gone = asyncio.create_task(wait_until_gone(receive))
        try:
            if request.is_stream:
                await self._stream(running, request, gone, send)
            else:
                await self._reply(running, request, gone, send)
        finally:
            gone.cancel()
            # Anything that leaves a call open here was an error or a caller that went away.
            running.cancel()

    async def _reply(self, running: RunningCall, request: ChatRequest, gone: asyncio.Task[None], send: Send) -> None:
        done = running.generation.done
        if not done.done():
            both: set[asyncio.Future[Any]] = {done, gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            return
        self._conclude(running)
        reply = running.reply
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": reply.answer.content, "refusal": None},
            "logprobs": None,
            "finish_reason": FINISH[running.finish_reason or FinishReason.STOP],
        }
        generation = running.generation
        if request.has_logprobs:
            content = token_logprobs(running.reply.codec, generation.token_ids, generation.logprobs)
            choice["logprobs"] = {"content": content, "refusal": None}
        body = {
            **self._head(running, "chat.completion"),
            "choices": [choice],
            "usage": usage(len(running.draft.prompt_ids), len(generation.token_ids)),
        }
        await send_json(send, 200, body, call_header(running))

    async def _stream(self, running: RunningCall, request: ChatRequest, gone: asyncio.Task[None], send: Send) -> None:
        generation, reply = running.generation, running.reply
        # The status line waits for the first token: until then a refusal can still be a proper error.
        if not await self._wait_for_news(running, gone):
            return
        if generation.done.done() and generation.done.exception() is not None:
            self._conclude(running)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + call_header(running)})
        head = self._head(running, "chat.completion.chunk")
        first: dict[str, Any] = {"role": "assistant", "content": ""}
        await send_event(send, {**head, "choices": [chunk(first)]})
        num_sent = 0
        try:
            while True:
                is_last = generation.done.done()
                if is_last:
                    self._conclude(running)
                text = "".join(delta.text for delta in reply.take() if isinstance(delta, TextDelta))
                entries = None
                if request.has_logprobs and num_sent < len(generation.token_ids):
                    new = slice(num_sent, len(generation.token_ids))
                    entries = token_logprobs(running.reply.codec, generation.token_ids[new], generation.logprobs[new])
                    num_sent = len(generation.token_ids)
                if text or entries:
                    await send_event(send, {**head, "choices": [chunk({"content": text}, entries)]})
                if is_last:
                    break
                if not await self._wait_for_news(running, gone):
                    return
        except SwarmEngineError as error:
            await send_event(send, error_body(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        finish = FINISH[running.finish_reason or FinishReason.STOP]
        await send_event(send, {**head, "choices": [chunk({}, finish_reason=finish)]})
        if request.has_usage_chunk:
            counts = usage(len(running.draft.prompt_ids), len(generation.token_ids))
            await send_event(send, {**head, "choices": [], "usage": counts})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _wait_for_news(self, running: RunningCall, gone: asyncio.Task[None]) -> bool:
        """Wait for tokens or the end; False where the caller went away first."""
        news = asyncio.ensure_future(running.has_news.wait())
        try:
            await asyncio.wait({news, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        running.has_news.clear()
        return not gone.done()

    def _conclude(self, running: RunningCall) -> None:
        """Record a call whose sampling has ended.

        Raises:
            EpisodeLostError: its episode ended while it ran.
            SwarmEngineError: the sampler could not serve it.
        """
        episode = running.episode
        if running.is_closed and episode.ending is None:
            raise self._engine.roster.gone(episode.episode_id)
        if running.is_closed:
            raise EpisodeLostError(
                f"episode {episode.episode_id!r} ended while this call ran",
                "end an episode after its calls",
                code="episode_ended",
            )
        try:
            reason = running.generation.done.result()
        except SwarmEngineError:
            running.fail()
            raise
        running.finish(reason)

    def _head(self, running: RunningCall, kind: str) -> dict[str, Any]:
        versions = running.generation.policy_versions
        name = running.episode.tracker.policy
        return {
            "id": running.draft.call_id,
            "object": kind,
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"{name}@{versions[-1] if versions else running.episode.policy_version}",
        }


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


def chunk(
    delta: Mapping[str, Any], entries: Sequence[Mapping[str, Any]] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    """The only choice of a streamed chunk."""
    logprobs = {"content": entries, "refusal": None} if entries is not None else None
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def call_header(running: RunningCall) -> list[tuple[bytes, bytes]]:
    """Names the call, so that a step reward can."""
    return [(b"x-call-id", running.draft.call_id.encode())]


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
    payload = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    length = (b"content-length", str(len(payload)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*JSON_HEADERS, length, *headers]})
    await send({"type": "http.response.body", "body": payload})


async def send_event(send: Send, body: Mapping[str, Any]) -> None:
    """One server-sent event."""
    payload = b"data: " + json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": payload, "more_body": True})
