"""What a swarm's events add up to."""

from __future__ import annotations

from swarm_engine.client import Task
from swarm_engine.config import EngineConfig, TrainerConfig
from swarm_engine.types import EngineState
from vibe.live import Progress, is_same

TASKS = [Task("a"), Task("b")]


def episode(number: int, task: str, *, reward: float | None = 1.0, outcome: str = "success", mode: str = "train"):  # type: ignore[no-untyped-def]
    return (
        "episode",
        {"episode_id": f"e{number}", "task_id": task, "rewards": {"main": reward}, "outcome": outcome, "mode": mode},
    )


def after(*events: tuple[str, dict[str, object]]) -> Progress:
    progress = Progress()
    for seq, (kind, payload) in enumerate(events, 1):
        progress.apply(seq, kind, payload)
    return progress


def test_an_engine_that_names_what_the_config_leaves_open_is_the_same() -> None:
    named = TrainerConfig(learning_rate=1e-3, warmup_updates=0)
    served = EngineConfig(trainer=named).model_dump(mode="json")
    assert is_same(served, EngineConfig())
    assert is_same(served, EngineConfig(trainer=named))
    assert not is_same(served, EngineConfig(trainer=TrainerConfig(learning_rate=1e-2)))
    assert not is_same(served, EngineConfig(seed=1))
    assert not is_same(None, EngineConfig())


def test_a_new_batch_lacks_every_episode() -> None:
    assert after().missing(TASKS, 3) == {"a": 3, "b": 3}


def test_judged_train_episodes_fill_it() -> None:
    progress = after(
        episode(1, "a"),
        episode(2, "a", reward=None),
        episode(3, "b", outcome="env_error"),
        episode(4, "b", mode="eval"),
        episode(5, "b"),
    )
    assert progress.missing(TASKS, 3) == {"a": 2, "b": 2}


def test_an_episode_whose_group_was_given_up_has_to_be_played_again() -> None:
    progress = after(episode(1, "a"), ("drop", {"episode_id": "e1", "group_id": "a#0", "reason": "group_abandoned"}))
    assert progress.missing(TASKS, 1) == {"a": 1, "b": 1}


def test_a_batch_takes_what_was_waiting() -> None:
    progress = after(episode(1, "a"), episode(2, "b"), ("batch", {"step": 1, "episode_ids": ["e1", "e2"], "seed": 5}))
    assert progress.last_batch == 1
    assert progress.missing(TASKS, 1) == {"a": 1, "b": 1}
    assert 1 not in progress.steps


def test_an_event_that_comes_twice_counts_once() -> None:
    progress = after(episode(1, "a"))
    progress.apply(1, *episode(1, "b"))
    assert progress.missing(TASKS, 1) == {"b": 1}


def test_the_state_is_the_last_one_told() -> None:
    progress = after(
        ("state", {"from": "OFFLINE", "to": "BOOTING", "cause": "start"}),
        ("state", {"from": "BOOTING", "to": "FAILED", "cause": "no such model"}),
    )
    assert progress.state is EngineState.FAILED
    assert progress.cause == "no such model"
