"""Why contexts of an episode part: by hand, and on what a real server recorded."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from chats import THOUGHTS, Chat, user
from conftest import Served
from typer.testing import CliRunner

from swarm_engine.cli import app
from swarm_engine.config import Merge
from swarm_engine.server.shown import Shown, show_timelines
from swarm_engine.splits import Reason, find_splits, split_lines
from swarm_engine.types import Mode
from swarm_engine.watch import timeline_lines


def block(role: str, text: str, *, is_sampled: bool = False) -> dict[str, Any]:
    """One token a letter."""
    logprobs = [-0.5 if is_sampled else None] * len(text)
    return {"role": role, "text": text, "token_ids": [ord(letter) for letter in text], "logprobs": logprobs}


def line(*blocks: dict[str, Any], agent: str = "main", call: str = "c", builds_on: str | None = None) -> dict[str, Any]:
    return {"agent": agent, "policy": "policy", "call_ids": [call], "builds_on": builds_on, "blocks": list(blocks)}


def shown(chat: Chat) -> list[dict[str, Any]]:
    return show_timelines(chat.record(), {"policy": Shown(chat.codec, 10_000)}, Merge.NONE, ignore_tools=False)


ASK = block("user", "abc")
REPLY = block("assistant", "xyz", is_sampled=True)
FIRST = line(ASK, REPLY)


@pytest.mark.parametrize(
    ("later", "num_shared", "reason"),
    [
        (line(ASK, block("assistant", "xyw", is_sampled=True)), 5, Reason.ASKED_AGAIN),
        (line(ASK, block("template", "zd"), REPLY, call="d", builds_on="c"), 3, Reason.TEMPLATE_REWROTE),
        (line(ASK, block("assistant", "z"), block("user", "d"), REPLY), 3, Reason.REPLY_CHANGED),
        (line(ASK, block("user", "d"), REPLY), 3, Reason.REPLY_CHANGED),
        (line(ASK), 3, Reason.ASKED_AGAIN),
        (line(block("user", "abd"), REPLY), 2, Reason.MESSAGE_CHANGED),
        (line(block("system", "q"), ASK, REPLY), 0, Reason.NOTHING_SHARED),
        (line(ASK, block("assistant", "xz", is_sampled=True), agent="other"), 4, Reason.OTHER_AGENT),
    ],
)
def test_each_way_to_part_is_named(later: dict[str, Any], num_shared: int, reason: Reason) -> None:
    (split,) = find_splits([FIRST, later])
    assert (split.timeline, split.earlier, split.num_shared, split.reason) == (1, 0, num_shared, reason)


def test_the_same_text_in_other_tokens_is_told_from_another_text() -> None:
    again = block("assistant", "xyz") | {"token_ids": [1, 2], "logprobs": [None, None]}
    (split,) = find_splits([FIRST, line(ASK, again, block("user", "d"), REPLY)])
    assert split.reason is Reason.RETOKENIZED


def test_a_conversation_that_only_goes_on_splits_nowhere() -> None:
    second = line(ASK, REPLY, block("user", "d"), block("assistant", "w", is_sampled=True))
    assert find_splits([FIRST, second]) == []
    assert find_splits([FIRST, second, FIRST]) == [], "a call that was repeated leaves nothing"
    assert split_lines([], 2) == ["nothing splits: of 2 calls each goes on from an earlier one, or repeats it"]


def test_an_episode_without_calls_is_said_to_have_none() -> None:
    assert split_lines(find_splits([]), 0) == ["the episode has no call yet"]
    assert split_lines(find_splits([FIRST]), 1) == ["nothing splits: the episode has a single call"]
    assert timeline_lines([]) == ["the episode has no call yet"]


def test_a_timeline_is_compared_with_the_one_it_shares_most_with() -> None:
    second = line(ASK, REPLY, block("user", "dd"), REPLY)
    third = line(ASK, REPLY, block("user", "de"), REPLY)
    (split,) = find_splits([FIRST, second, third])
    assert (split.timeline, split.earlier, split.num_shared, split.was, split.now) == (
        2,
        1,
        7,
        "abcxyzddxyz",
        "abcxyzdexyz",
    )


def test_an_agent_is_compared_with_its_own_calls_though_another_shares_more() -> None:
    other = line(block("user", "abcd"), REPLY, agent="other")
    again = line(block("user", "abcq"), REPLY)
    splits = find_splits([line(block("user", "abz"), REPLY), other, again])
    assert [(split.timeline, split.earlier, split.reason) for split in splits] == [
        (1, 0, Reason.OTHER_AGENT),
        (2, 0, Reason.MESSAGE_CHANGED),
    ]


def test_every_way_of_merging_is_named_by_the_command() -> None:
    shown = CliRunner().invoke(app, ["timelines", "--help"], env={"COLUMNS": "200"})
    assert all(re.search(rf"\b{how}\b", shown.output) for how in Merge), shown.output


@pytest.mark.parametrize("kind", THOUGHTS)
def test_thoughts_that_a_template_drops_are_its_doing_with_every_family(kind: str) -> None:
    chat = Chat(kind)
    chat.messages = [user("hi")]
    for number in range(3):
        chat.turn(THOUGHTS[kind].format(number, number), user("go"))
    splits = find_splits(shown(chat))
    assert [split.reason for split in splits] == [Reason.TEMPLATE_REWROTE] * 2
    assert [(f"hm, {number}" in split.was, f"hm, {number}" in split.now) for number, split in enumerate(splits)] == [
        (True, False),
        (True, False),
    ]


def test_a_prompt_of_the_same_letters_in_other_tokens_is_no_changed_message() -> None:
    chat = Chat("qwen25")
    for prompt in ((*chat.codec.encode("the"), 33), (*b"the", 34)):
        (draft,) = chat.tracker.number(chat.tracker.draft_ids("main", (32, *prompt)))
        chat.finish(draft, chat.codec.encode("so<|im_end|>"))
    (split,) = find_splits(shown(chat))
    assert split.reason is Reason.MESSAGE_CHANGED, "what follows differs"
    chat = Chat("qwen25")
    for prompt in ((*chat.codec.encode("the"), 33), (*b"the", 33)):
        (draft,) = chat.tracker.number(chat.tracker.draft_ids("main", (32, *prompt)))
        chat.finish(draft, chat.codec.encode("so<|im_end|>"))
    (split,) = find_splits(shown(chat))
    assert split.reason is Reason.RETOKENIZED


def test_the_command_shows_what_a_retry_and_an_edited_history_did(played: Served) -> None:
    with played.client() as client:
        episode = client.episode("split", mode=Mode.EVAL, script=["one", "two", "three"])
        hello = {"role": "user", "content": "hello"}
        episode.chat([hello])
        episode.chat([hello])
        episode.chat([hello, {"role": "assistant", "content": "never said"}, {"role": "user", "content": "go on"}])
        episode.end(reward=0.0)
    words = ["why-split", episode.episode_id, "--run-dir", str(played.run_dir)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "timeline 1 leaves timeline 0" in shown.output
    assert str(Reason.ASKED_AGAIN) in shown.output
    assert str(Reason.REPLY_CHANGED) in shown.output
    assert "never said" in shown.output
    (event,) = map(json.loads, CliRunner().invoke(app, [*words, "--json"]).output.splitlines())
    assert [split["reason"] for split in event["splits"]] == [Reason.ASKED_AGAIN, Reason.REPLY_CHANGED]
