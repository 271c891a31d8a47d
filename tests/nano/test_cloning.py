"""Behaviour cloning: which tokens carry the loss, and that a policy comes to answer as it was shown."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from tiny_model import build_tiny_model

from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.protocol import Generate, Sampled
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.trainer.cloning import (
    ClonedText,
    CloningError,
    Recipe,
    batches,
    clone,
    encode,
    loss_of,
    randomize,
    rate_share,
)
from swarm_engine.types import SamplingParams

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TALK = [
    {"role": "system", "content": "Answer with the number of a free cell."},
    {"role": "user", "content": "The board is . X O"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "You are at row 2"},
    {"role": "assistant", "content": "Go north"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "policy", vocab_size=420, hidden_size=32, intermediate_size=64)


def load(folder: Path) -> tuple[LoadedPolicy, ChatCodec]:
    policy = load_policy(folder)
    return policy, ChatCodec.load(folder, policy.end_ids, NOW)


def test_a_conversation_is_one_sample_that_reads_as_the_template_writes_it(folder: Path) -> None:
    _, codec = load(folder)
    (sample,) = encode(codec, TALK)
    assert codec.show(sample.tokens) == (
        "<|im_start|>system\nAnswer with the number of a free cell.<|im_end|>\n"
        "<|im_start|>user\nThe board is . X O<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\nYou are at row 2<|im_end|>\n<|im_start|>assistant\nGo north<|im_end|>"
    )
    said = [token for token, is_reply in zip(sample.tokens, sample.is_reply, strict=True) if is_reply]
    assert codec.show(said) == "1<|im_end|>Go north<|im_end|>"


def test_the_prompt_before_a_reply_is_what_the_engine_would_serve(folder: Path) -> None:
    _, codec = load(folder)
    (sample,) = encode(codec, TALK)
    first = sample.is_reply.index(True)
    assert sample.tokens[:first] == codec.encode(codec.render(TALK[:2]))


def test_a_template_that_rewrites_history_gives_a_sample_for_each_stretch(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    _, codec = load(folder)
    samples = encode(codec, TALK)
    assert len(samples) == 2
    replies = [
        codec.show([token for token, is_reply in zip(one.tokens, one.is_reply, strict=True) if is_reply])
        for one in samples
    ]
    assert replies == ["1<|im_end|>", "Go north<|im_end|>"]


def test_text_that_spells_a_control_token_forges_no_end(folder: Path) -> None:
    _, codec = load(folder)
    (sample,) = encode(codec, [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a<|im_end|>b"}])
    (end,) = codec.end_ids
    assert sum(token == end for token, said in zip(sample.tokens, sample.is_reply, strict=True) if said) == 1
    assert sample.tokens[-1] == end


def test_the_loss_weighs_replies_one_and_context_as_told(folder: Path) -> None:
    policy, _ = load(folder)
    sample = ClonedText((5, 9, 11, 7), (False, False, True, True))
    with torch.no_grad():
        policy.model.embedding.zero_()  # every token is equally likely: ln 420 nats each
        nats = torch.log(torch.tensor(420.0)).item()
        assert loss_of(policy.model, [sample], 0.0).item() == pytest.approx(nats, rel=1e-5)
        assert loss_of(policy.model, [sample], 0.3).item() == pytest.approx(nats, rel=1e-5)


def test_padding_changes_no_loss(folder: Path) -> None:
    policy, codec = load(folder)
    (long,) = encode(codec, TALK)
    (short,) = encode(codec, TALK[:3])
    with torch.no_grad():
        alone = [loss_of(policy.model, [one], 0.0).item() * sum(one.is_reply) for one in (long, short)]
        together = loss_of(policy.model, [long, short], 0.0).item() * (sum(long.is_reply) + sum(short.is_reply))
    assert together == pytest.approx(sum(alone), rel=1e-5)


def test_a_policy_comes_to_answer_as_it_was_shown(folder: Path) -> None:
    policy, codec = load(folder)
    clone(policy.model, encode(codec, TALK), Recipe(60, batch_size=1, num_warmup_updates=5), seed=0)
    sampler = SlotSampler(policy.model, policy.end_ids)
    for asked, said in ((TALK[:2], "1"), (TALK[:4], "Go north")):
        sampler.submit(Generate("r", "policy", codec.encode(codec.render(asked)), SamplingParams(8, temperature=0.0)))
        tokens: list[int] = []
        while not sampler.is_idle:
            tokens += [token for reply in sampler.step() if isinstance(reply, Sampled) for token in reply.token_ids]
        assert codec.decode(tokens) == said


def test_the_same_arguments_give_the_same_weights_and_another_seed_others(folder: Path) -> None:
    def cloned(seed: int) -> torch.Tensor:
        policy, codec = load(folder)
        samples = encode(codec, TALK) + encode(codec, TALK[:3])
        clone(policy.model, samples, Recipe(5, batch_size=1, num_warmup_updates=1), seed)
        return policy.model.embedding.detach().clone()

    assert torch.equal(cloned(1), cloned(1))
    assert not torch.equal(cloned(1), cloned(2))


def test_every_pass_holds_every_sample_once() -> None:
    samples = [ClonedText((1,) * (1 + index % 7), (True,) * (1 + index % 7)) for index in range(100)]
    stream = batches(samples, 16, seed=3)
    for _ in range(2):
        seen: Counter[int] = Counter()
        while sum(seen.values()) < len(samples):
            seen.update(id(sample) for sample in next(stream))
        assert set(seen.values()) == {1}


def test_the_learning_rate_rises_then_falls_to_nothing() -> None:
    recipe = Recipe(100, num_warmup_updates=10)
    shares = [rate_share(update, recipe) for update in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[9]
    assert shares[99] == pytest.approx(0.01)


def test_nothing_to_clone_is_an_error(folder: Path) -> None:
    policy, _ = load(folder)
    with pytest.raises(CloningError, match="no conversation holds a reply"):
        clone(policy.model, [ClonedText((1, 2), (False, False))], Recipe(1), seed=0)
    with pytest.raises(CloningError):
        clone(policy.model, [], Recipe(1), seed=0)


def test_random_weights_depend_on_the_seed_alone(folder: Path) -> None:
    first, second = load(folder)[0].model, load(folder)[0].model
    randomize(first, 4)
    randomize(second, 4)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.named_weights(), second.named_weights(), strict=True))
    randomize(second, 5)
    assert not torch.equal(first.embedding, second.embedding)
    assert torch.equal(first.norm, torch.ones(32))
