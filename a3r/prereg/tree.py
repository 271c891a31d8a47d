"""The decision tree: a closed set of tests on evidence, each true, false or undecided, read from the top.

The first node whose test is true decides; an undecided test never does. The tree is data, so that it can be locked by
its hash, run on simulated studies before a real one, and traced node by node afterwards. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, assert_never

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    # scipy takes longer to import than reading a question takes.
    from a3r.stats import Comparison


class Frozen(BaseModel, frozen=True, extra="forbid"):
    """Base of what is locked."""


class Truth(StrEnum):
    """What a test says."""

    TRUE = "true"
    FALSE = "false"
    UNDECIDED = "undecided"
    """The evidence does not reach either way."""


class Leaf(StrEnum):
    """Where a tree can lead."""

    SUPERIOR = "superior"
    INFERIOR = "inferior"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    TOO_MANY_FAILURES = "too_many_failures"
    """So many runs failed that the arms can't be compared."""
    ADD_SEEDS = "add_seeds"
    """Run the extra seeds in every arm and read the tree again."""

    @property
    def is_final(self) -> bool:
        """Whether the study ends here."""
        return self is not Leaf.ADD_SEEDS


class FailedRateAbove(Frozen):
    """More than a share of the runs of both arms failed."""

    test: Literal["failed_rate_above"] = "failed_rate_above"
    limit: float = Field(ge=0, lt=1)


class Superior(Frozen):
    """The arm is better than the reference: two-sided p, adjusted for the other arms, is at most alpha."""

    test: Literal["superior"] = "superior"
    alpha: float = Field(gt=0, lt=0.5)


class Inferior(Frozen):
    """The arm is worse than the reference, by the same rule."""

    test: Literal["inferior"] = "inferior"
    alpha: float = Field(gt=0, lt=0.5)


class Equivalent(Frozen):
    """The true difference lies within ±margin: two one-sided tests at alpha each."""

    test: Literal["equivalent"] = "equivalent"
    alpha: float = Field(gt=0, lt=0.5)
    margin: float = Field(gt=0)
    """Largest difference that does not matter, in the unit of the metric."""


class CanAddSeeds(Frozen):
    """Extra seeds are left, were added fewer than `at_most` times, and what they cost fits the budget."""

    test: Literal["can_add_seeds"] = "can_add_seeds"
    at_most: int = Field(1, ge=1)


class Always(Frozen):
    """True whatever the evidence says; a tree ends with it."""

    test: Literal["always"] = "always"


Test = Annotated[
    FailedRateAbove | Superior | Inferior | Equivalent | CanAddSeeds | Always,
    Field(discriminator="test"),
]


class Node(Frozen):
    """One question of the tree."""

    id: str = Field(pattern=r"^n[0-9]+$")
    when: Test
    then: Leaf


class Tree(Frozen):
    """Questions in order; the first that is true decides."""

    nodes: tuple[Node, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one contrast (an arm against the reference) has to show at one look."""

    gain: Comparison | None
    """Difference in the direction that is better when positive; None where there is nothing to compare."""
    p_difference: float
    """Two-sided, adjusted over the contrasts of this look."""
    p_equivalent: float
    """Of lying outside the margin, adjusted likewise."""
    num_failed: int
    """Failed runs of the two arms."""
    num_runs: int
    """All runs of the two arms."""
    times_extended: int
    """How often seeds were added already."""
    can_extend: bool
    """Extra seeds are left, and running them fits the budget."""


@dataclass(frozen=True, slots=True)
class Visited:
    """One node as it was read."""

    node: str
    test: str
    truth: Truth
    because: str
    """The numbers it was read from."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where the tree led, and by which way."""

    leaf: Leaf
    trace: tuple[Visited, ...]


def decide(tree: Tree, evidence: Evidence) -> Verdict:
    """Read the tree from the top.

    Raises:
        ValueError: no node is true; a checked tree ends with one that always is.
    """
    trace: list[Visited] = []
    for node in tree.nodes:
        truth, because = judge(node.when, evidence)
        trace.append(Visited(node.id, node.when.test, truth, because))
        if truth is Truth.TRUE:
            return Verdict(node.then, tuple(trace))
    raise ValueError("no node of the tree is true; let it end with one that always is")


def judge(test: Test, evidence: Evidence) -> tuple[Truth, str]:
    """One test and the numbers behind it."""
    match test:
        case FailedRateAbove():
            return _failed(test, evidence)
        case Superior():
            return _differs(test.alpha, evidence, sign=1)
        case Inferior():
            return _differs(test.alpha, evidence, sign=-1)
        case Equivalent():
            return _equivalent(test, evidence)
        case CanAddSeeds():
            is_left = evidence.times_extended < test.at_most
            truth = Truth.TRUE if is_left and evidence.can_extend else Truth.FALSE
            fits = "fits" if evidence.can_extend else "does not fit the budget, or no extra seed is left"
            return truth, f"seeds added {evidence.times_extended} of {test.at_most} times; adding them {fits}"
        case Always():
            return Truth.TRUE, "always"
        case other:
            assert_never(other)


def _failed(test: FailedRateAbove, evidence: Evidence) -> tuple[Truth, str]:
    if evidence.num_runs == 0:
        return Truth.UNDECIDED, "no run"
    is_above = evidence.num_failed > test.limit * evidence.num_runs
    because = f"{evidence.num_failed} of {evidence.num_runs} runs failed, the limit is {test.limit:.0%}"
    return Truth.TRUE if is_above else Truth.FALSE, because


def _differs(alpha: float, evidence: Evidence, *, sign: int) -> tuple[Truth, str]:
    gain = evidence.gain
    if gain is None or not gain.is_informative:
        return Truth.UNDECIDED, "the runs show no spread to judge a difference by"
    because = f"gain {gain.value:+.4f}, adjusted p {evidence.p_difference:.4f}, alpha {alpha:g}"
    if evidence.p_difference > alpha:
        return Truth.UNDECIDED, because
    return Truth.TRUE if gain.value * sign > 0 else Truth.FALSE, because


def _equivalent(test: Equivalent, evidence: Evidence) -> tuple[Truth, str]:
    gain = evidence.gain
    if gain is None or not gain.is_informative:
        return Truth.UNDECIDED, "the runs show no spread to judge a difference by"
    low, high = gain.interval(1 - 2 * test.alpha)
    because = (
        f"adjusted p of two one-sided tests {evidence.p_equivalent:.4f}, alpha {test.alpha:g}; "
        f"interval [{low:+.4f}, {high:+.4f}] against ±{test.margin:g}"
    )
    if evidence.p_equivalent <= test.alpha:
        return Truth.TRUE, because
    is_outside = low > test.margin or high < -test.margin
    return Truth.FALSE if is_outside else Truth.UNDECIDED, because


def standard_tree(*, alpha: float, margin: float, can_extend: bool, failure_limit: float = 1 / 3) -> Tree:
    """The tree of a two-arm comparison.

    Args:
        alpha: chance of a false claim over the whole study. With a second look each look gets half of it (Bonferroni),
            which holds however the looks hang together.
        margin: largest difference that does not matter, in the unit of the metric.
        can_extend: whether seeds may be added once.
        failure_limit: share of failed runs above which nothing is compared.
    """
    per_look = alpha / 2 if can_extend else alpha
    ways: list[tuple[Test, Leaf]] = [
        (FailedRateAbove(limit=round(failure_limit, 4)), Leaf.TOO_MANY_FAILURES),
        (Superior(alpha=per_look), Leaf.SUPERIOR),
        (Inferior(alpha=per_look), Leaf.INFERIOR),
        (Equivalent(alpha=per_look, margin=margin), Leaf.EQUIVALENT),
    ]
    if can_extend:
        ways.append((CanAddSeeds(at_most=1), Leaf.ADD_SEEDS))
    ways.append((Always(), Leaf.INCONCLUSIVE))
    return Tree(nodes=tuple(Node(id=f"n{index}", when=test, then=leaf) for index, (test, leaf) in enumerate(ways)))
