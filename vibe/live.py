"""A swarm while it trains: episodes go in, updates come out, and a failure is survived once.

Everything the engine does arrives as numbered events; `Progress` is what they add up to and decides nothing by time.
A server that goes away and comes back is followed on and its engine started again, within the time that the client
waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from swarm_engine.client import (
    AsyncSwarmClient,
    EpisodeResult,
    SwarmError,
    SwarmRequestError,
    SwarmUnavailableError,
    Task,
)
from swarm_engine.config import RESOLVED, EngineConfig
from swarm_engine.types import EngineState, Mode
from vibe.embedded import Swarm
from vibe.errors import GameError, UsageError
from vibe.judging import Play, is_judged

T = TypeVar("T")

MAX_ROUNDS = 5
"""An environment that fails now and then is played again; one that always does ends the run."""
RESTARTS = 1
"""An engine that fails again after a new start has a reason that another start does not cure."""
FOLLOW_PAUSE_S = 0.25
"""Before the events of a server that closed their stream are asked for again."""


class Progress:
    """What the event stream of a swarm has said so far."""

    def __init__(self) -> None:
        self.state = EngineState.OFFLINE
        self.cause = ""
        """Why the state is what it is."""
        self.config: dict[str, Any] | None = None
        """Of the engine's last start; None before the first."""
        self.seq = 0
        """The last event seen."""
        self.steps: dict[int, dict[str, Any]] = {}
        """Payload of every finished update."""
        self.waiting: dict[str, str] = {}
        """Judged train episodes that no batch holds yet: episode id to task id."""
        self.last_batch = 0
        """The newest update whose batch is complete."""
        self.fault: SwarmError | None = None
        """Why there will be no more events."""
        self._changed = asyncio.Condition()

    def apply(self, seq: int, kind: str, payload: Mapping[str, Any]) -> None:
        """Take one event in. Events that were seen before change nothing."""
        if seq <= self.seq:
            return
        self.seq = seq
        match kind:
            case "state":
                self.state = EngineState(payload["to"])
                self.cause = payload["cause"]
            case "config":
                self.config = dict(payload["config"])
            case "episode" if payload["mode"] == Mode.TRAIN and is_judged(payload["rewards"], payload["outcome"]):
                self.waiting[payload["episode_id"]] = payload["task_id"]
            case "drop":
                self.waiting.pop(payload["episode_id"], None)
            case "batch":
                self.waiting.clear()
                self.last_batch = payload["step"]
            case "step":
                self.steps[payload["step"]] = dict(payload)
            case _:
                pass

    async def take_in(self, client: AsyncSwarmClient) -> None:
        """Take in the events that are not yet, until the server closes their stream.

        Raises:
            SwarmUnavailableError: the stream broke off.
            SwarmError: the server does not give them.
        """
        async for event in client.events(after=self.seq):
            self.apply(event.seq, event.kind, event.payload)
            await self._notify()

    async def end(self, fault: SwarmError) -> None:
        """Let everyone who waits know that there will be no more events."""
        self.fault = fault
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds; looked at after every event.

        Raises:
            SwarmError: there will be no more events.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.fault is not None or holds())
        if self.fault is not None and not holds():
            raise self.fault

    def missing(self, tasks: Sequence[Task], group_size: int) -> dict[str, int]:
        """Episodes that the open batch still needs of each task, where it needs any."""
        there = Counter(self.waiting.values())
        wanted = {task.task_id: group_size - there[task.task_id] for task in tasks}
        return {task_id: count for task_id, count in wanted.items() if count > 0}


def is_same(served: Mapping[str, Any] | None, config: EngineConfig) -> bool:
    """Whether an engine was started with a config; what the config leaves open may be named there."""
    if served is None:
        return False
    own = config.model_dump(mode="json")
    trainer = served.get("trainer", {})
    own["trainer"] |= {name: trainer.get(name) for name in RESOLVED if own["trainer"][name] is None}
    return served == own


class LiveSwarm:
    """One engine that runs, through the operator's client."""

    def __init__(self, swarm: Swarm, client: AsyncSwarmClient, config: EngineConfig) -> None:
        self.swarm = swarm
        self.client = client
        self.config = config
        self.progress = Progress()
        self._restarts_left = RESTARTS

    @property
    def step(self) -> int:
        """Updates finished so far."""
        return max(self.progress.steps, default=0)

    @property
    def num_episodes_per_update(self) -> int:
        """Episodes in a batch."""
        return self.config.trainer.group_size * self.config.trainer.tasks_per_update

    async def open(self, *, goes_on: bool) -> None:
        """Start the engine, or join one that runs with the same settings.

        Args:
            goes_on: this run has trained on this swarm before.
        Raises:
            UsageError: the swarm trains, or has trained, something else.
            SwarmFailedError: the engine fails on the way up.
        """
        state = (await self.client.status()).state
        if state in (EngineState.OFFLINE, EngineState.FAILED):
            await self._boot()
        else:
            await self._catch_up()
            if not is_same(self.progress.config, self.config):
                raise UsageError(
                    f"the swarm at {self.swarm.url} is {state} with other settings; "
                    "stop its engine, or name another swarm"
                )
        if self.step and not goes_on:
            raise UsageError(
                f"the swarm at {self.swarm.url} has made {self.step} updates already, for another run; "
                "start a new one in a folder of its own"
            )

    async def follow(self) -> None:
        """Take in every event until cancelled.

        A server that goes away is waited for as long as the client does. Back with its engine off, which a server is
        that was started anew, it gets it started again; what ran there is lost, and `client.run` plays it again.
        """
        fault: SwarmError = SwarmUnavailableError("nobody follows the swarm's events any more")
        try:
            while True:
                with contextlib.suppress(SwarmUnavailableError):  # gone for good is what `status` says
                    await self.progress.take_in(self.client)
                await asyncio.sleep(FOLLOW_PAUSE_S)
                if (await self.client.status()).state is EngineState.OFFLINE:
                    await self._start_unless_started()
        except SwarmError as error:
            fault = error
        finally:
            await self.progress.end(fault)

    async def _start_unless_started(self) -> None:
        """Start an engine that `serve --start` may be about to start too."""
        try:
            await self.client.start(self.config.model_dump(mode="json"))
        except SwarmRequestError as error:
            if error.code != "running":
                raise

    async def play(
        self,
        tasks: Sequence[Task],
        play: Play,
        *,
        mode: Mode,
        group_size: int = 1,
        tags: Mapping[str, str] | None = None,
    ) -> list[EpisodeResult]:
        """Play every task `group_size` times without training on it.

        Raises:
            SwarmFailedError: the engine failed, also after a new start.
        """
        return await self._surviving(lambda: self._run(tasks, play, group_size, mode, tags))

    async def update(self, step: int, tasks: Sequence[Task], play: Callable[[int], Play]) -> dict[str, Any]:
        """Play the groups of one batch and wait for its update; returns the payload of the `step` event.

        Args:
            play: how to play, given how many episodes run side by side until the update.
        Raises:
            GameError: the games go on ending without a reward.
            SwarmFailedError: the engine failed, also after a new start.
        """
        await self._surviving(lambda: self._fill(step, tasks, play))
        return self.progress.steps[step]

    async def _fill(self, step: int, tasks: Sequence[Task], play: Callable[[int], Play]) -> None:
        """Play what the batch lacks: all of it, and after an interruption or a fault of the environment the rest."""
        group_size = self.config.trainer.group_size
        for _ in range(MAX_ROUNDS):
            missing = self.progress.missing(tasks, group_size)
            if self.progress.last_batch >= step or not missing:
                await self.progress.until(lambda: step in self.progress.steps)
                return
            how = play(sum(missing.values()))
            if all(missing.get(task.task_id) == group_size for task in tasks):
                await self._run(tasks, how, group_size, Mode.TRAIN, None)
            else:
                rest = [(task, missing[task.task_id]) for task in tasks if task.task_id in missing]
                await asyncio.gather(*(self._run([task], how, count, Mode.TRAIN, None) for task, count in rest))
            await self._catch_up()
        raise GameError(
            f"update {step} still lacks episodes after {MAX_ROUNDS} rounds of play: its games end without a reward, or "
            "without a word of the policy's; look for env_error and no_calls among the run's drops"
        )

    async def _run(
        self, tasks: Sequence[Task], play: Play, group_size: int, mode: Mode, tags: Mapping[str, str] | None
    ) -> list[EpisodeResult]:
        return await self.client.run(
            tasks,
            play,
            group_size=group_size,
            concurrency=max(self.config.sampler.max_running, self.num_episodes_per_update),
            mode=mode,
            tags=dict(tags or {}),
            # After an interruption a batch lacks only some places of its groups.
            is_partial=True,
        )

    async def _surviving(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of some work; done again after a new start where the engine failed meanwhile."""
        while True:
            working = asyncio.create_task(work())
            failing = asyncio.create_task(self.progress.until(lambda: self.progress.state is EngineState.FAILED))
            try:
                await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
                if working.done() and (working.exception() is None or not await self._has_failed()):
                    return working.result()
                if failing.done() and (fault := failing.exception()) is not None:
                    raise self.swarm.explain(f"the swarm at {self.swarm.url} is gone: {fault}") from fault
            finally:
                working.cancel()
                failing.cancel()
                await asyncio.gather(working, failing, return_exceptions=True)
            await self._start_again()

    async def _has_failed(self) -> bool:
        """Whether the engine itself says so; a request may fail before the event is here."""
        try:
            return (await self.client.status()).state is EngineState.FAILED
        except SwarmError:
            return False

    async def _start_again(self) -> None:
        """Start a failed engine again; it goes on from its last checkpoint and replays what came after."""
        if self._restarts_left == 0:
            reason = (await self.client.status()).reason
            raise self.swarm.explain(f"the engine failed again after a new start: {reason}")
        self._restarts_left -= 1
        await self._boot()

    async def _boot(self) -> None:
        try:
            await self.client.start(self.config.model_dump(mode="json"), wait=True)
        except SwarmUnavailableError as error:
            raise self.swarm.explain(str(error)) from error
        await self._catch_up()

    async def _catch_up(self) -> None:
        """Wait until every event up to now has been taken in."""
        last = (await self.client.status()).last_seq
        await self.progress.until(lambda: self.progress.seq >= last)
