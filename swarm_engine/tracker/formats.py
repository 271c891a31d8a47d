"""How a chat template writes reasoning and tool calls, found out by rendering probes through it.

Nothing here knows a model's name. The template writes a call with a known name and known arguments, and what stands
before, between and behind them is its markup. Five kinds are read: JSON between tags, a JSON list behind a tag, bare
JSON, the name and then the arguments between tags, and channels with recipients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from swarm_engine.errors import BadRequestError
from swarm_engine.tracker.marks import ANY
from swarm_engine.tracker.messages import NO_PARAMETERS, Message, Tool

Render = Callable[[Sequence[Message], Sequence[Tool], bool], str]
"""Messages as the template wants them, tools, whether a reply is to follow; the text."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""What templates call an assistant message's reasoning."""

NAME, OTHER_NAME = "probe_the_template", "probe_it_again"
KEY, VALUE, OTHER_VALUE = "probe_key", "probe value", "another value"
CONTENT, REASONING = "probe content", "probe reasoning"
QUESTION: Message = {"role": "user", "content": "Look it up."}
TOOLS: tuple[Tool, ...] = tuple(
    {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": NO_PARAMETERS}}
    for name in (NAME, OTHER_NAME)
)
IDS = ("probe0001", "probe0002")
OUR_IDS = re.compile(f"(call_)?({'|'.join(IDS)})")


class Family(StrEnum):
    """How tool calls are written."""

    TAGGED_JSON = "tagged_json"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, once a call."""
    JSON_LIST = "json_list"
    """`[TOOL_CALLS] [{"name": …, "arguments": …}, …]`."""
    BARE_JSON = "bare_json"
    """`{"name": …, "parameters": …}` as the whole reply."""
    NAMED = "named"
    """The name and then its arguments, each behind a tag of its own."""
    CHANNELS = "channels"
    """Every part of the reply is a message with a channel; a call is one with a recipient."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags around reasoning."""

    opens: str
    closes: str


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The markup of tool calls. White space in it is a habit, not a rule: replies are read without it."""

    family: Family
    opens: str = ""
    """Stands before the first call; empty where every call has its own or none is needed."""
    call_opens: str = ""
    """Stands before every call."""
    middle: str = ""
    """Between name and arguments, where these are no JSON object together."""
    call_closes: str = ""
    closes: str = ""
    """Stands behind the last call."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    closing: str = ""
    """All that the template writes between the last arguments and the end of the turn."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How replies hold reasoning and tool calls."""

    reasoning: Reasoning | None
    calls: CallSyntax | None
    is_reasoning_opened_by_prompt: bool = False
    """Whether the generation prompt opens the reasoning, as it did in the probe."""

    @property
    def has_reasoning(self) -> bool:
        """Whether replies may hold reasoning: between tags, or in a channel of its own."""
        return self.reasoning is not None or (self.calls is not None and self.calls.family is Family.CHANNELS)


@dataclass(frozen=True, slots=True)
class Wants:
    """In what shape a template takes what OpenAI's messages hold."""

    has_tools: bool = False
    """Whether it shows the tools of a request."""
    has_calls: bool = False
    """Whether it writes tool calls at all."""
    are_arguments_text: bool = False
    """Whether arguments must be JSON text; most templates take the object."""
    is_empty_content_none: bool = False
    """Whether a call without content is known by a content of None."""
    are_ids_short: bool = False
    """Whether call ids must be nine letters and digits."""
    reasoning_field: str | None = None
    """None where it knows no such field."""
    is_reasoning_in_content: bool = False
    """Whether it reads reasoning out of the content, by its tags."""


def find_format(render: Render, added: Sequence[str], ends: Sequence[str]) -> tuple[ReplyFormat | None, Wants]:
    """What the template behind `render` writes.

    Args:
        render: the template.
        added: texts of the tokenizer's control tokens.
        ends: those that end a reply.
    """
    probe = _Probe(render, added, ends)
    wants = probe.wants()
    reasoning, wants = probe.reasoning(wants)
    calls = probe.calls(wants, reasoning) if wants.has_calls else None
    if calls is not None and calls.family is Family.CHANNELS:
        reasoning = None
    if reasoning is None and calls is None:
        return None, wants
    prompt = probe.render([QUESTION], (), True) or ""
    is_opened = reasoning is not None and prompt.rstrip().endswith(reasoning.opens)
    return ReplyFormat(reasoning, calls, is_opened), wants


def call_message(names: Sequence[str], wants: Wants, content: str = "") -> Message:
    """An assistant's message that calls the named tools, the first with `VALUE`."""
    calls = []
    for call_id, name, value in zip(IDS, names, (VALUE, OTHER_VALUE), strict=False):
        arguments: Any = {KEY: value}
        if wants.are_arguments_text:
            arguments = json.dumps(arguments)
        given = call_id if wants.are_ids_short else f"call_{call_id}"
        calls.append({"id": given, "type": "function", "function": {"name": name, "arguments": arguments}})
    empty = None if wants.is_empty_content_none else ""
    return {"role": "assistant", "content": content or empty, "tool_calls": calls}


class _Probe:
    def __init__(self, render: Render, added: Sequence[str], ends: Sequence[str]) -> None:
        self._render = render
        self._added = added
        self._ends = ends
        self._tag = tag_pattern(added)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], is_asked: bool) -> str | None:
        """The text, or None where the template refuses."""
        try:
            return self._render(messages, tools, is_asked)
        except BadRequestError:
            return None

    # What the template takes

    def wants(self) -> Wants:
        """The shape in which it writes a call with its arguments as JSON, or otherwise in any form."""
        shown = self.render([QUESTION], TOOLS, True) or ""
        has_tools = NAME in shown and OTHER_NAME in shown
        loose: Wants | None = None
        for bits in range(8):
            wants = Wants(
                has_tools=has_tools,
                has_calls=True,
                are_arguments_text=bool(bits & 1),
                is_empty_content_none=bool(bits & 2),
                are_ids_short=bool(bits & 4),
            )
            call = call_message([NAME], wants)
            result = {"role": "tool", "content": "17", "name": NAME, "tool_call_id": call["tool_calls"][0]["id"]}
            text = self.render([QUESTION, call, result], TOOLS if has_tools else (), True)
            if text is None:
                continue
            if _arguments(VALUE).search(text):
                return wants
            if KEY in text and VALUE in text:
                loose = loose or wants
        return loose or Wants(has_tools=has_tools)

    def reasoning(self, wants: Wants) -> tuple[Reasoning | None, Wants]:
        """The tags around reasoning, and where the template looks for it."""
        for field in REASONING_FIELDS:
            text = self.render([QUESTION, {"role": "assistant", "content": CONTENT, field: REASONING}], (), False)
            if text is not None and REASONING in text and CONTENT in text:
                before, _, behind = text.partition(REASONING)
                opens, closes = self._last_tag(before), self._first_tag(behind)
                found = Reasoning(opens, closes) if opens and closes else None
                return found, replace(wants, reasoning_field=field)
        prompt = (self.render([QUESTION], (), True) or "").rstrip()
        for tags in self._pairs():
            if prompt.endswith(tags.opens):
                return tags, replace(wants, is_reasoning_in_content=self._reads(tags))
        for tags in self._pairs():
            if self._reads(tags):
                return tags, replace(wants, is_reasoning_in_content=True)
        return None, wants

    def _pairs(self) -> list[Reasoning]:
        """Tags that may stand around reasoning: control tokens that come in pairs, and the usual one."""
        pairs = [Reasoning(one, f"{one[0]}/{one[1:]}") for one in self._added]
        known = set(self._added)
        pairs = [pair for pair in pairs if pair.closes in known]
        return [*pairs, Reasoning("<think>", "</think>")]

    def _reads(self, tags: Reasoning) -> bool:
        """Whether the template takes reasoning between these tags out of an older answer's content."""
        content = f"{tags.opens}\n{REASONING}\n{tags.closes}\n\n{CONTENT}"
        text = self.render([QUESTION, {"role": "assistant", "content": content}, QUESTION], (), True)
        return text is not None and CONTENT in text and REASONING not in text

    # How it writes calls

    def calls(self, wants: Wants, reasoning: Reasoning | None) -> CallSyntax | None:
        """The markup of its calls; None where it is of no kind that is read."""
        turn = self._turn(call_message([NAME], wants))
        found = _arguments(VALUE).search(turn)
        at = turn.find(NAME)
        if found is None or at < 0:
            return None
        if reasoning is not None and reasoning.closes in turn[:at]:
            cut = turn[:at].rindex(reasoning.closes) + len(reasoning.closes)
            turn, at = turn[cut:], at - cut
            found = _arguments(VALUE).search(turn)
            assert found is not None, "the arguments stand behind the name's beginning or around it"
        closing = self._closing(turn[found.end() :])
        return (
            self._channels(turn, at, closing)
            or self._json_object(turn, at, closing)
            or self._named(turn, at, found, closing, wants)
        )

    def _turn(self, answer: Message) -> str:
        """What the template writes for an answer beyond the generation prompt."""
        prompt = self.render([QUESTION], TOOLS, True)
        whole = self.render([QUESTION, answer], TOOLS, False)
        if prompt is None or whole is None:
            return ""
        return beyond(prompt, whole, self._tag)

    def _closing(self, behind: str) -> str:
        """What follows the last arguments up to the end of the turn."""
        behind = OUR_IDS.sub(ANY, behind)
        ends = [behind.find(end) for end in self._ends if end in behind]
        if ends:
            return behind[: min(ends)]
        plain = self.render([QUESTION, {"role": "assistant", "content": CONTENT}], (), False) or ""
        return behind.removesuffix(plain.partition(CONTENT)[2])

    def _channels(self, turn: str, at: int, closing: str) -> CallSyntax | None:
        if f"to=functions.{NAME}" not in turn or "<|channel|>" not in turn or "<|message|>" not in turn[at:]:
            return None
        return CallSyntax(Family.CHANNELS, closing=closing)

    def _json_object(self, turn: str, at: int, closing: str) -> CallSyntax | None:
        decoder = json.JSONDecoder()
        for start in reversed([match.start() for match in re.finditer(r"\{", turn[:at])]):
            try:
                value, end = decoder.raw_decode(turn, start)
            except ValueError:
                continue
            name_keys = [key for key, item in value.items() if item == NAME]
            argument_keys = [key for key, item in value.items() if _is_probe(item)]
            if name_keys and argument_keys:
                before, behind = turn[:start].rstrip(), turn[end:].lstrip()
                is_list = before.endswith("[") and behind[:1] in ("]", ",")
                tag = self._last_tag(before[:-1] if is_list else before)
                keys = {"name_key": name_keys[0], "arguments_key": argument_keys[0], "closing": closing}
                if is_list:
                    return CallSyntax(Family.JSON_LIST, opens=tag, **keys) if tag else None
                if not tag:
                    return CallSyntax(Family.BARE_JSON, **keys)
                closes = self._first_tag(behind)
                closes = "" if closes in self._ends else closes
                return CallSyntax(Family.TAGGED_JSON, call_opens=tag, call_closes=closes, **keys)
        return None

    def _named(self, turn: str, at: int, found: re.Match[str], closing: str, wants: Wants) -> CallSyntax | None:
        if found.start() < at:
            return None
        before, middle = turn[:at], turn[at + len(NAME) : found.start()]
        opens, call_opens, call_closes, closes = "", before, closing, ""
        two = self._turn(call_message([NAME, OTHER_NAME], wants))
        first, second = _arguments(VALUE).search(two), _arguments(OTHER_VALUE).search(two)
        if first is not None and second is not None:
            between = two[first.end() : two.find(OTHER_NAME, first.end())]
            closing = self._closing(two[second.end() :])
            call_opens = self._common_end(before, between)
            call_closes = self._common_start(between.removesuffix(call_opens), closing)
            opens, closes = before.removesuffix(call_opens), closing.removeprefix(call_closes)
        if not self._tag.match(before.lstrip()) or not self._tag.match(call_opens.lstrip()):
            return None
        return CallSyntax(
            Family.NAMED,
            opens=opens,
            call_opens=call_opens,
            middle=OUR_IDS.sub(ANY, middle),
            call_closes=call_closes,
            closes=closes,
            closing=closing,
        )

    # Tags

    def _last_tag(self, text: str) -> str:
        """The tag that ends a text, white space aside; empty where none does."""
        text = text.rstrip()
        found = [match.group() for match in self._tag.finditer(text) if match.end() == len(text)]
        return found[0] if found else ""

    def _first_tag(self, text: str) -> str:
        match = self._tag.match(text.lstrip())
        return match.group() if match else ""

    def _common_start(self, one: str, other: str) -> str:
        cut = common_start(one, other)
        for match in self._tag.finditer(one):
            if match.start() < cut < match.end():
                cut = match.start()
        return one[:cut]

    def _common_end(self, one: str, other: str) -> str:
        cut = len(one) - common_start(one[::-1], other[::-1])
        for match in self._tag.finditer(one):
            if match.start() < cut < match.end():
                cut = match.end()
        return one[cut:]


LOOKS_LIKE_A_TAG = r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]"


def tag_pattern(added: Sequence[str]) -> re.Pattern[str]:
    """Control tokens, and what looks like a tag."""
    longest_first = sorted(added, key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, longest_first), LOOKS_LIKE_A_TAG]))


def beyond(prompt: str, whole: str, tag: re.Pattern[str]) -> str:
    """The rest of a text from where it parts from a prompt; a tag is never cut in two."""
    cut = common_start(prompt, whole)
    if cut < len(prompt):
        cut = next((match.start() for match in tag.finditer(whole) if match.start() < cut < match.end()), cut)
    return whole[cut:]


def common_start(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _arguments(value: str) -> re.Pattern[str]:
    return re.compile(rf'\{{\s*"{KEY}"\s*:\s*"{value}"\s*\}}')


def _is_probe(item: Any) -> bool:
    if isinstance(item, str):
        return _arguments(VALUE).fullmatch(item.strip()) is not None
    return bool(item == {KEY: VALUE})
