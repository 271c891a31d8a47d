"""Replies in every family's markup: whole, broken, and in every split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from chat_templates import CODECS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import ids

from swarm_engine.tracker.answers import Answer, Delta, ReasoningDelta, TextDelta, ToolCallDelta, join_deltas
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.formats import Family
from swarm_engine.tracker.messages import parse_messages, parse_tools
from swarm_engine.tracker.replies import ReplyReader
from swarm_engine.tracker.tracker import EpisodeTracker

TOOLS = parse_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("look", "add-up")
    ]
)


def reader(kind: str, stop: Sequence[str] = (), *, reads_tools: bool = True) -> ReplyReader:
    codec = CODECS[kind]
    tools = TOOLS if codec.takes_tools else ()
    (draft,) = EpisodeTracker("e", "policy", codec).begin(
        "main", parse_messages([{"role": "user", "content": "hi"}]), tools
    )
    return codec.reader(draft, stop, reads_tools=reads_tools)


def read(kind: str, text: str, stop: Sequence[str] = (), *, reads_tools: bool = True) -> Answer:
    """The answer in a reply whose markup was sampled as control tokens."""
    found = reader(kind, stop, reads_tools=reads_tools)
    found.push(CODECS[kind].encode(text))
    found.finish()
    return found.answer


def calls(answer: Answer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


def answer_of(deltas: Sequence[Delta]) -> tuple[str, str, list[list[str]]]:
    """What a client that follows a stream puts together."""
    content, reasoning, found = "", "", list[list[str]]()
    for delta in deltas:
        match delta:
            case TextDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case ToolCallDelta(index, call_id, name, arguments):
                if index == len(found):
                    found.append([call_id, name, arguments])
                else:
                    assert (index, call_id, name) == (len(found) - 1, found[-1][0], "")
                    found[-1][2] += arguments
    return content, reasoning, found


def parts(answer: Answer) -> tuple[str, str, list[list[str]]]:
    return (
        answer.content,
        answer.reasoning or "",
        [[call.call_id, call.name, call.arguments] for call in answer.tool_calls],
    )


def test_the_families_are_told_by_what_their_templates_write() -> None:
    found = {name: codec.format and codec.format.calls and codec.format.calls.family for name, codec in CODECS.items()}
    assert found == {
        "qwen25": Family.TAGGED_JSON,
        "qwen3": Family.TAGGED_JSON,
        "qwen3_opened": Family.TAGGED_JSON,
        "llama3": Family.BARE_JSON,
        "gemma3": None,
        "mistral": Family.JSON_LIST,
        "mistral_named": Family.NAMED,
        "harmony": Family.CHANNELS,
        "deepseek": Family.NAMED,
        "hermes_text": Family.TAGGED_JSON,
    }
    tagged = ["qwen3", "qwen3_opened", "deepseek"]
    assert [name for name, codec in CODECS.items() if codec.reasoning_tags] == tagged
    reasoning = {name for name, codec in CODECS.items() if codec.format and codec.format.has_reasoning}
    assert reasoning == {*tagged, "harmony"}


HERMES_CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"q": "x"}\n```<｜tool▁call▁end｜>'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen25", HERMES_CALL + "<|im_end|>"),
        ("hermes_text", HERMES_CALL + "<|im_end|>"),
        ("qwen3", "<think>\nhm\n</think>\n\n" + HERMES_CALL + "<|im_end|>"),
        ("qwen3_opened", "hm\n</think>\n\n" + HERMES_CALL + "<|im_end|>"),
        ("llama3", '{"name": "look", "parameters": {"q": "x"}}<|eot_id|>'),
        ("llama3", '<|python_tag|>{"name": "look", "parameters": {"q": "x"}}<|eom_id|>'),
        ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"q": "x"}, "id": "abcdefghi"}]</s>'),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {"q": "x"}}]</s>'),
        ("mistral_named", '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"q": "x"}</s>'),
        ("harmony", ' to=functions.look<|channel|>commentary json<|message|>{"q": "x"}<|call|>'),
        ("harmony", '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"q": "x"}<|call|>'),
        ("deepseek", f"hm\n</think>\n\n<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"),
    ],
)
def test_a_call_is_read_with_its_arguments_as_sampled(kind: str, text: str) -> None:
    answer = read(kind, text)
    assert calls(answer) == [("look", '{"q": "x"}')]
    assert answer.content == ""
    assert answer.reasoning == ("hm" if "hm" in text else None)
    assert answer.message()["tool_calls"][0]["function"]["arguments"] == {"q": "x"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen25", f'{HERMES_CALL}\n<tool_call>{{"name":"add-up","arguments":[1]}}</tool_call>'),
        ("llama3", '{"name": "look", "parameters": {"q": "x"}}; {"name": "add-up", "parameters": [1]}'),
        ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"q": "x"}}, {"arguments": [1], "name": "add-up"}]'),
        ("mistral_named", '[TOOL_CALLS]look[CALL_ID]a[ARGS]{"q": "x"}[TOOL_CALLS]add-up[CALL_ID]b[ARGS][1]'),
        (
            "harmony",
            '<|channel|>commentary to=functions.look<|message|>{"q": "x"}<|call|>'
            "<|start|>assistant<|channel|>commentary to=functions.add-up<|message|>[1]<|call|>",
        ),
        (
            "deepseek",
            f"</think>\n\n<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}\n"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add-up\n```json\n[1]\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ],
)
def test_calls_side_by_side_are_all_read_and_have_ids_of_their_own(kind: str, text: str) -> None:
    answer = read(kind, text)
    assert calls(answer) == [("look", '{"q": "x"}'), ("add-up", "[1]")]
    first, second = (call.call_id for call in answer.tool_calls)
    assert first != second
    assert [call.call_id for call in read(kind, text).tool_calls] == [first, second]
    assert answer.content == ""


BROKEN = '{"q": "x"'


BROKEN_REPLIES = [
    ("qwen25", f'<tool_call>\n{{"name": "look", "arguments": {BROKEN}\n</tool_call>'),
    ("qwen25", f'<tool_call>\n{{"name": "look", "arguments": {BROKEN}'),
    ("qwen25", f'<tool_call>{{"name": "look", "arguments": {BROKEN}<tool_call>\n'),
    ("hermes_text", f'<tool_call>\n{{"name": "look", "arguments": {BROKEN}\n</tool_call>'),
    ("llama3", f'{{"name": "look", "parameters": {BROKEN}'),
    ("mistral", f'[TOOL_CALLS] [{{"name": "look", "arguments": {BROKEN}'),
    ("mistral_named", f"[TOOL_CALLS]look[CALL_ID]a[ARGS]{BROKEN}"),
    ("harmony", f" to=functions.look<|channel|>commentary<|message|>{BROKEN}<|call|>"),
    ("deepseek", f"</think><｜tool▁calls▁begin｜>{DEEPSEEK_CALL}".replace('{"q": "x"}', BROKEN)),
]


@pytest.mark.parametrize(("kind", "text"), BROKEN_REPLIES)
def test_malformed_arguments_stay_as_they_were_sampled(kind: str, text: str) -> None:
    """B022."""
    answer = read(kind, text)
    assert calls(answer)[0] == ("look", BROKEN)
    assert answer.message()["tool_calls"][0]["function"]["arguments"] == BROKEN


@pytest.mark.parametrize("arguments", ["[1,2]", '"abc"', "null", "17", '"{\\"q\\": 1}"', '{"q": "}<a>\\"]"}'])
def test_arguments_that_are_json_but_no_object_stay_as_they_were_sampled(arguments: str) -> None:
    """B022."""
    text = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    assert calls(read("qwen25", text)) == [("look", arguments)]


@pytest.mark.parametrize(
    ("kind", "text", "content"),
    [
        ("qwen25", "a <tool_call>not json</tool_call> b", None),
        ("qwen25", '<tool_call>{"arguments": {}}</tool_call>', None),
        ("qwen25", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),
        ("qwen25", '<tool_call>{"name": "look"', None),
        ("qwen25", "<tool_call>", None),
        ("llama3", '{"name": "Bob", "parameters": {}}', None),
        ("llama3", '{"name": "look", "age": 5}', None),
        ("llama3", '{"answer": {"name": "look"}}', None),
        ("llama3", '{"name": "look"}', None),
        ("llama3", "{ok}", None),
        ("llama3", 'Sure: {"name": "look", "parameters": {}}', None),
        ("mistral", "[TOOL_CALLS] nothing", " nothing"),
        ("mistral", "[TOOL_CALLS] []", " []"),
        ("mistral_named", "[TOOL_CALLS]look", "look"),
        ("mistral_named", "[TOOL_CALLS]two words[ARGS]{}", "two words{}"),
        ("harmony", "Just text.<|return|>", "Just text."),
        ("harmony", "<|channel|>final<|message|>Hi<|return|>", "Hi"),
        ("harmony", "<|channel|>commentary<|message|>Hi<|end|>", "Hi"),
        ("harmony", "to=be or not", None),
        ("harmony", "<|channel|>analysis", ""),
        ("deepseek", "</think>\n\n<｜tool▁calls▁begin｜>nothing", "<｜tool▁calls▁begin｜>nothing"),
    ],
)
def test_what_can_not_be_read_as_a_call_is_content(kind: str, text: str, content: str | None) -> None:
    answer = read(kind, text)
    assert calls(answer) == []
    assert answer.content == (text if content is None else content)


def test_content_before_a_call_loses_only_the_white_space_between() -> None:
    answer = read("qwen25", f"Let me  look.\n\n{HERMES_CALL}\n")
    assert answer.content == "Let me  look."
    assert read("qwen25", f"a\n{HERMES_CALL}\nb \n").content == "a\nb \n"
    assert read("qwen25", "a \n").content == "a \n"


def test_a_call_without_arguments_takes_none() -> None:
    assert calls(read("qwen25", '<tool_call>{"name": "look"}</tool_call>')) == [("look", "{}")]


def test_calls_are_not_looked_for_where_no_tool_may_be_called() -> None:
    for kind, text in (("qwen25", HERMES_CALL), ("hermes_text", HERMES_CALL)):
        answer = read(kind, text, reads_tools=False)
        assert (answer.content, answer.tool_calls) == (HERMES_CALL, ())
    answer = read("harmony", " to=functions.look<|channel|>commentary<|message|>{}<|call|>", reads_tools=False)
    assert (answer.content, answer.tool_calls) == ("{}", ())


def test_text_that_spells_a_control_token_is_text_in_a_reply_too() -> None:
    spelled = reader("qwen25")
    spelled.push(CODECS["qwen25"].encode_text(HERMES_CALL))
    spelled.finish()
    assert (spelled.answer.content, spelled.answer.tool_calls) == (HERMES_CALL, ())


def test_reasoning_is_told_from_content_by_the_sampled_reply_alone() -> None:
    """B016: markers in the question, and markers that the model quotes in plain tokens."""
    codec = CODECS["qwen3"]
    asked = parse_messages([{"role": "user", "content": "repeat: <think>a</think>"}])
    (draft,) = EpisodeTracker("e", "policy", codec).begin("main", asked)
    for quoted in ("</think>", "<think>a</think>"):
        found = codec.reader(draft)
        think, unthink = codec.encode("<think>")[0], codec.encode("</think>")[0]
        found.push([think, *ids(f"they want {quoted}"), unthink, *ids("\n\n<think>a</think>")])
        found.finish()
        assert found.answer == Answer("<think>a</think>", f"they want {quoted}")
    plain = codec.reader(draft)
    plain.push(codec.encode("no thinking"))
    plain.finish()
    assert plain.answer == Answer("no thinking")


def test_reasoning_that_the_prompt_opened_is_reasoning_until_it_is_closed() -> None:
    assert read("qwen3_opened", "hm\n</think>\n\nyes<|im_end|>") == Answer("yes", "hm")
    assert read("qwen3_opened", "hm, cut off") == Answer("", "hm, cut off")
    assert read("qwen3", "<think>\n\n</think>\n\nyes") == Answer("yes")


def test_channels_are_told_apart_and_their_parts_joined() -> None:
    text = (
        "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"
    )
    answer = read("harmony", text)
    assert (answer.reasoning, answer.content, calls(answer)) == ("one\ntwo", "I look.", [("look", "{}")])


def test_a_call_cut_by_the_limit_keeps_what_came() -> None:
    """B073: the name is known, the arguments break off."""
    answer = read("qwen25", '<tool_call>\n{"name": "look", "arguments": {"q": "lon')
    assert calls(answer) == [("look", '{"q": "lon')]


def test_arguments_stream_while_they_come_and_a_tag_that_may_follow_is_held_back() -> None:
    found, codec = reader("hermes_text"), CODECS["hermes_text"]
    taken: list[list[Delta]] = []
    for piece in ("Hi <", "b> <tool", '_call>{"name": "look", "arg', 'uments": {"q"', ": 1}", "}</tool_call>"):
        found.push(codec.encode_text(piece))
        taken.append(found.take())
    assert [join_deltas(one) for one in taken[:2]] == [[TextDelta("Hi")], [TextDelta(" <b>")]]
    assert taken[2] == []
    call_id = found.answer.tool_calls[0].call_id
    assert taken[3:5] == [[ToolCallDelta(0, call_id, "look", '{"q"')], [ToolCallDelta(0, call_id, "", ": 1}")]]
    assert taken[5] == []


def test_a_stop_string_ends_a_reply_inside_a_call_and_at_its_end() -> None:
    """B085, and frameworks that stop at the closing tag."""
    for kind in ("qwen25", "hermes_text"):
        stopped = reader(kind, ["</tool_call>"])
        sampled = CODECS[kind].encode(HERMES_CALL)
        stopped.push([*sampled, *ids("never")])
        stopped.finish()
        assert (stopped.stopped_by, stopped.num_tokens) == ("</tool_call>", len(sampled))
        assert calls(stopped.answer) == [("look", '{"q": "x"}')]
    assert calls(read("qwen25", HERMES_CALL, ['"x"'])) == [("look", '{"q":')]


def test_noncharacters_that_a_model_samples_do_not_come_back_to_refuse_the_next_request() -> None:
    found = reader("qwen25")
    found.push(ids("a\ufdd0b\ufdd2c"))
    found.finish()
    assert found.answer.content == "a\ufffdb\ufffdc"
    assert parse_messages([{"role": "user", "content": "hi"}, found.answer.message()])


FRAGMENTS: dict[str, list[str]] = {
    "qwen25": ["<tool_call>", "</tool_call>", '{"name": "look", "arguments": ', '{"name": "lo', "<|im_end|>"],
    "hermes_text": ["<tool_call>", "</tool_call>", '{"name": "look", "arguments": ', "<tool", "</tool_"],
    "qwen3": ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "look", "arguments": '],
    "qwen3_opened": ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"arguments": 1, "name": "look"}'],
    "llama3": ['{"name": "look", "parameters": ', '{"name": "x"', ";", ",", '{"parameters": {}, "name": "look"}'],
    "mistral": ["[TOOL_CALLS]", "[", "]", ",", '{"name": "look", "arguments": ', '{"arguments": 1, "name": "look"}'],
    "mistral_named": ["[TOOL_CALLS]", "look", "[CALL_ID]", "[ARGS]", "</s>"],
    "harmony": [
        "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "<|return|>", "analysis", "final",
        "commentary", " to=functions.look", "to=",
    ],
    "deepseek": [
        "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>look", "\n```json\n",
        "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    ],
    "gemma3": ["<end_of_turn>", "<think>"],
}  # fmt: skip
COMMON = ["{", "}", '{"q": "x"}', '"', "\\", "a", " ", "\n", "😊", '{"q": "</tool_call>"}', "[1, 2]", "1"]
WHOLE: dict[str, str] = {
    "qwen25": f"a\n{HERMES_CALL}\n{HERMES_CALL}\nb\n",
    "hermes_text": f"a\n{HERMES_CALL}\n{HERMES_CALL}\nb\n",
    "qwen3": f"<think>\nhm\n</think>\n\na\n{HERMES_CALL}<|im_end|>",
    "qwen3_opened": f"hm\n</think>\n\na\n{HERMES_CALL}<|im_end|>",
    "llama3": '{"name": "look", "parameters": {"q": "x"}}; {"name": "look", "parameters": {}} b',
    "mistral": 'a [TOOL_CALLS] [{"name": "look", "arguments": {"q": "x"}, "id": "a"}, {"name": "look"}] b',
    "mistral_named": 'a[TOOL_CALLS]look[CALL_ID]a[ARGS]{"q": "x"} [TOOL_CALLS]look[CALL_ID]b[ARGS]{} b',
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.look<|channel|>commentary"
    '<|message|>{"q": "x"}<|call|><|start|>assistant<|channel|>final<|message|>ok  \n<|return|>',
    "deepseek": f"hm</think>a<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}\n{DEEPSEEK_CALL}<｜tool▁calls▁end｜>b",
    "gemma3": "a <think> b\n<end_of_turn>",
}


def tokens_of(codec: ChatCodec, text: str) -> list[int]:
    """Ids of a text with its tags as control tokens and everything else byte by byte."""
    edges = [0, *sorted({at for match in codec._marker.finditer(text) for at in match.span()}), len(text)]
    found: list[int] = []
    for start, end in pairwise(edges):
        piece = text[start:end]
        found += codec.encode(piece) if codec._marker.fullmatch(piece) else ids(piece)
    return found


def check_split(kind: str, tokens: Sequence[int], cuts: Sequence[int], stop: Sequence[str], reads_tools: bool) -> None:
    whole = reader(kind, stop, reads_tools=reads_tools)
    whole.push(tokens)
    whole.finish()
    assert answer_of(whole.take()) == parts(whole.answer)
    split = reader(kind, stop, reads_tools=reads_tools)
    deltas: list[Delta] = []
    for start, end in pairwise([0, *sorted(cuts), len(tokens)]):
        split.push(tokens[start:end])
        deltas += split.take()
        seen = answer_of(deltas)
        assert parts(split.answer) == seen
    split.finish()
    deltas += split.take()
    assert answer_of(deltas) == parts(split.answer) == parts(whole.answer)
    assert (split.num_tokens, split.stopped_by) == (whole.num_tokens, whole.stopped_by)


@pytest.mark.parametrize("kind", FRAGMENTS)
@given(data=st.data())
@settings(max_examples=150)
def test_every_split_of_a_reply_streams_to_the_same_answer(kind: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[kind] + COMMON), max_size=14), "text"))
    text = data.draw(st.sampled_from([text, WHOLE[kind] + text, text + WHOLE[kind]]), "around a whole call")
    tokens = tokens_of(CODECS[kind], text)
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=8), "cuts")
    stop = data.draw(st.sampled_from([(), (), ("x",), ("}}", "a\n"), ("</tool_call>",), ("hm", "ok  \n")]), "stop")
    check_split(kind, tokens, cuts, stop, data.draw(st.booleans(), "reads tools"))


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("stop", [(), ("never",), ('x"',)])
def test_one_token_at_a_time_gives_the_answer_of_all_at_once(kind: str, stop: tuple[str, ...]) -> None:
    tokens = tokens_of(CODECS[kind], WHOLE[kind])
    check_split(kind, tokens, range(1, len(tokens)), stop, True)
    for length in range(len(tokens)):
        check_split(kind, tokens[:length], range(1, length), stop, True)


@pytest.mark.parametrize(("kind", "text"), BROKEN_REPLIES)
def test_a_broken_reply_streams_to_the_same_answer(kind: str, text: str) -> None:
    tokens = tokens_of(CODECS[kind], text)
    check_split(kind, tokens, range(1, len(tokens)), (), True)


@pytest.mark.parametrize("space", [" ", "\n\n", "\x0c", "\u2028"])
@pytest.mark.parametrize("ends", ["<|end|>{}<|return|>", "<|end|>{}<|end|>", "<|end|>{}<|call|>{}<|return|>"])
def test_white_space_between_the_tokens_that_end_a_reply_in_channels_is_markup(ends: str, space: str) -> None:
    tokens = tokens_of(CODECS["harmony"], f"<|channel|>final<|message|>ok{ends.replace('{}', space)}")
    check_split("harmony", tokens, range(1, len(tokens)), (), True)
    assert read("harmony", f"<|channel|>final<|message|>ok{ends.replace('{}', space)}").content == "ok"


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40), st.lists(st.integers(0, 160), max_size=5))
@example("😊<tool_call>", [1, 2, 3])
@settings(max_examples=60)
def test_plain_text_comes_back_as_it_is(text: str, cuts: list[int]) -> None:
    tokens = ids(text)
    check_split("gemma3", tokens, [min(cut, len(tokens)) for cut in cuts], (), False)
    found: Any = reader("gemma3")
    found.push(tokens)
    found.finish()
    assert found.answer == Answer("".join("\ufffd" if "\ufdd0" <= one <= "\ufdd3" else one for one in text))


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("qwen3", [("<think>\nhm é\n</think>", True), ("\n\nHi<|im_end|>", False)]),
        ("qwen3", [("<think>\n\n</think>", True), ("Hi<|im_end|>", False)]),
        ("qwen3", [("Hi <think>x</think><|im_end|>", False)]),
        ("qwen3", [("<think>never closed", True), ("<|im_end|>", False)]),
        ("qwen3_opened", [("hm\n</think>", True), ("\n\nHi<|im_end|>", False)]),
        ("qwen3_opened", [("never closed", True), ("<|im_end|>", False)]),
        ("qwen25", [("<think>a</think>b<|im_end|>", False)]),
        (
            "harmony",
            [
                ("<|channel|>analysis<|message|>hm<|end|>", True),
                ("<|start|>assistant<|channel|>final<|message|>Hi<|return|>", False),
            ],
        ),
        (
            "harmony",
            [
                ("<|channel|>analysis<|message|>hm<|end|>", True),
                ("<|start|>assistant<|channel|>commentary<|message|>So.<|end|>", False),
                ("<|start|>assistant<|channel|>analysis<|message|>and<|end|>", True),
                ("<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>", False),
            ],
        ),
        ("harmony", [("<|channel|>analysis<|message|>never ended", True)]),
    ],
)
def test_reasoning_tokens_are_those_from_its_first_mark_to_its_last(kind: str, pieces: list[tuple[str, bool]]) -> None:
    codec = CODECS[kind]
    tokens = [(one, is_thought) for text, is_thought in pieces for one in codec.encode(text)]
    expected = sum(is_thought for _, is_thought in tokens)
    for stop in ((), ("never said",)):
        for size in (1, 3, len(tokens)):
            found = reader(kind, stop)
            for start in range(0, len(tokens), size):
                found.push([one for one, _ in tokens[start : start + size]])
            found.finish()
            assert found.num_reasoning_tokens == expected


def test_reasoning_tokens_end_where_a_stop_string_ends_the_reply() -> None:
    codec = CODECS["qwen3"]
    found = reader("qwen3", ("xyz",))
    found.push(codec.encode("<think>\nhm xyz more</think>"))
    found.finish()
    assert found.num_reasoning_tokens == len(codec.encode("<think>\nhm "))
