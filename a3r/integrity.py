"""Did a run do what its blueprint says? Pure: facts in, findings out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3r.estimates import RunRecord
from a3r.prereg.plan import Arm, Level, Plan
from experiments_db.models import Severity

MIN_GAMES = 0.95
"""Share of the held-out games that an evaluation must have scored; the rest were faults of the environment."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the log says of a run beside its scores."""

    config: Mapping[str, Any] | None
    """The engine's config as it was started; None where no event tells."""
    num_trained: int | None
    """Episodes that were part of an update; None where no row tells."""
    not_finite: tuple[str, ...]
    """Metrics that were once no finite number."""
    num_gradients: int = 0
    """Updates that had a gradient; those whose groups had nothing to compare have none."""
    num_not_finite_gradients: int = 0
    """Updates whose gradient was not finite, which the engine leaves out."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that looks wrong."""

    detector: str
    severity: Severity
    message: str


def check_run(plan: Plan, arm: Arm, record: RunRecord, facts: Facts) -> list[Problem]:
    """What is wrong with a run that says it succeeded. A problem of high severity takes it out of the estimates."""
    return [
        *_config(plan, arm, record, facts),
        *_evaluations(plan, arm, record),
        *_episodes(plan, facts),
        *(
            Problem("not finite", Severity.HIGH, f"{name} was not a finite number, so training diverged")
            for name in facts.not_finite
        ),
        *_gradients(facts),
    ]


def check_seeds(records: Sequence[RunRecord], earlier: Sequence[RunRecord] = ()) -> list[Problem]:
    """Whether seeds of one arm differ at all: runs that are copies of each other are one run.

    Args:
        records: runs of this stage.
        earlier: runs of the stages before; copies among these alone were found then.
    """
    copies: dict[tuple[str, str], list[int]] = defaultdict(list)
    for record in (*records, *earlier):
        if record.measurements:
            copies[record.arm, record.inputs_sha].append(record.seed)
    new = {(record.arm, record.inputs_sha) for record in records}
    return [
        Problem(
            "seeds differ",
            Severity.HIGH,
            f"seeds {' and '.join(map(str, sorted(seeds)))} of {arm} gave the same scores, game by game",
        )
        for (arm, sha), seeds in sorted(copies.items())
        if len(seeds) > 1 and (arm, sha) in new
    ]


def _config(plan: Plan, arm: Arm, record: RunRecord, facts: Facts) -> list[Problem]:
    if facts.config is None:
        return [Problem("config", Severity.MEDIUM, "no event says with which config the engine was started")]
    wanted: dict[str, Level | None] = {
        path.removeprefix("trainer."): value
        for path, value in plan.settings_of(arm).items()
        if path.startswith("trainer.")
    }
    trainer = facts.config.get("trainer", {})
    wrong = [
        f"{name} is {trainer.get(name)!r}, planned {value!r}"
        for name, value in wanted.items()
        if trainer.get(name) != value
    ]
    if facts.config.get("seed") != record.seed:
        wrong.append(f"seed is {facts.config.get('seed')!r}, planned {record.seed}")
    return (
        [Problem("config", Severity.HIGH, f"the engine ran with another config: {'; '.join(wrong)}")] if wrong else []
    )


def _evaluations(plan: Plan, arm: Arm, record: RunRecord) -> list[Problem]:
    settings = plan.settings_of(arm)
    updates, every = settings["training.updates"], settings["training.eval_every"]
    assert isinstance(updates, int)
    assert isinstance(every, int)
    planned = [*range(0, updates, every), updates]
    found = [each.step for each in record.measurements]
    if missing := [step for step in planned if step not in found]:
        return [Problem("evaluations", Severity.HIGH, f"no held-out result after {missing} of {planned} updates")]
    few = [
        f"{len(each.scores)} after update {each.step}"
        for each in record.measurements
        if each.step in planned and len(each.scores) < MIN_GAMES * plan.controls.evaluation_games
    ]
    if few:
        message = f"of {plan.controls.evaluation_games} held-out games only these were scored: {', '.join(few)}"
        return [Problem("evaluations", Severity.HIGH, message)]
    return []


def _gradients(facts: Facts) -> list[Problem]:
    """The engine leaves out an update whose gradient is not finite, so the weights stay what they were."""
    lost, total = facts.num_not_finite_gradients, facts.num_gradients
    if lost == 0:
        return []
    if lost == total:
        message = f"the gradient of all {total} updates was not finite, so training diverged"
        return [Problem("not finite", Severity.HIGH, message)]
    message = f"the gradient of {lost} of {total} updates was not finite, so they changed no weight"
    return [Problem("not finite", Severity.MEDIUM, message)]


def _episodes(plan: Plan, facts: Facts) -> list[Problem]:
    if facts.num_trained is None or facts.num_trained == plan.controls.episodes:
        return []
    message = f"it trained on {facts.num_trained} episodes, planned {plan.controls.episodes}"
    return [Problem("episodes", Severity.HIGH, message)]
