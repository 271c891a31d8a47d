"""Which episode fills which place of the batch: claims, groups, attempts and the quota, without clock or socket.

While the engine collects for one update, exactly `tasks_per_update` groups of `group_size` places are given out, in the
order of their claims. An episode that ends without a reward frees its place; the next claim takes it as another attempt
with another random stream. When every place holds a completed episode, the batch is the episodes in order of places,
so who was faster changes nothing. docs/decisions/0002-quota.md argues why.

With `num_batches` above 1 the groups of later batches are given out as well, and a batch is the first groups in order
of their claims all the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from swarm_engine.errors import ConflictError
from swarm_engine.types import ClaimReason, Mode


@dataclass(frozen=True, slots=True)
class Seat:
    """A place that an episode holds."""

    group_id: str
    task_id: str
    index: int
    attempt: int
    """How many episodes held this place since the engine's start and were dropped."""
    position: int
    """Number of the group among all groups of this run, in claim order; 0 outside training."""


class PlaceState(StrEnum):
    """What a place of a group holds."""

    FREE = "free"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True)
class Place:
    """One of a group's places."""

    state: PlaceState = PlaceState.FREE
    episode_id: str | None = None
    attempt: int = 0
    rewards: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class Group:
    """The episodes of one task that are measured against each other."""

    group_id: str
    task_id: str
    position: int
    places: list[Place]

    @property
    def is_complete(self) -> bool:
        """Whether every place holds a completed episode."""
        return all(place.state is PlaceState.DONE for place in self.places)

    @property
    def is_idle(self) -> bool:
        """Whether places are free and nobody works on the others."""
        states = {place.state for place in self.places}
        return PlaceState.FREE in states and PlaceState.RUNNING not in states

    @property
    def is_informative(self) -> bool:
        """Whether it is complete and some agent's rewards differ."""
        if not self.is_complete:
            return False
        by_agent: dict[str, set[float]] = {}
        for place in self.places:
            for agent, reward in place.rewards.items():
                if reward is not None:
                    by_agent.setdefault(agent, set()).add(reward)
        return any(len(rewards) > 1 for rewards in by_agent.values())

    def first_free(self) -> int | None:
        """The lowest free place, or None where all are taken."""
        return next((index for index, place in enumerate(self.places) if place.state is PlaceState.FREE), None)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """What the pool holds that no batch has taken."""

    episodes: int
    """Completed ones."""
    tasks: int
    """Complete groups."""
    informative_tasks: int
    """Complete groups whose rewards are not all the same."""


@dataclass(frozen=True, slots=True)
class PooledEpisode:
    """A completed episode of the journal that no batch has taken yet."""

    episode_id: str
    seat: Seat
    rewards: Mapping[str, float | None]


@dataclass(slots=True)
class LooseGroup:
    """A group outside training: it never fills up."""

    task_id: str
    num_given: int = 0
    freed: list[tuple[int, int]] = field(default_factory=list)
    """(index, attempt) of places whose episode was dropped."""


class Pool:
    """The open groups of the next batches, and the groups outside training."""

    def __init__(self, group_size: int, tasks_per_update: int) -> None:
        self.group_size = group_size
        self.tasks_per_update = tasks_per_update
        self.num_batches = 1
        """Batches whose groups may be open at once."""
        self._groups: dict[str, Group] = {}
        """In order of positions."""
        self._num_groups_of: dict[str, int] = {}
        self._closed: dict[str, str] = {}
        self._next_position = 0
        self._seats: dict[str, Seat] = {}
        self._loose: dict[tuple[Mode, str], LooseGroup] = {}

    def claim(self, episode_id: str, mode: Mode, task_id: str, group_id: str | None = None) -> Seat | ClaimReason:
        """Give an episode a place, or say why there is none now.

        Raises:
            ConflictError: the client names a group of another task, or one that a batch has taken.
        """
        seat = (
            self._claim_place(episode_id, task_id, group_id)
            if mode is Mode.TRAIN
            else self._claim_loose(mode, task_id, group_id)
        )
        if isinstance(seat, Seat) and mode is Mode.TRAIN:
            self._seats[episode_id] = seat
        return seat

    def _claim_place(self, episode_id: str, task_id: str, group_id: str | None) -> Seat | ClaimReason:
        group = self._group_for(task_id, group_id)
        if group is None:
            if len(self._groups) >= self.tasks_per_update * self.num_batches:
                return ClaimReason.QUOTA
            group = self._open(task_id, group_id)
        index = group.first_free()
        if index is None:
            return ClaimReason.QUOTA
        place = group.places[index]
        place.state = PlaceState.RUNNING
        place.episode_id = episode_id
        return Seat(group.group_id, task_id, index, place.attempt, group.position)

    def _group_for(self, task_id: str, group_id: str | None) -> Group | None:
        """The open group a claim joins, or None where it has to open one."""
        if group_id is None:
            # Without a name, a claim takes the first open group of its task that has a place.
            mine = [group for group in self._groups.values() if group.task_id == task_id]
            return next((group for group in mine if group.first_free() is not None), None)
        if (owner := self._closed.get(group_id)) is not None:
            raise ConflictError(
                f"group {group_id!r} of task {owner!r} is closed: a batch has taken it",
                "claim without a group_id, or name a new group",
                code="group_closed",
            )
        group = self._groups.get(group_id)
        if group is not None and group.task_id != task_id:
            raise ConflictError(
                f"group {group_id!r} belongs to task {group.task_id!r}, not to {task_id!r}",
                "a group holds the episodes of one task; name another",
                code="group_of_other_task",
            )
        return group

    def _open(self, task_id: str, group_id: str | None) -> Group:
        ordinal = self._num_groups_of.get(task_id, 0)
        while group_id is None:
            name = f"{task_id}#{ordinal}"
            if name not in self._groups and name not in self._closed:
                group_id = name
            else:
                ordinal += 1
        self._num_groups_of[task_id] = ordinal + 1
        group = Group(group_id, task_id, self._next_position, [Place() for _ in range(self.group_size)])
        self._next_position += 1
        self._groups[group_id] = group
        return group

    def _claim_loose(self, mode: Mode, task_id: str, group_id: str | None) -> Seat:
        name = group_id if group_id is not None else f"{task_id}#0"
        group = self._loose.setdefault((mode, name), LooseGroup(task_id))
        if group.task_id != task_id:
            raise ConflictError(
                f"group {name!r} belongs to task {group.task_id!r}, not to {task_id!r}",
                "a group holds the episodes of one task; name another",
                code="group_of_other_task",
            )
        if group.freed:
            index, attempt = group.freed.pop(0)
        else:
            index, attempt = group.num_given, 0
            group.num_given += 1
        return Seat(name, task_id, index, attempt, 0)

    def complete(self, episode_id: str, rewards: Mapping[str, float | None]) -> None:
        """An episode has its reward: it keeps its place until the batch is taken."""
        seat = self._seats.pop(episode_id)
        place = self._groups[seat.group_id].places[seat.index]
        place.state = PlaceState.DONE
        place.rewards = rewards

    def free(self, episode_id: str) -> None:
        """An episode was dropped: its place goes to the next claim, as another attempt."""
        seat = self._seats.pop(episode_id)
        self._groups[seat.group_id].places[seat.index] = Place(attempt=seat.attempt + 1)

    def free_loose(self, mode: Mode, seat: Seat) -> None:
        """As `free`, for an episode outside training."""
        group = self._loose[(mode, seat.group_id)]
        group.freed.append((seat.index, seat.attempt + 1))
        group.freed.sort()

    def idle_groups(self) -> dict[str, bool]:
        """Groups with free places that nobody works on, and whether they hold completed episodes."""
        return {
            group.group_id: any(place.state is PlaceState.DONE for place in group.places)
            for group in self._groups.values()
            if group.is_idle
        }

    def drop_group(self, group_id: str) -> list[str]:
        """Take an idle group out of the batch; returns its completed episodes, which will not be trained."""
        group = self._groups.pop(group_id)
        assert group.is_idle, f"group {group_id} still has running episodes"
        dropped = [place.episode_id for place in group.places if place.episode_id is not None]
        if dropped:
            self._closed[group_id] = group.task_id
        return dropped

    @property
    def _next(self) -> list[Group]:
        """The groups of the next batch, in claim order; fewer than a batch has where no more are open."""
        return list(islice(self._groups.values(), self.tasks_per_update))

    @property
    def is_claimed(self) -> bool:
        """Whether every place of the next batch is taken."""
        return len(groups := self._next) == self.tasks_per_update and all(
            group.first_free() is None for group in groups
        )

    @property
    def is_ready(self) -> bool:
        """Whether every place of the next batch holds a completed episode."""
        return len(groups := self._next) == self.tasks_per_update and all(group.is_complete for group in groups)

    def counts(self) -> PoolCounts:
        """What the pool holds that no batch has taken."""
        groups = self._groups.values()
        return PoolCounts(
            episodes=sum(place.state is PlaceState.DONE for group in groups for place in group.places),
            tasks=sum(group.is_complete for group in groups),
            informative_tasks=sum(group.is_informative for group in groups),
        )

    def batch(self) -> tuple[str, ...]:
        """The episodes of a ready batch, in order of places."""
        assert self.is_ready, "a batch is taken only when every place is done"
        return tuple(place.episode_id or "" for group in self._next for place in group.places)

    def close(self) -> None:
        """The ready batch is in the journal: its groups are closed, and those of another may open."""
        for group in self._next:
            self._closed[group.group_id] = group.task_id
            del self._groups[group.group_id]

    def restore(
        self,
        pooled: Collection[PooledEpisode],
        closed: Mapping[str, str],
        next_position: int,
        loose: Mapping[tuple[Mode, str], tuple[str, int]],
    ) -> None:
        """Take over what the journal knows.

        Args:
            pooled: completed train episodes that no batch has taken.
            closed: task by group, for every group of a batch.
            next_position: one past the highest group position in the journal.
            loose: task and number of places given, by mode and group, outside training.
        """
        self._closed.update(closed)
        self._next_position = next_position
        for (mode, name), (task_id, num_given) in loose.items():
            self._loose[(mode, name)] = LooseGroup(task_id, num_given)
        for episode in sorted(pooled, key=lambda one: (one.seat.position, one.seat.index)):
            seat = episode.seat
            group = self._groups.setdefault(
                seat.group_id,
                Group(seat.group_id, seat.task_id, seat.position, [Place() for _ in range(self.group_size)]),
            )
            group.places[seat.index] = Place(PlaceState.DONE, episode.episode_id, seat.attempt, episode.rewards)


def is_judged(rewards: Mapping[str, float | None]) -> bool:
    """Whether any agent got a reward."""
    return any(reward is not None and math.isfinite(reward) for reward in rewards.values())
