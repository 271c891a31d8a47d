"""Forced tool calls: whatever a model samples under the grammar is read as one call of an allowed tool."""

from __future__ import annotations

import json
import random

import pytest
from chat_templates import CHATML_TOKENS, CODECS, KINDS, QWEN3, Kind
from llguidance import LLMatcher, LLTokenizer
from tiny_tokenizer import ids, make_tokenizer

from swarm_engine.errors import UnsupportedError
from swarm_engine.tracker.answers import Answer
from swarm_engine.tracker.messages import Message, parse_messages, parse_tools
from swarm_engine.tracker.tracker import EpisodeTracker

SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "array", "items": {"type": "integer"}}},
    "required": ["q"],
    "additionalProperties": False,
}
TOOLS = parse_tools(
    [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "add-up", "never")]
)
PLAIN_TAGS = Kind(QWEN3.template, CHATML_TOKENS)
"""Reasoning and calls between tags that the tokenizer has no tokens for."""
IN_BRACKETS = Kind(QWEN3.template.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"), CHATML_TOKENS)
CLOSES = {id(PLAIN_TAGS): "</think>", id(IN_BRACKETS): "[/THINK]"}
"""Tags of several tokens that end reasoning; no such tag would ever be drawn by chance."""
FORCED = {
    name: kind
    for name, kind in {**KINDS, "plain_tags": PLAIN_TAGS, "in_brackets": IN_BRACKETS}.items()
    if kind.codec().takes_tools
}


def sample(kind: Kind, asked: list[Message], draw: random.Random) -> Answer:
    """A reply drawn at random under the grammar; endings are taken often, so that it ends."""
    codec = kind.codec()
    (draft,) = EpisodeTracker("e", "policy", codec).begin("main", parse_messages(asked), TOOLS)
    tokenizer = make_tokenizer(kind.special, kind.added)
    end = tokenizer.token_to_id(kind.ends[0])
    rules = LLTokenizer(tokenizer.to_str(), eos_token=end)
    matcher = LLMatcher(rules, codec.forced_call_grammar(TOOLS, ["look", "add-up"], draft))
    assert not matcher.get_error()
    sampled: list[int] = []
    spelled: list[int] = []
    closes = CLOSES.get(id(kind))
    while not matcher.is_stopped():
        mask = matcher.compute_logit_bias()
        allowed = [token for token in range(tokenizer.get_vocab_size()) if mask[token]]
        wanted = [token for token in allowed if token >= 256 or chr(token) in '"}]</'] or allowed
        token = draw.choice(wanted if len(sampled) > 20 or draw.random() < 0.3 else allowed)
        if closes and len(sampled) >= 20 and mask[ord(closes[0])] and not spelled and closes not in codec.show(sampled):
            spelled = ids(closes) if codec.show(sampled).startswith(closes.replace("/", "")) else []
        if spelled:
            token = spelled.pop(0)
        assert matcher.consume_token(token), matcher.get_error()
        sampled.append(token)
        assert len(sampled) < 5000
    found = codec.reader(draft)
    found.push(sampled)
    found.finish()
    return found.answer


@pytest.mark.parametrize("kind", FORCED)
def test_whatever_is_sampled_is_one_call_of_an_allowed_tool(kind: str) -> None:
    draw = random.Random(kind)
    names = set()
    for _ in range(12):
        answer = sample(FORCED[kind], [{"role": "user", "content": "hi"}], draw)
        (call,) = answer.tool_calls
        names.add(call.name)
        arguments = json.loads(call.arguments)
        assert isinstance(arguments["q"], str)
        assert arguments.keys() <= {"q", "n"}
        assert answer.content == ""
    assert names == {"look", "add-up"}


def test_reasoning_is_closed_only_where_this_prompt_opened_it() -> None:
    call = {"id": "c1", "function": {"name": "look", "arguments": "{}"}}
    asked: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "17", "tool_call_id": "c1"},
    ]
    answer = sample(KINDS["deepseek"], asked, random.Random(0))
    assert (len(answer.tool_calls), answer.content) == (1, "")


def test_the_tag_that_ends_reasoning_is_a_text_in_the_grammar_and_no_pattern() -> None:
    grammar = IN_BRACKETS.codec().forced_call_grammar(TOOLS, ["look"])
    tokenizer = make_tokenizer(IN_BRACKETS.special, IN_BRACKETS.added)
    rules = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(IN_BRACKETS.ends[0]))
    for thought, is_taken in (
        ("[THINK]\nTHINK, IT\n[/THINK]\n\n<tool_call>", True),
        ("[THINK]\nT\n\n<tool_call>", False),
    ):
        matcher = LLMatcher(rules, grammar)
        assert not matcher.get_error()
        assert all(matcher.try_consume_tokens([one]) for one in ids(thought)), "any text may stand in the reasoning"
        mask = matcher.compute_logit_bias()
        assert (mask[ord("x")] == 0) == is_taken


def test_a_template_without_calls_says_so() -> None:
    with pytest.raises(UnsupportedError, match="no form of tool calls"):
        CODECS["gemma3"].forced_call_grammar(TOOLS, ["look"])
