"""Distillation: what a teacher adds to a token's advantage, and that it teaches where rewards say nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from episodes import call, episode
from pydantic import ValidationError

from swarm_engine.config import Algorithm, EngineConfig, TrainerConfig
from swarm_engine.models.decoder import attend_causally
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.trainer.rows import trained_row
from swarm_engine.trainer.samples import Drop, count_drops, make_samples
from swarm_engine.trainer.trainer import Trainer, teacher_kl
from swarm_engine.types import BatchRecord, Untrained

TAUGHT = [one for one in Algorithm if one is not Algorithm.SFT]


def test_a_token_is_worth_its_reward_and_what_the_teacher_would_rather_have_seen() -> None:
    """Rewards 1 and 0 give advantages 1 and -1; log(teacher / sampling) is 0.5 and -2, at weight 0.1."""
    taught = call([5], [7, 8], [-1.0, -1.0], teacher_logprobs=(-0.5, -3.0))
    config = TrainerConfig(teacher_weight=0.1)
    first, second = make_samples([episode("a", [taught], 1.0), episode("b", [taught], 0.0)], config, 0)
    for sample, reward in ((first, 1.0), (second, -1.0)):
        row = trained_row(sample.timelines[0], sample, teacher_weight=0.1)
        assert row.advantages == pytest.approx([reward + 0.05, reward - 0.2])
    assert teacher_kl([first, second]) == pytest.approx((-0.5 + 2.0) / 2)
    assert trained_row(first.timelines[0], first).advantages == (1.0, 1.0), "no weight, no teacher"


@pytest.mark.parametrize("algorithm", TAUGHT)
def test_a_teacher_teaches_in_flat_groups_and_where_there_is_nothing_to_compare(algorithm: Algorithm) -> None:
    taught = call([5], [7], [-1.0], teacher_logprobs=(-2.0,))
    batch = [episode("a", [taught], 1.0), episode("b", [taught], 1.0), episode("c", [taught], 1.0, group_id="alone")]
    samples = make_samples(batch, TrainerConfig(algorithm=algorithm, teacher_weight=1.0), 0)
    assert [(sample.drop, sample.counts, sample.carries_loss) for sample in samples] == [(None, True, True)] * 3
    for sample in samples:
        assert trained_row(sample.timelines[0], sample, 1.0).advantages == pytest.approx([-1.0])
    untaught = make_samples(batch, TrainerConfig(algorithm=algorithm, teacher_weight=0.0), 0)
    assert not any(sample.carries_loss for sample in untaught), "its word weighs nothing"


def test_a_flat_group_is_flat_whoever_teaches_it(tiny: LoadedPolicy) -> None:
    taught = call([5], [7], [-9.0], teacher_logprobs=(-10.0,))
    batch = [episode("a", [taught], 0.5), episode("b", [taught], 0.5), episode("c", [taught], 0.0, group_id="alone")]
    metrics = Trainer(tiny.model, TrainerConfig(teacher_weight=1.0)).update(BatchRecord(1, (), 0), batch).metrics
    assert (metrics["zero_variance_groups"], metrics["zero_variance_fraction"], metrics["skipped"]) == (1, 0.5, 0)


def test_what_was_not_judged_is_not_taught_either() -> None:
    taught = call([5], [7], [-1.0], teacher_logprobs=(-2.0,))
    rejected = replace(taught, untrained_because=Untrained.CANCELLED, teacher_logprobs=None)
    samples = make_samples(
        [episode("a", [taught], None), episode("b", [rejected], 1.0)], TrainerConfig(teacher_weight=1.0), 0
    )
    assert [sample.drop for sample in samples] == [Drop.UNJUDGED, Drop.UNTRAINED]
    assert count_drops(samples) == {"unjudged": 1, "untrained": 1}


def test_the_weights_move_to_what_the_teacher_likes(tiny: LoadedPolicy) -> None:
    """One reply the teacher likes and one that it doesn't, rewards alike: one gets likelier, one less so."""
    replies = {(7, 9): (-0.1, -0.1), (8, 4): (-9.0, -9.0)}
    tokens = {reply: torch.tensor([(5, *reply)]) for reply in replies}

    def likelihood(reply: tuple[int, ...]) -> float:
        with torch.no_grad():
            places = torch.arange(3)
            logits = tiny.model.logits(tiny.model.hidden(tokens[reply], places, attend_causally))[0].log_softmax(-1)
        return float(logits[0, reply[0]] + logits[1, reply[1]])

    before = {reply: likelihood(reply) for reply in replies}
    batch = [
        episode(f"e{place}", [call([5], reply, [-4.0, -4.0], teacher_logprobs=liked)], 0.5)
        for place, (reply, liked) in enumerate(replies.items())
    ]
    metrics = Trainer(tiny.model, TrainerConfig(teacher_weight=1.0)).update(BatchRecord(1, (), 0), batch).metrics
    assert metrics["skipped"] == 0
    assert metrics["kl_teacher"] == pytest.approx((-3.9 * 2 + 5.0 * 2) / 4)
    assert likelihood((7, 9)) > before[7, 9]
    assert likelihood((8, 4)) < before[8, 4]


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://",
        "https:///v1",
        "http://host:port/v1",
        "http://host:0/v1",
        "http://ho\tst/v1",
        "http://a b/v1",
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_starts(url: str) -> None:
    with pytest.raises(ValidationError, match=r"no URL|should match pattern"):
        EngineConfig.model_validate({"teacher": {"base_url": url, "model": "large"}, "trainer": {"teacher_weight": 1}})


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@host/v1", "http://hunter2@host/v1", "http://host/v1?key=hunter2", "http://host#hunter2"]
)
def test_an_address_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValidationError, match="A3R_TEACHER_API_KEY") as caught:
        EngineConfig.model_validate({"teacher": {"base_url": url, "model": "large"}, "trainer": {"teacher_weight": 1}})
    assert "hunter2" not in str(caught.value)


def test_a_teacher_and_its_weight_go_together() -> None:
    teacher = {"base_url": "http://localhost:8000/v1", "model": "large"}
    EngineConfig.model_validate({"teacher": teacher, "trainer": {"teacher_weight": 1}})
    with pytest.raises(ValidationError, match=r"teacher_weight is 0; set it"):
        EngineConfig.model_validate({"teacher": teacher})
    with pytest.raises(ValidationError, match=r"teacher_weight is 2, but there is no teacher"):
        EngineConfig.model_validate({"trainer": {"teacher_weight": 2}})
    with pytest.raises(ValidationError, match="algorithm sft does not read it"):
        TrainerConfig(algorithm=Algorithm.SFT, teacher_weight=1)
