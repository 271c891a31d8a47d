"""Proof that sampler and trainer give a policy's tokens the same log-probability: at boot, and after every update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_engine.config import SamplerBackend
from swarm_engine.errors import WorkerError
from swarm_engine.models.decoder import attend_causally
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.protocol import Finished, Generate, Rejected, Sampled
from swarm_engine.sampler import Reply, Sampler
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.seeding import derive_seed
from swarm_engine.trainer.scoring import Row, score
from swarm_engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Nats that sampler and trainer may differ by about a token."""

    mean: float
    most: float

    def hold(self, mean: float, most: float) -> bool:
        """Whether a difference is within them; one that is not a number is not."""
        return mean <= self.mean and most <= self.most


FLOAT32 = Limits(mean=1e-4, most=1e-3)

PROBE_ID = "probe of version "
PROBE_TOKENS = 8
"""Of the prompt that follows an update; one token of reply is enough to see whose weights and whose prefix they are."""


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
    compare(list(sampled.values()), trained_N, "the policy")


def difference(sampled: Sequence[float], trained_N: Tensor) -> tuple[float, float]:
    """How far the log-probabilities of N tokens are apart, in nats on average and at most.

    Args:
        sampled: as the sampler gave them.
        trained_N: under the trainer's weights.
    """
    difference_N = (torch.tensor(sampled, dtype=trained_N.dtype) - trained_N).abs()
    return float(difference_N.mean()), float(difference_N.max())


def compare(sampled: Sequence[float], trained_N: Tensor, what: str) -> None:
    """See that some tokens have the same log-probabilities.

    Raises:
        WorkerError: they differ by more than rounding does.
    """
    mean, most = difference(sampled, trained_N)
    if not FLOAT32.hold(mean, most):
        raise WorkerError(
            f"sampler and trainer differ by {mean:.1e} nats about a token of {what} on average and {most:.1e} at most, "
            f"the limits are {FLOAT32.mean} and {FLOAT32.most}; the weights may be broken, or this machine's matrix "
            "products are not accurate enough"
        )


class Probe:
    """A request of our own to the sampler that serves, after every change of its weights.

    The prompt is always the same, so the sampler would have its beginning in a cache of prefixes that was not dropped.
    What the trainer's weights say of every token is worked out at once, for they may move on; the request takes its
    turn among the others and is compared when its reply comes.
    """

    def __init__(self, name: str, policy: LoadedPolicy, sampler: Sampler, backend: SamplerBackend) -> None:
        self._name = name
        self._policy = policy
        self._sampler = sampler
        vocab_size = policy.model.config.vocab_size
        draw = torch.Generator().manual_seed(derive_seed("probe"))
        length = min(PROBE_TOKENS, policy.max_context - 1)
        *prompt, token = torch.randint(vocab_size, (length + 1,), generator=draw).tolist()
        self._prompt = tuple(prompt)
        self._script = (token,) if backend is SamplerBackend.SCRIPTED else None
        self._params = SamplingParams(max_tokens=1, seed=derive_seed("probe"))
        self._version: int | None = None
        """Of the weights that it asked; None while it waits for nothing."""
        self._expected_V = torch.empty(0)
        """Log-probabilities under the trainer's weights."""

    @torch.no_grad()
    def begin(self, version: int) -> None:
        """Ask the weights of `version`, which are the trainer's now; give up what those before did not answer yet."""
        if self._version is not None:
            self._sampler.cancel(self._request_id)
        model = self._policy.model
        tokens_1_T = torch.tensor([self._prompt]).to(model.device)
        positions_T = torch.arange(len(self._prompt), device=model.device)
        hidden_1_T_C = model.hidden(tokens_1_T, positions_T, attend_causally)
        logits_V = model.logits(hidden_1_T_C[0, -1]).cpu()
        self._expected_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32)).log_softmax(-1)
        self._version = version
        ask = Generate(self._request_id, self._name, self._prompt, self._params, self._script, is_streamed=False)
        self.take(self._sampler.submit(ask))

    def take(self, replies: Sequence[Reply]) -> list[Reply]:
        """The replies to others; its own are read.

        Raises:
            WorkerError: sampler and trainer disagree.
        """
        others = []
        for reply in replies:
            if not reply.request_id.startswith(PROBE_ID):
                others.append(reply)
            elif self._version is not None and reply.request_id == self._request_id:
                self._read(reply, self._version)
        return others

    @property
    def _request_id(self) -> str:
        return f"{PROBE_ID}{self._version}"

    def _read(self, reply: Reply, version: int) -> None:
        what = f"policy {self._name!r} at version {version}"
        match reply:
            case Sampled():
                if reply.policy_version != version:
                    raise WorkerError(f"the sampler says that {what} is of version {reply.policy_version}")
                compare(reply.logprobs, self._expected_V[list(reply.token_ids)], what)
            case Finished():
                self._version = None
            case Rejected():
                raise WorkerError(f"{what} can't be sampled from: {reply.message}")
