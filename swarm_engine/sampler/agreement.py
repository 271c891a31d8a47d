"""Proof that sampler and trainer give a policy's tokens the same log-probability."""

from __future__ import annotations

import torch

from swarm_engine.config import SamplerBackend
from swarm_engine.errors import WorkerError
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.protocol import Generate, Rejected, Sampled
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.seeding import derive_seed
from swarm_engine.trainer.scoring import Row, score
from swarm_engine.types import SamplingParams

AGREEMENT_MAX = 1e-3
AGREEMENT_MEAN = 1e-4
"""Nats that sampler and trainer may differ by about a token, at most and on average, in float32."""


def check_agreement(policy: LoadedPolicy, is_lockstep: bool) -> None:
    """Prove on a probe that sampler and trainer give the same tokens the same log-probability.

    Two prompts, the second going on from the first, so that the cache's prefix is part of the proof.

    Raises:
        WorkerError: they differ, so that every ratio of every update would be wrong.
    """
    draw = torch.Generator().manual_seed(derive_seed("probe"))
    length = min(64, policy.max_context)
    tokens = tuple(torch.randint(policy.model.config.vocab_size, (length,), generator=draw).tolist())
    reply = max(1, length // 4)
    sampler = SlotSampler(policy.model, (), backend=SamplerBackend.SCRIPTED, max_running=2, is_lockstep=is_lockstep)
    sampled: dict[int, float] = {}
    for start in (max(1, length // 2), length - reply):
        params = SamplingParams(max_tokens=reply)
        answers = sampler.submit(Generate("probe", "", tokens[:start], params, script=tokens[start : start + reply]))
        while not sampler.is_idle:
            answers += sampler.step()
        rejected = next((answer.message for answer in answers if isinstance(answer, Rejected)), None)
        if rejected is not None:
            raise WorkerError(f"the policy can't be sampled from: {rejected}")
        found = [logprob for answer in answers if isinstance(answer, Sampled) for logprob in answer.logprobs]
        sampled |= {start + offset: logprob for offset, logprob in enumerate(found)}
    with torch.no_grad():
        trained_N = score(policy.model, [Row(tokens, tuple(sampled), (1.0,) * len(sampled))]).logprobs_N
    difference_N = (torch.tensor(list(sampled.values()), dtype=trained_N.dtype) - trained_N).abs()
    if not (difference_N.max() <= AGREEMENT_MAX and difference_N.mean() <= AGREEMENT_MEAN):
        raise WorkerError(
            f"sampler and trainer differ by up to {float(difference_N.max()):.1e} nats about a token, the limit is "
            f"{AGREEMENT_MAX}; the weights may be broken, or this machine's matrix products are not accurate enough"
        )
