"""What a training says while it runs: one event at a time, to the terminal and to a file it can go on from.

`record.jsonl` in the run's folder holds every event. A training that was interrupted reads it back and does not measure
again what it has measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from swarm_engine.watch import refusal_line, why_nothing_trained
from vibe.errors import UsageError

Event = dict[str, Any]

RECORD_FILE = "record.jsonl"


class Record:
    """The events of one training, old and new."""

    def __init__(self, run_dir: Path, *, as_json: bool, out: TextIO | None = None) -> None:
        self._path = run_dir / RECORD_FILE
        self._as_json = as_json
        self._out = out or sys.stdout
        self._events = list(read(self._path))
        _cut_torn_line(self._path)

    def emit(self, kind: str, **fields: Any) -> Event:
        """Write one event down, then show it. Not finite numbers become null, which JSON can say."""
        event: Event = {"event": kind, **_finite(fields)}
        line = json.dumps(event, ensure_ascii=False, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._events.append(event)
        print(line if self._as_json else event_text(event), file=self._out, flush=True)
        return event

    def find(self, kind: str, **fields: Any) -> Event | None:
        """The last event of a kind with these values, or None."""
        wanted = _finite(fields)
        for event in reversed(self._events):
            if event["event"] == kind and all(event.get(name) == value for name, value in wanted.items()):
                return event
        return None

    def last(self, field: str) -> Any:
        """The value of the last event that has this field, or None."""
        return last(self._events, field)

    def all(self, kind: str) -> list[Event]:
        """Every event of a kind, in order."""
        return [event for event in self._events if event["event"] == kind]


def read(path: Path) -> Iterator[Event]:
    """The events of a record, without a last line that was cut off while it was written.

    Raises:
        UsageError: the file can't be read, or a whole line of it is no event.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read ({error}); start in another folder with --run-dir") from error
    # Only a line feed ends an event; `splitlines` would cut at U+2028 too, which JSON leaves as it is in its strings.
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}, line {number} is no event; start in another folder with --run-dir") from error
        yield event


def last(events: Sequence[Event], field: str) -> Any:
    """The value of the last of these events that has this field, or None."""
    return next((event[field] for event in reversed(events) if field in event), None)


def _cut_torn_line(path: Path) -> None:
    """Take an unfinished last line off, so that the next event starts on a line of its own."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def event_text(event: Event) -> str:
    """One event as a line for people."""
    match event["event"]:
        case "begin":
            config, training = event["spec"]["config"], event["spec"]["training"]
            trainer = config["trainer"]
            return (
                f"seed {config['seed']}, {training['updates']} updates of {trainer['tasks_per_update']} games "
                f"x {trainer['group_size']} attempts, evaluated on {training['eval_games']} held-out games"
            )
        case "warning":
            return f"warning after step {event['step']}: {event['text']}"
        case "phase" | "warmup":
            return str(event["text"])
        case "environment":
            return (
                f"{event['num_games']} games without a policy end after {event['most_turns']} replies at most and pay "
                f"from {event['lowest']:g} to {event['highest']:g}"
            )
        case "variance":
            return f"different rewards in {event['share']:.0%} of {event['n_groups']} groups"
        case "step":
            metrics = event["metrics"]
            why = why_nothing_trained(metrics, event["drops"], refusal_line(event))
            return (
                f"step {event['step']:>4}/{event['updates']}  reward {_number(metrics.get('reward_mean'))}  "
                f"entropy {_number(metrics.get('entropy'))}  {event['seconds']:.1f} s" + (f"  {why}" if why else "")
            )
        case "level":
            return f"{event['player']} play: {with_interval(event)} over {event['n_groups']} games"
        case "evaluation":
            how = "greedy" if event["temperature"] == 0 else f"temperature {event['temperature']:g}"
            lost = event.get("n_lost")
            rest = f", {lost} more were lost" if lost else ""
            return (
                f"{event['label']} (step {event['step']}), {how}: {with_interval(event)} "
                f"over {event['n_groups']} held-out games{rest}"
            )
        case "result":
            return f"done in {event['seconds']:.0f} s; {event['path']}"
        case kind:
            rest = "  ".join(f"{name}={value}" for name, value in event.items() if name != "event")
            return f"{kind}: {rest}"


def with_interval(event: Event) -> str:
    """The mean of an evaluation or a level with its interval, or why it has none."""
    low, high = event["ci"]
    if low is None or high is None:
        num = event["n_groups"]
        return f"{event['mean']:.3f} (no interval: {'one game' if num == 1 else f'{num} games, all alike'})"
    return f"{event['mean']:.3f} [{low:.3f}, {high:.3f}]"


def _number(value: float | None) -> str:
    return "    –" if value is None else f"{value:5.3f}"


def _finite(value: Any) -> Any:
    """The same without NaN and infinities, tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
