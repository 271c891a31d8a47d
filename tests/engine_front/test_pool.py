"""Claims, groups and the quota: pure, so worked out by hand and by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_engine.errors import ConflictError
from swarm_engine.server.pool import Pool, PooledEpisode, Seat
from swarm_engine.types import ClaimReason, Mode

TRAIN = Mode.TRAIN


def claim(pool: Pool, episode: str, task: str, group: str | None = None) -> Seat:
    seat = pool.claim(episode, TRAIN, task, group)
    assert isinstance(seat, Seat), seat
    return seat


def test_claims_of_a_task_fill_its_group_and_the_next_task_opens_another() -> None:
    pool = Pool(group_size=2, tasks_per_update=2)
    seats = [claim(pool, f"e{number}", task) for number, task in enumerate(["a", "b", "a", "b"])]
    assert [(seat.group_id, seat.index, seat.attempt) for seat in seats] == [
        ("a#0", 0, 0),
        ("b#0", 0, 0),
        ("a#0", 1, 0),
        ("b#0", 1, 0),
    ]


def test_the_batch_is_in_order_of_claims_whoever_finishes_first() -> None:
    pool = Pool(group_size=2, tasks_per_update=2)
    for number, task in enumerate(["a", "b", "a", "b"]):
        claim(pool, f"e{number}", task)
    for episode in ("e3", "e2", "e0"):
        pool.complete(episode, {"main": 1.0})
        assert not pool.is_ready
    pool.complete("e1", {"main": 0.0})
    assert pool.is_ready
    assert pool.batch() == ("e0", "e2", "e1", "e3")


def test_a_claim_beyond_the_batch_waits_for_the_quota_until_the_batch_is_closed() -> None:
    pool = Pool(group_size=2, tasks_per_update=1)
    claim(pool, "e0", "a")
    assert pool.claim("x", TRAIN, "b") is ClaimReason.QUOTA
    claim(pool, "e1", "a")
    assert pool.claim("x", TRAIN, "a") is ClaimReason.QUOTA
    for episode in ("e0", "e1"):
        pool.complete(episode, {"main": 1.0})
    pool.close()
    assert claim(pool, "e2", "a").group_id == "a#1"


def test_a_task_can_have_two_groups_in_one_batch() -> None:
    pool = Pool(group_size=2, tasks_per_update=2)
    assert [claim(pool, f"e{n}", "a").group_id for n in range(4)] == ["a#0", "a#0", "a#1", "a#1"]


def test_a_dropped_episode_frees_its_place_for_another_attempt() -> None:
    pool = Pool(group_size=2, tasks_per_update=1)
    claim(pool, "e0", "a")
    claim(pool, "e1", "a")
    assert pool.is_claimed
    pool.free("e0")
    assert not pool.is_claimed
    again = claim(pool, "e2", "a")
    assert (again.index, again.attempt) == (0, 1)
    pool.free("e2")
    assert claim(pool, "e3", "a").attempt == 2


def test_a_named_group_is_joined_by_name_and_refused_for_another_task_and_after_its_batch() -> None:
    pool = Pool(group_size=2, tasks_per_update=1)
    assert claim(pool, "e0", "a", "mine").group_id == "mine"
    with pytest.raises(ConflictError, match="belongs to task 'a', not to 'b'"):
        pool.claim("x", TRAIN, "b", "mine")
    claim(pool, "e1", "a", "mine")
    for episode in ("e0", "e1"):
        pool.complete(episode, {"main": 1.0})
    pool.close()
    with pytest.raises(ConflictError, match="a batch has taken it"):
        pool.claim("x", TRAIN, "a", "mine")


def test_evaluation_episodes_take_no_place_of_the_batch_and_number_themselves() -> None:
    pool = Pool(group_size=2, tasks_per_update=1)
    seats = [pool.claim(f"v{n}", Mode.EVAL, "a") for n in range(3)]
    assert [seat.index for seat in seats if isinstance(seat, Seat)] == [0, 1, 2]
    assert pool.counts().episodes == 0
    assert isinstance(seats[1], Seat)
    pool.free_loose(Mode.EVAL, seats[1])
    again = pool.claim("v3", Mode.EVAL, "a")
    assert isinstance(again, Seat)
    assert (again.index, again.attempt) == (1, 1)


def test_a_group_is_informative_when_some_agents_rewards_differ() -> None:
    pool = Pool(group_size=2, tasks_per_update=3)
    for number in range(6):
        claim(pool, f"e{number}", "abc"[number // 2])
    pool.complete("e0", {"x": 1.0, "y": 0.0})
    pool.complete("e1", {"x": 0.0, "y": 0.0})
    pool.complete("e2", {"x": 1.0})
    pool.complete("e3", {"x": 1.0})
    pool.complete("e4", {"x": 0.0})
    counts = pool.counts()
    assert (counts.episodes, counts.tasks, counts.informative_tasks) == (5, 2, 1)


def test_an_idle_group_can_be_given_up_and_its_name_is_not_used_again() -> None:
    pool = Pool(group_size=2, tasks_per_update=2)
    claim(pool, "e0", "a")
    claim(pool, "e1", "b")
    pool.complete("e0", {"main": 1.0})
    assert pool.idle_groups() == {"a#0": True}
    assert pool.drop_group("a#0") == ["e0"]
    assert claim(pool, "e2", "a").group_id == "a#1"


def test_a_restored_pool_goes_on_where_the_journal_ended() -> None:
    pool = Pool(group_size=2, tasks_per_update=2)
    pool.restore(
        [
            PooledEpisode("e7", Seat("b#0", "b", 1, 2, 6), {"main": 1.0}),
            PooledEpisode("e5", Seat("a#3", "a", 0, 0, 5), {"main": 0.0}),
        ],
        closed={"a#0": "a", "a#1": "a", "a#2": "a"},
        next_position=7,
        loose={(Mode.EVAL, "a#0"): ("a", 4)},
    )
    assert claim(pool, "n0", "b").index == 0
    assert claim(pool, "n1", "a").index == 1
    assert pool.claim("n2", TRAIN, "c") is ClaimReason.QUOTA
    pool.complete("n1", {"main": 1.0})
    pool.complete("n0", {"main": 1.0})
    assert pool.batch() == ("e5", "n1", "n0", "e7")
    evaluated = pool.claim("v", Mode.EVAL, "a")
    assert isinstance(evaluated, Seat)
    assert evaluated.index == 4


def test_claims_ahead_fill_later_batches_and_each_is_the_first_groups_in_order_of_claims() -> None:
    pool = Pool(group_size=2, tasks_per_update=1)
    pool.num_batches = 3
    for number, task in enumerate(["a", "b", "c", "c", "b"]):
        claim(pool, f"e{number}", task)
    assert pool.claim("x", TRAIN, "d") is ClaimReason.QUOTA
    for episode in ("e1", "e2", "e3", "e4"):
        pool.complete(episode, {"main": 1.0})
        assert not pool.is_ready, "the first group is not full yet, so what is complete waits"
    assert (pool.counts().episodes, pool.counts().tasks) == (4, 2)
    claim(pool, "e5", "a")
    assert pool.is_claimed
    pool.complete("e0", {"main": 1.0})
    pool.complete("e5", {"main": 1.0})
    batches = []
    while pool.is_ready:
        batches.append(pool.batch())
        pool.close()
    assert batches == [("e0", "e5"), ("e1", "e4"), ("e2", "e3")]


def test_a_closed_batch_leaves_room_for_the_groups_of_one_more() -> None:
    pool = Pool(group_size=2, tasks_per_update=1)
    pool.num_batches = 2
    for number in range(4):
        claim(pool, f"e{number}", "ab"[number // 2])
    pool.complete("e0", {"main": 1.0})
    pool.complete("e1", {"main": 0.0})
    pool.close()
    assert claim(pool, "e4", "c").group_id == "c#0"
    pool.num_batches = 1
    assert pool.claim("x", TRAIN, "d") is ClaimReason.QUOTA


def test_a_group_that_is_given_up_moves_the_later_ones_forward() -> None:
    pool = Pool(group_size=2, tasks_per_update=1)
    pool.num_batches = 2
    for number in range(3):
        claim(pool, f"e{number}", "abb"[number])
    for episode in ("e0", "e1", "e2"):
        pool.complete(episode, {"main": 1.0})
    assert not pool.is_ready
    assert pool.drop_group("a#0") == ["e0"]
    assert pool.batch() == ("e1", "e2")


@given(
    group_size=st.integers(2, 4),
    tasks_per_update=st.integers(1, 3),
    num_batches=st.integers(1, 3),
    moves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=120),
)
def test_whatever_happens_every_batch_is_full_and_no_episode_is_in_two(
    group_size: int, tasks_per_update: int, num_batches: int, moves: list[tuple[int, int]]
) -> None:
    pool = Pool(group_size, tasks_per_update)
    pool.num_batches = num_batches
    running: list[tuple[str, Seat]] = []
    claimed: dict[str, Seat] = {}
    batches: list[tuple[str, ...]] = []
    for number, (kind, pick) in enumerate(moves):
        if kind == 0:
            seat = pool.claim(f"e{number}", TRAIN, f"task{pick}")
            if isinstance(seat, Seat):
                running.append((f"e{number}", seat))
                claimed[f"e{number}"] = seat
        elif running:
            episode, _ = running.pop(pick % len(running))
            if kind == 1:
                pool.complete(episode, {"main": 1.0})
            else:
                pool.free(episode)
        assert len(running) <= group_size * tasks_per_update * num_batches
        taken = {(seat.group_id, seat.index) for _, seat in running}
        assert len(taken) == len(running), "two running episodes hold one place"
        if pool.is_ready:
            assert not running or num_batches > 1
            batches.append(pool.batch())
            pool.close()
    trained = [episode for batch in batches for episode in batch]
    assert len(set(trained)) == len(trained)
    for batch in batches:
        assert len(batch) == group_size * tasks_per_update
        for start in range(0, len(batch), group_size):
            seats = [claimed[episode] for episode in batch[start : start + group_size]]
            assert len({seat.group_id for seat in seats}) == 1
            assert [seat.index for seat in seats] == list(range(group_size))
    firsts = [claimed[batch[start]].position for batch in batches for start in range(0, len(batch), group_size)]
    assert firsts == sorted(firsts)
