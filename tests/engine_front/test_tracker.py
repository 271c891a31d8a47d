"""What was sampled is what is trained: the tracker against real chat templates."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import CHATML, END_ID, PAD_ID, START_ID, THINK_ID, UNTHINK_ID, ids, make_tokenizer

from swarm_engine.config import Merge
from swarm_engine.merger import merge
from swarm_engine.tracker.answers import Answer
from swarm_engine.tracker.blocks import EpisodeBlocks
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.continuations import with_continuations
from swarm_engine.tracker.messages import Message, parse_messages
from swarm_engine.tracker.template import ChatTemplate
from swarm_engine.tracker.tracker import Draft, EpisodeRecord, EpisodeTracker
from swarm_engine.types import Author, Call, Episode, FinishReason, Mode, Outcome

NOW = datetime(2026, 3, 4, tzinfo=UTC)

TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
FORGETFUL = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Drops an assistant's thinking once another message follows, as reasoning models' templates do."""

THINK_FIRST = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
"""Writes an empty thinking block before the newest answer and takes it away later (B001)."""

BARE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""No control tokens at all."""


BEFORE = "{% for message in messages %}{% if message.content == 'bye' %}(over){% endif %}{% endfor %}" + CHATML
BEHIND = CHATML + "{% for message in messages %}{% if message.content == 'bye' %}(over){% endif %}{% endfor %}"
"""What an answer says changes what stands before or behind it."""


def make_codec(template: str) -> ChatCodec:
    return ChatCodec(make_tokenizer().to_str(), ChatTemplate(template, {}, NOW), (END_ID,))


CODECS = {
    name: make_codec(globals()[name])
    for name in ("CHATML", "TRIMMING", "FORGETFUL", "THINK_FIRST", "BARE", "BEFORE", "BEHIND")
}


class Chat:
    """An agent against a tracker: asks, gets ids, remembers."""

    def __init__(self, template: str = "CHATML") -> None:
        self.codec = CODECS[template]
        self.tracker = EpisodeTracker("e", "policy", self.codec)
        self.drafts: list[Draft] = []

    def ask(self, *messages: dict[str, Any], agent: str = "main") -> Draft:
        (draft,) = self.tracker.begin(agent, parse_messages(list(messages)))
        self.drafts.append(draft)
        return draft

    def answer(
        self,
        draft: Draft,
        sampled: list[int],
        reason: FinishReason = FinishReason.STOP,
        temperature: float = 1.0,
        stop: tuple[str, ...] = (),
    ) -> Message:
        reply = self.codec.reader(draft, stop)
        reply.push(sampled)
        reply.finish()
        self.tracker.finish(
            draft,
            completion_ids=sampled,
            logprobs=[-0.5] * len(sampled),
            policy_versions=[0] * len(sampled),
            temperature=temperature,
            finish_reason=reason,
            answer=reply.answer,
        )
        return reply.answer.message()

    def reply(self, *messages: dict[str, Any], sampled: list[int], **how: Any) -> Message:
        return self.answer(self.ask(*messages), sampled, **how)

    def calls(self) -> tuple[Call, ...]:
        return self.tracker.calls()

    def record(self) -> EpisodeRecord:
        episode = Episode(
            "e", "t", "t#0", 0, Mode.TRAIN, 0, self.tracker.calls(), {"main": 1.0}, Outcome.SUCCESS, {}, {}
        )
        return EpisodeRecord(episode, self.tracker.notes())

    def merged(self) -> int:
        return len(merge(self.record().episode.timelines(), Merge.TOKEN))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_newline_behind_the_end_token_is_in_the_row_without_a_loss() -> None:
    """B003, with ids by hand."""
    chat = Chat()
    first = chat.reply(user("hi"), sampled=[*ids("ok"), END_ID])
    draft = chat.ask(user("hi"), first, user("go"))
    prompt = [START_ID, *ids("user\nhi"), END_ID, *ids("\n"), START_ID, *ids("assistant\n")]
    suffix = [*ids("\n"), START_ID, *ids("user\ngo"), END_ID, *ids("\n"), START_ID, *ids("assistant\n")]
    assert list(draft.prompt_ids) == [*prompt, *ids("ok"), END_ID, *suffix]
    chat.answer(draft, [*ids("x"), END_ID])
    (timeline,) = merge(chat.record().episode.timelines(), Merge.TOKEN)
    mask = [0] * len(prompt) + [1] * 3 + [0] * len(suffix) + [1] * 2
    assert list(map(int, timeline.loss_mask)) == mask


def test_the_loss_covers_the_sampled_tokens_of_a_turn_and_nothing_of_its_frame() -> None:
    """B025: [start, 'assistant', newline, T1, T2, end, newline] has the mask [0, 0, 0, 1, 1, 1, 0]."""
    chat = Chat()
    first = chat.reply(user("hi"), sampled=[97, 99, END_ID])
    chat.reply(user("hi"), first, user("go"), sampled=[100, END_ID])
    (timeline,) = merge(chat.record().episode.timelines(), Merge.TOKEN)
    start = [at for at, token in enumerate(timeline.tokens) if token == START_ID][1]
    frame = [START_ID, *ids("assistant\n"), 97, 99, END_ID, *ids("\n")]
    assert list(timeline.tokens[start : start + len(frame)]) == frame
    mask = timeline.loss_mask[start : start + len(frame)]
    assert list(map(int, mask)) == [0] * 11 + [1, 1, 1] + [0]
    assert sum(mask) == len(chat.calls()[0].completion_ids) == 3


def test_white_space_that_a_template_trims_does_not_cut_the_conversation() -> None:
    """B006: five turns of 'ok  \\n' give one row, and no sampled token is lost."""
    chat = Chat("TRIMMING")
    messages: list[dict[str, Any]] = [user("hi")]
    for turn in range(5):
        sampled = [*ids("ok  \n"), END_ID]
        answer = chat.reply(*messages, sampled=sampled)
        messages += [{**answer, "content": answer["content"].strip() if turn % 2 else answer["content"]}, user("go")]
    assert chat.merged() == 1
    (timeline,) = merge(chat.record().episode.timelines(), Merge.TOKEN)
    assert timeline.num_trained == 5 * 6


def test_ids_that_do_not_survive_decoding_are_kept_as_they_were_sampled() -> None:
    """B007: 'ab' sampled as two bytes encodes to one merged token; the row keeps the two."""
    chat = Chat()
    answer = chat.reply(user("hi"), sampled=[97, 98, END_ID])
    draft = chat.ask(user("hi"), answer, user("go"))
    start = len(chat.drafts[0].prompt_ids)
    assert draft.prompt_ids[start : start + 3] == (97, 98, END_ID)


def test_a_reply_cut_by_its_limit_gets_the_templates_end_without_a_loss() -> None:
    """B007 and B030."""
    chat = Chat()
    answer = chat.reply(user("hi"), sampled=ids("wor"), reason=FinishReason.LENGTH)
    draft = chat.ask(user("hi"), answer, user("go"))
    start = len(chat.drafts[0].prompt_ids)
    assert list(draft.prompt_ids[start : start + 6]) == [*ids("wor"), END_ID, *ids("\n"), START_ID]
    chat.answer(draft, [END_ID])
    (timeline,) = merge(chat.record().episode.timelines(), Merge.TOKEN)
    assert timeline.num_trained == 3 + 1


def test_a_reply_cut_by_a_stop_string_is_joined_to_its_own_ids() -> None:
    """B085, B030: the end token behind it is the template's, without a loss or a log-probability."""
    chat = Chat()
    answer = chat.reply(user("hi"), sampled=[*ids("x"), 259], stop=("ab",))
    assert answer["content"] == "x"
    draft = chat.ask(user("hi"), answer, user("go"))
    start = len(chat.drafts[0].prompt_ids)
    assert list(draft.prompt_ids[start : start + 3]) == [*ids("x"), 259, END_ID]
    chat.answer(draft, [END_ID])
    (timeline,) = merge(chat.record().episode.timelines(), Merge.TOKEN)
    assert timeline.loss_mask[start : start + 3] == (True, True, False)
    assert [(span.start, len(span.logprobs)) for span in timeline.spans] == [(start, 2), (len(draft.prompt_ids), 1)]


def test_an_end_token_that_the_template_does_not_write_stays_and_the_templates_own_follows() -> None:
    chat = Chat()
    answer = chat.reply(user("hi"), sampled=[*ids("x"), PAD_ID], reason=FinishReason.LENGTH)
    draft = chat.ask(user("hi"), answer, user("go"))
    start = len(chat.drafts[0].prompt_ids)
    assert list(draft.prompt_ids[start : start + 3]) == [*ids("x"), PAD_ID, END_ID]


def test_a_template_without_control_tokens_is_encoded_apart_so_nothing_merges_across_the_edge() -> None:
    chat = Chat("BARE")
    answer = chat.reply(user("hi"), sampled=ids(" ta"), reason=FinishReason.LENGTH)
    draft = chat.ask(user("hi"), answer, user("b"))
    first = chat.drafts[0].prompt_ids
    assert draft.prompt_ids == (*first, *ids(" ta"), *ids("\nuser: b\nassistant:"))
    assert chat.merged() == 1


def test_thinking_that_the_template_drops_makes_a_branch() -> None:
    chat = Chat("FORGETFUL")
    answer = chat.reply(user("hi"), sampled=[THINK_ID, *ids("hm"), UNTHINK_ID, *ids("yes"), END_ID])
    assert (answer["content"], answer["reasoning_content"]) == ("yes", "hm")
    draft = chat.ask(user("hi"), answer, user("go"))
    assert draft.extends is None
    assert draft.builds_on == "e-0"
    assert THINK_ID not in draft.prompt_ids
    chat.answer(draft, [END_ID])
    assert chat.merged() == 2
    assert all(call.untrained_because is None for call in chat.calls())


def test_an_answer_that_the_template_reads_otherwise_than_it_was_sampled_makes_a_branch() -> None:
    """The tag was sampled in plain tokens, so it is content; the template takes what stands before it away."""
    chat = Chat("FORGETFUL")
    answer = chat.reply(user("hi"), sampled=[*ids("x</think>y"), END_ID])
    assert answer["content"] == "x</think>y"
    draft = chat.ask(user("hi"), answer, user("go"))
    assert draft.extends is None
    assert chat.codec.show(draft.prompt_ids).count("x") == 0


def test_an_answer_that_changes_what_the_template_writes_elsewhere_makes_a_branch() -> None:
    for template, extends in (("BEFORE", None), ("BEHIND", None), ("CHATML", "e-0")):
        chat = Chat(template)
        answer = chat.reply(user("hi"), sampled=[*ids("bye"), END_ID])
        assert chat.ask(user("hi"), answer, user("go")).extends == extends
        other = chat.reply(user("ho"), sampled=[*ids("ok"), END_ID])
        assert chat.ask(user("ho"), other, user("go")).extends == "e-2"


def test_an_empty_thinking_block_that_comes_and_goes_makes_a_branch_and_no_crash() -> None:
    """B001."""
    chat = Chat("THINK_FIRST")
    answer = chat.reply(user("Hi there"), sampled=[*ids("Hello."), END_ID])
    draft = chat.ask(user("Hi there"), answer, user("Name a colour"))
    assert draft.extends is None
    chat.answer(draft, [*ids("red"), END_ID])
    timelines = chat.record().episode.timelines()
    assert [timeline.num_trained for timeline in timelines] == [7, 4]


def test_trimmed_or_edited_history_is_a_new_timeline() -> None:
    """B018: 42 messages recorded, the next request has dropped the oldest."""
    chat = Chat()
    messages: list[dict[str, Any]] = []
    for turn in range(21):
        messages.append(user(f"q{turn}"))
        messages.append(chat.reply(*messages, sampled=[*ids("a"), END_ID]))
    trimmed = chat.ask(*messages[4:], user("last"))
    assert trimmed.extends is None
    edited = chat.ask(*messages[:-1], {"role": "assistant", "content": "changed"}, user("last"))
    assert edited.extends == "e-19", "the call before the edited answer is still a prefix"
    longest = chat.ask(*messages, user("last"))
    assert longest.extends == "e-20"


def test_a_system_prompt_as_parts_still_extends() -> None:
    """B063."""
    chat = Chat()
    answer = chat.reply({"role": "system", "content": "s"}, user("hi"), sampled=[*ids("a"), END_ID])
    parts = {"role": "system", "content": [{"type": "text", "text": "s"}]}
    assert chat.ask(parts, user(" hi"), answer, user("go")).extends == "e-0"


def test_agents_do_not_share_a_history() -> None:
    chat = Chat()
    answer = chat.answer(chat.ask(user("hi"), agent="x"), [*ids("a"), END_ID])
    assert chat.ask(user("hi"), answer, user("go"), agent="y").extends is None
    assert chat.ask(user("hi"), answer, user("go"), agent="x").extends == "e-0"
    assert [draft.index for draft in chat.drafts] == [0, 0, 1]
    assert chat.tracker.agents == ("x", "y")


def test_of_the_same_request_asked_again_the_last_is_trained_where_none_is_used() -> None:
    chat = Chat()
    for text in ("a", "b", "c"):
        chat.reply(user("hi"), sampled=[*ids(text), END_ID])
    assert [call.untrained_because for call in chat.calls()] == ["unused_retry", "unused_retry", None]


def test_of_the_same_request_asked_again_those_are_trained_that_later_calls_build_on() -> None:
    chat = Chat()
    kept = chat.reply(user("hi"), sampled=[*ids("a"), END_ID])
    chat.reply(user("hi"), sampled=[*ids("b"), END_ID])
    other = chat.reply(user("hi"), sampled=[*ids("c"), END_ID])
    chat.reply(user("hi"), kept, user("go"), sampled=[END_ID])
    chat.reply(user("hi"), other, user("go"), sampled=[END_ID])
    assert [call.untrained_because for call in chat.calls()] == [None, "unused_retry", None, None, None]


def test_a_retry_that_draws_the_same_words_is_built_on_once() -> None:
    chat = Chat()
    chat.reply(user("hi"), sampled=[*ids("a"), END_ID])
    again = chat.reply(user("hi"), sampled=[*ids("a"), END_ID])
    chat.reply(user("hi"), again, user("go"), sampled=[END_ID])
    assert [call.untrained_because for call in chat.calls()] == ["unused_retry", None, None]
    trained = [timeline.num_trained for timeline in merge(chat.record().episode.timelines(), Merge.TOKEN)]
    assert sum(trained) == 3


def test_greedy_and_cancelled_calls_are_recorded_and_not_trained() -> None:
    chat = Chat()
    chat.reply(user("a"), sampled=[*ids("x"), END_ID], temperature=0.0)
    chat.reply(user("b"), sampled=ids("xy"), reason=FinishReason.CANCELLED)
    first, second = chat.calls()
    assert (first.untrained_because, second.untrained_because) == ("greedy", "cancelled")
    assert second.completion_ids == tuple(ids("xy"))


def test_a_cancelled_try_does_not_count_as_the_one_that_was_asked_last() -> None:
    chat = Chat()
    chat.reply(user("hi"), sampled=[*ids("a"), END_ID])
    chat.reply(user("hi"), sampled=ids("b"), reason=FinishReason.CANCELLED)
    assert [call.untrained_because for call in chat.calls()] == [None, "cancelled"]


def test_a_last_try_that_can_not_be_trained_does_not_take_the_training_from_the_others() -> None:
    chat = Chat()
    chat.reply(user("hi"), sampled=[*ids("a"), END_ID])
    chat.reply(user("hi"), sampled=[*ids("b"), END_ID])
    chat.reply(user("hi"), sampled=[*ids("c"), END_ID], temperature=0.0)
    assert [call.untrained_because for call in chat.calls()] == ["unused_retry", None, "greedy"]


def test_a_draft_that_gets_no_number_leaves_no_trace() -> None:
    chat = Chat()
    chat.tracker.draft("other", [user("hi")])
    chat.tracker.draft_ids("main", [97])
    assert (chat.tracker.agents, chat.calls()) == ((), ())
    draft = chat.ask(user("hi"))
    assert (draft.call_id, draft.index, chat.tracker.agents) == ("e-0", 0, ("main",))


def test_a_finished_call_that_is_taken_back_is_not_trained_and_nothing_builds_on_it() -> None:
    chat = Chat()
    draft = chat.ask(user("hi"))
    answer = chat.answer(draft, [*ids("a"), END_ID])
    chat.tracker.cancel(draft)
    assert [call.untrained_because for call in chat.calls()] == ["cancelled"]
    assert chat.ask(user("hi"), answer, user("go")).builds_on is None
    (raw,) = chat.tracker.number(chat.tracker.draft_ids("main", [97]))
    chat.tracker.finish(
        raw,
        completion_ids=[98],
        logprobs=[-0.5],
        policy_versions=[0],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        answer=Answer("b"),
    )
    assert chat.tracker.draft_ids("main", [97, 98, 99]).builds_on == raw.call_id
    chat.tracker.cancel(raw)
    assert chat.tracker.draft_ids("main", [97, 98, 99]).builds_on is None


def test_a_try_that_is_taken_back_leaves_an_equal_answer_that_was_delivered() -> None:
    """The same words twice: the caller got the first, hung up on the second, threw a third away and goes on."""
    chat = Chat()
    delivered = chat.ask(user("hi"))
    answer = chat.answer(delivered, [*ids("a"), END_ID])
    taken_back = chat.ask(user("hi"))
    chat.answer(taken_back, [*ids("a"), END_ID])
    chat.tracker.cancel(taken_back)
    chat.answer(chat.ask(user("hi")), [*ids("b"), END_ID])
    later = chat.ask(user("hi"), answer, user("go"))
    assert later.extends == delivered.call_id
    chat.answer(later, [*ids("c"), END_ID])
    assert [call.untrained_because for call in chat.calls()] == [None, "cancelled", "unused_retry", None]


def test_calls_that_overlap_are_kept_in_order_of_arrival() -> None:
    chat = Chat()
    first, second = chat.ask(user("a")), chat.ask(user("b"))
    chat.answer(second, [END_ID])
    chat.answer(first, [END_ID])
    assert [call.call_id for call in chat.calls()] == ["e-0", "e-1"]


def test_blocks_show_who_wrote_what_and_join_to_the_recorded_ids() -> None:
    chat = Chat()
    answer = chat.reply({"role": "system", "content": "s"}, user("hi"), sampled=[*ids("a"), END_ID])
    chat.reply({"role": "system", "content": "s"}, user("hi"), answer, {"role": "tool", "content": "17"}, sampled=[66])
    record = chat.record()
    shown = EpisodeBlocks(record, chat.codec)
    (merged,) = merge(record.episode.timelines(), Merge.TOKEN)
    blocks = shown.blocks(merged)
    assert [(block.author, block.role, block.text) for block in blocks] == [
        (Author.USER, "system", "<|im_start|>system\ns<|im_end|>\n"),
        (Author.USER, "user", "<|im_start|>user\nhi<|im_end|>\n"),
        (Author.ENV, "template", "<|im_start|>assistant\n"),
        (Author.LLM, "assistant", "a<|im_end|>"),
        (Author.ENV, "template", "\n"),
        (Author.ENV, "tool", "<|im_start|>tool\n17<|im_end|>\n"),
        (Author.ENV, "template", "<|im_start|>assistant\n"),
        (Author.LLM, "assistant", "B"),
    ]
    assert sum((block.token_ids for block in blocks), ()) == merged.tokens
    assert blocks[3].logprobs == (-0.5, -0.5)
    assert blocks[3].loss_mask == (True, True)
    as_recorded = shown.blocks(record.episode.timelines()[1])
    assert as_recorded[3].loss_mask == (False, False)
    assert as_recorded[3].logprobs == (None, None)


@pytest.mark.parametrize("template", CODECS)
@given(data=st.data())
@settings(max_examples=40)
def test_every_row_is_the_prompt_that_was_served_and_the_ids_that_came_back(template: str, data: st.DataObject) -> None:
    """Prompt ids + returned ids = recorded ids, whatever an agent does with its history; and masks add up."""
    chat = Chat(template)
    texts = st.sampled_from(["hi", " spaced ", "<|im_end|>", "abc", "", "<think>x</think>y", "né"])
    tokens = st.sampled_from([97, 98, 32, 10, 256, 259, THINK_ID, UNTHINK_ID, START_ID, 195, PAD_ID])
    histories: list[list[dict[str, Any]]] = [[]]
    served: list[tuple[tuple[int, ...], list[int]]] = []
    for _ in count():
        if len(served) == 6 or not data.draw(st.booleans(), "goes on"):
            break
        history = data.draw(st.sampled_from(histories), "history")
        asked = [*history, user(data.draw(texts, "text"))]
        sampled = data.draw(st.lists(tokens, max_size=5), "sampled")
        is_ended = data.draw(st.booleans(), "ends")
        sampled += [END_ID] if is_ended or not sampled else []
        draft = chat.ask(*asked)
        answer = chat.answer(draft, sampled, FinishReason.STOP if is_ended else FinishReason.LENGTH)
        served.append((draft.prompt_ids, sampled))
        histories.append([*asked, answer])
    calls = chat.calls()
    assert [(call.prompt_ids, list(call.completion_ids)) for call in calls] == served
    record = chat.record()
    shown = EpisodeBlocks(record, chat.codec)
    for how in Merge:
        episode = with_continuations(record, chat.codec) if how is Merge.TEXT else record.episode
        timelines = merge(episode.timelines(), how)
        trained = sum(timeline.num_trained for timeline in timelines)
        assert trained == sum(len(call.completion_ids) for call in calls if call.untrained_because is None)
        for timeline in timelines:
            assert sum((block.token_ids for block in shown.blocks(timeline)), ()) == timeline.tokens


@given(st.lists(st.tuples(st.sampled_from(["a", "ab", "x  ", "the\n"]), st.booleans()), min_size=1, max_size=6))
def test_a_plain_conversation_is_one_row_with_any_template_that_keeps_history(turns: list[tuple[str, bool]]) -> None:
    for template in ("CHATML", "TRIMMING", "BARE"):
        chat = Chat(template)
        messages: list[dict[str, Any]] = []
        for text, is_ended in turns:
            messages.append(user(text))
            sampled = [*ids(text), END_ID] if is_ended else ids(text)
            reason = FinishReason.STOP if is_ended else FinishReason.LENGTH
            messages.append(chat.reply(*messages, sampled=sampled, reason=reason))
        assert chat.merged() == 1
