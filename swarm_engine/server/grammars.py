"""From a request's JSON schema to the grammar that its reply must fit.

Everything a schema asks for is enforced or refused: a keyword that can't be followed is a 400 that names it, misspelt
ones included, for who asked for `uniqueItems` and got an item twice would blame the model. So `strict` changes nothing
here: `true` gets what it asks for, and `false`, which asks for an attempt, gets the same.

Properties come in the schema's order, and between two marks of JSON there are at most `MAX_BLANKS` blanks, for a model
can go on with blanks for ever. llguidance reads the schema, in a process of its own (see `swarm_engine.guidance`): a
schema that ends it, or takes it too long, is refused like any other that can't be followed. What it says of a schema is
kept, so every schema is tried once.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swarm_engine.errors import BadRequestError, UnsupportedError, shortened, shown
from swarm_engine.guidance import Guidance, RefusedError
from swarm_engine.waiting import TakesLongError, is_event_loop

MAX_SCHEMA_CHARS = 256 * 1024
MAX_FAULT_CHARS = 400
MAX_BLANKS = 25
"""Enough for a line break and six levels of four blanks."""
BLANKS = rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}"
MAX_VERDICTS = 4096

ENFORCED = frozenset({
    "$anchor", "$defs", "$id", "$ref", "$schema", "definitions", "allOf", "anyOf", "oneOf", "discriminator", "const",
    "enum", "type", "additionalItems", "items", "maxItems", "minItems", "prefixItems", "additionalProperties",
    "maxProperties", "minProperties", "patternProperties", "properties", "required", "format", "maxLength", "minLength",
    "pattern", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf",
})  # fmt: skip
"""Keywords that llguidance follows, or says why it can't. Those it does not know it would pass over."""

ANNOTATIONS = frozenset({
    "$comment", "title", "description", "default", "deprecated", "example", "examples", "readOnly", "writeOnly",
})  # fmt: skip
"""Keywords that ask for nothing."""

IN_MAPS = ("$defs", "definitions", "properties", "patternProperties")
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
INSIDE = ("items", "additionalItems", "additionalProperties")


def json_schema_grammar(schema: Any) -> str:
    """The grammar of all JSON texts that fit a schema.

    Raises:
        BadRequestError: the schema is none, nothing fits it, or a value in it can't be enforced.
        UnsupportedError: a keyword that can't be enforced.
    """
    text = _text_of(schema)
    try:
        unknown = next(unknown_keywords(schema), None)
    except RecursionError as error:
        raise BadRequestError("the schema is nested too deeply", "send it flatter") from error
    if unknown is not None:
        keyword, where = map(shortened, unknown)
        raise UnsupportedError(f"{keyword} (in {where}) can't be enforced in a schema", "leave it out")
    is_error, faults = _verdict(text)
    if is_error or faults:
        raise BadRequestError(f"the schema can't be enforced: {_in_our_words('; '.join(faults))}")
    return _grammar(text)


def check_parameters(schema: Mapping[str, Any]) -> None:
    """See that a call's arguments can be held to the schema of its tool.

    Keywords that are passed over are no fault here: what a tool asks for is the caller's to check, forced or not.

    Raises:
        BadRequestError: the schema is broken, or nothing fits it.
    """
    is_error, faults = _verdict(_text_of(schema))
    if is_error:
        raise BadRequestError(f"the schema of its arguments can't be followed: {_in_our_words('; '.join(faults))}")


def json_object_grammar() -> str:
    """The grammar of all JSON objects."""
    return json_schema_grammar({"type": "object"})


def _text_of(schema: Any) -> str:
    """A schema as JSON.

    Raises:
        BadRequestError: it is none, or too long.
    """
    if not isinstance(schema, Mapping):
        raise BadRequestError(f"the schema must be a JSON object, not {shown(schema)}")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError as error:
        raise BadRequestError("the schema is nested too deeply", "send it flatter") from error
    except UnicodeEncodeError as error:
        raise BadRequestError("the schema holds a lone surrogate", "send valid Unicode text") from error
    except (ValueError, TypeError) as error:
        raise BadRequestError(f"the schema is no JSON ({error})") from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise UnsupportedError(f"the schema has {len(text)} characters, {MAX_SCHEMA_CHARS} are taken", "shorten it")
    return text


def _grammar(text: str) -> str:
    """The form in which llguidance takes a schema."""
    schema = {**json.loads(text), "x-guidance": {"whitespace_pattern": BLANKS}}
    inner = {"name": "json_schema", "json_schema": schema, "lark_grammar": None}
    return json.dumps({"grammars": [inner], "max_tokens": None}, ensure_ascii=False)


class _Verdicts:
    """What llguidance says of schemas."""

    def __init__(self) -> None:
        self._guidance = Guidance()
        self._kept: OrderedDict[bytes, tuple[bool, Sequence[str]]] = OrderedDict()

    def of(self, text: str) -> tuple[bool, Sequence[str]]:
        """Whether a schema is broken, and what is wrong with it.

        Raises:
            TakesLongError: it is not known yet, and this is the event loop, where nothing waits for another process.
        """
        key = hashlib.blake2b(text.encode()).digest()
        found = self._kept.get(key)
        if found is not None:
            return found
        if is_event_loop():
            raise TakesLongError
        try:
            is_error, faults = json.loads(self._guidance.ask("check", _grammar(text)))
        except RefusedError as error:
            is_error, faults = True, [str(error)]
            if not error.is_lasting:
                return is_error, faults
        self._kept[key] = is_error, faults
        if len(self._kept) > MAX_VERDICTS:
            self._kept.popitem(last=False)
        return is_error, faults


_verdict = _Verdicts().of


def unknown_keywords(schema: Any, where: str = "#") -> Iterator[tuple[str, str]]:
    """Keywords that would be passed over, with the JSON pointer of the schema they stand in."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        here = f"{where}/{keyword}"
        if keyword not in ENFORCED and keyword not in ANNOTATIONS:
            yield keyword, where
        elif keyword in IN_MAPS and isinstance(value, dict):
            for name, inner in value.items():
                yield from unknown_keywords(inner, f"{here}/{name}")
        elif keyword in IN_LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from unknown_keywords(inner, f"{here}/{index}")
        elif keyword in INSIDE:
            yield from unknown_keywords(value, here)


def _in_our_words(fault: str) -> str:
    """What llguidance says, on one line and with the keyword it means."""
    if "coerce_one_of" in fault:
        return "oneOf is taken where no value can fit two of its schemas, and here one may; use anyOf"
    if "recursion limit" in fault:
        return "it is nested too deeply; send it flatter"
    fault = " ".join(fault.removesuffix("<non-verbose/>").split()).replace("Unsatisfiable schema:", "nothing fits it,")
    if "regex" in fault:
        fault = f"pattern: {fault}"
    return fault if len(fault) <= MAX_FAULT_CHARS else f"{fault[:MAX_FAULT_CHARS]} …"
