"""Asking a teacher how likely it finds what the policy sampled.

The teacher is an OpenAI-compatible server that answers completions with `prompt_logprobs`, as vLLM does. It is given
prompt and reply as token ids, so its tokenizer has to be the policy's. Its answers go into the journal with the batch:
they depend on another machine, and an update that is done again has to come out the same.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from swarm_engine.config import TeacherConfig
from swarm_engine.errors import TeacherError, shown
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.types import Call, Episode

KEY_VARIABLE = "A3R_TEACHER_API_KEY"
"""Holds the key, or a whole authorization such as `Basic dXNlcjpwYXNz`; unset sends none."""
PASSING = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses after which the same request may succeed."""
LOWEST_LOGPROB = -1e4
"""In nats. The log-softmax of a real model stays far above it, and sums of what lies above it stay finite; an answer
beyond it would be in the journal before the update that fails on it, and fail every start."""
BYTES_PER_TOKEN = 4096
"""Most that an answer may hold for each token asked about; vLLM writes about a hundred, and a long word more."""
BYTES_BESIDE = 1 << 20
"""Most that it may hold beside them."""

PROBE = "The quick brown fox jumps over 13 lazy dogs.\n"
"""What a teacher is asked about first, so that a wrong URL or tokenizer is told before anything is sampled."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a teacher is waited for."""

    timeout_s: float = 120.0
    """For one answer, from the request to its last byte; a large teacher may have a queue. What took longer is not
    asked again: the teacher would begin anew, at the end of that queue."""
    pauses_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 24.0)
    """Before each new attempt at a request that failed for want of the server, not for what was asked."""
    again_s: float = 60.0
    """No attempt but the first begins later than this, however slowly the others failed."""


class Teacher:
    """One teacher. Connections are opened for a batch and closed after it."""

    def __init__(self, config: TeacherConfig, patience: Patience | None = None, authorization: str = "") -> None:
        """Open nothing yet.

        Args:
            authorization: is sent where the environment has no key.
        """
        self._config = config
        self._patience = patience or Patience()
        self._key = os.environ.get(KEY_VARIABLE, "").strip() or authorization
        # As it is: a little of what is compressed may be a lot.
        self._headers = {"accept-encoding": "identity"}
        if self._key:
            self._headers["authorization"] = self._key if " " in self._key else f"Bearer {self._key}"

    async def probe(self, codec: ChatCodec) -> None:
        """See that it answers, and that its tokens are those of the policy where it says what they are.

        Raises:
            TeacherError: it doesn't, or has another tokenizer.
        """
        tokens = codec.encode_text(PROBE)
        async with self._connect() as http:
            answer = await self._ask(http, tokens)
        read_logprobs(answer, tokens, 1)
        entries = answer["choices"][0]["prompt_logprobs"]
        for token, entry in zip(tokens[1:], entries[1:], strict=True):
            theirs, ours = entry[str(token)].get("decoded_token"), codec.decode([token])
            if theirs is not None and (not isinstance(theirs, str) or theirs.strip() != ours.strip()):
                raise TeacherError(
                    f"the teacher reads token {token} as {shown(theirs)}, the policy as {shown(ours)}",
                    "distillation by token needs a teacher with the policy's tokenizer",
                )

    async def judge(self, episodes: Sequence[Episode]) -> dict[str, tuple[float, ...]]:
        """Log-probabilities in nats of every trained reply's tokens, by call id.

        Raises:
            TeacherError: it can't be reached, refuses, or answers something else.
        """
        calls = [
            call
            for episode in episodes
            for call in episode.calls
            if call.untrained_because is None and call.completion_ids
        ]
        places = asyncio.Semaphore(self._config.max_running)
        async with self._connect() as http:

            async def judge_call(call: Call) -> tuple[float, ...]:
                tokens = call.prompt_ids + call.completion_ids
                async with places:
                    answer = await self._ask(http, tokens)
                return read_logprobs(answer, tokens, len(call.prompt_ids))

            try:
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(judge_call(call)) for call in calls]
            except* TeacherError as errors:
                raise errors.exceptions[0] from None  # one is enough: all were asked of the same server
        return {call.call_id: one.result() for call, one in zip(calls, asked, strict=True)}

    def _connect(self) -> httpx.AsyncClient:
        try:
            return httpx.AsyncClient(
                base_url=self._config.base_url.rstrip("/") + "/",
                headers=self._headers,
                timeout=None,  # httpx's is for one read, and a byte now and then keeps within it for ever
                limits=httpx.Limits(max_connections=self._config.max_running),
            )
        except httpx.InvalidURL as error:
            raise TeacherError(
                f"teacher.base_url {self._config.base_url!r} is no URL: {error}",
                "it goes like http://localhost:8000/v1",
            ) from None

    async def _ask(self, http: httpx.AsyncClient, tokens: Sequence[int]) -> Any:
        """Its answer about some tokens."""
        where = f"the teacher at {self._config.base_url}"
        body = {"model": self._config.model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        clock, patience = asyncio.get_running_loop().time, self._patience
        last_start = clock() + patience.again_s
        max_bytes = BYTES_BESIDE + BYTES_PER_TOKEN * len(tokens)
        for pause_s in (*patience.pauses_s, math.inf):
            try:
                async with asyncio.timeout(patience.timeout_s):
                    answer = await _post(http, body, max_bytes)
            except TimeoutError:
                raise TeacherError(
                    f"{where} has not answered about {len(tokens)} tokens within {patience.timeout_s:g} s",
                    "see that it is not stuck, or lower teacher.max_running; then start the engine again: completed "
                    "episodes are in the journal",
                ) from None
            except httpx.HTTPError as error:
                problem = f"{where} can't be reached: {error or type(error).__name__}"
            else:
                if answer.status in range(200, 300):
                    if len(answer.body) > max_bytes:
                        raise TeacherError(
                            f"{where} answers more than {max_bytes} bytes about {len(tokens)} tokens",
                            "see that teacher.base_url leads to a server that answers completions as vLLM does",
                        )
                    return _json(answer.body)
                said = answer.body.decode(errors="replace")
                for part in self._key.split():
                    said = said.replace(part, "***")
                problem = f"{where} answers {answer.status}: {shown(said)}"
                if answer.status not in PASSING:
                    raise TeacherError(problem, "see that teacher.model is served there and takes prompts of token ids")
            if clock() + pause_s > last_start:
                break
            await asyncio.sleep(pause_s)
        raise TeacherError(problem, "start it, then the engine again: completed episodes are in the journal")


def with_teacher(episode: Episode, taught: Mapping[str, tuple[float, ...]]) -> Episode:
    """An episode with what the teacher said of its calls."""
    if not taught:
        return episode
    calls = tuple(replace(call, teacher_logprobs=taught.get(call.call_id)) for call in episode.calls)
    return replace(episode, calls=calls)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered."""

    status: int
    body: bytes
    """Of one that is longer than it may be the beginning, a little longer than it may be."""


async def _post(http: httpx.AsyncClient, body: Mapping[str, Any], max_bytes: int) -> Answer:
    found = bytearray()
    async with http.stream("POST", "completions", json=body) as response:
        async for part in response.aiter_raw():
            found += part
            if len(found) > max_bytes:
                break
    return Answer(response.status_code, bytes(found))


def _json(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None  # which no reader takes for an answer


def read_logprobs(answer: Any, tokens: Sequence[int], start: int) -> tuple[float, ...]:
    """What a teacher's answer says of the tokens from `start` on, in nats.

    Raises:
        TeacherError: it doesn't say it.
    """
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        found = tuple(
            float(entry[str(token)]["logprob"]) for entry, token in zip(entries[start:], tokens[start:], strict=True)
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise TeacherError(
            f"the teacher's answer has no prompt_logprobs for every token ({type(error).__name__}: {error})",
            "it has to be served by vLLM, or by a server that answers completions as vLLM does",
        ) from error
    for token, logprob in zip(tokens[start:], found, strict=True):
        if not LOWEST_LOGPROB <= logprob <= 0:  # nor is what is not a number
            raise TeacherError(
                f"the teacher says that token {token} has a log-probability of {logprob:g} nats, and they go from "
                f"{LOWEST_LOGPROB:g} to 0",
                "look at its log",
            )
    return found
