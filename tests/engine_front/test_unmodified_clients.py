"""What clients that nobody here wrote send and expect, in every API: as their vendors' own servers take and give it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import beta_tool
from chat_template import CALL, TOOLS_AND_THINKING
from conftest import Served
from hypothesis import given
from hypothesis import strategies as st
from test_dialects import (
    ANTHROPIC,
    BODIES,
    FLAT,
    FULL,
    HI,
    LOOKUP,
    THOUGHT,
    TWO_CALLS,
    claude,
    episode,
    places,
    post,
    recorded,
    sdk,
    with_value,
)
from tiny_tokenizer import END_ID, make_tokenizer

from swarm_engine.errors import UnsupportedError
from swarm_engine.server.dialects import DIALECTS
from swarm_engine.server.dialects.messages import parse_count
from swarm_engine.server.episodes import Effort, _check_effort
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.fields import Fields, is_empty
from swarm_engine.tracker.template import ChatTemplate
from swarm_engine.types import Mode

ONE_CALL = "Let me see.\n" + CALL % ("lookup", '{"q": "a"}')
TRAINED: Any = SimpleNamespace(mode=Mode.TRAIN, responses={})
LIMITS = {"responses": "max_output_tokens"}


def body_of(route: str, **more: Any) -> dict[str, Any]:
    """A request that leaves room for a whole reply."""
    return {**BODIES[route], LIMITS.get(route, "max_tokens"): 500, **more}


def events_of(text: str) -> list[dict[str, Any]]:
    told = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in told if one != "[DONE]"]


# What changes nothing

EMPTY: list[Any] = [None, "", [], {}, {"a": None}, {"a": {"b": [], "c": ""}}]
UNREAD = [
    "x",
    "extra",
    "refusal",
    "annotations",
    "audio",
    "provider_specific_fields",
    "mcp_servers",
    "context_management",
]
OPTIONAL = {
    "chat/completions": ["reasoning_effort", "response_format", "tool_choice", "seed", "n", "stop", "user", "name"],
    "completions": ["logit_bias", "top_p", "stop", "best_of", "seed", "suffix", "script"],
    "responses": ["reasoning", "previous_response_id", "instructions", "include", "seed", "tool_choice", "stop"],
    "messages": ["thinking", "top_k", "system", "stop_sequences", "tool_choice", "thread", "output_config"],
    "messages/count_tokens": ["thinking", "system", "tool_choice", "top_k"],
}
"""Fields that are read at some place of a request, and at no other."""
NEUTRAL: list[dict[str, Any]] = [
    {"min_tokens": 0},
    {"top_p": 1},
    {"top_k": 0},
    {"top_k": -1},
    {"min_p": 0},
    {"presence_penalty": 0.0},
    {"repetition_penalty": 1},
    {"logit_bias": {"5": 0}},
    {"length_penalty": 1.0},
    {"use_beam_search": False},
]
TOOL_NEUTRAL: list[dict[str, Any]] = [
    {"cache_control": {"type": "ephemeral"}},
    {"allowed_callers": ["direct"]},
    {"defer_loading": False},
]
OPAQUE = {"metadata", "parameters", "input_schema", "schema", "arguments", "logit_bias"}
"""Objects that are the caller's own."""


def is_open(place: tuple[Any, ...]) -> bool:
    """Whether an object of a request has fields of the API."""
    is_input = len(place) > 1 and place[-1] == "input" and isinstance(place[-2], int)
    return not OPAQUE.intersection(place) and not is_input


def at(body: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        body = body[key]
    return body


def read(route: str, body: dict[str, Any]) -> Any:
    """All that a reply depends on."""
    body = copy.deepcopy(body)
    if route == "messages/count_tokens":
        return parse_count(body)
    request = DIALECTS[route].parse(body, TRAINED)
    return request.model, request.is_stream, request.call


@st.composite
def changes(draw: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A route, an object in its request, and fields for it that change nothing."""
    route = draw(st.sampled_from(sorted(FULL)))
    objects = [(), *(one for one in places(FULL[route]) if isinstance(at(FULL[route], one), dict))]
    place = draw(st.sampled_from([one for one in objects if is_open(one)]))
    names = st.sampled_from([*UNREAD, *OPTIONAL[route]])
    change = draw(st.dictionaries(names, st.sampled_from(EMPTY), max_size=3))
    if not place:
        change |= draw(st.sampled_from(NEUTRAL))
    if len(place) == 2 and place[0] == "tools":
        change |= draw(st.sampled_from(TOOL_NEUTRAL))
    return route, place, change


@given(changes())
def test_what_is_neutral_changes_nothing_at_whatever_place(
    change: tuple[str, tuple[Any, ...], dict[str, Any]],
) -> None:
    route, place, more = change
    body = FULL[route]
    changed = with_value(body, place, {**more, **at(body, place)})
    assert read(route, changed) == read(route, body)


@pytest.mark.parametrize("route", OPTIONAL)
def test_a_field_that_is_read_and_empty_is_as_if_it_were_left_out(route: str) -> None:
    body = BODIES[route.partition("/count")[0]]
    if route == "messages/count_tokens":
        body = {"model": "m", "messages": HI}
    for name in OPTIONAL[route]:
        for value in EMPTY:
            assert read(route, {**body, name: value}) == read(route, body), (name, value)


@pytest.mark.parametrize("route", BODIES)
def test_neutral_values_leave_the_sampled_ids_as_they_are(engine: Served, route: str) -> None:
    bodies = [{}, *NEUTRAL, {"tools": [], "x": {}, "y": None, "stop": "", "stream_options": []}]
    with episode(engine) as claimed:
        for more in bodies:
            answer = post(claimed, route, {**BODIES[route], "seed": 7, **more})
            assert answer.status_code == 200, answer.text
        assert len({tuple(one) for one in recorded(engine, claimed)}) == 1


@pytest.mark.parametrize("route", BODIES)
def test_what_only_rules_out_less_likely_tokens_changes_no_greedy_reply(route: str) -> None:
    greedy = {**BODIES[route], "temperature": 0}
    for more in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"top_p": 0, "top_k": 1}):
        assert read(route, {**greedy, **more}) == read(route, greedy)
        with pytest.raises(UnsupportedError, match=r"top_p|top_k|min_p"):
            read(route, {**greedy, **more, "temperature": 1})


def test_zero_false_and_lists_of_something_say_something() -> None:
    assert all(map(is_empty, EMPTY))
    assert not any(map(is_empty, [0, False, 0.0, [None], [[]], {"a": 0}, {"a": {"b": False}}, "x"]))


def test_a_flag_that_is_off_says_nothing_where_nothing_reads_it() -> None:
    fields = Fields(frozenset({"read"}), neutral={"number": (0,)})
    assert fields.said({"read": False, "flag": False}) == {"read": False}
    for name, value in (("flag", True), ("flag", 0), ("number", False), ("number", 1)):
        with pytest.raises(UnsupportedError) as caught:
            fields.said({name: value}, "body.part[0]")
        assert caught.value.param == f"body.part[0].{name}"


HINTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"reasoning_effort": "high", "verbosity": "low"}),
    ("responses", {"reasoning": {"effort": "xhigh", "summary": "auto"}, "text": {"verbosity": "high"}}),
    ("messages", {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive", "display": "summarized"}}),
]


@pytest.mark.parametrize(("route", "change"), HINTS, ids=[route for route, _ in HINTS])
def test_hints_that_the_model_was_not_taught_are_taken(engine: Served, route: str, change: dict[str, Any]) -> None:
    with episode(engine) as claimed:
        assert post(claimed, route, {**BODIES[route], **change}).status_code == 200


def test_an_effort_is_refused_where_the_template_tells_the_model_of_it() -> None:
    def codec(template: str) -> ChatCodec:
        tokenizer = make_tokenizer().to_str()
        from datetime import UTC, datetime

        return ChatCodec(tokenizer, ChatTemplate(template, {}, datetime(2026, 1, 1, tzinfo=UTC)), [END_ID])

    effort = Effort("reasoning.effort", is_none=False)
    _check_effort(effort, codec(TOOLS_AND_THINKING))
    told = "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    with pytest.raises(UnsupportedError, match="says how much the model reasons") as caught:
        _check_effort(effort, codec(told + "{{- 'Reasoning: ' + reasoning_effort }}" + TOOLS_AND_THINKING))
    assert caught.value.param == "reasoning.effort"


# Vercel's AI SDK


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_reference_to_an_item_of_the_episode_is_that_item(played: Served, is_stream: bool) -> None:
    hi = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    with episode(played, THOUGHT + ONE_CALL, THOUGHT + "Both.", "a", "b") as claimed:

        def ask(*items: Any) -> dict[str, Any]:
            body = body_of("responses", input=[hi, *items], tools=[FLAT], stream=is_stream)
            answer = post(claimed, "responses", body)
            assert answer.status_code == 200, answer.text
            return events_of(answer.text)[-1]["response"] if is_stream else answer.json()

        def named(item: dict[str, Any]) -> dict[str, Any]:
            return {"type": "item_reference", "id": item["id"]}

        thought, said, called = ask()["output"]
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": "17"}
        again = {"type": "function_call", "call_id": called["call_id"], "name": "lookup", "arguments": '{"q":"a"}'}
        ask(named(thought), named(said), again, output)
        ask(named(thought), named(said), named(called), output)
        ask({"id": thought["id"]}, {"type": None, "id": said["id"]}, {"type": "", "id": called["id"]}, output)
        first, *others = recorded(played, claimed)
        assert [other[: len(first)] for other in others] == [first] * 3


def test_a_reference_to_what_was_not_stored_says_how_to_do_without(played: Served) -> None:
    with episode(played, "a", "b") as claimed, episode(played, "c") as other:
        unstored = post(claimed, "responses", body_of("responses", store=False)).json()
        foreign = post(other, "responses", body_of("responses")).json()
        for name in (unstored["output"][0]["id"], foreign["output"][0]["id"], "msg_x", "", "resp_"):
            items = [*HI, {"type": "item_reference", "id": name}]
            answer = post(claimed, "responses", body_of("responses", input=items))
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("input[1].id", "item_not_found")
            assert "send the items, or store: false" in error["message"]


def test_a_stored_response_can_be_read_again(played: Served) -> None:
    reply = THOUGHT + TWO_CALLS
    with episode(played, reply, reply, "c") as claimed, sdk(claimed) as api:
        whole = api.responses.create(model="m", input="hi", tools=[FLAT])
        with api.responses.stream(model="m", input="hi", tools=[FLAT]) as stream:
            streamed = stream.get_final_response()
        dropped = {"output": {"__all__": {"parsed_arguments": True}}}
        for response in (whole, streamed):
            found = api.responses.retrieve(response.id)
            assert found.model_dump(exclude_none=True)["usage"] == response.model_dump(exclude_none=True)["usage"]
            assert found.status == "completed"
            assert [item.id for item in found.output] == [item.id for item in response.output]
        assert api.responses.retrieve(whole.id).model_dump(exclude=dropped) == whole.model_dump(exclude=dropped)
        unstored = api.responses.create(model="m", input="hi", store=False)
        with pytest.raises(openai.NotFoundError, match="has no response"):
            api.responses.retrieve(unstored.id)
        url = f"{claimed.base_url}/v1/responses/{whole.id}"
        head = httpx.head(url, headers={"x-api-key": claimed.api_key})
        assert (head.status_code, head.content) == (200, b"")


def test_stored_responses_hold_what_they_share_once(played: Served) -> None:
    assert played.front is not None
    with episode(played, "a", "b") as claimed:
        first = post(claimed, "responses", body_of("responses", input=HI, tools=[FLAT, {**FLAT, "name": "x"}])).json()
        again = [*HI, *first["output"], *HI]
        other = post(
            claimed, "responses", body_of("responses", input=again, tools=[FLAT, {**FLAT, "name": "y"}])
        ).json()
        live = played.front.engine.roster.find(claimed.episode_id)
        one, two = (live.responses[response["id"]] for response in (first, other))
        assert [mine is theirs for mine, theirs in zip(one.messages, two.messages, strict=False)] == [True, True]
        assert [tool["name"] for tool in two.body["tools"]] == ["lookup", "y"]
        assert two.body["tools"][0] is one.body["tools"][0]


NULLS: dict[str, set[str]] = {
    "chat/completions": {
        "choices.logprobs", "choices.finish_reason", "choices.message.refusal", "choices.message.content",
        "choices.logprobs.refusal",
    },
    "completions": {"choices.logprobs", "choices.finish_reason"},
    "responses": {
        "error", "incomplete_details", "completed_at", "instructions", "max_output_tokens", "previous_response_id",
        "usage", "reasoning.effort", "reasoning.summary",
    },
    "messages": {"stop_reason", "stop_sequence", "delta.stop_sequence"},
}  # fmt: skip
"""Where the vendors' own answers have a null; everywhere else they leave out what there is nothing of."""


def nulls(value: Any, *here: str) -> Iterator[str]:
    if value is None:
        yield ".".join(here)
    inner = (
        value.items() if isinstance(value, dict) else (("", one) for one in value) if isinstance(value, list) else ()
    )
    for key, item in inner:
        yield from nulls(item, *here, *([key] if key else []))


@pytest.mark.parametrize("route", BODIES)
def test_what_the_vendor_leaves_out_is_left_out(played: Served, route: str) -> None:
    tools = {"chat/completions": [LOOKUP], "responses": [FLAT], "messages": [ANTHROPIC], "completions": []}[route]
    reply = "plain" if route == "completions" else THOUGHT + TWO_CALLS
    for limit in (500, 5):
        with episode(played, reply, reply) as claimed:
            body = {**BODIES[route], LIMITS.get(route, "max_tokens"): limit, "tools": tools}
            found = set(nulls(post(claimed, route, body).json()))
            for event in events_of(post(claimed, route, {**body, "stream": True}).text):
                inner = event.get("response") or event.get("message") or event
                found |= set(nulls(inner)) | {one for one in nulls(event) if one.startswith("content_block")}
            assert found <= NULLS[route]
    with episode(played) as claimed:
        error = post(claimed, route, {"made_up": 1}).json()
        assert list(nulls(error)) == []


# @openai/agents


def test_a_part_may_say_again_what_its_message_says(played: Served) -> None:
    with episode(played, ONE_CALL, "ok") as claimed:
        asked = body_of("chat/completions", tools=[LOOKUP])
        said = post(claimed, "chat/completions", asked).json()["choices"][0]["message"]
        part = {"type": "text", "text": said["content"], "role": "assistant", "refusal": None}
        part["tool_calls"] = said["tool_calls"]
        again = {"role": "assistant", "content": [part], "tool_calls": said["tool_calls"]}
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}

        def ask(message: dict[str, Any]) -> httpx.Response:
            return post(claimed, "chat/completions", {**asked, "messages": [*HI, message, result]})

        for name, value in (
            ("role", "user"),
            ("tool_calls", [*said["tool_calls"], *said["tool_calls"]]),
            ("name", "b"),
        ):
            refused = ask({**again, "content": [{**part, name: value}]})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == f"messages[1].content[0].{name}"
        assert ask(again).status_code == 200
        first, second = recorded(played, claimed)
        assert second[: len(first)] == first


# Codex


def test_codex_is_told_how_to_turn_off_the_tools_that_its_vendor_runs(played: Served) -> None:
    label = {"client_metadata": {"session": "s"}, "reasoning": {"summary": "auto"}, "include": [], "service_tier": "x"}
    with episode(played, "ok") as claimed:
        asked = body_of("responses", tools=[FLAT], **label)
        for tool, setting in (
            ({"type": "web_search", "external_web_access": False}, 'web_search = "disabled"'),
            ({"type": "namespace", "name": "multi_agent_v1", "tools": [FLAT]}, "[agents]"),
            ({"type": "image_generation"}, "take it out"),
        ):
            answer = post(claimed, "responses", {**asked, "tools": [FLAT, tool]})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tools[1].type"
            assert setting in answer.json()["error"]["message"]
        assert post(claimed, "responses", asked).json()["reasoning"] == {"effort": None, "summary": "auto"}


# Claude Code


def test_claude_code_may_ask_to_clear_nothing_and_is_told_how_to_ask_for_no_more(engine: Served) -> None:
    asked = {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
    }
    with episode(engine) as claimed:
        for keep, status in (("all", 200), ({"type": "thinking_turns", "value": 1}, 400)):
            edits = [{"type": "clear_thinking_20251015", "keep": keep}]
            answer = post(claimed, "messages", body_of("messages", **asked, context_management={"edits": edits}))
            assert answer.status_code == status, answer.text
        assert "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1" in answer.json()["error"]["message"]


# Anthropic's tool runner


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two whole numbers."""
    return str(a + b)


@pytest.mark.parametrize("is_stream", [False, True])
def test_anthropics_tool_runner_goes_on_without_a_thread(played: Served, is_stream: bool) -> None:
    call = "Let me add.\n" + CALL % ("add", '{"a": 2, "b": 3}')
    with episode(played, call, "It is 5.") as claimed, claude(claimed) as api:
        asked: Any = [{"role": "user", "content": "What is 2 + 3?"}]
        runner = api.beta.messages.tool_runner(model="m", max_tokens=500, tools=[add], messages=asked, stream=is_stream)
        last = runner.until_done()
        assert last.content[0].text == "It is 5."  # type: ignore[union-attr]
        first, second = recorded(played, claimed)
        assert second[: len(first)] == first


def test_a_thread_is_refused_as_the_sdk_types_it(played: Served) -> None:
    with episode(played) as claimed, claude(claimed) as api:
        with pytest.raises(anthropic.types.ThreadUnsupportedRequestError) as caught:
            api.messages.create(model="m", max_tokens=9, messages=HI, extra_body={"thread": {"type": "create"}})
        assert caught.value.details.error_code == "thread_unsupported_request"
        assert "without thread" in str(caught.value)
