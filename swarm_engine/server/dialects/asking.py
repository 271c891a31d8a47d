"""What all APIs say in other words: which call a result answers, which tools a reply may call, and its form."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from swarm_engine.errors import BadRequestError, UnsupportedError, shortened, shown
from swarm_engine.server.dialects.fields import blaming
from swarm_engine.server.episodes import Auto, Named, NoTools, Required, ToolChoice
from swarm_engine.server.grammars import check_parameters, json_object_grammar, json_schema_grammar
from swarm_engine.tracker.fields import Fields
from swarm_engine.tracker.messages import Message

LABELS = frozenset({"name", "description", "strict"})
FORM = Fields(frozenset({"schema"}), LABELS, kept=frozenset({"schema"}))
FORMAT = Fields(frozenset({"type", "json_schema", "schema"}), LABELS, kept=frozenset({"json_schema", "schema"}))
"""Of the form of an answer."""


class ToolCalls:
    """The tool calls of a conversation while it is read, and those that wait for a result.

    Templates would show the model an answer to nothing, or a call that nobody answered, and neither is what happened.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()
        """Ids are the caller's own: frameworks rename them."""
        self._open: list[tuple[str, str]] = []
        """Id and place of each call without a result."""

    def make(self, call_id: str, where: str) -> None:
        """A call, and its place in the request."""
        self.known.add(call_id)
        self._open.append((call_id, where))

    def answer(self, call_id: str | None, where: str) -> None:
        """A result.

        Args:
            call_id: of the call that it answers; one without goes with any call, as legacy functions do.
            where: place of the id in the request.
        Raises:
            BadRequestError: no call before it has this id.
        """
        if call_id not in self.known and (call_id is not None or not self.known):
            named = sorted(filter(None, self.known))
            made = (
                f"those before it are {shortened(', '.join(map(shown, named)))}" if named else "none before it has one"
            )
            made = made if self.known else "there is none before it"
            raise BadRequestError(
                f"{where} is {shown(call_id)}, and no tool call has that id: {made}",
                "send the assistant's message with the call before its result, or leave both out",
                param=where,
            )
        answered = next((one for one in self._open if call_id in (None, one[0])), None)
        if answered is not None:
            self._open.remove(answered)

    def check_answered(self, before: str) -> None:
        """See that every call has its result.

        Args:
            before: where it has to stand, in words.
        Raises:
            BadRequestError: one has none.
        """
        if self._open:
            call_id, where = self._open[0]
            raise BadRequestError(
                f"{where} is the tool call {shown(call_id)}, and {before} there is no result of it",
                "send the result with the call's id, if only to say that it failed, or leave the call out",
                param=where,
            )


def openai_tool_choice(value: Any, tools: Sequence[Message]) -> ToolChoice:
    """`tool_choice` of OpenAI's APIs, in which a function is named in an object of its own or beside its type."""
    match value:
        case None | "auto":
            return Auto()
        case "none":
            return NoTools()
        case "required":
            return must_call((), tools)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return must_call((name,), tools)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(subset)}} | {
            "type": "allowed_tools",
            "mode": mode,
            "tools": list(subset),
        }:
            return _allowed(mode, [_name_of(one) for one in subset], tools)
    raise UnsupportedError(
        f"tool_choice {shown(value)} is not taken by this server",
        'use "auto", "none", "required", or name a function',
        param="tool_choice",
    )


def _name_of(value: Any) -> str:
    match value:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise BadRequestError(f"tool_choice allows {shown(value)}, which names no function", param="tool_choice")


def _allowed(mode: Any, names: Sequence[str], tools: Sequence[Message]) -> ToolChoice:
    if mode == "required":
        return must_call(names, tools)
    if mode != "auto" or {tool["function"]["name"] for tool in tools} - set(names):
        raise UnsupportedError(
            f"tool_choice allows some tools in mode {shown(mode)}, which nothing enforces here",
            "send only those tools, or use mode required",
            param="tool_choice",
        )
    return Auto()


def must_call(names: Sequence[str], tools: Sequence[Message]) -> ToolChoice:
    """The choice that forces a call of one of the named tools, or of any where none is named."""
    known = [tool["function"]["name"] for tool in tools]
    if not known:
        raise BadRequestError(
            "tool_choice forces a tool call, but there are no tools", "send tools", param="tool_choice"
        )
    if unknown := [name for name in names if name not in known]:
        raise BadRequestError(
            f"tool_choice names {shown(unknown[0])}, the tools are {shortened(', '.join(known))}",
            "name one of them",
            param="tool_choice",
        )
    _check_callable(tools, names or known)
    return Named(tuple(names)) if names else Required()


def _check_callable(tools: Sequence[Message], names: Collection[str]) -> None:
    """See that a grammar can hold calls of the named tools.

    Raises:
        BadRequestError: a schema among theirs can't be followed.
    """
    for index, tool in enumerate(tools):
        function, where = tool["function"], f"tools[{index}]"
        if function["name"] in names:
            try:
                check_parameters(function["parameters"])
            except BadRequestError as error:
                raise BadRequestError(f"{where} ({shown(function['name'])}): {error}", param=where) from error


def answer_grammar(value: Any, param: str, choice: ToolChoice, tools: Sequence[Message]) -> str | None:
    """The grammar that an answer is asked to follow: text has none, else it is a JSON object, or what fits a schema.

    Chat completions put the schema one level deeper than the other APIs. Tools that may be called in the answer's place
    are part of what the reply must follow.
    """
    if isinstance(value, dict):
        value = FORMAT.said(value, param)
        if isinstance(inside := value.get("json_schema"), dict):
            value["json_schema"] = FORM.said(inside, f"{param}.json_schema")
    is_free = value is None or (isinstance(value, dict) and value.get("type") == "text")
    if not is_free and isinstance(choice, Auto):
        _check_callable(tools, [tool["function"]["name"] for tool in tools])
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return json_object_grammar()
        case {"type": "json_schema", "json_schema": {"schema": schema}} | {"type": "json_schema", "schema": schema}:
            place = f"{param}.json_schema.schema" if "json_schema" in value else f"{param}.schema"
            return blaming(place, lambda: json_schema_grammar(schema))
        case {"type": "json_schema"}:
            place = f"{param}.json_schema.schema" if param == "response_format" else f"{param}.schema"
            raise BadRequestError(f"{place} is missing", "put the JSON schema there", param=place)
    raise UnsupportedError(
        f"{param} is {shown(value)}",
        "its type is text, json_object or json_schema with a schema",
        param=f"{param}.type" if isinstance(value, dict) else param,
    )


@contextmanager
def told_as(*names: tuple[str, str]) -> Iterator[None]:
    """Errors about what was put into the shape of chat completions, told with the names of the caller's own request.

    Args:
        names: the other shape's and the caller's, the longest first.
    """
    try:
        yield
    except BadRequestError as error:
        message, param = error.message, error.param
        for theirs, own in names:
            message, param = message.replace(theirs, own), param and param.replace(theirs, own)
        raise type(error)(message, error.hint, code=error.code, param=param) from error


def wrapped(name: Any, description: Any, parameters: Any, strict: Any = None) -> Mapping[str, Any]:
    """A tool in the shape of chat completions, which templates know."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
