"""From logits to a token, with random numbers that belong to the request alone.

The i-th uniform of a request is a hash of (its seed, i), so neither the batch it shares nor the order of arrival can
change it. Tokens come from the inverse of the cumulative distribution, in two levels: torch.multinomial was measured at
4.5 ms for 32 rows of 4096 logits, this at 0.4 ms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from swarm_engine.types import LogitsProcessors

BLOCK = 512
"""Tokens whose probability is summed before any of them is looked at."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds_B: NDArray[np.uint64], indices_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, token index); SplitMix64 over both (Steele et al. 2014)."""
    keys = _mix(_mix(seeds_B) + indices_B.astype(np.uint64) * _GOLDEN)
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def choose(
    logits_B_V: Tensor, temperatures_B: Tensor, uniforms_B: Tensor, forced_B: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of each row and its log-probability in nats under the distribution it was drawn from.

    That is softmax(logits / temperature), in float32. At temperature 0 the token is the likeliest (the lowest id among
    equals) and its log-probability that of temperature 1: a greedy call is never trained, and 0 for every token would
    tell a reader nothing.

    Args:
        logits_B_V: any float dtype.
        temperatures_B: float32, 0 for greedy.
        uniforms_B: float64 in [0, 1).
        forced_B: token ids to take instead, -1 where the row draws its own.
    Returns:
        Token ids (int64) and log-probabilities (float32), each of shape (B,), and the log-probabilities of all tokens.
    """
    is_greedy_B = temperatures_B == 0
    scale_B = temperatures_B.masked_fill(is_greedy_B, 1.0)
    logprobs_B_V = (logits_B_V.float() / scale_B.unsqueeze(1)).log_softmax(-1)
    tokens_B = draw(logprobs_B_V.exp(), uniforms_B)
    if is_greedy_B.any():
        tokens_B = torch.where(is_greedy_B, logprobs_B_V.argmax(-1), tokens_B)
    if forced_B is not None:
        tokens_B = torch.where(forced_B >= 0, forced_B, tokens_B)
    return tokens_B, logprobs_B_V.gather(1, tokens_B.unsqueeze(1)).squeeze(1), logprobs_B_V


def process(
    logits_V: Tensor,
    processors: LogitsProcessors,
    temperature: float,
    prompt_ids: Sequence[int],
    reply_ids: Sequence[int],
) -> Tensor:
    """The logits of one row after its processors, float32, minus infinity where a token is ruled out.

    They are in the order of vLLM, so that the backends agree: bias, penalties, and under the temperature min-p, top-k,
    top-p. The likeliest token is never ruled out; a greedy row needs no truncation.
    """
    logits_V = logits_V.float().clone()
    for token, bias in processors.logit_bias:
        logits_V[token] += bias
    if processors.repetition_penalty != 1:
        seen_S = torch.tensor(sorted({*prompt_ids, *reply_ids}), device=logits_V.device)
        seen_logits_S, penalty = logits_V[seen_S], processors.repetition_penalty
        logits_V[seen_S] = torch.where(seen_logits_S > 0, seen_logits_S / penalty, seen_logits_S * penalty)
    if reply_ids:
        tokens, counts = zip(*Counter(reply_ids).items(), strict=True)
        tokens_S, counts_S = (torch.tensor(one, device=logits_V.device) for one in (tokens, counts))
        logits_V[tokens_S] -= processors.presence_penalty + processors.frequency_penalty * counts_S
    if temperature == 0:
        return logits_V
    logprobs_V = (logits_V / temperature).log_softmax(-1)
    if processors.min_p > 0:
        logprobs_V[logprobs_V < logprobs_V.max() + math.log(processors.min_p)] = -math.inf
    if 0 < processors.top_k < len(logprobs_V):
        logprobs_V[logprobs_V < logprobs_V.topk(processors.top_k).values[-1]] = -math.inf
    if processors.top_p < 1:
        descending_V, order_V = logprobs_V.log_softmax(-1).sort(descending=True, stable=True)
        probs_V = descending_V.exp()
        is_beyond_V = probs_V.cumsum(-1) - probs_V >= processors.top_p
        is_beyond_V[0] = False
        logprobs_V[order_V[is_beyond_V]] = -math.inf
    return logits_V.masked_fill(logprobs_V == -math.inf, -math.inf)


def likeliest(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens with their log-probabilities, likeliest first, the lower id first among equals.

    Tokens that can't be sampled are left out, for minus infinity has no place in JSON.
    """
    values, ids = logprobs_V.topk(min(count, len(logprobs_V)))
    found = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(sorted(((one, value) for one, value in found if value > -math.inf), key=lambda it: (-it[1], it[0])))


def draw(weights_B_V: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token at which the cumulative weight passes `uniform` times the whole, never one of weight zero."""
    blocks_B_N_W = functional.pad(weights_B_V, (0, -weights_B_V.shape[1] % BLOCK)).view(len(weights_B_V), -1, BLOCK)
    ends_B_N = blocks_B_N_W.sum(-1, dtype=torch.float64).cumsum(-1)
    target_B_1 = uniforms_B.unsqueeze(1) * ends_B_N[:, -1:]
    block_B_1 = (ends_B_N <= target_B_1).sum(-1, keepdim=True).clamp_(max=ends_B_N.shape[1] - 1)
    starts_B_N = functional.pad(ends_B_N[:, :-1], (1, 0))
    inside_B_W = blocks_B_N_W.gather(1, block_B_1.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1)
    cumulative_B_W = inside_B_W.cumsum(-1, dtype=torch.float64)
    rest_B_1 = target_B_1 - starts_B_N.gather(1, block_B_1)
    # The two sums round apart, so the rest may reach the block's whole: keep it below, where a token with weight is.
    rest_B_1 = torch.minimum(rest_B_1, cumulative_B_W[:, -1:] * (1 - 2.0**-40))
    within_B = (cumulative_B_W <= rest_B_1).sum(-1).clamp_(max=BLOCK - 1)
    tokens_B: Tensor = block_B_1.squeeze(1) * BLOCK + within_B
    return tokens_B.clamp_(max=weights_B_V.shape[1] - 1)
