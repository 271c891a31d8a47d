"""From a request's JSON schema to the grammar that its reply must fit.

Everything a schema asks for is enforced or refused: a keyword that can't be followed is a 400 that names it, misspelt
ones included, for who asked for `uniqueItems` and got an item twice would blame the model. So `strict` changes nothing
here: `true` gets what it asks for, and `false`, which asks for an attempt, gets the same.

Properties come in the schema's order, and between two marks of JSON there are at most `MAX_BLANKS` blanks, for a model
can go on with blanks for ever. llguidance reads the schema; it is loaded with the first one that comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from swarm_engine.errors import BadRequestError, UnsupportedError, shortened, shown

MAX_SCHEMA_CHARS = 256 * 1024
MAX_FAULT_CHARS = 400
MAX_BLANKS = 25
"""Enough for a line break and six levels of four blanks."""

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
    if not isinstance(schema, Mapping):
        raise BadRequestError(f"the schema must be a JSON object, not {shown(schema)}")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
        unknown = next(unknown_keywords(schema), None)
    except RecursionError as error:
        raise BadRequestError("the schema is nested too deeply", "send it flatter") from error
    except UnicodeEncodeError as error:
        raise BadRequestError("the schema holds a lone surrogate", "send valid Unicode text") from error
    except (ValueError, TypeError) as error:
        raise BadRequestError(f"the schema is no JSON ({error})") from error
    if unknown is not None:
        keyword, where = map(shortened, unknown)
        raise UnsupportedError(f"{keyword} (in {where}) can't be enforced in a schema", "leave it out")
    if len(text) > MAX_SCHEMA_CHARS:
        raise UnsupportedError(f"the schema has {len(text)} characters, {MAX_SCHEMA_CHARS} are taken", "shorten it")
    return _compile(text)


def check_parameters(schema: Mapping[str, Any]) -> None:
    """See that a call's arguments can be held to the schema of its tool.

    Keywords that are passed over are no fault here: what a tool asks for is the caller's to check, forced or not.

    Raises:
        BadRequestError: the schema is broken, or nothing fits it.
    """
    _, is_error, faults = _follow(json.dumps(schema, ensure_ascii=False))
    if is_error:
        raise BadRequestError(f"the schema of its arguments can't be followed: {_in_our_words('; '.join(faults))}")


def json_object_grammar() -> str:
    """The grammar of all JSON objects."""
    return json_schema_grammar({"type": "object"})


def _compile(text: str) -> str:
    grammar, is_error, faults = _follow(text)
    if is_error or faults:
        raise BadRequestError(f"the schema can't be enforced: {_in_our_words('; '.join(faults))}")
    return grammar


@lru_cache(maxsize=256)
def _follow(text: str) -> tuple[str, bool, list[str]]:
    """The grammar of a schema, whether it is broken, and what is wrong with it."""
    from llguidance import LLMatcher, LLParserLimits

    blanks = rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}"
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": blanks})
    except ValueError as error:
        return "", True, [str(error)]
    is_error, faults = LLMatcher.validate_grammar_with_warnings(grammar, limits=LLParserLimits(verbose_errors=False))
    return grammar, is_error, faults


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
            for place, inner in enumerate(value):
                yield from unknown_keywords(inner, f"{here}/{place}")
        elif keyword in INSIDE:
            yield from unknown_keywords(value, here)


def _in_our_words(fault: str) -> str:
    """What llguidance says, on one line and with the keyword it means."""
    if "coerce_one_of" in fault:
        return "oneOf is taken where no value can fit two of its schemas, and here one may; use anyOf"
    if "recursion limit" in fault:
        return "it is nested too deeply; send it flatter"
    fault = " ".join(fault.split()).replace("Unsatisfiable schema:", "nothing fits it,")
    if "regex" in fault:
        fault = f"pattern: {fault}"
    return fault if len(fault) <= MAX_FAULT_CHARS else f"{fault[:MAX_FAULT_CHARS]} …"
