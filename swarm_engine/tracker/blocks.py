"""A recorded context, message by message, for people who look at it and for `GET …/timelines`.

Which tokens belong to which message is worked out from the template when somebody asks, not while the model waits:
the conversation is rendered up to each message, and where one rendering begins the next, what was added is the message.
The pieces are encoded apart and must join to the recorded ids; where they don't, the prompt is shown as one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm_engine.errors import BadRequestError
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import Message, Tool
from swarm_engine.tracker.replies import Answer
from swarm_engine.tracker.tracker import CallNote, EpisodeRecord
from swarm_engine.types import Author, Block, Call, Timeline

TEMPLATE_ROLE = "template"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a context that one author wrote."""

    author: Author
    role: str
    num_tokens: int


class EpisodeBlocks:
    """Shows the timelines of one recorded episode as blocks."""

    def __init__(self, record: EpisodeRecord, codec: ChatCodec) -> None:
        self._codec = codec
        self._calls: dict[str, Call] = {call.call_id: call for call in record.episode.calls}
        self._notes: dict[str, CallNote] = {note.call_id: note for note in record.notes}
        self._by_tokens = {call.timeline().tokens: call.call_id for call in record.episode.calls}

    def blocks(self, timeline: Timeline) -> tuple[Block, ...]:
        """The blocks of a timeline of this episode, as recorded or merged by token."""
        pieces = self._pieces(self._by_tokens[timeline.tokens])
        logprobs: list[float | None] = [None] * len(timeline.tokens)
        versions: list[int | None] = [None] * len(timeline.tokens)
        for span in timeline.spans:
            logprobs[span.start : span.end] = span.logprobs
            versions[span.start : span.end] = span.policy_versions
        mask = timeline.loss_mask
        blocks = []
        start = 0
        for piece in pieces:
            end = start + piece.num_tokens
            ids = timeline.tokens[start:end]
            blocks.append(
                Block(
                    author=piece.author,
                    role=piece.role,
                    text=self._codec.show(ids),
                    token_ids=ids,
                    logprobs=tuple(logprobs[start:end]),
                    loss_mask=mask[start:end],
                    policy_version=next((version for version in versions[start:end] if version is not None), None),
                )
            )
            start = end
        return tuple(blocks)

    def _pieces(self, call_id: str) -> list[Piece]:
        """The pieces of a call's prompt and its reply."""
        call, note = self._calls[call_id], self._notes[call_id]
        if not note.messages and note.extends is None:
            pieces = [Piece(Author.USER, "user", len(call.prompt_ids))]
        elif note.extends is None:
            pieces = self._cut(self._texts(note.messages, note.tools), note.messages, call.prompt_ids)
        else:
            base = self._calls[note.extends]
            known = len(base.prompt_ids) + len(base.completion_ids)
            texts = self._texts_behind(note.extends, note.messages, base.completion_ids)
            pieces = [*self._pieces(note.extends), *self._cut(texts, note.messages, call.prompt_ids[known:])]
        return [*pieces, Piece(Author.LLM, "assistant", len(call.completion_ids))]

    def _history(self, call_id: str) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """The messages and tools of a call."""
        note = self._notes[call_id]
        if note.extends is None:
            return note.messages, note.tools
        messages, tools = self._history(note.extends)
        return (*messages, self._notes[note.extends].answer.message(), *note.messages), tools

    def _cut(self, texts: Sequence[str], messages: Sequence[Message], ids: tuple[int, ...]) -> list[Piece]:
        """Pieces of the part of a prompt whose tokens are `ids`.

        Args:
            texts: that part as the template writes it up to the end of each message, then with the generation prompt;
                where it follows an answer, what the template writes behind that comes first. Empty where the template
                refuses a conversation that ends early: then nobody can say where its messages end.
        """
        whole = [Piece(Author.ENV, TEMPLATE_ROLE, len(ids))] if ids else []
        labels: list[tuple[Author, str]] = [(_author(one), one["role"]) for one in messages]
        if len(texts) == len(labels) + 2:
            labels.insert(0, (Author.ENV, TEMPLATE_ROLE))
        labels.append((Author.ENV, TEMPLATE_ROLE))
        if len(texts) != len(labels):
            return whole
        pieces: list[Piece] = []
        joined: list[int] = []
        shown = ""
        for (author, role), text in zip(labels, texts, strict=True):
            if not text.startswith(shown):
                return whole
            encoded = self._codec.encode(text[len(shown) :])
            joined.extend(encoded)
            shown = text
            if encoded:
                pieces.append(Piece(author, role, len(encoded)))
        return pieces if tuple(joined) == ids else whole

    def _texts(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[str]:
        """A prompt that was rendered whole, up to the end of each message."""
        return self._render((), [self._codec.protect(one) for one in messages], tools)

    def _texts_behind(self, call_id: str, messages: Sequence[Message], completion_ids: tuple[int, ...]) -> list[str]:
        """What the template writes behind a call's answer, up to the end of each message."""
        codec = self._codec
        history, tools = self._history(call_id)
        answer: Answer = self._notes[call_id].answer
        known = [*map(codec.protect, history), codec.stand_in(answer)]
        tails = [codec.after(text, answer) for text in self._render(known, list(map(codec.protect, messages)), tools)]
        return [codec.join(tail, answer, completion_ids) for tail in tails if tail is not None]

    def _render(self, known: Sequence[Message], later: Sequence[Message], tools: Sequence[Tool]) -> list[str]:
        """The conversation up to each later message, from the last known one on, then with the generation prompt."""
        codec = self._codec
        messages = [*known, *later]
        protected_tools = codec.protect_tools(tools)
        try:
            texts = [
                codec.render(messages[:count], protected_tools, add_generation_prompt=False)
                for count in range(max(len(known), 1), len(messages) + 1)
            ]
            return [*texts, codec.render(messages, protected_tools)]
        except BadRequestError:
            return []


def _author(message: Mapping[str, object]) -> Author:
    return Author.ENV if message["role"] == "tool" else Author.USER
