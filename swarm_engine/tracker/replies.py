"""What a reply says: its content, its reasoning and its tool calls, whole or piece by piece while tokens come in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from swarm_engine.tracker.messages import Message, read_arguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the model wrote it."""

    call_id: str
    """Made by the server; the same for the same call, however its reply was read."""
    name: str
    arguments: str
    """As sampled, well-formed JSON or not."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, read."""

    content: str
    reasoning: str | None = None
    """None where the reply holds none, or an empty block of it."""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """The reply as the message that comes back in a history."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": read_arguments(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of a tool call."""

    index: int
    """Among the calls of the reply, from 0; a call is complete when a delta of another one comes."""
    call_id: str
    name: str
    """Whole in the first delta of a call, empty in the later ones."""
    arguments: str
    """The next piece."""


Delta = TextDelta | ReasoningDelta | ToolCallDelta


def tool_call_id(call_id: str, index: int) -> str:
    """The id of a reply's tool call, made from the engine's call id."""
    return "call_" + hashlib.blake2b(f"{call_id}/{index}".encode(), digest_size=12).hexdigest()
