"""The plan of a study as one frozen value: everything that is fixed before the first run.

Its canonical JSON is hashed; the hash is what the report quotes, and a study never runs on another plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from a3r.prereg.tree import Frozen, Tree

Level = bool | int | float | str
"""A value that a factor can take."""

FORMAT: Literal["a3r-plan-1"] = "a3r-plan-1"


class MetricKind(StrEnum):
    """What a training run comes to as one number."""

    FINAL_REWARD = "final_reward"
    """Held-out reward after the last update."""
    AREA = "area_under_curve"
    """Mean height of the held-out curve over training episodes: how high, how early."""
    EPISODES_TO = "episodes_to_threshold"
    """Training episodes until the held-out curve reaches a level; at most those that were trained."""


class StageKind(StrEnum):
    """What a stage is for."""

    NOISE_FLOOR = "noise_floor"
    """The reference alone, over seeds: how far equal runs differ."""
    COMPARE = "compare"
    CONFIRM = "confirm"
    """Fresh seeds on the sealed split."""


class Direction(StrEnum):
    """What a hypothesis expects of an arm against the reference."""

    BETTER = "better"
    WORSE = "worse"
    DIFFERENT = "different"


class Source(StrEnum):
    """Where an assumption comes from."""

    USER = "user"
    """The question says so."""
    FLAG = "flag"
    """The command line does."""
    DEFAULT = "default"


class Metric(Frozen):
    """The one number that runs are compared by, and what a failed run counts as."""

    kind: MetricKind
    threshold: float | None = None
    """Held-out reward to reach; only for `EPISODES_TO`."""
    split: str = "heldout"
    temperature: float = 1.0
    """The held-out games are played at this sampling temperature."""
    higher_is_better: bool
    unit: Literal["reward", "episodes"]
    worst: float
    """What a run that failed counts as, declared before any run."""
    margin: float = Field(gt=0)
    """Largest difference that does not matter, in `unit`."""
    assumed_sd: float = Field(gt=0)
    """Deviation between seeds, in `unit`, assumed until the noise floor is measured."""

    @model_validator(mode="after")
    def _threshold_where_it_belongs(self) -> Self:
        if (self.kind is MetricKind.EPISODES_TO) != (self.threshold is not None):
            raise ValueError(f"{self.kind} with threshold {self.threshold}: only {MetricKind.EPISODES_TO} has one")
        return self


class Factor(Frozen):
    """What differs between the arms on purpose."""

    path: str
    """`trainer.FIELD` of the engine's config, or `rules.KNOB` of the template."""
    label: str
    """As people call it: `group size`."""
    levels: tuple[Level, ...] = Field(min_length=2)
    reference: Level
    """The level that the others are compared with."""
    adjusted: tuple[str, ...] = ()
    """Settings that follow from the level so that the controls stay fixed; see `Controls`."""


class Arm(Frozen):
    """One level of the factor, as settings."""

    key: str = Field(pattern=r"^[A-Za-z0-9_.=+-]+$")
    level: Level
    settings: dict[str, Level] = Field(default_factory=dict)
    """What differs from `Controls.settings`, by dotted path."""
    rules: dict[str, Level] = Field(default_factory=dict)
    """What differs from `Controls.rules`."""
    is_reference: bool = False


class Controls(Frozen):
    """What is the same in every arm."""

    settings: dict[str, Level | None]
    """Every setting of the engine's trainer and of the training, by dotted path; an arm's own come on top."""
    rules: dict[str, Level]
    """A value for every knob of the template."""
    episodes_per_update: int | None = Field(ge=1)
    """None where the factor is what sets it; the total is fixed all the same."""
    episodes: int = Field(ge=1)
    """Training episodes of a run, in every arm."""
    episodes_between_evaluations: int = Field(ge=1)
    evaluation_games: int = Field(ge=2)
    """Held-out games of each evaluation, the same in every arm and at every evaluation."""


class Hypothesis(Frozen):
    """What is expected of one arm, written down before it runs."""

    code: str = Field(pattern=r"^H[1-9][0-9]*$")
    arm: str
    expected: Direction
    statement: str


class Stage(Frozen):
    """Runs that are started together."""

    kind: StageKind
    arms: tuple[str, ...] = Field(min_length=1)
    split: str = "heldout"


class Budget(Frozen):
    """What the study may cost."""

    jobs: int = Field(ge=1)
    """Runs at most, retries not counted."""
    job_seconds: float = Field(gt=0)
    """Wall seconds of all runs together; adding seeds must fit what is left of it."""
    job_limit_s: float = Field(gt=0)
    """A run is ended after this."""
    assumed_job_s: float = Field(gt=0)
    """What a run is taken to cost until one was measured."""
    parallel: int = Field(ge=1)
    """Runs side by side on the machine that planned it."""


class Assumption(Frozen):
    """What the question left open and how it was settled."""

    text: str
    source: Source


class TemplateRef(Frozen):
    """The game."""

    name: str
    version: str
    start_weights: str


class Plan(Frozen):
    """Everything that is fixed before the first run."""

    format: Literal["a3r-plan-1"] = FORMAT
    question: str
    template: TemplateRef
    factor: Factor
    metric: Metric
    arms: tuple[Arm, ...] = Field(min_length=2)
    controls: Controls
    hypotheses: tuple[Hypothesis, ...]
    stages: tuple[Stage, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    """Every arm runs each of them, so that arms are compared seed by seed."""
    extra_seeds: tuple[int, ...] = ()
    """Added once, to every arm, where the tree says so."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Chance of a false claim over all contrasts and looks."""
    power: float = Field(0.8, gt=0, lt=1)
    """Chance of finding a difference, by which `smallest difference` is meant."""
    tree: Tree
    budget: Budget
    assumptions: tuple[Assumption, ...] = ()

    @property
    def reference(self) -> Arm:
        """The arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.is_reference)

    @property
    def treated(self) -> tuple[Arm, ...]:
        """The other arms, in the order of their levels."""
        return tuple(arm for arm in self.arms if not arm.is_reference)

    @property
    def num_looks(self) -> int:
        """How often the tree can be read on more data."""
        return 2 if self.extra_seeds else 1

    @property
    def level(self) -> float:
        """Coverage of each look's intervals, so that all looks together cover with 1 - alpha."""
        return 1 - self.alpha / self.num_looks

    def arm(self, key: str) -> Arm:
        """The arm of this key."""
        return next(arm for arm in self.arms if arm.key == key)

    def settings_of(self, arm: Arm) -> dict[str, Level | None]:
        """Every setting of an arm, the controls' and its own."""
        return {**self.controls.settings, **arm.settings}

    def canonical_json(self) -> str:
        """The plan as text that is the same wherever it is written: keys sorted, no spaces, no NaN."""
        return canonical(self.model_dump(mode="json"))

    @property
    def sha256(self) -> str:
        """Hash of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


def canonical(value: Mapping[str, object]) -> str:
    """JSON that two programs write alike."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def load_locked(text: str, sha256: str) -> Plan:
    """The plan behind a lock.

    Raises:
        ValueError: the text is not what was locked.
    """
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != sha256:
        raise ValueError(
            f"the plan hashes to {found[:12]}, the lock says {sha256[:12]}: it was changed after it was locked"
        )
    return Plan.model_validate_json(text)
