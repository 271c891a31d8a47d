"""JSON schemas: what is enforced, and that the rest is refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from swarm_engine.errors import BadRequestError
from swarm_engine.protocol import Sampled
from swarm_engine.server.grammars import MAX_BLANKS, MAX_SCHEMA_CHARS, json_object_grammar, json_schema_grammar
from swarm_engine.server.worker_link import Generation


def fits(grammar: str, text: str) -> bool:
    """Whether a whole text fits a grammar, byte by byte."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    class Bytes:
        """A tokenizer of the 256 bytes and an end token."""

        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>")
        special_token_ids = (256,)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes())), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def one(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of an object with one value."""
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 9}, [1, 9], [0, 10, 1.5, "1"]),
        ({"type": "number", "exclusiveMinimum": 0}, [0.5, 3], [0, -1]),
        ({"type": "integer", "multipleOf": 5}, [0, 10], [3]),
        ({"type": "string", "pattern": "^[a-c]{2}$"}, ["ab"], ["abc", "xy"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😊x"], ["a", "abcd"]),
        ({"type": "string", "format": "date"}, ["2026-11-29"], ["29.11.2026"]),
        ({"enum": ["x", 1, None]}, ["x", 1, None], ["y", 2, False]),
        ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
        ({"type": ["string", "null"]}, ["s", None], [1]),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, [3, True], ["3"]),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, [3, True], ["3"]),
        ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            [[1], [1, 2]],
            [[], [1, 2, 3], ["1"]],
        ),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[1]], [["1"], [1, 2]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "1"}]),
        (
            {"$ref": "#/$defs/leaf", "$defs": {"leaf": {"type": "integer"}}, "title": "T", "description": "d"},
            [1],
            ["1"],
        ),
    ],
)
def test_what_a_schema_asks_for_is_enforced(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    definitions = schema.pop("$defs", None)
    whole = one(schema) | ({"$defs": definitions} if definitions else {})
    grammar = json_schema_grammar(whole)
    for value in good:
        assert fits(grammar, json.dumps({"v": value}, ensure_ascii=False)), value
    for value in bad:
        assert not fits(grammar, json.dumps({"v": value}, ensure_ascii=False)), value


def test_tagged_unions_work() -> None:
    """As pydantic writes them."""

    def kind(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}

    union = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"}}
    grammar = json_schema_grammar(one(union) | {"$defs": {"Cat": kind("cat"), "Dog": kind("dog")}})
    assert fits(grammar, '{"v": {"kind": "dog"}}')
    assert not fits(grammar, '{"v": {"kind": "cow"}}')


def test_what_asks_for_nothing_is_taken() -> None:
    words = {"title": "T", "description": "d", "default": 1, "examples": [1], "deprecated": True, "$comment": "c"}
    assert fits(json_schema_grammar(one({"type": "integer", **words})), '{"v": 2}')
    named_like_keywords = {"not": {"type": "integer"}, "uniqueItems": {"const": {"if": 1}}}
    grammar = json_schema_grammar({"type": "object", "properties": named_like_keywords, "required": ["not"]})
    assert fits(grammar, '{"not": 1, "uniqueItems": {"if": 1}}')


def test_recursive_schemas_work() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["left"],
        "additionalProperties": False,
    }
    grammar = json_schema_grammar(tree)
    assert fits(grammar, '{"left": {"left": null}}')
    assert not fits(grammar, '{"left": {"right": null}}')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({"type": "string", "minLenght": 3}, "minLenght"),
        ({"type": "string", "format": "isbn"}, "isbn"),
        ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
        ({"type": "string", "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"$dynamicRef": "#it"}, "$dynamicRef"),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, "min/maxProperties"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, "oneOf"),
        ({"$ref": "https://example.com/schema.json"}, "https://example.com/schema.json"),
    ],
)
@pytest.mark.parametrize("where", ["root", "property", "item", "definition"])
def test_what_can_not_be_enforced_is_refused_by_name(schema: dict[str, Any], named: str, where: str) -> None:
    whole: dict[str, Any] = {
        "root": schema,
        "property": one(schema),
        "item": {"type": "array", "items": schema},
        "definition": one({"$ref": "#/$defs/it"}) | {"$defs": {"it": schema}},
    }[where]
    with pytest.raises(BadRequestError, match="can't be enforced") as caught:
        json_schema_grammar(whole)
    assert named in caught.value.message
    assert caught.value.status == 400
    assert len(str(caught.value)) < 600


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects inside each other."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def listed(depth: int) -> Any:
    """A value inside lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("schema", [nested(61), {"enum": [listed(122)]}])
def test_a_schema_may_be_as_deep_as_its_grammar_can_be_read(schema: dict[str, Any]) -> None:
    assert json_schema_grammar(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("string", "must be a JSON object"),
        (None, "must be a JSON object"),
        ({"type": "strnig"}, "strnig"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"enum": "a"}, "enum"),
        ({"enum": []}, "nothing fits"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "nothing fits"),
        ({"description": "x" * MAX_SCHEMA_CHARS}, "characters"),
        ({"default": float("nan")}, "no JSON"),
        ({"type": "string", "pattern": "\ud800"}, "lone surrogate"),
        ({"enum": ["\ud800"]}, "lone surrogate"),
        ({"type": "object", "properties": {"\ud800": {}}}, "lone surrogate"),
        *((nested(depth), "nested too deeply") for depth in (62, 63, 64, 78, 300, 480, 900)),
        *(({"enum": [listed(depth)]}, "nested too deeply") for depth in (123, 126, 200, 480, 900)),
    ],
)
def test_a_faulty_schema_is_refused_with_the_fault(schema: Any, reason: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        json_schema_grammar(schema)
    assert reason in caught.value.message


def test_blanks_between_marks_are_free_but_not_endless() -> None:
    grammar = json_schema_grammar(one({"type": "integer"}))
    for text in ('{"v":1}', '{"v": 1}', '{\n  "v": 1\n}', '{"v":' + " " * MAX_BLANKS + "1}"):
        assert fits(grammar, text), text
    for text in (' {"v":1}', '{"v":1} ', '{"v":' + " " * (MAX_BLANKS + 1) + "1}"):
        assert not fits(grammar, text), text


def test_properties_come_in_the_schemas_order() -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
        "required": ["a", "b"],
    }
    grammar = json_schema_grammar(schema)
    assert fits(grammar, '{"b": 1, "a": 2}')
    assert not fits(grammar, '{"a": 2, "b": 1}')


def test_a_json_object_is_any_object_and_nothing_else() -> None:
    grammar = json_object_grammar()
    for text in ("{}", '{"a": [1, "x", {"b": null}]}'):
        assert fits(grammar, text)
    for text in ("[]", '"a"', "1", "null"):
        assert not fits(grammar, text)


def test_likely_tokens_follow_their_tokens_through_the_link() -> None:
    async def follow() -> None:
        generation = Generation("a", lambda *_: None)
        generation.add(Sampled("a", (5, 6), (-1.0, -2.0), 0, (((5, -1.0),), ((7, -0.5), (6, -2.0)))))
        generation.add(Sampled("a", (8,), (-3.0,), 1, (((8, -3.0),),)))
        assert generation.top == [((5, -1.0),), ((7, -0.5), (6, -2.0)), ((8, -3.0),)]
        generation.cut(1)
        assert (generation.token_ids, generation.top) == ([5], [((5, -1.0),)])
        bare = Generation("b", lambda *_: None)
        bare.add(Sampled("b", (5,), (-1.0,), 0))
        assert bare.top == []

    asyncio.run(follow())
