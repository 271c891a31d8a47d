"""The embedded sampler: requests run side by side in slots, on the trainer's own weights.

A step starts waiting requests (their prompts in one padded batch, less what the cache already holds) and then samples
the next token of all that run. Requests therefore join and leave at any step, and none waits for another to end.

`lockstep` gives up the company: one request at a time, no prefix taken over, so that every shape and every number of a
request depends on the request and the weights alone.

The scripted backend is the same machine with the token forced instead of drawn: its log-probabilities are the model's.

A request with a grammar has the tokens that its grammar rules out taken from its own row of the logits, before anything
is drawn; the rows beside it hold the same numbers as without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from swarm_engine.config import SamplerBackend
from swarm_engine.errors import BadRequestError
from swarm_engine.models.decoder import Decoder
from swarm_engine.protocol import Finished, Generate, Rejected, Sampled
from swarm_engine.sampler import Reply
from swarm_engine.sampler.cache import KeyValueCache
from swarm_engine.sampler.grammar import Constraint, Grammars
from swarm_engine.sampler.requests import refusal_of
from swarm_engine.sampler.sampling import choose, likeliest, process, uniforms
from swarm_engine.types import FinishReason

PREFILL_TOKENS = 2048
"""Prompt tokens, padding included, computed at once; more than this falls out of the CPU's cache."""

WORTH_WAITING = 16
"""A prompt waits for another that is being computed if that saves it this many tokens."""


@dataclass(slots=True, eq=False)
class Running:
    """A request in a slot."""

    request: Generate
    slot: int
    max_tokens: int
    """What the request asked for, or the rest of the context."""
    constraint: Constraint | None
    """Where the reply is in the request's grammar; None where it has none."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """As long as `token_ids` where the request asked for likely tokens, empty otherwise."""
    num_sent: int = 0
    """Tokens already reported."""

    def report(self, version: int) -> list[Reply]:
        """The tokens not reported yet, all sampled by the weights of `version`."""
        if self.num_sent == len(self.token_ids):
            return []
        tokens, logprobs = tuple(self.token_ids[self.num_sent :]), tuple(self.logprobs[self.num_sent :])
        top = tuple(self.top[self.num_sent :]) if self.request.params.top_logprobs else None
        self.num_sent = len(self.token_ids)
        return [Sampled(self.request.request_id, tokens, logprobs, version, top)]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A stretch of a slot's context whose keys and values are to be computed."""

    slot: int
    start: int
    end: int


class SlotSampler:
    """Samples from `model`; see `swarm_engine.sampler.Sampler`."""

    def __init__(
        self,
        model: Decoder,
        end_ids: Sequence[int],
        *,
        backend: SamplerBackend = SamplerBackend.TORCH,
        max_running: int = 64,
        is_lockstep: bool = False,
        version: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        self.num_prefilled = 0
        """Prompt tokens computed since the start, those taken from the cache not counted."""
        self._model = model
        self._end_ids = frozenset(end_ids)
        self._backend = backend
        self._is_lockstep = is_lockstep
        self._grammars = grammars
        self._max_context = model.config.max_context
        num_slots = 1 if is_lockstep else max_running
        self._cache = KeyValueCache(
            model.config, num_slots, keeps_prefixes=not is_lockstep, like=model.embedding, version=version
        )
        self._waiting: deque[Generate] = deque()
        self._running: dict[int, Running] = {}
        """By slot."""
        self._temperatures_S = np.zeros(num_slots, np.float32)
        self._seeds_S = np.zeros(num_slots, np.uint64)
        self._last_S = np.zeros(num_slots, np.int64)
        """The newest token of each slot: sampled, its keys and values not computed yet."""

    @property
    def is_idle(self) -> bool:
        """No request waits or runs."""
        return not self._waiting and not self._running

    def submit(self, request: Generate) -> list[Reply]:
        """Take a request; one that can't be served is rejected with what it gave, the limit and the way out."""
        refusal = refusal_of(request, self._model.config.vocab_size, self._max_context)
        if refusal is not None:
            return [refusal]
        problem = self._problem(request)
        if problem is not None:
            return [Rejected(request.request_id, problem)]
        self._waiting.append(request)
        return []

    def cancel(self, request_id: str) -> list[Reply]:
        """Stop a request; nothing where it has ended or was never here."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return [Finished(request_id, FinishReason.CANCELLED)]
        for running in self._running.values():
            if running.request.request_id == request_id:
                return self._end(running, FinishReason.CANCELLED)
        return []

    @torch.no_grad()
    def step(self) -> list[Reply]:
        """Start what waits, then sample the next token of everything that runs."""
        replies = self._start_waiting()
        if self._running:
            replies += self._decode()
        return replies

    @torch.no_grad()
    def weights_changed(self, version: int) -> list[Reply]:
        """Forget every prefix; what runs now is computed again, so that it goes on under the new weights alone."""
        replies = [reply for running in self._running.values() for reply in running.report(self._cache.version)]
        stretches = [Prefill(slot, 0, int(self._cache.lengths_R[slot])) for slot in self._running]
        self._cache.version = version
        self._prefill(stretches)
        return replies

    def close(self) -> None:
        """Nothing runs outside this process."""

    def _problem(self, request: Generate) -> str | None:
        """Why a request can't be served by this backend; None where it can."""
        if self._backend is SamplerBackend.SCRIPTED and not request.script:
            return "the scripted sampler got no script to play; give one, or set sampler.backend to 'torch'"
        if self._backend is not SamplerBackend.SCRIPTED and request.script is not None:
            return f"a script was given to the {self._backend} sampler; set sampler.backend to 'scripted'"
        if request.grammar is None:
            return None
        if self._grammars is None:
            return "this sampler takes no grammar; make it with the policy's tokenizer"
        try:
            self._grammars.check(request.grammar)
        except BadRequestError as error:
            return str(error)
        return None

    def _constrain(self, request: Generate) -> Constraint | None:
        """The start of the request's grammar; None where it has none."""
        if request.grammar is None:
            return None
        assert self._grammars is not None, "the request was refused without"
        return self._grammars.start(request.grammar)

    def _start_waiting(self) -> list[Reply]:
        """Give slots to waiting requests, in waves: who shares a prompt with one of this wave takes it over in the
        next, so that a group of equal prompts is computed once."""
        replies: list[Reply] = []
        while self._waiting and self._cache.num_free:
            wave: list[Prefill] = []
            later: list[Generate] = []
            while self._waiting and self._cache.num_free:
                request = self._waiting.popleft()
                prompt_T = np.array(request.prompt_ids, np.int64)
                match = self._cache.match(prompt_T)
                if match.num_promised - match.num_shared >= WORTH_WAITING:
                    later.append(request)
                    continue
                slot = self._cache.claim(prompt_T, match)
                self._seat(request, slot)
                wave.append(Prefill(slot, match.num_shared, len(prompt_T)))
            self._waiting.extendleft(reversed(later))
            replies += self._sample_first(wave)
        return replies

    def _seat(self, request: Generate, slot: int) -> None:
        params = request.params
        most = min(params.max_tokens, self._max_context - len(request.prompt_ids))
        self._running[slot] = Running(request, slot, most, self._constrain(request))
        self._temperatures_S[slot] = params.temperature
        self._seeds_S[slot] = params.seed & 0xFFFF_FFFF_FFFF_FFFF

    def _sample_first(self, wave: list[Prefill]) -> list[Reply]:
        """Compute prompts and sample the first token of each reply."""
        replies: list[Reply] = []
        for slots_B, hidden_B_C in self._prefill(wave):
            replies += self._sample(slots_B, hidden_B_C)
        return replies

    def _prefill(self, stretches: list[Prefill]) -> list[tuple[NDArray[np.int64], Tensor]]:
        """Compute keys and values; return, by batch, the slots and the hidden state of each stretch's last token."""
        results: list[tuple[NDArray[np.int64], Tensor]] = []
        left = sorted(stretches, key=lambda stretch: (stretch.end - stretch.start, stretch.slot))
        while left:
            batch = [left.pop()]
            longest = batch[0].end - batch[0].start
            while left and longest * (len(batch) + 1) <= PREFILL_TOKENS:
                batch.append(left.pop())
            slots_B = np.array([stretch.slot for stretch in batch])
            results.append((slots_B, self._prefill_batch(batch, slots_B, longest)))
            for stretch in batch:
                self._cache.fill(stretch.slot, stretch.end)
                self.num_prefilled += stretch.end - stretch.start
        return results

    def _prefill_batch(self, batch: list[Prefill], slots_B: NDArray[np.int64], longest: int) -> Tensor:
        cache = self._cache
        starts_B = np.array([stretch.start for stretch in batch])
        counts_B = np.array([stretch.end - stretch.start for stretch in batch])
        steps_T = np.arange(longest)
        positions_B_T = starts_B[:, None] + np.minimum(steps_T, counts_B[:, None] - 1)
        tokens_B_T = self._there(cache.tokens_R_T[slots_B[:, None], positions_B_T])
        # Padding repeats a row's last token, and writes what it computes where no context reads.
        targets_B_T = self._there(np.where(steps_T < counts_B[:, None], positions_B_T, cache.scratch))
        rows_B = self._there(slots_B)
        span = int((starts_B + counts_B).max())
        is_fresh = not starts_B.any()
        is_seen_B_1_T_S = self._there(np.arange(span) <= positions_B_T[:, None, :, None])
        keys_L_R_K_T_D, values_L_R_K_T_D = cache.kv_2_L_R_K_T_D
        is_grouped = self._model.config.num_heads != self._model.config.num_kv_heads

        def attend(layer: int, q_B_H_T_D: Tensor, k_B_K_T_D: Tensor, v_B_K_T_D: Tensor) -> Tensor:
            keys, values = keys_L_R_K_T_D[layer], values_L_R_K_T_D[layer]
            keys[rows_B[:, None], :, targets_B_T] = k_B_K_T_D.transpose(1, 2)
            values[rows_B[:, None], :, targets_B_T] = v_B_K_T_D.transpose(1, 2)
            if is_fresh:
                return functional.scaled_dot_product_attention(
                    q_B_H_T_D, k_B_K_T_D, v_B_K_T_D, is_causal=True, enable_gqa=is_grouped
                )
            return functional.scaled_dot_product_attention(
                q_B_H_T_D,
                keys[:, :, :span].index_select(0, rows_B),
                values[:, :, :span].index_select(0, rows_B),
                attn_mask=is_seen_B_1_T_S,
                enable_gqa=is_grouped,
            )

        hidden_B_T_C = self._model.hidden(tokens_B_T, self._there(positions_B_T), attend)
        return hidden_B_T_C[self._there(np.arange(len(batch))), self._there(counts_B - 1)]

    def _decode(self) -> list[Reply]:
        """Feed the newest token of every running slot and sample the one after it."""
        cache = self._cache
        slots_B = np.array(sorted(self._running))
        cache.reserve(int(cache.lengths_R[slots_B].max()) + 1)
        span = int(cache.lengths_R[slots_B].max()) + 1
        config = self._model.config
        highest = int(slots_B[-1]) + 1
        # Rows of a view cost nothing to reach but all are computed; picked rows are copied first.
        rows_R = np.arange(highest) if 2 * len(slots_B) > highest else slots_B
        is_view = len(rows_R) == highest
        at_R = np.full(len(rows_R), cache.scratch)
        positions_R = np.zeros(len(rows_R), np.int64)
        here_B = slots_B if is_view else np.arange(len(slots_B))
        at_R[here_B] = positions_R[here_B] = cache.lengths_R[slots_B]
        tokens_R_1 = self._there(self._last_S[rows_R])[:, None]
        rows, at = self._there(rows_R), self._there(at_R)
        is_seen_R_1_1_S = self._there(np.arange(span) <= positions_R[:, None, None, None])
        keys_L_R_K_T_D, values_L_R_K_T_D = cache.kv_2_L_R_K_T_D
        shape = (len(rows_R), config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)

        def attend(layer: int, q_R_H_1_D: Tensor, k_R_K_1_D: Tensor, v_R_K_1_D: Tensor) -> Tensor:
            keys, values = keys_L_R_K_T_D[layer], values_L_R_K_T_D[layer]
            keys[rows, :, at] = k_R_K_1_D.squeeze(2)
            values[rows, :, at] = v_R_K_1_D.squeeze(2)
            keys, values = keys[:, :, :span], values[:, :, :span]
            if is_view:
                keys, values = keys[:highest], values[:highest]
            else:
                keys, values = keys.index_select(0, rows), values.index_select(0, rows)
            # The query heads of one key head stand where the positions would: each sees the whole context.
            out = functional.scaled_dot_product_attention(
                q_R_H_1_D.reshape(shape), keys, values, attn_mask=is_seen_R_1_1_S
            )
            return out.reshape(q_R_H_1_D.shape)

        hidden_R_1_C = self._model.hidden(tokens_R_1, self._there(positions_R)[:, None], attend)
        cache.append(slots_B, self._last_S[slots_B])
        hidden_B_C = hidden_R_1_C[:, 0]
        return self._sample(slots_B, hidden_B_C if len(here_B) == len(rows_R) else hidden_B_C[self._there(here_B)])

    def _sample(self, slots_B: NDArray[np.int64], hidden_B_C: Tensor) -> list[Reply]:
        """Choose the next token of each slot from its hidden state, and end the requests that are complete."""
        requests = [self._running[slot] for slot in slots_B.tolist()]
        counts_B = np.array([len(running.token_ids) for running in requests])
        forced_B = None
        if self._backend is SamplerBackend.SCRIPTED:
            scripts = [running.request.script or () for running in requests]
            forced_B = self._there(np.array([script[count] for script, count in zip(scripts, counts_B, strict=True)]))
        logits_B_V = self._model.logits(hidden_B_C)
        problems = _rule_out(requests, logits_B_V)
        logits_B_V = _process(requests, logits_B_V)
        tokens_B, logprobs_B, logprobs_B_V = choose(
            logits_B_V,
            self._there(self._temperatures_S[slots_B]),
            self._there(uniforms(self._seeds_S[slots_B], counts_B)),
            forced_B,
        )
        tokens_B, logprobs_B = tokens_B.cpu(), logprobs_B.cpu()
        self._last_S[slots_B] = tokens_B.numpy()
        replies: list[Reply] = []
        chosen = zip(requests, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        for place, (running, token, logprob) in enumerate(chosen):
            problem = problems.get(place) or _problem_of(running, token, logprob)
            if problem is not None:
                self._free(running)
                replies.append(Rejected(running.request.request_id, problem))
                continue
            running.token_ids.append(token)
            running.logprobs.append(logprob)
            if running.request.params.top_logprobs:
                running.top.append(likeliest(logprobs_B_V[place], running.request.params.top_logprobs))
            ended = self._ended(running, token)
            if running.constraint is not None and token not in self._end_ids:
                running.constraint.take(token)
                problem = _problem_at_end(running.constraint) if ended is FinishReason.STOP else None
                if problem is not None:
                    self._free(running)
                    replies.append(Rejected(running.request.request_id, problem))
                    continue
                if ended is None:
                    running.constraint.prepare()
            if ended is not None:
                replies += self._end(running, ended)
            elif running.request.is_streamed:
                replies += running.report(self._cache.version)
        return replies

    def _there(self, array: NDArray[Any]) -> Tensor:
        """An array where the model is."""
        return torch.from_numpy(array).to(self._model.device)

    def _ended(self, running: Running, token: int) -> FinishReason | None:
        if token in self._end_ids:
            return FinishReason.STOP
        if len(running.token_ids) >= running.max_tokens:
            return FinishReason.LENGTH
        if running.request.script is not None and len(running.token_ids) == len(running.request.script):
            return FinishReason.STOP
        return None

    def _end(self, running: Running, reason: FinishReason) -> list[Reply]:
        self._free(running)
        return [*running.report(self._cache.version), Finished(running.request.request_id, reason)]

    def _free(self, running: Running) -> None:
        del self._running[running.slot]
        if running.constraint is not None:
            running.constraint.close()
        self._cache.release(running.slot)


def _rule_out(requests: Sequence[Running], logits_B_V: Tensor) -> dict[int, str]:
    """Put minus infinity where a request's grammar allows no token; what can't go on comes back by place in the batch,
    with the reason. Rows without a grammar are not touched."""
    problems: dict[int, str] = {}
    for place, running in enumerate(requests):
        if running.constraint is None:
            continue
        try:
            is_allowed_V = running.constraint.allowed()
            if running.request.script is not None:
                token = running.request.script[len(running.token_ids)]
                is_allowed_V[token] = is_allowed_V[token] or running.constraint.takes(token)
        except BadRequestError as error:
            problems[place] = str(error)
            continue
        logits_B_V[place].masked_fill_(torch.from_numpy(~is_allowed_V).to(logits_B_V.device), float("-inf"))
    return problems


def _process(requests: Sequence[Running], logits_B_V: Tensor) -> Tensor:
    """The logits after the processors of each request; rows without any hold the same numbers as before."""
    if all(running.request.params.processors is None for running in requests):
        return logits_B_V
    logits_B_V = logits_B_V.float()
    for place, running in enumerate(requests):
        params = running.request.params
        if params.processors is not None:
            logits_B_V[place] = process(
                logits_B_V[place],
                params.processors,
                params.temperature,
                running.request.prompt_ids,
                running.token_ids,
            )
    return logits_B_V


def _problem_at_end(constraint: Constraint) -> str | None:
    """Why a script can't end here; None where it can."""
    try:
        if constraint.is_complete():
            return None
    except BadRequestError as error:
        return str(error)
    return "the script ends before the grammar is complete; play one that fits it"


def _problem_of(running: Running, token: int, logprob: float) -> str | None:
    """Why a token can't be taken; None where it can."""
    if logprob == logprob and logprob != float("-inf"):
        return None
    if running.request.script is not None and logprob == float("-inf"):
        place, ruled_out = len(running.token_ids), "the grammar" if running.constraint is not None else None
        if running.request.params.processors is not None:
            ruled_out = "min_p, top_k or top_p" if ruled_out is None else f"{ruled_out}, min_p, top_k or top_p"
        if ruled_out is not None:
            return (
                f"token {token}, number {place} of the script, is not allowed there by {ruled_out}; play one that fits"
            )
    return f"the log-probability of token {token} is {logprob}; the policy's weights are broken"
