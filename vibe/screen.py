"""What a person sees while a training runs: a live curve in a terminal, plain lines where the output is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vibe.errors import printable
from vibe.plot import in_text
from vibe.record import Event, event_text, with_interval
from vibe.spec import GameSpec

PLOT_HEIGHT = 12


class Screen(Protocol):
    """Shows the events of a training."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def show(self, event: Event) -> None:
        """Take one event in and show what it changes."""
        ...


class PlainScreen:
    """A line an event, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        pass

    def show(self, event: Event) -> None:
        """Print the event in words."""
        if event["event"] in SHOWN:
            self._console.print(Text(event_text(event)))


class JsonScreen:
    """A JSON line an event, as the project's train.py wrote it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        pass

    def show(self, event: Event) -> None:
        """Print the event."""
        if event["event"] != "result":  # the command's own result comes last and says more
            emit(event)


class LiveScreen:
    """A curve that grows."""

    def __init__(self, console: Console, title: str, updates: int) -> None:
        self._console = console
        self._title = title
        self._updates = updates
        self._line: list[tuple[float, float]] = []
        self._marks: list[tuple[float, float]] = []
        self._now = "starting"
        self._warnings: list[str] = []
        """Kinds of the newest update's."""
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._drawn)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, event: Event) -> None:
        """Let the curve grow; what is said once stays above it."""
        match event["event"]:
            case "step":
                if (reward := event["metrics"].get("reward_mean")) is not None:
                    self._line.append((event["step"], reward))
                self._now = event_text(event)
                self._warnings = [one["kind"].replace("_", " ") for one in event.get("health", ())]
            case "warning":
                self._console.print(Text(event_text(event), style="yellow"))
            case "evaluation":
                if event["temperature"] != 0:
                    self._marks.append((event["step"], event["mean"]))
                self._console.print(Text(event_text(event)))
            case kind if kind in SHOWN:
                self._now = event_text(event)
                self._console.print(Text(self._now))
            case _:
                pass

    def _drawn(self) -> RenderableType:
        width = max(30, min(self._console.width, 100) - 4)
        rows = in_text(self._line, self._marks, width=width, height=PLOT_HEIGHT, last_x=self._updates)
        below = Text(f"{'':7}└ update 0{'':{max(0, width - 26)}}{self._updates:>6}", style="dim")
        plot = Text("\n".join(rows))
        plot.highlight_regex("●", style="bold green")
        caption = "reward in training (line) and on held-out games (●)"
        lines: list[RenderableType] = [plot, below, Text(self._now, style="dim")]
        if self._warnings:
            lines.append(Text(f"warning: {', '.join(self._warnings)}", style="yellow"))
        return Panel(Group(*lines), title=self._title, subtitle=caption)


SHOWN = frozenset({"begin", "phase", "environment", "level", "variance", "warmup", "step", "warning", "evaluation"})
"""Events that people are shown as they come."""


def emit(event: Mapping[str, Any]) -> None:
    """Print one event as a JSON line."""
    import json

    print(json.dumps(event, ensure_ascii=False), flush=True)


def screen(console: Console, title: str, updates: int, *, as_json: bool) -> Screen:
    """The screen that fits the output."""
    if as_json:
        return JsonScreen()
    return LiveScreen(console, title, updates) if console.is_terminal else PlainScreen(console)


def reading(spec: GameSpec) -> Table:
    """Which of the user's sentences became which rule, what was not used, what was assumed."""
    table = Table(
        title=f"{spec.title} (template {spec.template}, version {spec.template_version})", title_justify="left"
    )
    table.add_column("you said", overflow="fold", ratio=1)
    table.add_column("it means", overflow="fold", ratio=1)
    for item in spec.requirements:
        table.add_row(Text(f"“{item.text}”"), Text(f"{item.id}  {item.meaning}"))
    for note in spec.unused:
        table.add_row(Text(f"“{note.text}”"), Text(f"not used: {note.reason}", style="yellow"))
    for assumption in spec.assumptions:
        table.add_row(Text("(nothing)", style="dim"), Text(assumption, style="dim"))
    return table


def results(evaluations: Sequence[Event], levels: Sequence[Event]) -> Table:
    """Before and after on held-out games, beside what scripted players earn there."""
    table = Table(title="reward on held-out games, mean and 95% interval over games", title_justify="left")
    for name in ("", "before", "after", "games"):
        table.add_column(name, justify="left" if not name else "right")
    for temperature, name in ((1, "temperature 1"), (0, "greedy")):
        found = {event["label"]: event for event in evaluations if event["temperature"] == temperature}
        if "before" in found and "after" in found:
            games = str(found["after"]["n_groups"])
            table.add_row(name, with_interval(found["before"]), with_interval(found["after"]), games)
    for level in levels:
        table.add_row(Text(level_name(level), style="dim"), "", with_interval(level), str(level["n_groups"]))
    return table


def level_name(level: Event) -> str:
    """Whose level it is, for people."""
    return "random legal play" if level["player"] == "random" else f"{level['player']} player"


def games(samples: Sequence[Sequence[Mapping[str, str]]]) -> Iterator[Panel]:
    """Sample games, move by move. What the model wrote is shown as text, never as markup."""
    for number, moves in enumerate(samples, 1):
        has_boards = any("\n" in move["note"] for move in moves)
        body = Columns(map(_board_move, moves), padding=(0, 3)) if has_boards else Group(*map(_line_move, moves))
        yield Panel(body, title=f"held-out game {number}, after training", title_align="left")


def _line_move(move: Mapping[str, str]) -> Text:
    return Text.assemble((f"{move['seat']:<9} ", "bold"), f"{printable(move['text']):<12} ", (move["note"], "dim"))


def _board_move(move: Mapping[str, str]) -> Text:
    return Text.assemble((move["seat"], "bold"), f" {printable(move['text'])}\n", (move["note"], "dim"))


def error_console() -> Console:
    """Where messages for people go that are no result."""
    return Console(stderr=True, file=sys.stderr)
