"""Chat messages as the tracker compares and renders them.

A message is a plain dict in the shape chat templates expect: `role`, `content` (always a string), and where they are
given `name`, `tool_calls` (arguments as the object they spell, or as the text the model wrote), `tool_call_id`,
`reasoning_content`. A tool is the dict that OpenAI's chat completions describe a function with.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from swarm_engine.errors import BadRequestError, UnsupportedError, shown
from swarm_engine.tracker.fields import Fields
from swarm_engine.tracker.marks import BREAKER, SENTINEL

Message = dict[str, Any]
Tool = dict[str, Any]

ROLES = {
    "system": "system",
    # Chat templates know no developer; OpenAI's own description calls it the new name of the system role.
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

MAX_DEPTH = 64
"""Objects and lists inside each other in a tool call's arguments; everything that reads them recurses."""

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
NO_PARAMETERS = {"type": "object", "properties": {}}
"""What a tool takes that names no parameters; many templates need the field."""

NONCE = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\n]*;)+[ \t]*\n?")
"""A coding client opens its system prompt with this line, which is for its vendor's accounts and ends in another
number every time. Left in, no request would begin with the one before it, so it is taken out before anything else."""

TEXT_FIELDS = frozenset({"role", "content", "name"})
SAID_BY_ROLE: Mapping[str, frozenset[str]] = {
    "system": TEXT_FIELDS,
    "user": TEXT_FIELDS,
    "assistant": TEXT_FIELDS | {"tool_calls", "reasoning_content", "reasoning"},
    "tool": TEXT_FIELDS | {"tool_call_id"},
}
MESSAGE = {
    role: Fields(names, kept=frozenset({"role", "content", "tool_call_id"})) for role, names in SAID_BY_ROLE.items()
}
"""Of a message, by role. What SDKs send back beside them (`refusal`, `annotations`, `audio`, …) is empty."""
PART = Fields(
    frozenset({"type", "text"}),
    frozenset({"cache_control", "prompt_cache_breakpoint", "citations", "annotations", "id", "index"}),
    kept=frozenset({"text"}),
)
"""Of a part of the content, which some SDKs give the message's own fields again."""
CALL = Fields(frozenset({"id", "type", "function"}), frozenset({"index"}))
FUNCTION = Fields(frozenset({"name", "arguments"}), kept=frozenset({"name", "arguments"}))
TOOL_LABELS = frozenset({"cache_control"})
TOOL_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"allowed_callers": (["direct"],)}
"""Of a tool in every API."""
TOOL = Fields(frozenset({"type", "function"}), TOOL_LABELS, TOOL_NEUTRAL)
SIGNATURE = Fields(
    frozenset({"name", "description", "parameters", "strict"}),
    TOOL_LABELS,
    TOOL_NEUTRAL,
    kept=frozenset({"name", "parameters"}),
)


def parse_messages(raw: Any) -> tuple[Message, ...]:
    """The messages of a request.

    Content parts of type text are joined without a separator, so a list of parts and a string are the same message.
    Content that is null, empty or missing is the same too. A system prompt loses its `NONCE`.

    Raises:
        BadRequestError: not a list of messages, or one of them is malformed.
        UnsupportedError: a part or field that this server doesn't take.
    """
    if not isinstance(raw, list) or not raw:
        raise BadRequestError("messages must be a list with at least one message", param="messages")
    messages = [_parse(one, f"messages[{index}]") for index, one in enumerate(raw)]
    first = messages[0]
    if first["role"] == "system" and (nonce := NONCE.match(first["content"])):
        first["content"] = first["content"][nonce.end() :]
        if not first["content"].strip() and len(messages) > 1:
            del messages[0]
    return tuple(messages)


def parse_tools(raw: Any) -> tuple[Tool, ...]:
    """The tools of a request; None and an empty list are no tools.

    Raises:
        BadRequestError: not a list of functions, or one of them is malformed.
        UnsupportedError: a tool or field that this server doesn't take.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise BadRequestError("tools must be a list", param="tools")
    tools = tuple(_parse_tool(one, f"tools[{index}]") for index, one in enumerate(raw))
    names = [tool["function"]["name"] for tool in tools]
    known: set[str] = set()
    for name in names:
        if name in known:
            raise BadRequestError(
                f"tools names {shown(name)} twice", "give every tool a name of its own", param="tools"
            )
        known.add(name)
    return tools


def _parse_tool(raw: Any, where: str) -> Tool:
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind != "function":
        raise UnsupportedError(
            f"{where} is a tool of type {shown(kind)}, models call functions only",
            'send {"type": "function", "function": {"name": ..., "parameters": ...}}',
            param=f"{where}.type",
        )
    function = raw.get("function")
    if not isinstance(function, dict):
        raise BadRequestError(f"{where}.function is missing", param=f"{where}.function")
    TOOL.said(raw, where)
    where = f"{where}.function"
    function = SIGNATURE.said(function, where)
    name = read_text(function.get("name"), f"{where}.name")
    if not TOOL_NAME.fullmatch(name):
        raise BadRequestError(
            f"{where}.name is {shown(name)}",
            "a name is 1 to 128 letters, digits, underscores, dots and dashes",
            param=f"{where}.name",
        )
    parsed: dict[str, Any] = {"name": name}
    if function.get("description") is not None:
        parsed["description"] = read_text(function["description"], f"{where}.description")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadRequestError(f"{where}.parameters must be a JSON schema", param=f"{where}.parameters")
    parsed["parameters"] = _checked(parameters or NO_PARAMETERS, f"{where}.parameters", MAX_DEPTH)
    if function.get("strict") is not None:
        if not isinstance(function["strict"], bool):
            raise BadRequestError(f"{where}.strict must be true or false", param=f"{where}.strict")
        parsed["strict"] = function["strict"]
    return {"type": "function", "function": parsed}


def _parse(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise BadRequestError(f"{where} must be an object with role and content", param=where)
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequestError(
            f"{where}.role is {shown(role)}", f"it must be one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    said = MESSAGE[ROLES[role]].said(raw, where)
    message: Message = {"role": ROLES[role], "content": _text(said, role, f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if key in said:
            message[key] = read_text(said[key], f"{where}.{key}")
    if (reasoning := said.get("reasoning_content", said.get("reasoning"))) is not None:
        message["reasoning_content"] = read_text(reasoning, f"{where}.reasoning_content")
    if "tool_calls" in said:
        message["tool_calls"] = _tool_calls(said["tool_calls"], f"{where}.tool_calls")
    return message


def read_text(value: Any, where: str) -> str:
    """A text that can be encoded.

    Raises:
        BadRequestError: it is no text, or holds what is no character.
    """
    if not isinstance(value, str):
        raise BadRequestError(f"{where} must be a string, not {type(value).__name__}", param=where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"{where} holds a lone surrogate at character {error.start}", "send valid Unicode text", param=where
        ) from error
    if BREAKER in value or SENTINEL in value:
        raise BadRequestError(
            f"{where} holds U+FDD0 or U+FDD1, which Unicode defines as noncharacters", "remove it", param=where
        )
    return value


def _text(message: Mapping[str, Any], role: str, where: str) -> str:
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise BadRequestError(f"{where} is missing", "only an assistant message may have none", param=where)
        return ""
    if isinstance(content, str):
        return read_text(content, where)
    if not isinstance(content, list):
        raise BadRequestError(f"{where} must be a string or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise UnsupportedError(
                f"{where}[{index}] is a part of type {shown(kind)}, this model reads text only",
                'send {"type": "text", "text": ...}',
                param=f"{where}[{index}].type",
            )
        said = PART.said(part, f"{where}[{index}]", outer=message)
        texts.append(read_text(said.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _tool_calls(raw: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(raw, list):
        raise BadRequestError(f"{where} must be a list", param=where)
    calls = []
    for index, one in enumerate(raw):
        function = one.get("function") if isinstance(one, dict) else None
        kind = one.get("type") if isinstance(one, dict) else None
        if kind not in (None, "function"):
            raise UnsupportedError(
                f"{where}[{index}] is a call of type {shown(kind)}, models call functions only",
                'its type is "function"',
                param=f"{where}[{index}].type",
            )
        if not isinstance(function, dict):
            raise BadRequestError(f"{where}[{index}].function is missing", param=f"{where}[{index}].function")
        call = CALL.said(one, f"{where}[{index}]")
        function = FUNCTION.said(function, f"{where}[{index}].function")
        calls.append(
            {
                "id": read_text(call.get("id", ""), f"{where}[{index}].id"),
                "type": "function",
                "function": {
                    "name": read_text(function.get("name"), f"{where}[{index}].function.name"),
                    "arguments": _arguments(function.get("arguments", ""), f"{where}[{index}].function.arguments"),
                },
            }
        )
    return calls


def read_object(value: dict[str, Any], where: str) -> dict[str, Any]:
    """A call's arguments as an object.

    Raises:
        BadRequestError: a text in it can't be encoded, or it is nested too deeply.
    """
    found: dict[str, Any] = _checked(value, where, MAX_DEPTH)
    return found


def _arguments(raw: Any, where: str) -> Any:
    if isinstance(raw, dict):
        return read_object(raw, where)
    return read_arguments(read_text(raw, where))


def read_arguments(text: str) -> dict[str, Any] | str:
    """Arguments as the object they spell; text that spells none stays the text the model wrote.

    So does text that no template could write again: what a model samples must never make the next request a bad one.
    """
    try:
        value = load_json(text)
        return _checked(value, "arguments", MAX_DEPTH) if isinstance(value, dict) else text
    except (ValueError, RecursionError, BadRequestError):
        return text


def load_json(text: str | bytes) -> Any:
    """A JSON value that can be written again: NaN, infinity and numbers that no float holds are refused.

    Raises:
        ValueError: it is no such value.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} has no float")
    return value


def _checked(value: Any, where: str, depth: int) -> Any:
    """A JSON value whose every text, names of fields included, passed `read_text`."""
    if isinstance(value, str):
        return read_text(value, where)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise BadRequestError(f"{where} is nested more than {MAX_DEPTH} deep", "send it flatter", param=where)
    if isinstance(value, list):
        return [_checked(item, where, depth - 1) for item in value]
    return {read_text(key, where): _checked(item, where, depth - 1) for key, item in value.items()}


def canonical(message: Mapping[str, Any], answers: int | None = None) -> bytes:
    """What two messages must share to be one: role, name, content, tool calls, and which call a result answers.

    White space around the content, the model's reasoning and the ids of calls do not count. Arguments are compared as
    JSON values where they are JSON at all, numbers by value: a caller writes them again in its own way, 1 for 1.0.

    Args:
        message: the message.
        answers: the place of the call that it answers among those of the message that made them; ids don't tell, for
            some frameworks make their own.
    """
    calls = [
        [call["function"]["name"], _value(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ] or None
    parts = [message["role"], message.get("name"), message["content"].strip(), calls, answers]
    return json.dumps(parts, sort_keys=True).encode()


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return _plain_numbers(arguments, MAX_DEPTH)
    try:
        return {"json": _plain_numbers(json.loads(arguments), MAX_DEPTH)}
    except (ValueError, RecursionError):
        return arguments


def _plain_numbers(value: Any, depth: int) -> Any:
    """A JSON value with numbers that are equal written alike.

    Raises:
        ValueError: objects and lists stand more than `depth` deep inside each other.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_plain_numbers(item, depth - 1) for item in value]
    return {key: _plain_numbers(item, depth - 1) for key, item in value.items()}


def prefix_digests(agent: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()) -> list[bytes]:
    """One digest for every beginning of a conversation; entry i covers the tools and the first i messages."""
    opening = json.dumps([agent, tools], sort_keys=True) if tools else json.dumps([agent])
    digest = hashlib.blake2b(opening.encode(), digest_size=16).digest()
    digests = [digest]
    places: dict[str, int] = {}
    """Of the newest calls in their message, by id."""
    for message in messages:
        if calls := message.get("tool_calls"):
            places = {call["id"]: place for place, call in enumerate(calls)}
        digest = extend_digest(digest, message, places.get(message.get("tool_call_id", "")))
        digests.append(digest)
    return digests


def extend_digest(digest: bytes, message: Mapping[str, Any], answers: int | None = None) -> bytes:
    """The digest of a conversation with one more message; for `answers` see `canonical`."""
    return hashlib.blake2b(digest + canonical(message, answers), digest_size=16).digest()
