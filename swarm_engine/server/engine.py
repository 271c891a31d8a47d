"""The engine's life: boots the worker, gives out episodes, records them, trains on full batches, stops in order.

Everything here runs on one event loop, so a method without `await` is atomic. Deciding is done by `pool`, `states` and
the tracker; this module carries the decisions out. A task that fails in a way nobody foresaw ends in FAILED with the
reason, never in a log line alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from swarm_engine.config import EngineConfig, Merge
from swarm_engine.errors import (
    BadRequestError,
    ConflictError,
    ContextLengthError,
    EngineUnavailableError,
    EpisodeLostError,
    InvalidError,
    JournalError,
    NotFoundError,
    SwarmEngineError,
    WorkerDiedError,
)
from swarm_engine.merger import merge
from swarm_engine.protocol import Boot, Export, Generate, PolicyReady, Saved, Update
from swarm_engine.seeding import derive_seed
from swarm_engine.server.episodes import CallRequest, ClaimRequest, KeyRing, LiveEpisode, RunningCall
from swarm_engine.server.journal import BatchWrite, EpisodeRow, EventWrite, Journal, MetaWrite, UnpoolWrite, Write
from swarm_engine.server.journal import dumps as dump_json
from swarm_engine.server.pool import Pool, PooledEpisode, Seat, is_judged
from swarm_engine.server.states import SERVING, check_transition
from swarm_engine.server.worker_link import WORKER_COMMAND, Generation, WorkerLink
from swarm_engine.tracker.blocks import EpisodeBlocks
from swarm_engine.tracker.codec import ChatCodec, ReplyText
from swarm_engine.tracker.tracker import EpisodeRecord, EpisodeTracker
from swarm_engine.types import (
    DEFAULT_AGENT,
    BatchRecord,
    ClaimReason,
    EngineState,
    Episode,
    FinishReason,
    Mode,
    Outcome,
    SamplingParams,
)

log = logging.getLogger(__name__)

MAX_LIVE_EPISODES = 4096
"""Episodes that run side by side; more claims wait with the reason `full`."""
EMPTY_GROUP_GRACE_S = 5.0
"""A group without a single completed episode that nobody works on is given up after this, where others wait."""
SWEEP_S = 0.5
"""How often idle groups are looked at while claims wait."""
CLIENT_MEMORY_S = 60.0
"""A client counts as active for this long after its last claim or running episode."""
STOP_UPDATE_TIMEOUT_S = 120.0
"""On stop an update that runs is let finish for this long; the batch is in the journal either way."""

_record = TypeAdapter(EpisodeRecord)

FIXED_TRAINER_FIELDS_NOT = {"checkpoint_every", "microbatch_tokens"}
"""Trainer fields that a later start may change; the others are part of what the journal replays."""


@dataclass(slots=True)
class _Waiter:
    request: ClaimRequest
    served: asyncio.Future[LiveEpisode]


@dataclass(frozen=True, slots=True)
class _Ready:
    """The policy that is served."""

    policy: PolicyReady
    codec: ChatCodec


def engine_version() -> str:
    """The distribution's version."""
    try:
        return version("a3r")
    except PackageNotFoundError:
        return "unknown"


class Engine:
    """One run folder's engine."""

    def __init__(self, run_dir: Path, worker_command: Sequence[str] = WORKER_COMMAND) -> None:
        self.run_dir = run_dir
        self.state = EngineState.OFFLINE
        self.reason: str | None = None
        """Why it is FAILED."""
        self.config: EngineConfig | None = None
        self.step = 0
        """Updates in the weights; the policy_version that is served."""
        self.base_url = ""
        """Where clients reach this server; set when it listens."""
        self._worker_command = worker_command
        self._link: WorkerLink | None = None
        self._ready: _Ready | None = None
        self._pool = Pool(2, 1)
        self._live: dict[str, LiveEpisode] = {}
        self._lost: dict[str, str] = {}
        self._completed: dict[str, Episode] = {}
        """Completed episodes of the open batch; the journal has them too."""
        self._drops: Counter[str] = Counter()
        self._waiters: deque[_Waiter] = deque()
        self._idle_since: dict[str, float] = {}
        self._clients: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._main_task: asyncio.Task[None] | None = None
        """Boots or updates."""
        self._update_started: float | None = None
        self._last_step_at = 0.0
        self._saved_step = 0
        self._is_closing = False

    # Life of the server

    async def open(self) -> None:
        """Open the run folder's journal.

        Raises:
            JournalError: it can't be opened.
        """
        self.journal = Journal(self.run_dir / "journal.db", on_error=self._on_journal_error)
        writes: list[Write] = []
        server_id = self.journal.meta("server_id")
        secret = self.journal.meta("secret")
        created = self.journal.meta("created")
        if server_id is None or secret is None or created is None:
            server_id, secret = secrets.token_hex(8), secrets.token_hex(32)
            created = datetime.now(UTC).isoformat()
            writes += [MetaWrite("server_id", server_id), MetaWrite("secret", secret), MetaWrite("created", created)]
        self.server_id = server_id
        self.created = datetime.fromisoformat(created)
        self._keys = KeyRing(secret)
        self.step = self.journal.last_step()
        writes.append(EventWrite.of("server", server_id=server_id, version=engine_version()))
        if (before := self.journal.last_state()) not in (None, EngineState.OFFLINE):
            cause = "the server ended without stopping the engine"
            writes.append(EventWrite.of("state", **{"from": before, "to": EngineState.OFFLINE, "cause": cause}))
        await self.journal.append(*writes)

    async def close(self, cause: str) -> None:
        """Stop the engine and close the journal; nothing that was answered is lost."""
        self._is_closing = True
        await self.stop(cause)
        await self.journal.close()

    # Start and stop

    def start(self, config: EngineConfig | None) -> None:
        """Begin to boot; `status` tells how it goes.

        Args:
            config: None goes on with the run folder's last one.

        Raises:
            ConflictError: it runs already, or the folder's journal belongs to another config.
            JournalError: the journal can't be written.
        """
        if self.state not in (EngineState.OFFLINE, EngineState.FAILED) or self._is_closing:
            raise ConflictError(
                f"the engine is {self.state}, it can be started from OFFLINE and FAILED",
                "stop it first",
                code="running",
            )
        if self._main_task is not None and not self._main_task.done():
            raise ConflictError("the engine is still going down", "ask again in a moment", code="stopping")
        self.journal.reopen()
        config = self._agree(config)
        self.config = config
        self.reason = None
        stored = config.model_dump(mode="json")
        self.journal.append(MetaWrite("config", dump_json(stored)), EventWrite.of("config", config=stored))
        self._to(EngineState.BOOTING, "start")
        self._main_task = self._spawn(self._boot(config), "boot")

    def _agree(self, config: EngineConfig | None) -> EngineConfig:
        """The config to start with: the one given, where the journal allows it."""
        text = self.journal.meta("config")
        stored = EngineConfig.model_validate_json(text) if text else None
        if config is None:
            return stored or EngineConfig()
        if stored is None or self.journal.is_untouched():
            return config
        now, then = _fixed_part(config), _fixed_part(stored)
        if now != then:
            changed = ", ".join(sorted(name for name in now if now[name] != then[name]))
            raise ConflictError(
                f"this run folder holds updates made with another config; {changed} can't change in it",
                "start with the same values, or use a new run folder",
                code="config_changed",
            )
        return config

    async def stop(self, cause: str) -> None:
        """Save, end the worker, go OFFLINE. Episodes that run are lost; completed ones stay."""
        if self.state is EngineState.OFFLINE:
            return
        if self._main_task is not None and not self._main_task.done():
            if self.state is EngineState.WEIGHT_SYNCING:
                await asyncio.wait({self._main_task}, timeout=STOP_UPDATE_TIMEOUT_S)
            self._main_task.cancel()
            await asyncio.wait({self._main_task})
        link = self._link
        was_serving = self.state in SERVING
        self._drop_everything("stopped")
        self._to(EngineState.OFFLINE, cause)
        self._link = None
        if link is not None:
            if was_serving and self._saved_step < self.step:
                try:
                    await self._save(link)
                except WorkerDiedError as error:
                    log.warning("no checkpoint at stop: %s", error)
            await link.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """The boundary of every background task: its failure is the engine's."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, SwarmEngineError):
            self._fail(str(error))
        else:
            log.error("%s failed", task.get_name(), exc_info=error)
            self._fail(f"{task.get_name()} failed with {type(error).__name__}: {error}")

    def _on_journal_error(self, error: JournalError) -> None:
        self._fail(str(error))

    def _fail(self, reason: str) -> None:
        """Go to FAILED: episodes that run are lost, completed ones wait in the journal for the next start."""
        if self.state in (EngineState.OFFLINE, EngineState.FAILED):
            return
        log.error("engine failed: %s", reason)
        self.reason = reason
        self._drop_everything("engine_failed")
        self._to(EngineState.FAILED, reason)
        if self._main_task is not None and not self._main_task.done():
            self._main_task.cancel()
        link, self._link = self._link, None
        if link is not None:
            self._spawn(link.kill(), "kill worker")

    def _drop_everything(self, reason: str) -> None:
        for episode in list(self._live.values()):
            if episode.ending is None:
                self._lose(episode, reason)
        for waiter in self._waiters:
            if not waiter.served.done():
                waiter.served.set_exception(self._unavailable())
                waiter.served.exception()
        self._waiters.clear()
        self._completed.clear()

    def _to(self, state: EngineState, cause: str) -> None:
        check_transition(self.state, state)
        self.journal.append(EventWrite.of("state", **{"from": self.state, "to": state, "cause": cause}))
        self.state = state

    # Boot

    async def _boot(self, config: EngineConfig) -> None:
        self._link = link = await WorkerLink.start(self.run_dir, self._fail, self._worker_command)
        checkpoints, models = self.run_dir / "checkpoints", self.run_dir / "models"
        checkpoints.mkdir(exist_ok=True)
        models.mkdir(exist_ok=True)
        booted = await link.boot(Boot(config.model_dump(mode="json"), str(models), str(checkpoints)))
        policy = booted.policies[0]
        codec = await asyncio.to_thread(ChatCodec.load, Path(policy.tokenizer_dir), policy.end_ids, self.created)
        self.journal.append(MetaWrite("policy", TypeAdapter(PolicyReady).dump_json(policy).decode()))
        self._ready = _Ready(policy, codec)
        self._saved_step = booted.step
        await self._replay(link, booted.step)
        self._restore(config)
        self._last_step_at = time.monotonic()
        self._to(EngineState.ROLLING, "booted" if self.step == 0 else f"booted at step {self.step}")
        self._after_change()

    async def _replay(self, link: WorkerLink, step: int) -> None:
        """Train again on the recorded batches that the checkpoint does not hold."""
        last = self.journal.last_step()
        if step > last:
            raise SwarmEngineError(
                f"the checkpoint is at step {step}, the journal ends at step {last}",
                "the two belong to different runs; use the journal that made the checkpoint, or a new run folder",
            )
        reported = self.journal.steps_reported(step)
        self.step = step
        for record in self.journal.batches_after(step):
            started = time.monotonic()
            rows = await asyncio.to_thread(self.journal.episodes_of, record)
            episodes = tuple(_record.validate_json(row.record).episode for row in rows)
            updated = await link.update(Update(record, episodes))
            self.step = record.step
            if record.step not in reported:
                self._report_step(record.step, updated.metrics, updated.drops, time.monotonic() - started)

    def _restore(self, config: EngineConfig) -> None:
        """Fill the pool with the journal's completed episodes."""
        self._pool = Pool(config.trainer.group_size, config.trainer.tasks_per_update)
        rows = self.journal.open_episodes()
        self._completed = {row.episode_id: _record.validate_json(row.record).episode for row in rows}
        pooled = [
            PooledEpisode(
                row.episode_id,
                Seat(row.group_id, row.task_id, row.place, row.attempt, row.position),
                row.rewards,
            )
            for row in rows
        ]
        self._pool.restore(
            pooled, self.journal.closed_groups(), self.journal.next_position(), self.journal.loose_groups()
        )

    # Batches

    def _after_change(self) -> None:
        """Look what a claim, an end or a drop has made possible."""
        now = time.monotonic()
        self._idle_since = {group_id: self._idle_since.get(group_id, now) for group_id in self._pool.idle_groups()}
        if self.state in (EngineState.ROLLING, EngineState.ROLLING_POST):
            self._serve_waiters()
            if self._pool.is_ready:
                self._to(EngineState.WEIGHT_SYNCING, f"the batch of step {self.step + 1} is complete")
                self._main_task = self._spawn(self._update(), "update")
            elif self.state is EngineState.ROLLING and self._pool.is_claimed:
                self._to(EngineState.ROLLING_POST, f"every place of the batch of step {self.step + 1} is claimed")
            elif self.state is EngineState.ROLLING_POST and not self._pool.is_claimed:
                self._to(EngineState.ROLLING, "a place of the batch is free again")
                self._serve_waiters()
        if self._waiters and self._idle_since and "sweep" not in {task.get_name() for task in self._tasks}:
            self._spawn(self._sweep(), "sweep")

    async def _sweep(self) -> None:
        """While claims wait, give up groups that nobody works on; a client that is gone must not stop the others."""
        while self._waiters and self._idle_since and self.state is EngineState.ROLLING:
            await asyncio.sleep(SWEEP_S)
            assert self.config is not None
            now = time.monotonic()
            for group_id, has_completed in self._pool.idle_groups().items():
                grace = self.config.lease_s if has_completed else min(EMPTY_GROUP_GRACE_S, self.config.lease_s)
                if now - self._idle_since.get(group_id, now) >= grace:
                    self._give_up(group_id)
            self._serve_waiters()

    def _give_up(self, group_id: str) -> None:
        dropped = self._pool.drop_group(group_id)
        self._idle_since.pop(group_id, None)
        writes: list[Write] = [UnpoolWrite(tuple(dropped))]
        for episode_id in dropped:
            del self._completed[episode_id]
            self._drops["group_abandoned"] += 1
            writes.append(EventWrite.of("drop", episode_id=episode_id, group_id=group_id, reason="group_abandoned"))
        self.journal.append(*writes)

    async def _update(self) -> None:
        """Train on the batch and go on."""
        assert self.config is not None
        assert self._link is not None
        link = self._link
        step = self.step + 1
        self._update_started = time.monotonic()
        record = BatchRecord(step, self._pool.batch(), derive_seed(self.config.seed, "batch", step))
        episodes = tuple(self._completed.pop(episode_id) for episode_id in record.episode_ids)
        batch = EventWrite.of("batch", step=step, episode_ids=record.episode_ids, seed=record.seed)
        await self.journal.append(BatchWrite(record), batch)
        self._pool.close()
        updated = await link.update(Update(record, episodes))
        self.step = step
        now = time.monotonic()
        self._report_step(step, updated.metrics, updated.drops, now - self._last_step_at)
        self._last_step_at = now
        self._update_started = None
        if step % self.config.trainer.checkpoint_every == 0:
            self._spawn(self._checkpoint(link), "checkpoint")
        self._to(EngineState.ROLLING, f"step {step} is in the weights")
        self._after_change()

    def _report_step(
        self, step: int, metrics: Mapping[str, float | None], drops: Mapping[str, int], seconds: float
    ) -> None:
        counted = self._drops + Counter(drops)
        self._drops.clear()
        self.journal.append(
            EventWrite.of("step", step=step, metrics=dict(metrics), drops=dict(counted), seconds=round(seconds, 6))
        )

    async def _checkpoint(self, link: WorkerLink) -> None:
        await self._save(link)

    async def _save(self, link: WorkerLink) -> Saved:
        saved = await link.save()
        if saved.error is None:
            self._saved_step = saved.step
        self.journal.append(EventWrite.of("checkpoint", step=saved.step, path=saved.path, error=saved.error))
        return saved

    # Claims

    async def claim(self, request: ClaimRequest, wait_s: float) -> LiveEpisode | ClaimReason:
        """Give out an episode, after up to `wait_s` seconds, or say why there is none.

        Raises:
            EngineUnavailableError: the engine is off or failed.
            ConflictError: the group named can't take it.
            NotFoundError: it asks for a policy that is not served.
        """
        given = self._try_claim(request)
        if isinstance(given, LiveEpisode) or wait_s <= 0:
            self._after_change()
            return given
        waiter = _Waiter(request, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._after_change()
        try:
            await asyncio.wait({waiter.served}, timeout=wait_s)
        except asyncio.CancelledError:
            if waiter.served.done() and waiter.served.exception() is None:
                # Served just when its caller went away: the place is free again at once.
                self.abort(waiter.served.result().episode_id, "client_gone")
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return waiter.served.result() if waiter.served.done() else self._reason_for(request)

    def _serve_waiters(self) -> None:
        for waiter in list(self._waiters):
            if waiter.served.done():
                continue
            try:
                given = self._try_claim(waiter.request)
            except SwarmEngineError as error:
                waiter.served.set_exception(error)
                self._waiters.remove(waiter)
                continue
            if isinstance(given, LiveEpisode):
                waiter.served.set_result(given)
                self._waiters.remove(waiter)

    def _reason_for(self, request: ClaimRequest) -> ClaimReason:
        match self.state:
            case EngineState.BOOTING:
                return ClaimReason.BOOTING
            case EngineState.WEIGHT_SYNCING:
                return ClaimReason.WEIGHT_SYNCING
            case EngineState.ROLLING_POST if request.mode is Mode.TRAIN:
                return ClaimReason.ROLLING_POST
            case _:
                return ClaimReason.FULL if len(self._live) >= MAX_LIVE_EPISODES else ClaimReason.QUOTA

    def _try_claim(self, request: ClaimRequest) -> LiveEpisode | ClaimReason:
        if self.state in (EngineState.OFFLINE, EngineState.FAILED) or self._is_closing:
            raise self._unavailable()
        is_open = self.state is EngineState.ROLLING or (
            self.state is EngineState.ROLLING_POST and request.mode is not Mode.TRAIN
        )
        if not is_open or len(self._live) >= MAX_LIVE_EPISODES:
            return self._reason_for(request)
        assert self._ready is not None
        assert self.config is not None
        policy = self._ready.policy
        if unknown := [name for name in request.policies if name != policy.name]:
            raise NotFoundError(
                f"policy {unknown[0]!r} is not served here", f"this server has {policy.name!r}", code="unknown_policy"
            )
        episode_id = self._keys.new_episode_id()
        seat = self._pool.claim(episode_id, request.mode, request.task_id, request.group_id)
        if isinstance(seat, ClaimReason):
            return seat
        now = time.monotonic()
        episode = LiveEpisode(
            episode_id=episode_id,
            api_key=self._keys.key_of(episode_id),
            seat=seat,
            mode=request.mode,
            tags=request.tags,
            client_id=request.client_id,
            agents=request.agents,
            policy_version=self.step,
            lease_s=request.lease_s or self.config.lease_s,
            started_at=now,
            deadline=now + self.config.episode_timeout_s,
            tracker=EpisodeTracker(episode_id, policy.name, self._ready.codec),
        )
        episode.touch(now)
        self._live[episode_id] = episode
        self._clients[request.client_id] = now
        self._arm(episode)
        extra = {"code_version": request.code_version} if request.code_version else {}
        self.journal.append(
            EventWrite.of(
                "claim",
                episode_id=episode_id,
                task_id=seat.task_id,
                group_id=seat.group_id,
                index=seat.index,
                mode=request.mode,
                client_id=request.client_id,
                **extra,
            )
        )
        return episode

    def _arm(self, episode: LiveEpisode) -> None:
        due = min(episode.lease_until, episode.deadline)
        delay = max(0.0, due - time.monotonic())
        episode.timer = asyncio.get_running_loop().call_later(delay, self._timer_rang, episode)

    def _timer_rang(self, episode: LiveEpisode) -> None:
        if episode.ending is not None or episode.episode_id not in self._live:
            return
        now = time.monotonic()
        if now >= episode.deadline:
            self._lose(episode, "timeout")
        elif now >= episode.lease_until and not episode.running:
            self._lose(episode, "lease_expired")
        else:
            if now >= episode.lease_until:
                # The model is still answering it; that is not the client's silence.
                episode.touch(now)
            self._arm(episode)
            return
        self._after_change()

    def _lose(self, episode: LiveEpisode, reason: str) -> None:
        """Take an episode off without a reward; its place is free again."""
        self._close_calls(episode)
        self._forget(episode)
        self._lost[episode.episode_id] = reason
        while len(self._lost) > 2 * MAX_LIVE_EPISODES:
            self._lost.pop(next(iter(self._lost)))
        self._vacate(episode)
        if episode.mode is not Mode.DEBUG:
            self._drops[reason] += 1
        self.journal.append(
            EventWrite.of("drop", episode_id=episode.episode_id, group_id=episode.seat.group_id, reason=reason)
        )

    def _vacate(self, episode: LiveEpisode) -> None:
        if episode.mode is Mode.TRAIN:
            self._pool.free(episode.episode_id)
        else:
            self._pool.free_loose(episode.mode, episode.seat)

    def _forget(self, episode: LiveEpisode) -> None:
        self._live.pop(episode.episode_id, None)
        self._clients[episode.client_id] = time.monotonic()
        if episode.timer is not None:
            episode.timer.cancel()

    def _close_calls(self, episode: LiveEpisode) -> None:
        """Cancel what still runs; it is recorded and never trained."""
        for running in list(episode.running.values()):
            self.cancel_call(episode, running)

    # The end of episodes

    async def end(
        self,
        episode_id: str,
        reward: float | Mapping[str, float | None] | None,
        outcome: Outcome,
        metrics: Mapping[str, float],
    ) -> Mapping[str, float | None]:
        """Record an episode's reward; returns it by agent once it is on disk.

        Raises:
            ConflictError: the episode has ended otherwise.
            InvalidError: an agent that spoke gets no reward.
            EpisodeLostError, NotFoundError: see `find`.
            JournalError: it can't be written.
        """
        episode = self._live.get(episode_id)
        if episode is None:
            row = await self._ended_row(episode_id)
            rewards = _by_agent(reward, tuple(row.rewards))
            _check_same_end(episode_id, row.request, _normalised(rewards, outcome, metrics))
            return rewards
        rewards = _by_agent(reward, episode.agents or episode.tracker.agents or (DEFAULT_AGENT,))
        if silent := [agent for agent in episode.tracker.agents if agent not in rewards]:
            raise InvalidError(
                f"reward names {', '.join(map(repr, rewards)) or 'nobody'}, but {silent[0]!r} made calls too",
                "give every agent that spoke a reward, or null where it can't be judged",
                param="reward",
            )
        request = _normalised(rewards, outcome, metrics)
        if episode.ending is not None:
            _check_same_end(episode_id, episode.ending, request)
            assert episode.ended is not None
            await asyncio.shield(episode.ended)
            return rewards
        await self._commit_end(episode, rewards, outcome, metrics, request)
        return rewards

    async def _commit_end(
        self,
        episode: LiveEpisode,
        rewards: Mapping[str, float | None],
        outcome: Outcome,
        metrics: Mapping[str, float],
        request: str,
    ) -> None:
        self._close_calls(episode)
        recorded = self._as_record(episode, rewards, outcome, metrics)
        drop = None
        if not is_judged(rewards):
            drop = "null_reward"
        elif outcome is Outcome.ENV_ERROR:
            drop = "env_error"
        is_pooled = episode.mode is Mode.TRAIN and drop is None
        seat = episode.seat
        calls = recorded.episode.calls
        writes: list[Write] = [
            EpisodeRow(
                episode_id=episode.episode_id,
                mode=episode.mode,
                task_id=seat.task_id,
                group_id=seat.group_id,
                place=seat.index,
                attempt=seat.attempt,
                position=seat.position,
                is_pooled=is_pooled,
                rewards=rewards,
                request=request,
                record=_record.dump_json(recorded),
            ),
            EventWrite.of(
                "episode",
                episode_id=episode.episode_id,
                task_id=seat.task_id,
                group_id=seat.group_id,
                index=seat.index,
                mode=episode.mode,
                tags=episode.tags,
                rewards=rewards,
                outcome=outcome,
                metrics=metrics,
                policy_version=episode.policy_version,
                num_calls=len(calls),
                num_prompt_tokens=sum(len(call.prompt_ids) for call in calls),
                num_sampled_tokens=sum(len(call.completion_ids) for call in calls),
                seconds=round(time.monotonic() - episode.started_at, 6),
            ),
        ]
        if drop is not None:
            writes.append(EventWrite.of("drop", episode_id=episode.episode_id, group_id=seat.group_id, reason=drop))
        episode.ending = request
        episode.ended = self.journal.append(*writes)
        await asyncio.shield(episode.ended)
        if episode.episode_id not in self._live:
            return
        self._forget(episode)
        if self.state not in SERVING:
            # The engine went down meanwhile. The episode is on disk, and the next start finds it there.
            return
        if is_pooled:
            self._completed[episode.episode_id] = recorded.episode
            self._pool.complete(episode.episode_id, rewards)
        elif drop is not None:
            self._vacate(episode)
            if episode.mode is not Mode.DEBUG:
                self._drops[drop] += 1
        self._after_change()

    def _as_record(
        self,
        episode: LiveEpisode,
        rewards: Mapping[str, float | None],
        outcome: Outcome,
        metrics: Mapping[str, float],
    ) -> EpisodeRecord:
        seat = episode.seat
        return EpisodeRecord(
            episode=Episode(
                episode_id=episode.episode_id,
                task_id=seat.task_id,
                group_id=seat.group_id,
                index=seat.index,
                mode=episode.mode,
                policy_version=episode.policy_version,
                calls=episode.tracker.calls(),
                rewards=dict(rewards),
                outcome=outcome,
                metrics=dict(metrics),
                tags=dict(episode.tags),
            ),
            notes=episode.tracker.notes(),
        )

    def abort(self, episode_id: str, reason: str) -> None:
        """Take an episode off; its place is given out again.

        Raises:
            EpisodeLostError, NotFoundError: it does not run.
            ConflictError: its end is being written.
        """
        episode = self.find(episode_id)
        if episode.ending is not None:
            raise ConflictError(f"episode {episode_id!r} has ended", "an ended episode can't be aborted", code="ended")
        self._lose(episode, f"aborted: {reason}" if reason else "aborted")
        self._after_change()

    def heartbeat(self, episode_id: str) -> LiveEpisode:
        """Renew an episode's lease.

        Raises:
            EpisodeLostError, NotFoundError: it does not run.
        """
        episode = self.find(episode_id)
        episode.touch(time.monotonic())
        return episode

    def find(self, episode_id: str) -> LiveEpisode:
        """A running episode.

        Raises:
            EpisodeLostError: it was this server's and does not run any more.
            NotFoundError: it never was.
        """
        episode = self._live.get(episode_id)
        if episode is None:
            raise self.gone(episode_id)
        return episode

    def gone(self, episode_id: str) -> SwarmEngineError:
        """The error for an episode that does not run."""
        if reason := self._lost.get(episode_id):
            return EpisodeLostError(f"episode {episode_id!r} is gone ({reason})", "claim its task again")
        if self._keys.is_ours(episode_id):
            return EpisodeLostError(
                f"episode {episode_id!r} does not run any more; it has ended, or the server was started anew",
                "claim its task again unless it has ended",
            )
        return NotFoundError(f"there is no episode {episode_id!r}", "claim one with POST /swarm/v1/episodes")

    async def _ended_row(self, episode_id: str) -> EpisodeRow:
        row = await self.journal.episode(episode_id)
        if row is None:
            raise self.gone(episode_id)
        return row

    async def describe(self, episode_id: str) -> dict[str, Any]:
        """An episode, running or ended, without its tokens.

        Raises:
            EpisodeLostError, NotFoundError: there is none.
        """
        episode = self._live.get(episode_id)
        if episode is None:
            row = await self._ended_row(episode_id)
            return {
                "episode_id": episode_id,
                "status": "ended",
                "task_id": row.task_id,
                "group_id": row.group_id,
                "index": row.place,
                "mode": row.mode,
                **json.loads(row.request),
            }
        return {
            "episode_id": episode_id,
            "status": "running",
            "task_id": episode.seat.task_id,
            "group_id": episode.seat.group_id,
            "index": episode.seat.index,
            "mode": episode.mode,
            "client_id": episode.client_id,
            "policy_version": episode.policy_version,
            "num_calls": len(episode.tracker.calls()),
            "num_running_calls": len(episode.running),
            "seconds": round(time.monotonic() - episode.started_at, 3),
            "lease_s": episode.lease_s,
        }

    async def timelines(self, episode_id: str, how: Merge) -> list[dict[str, Any]]:
        """An episode's contexts as blocks, as recorded or merged.

        Raises:
            EpisodeLostError, NotFoundError: there is no such episode.
            EngineUnavailableError: this run folder never served a policy, so its tokens can't be shown.
        """
        episode = self._live.get(episode_id)
        if episode is not None:
            record = self._as_record(episode, {}, Outcome.SUCCESS, {})
        else:
            row = await self._ended_row(episode_id)
            record = _record.validate_json(row.record)
        codec = (self._ready or await self._last_ready()).codec
        return await asyncio.to_thread(_show_timelines, record, codec, how)

    async def _last_ready(self) -> _Ready:
        text = self.journal.meta("policy")
        if text is None:
            raise self._unavailable()
        policy = TypeAdapter(PolicyReady).validate_json(text)
        codec = await asyncio.to_thread(ChatCodec.load, Path(policy.tokenizer_dir), policy.end_ids, self.created)
        self._ready = _Ready(policy, codec)
        return self._ready

    # Calls

    @property
    def codec(self) -> ChatCodec:
        """Messages to ids and back for the policy that is served."""
        assert self._ready is not None
        return self._ready.codec

    @property
    def policy_name(self) -> str:
        """Name of the policy that is served."""
        assert self._ready is not None
        return self._ready.policy.name

    @property
    def policy(self) -> PolicyReady:
        """The policy that is served.

        Raises:
            EngineUnavailableError: none is.
        """
        if self._ready is None or self.state not in SERVING:
            raise self._unavailable()
        return self._ready.policy

    def begin_call(self, episode: LiveEpisode, agent: str, request: CallRequest, *, follow: bool) -> RunningCall:
        """Send a request to the sampler; `follow` keeps the reply's text up to date while it comes in.

        Raises:
            BadRequestError: the messages or limits can't be served.
            EpisodeLostError: the episode is ending.
        """
        policy = self.policy
        assert self._link is not None
        assert self._ready is not None
        assert self.config is not None
        if episode.ending is not None:
            raise EpisodeLostError(f"episode {episode.episode_id!r} has ended", code="episode_ended")
        if episode.agents and agent not in episode.agents:
            raise NotFoundError(
                f"agent {agent!r} is not in this episode", f"its claim named {', '.join(episode.agents)}", code="agent"
            )
        draft = episode.tracker.begin(agent, request.messages)
        room = policy.max_context - len(draft.prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(draft.prompt_ids)} tokens, prompt and reply together may have "
                f"{policy.max_context}",
                "shorten the messages, or end the episode as truncated",
                param="messages",
            )
        seat = episode.seat
        # A caller's seed repeats within its episode, yet the members of a group still differ: with one stream for all
        # of them every reply would be the same and nothing could be learned.
        which: tuple[str | int, ...] = (draft.index,) if request.seed is None else ("seed", request.seed)
        params = SamplingParams(
            max_tokens=min(request.max_tokens or self.config.sampler.max_tokens, room),
            temperature=request.temperature,
            seed=derive_seed(self.config.seed, episode.mode, seat.group_id, seat.index, seat.attempt, agent, *which),
        )
        reply = ReplyText(self._ready.codec, request.stop)
        link = self._link
        running: RunningCall

        def on_tokens(generation: Generation, token_ids: Sequence[int]) -> None:
            reply.push(token_ids)
            if reply.is_stopped:
                link.cancel(generation.request_id)
            running.has_news.set()

        question = Generate(draft.call_id, policy.name, draft.prompt_ids, params)
        generation = link.generate(question, on_tokens if follow or request.stop else None)
        running = RunningCall(draft, params, generation, reply)
        generation.done.add_done_callback(lambda _: running.has_news.set())
        episode.running[draft.call_id] = running
        episode.touch(time.monotonic())
        return running

    def finish_call(self, episode: LiveEpisode, running: RunningCall, reason: FinishReason) -> None:
        """Record a reply, once."""
        if running.finish_reason is not None or running.is_closed:
            return
        generation, reply = running.generation, running.reply
        if reply.num_tokens == 0:
            reply.push(generation.token_ids)
        if reply.is_stopped:
            generation.cut(reply.num_tokens)
            reason = FinishReason.STOP
        reply.finish()
        running.finish_reason = reason
        episode.running.pop(running.draft.call_id, None)
        episode.tracker.finish(
            running.draft,
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            policy_versions=generation.policy_versions,
            temperature=running.params.temperature,
            finish_reason=reason,
            answer=reply.text,
        )
        episode.touch(time.monotonic())

    def cancel_call(self, episode: LiveEpisode, running: RunningCall) -> None:
        """The caller went away, or its episode did: what was sampled is kept and not trained."""
        if running.finish_reason is not None or running.is_closed:
            return
        if self._link is not None:
            self._link.cancel(running.generation.request_id)
        running.generation.finish(FinishReason.CANCELLED)
        self.finish_call(episode, running, FinishReason.CANCELLED)
        running.is_closed = True

    def fail_call(self, episode: LiveEpisode, running: RunningCall) -> None:
        """The sampler refused the call: there is nothing to record."""
        running.is_closed = True
        episode.running.pop(running.draft.call_id, None)

    # Checkpoints

    async def checkpoint(self) -> Saved:
        """Write a checkpoint of the weights as they are.

        Raises:
            EngineUnavailableError: the engine does not run.
        """
        if self._link is None or self.state not in SERVING:
            raise self._unavailable()
        return await self._save(self._link)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Whole checkpoints on disk, oldest first."""
        found = (self.run_dir / "checkpoints").glob("step-*")
        folders = sorted(path for path in found if path.name[5:].isdigit())
        return [{"step": int(path.name[5:]), "path": str(path)} for path in folders]

    async def export(self, policy: str, name: str) -> Saved:
        """Write a policy in the Hugging Face layout under `exports/`.

        Raises:
            EngineUnavailableError: the engine does not run.
            NotFoundError: it serves no such policy.
            BadRequestError: the name is no plain folder name.
        """
        if self._link is None or self.state not in SERVING:
            raise self._unavailable()
        if policy != self.policy.name:
            raise NotFoundError(f"policy {policy!r} is not served here", f"this server has {self.policy.name!r}")
        if not name or name.startswith(".") or Path(name).name != name:
            raise BadRequestError(f"export name {name!r} is no plain folder name", "it becomes a folder under exports/")
        return await self._link.export(Export(policy, str(self.run_dir / "exports" / name)))

    # Status

    def status(self) -> dict[str, Any]:
        """What `GET /status` answers."""
        now = time.monotonic()
        counts = self._pool.counts() if self.state in SERVING else None
        running = Counter(episode.client_id for episode in self._live.values())
        self._clients = {
            client: seen for client, seen in self._clients.items() if client in running or now - seen < CLIENT_MEMORY_S
        }
        trainer = self.config.trainer if self.config else None
        update = None
        if self.state is EngineState.WEIGHT_SYNCING and self._update_started is not None:
            update = {"step": self.step + 1, "seconds": round(now - self._update_started, 3)}
        policies = {}
        if self._ready is not None and self.state in SERVING:
            policy = self._ready.policy
            policies[policy.name] = {"version": self.step, "trainable": policy.trainable}
        return {
            "state": self.state,
            "reason": self.reason,
            "update": update,
            "step": self.step,
            "policies": policies,
            "pool": {
                "rule": self.config.rule if self.config else None,
                "episodes": counts.episodes if counts else 0,
                "tasks": counts.tasks if counts else 0,
                "informative_tasks": counts.informative_tasks if counts else 0,
                "targets": {
                    "episodes": trainer.tasks_per_update * trainer.group_size if trainer else 0,
                    "tasks": trainer.tasks_per_update if trainer else 0,
                },
            },
            "clients": {client: running[client] for client in self._clients},
            "running": len(self._live),
            "server_id": self.server_id,
            "version": engine_version(),
            "last_seq": self.journal.last_seq,
        }

    def _unavailable(self) -> EngineUnavailableError:
        if self._is_closing:
            return EngineUnavailableError("the server is going down", "start it again", code="engine_offline")
        if self.state is EngineState.FAILED:
            return EngineUnavailableError(
                f"the engine failed: {self.reason}",
                "start it again with POST /swarm/v1/engine/start",
                code="engine_failed",
            )
        return EngineUnavailableError(
            f"the engine is {self.state}", "start it with POST /swarm/v1/engine/start", code="engine_offline"
        )


def _fixed_part(config: EngineConfig) -> dict[str, Any]:
    """What may not change in a run folder that holds updates."""
    fields: dict[str, Any] = {"seed": config.seed, "rule": config.rule}
    fields["policies"] = {name: policy.model_dump() for name, policy in config.policies.items()}
    trainer = config.trainer.model_dump(exclude=FIXED_TRAINER_FIELDS_NOT)
    return fields | {f"trainer.{name}": value for name, value in trainer.items()}


def _by_agent(reward: float | Mapping[str, float | None] | None, agents: Sequence[str]) -> Mapping[str, float | None]:
    """A bare number goes to every agent."""
    if isinstance(reward, Mapping):
        return dict(reward)
    return dict.fromkeys(agents, reward)


def _normalised(rewards: Mapping[str, float | None], outcome: Outcome, metrics: Mapping[str, float]) -> str:
    """An `end` as text, equal for equal ends."""
    whole = {
        "rewards": dict(sorted(rewards.items())),
        "outcome": str(outcome),
        "metrics": dict(sorted(metrics.items())),
    }
    return dump_json(whole)


def _check_same_end(episode_id: str, before: str, now: str) -> None:
    if before != now:
        raise ConflictError(
            f"episode {episode_id!r} has ended with {before}, not with {now}",
            "an episode ends once; claim another for another attempt",
            code="ended_differently",
        )


def _show_timelines(record: EpisodeRecord, codec: ChatCodec, how: Merge) -> list[dict[str, Any]]:
    shown = EpisodeBlocks(record, codec)
    return [
        {
            "policy": timeline.policy,
            "agent": timeline.agent,
            "call_ids": [span.call_id for span in timeline.spans],
            "blocks": [
                {
                    "author": block.author,
                    "role": block.role,
                    "text": block.text,
                    "token_ids": block.token_ids,
                    "logprobs": block.logprobs,
                    "loss_mask": block.loss_mask,
                    "policy_version": block.policy_version,
                }
                for block in shown.blocks(timeline)
            ],
        }
        for timeline in merge(record.episode.timelines(), how)
    ]
