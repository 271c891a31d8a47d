"""What the commands `a3r research`, `resume` and `verify` do. The command line parses and calls one of these."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.console import Console

from a3r import store
from a3r.errors import A3RError, PlanError
from a3r.executor.local import LocalExecutor, default_slots
from a3r.graph.state import GRAPH_VERSION, Approval, Deps
from a3r.paths import Home
from a3r.planner.builtin import builtin_catalogue
from a3r.planner.design import Wishes, design
from a3r.planner.offline import Reading
from a3r.prereg.check import check
from a3r.prereg.plan import Plan
from a3r.progress import JsonReporter, PlainReporter, Reporter, reporter
from a3r.report import bundle as bundles
from a3r.report import write
from a3r.report.slots import filled
from a3r.verify import verify
from a3r.workshop import VibeWorkshop, refuse_impossible
from experiments_db.engine import Database, open_database
from experiments_db.errors import ExperimentsDbError
from experiments_db.home import home_folder
from experiments_db.models import ClaimForm, StudyStatus
from swarm_engine.signals import ending_signals, leave_dead_terminal

PACKAGES = ("a3r", "torch", "transformers", "langgraph", "numpy", "scipy")


def research(
    reading: Reading,
    *,
    home: Path | None,
    db: str | None,
    wishes: Wishes,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Plan a question, run it, answer it. Returns the exit code."""
    question = reading.question
    root = home_folder(home)
    slots = wishes.parallel if wishes.parallel > 0 else default_slots()
    wishes = Wishes(**{**asdict(wishes), "parallel": slots})
    told = reporter(as_json=as_json)
    plan = design(reading, wishes)
    refuse_impossible(plan)
    checked = check(plan)
    if dry_run:
        told.tell("scope", read_as=[list(pair) for pair in reading.read_as], assumed=list(reading.assumed))
        told.tell("checked", plan=plan, checked=checked)
    if checked.failures:
        raise PlanError("; ".join(f"{each.name}: {each.detail}" for each in checked.failures))
    if dry_run:
        if isinstance(told, JsonReporter):
            told.emit("result", plan_sha256=plan.sha256, jobs=plan.budget.jobs)
        return 0
    with open_database(db, root) as database:
        study = store.create_study(database, question, fingerprint(), GRAPH_VERSION, asdict(wishes))
        Home(root).study(study).root.mkdir(parents=True, exist_ok=True, mode=0o700)
        told.tell("study", id=study, home=str(root))
        return _go(study, database, Home(root), slots, told, yes=yes)


def resume(study: str, *, home: Path | None, db: str | None, jobs: int, yes: bool, as_json: bool) -> int:
    """Go on with a study that was stopped or killed. Returns the exit code."""
    root = home_folder(home)
    with open_database(db, root) as database:
        row = store.study(database, study)
        told = reporter(as_json=as_json)
        return _go(row.id, database, Home(root), jobs if jobs > 0 else default_slots(), told, yes=yes)


def verify_study(study: str, *, home: Path | None, db: str | None, as_json: bool) -> int:
    """Compute everything again. Returns 0 where all of it comes out as it is on record, else 1."""
    root = home_folder(home)
    with open_database(db, root) as database:
        row = store.study(database, study)
        results = verify(database, row.id, Home(root).study(row.id), title_of(database, row.id))
    is_ok = all(result.is_ok for result in results)
    console, lines = Console(highlight=False), JsonReporter()
    for result in results:
        if as_json:
            lines.emit("check", name=result.name, is_ok=result.is_ok, detail=result.detail)
        else:
            mark = "[green]✓[/]" if result.is_ok else "[red]✗[/]"
            console.print(f"{mark} {result.name:<16}", end="")
            console.print(result.detail, markup=False)
    if as_json:
        lines.emit("result", study=row.id, is_ok=is_ok)
    return 0 if is_ok else 1


def title_of(database: Database, study: str) -> str:
    """The game's title, for people."""
    plan = store.plan_of(database, study)
    return next(game.title for game in builtin_catalogue().games if game.name == plan.template.name)


def fingerprint() -> dict[str, str | dict[str, str]]:
    """What a repeat needs to be the same: interpreter, machine, packages."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"python": platform.python_version(), "machine": platform.platform(), "packages": versions}


def _go(study: str, database: Database, home: Home, slots: int, told: Reporter, *, yes: bool) -> int:
    # Imported here: LangGraph takes longer than all that is done before a study runs, or where none does.
    from a3r.graph.driver import ENDED, drive

    deps = Deps(
        database=database,
        home=home,
        executor=LocalExecutor(home.jobs, slots, secrets=database.for_child()[1]),
        catalogue=builtin_catalogue(),
        workshop=VibeWorkshop(),
        tell=told.tell,
    )
    if store.study(database, study).status in ENDED:
        told.tell("ended", id=study)
    try:
        with _stopped_in_order():
            status = drive(study, deps, _approver(told, study, yes=yes))
    except (ExperimentsDbError, OSError) as error:
        raise A3RError(f"{error}; then go on with: a3r resume {study}") from error
    finally:
        told.close()
    if status is StudyStatus.ABANDONED:
        raise A3RError(f"nothing was run: {store.study(database, study).status_reason}")
    _say_answer(study, database, home, told)
    return 0


@contextlib.contextmanager
def _stopped_in_order() -> Iterator[None]:
    """A polite kill and a closed terminal are treated like Ctrl-C: the jobs are ended, and the study can go on."""

    def stop(number: int, frame: FrameType | None) -> None:
        leave_dead_terminal()
        signal.default_int_handler(number, frame)

    before = {number: signal.signal(number, stop) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _approver(told: Reporter, study: str, *, yes: bool) -> Callable[[Plan], Approval]:
    def ask(plan: Plan) -> Approval:
        if yes:
            return Approval(True, "--yes")
        if not isinstance(told, PlainReporter) or not sys.stdin.isatty():
            raise A3RError(f"the plan {plan.sha256[:12]} waits for a yes: a3r resume {study} --yes")
        answer = told.console.input("\nRun it? [y/N] ", markup=False).strip().lower()
        return Approval(answer in {"y", "yes"}, "user")

    return ask


def _say_answer(study: str, database: Database, home: Home, told: Reporter) -> None:
    """The claims, and where the report is, last."""
    bundle = bundles.load(database, study)
    report = home.study(study).report
    source = write.slots_of(bundle, title_of(database, study), check(bundle.plan))
    answers = [claim for claim in bundle.claims if claim.form is not ClaimForm.DESCRIPTIVE]
    if isinstance(told, JsonReporter):
        told.emit(
            "result",
            study=study,
            verdicts={arm: leaf.value for arm, leaf in write.verdicts(bundle)},
            claims=[filled(claim.text_template, source) for claim in answers],
            report_md=str(report / "report.md"),
            report=str(report / "report.html"),
        )
    elif isinstance(told, PlainReporter):
        console = told.console
        console.print()
        for claim in answers:
            console.print(filled(claim.text_template, source), style="bold", markup=False, soft_wrap=True)
            for caveat in claim.caveats:
                console.print(filled(caveat, source), style="dim", markup=False, soft_wrap=True)
        console.print(f"\nverify: a3r verify {study}", markup=False, soft_wrap=True)
        # Nothing may break the path's line: it is what scripts and people take away.
        print(f"report: {report / 'report.md'}\nreport: {report / 'report.html'}", flush=True)
