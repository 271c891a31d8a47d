"""The front's HTTP application: control routes on FastAPI, inference routes beside it, one check before both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.routing import Match

from swarm_engine.config import EngineConfig, Merge
from swarm_engine.errors import (
    BadRequestError,
    CrowdedError,
    InternalError,
    InvalidError,
    JournalError,
    MethodNotAllowedError,
    NotFoundError,
    SwarmEngineError,
    WrongHostError,
    shortened,
    shown,
)
from swarm_engine.server.auth import HostCheck, Role, Tokens
from swarm_engine.server.bodies import MAX_CONTROL_BYTES, Receive, parse_json, read_body
from swarm_engine.server.connection import EXTENSION, Connection
from swarm_engine.server.crowd import Crowd
from swarm_engine.server.engine import Engine
from swarm_engine.server.episodes import ClaimRequest, LiveEpisode, Script
from swarm_engine.server.inference import (
    PREFIX,
    InferenceApp,
    Scope,
    Send,
    error_shape,
    refuse_stray,
    send_json,
    stray_route,
    wait_until_gone,
)
from swarm_engine.server.journal import Event
from swarm_engine.server.models import MAX_INTEGER, Abort, Claim, End, ExportRequest
from swarm_engine.types import ClaimReason, SamplingOverride
from swarm_engine.version import installed_version

log = logging.getLogger(__name__)

CONTROL = "/swarm/v1"
STATUS = f"{CONTROL}/status"
KEEP_ALIVE_S = 15.0
"""A comment goes over a quiet event stream this often, so that both ends notice a dead line."""
RETRY_AFTER_S = 0.1
EventNumber = Annotated[int, Field(ge=0, le=MAX_INTEGER)]

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


def body_of(error: SwarmEngineError) -> dict[str, Any]:
    """An error of a control route."""
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def answer(error: SwarmEngineError) -> JSONResponse:
    """An error as a response."""
    return JSONResponse(body_of(error), status_code=error.status)


class FrontApp:
    """ASGI application of the front."""

    def __init__(
        self, engine: Engine, tokens: Tokens, hosts: HostCheck, crowd: Crowd, public_url: str | None = None
    ) -> None:
        """Serve an engine.

        Args:
            public_url: where agents reach this server; None where that is the address by which the claim came.
        """
        self._hosts = hosts
        self._crowd = crowd
        self._inference = InferenceApp(engine)
        self._control: Asgi = build_control(engine, tokens, crowd, public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the Host header, then pass on."""
        assert scope["type"] == "http", "uvicorn is set to serve neither lifespan nor websockets"
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        try:
            self._hosts.check(host.decode("latin-1"))
            if scope["extensions"][EXTENSION]["connection"].is_spare and scope["path"] != STATUS:
                self._crowd.num_refused += 1
                raise CrowdedError(self._crowd.limit)
        except (WrongHostError, CrowdedError) as error:
            is_inference = scope["path"].startswith(PREFIX) or stray_route(scope)
            shape = error_shape(scope) if is_inference else body_of
            await send_json(send, error.status, shape(error))
            return
        if scope["path"].startswith(PREFIX):
            await self._inference(scope, receive, send)
        elif stray_route(scope):
            await refuse_stray(scope, send)
        else:
            await self._control(scope, receive, send)


def build_control(engine: Engine, tokens: Tokens, crowd: Crowd, public_url: str | None) -> FastAPI:
    """The control routes of an engine."""
    app = FastAPI(
        title="Swarm engine",
        version=installed_version(),
        description="Control of a swarm engine. Inference routes live under each episode's base_url.",
        docs_url=None,
        redoc_url=None,
    )

    @app.exception_handler(SwarmEngineError)
    async def on_error(_: Request, error: SwarmEngineError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(Exception)
    async def on_fault(_: Request, __: Exception) -> JSONResponse:
        response = answer(InternalError())
        response.headers["connection"] = "close"  # uvicorn closes it behind a fault, so a client must not use it again
        return response

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(shortened(str(name)) for name in first["loc"][1:]) or "the body"
        return answer(InvalidError(f"{where}: {first['msg']}", "see /openapi.json for what this route takes"))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == MethodNotAllowedError.status:
            # A path may have several routes, and the router names the methods of the first one only.
            routes = [*app.routes, *(route for router in (observer, sampler, operator) for route in router.routes)]
            found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            allowed = {method for route in found for method in getattr(route, "methods", None) or ()}
            refused = MethodNotAllowedError(request.method, request.url.path, allowed)
            return JSONResponse(body_of(refused), refused.status, headers={"allow": refused.allow})
        body = {
            "code": "not_found" if error.status_code == NotFoundError.status else "http",
            "message": f"{request.method} {request.url.path}: {error.detail}",
            "hint": "/openapi.json",
        }
        return JSONResponse({"error": body}, status_code=error.status_code)

    observer, sampler, operator = (
        APIRouter(prefix=CONTROL, route_class=route_for(role, tokens))
        for role in (Role.OBSERVER, Role.SAMPLER, Role.OPERATOR)
    )

    def told(request: Request) -> JSONResponse:
        """The status."""
        connection: Connection = request.scope["extensions"][EXTENSION]["connection"]
        return JSONResponse({**engine.status(), "connections": crowd.as_status(len(connection.connections))})

    @operator.post("/engine/start")
    async def start(request: Request, config: EngineConfig | None = None) -> JSONResponse:
        """Start the engine; without a config it goes on with the run folder's last one."""
        engine.start(config)
        return told(request)

    @operator.post("/engine/stop")
    async def stop(request: Request) -> JSONResponse:
        """Save a checkpoint and stop; answers when the engine is OFFLINE."""
        await engine.stop("stopped by an operator")
        return told(request)

    @observer.get("/status")
    async def status(request: Request) -> JSONResponse:
        """What the engine does now."""
        return told(request)

    @observer.get("/events")
    async def events(
        last_event_id: Annotated[EventNumber | None, Header()] = None,
        after: Annotated[EventNumber, Query()] = 0,
        follow: bool = True,
    ) -> StreamingResponse:
        """The numbered events, as server-sent events; `follow=false` ends at the newest one."""
        start = after if last_event_id is None else last_event_id
        found = await engine.journal.events_after(start)  # where it is damaged, the answer says so
        return StreamingResponse(
            event_stream(engine, start, follow, found),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    @sampler.post("/episodes")
    async def claim(request: Request, body: Claim) -> JSONResponse:
        """Claim an episode; waits up to `wait_s` for one."""
        wanted = ClaimRequest(
            client_id=body.client_id,
            task_id=body.task_id,
            mode=body.mode,
            group_id=body.group_id,
            policies=tuple(body.policies),
            agents=tuple(body.agents),
            lease_s=body.lease_s,
            code_version=body.code_version,
            tags=body.tags,
            script=None if body.script is None else tuple(map(as_script, body.script)),
            sampling=None if body.sampling is None else SamplingOverride(**body.sampling.model_dump()),
            models=body.models,
            claim_key=body.claim_key,
        )
        given = await engine.roster.claim(wanted, 0)
        if not isinstance(given, LiveEpisode) and body.wait_s > 0:
            given = await claim_unless_gone(engine, wanted, body.wait_s, request)
        if not isinstance(given, LiveEpisode):
            return JSONResponse({"episode_id": None, "reason": given, "retry_after_s": RETRY_AFTER_S})
        return JSONResponse(
            {
                "episode_id": given.episode_id,
                "group_id": given.seat.group_id,
                "index": given.seat.index,
                "base_url": f"{public_url or claimed_at(request)}{PREFIX}{given.episode_id}",
                "api_key": given.api_key,
                "policy_version": given.policy_version,
                "lease_s": given.lease_s,
            }
        )

    @sampler.post("/episodes/{episode_id}/end")
    async def end(episode_id: str, body: End) -> JSONResponse:
        """End an episode; answers when it is on disk. The same end again is the same episode."""
        step_rewards = {step.call_id: step.reward for step in body.step_rewards}
        if len(step_rewards) < len(body.step_rewards):
            raise InvalidError("step_rewards names a call twice", "give each call one reward", param="step_rewards")
        ended = await engine.roster.end(episode_id, body.reward, body.outcome, body.metrics, step_rewards)
        return JSONResponse(
            {
                "episode_id": episode_id,
                "rewards": ended.rewards,
                "outcome": body.outcome,
                "drop_reason": ended.drop_reason,
                **asdict(ended.refusals),
            }
        )

    @sampler.post("/episodes/{episode_id}/abort")
    async def abort(episode_id: str, body: Abort | None = None) -> JSONResponse:
        """Give an episode up; its place goes to another claim."""
        engine.roster.abort(episode_id, body.reason if body else "")
        return JSONResponse({"episode_id": episode_id})

    @sampler.post("/episodes/{episode_id}/heartbeat")
    async def heartbeat(episode_id: str) -> JSONResponse:
        """Renew a lease without a call."""
        return JSONResponse({"episode_id": episode_id, "lease_s": engine.roster.heartbeat(episode_id).lease_s})

    @observer.get("/episodes/{episode_id}")
    async def describe(episode_id: str) -> JSONResponse:
        """An episode, running or ended."""
        return JSONResponse(await engine.roster.describe(episode_id))

    @observer.get("/episodes/{episode_id}/timelines")
    async def timelines(episode_id: str, merge: str = Merge.NONE) -> JSONResponse:
        """An episode's contexts, token by token: as recorded, folded with `merge=token` or `merge=text` (there with the
        number of tokens that are trained out of the context that sampled them), or with `merge=tree` each with the
        number of its first tokens that an earlier one has too, which are computed once.
        """
        if merge not in tuple(Merge):
            raise InvalidError(f"merge is {shown(merge)}", f"it must be one of {', '.join(Merge)}")
        return JSONResponse({"timelines": await engine.timelines(episode_id, Merge(merge))})

    @observer.get("/tasks")
    async def tasks() -> JSONResponse:
        """How many train episodes of each task are completed: trained, or waiting for their batch."""
        return JSONResponse({"completed": await engine.completed_by_task()})

    @observer.get("/checkpoints")
    async def checkpoints() -> JSONResponse:
        """Checkpoints on disk, oldest first, with the rewards that their weights earned; null where none is known."""
        return JSONResponse({"checkpoints": await engine.checkpoints()})

    @operator.post("/checkpoints")
    async def checkpoint() -> JSONResponse:
        """Write a checkpoint now."""
        saved = await engine.checkpoint()
        return JSONResponse({"step": saved.step, "path": saved.path})

    @operator.post("/export")
    async def export(body: ExportRequest) -> JSONResponse:
        """Write a policy in the Hugging Face layout: as it is now, or the checkpoint of a step, or the best one."""
        saved = await engine.export(body)
        return JSONResponse({"step": saved.step, "path": saved.path})

    for router in (observer, sampler, operator):
        app.include_router(router)
    return app


class _Body(Request):
    """A request whose body was read and parsed already."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._value = parse_json(body) if body else None

    async def body(self) -> bytes:
        """The body."""
        return self._body

    async def json(self) -> Any:
        """What it says."""
        return self._value


def route_for(role: Role, tokens: Tokens) -> type[APIRoute]:
    """Routes that a role is needed for. Not a byte of a body is read before; FastAPI's own dependencies come after it.

    A body that can't be read is a value that makes no sense, as its fields are.
    """

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            respond = super().get_route_handler()

            async def handle(request: Request) -> Response:
                tokens.check(request.headers.get("authorization"), role)
                if self.body_field is None:
                    return await respond(request)
                body = await read_body(request.receive, request.scope["headers"], MAX_CONTROL_BYTES)
                if body is None:
                    raise NotFoundError("the caller is gone")
                try:
                    return await respond(_Body(request, body))
                except BadRequestError as error:
                    raise InvalidError(error.message, error.hint) from error

            return handle

    return Guarded


def as_script(reply: str | list[int]) -> Script:
    """A reply of a claim's script."""
    return reply if isinstance(reply, str) else tuple(reply)


def claimed_at(request: Request) -> str:
    """The address by which a request came, as its caller knows it; the Host header has been checked."""
    return f"{request.scope['scheme']}://{request.headers['host']}"


async def claim_unless_gone(
    engine: Engine, wanted: ClaimRequest, wait_s: float, request: Request
) -> LiveEpisode | ClaimReason:
    """A claim that is taken back when its caller closes the connection while it waits."""
    claiming = asyncio.create_task(engine.roster.claim(wanted, wait_s))
    gone = asyncio.create_task(wait_until_gone(request.receive))
    try:
        await asyncio.wait({claiming, gone}, return_when=asyncio.FIRST_COMPLETED)
        if claiming.done() and not gone.done():
            return claiming.result()
        claiming.cancel()
        await asyncio.wait({claiming})
        if not claiming.cancelled() and claiming.exception() is None:
            given = claiming.result()
            if isinstance(given, LiveEpisode):
                engine.roster.let_go(given)
        raise NotFoundError("the caller is gone")
    finally:
        gone.cancel()
        claiming.cancel()


async def event_stream(engine: Engine, after: int, follow: bool, found: Sequence[Event]) -> AsyncIterator[bytes]:
    """Server-sent events from `after` on, of which the first were found; ends with the server, or before one that can't
    be read.
    """
    journal = engine.journal
    while True:
        grown = journal.grown
        try:
            found = found or await journal.events_after(after)
        except JournalError as error:
            log.error("the event stream ends: %s", error)
            return
        if found:
            yield b"".join(map(as_sse, found))
            after, found = found[-1].seq, ()
            continue
        if not follow or journal.is_closed:
            return
        try:
            await asyncio.wait_for(grown.wait(), KEEP_ALIVE_S)
        except TimeoutError:
            yield b": still here\n\n"


def as_sse(event: Event) -> bytes:
    """An event on the wire."""
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {event.as_json()}\n\n".encode()
