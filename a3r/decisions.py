"""Where a study goes on, by its locked plan and what its runs came to. Pure; analyst and `a3r verify` use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from a3r.estimates import RunRecord
from a3r.prereg.plan import Plan
from a3r.prereg.tree import Evidence, FailedRateAbove, Leaf, Truth, Visited, judge

if TYPE_CHECKING:
    from a3r.store import RunView

GO_ON = "go_on"
"""What the noise floor leads to where its runs did not fail."""


def affordable(plan: Plan, runs: Sequence[RunView], stage: int) -> tuple[bool, str]:
    """Whether the extra seeds fit what is left of the budget, by what runs have cost so far; and that in words.

    Args:
        runs: of all stages up to this one.
    """
    if stage != 1 or not plan.extra_seeds:
        return False, "no seeds are left to add"
    spent = sum(run.seconds for run in runs)
    each = max((run.seconds for run in runs), default=0.0)
    needed = each * len(plan.extra_seeds) * len(plan.arms)
    fits = spent + needed <= plan.budget.job_seconds
    return fits, (
        f"runs took {spent:.0f} s so far, adding seeds takes about {needed:.0f} s more, "
        f"the budget is {plan.budget.job_seconds:.0f} s"
    )


def after_noise_floor(plan: Plan, records: Sequence[RunRecord]) -> tuple[Leaf | None, tuple[Visited, ...]]:
    """Where the tree leads after the first stage, and by which way.

    None is to go on: not so many runs of the reference failed that no arm could be compared with it.
    """
    failed = sum(record.failure is not None for record in records)
    seen = Evidence(None, 1.0, 1.0, num_failed=failed, num_runs=len(records), times_extended=0, can_extend=False)
    trace: list[Visited] = []
    for node in plan.tree.nodes:
        if isinstance(node.when, FailedRateAbove):
            truth, because = judge(node.when, seen)
            trace.append(Visited(node.id, node.when.test, truth, because))
            if truth is Truth.TRUE:
                return node.then, tuple(trace)
    return None, tuple(trace)
