"""A plan run on invented studies: what its tree does in worlds whose truth is known. Pure, seeded, under a second.

It shows before anything is paid how often the tree claims a difference that is not there, and how often it finds one
that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from a3r.analysis import Run, contrasts, evidence
from a3r.prereg.plan import Plan
from a3r.prereg.tree import Leaf, decide
from a3r.stats import smallest_difference


class World(StrEnum):
    """A truth to try the tree on."""

    NULL = "no effect"
    SMALL = "half the effect it can tell"
    LARGE = "twice the effect it can tell"
    ALL_CRASH = "every run fails"
    NAN = "one arm is not finite"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the tree ended in one world."""

    shares: Mapping[Leaf, float]
    """Share of contrasts that ended at each leaf."""
    extended: float
    """Share of studies in which seeds were added."""
    num_studies: int


def simulate(plan: Plan, *, num_studies: int = 200, seed: int = 0) -> dict[World, Outcome]:
    """Run the plan on `num_studies` invented studies in each world.

    Runs deviate by the plan's assumed deviation between seeds.
    """
    sd = plan.metric.assumed_sd
    told = smallest_difference(sd, len(plan.seeds), alpha=1 - plan.level, power=plan.power)
    gains = {World.SMALL: told / 2, World.LARGE: told * 2}
    outcomes: dict[World, Outcome] = {}
    for index, world in enumerate(World):
        rng = np.random.default_rng([seed, index])
        leaves: Counter[Leaf] = Counter()
        extended = 0
        for _ in range(num_studies):
            ended, times = _one(plan, world, gains.get(world, 0.0), rng)
            leaves.update(ended)
            extended += times > 0
        total = leaves.total()
        outcomes[world] = Outcome(
            {leaf: leaves[leaf] / total for leaf in Leaf if leaves[leaf]}, extended / num_studies, num_studies
        )
    return outcomes


def _one(plan: Plan, world: World, gain: float, rng: np.random.Generator) -> tuple[list[Leaf], int]:
    """One invented study: the leaf of every contrast, and how often seeds were added."""
    sign = 1 if plan.metric.higher_is_better else -1
    runs: list[Run] = []
    times_extended = 0
    wanted = plan.seeds
    while True:
        for arm in plan.arms:
            for number in wanted:
                value: float | None = float(rng.normal(0.0, plan.metric.assumed_sd))
                if not arm.is_reference:
                    value = value + sign * gain if value is not None else None
                if world is World.ALL_CRASH:
                    value = None
                elif world is World.NAN and not arm.is_reference:
                    value = float("nan")
                runs.append(Run(arm.key, number, value))
        can_extend = times_extended == 0 and bool(plan.extra_seeds)
        leaves = [
            decide(plan.tree, evidence(plan, contrast, times_extended=times_extended, can_extend=can_extend)).leaf
            for contrast in contrasts(plan, runs)
        ]
        if Leaf.ADD_SEEDS not in leaves:
            return leaves, times_extended
        times_extended += 1
        wanted = plan.extra_seeds
