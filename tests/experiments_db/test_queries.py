from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event
from sqlmodel import Session

from experiments_db.derive import Event, store
from experiments_db.engine import Database
from experiments_db.errors import NotFoundError
from experiments_db.intervals import Interval, likelihood_interval, t_interval
from experiments_db.models import (
    Experiment,
    ExperimentStatus,
    JobState,
    MetricPoint,
    OwnerType,
    Severity,
    StageKind,
    StudyKind,
)
from experiments_db.queries import (
    Axis,
    Warned,
    all_curves,
    compare_runs,
    curves,
    evaluations,
    find_run,
    held_out_curve,
    left_out,
    list_runs,
    natural,
    newest,
    segment_starts,
    show_run,
    warnings,
)
from experiments_db.writes import (
    add_artifact,
    add_blueprint,
    add_experiment,
    add_finding,
    add_prereg,
    add_stage,
    begin_attempt,
    create_single_run,
    create_study,
    quarantine,
    record_job,
)


class Told:
    """Events of one server, one a second, for one run."""

    def __init__(self, session: Session, experiment_id: str) -> None:
        self.session = session
        self.experiment_id = experiment_id
        self.events: list[Event] = []
        self.num_episodes = 0
        self.tell("server", server_id=experiment_id)

    def tell(self, kind: str, **payload: object) -> None:
        number = len(self.events) + 1
        self.events.append(Event(number, 1000.0 + number, kind, payload))

    def step(self, step: int, num_episodes: int = 0, **metrics: float | None) -> None:
        names = [self.episode("train", f"task-{i}", 0.0) for i in range(num_episodes)]
        self.tell("batch", step=step, episode_ids=names, seed=0)
        self.tell("step", step=step, metrics=metrics)

    def episode(
        self, mode: str, task: str, reward: float | None, step: int = 0, outcome: str = "success", **tags: str
    ) -> str:
        self.num_episodes += 1
        name = f"e{self.num_episodes}"
        self.tell(
            "episode", episode_id=name, task_id=task, group_id=task, index=0, mode=mode, rewards={"main": reward},
            outcome=outcome, policy_version=step, tags=tags,
        )  # fmt: skip
        return name

    def evaluate(
        self, step: int, rewards: Mapping[str, Sequence[float]], temperature: str = "1", label: str = "during"
    ) -> None:
        for task, own in rewards.items():
            for reward in own:
                self.episode("eval", task, reward, step, split="heldout", temperature=temperature, label=label)

    def done(self) -> None:
        store(self.session, self.experiment_id, self.experiment_id, self.events)


# Intervals


def test_the_t_interval_is_that_of_the_tables() -> None:
    # Mean 2, deviation 1, n 3: 2 ± 4.302653 / sqrt(3), by a table of Student's t.
    interval = t_interval([1.0, 2.0, 3.0])
    assert interval is not None
    assert interval.mean == 2.0
    assert interval.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert interval.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert interval.n == 3


@pytest.mark.parametrize("interval", [t_interval, likelihood_interval])
def test_one_value_has_no_interval_and_none_has_no_mean(interval: Callable[[list[float]], Interval | None]) -> None:
    assert interval([0.25]) == Interval(0.25, None, None, 1)
    assert interval([]) is None
    assert interval([1.0, 1.0]) == Interval(1.0, None, None, 2), "two that agree say no more about the spread"


def test_the_interval_of_wins_is_that_of_the_binomial_likelihood() -> None:
    # 149 games of 150 won; 1.976013 by a table of Student's t for 149 degrees of freedom.
    found = likelihood_interval([1.0] * 149 + [0.0])
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < 149 / 150 < found.high < 1
    for p in (found.low, found.high):
        lost = 2 * (149 * math.log(149 / 150 / p) + math.log(1 / 150 / (1 - p)))
        assert lost == pytest.approx(1.976013**2, abs=1e-4)


@pytest.mark.parametrize(
    ("games", "low"),
    # Of n games none was another: by Clopper and Pearson up to 1 - 0.025^(1/n) are, each -0.5 at the least.
    [(1, 1 - 1.5 * 0.975), (2, 1 - 1.5 * 0.841886), (10, 1 - 1.5 * 0.308497), (150, 1 - 1.5 * 0.0242926)],
)
def test_games_that_all_pay_the_best_say_what_that_many_can_show(games: int, low: float) -> None:
    found = likelihood_interval([1.0] * games, bounds=(-0.5, 1.0))
    assert found is not None
    assert found.low == pytest.approx(low, abs=2e-6)
    assert (found.mean, found.high, found.n) == (1.0, 1.0, games)
    zero = likelihood_interval([0.0] * games, bounds=(-1.0, 1.0))
    assert zero is not None
    assert zero.low == pytest.approx((low - 1) / 1.5, abs=2e-6)
    assert zero.high == pytest.approx((1 - low) / 1.5, abs=2e-6)


@given(st.lists(st.sampled_from([-0.5, 0.0, 0.1, 0.3, 0.5, 1.0]), min_size=1, max_size=40), st.integers(2, 5))
def test_an_interval_within_bounds_has_a_width_holds_the_mean_and_shrinks_with_more(
    rewards: list[float], times: int
) -> None:
    one, more = (likelihood_interval(each, bounds=(-0.5, 1.0)) for each in (rewards, rewards * times))
    assert one is not None
    assert more is not None
    for found in (one, more):
        assert found.low is not None
        assert found.high is not None
        assert -0.5 <= found.low < found.high <= 1.0
        assert found.low - 1e-12 <= found.mean <= found.high + 1e-12
    assert (more.high or 0) - (more.low or 0) < (one.high or 0) - (one.low or 0)


@pytest.mark.parametrize("games", [10, 50])
@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_an_interval_within_bounds_holds_the_truth_about_as_often_as_it_says(p: float, games: int) -> None:
    rng, held = random.Random(0), 0
    for _ in range(400):
        found = likelihood_interval([float(rng.random() < p) for _ in range(games)], bounds=(0.0, 1.0))
        assert found is not None
        held += (found.low or 0) <= p <= (found.high or 0)
    assert held / 400 >= 0.92


@given(
    st.lists(st.sampled_from([-0.5, 0.0, 0.3, 0.5, 1.0]), min_size=2, max_size=40).filter(lambda own: len(set(own)) > 1)
)
def test_an_interval_of_rewards_lies_within_them_and_holds_their_mean(rewards: list[float]) -> None:
    found = likelihood_interval(rewards)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert min(rewards) <= found.low <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.high <= max(rewards)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=30).filter(lambda own: len(set(own)) > 1))
def test_an_interval_of_mirrored_rewards_is_the_mirrored_interval(rewards: list[float]) -> None:
    one, other = likelihood_interval(rewards), likelihood_interval([1 - reward for reward in rewards])
    assert one is not None
    assert other is not None
    assert one.low == pytest.approx(1 - (other.high or 0), abs=1e-6)


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_an_interval_is_as_exact_in_any_unit(unit: float) -> None:
    rewards = [0.0, 0.25, 0.25, 0.5, 0.75, 1.0, 8.0]
    one, other = likelihood_interval(rewards), likelihood_interval([unit * reward for reward in rewards])
    assert one is not None
    assert other is not None
    assert (other.low, other.high) == pytest.approx((unit * (one.low or 0), unit * (one.high or 0)), rel=1e-9, abs=0)


@pytest.mark.parametrize("rewards", [[0.7, 0.70000005, 0.7], [1.0, 0.99999994, 1.0, 1.0], [1e9, 1e9 + 1, 1e9 + 2]])
def test_rewards_that_hardly_differ_have_an_interval_too(rewards: list[float]) -> None:
    one = likelihood_interval(rewards)
    apart = likelihood_interval([(reward - rewards[0]) * 1e6 for reward in rewards])
    assert one is not None
    assert apart is not None
    width = (one.high or 0) - (one.low or 0)
    assert width * 1e6 == pytest.approx((apart.high or 0) - (apart.low or 0), rel=1e-6)


def test_the_interval_of_rewards_near_their_best_holds_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(1000):
        found = likelihood_interval([float(rng.random() < 0.95) for _ in range(150)])
        assert found is not None
        held += (found.low or 0) <= 0.95 <= (found.high or 0)
    assert 0.93 <= held / 1000 <= 0.975


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        interval = t_interval([rng.gauss(3.0, 2.0) for _ in range(5)])
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        held += interval.low <= 3.0 <= interval.high
    assert 0.935 <= held / 2000 <= 0.965  # three standard errors around 0.95


# Curves


def test_a_curve_that_was_resumed_has_each_step_once_and_no_way_back(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        for step in range(1, 48):
            told.step(step, loss=0.0)
        for step in range(41, 61):
            told.step(step, loss=1.0)
        told.done()
        curve = curves(session, experiment_id, "loss")
    assert [point.x for point in curve.points] == [float(step) for step in range(1, 61)]
    assert [point.value for point in curve.points] == [0.0] * 40 + [1.0] * 20
    assert curve.num_resumes == 1


def test_steps_that_were_given_up_are_not_in_the_curve(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        for step in (*range(1, 48), 41, 42):
            told.step(step, loss=0.0)
        told.done()
        curve = curves(session, experiment_id, "loss")
    assert [point.step for point in curve.points] == list(range(1, 43))


@given(st.lists(st.integers(min_value=1, max_value=12), min_size=1, max_size=30))
def test_a_curve_never_turns_back(steps: list[int]) -> None:
    rows, segment, last = [], 0, 0
    for step in steps:
        segment += step <= last
        last = step
        rows.append(MetricPoint(experiment_id="x", name="loss", segment=segment, step=step, value=0.0))
    kept = newest(rows, segment_starts(rows))
    assert [row.step for row in kept] == sorted({row.step for row in kept})
    assert kept[-1].step == steps[-1]


def test_rewards_losses_and_evaluations_share_an_axis_and_optimizer_steps_are_another(
    database: Database, experiment_id: str
) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        for step, inner in enumerate((10, 50, 30, 20, 40), 1):
            told.step(step, reward_mean=0.5, loss=1.0, optimizer_steps=inner)
            told.evaluate(step, {"a": [1.0]})
        told.done()
        on_steps = all_curves(session, experiment_id)
        inner_steps = all_curves(session, experiment_id, Axis.OPTIMIZER_STEPS)
        held_out = held_out_curve(session, experiment_id)
        held_out_inner = held_out_curve(session, experiment_id, axis=Axis.OPTIMIZER_STEPS)
    for name in ("reward_mean", "loss"):
        assert [point.x for point in on_steps[name].points] == [1, 2, 3, 4, 5]
        assert [point.x for point in inner_steps[name].points] == [10, 60, 90, 110, 150]
        assert inner_steps[name].axis is Axis.OPTIMIZER_STEPS
    assert [one.x for one in held_out] == [1, 2, 3, 4, 5]
    assert [one.x for one in held_out_inner] == [10, 60, 90, 110, 150]


def test_evaluations_lie_where_they_were_made_on_every_axis(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        told.evaluate(0, {"a": [0.0]})
        for step in range(1, 31):
            told.step(step, num_episodes=4, reward_mean=0.5)
            if step % 10 == 0:
                told.evaluate(step, {"a": [1.0]})
        told.done()
        at = {axis: [one.x for one in held_out_curve(session, experiment_id, axis=axis)] for axis in Axis}
    assert at[Axis.STEP] == [0, 10, 20, 30]
    assert at[Axis.EPISODES] == [0, 40, 80, 120]
    assert at[Axis.OPTIMIZER_STEPS] == [0, 10, 20, 30]
    # One event a second: 1 server, 1 evaluation, and 6 for each step.
    assert at[Axis.WALL_S] == [1, 62, 123, 184]


def test_evaluations_told_between_steps_leave_the_training_rows_alone(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        for step in range(1, 11):
            told.step(step, reward_mean=0.1 * step)
            if step == 5:
                told.evaluate(5, {f"game-{i}": [1.0] for i in range(20)})
        told.done()
        curve = curves(session, experiment_id, "reward_mean")
        (evaluation,) = held_out_curve(session, experiment_id)
    assert [point.step for point in curve.points] == list(range(1, 11))
    assert (evaluation.step, evaluation.num_attempted) == (5, 20)


def test_values_that_are_not_finite_are_in_the_curve_and_counted(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        for step in range(1, 41):
            told.step(step, loss=2.0 if step % 4 == 0 else math.nan)
        told.done()
        curve = curves(session, experiment_id, "loss")
    assert len(curve.points) == 40
    assert curve.num_not_finite == 30
    assert all(point.value is not None and math.isnan(point.value) for point in curve.points if not point.is_finite)


def test_a_metric_that_is_not_there_is_answered_with_those_that_are(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        told.step(1, loss=0.0, kl=0.0)
        told.done()
        with pytest.raises(NotFoundError, match="has no metric 'los'; it has: kl, loss, seconds"):
            curves(session, experiment_id, "los")


# Evaluations


def test_attempts_at_one_task_are_averaged_before_the_interval(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        # Three tasks with means 1, 0.5 and 0, whatever the number of attempts.
        told.evaluate(0, {"a": [1.0, 1.0, 1.0, 1.0], "b": [1.0, 0.0], "c": [0.0]})
        told.done()
        (evaluation,) = held_out_curve(session, experiment_id)
    assert evaluation.reward == likelihood_interval([1.0, 0.5, 0.0])
    assert evaluation.num_attempted == 7


def test_measurements_of_the_same_weights_are_pooled_and_others_are_not(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        told.evaluate(4, {"a": [1.0], "b": [0.0]}, label="during")
        told.evaluate(4, {"a": [0.0], "b": [0.0]}, label="after")
        told.evaluate(4, {"a": [1.0], "b": [1.0]}, temperature="0", label="after")
        told.done()
        every = evaluations(session, experiment_id)
        (main,) = held_out_curve(session, experiment_id)
        (greedy,) = held_out_curve(session, experiment_id, temperature=0.0)
    assert [(one.temperature, one.label) for one in every] == [(0.0, "after"), (1.0, "during+after")]
    assert main.reward == likelihood_interval([0.5, 0.0])
    assert greedy.reward == likelihood_interval([1.0, 1.0])


def test_attempts_that_nobody_judged_are_counted_and_not_averaged(database: Database, experiment_id: str) -> None:
    with database.write() as session:
        told = Told(session, experiment_id)
        tags = {"split": "heldout", "temperature": "1", "label": "before"}
        told.episode("eval", "a", 1.0, **tags)
        told.episode("eval", "b", None, outcome="env_error", **tags)
        told.episode("eval", "c", None, outcome="timeout", **tags)
        told.done()
        (evaluation,) = held_out_curve(session, experiment_id)
    assert evaluation.reward == Interval(1.0, None, None, 1)
    assert (evaluation.num_attempted, evaluation.num_valid) == (3, 1)
    assert (evaluation.num_policy_faults, evaluation.num_env_faults) == (1, 1)


# Runs


class Study:
    """Two arms with two seeds each: 8 rises by 0.5, 16 by 0.25; the second seed of 16 fails."""

    def __init__(self, session: Session) -> None:
        self.id = create_study(session, StudyKind.RESEARCH, "Does 16 learn faster than 8?")
        stage = add_stage(session, add_prereg(session, self.id, {}), 0, StageKind.COMPARE)
        self.runs: list[str] = []
        for size in (16, 8):
            blueprint = add_blueprint(
                session, stage, f"group_size={size}", objective="learn", template_id="tictactoe",
                params={"trainer": {"group_size": size}}, controls={"trainer.learning_rate": 0.001},
            )  # fmt: skip
            for seed in (1, 0):
                self.runs.append(
                    add_experiment(session, blueprint, f"{self.id}/{size}/{seed}", seed_train=seed, run_dir="runs/x")
                )
        for run in self.runs:
            rise = 0.25 if run in self.runs[:2] else 0.5
            told = Told(session, run)
            told.evaluate(0, {"a": [0.0], "b": [0.25]}, label="before")
            told.step(1, num_episodes=2, reward_mean=0.1)
            told.step(2, num_episodes=2, reward_mean=math.nan)
            told.evaluate(2, {"a": [rise], "b": [0.25 + rise]}, label="after")
            told.tell("checkpoint", step=2, path="checkpoints/step-000002", error=None)
            told.done()
            attempt = begin_attempt(session, run)
            end = JobState.FAILED_NAN if run == self.runs[0] else JobState.SUCCEEDED
            record_job(session, attempt.job_id, JobState.RUNNING, fencing=attempt.fencing)
            record_job(session, attempt.job_id, end, fencing=attempt.fencing, cause="loss is NaN", exit_code=1)


@pytest.fixture
def study(database: Database) -> Study:
    with database.write() as session:
        return Study(session)


@pytest.mark.usefixtures("study")
def test_runs_are_listed_by_study_arm_and_seed_with_before_and_after(database: Database) -> None:
    with database.write() as session:
        newer = create_single_run(session, "vibe", "Play nim", "nim", {})
    with database.read() as session:
        runs = list_runs(session)
    assert runs[0].id == newer
    assert [(run.arm, run.seed) for run in runs[1:]] == [
        ("group_size=8", 0), ("group_size=8", 1), ("group_size=16", 0), ("group_size=16", 1),
    ]  # fmt: skip
    run = runs[1]
    assert (run.template, run.steps, run.status) == ("tictactoe", 2, ExperimentStatus.DONE)
    assert run.rewards == (0.1, None)
    assert run.last_reward is None
    assert run.before is not None
    assert run.before.reward == likelihood_interval([0.0, 0.25])
    assert run.after is not None
    assert run.after.reward == likelihood_interval([0.5, 0.75])
    assert runs[4].status is ExperimentStatus.FAILED
    assert runs[4].status_reason == "FAILED_NAN: loss is NaN"
    assert (runs[0].before, runs[0].after, runs[0].last_reward, runs[0].steps) == (None, None, None, 0)


def test_runs_can_be_narrowed_down(database: Database, study: Study) -> None:
    with database.write() as session:
        newer = create_single_run(session, "vibe", "Play nim", "nim", {})
    with database.read() as session:
        assert [run.id for run in list_runs(session, template="nim")] == [newer]
        assert [run.id for run in list_runs(session, status=ExperimentStatus.FAILED)] == [study.runs[0]]
        assert {run.id for run in list_runs(session, study_id=study.id)} == set(study.runs)
        assert [run.id for run in list_runs(session, limit=1)] == [newer]
        assert list_runs(session, ids=[]) == []


def test_a_run_is_found_by_enough_of_its_id(database: Database, study: Study) -> None:
    whole = study.runs[2]
    with database.read() as session:
        assert find_run(session, whole) == whole
        assert find_run(session, whole.lower()) == whole
        assert find_run(session, whole[-8:]) == whole
        with pytest.raises(NotFoundError, match=r"fits 4 runs: .* give more of the id"):
            find_run(session, whole[:2])
        with pytest.raises(NotFoundError, match=f"there is no run 'zz'; the newest is {study.runs[3]}"):
            find_run(session, "zz")
        with pytest.raises(NotFoundError, match="there is no run ' '"):
            find_run(session, " ")


def test_a_run_is_shown_whole(database: Database, study: Study) -> None:
    with database.write() as session:
        add_artifact(session, OwnerType.EXPERIMENT, study.runs[0], "curve", "curve.png")
        add_finding(
            session, OwnerType.EXPERIMENT, study.runs[0], detector="nan", severity=Severity.HIGH, message="diverged"
        )
    with database.read() as session:
        detail = show_run(session, study.runs[0])
    assert detail.settings == {"trainer.group_size": 16, "trainer.learning_rate": 0.001}
    assert [(job.state, job.cause, job.exit_code) for job in detail.jobs] == [(JobState.FAILED_NAN, "loss is NaN", 1)]
    assert [one.label for one in detail.evaluations] == ["before", "after"]
    assert math.isnan(detail.metrics["reward_mean"] or 0.0)
    assert detail.num_episodes == {"eval": 4, "train": 4}
    assert detail.checkpoints == ("checkpoints/step-000002",)
    assert detail.files == (("curve", "curve.png"),)
    assert [(one.detector, one.is_open) for one in detail.findings] == [("nan", True)]
    assert len(detail.plan_sha256) == 64
    home = Path("/a home")
    with database.read() as session:
        placed = show_run(session, study.runs[0], home)
        (listed,) = list_runs(session, ids=[study.runs[0]], home=home)
    assert placed.files == (("curve", "/a home/curve.png"),)
    assert placed.checkpoints == ("/a home/checkpoints/step-000002",)
    assert placed.summary.run_dir == listed.run_dir == "/a home/runs/x"


def test_warnings_and_what_was_left_out_are_told_as_they_count(database: Database) -> None:
    """The steps from 3 on are done again: only `flat` goes on there, and only the second drops count."""

    def warning(kind: str, value: float, policy: str = "") -> dict[str, object]:
        return {"policy": policy, "kind": kind, "value": value, "limit": 1.0, "message": f"{kind} is {value}"}

    with database.write() as session:
        run, well = (create_single_run(session, "vibe", "q", "nim", {"size": size}) for size in (3, 4))
        told = Told(session, run)
        for step, health, drops in (
            (1, [warning("flat", 1.0), warning("spike", 8.0, "b")], {"alone": 1}),
            (2, [], {}),
            (3, [warning("flat", 3.0), warning("over", 3.0)], {"alone": 10, "stale": 10}),
            (4, [warning("over", 4.0)], {"alone": 10}),
            (3, [warning("flat", 3.5)], {"alone": 2}),
            (4, [warning("flat", 4.5)], {"stale": 3}),
        ):
            told.tell("step", step=step, metrics={"loss": 0.0}, drops=drops, health=health)
        told.done()
        healthy = Told(session, well)
        healthy.step(1, loss=0.0)
        healthy.done()
    with database.read() as session:
        summaries = {one.id: one.warned_of for one in list_runs(session)}
        detail, other = show_run(session, run), show_run(session, well)
    assert summaries == {run: ("flat", "spike"), well: ()}
    assert detail.warnings == (
        Warned("flat", "", first_step=1, last_step=4, num_steps=3, value=4.5, message="flat is 4.5"),
        Warned("spike", "b", first_step=1, last_step=1, num_steps=1, value=8.0, message="spike is 8.0"),
    )
    assert detail.left_out == {"alone": 3, "stale": 3}
    assert (other.warnings, other.left_out) == ((), {})


class Counted(str):
    """An id that counts how often it is compared with another text."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_many_runs_are_told_of_without_comparing_every_row_with_every_run(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 runs with 5 rows of each kind: a row is looked up among runs a few times, not 20."""
    ill = {"policy": "", "kind": "flat", "value": 1.0, "limit": 1.0, "message": "flat"}
    with database.write() as session:
        runs = [create_single_run(session, "vibe", "q", "nim", {"size": size}) for size in range(20)]
        for run in runs:
            told = Told(session, run)
            for step in range(1, 6):
                told.tell("step", step=step, metrics={"loss": 0.0}, drops={"alone": step}, health=[ill])
            told.done()
    monkeypatch.setattr(Counted, "num_compared", 0)
    with database.read() as session:
        ids = [Counted(run) for run in runs]
        warned, left = warnings(session, ids), left_out(session, ids)
    once = Warned("flat", "", first_step=1, last_step=5, num_steps=5, value=1.0, message="flat")
    assert warned == dict.fromkeys(runs, (once,))
    assert left == {run: {"alone": 15} for run in runs}
    assert Counted.num_compared < 10 * 20 * 5


def test_a_list_of_runs_reads_no_message_of_their_warnings(database: Database) -> None:
    read: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        read.append(statement)

    with database.write() as session:
        run = create_single_run(session, "vibe", "q", "nim", {})
        told = Told(session, run)
        ill = {"policy": "", "kind": "flat", "value": 1.0, "limit": 1.0, "message": "flat"}
        told.tell("step", step=1, metrics={"reward_mean": 0.5, "loss": 1.0}, health=[ill])
        told.done()
    with database.read() as session:
        event.listen(session.get_bind(), "before_cursor_execute", note)
        (listed,) = list_runs(session)
        event.remove(session.get_bind(), "before_cursor_execute", note)
    assert (listed.warned_of, listed.rewards) == (("flat",), (0.5,))
    assert any("health_warning.kind" in statement for statement in read)
    assert not any("health_warning.message" in statement for statement in read)


def test_a_comparison_says_what_differs_and_counts_failed_runs(database: Database, study: Study) -> None:
    with database.read() as session:
        comparison = compare_runs(session, study.runs)
    assert comparison.differing == {"trainer.group_size": (16, 16, 8, 8), "seed": (1, 0, 1, 0)}
    eight, sixteen = comparison.arms
    assert (sixteen.arm, sixteen.num_runs, sixteen.num_failed) == ("group_size=16", 2, 1)
    assert sixteen.rise == Interval(0.25, None, None, 1)
    assert (eight.arm, eight.num_runs, eight.num_failed) == ("group_size=8", 2, 0)
    assert eight.rise == Interval(0.5, None, None, 2)
    assert eight.after == t_interval([0.625, 0.625])


def test_a_quarantined_run_is_counted_as_failed(database: Database, study: Study) -> None:
    with database.write() as session:
        quarantine(session, study.runs[2], "wrong config")
        (eight,) = compare_runs(session, study.runs[2:]).arms
        (run,) = list_runs(session, ids=[study.runs[2]])
    assert (eight.num_runs, eight.num_failed) == (2, 1)
    assert run.status_reason == "wrong config"


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.LOST])
def test_a_run_that_has_not_ended_is_counted_and_in_no_mean(database: Database, study: Study, state: JobState) -> None:
    with database.write() as session:
        blueprint = session.get_one(Experiment, study.runs[2]).blueprint_id
        going = add_experiment(session, blueprint, "going", seed_train=2)
        told = Told(session, going)
        told.evaluate(0, {"a": [1.0], "b": [1.0]}, label="before")
        told.done()
        attempt = begin_attempt(session, going)
        record_job(session, attempt.job_id, state, fencing=attempt.fencing)
    with database.read() as session:
        (eight,) = compare_runs(session, [*study.runs[2:], going]).arms
    assert (eight.num_runs, eight.num_failed, eight.num_unfinished) == (3, 0, 1)
    assert eight.before == t_interval([0.125, 0.125])


def test_comparing_a_run_that_is_not_there_names_it(database: Database, study: Study) -> None:
    with database.read() as session, pytest.raises(NotFoundError, match="there is no run 'nope'"):
        compare_runs(session, [study.runs[0], "nope"])


def test_arms_are_sorted_as_people_count() -> None:
    assert sorted(["g=16", "g=8", "f", "g=0.5"], key=natural) == ["f", "g=0.5", "g=8", "g=16"]
