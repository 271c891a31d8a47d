"""Grammars under which a model must call a tool or write its answer in a given form, as its template writes replies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from swarm_engine.tracker.formats import CallSyntax, Family, ReplyFormat
from swarm_engine.tracker.marks import ANY

TEXT = r"/(.|\n)*/"
ID = "/[A-Za-z0-9]{9}/"
SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as templates write it; a model that may write any white space may write it without end."""


def forced_call(form: ReplyFormat, functions: Sequence[Mapping[str, Any]], literals: Callable[[str], str]) -> str:
    """A Lark grammar of one call of one of the functions.

    Args:
        form: the template's; its calls have a syntax.
        functions: the tools that may be called.
        literals: text as Lark's literals, control tokens by their ids.
    """
    return _lark(form, "call", functions, literals)


def formed_answer(
    form: ReplyFormat, answer: str, functions: Sequence[Mapping[str, Any]], literals: Callable[[str], str]
) -> str:
    """A grammar (JSON) of replies whose answer fits another grammar; reasoning stays free.

    Args:
        answer: JSON of one grammar.
        functions: tools that may be called in the answer's place.
    """
    (inner,) = json.loads(answer)["grammars"]
    is_channels = form.calls is not None and form.calls.family is Family.CHANNELS
    shown = f"{literals('<|channel|>final<|message|>')} @answer" if is_channels else "@answer"
    lark = _lark(form, f"(call | {shown})" if functions else shown, functions, literals)
    return json.dumps({"grammars": [{"name": "reply", "lark_grammar": lark}, {**inner, "name": "answer"}]})


def _lark(form: ReplyFormat, reply: str, functions: Sequence[Mapping[str, Any]], literals: Callable[[str], str]) -> str:
    """The rules of a reply, reasoning before it and calls in it."""
    opening, rules = _before(form, literals)
    rules.insert(0, f"start: {opening}{reply}")
    if functions:
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, function in enumerate(functions):
        assert form.calls is not None, "calls are forced where they have a syntax"
        head, tail = _around(form.calls, function["name"])
        middle = f" {ID} ".join(literals(part) for part in head.split(ANY))
        rules.append(f"call_{index}: {middle} arguments_{index} {literals(tail)}".rstrip())
        schema = {**function["parameters"], "x-guidance": SPACING}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules) + "\n"


def _before(form: ReplyFormat, literals: Callable[[str], str]) -> tuple[str, list[str]]:
    """Reasoning, where the model may write some or the prompt has opened it; and the rules that it needs."""
    if form.calls is not None and form.calls.family is Family.CHANNELS:
        opens, closes = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        return f"({literals(opens)} reasoning_text {literals(closes)})? ", [f"reasoning_text: {TEXT}"]
    if form.reasoning is None:
        return "", []
    closes = literals(form.reasoning.closes)
    if closes.startswith("<["):
        body, rule = f"reasoning_text {closes}", f"reasoning_text: {TEXT}"
    else:
        tag = re.escape(form.reasoning.closes).replace("/", r"\/")
        body, rule = "reasoning_end", f"reasoning_end[lazy]: /(.|\\n)*{tag}/"
    body += f" {json.dumps(chr(10) * 2)}"
    is_open = form.is_reasoning_opened_by_prompt
    return f"{body} " if is_open else f"({literals(form.reasoning.opens)} {body})? ", [rule]


def _around(calls: CallSyntax, name: str) -> tuple[str, str]:
    """What a call's arguments stand between."""
    opened = f'{{"{calls.name_key}": {json.dumps(name)}, "{calls.arguments_key}": '
    match calls.family:
        case Family.TAGGED_JSON:
            return f"{calls.call_opens}\n{opened}", f"}}\n{calls.call_closes}"
        case Family.JSON_LIST:
            return f"{calls.opens} [{opened}", "}]"
        case Family.BARE_JSON:
            return opened, "}"
        case Family.NAMED:
            return f"{calls.opens}{calls.call_opens}{name}{calls.middle}", f"{calls.call_closes}{calls.closes}"
        case Family.CHANNELS:
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>"
        case _:
            assert_never(calls.family)
