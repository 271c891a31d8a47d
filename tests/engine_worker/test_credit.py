"""What becomes of every kind of sample under every algorithm, what single calls are worth, and what tokens weigh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import call, episode, own_logprobs
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from swarm_engine.config import OWN_VALUES, Aggregation, Algorithm, Merge, TrainerConfig
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.trainer.algorithms import METHODS
from swarm_engine.trainer.rows import trained_row
from swarm_engine.trainer.samples import Denominators, Drop, Sample, count_drops, make_samples
from swarm_engine.trainer.trainer import Sums, Trainer
from swarm_engine.types import BatchRecord, Call, Episode, Outcome, Untrained

GROUPED = [one for one in Algorithm if one not in (Algorithm.REINFORCE_PP, Algorithm.SFT)]


def samples_of(episodes: Sequence[Episode], algorithm: Algorithm | str = "grpo", **changes: Any) -> list[Sample]:
    return make_samples(episodes, TrainerConfig(algorithm=Algorithm(algorithm), **changes), version=0)


def simple(name: str, reward: float | None, group: str = "g", **changes: Any) -> Episode:
    return episode(name, [call([5], [7])], reward, group_id=group, **changes)


# Outcomes, as in the table of docs/trainer.md.


@pytest.mark.parametrize("algorithm", Algorithm)
def test_what_was_not_judged_carries_no_loss_under_any_algorithm(algorithm: Algorithm) -> None:
    """B046 among them: rewards 1, 0 and 5, the last of a reply that may not be trained."""
    rejected = call([5], [7], untrained_because=Untrained.CANCELLED)
    batch = [
        simple("a", 1.0),
        simple("b", 0.0),
        episode("rejected", [rejected], 5.0),
        simple("null", None),
        simple("nan", float("nan")),
        simple("infinite", float("inf")),
        simple("broken", 9.0, outcome=Outcome.ENV_ERROR),
        episode("silent", [], {"main": 7.0}),
    ]
    samples = samples_of(batch, algorithm)
    expected = [sample.advantage for sample in samples_of(batch[:2], algorithm)]
    assert [sample.advantage for sample in samples[:2]] == expected
    drops = [Drop.UNTRAINED, *[Drop.UNJUDGED] * 3, Drop.ENV_ERROR, Drop.UNTRAINED]
    assert [sample.drop for sample in samples[2:]] == drops
    assert not any(sample.counts or sample.carries_loss for sample in samples[2:])
    if algorithm is not Algorithm.SFT:
        assert samples[0].advantage == -samples[1].advantage > 0


@pytest.mark.parametrize("algorithm", GROUPED)
def test_a_flat_group_teaches_nothing_and_dapo_does_not_count_it(algorithm: Algorithm) -> None:
    batch = [simple("a", 1.0), simple("b", 0.0), simple("c", 1.0, "flat"), simple("d", 1.0, "flat")]
    samples = samples_of(batch, algorithm)
    assert [sample.drop for sample in samples] == [None, None, Drop.ZERO_VARIANCE, Drop.ZERO_VARIANCE]
    assert [sample.counts for sample in samples] == [True, True, *[algorithm is not Algorithm.DAPO] * 2]
    assert count_drops(samples) == {"zero_variance": 2}


@pytest.mark.parametrize("algorithm", GROUPED)
def test_a_group_of_one_is_never_trained_on_its_raw_reward(algorithm: Algorithm) -> None:
    (sample,) = samples_of([simple("a", 3.0)], algorithm)
    assert (sample.drop, sample.advantage, sample.counts) == (Drop.ALONE, 0.0, False)


def test_reinforce_pp_measures_a_flat_group_and_a_group_of_one_against_the_batch() -> None:
    batch = [simple("a", 1.0, "g"), simple("b", 1.0, "g"), simple("c", -2.0, "h")]
    samples = samples_of(batch, "reinforce_pp")
    # Mean 0, deviation sqrt((1 + 1 + 4) / 3).
    assert [sample.advantage for sample in samples] == pytest.approx([2**-0.5, 2**-0.5, -(2**0.5)])
    assert [sample.drop for sample in samples_of(batch[:2], "reinforce_pp")] == [Drop.ZERO_VARIANCE] * 2
    assert [sample.drop for sample in samples_of(batch[2:], "reinforce_pp")] == [Drop.ALONE]


def test_imitation_takes_what_is_above_zero_alone_or_in_a_flat_group() -> None:
    batch = [simple("a", 1.0), simple("b", 0.0), simple("c", -1.0), simple("d", 3.0, "alone")]
    samples = samples_of(batch, "sft")
    assert [sample.advantage for sample in samples] == [1, 0, 0, 1]
    assert [sample.counts for sample in samples] == [True, False, False, True]
    assert count_drops(samples) == {"unrewarded": 2}
    mixed = samples_of([simple("a", 1.0), simple("b", 1.0), simple("c", 1.0, "alone"), simple("d", None)], sft_weight=1)
    assert [sample.drop for sample in mixed] == [Drop.ZERO_VARIANCE, Drop.ZERO_VARIANCE, Drop.ALONE, Drop.UNJUDGED]
    assert [sample.is_imitated for sample in mixed] == [True, True, True, False]
    assert count_drops(mixed) == {"unjudged": 1}, "what is imitated carries a loss"


@pytest.mark.parametrize("algorithm", Algorithm)
def test_an_episode_counts_once_under_every_algorithm(algorithm: Algorithm) -> None:
    """B045: five rows with reward 1, one row with reward 0."""
    long = episode("a", [call([5] * n, [7]) for n in range(1, 6)], 1.0)
    by_row = [sample.advantage for sample in samples_of([long, simple("b", 0.0)], algorithm)]
    once = [sample.advantage for sample in samples_of([simple("a", 1.0), simple("b", 0.0)], algorithm)]
    assert by_row == once
    if algorithm in (Algorithm.GRPO, Algorithm.DAPO, Algorithm.GSPO, Algorithm.REINFORCE_PP):
        assert once == [1.0, -1.0]


@pytest.mark.parametrize("algorithm", Algorithm)
def test_one_missing_judgement_leaves_loss_and_gradient_finite(tiny: LoadedPolicy, algorithm: Algorithm) -> None:
    """B048: two parts of a reward, here of two agents; the second part of one of four episodes is null."""
    batch = []
    for place, second in enumerate((0.0, 1.0, 2.0, None)):
        calls = [call([5], [7 + place], agent="one"), call([6], [7 + place], agent="two")]
        batch.append(episode(f"e{place}", calls, {"one": float(place % 2), "two": second}))
    trainer = Trainer(tiny.model, TrainerConfig(algorithm=algorithm))
    updated = trainer.update(BatchRecord(1, (), 0), batch)
    assert updated.metrics["loss"] is not None
    assert (updated.metrics["grad_norm"] or 0) > 0
    assert (updated.metrics["skipped"], updated.metrics["nonfinite_loss"]) == (0, 0)
    dropped = [sample for sample in make_samples(batch, trainer.config, 0) if sample.drop is Drop.UNJUDGED]
    assert [(sample.episode_id, sample.agent) for sample in dropped] == [("e3", "two")]


@pytest.mark.parametrize("algorithm", Algorithm)
def test_the_mean_reward_is_of_all_that_was_judged_whatever_the_algorithm_leaves_out(
    tiny: LoadedPolicy, algorithm: Algorithm
) -> None:
    batch = [simple("a", 1.0), simple("b", 0.0), simple("c", 0.5, "flat"), simple("d", 0.5, "flat"), simple("e", None)]
    metrics = Trainer(tiny.model, TrainerConfig(algorithm=algorithm)).update(BatchRecord(1, (), 0), batch).metrics
    assert metrics["reward_mean"] == 0.5
    assert metrics["zero_variance_fraction"] == (0 if algorithm in (Algorithm.REINFORCE_PP, Algorithm.SFT) else 0.5)


def test_rewards_too_large_to_be_summed_stop_nothing(tiny: LoadedPolicy) -> None:
    batch = [simple("a", 1e100), simple("b", 1e100), simple("c", -1e100), simple("d", 1.7e308), simple("e", -1.7e308)]
    samples = samples_of(batch)
    assert [sample.advantage for sample in samples] == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5), 0, 0])
    assert [sample.drop for sample in samples[3:]] == [Drop.UNJUDGED] * 2
    config = TrainerConfig(algorithm="dr_grpo")
    metrics = Trainer(tiny.model, config).update(BatchRecord(1, (), 0), batch).metrics
    assert (metrics["skipped"], metrics["nonfinite_loss"], metrics["loss"]) == (1, 1, None)


# Single calls.


def stepped(name: str, steps: Sequence[float | None], reward: float, *, middle_is_trained: bool = True) -> Episode:
    """Calls that go on from each other over a tool's result, with these rewards of their own."""
    calls: list[Call] = []
    context = [5]
    for place, _ in enumerate(steps):
        reason = None if middle_is_trained or place != 1 else Untrained.GREEDY
        calls.append(call(context, [7, 8], call_id=f"{name}-{place}", untrained_because=reason))
        context = [*context, 7, 8, 9]
    own = {f"{name}-{place}": step for place, step in enumerate(steps) if step is not None}
    return episode(name, calls, reward, step_rewards=own)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # Steps 2, 0, 0, 0: mean 0.5, deviation sqrt(0.75); a call gets its own and those after it.
        ("grpo", [[2 / 3**0.5, -1 / 3**0.5], [-2 / 3**0.5, -1 / 3**0.5]]),
        ("dr_grpo", [[1.0, -0.5], [-1.0, -0.5]]),
        ("rloo", [[4 / 3, -2 / 3], [-4 / 3, -2 / 3]]),
        ("reinforce_pp", [[2 / 3**0.5, -1 / 3**0.5], [-2 / 3**0.5, -1 / 3**0.5]]),
    ],
)
@pytest.mark.parametrize("merge", Merge)
def test_rewards_of_steps_reach_their_call_and_those_before_it(
    algorithm: str, expected: list[list[float]], merge: Merge
) -> None:
    for rewards, outcome in (((1.0, 1.0), 0.0), ((1.0, 0.0), 1.0)):
        batch = [stepped("a", [2.0, 0.0], rewards[0]), stepped("b", [0.0, 0.0], rewards[1])]
        samples = samples_of(batch, algorithm, merge=merge)
        scale = {"dr_grpo": 0.5}.get(algorithm, 1.0) * outcome
        for sample, steps, sign in zip(samples, expected, (1, -1), strict=True):
            assert sample.drop is None
            found = [advantage for line in sample.timelines for advantage in trained_row(line, sample).advantages]
            assert found == pytest.approx([sign * scale + step for step in steps for _ in range(2)])


def test_a_later_reward_reaches_an_action_over_a_tool_result_and_over_a_call_that_is_not_trained() -> None:
    """B028: rewards 0, 0, 2 with the middle masked. There is no discount here, so 2.0 and 2.0 beside 0 and 0."""
    batch = [
        stepped("a", [0.0, 0.0, 2.0], 1.0, middle_is_trained=False),
        stepped("b", [0.0, 0.0, 0.0], 1.0, middle_is_trained=False),
    ]
    one, other = samples_of(batch, "dr_grpo")
    assert one.num_trained == 4
    for place in (0, 2):
        rest = (3 - place) * 2 / 6  # the mean step, taken off once for every step that is summed
        assert one.step_advantages[f"a-{place}"] == pytest.approx(2.0 - rest)
        assert other.step_advantages[f"b-{place}"] == pytest.approx(-rest)


def test_a_call_without_a_reward_of_its_own_gets_what_comes_later() -> None:
    one, other = samples_of([stepped("a", [None, 1.0, None], 1.0), stepped("b", [None, 0.0, None], 1.0)])
    assert one.step_advantages == {"a-0": 1.0, "a-1": 1.0, "a-2": 0.0}
    assert other.step_advantages == {"b-0": -1.0, "b-1": -1.0, "b-2": 0.0}


def test_choices_of_one_ask_are_not_later_than_each_other() -> None:
    """Four choices of one prompt, the first worth 1, in two alike episodes: mean 0.25."""
    batch = [
        episode(
            name,
            [call([5], [7 + choice], call_id=f"{name}-{choice}") for choice in range(4)],
            1.0,
            step_rewards={f"{name}-{choice}": float(choice == 0) for choice in range(4)},
        )
        for name in "ab"
    ]
    for sample in samples_of(batch, "dr_grpo"):
        assert list(sample.step_advantages.values()) == [-0.25, -0.25, -0.25, 0.75]
    later = call([5, 7, 6], [9], call_id="a-later")
    batch[0] = dataclasses.replace(
        batch[0], calls=(*batch[0].calls, later), step_rewards={**batch[0].step_rewards, "a-later": 3.0}
    )
    worth = samples_of(batch, "dr_grpo")[0].step_advantages
    mean = 5 / 9
    assert worth == pytest.approx(
        {"a-later": 3 - mean, "a-0": 1 + 3 - 2 * mean, **{f"a-{choice}": 3 - 2 * mean for choice in (1, 2, 3)}}
    )


@pytest.mark.parametrize("why", [Untrained.CANCELLED, Untrained.UNUSED_RETRY])
def test_a_reward_for_a_reply_that_nobody_acted_on_moves_nothing(why: Untrained) -> None:
    def batch(thrown_away: float | None) -> list[Episode]:
        calls = [
            call([5], [7], call_id="a-0"),
            call([5, 7, 6], [8], call_id="a-1", untrained_because=why),
            call([5, 7, 6], [9], call_id="a-2"),
        ]
        steps = {"a-0": 1.0, "a-2": 2.0} | ({} if thrown_away is None else {"a-1": thrown_away})
        other = [call([5], [7], call_id="b-0"), call([5, 7, 6], [9], call_id="b-1")]
        return [
            episode("a", calls, 1.0, step_rewards=steps),
            episode("b", other, 0.0, step_rewards={"b-0": 0.0, "b-1": 1.0}),
        ]

    without, beside = (samples_of(batch(reward)) for reward in (None, -9.0))
    assert [one.step_advantages for one in beside] == [one.step_advantages for one in without]


def test_steps_that_are_all_alike_leave_a_flat_group_flat_and_imitation_reads_none() -> None:
    flat = [stepped(name, [1.0, 1.0], 1.0) for name in "ab"]
    assert [sample.drop for sample in samples_of(flat)] == [Drop.ZERO_VARIANCE] * 2
    differ = [stepped("a", [1.0, 0.0], 1.0), stepped("b", [0.0, 0.0], 1.0)]
    assert [sample.step_advantages for sample in samples_of(differ, "sft")] == [{}, {}]
    assert [sample.drop for sample in samples_of([stepped("a", [1.0, 0.0], 1.0)])] == [Drop.ALONE]


def test_a_step_reward_that_is_not_finite_is_no_judgement() -> None:
    samples = samples_of([stepped("a", [math.nan, 1.0], 1.0), stepped("b", [0.0, 1.0], 0.0), simple("c", 1.0)])
    assert [sample.drop for sample in samples] == [Drop.UNJUDGED, None, None]


def test_step_rewards_are_trained_and_journals_without_them_can_still_be_read(tiny: LoadedPolicy) -> None:
    adapter = TypeAdapter(Episode)
    batch = [stepped("a", [1.0, 0.0], 1.0), stepped("b", [0.0, 0.0], 1.0)]
    assert [adapter.validate_json(adapter.dump_json(one)) for one in batch] == batch
    old = adapter.dump_python(batch[0], mode="json")
    del old["step_rewards"]
    assert adapter.validate_python(old).step_rewards == {}
    metrics = Trainer(tiny.model, TrainerConfig()).update(BatchRecord(1, (), 0), batch).metrics
    assert (metrics["skipped"], metrics["zero_variance_fraction"]) == (0, 0)
    assert (metrics["grad_norm"] or 0) > 0


# Weights.


def fragments(name: str, num_contexts: int, reward: float) -> Episode:
    """Twelve sampled tokens, in contexts that share nothing."""
    length = 12 // num_contexts
    return episode(name, [call([40 + place], [7] * length) for place in range(num_contexts)], reward)


@pytest.mark.parametrize("merge", Merge)
@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("algorithm", Algorithm)
def test_the_weight_of_an_episode_does_not_depend_on_how_many_timelines_it_falls_into(
    tiny: LoadedPolicy, algorithm: Algorithm, aggregation: Aggregation, merge: Merge
) -> None:
    trainer = Trainer(tiny.model, TrainerConfig(algorithm=algorithm, aggregation=aggregation, merge=merge))
    for num_contexts in (1, 2, 6):
        batch = [fragments("a", num_contexts, 1.0), fragments("b", 1, 0.5), fragments("c", 3, 0.1)]
        samples = make_samples(batch, trainer.config, 0)
        rows = trainer.weigh(trainer.rows(samples), samples, range(3))
        assert len(rows) == num_contexts + 4
        weights = [sum(row.weight * len(row.row.targets) for row in rows if row.sample == place) for place in range(3)]
        assert weights == pytest.approx([12 / (3 * 512) if aggregation is Aggregation.CONSTANT else 1 / 3] * 3)


def test_a_token_weighs_the_same_in_every_micro_batch_and_a_constant_knows_no_padding() -> None:
    """B051: one token with loss 1 and nine with loss 0. B052: sums 3 and 5 over a constant of 10."""
    one, nine = samples_of([simple("a", 1.0), episode("b", [call([5], [7] * 9)], 0.0)])
    by_token = Denominators.of([one, nine], TrainerConfig().knobs)
    assert by_token.token_weight(one) * 1.0 + by_token.token_weight(nine) * 0.0 == pytest.approx(0.1)
    constant = Denominators.of([one, nine], TrainerConfig(aggregation="constant", loss_length=10).knobs)
    assert constant.token_weight(one) * 3 + constant.token_weight(nine) * 5 == pytest.approx(0.4)


def test_four_micro_batches_of_one_give_the_gradient_of_one_of_four(tiny: LoadedPolicy) -> None:
    """B049: and not a quarter of it."""
    batch = [episode(f"e{place}", [call([5, 6], [7 + place] * (place + 1))], float(place)) for place in range(4)]
    gradients = []
    for microbatch_tokens in (1, 4096):
        trainer = Trainer(tiny.model, TrainerConfig(merge=Merge.NONE, microbatch_tokens=microbatch_tokens))
        samples = make_samples(batch, trainer.config, 0)
        trainer.accumulate_gradient(trainer.weigh(trainer.rows(samples), samples, range(4)), 0, Sums())
        gradients.append(torch.cat([one.grad.flatten() for one in tiny.model.parameters() if one.grad is not None]))
        trainer.optimizer.zero_grad()
    assert gradients[0].norm() > 0
    assert ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item() < 1e-6


def test_padding_is_in_no_mean(tiny: LoadedPolicy) -> None:
    """B057: two tokens beside a row that is longer by three; their mean is over two."""
    short, long = call([5, 6], [11, 12]), call([5, 6], [7] * 5)
    config = TrainerConfig(algorithm="sft", merge=Merge.NONE)
    samples = make_samples([episode("a", [short], 1.0), episode("b", [long], 1.0, group_id="h")], config, 0)
    trainer = Trainer(tiny.model, config)
    own = own_logprobs(tiny.model, short) + own_logprobs(tiny.model, long)
    sums = trainer.learn(samples, 0, 0)
    assert sums.num_scored == 7
    assert sums.loss == pytest.approx(-sum(own) / 7, rel=1e-5)


# Knobs.


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_low", 0.1),
        ("clip_high", 0.1),
        ("normalize_by_std", False),
        ("epochs", 2),
        ("minibatches", 2),
        ("sft_weight", 0.1),
        ("overlong_limit", 10),
        ("off_policy", "truncated"),
        ("aggregation", "token_mean"),
    ],
)
def test_a_knob_that_the_algorithm_does_not_read_is_refused(algorithm: Algorithm, name: str, value: Any) -> None:
    if name in OWN_VALUES[algorithm]:
        assert getattr(TrainerConfig(algorithm=algorithm, **{name: value}).knobs, name) == value
    else:
        with pytest.raises(ValidationError, match=f"trainer.{name} is .*algorithm {algorithm} does not read it"):
            TrainerConfig(algorithm=algorithm, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_length": 9}, "only aggregation constant divides by it, not token_mean"),
        ({"off_policy_high": 3.0}, "off_policy none does not read it"),
        ({"off_policy": "truncated", "off_policy_low": 0.3}, "off_policy truncated does not read it"),
        ({"algorithm": "dapo", "overlong_margin": 3}, "overlong_limit is not set"),
        ({"algorithm": "dapo", "overlong_margin": 30, "overlong_limit": 20}, "lower the margin or raise the limit"),
        ({"overlong_margin": 3}, "it belongs to dapo"),
    ],
)
def test_a_knob_that_another_knob_makes_idle_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**changes)


@pytest.mark.parametrize(
    ("name", "largest", "beyond", "needs"),
    [
        ("clip_high", 1e6, 1e300, {}),
        ("off_policy_high", 1e6, 1e300, {"off_policy": "truncated"}),
        ("loss_length", 10**9, 10**400, {"algorithm": "rloo"}),
        ("overlong_limit", 10**9, 10**400, {"algorithm": "dapo"}),
        ("total_updates", 10**9, 10**400, {"lr_schedule": "linear"}),
        ("max_staleness", 10**9, 10**400, {}),
        ("microbatch_tokens", 10**9, 10**400, {}),
        ("kl_weight", 1e3, 1e300, {}),
        ("entropy_weight", 1e3, 1e39, {}),
        ("sft_weight", 1e3, 1e40, {}),
        ("teacher_weight", 1e3, 1e300, {}),
        ("max_grad_norm", 1e6, 1e300, {}),
        ("weight_decay", 1e6, 1e300, {"learning_rate": 1e-7}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_number_that_float32_could_not_take_is_refused_before_it_is_in_a_run(
    name: str, largest: float, beyond: float, needs: dict[str, Any]
) -> None:
    assert getattr(TrainerConfig.model_validate({name: largest, **needs}), name) == largest
    for value in (largest + 1, beyond):
        with pytest.raises(ValidationError, match=rf"{name}\n.*less than or equal to {largest:.0f} "):
            TrainerConfig.model_validate({name: value, **needs})


def test_a_gradient_is_not_cut_to_nothing() -> None:
    with pytest.raises(ValidationError, match=r"max_grad_norm\n.*greater than or equal to 0.000001"):
        TrainerConfig(max_grad_norm=1e-7)


def test_decay_takes_less_than_the_whole_of_a_weight() -> None:
    """0.5 a step times 1.5 is 0.75, times 2 is all, times 4 is minus the weight and beyond."""
    assert TrainerConfig(learning_rate=0.5, weight_decay=1.5).weight_decay == 1.5
    for decay, taken in ((2, 1), (4, 2)):
        with pytest.raises(ValidationError, match=rf"take {taken} times a weight off it, and the limit is below 1"):
            TrainerConfig(learning_rate=0.5, weight_decay=decay)


@given(st.sampled_from(Algorithm))
def test_a_config_that_was_written_down_is_the_same_config(algorithm: Algorithm) -> None:
    config = TrainerConfig(algorithm=algorithm)
    again = TrainerConfig.model_validate(config.model_dump(mode="json"))
    assert (again, again.knobs) == (config, config.knobs)


def test_every_algorithm_is_there_and_the_docs_say_what_it_runs_with() -> None:
    assert set(METHODS) == set(OWN_VALUES) == set(Algorithm)
    lines = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text(encoding="utf-8").splitlines()
    for algorithm in Algorithm:
        (row,) = (line for line in lines if line.startswith(f"| `{algorithm}`") and line.count("|") == 7)
        clip, aggregation = (cell.strip() for cell in row.split("|")[4:6])
        knobs = TrainerConfig(algorithm=algorithm).knobs
        bounds = [bound for bound in (knobs.clip_low, knobs.clip_high) if bound is not None]
        assert [float(bound) for bound in clip.split(", ") if bound != "none"] == bounds, algorithm
        assert aggregation == f"`{knobs.aggregation}`"


def test_the_defaults_are_the_ones_that_were_measured() -> None:
    knobs = TrainerConfig().knobs
    assert (knobs.clip_low, knobs.clip_high, knobs.normalize_by_std) == (0.2, 0.28, True)
    assert knobs.aggregation is Aggregation.TOKEN_MEAN
    assert (knobs.epochs, knobs.minibatches, knobs.sft_weight, knobs.off_policy) == (1, 1, 0.0, "none")
