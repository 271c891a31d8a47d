"""The engine's life: boots the worker, trains on full batches, fails with a reason, stops in order.

Everything here runs on one event loop, so a method without `await` is atomic. What may follow what is in `states`, who
gets which place in `pool`, what becomes of episodes in `roster`; this module carries it out. A task that fails in a way
nobody foresaw ends in FAILED with the reason, never in a log line alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swarm_engine.config import RESOLVED, BestBy, EngineConfig, Merge, TrainerConfig
from swarm_engine.errors import (
    BadRequestError,
    CheckpointError,
    ConflictError,
    EngineUnavailableError,
    JournalError,
    ModelError,
    NotFoundError,
    ServerClosingError,
    SwarmEngineError,
    WorkerDiedError,
    shown,
)
from swarm_engine.folders import Checkpoint, find_checkpoints, remove_partial
from swarm_engine.health import warnings_of
from swarm_engine.protocol import Boot, Export, PolicyReady, Save, Saved, Update
from swarm_engine.seeding import derive_seed
from swarm_engine.server.auth import KeyRing
from swarm_engine.server.checkpoints import best_checkpoint, export_checkpoint, rate_checkpoints
from swarm_engine.server.journal import BatchWrite, EventWrite, Journal, MetaWrite, Write, dumps
from swarm_engine.server.journal_file import TEACHER_KEY
from swarm_engine.server.loaded import Loaded, ServedPolicy
from swarm_engine.server.models import ExportRequest
from swarm_engine.server.pool import Pool, PoolCounts
from swarm_engine.server.roster import KeptEpisodes, Roster, record_of
from swarm_engine.server.shown import Shown, show_timelines
from swarm_engine.server.states import check_transition
from swarm_engine.server.teacher import Teacher, with_teacher
from swarm_engine.server.worker_link import WORKER_COMMAND, WorkerLink
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.continuations import with_continuations
from swarm_engine.tracker.tracker import EpisodeRecord
from swarm_engine.types import BatchRecord, ClaimReason, EngineState, Episode, Mode, Refusals, well_formed
from swarm_engine.version import installed_version

log = logging.getLogger(__name__)

SWEEP_S = 0.5
"""How often idle groups are looked at while claims wait."""
STOP_TIMEOUT_S = 120.0
"""An operator's stop waits this long for an update that runs, and again for the checkpoint; what it cuts short is done
again from the journal at the next start."""
CLOSE_TIMEOUT_S = 5.0
"""The same for a server that is going down, whose parent may not wait longer."""
MAX_EXPORT_BYTES = 200
"""Of an export's name: file systems take 255, and what is being written has a longer one."""

CHANGEABLE_TRAINER_FIELDS = {"best_by", "checkpoint_every", "checkpoint_required", "keep_last", "microbatch_tokens"}
"""Trainer fields that a later start may change; the others are part of what the journal replays."""

policies_ready: TypeAdapter[dict[str, PolicyReady]] = TypeAdapter(dict[str, PolicyReady])


class Engine:
    """One run folder's engine. `open` it before anything else."""

    journal: Journal
    roster: Roster
    server_id: str
    created: datetime
    """When the run folder was made."""

    def __init__(self, run_dir: Path, worker_command: Sequence[str] = WORKER_COMMAND) -> None:
        self.run_dir = run_dir
        self.state = EngineState.OFFLINE
        self.reason: str | None = None
        """Why it is FAILED."""
        self._worker_command = worker_command
        self._config: EngineConfig | None = None
        """The last one started with; None before the run folder's first start."""
        self._link: WorkerLink | None = None
        """There from the beginning of a boot on."""
        self._loaded: Loaded | None = None
        """There in the states that serve."""
        self._history: list[Mapping[str, float | None]] = []
        """Metrics of the run's updates, from the first one on."""
        self._shown: dict[str, Shown] = {}
        """Shows recorded tokens, by policy, while nothing is loaded too."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._main_task: asyncio.Task[None] | None = None
        """Boots or updates."""
        self._stopping: asyncio.Task[None] | None = None
        """The last stop; one that runs is shared by everybody who asks for a stop meanwhile."""
        self._is_training = False
        """Whether updates run beside the sampler, or the checkpoint between two of them is written."""
        self._update_started: float | None = None
        self._last_step_at = 0.0
        self._kept_counts: tuple[tuple[int, int, int], PoolCounts] | None = None
        """What the journal holds while nothing is loaded, and what it was looked up for."""
        self._checkpoint_dir = run_dir / "checkpoints"
        self._saved_step = 0
        """Of the newest checkpoint."""
        self._save_error: str | None = None
        """Why the last checkpoint could not be written; None once one is."""
        self._folders = asyncio.Lock()
        """Held while checkpoints are written, removed or copied."""
        self._closing = asyncio.Event()
        """Set once the server is going down."""

    # Life of the server

    async def open(self) -> None:
        """Open the run folder's journal.

        Raises:
            JournalError: it can't be opened.
        """
        remove_partial(self.run_dir / "exports")
        self.journal = Journal(self.run_dir / "journal.db", on_error=lambda error: self._fail(str(error)))
        try:
            await self._begin_journal(self.journal)
        except JournalError:
            await self.journal.close()
            raise

    async def _begin_journal(self, journal: Journal) -> None:
        """Take up what the journal knows of this run folder, and note that a server has begun."""
        writes: list[Write] = []
        server_id, secret, created = (journal.meta(key) for key in ("server_id", "secret", "created"))
        if server_id is None or secret is None or created is None:
            server_id, secret, created = secrets.token_hex(8), secrets.token_hex(32), datetime.now(UTC).isoformat()
            writes += [MetaWrite("server_id", server_id), MetaWrite("secret", secret), MetaWrite("created", created)]
        self.server_id = server_id
        with journal.reading("meta", "created"):
            self.created = datetime.fromisoformat(created)
        if config := journal.meta("config"):
            with contextlib.suppress(ValidationError):  # `start` says which part of it is not valid any more
                self._config = EngineConfig.model_validate_json(config)
        self.roster = Roster(journal, KeyRing(secret), self._gate, self._after_change, self._fail)
        writes.append(EventWrite.of("server", server_id=server_id, version=installed_version()))
        if (before := journal.last_state()) not in (None, EngineState.OFFLINE):
            cause = "the server ended without stopping the engine"
            writes.append(EventWrite.of("state", **{"from": before, "to": EngineState.OFFLINE, "cause": cause}))
        await journal.until_written(journal.append(*writes))

    async def close(self, cause: str) -> None:
        """Stop the engine and close the journal; nothing that was answered is lost."""
        self._closing.set()
        await self.stop(cause)
        await self.journal.close()

    # Start and stop

    def start(self, config: EngineConfig | None) -> None:
        """Begin to boot; `status` tells how it goes.

        Args:
            config: None goes on with the run folder's last one.

        Raises:
            ConflictError: it runs already, or the folder's journal belongs to another config.
        """
        going_down = ConflictError("the engine is still going down", "ask again in a moment", code="stopping")
        if self._closing.is_set() or self._is_stopping:
            raise going_down
        if self.state not in (EngineState.OFFLINE, EngineState.FAILED):
            raise ConflictError(
                f"the engine is {self.state}, it can be started from OFFLINE and FAILED",
                "stop it first",
                code="running",
            )
        if self._main_task is not None and not self._main_task.done():
            raise going_down
        self.journal.reopen()
        self._config = config = self._agree(config)
        stored = config.model_dump(mode="json")
        self.journal.append(MetaWrite("config", dumps(stored)), EventWrite.of("config", config=stored))
        self._to(EngineState.BOOTING, "start")
        self._main_task = self._spawn(self._boot(config), "boot")

    def _agree(self, config: EngineConfig | None) -> EngineConfig:
        """The config to start with: the one given, where the journal allows it."""
        text = self.journal.meta("config")
        if config is not None and (text is None or self.journal.is_untouched()):
            return config
        try:
            stored = EngineConfig.model_validate_json(text) if text else EngineConfig()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConflictError(
                f"the config that this run folder was used with is not valid any more: {where}: {first['msg']}",
                "use the version that wrote it, or a new run folder",
                code="config_outdated",
            ) from error
        if config is None:
            return stored
        known = self._known_policies()
        config = config.model_copy(update={"trainer": config.trainer.going_on_from(stored.trainer)})
        now, then = _fixed_part(config, known), _fixed_part(stored, known)
        if now != then:
            changed = ", ".join(sorted(name for name in now if now[name] != then[name]))
            raise ConflictError(
                f"this run folder holds episodes or updates of another config; {changed} can't change in it",
                "start with the same values, or use a new run folder",
                code="config_changed",
            )
        return config

    def _authorization_at(self, base_url: str) -> str:
        """What opens a teacher whose URL held a password when the run began; empty where none did at this URL."""
        if (text := self.journal.meta(TEACHER_KEY)) is None:
            return ""
        with self.journal.reading("meta", TEACHER_KEY):
            known: dict[str, str] = json.loads(text)
            return known["authorization"] if known["base_url"] == base_url else ""

    async def stop(self, cause: str) -> None:
        """Save, end the worker, go OFFLINE. Episodes that run are lost; completed ones stay.

        A stop that runs already is waited for: it is one stop, whoever asks and whoever stops waiting.
        """
        if not self._is_stopping:
            if self.state is EngineState.OFFLINE:
                return
            self._stopping = asyncio.create_task(self._stop(cause), name="stop")
        assert self._stopping is not None
        await asyncio.shield(self._stopping)

    @property
    def _is_stopping(self) -> bool:
        """Whether a stop is on its way."""
        return self._stopping is not None and not self._stopping.done()

    async def _stop(self, cause: str) -> None:
        if self._main_task is not None and not self._main_task.done():
            if self.state is EngineState.WEIGHT_SYNCING or self._is_training:
                await self._let_finish(self._main_task)
            self._main_task.cancel()
            await asyncio.wait({self._main_task})
        link, loaded = self._link, self._loaded
        self._unload("stopped", EngineState.OFFLINE, cause)
        if link is not None:
            if loaded is None:
                await link.kill()
            elif loaded.step == self._saved_step or await self._save_before_stop(link):
                await link.stop()
            else:
                await link.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Whoever asked for the stop finds it among the events; where the disk refuses them it is off anyhow.
        await self._let_finish(asyncio.create_task(self.journal.flush(), name="flush"))

    async def _save_before_stop(self, link: WorkerLink) -> bool:
        """Write a last checkpoint; whether the worker can be told to stop."""
        saving = asyncio.create_task(self._save(link), name="save")
        if not await self._let_finish(saving):
            saving.cancel()
            log.warning("no checkpoint at the stop, it took too long; the next start trains again from the journal")
            return False
        if isinstance(error := saving.exception(), WorkerDiedError):
            log.warning("no checkpoint at the stop: %s", error)
        elif error is not None:
            log.error("no checkpoint at the stop; the next start trains again from the journal", exc_info=error)
            return False
        return True

    async def _let_finish(self, task: asyncio.Task[Any]) -> bool:
        """Wait for a task as long as this stop may; whether it has finished."""
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({task, closing}, timeout=STOP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not task.done() and self._closing.is_set():
            await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)
        return task.done()

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

    def _fail(self, reason: str) -> None:
        """Go to FAILED: episodes that run are lost, completed ones wait in the journal for the next start."""
        if self.state in (EngineState.OFFLINE, EngineState.FAILED):
            return
        reason = well_formed(reason)  # it may quote a file's name, or what a teacher or a worker said
        log.error("engine failed: %s", reason)
        self.reason = reason
        if self._main_task is not None and not self._main_task.done():
            self._main_task.cancel()
        link = self._link
        self._unload("engine_failed", EngineState.FAILED, reason)
        if link is not None:
            self._spawn(link.kill(), "kill worker")

    def _unload(self, lost_because: str, state: EngineState, cause: str) -> None:
        """Leave the states that serve."""
        self._to(state, cause)
        self.roster.close(lost_because, self._unavailable())
        self._loaded = self._link = self._update_started = None
        self._is_training = False

    def _to(self, state: EngineState, cause: str) -> None:
        check_transition(self.state, state)
        if state is not EngineState.FAILED:
            self.reason = None
        self.journal.append(EventWrite.of("state", **{"from": self.state, "to": state, "cause": cause}))
        self.state = state

    # Boot

    async def _boot(self, config: EngineConfig) -> None:
        self._link = link = await WorkerLink.start(self.run_dir, self._fail, self._worker_command)
        models = self.run_dir / "models"
        self._checkpoint_dir.mkdir(exist_ok=True)
        models.mkdir(exist_ok=True)
        boot = Boot(config.model_dump(mode="json"), str(models), str(self._checkpoint_dir), self.server_id)
        booted = await link.boot(boot)
        policies = {
            one.name: await asyncio.to_thread(ServedPolicy.load, one, config.policies[one.name].history, self.created)
            for one in booted.policies
        }
        self._shown |= {name: Shown(policy.codec, policy.max_context) for name, policy in policies.items()}
        known = self._known_policies()
        if not self.journal.is_untouched():
            for name, policy in policies.items():
                if name in known:
                    _check_start_weights(known[name], policy.ready)
                    _check_own_values(known[name], policy.ready)
        known |= {name: policy.ready for name, policy in policies.items()}
        trained = {
            name: {field: getattr(policy.ready, field) for field in RESOLVED}
            for name, policy in policies.items()
            if policy.ready.trainable
        }
        self.journal.append(
            MetaWrite("policies", policies_ready.dump_json(known).decode()), EventWrite.of("trained", policies=trained)
        )
        teacher = None
        if config.teacher is not None:
            teacher = Teacher(config.teacher, authorization=self._authorization_at(config.teacher.base_url))
            for policy in policies.values():
                if policy.ready.trainable:
                    await teacher.probe(policy.codec)
        pool = Pool(config.trainer.group_size, config.trainer.tasks_per_update)
        self._saved_step, self._save_error = booted.step, None
        self._history = list(await asyncio.to_thread(self.journal.step_metrics))
        step = await self._replay(link, booted.step, config.trainer, policies)
        # An end that was on its way when the last engine went down is on disk before its journal is read.
        await self.journal.flush()
        kept = await asyncio.to_thread(KeptEpisodes.read, self.journal)
        self._loaded = Loaded(config, policies, link, pool, step, teacher)
        self.roster.open(self._loaded, kept)
        self._open_batches(self._loaded, taken=step)
        self._last_step_at = time.monotonic()
        self._to(EngineState.ROLLING, f"booted at step {step}")
        self._after_change()

    def _known_policies(self) -> dict[str, PolicyReady]:
        """Every policy that this run folder ever served, as it was last."""
        text = self.journal.meta("policies")
        with self.journal.reading("meta", "policies"):
            return policies_ready.validate_json(text) if text else {}

    async def _replay(
        self, link: WorkerLink, step: int, trainer: TrainerConfig, policies: Mapping[str, ServedPolicy]
    ) -> int:
        """Train again on the recorded batches that the checkpoint does not hold; returns the step reached."""
        last = self.journal.last_step()
        if step > last:
            raise SwarmEngineError(
                f"the checkpoint is at step {step}, the journal ends at step {last}",
                "the two belong to different runs; use the journal that made the checkpoint, or a new run folder",
            )
        reported = await asyncio.to_thread(self.journal.steps_reported, step)
        for record in await asyncio.to_thread(self.journal.batches_after, step):
            started = time.monotonic()
            episodes = await asyncio.to_thread(self._read_batch, record, trainer, policies)
            updated = await link.update(Update(record, episodes))
            if record.step not in reported:
                await self._report_step(record.step, updated.metrics, updated.drops, time.monotonic() - started)
        return last

    def _read_batch(
        self, record: BatchRecord, trainer: TrainerConfig, policies: Mapping[str, ServedPolicy]
    ) -> tuple[Episode, ...]:
        """The episodes of a batch as the trainer takes them, from the journal."""
        records = [record_of(self.journal, row) for row in self.journal.episodes_of(record)]
        if trainer.merge is Merge.TEXT:
            episodes = [_continued(one, policies, ignore_tools=bool(trainer.ignore_tools)) for one in records]
        else:
            episodes = [one.episode for one in records]
        taught = self.journal.taught(record.step)
        return tuple(with_teacher(episode, taught) for episode in episodes)

    # Batches

    def _gate(self, mode: Mode) -> Loaded | ClaimReason:
        """What serves an episode of a mode now, or why its claim has to wait.

        Raises:
            EngineUnavailableError: waiting would be in vain.
            JournalLockedError: nothing that happens now can be kept.
        """
        if self.state in (EngineState.OFFLINE, EngineState.FAILED) or self._closing.is_set():
            raise self._unavailable()
        self.journal.check_lock()
        if self.state is EngineState.ROLLING or (self.state is EngineState.ROLLING_POST and mode is not Mode.TRAIN):
            return self.loaded
        return {
            EngineState.BOOTING: ClaimReason.BOOTING,
            EngineState.ROLLING_POST: ClaimReason.ROLLING_POST,
            EngineState.WEIGHT_SYNCING: ClaimReason.WEIGHT_SYNCING,
        }[self.state]

    def _after_change(self) -> None:
        """Look what a claim, an end or a drop has made possible."""
        loaded = self._loaded
        if loaded is None or self.state not in (EngineState.ROLLING, EngineState.ROLLING_POST):
            return
        pool, step = loaded.pool, loaded.step + 1
        if self.state is EngineState.ROLLING_POST and not pool.is_claimed:
            self._to(EngineState.ROLLING, "a place of the batch is free again")
        self.roster.serve_waiters()
        is_held_up = self.roster.note_idle_groups(loaded)
        is_asynchronous = loaded.config.trainer.is_asynchronous
        if is_asynchronous and pool.is_ready and not self._is_training and not self._is_stopping:
            self._is_training = True
            self._main_task = self._spawn(self._update_meanwhile(loaded), "update")
        if pool.is_ready and not is_asynchronous:
            self._to(EngineState.WEIGHT_SYNCING, f"the batch of step {step} is complete")
            self._main_task = self._spawn(self._update(loaded), "update")
        elif self.state is EngineState.ROLLING and pool.is_claimed and not is_asynchronous:
            self._to(EngineState.ROLLING_POST, f"every place of the batch of step {step} is claimed")
        elif is_held_up and all(task.get_name() != "sweep" for task in self._tasks):
            self._spawn(self._sweep(loaded), "sweep")

    async def _sweep(self, loaded: Loaded) -> None:
        """While claims wait, give up groups that nobody works on."""
        while self._loaded is loaded and self.state is EngineState.ROLLING and self.roster.note_idle_groups(loaded):
            await asyncio.sleep(SWEEP_S)
            if self._loaded is loaded and self.state is EngineState.ROLLING:
                self.roster.give_up_idle_groups(loaded)
                self._after_change()

    async def _update(self, loaded: Loaded) -> None:
        """Train on the batch and go on."""
        await self._train(loaded)
        if self._is_checkpoint_due(loaded):
            self._spawn(self._checkpoint(loaded), "checkpoint")
        self._to(EngineState.ROLLING, f"step {loaded.step} is in the weights")
        self._after_change()

    async def _update_meanwhile(self, loaded: Loaded) -> None:
        """Train on complete batches as long as there are any, while episodes go on."""
        while loaded.pool.is_ready and not self._is_stopping:
            await self._train(loaded)
            self._after_change()
            if self._is_checkpoint_due(loaded):
                # Waited for, because the next update changes the weights that are to be saved.
                await self._checkpoint(loaded)
        self._is_training = False

    async def _train(self, loaded: Loaded) -> None:
        """Train on the next batch, and report the step."""
        step = loaded.step + 1
        self._update_started = time.monotonic()
        record = BatchRecord(step, loaded.pool.batch(), derive_seed(loaded.config.seed, "batch", step))
        if step == 1:
            await self._save_start(loaded)
        episodes = self.roster.take(record)
        announced = EventWrite.of("batch", step=step, episode_ids=record.episode_ids, seed=record.seed)
        taught = await loaded.teacher.judge(episodes) if loaded.teacher else None
        await self.journal.append(BatchWrite(record, taught), announced)
        loaded.pool.close()
        self._open_batches(loaded, taken=step)
        if loaded.config.trainer.merge is Merge.TEXT:  # which needs what only the records have
            episodes = await asyncio.to_thread(self._read_batch, record, loaded.config.trainer, loaded.policies)
        elif taught is not None:
            episodes = tuple(with_teacher(episode, taught) for episode in episodes)
        updated = await loaded.link.update(Update(record, episodes))
        loaded.step = step
        self._open_batches(loaded, taken=step)
        now = time.monotonic()
        # On disk before the checkpoint that holds it: a start from there on would not report it again.
        await self._report_step(step, updated.metrics, updated.drops, now - self._last_step_at)
        self._last_step_at = now
        self._update_started = None

    def _open_batches(self, loaded: Loaded, taken: int) -> None:
        """Let as many batches be claimed as are trained at most `max_staleness` updates after the weights served now.

        Those of version v may sample for the batches up to v + 1 + max_staleness, and the ones up to `taken` are
        closed.
        """
        loaded.pool.num_batches = loaded.step + 1 + (loaded.config.trainer.max_staleness or 0) - taken

    def _is_checkpoint_due(self, loaded: Loaded) -> bool:
        return loaded.step % loaded.config.trainer.checkpoint_every == 0

    def _report_step(
        self, step: int, metrics: Mapping[str, float | None], drops: Mapping[str, int], seconds: float
    ) -> asyncio.Future[None]:
        counted = dict(self.roster.drops + Counter(drops))
        self.roster.drops.clear()
        refusals, self.roster.refusals = self.roster.refusals, Refusals()
        self._history.append(metrics)
        health = [warning.as_event() for warning in warnings_of(self._history)]
        return self.journal.append(
            EventWrite.of(
                "step",
                step=step,
                metrics=dict(metrics),
                drops=counted,
                seconds=round(seconds, 6),
                health=health,
                **asdict(refusals),
            )
        )

    # Checkpoints

    async def _checkpoint(self, loaded: Loaded) -> None:
        saved = await self._save(loaded.link)
        if loaded.config.trainer.checkpoint_required:
            _written(saved)

    async def _save_start(self, loaded: Loaded) -> None:
        """Write a checkpoint of the start weights where they were evaluated: they may turn out to be the best."""
        evaluated = await asyncio.to_thread(self.journal.rewards_by_version, BestBy.EVALUATION)
        if 0 in evaluated and not find_checkpoints(self._checkpoint_dir):
            await self._save(loaded.link)

    async def _save(self, link: WorkerLink) -> Saved:
        async with self._folders:
            best = await asyncio.to_thread(best_checkpoint, self._checkpoint_dir, self.journal, self._best_by)
            saved = await link.save(Save(() if best is None else (best.step,)))
        self._save_error = saved.error
        if saved.error is None:
            self._saved_step = saved.step
        self.journal.append(EventWrite.of("checkpoint", step=saved.step, path=saved.path, error=saved.error))
        return saved

    async def checkpoint(self) -> Saved:
        """Write a checkpoint of the weights as they are.

        Raises:
            EngineUnavailableError: the engine does not run.
            CheckpointError: it can't be written; the last one stands.
        """
        return _written(await self._save(self.loaded.link))

    async def checkpoints(self) -> list[dict[str, Any]]:
        """Checkpoints on disk, oldest first, with what their weights earned."""
        return [
            {
                "step": one.checkpoint.step,
                "path": str(one.checkpoint.path),
                "reward": one.reward,
                "evaluation": one.evaluation,
                "is_best": one.is_best,
            }
            for one in await asyncio.to_thread(rate_checkpoints, self._checkpoint_dir, self.journal, self._best_by)
        ]

    @property
    def _best_by(self) -> BestBy | None:
        return (self._config or EngineConfig()).trainer.best_by

    async def export(self, request: ExportRequest) -> Saved:
        """Write a policy in the Hugging Face layout under `exports/`: as it is now, or a checkpoint of it.

        Raises:
            EngineUnavailableError: the weights of now are asked for, and the engine does not run.
            NotFoundError: it serves no such policy, or has no such checkpoint.
            BadRequestError: the name is no plain folder name.
            ConflictError: there is an export of that name.
            CheckpointError: it can't be written, or the checkpoint is damaged.
        """
        policy, name = request.policy, request.name
        if policy not in (served := tuple((self._config or EngineConfig()).policies)):
            there = ", ".join(map(repr, served))
            raise NotFoundError(f"policy {policy!r} is not served here", f"this server has {there}")
        is_plain = name.isprintable() and not name.startswith(".") and Path(name).name == name
        if not is_plain or len(name.encode()) > MAX_EXPORT_BYTES:
            raise BadRequestError(
                f"export name {shown(name)} is no plain folder name",
                f"it becomes a folder under exports/ and has at most {MAX_EXPORT_BYTES} bytes",
            )
        folder = self.run_dir / "exports" / name
        async with self._folders:
            if os.path.lexists(folder):
                raise ConflictError(f"{folder} is there already", "name another folder", code="export_exists")
            if request.step is None and not request.best:
                return _written(await self.loaded.link.export(Export(policy, str(folder), request.merged)))
            checkpoint = await asyncio.to_thread(self._export_checkpoint, request, folder)
        return Saved(checkpoint.step, str(folder))

    def _export_checkpoint(self, request: ExportRequest, folder: Path) -> Checkpoint:
        if request.best:
            checkpoint = best_checkpoint(self._checkpoint_dir, self.journal, self._best_by)
        else:
            checkpoint = next((one for one in find_checkpoints(self._checkpoint_dir) if one.step == request.step), None)
        if checkpoint is None:
            missing = "no checkpoint has a reward yet" if request.best else f"there is no checkpoint {request.step}"
            there = ", ".join(str(one.step) for one in find_checkpoints(self._checkpoint_dir)) or "none"
            raise NotFoundError(missing, f"there are checkpoints of the steps: {there}", code="no_checkpoint")
        export_checkpoint(checkpoint, request.policy, folder)
        return checkpoint

    # Looking

    @property
    def loaded(self) -> Loaded:
        """What is served with now.

        Raises:
            EngineUnavailableError: nothing is.
        """
        if self._loaded is None:
            raise self._unavailable()
        return self._loaded

    async def timelines(self, episode_id: str, how: Merge) -> list[dict[str, Any]]:
        """An episode's contexts as blocks, as recorded or merged.

        Raises:
            EpisodeLostError, NotFoundError: there is no such episode.
        """
        record = await self.roster.record(episode_id)
        for name in record.policies:
            if name not in self._shown:
                ready = self._known_policies()[name]
                codec = await asyncio.to_thread(ChatCodec.load, Path(ready.tokenizer_dir), ready.end_ids, self.created)
                self._shown[name] = Shown(codec, ready.max_context)
        ignore_tools = self._config is not None and bool(self._config.trainer.ignore_tools)
        return await asyncio.to_thread(show_timelines, record, self._shown, how, ignore_tools)

    async def completed_by_task(self) -> dict[str, int]:
        """Completed train episodes by task, from which a client that was killed sees where to go on."""
        return await asyncio.to_thread(self.journal.completed_by_task)

    def status(self) -> dict[str, Any]:
        """What `GET /status` answers."""
        loaded, config = self._loaded, self._config
        trainer = config.trainer if config else None
        counts = loaded.pool.counts() if loaded else self._kept(trainer) if trainer else None
        step = loaded.step if loaded else self.journal.last_step()
        update = None
        if self._update_started is not None:
            update = {"step": step + 1, "seconds": round(time.monotonic() - self._update_started, 3)}
        return {
            "state": self.state,
            "reason": self.reason,
            "update": update,
            "step": step,
            "checkpoint": {"step": self._saved_step or None, "error": self._save_error},
            "policies": loaded.versions() if loaded else {},
            "pool": {
                "rule": "tasks",  # the only one there is: `tasks_per_update` complete groups
                "episodes": counts.episodes if counts else 0,
                "tasks": counts.tasks if counts else 0,
                "informative_tasks": counts.informative_tasks if counts else 0,
                "targets": {
                    "episodes": trainer.tasks_per_update * trainer.group_size if trainer else 0,
                    "tasks": trainer.tasks_per_update if trainer else 0,
                    "group_size": trainer.group_size if trainer else 0,
                },
            },
            "clients": self.roster.clients(),
            "running": self.roster.num_running,
            **asdict(self.roster.refusals),
            "server_id": self.server_id,
            "version": installed_version(),
            "last_seq": self.journal.last_seq,
        }

    def _kept(self, trainer: TrainerConfig) -> PoolCounts:
        """What the journal holds for the next start; looked up again only after an event, for none changes without."""
        now = self.journal.last_seq, trainer.group_size, trainer.tasks_per_update
        if self._kept_counts is None or self._kept_counts[0] != now:
            pool = Pool(trainer.group_size, trainer.tasks_per_update)
            pool.restore(self.journal.kept(), {}, 0, {})
            self._kept_counts = now, pool.counts()
        return self._kept_counts[1]

    def _unavailable(self) -> EngineUnavailableError:
        if self._closing.is_set():
            return ServerClosingError()
        again = "again " if self.state is EngineState.FAILED else ""
        start = f"start it {again}with `swarm start` or POST /swarm/v1/engine/start"
        if self.state is EngineState.FAILED:
            return EngineUnavailableError(f"the engine failed: {self.reason}", start, code="engine_failed")
        return EngineUnavailableError(f"the engine is {self.state}", start, code="engine_offline")


def _written(saved: Saved) -> Saved:
    """What was saved, or the error that says why it wasn't."""
    if saved.error is not None:
        raise CheckpointError(saved.error)
    return saved


def _continued(record: EpisodeRecord, policies: Mapping[str, ServedPolicy], *, ignore_tools: bool) -> Episode:
    """The episode of a record, each call with the one of its policy that it continues."""
    parts = [
        with_continuations(record.part(name), policies[name].codec, ignore_tools=ignore_tools)
        for name in record.policies
    ]
    calls = {call.call_id: call for part in parts for call in part.calls}
    return replace(record.episode, calls=tuple(calls[call.call_id] for call in record.episode.calls))


def _fixed_part(config: EngineConfig, known: Mapping[str, PolicyReady]) -> dict[str, Any]:
    """What may not change in a run folder that is not untouched.

    Args:
        known: the policies as they were last, whose kind says what a config leaves open.
    """
    fields: dict[str, Any] = {"seed": config.seed}
    fields["policies"] = {name: policy.model_dump() for name, policy in config.policies.items()}
    trainer = config.trainer.model_dump(exclude=CHANGEABLE_TRAINER_FIELDS)
    for name in RESOLVED:
        named = trainer[name]
        trainer[name] = {
            policy: getattr(ready, name) if named is None else named
            for policy, ready in known.items()
            if ready.trainable
        }
    return fields | {f"trainer.{name}": value for name, value in trainer.items()}


def _check_start_weights(before: PolicyReady, now: PolicyReady) -> None:
    """Compare what a policy begins with to what it began with when the run folder was started last.

    Raises:
        ModelError: it is something else. Batches would be trained again to other weights, and references and frozen
            opponents be others than before.
    """
    then_and_now = zip_longest(before.start_weights, now.start_weights)
    changed = [one or old for old, one in then_and_now if old is None or one is None or old.sha256 != one.sha256]
    if before.start_weights and changed:  # a run folder of an older version has none
        raise ModelError(
            f"policy {now.name!r} began with other weights than {changed[0].path} holds now",
            "the run folder's batches are trained again from those: put them back, or use a new run folder",
        )


def _check_own_values(before: PolicyReady, now: PolicyReady) -> None:
    """Compare what a policy is trained with to what it was trained with when the run folder was started last.

    Raises:
        ModelError: the config names neither, and own values are others in this version.
    """
    for name in RESOLVED:
        then, value = getattr(before, name), getattr(now, name)
        if then is not None and value is not None and value != then:
            raise ModelError(
                f"policy {now.name!r} was trained with trainer.{name} {then:g}, and this version's own value is "
                f"{value:g}",
                f"name it: trainer.{name}: {then:g}",
            )
