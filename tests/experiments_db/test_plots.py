from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.collections import LineCollection, PolyCollection
from sqlmodel import Session

from experiments_db.engine import Database
from experiments_db.errors import NotFoundError
from experiments_db.intervals import t_interval
from experiments_db.models import EvalItem, EvalRun, MetricPoint, StageKind, StudyKind, ValueMark
from experiments_db.plots import Line, Series, draw, mean_over_runs, plot_runs, read_series, save
from experiments_db.queries import Axis, list_runs
from experiments_db.writes import (
    add_blueprint,
    add_experiment,
    add_prereg,
    add_stage,
    create_single_run,
    create_study,
)

PNG = b"\x89PNG\r\n\x1a\n"


def line(*y: float | None) -> Line:
    return Line(tuple(float(x) for x in range(1, len(y) + 1)), y, (None,) * len(y))


def add_points(session: Session, run: str, *values: float) -> None:
    for step, value in enumerate(values, 1):
        finite, mark = (value, ValueMark.FINITE) if math.isfinite(value) else (None, ValueMark.NAN)
        session.add(MetricPoint(experiment_id=run, name="loss", step=step, value=finite, mark=mark))


def add_evaluation(session: Session, run: str, step: int, *scores: float) -> None:
    row = EvalRun(experiment_id=run, step=step, split_name="heldout", n_attempted=len(scores), n_valid=len(scores))
    session.add(row)
    session.flush()
    for item, score in enumerate(scores):
        session.add(EvalItem(eval_run_id=row.id, item_id=str(item), sample=0, score=score))


@pytest.fixture
def study(database: Database) -> list[str]:
    """Two arms of two runs, each with three losses and two evaluations."""
    with database.write() as session:
        study = create_study(session, StudyKind.RESEARCH, "q")
        stage = add_stage(session, add_prereg(session, study, {}), 0, StageKind.COMPARE)
        runs = []
        for size in (16, 8):
            arm = f"group_size={size}"
            blueprint = add_blueprint(session, stage, arm, objective="o", template_id="nim", params={"size": size})
            for seed in (0, 1):
                run = add_experiment(session, blueprint, f"{size}/{seed}", seed_train=seed)
                add_points(session, run, 1.0 + seed, 2.0 + seed, 3.0 + seed)
                add_evaluation(session, run, 0, 0.0, 0.5)
                add_evaluation(session, run, 3, 0.5, 1.0)
                runs.append(run)
    return runs


def test_the_mean_is_over_runs_and_only_where_all_of_them_are() -> None:
    means = mean_over_runs([line(1.0, 2.0, 3.0), line(3.0, math.nan, 5.0), line(2.0, 2.0, 4.0, 9.0)])
    assert means == [(1.0, t_interval([1.0, 3.0, 2.0])), (3.0, t_interval([3.0, 5.0, 4.0]))]


def test_every_run_is_drawn_and_each_arm_has_a_mean_and_a_band() -> None:
    series = [Series("a", (line(1.0, 2.0), line(2.0, 3.0))), Series("b", (line(0.0, 1.0), line(1.0, 2.0)))]
    figure = draw(series, "loss", Axis.STEP, title="t")
    (axes,) = figure.axes
    drawn = [[float(y) for y in one.get_ydata()] for one in axes.get_lines()]
    assert drawn == [[1.0, 2.0], [2.0, 3.0], [1.5, 2.5], [0.0, 1.0], [1.0, 2.0], [0.5, 1.5]]
    assert len([one for one in axes.collections if isinstance(one, PolyCollection)]) == 2
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["a (2 runs)", "b (2 runs)"]
    assert axes.get_xlabel() == "step (updates of the policy)"
    assert axes.get_ylabel() == "loss"


def test_values_that_are_not_finite_are_gaps_marks_and_a_share_under_the_title() -> None:
    values = [2.0 if step % 4 == 0 else math.nan for step in range(1, 41)]
    figure = draw([Series("a", (line(*values),))], "loss", Axis.STEP, title="t")
    (axes,) = figure.axes
    curve, marks = axes.get_lines()
    assert [math.isnan(float(y)) for y in curve.get_ydata()] == [math.isnan(value) for value in values]
    assert [float(x) for x in marks.get_xdata()] == [float(step) for step in range(1, 41) if step % 4]
    assert "30 of 40 values are not finite" in " ".join(text.get_text() for text in axes.texts)


def test_a_run_alone_has_a_bar_for_each_interval() -> None:
    one = Line((0.0, 1.0), (0.5, 0.75), ((0.25, 0.75), None))
    (axes,) = draw([Series("a", (one,))], "heldout", Axis.EPISODES, title="t").axes
    (bar,) = [collection for collection in axes.collections if isinstance(collection, LineCollection)]
    assert [tuple(map(float, point)) for point in bar.get_segments()[0]] == [(0.0, 0.25), (0.0, 0.75)]
    assert axes.get_legend() is None
    assert axes.get_xlabel() == "training episodes"


def test_levels_are_lines_with_names() -> None:
    figure = draw([Series("a", (line(0.0, 1.0),))], "heldout", Axis.STEP, title="t", levels={"random": 0.25})
    (axes,) = figure.axes
    assert [float(y) for y in axes.get_lines()[1].get_ydata()] == [0.25, 0.25]
    assert "random" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("title", ["a $ of b $ and \x1b[2J", "谁是卧底：四个玩家", "[bold] " + "long words " * 20, ""])
def test_titles_that_others_wrote_are_drawn_as_they_are(title: str, tmp_path: Path) -> None:
    path = save(draw([Series(title, (line(0.0, 1.0),))], title, Axis.STEP, title=title), tmp_path / "a.png")
    assert path.read_bytes().startswith(PNG)


def test_numbers_too_large_for_axes_are_marked(tmp_path: Path) -> None:
    figure = draw([Series("a", (line(1e308, -1e308, 1e299, 1e-308),))], "loss", Axis.STEP, title="t")
    save(figure, tmp_path / "a.png")
    assert "2 of 4 values are not finite or beyond 1e+300" in " ".join(text.get_text() for text in figure.axes[0].texts)


@pytest.mark.parametrize("metric", ["loss", "heldout"])
def test_the_same_rows_give_the_same_picture(database: Database, study: list[str], tmp_path: Path, metric: str) -> None:
    with database.read() as session:
        for suffix in ("png", "svg"):
            one = plot_runs(session, study, metric, tmp_path / "a" / f"one.{suffix}")
            other = plot_runs(session, study[::-1], metric, tmp_path / "b" / f"other.{suffix}")
            assert one.read_bytes() == other.read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["one.png", "one.svg"]


def test_series_are_arms_in_the_order_people_count(database: Database, study: list[str]) -> None:
    with database.read() as session:
        runs = list_runs(session, ids=study)
        loss = read_series(session, runs, "loss")
        held_out = read_series(session, runs, "heldout", axis=Axis.STEP)
    assert [one.label for one in loss] == ["group_size=8", "group_size=16"]
    assert [one.y for one in loss[0].lines] == [(1.0, 2.0, 3.0), (2.0, 3.0, 4.0)]
    assert [one.x for one in held_out[0].lines] == [(0.0, 3.0), (0.0, 3.0)]
    assert held_out[0].lines[0].y == (0.25, 0.75)


def test_single_runs_with_other_settings_are_never_averaged(database: Database) -> None:
    with database.write() as session:
        ids = [create_single_run(session, "vibe", "q", "nim", {"stones": stones}) for stones in (7, 9)]
        for run in ids:
            add_points(session, run, 1.0)
        series = read_series(session, list_runs(session, ids=ids), "loss")
    assert sorted(one.label for one in series) == sorted(f"run {run[-8:]}" for run in ids)


def test_what_can_not_be_drawn_is_said(database: Database, study: list[str], tmp_path: Path) -> None:
    with database.read() as session:
        with pytest.raises(NotFoundError, match="there is no run 'nope'"):
            plot_runs(session, ["nope"], "loss", tmp_path / "a.png")
        with pytest.raises(NotFoundError, match="has no metric 'kl'; it has: loss"):
            plot_runs(session, study, "kl", tmp_path / "a.png")
        with pytest.raises(NotFoundError, match="no held-out evaluation yet"):
            plot_runs(session, study, "heldout", tmp_path / "a.png", temperature=0.5)
    assert list(tmp_path.glob("*.png")) == []
