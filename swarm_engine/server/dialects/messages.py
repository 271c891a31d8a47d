"""Anthropic's messages, and the count of a request's tokens.

Blocks of a user's turn become messages for the chat template: tool results come first, right behind the calls they
answer, then the text. A system prompt of several blocks is joined with line breaks.

A tool's input is an object here, whatever the model wrote. Arguments that are none come as `{"INVALID_JSON": text}`,
the form that Anthropic's own documentation gives them, and such an input in a history is that text again. While a call
is sampled its input is held back until it is complete, for the SDK raises on input that is no JSON; a tool with
`eager_input_streaming` gets it token by token as sampled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swarm_engine.errors import BadRequestError, SwarmEngineError, UnsupportedError, shown
from swarm_engine.server.dialects import asking, fields, writing
from swarm_engine.server.episodes import (
    Auto,
    CallRequest,
    Effort,
    LiveEpisode,
    News,
    NoTools,
    RunningAsk,
    RunningCall,
    ToolChoice,
)
from swarm_engine.tracker.answers import Delta, ReasoningDelta, TextDelta
from swarm_engine.tracker.fields import Fields, is_empty
from swarm_engine.tracker.messages import (
    TOOL_LABELS,
    TOOL_NEUTRAL,
    Message,
    Tool,
    parse_messages,
    parse_tools,
    read_arguments,
    read_object,
    read_text,
)
from swarm_engine.types import FinishReason

INVALID = "INVALID_JSON"
"""The only key of an input that stands for arguments that are no object."""
SYSTEM_SEPARATOR = "\n"

COUNTED = frozenset({"model", "messages", "system", "tools", "tool_choice", "output_config", "thinking"})
LABELS = frozenset(
    {"metadata", "cache_control", "service_tier", "inference_geo", "user_profile_id", "workspace_id", "diagnostics"}
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **fields.NEUTRAL,
    "speed": ("standard",),
    "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},),
}
WHY = {
    **fields.WHY,
    "context_management": "edit the messages yourself (Claude Code: CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1)",
}
FIELDS = Fields(
    COUNTED | fields.SAMPLING | {"max_tokens", "temperature", "stop_sequences", "stream", "seed", "script"},
    LABELS,
    NEUTRAL,
    why=WHY,
)
COUNT_FIELDS = Fields(COUNTED, LABELS | fields.SAMPLING, NEUTRAL, why=WHY)
MESSAGE = Fields(frozenset({"role", "content"}), kept=frozenset({"content"}))
BLOCK_LABELS = frozenset({"cache_control", "index"})


def _block(names: Collection[str], labels: Collection[str] = ()) -> Fields:
    read = frozenset({"type", *names})
    return Fields(read, BLOCK_LABELS.union(labels), kept=read)


BLOCKS = {
    "text": _block({"text"}, {"citations"}),
    "thinking": _block({"thinking"}, {"signature"}),
    "tool_use": _block({"id", "name", "input"}, {"caller"}),
    "tool_result": _block({"tool_use_id", "content", "is_error"}),
}
"""Of a block, by type."""
TOOL = Fields(
    frozenset({"type", "name", "description", "input_schema", "strict", "eager_input_streaming"}),
    TOOL_LABELS,
    TOOL_NEUTRAL,
    kept=frozenset({"name", "input_schema"}),
)
CHOICE = Fields(frozenset({"type", "name", "disable_parallel_tool_use"}))
THINKING = Fields(frozenset({"type"}), frozenset({"display"}), why={"budget_tokens": fields.WHY["thinking"]})
OUTPUT = Fields(frozenset({"format", "effort"}))

THREAD = "thread_unsupported_request"
ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_body(error: SwarmEngineError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = ERROR_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": kind, "message": str(error)}
    details = {"details": {"error_code": error.code, "unsupported": []}} if error.code == THREAD else {}
    return {"type": "error", "error": body | details}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request for a message."""

    model: str
    call: CallRequest
    is_stream: bool
    eager_tools: frozenset[str]
    """Names of the tools whose input is streamed as sampled."""

    def whole(self, ask: RunningAsk) -> Mapping[str, Any]:
        """The message with all its blocks."""
        blocks = Blocks(self, ask)
        (call,) = ask.calls
        for _ in (*blocks.take(call.news()), *blocks.close()):
            pass
        return blocks.message(call)

    def writer(self, ask: RunningAsk) -> MessagesWriter:
        """Writes the message event by event."""
        return MessagesWriter(self, ask)


Event = dict[str, Any]


class Blocks:
    """The content of a message while it grows, and the events that tell of it.

    A whole message is what its events add up to, so the two can't differ.
    """

    def __init__(self, request: MessagesRequest, ask: RunningAsk) -> None:
        self._request = request
        self._ask = ask
        self._content: list[dict[str, Any]] = []
        self._kind: writing.PieceKind | None = None
        """Of the pieces that the open block takes; None where none is open."""
        self._parts: list[str] = []
        """Text of the open block."""

    def message(self, call: RunningCall | None = None) -> Event:
        """The message as it is now; with its call where that is recorded."""
        reason, stop = _stop_reason(call) if call is not None else (None, None)
        return {
            "id": f"msg_{self._ask.call_id}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.policy,
            "content": self._content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self.usage(call),
        }

    def usage(self, call: RunningCall | None) -> Event:
        """Token counts."""
        return {
            "input_tokens": self._ask.num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": self._ask.num_completion_tokens if call is not None else 0,
        }

    def take(self, news: News) -> Iterable[Event]:
        """Events of what came in."""
        for delta in news.deltas:
            kind = writing.piece_kind(delta)
            if kind != self._kind:
                yield from self.close()
                yield self._open(delta)
                self._kind = kind
            yield from self._grow(delta)

    def _delta(self, **delta: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _open(self, delta: Delta) -> Event:
        self._parts = []
        block: dict[str, Any]
        match delta:
            case TextDelta():
                block = {"type": "text", "text": ""}
            case ReasoningDelta():
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                block = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
        self._content.append(block)
        return {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block.copy()}

    def _grow(self, delta: Delta) -> Iterable[Event]:
        match delta:
            case TextDelta(text):
                yield self._delta(type="text_delta", text=text)
            case ReasoningDelta(text):
                yield self._delta(type="thinking_delta", thinking=text)
            case _:
                text = delta.arguments
                if text and self._content[-1]["name"] in self._request.eager_tools:
                    yield self._delta(type="input_json_delta", partial_json=text)
        self._parts.append(text)

    def close(self) -> Iterable[Event]:
        """Events of the end of the open block, if there is one."""
        if self._kind is None:
            return
        self._kind = None
        block, text = self._content[-1], "".join(self._parts)
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                # Frameworks send thinking back only with a signature; the reply's own name is one.
                block["thinking"], block["signature"] = text, self._ask.call_id
                yield self._delta(type="signature_delta", signature=self._ask.call_id)
            case _:
                block["input"] = _input(text)
                if block["name"] not in self._request.eager_tools:
                    whole = json.dumps(block["input"]) if INVALID in block["input"] else text
                    yield self._delta(type="input_json_delta", partial_json=whole)
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


def _input(arguments: str) -> dict[str, Any]:
    """What the model wrote as an object."""
    found = read_arguments(arguments)
    return found if isinstance(found, dict) else {INVALID: arguments}


def _stop_reason(call: RunningCall) -> tuple[str, str | None]:
    if call.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if call.reply.stopped_by is not None:
        return "stop_sequence", call.reply.stopped_by
    return ("tool_use" if call.answer.tool_calls else "end_turn"), None


class MessagesWriter:
    """Writes a message as events."""

    def __init__(self, request: MessagesRequest, ask: RunningAsk) -> None:
        self._blocks = Blocks(request, ask)
        self._call = ask.calls[0]

    def start(self) -> bytes:
        """The message before its first block."""
        return writing.named_events([{"type": "message_start", "message": self._blocks.message()}])

    def more(self, _call: RunningCall, news: News) -> bytes:
        """Blocks that begin, grow and end."""
        return writing.named_events(self._blocks.take(news))

    def finish(self, _call: RunningCall) -> bytes:
        """The end of the last block."""
        return writing.named_events(self._blocks.close())

    def end(self) -> bytes:
        """Why the message ended, and its usage."""
        reason, stop = _stop_reason(self._call)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = self._blocks.usage(self._call)
        return writing.named_events(
            [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]
        )

    def fail(self, error: SwarmEngineError) -> bytes:
        """The open block ends, and the error follows."""
        return writing.named_events([*self._blocks.close(), error_body(error)])


def parse(request: Mapping[str, Any], episode: LiveEpisode) -> MessagesRequest:
    """Read a request.

    Raises:
        BadRequestError: a field is malformed.
        UnsupportedError: a field or value that this server doesn't take.
    """
    _check_thread(request.get("thread"))
    raw = FIELDS.said(request)
    messages, tools = _prompt(raw)
    choice, is_parallel = _tool_choice(raw.get("tool_choice"), tools)
    grammar, effort = _output(raw, choice, tools)
    return MessagesRequest(
        model=fields.text(raw, "model") or "",
        call=CallRequest(
            messages=messages,
            max_tokens=fields.limit(raw, "max_tokens"),
            temperature=fields.temperature(raw),
            seed=fields.seed(raw),
            stop=fields.stops(raw, "stop_sequences"),
            tools=tools,
            tool_choice=choice,
            is_single_call=not is_parallel,
            grammar=grammar,
            effort=effort,
            processors=fields.processors(raw, episode.mode),
            script=fields.script(raw),
        ),
        is_stream=fields.flag(raw, "stream"),
        eager_tools=frozenset(
            tool["name"] for tool in raw.get("tools", ()) if tool.get("eager_input_streaming") is True
        ),
    )


def parse_count(request: Mapping[str, Any]) -> tuple[str, tuple[Message, ...], tuple[Tool, ...]]:
    """Read a request for a count: the model's name, the messages and the tools.

    Raises:
        BadRequestError: a field is malformed.
        UnsupportedError: a field or value that this server doesn't take.
    """
    raw = COUNT_FIELDS.said(request)
    messages, tools = _prompt(raw)
    choice, _ = _tool_choice(raw.get("tool_choice"), tools)
    _output(raw, choice, tools)
    return fields.text(raw, "model") or "", messages, tools


def _check_thread(value: Any) -> None:
    """See that a request does not ask the server to keep its conversation.

    Raises:
        UnsupportedError: it does, and clients that can do without know this error.
    """
    if not is_empty(value):
        raise UnsupportedError(
            f"thread={shown(value)} is not taken by this server, which keeps no conversations",
            "send the whole conversation without thread",
            code=THREAD,
            param="thread",
        )


def _thinking(raw: Mapping[str, Any]) -> Effort | None:
    """Whether the model is told not to reason."""
    kind = fields.inner(raw, "thinking", THINKING).get("type", "adaptive")
    if kind not in ("adaptive", "disabled"):
        raise UnsupportedError(
            f"thinking of type {shown(kind)} is not taken by this server", fields.WHY["thinking"], param="thinking.type"
        )
    return Effort("thinking", is_none=True) if kind == "disabled" else None


def _prompt(raw: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    messages: list[dict[str, Any]] = []
    if system := raw.get("system"):
        messages.append({"role": "system", "content": _system(system, "system")})
    if not raw.get("messages"):
        raise BadRequestError("messages must be a list with at least one message", param="messages")
    calls = asking.ToolCalls()
    for where, message in fields.items(raw["messages"], "messages"):
        message = MESSAGE.said(message, where)
        match message.get("role"):
            case "user":
                messages += _user(message.get("content"), f"{where}.content", calls)
                calls.check_answered(f"in {where}")
            case "assistant":
                calls.check_answered(f"before {where}")
                messages.append(_assistant(message.get("content"), f"{where}.content", calls))
            case "system":
                messages.append({"role": "system", "content": _system(message.get("content"), f"{where}.content")})
            case role:
                raise BadRequestError(
                    f"{where}.role is {shown(role)}", "it must be user, assistant or system", param=f"{where}.role"
                )
    if messages[-1]["role"] == "assistant":
        calls.check_answered("behind it")
        raise UnsupportedError(
            "the last message is the assistant's, and this server begins every reply itself",
            "end with a user message",
            param="messages",
        )
    with asking.told_as((".function.parameters", ".input_schema"), (".function", "")):
        tools = parse_tools(_tools(raw.get("tools")))
    return parse_messages(messages), tools


def _blocks(content: Any, where: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if isinstance(content, str):
        return [(where, {"type": "text", "text": read_text(content, where)})]
    return [
        (place, BLOCKS[kind].said(block, place) if (kind := str(block.get("type"))) in BLOCKS else block)
        for place, block in fields.items(content, where)
    ]


def _block_text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise UnsupportedError(
            f"{where} is a block of type {shown(block.get('type'))}, this model reads text only",
            'send {"type": "text", "text": ...}',
            param=where,
        )
    return read_text(block["text"], f"{where}.text")


def _system(content: Any, where: str) -> str:
    return SYSTEM_SEPARATOR.join(_block_text(block, place) for place, block in _blocks(content, where))


def _user(content: Any, where: str, made: asking.ToolCalls) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for place, block in _blocks(content, where):
        if block.get("type") != "tool_result":
            texts.append(_block_text(block, place))
            continue
        fields.flag(block, "is_error", where=place)
        inner = block.get("content")
        text = "" if inner is None else "".join(_block_text(*one[::-1]) for one in _blocks(inner, f"{place}.content"))
        call_id = _field(block, "tool_use_id", place)
        made.answer(call_id, f"{place}.tool_use_id")
        results.append({"role": "tool", "tool_call_id": call_id, "content": text})
    if texts or not results:
        results.append({"role": "user", "content": "".join(texts)})
    return results


def _assistant(content: Any, where: str, made: asking.ToolCalls) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in _blocks(content, where):
        match block.get("type"):
            case "thinking":
                reasoning.append(_field(block, "thinking", place))
            case "tool_use":
                function = {"name": _field(block, "name", place), "arguments": _arguments(block.get("input"), place)}
                calls.append({"id": _field(block, "id", place), "type": "function", "function": function})
                made.make(calls[-1]["id"], place)
            case _:
                texts.append(_block_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    return read_text(block.get(name), f"{where}.{name}")


def _arguments(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise BadRequestError(f"{where}.input must be an object", param=f"{where}.input")
    if value.keys() == {INVALID} and isinstance(value[INVALID], str):
        return read_text(value[INVALID], f"{where}.input")
    return read_object(value, f"{where}.input")


def _tools(raw: Any) -> Any:
    """Tools in the shape of chat completions."""
    if raw is None:
        return None
    wrapped = []
    for where, tool in fields.items(raw, "tools"):
        if not is_empty(kind := tool.get("type")) and kind != "custom":
            raise UnsupportedError(
                f"{where} is a tool of type {shown(kind)}, which a vendor's server runs and this one can't",
                "take it out of the agent's tools; send tools with an input_schema and run them yourself",
                param=f"{where}.type",
            )
        tool = TOOL.said(tool, where)
        fields.flag(tool, "eager_input_streaming", where=where)
        wrapped.append(
            asking.wrapped(tool.get("name"), tool.get("description"), tool.get("input_schema"), tool.get("strict"))
        )
    return wrapped


def _tool_choice(value: Any, tools: tuple[Tool, ...]) -> tuple[ToolChoice, bool]:
    """The choice, and whether a reply may hold several calls."""
    is_parallel = True
    if isinstance(value, dict):
        value = CHOICE.said(value, "tool_choice")
        is_parallel = not fields.flag(value, "disable_parallel_tool_use", where="tool_choice")
    match value:
        case None | {"type": "auto"}:
            return Auto(), is_parallel
        case {"type": "none"}:
            return NoTools(), is_parallel
        case {"type": "any"}:
            return asking.must_call((), tools), is_parallel
        case {"type": "tool", "name": str(name)}:
            return asking.must_call((name,), tools), is_parallel
    raise UnsupportedError(
        f"tool_choice {shown(value)} is not taken by this server",
        "its type is auto, any, tool or none",
        param="tool_choice",
    )


def _output(raw: Mapping[str, Any], choice: ToolChoice, tools: tuple[Tool, ...]) -> tuple[str | None, Effort | None]:
    """The grammar that the answer is to follow, and how much the model is to reason before it."""
    output = fields.inner(raw, "output_config", OUTPUT)
    grammar = asking.answer_grammar(output.get("format"), "output_config.format", choice, tools)
    return grammar, _thinking(raw) or fields.effort(output, "effort", "output_config.effort")
