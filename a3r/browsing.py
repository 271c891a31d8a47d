"""What the commands `a3r runs`, `show` and `compare` do: the experiment log's own views, studies included."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text
from sqlmodel import Session

from a3r import store
from a3r.errors import UsageError
from a3r.liveness import note_the_dead
from a3r.paths import Home
from experiments_db import browse, plots, queries
from experiments_db.engine import Database, open_database
from experiments_db.errors import NotFoundError
from experiments_db.home import home_folder
from experiments_db.models import StudyKind
from experiments_db.text import plain


def show_runs(home: Path | None, db: str | None, *, template: str | None, limit: int, as_json: bool) -> None:
    """Every run, newest study first."""
    root = home_folder(home)
    with _up_to_date(home, db) as database, database.read() as session:
        found = queries.list_runs(session, template=template, limit=limit, home=root)
        if as_json:
            _emit("result", runs=found)
        elif template and not found and (others := queries.num_runs_by_template(session)):
            there = ", ".join(f"{name} ({count})" for name, count in others.items())
            print(f"No run is of the template {plain(template)!r}. These have runs: {plain(there)}")
        else:
            Console(highlight=False).print(browse.runs_table(found))


def show_one(what: str, home: Path | None, db: str | None, *, plot: Path | None, as_json: bool) -> None:
    """A run with everything about it, or a study's runs and its answer."""
    root = home_folder(home)
    with _up_to_date(home, db) as database, database.read() as session:
        if study := _study_of(database, what):
            row = store.study(database, study)
            found = queries.list_runs(session, study_id=study, home=root)
            ids = [run.id for run in found]
            if as_json:
                _plot(session, ids, "heldout", plot, as_json=True)
                _emit("result", study=row.id, status=row.status, question=row.question, runs=found)
                return
            console = Console(highlight=False)
            console.print(browse.runs_table(found))
            reason = f" ({plain(row.status_reason)})" if row.status_reason else ""
            console.print(Text(f"study {row.id} is {row.status}{reason}"))
            report = root / "studies" / study / "report" / "report.html"
            if row.kind is StudyKind.RESEARCH and report.exists():
                print(f"report: {report}")
            _plot(session, ids, "heldout", plot, as_json=False)
        else:
            ids = [queries.find_run(session, what)]
            detail = queries.show_run(session, ids[0], root)
            _show(session, browse.run_view(detail), detail, ids, "heldout", plot, as_json=as_json)


def compare_them(
    what: Sequence[str], home: Path | None, db: str | None, *, metric: str, plot: Path | None, as_json: bool
) -> None:
    """Runs side by side; a study stands for all its runs."""
    with _up_to_date(home, db) as database, database.read() as session:
        ids: list[str] = []
        for text in what:
            if study := _study_of(database, text):
                ids += [run.id for run in queries.list_runs(session, study_id=study)]
            else:
                ids.append(queries.find_run(session, text))
        ids = list(dict.fromkeys(ids))
        if len(ids) < 2:
            raise UsageError(f"{len(ids)} run can't be compared; name another run, or a study with several")
        comparison = queries.compare_runs(session, ids)
        _show(session, browse.comparison_view(comparison), comparison, ids, metric, plot, as_json=as_json)


@contextlib.contextmanager
def _up_to_date(home: Path | None, db: str | None) -> Iterator[Database]:
    """The log, in which nothing is said to run that has died."""
    root = home_folder(home)
    with open_database(db, root) as database:
        note_the_dead(database, Home(root))
        yield database


def _study_of(database: Database, text: str) -> str | None:
    """The study that a text names, if any."""
    try:
        return store.study(database, text).id
    except UsageError:
        return None


def _show(
    session: Session,
    view: RenderableType,
    data: queries.RunDetail | queries.Comparison,
    ids: Sequence[str],
    metric: str,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    """What was found, and its picture where one is asked for. In JSON the result is the last line."""
    if as_json:
        _plot(session, ids, metric, plot, as_json=True)
        _emit("result", **browse.as_json(data))
    else:
        Console(highlight=False).print(view)
        _plot(session, ids, metric, plot, as_json=False)


def _plot(session: Session, ids: Sequence[str], metric: str, path: Path | None, *, as_json: bool) -> None:
    if path is None:
        return
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise UsageError(f"{path} says no kind of picture; end it with .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path} can't be drawn, there is no folder {path.parent}; make it, or name another")
    try:
        drawn = plots.plot_runs(session, ids, metric, path)
    except NotFoundError as error:
        raise UsageError(str(error)) from error
    if as_json:
        _emit("curves", path=str(drawn))
    else:
        print(f"curves: {drawn}")


def _emit(kind: str, **fields: Any) -> None:
    """One JSON line."""
    print(json.dumps({"event": kind, **browse.as_json(fields)}, ensure_ascii=False), flush=True)
