from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from sqlalchemy import text
from sqlmodel import Session, select

from experiments_db.columns import canonical_json, sha256_of
from experiments_db.engine import Database
from experiments_db.errors import ConflictError, NotFoundError, StaleWriterError, TransitionError
from experiments_db.models import (
    Amendment,
    AssumptionSource,
    AuditFinding,
    Blueprint,
    ClaimForm,
    ClaimStrength,
    Direction,
    Estimate,
    EstimateInput,
    EvalRun,
    Experiment,
    ExperimentStatus,
    FactorKind,
    Job,
    JobEvent,
    JobState,
    OwnerType,
    Prereg,
    Row,
    RunRole,
    Severity,
    Stage,
    StageKind,
    Study,
    StudyKind,
    StudyStatus,
)
from experiments_db.writes import (
    Evidence,
    add_artifact,
    add_assumption,
    add_blueprint,
    add_claim,
    add_decision,
    add_estimate,
    add_experiment,
    add_factor,
    add_finding,
    add_hypothesis,
    add_job,
    add_prereg,
    add_stage,
    amend,
    begin_attempt,
    can_move,
    create_single_run,
    create_study,
    get,
    quarantine,
    record_job,
    set_study_status,
    take_over,
)

PLAN = {"arms": ["4", "8"], "margin": 0.05}

OPEN = (JobState.INTENT, JobState.SUBMITTED, JobState.QUEUED, JobState.RUNNING)


class Lab:
    """A study with one stage, two arms and a run of each role."""

    def __init__(self, session: Session) -> None:
        self.study = create_study(session, StudyKind.RESEARCH, "Does 8 learn faster than 4?", key="s")
        self.prereg = add_prereg(session, self.study, PLAN)
        self.hypothesis = add_hypothesis(
            session, self.prereg, "H1", "8 is better", estimand="area", direction=Direction.BETTER, arm_key="8"
        )
        self.factor = add_factor(session, self.prereg, "trainer.group_size", [4, 8], FactorKind.ORDINAL)
        self.stage = add_stage(session, self.prereg, 0, StageKind.COMPARE)
        self.blueprint = add_blueprint(
            session, self.stage, "8", objective="measure 8", template_id="tictactoe", params={"trainer.group_size": 8}
        )
        self.select = add_experiment(session, self.blueprint, "8/0", seed_train=2**63 - 1)
        self.confirm = add_experiment(session, self.blueprint, "8/c0", seed_train=1, role=RunRole.CONFIRM)
        self.job = add_job(session, self.select)
        self.estimate = add_estimate(
            session,
            self.study,
            "area 8-4",
            estimand="area",
            method="paired_t",
            value=0.25,
            ci_lo=-math.inf,
            ci_hi=0.5,
            n_seeds=3,
            experiments=[self.select],
        )
        self.decision = add_decision(
            session, self.stage, node_id="n0", branch="stop", predicate_trace=[], estimates=[self.estimate]
        )
        self.claim = add_claim(
            session,
            self.study,
            "c1",
            form=ClaimForm.DESCRIPTIVE,
            text_template="{{value}}",
            strength=ClaimStrength.EXPLORATORY,
            slots={"value": self.estimate},
            evidence=[Evidence(self.estimate), Evidence(get(session, Experiment, self.select))],
        )
        self.assumption = add_assumption(session, self.study, "area over episodes", AssumptionSource.DEFAULT)
        self.finding = add_finding(
            session,
            OwnerType.EXPERIMENT,
            self.confirm,
            detector="canary",
            severity=Severity.HIGH,
            message="pays idlers",
        )


@pytest.fixture
def lab(database: Database) -> Lab:
    with database.write() as session:
        return Lab(session)


def count_rows(database: Database) -> dict[str, int]:
    with database.read() as session:
        return {
            name: session.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one() for name in Row.metadata.tables
        }


def refused(database: Database, work: Callable[[Session], Any], says: str) -> None:
    def run() -> None:
        with database.write() as session:
            work(session)

    with pytest.raises(ConflictError, match=says):
        run()


def test_doing_everything_twice_is_doing_it_once(database: Database, lab: Lab) -> None:
    before = count_rows(database)
    with database.write() as session:
        again = Lab(session)
    assert vars(again) == vars(lab)
    assert count_rows(database) == before
    assert before["study"] == before["job"] == before["job_event"] == before["claim"] == 1
    assert before["experiment"] == before["claim_evidence"] == 2


def test_big_seeds_and_unbounded_intervals_survive(database: Database, lab: Lab) -> None:
    with database.read() as session:
        assert get(session, Experiment, lab.select).seed_train == 2**63 - 1
        estimate = get(session, Estimate, lab.estimate)
    assert (estimate.value, estimate.ci_lo, estimate.ci_hi) == (0.25, None, 0.5)


def test_a_key_with_other_content_is_refused(database: Database, lab: Lab) -> None:
    refused(
        database,
        lambda session: add_experiment(session, lab.blueprint, "8/0", seed_train=3),
        "experiment with key '8/0' is there with seed_train = 9223372036854775807, this one has 3",
    )


def test_a_study_without_a_key_is_a_new_one_each_time(database: Database) -> None:
    with database.write() as session:
        one = create_study(session, StudyKind.VIBE, "Play nim")
        other = create_study(session, StudyKind.VIBE, "Play nim")
    assert one < other


def test_a_plan_is_locked_by_the_hash_of_its_canonical_json(database: Database, lab: Lab) -> None:
    with database.read() as session:
        prereg = get(session, Prereg, lab.prereg)
        assert prereg.canonical_json == '{"arms":["4","8"],"margin":0.05}'
        assert prereg.sha256 == sha256_of(prereg.canonical_json)
        assert get(session, Study, lab.study).status is StudyStatus.LOCKED


def test_a_locked_plan_can_not_be_changed_or_deleted(database: Database, lab: Lab) -> None:
    refused(database, lambda s: s.execute(text("UPDATE prereg SET locked_at = locked_at")), "can not be changed; amend")
    refused(database, lambda s: s.execute(text("DELETE FROM prereg")), "can not be deleted")
    refused(database, lambda s: add_prereg(s, lab.study, {"arms": []}), "prereg with study_id .* sha256")


def test_an_amendment_is_the_next_version_and_says_what_changed(database: Database, lab: Lab) -> None:
    plan = {**PLAN, "margin": 0.1}
    for _ in range(2):
        with database.write() as session:
            second = amend(session, lab.prereg, plan, reason="noise", data_seen=True, approved_by="me")
    with database.read() as session:
        assert get(session, Prereg, second).version == 2
        (amendment,) = session.exec(select(Amendment)).all()
    assert amendment.before_sha == sha256_of(canonical_json(PLAN))
    assert amendment.after_sha == sha256_of(canonical_json(plan))


def test_the_hash_of_a_blueprint_changes_with_its_content(database: Database, lab: Lab) -> None:
    with database.write() as session:
        other = add_blueprint(
            session, lab.stage, "4", objective="measure 8", template_id="tictactoe", params={"trainer.group_size": 8}
        )
    with database.read() as session:
        assert get(session, Blueprint, other).sha256 != get(session, Blueprint, lab.blueprint).sha256


def test_study_status_notes_when_it_ended(database: Database, lab: Lab) -> None:
    with database.write() as session:
        set_study_status(session, lab.study, StudyStatus.RUNNING)
        assert get(session, Study, lab.study).finished_at is None
        set_study_status(session, lab.study, StudyStatus.FAILED, "disk full")
    with database.read() as session:
        study = get(session, Study, lab.study)
    assert study.finished_at is not None
    assert study.status_reason == "disk full"


def test_a_row_that_is_not_there_is_named(database: Database) -> None:
    with database.read() as session, pytest.raises(NotFoundError, match="there is no eval_run 'nope'"):
        get(session, EvalRun, "nope")


# Jobs


@pytest.mark.parametrize(("before", "after"), list(product(JobState, JobState)))
def test_jobs_move_forwards_to_one_end(before: JobState, after: JobState) -> None:
    order = list(JobState)
    is_forwards = order.index(after) > order.index(before)
    is_result = after in (JobState.SUCCEEDED, JobState.FAILED_OOM, JobState.FAILED_NAN)
    expected = before in OPEN and is_forwards and not (before is JobState.INTENT and is_result)
    assert can_move(before, after) is expected


def test_a_job_goes_its_way_and_every_step_is_an_event(database: Database, lab: Lab) -> None:
    with database.write() as session:
        number = take_over(session, lab.job)
        assert record_job(session, lab.job, JobState.SUBMITTED, fencing=number, backend_id="4711", host="here")
        assert record_job(session, lab.job, JobState.RUNNING, fencing=number)
        assert not record_job(session, lab.job, JobState.RUNNING, fencing=number)
        assert get(session, Experiment, lab.select).status is ExperimentStatus.RUNNING
        assert record_job(session, lab.job, JobState.FAILED_OOM, fencing=number, cause="12 GB", exit_code=137, signal=9)
    with database.read() as session:
        job = get(session, Job, lab.job)
        experiment = get(session, Experiment, lab.select)
        events = session.exec(select(JobEvent).order_by(JobEvent.id)).all()
    assert (job.backend_id, job.host, job.exit_code, job.signal, job.state_cause) == ("4711", "here", 137, 9, "12 GB")
    assert job.submitted_at
    assert job.started_at
    assert job.ended_at
    assert job.submitted_at <= job.started_at <= job.ended_at
    assert experiment.status is ExperimentStatus.FAILED
    assert experiment.finished_at == job.ended_at
    assert [(event.kind, event.payload.get("to")) for event in events] == [
        ("state", "INTENT"),
        ("takeover", None),
        ("state", "SUBMITTED"),
        ("state", "RUNNING"),
        ("state", "FAILED_OOM"),
    ]


def test_an_end_is_written_once(database: Database, lab: Lab) -> None:
    with database.write() as session:
        number = take_over(session, lab.job)
        record_job(session, lab.job, JobState.CANCELLED, fencing=number)
    with database.write() as session, pytest.raises(TransitionError, match="is CANCELLED and can't become SUCCEEDED"):
        record_job(session, lab.job, JobState.SUCCEEDED, fencing=number)
    # The database itself keeps the rule, whoever writes.
    refused(database, lambda s: s.execute(text("UPDATE job SET state = 'RUNNING'")), "the end of a job is written once")


def test_a_job_never_submitted_has_no_result(database: Database, lab: Lab) -> None:
    with database.write() as session:
        number = take_over(session, lab.job)
        with pytest.raises(TransitionError, match="record SUBMITTED with its backend_id first"):
            record_job(session, lab.job, JobState.SUCCEEDED, fencing=number)


def test_who_lost_the_job_can_not_write_about_it(database: Database, lab: Lab) -> None:
    with database.write() as session:
        first = take_over(session, lab.job)
        second = take_over(session, lab.job)
        with pytest.raises(StaleWriterError, match="this process writes with number 1, the job is at 2"):
            record_job(session, lab.job, JobState.RUNNING, fencing=first)
        assert record_job(session, lab.job, JobState.RUNNING, fencing=second)
        with pytest.raises(ValueError, match="number 3 was never given out"):
            record_job(session, lab.job, JobState.SUCCEEDED, fencing=3)


def test_a_lost_job_is_followed_by_another_attempt_and_an_open_one_is_taken_over(database: Database, lab: Lab) -> None:
    with database.write() as session:
        first = begin_attempt(session, lab.select)
        again = begin_attempt(session, lab.select)
        assert (again.job_id, again.attempt, again.fencing) == (first.job_id, 1, first.fencing + 1)
        record_job(session, again.job_id, JobState.LOST, fencing=again.fencing, cause="no heartbeat")
        assert get(session, Experiment, lab.select).status is ExperimentStatus.INTERRUPTED
        second = begin_attempt(session, lab.select)
    assert (second.attempt, second.key, second.state) == (2, "8/0.2", JobState.INTENT)


def test_a_quarantined_run_stays_so(database: Database, lab: Lab) -> None:
    with database.write() as session:
        quarantine(session, lab.select, "12 of 40 updates")
        number = take_over(session, lab.job)
        record_job(session, lab.job, JobState.RUNNING, fencing=number)
        record_job(session, lab.job, JobState.SUCCEEDED, fencing=number)
        experiment = get(session, Experiment, lab.select)
    assert (experiment.status, experiment.quarantine_reason) == (ExperimentStatus.QUARANTINED, "12 of 40 updates")


@pytest.mark.usefixtures("lab")
def test_events_of_a_job_are_only_added(database: Database) -> None:
    refused(database, lambda s: s.execute(text("UPDATE job_event SET kind = 'x'")), "events of a job are only added")
    refused(database, lambda s: s.execute(text("DELETE FROM job_event")), "events of a job are only added")


# What the schema itself refuses


def test_a_confirmation_never_rests_on_a_run_that_selected(database: Database, lab: Lab) -> None:
    def estimate(session: Session) -> None:
        add_estimate(
            session, lab.study, "c", estimand="area", method="paired_t", value=0.2, role=RunRole.CONFIRM,
            experiments=[lab.confirm, lab.select],
        )  # fmt: skip

    refused(database, estimate, "can not rest on a run that was used to select")
    # Not by changing the roles afterwards either.
    refused(database, lambda s: s.execute(text("UPDATE estimate SET role = 'confirm'")), "can not rest on a run")
    with database.write() as session:
        add_estimate(
            session, lab.study, "c", estimand="area", method="paired_t", value=0.2, role=RunRole.CONFIRM,
            experiments=[lab.confirm],
        )  # fmt: skip
    refused(
        database,
        lambda s: s.execute(text("UPDATE experiment SET role = 'select' WHERE key = '8/c0'")),
        "a run behind an estimate that confirms can not be used to select",
    )


def test_a_confirmed_claim_needs_a_confirming_estimate_and_no_open_finding(database: Database, lab: Lab) -> None:
    def claim(session: Session, estimate: str) -> str:
        return add_claim(
            session, lab.study, "c2", form=ClaimForm.SUPERIOR, text_template="{{v}}", slots={"v": estimate},
            strength=ClaimStrength.CONFIRMED, evidence=[Evidence(estimate)],
        )  # fmt: skip

    refused(database, lambda s: claim(s, lab.estimate), "a confirmed claim needs an estimate that confirms")
    with database.write() as session:
        confirming = add_estimate(
            session, lab.study, "c", estimand="area", method="paired_t", value=0.2, role=RunRole.CONFIRM,
            experiments=[lab.confirm],
        )  # fmt: skip
    # The run behind it has an open finding of high severity.
    refused(database, lambda s: claim(s, confirming), "no open high finding")
    with database.write() as session:
        get(session, AuditFinding, lab.finding).resolved_by = "me"
        session.flush()
        claim(session, confirming)


def test_a_slot_must_name_an_estimate(database: Database, lab: Lab) -> None:
    def claim(session: Session) -> None:
        add_claim(
            session, lab.study, "c3", form=ClaimForm.TREND, text_template="{{v}}", slots={"v": lab.study},
            strength=ClaimStrength.DESCRIPTIVE,
        )  # fmt: skip

    with database.write() as session, pytest.raises(NotFoundError, match="slot 'v' of claim 'c3'"):
        claim(session)


@pytest.mark.parametrize(
    ("counts", "is_right"), [((3, 1, 1, 1), True), ((3, 1, 1, 0), False), ((0, 1, -1, 0), False), ((0, 0, 0, 0), True)]
)
def test_every_attempt_of_an_evaluation_is_accounted_for(
    database: Database, experiment_id: str, counts: tuple[int, int, int, int], is_right: bool
) -> None:
    attempted, valid, policy, env = counts

    def write(session: Session) -> None:
        session.add(
            EvalRun(
                experiment_id=experiment_id,
                step=0,
                split_name="heldout",
                n_attempted=attempted,
                n_valid=valid,
                n_policy_fault=policy,
                n_env_fault=env,
            )
        )

    if is_right:
        with database.write() as session:
            write(session)
    else:
        refused(database, write, "ck_eval_run_")


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE job SET state = 'SLEEPING'",
        "UPDATE experiment SET status = 'lost'",
        "UPDATE claim SET strength = 'proven'",
        "UPDATE stage SET kind = 'party'",
    ],
)
@pytest.mark.usefixtures("lab")
def test_closed_sets_are_closed(database: Database, sql: str) -> None:
    refused(database, lambda session: session.execute(text(sql)), "(?i)check constraint")


def test_a_row_can_not_refer_to_nothing(database: Database) -> None:
    refused(
        database, lambda session: session.add(Stage(prereg_id="nope", n=0, kind=StageKind.SCREEN)), "(?i)foreign key"
    )
    refused(database, lambda session: session.add(EstimateInput(estimate_id="a", experiment_id="b")), "(?i)foreign key")


# Single runs, money


def test_a_single_run_hangs_under_the_whole_tree(database: Database, experiment_id: str) -> None:
    with database.read() as session:
        experiment = get(session, Experiment, experiment_id)
        blueprint = get(session, Blueprint, experiment.blueprint_id)
        stage = get(session, Stage, blueprint.stage_id)
        study = get(session, Study, get(session, Prereg, stage.prereg_id).study_id)
    assert (study.kind, study.question, study.status) == (StudyKind.VIBE, "Play tic-tac-toe", StudyStatus.LOCKED)
    assert (stage.kind, blueprint.template_id) == (StageKind.SINGLE, "tictactoe")
    assert blueprint.params == {"trainer.group_size": 8}


def test_a_single_run_is_found_again_by_its_key_and_settings(database: Database) -> None:
    def run(updates: int) -> str:
        with database.write() as session:
            return create_single_run(session, "vibe", "q", "nim", {"updates": updates}, key="runs/1")

    first = run(4)
    assert run(4) == first
    with pytest.raises(ConflictError, match="run 'runs/1' was begun with other settings"):
        run(5)


def test_an_artifact_written_again_tells_of_the_newest_content(database: Database, lab: Lab) -> None:
    with database.write() as session:
        first = add_artifact(session, OwnerType.STUDY, lab.study, "report", "report.md", sha256="0" * 64, num_bytes=3)
        second = add_artifact(session, OwnerType.STUDY, lab.study, "report", "report.md", sha256="1" * 64, num_bytes=4)
    assert first == second
