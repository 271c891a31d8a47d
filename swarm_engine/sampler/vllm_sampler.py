"""Sampling with vLLM: passes requests on, hands the weights out, and proves that they arrived.

An update is a few messages: the weights go into memory that vLLM shares, which it loads between two of its steps; then
it computes what runs again from its tokens and forgets every prefix, and a probe is sampled under the new weights and
scored by the trainer's forward. An engine that samples from other weights than it trains would learn nonsense in
silence, so a difference ends the worker. How the processes are reached is `swarm_engine.sampler.vllm_link`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm_engine.config import SamplerConfig, VllmDtype
from swarm_engine.errors import WorkerError
from swarm_engine.models.loading import DTYPE_KEYS, LoadedPolicy
from swarm_engine.protocol import Cancel, Generate, Rejected, Sampled
from swarm_engine.sampler import Reply
from swarm_engine.sampler.agreement import FLOAT32, Limits, difference
from swarm_engine.sampler.grammar import TOKENIZER_FILE
from swarm_engine.sampler.requests import refusal_of
from swarm_engine.sampler.several import SeveralSamplers
from swarm_engine.sampler.shared_weights import plan_places, views
from swarm_engine.sampler.vllm_link import Link, Links
from swarm_engine.sampler.vllm_messages import Asleep, LoadModel, LoadWeights, Sleep, WeightPlace, WeightsLoaded
from swarm_engine.seeding import derive_seed
from swarm_engine.trainer.scoring import Row, score
from swarm_engine.types import SamplingParams

AGREEMENT = {VllmDtype.FLOAT32: FLOAT32, VllmDtype.BFLOAT16: Limits(mean=0.02, most=float("inf"))}
"""Of vLLM and the trainer's float32, on the probe. In bfloat16 a token may be far off where its logits are large."""

PROBE_TOKENS = 96
PROBE_REPLY = 16
PROBE_TEMPERATURES = (1.0, 0.7)

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower temperature to the first in silence, and takes none above the second."""

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}

KV_BLOCK_TOKENS = 128
"""The largest block of keys and values that vLLM takes by itself."""
MAX_KV_BYTES = 4 << 30
"""Own limit of `sampler.vllm_kv_gib`."""

log = logging.getLogger(__name__)


class VllmSampler:
    """Samples in a vLLM process; see `swarm_engine.sampler.Sampler`. `start_vllm` makes one, or several as one."""

    def __init__(
        self,
        policy: LoadedPolicy,
        dtype: VllmDtype,
        link: Link,
        hand_out: Callable[[int], None],
    ) -> None:
        self._policy = policy
        self._dtype = dtype
        self._link = link
        self._hand_out = hand_out
        self._unreported: list[Reply] = []
        """Came in while something else was waited for."""

    @property
    def is_idle(self) -> bool:
        """No answer of vLLM waits; it may well be sampling."""
        return not self._link.has_message and not self._unreported

    def submit(self, request: Generate) -> list[Reply]:
        """Pass a request on, or refuse what vLLM would serve otherwise than asked."""
        refusal = refusal_of(request, self._policy.model.config.vocab_size, self._policy.max_context)
        if refusal is not None:
            return [refusal]
        temperature = request.params.temperature
        if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            why = f"temperature is {temperature}; vLLM takes 0 and from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
            return [Rejected(request.request_id, why, "temperature")]
        if request.script is not None:
            why = "a script was given to the vllm sampler; set sampler.backend to 'scripted'"
            return [Rejected(request.request_id, why)]
        self._link.send(request)
        return []

    def cancel(self, request_id: str) -> list[Reply]:
        """Stop a request; what it sampled until then comes with a later step."""
        self._link.send(Cancel(request_id))
        return []

    def step(self) -> list[Reply]:
        """What vLLM has answered since the last look.

        Raises:
            WorkerError: vLLM gave up or is gone.
        """
        replies, self._unreported = self._unreported, []
        while self._link.has_message:
            replies.append(self._next_reply())
        return replies

    def weights_changed(self, version: int) -> list[Reply]:
        """Give vLLM the weights and prove by a probe that it samples from them. What runs goes on under the new ones.

        Raises:
            WorkerError: it ended, or samples from other weights.
        """
        self._hand_out(version)
        return self.weights_loaded()

    def weights_loaded(self) -> list[Reply]:
        """Wait until vLLM has what was handed out, and prove that it samples from it.

        Raises:
            WorkerError: it ended, or samples from other weights.
        """
        before = self._until(WeightsLoaded)
        self._check(probes_of(self._policy))
        return before

    def begin_sleep(self) -> None:
        """Have vLLM free its card. What runs goes on after `weights_changed`."""
        self._link.send(Sleep())

    def wait_asleep(self) -> list[Reply]:
        """Wait until it has.

        Raises:
            WorkerError: it ended.
        """
        return self._until(Asleep)

    def close(self) -> None:
        """End vLLM and wait until it is gone."""
        self._link.close()

    def _check(self, probes: Sequence[Generate]) -> None:
        """Compare the log-probabilities of the probes' replies with the trainer's.

        Raises:
            WorkerError: they differ by more than rounding, so that every ratio of every update would be wrong.
        """
        replies = self._replies_to(probes)
        logprobs: list[float] = []
        rows: list[Row] = []
        for probe in probes:
            sampled = replies[probe.request_id]
            places = range(len(probe.prompt_ids), len(probe.prompt_ids) + len(sampled.token_ids))
            temperatures = (probe.params.temperature,) * len(places)
            rows.append(Row(probe.prompt_ids + sampled.token_ids, tuple(places), temperatures))
            logprobs += sampled.logprobs
        with torch.no_grad():
            trained_N = score(self._policy.model, rows).logprobs_N
        mean, most = difference(logprobs, trained_N)
        limits = AGREEMENT[self._dtype]
        if not limits.hold(mean, most):
            raise WorkerError(
                f"vLLM and the trainer differ by {mean:.1e} nats about a token on average, {most:.1e} at most, the "
                f"limits in {self._dtype} are {limits.mean} and {limits.most}; vLLM samples from other weights than "
                "are trained, or computes them otherwise"
            )
        log.info("vLLM and the trainer differ by %.1e nats about a token on average, %.1e at most", mean, most)

    def _replies_to(self, probes: Sequence[Generate]) -> dict[str, Sampled]:
        """The replies to requests of our own, by id; those to others wait."""
        waited_for = {probe.request_id for probe in probes}
        found: dict[str, Sampled] = {}
        while waited_for:
            reply = self._next_reply()
            if reply.request_id not in waited_for:
                self._unreported.append(reply)
            elif isinstance(reply, Sampled):
                found[reply.request_id] = reply
            elif isinstance(reply, Rejected):
                raise WorkerError(f"vLLM can't sample from the policy: {reply.message}")
            else:
                waited_for.remove(reply.request_id)
        return found

    def _until(self, answer: type[WeightsLoaded | Asleep]) -> list[Reply]:
        """The replies before an answer to the worker itself."""
        before, self._unreported = self._unreported, []
        while not isinstance(message := self._link.receive(), answer):
            assert not isinstance(message, WeightsLoaded | Asleep), message
            before.append(message)
        return before

    def _next_reply(self) -> Reply:
        message = self._link.receive()
        assert not isinstance(message, WeightsLoaded | Asleep), message
        return message


class HandOut:
    """Gives all vLLM processes of a policy its weights as they are, at once."""

    def __init__(self, policy: LoadedPolicy, dtype: torch.dtype, places: Sequence[WeightPlace], links: Links) -> None:
        self._policy = policy
        self._links = links
        self._views = dict(views(links.memory, places, dtype))

    def __call__(self, version: int) -> None:
        """Begin an update; every process answers `WeightsLoaded`, then to the probes."""
        for name, weight in self._policy.model.merged_weights():
            self._views[name].copy_(weight)
        self._links.load_weights(LoadWeights(version, probes_of(self._policy)))


def start_vllm(
    policy: LoadedPolicy, config: SamplerConfig, reach: Callable[[int], Links], *, version: int
) -> VllmSampler | SeveralSamplers:
    """Start the vLLM processes of a policy, give them the weights and prove that they sample from them.

    Args:
        policy: as trained; its weights are read again at every `weights_changed`.
        config: with backend `vllm`.
        reach: starts the processes, given the bytes that the weights take.
        version: of the weights.

    Raises:
        WorkerError: vLLM could not be started, ended, or disagrees with the trainer.
    """
    dtype = config.vllm_dtype or VllmDtype.FLOAT32
    torch_dtype: torch.dtype = getattr(torch, dtype)
    places, size = plan_places(dict(policy.model.merged_weights()), torch_dtype)
    cache = _cache_of(policy, config, torch_dtype)
    model = LoadModel(
        config_json=_described(policy, dtype),
        places=_with_head(places),
        dtype=dtype,
        tokenizer_json=(policy.tokenizer_dir / TOKENIZER_FILE).read_text(encoding="utf-8"),
        end_ids=policy.end_ids,
        max_context=policy.max_context,
        max_running=config.max_running,
        kv_bytes=cache.num_bytes,
        is_eager=config.vllm_eager is not False,
        can_sleep=bool(config.vllm_sleep_mode),
    )
    links = reach(size)
    hand_out = HandOut(policy, torch_dtype, places, links)
    members = [VllmSampler(policy, dtype, link, hand_out) for link in links.members]
    sampler = (
        members[0]
        if len(members) == 1
        else SeveralSamplers(members, hand_out, max_running=config.max_running, cache_tokens=cache.num_tokens)
    )
    try:
        for link in links.members:
            link.send(model)
        sampler.weights_changed(version)
    except WorkerError:
        sampler.close()
        raise
    return sampler


def probes_of(policy: LoadedPolicy) -> tuple[Generate, ...]:
    """Requests whose log-probabilities the trainer can check. They are the same at every update, so that a prefix
    which survived it would show."""
    draw = torch.Generator().manual_seed(derive_seed("probe"))
    length = min(PROBE_TOKENS, policy.max_context)
    tokens = tuple(torch.randint(policy.model.config.vocab_size, (length,), generator=draw).tolist())
    reply = max(1, min(PROBE_REPLY, length // 4))
    return tuple(
        Generate(
            f"probe-{number}",
            "",
            tokens[: max(1, length // 2 if number == 0 else length - reply)],
            SamplingParams(reply, temperature, seed=number),
            is_streamed=False,
        )
        for number, temperature in enumerate(PROBE_TEMPERATURES)
    )


def _with_head(places: Sequence[WeightPlace]) -> tuple[WeightPlace, ...]:
    """The places with one for the output head, which in a tied model is that of the embedding.

    vLLM keeps a copy of the head on a CPU, and without weights by that name an update would leave the old ones in it.
    """
    by_name = {place.name: place for place in places}
    if "lm_head.weight" in by_name:
        return tuple(places)
    embedding = by_name["model.embed_tokens.weight"]
    return (*places, WeightPlace("lm_head.weight", embedding.shape, embedding.offset))


def _described(policy: LoadedPolicy, dtype: VllmDtype) -> dict[str, object]:
    """`config.json` for vLLM, which goes by the architecture and not by the model type."""
    config = policy.config_json | dict.fromkeys(sorted(DTYPE_KEYS), dtype.value)
    return config | {"architectures": [ARCHITECTURES[policy.model.config.family]]}


@dataclass(frozen=True, slots=True)
class Cache:
    """Room for keys and values."""

    num_bytes: int
    num_tokens: int
    """That fit into it."""


def _cache_of(policy: LoadedPolicy, config: SamplerConfig, dtype: torch.dtype) -> Cache:
    """The cache of one process: what the config says, or as much as whole contexts need within the limit, and one at
    least."""
    model = policy.model.config
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    if config.vllm_kv_gib is not None:
        num_bytes = int(config.vllm_kv_gib * (1 << 30))
    else:
        context = (-(-policy.max_context // KV_BLOCK_TOKENS) + 1) * KV_BLOCK_TOKENS * token
        num_bytes = max(context, min(context * config.max_running, MAX_KV_BYTES))
    return Cache(num_bytes, num_bytes // token)
