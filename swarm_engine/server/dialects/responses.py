"""OpenAI's responses: typed items in, typed items out.

A response can go on from an earlier one of its episode by `previous_response_id`. Items that one reply of the assistant
is made of (reasoning, message, function calls) become one message for the chat template. Reasoning comes back in plain
text; `encrypted_content`, where a request includes it, is the same text, so that a caller who keeps only that loses
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from swarm_engine.errors import BadRequestError, NotFoundError, SwarmEngineError, UnsupportedError, shown
from swarm_engine.server.dialects import asking, fields, writing
from swarm_engine.server.dialects.chat import MAX_TOP_LOGPROBS
from swarm_engine.server.episodes import CallRequest, LiveEpisode, News, RunningAsk, RunningCall, StoredResponse
from swarm_engine.tracker.answers import Delta, ReasoningDelta, TextDelta
from swarm_engine.tracker.fields import Fields, is_empty
from swarm_engine.tracker.messages import TOOL_LABELS, TOOL_NEUTRAL, Message, parse_messages, parse_tools, read_text
from swarm_engine.types import FinishReason

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_REASONING = "reasoning.encrypted_content"

INPUT_ROLES = ("user", "assistant", "system", "developer")
THOUGHT_PARTS = ("reasoning_text", "summary_text", "text")

FIELDS = Fields(
    read=fields.SAMPLING
    | {
        "model", "input", "instructions", "previous_response_id", "temperature", "max_output_tokens", "stream",
        "stream_options", "include", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "text", "store",
        "seed", "stop", "script", "reasoning",
    },
    labels=fields.OPENAI_LABELS,
    neutral={**fields.NEUTRAL, "truncation": ("disabled",)},
    why=fields.WHY,
)  # fmt: skip
REASONING = Fields(
    frozenset({"effort"}),
    # Reasoning comes back whole and in plain text, so no summary is made of it.
    frozenset({"summary", "generate_summary"}),
    {"context": ("auto",), "mode": ("standard",)},
    why=dict.fromkeys(("context", "mode"), fields.TEMPLATE_DECIDES),
)
TEXT = Fields(frozenset({"format", "verbosity"}))
TOOL = Fields(
    frozenset({"type", "name", "description", "parameters", "strict"}),
    TOOL_LABELS,
    TOOL_NEUTRAL,
    kept=frozenset({"name", "parameters"}),
)
RESPONSE = "resp_"
"""Before the id of a response's call; an item's id is its kind, the same call and its number."""
SETTINGS = {
    "web_search": 'turn it off (Codex: `web_search = "disabled"` in its config.toml)',
    "namespace": "turn off what brings it (Codex: `enabled = false` under `[agents]` in its config.toml)",
}
"""How clients are told to leave out tools that the vendor's server runs, by type."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request for a response."""

    model: str
    call: CallRequest
    is_stream: bool
    is_stored: bool
    """Whether a later request may go on from it."""
    has_logprobs: bool
    has_encrypted: bool
    history: tuple[Message, ...]
    """The messages a later request goes on from; instructions are each request's own."""
    echoed: Mapping[str, Any]
    """What the response repeats of the request."""

    def whole(self, ask: RunningAsk) -> Mapping[str, Any]:
        """The response with all its items."""
        items = Items(self, ask)
        (call,) = ask.calls
        for _ in (*items.take(call.news()), *items.close(call)):
            pass
        return items.complete(call)

    def writer(self, ask: RunningAsk) -> ResponsesWriter:
        """Writes the response event by event."""
        return ResponsesWriter(self, ask)


def _status(call: RunningCall) -> str:
    return "incomplete" if call.finish_reason is FinishReason.LENGTH else "completed"


Event = dict[str, Any]
T = TypeVar("T")


class Items:
    """The output of a response while it grows, and the events that tell of it.

    A whole response is what its events add up to, so the two can't differ.
    """

    def __init__(self, request: ResponsesRequest, ask: RunningAsk) -> None:
        self._request = request
        self._ask = ask
        self._name = RESPONSE + ask.call_id
        self._created = time.time()
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        self._parts: list[str] = []
        """Text of the open item."""
        self._kind: writing.PieceKind | None = None
        """Of the pieces that the open item takes; None where none is open."""
        self._told: list[dict[str, Any]] = []
        """Log-probabilities that the events of the open text have told."""
        self._num_told = 0
        """Tokens whose log-probabilities have been told."""

    def response(self, status: str, call: RunningCall | None = None, error: SwarmEngineError | None = None) -> Event:
        """The response as it is now; with its call where that is recorded."""
        usage = None
        if call is not None:
            num_prompt, num_sampled = self._ask.num_prompt_tokens, self._ask.num_completion_tokens
            usage = {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": self._ask.num_reasoning_tokens},
                "total_tokens": num_prompt + num_sampled,
            }
        processors = self._ask.request.processors
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "completed_at": time.time() if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": str(error)},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._ask.policy,
            "output": self._output.copy(),
            "temperature": self._ask.request.temperature,
            "top_p": 1.0 if processors is None else processors.top_p,
            "truncation": "disabled",
            **self._request.echoed,
            "usage": usage,
        }

    def take(self, news: News) -> Iterable[Event]:
        """Events of what came in."""
        for delta, end in zip(news.deltas, news.ends, strict=True):
            kind = writing.piece_kind(delta)
            if kind != self._kind:
                yield from self._close_item("completed")
                yield from self._open_item(delta)
                self._kind = kind
            yield from self._grow(delta, end)

    def close(self, call: RunningCall) -> Iterable[Event]:
        """Events of the end of the output."""
        if not self._output:
            yield from self._open_item(TextDelta(""))
        if self._output[-1]["type"] == "message":
            # The end token belongs to the text before it.
            self._tell_to(len(call.generation.token_ids))
        yield from self._close_item(_status(call))

    def complete(self, call: RunningCall) -> Event:
        """The response after its last item; where it is stored, later requests can name it from now on."""
        response, stored = self.response(_status(call), call), self._ask.episode.responses
        if self._request.is_stored:
            messages: Sequence[Message] = (*self._request.history, call.answer.message())
            if stored:
                # Agents send all of a conversation and their tools each turn; kept once they take no room to speak of.
                last = stored[next(reversed(stored))]
                messages = _sharing(messages, last.messages)
                response["tools"] = _sharing(response["tools"], last.body["tools"])
            stored[self._name] = StoredResponse(tuple(messages), response)
        return response

    def abandon(self) -> Iterable[Event]:
        """Events of an output that broke off."""
        yield from self._close_item("incomplete")

    def _event(self, kind: str, **more: Any) -> Event:
        item = self._output[-1]
        return {"type": f"response.{kind}", "item_id": item["id"], "output_index": len(self._output) - 1, **more}

    def _item_event(self, kind: str) -> Event:
        item = self._output[-1]
        return {
            "type": f"response.output_item.{kind}",
            "output_index": len(self._output) - 1,
            "item": {key: value.copy() if isinstance(value, list) else value for key, value in item.items()},
        }

    def _open_item(self, delta: Delta) -> Iterable[Event]:
        name = f"{self._ask.call_id}_{len(self._output)}"
        self._is_open, self._parts, self._told = True, [], []
        item: dict[str, Any]
        match delta:
            case TextDelta():
                item = {
                    "type": "message",
                    "id": f"msg_{name}",
                    "status": "in_progress",
                    "role": "assistant",
                    "content": [],
                }
            case ReasoningDelta():
                item = {"type": "reasoning", "id": f"rs_{name}", "status": "in_progress", "summary": [], "content": []}
            case _:
                item = {
                    "type": "function_call",
                    "id": f"fc_{name}",
                    "status": "in_progress",
                    "call_id": delta.call_id,
                    "name": delta.name,
                    "arguments": "",
                }
        self._output.append(item)
        yield self._item_event("added")
        if item["type"] != "function_call":
            yield self._event("content_part.added", content_index=0, part=self._part(""))

    def _part(self, text: str) -> dict[str, Any]:
        """The content of the open item."""
        if self._output[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._told.copy()}

    def _tell_to(self, end: int) -> list[dict[str, Any]]:
        """The log-probabilities of the tokens up to `end` that were not told; those before a text are told with it."""
        if not self._request.has_logprobs:
            return []
        entries = writing.token_entries(self._ask.calls[0], range(self._num_told, end))
        self._num_told = max(end, self._num_told)
        self._told += entries
        return entries

    def _grow(self, delta: Delta, end: int) -> Iterable[Event]:
        match delta:
            case TextDelta(text):
                entries = self._tell_to(end)
                yield self._event("output_text.delta", content_index=0, delta=text, logprobs=entries)
            case ReasoningDelta(text):
                yield self._event("reasoning_text.delta", content_index=0, delta=text)
            case _:
                text = delta.arguments
                if text:
                    yield self._event("function_call_arguments.delta", delta=text)
        self._parts.append(text)

    def _close_item(self, status: str) -> Iterable[Event]:
        if not self._is_open:
            return
        self._is_open, self._kind = False, None
        item, text = self._output[-1], "".join(self._parts)
        item["status"] = status
        match item["type"]:
            case "function_call":
                item["arguments"] = text
                yield self._event("function_call_arguments.done", arguments=text)
            case kind:
                part = self._part(text)
                item["content"] = [part]
                if kind == "reasoning":
                    if self._request.has_encrypted:
                        item["encrypted_content"] = text
                    yield self._event("reasoning_text.done", content_index=0, text=text)
                else:
                    yield self._event("output_text.done", content_index=0, text=text, logprobs=part["logprobs"])
                yield self._event("content_part.done", content_index=0, part=part)
        yield self._item_event("done")


def _sharing(values: Sequence[T], others: Sequence[T]) -> list[T]:
    """Values, and where another list has an equal one at the same place, the very object that stands there."""
    shared = [other if value == other else value for value, other in zip(values, others, strict=False)]
    return [*shared, *values[len(shared) :]]


class ResponsesWriter:
    """Writes a response as events, numbered."""

    def __init__(self, request: ResponsesRequest, ask: RunningAsk) -> None:
        self._items = Items(request, ask)
        self._call = ask.calls[0]
        self._num_events = 0

    def _numbered(self, events: Iterable[Event]) -> bytes:
        numbered = []
        for event in events:
            numbered.append({**event, "sequence_number": self._num_events})
            self._num_events += 1
        return writing.named_events(numbered)

    def _life(self, kind: str, response: Event) -> Event:
        return {"type": f"response.{kind}", "response": response}

    def start(self) -> bytes:
        """The response before its first item."""
        begun = self._items.response("in_progress")
        return self._numbered([self._life("created", begun), self._life("in_progress", begun)])

    def more(self, _call: RunningCall, news: News) -> bytes:
        """Items that begin, grow and end."""
        return self._numbered(self._items.take(news))

    def finish(self, call: RunningCall) -> bytes:
        """The end of the last item."""
        return self._numbered(self._items.close(call))

    def end(self) -> bytes:
        """The response, complete or cut at its limit."""
        response = self._items.complete(self._call)
        return self._numbered([self._life(response["status"], response)])

    def fail(self, error: SwarmEngineError) -> bytes:
        """The open item ends, and the response has failed."""
        events = list(self._items.abandon())
        return self._numbered([*events, self._life("failed", self._items.response("failed", error=error))])


def parse(request: Mapping[str, Any], episode: LiveEpisode) -> ResponsesRequest:
    """Read a request.

    Raises:
        BadRequestError: a field is malformed.
        UnsupportedError: a field or value that this server doesn't take.
        NotFoundError: this episode has no such earlier response.
    """
    raw = FIELDS.said(request)
    fields.stream_options(raw, "include_obfuscation")
    include = raw.get("include") or []
    if not isinstance(include, list):
        raise BadRequestError(f"include must be a list, not {include!r:.80}", param="include")
    for index, one in enumerate(include):
        if one not in (INCLUDE_LOGPROBS, INCLUDE_REASONING):
            place = f"include[{index}]"
            raise UnsupportedError(f"{place} is {shown(one)}, which this server has nothing of", param=place)
    top_logprobs = fields.integer(raw, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    earlier = _earlier(raw, episode)
    history = (*earlier, *parse_messages(_messages(raw.get("input"), earlier, episode)))
    instructions = fields.text(raw, "instructions")
    own = (
        parse_messages([{"role": "system", "content": read_text(instructions, "instructions")}]) if instructions else ()
    )
    with asking.told_as((".function", "")):
        tools = parse_tools(_tools(raw.get("tools")))
    choice = asking.openai_tool_choice(raw.get("tool_choice"), tools)
    is_parallel = fields.flag(raw, "parallel_tool_calls", default=True)
    text = fields.inner(raw, "text", TEXT)
    text_format = text.get("format")
    if "verbosity" in text:
        fields.one_of(text["verbosity"], fields.VERBOSITIES, "text.verbosity")
    reasoning = fields.inner(raw, "reasoning", REASONING)
    return ResponsesRequest(
        model=fields.text(raw, "model") or "",
        call=CallRequest(
            messages=(*own, *history),
            max_tokens=fields.limit(raw, "max_output_tokens"),
            temperature=fields.temperature(raw),
            seed=fields.seed(raw),
            stop=fields.stops(raw),
            tools=tools,
            tool_choice=choice,
            is_single_call=not is_parallel,
            grammar=asking.answer_grammar(text_format, "text.format", choice, tools),
            top_logprobs=top_logprobs,
            effort=fields.effort(reasoning, "effort", "reasoning.effort"),
            processors=fields.processors(raw, episode.mode),
            script=fields.script(raw),
        ),
        is_stream=fields.flag(raw, "stream"),
        is_stored=fields.flag(raw, "store", default=True),
        has_logprobs=top_logprobs > 0 or INCLUDE_LOGPROBS in include,
        has_encrypted=INCLUDE_REASONING in include,
        history=history,
        echoed={
            "instructions": instructions,
            "max_output_tokens": raw.get("max_output_tokens"),
            "metadata": request.get("metadata") or {},
            "parallel_tool_calls": is_parallel,
            "previous_response_id": raw.get("previous_response_id"),
            "store": raw.get("store", True),
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": raw.get("tool_choice") or "auto",
            "tools": raw.get("tools") or [],
            "top_logprobs": top_logprobs,
            "reasoning": {"effort": None, "summary": None, **raw.get("reasoning", {})},
        },
    )


def stored(
    name: str, episode: LiveEpisode, *, code: str = "response_not_found", param: str | None = None
) -> StoredResponse:
    """A response that the episode gave and stored.

    Raises:
        NotFoundError: there is none of that id.
    """
    found = episode.responses.get(name)
    if found is None:
        raise NotFoundError(
            f"this episode has no response {shown(name)}",
            "name one that it gave and stored, or send the whole input",
            code=code,
            param=param,
        )
    return found


def _earlier(raw: Mapping[str, Any], episode: LiveEpisode) -> tuple[Message, ...]:
    name = fields.text(raw, "previous_response_id")
    if name is None:
        return ()
    return stored(name, episode, code="previous_response_not_found", param="previous_response_id").messages


def _tools(raw: Any) -> Any:
    """Tools in the shape of chat completions."""
    if raw is None:
        return None
    wrapped = []
    for where, tool in fields.items(raw, "tools"):
        if (kind := tool.get("type")) != "function":
            raise UnsupportedError(
                f"{where} is a tool of type {shown(kind)}, which a vendor's server runs and this one can't",
                SETTINGS.get(str(kind), "take it out of the agent's tools; send functions and run them yourself"),
                param=f"{where}.type",
            )
        tool = TOOL.said(tool, where)
        wrapped.append(
            asking.wrapped(tool.get("name"), tool.get("description"), tool.get("parameters"), tool.get("strict"))
        )
    return wrapped


def _messages(raw: Any, earlier: Sequence[Message], episode: LiveEpisode) -> list[dict[str, Any]]:
    """Items as messages of chat completions, which go on from earlier ones."""
    calls = asking.ToolCalls()
    for message in earlier:
        for call in message.get("tool_calls", ()):
            calls.make(call["id"], "previous_response_id")
        if message["role"] == "tool":
            calls.answer(message["tool_call_id"], "previous_response_id")
    if isinstance(raw, str):
        calls.check_answered("in the input")
        return [{"role": "user", "content": read_text(raw, "input")}]
    if not raw:
        raise BadRequestError("input must be a text or a list with at least one item", param="input")
    messages: list[dict[str, Any]] = []
    told = [(where, _told(item, where, episode)) for where, item in fields.items(raw, "input")]
    for is_reply, group in groupby(told, lambda one: _is_reply(one[1])):
        items = list(group)
        if is_reply:
            messages += _replies(items, calls)
        else:
            messages += [_other(item, where, calls) for where, item in items]
    calls.check_answered("behind it")
    return messages


def _kind(item: Mapping[str, Any]) -> Any:
    kind = item.get("type")
    if not is_empty(kind):
        return kind
    return "message" if "role" in item else "item_reference" if "id" in item else None


def _response_of(item_id: str) -> str:
    """Id of the response that would have given an item."""
    return RESPONSE + item_id.partition("_")[2].rpartition("_")[0]


def _told(item: Mapping[str, Any], where: str, episode: LiveEpisode) -> Mapping[str, Any]:
    """An item, and for a reference the item that it names.

    Raises:
        BadRequestError: no response of the episode that was stored has it.
    """
    if _kind(item) != "item_reference":
        return item
    name = item.get("id")
    response = episode.responses.get(_response_of(name)) if isinstance(name, str) else None
    items: Sequence[Mapping[str, Any]] = () if response is None else response.body["output"]
    found = next((one for one in items if one["id"] == name), None)
    if found is None:
        raise BadRequestError(
            f"{where} refers to item {shown(name)}, and this episode has stored none of that id",
            "send the items, or store: false, which has SDKs send them",
            code="item_not_found",
            param=f"{where}.id",
        )
    return found


def _is_reply(item: Mapping[str, Any]) -> bool:
    kind = _kind(item)
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def _replies(items: Iterable[tuple[str, Mapping[str, Any]]], made: asking.ToolCalls) -> list[dict[str, Any]]:
    """Items of the assistant in a row: one reply, but where a message comes behind another without a call.

    A model that reasons between its calls and messages wrote one reply, whose record joins them with nothing between.
    """
    replies: list[dict[str, Any]] = []
    thought = ""
    for where, item in items:
        kind = _kind(item)
        if kind == "reasoning":
            thought += _reasoning(item, where)
            continue
        if not replies or (kind == "message" and replies[-1]["content"] and "tool_calls" not in replies[-1]):
            replies.append({"role": "assistant", "content": ""})
        reply = replies[-1]
        _add_thought(reply, thought)
        thought = ""
        if kind == "message":
            reply["content"] += _text(item.get("content"), f"{where}.content")
        else:
            arguments = read_text(item.get("arguments"), f"{where}.arguments")
            function = {"name": read_text(item.get("name"), f"{where}.name"), "arguments": arguments}
            call_id = read_text(item.get("call_id") or "", f"{where}.call_id")
            call = {"id": call_id, "type": "function", "function": function}
            reply.setdefault("tool_calls", []).append(call)
            made.make(call_id, where)
    if not replies:
        replies.append({"role": "assistant", "content": ""})
    _add_thought(replies[-1], thought)
    return replies


def _add_thought(reply: dict[str, Any], thought: str) -> None:
    if thought:
        reply["reasoning_content"] = reply.get("reasoning_content", "") + thought


def _other(item: Mapping[str, Any], where: str, made: asking.ToolCalls) -> dict[str, Any]:
    kind = _kind(item)
    if kind == "message":
        if (role := item.get("role")) not in INPUT_ROLES:
            raise BadRequestError(
                f"{where}.role is {shown(role)}",
                f"it must be one of {', '.join(INPUT_ROLES)}; a tool's result is an item of type function_call_output",
                param=f"{where}.role",
            )
        return {"role": role, "content": _text(item.get("content"), f"{where}.content")}
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{where}.output")
        call_id = read_text(item.get("call_id"), f"{where}.call_id")
        made.answer(call_id, f"{where}.call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    raise UnsupportedError(
        f"{where} is an item of type {shown(kind)}",
        "this server takes message, reasoning, function_call, function_call_output and item_reference",
        param=f"{where}.type",
    )


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return read_text(content, where)
    texts = []
    for place, part in fields.items(content, where):
        if part.get("type") not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise UnsupportedError(
                f"{place} is a part of type {shown(part.get('type'))}, this model reads text only",
                'send {"type": "input_text", "text": ...}',
                param=f"{place}.type",
            )
        texts.append(read_text(part["text"], f"{place}.text"))
    return "".join(texts)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    if item.get("content"):
        parts = fields.items(item["content"], f"{where}.content")
    elif item.get("encrypted_content"):
        return read_text(item["encrypted_content"], f"{where}.encrypted_content")
    else:
        parts = fields.items(item.get("summary") or [], f"{where}.summary")
    texts = []
    for place, part in parts:
        if part.get("type") not in THOUGHT_PARTS:
            raise UnsupportedError(
                f"{place} is a part of type {shown(part.get('type'))}, reasoning is text",
                "send back the item as it came",
                param=f"{place}.type",
            )
        texts.append(read_text(part.get("text"), f"{place}.text"))
    return "".join(texts)
