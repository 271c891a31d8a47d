"""Proof that sampler and trainer give a policy's tokens the same log-probability: at boot, and after every update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_engine.config import SamplerBackend
from swarm_engine.errors import WorkerError
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.protocol import Finished, Generate, Rejected, Sampled
from swarm_engine.sampler import Reply, Sampler
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.seeding import derive_seed
from swarm_engine.trainer.scoring import Row, score
from swarm_engine.types import SamplingParams

AGREEMENT_MAX = 1e-3
AGREEMENT_MEAN = 1e-4
"""Nats that sampler and trainer may differ by about a token, at most and on average, in float32."""

PROBE_ID = "probe of version "
PROBE_PROMPT, PROBE_REPLY = 8, 1
"""Tokens of the request that follows an update: enough to see whose weights and whose prefix they are."""


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


def compare(sampled: Sequence[float], trained_N: Tensor, what: str) -> None:
    """See that some tokens have the same log-probabilities.

    Raises:
        WorkerError: they differ by more than rounding does.
    """
    difference_N = (torch.tensor(sampled, dtype=trained_N.dtype) - trained_N).abs()
    if not (difference_N.max() <= AGREEMENT_MAX and difference_N.mean() <= AGREEMENT_MEAN):
        raise WorkerError(
            f"sampler and trainer differ by up to {float(difference_N.max()):.1e} nats about a token of {what}, the "
            f"limit is {AGREEMENT_MAX}; the weights may be broken, or this machine's matrix products are not accurate "
            "enough"
        )


class Probe:
    """A short request of our own to the sampler that serves, after every change of its weights.

    The prompt is always the same, so the sampler would have its beginning in a cache of prefixes that was not dropped.
    It takes its turn among the others, and its numbers are compared with the trainer's when it is complete.
    """

    def __init__(self, name: str, policy: LoadedPolicy, sampler: Sampler, backend: SamplerBackend) -> None:
        self._name = name
        self._what = f"policy {name!r}"
        self._policy = policy
        self._sampler = sampler
        draw = torch.Generator().manual_seed(derive_seed("probe"))
        length = min(PROBE_PROMPT + PROBE_REPLY, policy.max_context)
        tokens = tuple(torch.randint(policy.model.config.vocab_size, (length,), generator=draw).tolist())
        reply = min(PROBE_REPLY, length - 1)
        self._prompt = tokens[: length - reply]
        self._script = tokens[length - reply :] if backend is SamplerBackend.SCRIPTED else None
        self._params = SamplingParams(reply, seed=derive_seed("probe"))
        self._version: int | None = None
        """Of the weights that it asked; None while it waits for nothing."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    def end(self) -> None:
        """Give up what was not answered yet: the weights it asked are about to go."""
        if self._version is not None:
            self._sampler.cancel(self._request_id)
            self._version = None

    def begin(self, version: int) -> None:
        """Ask the weights of `version`."""
        self._version, self._token_ids, self._logprobs = version, [], []
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
        match reply:
            case Sampled():
                if reply.policy_version != version:
                    raise WorkerError(
                        f"the sampler of {self._what} speaks of version {reply.policy_version}, its weights are of "
                        f"version {version}"
                    )
                self._token_ids += reply.token_ids
                self._logprobs += reply.logprobs
            case Finished():
                self._version = None
                tokens = (*self._prompt, *self._token_ids)
                targets = tuple(range(len(self._prompt), len(tokens)))
                with torch.no_grad():
                    trained = score(self._policy.model, [Row(tokens, targets, (1.0,) * len(targets))])
                compare(self._logprobs, trained.logprobs_N, f"{self._what} at version {version}")
            case Rejected():
                raise WorkerError(f"{self._what} can't be sampled from at version {version}: {reply.message}")
