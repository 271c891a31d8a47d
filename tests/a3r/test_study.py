"""Whole studies on the real graph and database; only what a training comes to is made up.

Where processes matter (kills, Ctrl-C, lost jobs) the executor and its processes are real too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import threading
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import fake_lab
import langsmith.utils as langsmith_env
import pytest
from fake_lab import Lab, begin_and_cut_power, end_jobs
from langchain_core.tracers.langchain import wait_for_all_tracers
from sqlmodel import col, delete, func, select

from a3r import executor, store
from a3r.decisions import affordable
from a3r.errors import A3RError, PlanError, StoppedError, StudyBusyError, StudyVersionError
from a3r.graph.build import build_graph
from a3r.graph.driver import drive, saver
from a3r.graph.lease import lease
from a3r.graph.runner import job_spec
from a3r.graph.state import Approval
from a3r.integrity import check_seeds
from a3r.paths import Home
from a3r.prereg.tree import Leaf
from a3r.progress import event_text
from a3r.report import bundle as bundles
from a3r.report import publish, write
from a3r.research import verify_study
from a3r.verify import verify
from experiments_db.errors import ConflictError
from experiments_db.models import (
    Claim,
    ClaimEvidence,
    Decision,
    Estimate,
    EvalItem,
    Experiment,
    ExperimentStatus,
    Job,
    JobState,
    Study,
    StudyStatus,
)

EXAMPLE = "Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?"
EFFECT = {"group_size=8": {"rise": 0.6}}
"""Twice the rise of the reference: every look at it says superior."""
HOSTILE = ' $(touch x) `touch y` it\'s "fine" <script>alert()</script> | **bold** [x](javascript:y)'


@pytest.fixture
def lab_in(tmp_path):
    """Makes labs in this test's home; they are closed with it."""
    made: list[Lab] = []

    def make(effects: dict[str, Any] | None = None, **more: Any) -> Lab:
        made.append(Lab(tmp_path / "a home", effects, **more))
        return made[-1]

    yield make
    for lab in made:
        lab.deps.database.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A home and the study there that found the effect it was given."""
    return run_study(tmp_path_factory.mktemp("finished"), EXAMPLE, EFFECT)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, str]:
    """The same of a question that tries to be more than text, and of a run that failed."""
    effects = {"group_size=8": {"fail_seeds": [1]}}
    return run_study(tmp_path_factory.mktemp("hostile"), EXAMPLE + HOSTILE, effects, minutes=20.5)


def run_study(home: Path, question: str, effects: dict[str, Any], **wishes: Any) -> tuple[Path, str]:
    lab = Lab(home, effects)
    study = lab.begin(question, **wishes)
    assert lab.go(study) is StudyStatus.DONE
    lab.deps.database.close()
    return home, study


@pytest.fixture
def answered(finished, lab_in, tmp_path) -> tuple[Lab, str]:
    """A copy of the finished study, which the test may change, and its lab."""
    home, study = finished
    shutil.copytree(home, tmp_path / "a home")
    return lab_in(EFFECT), study


def leaf_of(lab: Any, study: str) -> Leaf | None:
    return bundles.load(lab.deps.database, study).leaf_of("group_size=8")


def checks(lab: Any, study: str) -> dict[str, bool]:
    results = verify(lab.deps.database, study, lab.deps.home.study(study), "Tic-tac-toe")
    return {result.name: result.is_ok for result in results}


def test_a_planted_effect_is_found_reported_and_verified(answered):
    lab, study = answered
    assert leaf_of(lab, study) is Leaf.SUPERIOR
    report = (lab.deps.home.study(study).report / "report.md").read_text()
    assert "Group size 8 learns faster than group size 4 on Tic-tac-toe." in report
    assert "twice as many" in report
    assert store.prereg(lab.deps.database, study).sha256 in report
    assert all(checks(lab, study).values())
    with lab.deps.database.read() as session:
        assert session.exec(select(func.count()).select_from(Job)).one() == 6
        (claim,) = session.exec(select(Claim).where(Claim.key == "group_size=8")).all()
        assert (claim.strength.value, claim.status.value) == ("supported", "verified")
    data = json.loads((lab.deps.home.study(study).report / "report.json").read_text())
    assert data["verdicts"] == [{"arm": "group_size=8", "leaf": "superior"}]


def test_no_effect_adds_seeds_once_and_then_says_what_it_can_not_tell(lab_in):
    lab = lab_in({"*": {"sd": 0.08}})
    study = lab.begin(EXAMPLE)
    lab.go(study)
    loaded = bundles.load(lab.deps.database, study)
    assert loaded.look == 2
    assert len(loaded.runs) == 10
    assert {decision.branch for _, decision in loaded.decisions} == {"go_on", "add_seeds", "inconclusive"}
    report = (lab.deps.home.study(study).report / "report.md").read_text()
    told = loaded.numbers["noise/smallest_difference/all_seeds"].value
    assert f"a difference under {told:.3f} can't be told with 5 seeds" in report
    assert all(checks(lab, study).values())


def test_runs_that_agree_exactly_do_not_say_what_can_be_told(lab_in):
    lab = lab_in({"*": {"sd": 0.0, "means_agree": True}})
    study = lab.begin(EXAMPLE)
    lab.go(study)
    numbers = bundles.load(lab.deps.database, study).numbers
    assert numbers["noise/sd"].value == 0
    assert not [key for key in numbers if key.startswith("noise/smallest_difference/")]
    report = (lab.deps.home.study(study).report / "report.md").read_text()
    assert "agree exactly, so how far equal runs differ, and what difference can be told, is not known" in report
    assert all(checks(lab, study).values())
    told = event_text("noise_floor", {"unit": "reward", "ci": [0.0, None], "smallest_difference": None})
    assert "agree exactly" in str(told)


def test_a_budget_that_is_used_up_adds_no_seeds(plan_of):
    plan = plan_of()
    run = store.RunView(
        "e", "k", "a", 1, 0, ExperimentStatus.DONE, None, "", "b", "j", "k.1", JobState.SUCCEEDED, 1, 0.0
    )

    def can_add(seconds: float) -> bool:
        return affordable(plan, [dataclasses.replace(run, seconds=seconds)] * 6, stage=1)[0]

    # 6 runs so far and 4 more, on 2 places for 12 minutes: 1440 s, 144 s each.
    assert plan.budget.job_seconds == 1440
    assert can_add(143.0)
    assert not can_add(145.0)
    assert affordable(plan, [run], stage=2) == (False, "no seeds are left to add")


def test_the_command_of_a_job_does_not_show_the_password_of_the_database(answered):
    """Every user of the machine sees it, and it is kept."""
    lab, study = answered
    run = store.runs(lab.deps.database, study)[0]
    elsewhere = dataclasses.replace(lab.deps.database, url="postgresql+psycopg://me:hunter2@host/name")
    command = job_spec(dataclasses.replace(lab.deps, database=elsewhere), {"study_id": study, "stage": 0}, run).command
    assert command[command.index("--db") + 1] == "postgresql+psycopg://me@host/name"


def test_a_run_may_be_lost_twice_however_often_the_user_stopped_it(answered):
    lab, study = answered
    states = [JobState.CANCELLED] * 4 + [JobState.LOST, JobState.LOST]
    with lab.deps.database.write() as session:
        run = session.exec(select(Experiment.id).order_by(Experiment.id)).first()
        assert run
        for attempt, state in enumerate(states, 2):
            session.add(Job(experiment_id=run, attempt=attempt, key=f"{run}.{attempt}", state=state))

    def view() -> store.RunView:
        return next(each for each in store.runs(lab.deps.database, study) if each.experiment_id == run)

    assert (view().attempt, view().num_lost, view().wants_another_attempt) == (7, 2, True)
    with lab.deps.database.write() as session:
        session.add(Job(experiment_id=run, attempt=8, key=f"{run}.8", state=JobState.PREEMPTED))
    assert (view().num_lost, view().is_settled) == (3, True)


def test_failing_runs_are_counted_and_decide_nothing(lab_in):
    lab = lab_in({"group_size=8": {"fail_seeds": [1, 2, 3], "rise": 0.9}})
    study = lab.begin(EXAMPLE)
    assert lab.go(study) is StudyStatus.DONE
    assert leaf_of(lab, study) is Leaf.TOO_MANY_FAILURES
    report = (lab.deps.home.study(study).report / "report.md").read_text()
    assert "3 of 6 runs failed" in report
    assert "CUDA is on fire" in report
    with lab.deps.database.read() as session:
        states = [job.state for job in session.exec(select(Job))]
    assert states.count(JobState.FAILED_CODE) == 3, "a run that fails by itself is not tried again"
    assert all(checks(lab, study).values())


def test_a_reference_that_fails_ends_the_study_before_the_other_arms_are_paid(lab_in):
    lab = lab_in({"group_size=4": {"fail_seeds": [1, 2]}})
    study = lab.begin(EXAMPLE)
    assert lab.go(study) is StudyStatus.DONE
    assert len(bundles.load(lab.deps.database, study).runs) == 3
    assert "no other level was tried" in (lab.deps.home.study(study).report / "report.md").read_text()
    assert all(checks(lab, study).values())


def test_exit_code_0_without_results_is_a_failure(lab_in):
    lab = lab_in({"*": {"is_silent": True}})
    study = lab.begin(EXAMPLE)
    lab.go(study)
    runs = bundles.load(lab.deps.database, study).runs
    assert {run.reason for run in runs} == {"exit code 0, but it left no results.json"}


def test_a_run_with_another_config_is_quarantined(lab_in):
    lab = lab_in(EFFECT)
    study = lab.begin(EXAMPLE)
    build = lab.deps.workshop.build

    def wrong(plan: Any, arm: Any, folder: Path) -> str:
        sha = build(plan, arm, folder)
        if arm.level == 8:
            effects = json.loads((folder / "effects.json").read_text())
            effects["trainer"]["learning_rate"] = 0.5
            (folder / "effects.json").write_text(json.dumps(effects))
        return str(sha)

    lab.deps.workshop.build = wrong
    lab.go(study)
    loaded = bundles.load(lab.deps.database, study)
    assert leaf_of(lab, study) is Leaf.TOO_MANY_FAILURES
    assert {run.status.value for run in loaded.runs if run.arm == "group_size=8"} == {"quarantined"}
    assert "learning_rate is 0.5, planned 0.001" in loaded.findings[0].message


def test_a_run_that_diverged_counts_as_failed_and_one_that_lost_an_update_is_doubted(lab_in):
    lab = lab_in({"group_size=8": {"rise": 0.6, "bad_steps": [1, 2, 3, 4, 5]}, "group_size=4": {"bad_steps": [3]}})
    study = lab.begin(EXAMPLE)
    assert lab.go(study) is StudyStatus.DONE
    loaded = bundles.load(lab.deps.database, study)
    assert leaf_of(lab, study) is Leaf.TOO_MANY_FAILURES
    assert {run.status.value for run in loaded.runs if run.arm == "group_size=8"} == {"quarantined"}
    assert {run.status.value for run in loaded.runs if run.arm == "group_size=4"} == {"done"}
    messages = [(finding.severity.value, finding.message) for finding in loaded.findings]
    assert messages.count(("high", "the gradient of all 5 updates was not finite, so training diverged")) == 3
    assert messages.count(("medium", "the gradient of 1 of 5 updates was not finite, so they changed no weight")) == 3


def test_two_identical_seeds_are_noticed(answered):
    lab, study = answered
    records = bundles.load(lab.deps.database, study).records
    assert check_seeds(records) == []
    (problem,) = check_seeds([*records, records[0]])
    assert "same scores" in problem.message


def test_a_seed_that_copies_one_of_an_earlier_stage_is_noticed(lab_in):
    lab = lab_in({"*": {"sd": 0.08}, "group_size=4": {"copies": {"4": 2}}})
    study = lab.begin(EXAMPLE)
    lab.go(study)
    loaded = bundles.load(lab.deps.database, study)
    assert loaded.look == 2
    found = [finding.message for finding in loaded.findings]
    assert found == ["seeds 2 and 4 of group_size=4 gave the same scores, game by game"]


def test_a_report_says_which_runs_were_warned_about_and_what_was_left_out(lab_in):
    lab = lab_in({"group_size=8": {"rise": 0.6, "warned_steps": [2, 3, 5]}})
    study = lab.begin(EXAMPLE)
    lab.go(study)
    folder = lab.deps.home.study(study).report
    report = (folder / "report.md").read_text()
    assert "The engine warned in 3 of 6 runs." in report
    assert "| 8 | 2 | zero variance | 2 to 5 (3) | 90% of the &lt;groups&gt; are flat |" in report
    assert "| 8 | 2 | zero\\_variance | 21 |" in report
    assert "| 4 | 2 | zero" not in report
    page = (folder / "report.html").read_text()
    assert "90% of the &lt;groups&gt; are flat" in page
    runs = json.loads((folder / "report.json").read_text())["runs"]
    assert [len(run["warnings"]) for run in runs if run["arm"] == "group_size=4"] == [0, 0, 0]
    (said, *_) = [run for run in runs if run["arm"] == "group_size=8"]
    assert said["left_out"] == {"zero_variance": 21}
    assert said["warnings"] == [
        {
            "kind": "zero_variance", "policy": "", "first_step": 2, "last_step": 5, "num_steps": 3, "value": 0.9,
            "message": "90% of the <groups> are flat",
        }
    ]  # fmt: skip
    assert all(checks(lab, study).values())


def test_a_study_without_warnings_says_so(answered):
    lab, study = answered
    report = (lab.deps.home.study(study).report / "report.md").read_text()
    assert "The engine warned in 0 of 6 runs." in report


def test_a_turned_down_plan_runs_nothing(lab_in):
    lab = lab_in()
    study = lab.begin(EXAMPLE)
    assert lab.go(study, is_approved=False) is StudyStatus.ABANDONED
    with lab.deps.database.read() as session:
        assert session.exec(select(Job)).all() == []
    assert lab.go(study) is StudyStatus.ABANDONED, "an ended study stays ended"


class Listener(http.server.BaseHTTPRequestHandler):
    """Takes what tracing sends."""

    def do_GET(self) -> None:
        self.server.heard.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


def test_tracing_variables_of_other_tools_send_nothing_of_a_study(lab_in, monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        server.heard = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for name in ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING_V2", "LANGCHAIN_TRACING"):
            monkeypatch.setenv(name, "true")
        for name in ("LANGSMITH_ENDPOINT", "LANGCHAIN_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
            monkeypatch.setenv(name, url)
        for name in ("LANGSMITH_API_KEY", "LANGCHAIN_API_KEY"):
            monkeypatch.setenv(name, "lsv2_a_key")
        langsmith_env.get_env_var.cache_clear()
        lab = lab_in()
        environments = []
        build = lab.deps.workshop.build
        lab.deps.workshop.build = lambda *words: environments.append(dict(os.environ)) or build(*words)
        try:
            assert lab.go(lab.begin(EXAMPLE)) is StudyStatus.DONE
        finally:
            wait_for_all_tracers()
            langsmith_env.get_env_var.cache_clear()
            server.shutdown()
    assert server.heard == []
    assert not [name for name in environments[0] if name.startswith(("LANGSMITH_", "LANGCHAIN_"))], "nor do its jobs"
    assert os.environ["LANGSMITH_TRACING"] == "true"


def test_a_plan_that_was_changed_between_showing_and_locking_is_refused(lab_in):
    lab = lab_in()
    study = lab.begin(EXAMPLE)
    path = lab.deps.home.study(study).plan

    def tamper(_: Any) -> Any:
        plan = json.loads(path.read_text())
        plan["alpha"] = 0.4
        path.write_text(json.dumps(plan))
        return Approval(True, "test")

    with pytest.raises(PlanError, match="not the plan that was shown"):
        drive(study, lab.deps, tamper)


def test_a_locked_plan_can_not_be_changed_in_the_database(answered):
    lab, _ = answered
    with pytest.raises(ConflictError, match="locked plan"), lab.deps.database.write() as session:
        session.connection().exec_driver_sql("UPDATE prereg SET canonical_json = '{}'")


def test_verify_notices_a_changed_score_and_a_changed_report(answered):
    lab, study = answered
    page = lab.deps.home.study(study).report / "report.html"
    page.write_text(page.read_text().replace("faster", "slower"))
    assert [name for name, is_ok in checks(lab, study).items() if not is_ok] == ["report.html"]
    with lab.deps.database.write() as session:
        item = session.exec(select(EvalItem)).first()
        assert item
        item.score = 0.99
        session.add(item)
    assert checks(lab, study)["numbers"] is False


def test_verify_notices_a_decision_that_the_tree_did_not_take(answered):
    lab, study = answered
    with lab.deps.database.write() as session:
        decision = session.exec(select(Decision).where(Decision.branch == "superior")).one()
        decision.branch = "inferior"
        session.add(decision)
    assert checks(lab, study)["decisions"] is False


def test_verify_says_each_check_and_the_result_last(answered, capsys):
    lab, study = answered
    assert verify_study(study, home=lab.deps.home.root, db=None, as_json=True) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1] == {"event": "result", "study": study, "is_ok": True}
    assert {event["event"] for event in events[:-1]} == {"check"}


TAMPERED_NUMBERS = {
    "se_eval": 0.5,
    "n_seeds": 30,
    "n_items": 1000,
    "level": 0.5,
    "params": {"failed": 0},
    "method": "guess",
    "estimand": "luck",
    "unit": "points",
}


@pytest.mark.parametrize(("column", "value"), TAMPERED_NUMBERS.items())
def test_verify_notices_a_number_whose_row_was_changed(answered, column, value):
    lab, study = answered
    with lab.deps.database.write() as session:
        row = session.exec(select(Estimate).where(Estimate.key == "run/group_size=8/s1")).one()
        setattr(row, column, value)
        session.add(row)
    assert checks(lab, study)["numbers"] is False


def test_verify_notices_every_change_of_a_claim_and_of_a_way_through_the_tree(answered):
    lab, study = answered
    database = lab.deps.database
    changes = {"caveats": ["It rained."], "slots": {}, "hypothesis_id": None, "text_template": "Eight wins."}
    for column, value in changes.items():
        with database.write() as session:
            claim = session.exec(select(Claim).where(Claim.key == "group_size=8")).one()
            before = getattr(claim, column)
            setattr(claim, column, value)
        assert checks(lab, study)["claims"] is False, column
        with database.write() as session:
            setattr(session.exec(select(Claim).where(Claim.key == "group_size=8")).one(), column, before)
    assert all(checks(lab, study).values())
    with database.write() as session:
        extra = Claim(
            study_id=study, key="more", form="descriptive", text_template="All is well.", strength="supported"
        )
        session.add(extra)
    assert checks(lab, study)["claims"] is False
    with database.write() as session:
        for claim in session.exec(select(Claim)):
            session.exec(delete(ClaimEvidence).where(col(ClaimEvidence.claim_id) == claim.id))
            session.delete(claim)
    assert checks(lab, study)["claims"] is False, "a study that is done has its claims"


@pytest.mark.parametrize(
    ("branch", "column", "value"),
    [
        ("go_on", "branch", "too_many_failures"),
        ("go_on", "predicate_trace", []),
        ("superior", "branch", "nonsense"),
        ("superior", "arm_key", "group_size=4"),
        ("superior", "node_id", "n9"),
        ("superior", "predicate_trace", []),
    ],
)
def test_verify_reads_every_decision_again_those_on_the_noise_floor_included(answered, branch, column, value):
    lab, study = answered
    with lab.deps.database.write() as session:
        setattr(session.exec(select(Decision).where(Decision.branch == branch)).one(), column, value)
    assert checks(lab, study)["decisions"] is False


def test_a_decision_on_the_noise_floor_that_names_no_arm_is_about_the_reference(answered):
    lab, study = answered
    with lab.deps.database.write() as session:
        session.exec(select(Decision).where(Decision.branch == "go_on")).one().arm_key = None
    assert all(checks(lab, study).values())


def test_the_command_that_repeats_a_study_says_all_that_was_wished_and_runs_nothing_else(hostile):
    home, study = hostile
    paths = Home(home).study(study)
    report = (paths.report / "report.md").read_text()
    (line,) = [line for line in report.splitlines() if line.startswith("a3r research")]
    assert shlex.split(line, comments=True) == [
        *("a3r", "research", "--yes", "--extra-seeds", "2", "--updates", "5", "--eval-games", "10"),
        *("--minutes", "20.5", "--jobs", "2", "--", EXAMPLE + HOSTILE),
    ]
    (line,) = [line for line in report.splitlines() if line.startswith("cd ")]
    where, _, _ = line.partition(" && ")
    said = subprocess.run(["sh", "-c", f"{where} && pwd"], env={"A3R_HOME": str(home)}, capture_output=True, text=True)
    assert said.stdout == f"{paths.project('group_size=4')}\n"


def test_the_report_says_what_the_command_line_set_and_what_the_question_asked_for(answered):
    lab, study = answered  # with --updates 5, of 64 episodes each
    report = (lab.deps.home.study(study).report / "report.md").read_text()
    assert "| A run trains on 320 episodes. | command line |" in report
    assert "| Every run trains on the same number of episodes, whatever its level. | question |" in report


def test_text_from_the_user_and_from_logs_is_escaped(hostile):
    home, study = hostile
    report = Home(home).study(study).report
    page, text = (report / "report.html").read_text(), (report / "report.md").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<script" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert r"\*\*bold\*\*" in text
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", page).replace("http-equiv", ""), "the page loads nothing"


def test_a_second_process_on_one_study_is_refused(lab_in):
    lab = lab_in()
    study = lab.begin(EXAMPLE)
    with lease(lab.deps.home.study(study).lock, study), pytest.raises(StudyBusyError, match=str(os.getpid())):
        lab.go(study)
    assert lab.go(study, is_approved=False) is StudyStatus.ABANDONED, "it goes on once the other one has let go"


def test_a_study_of_another_graph_version_is_refused(lab_in):
    lab = lab_in()
    study = lab.begin(EXAMPLE)
    with lab.deps.database.write() as session:
        row = session.get(Study, study)
        assert row
        row.graph_version = "0"
        session.add(row)
    with pytest.raises(StudyVersionError, match="version 0"):
        lab.go(study)


@pytest.mark.parametrize("is_outcome_kept", [True, False])
@pytest.mark.parametrize("told_next", ["phase", "stage", "noise_floor"])
def test_a_kill_between_two_steps_of_the_graph_loses_nothing(lab_in, told_next, is_outcome_kept):
    lab = lab_in(EFFECT)
    study = lab.begin(EXAMPLE)
    paths, tell = lab.deps.home.study(study), lab.deps.tell

    def fail(kind: str, /, **fields: Any) -> None:
        tell(kind, **fields)
        if kind == told_next:
            raise A3RError("in the next step")

    for _ in range(2):
        lab.deps.tell = fail
        with pytest.raises(A3RError, match="in the next step"):
            lab.go(study)
        forget_newest_step(paths.checkpoints, is_outcome_kept=is_outcome_kept)
    lab.deps.tell = tell
    assert lab.go(study) is StudyStatus.DONE
    assert leaf_of(lab, study) is Leaf.SUPERIOR
    assert [path.read_text() for path in paths.root.glob("runs/*/starts")] == ["start\n"] * 6


def test_what_was_said_of_a_plan_holds_whatever_is_killed_after_it(lab_in):
    lab = lab_in(EFFECT)
    study = lab.begin(EXAMPLE)
    tell, asked = lab.deps.tell, []

    def ask(_: Any) -> Approval:
        asked.append("may it run?")
        return Approval(len(asked) == 1, "ann")

    def fail(kind: str, /, **fields: Any) -> None:
        tell(kind, **fields)
        if kind == "locked":
            raise A3RError("in the step that locks the plan")

    lab.deps.tell = fail
    with pytest.raises(A3RError, match="locks the plan"):
        drive(study, lab.deps, ask)
    lab.deps.tell = tell
    assert drive(study, lab.deps, ask) is StudyStatus.DONE
    assert asked == ["may it run?"]


def forget_newest_step(path: Path, *, is_outcome_kept: bool) -> None:
    """Leave what a kill leaves that comes when a step has ended and the next is not yet kept as begun, or, without its
    outcome, a moment earlier."""
    with contextlib.closing(sqlite3.connect(path)) as checkpoints, checkpoints:
        newest, ended = checkpoints.execute(
            "SELECT checkpoint_id FROM checkpoints WHERE checkpoint_ns = '' ORDER BY checkpoint_id DESC LIMIT 2"
        )
        for table in ("checkpoints", "writes"):
            checkpoints.execute(f"DELETE FROM {table} WHERE checkpoint_id >= ?", newest)
        if not is_outcome_kept:
            # Interrupts and their answers have negative numbers.
            checkpoints.execute("DELETE FROM writes WHERE checkpoint_ns = '' AND checkpoint_id = ? AND idx >= 0", ended)


def test_the_checkpoint_holds_ids_and_stays_small(answered):
    lab, study = answered
    with saver(lab.deps.home.study(study).checkpoints) as checkpointer:
        state = build_graph(lab.deps, checkpointer).get_state({"configurable": {"thread_id": study}}).values
    assert len(json.dumps(state)) < 1000
    assert set(state) == {"study_id", "graph_version", "plan_sha", "is_approved", "stage", "goes_on"}


@pytest.mark.slow
def test_ctrl_c_cancels_what_runs_keeps_what_is_done_and_resume_goes_on(lab_in):
    lab = lab_in({"*": {"step_s": 0.1}} | EFFECT, processes=2)
    study = lab.begin(EXAMPLE)
    tell = lab.deps.tell

    def interrupt_at_the_comparison(kind: str, /, **fields: Any) -> None:
        tell(kind, **fields)
        if kind == "jobs" and fields["stage"] == 1 and any(status.pid for status in fields["statuses"].values()):
            raise KeyboardInterrupt

    lab.deps.tell = interrupt_at_the_comparison
    with pytest.raises(
        StoppedError, match=f"3 finished runs are kept, 3 were cancelled.*a3r resume {study}"
    ) as stopped:
        lab.go(study)
    assert stopped.value.exit_code == 130
    assert store.study(lab.deps.database, study).status is StudyStatus.PAUSED
    lab.deps.tell = tell
    assert lab.go(study) is StudyStatus.DONE
    assert leaf_of(lab, study) is Leaf.SUPERIOR
    runs = bundles.load(lab.deps.database, study).runs
    assert {run.arm: run.attempt for run in runs} == {"group_size=4": 1, "group_size=8": 2}
    assert "3 starts were repeated" in (lab.deps.home.study(study).report / "report.md").read_text()


def written(home: Path) -> dict[Path, tuple[int, int]]:
    """When each file was written last, and its length."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in home.rglob("*") if path.is_file()}


def as_written_before(lab: Lab) -> None:
    """Give the rows whole paths, as earlier versions wrote them."""
    with lab.deps.database.write() as session:
        for run in session.exec(select(Experiment)):
            run.run_dir = str(lab.deps.home.place(run.run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("are_rows_whole_paths", [True, False])
def test_a_study_in_a_home_that_was_moved_goes_on_inside_it(lab_in, tmp_path, are_rows_whole_paths):
    lab = lab_in({"*": {"step_s": 0.1}} | EFFECT, processes=1)
    home = lab.deps.home.root
    study = begin_and_cut_power(lab, EXAMPLE)
    if are_rows_whole_paths:
        as_written_before(lab)
    lab.deps.database.close()
    end_jobs(home)
    moved = home.rename(tmp_path / "another hömë")
    there = Lab(moved, EFFECT, processes=2)
    try:
        assert there.go(study) is StudyStatus.DONE
        assert leaf_of(there, study) is Leaf.SUPERIOR
        assert all(checks(there, study).values())
        assert sorted(run.attempt for run in bundles.load(there.deps.database, study).runs) == [1, 1, 1, 1, 1, 2]
        assert len([*moved.glob(f"studies/{study}/runs/*/results.json")]) == 6
    finally:
        there.deps.database.close()
    assert [path.name for path in tmp_path.iterdir()] == [moved.name], "nothing was written where the home was"


@pytest.mark.slow
def test_a_study_in_a_copied_home_goes_on_beside_the_other_and_neither_touches_the_other(lab_in, tmp_path):
    lab = lab_in({"*": {"step_s": 0.1}} | EFFECT, processes=1)
    home = lab.deps.home.root
    study = begin_and_cut_power(lab, EXAMPLE)
    as_written_before(lab)
    # The job still runs in the original, and is only slow.
    (job,) = (json.loads(path.read_text())["pid"] for path in home.glob("jobs/*/child.json"))
    os.kill(job, signal.SIGSTOP)
    # In a process of its own, for SQLite's locks are lost with any descriptor of this one.
    subprocess.run(["cp", "-r", home, tmp_path / "copy"], check=True)
    copy = Lab(tmp_path / "copy", EFFECT, processes=2)
    try:
        before = written(home)
        assert copy.go(study) is StudyStatus.DONE
        assert written(home) == before
        assert all(checks(copy, study).values())
        assert sorted(run.attempt for run in bundles.load(copy.deps.database, study).runs) == [1, 1, 1, 1, 1, 2]
    finally:
        copy.deps.database.close()
        os.kill(job, signal.SIGCONT)
    assert lab.go(study) is StudyStatus.DONE
    assert all(checks(lab, study).values())
    assert sorted(run.attempt for run in bundles.load(lab.deps.database, study).runs) == [1] * 6


def test_a_study_whose_files_are_in_another_home_is_refused_and_nothing_is_written(answered, tmp_path):
    lab, study = answered
    with lab.deps.database.write() as session:
        session.exec(select(Study)).one().status = StudyStatus.PAUSED
    elsewhere = tmp_path / "elsewhere"
    lab.deps.home = Home(elsewhere)
    with pytest.raises(A3RError, match=f"was begun in another home than {elsewhere}.*--home"):
        lab.go(study)
    assert not elsewhere.exists()
    assert store.study(lab.deps.database, study).status is StudyStatus.PAUSED


@pytest.mark.slow
def test_a_job_that_can_not_be_started_is_no_result_and_the_study_waits(lab_in):
    lab = lab_in(EFFECT, processes=3)
    study = lab.begin(EXAMPLE)
    project = lab.deps.home.study(study).project("group_size=4")
    tell = lab.deps.tell

    def lose_the_project(kind: str, /, **fields: Any) -> None:
        tell(kind, **fields)
        if kind == "rendered":
            shutil.rmtree(project)

    poll, cancel = lab.deps.executor.poll, lab.deps.executor.cancel
    is_told = []

    def one_after_the_other(keys: Any) -> dict[str, executor.JobStatus]:
        """The others end a moment later, when the first has stopped the study."""
        waits = {} if is_told else {"state": executor.JobState.QUEUED}
        return {
            key: status if key.endswith("s1.1") else dataclasses.replace(status, **waits)
            for key, status in poll(keys).items()
        }

    lab.deps.executor.poll = one_after_the_other
    lab.deps.executor.cancel = lambda keys: is_told.append(cancel(keys))
    lab.deps.tell = lose_the_project
    with pytest.raises(A3RError, match=f"could not be started: .*No such file.*a3r resume {study}"):
        lab.go(study)
    row = store.study(lab.deps.database, study)
    assert row.status is StudyStatus.PAUSED
    assert "could not be started" in row.status_reason
    lab.deps.tell = tell
    plan = store.plan_of(lab.deps.database, study)
    lab.deps.workshop.build(plan, plan.reference, project)
    assert lab.go(study) is StudyStatus.DONE
    assert leaf_of(lab, study) is Leaf.SUPERIOR


def test_a_step_that_fails_says_so_and_can_be_done_again(lab_in):
    lab = lab_in(EFFECT)
    study = lab.begin(EXAMPLE)
    build = lab.deps.workshop.build

    def broken(*_: Any) -> str:
        raise A3RError("no room left")

    lab.deps.workshop.build = broken
    with pytest.raises(A3RError, match="no room left"):
        lab.go(study)
    assert store.study(lab.deps.database, study).status_reason == "no room left"
    lab.deps.workshop.build = build
    assert lab.go(study) is StudyStatus.DONE


@pytest.mark.slow
def test_an_error_leaves_no_job_running_and_resume_goes_on(lab_in):
    lab = lab_in({"*": {"step_s": 0.1}} | EFFECT, processes=2)
    study = lab.begin(EXAMPLE)
    tell = lab.deps.tell

    def fail(kind: str, /, **fields: Any) -> None:
        tell(kind, **fields)
        if kind == "jobs" and any(status.pid for status in fields["statuses"].values()):
            raise OSError(28, "No space left on device")

    lab.deps.tell = fail
    with pytest.raises(OSError, match="No space left"):
        lab.go(study)
    states = [status.state for status in lab.deps.executor.poll(lab.deps.executor.list()).values()]
    assert all(state.is_final for state in states)
    assert executor.JobState.CANCELLED in states
    lab.deps.tell = tell
    assert lab.go(study) is StudyStatus.DONE


@pytest.fixture(scope="module")
def warm() -> ForkServerContext:
    """Starts processes that have imported everything: what kills them finds them at work, not at their imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["a3r.graph.driver", "a3r.workshop", "scipy.optimize"])
    return context


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_study_killed_again_and_again_submits_each_job_once_and_ends_as_if_it_had_not_been(lab_in, warm, seed):
    lab, rng = lab_in(), random.Random(seed)
    home, study = lab.deps.home.root, lab.begin(EXAMPLE)
    kills = 0
    while True:
        driver = warm.Process(target=fake_lab.go_on, args=(home, study, {"*": {"step_s": 0.05}} | EFFECT))
        driver.start()
        driver.join(rng.uniform(0.05, 0.8) if kills < 8 else 120)
        if driver.exitcode is not None:
            break
        assert kills < 8, "it does not end"
        driver.kill()
        driver.join()
        kills += 1
    assert driver.exitcode == 0
    assert kills >= 3
    loaded = bundles.load(lab.deps.database, study)
    assert loaded.leaf_of("group_size=8") is Leaf.SUPERIOR
    with lab.deps.database.read() as session:
        jobs = session.exec(select(Job)).all()
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        assert len(jobs) == len({job.experiment_id for job in jobs}) == 6
        assert session.exec(select(func.count()).select_from(Decision)).one() == 2
    starts = [path.read_text() for path in home.glob("studies/*/runs/*/starts")]
    assert starts == ["start\n"] * 6, "each run was started once"
    assert all(checks(lab, study).values())


@pytest.mark.slow
def test_a_lost_job_is_started_again_as_a_new_attempt(lab_in):
    lab = lab_in({"*": {"step_s": 0.1}} | EFFECT, processes=3)
    study = lab.begin(EXAMPLE)
    tell, killed = lab.deps.tell, []

    def kill_one(kind: str, /, **fields: Any) -> None:
        tell(kind, **fields)
        running = [status for status in fields.get("statuses", {}).values() if status.pid]
        if running and not killed:
            killed.append(running[0].key)
            os.kill(running[0].pid, signal.SIGKILL)

    lab.deps.tell = kill_one
    assert lab.go(study) is StudyStatus.DONE
    with lab.deps.database.read() as session:
        states = {job.key: job.state for job in session.exec(select(Job))}
    assert states[killed[0]] is JobState.LOST
    assert len(states) == 7
    assert leaf_of(lab, study) is Leaf.SUPERIOR


def test_the_report_has_all_its_sections_in_order(answered):
    lab, study = answered
    titles = re.findall(r"^## (.*)$", (lab.deps.home.study(study).report / "report.md").read_text(), flags=re.MULTILINE)
    assert titles == [
        "Answer",
        "What was asked, and what was assumed",
        "Pre-registration",
        "Design",
        "Noise floor, and the smallest difference that can be told",
        "Results",
        "Decisions",
        "Claims by strength",
        "What was not tested",
        "Failures and quarantines",
        "Warnings",
        "Cost",
        "Reproduce",
        "Every number",
    ]
    assert write.verdicts(bundles.load(lab.deps.database, study)) == [("group_size=8", Leaf.SUPERIOR)]


def test_episodes_to_a_threshold_keep_the_runs_that_never_reach_it(lab_in):
    lab = lab_in({"group_size=4": {"rise": 0.1}, "group_size=8": {"rise": 0.6}})
    study = lab.begin("Does a group size of 8 need fewer episodes to reach 0.6 on tic-tac-toe than 4?")
    lab.go(study)
    loaded = bundles.load(lab.deps.database, study)
    assert [loaded.numbers[f"run/group_size=4/s{seed}"].value for seed in (1, 2, 3)] == [320.0] * 3
    assert loaded.leaf_of("group_size=8") is Leaf.SUPERIOR
    assert all(checks(lab, study).values())
    assert (lab.deps.home.study(study).report / "report.md").read_text().count("not reached") == 3
    # A run that gets there with its last episode did reach it, though its number is the same.
    with lab.deps.database.write() as session:
        row = session.exec(select(Estimate).where(Estimate.key == "run/group_size=4/s1")).one()
        row.params = {**row.params, "censored": False}
    changed = bundles.load(lab.deps.database, study)
    assert changed.numbers["run/group_size=4/s1"].value == 320.0
    assert publish.files_of(changed, "Tic-tac-toe")["report.md"].count("not reached") == 2
