"""Stands in for a training project: writes the rows that a real one writes, with effects that are known.

`effects.json` in its folder says what happens. Like the real one it goes on in the folder it was started in.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from sqlmodel import select

from experiments_db.engine import Database, open_database
from experiments_db.models import EngineEvent, EvalItem, EvalRun, HealthWarning, MetricPoint, ValueMark


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    for name in ("--run-dir", "--seed", "--experiment", "--db"):
        parser.add_argument(name, required=True)
    parser.add_argument("--json", action="store_true")
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
    with open_database(args.db) as database:
        with database.write() as session:
            if session.get(EngineEvent, (args.experiment, 1)) is None:
                config = {"trainer": effects["trainer"], "seed": seed}
                session.add(
                    EngineEvent(
                        server_id=args.experiment,
                        seq=1,
                        experiment_id=args.experiment,
                        at=datetime.now(UTC),
                        kind="config",
                        payload={"config": config},
                    )
                )
        for step in range(updates + 1):
            if step:
                time.sleep(effects.get("step_s", 0.0))
                tell_gradient(database, args.experiment, step, is_finite=step not in effects.get("bad_steps", []))
                if step in effects.get("warned_steps", []):
                    tell_warning(database, args.experiment, step)
                print(
                    json.dumps({"event": "step", "step": step, "updates": updates, "metrics": {"reward_mean": top}}),
                    flush=True,
                )
            if step % every and step != updates:
                continue
            label = "before" if step == 0 else "after" if step == updates else "during"
            level = effects["start"] + (top - effects["start"]) * (1 - math.exp(-4 * step / updates))
            scores = [
                level + random.Random(f"{game}-{drawn}-{step}-{effects['arm']}").gauss(0, 0.05) for game in range(games)
            ]
            with database.write() as session:
                known = session.exec(
                    select(EvalRun).where(EvalRun.experiment_id == args.experiment, EvalRun.step == step)
                ).first()
                if known is None:
                    run = EvalRun(
                        experiment_id=args.experiment,
                        step=step,
                        split_name="heldout",
                        label=label,
                        temperature=1.0,
                        k=1,
                        n_attempted=games,
                        n_valid=games,
                    )
                    session.add(run)
                    session.flush()
                    for game, score in enumerate(scores):
                        session.add(EvalItem(eval_run_id=run.id, item_id=f"heldout-{game}", sample=0, score=score))
            mean = math.fsum(scores) / games
            print(
                json.dumps(
                    {
                        "event": "evaluation",
                        "step": step,
                        "temperature": 1,
                        "label": label,
                        "mean": mean,
                        "ci": [mean, mean],
                    }
                ),
                flush=True,
            )
    if not effects.get("is_silent"):
        (folder / "results.json").write_text("{}")
    return 0


def tell_gradient(database: Database, experiment: str, step: int, *, is_finite: bool) -> None:
    """What the engine reports of a gradient: its norm, or null and why the update was left out."""
    bad = float(not is_finite)
    values = {"grad_norm": 0.5 if is_finite else None, "skipped": bad, "nonfinite_gradient": bad}
    with database.write() as session:
        for name, value in values.items():
            mark = ValueMark.FINITE if value is not None else ValueMark.ABSENT
            known = (
                MetricPoint.experiment_id == experiment,
                MetricPoint.name == name,
                MetricPoint.step == step,
            )
            if session.exec(select(MetricPoint).where(*known)).first() is None:
                session.add(MetricPoint(experiment_id=experiment, name=name, step=step, value=value, mark=mark))


def tell_warning(database: Database, experiment: str, step: int) -> None:
    """What the engine reports of flat groups, and what the update did without."""
    with database.write() as session:
        session.add(
            HealthWarning(
                experiment_id=experiment,
                step=step,
                kind="zero_variance",
                value=0.9,
                message="90% of the <groups> are flat",
            )
        )
        session.add(MetricPoint(experiment_id=experiment, name="drops.zero_variance", step=step, value=7.0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
