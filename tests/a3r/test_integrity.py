"""Runs that are not what their blueprint says, and what a person sees while they run."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from a3r import estimates, store
from a3r.analysis import contrasts
from a3r.estimates import Measurement, RunRecord
from a3r.executor import JobState, JobStatus
from a3r.integrity import Facts, check_run, check_seeds
from a3r.planner.design import design
from a3r.planner.offline import read
from a3r.prereg.check import check
from a3r.prereg.simulate import simulate
from a3r.prereg.tree import decide
from a3r.progress import LiveReporter, Place, PlainReporter, Tails, time_left
from a3r.stats import paired_t
from experiments_db.intervals import t_interval
from experiments_db.models import ExperimentStatus, Severity
from experiments_db.models import JobState as RowState


@pytest.fixture
def plan(plan_of):
    return plan_of(updates=4, eval_games=20)


def record(*, steps=(0, 1, 2, 3, 4), games=20, seed=1):
    scores = {f"heldout-{game}": 0.5 + 0.01 * seed for game in range(games)}
    return RunRecord("e", "group_size=8", seed, tuple(Measurement(step, 64 * step, scores) for step in steps))


def facts(plan, *, seed=1, trained=256, not_finite=(), **trainer):
    wanted = {
        path.removeprefix("trainer."): value
        for path, value in plan.settings_of(plan.arm("group_size=8")).items()
        if path.startswith("trainer.")
    }
    return Facts({"trainer": wanted | trainer, "seed": seed}, trained, not_finite)


def problems(plan, run, seen):
    return [(each.detector, each.severity) for each in check_run(plan, plan.arm("group_size=8"), run, seen)]


def test_a_run_that_did_what_it_should_has_no_problem(plan):
    assert problems(plan, record(), facts(plan)) == []
    assert problems(plan, record(), Facts(facts(plan).config, None, ())) == []


def test_each_deviation_is_found(plan):
    assert problems(plan, record(), facts(plan, learning_rate=0.1)) == [("config", Severity.HIGH)]
    assert problems(plan, record(), facts(plan, seed=2)) == [("config", Severity.HIGH)]
    assert problems(plan, record(steps=(0, 1, 2, 4)), facts(plan)) == [("evaluations", Severity.HIGH)]
    assert problems(plan, record(games=18), facts(plan)) == [("evaluations", Severity.HIGH)]
    assert problems(plan, record(), facts(plan, trained=255)) == [("episodes", Severity.HIGH)]
    assert problems(plan, record(), facts(plan, not_finite=("loss",))) == [("not finite", Severity.HIGH)]
    assert problems(plan, record(), Facts(None, 256, ())) == [("config", Severity.MEDIUM)]


@pytest.mark.parametrize(
    ("lost", "found"),
    [(0, []), (1, [("not finite", Severity.MEDIUM)]), (4, [("not finite", Severity.HIGH)])],
)
def test_updates_without_a_finite_gradient_are_found_and_where_there_is_no_other_the_run_failed(plan, lost, found):
    seen = dataclasses.replace(facts(plan), num_gradients=4, num_not_finite_gradients=lost)
    assert problems(plan, record(), seen) == found


def test_one_game_in_twenty_may_be_missing(plan):
    assert problems(plan, record(games=19), facts(plan)) == []


def test_seeds_that_are_copies_of_each_other_are_found():
    assert check_seeds([record(seed=1), record(seed=2)]) == []
    copy = RunRecord("f", "group_size=8", 2, record(seed=1).measurements)
    (problem,) = check_seeds([record(seed=1), copy])
    assert "seeds 1 and 2" in problem.message


def test_copies_are_found_whatever_lies_between_them_and_in_whatever_stage_they_ran():
    def copy(seed: int) -> RunRecord:
        return dataclasses.replace(record(seed=1), seed=seed)

    (problem,) = check_seeds([record(seed=1), record(seed=2), copy(3)])
    assert "seeds 1 and 3" in problem.message
    (problem,) = check_seeds([copy(4), copy(5)], [record(seed=1), record(seed=2)])
    assert "seeds 1 and 4 and 5" in problem.message
    assert check_seeds([record(seed=4)], [record(seed=1), copy(2)]) == [], "found in the stage of both"
    other = dataclasses.replace(copy(2), arm="group_size=4")
    assert check_seeds([record(seed=1), other]) == []


@pytest.mark.parametrize(
    "part", [design, read, check, decide, simulate, estimates.comparison, contrasts, paired_t, t_interval, check_run]
)
def test_the_hash_of_a_study_covers_what_plans_and_decides(part):
    source = Path(inspect.getsourcefile(part))
    top = Path(estimates.__file__).parent.parent
    files = {path for pattern in estimates.STUDY_CODE for path in top.glob(pattern)}
    assert source in files


def test_the_tail_of_a_job_is_read_line_by_line_and_noise_is_skipped(tmp_path):
    log = tmp_path / "stdout.log"
    status = JobStatus("k", JobState.RUNNING, "running", log)
    tails = Tails()
    assert tails.read([status]) == []
    step = {"event": "step", "step": 3, "updates": 10, "metrics": {"reward_mean": 0.25}}
    log.write_text(f"hello\n[1, 2]\n{json.dumps(step)}\n" + '{"event": "evaluation", "temper')
    assert [event["event"] for _, event in tails.read([status])] == ["step"]
    assert (tails.places["k"].step, tails.places["k"].updates, tails.places["k"].reward) == (3, 10, 0.25)
    with log.open("a") as file:
        file.write('ature": 1, "mean": 0.5}\n')
    tails.read([status])
    assert (tails.places["k"].held_out, tails.places["k"].evaluations) == (0.5, 1)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_a_job_warns_of_is_shown_while_it_runs(plan, tmp_path, is_terminal):
    log = tmp_path / "stdout.log"
    step = {"event": "step", "step": 3, "updates": 9, "metrics": {}, "health": [{"kind": "collapse", "message": "…"}]}
    log.write_text(
        "".join(json.dumps(one) + "\n" for one in (step, {"event": "warning", "step": 3, "text": "it fell"}))
    )
    status = JobStatus("k1", JobState.RUNNING, "", log, started_at=time.time())
    run = store.RunView(
        "e", "k", "group_size=4", 1, 0, ExperimentStatus.RUNNING, None, "", "b", "j", "k1", RowState.RUNNING, 1, 0.0
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal, color_system=None)
    shown = (LiveReporter if is_terminal else PlainReporter)(console)
    for _ in range(2):
        shown.tell("jobs", stage=0, plan=plan, every=[run], runs=[run], statuses={"k1": status})
    shown.close()
    said = console.file.getvalue()
    assert said.count("group_size=4 seed 1 warns after step 3: it fell") == 1
    assert ("collapse" in said) == is_terminal, "in the panel, as long as it lasts"


def view(arm: str, seed: int, seconds: float | None) -> store.RunView:
    """A run that took so many seconds, or that still runs."""
    status = ExperimentStatus.RUNNING if seconds is None else ExperimentStatus.DONE
    state = RowState.RUNNING if seconds is None else RowState.SUCCEEDED
    stage = 0 if arm == "group_size=4" else 1
    key = f"{arm}-{seed}"
    return store.RunView("e", "k", arm, seed, stage, status, None, "", "b", "j", key, state, 1, seconds or 0.0)


def going(key: str, spent: float) -> dict[str, JobStatus]:
    return {key: JobStatus(key, JobState.RUNNING, "", Path(), started_at=time.time() - spent)}


def test_time_left_is_that_of_the_stage_on_its_places_and_then_of_the_next_one(plan):
    # A run plays 4 x 64 games for updates and 7 x 20 in evaluations; after two updates 188 of the 396 are played.
    every = [view("group_size=4", 1, 100.0), view("group_size=4", 2, None)]
    left = time_left(plan, 0, every, going("group_size=4-2", 94), {"group_size=4-2": Place(2, 4)})
    # It will take 198 s, so a run takes 149 s: one more beside it on 2 places, then three of the other arm, 2 and 1.
    assert left == pytest.approx(149 + 2 * 149, abs=2)
    assert time_left(plan, 0, [], {}, {}) is None


def test_a_run_that_takes_longer_than_others_has_time_left_until_its_last_evaluation(plan):
    every = [
        *(view("group_size=4", seed, 100.0) for seed in (1, 2, 3)),
        *(view("group_size=8", s, 90.0) for s in (1, 2)),
    ]
    last = view("group_size=8", 3, None)
    for place, spent, expected in (
        (Place(4, 4), 356.0, 40.0),  # all updates, none of the two evaluations after them: 356 of 396
        (Place(4, 4, evaluations=1), 376.0, 20.0),
        (Place(), 30.0, 60.0),  # nothing is known of it but what the others of its arm took
        (Place(), 80.0, 45.0),
    ):
        left = time_left(plan, 1, [*every, last], going("group_size=8-3", spent), {"group_size=8-3": place})
        assert left == pytest.approx(expected, abs=2)


def test_three_runs_on_two_places_take_as_long_as_two(plan):
    every = [view("group_size=4", seed, 100.0) for seed in (1, 2, 3)]
    assert time_left(plan, 1, every, {}, {}) == 200
