"""What a reply says: its content, its reasoning and its tool calls, whole or piece by piece while tokens come in.

However the tokens are split, the pieces join to the same answer. Nothing a model writes is an error: arguments that are
no JSON stay as they were sampled, and what can't be read as a call is content.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from swarm_engine.tracker.formats import ANY, CallSyntax, Family, Reasoning, ReplyFormat
from swarm_engine.tracker.messages import Message, read_arguments

if TYPE_CHECKING:
    from swarm_engine.tracker.codec import ChatCodec


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


MARK = "\ufdd2"
"""Stands before a control token of the markup that was sampled as one; a noncharacter."""
OURS = re.compile("[\ufdd0-\ufdd3]")
"""Noncharacters that this package keeps for itself."""

CHANNEL_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
START, CHANNEL, MESSAGE, END = CHANNEL_TAGS[:4]


class Markup:
    """A format as it shows in sampled tokens: which control tokens count, and the markup with a `MARK` before each."""

    def __init__(self, form: ReplyFormat, added: Mapping[str, int], is_hidden: Callable[[int], bool]) -> None:
        """Mark a format.

        Args:
            form: the format as the template writes it.
            added: ids of the tokenizer's control tokens by text.
            is_hidden: whether a control token is left out of what people see.
        """
        self.is_channels = form.calls is not None and form.calls.family is Family.CHANNELS
        strings = list(CHANNEL_TAGS) if self.is_channels else []
        if form.reasoning is not None:
            strings += [form.reasoning.opens, form.reasoning.closes]
        if form.calls is not None:
            calls = form.calls
            strings += [calls.opens, calls.call_opens, calls.middle, calls.call_closes, calls.closes]
        used = {text: number for text, number in added.items() if any(text in one for one in strings)}
        self.by_id = {number: MARK + text for text, number in used.items()}
        """Control tokens of the format, marked."""
        longest_first = sorted(used, key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._marked = re.compile(f"{MARK}({self._tags.pattern})")
        self._seen = {text: "" if is_hidden(number) else text for text, number in used.items()}
        self.reasoning = form.reasoning and Reasoning(self.mark(form.reasoning.opens), self.mark(form.reasoning.closes))
        self.calls = form.calls and replace(
            form.calls,
            opens=self.mark(form.calls.opens.strip()),
            call_opens=self.mark(form.calls.call_opens.strip()),
            middle=self.mark(form.calls.middle.strip()),
            call_closes=self.mark(form.calls.call_closes.strip()),
            closes=self.mark(form.calls.closes.strip()),
        )
        if self.calls is not None:
            self._read_calls(self.calls)

    def _read_calls(self, calls: CallSyntax) -> None:
        """What the parser looks for."""
        self.openers = tuple(tag for one in (calls.opens, calls.call_opens) if (tag := self._first_tag(one)))
        """Tags at which calls may begin."""
        self.call_end = self._last_tag(calls.call_closes)
        """Tag that ends a call; empty where none does."""
        self.soft_end = calls.call_closes.removesuffix(self.call_end).strip() if self.call_end else ""
        """Text before that tag that ends a call too, unless it stands inside a string."""
        self.end = self._first_tag(calls.closes)
        """Tag behind the last call; empty where there is none."""
        keys = "|".join({re.escape(calls.arguments_key), "arguments", "parameters"})
        self.object_head = re.compile(
            rf'\s*\{{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"{re.escape(calls.name_key)}"\s*:\s*'
            rf'(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:{keys})"\s*:\s*(?=\S)'
        )
        """A call's JSON object up to its arguments, in the usual order."""
        opens = f"(?:{_relaxed(calls.opens)})?" if calls.opens else ""
        middle = _relaxed(calls.middle) or r"(?=\{)"
        self.named_head = re.compile(rf"{opens}\s*{_relaxed(calls.call_opens)}\s*(?P<name>[\w.:/-]+)\s*{middle}\s*")
        """A named call up to its arguments."""

    def mark(self, text: str) -> str:
        """Markup as it shows in sampled tokens."""
        return self._tags.sub(lambda match: MARK + match.group(), text)

    def see(self, text: str) -> str:
        """Marked text as people see it."""
        return self._marked.sub(lambda match: self._seen[match.group(1)], text) if MARK in text else text

    def _first_tag(self, text: str) -> str:
        match = self._marked.match(text) or TAG.match(text)
        return match.group() if match else ""

    def _last_tag(self, text: str) -> str:
        marked = [match.group() for match in self._marked.finditer(text) if match.end() == len(text)]
        plain = [match.group() for match in TAG.finditer(text) if match.end() == len(text)]
        return (marked or plain or [""])[0]


TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]")


def _relaxed(markup: str) -> str:
    """A pattern for markup in which white space counts for nothing and an id is any id."""
    parts = re.findall(rf"{MARK}?[^\s{MARK}]+", markup)
    return r"\s*".join(re.escape(part).replace(ANY, r"[^\s<>\[\]]*") for part in parts)


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
        self._parser = _Parser(markup, call_id, frozenset(tool_names), is_reasoning_open)
        self._num_taken = 0
        self._num_chars = 0
        self._starts = array("Q")
        """For each token how many characters of the reply, marks included, stand before its own."""

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
            rest = _clean(self._decoder.decode(b"", final=True))
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
        joined = join(new)
        lasts = [
            index for index, delta in enumerate(new) if index + 1 == len(new) or _sort(delta) != _sort(new[index + 1])
        ]
        return [(delta, self.num_before(ends[last])) for delta, last in zip(joined, lasts, strict=True)]

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens spent on reasoning, in a reply that is finished.

        From the mark that opens it, where that was sampled, up to and with the one that closes it. In channels those of
        analysis messages, headers and ends included.
        """
        return sum(self.num_before(end) - self.num_before(start) for start, end in self._parser.reasoning)

    def num_before(self, place: int) -> int:
        """How many tokens begin before a character of the reply, marks counted as characters."""
        return bisect_left(self._starts, place)

    @property
    def answer(self) -> Answer:
        """What was read so far."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for delta in join(self._parser.deltas):
            match delta:
                case TextDelta(text):
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case ToolCallDelta(_, call_id, name, arguments):
                    calls.append(ToolCall(call_id, name, arguments))
        return Answer("".join(content), "".join(reasoning) or None, tuple(calls))

    def _decode(self, token_ids: Sequence[int]) -> list[tuple[str, str]]:
        """Tokens as text, the markup's control tokens marked."""
        codec, pieces = self.codec, list[tuple[str, str]]()
        for token_id in token_ids:
            self._starts.append(self._num_chars)
            mark = self._marks.get(token_id)
            if mark is not None:
                # A control token ends a character that was cut short.
                text = _clean(self._decoder.decode(b"", final=True))
                pieces += [(text, text), (mark, "" if codec.is_hidden(token_id) else mark[1:])]
                self._num_chars += len(text) + len(mark)
            elif not codec.is_hidden(token_id):
                text = _clean(self._decoder.decode(codec.token_bytes(token_id)))
                pieces.append((text, text))
                self._num_chars += len(text)
        return pieces

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


def _clean(text: str) -> str:
    """Text without the noncharacters that this package keeps for itself."""
    return OURS.sub("\ufffd", text)


def _sort(delta: Delta) -> tuple[type[Delta], int | None]:
    """What deltas that belong together share."""
    return type(delta), delta.index if isinstance(delta, ToolCallDelta) else None


def join(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    joined: list[Delta] = []
    for (kind, _), group in groupby(deltas, _sort):
        pieces = list(group)
        first = pieces[0]
        if isinstance(first, ToolCallDelta):
            calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
            joined.append(replace(first, arguments="".join(piece.arguments for piece in calls)))
        else:
            text = "".join(piece.text for piece in pieces if not isinstance(piece, ToolCallDelta))
            joined.append(TextDelta(text) if kind is TextDelta else ReasoningDelta(text))
    return joined


Steps = Generator[None, None, None]
"""Reads on and yields where it needs more text. Once the text is over it yields no more."""
Tries = Generator[None, None, bool]
"""Steps that say whether a call was read; where none was, nothing is used up."""

FIRST_KEY = re.compile(r'\s*\{\s*(?:"(?P<key>(?:[^"\\]|\\.)*)"\s*:|[^"\s])')
COMMA = re.compile(r"\s*,")
MEMBER = re.compile(r'\s*"(?P<key>(?:[^"\\]|\\.)*)"\s*:\s*')
CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class _Parser:
    """The grammar of replies, over text in which the markup's control tokens carry a `MARK`.

    White space around reasoning and calls is markup; inside the content it stays. What looks like a call and can't be
    read as one is content, as it stands.
    """

    def __init__(self, markup: Markup | None, call_id: str, tools: frozenset[str], is_reasoning_open: bool) -> None:
        self.deltas: list[Delta] = []
        self.ends: list[int] = []
        """Where each delta ends, in characters of all that was fed."""
        self.reasoning: list[tuple[int, int]] = []
        """Where reasoning stood, from its mark to behind its last one, in characters of all that was fed."""
        self._num_fed = 0
        self._call_id = call_id
        self._tools = tools
        self._num_calls = 0
        self._text = ""
        """Not read yet."""
        self._is_over = False
        self._space = ""
        """White space that belongs to a part only if more of this part follows."""
        self._has_content = self._has_reasoning = self._has_arguments = False
        self._is_after_block = False
        """Whether reasoning or a call was the last thing read."""
        self._steps: Steps | None = None
        if markup is not None:
            self._markup = markup
            self._steps = self._read(markup, is_reasoning_open)

    def feed(self, text: str, is_over: bool = False) -> None:
        """Read more text."""
        self._num_fed += len(text)
        if self._steps is None:
            if text:
                self._emit(TextDelta(text))
            return
        self._text += text
        self._is_over = self._is_over or is_over
        if text or is_over:
            next(self._steps, None)

    def _read(self, markup: Markup, is_reasoning_open: bool) -> Steps:
        if markup.is_channels:
            yield from self._channels(markup)
        else:
            if markup.reasoning is not None:
                yield from self._think(markup.reasoning, is_reasoning_open)
            if markup.calls is None or not self._tools:
                yield from self._pour(self._add_plain_content, ())
            elif markup.calls.family is Family.BARE_JSON:
                yield from self._bare(markup)
                yield from self._pour(self._add_plain_content, ())
            else:
                yield from self._content(markup, markup.calls)
        space, self._space = self._space, ""
        if space and not self._is_after_block:
            self._emit(TextDelta(space))

    def _emit(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.ends.append(self._place - len(self._space))

    # Moving on in the text

    @property
    def _place(self) -> int:
        """How many characters have been read."""
        return self._num_fed - len(self._text)

    def _find(self, tags: Sequence[str]) -> tuple[int | None, int]:
        """Where the first of the tags stands, and how much of the text is surely none of them."""
        text = self._text
        found = [at for tag in tags if tag and (at := text.find(tag)) >= 0]
        if found:
            return min(found), min(found)
        if self._is_over:
            return None, len(text)
        return None, len(text) - max((_overlap(text, tag) for tag in tags), default=0)

    def _pour(self, say: Callable[[str], None], tags: Sequence[str]) -> Steps:
        """Hand everything before the first of the tags to `say`."""
        while True:
            at, end = self._find(tags)
            piece, self._text = self._text[:end], self._text[end:]
            if piece:
                say(piece)
            if at is not None or self._is_over:
                return
            yield

    def _wait(self, *tags: str) -> Steps:
        """Read white space ahead until it is clear whether one of the tags follows, or any text where none is given."""
        while not self._is_over:
            ahead = self._text.lstrip()
            if ahead and not any(tag.startswith(ahead) and tag != ahead for tag in tags):
                return
            yield

    def _skip(self, tag: str) -> bool:
        """Go past a tag and the white space before it, where it comes next."""
        ahead = self._text.lstrip()
        if not tag or not ahead.startswith(tag):
            return False
        self._text = ahead[len(tag) :]
        return True

    # Saying what was read

    def _add_plain_content(self, text: str) -> None:
        """More content, no call can follow."""
        text, self._space = self._space + self._markup.see(text), ""
        if self._is_after_block:
            text = text.lstrip()
        if text:
            self._has_content, self._is_after_block = True, False
            self._emit(TextDelta(text))

    def _add_content(self, text: str) -> None:
        """More content; white space at its end is markup if a call follows."""
        body = self._hold(text, not self._has_content and self._is_after_block)
        if body:
            self._has_content, self._is_after_block = True, False
            self._emit(TextDelta(body))

    def _add_reasoning(self, text: str) -> None:
        """More reasoning."""
        body = self._hold(text, not self._has_reasoning)
        if body:
            self._has_reasoning = True
            self._emit(ReasoningDelta(body))

    def _add_arguments(self, text: str) -> None:
        """More arguments of the newest call."""
        body = self._hold(text, not self._has_arguments)
        if body:
            self._has_arguments = True
            index = self._num_calls - 1
            self._emit(ToolCallDelta(index, tool_call_id(self._call_id, index), "", body))

    def _hold(self, text: str, is_first: bool) -> str:
        text = self._space + self._markup.see(text)
        body = text.rstrip()
        self._space = text[len(body) :]
        return body.lstrip() if is_first else body

    def _begin_call(self, name: str) -> None:
        self._emit(ToolCallDelta(self._num_calls, tool_call_id(self._call_id, self._num_calls), name, ""))
        self._num_calls += 1
        self._is_after_block = True
        self._has_arguments = False
        self._space = ""

    # Reasoning

    def _think(self, tags: Reasoning, is_open: bool) -> Steps:
        if not is_open:
            yield from self._wait(tags.opens)
            if not self._skip(tags.opens):
                return
        self._is_after_block = True
        yield from self._pour(self._add_reasoning, (tags.closes,))
        self._skip(tags.closes)
        self._space = ""
        self.reasoning.append((0, self._place))

    # Calls

    def _content(self, markup: Markup, calls: CallSyntax) -> Steps:
        """Content with calls in it."""
        while True:
            yield from self._pour(self._add_content, markup.openers)
            if not self._text:
                return
            if calls.family is Family.NAMED:
                is_read = yield from self._named(markup)
            elif calls.family is Family.JSON_LIST:
                is_read = yield from self._list(markup)
            else:
                is_read = yield from self._tagged(markup)
            if not is_read:
                opener = next(tag for tag in markup.openers if self._text.startswith(tag))
                self._text = self._text[len(opener) :]
                self._add_content(opener)

    def _tagged(self, markup: Markup) -> Tries:
        (opener,) = markup.openers
        self._text = self._text[len(opener) :]
        if not (yield from self._object(markup, (markup.call_end, opener))):
            self._text = opener + self._text
            return False
        yield from self._end_call(markup)
        return True

    def _list(self, markup: Markup) -> Tries:
        (opener,) = markup.openers
        self._text = self._text[len(opener) :]
        yield from self._wait()
        ahead = self._text
        self._skip("[")
        taken = opener + ahead[: len(ahead) - len(self._text)]
        if not (yield from self._object(markup, (opener,))):
            self._text = taken + self._text
            return False
        while True:
            yield from self._wait()
            if not (self._skip(",") or self._skip(";")):
                break
            yield from self._wait()
            if not (yield from self._object(markup, (opener,))):
                break
        self._skip("]")
        return True

    def _bare(self, markup: Markup) -> Steps:
        """A reply that is calls and nothing else; only the name of a tool tells a call from other JSON."""
        yield from self._wait()
        while self._text.lstrip().startswith("{"):
            if not (yield from self._object(markup, (), is_bare=True)):
                return
            yield from self._wait()
            if self._skip(";") or self._skip(","):
                yield from self._wait()

    def _object(self, markup: Markup, ends: Sequence[str], is_bare: bool = False) -> Tries:
        """A call as one JSON object, cut off at the first of `ends`."""
        scan, num_scanned = JsonScan(), 0
        while True:
            at, length = self._find(ends)
            block = self._text[:length]
            if block.strip() and not block.lstrip().startswith("{"):
                return False
            first = FIRST_KEY.match(block) if is_bare else None
            if first is not None and first["key"] not in CALL_KEYS:
                return False
            head = markup.object_head.match(block)
            name = _text_of(head["name"]) if head else None
            if head is not None and name is not None:
                if is_bare and name not in self._tools:
                    return False
                self._text = self._text[head.end() :]
                self._begin_call(name)
                yield from self._arguments(ends, "")
                yield from self._close_object(ends)
                return True
            end = scan.feed(block, num_scanned)
            num_scanned = len(block)
            if end is not None or at is not None or self._is_over:
                return self._whole_object(block[:end], end is not None, is_bare)
            yield

    def _whole_object(self, block: str, is_complete: bool, is_bare: bool) -> bool:
        """A call whose members stand in an unusual order; without arguments it takes none."""
        members, calls = members_of(block), self._markup.calls
        assert calls is not None, "calls are looked for where they have a syntax"
        name = _text_of(members.get(calls.name_key, ""))
        keys = (calls.arguments_key, "arguments", "parameters")
        arguments = next((members[key] for key in keys if key in members), None)
        if name is None or (is_bare and (name not in self._tools or arguments is None)):
            return False
        if arguments is None and not is_complete:
            return False
        self._text = self._text[len(block) :]
        self._begin_call(name)
        self._add_arguments("{}" if arguments is None else arguments)
        self._space = ""
        return True

    def _arguments(self, ends: Sequence[str], soft_end: str) -> Steps:
        """The arguments of the newest call: a JSON value, or whatever stands before its end."""
        scan = JsonScan(soft_end)
        while True:
            at, length = self._find(ends)
            if at is None and not self._is_over:
                length = min(length, len(self._text) - _overlap(self._text, soft_end))
            end = scan.feed(self._text, stop=length)
            used = length if end is None else end
            self._add_arguments(self._text[:used])
            self._text = self._text[used:]
            if end is not None or at is not None or self._is_over:
                self._space = ""
                return
            yield

    def _close_object(self, ends: Sequence[str]) -> Steps:
        """Go past the rest of a call's JSON object."""
        scan = JsonScan(depth=1)
        while True:
            at, length = self._find(ends)
            end = scan.feed(self._text[:length])
            self._text = self._text[length if end is None else end :]
            if end is not None or at is not None or self._is_over:
                return
            yield

    def _end_call(self, markup: Markup) -> Steps:
        """Go past the tag that ends a call; what stands before it is no text of the reply's."""
        if not markup.call_end:
            return
        while True:
            at, _ = self._find((markup.call_end, *markup.openers))
            if at is not None or self._is_over:
                break
            yield
        if at is not None and self._text.startswith(markup.call_end, at):
            self._text = self._text[at + len(markup.call_end) :]

    def _named(self, markup: Markup) -> Tries:
        while True:
            head = markup.named_head.match(self._text)
            if head is not None and (self._is_over or head.end() < len(self._text)):
                break
            opener = markup.openers[-1]
            again = self._text.find(opener, self._text.find(opener) + 1) >= 0
            if again or self._is_over or any(end and end in self._text for end in (markup.call_end, markup.end)):
                return False
            yield
        self._text = self._text[head.end() :]
        self._begin_call(head["name"])
        yield from self._arguments((markup.call_end, markup.end, *markup.openers), markup.soft_end)
        if markup.soft_end:
            yield from self._wait(markup.soft_end)
            self._skip(markup.soft_end)
        yield from self._end_call(markup)
        if markup.end:
            yield from self._wait(markup.end, *markup.openers)
            self._skip(markup.end)
        return True

    # Channels

    def _channels(self, markup: Markup) -> Steps:
        """Messages one after another, each a header with a channel and perhaps a recipient, then its body."""
        start, channel, message, *enders, _ = map(markup.mark, CHANNEL_TAGS)
        bounds = (*enders, start)
        is_started = False
        begin = 0
        while True:
            yield from self._wait("to=")
            ahead = self._text.lstrip()
            if not ahead:
                return
            header = ""
            if is_started or ahead.startswith((MARK, "to=")):
                parts: list[str] = []
                yield from self._pour(parts.append, (message, *enders))
                header = "".join(parts)
                if not self._skip(message):
                    if not is_started and MARK not in header and header.strip():
                        self._add_content(header)
                    header = ""
            to = re.search(rf"to=([^\s{MARK}]+)", header)
            which = re.search(rf"{re.escape(channel)}\s*(\w+)", header)
            is_analysis = False
            if to is not None and self._tools:
                self._begin_call(to[1].removeprefix("functions."))
                yield from self._pour(self._add_arguments, bounds)
                self._space = ""
            elif which is not None and which[1] == "analysis":
                is_analysis = True
                self._is_after_block = True
                self._space = "\n" if self._has_reasoning else ""
                yield from self._pour(self._add_reasoning, bounds)
                self._space = ""
            else:
                if header:
                    self._space = "\n" if self._has_content else ""
                yield from self._pour(self._add_content, bounds)
            for ender in enders:
                self._skip(ender)
            if is_analysis:
                self.reasoning.append((begin, self._place))
            begin = self._place
            yield from self._wait(start)
            is_started = self._skip(start)


class JsonScan:
    """Finds where a JSON value ends, piece by piece. It need not be valid: brackets are counted, strings are passed."""

    def __init__(self, soft_end: str = "", depth: int = 0) -> None:
        """Begin before a value, or `depth` objects inside one; `soft_end` ends it too where it stands in no string."""
        self._soft_end = soft_end
        self._depth = depth
        self._is_started = depth > 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int = 0, stop: int | None = None) -> int | None:
        """Read on from `start` to before `stop`; one past the end of the value, or None where it goes on."""
        for index in range(start, len(text) if stop is None else stop):
            char = text[index]
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_in_string = False
                    if self._depth == 0:
                        return index + 1
            elif self._soft_end and text.startswith(self._soft_end, index):
                return index
            elif char == '"':
                self._is_in_string = self._is_started = True
            elif char in "{[":
                self._depth += 1
                self._is_started = True
            elif char in "}]":
                if self._depth == 0:
                    return index
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
            elif self._depth == 0:
                if not char.isspace() and char != ",":
                    self._is_started = True
                elif self._is_started:
                    return index
        return None


def members_of(text: str) -> dict[str, str]:
    """The members of a JSON object as they are written; the last one may be cut short."""
    members: dict[str, str] = {}
    at = text.find("{") + 1
    while at and (member := MEMBER.match(text, at)):
        end = JsonScan().feed(text, member.end())
        members[member["key"]] = text[member.end() : end].rstrip()
        comma = COMMA.match(text, end) if end is not None else None
        at = comma.end() if comma else 0
    return members


def _text_of(raw: str) -> str | None:
    """The text that a JSON string spells; None where it is none, or empty."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) and value else None


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
