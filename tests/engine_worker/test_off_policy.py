"""Tokens that other weights sampled: their age, what they weigh, and how an update of several steps sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import EXACT_MERGES, call, conversations, episode, own_logprobs
from hypothesis import given
from hypothesis import strategies as st

from swarm_engine.config import Algorithm, Knobs, OffPolicy, TrainerConfig
from swarm_engine.models.decoder import Decoder
from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.protocol import Updated
from swarm_engine.trainer.loss import Objective, Tokens
from swarm_engine.trainer.off_policy import correct
from swarm_engine.trainer.samples import Drop, count_drops, make_samples
from swarm_engine.trainer.trainer import Trainer, plan_steps
from swarm_engine.types import BatchRecord, Episode

WIDE = {"clip_low": 0.99, "clip_high": 100.0}
"""A clip that leaves every token a gradient here, so that each minibatch takes its step."""


def update(trainer: Trainer, episodes: Sequence[Episode], step: int = 1, seed: int = 0) -> Updated:
    return trainer.update(BatchRecord(step, (), seed), episodes)


def shifted(model: Decoder, name: str, reward: float, shifts: Sequence[float], **changes: Any) -> Episode:
    """One call, whose tokens the trainer finds likelier than the sampler did, by these nats."""
    reply = [10 + len(name), 20, 30, 40][: len(shifts)]
    told = [logprob - shift for logprob, shift in zip(own_logprobs(model, call([5], reply)), shifts, strict=True)]
    return episode(name, [call([5], reply, told, **changes)], reward)


# Weights.


def test_weights_are_truncated_or_masked_by_hand() -> None:
    weights = torch.tensor([0.3, 1.0, 3.0, math.inf])
    truncated, is_bounded = correct(weights, TrainerConfig(off_policy="truncated", off_policy_high=2.0).knobs)
    assert truncated.tolist() == pytest.approx([0.3, 1.0, 2.0, 2.0])
    assert is_bounded.tolist() == [False, False, True, True]
    masked, is_bounded = correct(weights, TrainerConfig(off_policy="masked").knobs)
    assert masked.tolist() == [0.0, 1.0, 3.0, 0.0]
    assert is_bounded.tolist() == [True, False, False, True]


@given(st.lists(st.floats(-50, 50), min_size=1), st.sampled_from(OffPolicy), st.floats(1, 10))
def test_no_weight_is_above_its_bound_whatever_the_path(shifts: list[float], how: OffPolicy, high: float) -> None:
    bound = {} if how is OffPolicy.NONE else {"off_policy_high": high}
    found, _ = correct(torch.tensor(shifts, dtype=torch.float64).exp(), TrainerConfig(off_policy=how, **bound).knobs)
    assert float(found.max()) <= (1 if how is OffPolicy.NONE else high)
    assert float(found.min()) >= 0


@pytest.mark.parametrize("how", [OffPolicy.TRUNCATED, OffPolicy.MASKED])
def test_a_long_sample_of_small_differences_keeps_every_token(how: OffPolicy) -> None:
    """B055: 1000 tokens that differ by 0.005 nats, cap 3; over the whole sample the weight would be 148."""
    found, is_bounded = correct(
        torch.full((1000,), 0.005).exp(), TrainerConfig(off_policy=how, off_policy_high=3).knobs
    )
    assert found.tolist() == pytest.approx([1.005] * 1000, abs=1e-4)
    assert not is_bounded.any()


@pytest.mark.parametrize(("how", "expected"), [("none", None), ("truncated", 0.5), ("masked", 0.75)])
def test_what_the_weights_come_to_is_in_the_metrics(tiny: LoadedPolicy, how: str, expected: float | None) -> None:
    """Weights 4, 3, 1 and 1/4: two above 2, and three outside [0.5, 2]."""
    batch = [
        shifted(tiny.model, "a", 1.0, [math.log(4), math.log(3)]),
        shifted(tiny.model, "bb", 0.0, [0.0, math.log(0.25)]),
    ]
    bound = {} if how == "none" else {"off_policy_high": 2.0}
    metrics = update(Trainer(tiny.model, TrainerConfig(off_policy=how, **bound)), batch).metrics
    assert metrics["off_policy_fraction"] == expected
    assert metrics["effective_sample_size"] == pytest.approx(8.25**2 / (4 * (16 + 9 + 1 + 0.0625)), rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(4.0 if how == "none" else 1.0, rel=1e-4)


# Age.


def aged(name: str, reward: float, *versions: Sequence[int]) -> Episode:
    calls = [call([5 + turn], [7] * len(some), policy_versions=tuple(some)) for turn, some in enumerate(versions)]
    return episode(name, calls, reward)


def test_a_sample_whose_oldest_token_is_too_old_is_dropped_and_moves_no_baseline() -> None:
    batch = [aged("a", 1.0, [4, 4], [4]), aged("b", 0.0, [2, 3]), aged("c", 9.0, [4], [1, 4])]
    for limit, dropped in ((None, []), (3, []), (2, ["c"]), (1, ["b", "c"]), (0, ["b", "c"])):
        samples = make_samples(batch, TrainerConfig(max_staleness=limit), version=4)
        assert [sample.episode_id for sample in samples if sample.drop is Drop.STALE] == dropped
    two = make_samples(batch, TrainerConfig(max_staleness=2), version=4)
    assert [sample.advantage for sample in two] == [1.0, -1.0, 0.0]
    assert [sample.counts for sample in two] == [True, True, False]
    assert count_drops(two) == {"stale": 1}


def test_an_untrained_call_of_old_weights_makes_nothing_stale() -> None:
    old = replace(call([5], [7], policy_versions=(0,)), untrained_because="greedy")
    batch = [episode(name, [old, call([6], [8], policy_versions=(4,))], float(name == "a")) for name in "ab"]
    assert [one.drop for one in make_samples(batch, TrainerConfig(max_staleness=0), version=4)] == [None, None]


def test_age_is_measured_in_updates_from_the_weights_that_are_trained(tiny: LoadedPolicy) -> None:
    batch = [aged("a", 1.0, [4, 4], [4]), aged("b", 0.0, [2, 3]), aged("c", 9.0, [4], [1, 4])]
    metrics = update(Trainer(tiny.model, TrainerConfig(max_staleness=2)), batch, step=5)
    assert metrics.drops == {"stale": 1}
    assert (metrics.metrics["staleness_mean"], metrics.metrics["staleness_max"]) == (3 / 5, 2)
    all_stale = update(Trainer(tiny.model, TrainerConfig(max_staleness=0)), batch[1:], step=5)
    assert all_stale.drops == {"stale": 2}
    assert (all_stale.metrics["skipped"], all_stale.metrics["staleness_max"]) == (1, None)


def test_sampler_and_trainer_are_compared_on_tokens_of_the_weights_at_hand(tiny: LoadedPolicy) -> None:
    batch = [
        shifted(tiny.model, "a", 1.0, [0.1, -0.3], policy_versions=(4, 4)),
        shifted(tiny.model, "bb", 0.0, [5.0, 0.2], policy_versions=(3, 4)),
    ]
    metrics = update(Trainer(tiny.model, TrainerConfig()), batch, step=5).metrics
    assert metrics["sampler_difference_mean"] == pytest.approx(0.2, abs=1e-5)
    assert metrics["sampler_difference_max"] == pytest.approx(0.3, abs=1e-5)
    none_at_hand = update(Trainer(tiny.model, TrainerConfig()), batch, step=9).metrics
    assert none_at_hand["sampler_difference_mean"] is none_at_hand["sampler_difference_max"] is None


# Several optimizer steps in one update.


def test_the_proximal_policy_stays_where_the_update_began(tiny_dir: Path) -> None:
    found = []
    for epochs in (1, 3):
        model = load_policy(tiny_dir).model
        batch = [shifted(model, "a", 1.0, [0.5, 0.0]), shifted(model, "bb", 0.0, [-0.5, 0.0])]
        config = TrainerConfig(off_policy="truncated", epochs=epochs, learning_rate=1e-2)
        found.append(update(Trainer(model, config), batch).metrics)
    for name in ("effective_sample_size", "sampler_difference_mean", "sampler_difference_max"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4), name
    assert found[0]["ratio_max"] == 1
    assert (found[1]["ratio_max"] or 0) > 1.05, "the weights moved, and the ratio is to where they began"


def test_several_epochs_and_minibatches_are_the_same_however_timelines_merge(tiny_dir: Path) -> None:
    batch = conversations(4)
    for algorithm in (Algorithm.PPO_CLIP, Algorithm.GSPO):
        weights = []
        for merge in EXACT_MERGES:
            policy = load_policy(tiny_dir, torch.float64)
            config = TrainerConfig(
                algorithm=algorithm,
                merge=merge,
                epochs=2,
                minibatches=3,
                off_policy="masked",
                microbatch_tokens=128,
                **WIDE,
            )
            metrics = update(Trainer(policy.model, config), batch, seed=7).metrics
            assert metrics["optimizer_steps"] == 6
            weights.append(torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()]))
        for other in weights[1:]:
            assert ((other - weights[0]).norm() / weights[0].norm()).item() < 1e-9


def test_ppo_takes_epochs_times_minibatches_steps_whatever_the_turns(tiny: LoadedPolicy) -> None:
    for turns in (1, 5):
        batch = [
            episode(
                f"e{place}", [call([5] * turn, [7 + place], [-7.0]) for turn in range(1, turns + 1)], float(place % 2)
            )
            for place in range(8)
        ]
        metrics = update(Trainer(tiny.model, TrainerConfig(algorithm="ppo_clip", epochs=2, **WIDE)), batch).metrics
        assert metrics["optimizer_steps"] == 8


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
def test_every_sample_is_in_one_minibatch_of_every_epoch(num: int, epochs: int, minibatches: int, seed: int) -> None:
    batch = [episode(f"e{place}", [call([5], [7])], float(place)) for place in range(num)]
    samples = make_samples([*batch, episode("null", [call([5], [7])], None)], TrainerConfig(), 0)
    parts = list(plan_steps(samples, epochs, minibatches, seed))
    assert parts == list(plan_steps(samples, epochs, minibatches, seed)), "the seed is in the batch's record"
    if num < 2:
        assert parts == []
        return
    cut = min(minibatches, num)
    assert len(parts) == epochs * cut
    for epoch in range(epochs):
        some = parts[epoch * cut : (epoch + 1) * cut]
        assert sorted(place for part in some for place in part) == list(range(num))
        assert max(map(len, some)) - min(map(len, some)) <= 1


def test_every_epoch_and_every_seed_cuts_anew() -> None:
    batch = [episode(f"e{place}", [call([5], [7])], float(place)) for place in range(16)]
    samples = make_samples(batch, TrainerConfig(), 0)
    one, other = (list(plan_steps(samples, 2, 4, seed)) for seed in (0, 1))
    assert one[:4] != one[4:]
    assert one[:4] != other[:4]


def test_a_minibatch_that_teaches_nothing_takes_no_step(tiny: LoadedPolicy) -> None:
    pair = [episode(f"e{place}", [call([5], [7 + place], [-7.0])], float(place)) for place in range(2)]
    flat = [episode(f"f{place}", [call([5], [7 + place])], 1.0, group_id="flat") for place in range(6)]
    trainer = Trainer(tiny.model, TrainerConfig(minibatches=8, weight_decay=0.5, **WIDE))
    assert update(trainer, [*pair, *flat]).metrics["optimizer_steps"] == 2
    assert trainer.optimizer.num_steps == 2


@pytest.mark.parametrize("knobs", [{}, {"kl_weight": 0.5}, {"algorithm": "gspo"}, {"minibatches": 2}])
def test_an_update_whose_every_token_is_masked_leaves_weights_and_optimizer(
    tiny: LoadedPolicy, knobs: dict[str, Any]
) -> None:
    """At 3 nats a token weighs exp(3) = 20, and 5 is the limit. KL pulls nowhere from the start weights."""
    trainer = Trainer(tiny.model, TrainerConfig(off_policy="masked", weight_decay=0.5, **knobs))
    before = {name: weight.clone() for name, weight in tiny.model.state_dict().items()}
    outside = [shifted(tiny.model, "a" * (1 + place), float(place % 2), [3.0, 3.0]) for place in range(4)]
    metrics = update(trainer, outside).metrics
    assert (metrics["off_policy_fraction"], metrics["grad_norm"]) == (1, 0)
    assert (metrics["optimizer_steps"], metrics["skipped"], metrics["nonfinite_gradient"]) == (0, 1, 0)
    assert trainer.optimizer.num_steps == 0
    assert all(torch.equal(weight, before[name]) for name, weight in tiny.model.state_dict().items())
    inside = [*outside[:3], shifted(tiny.model, "aaaa", 1.0, [3.0, 0.0])]
    assert update(trainer, inside, step=2).metrics["optimizer_steps"] == 1, "one token is left"


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_or_a_gradient_that_is_not_finite_takes_no_step_though_the_other_is(
    tiny: LoadedPolicy, what: str
) -> None:
    trainer = Trainer(tiny.model, TrainerConfig())
    finite = trainer.method.objective

    def endless(tokens: Tokens, knobs: Knobs) -> Objective:
        found = finite(tokens, knobs)
        steep_N = (tokens.policy_N - tokens.policy_N.detach()).sqrt()  # 0, and its derivative is infinite
        return replace(found, values_N=found.values_N + (math.inf if what == "loss" else steep_N))

    trainer.method = replace(trainer.method, objective=endless)
    metrics = update(trainer, conversations(1)).metrics
    assert (metrics["skipped"], trainer.optimizer.num_steps) == (1, 0)
    assert (metrics["nonfinite_loss"], metrics["nonfinite_gradient"]) == (what == "loss", what == "gradient")


def test_one_step_that_is_not_finite_does_not_spoil_the_others(tiny: LoadedPolicy) -> None:
    batch = [episode(f"e{place}", [call([5], [7 + place], [-6.0])], float(place % 2)) for place in range(4)]
    batch[0] = episode("e0", [call([5], [7], [-1e6])], 0.0)
    trainer = Trainer(tiny.model, TrainerConfig(minibatches=4, learning_rate=1e-3))
    metrics = update(trainer, batch).metrics
    assert (metrics["optimizer_steps"], metrics["skipped"], metrics["nonfinite_gradient"]) == (3, 0, 1)
    assert all(bool(parameter.isfinite().all()) for parameter in tiny.model.parameters())
