"""Stands in for a training project: writes the rows that a real one writes, with effects that are known.

`effects.json` in its folder says what happens. Like the real one it goes on in the folder it was started in. It writes
plain SQL, for a process that imports no tables of ours starts at once, and studies start many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sqlite3
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

from experiments_db.ulid import new_ulid


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    for name in ("--run-dir", "--seed", "--experiment", "--db"):
        parser.add_argument(name, required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--go-on", action="store_true")
    args = parser.parse_args(argv)
    effects = json.loads(Path("effects.json").read_text())
    seed, folder = int(args.seed), Path(args.run_dir)
    drawn = effects.get("copies", {}).get(str(seed), seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starts").open("a") as starts:
        starts.write("start\n")
    if seed in effects.get("fail_seeds", []):
        print("CUDA is on fire", file=sys.stderr)
        return 3
    rng = random.Random(f"{effects['arm']}-{drawn}")
    top = effects["start"] + effects["rise"] + rng.gauss(0, effects["sd"])
    updates, every, games = effects["updates"], effects["eval_every"], effects["games"]
    with contextlib.closing(sqlite3.connect(unquote(args.db.removeprefix("sqlite:///")), timeout=30)) as database:
        tell_config(database, args.experiment, {"trainer": effects["trainer"], "seed": seed})
        for step in range(updates + 1):
            if step:
                time.sleep(effects.get("step_s", 0.0))
                tell_gradient(database, args.experiment, step, is_finite=step not in effects.get("bad_steps", []))
                if step in effects.get("warned_steps", []):
                    tell_warning(database, args.experiment, step)
                say(event="step", step=step, updates=updates, metrics={"reward_mean": top})
            if step % every and step != updates:
                continue
            label = "before" if step == 0 else "after" if step == updates else "during"
            level = effects["start"] + (top - effects["start"]) * (1 - math.exp(-4 * step / updates))
            scores = [
                level + random.Random(f"{game}-{drawn}-{step}-{effects['arm']}").gauss(0, 0.05) for game in range(games)
            ]
            if effects.get("means_agree"):  # each seed wins other games, all seeds as many
                scores = [level + 0.01 * ((game + seed) % games) for game in range(games)]
            tell_evaluation(database, args.experiment, step, label, scores)
            mean = math.fsum(scores) / games
            say(event="evaluation", step=step, temperature=1, label=label, mean=mean, ci=[mean, mean])
    if not effects.get("is_silent"):
        (folder / "results.json").write_text("{}")
    return 0


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def add(database: sqlite3.Connection, table: str, **row: object) -> bool:
    """Add a row; returns whether it is new: a run that goes on has some already."""
    names, places = ", ".join(row), ", ".join("?" * len(row))
    statement = f"INSERT INTO {table} ({names}) VALUES ({places}) ON CONFLICT DO NOTHING"
    return database.execute(statement, tuple(row.values())).rowcount == 1


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


def tell_config(database: sqlite3.Connection, experiment: str, config: dict[str, object]) -> None:
    """What the engine was started with: its first event."""
    payload = json.dumps({"config": config})
    with database:
        add(
            database, "engine_event", server_id=experiment, seq=1, experiment_id=experiment, at=now(), kind="config",
            payload=payload,
        )  # fmt: skip


def tell_gradient(database: sqlite3.Connection, experiment: str, step: int, *, is_finite: bool) -> None:
    """What the engine reports of a gradient: its norm, or null and why the update was left out."""
    bad = float(not is_finite)
    values = {"grad_norm": 0.5 if is_finite else None, "skipped": bad, "nonfinite_gradient": bad}
    with database:
        for name, value in values.items():
            add_metric(database, experiment, step, name, value)


def tell_warning(database: sqlite3.Connection, experiment: str, step: int) -> None:
    """What the engine reports of flat groups, and what the update did without."""
    with database:
        add(
            database, "health_warning", id=new_ulid(), experiment_id=experiment, segment=0, step=step, policy="",
            kind="zero_variance", value=0.9, message="90% of the <groups> are flat",
        )  # fmt: skip
        add_metric(database, experiment, step, "drops.zero_variance", 7.0)


def add_metric(database: sqlite3.Connection, experiment: str, step: int, name: str, value: float | None) -> None:
    add(
        database, "metric_point", id=new_ulid(), experiment_id=experiment, segment=0, step=step, wall_s=0.0, name=name,
        value=value, mark="absent" if value is None else "finite",
    )  # fmt: skip


def tell_evaluation(database: sqlite3.Connection, experiment: str, step: int, label: str, scores: list[float]) -> None:
    """The held-out games of one evaluation."""
    run = new_ulid()
    with database:
        is_new = add(
            database, "eval_run", id=run, experiment_id=experiment, step=step, split_name="heldout", label=label, k=1,
            temperature=1.0, n_attempted=len(scores), n_valid=len(scores), n_policy_fault=0, n_env_fault=0,
            started_at=now(),
        )  # fmt: skip
        for game, score in enumerate(scores if is_new else []):
            add(
                database, "eval_item", id=new_ulid(), eval_run_id=run, item_id=f"heldout-{game}", sample=0, score=score,
                fault="none",
            )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
