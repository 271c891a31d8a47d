"""The worker's end of vLLM: passes requests on to a process of its own, hands it the weights, and proves that they
arrived.

vLLM goes on sampling while the worker trains. What it answers waits in a queue that a thread fills, and each answer
wakes the worker, whose `step` then takes what is there: nobody polls. An update is a few messages: the weights go into
memory that both processes share, vLLM loads them between two of its steps, computes what runs again from its tokens and
forgets every prefix; then a probe is sampled under the new weights and scored by the trainer's forward. An engine that
samples from other weights than it trains would learn nonsense in silence, so a difference ends the worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ValidationError

import swarm_engine
from swarm_engine.config import SamplerConfig, VllmDtype
from swarm_engine.errors import WorkerError
from swarm_engine.models.loading import DTYPE_KEYS, LoadedPolicy
from swarm_engine.protocol import Cancel, Failed, Finished, Generate, Rejected, Sampled, frame, read_frames
from swarm_engine.sampler import Reply
from swarm_engine.sampler.agreement import FLOAT32, Limits, difference
from swarm_engine.sampler.requests import refusal_of
from swarm_engine.sampler.shared_weights import new_memory, plan_places, views
from swarm_engine.sampler.vllm_messages import (
    FromVllm,
    LoadModel,
    LoadWeights,
    Ready,
    ToVllm,
    WeightPlace,
    WeightsLoaded,
    from_vllm,
    to_vllm,
)
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

STOP_TIMEOUT_S = 5.0

PYTHON_VARIABLE = "A3R_VLLM_PYTHON"
"""Names the interpreter of vLLM's environment. No key of the config does, for that comes over HTTP and names no
programs."""

LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv[1]); import swarm_engine; del sys.path[0];"
    "from swarm_engine.sampler.vllm_process import main; sys.exit(main(sys.argv[2:]))"
)
"""This very package in the other environment: its folder is on the path for one import only, for what lies beside it
here (torch, transformers) must not take the place of what is installed there."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The other model runner has another interface for logits processors.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""One process, which calls nobody up; its threads are this engine's to count."""

Message = TypeVar("Message", Ready, WeightsLoaded)

log = logging.getLogger(__name__)


class VllmSampler:
    """Samples in a vLLM process; see `swarm_engine.sampler.Sampler`. `start` makes one."""

    def __init__(
        self, policy: LoadedPolicy, dtype: VllmDtype, process: subprocess.Popen[bytes], line: socket.socket, memory: int
    ) -> None:
        self._policy = policy
        self._dtype = dtype
        self._process = process
        self._line = line
        weights = dict(policy.model.merged_weights())
        self._places, _ = plan_places(weights, self._torch_dtype)
        self._views = dict(views(memory, self._places, self._torch_dtype))
        self._received: queue.SimpleQueue[FromVllm | None] = queue.SimpleQueue()
        """None ends it."""
        self._unreported: list[Reply] = []
        """Came in while something else was waited for."""

    @staticmethod
    def start(
        policy: LoadedPolicy,
        config: SamplerConfig,
        *,
        version: int,
        wake: Callable[[], None],
    ) -> VllmSampler:
        """Start vLLM, give it the weights and prove that it samples from them.

        Args:
            policy: as trained; its weights are read again at every `weights_changed`.
            config: with backend `vllm`.
            version: of the weights.
            wake: called from another thread whenever `step` has something to give.

        Raises:
            WorkerError: vLLM could not be started, ended, or disagrees with the trainer.
        """
        dtype = config.vllm_dtype or VllmDtype.FLOAT32
        places, size = plan_places(dict(policy.model.merged_weights()), getattr(torch, dtype))
        memory = new_memory(size)
        ours, theirs = socket.socketpair()
        python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        home = str(Path(swarm_engine.__file__).parent.parent)
        try:
            with theirs:
                process = subprocess.Popen(
                    [python, "-P", "-c", LAUNCH, home, "--line", str(theirs.fileno()), "--memory", str(memory)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), memory),
                    env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
                )
        except OSError as error:
            ours.close()
            os.close(memory)
            raise WorkerError(
                f"{python} can't be run: {error.strerror}",
                f"name the interpreter of the environment that has vLLM in {PYTHON_VARIABLE}",
            ) from error
        sampler = VllmSampler(policy, dtype, process, ours, memory)
        os.close(memory)
        threading.Thread(target=sampler._read, args=(wake,), daemon=True).start()
        sampler._send(
            LoadModel(
                config_json=_described(policy, dtype),
                places=_with_head(places),
                dtype=dtype,
                tokenizer_dir=str(policy.tokenizer_dir.resolve()),
                end_ids=policy.end_ids,
                max_context=policy.max_context,
                max_running=config.max_running,
                kv_bytes=_kv_bytes(policy, config, dtype),
                is_eager=config.vllm_eager is not False,
            )
        )
        try:
            sampler._await(Ready)
            sampler.weights_changed(version)
        except WorkerError:
            sampler.close()
            raise
        return sampler

    @property
    def is_idle(self) -> bool:
        """No answer of vLLM waits; it may well be sampling."""
        return self._received.empty() and not self._unreported

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
        self._send(request)
        return []

    def cancel(self, request_id: str) -> list[Reply]:
        """Stop a request; what it sampled until then comes with a later step."""
        self._send(Cancel(request_id))
        return []

    def step(self) -> list[Reply]:
        """What vLLM has answered since the last look.

        Raises:
            WorkerError: vLLM gave up or is gone.
        """
        replies, self._unreported = self._unreported, []
        while not self._received.empty():
            replies.append(self._next_reply())
        return replies

    def weights_changed(self, version: int) -> list[Reply]:
        """Give vLLM the weights and prove by a probe that it samples from them. What runs goes on under the new ones.

        Raises:
            WorkerError: it ended, or samples from other weights.
        """
        for name, weight in self._policy.model.merged_weights():
            self._views[name].copy_(weight)
        probes = self._probes()
        self._send(LoadWeights(version, probes))
        before = self._await(WeightsLoaded)
        self._check(probes)
        return before

    def close(self) -> None:
        """End vLLM and wait until it is gone."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._exit_code()

    def _probes(self) -> tuple[Generate, ...]:
        """Requests whose log-probabilities the trainer can check. They are the same at every update, so that a prefix
        which survived it would show."""
        draw = torch.Generator().manual_seed(derive_seed("probe"))
        length = min(PROBE_TOKENS, self._policy.max_context)
        tokens = tuple(torch.randint(self._policy.model.config.vocab_size, (length,), generator=draw).tolist())
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

    def _await(self, kind: type[Message]) -> list[Reply]:
        """Wait for a message; the replies before it."""
        replies, self._unreported = self._unreported, []
        while not isinstance(message := self._next(), kind):
            assert isinstance(message, Sampled | Finished | Rejected), message
            replies.append(message)
        return replies

    def _next_reply(self) -> Reply:
        message = self._next()
        assert isinstance(message, Sampled | Finished | Rejected), message
        return message

    def _next(self) -> FromVllm:
        message = self._received.get()
        if message is None:
            raise WorkerError(self._why_gone())
        if isinstance(message, Failed):
            raise WorkerError(message.reason)
        return message

    def _send(self, question: ToVllm) -> None:
        # A line that broke is found out by the reading thread, behind what vLLM may have said last.
        with contextlib.suppress(OSError):
            self._line.sendall(frame(to_vllm.dump_json(question)))

    def _read(self, wake: Callable[[], None]) -> None:
        try:
            for message in read_frames(self._line):
                self._received.put(from_vllm.validate_json(message))
                wake()
        except (OSError, ValidationError) as error:
            log.error("the line to vLLM broke: %s", error)
        self._line.close()
        self._received.put(None)
        wake()

    def _why_gone(self) -> str:
        code = self._exit_code()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f"the vLLM process {how}"
        if code == -signal.SIGKILL:
            reason += ", perhaps by the system for want of memory"
        return f"{reason}; worker.log in the run folder may say more"

    def _exit_code(self) -> int:
        """Of the process, which is killed where it does not end by itself."""
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    @property
    def _torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._dtype)
        return found


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


def _kv_bytes(policy: LoadedPolicy, config: SamplerConfig, dtype: VllmDtype) -> int:
    """Memory for keys and values: what the config says, or as much as whole contexts need within the limit, and one at
    least."""
    if config.vllm_kv_gib is not None:
        return int(config.vllm_kv_gib * (1 << 30))
    model = policy.model.config
    blocks = -(-policy.max_context // KV_BLOCK_TOKENS) + 1
    itemsize: int = getattr(torch, dtype).itemsize
    context = blocks * KV_BLOCK_TOKENS * 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    return max(context, min(context * config.max_running, MAX_KV_BYTES))
