"""A server for people: its status, its events, an episode's contexts, as text in a terminal."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from swarm_engine.client.errors import SwarmUnavailableError
from swarm_engine.client.wire import Checkpoint, Event, Status

if TYPE_CHECKING:
    from rich.table import Table

    from swarm_engine.client.sync import SwarmClient

NUM_STEPS_SHOWN = 12
METRICS = ("reward_mean", "loss", "grad_norm", "entropy", "kl_sampling", "clip_fraction")
REFRESH_S = 0.5


def status_lines(status: Status) -> list[str]:
    """A status in a few lines."""
    pool = status.pool
    lines = [f"state     {status.state}" + (f": {status.reason}" if status.reason else "")]
    for name, policy in status.policies.items():
        lines.append(f"policy    {name} at version {policy.version}" + ("" if policy.trainable else ", frozen"))
    if status.update:
        lines.append(f"update    step {status.update['step']}, {status.update['seconds']:.1f} s so far")
    if status.save_error:
        lines.append(f"saved     NOT SAVED since {_step(status.saved_step)}: {status.save_error}")
    elif status.saved_step is not None:
        lines.append(f"saved     {_step(status.saved_step)}")
    targets = pool.targets
    lines.append(
        f"batch     {pool.episodes}/{targets['episodes']} episodes, {pool.tasks}/{targets['tasks']} tasks complete, "
        f"{pool.informative_tasks} informative"
    )
    lines.append(f"running   {status.running} episodes of {len(status.clients)} clients")
    return lines


def _step(step: int | None) -> str:
    return "the start" if step is None else f"step {step}"


def checkpoint_lines(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """One checkpoint a line."""
    lines = []
    for one in checkpoints:
        reward, evaluation = ("-" if value is None else f"{value:.4g}" for value in (one.reward, one.evaluation))
        best = "  best" if one.is_best else ""
        lines.append(f"step {one.step}: reward {reward}, evaluation {evaluation}, {one.path}{best}")
    return lines or ["there is no checkpoint yet"]


def timeline_lines(timelines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Contexts block by block; sampled blocks show how many of their tokens are trained."""
    lines = []
    for number, timeline in enumerate(timelines):
        shared = f", {timeline['num_shared_tokens']} tokens shared" if timeline.get("num_shared_tokens") else ""
        lines.append(f"timeline {number}: policy {timeline['policy']}, agent {timeline['agent']}{shared}")
        for block in timeline["blocks"]:
            trained = sum(block["loss_mask"])
            counts = f"{len(block['token_ids'])} tokens" + (f", {trained} trained" if trained else "")
            lines.append(f"  [{block['author']} {block['role']}, {counts}] {block['text']!r}")
    return lines


def print_events(client: SwarmClient, after: int) -> None:
    """Print events as JSON lines for ever."""
    for event in client.events(after):
        print(json.dumps(asdict(event)), flush=True)


def print_lines(client: SwarmClient, after: int) -> None:
    """Print state changes, updates and checkpoints in words, one a line, for ever."""
    for event in client.events(after):
        match event.kind:
            case "state":
                print(f"{event.payload['to']}: {event.payload['cause']}", flush=True)
            case "checkpoint":
                how = "not saved: " + event.payload["error"] if event.payload["error"] else "saved"
                print(f"checkpoint of step {event.payload['step']}: {how}", flush=True)
            case "step":
                values = ((name, event.payload["metrics"].get(name)) for name in METRICS)
                said = [f"{name} {value:.4g}" for name, value in values if value is not None]
                print(", ".join([f"step {event.payload['step']}: {event.payload['seconds']:.2f} s", *said]), flush=True)


def watch_table(client: SwarmClient) -> None:
    """Show state, batch and the last steps until the server goes away or Ctrl-C."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    steps: deque[Event] = deque(maxlen=NUM_STEPS_SHOWN)
    gone = threading.Event()

    def follow() -> None:
        try:
            for event in client.events():
                if event.kind == "step":
                    steps.append(event)
        except SwarmUnavailableError:
            # The status request of the main thread meets the same end and reports it.
            pass
        finally:
            gone.set()

    threading.Thread(target=follow, name="events", daemon=True).start()
    with Live(refresh_per_second=2, transient=False) as live:
        while not gone.is_set():
            lines = status_lines(client.status())
            live.update(Group(Text("\n".join(lines)), step_table(list(steps))))
            time.sleep(REFRESH_S)


def step_table(steps: Sequence[Event]) -> Table:
    """The last updates, one a row."""
    from rich.table import Table

    table = Table()
    for name in ("step", "seconds", *METRICS):
        # Folded where the terminal is narrow: a number without its exponent would be another number.
        table.add_column(name, overflow="fold", justify="right")
    for event in steps:
        metrics = event.payload["metrics"]
        numbers = [metrics.get(name) for name in METRICS]
        cells = ["" if number is None else f"{number:.4g}" for number in numbers]
        table.add_row(str(event.payload["step"]), f"{event.payload['seconds']:.2f}", *cells)
    return table
