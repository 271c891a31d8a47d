"""What a reply says: its content, its reasoning and its tool calls, whole or piece by piece while tokens come in.

However the tokens are split, the pieces join to the same answer. Nothing a model writes is an error: arguments that are
no JSON stay as they were sampled, and what can't be read as a call is content.
"""

from __future__ import annotations

import codecs
from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from swarm_engine.tracker.answers import (
    Answer,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    join_deltas,
    kind_of,
)
from swarm_engine.tracker.marks import clean
from swarm_engine.tracker.markup import Markup
from swarm_engine.tracker.reply_parser import ReplyParser

if TYPE_CHECKING:
    from swarm_engine.tracker.codec import ChatCodec


class ReplyReader:
    """Reads a reply while its tokens come in.

    Control tokens of the template's markup count where they were sampled as such; text that spells one is text. Stop
    strings are looked for in the whole reply as people see it, reasoning and calls included. What a stop string or a
    tag may still reach back into is held back, everything else can be taken at once.
    """

    def __init__(
        self,
        codec: ChatCodec,
        call_id: str,
        *,
        stop: Sequence[str] = (),
        markup: Markup | None = None,
        is_reasoning_open: bool = False,
        tool_names: Collection[str] = (),
    ) -> None:
        """Begin.

        Args:
            codec: turns tokens into bytes.
            call_id: of the engine's call; the ids of tool calls are made from it.
            stop: texts before which the reply ends.
            markup: how reasoning and calls show; None reads everything as content.
            is_reasoning_open: whether the prompt has opened the reasoning.
            tool_names: tools that may be called; where there are none, calls are not looked for.
        """
        self.codec = codec
        self.num_tokens = 0
        """Tokens read so far."""
        self.stopped_by: str | None = None
        """The stop string that came, the first one where several did; its last token is the last one read."""
        self._stop = tuple(stop)
        self._held_back = max(map(len, stop), default=1) - 1
        self._waiting: list[tuple[str, str]] = []
        """Pieces that a stop string may still reach back into: as parsed, and as people see them."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._marks = markup.by_id if markup is not None else {}
        self._parser = ReplyParser(markup, call_id, frozenset(tool_names), is_reasoning_open)
        self._num_taken = 0
        self._num_chars = 0
        self._starts = array("Q")
        """For each token the character of the reply, marks included, that it begins or goes on with."""

    def push(self, token_ids: Sequence[int]) -> None:
        """Read tokens, up to the one that completes a stop string."""
        if self.stopped_by is not None:
            return
        if not self._stop:
            self.num_tokens += len(token_ids)
            self._parser.feed("".join(parsed for parsed, _ in self._decode(token_ids)))
            return
        for token_id in token_ids:
            self.num_tokens += 1
            self._waiting += self._decode([token_id])
            self._release()
            if self.stopped_by is not None:
                return

    def finish(self) -> None:
        """No token follows: a character that was cut short becomes U+FFFD."""
        if self.stopped_by is None:
            rest = clean(self._decoder.decode(b"", final=True))
            self._waiting.append((rest, rest))
            self._parser.feed("".join(parsed for parsed, _ in self._waiting))
            self._waiting.clear()
        self._parser.feed("", is_over=True)

    def take(self) -> list[Delta]:
        """What was not taken yet and can't change any more; all of it together is the answer."""
        return [delta for delta, _ in self.take_placed()]

    def take_placed(self) -> list[tuple[Delta, int]]:
        """What `take` gives, each delta with the number of tokens that begin before its end."""
        new, ends = self._parser.deltas[self._num_taken :], self._parser.ends[self._num_taken :]
        self._num_taken = len(self._parser.deltas)
        joined = join_deltas(new)
        kinds = [*map(kind_of, new), None]
        lasts = [index for index in range(len(new)) if kinds[index] != kinds[index + 1]]
        return [(delta, self.num_before(ends[last])) for delta, last in zip(joined, lasts, strict=True)]

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens spent on reasoning, in a reply that is finished.

        From the mark that opens it, where that was sampled, up to and with the one that closes it. In channels those of
        analysis messages, headers and ends included.
        """
        return sum(self.num_before(end) - self.num_before(start) for start, end in self._parser.reasoning)

    def starts(self, tokens: range) -> list[int]:
        """Where in the reply's text each of these tokens begins, one in the middle of a character at that character.

        For a reply without markup, whose text is all of it.
        """
        return list(self._starts[tokens.start : tokens.stop])

    def num_before(self, place: int) -> int:
        """How many tokens begin before a character of the reply, marks counted as characters."""
        return bisect_left(self._starts, place)

    @property
    def answer(self) -> Answer:
        """What was read so far."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for delta in join_deltas(self._parser.deltas):
            match delta:
                case TextDelta(text):
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case ToolCallDelta(index, call_id, name, arguments):
                    calls.append(ToolCall(call_id, name, arguments, self._parser.written_ids.get(index)))
        return Answer("".join(content), "".join(reasoning) or None, tuple(calls))

    def _decode(self, token_ids: Sequence[int]) -> list[tuple[str, str]]:
        """Tokens as text, the markup's control tokens marked."""
        codec, pieces = self.codec, list[tuple[str, str]]()
        for token_id in token_ids:
            mark = self._marks.get(token_id)
            if mark is not None:
                self._starts.append(self._num_chars)
                # A control token ends a character that was cut short.
                text = clean(self._decoder.decode(b"", final=True))
                pieces += [(text, text), (mark, "" if codec.is_hidden(token_id) else mark[1:])]
                self._num_chars += len(text) + len(mark)
            elif codec.is_hidden(token_id):
                self._starts.append(self._num_chars)
            else:
                raw = codec.token_bytes(token_id)
                self._starts.append(self._num_chars + self._breaks(raw))
                text = clean(self._decoder.decode(raw))
                pieces.append((text, text))
                self._num_chars += len(text)
        return pieces

    def _breaks(self, raw: bytes) -> bool:
        """Whether bytes begin a character of their own while one is open, which then stands before them as U+FFFD."""
        if not raw or not (begun := self._decoder.getstate()[0]):
            return False
        try:
            codecs.utf_8_decode(begun + raw, "strict", False)
        except UnicodeDecodeError as error:
            return error.start == 0
        return False

    def _release(self) -> None:
        """Hand on what no stop string can reach back into, or all before the first one."""
        visible = "".join(seen for _, seen in self._waiting)
        found = [(at, place) for place, stop in enumerate(self._stop) if (at := visible.find(stop)) >= 0]
        room = len(visible) - self._held_back
        if found:
            room, first = min(found)
            self.stopped_by = self._stop[first]
        released, kept = "", list[tuple[str, str]]()
        for parsed, seen in self._waiting:
            if not kept and len(seen) <= room:
                released += parsed
                room -= len(seen)
            elif not kept and parsed == seen and room > 0:
                released += seen[:room]
                kept.append((seen[room:], seen[room:]))
            else:
                kept.append((parsed, seen))
        self._waiting = [] if found else kept
        self._parser.feed(released)
