"""What a plan has to pass before it is locked. Pure: a plan in, findings out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from a3r.prereg.plan import Level, MetricKind, Plan, StageKind
from a3r.prereg.simulate import Outcome, World, simulate
from a3r.prereg.tree import Always, CanAddSeeds, Leaf
from a3r.stats import smallest_difference

MIN_SEEDS = 3
"""Below three runs per arm an interval is a formality: two seeds have one degree of freedom."""

SEALED_SPLIT = "sealed"
"""Held back for a confirming stage; nothing before it may look."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and what it found."""

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Checked:
    """A plan's findings, and how its tree ends in invented worlds."""

    findings: tuple[Finding, ...]
    simulated: Mapping[World, Outcome]
    smallest_difference: float
    """What the design can tell, by the assumed deviation between seeds, in the unit of the metric."""

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The checks that did not pass."""
        return tuple(finding for finding in self.findings if not finding.is_ok)


def check(plan: Plan, *, num_studies: int = 200) -> Checked:
    """Every check on a plan; the simulation runs only where the tree ends for sure."""
    return _check(plan.canonical_json(), num_studies)


@lru_cache(maxsize=8)
def _check(plan_json: str, num_studies: int) -> Checked:
    plan = Plan.model_validate_json(plan_json)
    tree = [_is_total(plan), _terminates(plan)]
    others = [
        _seeds(plan),
        _one_factor(plan),
        _same_episodes(plan),
        _curve_is_long_enough(plan),
        _sealed(plan),
        _budget(plan),
    ]
    findings = [*tree, *others]
    simulated: dict[World, Outcome] = {}
    told = math.inf
    if all(finding.is_ok for finding in [*tree, _seeds(plan)]):
        simulated = simulate(plan, num_studies=num_studies)
        findings += [_honest(plan, simulated), _crashes_are_no_result(simulated)]
        told = smallest_difference(plan.metric.assumed_sd, len(plan.seeds), alpha=1 - plan.level, power=plan.power)
    return Checked(tuple(findings), simulated, told)


def _is_total(plan: Plan) -> Finding:
    *before, last = plan.tree.nodes
    early = [node.id for node in before if isinstance(node.when, Always)]
    is_ok = isinstance(last.when, Always) and last.then.is_final and not early
    detail = f"{len(plan.tree.nodes)} nodes, the last one always true"
    if early:
        detail = f"{early[0]} is always true, so nothing after it is ever read"
    elif not is_ok:
        detail = (
            f"{last.id} is {last.when.test} and leads to {last.then}; a tree ends with a final leaf that is always true"
        )
    return Finding("totality", is_ok, detail)


def _terminates(plan: Plan) -> Finding:
    loops = [node for node in plan.tree.nodes if node.then is Leaf.ADD_SEEDS]
    endless = [node.id for node in loops if not isinstance(node.when, CanAddSeeds)]
    if endless:
        return Finding("termination", False, f"{endless[0]} adds seeds without counting how often")
    times = sum(node.when.at_most for node in loops if isinstance(node.when, CanAddSeeds))
    if times > 1 or (times == 1) != bool(plan.extra_seeds):
        return Finding(
            "termination",
            False,
            f"the tree adds seeds {times} times, the plan has {len(plan.extra_seeds)} extra seeds for one",
        )
    return Finding("termination", True, f"at most {times} loop, counted")


def _seeds(plan: Plan) -> Finding:
    every = (*plan.seeds, *plan.extra_seeds)
    is_ok = len(plan.seeds) >= MIN_SEEDS and len(set(every)) == len(every)
    detail = f"{len(plan.seeds)} seeds and {len(plan.extra_seeds)} extra, each its own, the same in every arm"
    if not is_ok:
        detail = f"{len(plan.seeds)} seeds ({every}): at least {MIN_SEEDS}, and none twice"
    return Finding("seeds", is_ok, detail)


def _one_factor(plan: Plan) -> Finding:
    """Arms differ in the factor and in what follows from it, and in nothing else."""
    allowed = {plan.factor.path, *plan.factor.adjusted}
    differing = sorted(
        path
        for path in {*_settings(plan, 0), *(path for index in range(len(plan.arms)) for path in _settings(plan, index))}
        if len({_settings(plan, index).get(path) for index in range(len(plan.arms))}) > 1
    )
    extra = [path for path in differing if path not in allowed]
    levels = [_settings(plan, index).get(plan.factor.path) for index in range(len(plan.arms))]
    keys = {arm.key for arm in plan.arms}
    references = sum(arm.is_reference for arm in plan.arms)
    if extra:
        return Finding("one factor", False, f"the arms also differ in {', '.join(extra)}")
    if levels != [arm.level for arm in plan.arms] or len(set(levels)) != len(levels) or len(keys) != len(levels):
        return Finding(
            "one factor", False, f"the arms set {plan.factor.path} to {levels}; each arm its own level, and that level"
        )
    if references != 1 or plan.reference.level != plan.factor.reference:
        return Finding(
            "one factor", False, f"{references} arms are the reference; exactly one is, at {plan.factor.reference}"
        )
    follows = (
        f"; {', '.join(plan.factor.adjusted)} follow so that the controls stay fixed" if plan.factor.adjusted else ""
    )
    return Finding("one factor", True, f"{plan.factor.path} alone{follows}")


def _settings(plan: Plan, index: int) -> dict[str, Level | None]:
    arm = plan.arms[index]
    rules = {f"rules.{name}": value for name, value in {**plan.controls.rules, **arm.rules}.items()}
    return {**plan.settings_of(arm), **rules}


def _same_episodes(plan: Plan) -> Finding:
    wanted = plan.controls.episodes
    for index, arm in enumerate(plan.arms):
        settings = _settings(plan, index)
        group, tasks, updates = (
            settings.get(path) for path in ("trainer.group_size", "trainer.tasks_per_update", "training.updates")
        )
        if not (isinstance(group, int) and isinstance(tasks, int) and isinstance(updates, int)):
            return Finding("episodes", False, f"{arm.key} does not say group size, tasks per update and updates")
        if group * tasks * updates != wanted:
            return Finding(
                "episodes",
                False,
                f"{arm.key} trains on {group} x {tasks} x {updates} episodes, the controls say {wanted}",
            )
    return Finding("episodes", True, f"{wanted} training episodes in every arm")


def _curve_is_long_enough(plan: Plan) -> Finding:
    points = 1 + math.ceil(plan.controls.episodes / plan.controls.episodes_between_evaluations)
    needed = 2 if plan.metric.kind is MetricKind.FINAL_REWARD else 3
    return Finding(
        "curve",
        points >= needed,
        f"{points} evaluations a run, the first before training; {plan.metric.kind} needs {needed}",
    )


def _sealed(plan: Plan) -> Finding:
    early = [
        stage.kind.value for stage in plan.stages if stage.split == SEALED_SPLIT and stage.kind is not StageKind.CONFIRM
    ]
    is_ok = not early and plan.metric.split != SEALED_SPLIT
    return Finding(
        "sealed split",
        is_ok,
        "no stage before a confirming one uses it" if is_ok else f"{early or 'the metric'} would open it",
    )


def _budget(plan: Plan) -> Finding:
    """What the first look costs at least. Adding seeds is bound by the budget later, by measured times."""
    base = len(plan.arms) * len(plan.seeds)
    worst = len(plan.arms) * (len(plan.seeds) + len(plan.extra_seeds))
    cost = base * plan.budget.assumed_job_s
    is_ok = worst <= plan.budget.jobs and cost <= plan.budget.job_seconds
    wall = math.ceil(base / plan.budget.parallel) * plan.budget.assumed_job_s
    detail = (
        f"{base} runs, {worst} on the longest path; about {cost / 60:.0f} minutes of runs, "
        f"{wall / 60:.0f} minutes on the clock with {plan.budget.parallel} side by side; "
        f"the budget is {plan.budget.jobs} runs and {plan.budget.job_seconds / 60:.0f} minutes of runs"
    )
    return Finding(
        "budget", is_ok, detail if is_ok else f"{detail}: raise --minutes, or lower --updates, --seeds or the levels"
    )


def _honest(plan: Plan, simulated: Mapping[World, Outcome]) -> Finding:
    """Without an effect the tree may claim one in a share alpha of studies; the simulation's chance comes on top."""
    outcome = simulated[World.NULL]
    claimed = sum(share for leaf, share in outcome.shares.items() if leaf in {Leaf.SUPERIOR, Leaf.INFERIOR})
    limit = plan.alpha + 3 * math.sqrt(plan.alpha * (1 - plan.alpha) / outcome.num_studies)
    return Finding(
        "false claims",
        claimed <= limit,
        f"{claimed:.1%} of {outcome.num_studies} invented studies without an effect claim one",
    )


def _crashes_are_no_result(simulated: Mapping[World, Outcome]) -> Finding:
    final = {Leaf.TOO_MANY_FAILURES, Leaf.INCONCLUSIVE}
    wrong = [
        leaf.value for world in (World.ALL_CRASH, World.NAN) for leaf in simulated[world].shares if leaf not in final
    ]
    return Finding(
        "failed runs",
        not wrong,
        "runs that fail decide nothing" if not wrong else f"failed runs would lead to {wrong[0]}",
    )
