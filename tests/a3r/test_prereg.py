"""The plan, its lock, its decision tree and its checks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3r.analysis import Run, contrasts, evidence
from a3r.prereg.check import SEALED_SPLIT, check
from a3r.prereg.plan import Plan, StageKind, load_locked
from a3r.prereg.simulate import World, simulate
from a3r.prereg.tree import (
    Always,
    CanAddSeeds,
    Equivalent,
    Evidence,
    FailedRateAbove,
    Inferior,
    Leaf,
    Node,
    Superior,
    Tree,
    Truth,
    decide,
    judge,
    standard_tree,
)
from a3r.stats import paired_t


def seen(gains: list[float] | None, *, failed: int = 0, extended: int = 0, can_extend: bool = False) -> Evidence:
    """Evidence of one contrast whose runs differ by these gains, pair by pair."""
    gain = paired_t(gains, [0.0] * len(gains)) if gains else None
    return Evidence(
        gain=gain,
        p_difference=gain.p_value() if gain else 1.0,
        p_equivalent=gain.p_equivalent(0.05) if gain else 1.0,
        num_failed=failed,
        num_runs=2 * len(gains) if gains else 6,
        times_extended=extended,
        can_extend=can_extend,
    )


BETTER, WORSE = [0.20, 0.21, 0.19], [-0.20, -0.21, -0.19]
SAME, UNCLEAR = [0.001, -0.001, 0.0005], [0.2, -0.2, 0.05]


@pytest.mark.parametrize(
    ("gains", "leaf"),
    [
        (BETTER, Leaf.SUPERIOR),
        (WORSE, Leaf.INFERIOR),
        (SAME, Leaf.EQUIVALENT),
        (UNCLEAR, Leaf.INCONCLUSIVE),
        (None, Leaf.INCONCLUSIVE),
    ],
)
def test_the_standard_tree_says_what_the_gains_say(gains, leaf):
    tree = standard_tree(alpha=0.05, margin=0.05, can_extend=False)
    assert decide(tree, seen(gains)).leaf is leaf


def test_an_undecided_test_is_never_taken_for_true_or_false():
    assert judge(Superior(alpha=0.05), seen(UNCLEAR))[0] is Truth.UNDECIDED
    assert judge(Superior(alpha=0.05), seen(WORSE))[0] is Truth.FALSE
    assert judge(Inferior(alpha=0.05), seen(WORSE))[0] is Truth.TRUE
    assert judge(Equivalent(alpha=0.05, margin=0.05), seen(BETTER))[0] is Truth.FALSE
    assert judge(Equivalent(alpha=0.05, margin=0.05), seen(UNCLEAR))[0] is Truth.UNDECIDED
    assert judge(Superior(alpha=0.05), seen([0.1, 0.1, 0.1]))[0] is Truth.UNDECIDED, "no spread, no judgement"


def test_failed_runs_come_before_anything_else():
    tree = standard_tree(alpha=0.05, margin=0.05, can_extend=True)
    verdict = decide(tree, seen(BETTER, failed=3))
    assert verdict.leaf is Leaf.TOO_MANY_FAILURES
    assert [visited.node for visited in verdict.trace] == ["n0"]
    assert verdict.trace[0].because == "3 of 6 runs failed, the limit is 33%"
    assert decide(tree, seen(BETTER, failed=1)).leaf is Leaf.SUPERIOR


def test_seeds_are_added_once_and_only_where_they_fit():
    tree = standard_tree(alpha=0.05, margin=0.05, can_extend=True)
    assert decide(tree, seen(UNCLEAR, can_extend=True)).leaf is Leaf.ADD_SEEDS
    assert decide(tree, seen(UNCLEAR, can_extend=False)).leaf is Leaf.INCONCLUSIVE
    assert decide(tree, seen(UNCLEAR, extended=1, can_extend=True)).leaf is Leaf.INCONCLUSIVE


def test_with_a_second_look_each_look_gets_half_of_alpha():
    (first,) = [node.when for node in standard_tree(alpha=0.05, margin=0.1, can_extend=True).nodes[1:2]]
    assert first == Superior(alpha=0.025)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.integers(0, 12), st.booleans())
def test_every_evidence_leads_to_a_leaf(gains, failed, can_extend):
    tree = standard_tree(alpha=0.05, margin=0.05, can_extend=True)
    verdict = decide(tree, seen(gains, failed=failed, can_extend=can_extend))
    assert verdict.trace[-1].truth is Truth.TRUE
    assert all(visited.truth is not Truth.TRUE for visited in verdict.trace[:-1])


def test_the_lock_is_the_hash_of_the_canonical_json(plan_of):
    plan = plan_of()
    text = plan.canonical_json()
    assert load_locked(text, plan.sha256) == plan
    assert Plan.model_validate_json(json.dumps(json.loads(text))).sha256 == plan.sha256
    assert plan_of(updates=26).sha256 != plan.sha256
    with pytest.raises(ValueError, match="changed after it was locked"):
        load_locked(text.replace('"alpha":0.05', '"alpha":0.06'), plan.sha256)


def test_a_plan_refuses_what_it_does_not_know(plan_of):
    with pytest.raises(ValueError, match="extra"):
        Plan.model_validate({**plan_of().model_dump(), "mood": "hopeful"})


def failing(plan: Plan, **changes: object) -> set[str]:
    return {finding.name for finding in check(plan.model_copy(update=changes), num_studies=20).failures}


def tree_of(*nodes: tuple[object, Leaf]) -> Tree:
    return Tree(nodes=tuple(Node(id=f"n{index}", when=when, then=then) for index, (when, then) in enumerate(nodes)))


def test_a_tree_without_a_last_word_is_refused(plan_of):
    plan = plan_of()
    assert "totality" in failing(plan, tree=tree_of((Superior(alpha=0.025), Leaf.SUPERIOR)))
    assert "totality" in failing(plan, tree=tree_of((Always(), Leaf.INCONCLUSIVE), (Always(), Leaf.INCONCLUSIVE)))


def test_a_tree_that_could_go_on_for_ever_is_refused(plan_of):
    endless = tree_of((FailedRateAbove(limit=0.9), Leaf.ADD_SEEDS), (Always(), Leaf.INCONCLUSIVE))
    assert "termination" in failing(plan_of(), tree=endless)
    twice = tree_of((CanAddSeeds(at_most=2), Leaf.ADD_SEEDS), (Always(), Leaf.INCONCLUSIVE))
    assert "termination" in failing(plan_of(), tree=twice)


def test_arms_that_differ_in_a_second_setting_are_refused(plan_of):
    plan = plan_of()
    one, other = plan.arms
    tampered = other.model_copy(update={"settings": {**other.settings, "trainer.learning_rate": 0.01}})
    (finding,) = check(plan.model_copy(update={"arms": (one, tampered)})).failures
    assert (finding.name, finding.detail) == ("one factor", "the arms also differ in trainer.learning_rate")


def test_arms_with_unequal_episodes_are_refused(plan_of):
    plan = plan_of()
    one, other = plan.arms
    tampered = other.model_copy(update={"settings": {**other.settings, "trainer.tasks_per_update": 16}})
    assert "episodes" in failing(plan, arms=(one, tampered))


def test_the_sealed_split_may_not_be_opened_by_a_comparison(plan_of):
    plan = plan_of()
    first, second = plan.stages
    assert "sealed split" in failing(plan, stages=(first, second.model_copy(update={"split": SEALED_SPLIT})))
    confirm = second.model_copy(update={"split": SEALED_SPLIT, "kind": StageKind.CONFIRM})
    assert "sealed split" not in failing(plan, stages=(first, second, confirm))


def test_two_seeds_or_one_seed_twice_are_refused(plan_of):
    assert "seeds" in failing(plan_of(), seeds=(1, 2))
    assert "seeds" in failing(plan_of(), seeds=(1, 2, 2))


def test_a_budget_that_the_runs_do_not_fit_is_refused(plan_of):
    (finding,) = check(plan_of(minutes=1.0), num_studies=20).failures
    assert finding.name == "budget"
    assert "raise --minutes" in finding.detail


def test_a_curve_of_two_points_has_no_speed(plan_of):
    plan = plan_of(updates=2)
    controls = plan.controls.model_copy(update={"episodes_between_evaluations": 128})
    assert "curve" in failing(plan, controls=controls)


def test_invented_studies_without_an_effect_claim_one_in_at_most_a_share_alpha(plan_of):
    outcome = simulate(plan_of(), num_studies=2000, seed=3)[World.NULL]
    claimed = outcome.shares.get(Leaf.SUPERIOR, 0) + outcome.shares.get(Leaf.INFERIOR, 0)
    # 0.05 and three standard errors of a share over 2000 studies. Both looks are in it.
    assert 0.01 < claimed <= 0.05 + 3 * (0.05 * 0.95 / 2000) ** 0.5


def test_with_three_arms_the_family_claims_one_in_at_most_a_share_alpha(plan_of):
    plan = plan_of("does trainer.group_size at 4, 8, 16 change the final held-out reward on tictactoe?", extra_seeds=0)
    outcome = simulate(plan, num_studies=1000, seed=4)[World.NULL]
    claimed = outcome.shares.get(Leaf.SUPERIOR, 0) + outcome.shares.get(Leaf.INFERIOR, 0)
    assert claimed * len(plan.treated) <= 0.05 + 3 * (0.05 * 0.95 / 1000) ** 0.5


def test_invented_studies_with_a_large_effect_find_it_and_crashes_decide_nothing(plan_of):
    outcomes = simulate(plan_of(), num_studies=200)
    assert outcomes[World.LARGE].shares[Leaf.SUPERIOR] > 0.95
    assert outcomes[World.ALL_CRASH].shares == {Leaf.TOO_MANY_FAILURES: 1.0}
    assert outcomes[World.NAN].shares == {Leaf.TOO_MANY_FAILURES: 1.0}


def test_planted_equivalence_is_called_equivalent(plan_of):
    plan = plan_of()
    arms = [arm.key for arm in plan.arms]
    runs = [
        Run(arm, seed, 0.6 + 0.001 * seed + 0.0005 * (arm == arms[0]) * seed) for arm in arms for seed in plan.seeds
    ]
    (contrast,) = contrasts(plan, runs)
    assert decide(plan.tree, evidence(plan, contrast, times_extended=0, can_extend=True)).leaf is Leaf.EQUIVALENT


def test_fewer_episodes_to_a_threshold_is_better(plan_of):
    plan = plan_of("Does a group size of 8 need fewer episodes to reach 0.6 on tic-tac-toe than 4?")
    runs = [Run("group_size=4", seed, 1000.0 + seed) for seed in plan.seeds]
    runs += [Run("group_size=8", seed, 500.0 - seed) for seed in plan.seeds]
    (contrast,) = contrasts(plan, runs)
    assert contrast.difference.value == pytest.approx(-504.0)
    assert decide(plan.tree, evidence(plan, contrast, times_extended=0, can_extend=False)).leaf is Leaf.SUPERIOR


def test_a_failed_run_counts_as_the_worst_and_its_pair_is_kept(plan_of):
    plan = plan_of()
    runs = [Run("group_size=4", seed, 0.5 + 0.01 * seed) for seed in plan.seeds]
    runs += [Run("group_size=8", 1, 0.8), Run("group_size=8", 2, 0.81), Run("group_size=8", 3, None)]
    (contrast,) = contrasts(plan, runs)
    assert (contrast.num_failed, contrast.num_runs, contrast.difference.n) == (1, 6, 3)
    # Pairs 0.8-0.51, 0.81-0.52, -1-0.53.
    assert contrast.difference.value == pytest.approx((0.29 + 0.29 - 1.53) / 3)
    assert contrast.survivors is not None
    assert contrast.survivors.value == pytest.approx(0.29)
