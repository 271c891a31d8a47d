"""A reply that was read: its content, its reasoning and its tool calls, whole and as the pieces that it came in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from swarm_engine.tracker.messages import Message, read_arguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the model wrote it."""

    call_id: str
    """Made by the server; the same for the same call, however its reply was read."""
    name: str
    arguments: str
    """As sampled, well-formed JSON or not."""
    written_id: str | None = None
    """The id that the model itself gave it, which its history shows; None where the reply has none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, read."""

    content: str
    reasoning: str | None = None
    """None where the reply holds none, or an empty block of it."""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self, *, has_written_ids: bool = False) -> Message:
        """The reply as the message that comes back in a history.

        Args:
            has_written_ids: whether calls go by the ids that the model wrote, as it sees them, where it wrote any.
        """
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": (call.written_id if has_written_ids else None) or call.call_id,
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


def kind_of(delta: Delta) -> tuple[type[Delta], int | None]:
    """What deltas that belong together share."""
    return type(delta), delta.index if isinstance(delta, ToolCallDelta) else None


def join_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    joined: list[Delta] = []
    for (kind, _), group in groupby(deltas, kind_of):
        pieces = list(group)
        first = pieces[0]
        if isinstance(first, ToolCallDelta):
            calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
            joined.append(replace(first, arguments="".join(piece.arguments for piece in calls)))
        else:
            text = "".join(piece.text for piece in pieces if not isinstance(piece, ToolCallDelta))
            joined.append(TextDelta(text) if kind is TextDelta else ReasoningDelta(text))
    return joined
