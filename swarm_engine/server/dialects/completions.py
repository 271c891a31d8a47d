"""OpenAI's completions: a prompt as text or token ids, past the chat template.

Ids are what the model runs on, unchanged. In a text nothing is a control token. One request has one prompt; where it
sets no limit, the server's own holds (`sampler.max_tokens`), and not 16 tokens as OpenAI's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm_engine.errors import BadRequestError, SwarmEngineError, UnsupportedError, shown
from swarm_engine.server.dialects import chat, fields, writing
from swarm_engine.server.episodes import CallRequest, LiveEpisode, News, RunningAsk, RunningCall
from swarm_engine.tracker.answers import TextDelta
from swarm_engine.tracker.fields import Fields
from swarm_engine.types import FinishReason

MAX_LOGPROBS = 20

FIELDS = Fields(
    read=fields.SAMPLING
    | {
        "model", "prompt", "temperature", "max_tokens", "stream", "stream_options", "logprobs", "stop", "seed", "n",
        "best_of", "script",
    },
    labels=fields.OPENAI_LABELS,
    neutral=fields.NEUTRAL,
    why=fields.WHY,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion request."""

    model: str
    call: CallRequest
    is_stream: bool
    has_usage_event: bool
    has_logprobs: bool

    def whole(self, ask: RunningAsk) -> Mapping[str, Any]:
        """The reply with all its choices."""
        choices = []
        for call in ask.calls:
            tokens = range(len(call.generation.token_ids))
            logprobs = token_lists(call, tokens) if self.has_logprobs else None
            choices.append(_choice(call, call.answer.content, logprobs, _finish(call)))
        head = writing.openai_head(ask, "text_completion", int(time.time()))
        return {**head, "choices": choices, "usage": writing.openai_usage(ask)}

    def writer(self, ask: RunningAsk) -> CompletionWriter:
        """Writes the reply chunk by chunk."""
        return CompletionWriter(self, ask)


def _choice(call: RunningCall, text: str, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": call.choice, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _finish(call: RunningCall) -> str:
    return "length" if call.finish_reason is FinishReason.LENGTH else "stop"


class CompletionWriter:
    """Writes a reply as chunks of text."""

    def __init__(self, request: CompletionRequest, ask: RunningAsk) -> None:
        self._request = request
        self._ask = ask
        self._head = writing.openai_head(ask, "text_completion", int(time.time()))

    def start(self) -> bytes:
        """Nothing: the first chunk has the first text."""
        return b""

    def more(self, call: RunningCall, news: News) -> bytes:
        """One chunk with the new text."""
        text = "".join(delta.text for delta in news.deltas if isinstance(delta, TextDelta))
        logprobs = None
        if self._request.has_logprobs and news.tokens:
            logprobs = token_lists(call, news.tokens)
        if not text and logprobs is None:
            return b""
        return writing.event({**self._head, "choices": [_choice(call, text, logprobs)]})

    def finish(self, call: RunningCall) -> bytes:
        """Why a choice ended."""
        return writing.event({**self._head, "choices": [_choice(call, "", finish=_finish(call))]})

    def end(self) -> bytes:
        """The usage, where it was asked for, and the end of the stream."""
        return writing.openai_end(self._ask, self._head, has_usage=self._request.has_usage_event)

    def fail(self, error: SwarmEngineError) -> bytes:
        """The error, as the SDK raises it."""
        return writing.event(writing.openai_error(error))


def token_lists(call: RunningCall, tokens: range) -> dict[str, Any]:
    """Log-probabilities as this API writes them: a list for each thing that is known of a token.

    `text_offset` is where a token begins in the text of the whole reply. A token that is part of a character alone
    begins where that character does, though `tokens` shows its bytes.
    """
    entries = writing.token_entries(call, tokens)
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in entries],
        "text_offset": call.reply.starts(tokens),
    }


def parse(request: Mapping[str, Any], episode: LiveEpisode) -> CompletionRequest:
    """Read a request.

    Raises:
        BadRequestError: a field is malformed.
        UnsupportedError: a field or value that this server doesn't take.
    """
    raw = FIELDS.said(request)
    num_choices = fields.integer(raw, "n", 1, chat.MAX_CHOICES) or 1
    if raw.get("best_of") not in (None, num_choices):
        raise UnsupportedError(f"best_of={shown(raw['best_of'])} is not n", fields.WHY["best_of"], param="best_of")
    logprobs = fields.integer(raw, "logprobs", 0, MAX_LOGPROBS)
    return CompletionRequest(
        model=fields.text(raw, "model") or "",
        call=CallRequest(
            messages=(),
            raw_prompt=_prompt(raw.get("prompt")),
            max_tokens=fields.limit(raw, "max_tokens"),
            temperature=fields.temperature(raw),
            seed=fields.seed(raw),
            stop=fields.stops(raw),
            num_choices=num_choices,
            top_logprobs=logprobs or 0,
            processors=fields.processors(raw, episode.mode),
            script=fields.script(raw),
        ),
        is_stream=fields.flag(raw, "stream"),
        has_usage_event=chat.usage_event(raw),
        has_logprobs=logprobs is not None,
    )


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise UnsupportedError(
                f"prompt holds {len(value)} prompts", "send one request a prompt; they run side by side", param="prompt"
            )
        value = value[0]
    if not value or not isinstance(value, str | list):
        raise BadRequestError("prompt must be a text or a list of token ids, and not empty", param="prompt")
    return value if isinstance(value, str) else fields.token_ids(value, "prompt")
