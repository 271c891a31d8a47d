"""What counts as the same message, and which messages are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm_engine.errors import BadRequestError, UnsupportedError
from swarm_engine.tracker.messages import canonical, parse_messages, prefix_digests


def one(**message: Any) -> dict[str, Any]:
    (parsed,) = parse_messages([message])
    return parsed


def test_a_list_of_text_parts_and_a_string_are_the_same_message() -> None:
    """B063."""
    parts = one(role="system", content=[{"type": "text", "text": "h"}, {"type": "text", "text": "i"}])
    assert parts == one(role="system", content="hi") == {"role": "system", "content": "hi"}


def test_null_empty_and_missing_content_beside_tool_calls_are_the_same_message() -> None:
    """B064."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "lookup_code", "arguments": "{}"}}]
    null = one(role="assistant", content=None, tool_calls=calls)
    assert null == one(role="assistant", content="", tool_calls=calls) == one(role="assistant", tool_calls=calls)
    assert null["content"] == ""
    assert null["tool_calls"][0]["function"] == {"name": "lookup_code", "arguments": {}}


def test_arguments_are_compared_as_values_and_broken_ones_stay_text() -> None:
    """B022: a malformed argument string must not raise."""

    def call(arguments: str) -> dict[str, Any]:
        return one(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])

    assert canonical(call('{"a": 1, "b": 2}')) == canonical(call('{"b":2,"a":1}'))
    for broken in ('{"q": "x"', "[1,2]", '"abc"'):
        assert call(broken)["tool_calls"][0]["function"]["arguments"] == broken


def test_arguments_that_no_tokenizer_takes_are_refused_whether_text_or_object() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return one(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])

    deep: dict[str, Any] = {}
    for _ in range(64):
        deep = {"a": [deep]}
    for arguments, why in (
        ({"q": "\ud800"}, "lone surrogate"),
        ({"q": [{"\ud800": 1}]}, "lone surrogate"),
        (r'{"q": "\ud800"}', "lone surrogate"),
        (r'{"\ufdd0": 1}', "noncharacters"),
        (deep, "nested more than 64 deep"),
        (json.dumps(deep), "nested more than 64 deep"),
    ):
        with pytest.raises(BadRequestError, match=rf"tool_calls\[0\].function.arguments .*{why}"):
            call(arguments)
    fine = {"a": [{"b": "🙂", "c": 1.5}], "role": None}
    assert call(fine) == call(json.dumps(fine))
    assert call(fine)["tool_calls"][0]["function"]["arguments"] == fine


def test_outer_white_space_and_reasoning_do_not_count() -> None:
    plain = canonical(one(role="assistant", content="yes"))
    assert canonical(one(role="assistant", content=" yes\n")) == plain
    assert canonical(one(role="assistant", content="yes", reasoning_content="because")) == plain
    assert canonical(one(role="assistant", content="yes", name="bob")) != plain
    assert canonical(one(role="user", content="yes")) != plain


def test_fields_that_an_sdk_sends_back_empty_are_fine() -> None:
    echoed = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert parse_messages([echoed]) == ({"role": "assistant", "content": "hi"},)


def test_the_developer_is_the_system() -> None:
    assert one(role="developer", content="x")["role"] == "system"


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "at least one"),
        ("hi", "must be a list"),
        ([{"role": "king", "content": "x"}], r"messages\[0\].role is 'king'"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], "string or a list of parts"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate at character 0"),
        ([{"role": "user", "content": "a\ufdd0"}], "noncharacters"),
        ([{"role": "user", "content": "x", "audio": {"id": "a"}}], "audio is not taken"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "part of type 'image_url'"),
    ],
)
def test_messages_that_make_no_sense_are_refused_with_their_place(messages: Any, where: str) -> None:
    with pytest.raises(BadRequestError, match=where):
        parse_messages(messages)


def test_an_image_is_refused_as_unsupported() -> None:
    with pytest.raises(UnsupportedError):
        parse_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_digests_differ_by_agent_and_grow_by_message() -> None:
    messages = parse_messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    digests = prefix_digests("main", messages)
    assert len(digests) == 3
    assert prefix_digests("main", messages[:1]) == digests[:2]
    assert not set(digests) & set(prefix_digests("other", messages))
