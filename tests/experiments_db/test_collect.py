from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlmodel import col, select

from experiments_db import collect as collect_module
from experiments_db.collect import Collector
from experiments_db.derive import Event, fault_of, json_safe, mark_of, number_of, score_of, store
from experiments_db.engine import Database, open_database
from experiments_db.errors import CollectorError, NotFoundError, UnavailableError
from experiments_db.models import (
    Artifact,
    EngineEvent,
    EpisodeRow,
    EvalItem,
    EvalRun,
    Fault,
    HealthWarning,
    MetricPoint,
    ValueMark,
)
from experiments_db.writes import create_single_run

EVAL = {"split": "heldout", "temperature": "1", "label": "during"}


def episode(number: int, *, mode: str = "train", reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "episode_id": f"e{number}",
        "task_id": f"task-{number}",
        "group_id": f"task-{number}#0",
        "index": 0,
        "mode": mode,
        "tags": EVAL if mode == "eval" else {},
        "rewards": {"main": reward},
        "outcome": "success",
        "metrics": {"turns": 3.0},
        "policy_version": 0,
        "num_calls": 3,
        "num_prompt_tokens": 30,
        "num_sampled_tokens": 6,
        "seconds": 0.5,
        **changes,
    }


def claim(number: int, **changes: Any) -> dict[str, Any]:
    whole = episode(number, **changes)
    return {name: whole[name] for name in ("episode_id", "task_id", "group_id", "index", "mode")} | {"client_id": "c"}


def collect(swarm: Any, database: Database, experiment_id: str) -> None:
    """Collect everything the server has told, and stop."""
    collector = Collector(swarm.url, swarm.token, database.url, experiment_id)
    with collector.run_in_thread():
        collector.drain(len(swarm.events), timeout_s=60)


def points(database: Database, name: str) -> list[tuple[int, int, float | None]]:
    with database.read() as session:
        rows = session.exec(select(MetricPoint).where(MetricPoint.name == name).order_by(MetricPoint.id)).all()
    return [(row.segment, row.step, row.value) for row in rows]


def everything(database: Database) -> dict[str, Any]:
    """What the rows say, without their ids."""
    with database.read() as session:
        items = session.exec(select(EvalItem, EvalRun).join(EvalRun)).all()
        return {
            "events": [(e.seq, e.kind) for e in session.exec(select(EngineEvent).order_by(EngineEvent.seq)).all()],
            "points": sorted((p.name, p.segment, p.step, p.value) for p in session.exec(select(MetricPoint)).all()),
            "episodes": sorted(
                (e.episode_id, e.outcome or "", e.trained_step or 0, e.drop_reason or "")
                for e in session.exec(select(EpisodeRow)).all()
            ),
            "items": sorted((run.step, run.label, item.item_id, item.sample, item.score or 0) for item, run in items),
            "counts": sorted(
                (r.step, r.label, r.n_attempted, r.n_valid, r.n_policy_fault, r.n_env_fault)
                for r in session.exec(select(EvalRun)).all()
            ),
            "warnings": sorted((w.kind, w.segment, w.step) for w in session.exec(select(HealthWarning)).all()),
            "artifacts": sorted(a.path for a in session.exec(select(Artifact)).all()),
        }


def tell_a_training(swarm: Any, steps: int = 6, evaluated: int = 2) -> None:
    """Two episodes a step, an evaluation of four games every `evaluated` steps, some drops, a checkpoint."""
    number = 0
    for step in range(1, steps + 1):
        batch = []
        for _ in range(2):
            number += 1
            batch.append(f"e{number}")
            swarm.tell("claim", **claim(number))
            swarm.tell("episode", **episode(number, reward=step / 10, policy_version=step - 1))
        number += 1
        swarm.tell("claim", **claim(number))
        swarm.tell("drop", episode_id=f"e{number}", group_id="g", reason="timeout")
        swarm.tell("batch", step=step, episode_ids=batch, seed=step)
        metrics = {"reward_mean": step / 10, "loss": None}
        flat = {"policy": "", "kind": "reward_flat", "value": 0.0, "limit": 0.1, "message": "it does not move"}
        swarm.tell("step", step=step, metrics=metrics, drops={"timeout": 1}, seconds=0.5, health=[flat])
        if step % evaluated == 0:
            for game in range(4):
                number += 1
                task = f"heldout-{game}"
                swarm.tell("claim", **claim(number, mode="eval", task_id=task))
                ended = episode(number, mode="eval", task_id=task, policy_version=step, reward=game % 2)
                swarm.tell("episode", **ended)
    swarm.tell("checkpoint", step=steps, path=f"checkpoints/step-{steps:06d}", error=None)


# What rows follow


def test_a_training_becomes_rows(swarm: Any, database: Database, experiment_id: str) -> None:
    tell_a_training(swarm, steps=2)
    collect(swarm, database, experiment_id)
    assert points(database, "reward_mean") == [(0, 1, 0.1), (0, 2, 0.2)]
    assert points(database, "drops.timeout") == [(0, 1, 1.0), (0, 2, 1.0)]
    assert points(database, "seconds") == [(0, 1, 0.5), (0, 2, 0.5)]
    with database.read() as session:
        trained = session.exec(select(EpisodeRow).where(EpisodeRow.episode_id == "e1")).one()
        dropped = session.exec(select(EpisodeRow).where(EpisodeRow.episode_id == "e3")).one()
        (evaluation,) = session.exec(select(EvalRun)).all()
        items = session.exec(select(EvalItem).order_by(EvalItem.item_id)).all()
        (checkpoint,) = session.exec(select(Artifact)).all()
        step_event = session.exec(select(EngineEvent).where(EngineEvent.kind == "step")).first()
        point = session.exec(select(MetricPoint)).first()
    assert (trained.task_id, trained.group_index, trained.mode, trained.outcome) == ("task-1", 0, "train", "success")
    assert (trained.rewards, trained.metrics, trained.trained_step) == ({"main": 0.1}, {"turns": 3.0}, 1)
    assert (trained.num_calls, trained.num_prompt_tokens, trained.num_sampled_tokens) == (3, 30, 6)
    assert (trained.policy_version, trained.seconds) == (0, 0.5)
    assert (dropped.ended_at, dropped.drop_reason, dropped.trained_step) == (None, "timeout", None)
    assert (evaluation.step, evaluation.split_name, evaluation.temperature) == (2, "heldout", 1.0)
    assert evaluation.label == "during"
    assert (evaluation.k, evaluation.n_attempted, evaluation.n_valid) == (1, 4, 4)
    assert [(item.item_id, item.sample, item.score, item.tokens) for item in items] == [
        ("heldout-0", 0, 0.0, 6), ("heldout-1", 0, 1.0, 6), ("heldout-2", 0, 0.0, 6), ("heldout-3", 0, 1.0, 6),
    ]  # fmt: skip
    assert (checkpoint.path, checkpoint.step, checkpoint.owner_id) == ("checkpoints/step-000002", 2, experiment_id)
    assert step_event is not None
    assert step_event.payload["metrics"] == {"reward_mean": 0.1, "loss": None}
    assert point is not None
    assert point.wall_s == step_event.at.timestamp() - 1001.0


def test_what_the_engine_warns_of_becomes_rows(swarm: Any, database: Database, experiment_id: str) -> None:
    spike = {"policy": "a", "kind": "kl_spike", "value": 0.5, "limit": 0.1, "message": "policy 'a': they differ by 0.5"}
    grew = {"policy": "a", "kind": "gradient_explodes", "value": None, "limit": 10.0, "message": "from nothing"}
    for step, health in ((1, []), (2, [spike]), (3, [spike | {"value": 0.7}, grew]), (3, [spike | {"value": 0.6}])):
        swarm.tell("step", step=step, metrics={"a/loss": 0.0}, drops={"a/alone": 2}, seconds=1.0, health=health)
    collect(swarm, database, experiment_id)
    collect(swarm, database, experiment_id)
    with database.read() as session:
        rows = session.exec(select(HealthWarning).order_by(HealthWarning.id)).all()
    assert [(row.segment, row.step, row.policy, row.kind, row.value, row.message) for row in rows] == [
        (0, 2, "a", "kl_spike", 0.5, "policy 'a': they differ by 0.5"),
        (0, 3, "a", "kl_spike", 0.7, "policy 'a': they differ by 0.5"),
        (0, 3, "a", "gradient_explodes", None, "from nothing"),
        (1, 3, "a", "kl_spike", 0.6, "policy 'a': they differ by 0.5"),
    ]
    assert {row.experiment_id for row in rows} == {experiment_id}
    assert points(database, "drops.a/alone") == [(0, 1, 2.0), (0, 2, 2.0), (0, 3, 2.0), (1, 3, 2.0)]


def test_numbers_that_are_not_finite_are_marked_and_the_others_drawn(
    swarm: Any, database: Database, experiment_id: str
) -> None:
    metrics = {
        "loss": math.nan, "kl": math.inf, "low": -math.inf, "none": None, "reward": 0.5, "huge": 1e308, "zero": -0.0
    }  # fmt: skip
    swarm.tell("step", step=1, metrics=metrics, drops={}, seconds=1.0)
    collect(swarm, database, experiment_id)
    with database.read() as session:
        found = {p.name: p for p in session.exec(select(MetricPoint)).all()}
        stored = session.execute(text("SELECT payload FROM engine_event WHERE kind = 'step'")).scalar_one()
    back = {name: number_of(point.value, point.mark) for name, point in found.items()}
    assert math.isnan(back["loss"])
    assert (back["kl"], back["low"], back["none"]) == (math.inf, -math.inf, None)
    assert (back["reward"], back["huge"]) == (0.5, 1e308)
    assert math.copysign(1, back["zero"]) == -1

    # The stored event is JSON that a strict reader takes.
    def refuse(word: str) -> None:
        raise AssertionError(word)

    strict = json.loads(stored, parse_constant=refuse)
    assert strict["metrics"]["loss"] == "NaN"
    assert strict["metrics"]["kl"] == "Infinity"


def test_steps_done_again_after_a_resume_are_a_second_segment(
    swarm: Any, database: Database, experiment_id: str
) -> None:
    for step in range(1, 48):
        swarm.tell("step", step=step, metrics={"reward_mean": 0.0}, drops={}, seconds=1.0)
    for step in range(41, 61):
        swarm.tell("step", step=step, metrics={"reward_mean": 1.0}, drops={}, seconds=1.0)
    collect(swarm, database, experiment_id)
    assert points(database, "reward_mean") == [
        *[(0, step, 0.0) for step in range(1, 48)], *[(1, step, 1.0) for step in range(41, 61)]
    ]  # fmt: skip


def test_a_resume_is_seen_by_a_collector_that_starts_after_it(
    swarm: Any, database: Database, experiment_id: str
) -> None:
    for step in (1, 2, 3):
        swarm.tell("step", step=step, metrics={"loss": 0.0}, drops={}, seconds=1.0)
    collect(swarm, database, experiment_id)
    swarm.tell("step", step=3, metrics={"loss": 1.0}, drops={}, seconds=1.0)
    collect(swarm, database, experiment_id)
    assert points(database, "loss") == [(0, 1, 0.0), (0, 2, 0.0), (0, 3, 0.0), (1, 3, 1.0)]


def test_evaluations_between_steps_cost_no_training_rows(swarm: Any, database: Database, experiment_id: str) -> None:
    number = 0
    for step in range(1, 11):
        swarm.tell("step", step=step, metrics={"reward_mean": 0.5}, drops={}, seconds=1.0)
        if step == 5:
            for _ in range(20):
                number += 1
                swarm.tell("episode", **episode(number, mode="eval", policy_version=5))
    collect(swarm, database, experiment_id)
    assert [step for _, step, _ in points(database, "reward_mean")] == list(range(1, 11))
    with database.read() as session:
        (evaluation,) = session.exec(select(EvalRun)).all()
    assert (evaluation.step, evaluation.n_attempted) == (5, 20)


def test_what_a_frozen_opponent_earned_is_kept_and_counts_in_no_score(
    swarm: Any, database: Database, experiment_id: str
) -> None:
    rewards = {"learner": 0.25, "rival": -0.25}
    swarm.tell("claim", **claim(1, mode="eval"))
    swarm.tell("episode", **episode(1, mode="eval", rewards=rewards, frozen_agents=["rival"]))
    collect(swarm, database, experiment_id)
    with database.read() as session:
        (item,) = session.exec(select(EvalItem)).all()
        (row,) = session.exec(select(EpisodeRow)).all()
    assert (item.score, row.rewards) == (0.25, rewards)


def test_every_attempt_at_a_held_out_game_is_counted_under_whose_fault_it_was(
    swarm: Any, database: Database, experiment_id: str
) -> None:
    ends: list[tuple[str, float | None]] = [
        ("success", 1.0), ("failure", 0.0), ("truncated", 0.5), ("agent_error", -1.0), ("agent_error", None),
        ("timeout", None), ("env_error", None), ("success", None),
    ]  # fmt: skip
    for number, (outcome, reward) in enumerate(ends):
        swarm.tell("claim", **claim(number, mode="eval", task_id="game", index=number))
        swarm.tell(
            "episode", **episode(number, mode="eval", task_id="game", outcome=outcome, reward=reward, index=number)
        )
        if reward is None:
            swarm.tell("drop", episode_id=f"e{number}", group_id="g", reason="null_reward")
    swarm.tell("claim", **claim(20, mode="eval", task_id="game", index=8), tags=EVAL, policy_version=0)
    swarm.tell("drop", episode_id="e20", group_id="g", reason="lease_expired")
    collect(swarm, database, experiment_id)
    with database.read() as session:
        (evaluation,) = session.exec(select(EvalRun)).all()
        items = session.exec(select(EvalItem).order_by(EvalItem.sample)).all()
    assert (evaluation.n_attempted, evaluation.n_valid) == (9, 3)
    assert (evaluation.n_policy_fault, evaluation.n_env_fault, evaluation.k) == (3, 3, 9)
    assert [item.sample for item in items] == list(range(9))
    assert [item.score for item in items] == [1.0, 0.0, 0.5, -1.0, None, None, None, None, None]


def test_measurements_are_kept_apart_by_tags_and_weights(swarm: Any, database: Database, experiment_id: str) -> None:
    greedy = {**EVAL, "temperature": "0"}
    for number, (tags, version) in enumerate(
        [(EVAL, 0), (EVAL, 0), (greedy, 0), (EVAL, 5), ({**EVAL, "label": "after"}, 5), ({}, 5)]
    ):
        swarm.tell("episode", **episode(number, mode="eval", tags=tags, policy_version=version))
    collect(swarm, database, experiment_id)
    with database.read() as session:
        rows = session.exec(select(EvalRun)).all()
    assert Counter((r.split_name, r.temperature, r.label, r.step, r.n_attempted) for r in rows) == Counter(
        [
            ("heldout", 1.0, "during", 0, 2),
            ("heldout", 0.0, "during", 0, 1),
            ("heldout", 1.0, "during", 5, 1),
            ("heldout", 1.0, "after", 5, 1),
            ("eval", 1.0, "", 5, 1),
        ]
    )


def test_episodes_that_ran_when_the_server_went_down_are_dropped_with_it(
    swarm: Any, database: Database, experiment_id: str
) -> None:
    swarm.tell("claim", **claim(1))
    swarm.tell("claim", **claim(2))
    swarm.tell("episode", **episode(1))
    swarm.tell("server", server_id="s1", version="0.1.0")
    collect(swarm, database, experiment_id)
    with database.read() as session:
        rows = session.exec(select(EpisodeRow).order_by(EpisodeRow.episode_id)).all()
    assert [(row.episode_id, row.drop_reason) for row in rows] == [("e1", None), ("e2", "server_ended")]


def test_episodes_stored_long_before_their_server_went_down_are_dropped_too(
    database: Database, experiment_id: str
) -> None:
    for event in (
        Event(1, 1.0, "server", {"server_id": "s1"}),
        Event(2, 2.0, "claim", claim(1)),
        Event(3, 3.0, "server", {"server_id": "s1"}),
    ):
        with database.write() as session:
            store(session, experiment_id, "s1", [event])
    with database.read() as session:
        assert session.exec(select(EpisodeRow.drop_reason)).all() == ["server_ended"]


def test_events_stored_before_are_passed_over(database: Database, experiment_id: str) -> None:
    events = [Event(seq, float(seq), "step", {"step": seq, "metrics": {"loss": 0.0}}) for seq in range(1, 5)]
    with database.write() as session:
        assert store(session, experiment_id, "s1", events[:3]) == 3
        assert store(session, experiment_id, "s1", events[1:]) == 1
        assert store(session, experiment_id, "s1", events[::-1]) == 0
        assert store(session, experiment_id, "s1", []) == 0
    assert points(database, "loss") == [(0, step, 0.0) for step in range(1, 5)]


def test_an_event_of_a_later_version_is_kept_and_nothing_stops(
    swarm: Any, database: Database, experiment_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    swarm.tell("votes", someone="new")
    swarm.tell("step", step="three")
    swarm.tell("step", step=1, metrics={"loss": 0.5})
    collect(swarm, database, experiment_id)
    with database.read() as session:
        kinds = session.exec(select(EngineEvent.kind).order_by(EngineEvent.seq)).all()
    assert kinds == ["server", "votes", "step", "step"]
    assert points(database, "loss") == [(0, 1, 0.5)]
    assert "event 3 (step) can't be read" in caplog.text


def test_a_checkpoint_that_failed_is_no_file(swarm: Any, database: Database, experiment_id: str) -> None:
    swarm.tell("checkpoint", step=10, path=None, error="no space left")
    collect(swarm, database, experiment_id)
    with database.read() as session:
        assert session.exec(select(Artifact)).all() == []


def test_two_runs_on_one_server_each_get_their_own_events(swarm: Any, database: Database, experiment_id: str) -> None:
    with database.write() as session:
        second = create_single_run(session, "vibe", "Play nim", "nim", {})
    swarm.tell("step", step=1, metrics={"loss": 1.0})
    collect(swarm, database, experiment_id)
    swarm.tell("step", step=2, metrics={"loss": 2.0})
    collect(swarm, database, second)
    with database.read() as session:
        rows = session.exec(select(MetricPoint).where(MetricPoint.name == "loss").order_by(MetricPoint.step)).all()
    assert [(row.experiment_id, row.step) for row in rows] == [(experiment_id, 1), (second, 2)]


# Exactly once


def test_the_last_step_is_there_after_a_drain(swarm: Any, database: Database, experiment_id: str) -> None:
    collector = Collector(swarm.url, swarm.token, database.url, experiment_id)
    with collector.run_in_thread():
        for step in (1, 2, 3):
            last = swarm.tell("step", step=step, metrics={"loss": 0.0})
        collector.drain(last)
        assert collector.stored_seq == last
    assert [step for _, step, _ in points(database, "loss")] == [1, 2, 3]


def test_what_was_received_is_written_when_it_is_stopped(swarm: Any, database: Database, experiment_id: str) -> None:
    collector = Collector(swarm.url, swarm.token, database.url, experiment_id)
    with collector.run_in_thread():
        collector.drain(1)
        last = swarm.tell("step", step=1, metrics={"loss": 0.0})
        # Long enough to arrive, too short for a batch to be due.
        time.sleep(0.1)
    assert collector.stored_seq == last


def test_it_stops_where_the_disk_is_full(
    swarm: Any, database: Database, experiment_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UnavailableError("the disk is full")

    monkeypatch.setattr(collect_module, "RETRY_S", (0.0,))
    collector = Collector(swarm.url, swarm.token, database.url, experiment_id)
    thread = threading.Thread(target=collector.run, daemon=True)
    thread.start()
    collector.drain(1)
    monkeypatch.setattr(collector, "_write", refuse)
    swarm.tell("step", step=1, metrics={"loss": 0.0})
    # Long enough to arrive, too short for a batch to be due.
    time.sleep(0.1)
    collector.stop()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(6))
def test_connections_that_break_off_anywhere_lose_and_double_nothing(
    swarm: Any, database: Database, experiment_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(collect_module, "RETRY_S", (0.0,))
    rng = random.Random(seed)
    tell_a_training(swarm)
    with open_database(home=tmp_path / "whole") as whole:
        with whole.write() as session:
            alone = create_single_run(session, "vibe", "q", "nim", {})
        collect(swarm, whole, alone)
        expected = everything(whole)
    # Many connections bring less than one event; the last one of these brings all that is left.
    swarm.cuts = iter([*(rng.choice([0, 1, 30, 200, 999, 3000]) for _ in range(12)), *[None] * 50])
    swarm.asked_for.clear()
    collect(swarm, database, experiment_id)
    assert everything(database) == expected
    assert len(swarm.asked_for) > 12
    assert max(swarm.asked_for) > 0  # it goes on after what it has


def test_connections_that_never_last_still_bring_everything(
    swarm: Any, database: Database, experiment_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_module, "RETRY_S", (0.0,))
    tell_a_training(swarm, steps=2)
    longest = max(len(json.dumps(event)) for event in swarm.events)
    swarm.cuts = repeat(2 * longest)
    collect(swarm, database, experiment_id)
    assert len(everything(database)["events"]) == len(swarm.events)


def test_a_server_that_restarts_is_followed_on(swarm: Any, database: Database, experiment_id: str) -> None:
    collector = Collector(swarm.url, swarm.token, database.url, experiment_id)
    with collector.run_in_thread():
        collector.drain(swarm.tell("step", step=1, metrics={"loss": 0.0}))
        port = swarm.port
        swarm.close()
        with pytest.raises(CollectorError, match=r"was given 0\.3 s and is at event 2 of 3 \(.*127\.0\.0\.1"):
            collector.drain(3, timeout_s=0.3)
        swarm.tell("server", server_id="s1", version="0.1.0")
        swarm.start(port)
        collector.drain(swarm.tell("step", step=2, metrics={"loss": 0.0}))
    assert points(database, "loss") == [(0, 1, 0.0), (0, 2, 0.0)]


def test_two_collectors_of_one_run_write_every_event_once(swarm: Any, database: Database, experiment_id: str) -> None:
    collectors = [Collector(swarm.url, swarm.token, database.url, experiment_id) for _ in range(2)]
    with collectors[0].run_in_thread(), collectors[1].run_in_thread():
        tell_a_training(swarm)
        for collector in collectors:
            collector.drain(len(swarm.events), timeout_s=60)
    found = everything(database)
    assert [seq for seq, _ in found["events"]] == list(range(1, len(swarm.events) + 1))
    assert found["counts"] == [(step, "during", 4, 4, 0, 0) for step in (2, 4, 6)]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_a_collector_that_is_killed_again_and_again_loses_and_doubles_nothing(
    swarm: Any, database: Database, experiment_id: str, tmp_path: Path
) -> None:
    rng = random.Random(7)
    token_file = tmp_path / "token.json"
    token_file.write_text(json.dumps({"observer": swarm.token}))
    command = [
        sys.executable, "-m", "experiments_db.collect", "--server", swarm.url, "--token-file", str(token_file),
        "--experiment", experiment_id, "--db", database.url,
    ]  # fmt: skip

    def train() -> None:
        tell_a_training(swarm, steps=60)

    teller = threading.Thread(target=train)
    teller.start()
    stored = 0
    for _ in range(6):
        process = subprocess.Popen(command)
        # Kill it once it has written something new, at a moment that has nothing to do with what it does.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with database.read() as session:
                now = session.execute(text("SELECT count(*) FROM engine_event")).scalar_one()
            if now > stored or now == len(swarm.events):
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        stored = now
    teller.join()
    collect(swarm, database, experiment_id)
    found = everything(database)
    assert [seq for seq, _ in found["events"]] == list(range(1, len(swarm.events) + 1))
    assert [(step, value) for name, _, step, value in found["points"] if name == "reward_mean"] == [
        (step, step / 10) for step in range(1, 61)
    ]
    assert found["counts"] == [(step, "during", 4, 4, 0, 0) for step in range(2, 61, 2)]


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_the_command_ends_well_when_it_is_asked_to(
    swarm: Any, database: Database, experiment_id: str, tmp_path: Path
) -> None:
    token_file = tmp_path / "token.json"
    token_file.write_text(json.dumps({"observer": swarm.token}))
    process = subprocess.Popen(
        [
            sys.executable, "-m", "experiments_db.collect", "--server", swarm.url, "--token-file", str(token_file),
            "--experiment", experiment_id, "--db", database.url,
        ]
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not everything(database)["events"] and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=30) == 0


# What it refuses


def test_a_wrong_token_ends_it_with_the_reason(swarm: Any, database: Database, experiment_id: str) -> None:
    collector = Collector(swarm.url, "wrong", database.url, experiment_id)
    with pytest.raises(CollectorError, match="answers 401: the server does not know this token"):
        collector.run()
    with pytest.raises(CollectorError, match=r"has ended at event 0 of 5 .*401"):
        collector.drain(5)


@pytest.mark.parametrize("url", ["http://me:hunter2@host", "http://host?token=hunter2"])
def test_an_address_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(CollectorError, match="a token opens it") as caught:
        Collector(url, "token", None, "run")
    assert "hunter2" not in str(caught.value)


def test_a_run_that_is_not_there_ends_it(swarm: Any, database: Database) -> None:
    with pytest.raises(NotFoundError, match="there is no run 'nope'"):
        Collector(swarm.url, swarm.token, database.url, "nope").run()


def test_a_server_in_trouble_is_asked_again(swarm: Any, database: Database, experiment_id: str) -> None:
    swarm.status = 503
    collector = Collector(swarm.url, swarm.token, database.url, experiment_id)
    with collector.run_in_thread():
        while len(swarm.asked_for) < 2:  # a second request follows the answer to the first
            time.sleep(0.01)
        with pytest.raises(CollectorError, match="the server answers 503"):
            collector.drain(1, timeout_s=0.3)
        swarm.status = 200
        collector.drain(1)


def test_a_pruned_log_is_followed_by_a_run_that_knows_its_server(
    swarm: Any, database: Database, experiment_id: str
) -> None:
    collect(swarm, database, experiment_id)
    for step in (1, 2, 3):
        swarm.tell("step", step=step, metrics={"loss": 0.0})
    swarm.first_seq = 3
    collect(swarm, database, experiment_id)
    assert [step for _, step, _ in points(database, "loss")] == [2, 3]


def test_a_pruned_log_of_an_unknown_server_is_refused(swarm: Any, database: Database, experiment_id: str) -> None:
    swarm.tell("step", step=1, metrics={"loss": 0.0})
    swarm.first_seq = 2
    with pytest.raises(CollectorError, match=r"begins with event 2 \(step\).*start the server again"):
        Collector(swarm.url, swarm.token, database.url, experiment_id).run()


def test_stopping_before_it_starts_is_stopping(swarm: Any, database: Database, experiment_id: str) -> None:
    collector = Collector(swarm.url, swarm.token, database.url, experiment_id)
    collector.stop()
    collector.run()
    assert collector.stored_seq == 0


# Pure parts


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.5, (0.5, ValueMark.FINITE)),
        (0.0, (0.0, ValueMark.FINITE)),
        (-0.0, (0.0, ValueMark.NEGATIVE_ZERO)),
        (math.nan, (None, ValueMark.NAN)),
        (math.inf, (None, ValueMark.POSITIVE_INFINITY)),
        (-math.inf, (None, ValueMark.NEGATIVE_INFINITY)),
        (None, (None, ValueMark.ABSENT)),
    ],
)
def test_every_number_has_its_mark_and_comes_back(value: float | None, stored: tuple[float | None, ValueMark]) -> None:
    assert mark_of(value) == stored
    assert repr(number_of(*stored)) == repr(value)


def test_json_keeps_what_it_has_no_word_for() -> None:
    assert json_safe({"a": [math.nan, -math.inf, 1.0, True], "b": (math.inf,)}) == {
        "a": ["NaN", "-Infinity", 1.0, True], "b": ["Infinity"]
    }  # fmt: skip


def test_the_score_is_the_mean_of_who_was_judged() -> None:
    assert score_of({"a": 1.0, "b": 0.0, "c": None}) == 0.5
    assert score_of({"a": None}) is None
    assert score_of({}) is None


def test_an_environment_that_failed_is_nobodys_fault_but_its_own() -> None:
    assert fault_of("env_error", 1.0) is Fault.ENV
    assert fault_of("success", None) is Fault.ENV
    assert fault_of("truncated", 0.0) is Fault.NONE
    assert fault_of("timeout", None) is Fault.POLICY


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_the_real_server_is_followed_through_a_kill(database: Database, experiment_id: str, tmp_path: Path) -> None:
    def serve() -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, "-m", "swarm_engine.cli", "serve", "--run-dir", str(tmp_path / "swarm")]
        process = subprocess.Popen(
            [*command, "--port", port, "--json", "--exit-with-stdin"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert process.stdout
        return process, json.loads(process.stdout.readline())

    port = "0"
    first, listening = serve()
    port = listening["url"].rsplit(":", 1)[1]
    token = json.loads(Path(listening["token_file"]).read_text())["observer"]
    collector = Collector(listening["url"], token, database.url, experiment_id)
    with collector.run_in_thread():
        with first:
            collector.drain(1)
            first.kill()
        second, _ = serve()
        with second:  # closes its input, and it ends
            collector.drain(2)
    assert second.returncode == 0
    with database.read() as session:
        rows = session.exec(select(EngineEvent).order_by(EngineEvent.seq)).all()
    assert [(row.kind, row.payload["server_id"]) for row in rows] == [("server", listening["server_id"])] * 2


def test_refused_calls_are_kept_with_their_episodes_and_counted_by_step(
    swarm: Any, database: Database, experiment_id: str
) -> None:
    refused = {"num_refused": 3, "last_refusal": "400: top_p=0.9 is not taken"}
    for number in (1, 2, 3):
        swarm.tell("claim", **claim(number))
    swarm.tell("episode", **episode(1, **refused))
    swarm.tell("drop", episode_id="e2", group_id="g", reason="lease_expired", **refused)
    swarm.tell("episode", **episode(3))
    swarm.tell("step", step=1, metrics={}, drops={}, seconds=1.0, **refused)
    swarm.tell("step", step=2, metrics={}, drops={}, seconds=1.0)
    collect(swarm, database, experiment_id)
    with database.read() as session:
        rows = session.exec(select(EpisodeRow).order_by(col(EpisodeRow.episode_id))).all()
    told = (3, "400: top_p=0.9 is not taken")
    assert [(row.num_refused, row.last_refusal) for row in rows] == [told, told, (None, None)]
    assert [(step, value) for _, step, value in points(database, "num_refused")] == [(1, 3.0)]
