"""A chat template and a tokenizer as one thing: messages to ids, ids to text.

Control tokens come from the template alone. Text in a message that spells one (`<|im_end|>`, and markers that are added
tokens without being flagged special, like `<think>`) is broken with a noncharacter before the template runs, the result
is cut at the markers that are still whole, and what lies between them is encoded without any added token. So a user can
write about a control token, and can't forge a turn; neither can the description of a tool, a call's arguments or a
tool's result. In the content of an assistant's message markers that are not flagged special are left whole: templates
read them, for instance to drop earlier reasoning.

What a template takes and how it writes reasoning and tool calls is asked of the template itself; see `formats`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from swarm_engine.errors import (
    BadRequestError,
    ContextLengthError,
    TemplateBoundError,
    TokenizerError,
    UnsupportedError,
    shown,
)
from swarm_engine.tracker.answers import Answer
from swarm_engine.tracker.forcing import forced_call, formed_answer
from swarm_engine.tracker.formats import Reasoning, beyond, find_format, tag_pattern
from swarm_engine.tracker.marks import ANY, BREAKER, SENTINEL
from swarm_engine.tracker.markup import Markup
from swarm_engine.tracker.messages import Message, Tool
from swarm_engine.tracker.replies import ReplyReader
from swarm_engine.tracker.template import ChatTemplate, RawArguments, read_templates, simpler_message
from swarm_engine.tracker.token_bytes import byte_reader, fallback_bytes

if TYPE_CHECKING:
    from swarm_engine.tracker.tracker import Draft

PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "First question, 1 + 1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "  And  2 + 2?\n\nSay it.\n"},
)
"""A conversation that every template must render; used to prove the codec on a tokenizer."""

MAX_CACHED_PIECE = 2000
"""Characters; longer pieces of text rarely come twice."""

SHRINKING = (" " * 64, "\n\t " * 24, "e\u0301" * 24, "\u1112\u1161\u11ab" * 24)
"""Text that some tokenizers make shorter before they encode it."""

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The ids that some templates insist on."""


class ChatCodec:
    """Messages to ids and ids to text for one policy. Thread-safe."""

    def __init__(
        self,
        tokenizer_json: str,
        template: ChatTemplate,
        end_ids: Sequence[int],
        tool_template: ChatTemplate | None = None,
    ) -> None:
        """Read a tokenizer.

        Args:
            tool_template: of requests with tools; None where `template` is theirs too.

        Raises:
            TokenizerError: it is broken, or of a kind that can't be decoded token by token.
        """
        try:
            self._full = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # tokenizers has no narrower class
            raise TokenizerError(
                f"tokenizer.json describes no tokenizer ({error})", "copy it from the model's checkpoint again"
            ) from error
        parsed = {"added_tokens": []} | json.loads(tokenizer_json)
        self._full.no_padding()
        self._full.no_truncation()
        # Some vocabularies list runs of white space as added tokens; these are text, nobody forges a turn with them.
        blank = [token for token in parsed["added_tokens"] if not token["content"].replace("\u2581", " ").strip()]
        self._added = {token["content"]: token for token in parsed["added_tokens"] if token not in blank}
        plain = {**parsed, "added_tokens": blank, "post_processor": None, "padding": None, "truncation": None}
        self._plain = Tokenizer.from_str(json.dumps(plain))
        longest_first = sorted(self._added, key=len, reverse=True)
        special = [content for content in longest_first if self._added[content]["special"]]
        self._marker = _any_of(longest_first)
        self._special_marker = _any_of(special)
        self.end_ids = frozenset(end_ids)
        self._hidden = self.end_ids | {token["id"] for token in self._added.values() if token["special"]}
        self._added_text: dict[int, str] = {token["id"]: token["content"] for token in parsed["added_tokens"]}
        if short := [content for content in self._added if len(content) < 2]:
            raise TokenizerError(
                f"the control token {short[0]!r} is a single character, so text that holds it can't be told from it",
                "use another tokenizer",
            )
        self._to_bytes = byte_reader(parsed)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)
        self._encode_piece = lru_cache(maxsize=16384)(self.encode_text)
        self._max_token_bytes = self._longest_token()
        self._tag = tag_pattern(list(self._added))
        self._follow(template)
        self._with_tools = self
        if tool_template is not None:
            suited = copy.copy(self)
            suited._follow(tool_template)
            self._with_tools = suited._with_tools = suited

    def _follow(self, template: ChatTemplate) -> None:
        """Find out how a template writes what this tokenizer encodes."""
        self.template = template
        added = list(self._added)
        ends = [self._added_text[one] for one in self.end_ids if one in self._added_text]
        self.format, self._wants = find_format(
            lambda messages, tools, is_asked: template.render(messages, tools, add_generation_prompt=is_asked),
            added,
            ends,
        )
        """How the template writes reasoning and tool calls; None where it writes neither in a form that is read."""
        form, ids = self.format, {text: token["id"] for text, token in self._added.items()}
        self._markup = Markup(form, ids, self.is_hidden) if form is not None else None
        closing = form.calls.closing if form is not None and form.calls is not None else ""
        self._closing = re.compile(
            r"\s*".join(re.escape(part).replace(ANY, r'[^\s"<>\[\]]*') for part in ["", *closing.split()])
        )
        self._shows_reply_names = self._tells_names_of_replies()

    @staticmethod
    def load(folder: Path, end_ids: Sequence[int], now: datetime) -> ChatCodec:
        """The codec of a model folder, proved on a probe.

        Raises:
            TokenizerError: a file is missing or broken, or this tokenizer and template can't be followed faithfully.
        """
        try:
            tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
            config_file = folder / "tokenizer_config.json"
            config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
            if not isinstance(config, dict):
                raise ValueError(f"{config_file.name} is {shown(config)}, no JSON object")
            json.dumps(config, ensure_ascii=False).encode()  # raises where an escape is half of a surrogate pair
            source, tool_source = read_templates(folder, config)
        except (OSError, ValueError, RecursionError) as error:
            raise TokenizerError(
                f"the tokenizer in {folder} can't be read ({error})", "check the model folder"
            ) from error
        special_tokens = {}
        for name, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                special_tokens[name] = text
        template = ChatTemplate(source, special_tokens, now)
        tool_template = None if tool_source is None else ChatTemplate(tool_source, special_tokens, now)
        # The check drives a tracker, which is built on this module.
        from swarm_engine.tracker.conformance import check_conformance

        try:
            codec = ChatCodec(tokenizer_json, template, end_ids, tool_template)
            codec.prove()
            check_conformance(codec)
        except TokenizerError as error:
            raise TokenizerError(f"{folder}: {error.message}", error.hint) from error
        except TemplateBoundError as error:
            raise TokenizerError(f"{folder}: {error.message}", "check the model's chat template") from error
        return codec

    def prove(self) -> None:
        """Check on a probe that cutting at markers and joining bytes equals what the tokenizer itself does.

        Raises:
            TokenizerError: it doesn't.
        """
        for content, token in self._added.items():
            if token["id"] in self.encode_text(content):
                raise TokenizerError(
                    f"the tokenizer makes the control token {content!r} from plain text, so a user could forge a turn",
                    "use a tokenizer whose control tokens are added tokens only",
                )
        self.compare(self.render(PROBE))
        text = PROBE[0]["content"] + " ✓ é 😊"
        if self.decode(self.encode_text(text)).strip() != text:
            raise TokenizerError(
                "text does not survive encoding and decoding with this tokenizer", "use a byte-level tokenizer"
            )

    def compare(self, rendered: str) -> None:
        """Check that text without breaks is encoded here as the tokenizer itself encodes it.

        Raises:
            TokenizerError: it isn't.
        """
        ours = self.encode(rendered)
        theirs = tuple(self._full.encode(rendered, add_special_tokens=False).ids)
        if ours != theirs:
            raise TokenizerError(
                f"the tokenizer encodes a probe as {len(theirs)} ids, cut at its control tokens as {len(ours)} others; "
                f"the probe: {rendered!r}",
                "this kind of tokenizer joins text across control tokens; use a byte-level one",
            )

    # Messages to ids

    def suited(self, tools: Sequence[Tool]) -> ChatCodec:
        """The codec of requests with these tools: some models have a template of its own for tools."""
        return self._with_tools if tools else self

    @property
    def reasoning_tags(self) -> Reasoning | None:
        """The tags around reasoning, where there are any."""
        return self.format.reasoning if self.format is not None else None

    @property
    def has_reasoning(self) -> bool:
        """Whether replies may hold reasoning."""
        return self.format is not None and self.format.has_reasoning

    @property
    def takes_tools(self) -> bool:
        """Whether requests may name tools: the template shows them, and its way of writing calls is read."""
        return self._wants.has_tools and self.format is not None and self.format.calls is not None

    def check(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """See that the template has a place for everything in the messages, and that calls of the tools can be read.

        Raises:
            UnsupportedError: it would leave tools or tool calls out without a word.
        """
        if tools and not self._wants.has_tools:
            raise UnsupportedError(
                "the model's chat template has no place for tools",
                "describe them in a message and read the reply yourself",
                param="tools",
            )
        if tools and (self.format is None or self.format.calls is None):
            raise UnsupportedError(
                "the model's chat template writes tool calls in a form that this server can't read",
                "describe the tools in a message and read the reply yourself",
                param="tools",
            )
        if any(message.get("tool_calls") for message in messages) and not self._wants.has_calls:
            raise UnsupportedError(
                "the model's chat template has no place for tool calls", "write them into the content", param="messages"
            )

    def _tells_names_of_replies(self) -> bool:
        """Whether a prompt shows them anywhere: of one speaker or of several, in replies or in calls."""
        first, reply, last = PROBE
        earlier = [reply, last]
        if self._wants.has_calls:
            call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
            earlier = [self.protect(calling), self.protect(result)]
        for probe in ([first, reply, last], [first, *earlier, reply, last]):
            named = [
                {**message, "name": f"probe{place}"} if message["role"] == "assistant" else message
                for place, message in enumerate(probe)
            ]
            try:
                if self.render(named) != self.render(probe):
                    return True
            except BadRequestError:
                return True
        return False

    def without_labels(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Messages without the names of replies, where the template does not show them.

        Some frameworks label every reply that they send back with their agent's name; the model reads none of it.
        """
        if self._shows_reply_names:
            return tuple(messages)
        return tuple(
            {key: value for key, value in message.items() if key != "name"}
            if message["role"] == "assistant" and "name" in message
            else message
            for message in messages
        )

    def protect(self, message: Message) -> Message:
        """The message in the shape this template takes, with every text broken that spells a control token."""
        # The role is one of ours, and templates compare it; a field of that name inside a tool call is the caller's.
        shaped = {key: item if key == "role" else _map_strings(item, self._break) for key, item in message.items()}
        if "tool_call_id" in shaped:
            shaped["tool_call_id"] = self._call_id(shaped["tool_call_id"])
        if message["role"] != "assistant":
            return shaped
        wants = self._wants
        shaped["content"] = self._special_marker.sub(_break, message["content"])
        if calls := shaped.get("tool_calls"):
            shaped["tool_calls"] = [self._shape_call(call) for call in calls]
            if wants.is_empty_content_none:
                # Such a template writes the content or the calls, and the results that follow need the calls.
                shaped["content"] = None
        reasoning = shaped.get("reasoning_content")
        if reasoning is not None and wants.reasoning_field is not None:
            shaped[wants.reasoning_field] = shaped.pop("reasoning_content")
        elif reasoning is not None and wants.is_reasoning_in_content and shaped["content"] is not None:
            tags = self.reasoning_tags
            assert tags is not None, "where reasoning is read out of the content its tags are known"
            shaped["content"] = f"{tags.opens}\n{reasoning}\n{tags.closes}\n\n{shaped['content']}"
        return shaped

    def _break(self, text: str) -> str:
        return self._marker.sub(_break, text)

    def _call_id(self, given: str) -> str:
        if not self._wants.are_ids_short or SHORT_ID.fullmatch(given):
            return given
        return hashlib.blake2b(given.encode()).hexdigest()[:9]

    def _shape_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = RawArguments(arguments)
        elif self._wants.are_arguments_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "id": self._call_id(call["id"]), "function": {**function, "arguments": arguments}}

    def protect_tools(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools with every text broken that spells a control token."""
        return tuple(_map_strings(tool, self._break) for tool in tools)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """Protected messages as the model reads them, still holding the breaks.

        Raises:
            BadRequestError: the template refuses these messages.
        """
        try:
            return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except BadRequestError:
            simpler = [simpler_message(message) for message in messages]
            if simpler == list(messages):
                raise
            return self.template.render(simpler, tools, add_generation_prompt=add_generation_prompt)

    # Where a template puts an answer

    def beyond(self, prompt: str, whole: str) -> str:
        """The rest of a rendered text from where it parts from a prompt; a control token is never cut in two."""
        return beyond(prompt, whole, self._tag)

    def stand_in(self, answer: Answer) -> Message:
        """A protected message shaped like an answer, with a mark of its own in place of every part."""
        message = answer.message(has_written_ids=True)
        if answer.content.strip() or not answer.tool_calls:
            message["content"] = mark_of("content")
        if answer.reasoning is not None:
            message["reasoning_content"] = mark_of("reasoning")
        for index, call in enumerate(message.get("tool_calls", ())):
            call["function"]["arguments"] = {mark_of("key"): mark_of(index)}
        return self.protect(message)

    def after(self, marked: str, answer: Answer) -> str | None:
        """What follows the answer's last part in text that was rendered with its stand-in; None where it is left out.

        The markup that closes the last call is part of what follows.
        """
        calls = len(answer.tool_calls)
        _, found, tail = marked.partition(mark_of(calls - 1 if calls else "content"))
        if not found or SENTINEL in tail:
            return None
        return END_OF_ARGUMENTS.sub("", tail) if calls else tail

    def join(self, tail: str, answer: Answer, completion_ids: Sequence[int]) -> str:
        """Of what follows an answer (see `after`), that which the sampler did not return itself.

        It returned the end token, as a rule, and the markup that closes a call. A reply that was cut short before them
        gets the template's.
        """
        closing = ""
        if answer.tool_calls and (match := self._closing.match(tail)):
            closing, tail = match.group(), tail[match.end() :]
        if completion_ids and completion_ids[-1] in self.end_ids:
            end = self.show(completion_ids[-1:])
            following = tail.lstrip()
            if following.startswith(end):
                return following[len(end) :]
            if answer.tool_calls and not closing and end in tail:
                return tail.partition(end)[2]
            return tail
        return self._missing(closing, answer, completion_ids) + tail if closing else tail

    def _missing(self, closing: str, answer: Answer, completion_ids: Sequence[int]) -> str:
        """The rest of the markup that closes a call where a reply was cut inside it; white space does not count."""
        call, written = answer.tool_calls[-1], self.show(completion_ids)
        # A call may be cut before its arguments begin, and one that wrote none takes none.
        last = next((part for part in (call.arguments, call.name) if part and part in written), None)
        if last is not None:
            written = written.rpartition(last)[2]
        written, closed = "".join(written.split()), "".join(closing.split())
        if closed in written:
            return ""
        num_written = max(count for count in range(len(closed)) if written.endswith(closed[:count]))
        done = re.match(rf"(?:\s*\S){{{num_written}}}", closing)
        assert done is not None, "it has that many characters"
        return closing[done.end() :]

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Token ids of rendered text: whole markers are control tokens, all else is text."""
        ids: list[int] = []
        position = 0
        strip_next = False
        for match in self._marker.finditer(rendered):
            token = self._added[match.group()]
            self._extend(ids, rendered[position : match.start()], strip_next, token["lstrip"])
            ids.append(token["id"])
            position = match.end()
            strip_next = token["rstrip"]
        self._extend(ids, rendered[position:], strip_next, False)
        return tuple(ids)

    def _extend(self, ids: list[int], piece: str, strip_left: bool, strip_right: bool) -> None:
        if strip_left:
            piece = piece.lstrip()
        if strip_right:
            piece = piece.rstrip()
        if piece:
            piece = piece.replace(BREAKER, "")
            ids.extend(self._encode_piece(piece) if len(piece) <= MAX_CACHED_PIECE else self.encode_text(piece))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of text in which nothing is a control token."""
        if len(text) <= MAX_CACHED_PIECE:
            return tuple(self._plain.encode(text, add_special_tokens=False).ids)
        # Of the tokenizer's methods only those for batches let other threads run meanwhile.
        (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        return tuple(encoded.ids)

    def check_length(self, text: str, max_tokens: int, param: str = "messages") -> None:
        """See that a prompt may fit as far as its bytes tell, for a megabyte takes a second to encode.

        Raises:
            ContextLengthError: however it is encoded, it has as many tokens as there may be, or more.
        """
        if 4 * len(text) < max_tokens * self._max_token_bytes:
            return
        # White space beside a control token may be left out.
        pieces = self._marker.split(text.replace(BREAKER, ""))
        fewest = int(sum(len(piece.strip().encode()) for piece in pieces) / self._max_token_bytes)
        if fewest >= max_tokens:
            raise ContextLengthError(f"at least {fewest}", max_tokens, param)

    def _longest_token(self) -> float:
        """The most bytes of text that become one token."""
        is_byte_level = self._to_bytes is not fallback_bytes
        longest = max(len(token) if is_byte_level else len(token.encode()) for token in self._plain.get_vocab())
        shrinks = 1.0
        for text in SHRINKING:
            kept = sum(len(self._token_bytes(one)) for one in self.encode_text(text))
            shrinks = max(shrinks, len(text.encode()) / kept if kept else math.inf)
        return longest * shrinks

    # Ids to text

    def is_hidden(self, token_id: int) -> bool:
        """Whether a token is left out of the reply's text: special tokens, and those that end it."""
        return token_id in self._hidden

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, part of a character or whole ones; an added token's are its name's.

        Ids past the vocabulary (a head padded for speed has some) stand for nothing.
        """
        added = self._added_text.get(token_id)
        if added is not None:
            return str(added).encode()
        token = self._full.id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out; bytes that form no character become U+FFFD."""
        return b"".join(self.token_bytes(one) for one in ids if one not in self._hidden).decode("utf-8", "replace")

    def show(self, ids: Sequence[int]) -> str:
        """The text of ids with special tokens written out, for people."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def reader(self, draft: Draft, stop: Sequence[str] = (), *, reads_tools: bool = True) -> ReplyReader:
        """Reads the reply to a draft; calls are looked for where the draft has tools and `reads_tools`.

        The reply to a raw prompt is content from end to end, for no template has said how to read it.
        """
        suited = self.suited(draft.tools)
        markup = None if draft.is_raw else suited._markup
        is_open = suited._opens_reasoning(draft)
        names: Collection[str] = [tool["function"]["name"] for tool in draft.tools] if reads_tools else ()
        return ReplyReader(self, draft.call_id, stop=stop, markup=markup, is_reasoning_open=is_open, tool_names=names)

    def _opens_reasoning(self, draft: Draft) -> bool:
        """Whether the prompt has opened the reasoning; user text can't, for its tags are broken."""
        tags = self.reasoning_tags
        return tags is not None and draft.rendered.rstrip().endswith(tags.opens)

    def forced_call_grammar(self, tools: Sequence[Tool], names: Collection[str], draft: Draft | None = None) -> str:
        """A grammar (llguidance's Lark) of replies that call one of the named tools, reasoning before it allowed.

        Whether the prompt has opened the reasoning is read off the draft, or taken to be as in a first question.

        Raises:
            UnsupportedError: this template's calls have no form that is known.
        """
        if self.format is None or self.format.calls is None:
            raise UnsupportedError(
                "the model's chat template has no form of tool calls that can be forced",
                'send tool_choice "auto" or "none"',
                param="tool_choice",
            )
        chosen = [tool["function"] for tool in tools if tool["function"]["name"] in names]
        form = self.format
        if draft is not None:
            form = replace(form, is_reasoning_opened_by_prompt=self._opens_reasoning(draft))
        return forced_call(form, chosen, self._lark_literals)

    def formed_answer_grammar(self, answer: str, tools: Sequence[Tool], draft: Draft) -> str:
        """A grammar of replies whose answer fits another one; reasoning, and calls of the tools, stay possible."""
        if self.format is None:
            return answer
        form = replace(self.format, is_reasoning_opened_by_prompt=self._opens_reasoning(draft))
        return formed_answer(form, answer, [tool["function"] for tool in tools], self._lark_literals)

    def _lark_literals(self, text: str) -> str:
        return _lark_literals(text, self._marker, {text: token["id"] for text, token in self._added.items()})


def _lark_literals(text: str, marker: re.Pattern[str], ids: Mapping[str, int]) -> str:
    """Text as Lark's literals, control tokens by their ids."""
    parts = []
    position = 0
    for match in [*marker.finditer(text), None]:
        piece = text[position : match.start() if match else None]
        parts += [json.dumps(piece)] if piece else []
        parts += [f"<[{ids[match.group()]}]>"] if match else []
        position = match.end() if match else position
    return " ".join(parts)


def mark_of(part: str | int) -> str:
    """Stands for a part of an answer while the tracker asks a template where it puts it."""
    return f"{SENTINEL}{part}{SENTINEL}"


END_OF_ARGUMENTS = re.compile(r'\A"\s*\}')
"""What JSON writes after the last value of a stand-in's arguments."""


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _break(match: re.Match[str]) -> str:
    text = match.group()
    return text[0] + BREAKER + text[1:]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value
