"""Agents that keep a history as frameworks do, against the tracker with any family of chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from chat_templates import CODECS, KINDS

from swarm_engine.config import History, Merge
from swarm_engine.merger import merge
from swarm_engine.tracker.answers import Answer
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import Message, parse_messages, parse_tools
from swarm_engine.tracker.tracker import Draft, EpisodeRecord, EpisodeTracker
from swarm_engine.types import Call, Episode, FinishReason, Mode, Outcome, Timeline

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks it up.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
WITH_TOOLS = [name for name, codec in CODECS.items() if codec.takes_tools]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


class Chat:
    """An agent that keeps its history in OpenAI's shape, as frameworks do: reasoning is not sent back."""

    def __init__(self, kind: str, history: History = History.RECORDED, tools: Sequence[Message] = ()) -> None:
        self.codec: ChatCodec = CODECS[kind]
        self.tracker = EpisodeTracker("e", "policy", self.codec, history)
        self.tools = parse_tools(list(tools))
        self.messages: list[Message] = []
        self.drafts: list[Draft] = []
        self.served: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def ask(self, *messages: Message, num_choices: int = 1) -> tuple[Draft, ...]:
        draft = self.tracker.draft("main", parse_messages(list(messages)), self.tools)
        drafts = self.tracker.number(draft, num_choices)
        self.drafts += drafts
        return drafts

    def finish(
        self, draft: Draft, sampled: Sequence[int], reason: FinishReason = FinishReason.STOP, **how: Any
    ) -> Answer:
        reader = self.codec.reader(draft, how.pop("stop", ()))
        reader.push(sampled)
        reader.finish()
        self.tracker.finish(
            draft,
            completion_ids=sampled,
            logprobs=[-0.5] * len(sampled),
            policy_versions=[0] * len(sampled),
            temperature=how.pop("temperature", 1.0),
            finish_reason=reason,
            answer=reader.answer,
            **how,
        )
        self.served[draft.call_id] = (draft.prompt_ids, tuple(sampled))
        return reader.answer

    def turn(self, text: str, *later: Message, **how: Any) -> Answer:
        """Ask, get `text`, and take the answer and what follows into the history."""
        (draft,) = self.ask(*self.messages)
        answer = self.finish(draft, self.codec.encode(text), **how)
        self.messages += [sent_back(answer), *later]
        return answer

    def results(self, *texts: str) -> list[Message]:
        """Results of the newest answer's calls."""
        calls = self.messages[-1]["tool_calls"]
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    def record(self) -> EpisodeRecord:
        episode = Episode("e", "t", "t#0", 0, Mode.TRAIN, 0, self.calls(), {"main": 1.0}, Outcome.SUCCESS, {}, {})
        return EpisodeRecord(episode, self.tracker.notes())

    def calls(self) -> tuple[Call, ...]:
        return self.tracker.calls()

    def rows(self) -> tuple[Timeline, ...]:
        """Merged by token, checked: every sampled position of a trained call carries a loss in exactly one row."""
        timelines = self.record().episode.timelines()
        rows = merge(timelines, Merge.TOKEN)
        assert sum(row.num_trained for row in rows) == sum(
            len(call.completion_ids) for call in self.calls() if call.untrained_because is None
        )
        return rows


def sent_back(answer: Answer) -> Message:
    """An answer as a framework sends it back: without reasoning, arguments written again."""
    message: Message = {"role": "assistant", "content": answer.content.strip() or None}
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": rewritten(call.arguments)},
            }
            for call in answer.tool_calls
        ]
    return message


def rewritten(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments


ARGUMENTS = '{ "q":"né 😊",\n "n": [1.0,  2]}'
"""White space, an escape and a number that come back written in another way."""


def call_text(kind: str, arguments: str = ARGUMENTS, name: str = "look") -> str:
    """A call as a model of this family samples it."""
    return {
        "qwen25": f'<tool_call>{{"name": "{name}",  "arguments": {arguments}}}\n\n</tool_call><|im_end|>',
        "hermes_text": f'<tool_call>{{"name": "{name}",  "arguments": {arguments}}}\n\n</tool_call><|im_end|>',
        "qwen3": "<think>\nhm\n</think>\n\n"
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>',
        "qwen3_opened": "hm\n</think>\n\n"
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>',
        "llama3": f'{{"name": "{name}",  "parameters": {arguments}}}<|eot_id|>',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]</s>',
        "mistral_named": f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{arguments}</s>",
        "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        "deepseek": "hm\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    }[kind]


def final_text(kind: str, text: str) -> str:
    """An answer without reasoning."""
    end = KINDS[kind].ends[0]
    if kind == "harmony":
        return f"<|channel|>final<|message|>{text}{end}"
    return f"</think>{text}{end}" if kind == "qwen3_opened" else f"{text}{end}"


THOUGHTS = {
    "qwen3": "<think>\nhm, {}\n</think>\n\nI say {}.<|im_end|>",
    "qwen3_opened": "hm, {}\n</think>\n\nI say {}.<|im_end|>",
    "deepseek": "hm, {}\n</think>I say {}.<｜end▁of▁sentence｜>",
    "harmony": "<|channel|>analysis<|message|>hm, {}<|end|>"
    "<|start|>assistant<|channel|>final<|message|>I say {}.<|return|>",
}
"""Replies of the families that drop reasoning from history."""
