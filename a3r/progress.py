"""What a person sees while a study runs: a live panel on a terminal, plain lines elsewhere, or one JSON line an event.

Jobs say where they are on their standard output, as JSON lines; `Tails` reads what is new there. Nothing here decides.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from a3r.executor import JobState, JobStatus
from a3r.prereg.check import Checked
from a3r.prereg.plan import Arm, Plan, StageKind
from a3r.prereg.tree import Leaf
from a3r.report.facts import duration
from a3r.report.slots import amount
from a3r.store import RunView, batch_of
from experiments_db.models import ExperimentStatus
from experiments_db.models import JobState as RowState
from experiments_db.text import plain

LEAST_SHARE = 0.05
"""Of a run's work; what is done before says little of its pace."""
EVERY_S = 15.0
"""Between two lines about jobs where nothing can be redrawn."""
STAGES: Mapping[StageKind, str] = {
    StageKind.NOISE_FLOOR: "Noise floor",
    StageKind.COMPARE: "Comparison",
    StageKind.CONFIRM: "Confirmation",
}


@dataclass(slots=True)
class Place:
    """Where a job is, by what it said."""

    step: int = 0
    updates: int = 0
    reward: float | None = None
    """Of the last update's training episodes."""
    held_out: float | None = None
    """Of the last evaluation at temperature 1."""
    evaluations: int = 0
    """That it has ended since the last update."""
    text: str = ""
    """The last thing it said in words."""
    warnings: tuple[str, ...] = ()
    """What its last update warned of, by kind."""

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in an event."""
        match event.get("event"):
            case "step":
                self.step, self.updates = int(event["step"]), int(event.get("updates", self.updates))
                self.reward = event.get("metrics", {}).get("reward_mean")
                self.warnings = tuple(str(one["kind"]).replace("_", " ") for one in event.get("health", ()))
                self.evaluations = 0
            case "evaluation":
                self.evaluations += 1
                if event.get("temperature") == 1:
                    self.held_out = event.get("mean")
            case "phase":
                self.text = str(event.get("text", ""))
            case _:
                pass


@dataclass(slots=True)
class Tails:
    """Reads what jobs add to their output."""

    places: dict[str, Place] = field(default_factory=dict)
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read(self, statuses: Iterable[JobStatus]) -> list[tuple[str, dict[str, Any]]]:
        """New events as (job key, event). A line that is still being written is left for later; noise is skipped."""
        found: list[tuple[str, dict[str, Any]]] = []
        for status in statuses:
            place = self.places.setdefault(status.key, Place())
            for event in self._new_lines(status.log):
                place.apply(event)
                found.append((status.key, event))
        return found

    def _new_lines(self, log: Path) -> list[dict[str, Any]]:
        try:
            with log.open("rb") as file:
                file.seek(self._offsets.get(log, 0))
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._offsets[log] = self._offsets.get(log, 0) + len(whole)
        events: list[dict[str, Any]] = []
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                events.append(event)
        return events


def time_left(
    plan: Plan, stage: int, every: Sequence[RunView], statuses: Mapping[str, JobStatus], places: Mapping[str, Place]
) -> float | None:
    """Seconds until the runs that are planned now have ended; None before anything is known. Pure but for the clock.

    A run of another arm may take another time, and a stage begins when the one before has ended. Seeds that the tree
    may add later are not counted.
    """
    now = time.time()
    totals: dict[str, list[float]] = {arm.key: [] for arm in plan.arms}
    """Seconds of a whole run, by arm: of those that have ended, and as those that run are going."""
    running: list[tuple[str, float, float]] = []
    """Arm, seconds so far, share of the work done."""
    for run in every:
        status = statuses.get(run.job_key or "")
        if run.status is ExperimentStatus.DONE and run.seconds > 0:
            totals[run.arm].append(run.seconds)
        elif status is not None and status.state is JobState.RUNNING and status.started_at is not None:
            share = share_done(plan, plan.arm(run.arm), places.get(status.key, Place()))
            spent = now - status.started_at + run.seconds  # and what it took before it was interrupted
            running.append((run.arm, spent, share))
            if share > LEAST_SHARE:
                totals[run.arm].append(spent / share)
    if not (known := [seconds for each in totals.values() for seconds in each]):
        return None
    lengths = {arm: fmean(each or known) for arm, each in totals.items()}
    going = [
        spent * (1 - share) / share if share > LEAST_SHARE else max(lengths[arm] - spent, lengths[arm] / 2)
        for arm, spent, share in running
    ]
    left = 0.0
    for n in (stage,) if stage else (0, 1):
        batch = batch_of(plan, n)
        begun = [run.arm for run in every if run.stage == n and run.is_settled]
        if n == stage:
            begun += [arm for arm, *_ in running]
        waiting = [lengths[arm.key] for arm in batch.arms for _ in range(len(batch.seeds) - begun.count(arm.key))]
        left += makespan([*(going if n == stage else []), *waiting], plan.budget.parallel)
    return left


def share_done(plan: Plan, arm: Arm, place: Place) -> float:
    """How much of a run's work is done, 0 to 1: games played, those of evaluations included."""
    settings = plan.settings_of(arm)
    updates, every, group, tasks = (
        int(settings[name] or 0)
        for name in ("training.updates", "training.eval_every", "trainer.group_size", "trainer.tasks_per_update")
    )
    # Before the first update and after the last one are two evaluations, by the policy's own temperature and greedily.
    evaluations = place.evaluations
    if place.step:
        evaluations += 2 + (place.step - 1) // every
    whole = updates * group * tasks + (4 + (updates - 1) // every) * plan.controls.evaluation_games
    return min(1.0, (place.step * group * tasks + evaluations * plan.controls.evaluation_games) / whole)


def makespan(lengths: Sequence[float], places: int) -> float:
    """Seconds until runs of these lengths have ended, each begun in this order as soon as one of the places is free."""
    free = [0.0] * max(1, places)
    for seconds in lengths:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


class Reporter(Protocol):
    """Shows what happens."""

    def tell(self, kind: str, /, **fields: Any) -> None:
        """One event."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


def reporter(*, as_json: bool) -> Reporter:
    """The one that fits: JSON lines where asked for, a live panel on a terminal, else plain lines."""
    if as_json:
        return JsonReporter()
    console = Console(highlight=False)
    return LiveReporter(console) if console.is_terminal else PlainReporter(console)


class JsonReporter:
    """One JSON line an event."""

    def __init__(self) -> None:
        self._tails = Tails()

    def tell(self, kind: str, /, **fields: Any) -> None:
        """See `Reporter.tell`."""
        if kind == "jobs":
            for key, event in self._tails.read(fields["statuses"].values()):
                self.emit("job_event", job=key, said=event)
            return
        if kind == "checked":
            plan, checked = fields["plan"], fields["checked"]
            fields = {"plan": plan.model_dump(mode="json"), "plan_sha256": plan.sha256, **_checked_as_data(checked)}
        self.emit(kind, **fields)

    def emit(self, kind: str, /, **fields: Any) -> None:
        """One line."""
        print(json.dumps({"event": kind, **fields}, ensure_ascii=False, default=_as_data), flush=True)

    def close(self) -> None:
        """See `Reporter.close`."""


class PlainReporter:
    """Lines for people."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.tails = Tails()
        self._last_line = 0.0

    def tell(self, kind: str, /, **fields: Any) -> None:
        """See `Reporter.tell`."""
        match kind:
            case "scope":
                self.show(scope_view(fields["read_as"], fields["assumed"]))
            case "checked":
                self.show(plan_view(fields["plan"], fields["checked"]))
            case "jobs":
                self.jobs(**fields)
            case _:
                if line := event_text(kind, fields):
                    self.show(line)

    def show(self, what: RenderableType) -> None:
        """Print it; a line is a line, however narrow the terminal is taken to be."""
        self.console.print(what, soft_wrap=isinstance(what, Text))

    def read(self, runs: Sequence[RunView], statuses: Mapping[str, JobStatus]) -> None:
        """Take in what the jobs have said since, and show what they warn of."""
        names = {run.job_key: f"{run.arm} seed {run.seed}" for run in runs}
        for key, event in self.tails.read(statuses.values()):
            if event.get("event") == "warning":
                said = f"  {names.get(key, key)} warns after step {event.get('step')}: {plain(str(event.get('text')))}"
                self.show(Text(said, style="yellow"))

    def jobs(
        self,
        *,
        stage: int,
        plan: Plan,
        every: Sequence[RunView],
        runs: Sequence[RunView],
        statuses: Mapping[str, JobStatus],
    ) -> None:
        """How the jobs stand, now and then."""
        self.read(runs, statuses)
        if time.monotonic() - self._last_line < EVERY_S:
            return
        self._last_line = time.monotonic()
        parts = []
        for run in runs:
            status = statuses.get(run.job_key or "")
            if status is not None and status.state is JobState.RUNNING:
                place = self.tails.places.get(status.key, Place())
                reward = "" if place.reward is None else f" reward {place.reward:.2f}"
                parts.append(f"{run.arm} s{run.seed} {place.step}/{place.updates or '?'}{reward}")
        left = time_left(plan, stage, every, statuses, self.tails.places)
        settled, total = _counts(plan, stage, every)
        tail = f"; about {duration(left)} left" if left is not None else ""
        self.show(Text(f"  {settled} of {total} runs done; {', '.join(parts) or 'starting'}{tail}", style="dim"))

    def close(self) -> None:
        """See `Reporter.close`."""


class LiveReporter(PlainReporter):
    """Lines for people, with a panel of the jobs below them that is redrawn."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None

    def jobs(
        self,
        *,
        stage: int,
        plan: Plan,
        every: Sequence[RunView],
        runs: Sequence[RunView],
        statuses: Mapping[str, JobStatus],
    ) -> None:
        """Redraw the panel."""
        self.read(runs, statuses)
        if self._live is None:
            self._live = Live(console=self.console, transient=True, refresh_per_second=4)
            self._live.start()
        self._live.update(jobs_view(plan, stage, every, runs, statuses, self.tails.places))

    def tell(self, kind: str, /, **fields: Any) -> None:
        """See `Reporter.tell`."""
        if kind not in {"jobs", "job_ended", "submitted"}:
            self.close()
        super().tell(kind, **fields)

    def close(self) -> None:
        """See `Reporter.close`."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def jobs_view(
    plan: Plan,
    stage: int,
    every: Sequence[RunView],
    runs: Sequence[RunView],
    statuses: Mapping[str, JobStatus],
    places: Mapping[str, Place],
) -> RenderableType:
    """The panel: one line a job, and how long it will take."""
    table = Table.grid(padding=(0, 2))
    now = time.time()
    for run in runs:
        status = statuses.get(run.job_key or "")
        if status is None:
            continue
        place = places.get(status.key, Place())
        spent = duration(now - status.started_at) if status.started_at and not status.state.is_final else ""
        bar = ProgressBar(total=max(1, place.updates), completed=place.step, width=24)
        table.add_row(
            Text(f"{run.arm} seed {run.seed}"),
            Text(status.state.value, style="cyan" if status.state is JobState.RUNNING else "dim"),
            bar,
            Text(f"{place.step}/{place.updates}" if place.updates else place.text[:40], style="dim"),
            Text("" if place.reward is None else f"reward {place.reward:.2f}"),
            Text("" if place.held_out is None else f"held-out {place.held_out:.2f}", style="bold"),
            Text(spent, style="dim"),
            Text(", ".join(place.warnings), style="yellow"),
        )
    left = time_left(plan, stage, every, statuses, places)
    settled, total = _counts(plan, stage, every)
    foot = f"{settled} of {total} runs done" + (f", about {duration(left)} left" if left is not None else "")
    return Group(table, Text(foot, style="dim"))


def scope_view(read_as: Sequence[Sequence[str]], assumed: Sequence[str]) -> RenderableType:
    """Which words became what."""
    table = Table.grid(padding=(0, 2))
    for words, meaning in read_as:
        table.add_row(Text(f"  {plain(words)}", style="bold"), Text("→"), Text(plain(meaning)))
    notes = [Text(f"  {plain(note)}", style="dim") for note in assumed]
    return Group(Text("Read as"), table, *notes)


def plan_view(plan: Plan, checked: Checked) -> RenderableType:
    """The plan as it is put to a person."""
    unit = plan.metric.unit
    facts = Table.grid(padding=(0, 2))
    levels = ", ".join(arm.key + (" (reference)" if arm.is_reference else "") for arm in plan.arms)
    each = plan.controls.episodes_per_update
    per_update = f", {each} in each update" if each else ""
    rows = [
        ("arms", levels),
        (
            "the same in all",
            f"{plan.controls.episodes} episodes{per_update}; {plan.controls.evaluation_games} held-out games",
        ),
        ("seeds", f"{', '.join(map(str, plan.seeds))}, and {len(plan.extra_seeds)} more if the tree asks for them"),
        ("metric", plan.metric.kind.value.replace("_", " ")),
        (
            "can be told",
            f"a difference of about {amount(checked.smallest_difference, unit)}, until the noise is measured",
        ),
        *((finding.name, finding.detail) for finding in checked.findings if finding.name in {"budget", "false claims"}),
    ]
    for name, text in rows:
        facts.add_row(Text(f"  {name}", style="bold"), Text(text))
    tree = Table.grid(padding=(0, 2))
    for node in plan.tree.nodes:
        tree.add_row(
            Text(f"  {node.id}"), Text(node.when.test.replace("_", " ")), Text("→ " + node.then.value.replace("_", " "))
        )
    worlds = Table(
        "if there is", *(leaf.value.replace("_", " ") for leaf in Leaf if leaf.is_final), box=None, pad_edge=False
    )
    for world, outcome in checked.simulated.items():
        worlds.add_row(
            world.value,
            *(
                f"{outcome.shares.get(leaf, 0):.0%}" if outcome.shares.get(leaf) else "·"
                for leaf in Leaf
                if leaf.is_final
            ),
        )
    failures = [Text(f"  {finding.name}: {finding.detail}", style="red") for finding in checked.failures]
    heading = Text("Where the tree ends, in invented studies", style="bold")
    return Group(
        Text("\nPlan"),
        facts,
        Text("\nDecision tree, first true node decides"),
        tree,
        Text(""),
        heading,
        worlds,
        *failures,
    )


def event_text(kind: str, fields: Mapping[str, Any]) -> Text | None:
    """An event as a line; None where there is nothing to say."""
    match kind:
        case "locked":
            return Text(f"\nPlan locked: {fields['sha256']}", style="bold")
        case "stage":
            name = STAGES[fields["kind"]]
            seeds = ", ".join(map(str, fields["seeds"]))
            return Text(f"\n{name}: {', '.join(fields['arms'])} with seeds {seeds}", style="bold")
        case "job_ended":
            state = fields["state"]
            good = state is RowState.SUCCEEDED
            cause = "" if good else f": {plain(fields['cause'])[:300]}"
            ended = f"{state.lower().replace('_', ' ')} after {duration(fields['s'])}"
            text = f"  {fields['arm']} seed {fields['seed']} {ended}{cause}"
            return Text(text, style="green" if good else "yellow")
        case "finding":
            where = f"{fields['arm']} seed {fields['seed']}: " if "arm" in fields else ""
            return Text(f"  {fields['severity']} finding: {where}{plain(fields['text'])}", style="yellow")
        case "noise_floor":
            unit, (low, high) = fields["unit"], fields["ci"]
            if fields["smallest_difference"] is None:
                return Text("  The runs agree exactly, so how far equal runs differ is not known yet.")
            return Text(
                f"  Equal runs deviate by {amount(fields['sd'], unit)} [{amount(low, unit)}, {amount(high, unit)}]. "
                f"{fields['seeds']} seeds tell a difference of {amount(fields['smallest_difference'], unit)} with "
                f"probability {fields['power']:.0%}."
            )
        case "decision":
            last = fields["trace"][-1] if fields["trace"] else {"node": "–", "because": ""}
            branch = fields["branch"].replace("_", " ")
            return Text(f"  {fields['arm']}: {last['node']} → {branch} ({last['because']})")
        case "stopping":
            return Text(f"\nStopping {fields['jobs']} running jobs …", style="yellow")
        case _:
            return None


def _counts(plan: Plan, stage: int, every: Sequence[RunView]) -> tuple[int, int]:
    seeds = len(plan.seeds) + (len(plan.extra_seeds) if stage == 2 else 0)
    return sum(run.is_settled for run in every), len(plan.arms) * seeds


def _checked_as_data(checked: Checked) -> dict[str, Any]:
    return {
        "checks": [
            {"name": finding.name, "is_ok": finding.is_ok, "detail": finding.detail} for finding in checked.findings
        ],
        "simulated": {
            world.value: {leaf.value: share for leaf, share in outcome.shares.items()}
            for world, outcome in checked.simulated.items()
        },
        "smallest_difference": checked.smallest_difference,
    }


def _as_data(value: object) -> object:
    return value.value if isinstance(value, StrEnum) else str(value)
