"""The process that runs vLLM: one synchronous engine behind the worker's line.

    VLLM_PYTHON … --line DESCRIPTOR --memory DESCRIPTOR

`swarm_engine.sampler.vllm_link` starts it, in an environment of vLLM's own that need not have this package installed
(docs/vllm.md). It ends when the line does, so that it never outlives its worker. As in the worker one thread reads and
one computes, hence weights never change inside a step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
from pydantic import ValidationError

from swarm_engine.errors import BadRequestError
from swarm_engine.protocol import Cancel, Failed, Finished, Generate, Rejected, Sampled, frame, read_frames
from swarm_engine.sampler import Reply
from swarm_engine.sampler.grammar import Grammars
from swarm_engine.sampler.shared_weights import mapped, views
from swarm_engine.sampler.vllm_messages import (
    Asleep,
    FromVllm,
    LoadModel,
    LoadWeights,
    Sleep,
    ToVllm,
    WeightsLoaded,
    from_vllm,
    to_vllm,
)
from swarm_engine.types import FinishReason, LogitsProcessors

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams
    from vllm.outputs import CompletionOutput

    from swarm_engine.sampler.vllm_grammar import Follower

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of keys and values on a CPU, the least that its kernels take; vLLM's own 128 would share no prefix
shorter than that."""
LEAST_SHARE = 0.01
"""Of a card's memory; vLLM's own 0.92 wants the card for itself."""
PROBE_PRIORITY = -1
"""The lower comes first; that of other requests is 0."""
MIN_LLGUIDANCE = (1, 9)
"""1.7, which vLLM asks for, does not know the bound on white space in forms."""
MAX_SEED = (1 << 63) - 1
LEAST_TOP_P = 1e-9
DISCARD = 2
"""vLLM's level of sleep that keeps no copy of the weights: they are handed out anew."""
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Running:
    """A request in the engine, with the tokens not reported yet; all are of the weights that serve now."""

    request: Generate
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def take(self, completion: CompletionOutput) -> str | None:
        """Take the tokens of a step; what is wrong with them, or None."""
        for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
            logprob = found[token].logprob
            if not logprob > float("-inf"):
                return f"the log-probability of token {token} is {logprob}; the policy's weights are broken"
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if count := self.request.params.top_logprobs:
                likeliest = sorted(
                    ((one, entry.logprob) for one, entry in found.items() if entry.logprob > float("-inf")),
                    key=lambda it: (-it[1], it[0]),
                )
                self.top.append(tuple(likeliest[:count]))
        return None

    def report(self, version: int) -> list[Reply]:
        """The tokens not reported yet."""
        if not self.token_ids:
            return []
        top = tuple(self.top) if self.request.params.top_logprobs else None
        sampled = Sampled(self.request.request_id, tuple(self.token_ids), tuple(self.logprobs), version, top)
        for values in (self.token_ids, self.logprobs, self.top):
            values.clear()
        return [sampled]


class Host:
    """vLLM's engine, speaking our messages."""

    def __init__(self, model: LoadModel, memory: int) -> None:
        self._model = model
        self._memory = mapped(memory)
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._version = -1
        """Of noise, until weights come."""
        self._is_asleep = False
        self._running: dict[str, Running] = {}
        self._followers: dict[str, Follower] = {}
        """Of the running requests with a grammar, by request id."""
        vocab_size = int(model.config_json["vocab_size"])
        self._grammars = Grammars(model.tokenizer_json, vocab_size, model.end_ids)
        self._engine = _make_engine(model, vocab_size, self._followers)

    @property
    def is_idle(self) -> bool:
        """No request runs, and none would at the next step."""
        return self._is_asleep or not self._running

    def answer(self, question: ToVllm) -> list[FromVllm]:
        """Do what the worker asks between two steps."""
        match question:
            case Generate():
                return list(self._submit(question, self._model.end_ids))
            case Cancel():
                return list(self._cancel(question.request_id))
            case LoadWeights():
                return self._load_weights(question)
            case Sleep():
                return self._sleep()
            case LoadModel():
                raise AssertionError("a model was given twice")
            case _:
                assert_never(question)

    def step(self) -> list[Reply]:
        """Sample the next token of every running request."""
        replies: list[Reply] = []
        for output in self._engine.step():
            running = self._running[output.request_id]
            (completion,) = output.outputs
            follower = self._followers.get(output.request_id)
            problem = (follower and follower.problem) or running.take(completion)
            if problem is not None:
                self._drop(output.request_id)
                replies.append(Rejected(output.request_id, problem))
            elif output.finished:
                replies += running.report(self._version)
                replies.append(Finished(output.request_id, FINISH_REASONS[completion.finish_reason or ""]))
                self._forget(output.request_id)
            elif running.request.is_streamed:
                replies += running.report(self._version)
        return replies

    def _submit(self, request: Generate, end_ids: Sequence[int], priority: int = 0) -> list[Reply]:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input

        if request.grammar is not None:
            from swarm_engine.sampler.vllm_grammar import Follower

            try:
                check_llguidance(installed("llguidance"))
                self._grammars.check(request.grammar)
                self._followers[request.request_id] = Follower(self._grammars.start(request.grammar))
            except BadRequestError as error:
                return [Rejected(request.request_id, str(error))]
        prompt = tokens_input(list(request.prompt_ids))
        try:
            self._engine.add_request(request.request_id, prompt, self._params(request, end_ids), priority=priority)
        except (VLLMValidationError, ValueError) as error:
            self._forget(request.request_id)
            return [Rejected(request.request_id, f"vLLM refuses the request: {error}")]
        self._running[request.request_id] = Running(request)
        return []

    def _params(self, request: Generate, end_ids: Sequence[int]) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from swarm_engine.sampler.vllm_grammar import KEY

        asked = request.params
        return SamplingParams(
            max_tokens=min(asked.max_tokens, self._model.max_context - len(request.prompt_ids)),
            temperature=asked.temperature,
            seed=asked.seed & MAX_SEED,
            logprobs=asked.top_logprobs,
            # The end tokens are ours to name; vLLM's own is that of the checkpoint's config.
            ignore_eos=True,
            stop_token_ids=list(end_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={KEY: request.request_id} if request.grammar is not None else None,
            **processed(asked.processors),
        )

    def _cancel(self, request_id: str) -> list[Reply]:
        running = self._running.get(request_id)
        if running is None:
            return []
        self._drop(request_id)
        return [*running.report(self._version), Finished(request_id, FinishReason.CANCELLED)]

    def _load_weights(self, load: LoadWeights) -> list[FromVllm]:
        """Take the weights that lie in the memory. What runs is computed again from its tokens, and no prefix of the
        old weights is left."""
        reports = self._reports()
        if self._is_asleep:
            self._engine.wake_up(["weights"])
        weights = views(self._memory, self._model.places, self._dtype)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self._is_asleep:
            self._engine.wake_up(["kv_cache"])
            self._is_asleep = False
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM kept prefixes of the old weights")
        self._version = load.version
        # What ran waits again now, so those of the higher priority get a place at once.
        refused = [reply for probe in load.probes for reply in self._submit(probe, (), PROBE_PRIORITY)]
        return [*reports, WeightsLoaded(load.version), *refused]

    def _sleep(self) -> list[FromVllm]:
        """Give up what a card holds. vLLM forgets every prefix, and what runs waits to be computed again."""
        reports = self._reports()
        self._engine.sleep(DISCARD, mode="keep")
        self._is_asleep = True
        return [*reports, Asleep()]

    def _reports(self) -> list[FromVllm]:
        """The tokens of all that runs that are not reported yet."""
        return [one for running in self._running.values() for one in running.report(self._version)]

    def _drop(self, request_id: str) -> None:
        self._engine.abort_request([request_id])
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        if follower := self._followers.pop(request_id, None):
            follower.close()


def processed(processors: LogitsProcessors | None) -> dict[str, Any]:
    """What is done to the logits, as vLLM takes it."""
    if processors is None:
        return {}
    return {
        **asdict(processors),
        "logit_bias": dict(processors.logit_bias) or None,
        # vLLM takes no 0; the likeliest token alone is more probable than this.
        "top_p": max(processors.top_p, LEAST_TOP_P),
    }


installed = lru_cache(version)
"""The version of a distribution; the files that tell it are read once."""


def check_llguidance(found: str) -> None:
    """See that grammars mean here what they mean to the front, which has the version that the engine asks for.

    Raises:
        BadRequestError: the version found is too old.
    """
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_LLGUIDANCE:
        raise BadRequestError(
            f"the environment of vLLM has llguidance {found}, which reads grammars otherwise than the engine's",
            "install llguidance 1.9 there with --no-deps; vLLM itself does not use it here",
        )


def _make_engine(model: LoadModel, vocab_size: int, followers: dict[str, Follower]) -> LLMEngine:
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    from swarm_engine.sampler.vllm_grammar import processor_for

    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.config_json))
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            generation_config="vllm",
            load_format="dummy",
            dtype=model.dtype,
            max_model_len=model.max_context,
            max_num_seqs=model.max_running,
            kv_cache_memory_bytes=model.kv_bytes,
            # What has to be free at the start, which counts even where the line above says what is taken: a card may
            # hold a trainer or another policy's engine.
            gpu_memory_utilization=LEAST_SHARE,
            block_size=CPU_BLOCK_TOKENS if current_platform.is_cpu() else None,
            enforce_eager=model.is_eager,
            # On a CPU vLLM refuses it; there its sleep is a pause and frees nothing.
            enable_sleep_mode=model.can_sleep and not current_platform.is_cpu(),
            # Of the distribution sampled from, after temperature and grammar.
            logprobs_mode="processed_logprobs",
            max_logprobs=vocab_size,
            logits_processors=[processor_for(followers)],
            # Everything in this process, one step at a time: a token's version is then that of the last load.
            distributed_executor_backend="uni",
            async_scheduling=False,
            enable_prefix_caching=True,
            scheduling_policy="priority",
            disable_log_stats=True,
        )
        return LLMEngine.from_engine_args(arguments)


def serve(line: socket.socket, memory: int) -> None:
    """Answer the worker until its line ends."""
    inbox: queue.SimpleQueue[ToVllm] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, inbox), daemon=True).start()
    model = inbox.get()
    assert isinstance(model, LoadModel), model
    host = Host(model, memory)
    while True:
        for question in _take(inbox, must_wait=host.is_idle):
            _send(line, host.answer(question))
        if not host.is_idle:
            _send(line, host.step())


def _take(inbox: queue.SimpleQueue[ToVllm], *, must_wait: bool) -> list[ToVllm]:
    questions = [inbox.get()] if must_wait else []
    while not inbox.empty():
        questions.append(inbox.get())
    return questions


def _read(line: socket.socket, inbox: queue.SimpleQueue[ToVllm]) -> None:
    """Read questions until the line ends, which ends the process at once."""
    try:
        for message in read_frames(line):
            inbox.put(to_vllm.validate_json(message))
    except (OSError, ValidationError) as error:
        log.error("the line to the worker broke: %s", error)
    logging.shutdown()
    os._exit(0)


def _send(line: socket.socket, answers: Iterable[FromVllm]) -> None:
    payload = b"".join(frame(from_vllm.dump_json(answer)) for answer in answers)
    if payload:
        line.sendall(payload)


def main(argv: list[str]) -> int:
    """Parse and serve; 1 with a `Failed` to the worker where that fails."""
    parser = argparse.ArgumentParser(description="Sample with vLLM for an engine worker.")
    parser.add_argument("--line", type=int, required=True, metavar="DESCRIPTOR")
    parser.add_argument("--memory", type=int, required=True, metavar="DESCRIPTOR")
    arguments = parser.parse_args(argv)
    line = socket.socket(fileno=arguments.line)
    for descriptor in (arguments.line, arguments.memory):
        os.set_inheritable(descriptor, False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        serve(line, arguments.memory)
    except ImportError as error:
        reason = f"{sys.executable} can't run vLLM: {error}; name the interpreter of its environment in A3R_VLLM_PYTHON"
        _send(line, [Failed(reason)])
    except Exception as error:
        log.exception("the vLLM process ends")
        _send(line, [Failed(f"vLLM failed: {type(error).__name__}: {error}")])
    return 1
