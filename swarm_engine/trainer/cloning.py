"""Behaviour cloning: make a policy answer as recorded conversations do.

Start weights come from it, and so does the control that trains on the warm-up data again. The replies carry the loss;
the text around them carries a small share of it. Reading a board well is most of what a tiny model has to learn, and
one board teaches more about reading than the single token played on it: with a tenth a policy of 0.44 million
parameters needed half the conversations to play tic-tac-toe legally.

The optimizer is torch's AdamW and not the trainer's (`adamw`): the shipped start weights were made with it, down to the
decay of gains and biases, and another order of sums would make others. Nothing here resumes, so nobody needs its state,
and the seconds that its import takes are a worker's to mind, not a warm-up's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from swarm_engine.models.decoder import Decoder, attend_causally
from swarm_engine.seeding import derive_seed
from swarm_engine.tracker.codec import ChatCodec

Conversation = Sequence[Mapping[str, str]]
"""Messages with `role` and `content`; every assistant message is a reply to clone."""

BATCHES_SORTED_TOGETHER = 32
"""Samples of this many batches are sorted by length, so that little is padded."""


class CloningError(ValueError):
    """Nothing to clone from."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast to clone. The defaults built the shipped start weights."""

    num_updates: int
    batch_size: int = 16
    """Conversations an update."""
    learning_rate: float = 3e-3
    """Peak; reached after `num_warmup_updates`, then falling in a line to zero."""
    num_warmup_updates: int = 50
    context_weight: float = 0.1
    """Weight of a token between the replies, beside 1 for a token of a reply."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True)
class ClonedText:
    """One conversation as token ids."""

    tokens: tuple[int, ...]
    is_reply: tuple[bool, ...]
    """True for every token that the policy would have sampled, the one that ends a reply included."""


def encode(codec: ChatCodec, conversation: Conversation) -> list[ClonedText]:
    """A conversation as the engine would have served it: every reply follows the prompt that asked for it.

    A template that rewrites history breaks the conversation into several samples, one for each stretch that only grows.
    """
    messages = [codec.protect(dict(message)) for message in conversation]
    samples: list[ClonedText] = []
    text, tokens, is_reply = "", list[int](), list[bool]()
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = codec.render(messages[:index], add_generation_prompt=True)
        if not prompt.startswith(text):
            samples.append(ClonedText(tuple(tokens), tuple(is_reply)))
            text, tokens, is_reply = "", [], []
        asked = codec.encode(prompt[len(text) :])
        closed = codec.render(messages[: index + 1], add_generation_prompt=False)
        said = _reply(codec, closed[len(prompt) :] if closed.startswith(prompt) else message["content"])
        tokens += [*asked, *said]
        is_reply += [False] * len(asked) + [True] * len(said)
        text = prompt + codec.show(said)
    if tokens:
        samples.append(ClonedText(tuple(tokens), tuple(is_reply)))
    return samples


def _reply(codec: ChatCodec, text: str) -> tuple[int, ...]:
    """The tokens of a reply up to the one that ends it, which is added where the template puts none."""
    tokens = codec.encode(text)
    for index, token in enumerate(tokens):
        if token in codec.end_ids:
            return tokens[: index + 1]
    return (*tokens, min(codec.end_ids))


def loss_of(model: Decoder, samples: Sequence[ClonedText], context_weight: float) -> Tensor:
    """Mean negative log-likelihood in nats, a token of a reply weighing 1 and any other `context_weight`."""
    length = max(len(sample.tokens) for sample in samples)
    tokens_B_T = torch.zeros(len(samples), length, dtype=torch.long)
    weights_B_T = torch.zeros(len(samples), length)
    by_kind = torch.tensor([context_weight, 1.0])
    for row, sample in enumerate(samples):
        tokens_B_T[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        weights_B_T[row, : len(sample.tokens)] = by_kind[torch.tensor(sample.is_reply, dtype=torch.long)]
    hidden = model.hidden(tokens_B_T[:, :-1], torch.arange(length - 1), attend_causally)
    weights = weights_B_T[:, 1:]
    is_wanted = weights > 0
    losses = functional.cross_entropy(model.logits(hidden[is_wanted]), tokens_B_T[:, 1:][is_wanted], reduction="none")
    return (losses * weights[is_wanted]).sum() / weights.sum()


def clone(
    model: Decoder,
    samples: Sequence[ClonedText],
    recipe: Recipe,
    seed: int,
    on_update: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `model` in place; the same arguments on the same machine and thread count give the same weights.

    Args:
        on_update: called after each update with its number, from 1, and its loss.
    Returns:
        The loss of every update.
    Raises:
        CloningError: no sample holds a reply.
    """
    if not any(any(sample.is_reply) for sample in samples):
        raise CloningError("no conversation holds a reply; were all episodes empty?")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    losses: list[float] = []
    for update, batch in zip(range(recipe.num_updates), batches(samples, recipe.batch_size, seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate_share(update, recipe)
        loss = loss_of(model, batch, recipe.context_weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        if on_update:
            on_update(update + 1, losses[-1])
    return losses


def rate_share(update: int, recipe: Recipe) -> float:
    """Share of the peak learning rate at an update, counted from 0."""
    rising = min(1.0, (update + 1) / max(recipe.num_warmup_updates, 1))
    return rising * (1 - update / recipe.num_updates)


def batches(samples: Sequence[ClonedText], batch_size: int, seed: int) -> Iterator[list[ClonedText]]:
    """Batches without end: every pass in a new order, neighbours of like length together."""
    chance = random.Random(derive_seed("cloning", seed))
    while True:
        order = chance.sample(range(len(samples)), len(samples))
        for start in range(0, len(order), batch_size * BATCHES_SORTED_TOGETHER):
            stretch = sorted(
                order[start : start + batch_size * BATCHES_SORTED_TOGETHER],
                key=lambda index: len(samples[index].tokens),
            )
            parts = [stretch[at : at + batch_size] for at in range(0, len(stretch), batch_size)]
            chance.shuffle(parts)
            for part in parts:
                yield [samples[index] for index in part]


@torch.no_grad()
def randomize(model: Decoder, seed: int, spread: float = 0.05) -> None:
    """Give a model random weights of this standard deviation, its norms ones and its biases zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif "bias" in name:
            parameter.zero_()
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
