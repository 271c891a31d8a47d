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
    assert (tails.places["k"].step, tails.places["k"].reward, tails.places["k"].share) == (3, 0.25, 0.3)
    with log.open("a") as file:
        file.write('ature": 1, "mean": 0.5}\n')
    tails.read([status])
    assert tails.places["k"].held_out == 0.5


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_a_job_warns_of_is_shown_while_it_runs(plan, tmp_path, is_terminal):
    log = tmp_path / "stdout.log"
    step = {"event": "step", "step": 3, "updates": 9, "metrics": {}, "health": [{"kind": "collapse", "message": "…"}]}
    log.write_text(
        "".join(json.dumps(one) + "\n" for one in (step, {"event": "warning", "step": 3, "text": "it fell"}))
    )
    status = JobStatus("k1", JobState.RUNNING, "", log, started_at=time.time())
    run = store.RunView(
        "e", "k", "cold", 1, 0, ExperimentStatus.RUNNING, None, Path(), "b", "j", "k1", RowState.RUNNING, 1, 0.0
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal, color_system=None)
    shown = (LiveReporter if is_terminal else PlainReporter)(console)
    for _ in range(2):
        shown.tell("jobs", stage=0, plan=plan, every=[run], runs=[run], statuses={"k1": status})
    shown.close()
    said = console.file.getvalue()
    assert said.count("cold seed 1 warns after step 3: it fell") == 1
    assert ("collapse" in said) == is_terminal, "in the panel, as long as it lasts"


def test_time_left_is_the_work_left_over_the_places(plan):
    def view(seed: int, state: RowState | None, seconds: float) -> store.RunView:
        status = ExperimentStatus.DONE if seconds else ExperimentStatus.RUNNING
        return store.RunView("e", "k", "a", seed, 0, status, None, "", "b", "j", f"k{seed}", state, 1, seconds)

    every = [view(1, RowState.SUCCEEDED, 100.0), view(2, RowState.RUNNING, 0.0)]
    running = {"k2": JobStatus("k2", JobState.RUNNING, "", Path(), started_at=time.time() - 50)}
    # 6 runs of 100 s, one done and one half way: 450 s of work on 2 places.
    assert time_left(plan, 0, every, running, {"k2": Place(1, 2)}) == pytest.approx(225, abs=1)
    assert time_left(plan, 0, [], {}, {}) is None
