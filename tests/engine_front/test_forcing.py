"""Forced tool calls: whatever a model samples under the grammar is read as one call of an allowed tool."""

from __future__ import annotations

import json
import random

import pytest
from chat_templates import CHATML_TOKENS, CODECS, KINDS, QWEN3, Kind
from llguidance import LLMatcher, LLTokenizer
from tiny_tokenizer import ids, make_tokenizer

from swarm_engine.errors import UnsupportedError
from swarm_engine.tracker.messages import Message, parse_messages, parse_tools
from swarm_engine.tracker.replies import Answer
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
FORCED = {name: kind for name, kind in {**KINDS, "plain_tags": PLAIN_TAGS}.items() if kind.codec().takes_tools}


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
    # A tag of several tokens would never be drawn by chance.
    while not matcher.is_stopped():
        mask = matcher.compute_logit_bias()
        allowed = [token for token in range(tokenizer.get_vocab_size()) if mask[token]]
        wanted = [token for token in allowed if token >= 256 or chr(token) in '"}]</'] or allowed
        token = draw.choice(wanted if len(sampled) > 20 or draw.random() < 0.3 else allowed)
        if (
            kind is PLAIN_TAGS
            and len(sampled) >= 20
            and mask[ord("<")]
            and not spelled
            and "</think>" not in codec.show(sampled)
        ):
            spelled = ids("</think>") if codec.show(sampled).startswith("<think>") else []
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


def test_a_template_without_calls_says_so() -> None:
    with pytest.raises(UnsupportedError, match="no form of tool calls"):
        CODECS["gemma3"].forced_call_grammar(TOOLS, ["look"])
