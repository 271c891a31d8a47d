"""OpenAI's chat completions.

Beside OpenAI's own fields a message has `reasoning_content` where the model's template marks reasoning, and a request
may carry `script`. `max_completion_tokens` goes before the older `max_tokens`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm_engine.errors import BadRequestError, SwarmEngineError
from swarm_engine.server.dialects import asking, fields, writing
from swarm_engine.server.episodes import CallRequest, LiveEpisode, News, RunningAsk, RunningCall
from swarm_engine.tracker.answers import ReasoningDelta, TextDelta, ToolCallDelta
from swarm_engine.tracker.fields import Fields
from swarm_engine.tracker.messages import Message, parse_messages, parse_tools

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
SAID_BESIDE_CONTENT = ("tool_calls", "reasoning_content")

FIELDS = Fields(
    read=fields.SAMPLING
    | {
        "model", "messages", "temperature", "max_tokens", "max_completion_tokens", "stream", "stream_options",
        "logprobs", "top_logprobs", "stop", "seed", "n", "tools", "tool_choice", "parallel_tool_calls",
        "response_format", "script", "reasoning_effort",
    },
    labels=fields.OPENAI_LABELS,
    neutral={
        **fields.NEUTRAL,
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "verbosity": fields.VERBOSITIES,
    },
    presence=frozenset({"web_search_options"}),
    why=fields.WHY,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat-completion request."""

    model: str
    call: CallRequest
    is_stream: bool
    has_usage_event: bool
    has_logprobs: bool

    def whole(self, ask: RunningAsk) -> Mapping[str, Any]:
        """The reply with all its choices."""
        return {
            **writing.openai_head(ask, "chat.completion", int(time.time())),
            "choices": [self._choice(call) for call in ask.calls],
            "usage": writing.openai_usage(ask),
        }

    def _choice(self, call: RunningCall) -> dict[str, Any]:
        logprobs = None
        if self.has_logprobs:
            entries = writing.token_entries(call, range(len(call.generation.token_ids)))
            logprobs = {"content": entries, "refusal": None}
        return {
            "index": call.choice,
            "message": _message(call),
            "logprobs": logprobs,
            "finish_reason": writing.openai_finish(call),
        }

    def writer(self, ask: RunningAsk) -> ChatWriter:
        """Writes the reply chunk by chunk."""
        return ChatWriter(self, ask)


def _message(call: RunningCall) -> dict[str, Any]:
    answer = call.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": one.call_id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in answer.tool_calls
        ]
    return message


class ChatWriter:
    """Writes a reply as chunks: the role, then what comes in, then why it ended."""

    def __init__(self, request: ChatRequest, ask: RunningAsk) -> None:
        self._request = request
        self._ask = ask
        self._head = writing.openai_head(ask, "chat.completion.chunk", int(time.time()))

    def _chunk(
        self, call: RunningCall, delta: Mapping[str, Any], finish: str | None = None, entries: Any = None
    ) -> bytes:
        logprobs = {"content": entries, "refusal": None} if entries else None
        choice = {"index": call.choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return writing.event({**self._head, "choices": [choice]})

    def start(self) -> bytes:
        """The role of every choice."""
        return b"".join(self._chunk(call, {"role": "assistant", "content": ""}) for call in self._ask.calls)

    def more(self, call: RunningCall, news: News) -> bytes:
        """One chunk with everything that is new."""
        delta: dict[str, Any] = {}
        for piece in news.deltas:
            match piece:
                case TextDelta(text):
                    delta["content"] = delta.get("content", "") + text
                case ReasoningDelta(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case ToolCallDelta():
                    delta.setdefault("tool_calls", []).append(_call_delta(piece))
        entries = writing.token_entries(call, news.tokens) if self._request.has_logprobs else None
        return self._chunk(call, delta, entries=entries) if delta or entries else b""

    def finish(self, call: RunningCall) -> bytes:
        """Why a choice ended."""
        return self._chunk(call, {}, writing.openai_finish(call))

    def end(self) -> bytes:
        """The usage, where it was asked for, and the end of the stream."""
        return writing.openai_end(self._ask, self._head, has_usage=self._request.has_usage_event)

    def fail(self, error: SwarmEngineError) -> bytes:
        """The error, as the SDK raises it."""
        return writing.event(writing.openai_error(error))


def _call_delta(piece: ToolCallDelta) -> dict[str, Any]:
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}


def parse(request: Mapping[str, Any], episode: LiveEpisode) -> ChatRequest:
    """Read a request.

    Raises:
        BadRequestError: a field is malformed.
        UnsupportedError: a field or value that this server doesn't take.
    """
    raw = FIELDS.said(request)
    tools = parse_tools(raw.get("tools"))
    choice = asking.openai_tool_choice(raw.get("tool_choice"), tools)
    has_logprobs = fields.flag(raw, "logprobs")
    top_logprobs = fields.integer(raw, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if top_logprobs and not has_logprobs:
        raise BadRequestError("top_logprobs needs logprobs", "set logprobs to true", param="top_logprobs")
    return ChatRequest(
        model=fields.text(raw, "model") or "",
        call=CallRequest(
            messages=_messages(raw.get("messages")),
            max_tokens=fields.limit(raw, "max_completion_tokens", "max_tokens"),
            temperature=fields.temperature(raw),
            seed=fields.seed(raw),
            stop=fields.stops(raw),
            tools=tools,
            tool_choice=choice,
            is_single_call=not fields.flag(raw, "parallel_tool_calls", default=True),
            grammar=asking.answer_grammar(raw.get("response_format"), "response_format", choice, tools),
            num_choices=fields.integer(raw, "n", 1, MAX_CHOICES) or 1,
            top_logprobs=top_logprobs,
            effort=fields.effort(raw, "reasoning_effort", "reasoning_effort"),
            processors=fields.processors(raw, episode.mode),
            script=fields.script(raw),
        ),
        is_stream=fields.flag(raw, "stream"),
        has_usage_event=usage_event(raw),
        has_logprobs=has_logprobs,
    )


def _messages(raw: Any) -> tuple[Message, ...]:
    """The messages of a request: tool messages answer calls, calls are answered right behind them, the assistant's say
    something.
    """
    parsed = parse_messages(raw)
    calls = asking.ToolCalls()
    for index, message in enumerate(parsed, len(raw) - len(parsed)):
        where = f"messages[{index}]"
        if message["role"] == "tool":
            calls.answer(message.get("tool_call_id"), f"{where}.tool_call_id")
            continue
        calls.check_answered(f"before {where}")
        if raw[index].get("content") is None and not any(map(message.get, SAID_BESIDE_CONTENT)):
            raise BadRequestError(
                f"{where} is the assistant's, and it has neither content nor tool_calls",
                "send the message as it came; what says nothing has the content ''",
                param=f"{where}.content",
            )
        for place, call in enumerate(message.get("tool_calls", ())):
            calls.make(call["id"], f"{where}.tool_calls[{place}]")
    calls.check_answered("behind it")
    return parsed


def usage_event(raw: Mapping[str, Any]) -> bool:
    """Whether a stream ends with its token counts."""
    return fields.flag(fields.stream_options(raw, "include_usage", "include_obfuscation"), "include_usage")
