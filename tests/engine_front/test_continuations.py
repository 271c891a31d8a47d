"""Which call goes on from which by what was said, and what merging by it gives, with every family of templates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_template import TOOLS_AND_THINKING
from chat_templates import KINDS
from chats import THOUGHTS, TOOLS, WITH_TOOLS, Chat, call_text, final_text, sent_back, user
from conftest import SMALL, serve_thread

from swarm_engine.config import History, Merge
from swarm_engine.merger import merge
from swarm_engine.tracker.blocks import EpisodeBlocks
from swarm_engine.tracker.continuations import with_continuations
from swarm_engine.tracker.messages import parse_tools
from swarm_engine.types import Author, FinishReason, Mode, Timeline, Untrained


def by_text(chat: Chat, *, ignore_tools: bool = False) -> tuple[Timeline, ...]:
    return merge(with_continuations(chat.record(), chat.codec, ignore_tools=ignore_tools).timelines(), Merge.TEXT)


def converse(chat: Chat, replies: list[str]) -> Chat:
    chat.messages = [user("hi")]
    for reply in replies:
        chat.turn(reply, user("go"))
    return chat


@pytest.mark.parametrize("kind", THOUGHTS)
def test_replies_whose_thoughts_left_history_are_one_row_with_their_thoughts_back(kind: str) -> None:
    """The row is the one that `history: append` would have served and recorded."""
    replies = [THOUGHTS[kind].format(number, number) for number in range(3)]
    chat = converse(Chat(kind), replies)
    assert len(chat.rows()) == 3
    (row,) = by_text(chat)
    (appended,) = converse(Chat(kind, History.APPEND), replies).rows()
    assert row.tokens == appended.tokens
    assert row.spans == appended.spans
    assert row.num_out_of_context > 0
    assert chat.codec.show(row.tokens).count("hm, ") == 3


@pytest.mark.parametrize("kind", WITH_TOOLS)
def test_a_call_of_a_tool_and_its_result_are_one_row(kind: str) -> None:
    chat = Chat(kind, tools=TOOLS)
    chat.messages = [user("hi")]
    chat.turn(call_text(kind))
    chat.messages += chat.results("17")
    chat.turn(final_text(kind, "It is 17."), user("go"))
    chat.turn(final_text(kind, "Still."))
    (row,) = by_text(chat)
    assert [span.call_id for span in row.spans] == ["e-0", "e-1", "e-2"]
    for span in row.spans:
        assert row.tokens[span.start : span.end] == chat.served[span.call_id][1]


@pytest.mark.parametrize("kind", KINDS)
def test_where_history_keeps_its_tokens_text_merges_as_tokens_do(kind: str) -> None:
    chat = converse(Chat(kind, History.APPEND), [final_text(kind, text) for text in ("ok  \n", "  né 😊", "a\n\nb")])
    (row,) = by_text(chat)
    assert replace(row, continues=None) == replace(chat.rows()[0], continues=None)
    assert row.num_out_of_context == 0


def test_replies_behind_a_thought_that_left_history_are_counted_as_out_of_context() -> None:
    """By hand: of `<think>\\nhm\\n</think>\\n\\nok` the template drops all but `ok`; the second reply never saw it."""
    chat = Chat("qwen3")
    chat.messages = [user("hi")]
    chat.turn("<think>\nhm\n</think>\n\nok<|im_end|>", user("go"))
    chat.turn("<think>\nso\n</think>\n\nyes<|im_end|>")
    (row,) = by_text(chat)
    dropped = chat.codec.encode("<think>\nhm\n</think>\n\n")
    assert len(row.tokens) == sum(map(len, chat.served["e-1"])) + len(dropped)
    assert row.num_out_of_context == len(chat.served["e-1"][1])


def test_a_row_stays_within_what_the_model_takes() -> None:
    chat = converse(Chat("qwen3"), [THOUGHTS["qwen3"].format(number, number) for number in range(3)])
    lines = with_continuations(chat.record(), chat.codec).timelines()
    (whole,) = merge(lines, Merge.TEXT)
    rows = merge(lines, Merge.TEXT, max_tokens=len(whole.tokens) - 1)
    assert [[span.call_id for span in row.spans] for row in rows] == [["e-0"], ["e-1", "e-2"]]
    assert rows[0] == lines[0]


def test_a_retry_with_another_tool_call_never_gets_the_result_of_the_first() -> None:
    """Contents are equal (empty), calls are not: the row holds the call that was answered, the other stands apart."""
    chat = Chat("qwen25", tools=TOOLS)
    (first,) = chat.ask(user("hi"))
    (second,) = chat.ask(user("hi"))
    kept = chat.finish(first, chat.codec.encode(call_text("qwen25", '{"q": "left"}')))
    chat.finish(second, chat.codec.encode(call_text("qwen25", '{"q": "right"}')))
    chat.messages = [user("hi"), sent_back(kept)]
    chat.messages += chat.results("17")
    chat.turn(final_text("qwen25", "It is 17."))
    rows = by_text(chat)
    assert [[span.call_id for span in row.spans] for row in rows] == [["e-1"], ["e-0", "e-2"]]
    assert "left" in chat.codec.show(rows[1].tokens)
    assert "right" not in chat.codec.show(rows[1].tokens)
    assert chat.calls()[1].untrained_because is Untrained.UNUSED_RETRY


def test_choices_with_one_text_and_other_tokens_are_all_kept() -> None:
    chat = Chat("qwen25")
    drafts = chat.ask(user("hi"), num_choices=2)
    whole, apart = chat.codec.encode("the"), tuple(b"the")
    assert whole != apart
    end = chat.codec.encode("<|im_end|>")
    for draft, sampled in zip(drafts, (whole + end, apart + end), strict=True):
        chat.finish(draft, sampled)
    rows = by_text(chat)
    assert [row.tokens[span.start : span.end] for row in rows for span in row.spans] == [whole + end, apart + end]


@pytest.mark.parametrize("last", [0, 1])
def test_of_equal_asks_a_call_goes_on_from_the_reply_that_was_there_when_it_came(last: int) -> None:
    """Two asks answered with one visible text and other thoughts; the tracker knows which of them was gone on from."""
    chat = Chat("qwen3")
    drafts = [chat.ask(user("hi"))[0] for _ in range(2)]
    for place in (1 - last, last):
        answer = chat.finish(drafts[place], chat.codec.encode(THOUGHTS["qwen3"].format(f"thought {place}", "it")))
    chat.messages = [user("hi"), sent_back(answer), user("go")]
    chat.turn(THOUGHTS["qwen3"].format("so", "that"))
    rows = by_text(chat)
    assert [[span.call_id for span in row.spans if span.is_trained] for row in rows] == [[], [f"e-{last}", "e-2"]]
    assert f"thought {last}" in chat.codec.show(rows[1].tokens)


def test_agents_stay_apart_though_they_say_the_same() -> None:
    chat = Chat("qwen3")
    messages = [user("hi")]
    for agent in ("white", "black"):
        draft = chat.tracker.draft(agent, messages)
        (numbered,) = chat.tracker.number(draft)
        answer = chat.finish(numbered, chat.codec.encode("<think>\nhm\n</think>\n\nok<|im_end|>"))
        messages = [user("hi"), sent_back(answer), user("go")]
    rows = by_text(chat)
    assert [row.agent for row in rows] == ["white", "black"]
    assert [len(row.spans) for row in rows] == [1, 1]


def test_calls_that_were_offered_other_tools_join_only_where_tools_are_ignored() -> None:
    chat = Chat("qwen25", tools=TOOLS)
    chat.messages = [user("hi")]
    chat.turn(final_text("qwen25", "ok"), user("go"))
    chat.tools = parse_tools([])
    chat.turn(final_text("qwen25", "yes"))
    assert len(by_text(chat)) == 2
    (row,) = by_text(chat, ignore_tools=True)
    assert "look" in chat.codec.show(row.tokens), "its context is the first call's"
    assert row.num_out_of_context > 0


def test_tools_that_come_and_go_leave_one_row_where_they_are_ignored() -> None:
    """With its own tools the third call goes on from the first; by what was said it goes on from the second."""
    chat = Chat("qwen25", tools=TOOLS)
    chat.messages = [user("hi")]
    for number in range(4):
        chat.tools = parse_tools([] if number % 2 else TOOLS)
        chat.turn(final_text("qwen25", f"ok {number}"), user("go"))
    (row,) = by_text(chat, ignore_tools=True)
    assert [span.call_id for span in row.spans] == ["e-0", "e-1", "e-2", "e-3"]
    assert [row.tokens[span.start : span.end] for span in row.spans] == [sampled for _, sampled in chat.served.values()]
    shown = chat.codec.show(row.tokens)
    assert [shown.count(f"ok {number}") for number in range(4)] == [1, 1, 1, 1]


def test_a_reply_that_was_cut_off_or_thrown_away_is_nobodys_history() -> None:
    chat = Chat("qwen25")
    (draft,) = chat.ask(user("hi"))
    answer = chat.finish(draft, chat.codec.encode("ok"), FinishReason.CANCELLED)
    chat.messages = [user("hi"), sent_back(answer), user("go")]
    chat.turn(final_text("qwen25", "yes"))
    assert len(by_text(chat)) == 2


def test_prompts_of_token_ids_continue_each_other_by_their_ids() -> None:
    chat = Chat("qwen25")
    for prompt, reply in (((5, 6), (7,)), ((5, 6, 7, 8), (9,)), ((5, 6, 8), (9,))):
        (draft,) = chat.tracker.number(chat.tracker.draft_ids("main", prompt))
        chat.finish(draft, reply)
    rows = by_text(chat)
    assert [row.tokens for row in rows] == [(5, 6, 7, 8, 9), (5, 6, 8, 9)]
    blocks = EpisodeBlocks(chat.record(), chat.codec).blocks(rows[0])
    assert [(block.author, block.token_ids) for block in blocks] == [
        (Author.USER, (5, 6)),
        (Author.LLM, (7,)),
        (Author.USER, (8,)),
        (Author.LLM, (9,)),
    ]


def test_blocks_of_calls_with_the_same_tokens_are_cut_where_each_began_to_sample() -> None:
    chat = Chat("qwen25")
    for prompt, reply in (((5, 6), (7, 8)), ((5, 6, 7), (8,))):
        (draft,) = chat.tracker.number(chat.tracker.draft_ids("main", prompt))
        chat.finish(draft, reply)
    record = chat.record()
    shown = EpisodeBlocks(record, chat.codec)
    for how in (Merge.NONE, Merge.TOKEN):
        rows = [[block.token_ids for block in shown.blocks(row)] for row in merge(record.episode.timelines(), how)]
        assert rows == [[(5, 6), (7, 8)], [(5, 6, 7), (8,)]]


def test_a_cancelled_beginning_of_a_reply_is_a_block_of_its_own() -> None:
    """By token the broken off call is a prefix of the later one, which holds the other call's whole reply."""
    chat = Chat("qwen25")
    first, second = chat.ask(user("hi"), num_choices=2)
    answer = chat.finish(first, chat.codec.encode("one two<|im_end|>"))
    begun = chat.codec.encode("one two<|im_end|>")[:2]
    chat.finish(second, begun, FinishReason.CANCELLED)
    chat.messages = [user("hi"), sent_back(answer), user("go")]
    for number in range(2):
        (draft,) = chat.ask(*chat.messages)
        chat.finish(draft, chat.codec.encode(f"{number}<|im_end|>"))
    rows = merge(chat.record().episode.timelines(), Merge.TOKEN)
    (row,) = (row for row in rows if row.spans[0].call_id == second.call_id)
    assert len(row.spans) == 2
    blocks = EpisodeBlocks(chat.record(), chat.codec).blocks(row)
    assert sum((block.token_ids for block in blocks), ()) == row.tokens
    assert begun in [block.token_ids for block in blocks]
    assert all(len({logprob is None for logprob in block.logprobs}) == 1 for block in blocks)


def test_blocks_of_a_joined_row_show_who_wrote_what() -> None:
    chat = converse(Chat("qwen3"), [THOUGHTS["qwen3"].format("so", "A"), THOUGHTS["qwen3"].format("then", "B")])
    (row,) = by_text(chat)
    blocks = EpisodeBlocks(chat.record(), chat.codec).blocks(row)
    assert sum((block.token_ids for block in blocks), ()) == row.tokens
    assert [block.text for block in blocks if block.author is Author.LLM] == [
        "<think>\nhm, so\n</think>\n\nI say A.<|im_end|>",
        "<think>\nhm, then\n</think>\n\nI say B.<|im_end|>",
    ]
    assert all(all(block.loss_mask) is (block.author is Author.LLM) for block in blocks)


@pytest.mark.parametrize(("ignore_tools", "num_rows"), [(None, 2), (True, 1)])
def test_what_a_server_shows_joins_calls_as_its_trainer_would(
    tmp_path: Path, ignore_tools: bool | None, num_rows: int
) -> None:
    trainer = {**SMALL["trainer"], "merge": "text", "ignore_tools": ignore_tools}
    config = {**SMALL, "trainer": trainer, "sampler": {"backend": "scripted", "max_tokens": 1000}}
    asked: list[Any] = [{"role": "user", "content": "hi"}]
    with serve_thread(tmp_path / "run", template=TOOLS_AND_THINKING) as served, served.client() as client:
        client.start(config, wait=True)
        with client.episode("t", mode=Mode.EVAL, script=["one", "two"]) as episode:
            api = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
            reply = api.chat.completions.create(model="policy", messages=asked, tools=TOOLS)
            asked += [{"role": "assistant", "content": reply.choices[0].message.content}, *asked]
            api.chat.completions.create(model="policy", messages=asked)
            episode.end(reward=1.0)
        assert len(client.timelines(episode.episode_id, merge="text")) == num_rows
