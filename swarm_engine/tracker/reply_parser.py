"""Reading marked text as a reply: a grammar of coroutines, one for each way in which templates write calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

from swarm_engine.tracker.answers import Delta, ReasoningDelta, TextDelta, ToolCallDelta, tool_call_id
from swarm_engine.tracker.formats import CallSyntax, Family, Reasoning
from swarm_engine.tracker.json_scan import JsonScan, members_of, text_of
from swarm_engine.tracker.marks import MARK
from swarm_engine.tracker.markup import CHANNEL_TAGS, Markup

FIRST_KEY = re.compile(r'\s*\{\s*(?:"(?P<key>(?:[^"\\]|\\.)*)"\s*:|[^"\s])')
CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
WRITTEN_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)

Steps = Generator[None, None, None]
"""Reads on and yields where it needs more text. Once the text is over it yields no more."""
Tries = Generator[None, None, bool]
"""Steps that say whether a call was read; where none was, nothing is used up."""


class ReplyParser:
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
        self.written_ids: dict[int, str] = {}
        """By number of the call, ids that the model gave calls itself."""
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

    def _note_id(self, raw: str | None) -> None:
        """What stands where a call's id may stand, of the newest call."""
        if raw and WRITTEN_ID.fullmatch(raw):
            self.written_ids[self._num_calls - 1] = raw

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
            name = text_of(head["name"]) if head else None
            if head is not None and name is not None:
                if is_bare and name not in self._tools:
                    return False
                self._text = self._text[head.end() :]
                self._begin_call(name)
                self._note_id(text_of(members_of(head.group()).get("id", "")))
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
        name = text_of(members.get(calls.name_key, ""))
        keys = (calls.arguments_key, "arguments", "parameters")
        arguments = next((members[key] for key in keys if key in members), None)
        if name is None or (is_bare and (name not in self._tools or arguments is None)):
            return False
        if arguments is None and not is_complete:
            return False
        self._text = self._text[len(block) :]
        self._begin_call(name)
        self._note_id(text_of(members.get("id", "")))
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
        """Go past the rest of a call's JSON object, which may hold its id."""
        scan, rest = JsonScan(depth=1), '{"arguments": 0'
        while True:
            at, length = self._find(ends)
            end = scan.feed(self._text[:length])
            used = length if end is None else end
            rest += self._text[:used]
            self._text = self._text[used:]
            if end is not None or at is not None or self._is_over:
                self._note_id(text_of(members_of(rest).get("id", "")))
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
        self._note_id(head.groupdict().get("id"))
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


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
