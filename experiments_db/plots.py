"""Curves as pictures: every run as a thin line, arms as a mean with its interval, nothing smoothed.

    with database.read() as session:
        plot_runs(session, ids, "heldout", Path("curve.png"))

What is not finite is a gap in the line, a mark at the foot of the axes and a share under the title. Colour-blind
readers can tell the colours apart (Okabe and Ito), and the markers differ too. The same rows give the same bytes.
"""

from __future__ import annotations

import math
import os
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, assert_never

from sqlmodel import Session

from experiments_db.errors import NotFoundError
from experiments_db.intervals import Interval, t_interval
from experiments_db.queries import HELD_OUT, Axis, RunSummary, by_arm, curves, held_out_curve, list_runs
from experiments_db.text import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, without its yellow, which is too light on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
TITLE_LETTERS = 72
LARGEST = 1e300
"""Axes overflow beyond it."""
MAX_MARKERS = 16
"""A line with more points than this is drawn without a marker for each."""
SIZE_INCHES = (7.2, 4.3)
DPI = 160
UNITS = {
    HELD_OUT: "held-out reward",
    "reward_mean": "training reward (mean per episode)",
    "reward_std": "deviation of the training reward",
    "entropy": "entropy (nats per token)",
    "kl_sampling": "KL of sampler and trainer (nats per token)",
    "loss": "loss",
    "grad_norm": "norm of the gradient",
    "clip_fraction": "share of tokens clipped",
    "truncated_fraction": "share of calls cut off",
    "update_s": "update (s)",
    "seconds": "wall time of a step (s)",
}
RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.labelcolor": "#333333",
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "a3r",
    "text.parse_math": False,  # a dollar in a question is a dollar
    "figure.facecolor": "white",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One run's curve."""

    x: tuple[float, ...]
    y: tuple[float | None, ...]
    """None, NaN and infinities where there is nothing to draw."""
    bounds: tuple[tuple[float, float] | None, ...]
    """Interval of each value within the run, where it has one."""


@dataclass(frozen=True, slots=True)
class Series:
    """The runs that are shown as one."""

    label: str
    lines: tuple[Line, ...]


def plot_runs(
    session: Session,
    ids: Sequence[str],
    metric: str,
    path: Path,
    *,
    axis: Axis = Axis.STEP,
    temperature: float | None = None,
    levels: Mapping[str, float] | None = None,
    title: str | None = None,
) -> Path:
    """Draw one metric of some runs, arm by arm, into a file; its suffix (png, svg, pdf) says which kind.

    Args:
        metric: an engine's metric such as `reward_mean`, or `heldout` for the held-out reward.
        temperature: of held-out play; None takes 1 where it was measured.
        levels: values to compare with, by name, as lines across: `{"legal random play": 0.29}`.
        title: None says what is drawn.
    Returns:
        The path.
    Raises:
        NotFoundError: a run does not exist, or none has this metric.
    """
    runs = list_runs(session, ids=ids)
    if missing := set(ids) - {run.id for run in runs}:
        raise NotFoundError(f"there is no run {min(missing)!r}; `a3r runs` lists them")
    series = read_series(session, runs, metric, axis=axis, temperature=temperature)
    figure = draw(series, metric, axis, title=title or _title(runs), levels=levels or {})
    return save(figure, path)


def read_series(
    session: Session,
    runs: Sequence[RunSummary],
    metric: str,
    *,
    axis: Axis = Axis.STEP,
    temperature: float | None = None,
) -> list[Series]:
    """The runs' curves, arm by arm. Runs that have no such metric are left out.

    Raises:
        NotFoundError: none has.
    """
    found: list[Series] = []
    problem = NotFoundError("there are no runs to draw")
    for label, own in by_arm(session, runs).items():
        lines: list[Line] = []
        for run in own:
            try:
                lines.append(_line(session, run.id, metric, axis, temperature))
            except NotFoundError as error:
                problem = error
        if lines:
            found.append(Series(label, tuple(lines)))
    if not found:
        raise problem
    return found


def _line(session: Session, experiment_id: str, metric: str, axis: Axis, temperature: float | None) -> Line:
    if metric != HELD_OUT:
        points = curves(session, experiment_id, metric, axis).points
        return Line(tuple(p.x for p in points), tuple(p.value for p in points), (None,) * len(points))
    every = held_out_curve(session, experiment_id, temperature=temperature, axis=axis)
    if not every:
        raise NotFoundError(f"run {experiment_id} has no held-out evaluation yet")
    return Line(
        tuple(one.x for one in every),
        tuple(one.reward.mean if one.reward else None for one in every),
        tuple(_bounds(one.reward) for one in every),
    )


def _bounds(interval: Interval | None) -> tuple[float, float] | None:
    if interval is None or interval.low is None or interval.high is None:
        return None
    return interval.low, interval.high


def mean_over_runs(lines: Sequence[Line]) -> list[tuple[float, Interval]]:
    """Mean over runs, with its interval, at every place where all of them have a finite value.

    Where some runs have none, a mean over the others would be of the survivors; there is a gap instead.
    """
    by_x: dict[float, list[float]] = defaultdict(list)
    for line in lines:
        for x, y in zip(line.x, line.y, strict=True):
            if _is_drawable(y):
                by_x[x].append(y)
    whole = sorted((x, values) for x, values in by_x.items() if len(values) == len(lines))
    return [(x, interval) for x, values in whole if (interval := t_interval(values)) is not None]


def draw(
    series: Sequence[Series],
    metric: str,
    axis: Axis,
    *,
    title: str,
    levels: Mapping[str, float] | None = None,
) -> Figure:
    """The figure; see `plot_runs`."""
    import matplotlib
    from matplotlib.figure import Figure as NewFigure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(RC):
        figure = NewFigure(figsize=SIZE_INCHES, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        axes = figure.add_subplot()
        for one, colour, marker in zip(series, cycle(COLOURS), cycle(MARKERS), strict=False):
            _draw_series(axes, one, colour, marker)
        for name, level in (levels or {}).items():
            axes.axhline(level, color="#777777", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
            axes.annotate(
                plain(name), (1, level), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
                ha="left", va="center", fontsize=8, color="#666666",
            )  # fmt: skip
        axes.set_xlabel(_axis_label(axis))
        axes.set_ylabel(UNITS.get(metric, metric))
        axes.margins(x=0.02, y=0.08)
        _mark_not_finite(axes, series)
        _write_title(axes, title, series, metric)
        if len(series) > 1 or any(len(one.lines) > 1 for one in series):
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.13), ncols=min(4, len(series)), borderaxespad=0.3)
    return figure


def _draw_series(axes: Axes, series: Series, colour: str, marker: str) -> None:
    if len(series.lines) == 1:
        _draw_alone(axes, series.lines[0], series.label, colour, marker)
        return
    for line in series.lines:
        dots = "." if len(line.x) <= MAX_MARKERS else ""
        y = [_drawable(value) for value in line.y]
        axes.plot(line.x, y, color=colour, linewidth=0.9, alpha=0.45, marker=dots, markersize=3, zorder=2)
    means = mean_over_runs(series.lines)
    x = [place for place, _ in means]
    label = f"{plain(series.label)} ({len(series.lines)} runs)"
    axes.plot(
        x, [one.mean for _, one in means], color=colour, linewidth=2.2, label=label,
        marker=marker if len(x) <= MAX_MARKERS else "", markersize=5.5, markeredgecolor="white", markeredgewidth=0.8,
        zorder=4, solid_capstyle="round",
    )  # fmt: skip
    band = [_bounds(one) or (one.mean, one.mean) for _, one in means]
    axes.fill_between(
        x, [low for low, _ in band], [high for _, high in band], color=colour, alpha=0.14, linewidth=0, zorder=1
    )


def _draw_alone(axes: Axes, line: Line, label: str, colour: str, marker: str) -> None:
    """A run that stands for itself, each value with its interval where it has one."""
    dots, size = (marker, 4.5) if len(line.x) <= MAX_MARKERS else (".", 5)
    y = [_drawable(value) for value in line.y]
    axes.plot(
        line.x, y, color=colour, linewidth=1.8, marker=dots, markersize=size, label=plain(label), zorder=4,
        solid_capstyle="round",
    )  # fmt: skip
    for x, bounds in zip(line.x, line.bounds, strict=True):
        if bounds is not None:
            axes.vlines(x, *bounds, color=colour, linewidth=1.3, alpha=0.5, zorder=3)


def _mark_not_finite(axes: Axes, series: Sequence[Series]) -> None:
    """A cross at the foot of the axes for every value that is not there."""
    for one, colour in zip(series, cycle(COLOURS), strict=False):
        x = [
            place for line in one.lines for place, value in zip(line.x, line.y, strict=True) if not _is_drawable(value)
        ]
        if x:
            axes.plot(
                x, [0.015] * len(x), transform=axes.get_xaxis_transform(), linestyle="", marker="x", markersize=4,
                color=colour, clip_on=False, zorder=5,
            )  # fmt: skip


def _write_title(axes: Axes, title: str, series: Sequence[Series], metric: str) -> None:
    """The title, and under it in small letters what the marks mean and what is not in the picture."""
    notes = []
    if any(len(one.lines) > 1 for one in series):
        notes.append("thin lines: runs; thick: their mean; band: its 95 % interval over runs")
    elif metric == HELD_OUT:
        notes.append("bars: 95 % interval over held-out tasks")
    values = [value for one in series for line in one.lines for value in line.y]
    missing = [value for value in values if not _is_drawable(value)]
    if missing:
        is_large = any(value is not None and math.isfinite(value) for value in missing)
        what = f"not finite or beyond {LARGEST:g}" if is_large else "not finite"
        notes.append(f"{len(missing)} of {len(values)} values are {what} (×)")
    axes.set_title(textwrap.fill(plain(title), TITLE_LETTERS), pad=22 if notes else 10)
    axes.annotate(
        "; ".join(notes), (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points", fontsize=8.5,
        color=COLOURS[1] if missing else "#666666", va="bottom",
    )  # fmt: skip


def save(figure: Figure, path: Path) -> Path:
    """Write a figure to a file, whole or not at all."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.removeprefix(".") or "png"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with matplotlib.rc_context(RC), warnings.catch_warnings():
            # A question in a script that the font lacks shows boxes in the title; the curves are whole.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(unfinished, format=kind, metadata=_NO_DATE.get(kind))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


_NO_DATE: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Nothing in a file that two drawings of the same rows would not share."""


def _title(runs: Sequence[RunSummary]) -> str:
    games = ", ".join(sorted({run.template for run in runs}))
    return f"{games}: run {runs[0].short_id}" if len(runs) == 1 else f"{games}: {len(runs)} runs"


def _axis_label(axis: Axis) -> str:
    match axis:
        case Axis.STEP:
            return "step (updates of the policy)"
        case Axis.EPISODES:
            return "training episodes"
        case Axis.WALL_S:
            return "wall time (s)"
        case Axis.OPTIMIZER_STEPS:
            return "optimizer steps"
        case other:
            assert_never(other)


def _is_drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) <= LARGEST


def _drawable(value: float | None) -> float:
    """NaN, which leaves a gap, for what can't be drawn."""
    return value if _is_drawable(value) else math.nan
