"""Every algorithm is what it is on paper: against one sequence at a time in float64, and against numbers by hand."""

from __future__ import annotations

import math
import random
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import EXACT_MERGES, call, conversations, episode, own_logprobs
from tiny_model import build_tiny_model
from torch import Tensor

from swarm_engine.config import OWN_VALUES, Aggregation, Algorithm, OffPolicy, TrainerConfig
from swarm_engine.models.decoder import Decoder, attend_causally
from swarm_engine.models.loading import load_policy
from swarm_engine.trainer.algorithms import METHODS
from swarm_engine.trainer.algorithms.dapo import overlong_punishment
from swarm_engine.trainer.loss import Tokens
from swarm_engine.trainer.samples import make_samples
from swarm_engine.trainer.trainer import Sums, Trainer
from swarm_engine.types import Episode, Untrained

LIMIT = 1e-9
"""Largest relative difference of losses and of gradients in float64."""
CLIPS = {"clip_low": 0.3, "clip_high": 3.0}
LOSS_LENGTH = 7

TRAJECTORIES = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "trajectories.py"))
SHAPES = {
    *("react x8", "drift x8", "group x8", "thinking x8", "agents x8"),
    *("thinking agents x8", "compaction x8", "wide group x16"),
}
SHAPE_SCALE, VOCABULARY = 0.02, 900


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    return build_tiny_model(tmp_path_factory.mktemp("small"), num_attention_heads=2, num_key_value_heads=1, **shape)


@pytest.fixture
def model(policy_dir: Path) -> Decoder:
    return load_policy(policy_dir, torch.float64).model


def loss_and_gradient(
    model: Decoder, config: TrainerConfig, episodes: Sequence[Episode], reference: Decoder | None = None
) -> tuple[float, Tensor]:
    """Of one optimizer step over the whole batch."""
    trainer = Trainer(model, config)
    if config.kl_weight:
        trainer.reference = reference
    samples = make_samples(episodes, config, version=0)
    rows = trainer.weigh(trainer.rows(samples), samples, range(len(samples)))
    loss = trainer.accumulate_gradient(rows, 0, Sums())
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    trainer.optimizer.zero_grad()
    return loss, gradient


# On paper: one sequence at a time.


def odd_batch() -> list[Episode]:
    """Two agents, three groups; twins, replies that begin alike, single tokens, empty and untrained replies, a flat
    group, rewards on both sides of zero."""
    draw = random.Random(5)
    batch = [
        replace(one, rewards={agent: (reward or 0) - 0.4 for agent, reward in one.rewards.items()})
        for one in conversations(3, num_groups=2, group_size=2, num_turns=2)
    ]
    first = batch[0]
    twin = [
        replace(one, call_id=f"twin-{one.call_id}", logprobs=tuple(draw.uniform(-8, -5) for _ in one.logprobs))
        for one in first.calls
    ]
    batch.append(replace(first, episode_id="twin", calls=tuple(twin), rewards={"left": 0.9, "right": -0.9}))
    opening = first.calls[0]
    stub = [
        call(opening.prompt_ids, opening.completion_ids[:1], [-6.0], call_id="stub", agent="left"),
        call(opening.prompt_ids, (8,), [-7.0], call_id="branch", agent="left", temperature=0.7),
        call(opening.prompt_ids, (), call_id="empty", agent="left"),
        call((5,), (9, 9, 9), [-6.0] * 3, call_id="greedy", agent="left", untrained_because=Untrained.GREEDY),
        call(first.calls[1].prompt_ids, (8, 3), [-7.0, -5.0], call_id="other", agent="right"),
    ]
    batch.append(episode("stub", stub, {"left": 0.3, "right": 0.5}, group_id=first.group_id))
    for place in range(2):
        flat = [call((5, 6), (7 + place, 9), [-6.5, -5.5], agent=agent) for agent in ("left", "right")]
        batch.append(episode(f"flat-{place}", flat, 0.5, group_id="flat"))
    return batch


def shaped_batch(name: str) -> list[Episode]:
    """A group of two episodes in the shape of one of the benchmarks' sets, short."""
    draw = random.Random(name)
    write, _ = TRAJECTORIES["SETS"][name]
    batch = []
    for number, turns in enumerate(TRAJECTORIES["group"](name, write, 2, SHAPE_SCALE).episodes):
        calls = [
            call(
                [token % VOCABULARY for token in turn.context],
                [token % VOCABULARY for token in turn.reply],
                [draw.uniform(-8.0, -5.0) for _ in turn.reply],
                call_id=f"{number}-{index}",
            )
            for index, turn in enumerate(turns)
        ]
        batch.append(episode(f"e{number}", calls, (0.9, -0.4)[number]))
    return batch


@dataclass
class PaperSample:
    """One agent's tokens in one episode; the tensors are of its trained tokens in order, of shape (n,)."""

    group: str
    agent: str
    reward: float
    policy: Tensor
    sampling: Tensor
    teacher: Tensor
    reference: Tensor
    entropy: Tensor


def read_paper(model: Decoder, reference: Decoder, batch: Sequence[Episode]) -> list[PaperSample]:
    """Call by call, full logits."""
    found = []
    for member in batch:
        for agent, reward in member.rewards.items():
            columns: list[list[Tensor]] = [[], [], [], [], []]
            for one in member.calls:
                if one.agent != agent or one.untrained_because or not one.completion_ids:
                    continue
                tokens = torch.tensor([one.prompt_ids + one.completion_ids])
                places = torch.arange(tokens.shape[1])
                logits = [some.logits(some.hidden(tokens, places, attend_causally))[0] for some in (model, reference)]
                for offset, token in enumerate(one.completion_ids):
                    at = len(one.prompt_ids) + offset - 1
                    policy, anchor = ((rows[at] / one.temperature).log_softmax(-1) for rows in logits)
                    told, taught = (
                        torch.tensor(logprobs[offset], dtype=torch.float64)
                        for logprobs in (one.logprobs, one.teacher_logprobs or one.logprobs)
                    )
                    entropy = -(policy.exp() * policy).sum()
                    values = (policy[token], told, taught, anchor[token].detach(), entropy)
                    for column, value in zip(columns, values, strict=True):
                        column.append(value)
            found.append(PaperSample(member.group_id, agent, reward or 0.0, *(torch.stack(one) for one in columns)))
    return found


def paper_advantages(algorithm: Algorithm, samples: Sequence[PaperSample]) -> list[float]:
    found = []
    for sample in samples:
        if algorithm is Algorithm.SFT:
            found.append(float(sample.reward > 0))
            continue
        peers = [
            other.reward
            for other in samples
            if other.agent == sample.agent and (algorithm is Algorithm.REINFORCE_PP or other.group == sample.group)
        ]
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in peers) / len(peers))
        if deviation < 1e-9:
            found.append(0.0)
        elif algorithm is Algorithm.DR_GRPO:
            found.append(sample.reward - mean)
        elif algorithm is Algorithm.RLOO:
            found.append((sample.reward - mean) * len(peers) / (len(peers) - 1))
        else:
            found.append((sample.reward - mean) / deviation)
    return found


def paper_values(algorithm: Algorithm, sample: PaperSample, advantage: Tensor, old: Tensor) -> Tensor:
    """What each token of a sample is worth, of shape (n,)."""
    ratio = (sample.policy - old).exp()
    match algorithm:
        case Algorithm.SFT | Algorithm.RLOO:
            return advantage * sample.policy
        case Algorithm.CISPO:
            return ratio.detach().clamp(max=1 + CLIPS["clip_high"]) * advantage * sample.policy
        case Algorithm.GSPO:
            ratio = (sample.policy - old).mean().exp().expand(len(old))
            if advantage.numel() > 1:  # the paper's form for advantages of tokens, equation 13
                ratio = ratio.detach() * (sample.policy - sample.policy.detach()).exp()
        case _:
            pass
    clipped = ratio.clamp(1 - CLIPS["clip_low"], 1 + CLIPS["clip_high"])
    return torch.minimum(ratio * advantage, clipped * advantage)


def paper_mean(aggregation: Aggregation, values: Sequence[Tensor]) -> Tensor:
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return torch.cat(list(values)).mean()
        case Aggregation.SEQUENCE_MEAN:
            return torch.stack([value.mean() for value in values]).mean()
        case Aggregation.CONSTANT:
            return torch.stack([value.sum() / LOSS_LENGTH for value in values]).mean()


def paper_loss(config: TrainerConfig, samples: Sequence[PaperSample]) -> Tensor:
    algorithm, aggregation = config.algorithm, config.knobs.aggregation
    values, penalties, entropies, imitated = [], [], [], []
    for sample, advantage in zip(samples, paper_advantages(algorithm, samples), strict=True):
        if sample.reward > 0:
            imitated.append(-sample.policy)
        if algorithm is Algorithm.SFT and advantage == 0:
            continue
        if algorithm is Algorithm.DAPO and sample.group == "flat" and not config.teacher_weight:
            continue
        worth = advantage + (config.teacher_weight or 0.0) * (sample.teacher - sample.sampling)
        if config.off_policy is None:
            values.append(paper_values(algorithm, sample, worth, sample.sampling))
        else:
            weight = (sample.policy - sample.sampling).exp().detach()
            if config.off_policy is OffPolicy.TRUNCATED:
                weight = weight.clamp(max=2.0)
            else:
                weight = weight * ((weight >= 0.5) & (weight <= 5.0))
            values.append(weight * paper_values(algorithm, sample, worth, sample.policy.detach()))
        difference = sample.reference - sample.policy
        penalties.append(difference.exp() - difference - 1)
        entropies.append(sample.entropy)
    loss = -paper_mean(aggregation, values)
    loss = loss + config.kl_weight * paper_mean(aggregation, penalties)
    loss = loss - config.entropy_weight * paper_mean(aggregation, entropies)
    return loss + (config.sft_weight or 0.0) * paper_mean(aggregation, imitated)


def settings(algorithm: Algorithm, aggregation: Aggregation, **changes: Any) -> dict[str, Any]:
    clips = {name: value for name, value in CLIPS.items() if name in OWN_VALUES[algorithm]}
    length = {"loss_length": LOSS_LENGTH} if aggregation is Aggregation.CONSTANT else {}
    return {"algorithm": algorithm, "aggregation": aggregation, **clips, **length, **changes}


def check_exactness(
    policy_dir: Path, batch: Sequence[Episode], cases: Sequence[dict[str, Any]], sizes: Sequence[int]
) -> None:
    reference, model = load_policy(policy_dir, torch.float64).model, load_policy(policy_dir, torch.float64).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.01)
    samples = read_paper(model, reference, batch)
    for case in cases:
        on_paper = paper_loss(TrainerConfig(**case), samples)
        gradients = torch.autograd.grad(on_paper, list(model.parameters()), retain_graph=True)
        expected = torch.cat([gradient.flatten() for gradient in gradients])
        assert expected.norm() > 1e-3
        for merge in EXACT_MERGES:
            for size in sizes:
                config = TrainerConfig(**case, merge=merge, microbatch_tokens=size)
                loss, found = loss_and_gradient(model, config, batch, reference)
                assert loss == pytest.approx(on_paper.item(), rel=LIMIT), (case, merge, size)
                assert ((found - expected).norm() / expected.norm()).item() < LIMIT, (case, merge, size)


@pytest.mark.parametrize("algorithm", [one for one in Algorithm if one is not Algorithm.SFT])
def test_a_teacher_s_word_is_in_every_algorithm_what_it_is_on_paper(policy_dir: Path, algorithm: Algorithm) -> None:
    draw = random.Random(1)
    batch = []
    for one in odd_batch():
        calls = [
            replace(
                some, teacher_logprobs=None if some.untrained_because else [draw.uniform(-9, -4) for _ in some.logprobs]
            )
            for some in one.calls
        ]
        batch.append(replace(one, calls=tuple(calls)))
    case = settings(algorithm, OWN_VALUES[algorithm]["aggregation"], teacher_weight=0.3)
    check_exactness(policy_dir, batch, [case], (24, 10_000))


@pytest.mark.parametrize("algorithm", Algorithm)
def test_loss_and_gradient_are_those_on_paper_for_every_algorithm_aggregation_and_merge(
    policy_dir: Path, algorithm: Algorithm
) -> None:
    check_exactness(policy_dir, odd_batch(), [settings(algorithm, one) for one in Aggregation], (24, 4096))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_so_they_are_for_every_shape_of_trajectory(policy_dir: Path, name: str) -> None:
    """Linear turns, drift, one prompt, thoughts that leave history, a log of five agents, compaction with retries."""
    cases = [settings(algorithm, aggregation) for algorithm in Algorithm for aggregation in Aggregation]
    batch = shaped_batch(name)  # in about two microbatches where every prefix is computed once
    contexts = [one.prompt_ids + one.completion_ids for member in batch for one in member.calls]
    prefixes = {context[:length] for context in contexts for length in range(1, len(context) + 1)}
    check_exactness(policy_dir, batch, cases, (max(64, len(prefixes) // 2),))


@pytest.mark.parametrize("algorithm", [Algorithm.GRPO, Algorithm.GSPO, Algorithm.CISPO, Algorithm.DAPO])
@pytest.mark.parametrize(
    "changes",
    [
        {"kl_weight": 0.3, "entropy_weight": 0.05},
        {"sft_weight": 0.5},
        {"off_policy": OffPolicy.TRUNCATED},
        {"off_policy": OffPolicy.MASKED, "sft_weight": 0.2, "entropy_weight": 0.05},
    ],
    ids=["regularized", "imitation", "truncated", "masked, imitation and entropy"],
)
def test_what_is_added_to_an_algorithm_is_exact_too(
    policy_dir: Path, algorithm: Algorithm, changes: dict[str, Any]
) -> None:
    aggregations = (Aggregation.TOKEN_MEAN, Aggregation.SEQUENCE_MEAN)
    check_exactness(policy_dir, odd_batch(), [settings(algorithm, one, **changes) for one in aggregations], (8,))


# By hand: two samples, the first of two tokens with reward 1, the second of one token with reward 0.

RATIOS = ((1.5, 0.5), (0.9,))


def pair(
    model: Decoder, ratios: Sequence[Sequence[float]] = RATIOS, rewards: Sequence[float] = (1.0, 0.0)
) -> tuple[list[Episode], list[list[float]]]:
    """One episode a reward, whose tokens have these ratios of policy and sampling, and the policy's logprobs."""
    batch, policy = [], []
    for place, (some, reward) in enumerate(zip(ratios, rewards, strict=True)):
        reply = [10 + place, 30, 20][: len(some)]
        logprobs = own_logprobs(model, call([5, 6], reply))
        told = [logprob - math.log(ratio) for logprob, ratio in zip(logprobs, some, strict=True)]
        batch.append(episode(f"e{place}", [call([5, 6], reply, told)], reward))
        policy.append(logprobs)
    return batch, policy


BY_HAND: Mapping[str, tuple[dict[str, Any], Callable[[float, float, float], float]]] = {
    # Advantages +1 and -1; min(1.5, 1.28) + min(0.5, 0.8) + min(-0.9, -0.9), over three tokens.
    "grpo": ({}, lambda *_: -(1.28 + 0.5 - 0.9) / 3),
    # (1.28 + 0.5) / 2 and -0.9, over two samples.
    "grpo by sequence": ({"aggregation": "sequence_mean"}, lambda *_: -(0.89 - 0.9) / 2),
    # Advantages +0.5 and -0.5; the upper clip is 1.2; (0.6 + 0.25 - 0.45) over 10 tokens and two samples.
    "dr_grpo": ({"algorithm": "dr_grpo", "loss_length": 10}, lambda *_: -(0.6 + 0.25 - 0.45) / 20),
    # Advantages +1 and -1, times the log-probabilities.
    "rloo": ({"algorithm": "rloo", "loss_length": 1}, lambda a, b, c: -(a + b - c) / 2),
    # As GRPO where the batch is one group, with the clip at 1.2.
    "reinforce_pp": ({"algorithm": "reinforce_pp"}, lambda *_: -(1.2 + 0.5 - 0.9) / 3),
    "dapo": ({"algorithm": "dapo"}, lambda *_: -(1.28 + 0.5 - 0.9) / 3),
    # Ratios sqrt(1.5 * 0.5) = 0.8660 and 0.9; with advantage -1 the second is clipped up to 0.95.
    "gspo": (
        {"algorithm": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        lambda *_: -(math.sqrt(0.75) - 0.95) / 2,
    ),
    # Weights min(1.5, 1.2), 0.5 and 0.9.
    "cispo": ({"algorithm": "cispo", "clip_high": 0.2}, lambda a, b, c: -(1.2 * a + 0.5 * b - 0.9 * c) / 3),
    "ppo_clip": ({"algorithm": "ppo_clip"}, lambda *_: -(1.2 + 0.5 - 0.9) / 3),
    # The first sample alone.
    "sft": ({"algorithm": "sft"}, lambda a, b, _: -(a + b) / 2),
    "grpo with imitation": ({"sft_weight": 0.1}, lambda a, b, _: -(1.28 + 0.5 - 0.9) / 3 - 0.1 * (a + b) / 2),
    # Decoupled: the ratio to the proximal policy is 1 and the weights are 1.5, 0.5 and 0.9.
    "truncated": ({"off_policy": "truncated", "off_policy_high": 1.2}, lambda *_: -(1.2 + 0.5 - 0.9) / 3),
    "masked": (
        {"off_policy": "masked", "off_policy_low": 0.8, "off_policy_high": 2.0},
        lambda *_: -(1.5 + 0.0 - 0.9) / 3,
    ),
    "rloo, truncated": (
        {"algorithm": "rloo", "loss_length": 1, "off_policy": "truncated", "off_policy_high": 1.2},
        lambda a, b, c: -(1.2 * a + 0.5 * b - 0.9 * c) / 2,
    ),
}


@pytest.mark.parametrize(("changes", "expected"), BY_HAND.values(), ids=list(BY_HAND))
def test_losses_by_hand(
    model: Decoder, changes: dict[str, Any], expected: Callable[[float, float, float], float]
) -> None:
    batch, ((a, b), (c,)) = pair(model)
    loss, _ = loss_and_gradient(model, TrainerConfig(**changes), batch)
    assert loss == pytest.approx(expected(a, b, c), rel=1e-6)


# Limits.


def logprob_gradient(model: Decoder, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
    """Gradient of the log-probability of a reply."""
    tokens = torch.tensor([[*prompt, *reply]])
    logits = model.logits(model.hidden(tokens, torch.arange(tokens.shape[1]), attend_causally))[0]
    logprobs = [logits[len(prompt) + offset - 1].log_softmax(-1)[token] for offset, token in enumerate(reply)]
    gradients = torch.autograd.grad(torch.stack(logprobs).sum(), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("algorithm", [one for one in Algorithm if one is not Algorithm.SFT])
def test_on_policy_every_algorithm_is_the_plain_policy_gradient(model: Decoder, algorithm: Algorithm) -> None:
    batch, _ = pair(model, ratios=((1.0,), (1.0,)))
    config = TrainerConfig(algorithm=algorithm, aggregation=Aggregation.TOKEN_MEAN)
    _, found = loss_and_gradient(model, config, batch)
    scale = 0.5 if algorithm is Algorithm.DR_GRPO else 1.0
    good, bad = (logprob_gradient(model, [5, 6], [10 + place]) for place in (0, 1))
    torch.testing.assert_close(found, -scale * (good - bad) / 2, rtol=1e-6, atol=1e-9)


def test_gspo_of_samples_of_one_token_is_grpo_of_them(model: Decoder) -> None:
    batch, _ = pair(model, ratios=((1.3,), (0.6,)))
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    grpo = loss_and_gradient(model, TrainerConfig(**clips), batch)
    gspo = loss_and_gradient(model, TrainerConfig(algorithm="gspo", **clips), batch)
    assert gspo[0] == pytest.approx(grpo[0], rel=1e-12)
    torch.testing.assert_close(gspo[1], grpo[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", [Algorithm.GRPO, Algorithm.GSPO])
def test_tokens_of_one_sample_are_moved_by_their_own_advantages(algorithm: Algorithm) -> None:
    policy_N = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    tokens = Tokens(policy_N, policy_N.detach(), torch.tensor([3.0, -1.0]).double(), torch.tensor([0, 0]))
    worth = METHODS[algorithm].objective(tokens, TrainerConfig(algorithm=algorithm).knobs).values_N
    (gradient,) = torch.autograd.grad(worth.sum(), policy_N)
    assert gradient.tolist() == pytest.approx([3.0, -1.0])


def test_gspo_takes_one_ratio_for_all_turns_of_an_agent(model: Decoder) -> None:
    turns = [call([5, 6], [10], call_id="one"), call([5, 6, 10, 7], [20], call_id="two")]
    told = [own_logprobs(model, one)[0] - math.log(ratio) for one, ratio in zip(turns, (4.0, 0.25), strict=True)]
    calls = [replace(one, logprobs=(logprob,)) for one, logprob in zip(turns, told, strict=True)]
    other, _ = pair(model, ratios=((1.0,),), rewards=(0.0,))
    batch = [episode("two turns", calls, 1.0), *other]
    loss, _ = loss_and_gradient(model, TrainerConfig(algorithm="gspo"), batch)
    assert loss == pytest.approx(0, abs=1e-9), "sqrt(4 * 0.25) = 1 against 1"


@pytest.mark.parametrize(
    ("algorithm", "is_silent"), [("grpo", True), ("dapo", True), ("gspo", True), ("cispo", False), ("rloo", False)]
)
def test_cispo_has_a_gradient_where_a_clip_takes_it(model: Decoder, algorithm: str, is_silent: bool) -> None:
    batch, _ = pair(model, ratios=((9.0, 9.0), (0.1,)))
    _, gradient = loss_and_gradient(model, TrainerConfig(algorithm=algorithm, aggregation="token_mean"), batch)
    assert (gradient.norm().item() == 0) == is_silent


def test_rloo_of_two_is_their_difference(model: Decoder) -> None:
    batch, _ = pair(model, ratios=((1.0,), (1.0,)), rewards=(3.0, 0.5))
    samples = make_samples(batch, TrainerConfig(algorithm="rloo"), version=0)
    assert [sample.advantage for sample in samples] == [2.5, -2.5]
    three, _ = pair(model, ratios=((1.0,), (1.0,), (1.0,)), rewards=(3.0, 0.0, 0.0))
    samples = make_samples(three, TrainerConfig(algorithm="rloo"), version=0)
    assert [sample.advantage for sample in samples] == [3.0, -1.5, -1.5]


def test_imitation_weighs_all_that_is_rewarded_alike(model: Decoder) -> None:
    """And is the same loss by either name."""
    batch, policy = pair(model, ratios=((1.0,), (1.0,), (1.0,)), rewards=(0.1, 5.0, -1.0))
    loss, gradient = loss_and_gradient(model, TrainerConfig(algorithm="sft"), batch)
    assert loss == pytest.approx(-(policy[0][0] + policy[1][0]) / 2)
    alone, _ = loss_and_gradient(model, TrainerConfig(), batch)
    mixed, mixed_gradient = loss_and_gradient(model, TrainerConfig(sft_weight=2.0), batch)
    assert mixed - alone == pytest.approx(2 * loss)
    _, alone_gradient = loss_and_gradient(model, TrainerConfig(), batch)
    torch.testing.assert_close(mixed_gradient - alone_gradient, 2 * gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (101, -1), (1000, -1)]
)
def test_length_is_punished_along_a_line(num_tokens: int, expected: float) -> None:
    assert overlong_punishment(num_tokens, limit=100, margin=20) == expected


def test_dapo_punishes_length_and_leaves_flat_groups_out() -> None:
    def of(name: str, group: str, length: int, reward: float) -> Episode:
        return episode(
            name, [call([5], [7] * (length // 2)), call([6], [7] * (length - length // 2))], reward, group_id=group
        )

    batch = [of("a", "g", 10, 1), of("b", "g", 9, 0), of("c", "h", 1, 1), of("d", "h", 10, 1)]
    config = TrainerConfig(algorithm="dapo", overlong_limit=10)
    assert config.knobs.overlong_margin == 2, "a fifth"
    # Rewards 1 - 1 and 0 - 0.5: both lengths are of the sample, over its two calls.
    samples = make_samples(batch, config, version=0)
    assert [sample.advantage for sample in samples] == [1.0, -1.0, 0.0, 0.0]
    assert [sample.counts for sample in samples] == [True, True, False, False], "punished or not, group h is solved"
    assert [sample.counts for sample in make_samples(batch, TrainerConfig(), version=0)] == [True] * 4
