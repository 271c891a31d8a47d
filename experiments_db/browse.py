"""The experiment log in a terminal: tables for `a3r runs`, `a3r show` and `a3r compare`, and the same as JSON.

    with database.read() as session:
        Console().print(runs_table(list_runs(session)))

Texts that come from users, models or logs are shown as they are and do nothing: neither markup nor the codes that move
a terminal's cursor.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from experiments_db.derive import json_safe
from experiments_db.intervals import Interval
from experiments_db.models import ExperimentStatus, Severity, StageKind
from experiments_db.queries import SHORT, ArmSummary, Comparison, Evaluation, RunDetail, RunSummary, Warned
from experiments_db.text import plain

NOTHING = "–"
BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"
WARNED = "!"
"""Behind the state of a run that was warned about."""
SPARK_WIDTH = 16
WIDTH_OF_THE_REST = 82
"""Letters that a table of runs needs beside the shapes."""
STYLES = {
    ExperimentStatus.PLANNED: "dim",
    ExperimentStatus.RUNNING: "cyan",
    ExperimentStatus.INTERRUPTED: "yellow",
    ExperimentStatus.DONE: "green",
    ExperimentStatus.FAILED: "red",
    ExperimentStatus.CANCELLED: "yellow",
    ExperimentStatus.QUARANTINED: "magenta",
}


# Whole views


def runs_table(runs: Sequence[RunSummary]) -> RenderableType:
    """The runs, study by study, then those that belong to no comparison. It fits the terminal: where that is narrow,
    the shapes of the training rewards go."""
    if not runs:
        return Text('No runs yet. `vibe train "tic-tac-toe against a random opponent"` makes one.', style="dim")
    studies: dict[str, list[RunSummary]] = defaultdict(list)
    singles: list[RunSummary] = []
    for run in runs:
        (singles if run.stage_kind is StageKind.SINGLE else studies[run.study_id]).append(run)
    parts: list[RenderableType] = []
    for study_id, own in studies.items():
        note = f"study {study_id[-SHORT:]}, {own[0].template}, {_count(own)}"
        parts += [_heading(own[0].question), Text(plain(note), style="dim"), _Runs(own, runs)]
    if singles:
        parts += [_heading("Single runs", _count(singles)), _Runs(singles, runs, are_single=True)]
    parts.append(Text("before, after: held-out reward ± half its 95 % interval over tasks", style="dim"))
    if any(run.warned_of for run in runs):
        parts.append(Text(f"{WARNED} the engine warned while it trained; `a3r show RUN` says of what", style="dim"))
    return Group(*parts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Runs:
    """A table of runs that knows how wide it may be."""

    runs: Sequence[RunSummary]
    context: Sequence[RunSummary]
    """Runs whose training rewards share a scale with these, game by game."""
    are_single: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spark = max(0, min(SPARK_WIDTH, options.max_width - WIDTH_OF_THE_REST))
        names = ("game", "asked for") if self.are_single else ("arm", "seed")
        table = _table("run", *names, "state", "steps", "training reward" if spark else "reward", "before", "after")
        for column in table.columns:
            column.no_wrap = True
            column.overflow = "ellipsis"
        if self.are_single:
            table.columns[2].max_width = max(8, options.max_width - WIDTH_OF_THE_REST - spark + 8)
        else:
            # An arm's name goes on in the next line, so that ids and numbers stay whole.
            table.columns[1].no_wrap, table.columns[1].overflow = False, "fold"
        scales = _scales(self.context)
        for run in self.runs:
            low, high = scales.get(run.template, (0.0, 1.0))
            shape = sparkline(run.rewards, low, high, spark)
            last = number(run.last_reward) if run.rewards else NOTHING
            _add(
                table,
                run.short_id,
                run.template if self.are_single else run.arm,
                run.question if self.are_single else str(run.seed),
                _state(run),
                str(run.steps),
                Text.assemble((shape, "cyan"), " " if shape else "", last),
                _reward(run.before),
                _reward(run.after),
            )
        yield table


def run_view(detail: RunDetail) -> RenderableType:
    """Everything about one run."""
    run = detail.summary
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts_shown: tuple[tuple[str, str | Text | None], ...] = (
        ("run", run.id),
        ("study", f"{run.study_id} ({run.study_kind})"),
        ("state", _state(run)),
        ("why", Text(plain(run.status_reason), style="red") if run.status_reason else None),
        ("game", run.template),
        ("arm", run.arm),
        ("seed", str(run.seed)),
        ("objective", detail.objective),
        ("started", _moment(run.created_at)),
        ("ended", _moment(run.finished_at)),
        ("updates", str(run.steps)),
        ("episodes", _counts(detail.num_episodes)),
        ("not used", _counts(detail.drops)),
        ("left out of updates", _counts(detail.left_out)),
        ("folder", run.run_dir or NOTHING),
        ("plan", f"sha256 {detail.plan_sha256}"),
    )
    for name, value in facts_shown:
        if value is not None:
            _add(facts, name, value)
    parts: list[RenderableType] = [_heading(run.question), Padding(facts, (0, 0, 1, 1))]
    if detail.evaluations:
        parts += [_heading("Held out", "mean over tasks with its 95 % interval"), _evaluations(detail.evaluations)]
    if detail.findings:
        table = _table("severity", "found by", "what", "is")
        for finding in detail.findings:
            style = "red" if finding.severity is Severity.HIGH and finding.is_open else ""
            is_open = "open" if finding.is_open else "settled"
            _add(table, finding.severity, finding.detector, finding.message, is_open, style=style)
        parts += [_heading("Findings"), table]
    if detail.warnings:
        parts += [_heading("Warnings", "of the engine, as they were after the last of these updates")]
        parts += [_warnings(detail.warnings)]
    if detail.metrics:
        parts += [_heading("Last metrics", f"step {run.steps}"), _pairs(detail.metrics)]
    parts += [_heading("Settings"), _pairs(detail.settings)]
    table = _table("attempt", "state", "exit", "from", "to", "cause")
    for job in detail.jobs:
        code = NOTHING if job.exit_code is None else str(job.exit_code)
        cause = job.cause or ""
        _add(table, str(job.attempt), job.state, code, _moment(job.started_at), _moment(job.ended_at), cause)
    parts += [_heading("Jobs"), table]
    files = [("checkpoint", path) for path in detail.checkpoints] + list(detail.files)
    if files:
        table = _table("kind", "path")
        for kind, path in files:
            _add(table, kind, path)
        parts += [_heading("Files"), table]
    return Group(*parts)


def comparison_view(comparison: Comparison) -> RenderableType:
    """Runs side by side: arms over their runs, then what differs, then each run."""
    parts: list[RenderableType] = [
        _heading("Arms", "held-out reward, mean over runs with its 95 % interval"),
        _arms(comparison.arms),
    ]
    if comparison.differing:
        table = _table("setting", *(run.short_id for run in comparison.runs))
        for name, values in comparison.differing.items():
            _add(table, name, *map(_value, values))
        parts += [_heading("What differs"), table]
    else:
        parts.append(Text("All settings are the same.\n", style="dim"))
    note = "held-out reward ± half its 95 % interval over tasks"
    parts += [_heading("Runs", note), _Runs(comparison.runs, comparison.runs)]
    return Group(*parts)


def as_json(value: Any) -> Any:
    """A result of `queries` as JSON can hold it: fields by name, moments in ISO 8601, not finite numbers as texts."""
    match value:
        case datetime():
            return value.isoformat()
        case StrEnum():
            return value.value
        case dict() | Mapping():
            return {str(name): as_json(item) for name, item in value.items()}
        case list() | tuple():
            return [as_json(item) for item in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case _:
            return json_safe(value)


# Words and numbers


def number(value: float | None) -> str:
    """A number in at most seven letters; a word where it is not finite."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3f}"
    return f"{value:.1e}"


def interval(value: Interval | None) -> str:
    """A mean with its interval: `0.531 [0.498, 0.564]`; one value alone has none, nor have several that all agree."""
    if value is None:
        return NOTHING
    if value.low is None or value.high is None:
        return f"{number(value.mean)} [n={value.n}{', alike' if value.n > 1 else ''}]"
    return f"{number(value.mean)} [{number(value.low)}, {number(value.high)}]"


def sparkline(values: Sequence[float | None], low: float, high: float, width: int = SPARK_WIDTH) -> str:
    """The shape of a curve in a few letters, each the mean of its stretch; `×` where a value of it is not finite."""
    num_cells = min(width, len(values))
    letters = []
    for cell in range(num_cells):
        stretch = values[cell * len(values) // num_cells : (cell + 1) * len(values) // num_cells]
        finite = [value for value in stretch if value is not None and math.isfinite(value)]
        if len(finite) < len(stretch):
            letters.append(NOT_FINITE)
            continue
        share = (math.fsum(finite) / len(finite) - low) / (high - low) if high > low else 0.5
        letters.append(BARS[round(min(1.0, max(0.0, share)) * (len(BARS) - 1))])
    return "".join(letters)


# Parts


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in ("seed", "steps", "attempt", "exit") else "left")
    return table


def _add(table: Table, *cells: str | Text, style: str = "") -> None:
    """A row. A bare string would be read for markup, so each becomes a text."""
    table.add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells), style=style)


def _heading(text: str, note: str = "") -> Text:
    return Text.assemble((plain(text), "bold"), (f"  {note}" if note else "", "dim"))


def _count(runs: Sequence[RunSummary]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _scales(runs: Sequence[RunSummary]) -> dict[str, tuple[float, float]]:
    """Smallest and largest training reward, by game."""
    values: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        values[run.template] += [value for value in run.rewards if value is not None and math.isfinite(value)]
    return {template: (min(own), max(own)) for template, own in values.items() if own}


def _reward(evaluation: Evaluation | None) -> str:
    """A mean with half its interval, which is short enough for a table."""
    if evaluation is None or evaluation.reward is None:
        return NOTHING
    mean, low, high = evaluation.reward.mean, evaluation.reward.low, evaluation.reward.high
    return number(mean) if low is None or high is None else f"{number(mean)} ±{(high - low) / 2:.3f}"


def _state(run: RunSummary) -> Text:
    mark = (f" {WARNED}", "yellow") if run.warned_of else ""
    return Text.assemble((run.status.value, STYLES[run.status]), mark)


def updates_of(warned: Warned) -> str:
    """After which updates the engine warned: `7`, `3 to 9`, or `3 to 9 (4)` where it was over between."""
    first, last = warned.first_step, warned.last_step
    if first == last:
        return str(first)
    is_whole = warned.num_steps == last - first + 1
    return f"{first} to {last}" + ("" if is_whole else f" ({warned.num_steps})")


def _warnings(every: Sequence[Warned]) -> Table:
    has_names = any(warned.policy for warned in every)
    table = _table("of", *(["policy"] if has_names else []), "updates", "what")
    for warned in every:
        _add(table, warned.kind, *([warned.policy] if has_names else []), updates_of(warned), warned.message)
    return table


def _evaluations(every: Sequence[Evaluation]) -> Table:
    table = _table(
        "split", "temperature", "step", "label", "reward", "tasks", "attempts", "agent's faults", "env's faults"
    )
    for one in every:
        _add(
            table,
            one.split,
            "greedy" if one.temperature == 0 else f"{one.temperature:g}",
            str(one.step),
            one.label,
            interval(one.reward),
            str(one.reward.n if one.reward else 0),
            str(one.num_attempted),
            str(one.num_policy_faults),
            str(one.num_env_faults),
        )
    return table


def _arms(arms: Sequence[ArmSummary]) -> Table:
    table = _table("arm", "game", "runs", "failed", "unfinished", "before", "after", "rise")
    for arm in arms:
        failed = Text(str(arm.num_failed), style="red" if arm.num_failed else "")
        ends = (interval(arm.before), interval(arm.after), interval(arm.rise))
        unfinished = Text(str(arm.num_unfinished), style="yellow" if arm.num_unfinished else "")
        _add(table, arm.arm, arm.template, str(arm.num_runs), failed, unfinished, *ends)
    return table


def _pairs(values: Mapping[str, Any]) -> Padding:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in values.items():
        _add(grid, name, _value(value))
    return Padding(grid, (0, 0, 1, 1))


def _value(value: Any) -> str:
    match value:
        case None:
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or NOTHING


def _moment(moment: datetime | None) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}" if moment else NOTHING
