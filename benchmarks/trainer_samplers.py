"""Tokens per CPU second: the embedded sampler beside transformers' `generate` in batch, and beside vLLM where it is.

A workload is waves of requests, each a prompt and the number of tokens to be sampled; the tokens that were asked for
are what counts. `generate` takes as many requests at a time as the workload says, padded on the left, and a batch lasts
as long as its longest reply. The sampler is given all requests at once and seats as many. A wave's prompts may go on
from the wave before: then the sampler goes on from its cache, and `generate` reads the whole prompt again, as it does
in TRL's tool loop.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from trajectories import ANSWER, OBSERVATION, PROMPT
from transformers import GenerationConfig

from swarm_engine.models.decoder import Decoder
from swarm_engine.protocol import Generate, Sampled
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.types import SamplingParams

SIZES = (1, 8, 32)
QUESTION, REPLY, SHORTEST, LONGEST = 64, 64, 8, 128
GROUP_SIZE, NUM_TURNS, SCALE = 8, 6, 0.25
OPENING, TURN_REPLY, TURN_RESULT = (round(SCALE * length) for length in (PROMPT, ANSWER, OBSERVATION))
"""Of an agent's turns: those of the set `react`, at the scale that merging.py has."""
BATCHES_OF_UNEVEN = 3
VLLM_PROGRAM = Path(__file__).with_name("vllm_tokens.py")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sampled."""

    name: str
    size: int
    """Requests at a time."""
    waves: tuple[tuple[tuple[tuple[int, ...], int], ...], ...]
    """Of each wave, its requests: what is appended to the place's history, and how many tokens to sample."""
    has_history: bool
    """Whether a request goes on from the prompt and reply of the same place in the wave before."""

    @property
    def num_tokens(self) -> int:
        """That are asked for."""
        return sum(count for wave in self.waves for _, count in wave)


def workloads(vocab_size: int, sizes: Sequence[int] = SIZES) -> list[Workload]:
    """All of them."""
    found = []
    for size in sizes:
        draw = random.Random(f"workload/{size}")

        def text(length: int, draw: random.Random = draw) -> tuple[int, ...]:
            return tuple(draw.randrange(3, vocab_size) for _ in range(length))

        even = tuple((text(QUESTION), REPLY) for _ in range(size))
        lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(BATCHES_OF_UNEVEN * size)]
        found.append(Workload(f"even, {size} at a time", size, (even,), has_history=False))
        uneven = tuple((text(QUESTION), length) for length in lengths)
        found.append(Workload(f"uneven, {size} at a time", size, (uneven,), has_history=False))
        if size % GROUP_SIZE == 0:
            openings = [text(OPENING) for _ in range(size // GROUP_SIZE)]
            first = tuple((openings[place // GROUP_SIZE], TURN_REPLY) for place in range(size))
            later = [tuple((text(TURN_RESULT), TURN_REPLY) for _ in range(size)) for _ in range(NUM_TURNS - 1)]
            found.append(Workload(f"{NUM_TURNS} turns, {size} at a time", size, (first, *later), has_history=True))
    return found


Sample = Callable[[Sequence[Sequence[int]], Sequence[int], int], list[list[int]]]
"""Replies to prompts, of these lengths, so many at a time."""


def play(workload: Workload, sample: Sample) -> float:
    """Sample a workload; returns its CPU seconds."""
    start = time.process_time()
    histories: list[tuple[int, ...]] = [()] * len(workload.waves[0])
    for wave in workload.waves:
        prompts = [(*history, *added) for history, (added, _) in zip(histories, wave, strict=True)]
        replies = sample(prompts, [count for _, count in wave], workload.size)
        assert [len(reply) for reply in replies] == [count for _, count in wave], "a reply has another length"
        if workload.has_history:
            histories = [(*prompt, *reply) for prompt, reply in zip(prompts, replies, strict=True)]
    return time.process_time() - start


class OwnSampler:
    """The slot sampler. Nothing ends a reply but its length."""

    def __init__(self, model: Decoder, max_running: int) -> None:
        self._model = model
        self._sampler = SlotSampler(model, (), max_running=max_running)
        self._num_asked = 0

    def forget(self) -> None:
        """Let no prompt of an earlier repetition be found in the cache."""
        self._num_asked += 1
        self._sampler.weights_changed(self._num_asked)

    def __call__(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], _size: int) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            self._num_asked += 1
            params = SamplingParams(length, seed=self._num_asked)
            assert not self._sampler.submit(Generate(str(place), "policy", tuple(prompt), params, is_streamed=False))
        while not self._sampler.is_idle:
            for reply in self._sampler.step():
                if isinstance(reply, Sampled):
                    found[reply.request_id] = list(reply.token_ids)
        return [found[str(place)] for place in range(len(prompts))]


class GenerateSampler:
    """transformers' `generate`, with its key/value cache and the settings that TRL gives it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # `generate` takes from here what its own config leaves out: nothing may end a reply but its length.
        model.generation_config.eos_token_id = None

    def __call__(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], size: int) -> list[list[int]]:
        replies: list[list[int]] = []
        for start in range(0, len(prompts), size):
            some, counts = prompts[start : start + size], lengths[start : start + size]
            width = max(map(len, some))
            tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in some])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some])
            config = GenerationConfig(
                max_new_tokens=max(counts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                eos_token_id=None,
                disable_compile=True,
            )
            with torch.no_grad():
                whole = self._model.generate(input_ids=tokens, attention_mask=mask, generation_config=config)
            replies += [row[:count] for row, count in zip(whole[:, width:].tolist(), counts, strict=True)]
        return replies


@dataclass(frozen=True, slots=True)
class VllmTimes:
    """What vLLM took."""

    version: str
    cpu_s: Mapping[str, Sequence[float]]
    """Of each repetition, by the workload's name."""


def measure_vllm(python: str, model: Path, todo: Sequence[Workload], num_repetitions: int) -> VllmTimes:
    """Sample every workload in vLLM, in processes of the interpreter that has it: one a size, for it seats as many."""
    version, cpu_s = "", dict[str, Sequence[float]]()
    for size in sorted({workload.size for workload in todo}):
        asked = {
            "model": str(model),
            "size": size,
            "num_repetitions": num_repetitions,
            "workloads": [asdict(workload) for workload in todo if workload.size == size],
        }
        command = [python, VLLM_PROGRAM]
        done = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        version = found["version"]
        cpu_s |= found["cpu_s"]
    return VllmTimes(version, cpu_s)
