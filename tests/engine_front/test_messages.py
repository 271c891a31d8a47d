"""What counts as the same message, and which messages are refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from swarm_engine.errors import BadRequestError, UnsupportedError
from swarm_engine.tracker.messages import canonical, parse_messages, parse_tools, prefix_digests


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


def with_arguments(arguments: Any) -> Any:
    message = one(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
    return message["tool_calls"][0]["function"]["arguments"]


def test_an_argument_object_that_no_tokenizer_takes_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(64):
        deep = {"a": [deep]}
    for arguments, why in (
        ({"q": "\ud800"}, "lone surrogate"),
        ({"q": [{"\ud800": 1}]}, "lone surrogate"),
        ({"\ufdd0": 1}, "noncharacters"),
        (deep, "nested more than 64 deep"),
    ):
        with pytest.raises(BadRequestError, match=rf"tool_calls\[0\].function.arguments .*{why}"):
            with_arguments(arguments)
    fine = {"a": [{"b": "🙂", "c": 1.5}], "role": None}
    assert with_arguments(fine) == with_arguments(json.dumps(fine)) == fine


@pytest.mark.parametrize(
    "text",
    [
        '{"q": "x"',
        "[1,2]",
        '"abc"',
        "",
        r'{"q": "\ud800"}',
        r'{"\ufdd0": 1}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a":' * 65 + "1" + "}" * 65,
        "[" * 100_000,
    ],
)
def test_argument_text_that_spells_no_object_stays_the_text_the_model_wrote(text: str) -> None:
    """B022: whatever was sampled, the next request is a good one."""
    assert with_arguments(text) == text


def test_arguments_are_compared_by_value_whatever_language_wrote_them_again() -> None:
    def call(arguments: str, call_id: str) -> dict[str, Any]:
        return one(role="assistant", tool_calls=[{"id": call_id, "function": {"name": "f", "arguments": arguments}}])

    sampled = call('{"n": 1.0, "s": "\\u00e9", "l": [2.50]}', "call_a")
    assert canonical(sampled) == canonical(call('{"l":[2.5],"s":"é","n":1}', "other"))
    assert canonical(sampled) != canonical(call('{"l":[2.5],"s":"e","n":1}', "call_a"))


@pytest.mark.parametrize("depth", [65, 500, 960, 100_000])
def test_arguments_nested_too_deep_are_compared_as_text(depth: int) -> None:
    """A model may sample them, so neither its reply nor the next request may fail over them."""

    def call(arguments: str) -> dict[str, Any]:
        return one(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])

    for opens, closes in (('{"a":', "}"), ("[", "]")):
        text = opens * depth + "1" + closes * depth
        assert canonical(call(text)) == canonical(call(text))
        assert canonical(call(text)) != canonical(call(text.replace("1", "2")))


def test_a_tools_result_is_another_message_where_it_answers_another_call() -> None:
    def asked(*ids: str, results: tuple[str, str]) -> bytes:
        calls = [{"id": one, "function": {"name": "f", "arguments": "{}"}} for one in ids]
        answers = [
            {"role": "tool", "tool_call_id": one, "content": text}
            for one, text in zip(results, ("17", "18"), strict=True)
        ]
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}, *answers]
        return prefix_digests("main", parse_messages(messages))[-1]

    plain = asked("a", "b", results=("a", "b"))
    assert plain != asked("a", "b", results=("b", "a"))
    assert plain == asked("x", "y", results=("x", "y")), "ids that a framework made are no difference"
    assert plain != asked("a", "b", results=("a", "?"))


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
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}, "custom": None}
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "annotations": [], "thought": None}
    asked = parse_messages([{"role": "user", "content": [part], "tool_calls": [], "refusal": None}])
    assert asked == ({"role": "user", "content": "hi"},)
    assert one(role="assistant", tool_calls=[call]) == one(
        role="assistant", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
    )


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


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_tools_are_read_and_what_they_leave_out_is_filled_in() -> None:
    assert parse_tools(None) == parse_tools([]) == ()
    short = {"type": "function", "function": {"name": "look", "description": None, "strict": None}}
    assert parse_tools([short]) == parse_tools([TOOL]) == (TOOL,)
    whole = {"type": "function", "function": {**TOOL["function"], "description": "Looks.", "strict": True}}
    assert parse_tools([whole]) == (whole,)


@pytest.mark.parametrize(
    ("tools", "where"),
    [
        ({}, "must be a list"),
        ([{"type": "web_search"}], r"tools\[0\] is a tool of type 'web_search'"),
        ([TOOL, TOOL], "names 'look' twice"),
        ([{"type": "function"}], r"tools\[0\].function is missing"),
        ([{**TOOL, "cache": 1}], r"tools\[0\].cache is not taken"),
        ([{"type": "function", "function": {"name": "a b"}}], r"name is 'a b'"),
        ([{"type": "function", "function": {"name": "a" * 129}}], "1 to 128"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "must be a JSON schema"),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], "must be true or false"),
        ([{"type": "function", "function": {"name": "a", "returns": {"type": "string"}}}], "returns is not taken"),
        ([{"type": "function", "function": {"name": "a", "description": "\ufdd0"}}], "noncharacters"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"\ud800": 1}}}], "lone surrogate"),
    ],
)
def test_tools_that_make_no_sense_are_refused_with_their_place(tools: Any, where: str) -> None:
    with pytest.raises(BadRequestError, match=where):
        parse_tools(tools)


def test_a_name_is_looked_for_once_among_many_tools() -> None:
    tools = [{"type": "function", "function": {"name": f"look_{place}"}} for place in range(20_000)]
    started = time.process_time()
    assert len(parse_tools(tools)) == 20_000
    assert time.process_time() - started < 2


def test_other_tools_are_another_conversation_and_the_order_of_fields_is_not() -> None:
    messages = parse_messages([{"role": "user", "content": "a"}])
    other = {"type": "function", "function": {**TOOL["function"], "name": "see"}}
    turned = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}
    digest = prefix_digests("main", messages, (TOOL,))[-1]
    assert digest == prefix_digests("main", messages, (turned,))[-1]
    assert digest != prefix_digests("main", messages)[-1]
    assert digest != prefix_digests("main", messages, (other,))[-1]


HEADER = "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch="


def test_a_coding_clients_nonce_is_not_part_of_the_system_prompt() -> None:
    """B021: as a block of its own, on a line of its own, and right before the text."""
    user = {"role": "user", "content": "hi"}
    plain = parse_messages([{"role": "system", "content": "Be brief."}, user])
    for nonce in ("aaaa1;", "bbbb2;"):
        parts = [{"type": "text", "text": HEADER + nonce}, {"type": "text", "text": "Be brief."}]
        for content in (parts, f"{HEADER}{nonce}\nBe brief.", f"{HEADER}{nonce}Be brief."):
            assert parse_messages([{"role": "system", "content": content}, user]) == plain
        assert parse_messages([{"role": "system", "content": HEADER + nonce}, user]) == parse_messages([user])
    asked = parse_messages([{"role": "user", "content": HEADER + "aaaa1;"}])
    assert asked[0]["content"] == HEADER + "aaaa1;", "only a system prompt carries it"
