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
from swarm_engine.metrics import by_policy
from swarm_engine.types import EngineState, Untrained

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swarm_engine.client.sync import SwarmClient

NUM_STEPS_SHOWN = 12
METRICS = ("reward_mean", "loss", "grad_norm", "entropy", "kl_sampling", "clip_fraction")
REFRESH_S = 0.5
EPISODES_WITHOUT_LOSS = {
    "zero_variance": "in groups of equal reward",
    "untrained": "without a reply to train",
    "alone": "alone in their group",
    "stale": "sampled by weights that are too old",
    "unrewarded": "without a reward above zero",
}
"""The trainer's drops in words. The other drops of a step are of episodes that came into no batch."""


def status_lines(status: Status) -> list[str]:
    """A status in a few lines."""
    pool = status.pool
    lines = [f"state     {status.state}" + (f": {status.reason}" if status.reason else "")]
    if status.state in (EngineState.OFFLINE, EngineState.FAILED):
        lines.append("          start it with `swarm start`")
    for name, policy in status.policies.items():
        rate = "" if policy.learning_rate is None else f", learning rate {policy.learning_rate:g}"
        lines.append(f"policy    {name} at version {policy.version}" + (rate if policy.trainable else ", frozen"))
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
    crowd = status.connections
    if crowd["closed"] or crowd["refused"]:
        lines.append(
            f"files     the limit of open files leaves room for {crowd['limit']} connections: {crowd['closed']} idle "
            f"ones were closed for others, {crowd['refused']} requests refused; raise it and start the server again"
        )
    if refused := refusal_line(asdict(status)):
        lines.append(f"refused   since the last update: {refused}")
    return lines


def refusal_line(payload: Mapping[str, Any]) -> str | None:
    """What was refused, in words; None where nothing was.

    Args:
        payload: of a `step`, `episode` or `drop` event, or any other that counts refusals.
    """
    if not (count := payload.get("num_refused")):
        return None
    return _counted(count, "call", f"refused, the last with {payload['last_refusal']}")


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
    """Contexts block by block; sampled blocks show how many of their tokens are trained, or why none is."""
    lines = []
    for number, timeline in enumerate(timelines):
        shared = f", {timeline['num_shared_tokens']} tokens shared" if timeline.get("num_shared_tokens") else ""
        moved = timeline.get("num_out_of_context_tokens")
        out = f", {moved} tokens trained out of the context that sampled them" if moved else ""
        lines.append(f"timeline {number}: policy {timeline['policy']}, agent {timeline['agent']}{shared}{out}")
        for block in timeline["blocks"]:
            trained = sum(block["loss_mask"])
            counts = f"{len(block['token_ids'])} tokens" + (f", {trained} trained" if trained else "")
            if because := block["untrained_because"]:
                counts += f", not trained: {because.replace('_', ' ')}"
            lines.append(f"  [{block['author']} {block['role']}, {counts}] {block['text']!r}")
    return lines or ["the episode has no call yet"]


def why_nothing_trained(
    metrics: Mapping[str, float | None], drops: Mapping[str, int], refused: str | None = None
) -> str | None:
    """Why an update left the weights as they were, in words; None where it moved them.

    Args:
        metrics: of the update's `step` event.
        drops: of the same event.
        refused: of the same event, by `refusal_line`.
    """
    if not metrics.get("skipped"):
        if metrics.get("learning_rate") == 0:
            return "nothing trained: the learning rate is 0, this is past trainer.total_updates"
        return None
    if metrics.get("nonfinite_gradient") or metrics.get("nonfinite_loss"):
        return "nothing trained: loss or gradient was not finite"
    if metrics.get("grad_norm") == 0:
        why = ", trainer.off_policy bounds every token" if metrics.get("off_policy_fraction") == 1 else ""
        return f"nothing trained: the gradient was zero{why}"
    reasons = [
        _counted(drops[drop], "episode", said) for drop, said in EPISODES_WITHOUT_LOSS.items() if drops.get(drop)
    ]
    reasons += [
        _counted(int(count), "call", untrained.replace("_", " "))
        for untrained in Untrained
        if (count := metrics.get(f"{untrained}_calls"))
    ]
    reasons += [refused] if refused else []
    return "nothing trained" + (f": {', '.join(reasons)}" if reasons else "")


def _counted(count: int, thing: str, said: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'} {said}"


def print_events(client: SwarmClient, after: int) -> None:
    """Print events as JSON lines for ever."""
    for event in client.events(after):
        print(json.dumps(asdict(event)), flush=True)


def step_lines(payload: Mapping[str, Any]) -> list[str]:
    """An update in words, a line for each policy that is trained; then what goes wrong."""
    lines = []
    drops, refused = by_policy(payload["drops"]), refusal_line(payload)
    for policy, metrics in by_policy(payload["metrics"]).items():
        head = f"step {payload['step']}: {payload['seconds']:.2f} s" + (f", {policy}" if policy else "")
        values = ((name, metrics.get(name)) for name in METRICS)
        said = [f"{name} {value:.4g}" for name, value in values if value is not None]
        if why := why_nothing_trained(metrics, drops.get(policy, {}), refused):
            said.append(why)
        lines.append(", ".join([head, *said]))
    if refused and refused not in lines[-1]:
        lines.append(f"  {refused}")
    return [*lines, *(f"  warning: {warning['message']}" for warning in payload.get("health", ()))]


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
                print("\n".join(step_lines(event.payload)), flush=True)


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


def step_table(steps: Sequence[Event]) -> RenderableType:
    """The last updates, a row for each policy that is trained; below them which trained nothing, and what goes wrong.

    Of at most 80 columns where there is one policy.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 0, 0, 1))
    has_names = any("" not in by_policy(event.payload["metrics"]) for event in steps)
    for name in ("step", "seconds", *(["policy"] if has_names else []), *METRICS):
        # Folded where the terminal is narrow: a number without its exponent would be another number.
        table.add_column(name.replace("_", "\n"), overflow="fold", justify="right")
    notes = []
    for event in steps:
        step, drops = event.payload["step"], by_policy(event.payload["drops"])
        refused = refusal_line(event.payload)
        for policy, metrics in by_policy(event.payload["metrics"]).items():
            numbers = [metrics.get(name) for name in METRICS]
            cells = ["" if number is None else f"{number:.3g}" for number in numbers]
            table.add_row(str(step), f"{event.payload['seconds']:.2f}", *([policy] if has_names else []), *cells)
            if why := why_nothing_trained(metrics, drops.get(policy, {}), refused):
                notes.append(Text(f"step {step}{', ' + policy if policy else ''}: {why}"))
        if refused and not (notes and refused in notes[-1].plain):
            notes.append(Text(f"step {step}: {refused}"))
    if steps:
        notes += [Text(f"warning: {warning['message']}") for warning in steps[-1].payload.get("health", ())]
    return Group(table, *notes)
