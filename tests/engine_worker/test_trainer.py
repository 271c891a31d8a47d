"""The update is the gradient of the objective on paper, for whom it should be and for nobody else."""

from __future__ import annotations

import hashlib
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

from experiments_db import queries
from swarm_engine.config import Aggregation, Algorithm, LoraConfig, Merge, TrainerConfig
from swarm_engine.models import resolve
from swarm_engine.models.decoder import Decoder, attend_causally
from swarm_engine.models.loading import LoadedPolicy, adapt, load_policy, save_policy
from swarm_engine.protocol import Updated
from swarm_engine.trainer.adamw import AdamW, AdamWConfig
from swarm_engine.trainer.advantages import group_advantages
from swarm_engine.trainer.loss import clipped_surrogate, entropy, k3, kl_penalty
from swarm_engine.trainer.rows import row_of, trained_row
from swarm_engine.trainer.samples import Drop, Sample, count_drops, make_samples
from swarm_engine.trainer.scoring import Row, plan_microbatches, score
from swarm_engine.trainer.trainer import Sums, Trainer
from swarm_engine.types import BatchRecord, Continuation, Episode, FinishReason, Outcome, Untrained

rewards = st.lists(st.floats(-100, 100, allow_nan=False), min_size=1, max_size=16)


def samples_of(episodes: Sequence[Episode], merge: Merge = Merge.NONE) -> list[Sample]:
    return make_samples(episodes, TrainerConfig(merge=merge), version=0)


def update(trainer: Trainer, episodes: Sequence[Episode], step: int = 1) -> Updated:
    return trainer.update(BatchRecord(step, tuple(episode.episode_id for episode in episodes), 0), episodes)


def fingerprint(model: Decoder) -> str:
    digest = hashlib.sha256()
    for _, tensor in model.named_weights():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def gradient_of(model: Decoder, config: TrainerConfig, episodes: Sequence[Episode]) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient of one batch."""
    return gradient_by(Trainer(model, config), episodes)


def gradient_by(trainer: Trainer, episodes: Sequence[Episode]) -> tuple[float, torch.Tensor]:
    samples = make_samples(episodes, trainer.config, version=0)
    rows = trainer.weigh(trainer.rows(samples), samples, range(len(samples)))
    loss = trainer.accumulate_gradient(rows, 0, Sums())
    gradient = flat_gradient(trainer.model)
    trainer.optimizer.zero_grad()
    return loss, gradient


def flat_gradient(model: Decoder) -> torch.Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


# Advantages.


def test_advantages_of_a_win_and_a_loss_are_plus_and_minus_one() -> None:
    assert group_advantages([1.0, 0.0], normalize_by_std=True) == [1.0, -1.0]
    assert group_advantages([1.0, 0.0], normalize_by_std=False) == [0.5, -0.5]


@pytest.mark.parametrize("same", [[2.0], [0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.1 + 0.2, 0.3], [1e9, 1e9 + 1]])
def test_a_group_of_one_and_rewards_that_differ_by_rounding_teach_nothing(same: list[float]) -> None:
    assert group_advantages(same, normalize_by_std=True) == [0.0] * len(same)


def test_a_single_loss_among_wins_is_told_by_deviations_worked_out_by_hand() -> None:
    """Seven of .35 and a 0: mean .30625, deviation .35 * sqrt(7) / 8 = .11575."""
    found = group_advantages([0.35] * 7 + [0.0], normalize_by_std=True)
    assert found == pytest.approx([7**-0.5] * 7 + [-(7**0.5)])


@given(rewards, st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order(some: list[float], normalize: bool) -> None:
    advantages = group_advantages(some, normalize_by_std=normalize)
    assert sum(advantages) == pytest.approx(0, abs=1e-9)
    if any(advantages):
        by_reward = sorted(range(len(some)), key=lambda place: some[place])
        assert [advantages[place] for place in by_reward] == sorted(advantages)


@given(rewards, st.floats(0.1, 10), st.floats(-10, 10))
def test_normalized_advantages_ignore_scale_and_offset(some: list[float], scale: float, offset: float) -> None:
    before = group_advantages(some, normalize_by_std=True)
    after = group_advantages([scale * reward + offset for reward in some], normalize_by_std=True)
    if max(some) - min(some) > 1e-2:
        assert after == pytest.approx(before, abs=1e-6)


# Who takes part.


def test_an_episode_counts_once_in_its_baseline_however_many_calls_it_made() -> None:
    """B045."""
    long = episode("a", [call([5] * n, [7]) for n in range(1, 6)], 1.0)
    short = episode("b", [call([5], [7])], 0.0)
    assert [sample.advantage for sample in samples_of([long, short])] == [1.0, -1.0]


def test_a_rejected_reply_does_not_move_the_baseline_of_its_siblings() -> None:
    """B046."""
    cancelled = call([5], [7], finish_reason=FinishReason.CANCELLED, untrained_because="cancelled")
    batch = [
        episode("a", [call([5], [7])], 1.0),
        episode("b", [call([5], [7])], 0.0),
        episode("c", [cancelled], 5.0),
    ]
    samples = samples_of(batch)
    assert [(sample.advantage, sample.drop) for sample in samples] == [(1, None), (-1, None), (0, Drop.UNTRAINED)]
    assert count_drops(samples) == {"untrained": 1}


def test_null_rewards_and_broken_environments_are_counted_and_never_trained() -> None:
    batch = [
        episode("a", [call([5], [7])], 1.0),
        episode("b", [call([5], [7])], None),
        episode("c", [call([5], [7])], 0.0),
        episode("d", [call([5], [7])], 9.0, outcome=Outcome.ENV_ERROR),
        episode("e", [call([5], [7])], float("nan")),
        episode("f", [call([5], [7])], {"somebody else": 3.0}),
        episode("g", [], {"main": 2.0}),
    ]
    samples = samples_of(batch)
    assert [sample.advantage for sample in samples] == [1, 0, -1, 0, 0, 0, 0, 0]
    assert count_drops(samples) == {"unjudged": 3, "env_error": 1, "untrained": 1}


def test_baselines_are_of_the_group_and_the_agent() -> None:
    def both(name: str, group: str, white: float, black: float) -> Episode:
        calls = [call([5], [7], agent="white"), call([6], [8], agent="black")]
        return episode(name, calls, {"white": white, "black": black}, group_id=group)

    samples = samples_of([both("a", "g", 1, 30), both("b", "g", 0, 10), both("c", "h", 7, 7), both("d", "h", 5, 7)])
    assert [(sample.agent, sample.advantage) for sample in samples] == [
        *[("white", 1), ("black", 1), ("white", -1), ("black", -1)],
        *[("white", 1), ("black", 0), ("white", -1), ("black", 0)],
    ]
    assert count_drops(samples) == {}, "an episode with one trained agent carries a loss"


def test_a_group_with_one_judged_episode_is_alone() -> None:
    samples = samples_of([episode("a", [call([5], [7])], 1.0), episode("b", [call([5], [7])], None)])
    assert [sample.drop for sample in samples] == [Drop.ALONE, Drop.UNJUDGED]


def test_exactly_the_sampled_tokens_are_targets() -> None:
    """B037: the first of a reply too, which is predicted at the prompt's last token."""
    first = call([1, 2, 3], [11, 12, 13], [-0.1, -0.2, -0.3], call_id="a", temperature=0.5)
    greedy = call([1, 2, 3, 11, 12, 13, 4], [21, 22], call_id="b", untrained_because="greedy")
    last = call([1, 2, 3, 11, 12, 13, 4, 21, 22, 5], [31], [-0.7], call_id="c")
    (sample,) = samples_of([episode("a", [first, greedy, last], 1.0)], Merge.TOKEN)
    (timeline,) = sample.timelines
    row = trained_row(timeline, sample)
    assert row.row.targets == (3, 4, 5, 10)
    assert [row.row.tokens[target] for target in row.row.targets] == [11, 12, 13, 31]
    assert row.sampling_logprobs == (-0.1, -0.2, -0.3, -0.7)
    assert row.row.temperatures == (0.5, 0.5, 0.5, 1.0)
    assert row.row.num_computed == 10, "the last token predicts nothing"
    assert sample.num_trained == 4


# Scores.


def test_an_end_token_that_also_pads_is_trained_and_a_gap_in_the_loss_is_read(tiny: LoadedPolicy) -> None:
    """B031: token 0 ends the short reply, and pads its row to the length of the other."""
    model = tiny.model.double()
    pad = 0
    first = call([5, 6], [11, 12, pad], call_id="a")
    rows = [row_of(call([5, 6], [7] * 5).timeline()), row_of(first.timeline())]
    assert rows[1].targets == (2, 3, 4)
    together = score(model, rows).logprobs_N
    assert torch.allclose(together[5:], score(model, [rows[1]]).logprobs_N, atol=1e-12, rtol=0)
    tokens = torch.tensor([[5, 6, 11, 12]])
    logits = model.logits(model.hidden(tokens, torch.arange(4), attend_causally))[0, 3]
    assert together[-1].item() == pytest.approx(logits.log_softmax(-1)[pad].item(), abs=1e-12)
    told = []
    for result in (20, 21):
        second = call([5, 6, 11, 12, pad, result], [31], call_id="b")
        (sample,) = samples_of([episode("a", [first, second], 1.0)], Merge.TOKEN)
        row = row_of(sample.timelines[0])
        assert row.targets == (2, 3, 4, 6)
        told.append(score(model, [row]).logprobs_N)
    assert torch.equal(told[0][:3], told[1][:3])
    assert abs(told[0][3] - told[1][3]) > 1e-6, "the answer depends on the tool's result"


def test_scores_are_those_of_each_row_alone(tiny: LoadedPolicy) -> None:
    """B039: rows side by side see nothing of each other, and none predicts the first token of the next."""
    rows = [
        Row((5, 6, 7, 8), (2, 3), (1.0, 0.5)),
        Row((9,) * 30, (1, 29), (1.0, 1.0)),
        Row((4, 0), (1,), (2.0,)),  # token 0 is also what rows are padded with
    ]
    model = tiny.model.double()
    together = score(model, rows)
    alone = [score(model, [row]) for row in rows]
    assert torch.allclose(together.logprobs_N, torch.cat([one.logprobs_N for one in alone]), atol=1e-12, rtol=0)
    assert torch.allclose(together.entropies_N, torch.cat([one.entropies_N for one in alone]), atol=1e-12, rtol=0)
    assert together.logprobs_N.shape == (5,)
    tokens = torch.tensor([[5, 6, 7, 8]])
    logits = model.logits(model.hidden(tokens, torch.arange(4), attend_causally))[0, 2] / 0.5
    assert together.logprobs_N[1].item() == pytest.approx(logits.log_softmax(-1)[8].item(), abs=1e-12)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan_microbatches(lengths, budget)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= budget


# The objective.


def test_the_clipped_surrogate_by_hand() -> None:
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    found = clipped_surrogate(ratios, advantages, clip_low=0.2, clip_high=0.28)
    # min(1*2, ..), min(1.5, 1.28), min(-1.5, -1.28), min(0.5, 0.8), min(-0.5, -0.8)
    assert found.values_N.tolist() == pytest.approx([2.0, 1.28, -1.5, 0.5, -0.8])
    assert found.is_clipped_N.tolist() == [False, True, False, False, True]


def test_the_kl_penalty_by_hand() -> None:
    policy, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0 + math.log(2)])
    assert kl_penalty(policy, reference).tolist() == pytest.approx([0.0, 2 - math.log(2) - 1], abs=1e-6)


def test_a_token_that_the_reference_finds_far_likelier_neither_dominates_a_kl_penalty_nor_ends_it() -> None:
    """e^2 - 2 - 1 = 4.389, e^10 - 11 = 22015, e^30 - 31 = 1e13, e^200 = infinity; on the other side d - 1 + e^-d."""
    policy = torch.tensor([-31.0, -31.0, -31.0, -201.0, -1.0, -1.0, -1.0], requires_grad=True)
    reference = torch.tensor([-29.0, -21.0, -1.0, -1.0, -3.0, -12.5, -31.0])
    penalty = kl_penalty(policy, reference)
    assert penalty.tolist() == pytest.approx([math.e**2 - 3, 10, 10, 10, 1 + math.e**-2, 10, 10])
    penalty.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([1 - math.e**2, 0, 0, 0, 1 - math.e**-2, 0, 0])
    assert k3(policy.detach()[1:2], reference[1:2]).tolist() == pytest.approx([math.e**10 - 11]), "metrics say it all"


@pytest.mark.parametrize("merge", EXACT_MERGES)
def test_one_token_far_from_the_start_weights_leaves_an_update_to_the_others(tiny: LoadedPolicy, merge: Merge) -> None:
    config = TrainerConfig(kl_weight=0.1, merge=merge)
    far = Trainer(tiny.model, config)
    assert far.reference is not None
    with torch.no_grad():  # so sure of other tokens that those of the batch are hundreds of nats from the start's
        tiny.model.norm *= 100
    batch = [episode(f"e{index}", [call([5, 6], [7 + index % 2])], float(index % 2)) for index in range(4)]
    metrics = update(far, on_policy(tiny, batch)).metrics
    assert (metrics["skipped"], metrics["nonfinite_gradient"]) == (0, 0)
    assert metrics["kl_reference"] == 10
    assert metrics["grad_norm"]


@pytest.mark.parametrize(
    ("config", "rate", "warmup"),
    [
        ({}, 1e-3, 5),
        # 32 episodes in place of 64
        ({"group_size": 4}, 0.5e-3, 5),
        ({"tasks_per_update": 32}, 1e-3, 5),
        ({"learning_rate": 0.5, "warmup_updates": 0}, 0.5, 0),
        ({"lr_schedule": "linear", "total_updates": 3}, 1e-3, 2),
    ],
)
def test_the_embedded_model_and_its_copies_have_a_rate_of_their_own(
    config: dict[str, Any], rate: float, warmup: int, tmp_path: Path
) -> None:
    policy = load_policy(resolve("nano-nim", tmp_path))
    save_policy(policy, tmp_path)
    for one in (policy, load_policy(tmp_path), adapt(policy, "nano-nim", "", LoraConfig(), 0)):
        found = Trainer(one.model, TrainerConfig.model_validate(config)).config
        assert found.learning_rate == pytest.approx(rate)
        assert found.warmup_updates == warmup


def test_any_other_model_is_trained_as_slowly_as_public_trainers_do(tiny: LoadedPolicy) -> None:
    branches = adapt(tiny, "tiny", "", LoraConfig(), 0)
    for policy, rate in ((tiny, 1e-6), (branches, 1e-5)):
        config = Trainer(policy.model, TrainerConfig(group_size=2)).config
        assert (config.learning_rate, config.warmup_updates) == (rate, 0)


def test_what_was_sampled_tells_the_entropy_where_nothing_is_computed(tiny: LoadedPolicy) -> None:
    flat = [episode(f"e{index}", [call([5, 6], [7, 8], [-1.0, -2.5])], -0.5) for index in range(2)]
    metrics = update(Trainer(tiny.model, TrainerConfig()), flat).metrics
    assert (metrics["entropy"], metrics["sampling_entropy"], metrics["reward_min"]) == (None, 1.75, -0.5)


def test_entropy_with_an_impossible_token_is_finite_and_so_is_its_gradient() -> None:
    """B058, where a logit is -inf."""
    logits = torch.tensor([[0.0, -math.inf], [0.0, 0.0]], requires_grad=True)
    values = entropy(logits)
    assert values.tolist() == pytest.approx([0.0, math.log(2)])
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_an_update_reports_what_the_experiment_log_asks_for_by_name(tiny: LoadedPolicy) -> None:
    metrics = update(Trainer(tiny.model, TrainerConfig(epochs=3)), conversations(0)).metrics
    assert metrics[queries.OPTIMIZER_STEPS] == 3
    assert metrics[queries.REWARD] is not None


@pytest.mark.parametrize("how", [Merge.TOKEN, Merge.TREE])
def test_merging_computes_fewer_tokens(tiny: LoadedPolicy, how: Merge) -> None:
    batch = conversations(3)
    apart = update(Trainer(tiny.model, TrainerConfig(merge=Merge.NONE)), batch)
    merged = update(Trainer(tiny.model, TrainerConfig(merge=how)), batch)
    assert apart.metrics["merge_ratio"] == 1
    assert merged.metrics["num_trained_tokens"] == apart.metrics["num_trained_tokens"]
    ratio = (apart.metrics["num_computed_tokens"] or 0) / (merged.metrics["num_computed_tokens"] or 1)
    assert ratio == pytest.approx(merged.metrics["merge_ratio"], rel=0.1)
    assert ratio > 1.5


def test_rows_merged_by_text_stay_within_the_models_context(tiny: LoadedPolicy) -> None:
    """Two calls that fit, though with the thought back in its history the second would not."""
    most = tiny.model.config.max_context
    thought = call([5], [7] * (most // 2), call_id="thought")
    told = call([5, 7], [8] * (most // 2 + 1), call_id="told", continues=Continuation("thought", 2))
    short = call([5], [9], call_id="short")
    batch = [episode("a", [thought, told], 1.0), episode("b", [short], 0.0)]
    metrics = update(Trainer(tiny.model, TrainerConfig(merge=Merge.TEXT)), batch).metrics
    assert metrics["merge_ratio"] == 1
    assert metrics["out_of_context_tokens"] == 0
    assert metrics["num_trained_tokens"] == 2 * (most // 2) + 2


def test_tokens_that_are_not_trained_are_in_no_denominator(tiny: LoadedPolicy) -> None:
    """B033: ten kept tokens beside ninety that are masked."""
    pair = [episode("a", [call([5], [7] * 10, [-1.0] * 10)], 1.0), episode("b", [call([5], [8])], 0.0)]
    cut_off = call([6], [7] * 90, finish_reason=FinishReason.LENGTH, untrained_because="unused_retry")
    with_dead_weight = [*pair, episode("c", [cut_off], 0.0), episode("d", [call([9], [7] * 50)], None)]
    for algorithm in Algorithm:
        for aggregation in Aggregation:
            config = TrainerConfig(algorithm=algorithm, aggregation=aggregation)
            alone, _ = gradient_of(tiny.model, config, pair)
            assert alone != 0
            assert gradient_of(tiny.model, config, with_dead_weight)[0] == alone


def test_a_reply_that_was_cut_counts_as_cut_whether_or_not_it_is_trained(tiny: LoadedPolicy) -> None:
    """B034: lengths 10 (finished) and 90 (cut, masked); a reply whose caller went away is neither."""
    cut: dict[str, Any] = {"finish_reason": FinishReason.LENGTH}
    gone: dict[str, Any] = {"finish_reason": FinishReason.CANCELLED, "untrained_because": Untrained.CANCELLED}
    for masked in (None, Untrained.CONSTRAINED):
        calls = [call([5], [7] * 10), call([6], [8] * 90, untrained_because=masked, **cut), call([9], [8], **gone)]
        metrics = update(Trainer(tiny.model, TrainerConfig()), [episode("a", calls, 1.0)]).metrics
        assert metrics["truncated_fraction"] == 0.5
    assert update(Trainer(tiny.model, TrainerConfig()), [episode("a", [], None)]).metrics["truncated_fraction"] is None


def test_groups_of_identical_replies_are_counted(tiny: LoadedPolicy) -> None:
    """B084: whatever their rewards, and however the prompts around their replies differ."""

    def group(name: str, *replies: list[int]) -> list[Episode]:
        calls = [[call([place], [7]), call([place, 7, 9], reply)] for place, reply in enumerate(replies)]
        return [episode(f"{name}{place}", members, float(place), group_id=name) for place, members in enumerate(calls)]

    batch = [*group("a", [5, 6], [5, 6], [5, 6]), *group("b", [5, 6], [5, 6], [5, 7]), *group("c", [8])]
    metrics = update(Trainer(tiny.model, TrainerConfig()), batch).metrics
    assert (metrics["identical_reply_groups"], metrics["zero_variance_groups"]) == (1, 0)
    one_success = [*group("d", [5], [6], [7]), *group("e", [5, 6], [5, 6])]
    for member in one_success[:2]:
        member.rewards["main"] = 0.0
    metrics = update(Trainer(tiny.model, TrainerConfig(algorithm=Algorithm.SFT)), one_success).metrics
    assert metrics["identical_reply_groups"] == 0, "of each group only one sample is imitated"


def test_zero_variance_groups_stay_in_the_denominator(tiny: LoadedPolicy) -> None:
    pair = [episode("a", [call([5], [7, 7])], 1.0), episode("b", [call([5], [8, 8])], 0.0)]
    flat = [episode(name, [call([5], [9] * 2)], 3.0, group_id="h") for name in ("c", "d")]
    alone, _ = gradient_of(tiny.model, TrainerConfig(), pair)
    assert gradient_of(tiny.model, TrainerConfig(), [*pair, *flat])[0] == pytest.approx(alone / 2, rel=1e-6)


# The update.


def on_policy(policy: LoadedPolicy, batch: Sequence[Episode]) -> list[Episode]:
    """The same episodes with the policy's own log-probabilities."""
    return [
        replace(
            member,
            calls=tuple(replace(one, logprobs=tuple(own_logprobs(policy.model, one))) for one in member.calls),
        )
        for member in batch
    ]


def test_the_first_update_on_policy_has_loss_zero_and_still_a_gradient(tiny: LoadedPolicy) -> None:
    """B061."""
    reply_lengths_equal = [episode(f"e{index}", [call([5, 6], [7 + index, 8])], float(index % 2)) for index in range(4)]
    metrics = update(Trainer(tiny.model, TrainerConfig()), on_policy(tiny, reply_lengths_equal)).metrics
    assert metrics["loss"] == pytest.approx(0, abs=1e-6)
    assert (metrics["grad_norm"] or 0) > 1e-2
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl_sampling"] == pytest.approx(0, abs=1e-6)
    assert metrics["kl_update"] is None, "its one step is computed before anything moves"
    assert (metrics["clip_fraction"], metrics["skipped"]) == (0, 0)
    assert (metrics["reward_mean"], metrics["reward_std"]) == (0.5, 0.5)


def test_what_an_update_moves_is_not_what_sampler_and_trainer_differ_by(tiny: LoadedPolicy) -> None:
    """Sixteen steps on policy, at a rate that takes the policy far."""
    batch = [episode(f"e{index}", [call([5, 6], [7 + index, 8])], float(index % 2)) for index in range(4)]
    config = TrainerConfig(algorithm=Algorithm.PPO_CLIP, learning_rate=3e-3)
    metrics = update(Trainer(tiny.model, config), on_policy(tiny, batch)).metrics
    assert metrics["kl_sampling"] == pytest.approx(0, abs=1e-9)
    assert (metrics["kl_update"] or 0) > 0.01


@pytest.mark.parametrize("algorithm", Algorithm)
def test_updates_raise_the_probability_of_what_was_rewarded(tiny: LoadedPolicy, algorithm: Algorithm) -> None:
    batch = [episode(f"e{index}", [call([5, 6], [7 + index % 2])], float(index % 2)) for index in range(8)]
    trainer = Trainer(tiny.model, TrainerConfig(algorithm=algorithm, learning_rate=1e-3))
    good, bad = Row((5, 6, 8), (2,), (1.0,)), Row((5, 6, 7), (2,), (1.0,))
    with torch.no_grad():
        before = score(tiny.model, [good, bad]).logprobs_N
    for step in range(5):
        update(trainer, on_policy(tiny, batch), step + 1)
    with torch.no_grad():
        after = score(tiny.model, [good, bad]).logprobs_N
    assert after[0] > before[0] + 0.5
    assert after[1] < before[1]
    assert trainer.step == 5


@pytest.mark.parametrize("algorithm", [one for one in Algorithm if one is not Algorithm.SFT])
def test_a_batch_of_uniform_groups_leaves_every_bit_of_the_weights(tiny: LoadedPolicy, algorithm: Algorithm) -> None:
    """B060: neither decay nor momentum moves them; the optimizer's steps stay and the version goes up."""
    trainer = Trainer(
        tiny.model, TrainerConfig(algorithm=algorithm, weight_decay=0.1, kl_weight=0.1, entropy_weight=0.1)
    )
    update(trainer, conversations(1))
    before, steps = fingerprint(tiny.model), trainer.optimizer.num_steps
    uniform = [episode(f"e{index}", [call([5, 6], [7 + index])], 0.5) for index in range(4)]
    result = update(trainer, uniform, 2)
    assert fingerprint(tiny.model) == before
    assert (trainer.optimizer.num_steps, trainer.step) == (steps, 2)
    assert result.drops == {"zero_variance": 4}
    assert result.metrics["num_computed_tokens"] == 0
    assert (result.metrics["skipped"], result.metrics["zero_variance_groups"]) == (1, 1)
    assert result.metrics["loss"] is None
    assert result.metrics["grad_norm"] is None


@pytest.mark.parametrize("empty", [[], [episode("a", [], None)], [episode("a", [call([5], [7])], None)]])
def test_a_batch_with_nothing_to_train_is_skipped_and_its_metrics_are_null(
    tiny: LoadedPolicy, empty: list[Episode]
) -> None:
    """B033 and B058, where everything is masked."""
    before = fingerprint(tiny.model)
    metrics = update(Trainer(tiny.model, TrainerConfig()), empty).metrics
    assert fingerprint(tiny.model) == before
    assert metrics["skipped"] == 1
    for name in ("loss", "grad_norm", "entropy", "kl_sampling", "ratio_max", "reward_mean", "merge_ratio"):
        assert metrics[name] is None, name


def test_calls_that_are_not_trained_are_counted_by_reason(tiny: LoadedPolicy) -> None:
    forced = replace(call([5], [7]), untrained_because=Untrained.CONSTRAINED)
    batch = [episode("a", [call([5], [7]), forced], 0.0), episode("b", [forced, call([5], [8])], 1.0)]
    metrics = update(Trainer(tiny.model, TrainerConfig()), batch).metrics
    assert metrics["constrained_calls"] == 2
    assert [metrics[f"{reason}_calls"] for reason in ("greedy", "cancelled", "unused_retry")] == [0, 0, 0]
    assert metrics["num_trained_tokens"] == 2


def test_a_gradient_that_is_not_finite_skips_the_step_visibly(tiny: LoadedPolicy) -> None:
    trainer = Trainer(tiny.model, TrainerConfig())
    before = fingerprint(tiny.model)
    poisoned = [episode("a", [call([5], [7], [-1e6])], 0.0), episode("b", [call([5], [8], [-1.0])], 1.0)]
    metrics = update(trainer, poisoned).metrics
    assert fingerprint(tiny.model) == before
    assert (metrics["skipped"], metrics["nonfinite_gradient"]) == (1, 1)
    assert all(value is None or math.isfinite(value) for value in metrics.values())
    assert update(trainer, conversations(1), 2).metrics["skipped"] == 0


def test_the_kl_pulls_towards_the_start_weights(tiny: LoadedPolicy) -> None:
    trainer = Trainer(tiny.model, TrainerConfig(kl_weight=0.5, learning_rate=3e-3))
    first = update(trainer, conversations(1)).metrics["kl_reference"]
    assert first == pytest.approx(0, abs=1e-9)
    assert (update(trainer, conversations(1), 2).metrics["kl_reference"] or 0) > 1e-4


def test_our_adamw_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(5, 4, generator=generator, dtype=torch.float64))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = AdamW({"p": ours}, AdamWConfig(0.01, 0.8, 0.9, 0.1))
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for _ in range(5):
        gradient = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)


def test_a_long_gradient_is_cut_to_the_norm_and_a_short_one_left() -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"}
    optimizer = AdamW(parameters, AdamWConfig(0.1))
    for parameter in parameters.values():
        parameter.grad = torch.tensor([3.0, 0.0])
    assert optimizer.clip_gradient(10.0) == pytest.approx(math.sqrt(18))
    assert parameters["a"].grad is not None
    assert parameters["a"].grad.tolist() == [3.0, 0.0]
    optimizer.clip_gradient(1.0)
    assert parameters["a"].grad[0].item() == pytest.approx(3 / math.sqrt(18))
