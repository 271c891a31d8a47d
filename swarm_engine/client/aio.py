"""The async client: claims episodes, talks to the policy, ends episodes, drives a data set."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self

import httpx

from swarm_engine.client import wire
from swarm_engine.client.errors import (
    ClaimTimeoutError,
    EpisodeLostError,
    EpisodeNotEndedError,
    SwarmError,
    SwarmRequestError,
    SwarmUnavailableError,
)
from swarm_engine.client.http import RECONNECT_S, TIMEOUT, Reconnection, TransportPool, no_answer, request_of
from swarm_engine.types import ClaimReason, EngineState, Mode, Outcome, well_formed

STATUS_POLL_S = 0.05
CANCEL_GRACE_S = 0.25
"""How long a cancelled claim waits for an answer that may be on its way."""
QUIET_SHARE = 1 / 3
"""An episode that was quiet for this share of its lease gets a heartbeat."""

Rollout = Callable[["Episode", wire.Task], Awaitable[None]]
OnEpisode = Callable[[wire.EpisodeResult], None]


class Episode:
    """A claimed episode. Leaving its context without an end, or with an exception, aborts it."""

    def __init__(self, client: AsyncSwarmClient, lease: wire.Lease) -> None:
        self._client = client
        self._lease = lease
        self._auth = wire.bearer(lease.api_key)
        self._last_sign = asyncio.get_running_loop().time()
        self.result: wire.EpisodeResult | None = None
        """How it ended; None before."""
        self.is_given_up = False
        """Whether it was aborted, or found to be lost."""

    @property
    def episode_id(self) -> str:
        """Its name on the server."""
        return self._lease.episode_id

    @property
    def task_id(self) -> str:
        """The task it is an attempt at."""
        return self._lease.task_id

    @property
    def group_id(self) -> str:
        """Episodes that share it are measured against each other."""
        return self._lease.group_id

    @property
    def index(self) -> int:
        """Its place in the group, from 0."""
        return self._lease.index

    @property
    def base_url(self) -> str:
        """For any OpenAI client; `/v1` may follow it."""
        return self._lease.base_url

    @property
    def api_key(self) -> str:
        """Opens `base_url`, and nothing else."""
        return self._lease.api_key

    @property
    def policy_version(self) -> int:
        """Updates in the weights at its claim."""
        return self._lease.policy_version

    async def chat(
        self,
        messages: wire.Messages,
        *,
        agent: str | None = None,
        policy: str | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        script: str | Sequence[int] | None = None,
    ) -> wire.ChatReply:
        """Ask a policy.

        Args:
            policy: that answers; None where the episode has one.
            seed: repeats the reply within this episode; the members of a group still differ.
            script: a reply for the scripted backend to play, as text or token ids.

        Raises:
            ContextLengthError: the prompt leaves no room for a reply.
            EpisodeLostError: the episode is gone.
            SwarmRequestError: the server refused the request.
            SwarmUnavailableError: nobody answers.
        """
        url = wire.chat_url(self._lease.base_url, agent)
        body = wire.chat_body(messages, policy, temperature, max_tokens, seed, stop, script)
        # Asked again where the connection died: of equal requests the server trains the one whose reply was used.
        answer = wire.read_chat(await self._client._request("POST", url, body, self._auth, is_repeatable=True))
        self._last_sign = asyncio.get_running_loop().time()
        return answer

    async def end(
        self,
        *,
        reward: wire.Reward,
        outcome: Outcome = Outcome.SUCCESS,
        metrics: Mapping[str, float] | None = None,
        step_rewards: Mapping[str, float] | None = None,
    ) -> wire.EpisodeResult:
        """Give the episode its reward; returns once the server has it on disk.

        Args:
            step_rewards: of single calls, by call id, beside the reward of the whole; see docs/trainer.md.
        Raises:
            EpisodeLostError: the episode is gone.
            NotFiniteError: a reward or metric is no finite number.
            SwarmRequestError: the reward makes no sense, or it has ended differently before.
        """
        body = wire.end_body(reward, outcome, metrics, step_rewards)
        answer = await self._client._control("POST", f"/episodes/{self.episode_id}/end", body, is_repeatable=True)
        self.result = wire.read_end(self._lease, metrics, answer)
        self._client._live.pop(self.episode_id, None)
        return self.result

    async def abort(self, reason: str = "") -> None:
        """Give the episode up; its place goes to another claim. An episode that is gone already is fine."""
        self.is_given_up = True
        self._client._live.pop(self.episode_id, None)
        with contextlib.suppress(EpisodeLostError):
            path, body = f"/episodes/{self.episode_id}/abort", {"reason": well_formed(reason)[:500]}
            await self._client._control("POST", path, body, is_repeatable=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.result is not None or self.is_given_up:
            return
        reason = "left without an end" if kind is None else f"{kind.__name__}: {error}"
        # An abort must reach the server even where this task is being cancelled, and must not hide what went wrong.
        with contextlib.suppress(SwarmError):
            await asyncio.shield(asyncio.ensure_future(self.abort(reason)))
        if kind is None:
            raise wire.not_ended(self.episode_id, self.task_id)


class AsyncSwarmClient:
    """A client of one server. Use it as a context manager, or call `aclose`."""

    def __init__(self, url: str, token: str, *, client_id: str | None = None, reconnect_s: float = RECONNECT_S) -> None:
        """Name the server; nothing is sent yet.

        Args:
            reconnect_s: a server that has answered and is gone is waited for so long, and its engine to be started.
        """
        self.url = wire.read_address(url)
        self.client_id = client_id or f"client-{uuid.uuid4().hex[:8]}"
        self._auth = wire.bearer(token)
        self._transports = TransportPool(httpx.AsyncHTTPTransport)
        self._reconnection = Reconnection(reconnect_s)
        self._finished: Counter[str] = Counter()
        """Train episodes by task of the runs that have ended well."""
        self._live: dict[str, Episode] = {}
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})
        for transport in self._transports.made:
            await transport.aclose()

    async def _request(
        self, method: str, url: str, body: Any, headers: Mapping[str, str], *, is_repeatable: bool
    ) -> Any:
        """The answer to a request, which is sent again where the server is gone and comes back in time."""
        num_tries = 0
        while True:
            try:
                return await self._send(method, url, body, headers)
            except SwarmUnavailableError as error:
                now = asyncio.get_running_loop().time()
                pause_s = self._reconnection.pause_s(error, is_repeatable=is_repeatable, num_tries=num_tries, now=now)
            await asyncio.sleep(pause_s)
            num_tries += 1

    async def _send(self, method: str, url: str, body: Any, headers: Mapping[str, str]) -> Any:
        request = request_of(method, url, body, headers)
        try:
            with self._transports.borrow() as transport:
                answer = await transport.handle_async_request(request)
                content = await answer.aread()
        except httpx.TransportError as error:
            raise no_answer(self.url, error) from error
        if answer.status_code not in wire.UNAVAILABLE_STATUS:
            self._reconnection.heard()
        return wire.read_answer(answer.status_code, content)

    async def _control(self, method: str, path: str, body: Any = None, *, is_repeatable: bool = False) -> Any:
        is_repeatable = is_repeatable or method == "GET"
        return await self._request(
            method, f"{self.url}{wire.CONTROL}{path}", body, self._auth, is_repeatable=is_repeatable
        )

    async def status(self) -> wire.Status:
        """What the engine does now."""
        return wire.read_status(await self._control("GET", "/status"))

    async def start(self, config: Mapping[str, Any] | None = None, *, wait: bool = False) -> wire.Status:
        """Start the engine; without a config it goes on with the run folder's last one.

        Args:
            wait: return when it takes episodes, not when it has begun to boot.

        Raises:
            SwarmUnavailableError: with `wait`, it failed while it came up.
        """
        status = wire.read_status(await self._control("POST", "/engine/start", config))
        while wait and status.state is EngineState.BOOTING:
            await asyncio.sleep(STATUS_POLL_S)
            status = await self.status()
        if wait and status.state is EngineState.FAILED:
            raise SwarmUnavailableError(f"the engine failed while it started: {status.reason}")
        return status

    async def stop(self) -> wire.Status:
        """Save and stop the engine; returns when it is off."""
        return wire.read_status(await self._control("POST", "/engine/stop"))

    async def checkpoint(self) -> str:
        """Write a checkpoint now; returns its folder on the server."""
        return str((await self._control("POST", "/checkpoints"))["path"])

    async def completed(self) -> dict[str, int]:
        """Completed train episodes by task, of every client and every start of the server's run folder."""
        found: dict[str, int] = (await self._control("GET", "/tasks"))["completed"]
        return found

    async def checkpoints(self) -> list[wire.Checkpoint]:
        """The checkpoints on the server's disk, oldest first."""
        return wire.read_checkpoints(await self._control("GET", "/checkpoints"))

    async def export(
        self, policy: str, name: str, *, step: int | None = None, best: bool = False, merged: bool = False
    ) -> str:
        """Write a policy in the Hugging Face layout, or its adapter in peft's; returns its folder on the server.

        Args:
            step: of the checkpoint to write; None writes the weights as they are.
            best: write the best checkpoint.
            merged: write an adapter's model with what the adapter adds.
        """
        body = wire.export_body(policy, name, step, best, merged)
        return str((await self._control("POST", "/export", body))["path"])

    async def describe(self, episode_id: str) -> dict[str, Any]:
        """An episode as the server knows it, running or ended, without its tokens; see `GET /episodes/ID`."""
        answer: dict[str, Any] = await self._control("GET", wire.episode_path(episode_id))
        return answer

    async def timelines(self, episode_id: str, *, merge: str = "none") -> list[dict[str, Any]]:
        """An episode's contexts, token by token."""
        answer = await self._control("GET", wire.timelines_path(episode_id, merge))
        found: list[dict[str, Any]] = answer["timelines"]
        return found

    async def events(self, after: int = 0, *, follow: bool = True) -> AsyncIterator[wire.Event]:
        """The server's numbered events later than `after`, for ever, or with `follow=False` up to the newest one.

        Raises:
            SwarmUnavailableError: the server went away; go on later from the last event's number.
        """
        url = f"{self.url}{wire.CONTROL}/events?after={after}&follow={str(follow).lower()}"
        reader = wire.EventReader()
        try:
            async with (
                httpx.AsyncClient(transport=self._transports.make(), timeout=TIMEOUT) as http,
                http.stream("GET", url, headers=self._auth) as answer,
            ):
                if answer.status_code >= 400:
                    wire.read_answer(answer.status_code, await answer.aread())
                async for chunk in answer.aiter_bytes():
                    for event in reader.feed(chunk):
                        yield event
        except httpx.TransportError as error:
            raise SwarmUnavailableError(f"the event stream of {self.url} broke off ({error})") from error

    async def claim(
        self,
        task_id: str,
        *,
        mode: Mode = Mode.TRAIN,
        group_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        script: wire.Script | None = None,
        policies: Sequence[str] = (),
        sampling: Mapping[str, float] | None = None,
        models: Mapping[str, str] | None = None,
        wait_s: float | None = 20.0,
    ) -> Episode:
        """Claim an episode; `episode` does so for a `with` block.

        Args:
            script: for the scripted backend, the replies to play in order of the episode's calls.
            policies: that may answer; empty takes all that are served.
            sampling: how every call is sampled whatever it asks for, as `{"temperature": 1}`, which an agent needs for
                its training that sends temperature 0, `top_p` or penalties; with `max_tokens` its longest reply.
            models: policy by the name that a call's `model` has, as `{"titles": "old"}`; other names mean the policy
                that is not routed to, where it is one.
            wait_s: seconds to wait for one; None waits for ever.

        Raises:
            ClaimTimeoutError: none was free in time.
            SwarmUnavailableError: the engine is off or failed.
        """
        clock = asyncio.get_running_loop().time
        deadline = None if wait_s is None else clock() + wait_s
        key = uuid.uuid4().hex
        while True:
            left = wire.MAX_POLL_S if deadline is None else max(0.0, deadline - clock())
            poll_s = min(left, wire.MAX_POLL_S)
            body = wire.claim_body(
                self.client_id, key, task_id, mode, group_id, tags, script, policies, sampling, models, poll_s
            )
            try:
                lease = await self._ask_for_lease(task_id, body)
            except EpisodeLostError:
                # The answer that named its episode was lost, and since then the episode.
                key = uuid.uuid4().hex
                continue
            if isinstance(lease, wire.Lease):
                episode = Episode(self, lease)
                self._live[lease.episode_id] = episode
                if self._beating is None or self._beating.done():
                    self._beating = asyncio.create_task(self._beat())
                return episode
            if deadline is not None and clock() >= deadline:
                raise ClaimTimeoutError(task_id, lease, wait_s or 0.0)

    async def _ask_for_lease(self, task_id: str, body: Mapping[str, Any]) -> wire.Lease | ClaimReason:
        """One claim. A caller that is cancelled meanwhile leaves no episode behind."""
        asking = asyncio.ensure_future(self._control("POST", "/episodes", body, is_repeatable=True))
        try:
            return wire.read_claim(task_id, await asyncio.shield(asking))
        except asyncio.CancelledError:
            # An answer that is on its way names an episode that nobody would play. A claim that still waits is taken
            # back by the server when its connection closes.
            await asyncio.wait({asking}, timeout=CANCEL_GRACE_S)
            if asking.done() and not asking.cancelled() and asking.exception() is None:
                lease = wire.read_claim(task_id, asking.result())
                if isinstance(lease, wire.Lease):
                    with contextlib.suppress(SwarmError):
                        await Episode(self, lease).abort("its claim was cancelled")
            asking.cancel()
            raise

    @contextlib.asynccontextmanager
    async def episode(
        self,
        task_id: str,
        *,
        mode: Mode = Mode.TRAIN,
        group_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        script: wire.Script | None = None,
        policies: Sequence[str] = (),
        sampling: Mapping[str, float] | None = None,
        models: Mapping[str, str] | None = None,
        wait_s: float | None = 20.0,
    ) -> AsyncIterator[Episode]:
        """An episode for a `with` block, which must end it; see `claim`."""
        claimed = await self.claim(
            task_id,
            mode=mode,
            group_id=group_id,
            tags=tags,
            script=script,
            policies=policies,
            sampling=sampling,
            models=models,
            wait_s=wait_s,
        )
        async with claimed as episode:
            yield episode

    async def _beat(self) -> None:
        """Renew the leases of quiet episodes while there are any."""
        clock = asyncio.get_running_loop().time
        while self._live:
            await asyncio.sleep(min(episode._lease.lease_s for episode in self._live.values()) * QUIET_SHARE / 2)
            for episode in list(self._live.values()):
                if clock() - episode._last_sign < episode._lease.lease_s * QUIET_SHARE:
                    continue
                try:
                    # Not sent again: the next beat comes, and nobody who closes the client waits for it.
                    path = f"{self.url}{wire.CONTROL}/episodes/{episode.episode_id}/heartbeat"
                    await self._send("POST", path, None, self._auth)
                    episode._last_sign = clock()
                except EpisodeLostError:
                    # Whoever works on it learns so from its next call.
                    self._live.pop(episode.episode_id, None)
                except SwarmError:
                    # The next beat tries again; the lease decides.
                    continue

    async def run(
        self,
        tasks: Sequence[wire.Task],
        rollout: Rollout,
        *,
        group_size: int,
        concurrency: int,
        mode: Mode = Mode.TRAIN,
        tags: Mapping[str, str] | None = None,
        sampling: Mapping[str, float] | None = None,
        models: Mapping[str, str] | None = None,
        on_episode: OnEpisode | None = None,
        is_partial: bool = False,
        resume: bool = False,
        epoch: int | None = None,
    ) -> list[wire.EpisodeResult]:
        """Play every task `group_size` times, up to `concurrency` episodes side by side.

        Claims go out in the order of the tasks, so a lockstep run repeats itself. Where a rollout raises, the server is
        asked: an episode that is gone there is played again, whatever the exception; one that runs is aborted, and the
        exception ends the run after the others were aborted. One that its rollout aborts is played again too, and in
        training one that was dropped by its end, for its group waits for it; after `wire.MAX_REPLAYS` times that end
        stands.

        Args:
            sampling: of every claim, as `models`; see `claim`.
            on_episode: gets each result as soon as its place is done.
            is_partial: in training, the episodes fill up groups that others have begun or will fill, so `group_size`
                need not be the server's, and those fill the places of dropped ones.
            resume: in training, leave out what the server has completed of this pass over the tasks, which is what it
                has completed of them beyond the passes before it. Those are the runs that this client has finished: a
                program that is started again from its beginning goes on where it was.
            epoch: with `resume`, the number of passes before this one, for a program that begins elsewhere.

        Returns:
            One result a place, of the episode that was played there last, in the order of tasks and places.

        Raises:
            GroupSizeError: in training, the server's groups have another size, so the run would fill none.
            ReplayLimitError: one place's episodes were lost more than `wire.MAX_REPLAYS` times.
            SwarmUnavailableError: the engine is off or failed, or the server did not come back in time.
            ValueError: `resume` or `epoch` makes no sense here.
        """
        wire.check_resume(resume, epoch, mode)
        fills_groups = mode is Mode.TRAIN and not is_partial
        if fills_groups:
            wire.check_group_size(await self.status(), group_size)
        before = self._finished if epoch is None else wire.episodes_of(tasks, group_size * epoch)
        completed = Counter(await self.completed()) - before if resume else {}
        results: dict[int, wire.EpisodeResult] = {}
        claimed: dict[int, Episode] = {}
        free = asyncio.Semaphore(concurrency)

        def claim(task: wire.Task) -> Awaitable[Episode]:
            return self.claim(task.task_id, mode=mode, tags=tags, sampling=sampling, models=models, wait_s=None)

        async def play(number: int, task: wire.Task, episode: Episode) -> None:
            try:
                for num_replays in count():
                    lost = await self._attempt(rollout, episode, task)
                    if not wire.is_played_again(
                        task.task_id, lost, episode.result, num_replays, fills_groups=fills_groups
                    ):
                        break
                    episode = await claim(task)
                assert episode.result is not None
                results[number] = episode.result
                if on_episode is not None:
                    on_episode(episode.result)
            finally:
                claimed.pop(number, None)
                free.release()

        try:
            async with asyncio.TaskGroup() as group:
                for number, task in wire.places(tasks, group_size, completed):
                    await free.acquire()
                    claimed[number] = await claim(task)
                    group.create_task(play(number, task, claimed[number]))
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        finally:
            # A task that was called off before its first line has left its episode untouched.
            for episode in claimed.values():
                if episode.episode_id in self._live:
                    with contextlib.suppress(SwarmError):
                        await episode.abort("the run was called off")
        if mode is Mode.TRAIN:
            self._finished |= before + wire.episodes_of(tasks, group_size)
        return [results[number] for number in sorted(results)]

    async def _attempt(self, rollout: Rollout, episode: Episode, task: wire.Task) -> Exception | None:
        """Play an episode. Returns None where it has its reward, and where it was lost, what its rollout met then.

        Raises whatever the rollout did where the episode runs, which is aborted then, or has its reward.
        """
        async with episode:
            try:
                await rollout(episode, task)
                if episode.result is None:
                    raise wire.not_ended(episode.episode_id, task.task_id)
            except Exception as error:
                if not await self._is_lost(episode, error):
                    raise
                self._live.pop(episode.episode_id, None)
                episode.is_given_up = True
                return error
        return None

    async def _is_lost(self, episode: Episode, error: Exception) -> bool:
        """Whether an episode has to be played again, after its rollout raised something."""
        if episode.is_given_up:
            return isinstance(error, EpisodeNotEndedError)
        if episode.result is not None:
            # What came after its end is the rollout's fault. Played again, its task would count twice.
            return False
        try:
            await self._control("GET", f"/episodes/{episode.episode_id}")
        except EpisodeLostError:
            return True
        except SwarmRequestError:
            # Of another server, or one that does not tell: what the rollout raised says more.
            return False
        return False


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single exception of a group; the others were called off because of it."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
