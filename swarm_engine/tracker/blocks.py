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
from swarm_engine.tracker.messages import SENTINEL, Message
from swarm_engine.tracker.tracker import CallNote, EpisodeRecord, after_answer, answer_message
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
        if note.extends is None:
            pieces = self._cut((), note.messages, call.prompt_ids, ())
        else:
            base = self._calls[note.extends]
            known = len(base.prompt_ids) + len(base.completion_ids)
            history = (*self._messages(note.extends), answer_message(SENTINEL))
            pieces = [
                *self._pieces(note.extends),
                *self._cut(history, note.messages, call.prompt_ids[known:], base.completion_ids),
            ]
        return [*pieces, Piece(Author.LLM, "assistant", len(call.completion_ids))]

    def _messages(self, call_id: str) -> tuple[Message, ...]:
        note = self._notes[call_id]
        if note.extends is None:
            return note.messages
        return (*self._messages(note.extends), answer_message(self._notes[note.extends].answer), *note.messages)

    def _cut(
        self,
        history: Sequence[Message],
        messages: Sequence[Message],
        ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
    ) -> list[Piece]:
        """Pieces of the part of a prompt that follows `history`, whose tokens are `ids`."""
        whole = [Piece(Author.ENV, TEMPLATE_ROLE, len(ids))] if ids else []
        try:
            ends = self._ends(history, messages)
        except BadRequestError:
            # Some templates refuse a conversation that ends early; then nobody can say where its messages end.
            return whole
        codec = self._codec
        pieces: list[Piece] = []
        joined: list[int] = []
        shown = ""
        labels: list[tuple[Author, str]] = [(_author(one), one["role"]) for one in messages]
        if history:
            labels.insert(0, (Author.ENV, TEMPLATE_ROLE))
            ends = [after_answer(codec, end, completion_ids) for end in ends]
        labels.append((Author.ENV, TEMPLATE_ROLE))
        for (author, role), end in zip(labels, ends, strict=True):
            if not end.startswith(shown):
                return whole
            encoded = codec.encode(end[len(shown) :])
            joined.extend(encoded)
            shown = end
            if encoded:
                pieces.append(Piece(author, role, len(encoded)))
        return pieces if tuple(joined) == ids else whole

    def _ends(self, history: Sequence[Message], messages: Sequence[Message]) -> list[str]:
        """The rendered text after `history` up to the end of each message, then with the generation prompt."""
        codec = self._codec
        everything = [*map(codec.protect, history), *map(codec.protect, messages)]
        first = len(history) if history else 1
        rendered = [
            codec.render(everything[:count], add_generation_prompt=False) for count in range(first, len(everything) + 1)
        ]
        rendered.append(codec.render(everything))
        return [text.partition(SENTINEL)[2] for text in rendered] if history else rendered


def _author(message: Mapping[str, object]) -> Author:
    return Author.ENV if message["role"] == "tool" else Author.USER
