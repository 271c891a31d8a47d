"""A recorded context, message by message, for people who look at it and for `GET …/timelines`.

Which tokens belong to which message is worked out from the template when somebody asks, not while the model waits:
the conversation is rendered up to each message, and where one rendering begins the next, what was added is the message.
The pieces are encoded apart and must join to the recorded ids; where they don't, the prompt is shown as one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swarm_engine.errors import BadRequestError
from swarm_engine.tracker.answers import Answer
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import Message, Tool
from swarm_engine.tracker.tracker import CallNote, EpisodeRecord
from swarm_engine.types import Author, Block, Call, Span, Timeline

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
        # Every call is read once, for the timelines of a conversation repeat each other.
        self._added: dict[str, list[Piece]] = {}
        """What each call added to the context that it extends."""
        self._protected: dict[str, tuple[Message, ...]] = {}
        """Each call's own messages as the template takes them."""

    def blocks(self, timeline: Timeline) -> tuple[Block, ...]:
        """The blocks of a timeline of this episode, as recorded or merged."""
        if (whole := self._recorded_as(timeline)) is not None:
            pieces = self._pieces(whole)
        else:  # merged by text: what each call added, behind the call before it
            ends = [0, *(span.end for span in timeline.spans)]
            pieces = [
                piece
                for (before, end), span in zip(pairwise(ends), timeline.spans, strict=True)
                for piece in _last(self._pieces(span.call_id), end - before)
            ]
        logprobs: list[float | None] = [None] * len(timeline.tokens)
        versions: list[int | None] = [None] * len(timeline.tokens)
        for span in timeline.spans:
            logprobs[span.start : span.end] = span.logprobs
            versions[span.start : span.end] = span.policy_versions
        mask = timeline.loss_mask
        blocks = []
        start = 0
        for piece in _apart_from_spans(pieces, timeline.spans):
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

    def _recorded_as(self, timeline: Timeline) -> str | None:
        """The call whose context a timeline is; of calls with these very tokens the one that sampled the last of them.

        None where merging by text made it.
        """
        last = timeline.spans[-1].call_id if timeline.spans else None
        if last is not None and self._calls[last].timeline().tokens == timeline.tokens:
            return last
        return self._by_tokens.get(timeline.tokens)

    def _pieces(self, call_id: str) -> list[Piece]:
        """The pieces of a call's prompt and its reply."""
        chain = [call_id]
        while (base := self._notes[chain[-1]].extends) is not None:
            chain.append(base)
        chain.reverse()
        first = self._notes[chain[0]]
        codec = self._codec.suited(first.tools)
        tools = codec.protect_tools(first.tools)
        pieces: list[Piece] = []
        history: list[Message] = []
        """All that stands before the answer of the call before, protected."""
        for one in chain:
            if one not in self._added:
                self._protected[one] = tuple(map(codec.protect, self._notes[one].messages))
                self._added[one] = self._read(one, history, tools)
            pieces += self._added[one]
            note = self._notes[one]
            if note.extends is not None:
                history.append(codec.protect(self._notes[note.extends].answer.message()))
            history += self._protected[one]
        return pieces

    def _read(self, call_id: str, history: Sequence[Message], tools: Sequence[Tool]) -> list[Piece]:
        """What a call added: its own messages and its reply."""
        call, note = self._calls[call_id], self._notes[call_id]
        own = self._protected[call_id]
        if note.extends is not None:
            base, answer = self._calls[note.extends], self._notes[note.extends].answer
            known = len(base.prompt_ids) + len(base.completion_ids)
            texts = self._texts_behind(answer, base.completion_ids, history, own, tools)
            pieces = self._cut(texts, note.messages, call.prompt_ids[known:])
        elif note.messages:
            pieces = self._cut(self._render((), own, tools), note.messages, call.prompt_ids)
        else:
            pieces = [Piece(Author.USER, "user", len(call.prompt_ids))]
        return [*pieces, Piece(Author.LLM, "assistant", len(call.completion_ids))]

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

    def _texts_behind(
        self,
        answer: Answer,
        completion_ids: Sequence[int],
        history: Sequence[Message],
        later: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[str]:
        """What the template writes behind an answer, up to the end of each later message."""
        codec = self._codec.suited(tools)
        texts = self._render([*history, codec.stand_in(answer)], later, tools)
        tails = [codec.after(text, answer) for text in texts]
        return [codec.join(tail, answer, completion_ids) for tail in tails if tail is not None]

    def _render(self, known: Sequence[Message], later: Sequence[Message], tools: Sequence[Tool]) -> list[str]:
        """The conversation up to each later message, from the last known one on, then with the generation prompt."""
        messages, codec = [*known, *later], self._codec.suited(tools)
        try:
            texts = [
                codec.render(messages[:count], tools, add_generation_prompt=False)
                for count in range(max(len(known), 1), len(messages) + 1)
            ]
            return [*texts, codec.render(messages, tools)]
        except BadRequestError:
            return []


def _apart_from_spans(pieces: Sequence[Piece], spans: Sequence[Span]) -> Iterator[Piece]:
    """Pieces, and apart what calls sampled inside of them.

    A prompt of token ids is one piece, replies included; and a reply that was broken off may be how another one begins.
    """
    start = 0
    for piece in pieces:
        end = start + piece.num_tokens
        inside = [span for span in spans if start <= span.start and span.end <= end]
        for span in inside:
            if start < span.start:
                yield replace(piece, num_tokens=span.start - start)
            yield Piece(Author.LLM, "assistant", span.end - span.start)
            start = span.end
        if start < end or piece.num_tokens == 0:
            yield replace(piece, num_tokens=end - start)
        start = end


def _last(pieces: Sequence[Piece], num_tokens: int) -> list[Piece]:
    """The pieces of the last tokens of a context."""
    kept: list[Piece] = []
    for piece in reversed(pieces):
        taken = min(piece.num_tokens, num_tokens)
        if taken:
            kept.append(replace(piece, num_tokens=taken))
        num_tokens -= taken
    return kept[::-1]


def _author(message: Mapping[str, object]) -> Author:
    return Author.ENV if message["role"] == "tool" else Author.USER
