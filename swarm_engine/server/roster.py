"""The episodes of a front: who waits for one, who runs one, how they end.

Everything runs on one event loop, so a method without `await` is atomic. Which place an episode gets is the pool's to
decide; leases, time limits and the journal are handled here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from swarm_engine.config import Algorithm
from swarm_engine.errors import (
    ConflictError,
    EpisodeLostError,
    InvalidError,
    JournalError,
    NotFoundError,
    SwarmEngineError,
    UnsupportedError,
    shown,
)
from swarm_engine.server.auth import KeyRing
from swarm_engine.server.episodes import ClaimRequest, Ending, LiveEpisode, check_scripts
from swarm_engine.server.journal import EpisodeRow, EventWrite, Journal, UnpoolWrite, Write
from swarm_engine.server.loaded import Loaded, ServedPolicy
from swarm_engine.server.pool import PooledEpisode, Seat, is_judged
from swarm_engine.tracker.tracker import EpisodeRecord
from swarm_engine.types import DEFAULT_AGENT, BatchRecord, ClaimReason, DropReason, Episode, Mode, Outcome, Refusals

MAX_LIVE_EPISODES = 4096
"""Episodes that run side by side; more claims wait with the reason `full`."""
NUM_REMEMBERED = 2 * MAX_LIVE_EPISODES
"""Lost episodes and answered claims that are known still."""
EMPTY_GROUP_GRACE_S = 5.0
"""A group without a single completed episode that nobody works on is given up after this, where others wait."""
BARREN_BATCHES = 3
"""As many train episodes as this many batches hold may end without a reward or a call in a row; then the engine
fails."""
CLIENT_MEMORY_S = 60.0
"""A client counts as active for this long after its last claim or running episode."""
SILENT_AGENT = "silent_agent"
"""Counts rewards of agents that made no call in an episode in which others did. In many a game not everybody gets a
turn, so they are taken; they train nothing, and a name that was misspelt shows here."""

episode_records: TypeAdapter[EpisodeRecord] = TypeAdapter(EpisodeRecord)

Key = TypeVar("Key", bound=Hashable)
Reward = float | Mapping[str, float | None] | None
Gate = Callable[[Mode], Loaded | ClaimReason]
"""What serves an episode of a mode now, or why a claim has to wait; raises where waiting is in vain."""


@dataclass(slots=True)
class _Waiter:
    request: ClaimRequest
    served: asyncio.Future[LiveEpisode]
    reason: ClaimReason
    """Why the last look found nothing for it."""


@dataclass(frozen=True, slots=True)
class KeptEpisodes:
    """What the journal knows of earlier episodes when an engine boots."""

    completed: Mapping[str, Episode]
    """Those of the open batch."""
    pooled: Sequence[PooledEpisode]
    """Their places."""
    closed_groups: Mapping[str, str]
    next_position: int
    loose_groups: Mapping[tuple[Mode, str], tuple[str, int]]

    @staticmethod
    def read(journal: Journal) -> KeptEpisodes:
        """Read them; takes long where the journal is long, so not on the event loop."""
        rows = journal.open_episodes()
        return KeptEpisodes(
            completed={row.episode_id: record_of(journal, row).episode for row in rows},
            pooled=[row.pooled() for row in rows],
            closed_groups=journal.closed_groups(),
            next_position=journal.next_position(),
            loose_groups=journal.loose_groups(),
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of an episode by its end."""

    rewards: Mapping[str, float | None]
    """By agent."""
    drop_reason: DropReason | None
    """Why its place is free again; None where it keeps it."""
    refusals: Refusals


def record_of(journal: Journal, row: EpisodeRow) -> EpisodeRecord:
    """What a row of the journal holds of its episode.

    Raises:
        JournalDamagedError: it holds none.
    """
    with journal.reading("episodes", row.episode_id):
        return episode_records.validate_json(row.record)


class Roster:
    """The running, the lost and the completed episodes of a front."""

    def __init__(
        self,
        journal: Journal,
        keys: KeyRing,
        gate: Gate,
        on_change: Callable[[], None],
        on_barren: Callable[[str], None],
    ) -> None:
        """Begin empty.

        Args:
            gate: decides whether a claim can be served now.
            on_change: called when a place was taken, filled or freed.
            on_barren: called with the reason when episode after episode ends without a reward or a call.
        """
        self._journal = journal
        self._keys = keys
        self._gate = gate
        self._on_change = on_change
        self._on_barren = on_barren
        self._num_barren = 0
        """Train episodes in a row that ended without a reward or a call."""
        self._num_abandoned = 0
        """Judged train episodes that were dropped with their groups since the last batch."""
        self._loaded: Loaded | None = None
        self._live: dict[str, LiveEpisode] = {}
        self._lost: dict[str, str] = {}
        """Why an episode does not run any more, of the newest that were lost."""
        self._claimed: dict[tuple[str, str], str] = {}
        """Episode by client and claim key, of the newest claims that had one."""
        self._completed: dict[str, Episode] = {}
        """Completed episodes of the open batch; the journal has them too."""
        self._waiters: deque[_Waiter] = deque()
        self._idle_since: dict[str, float] = {}
        self._clients: dict[str, float] = {}
        self.drops: Counter[str] = Counter()
        """Episodes that will not be trained, by reason, since the last step was reported; and under `SILENT_AGENT`
        rewards."""
        self.refusals = Refusals()
        """Of train episodes, since the last step was reported."""

    # With the engine

    def open(self, loaded: Loaded, kept: KeptEpisodes) -> None:
        """Serve with a freshly booted engine: the journal's completed episodes take their places again."""
        self._loaded = loaded
        self._num_barren = self._num_abandoned = 0
        self._completed = dict(kept.completed)
        loaded.pool.restore(kept.pooled, kept.closed_groups, kept.next_position, kept.loose_groups)

    def close(self, reason: str, error: SwarmEngineError) -> None:
        """The engine is gone: episodes that run are lost, claims that wait are refused, completed ones stay on disk."""
        for episode in list(self._live.values()):
            if episode.ending is None:
                self._lose(episode, reason)
        for waiter in self._waiters:
            if not waiter.served.done():
                waiter.served.set_exception(error)
                waiter.served.exception()
        self._waiters.clear()
        self._completed.clear()
        self._idle_since.clear()
        self._loaded = None

    def take(self, record: BatchRecord) -> tuple[Episode, ...]:
        """The episodes of a batch, which are let go."""
        self._num_abandoned = 0
        return tuple(self._completed.pop(episode_id) for episode_id in record.episode_ids)

    @property
    def num_running(self) -> int:
        """Episodes that run."""
        return len(self._live)

    def clients(self) -> dict[str, int]:
        """Running episodes by active client."""
        now = time.monotonic()
        running = Counter(episode.client_id for episode in self._live.values())
        self._clients = {
            client: seen for client, seen in self._clients.items() if client in running or now - seen < CLIENT_MEMORY_S
        }
        return {client: running[client] for client in self._clients}

    # Claims

    async def claim(self, request: ClaimRequest, wait_s: float) -> LiveEpisode | ClaimReason:
        """Give out an episode, after up to `wait_s` seconds, or say why there is none.

        Raises:
            EngineUnavailableError: the engine is off or failed.
            ConflictError: the group named can't take it, the policy is frozen, or its key is that of another claim.
            EpisodeLostError: the episode that its key was given does not run any more.
            NotFoundError: it asks for a policy that is not served, or routes calls to one that it does not have.
            UnsupportedError: it brings a script, and the backend plays none.
        """
        given = self._try_claim(request)
        if isinstance(given, LiveEpisode):
            self._on_change()
            return given
        if wait_s <= 0:
            return given
        waiter = _Waiter(request, asyncio.get_running_loop().create_future(), given)
        self._waiters.append(waiter)
        self._on_change()
        try:
            await asyncio.wait({waiter.served}, timeout=wait_s)
        except asyncio.CancelledError:
            if waiter.served.done() and waiter.served.exception() is None:
                # Served just when its caller went away: the place is free again at once.
                self.let_go(waiter.served.result())
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if waiter.served.done():
            return waiter.served.result()
        reason = self._gate(request.mode)
        return reason if isinstance(reason, ClaimReason) else waiter.reason

    def let_go(self, episode: LiveEpisode) -> None:
        """A claim's caller went away before it had its answer; another one may have sent the same claim again."""
        episode.num_claims -= 1
        if episode.num_claims == 0 and episode.episode_id in self._live:
            self.abort(episode.episode_id, "client_gone")

    def serve_waiters(self) -> None:
        """Give the claims that wait what there is, first come first served."""
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
            else:
                waiter.reason = given

    def _claimed_before(self, request: ClaimRequest) -> LiveEpisode | None:
        """The episode that a claim with this key was given; None where there was none.

        Raises:
            ConflictError: that claim asked for something else.
            EpisodeLostError: it does not run any more.
        """
        if request.claim_key is None:
            return None
        episode_id = self._claimed.get((request.client_id, request.claim_key))
        if episode_id is None:
            return None
        episode = self.find(episode_id)
        if (episode.seat.task_id, episode.mode) != (request.task_id, request.mode):
            raise ConflictError(
                f"claim_key {shown(request.claim_key)} has an episode of task {shown(episode.seat.task_id)}, "
                f"mode {episode.mode}",
                "take a new key for every episode",
                code="claim_key_taken",
            )
        episode.num_claims += 1
        return episode

    def _try_claim(self, request: ClaimRequest) -> LiveEpisode | ClaimReason:
        if (known := self._claimed_before(request)) is not None:
            return known
        loaded = self._gate(request.mode)
        if isinstance(loaded, ClaimReason):
            return loaded
        policies = loaded.choose(request.policies)
        if request.mode is Mode.TRAIN and not any(policy.ready.trainable for policy in policies.values()):
            names = ", ".join(map(repr, policies))
            what = f"policy {names} is" if len(policies) == 1 else f"policies {names} are"
            raise ConflictError(f"{what} frozen (trainable: false)", "claim with mode eval", code="policy_frozen")
        if strangers := {policy for policy in request.models.values() if policy not in policies}:
            raise NotFoundError(
                f"models routes to {shown(min(strangers))}, which is no policy of this episode",
                f"it has {', '.join(policies)}; route to one of them",
                code="unknown_policy",
            )
        if request.script is not None:
            check_scripts(loaded)
        if len(self._live) >= MAX_LIVE_EPISODES:
            return ClaimReason.FULL
        episode_id = self._keys.new_episode_id()
        seat = loaded.pool.claim(episode_id, request.mode, request.task_id, request.group_id)
        if isinstance(seat, ClaimReason):
            return seat
        return self._admit(loaded, policies, request, episode_id, seat)

    def _admit(
        self,
        loaded: Loaded,
        policies: Mapping[str, ServedPolicy],
        request: ClaimRequest,
        episode_id: str,
        seat: Seat,
    ) -> LiveEpisode:
        now = time.monotonic()
        version = max(loaded.version(policy) for policy in policies.values())
        episode = LiveEpisode(
            episode_id=episode_id,
            api_key=self._keys.key_of(episode_id),
            seat=seat,
            mode=request.mode,
            tags=request.tags,
            client_id=request.client_id,
            agents=request.agents,
            policy_version=version,
            lease_s=request.lease_s or loaded.config.lease_s,
            started_at=now,
            deadline=now + loaded.config.episode_timeout_s,
            policies=policies,
            trackers=LiveEpisode.track(episode_id, policies),
            sampling=request.sampling,
            models=request.models,
            script=None if request.script is None else deque(request.script),
        )
        episode.touch()
        self._live[episode_id] = episode
        self._clients[request.client_id] = now
        if request.claim_key is not None:
            _remember(self._claimed, (request.client_id, request.claim_key), episode_id)
        self._arm(episode)
        extra: dict[str, Any] = {"code_version": request.code_version} if request.code_version else {}
        extra |= _overrides(request)
        self._journal.append(
            EventWrite.of(
                "claim",
                episode_id=episode_id,
                task_id=seat.task_id,
                group_id=seat.group_id,
                index=seat.index,
                mode=request.mode,
                tags=request.tags,
                policy_version=version,
                client_id=request.client_id,
                **extra,
            )
        )
        return episode

    # Groups that nobody works on

    def note_idle_groups(self, loaded: Loaded) -> bool:
        """Remember since when groups are idle; whether some are while claims wait."""
        now = time.monotonic()
        self._idle_since = {group: self._idle_since.get(group, now) for group in loaded.pool.idle_groups()}
        return bool(self._groups_waited_for() and self._idle_since)

    def _groups_waited_for(self) -> int:
        """How many groups the train claims that wait could begin; claims of one task share a group."""
        requests = [waiter.request for waiter in self._waiters if waiter.request.mode is Mode.TRAIN]
        return len({(request.task_id, request.group_id) for request in requests})

    def give_up_idle_groups(self, loaded: Loaded) -> None:
        """Drop groups that have been idle for too long; a client that is gone must not stop the others.

        No more than others wait for: what is left may still be filled. Empty ones go first, then the longest idle.
        """
        now = time.monotonic()
        overdue: list[tuple[bool, float, str]] = []
        for group_id, has_completed in loaded.pool.idle_groups().items():
            grace = loaded.config.lease_s if has_completed else min(EMPTY_GROUP_GRACE_S, loaded.config.lease_s)
            since = self._idle_since.get(group_id, now)
            if now - since >= grace:
                overdue.append((has_completed, since, group_id))
        for _, _, group_id in sorted(overdue)[: self._groups_waited_for()]:
            self._give_up(loaded, group_id)
        self._note_abandoned(loaded)

    def _give_up(self, loaded: Loaded, group_id: str) -> None:
        dropped = loaded.pool.drop_group(group_id)
        self._idle_since.pop(group_id, None)
        writes: list[Write] = [UnpoolWrite(tuple(dropped))]
        for episode_id in dropped:
            del self._completed[episode_id]
            self.drops["group_abandoned"] += 1
            self._num_abandoned += 1
            writes.append(EventWrite.of("drop", episode_id=episode_id, group_id=group_id, reason="group_abandoned"))
        self._journal.append(*writes)

    def _note_abandoned(self, loaded: Loaded) -> None:
        """Clients that play a task less often than a group has places would be busy for ever and train nothing."""
        size = loaded.config.trainer.group_size
        if self._num_abandoned >= BARREN_BATCHES * size * loaded.config.trainer.tasks_per_update:
            self._on_barren(
                f"{self._num_abandoned} judged train episodes were dropped since the last update, for nobody filled "
                f"their groups; play every task {size} times (trainer.group_size), and start again"
            )

    # Leases and losses

    def _arm(self, episode: LiveEpisode) -> None:
        delay = max(0.0, min(episode.lease_until, episode.deadline) - time.monotonic())
        episode.timer = asyncio.get_running_loop().call_later(delay, self._timer_rang, episode)

    def _timer_rang(self, episode: LiveEpisode) -> None:
        if episode.ending is not None or episode.episode_id not in self._live:
            return
        now = time.monotonic()
        if now >= episode.deadline:
            self._lose(episode, "timeout")
        elif now >= episode.lease_until and not episode.is_sampling:
            self._lose(episode, "lease_expired")
        else:
            if now >= episode.lease_until:
                # The model is still at work for it; that is not the client's silence.
                episode.touch()
            self._arm(episode)
            return
        self._on_change()

    def _lose(self, episode: LiveEpisode, reason: str) -> None:
        """Take an episode off without a reward; its place is free again."""
        episode.close_calls()
        self._forget(episode)
        _remember(self._lost, episode.episode_id, reason)
        self._vacate(episode)
        # Aborts carry their caller's words; they are counted as one kind.
        self._count_drop(episode, reason.partition(":")[0])
        refused = asdict(episode.refusals) if episode.refusals else {}
        self._journal.append(
            EventWrite.of(
                "drop", episode_id=episode.episode_id, group_id=episode.seat.group_id, reason=reason, **refused
            )
        )

    def count_refusal(self, episode: LiveEpisode, error: SwarmEngineError) -> None:
        """A call got an error. They may come as fast as the network brings them, so the journal has them with the
        episode's end and the update's report.
        """
        told = error.status, str(error)
        episode.refusals = episode.refusals.and_one(*told)
        if episode.mode is Mode.TRAIN:
            self.refusals = self.refusals.and_one(*told)

    def _count_drop(self, episode: LiveEpisode, reason: str) -> None:
        if episode.mode is Mode.TRAIN:
            self.drops[reason] += 1

    def _vacate(self, episode: LiveEpisode) -> None:
        assert self._loaded is not None
        if episode.mode is Mode.TRAIN:
            self._loaded.pool.free(episode.episode_id)
        else:
            self._loaded.pool.free_loose(episode.mode, episode.seat)

    def _forget(self, episode: LiveEpisode) -> None:
        self._live.pop(episode.episode_id, None)
        self._clients[episode.client_id] = time.monotonic()
        if episode.timer is not None:
            episode.timer.cancel()

    # Ends

    async def end(
        self,
        episode_id: str,
        reward: Reward,
        outcome: Outcome,
        metrics: Mapping[str, float],
        step_rewards: Mapping[str, float],
    ) -> Ended:
        """Record an episode's reward; returns what became of it once it is on disk.

        Raises:
            ConflictError: the episode has ended otherwise.
            InvalidError: an agent that spoke gets no reward, or one that the claim did not name gets one, or a call
                that the episode did not make does.
            UnsupportedError: the algorithm reads no rewards of calls.
            EpisodeLostError, NotFoundError: see `find`.
            JournalLockedError: it waits for the disk still; the same end again waits on.
            JournalError: it can't be written.
        """
        episode = self._live.get(episode_id)
        if episode is None:
            row = await self.ended_row(episode_id)
            with self._journal.reading("episodes", episode_id):
                agents = (*row.rewards, *Ending.unnamed_in(row.request))
            rewards = _by_agent(reward, agents or (DEFAULT_AGENT,))
            ending = Ending(rewards, outcome, metrics, step_rewards, _without(agents, rewards))
            _check_same_end(episode_id, row.request, ending.as_text())
            record = await asyncio.to_thread(record_of, self._journal, row)
            return Ended(rewards, None if row.is_pooled else _drop_reason(record.episode), record.refusals)
        rewards = _by_agent(reward, episode.agents or episode.speakers or (DEFAULT_AGENT,))
        if silent := [agent for agent in episode.speakers if agent not in rewards]:
            raise InvalidError(
                f"reward names {', '.join(map(repr, rewards)) or 'nobody'}, but {silent[0]!r} made calls too",
                "give every agent that spoke a reward, or null where it can't be judged",
                param="reward",
            )
        if episode.agents and (strangers := [agent for agent in rewards if agent not in episode.agents]):
            raise InvalidError(
                f"reward names {strangers[0]!r}, which is not in this episode",
                f"its claim named {', '.join(episode.agents)}",
                param="reward",
            )
        ending = Ending(rewards, outcome, metrics, step_rewards, _without(episode.agents, rewards))
        if episode.ending is not None:
            _check_same_end(episode_id, episode.ending, ending.as_text())
        else:
            self._check_step_rewards(episode, step_rewards)
            self._begin_end(episode, ending)
        assert episode.ended is not None
        drop_reason = await self._journal.until_written(episode.ended)
        return Ended(rewards, drop_reason, episode.refusals)

    def _check_step_rewards(self, episode: LiveEpisode, step_rewards: Mapping[str, float]) -> None:
        if not step_rewards:
            return
        assert self._loaded is not None
        algorithm = self._loaded.config.trainer.algorithm
        if algorithm is Algorithm.SFT:
            raise UnsupportedError(
                f"algorithm {algorithm} reads no step_rewards", "leave them out", param="step_rewards"
            )
        made = {call.call_id for call in episode.calls()}
        if unknown := [call_id for call_id in step_rewards if call_id not in made]:
            raise InvalidError(
                f"step_rewards names {shown(unknown[0])}, which is no answered call of this episode",
                "its calls' ids came with their replies as x-call-id, and stand behind msg_ or resp_ in the id of a "
                "message or a response",
                param="step_rewards",
            )

    def _begin_end(self, episode: LiveEpisode, ending: Ending) -> None:
        """Send an end to the journal. What follows from it must not depend on its caller still being there."""
        assert self._loaded is not None
        episode.close_calls()
        record = episode.record(ending)
        drop = _drop_reason(record.episode)
        request = ending.as_text()
        is_pooled = episode.mode is Mode.TRAIN and drop is None
        writes: list[Write] = [_row(episode, record, request, is_pooled), _ended_event(episode, record)]
        if drop is not None:
            group_id = episode.seat.group_id
            writes.append(EventWrite.of("drop", episode_id=episode.episode_id, group_id=group_id, reason=drop))
        episode.ending = request
        settling = self._settle_end(episode, self._loaded, record.episode, drop, self._journal.append(*writes))
        episode.ended = asyncio.create_task(settling, name="end")

    async def _settle_end(
        self,
        episode: LiveEpisode,
        loaded: Loaded,
        ended: Episode,
        drop: DropReason | None,
        written: asyncio.Future[None],
    ) -> DropReason | None:
        """Once its end is on disk, an episode has its place in the batch or frees it; returns `drop`."""
        try:
            await written
        except JournalError:
            # The engine has failed of it and its pool is gone; nothing holds a place for this episode any more.
            episode.ending = None
            self._forget(episode)
            _remember(self._lost, episode.episode_id, "its end could not be written")
            raise
        self._forget(episode)
        if self._loaded is not loaded:
            # The engine went down meanwhile. The episode is on disk, and the next start finds it there.
            return drop
        if drop is not None:
            self._vacate(episode)
            self._count_drop(episode, drop)
        elif episode.mode is Mode.TRAIN:
            self._num_barren = 0
            self._completed[episode.episode_id] = ended
            judged = {agent for agent, reward in ended.rewards.items() if reward is not None}
            if silent := judged.difference(episode.speakers):
                self.drops[SILENT_AGENT] += len(silent)
            loaded.pool.complete(episode.episode_id, ended.rewards)
        self._on_change()
        if episode.mode is Mode.TRAIN and drop is not None:
            self._note_barren(loaded, drop, episode.refusals)
        return drop

    def _note_barren(self, loaded: Loaded, drop: DropReason, refusals: Refusals) -> None:
        """Without this, a reward function that is broken for every episode, or an agent that asks another model, looks
        like a run that is merely slow."""
        self._num_barren += 1
        trainer = loaded.config.trainer
        if self._num_barren >= BARREN_BATCHES * trainer.group_size * trainer.tasks_per_update:
            refused = f" ({refusals.num_refused} of its calls were refused: {refusals.last_refusal})"
            self._on_barren(
                f"the last {self._num_barren} train episodes ended without a reward or without a call, the last one "
                f"as {drop}{refused if refusals else ''}; see their events, mend the environment, the judge or the "
                "agent, and start again"
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
        self._on_change()

    def heartbeat(self, episode_id: str) -> LiveEpisode:
        """Renew an episode's lease.

        Raises:
            EpisodeLostError, NotFoundError: it does not run.
        """
        episode = self.find(episode_id)
        episode.touch()
        return episode

    # Looking

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

    async def ended_row(self, episode_id: str) -> EpisodeRow:
        """A completed episode of the journal.

        Raises:
            EpisodeLostError, NotFoundError: there is none.
        """
        row = await self._journal.episode(episode_id)
        if row is None:
            raise self.gone(episode_id)
        return row

    async def record(self, episode_id: str) -> EpisodeRecord:
        """An episode's calls so far, running or ended.

        Raises:
            EpisodeLostError, NotFoundError: there is none.
        """
        episode = self._live.get(episode_id)
        if episode is not None:
            return episode.record(Ending({}, Outcome.SUCCESS, {}, {}))
        row = await self.ended_row(episode_id)
        return record_of(self._journal, row)

    def _request_of(self, row: EpisodeRow) -> dict[str, Any]:
        with self._journal.reading("episodes", row.episode_id):
            return dict(json.loads(row.request))

    async def describe(self, episode_id: str) -> dict[str, Any]:
        """An episode, running or ended, without its tokens.

        Raises:
            EpisodeLostError, NotFoundError: there is none.
        """
        episode = self._live.get(episode_id)
        if episode is None:
            row = await self.ended_row(episode_id)
            record = await asyncio.to_thread(record_of, self._journal, row)
            return {
                "episode_id": episode_id,
                "status": "ended",
                "task_id": row.task_id,
                "group_id": row.group_id,
                "index": row.place,
                "mode": row.mode,
                **self._request_of(row),
                **asdict(record.refusals),
                **_overrides(record),
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
            "num_calls": len(episode.calls()),
            "num_running_calls": episode.num_running,
            "seconds": round(time.monotonic() - episode.started_at, 3),
            "lease_s": episode.lease_s,
            **asdict(episode.refusals),
            **_overrides(episode),
        }


def _remember(newest: dict[Key, str], key: Key, value: str) -> None:
    """Keep a value with those that came last."""
    newest[key] = value
    while len(newest) > NUM_REMEMBERED:
        newest.pop(next(iter(newest)))


def _overrides(of: ClaimRequest | LiveEpisode | EpisodeRecord) -> dict[str, Any]:
    """What a claim decides for all calls of its episode, where it does."""
    sampling = {} if of.sampling is None else {"sampling": asdict(of.sampling)}
    return sampling | ({"models": dict(of.models)} if of.models else {})


def _by_agent(reward: Reward, agents: Sequence[str]) -> dict[str, float | None]:
    """A bare number goes to every agent."""
    if isinstance(reward, Mapping):
        return dict(reward)
    return dict.fromkeys(agents, reward)


def _without(agents: Sequence[str], rewards: Mapping[str, float | None]) -> tuple[str, ...]:
    """The agents that have no reward, not even null."""
    return tuple(agent for agent in agents if agent not in rewards)


def _drop_reason(ended: Episode) -> DropReason | None:
    """Why an ended episode takes no place in a batch; None where it does."""
    if ended.outcome is Outcome.ENV_ERROR:
        return DropReason.ENV_ERROR
    if not is_judged(ended.rewards):
        return DropReason.NULL_REWARD
    return DropReason.NO_CALLS if ended.mode is Mode.TRAIN and not ended.calls else None


def _check_same_end(episode_id: str, before: str, now: str) -> None:
    if before != now:
        raise ConflictError(
            f"episode {episode_id!r} has ended with {before}, not with {now}",
            "an episode ends once; claim another for another attempt",
            code="ended_differently",
        )


def _row(episode: LiveEpisode, record: EpisodeRecord, request: str, is_pooled: bool) -> EpisodeRow:
    seat = episode.seat
    return EpisodeRow(
        episode_id=episode.episode_id,
        mode=episode.mode,
        task_id=seat.task_id,
        group_id=seat.group_id,
        place=seat.index,
        attempt=seat.attempt,
        position=seat.position,
        is_pooled=is_pooled,
        rewards=record.episode.rewards,
        request=request,
        record=episode_records.dump_json(record),
    )


def _ended_event(episode: LiveEpisode, record: EpisodeRecord) -> EventWrite:
    ended = record.episode
    frozen = _frozen_agents(episode, ended)
    return EventWrite.of(
        "episode",
        episode_id=ended.episode_id,
        task_id=ended.task_id,
        group_id=ended.group_id,
        index=ended.index,
        mode=ended.mode,
        tags=ended.tags,
        rewards=ended.rewards,
        outcome=ended.outcome,
        metrics=ended.metrics,
        policy_version=ended.policy_version,
        num_calls=len(ended.calls),
        num_prompt_tokens=sum(len(call.prompt_ids) for call in ended.calls),
        num_sampled_tokens=sum(len(call.completion_ids) for call in ended.calls),
        seconds=round(time.monotonic() - episode.started_at, 6),
        **asdict(record.refusals),
        **({"frozen_agents": frozen} if frozen else {}),
    )


def _frozen_agents(episode: LiveEpisode, ended: Episode) -> list[str]:
    """Agents that spoke through frozen policies alone, where others are trained: their rewards say nothing of these."""
    trained = {name for name, policy in episode.policies.items() if policy.ready.trainable}
    if not trained:
        return []
    speaks_trained = {call.agent for call in ended.calls if call.policy in trained}
    return [agent for agent in dict.fromkeys(call.agent for call in ended.calls) if agent not in speaks_trained]
