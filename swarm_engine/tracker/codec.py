"""A chat template and a tokenizer as one thing: messages to ids, ids to text.

Control tokens come from the template alone. Text in a message that spells one (`<|im_end|>`, and markers that are added
tokens without being flagged special, like `<think>`) is broken with a noncharacter before the template runs, the result
is cut at the markers that are still whole, and what lies between them is encoded without any added token. So a user can
write about a control token, and can't forge a turn. An assistant's own markers that are not flagged special are left
whole: templates read them, for instance to drop earlier reasoning.

Templates run sandboxed with the settings of transformers' `apply_chat_template` (its source, version 5.24, is the only
specification there is).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from swarm_engine.errors import BadRequestError, TokenizerError, UnsupportedError
from swarm_engine.tracker.messages import BREAKER, Message

PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "First question, 1 + 1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "  And  2 + 2?\n\nSay it.\n"},
)
"""A conversation that every template must render; used to prove the codec on a tokenizer."""

TOOL_PROBE_NAME = "probe_the_template"
TOOL_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "Look it up."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": TOOL_PROBE_NAME, "arguments": {}}}],
    },
    {"role": "tool", "content": "17", "tool_call_id": "c1"},
)
"""A conversation that shows whether a template has a place for tool calls."""

MAX_CACHED_PIECE = 2000
"""Characters; longer pieces of text rarely come twice."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for other tools; here it is just its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A model's chat template, rendered in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime) -> None:
        """Compile a template.

        Args:
            source: Jinja source.
            special_tokens: `bos_token` and the like, by name.
            now: what `strftime_now` shows; fixed, so that a run that goes on tomorrow renders the same.

        Raises:
            TokenizerError: the source is no valid template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = now.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(
                f"the chat template is not valid Jinja ({error})", "check the model's folder"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as the model reads it.

        Raises:
            BadRequestError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
            raise BadRequestError(
                f"the model's chat template refuses these messages ({error})",
                "check the order of the roles and which roles this model knows",
                code="template_refused",
                param="messages",
            ) from error


class ChatCodec:
    """Messages to ids and ids to text for one policy. Thread-safe."""

    def __init__(self, tokenizer_json: str, template: ChatTemplate, end_ids: Sequence[int]) -> None:
        """Read a tokenizer.

        Raises:
            TokenizerError: its kind can't be decoded token by token.
        """
        self.template = template
        parsed = json.loads(tokenizer_json)
        self._full = Tokenizer.from_str(tokenizer_json)
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
        self._renders_tool_calls = False
        self.end_ids = frozenset(end_ids)
        self._hidden = self.end_ids | {token["id"] for token in self._added.values() if token["special"]}
        self._added_text: dict[int, str] = {token["id"]: token["content"] for token in parsed["added_tokens"]}
        if short := [content for content in self._added if len(content) < 2]:
            raise TokenizerError(
                f"the control token {short[0]!r} is a single character, so text that holds it can't be told from it",
                "use another tokenizer",
            )
        self._to_bytes = _byte_reader(parsed)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)
        self._encode_piece = lru_cache(maxsize=16384)(self._encode_plain)

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
            template_file = folder / "chat_template.jinja"
            source = (
                template_file.read_text(encoding="utf-8") if template_file.exists() else _template_of(config, folder)
            )
        except (OSError, ValueError) as error:
            raise TokenizerError(
                f"the tokenizer in {folder} can't be read ({error})", "check the model folder"
            ) from error
        special_tokens = {}
        for name, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                special_tokens[name] = text
        codec = ChatCodec(tokenizer_json, ChatTemplate(source, special_tokens, now), end_ids)
        codec.prove()
        return codec

    def prove(self) -> None:
        """Check on a probe that cutting at markers and joining bytes equals what the tokenizer itself does.

        Raises:
            TokenizerError: it doesn't.
        """
        for content, token in self._added.items():
            if token["id"] in self._encode_plain(content):
                raise TokenizerError(
                    f"the tokenizer makes the control token {content!r} from plain text, so a user could forge a turn",
                    "use a tokenizer whose control tokens are added tokens only",
                )
        try:
            self._renders_tool_calls = TOOL_PROBE_NAME in self.render(TOOL_PROBE)
        except BadRequestError:
            self._renders_tool_calls = False
        rendered = self.render(PROBE)
        ours = self.encode(rendered)
        theirs = tuple(self._full.encode(rendered, add_special_tokens=False).ids)
        if ours != theirs:
            raise TokenizerError(
                f"the tokenizer encodes a probe as {len(theirs)} ids, cut at its control tokens as {len(ours)} others",
                "this kind of tokenizer joins text across control tokens; use a byte-level one",
            )
        text = PROBE[0]["content"] + " ✓ é 😊"
        if self.decode(self._encode_plain(text)).strip() != text:
            raise TokenizerError(
                "text does not survive encoding and decoding with this tokenizer", "use a byte-level tokenizer"
            )

    # Messages to ids

    def check(self, messages: Sequence[Message]) -> None:
        """See that the template has a place for everything in the messages.

        Raises:
            UnsupportedError: it would leave tool calls out without a word.
        """
        if any(message.get("tool_calls") for message in messages) and not self._renders_tool_calls:
            raise UnsupportedError(
                "the model's chat template has no place for tool calls", "write them into the content", param="messages"
            )

    def protect(self, message: Message) -> Message:
        """The message with every text broken that spells a control token."""
        marker = self._special_marker if message["role"] == "assistant" else self._marker

        def change(text: str) -> str:
            return marker.sub(_break, text)

        # The role is one of ours, and templates compare it; a field of that name inside a tool call is the caller's.
        return {key: item if key == "role" else _map_strings(item, change) for key, item in message.items()}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Protected messages as the model reads them, still holding the breaks.

        Raises:
            BadRequestError: the template refuses these messages.
        """
        return self.template.render(messages, add_generation_prompt=add_generation_prompt)

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
            ids.extend(self._encode_piece(piece) if len(piece) <= MAX_CACHED_PIECE else self._encode_plain(piece))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of text in which nothing is a control token."""
        return self._encode_plain(text)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

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


class ReplyText:
    """The text of a reply while its tokens come in: whole characters only, cut before a stop string."""

    def __init__(self, codec: ChatCodec, stop: Sequence[str] = ()) -> None:
        self.codec = codec
        self._stop = stop
        self._held_back = max(map(len, stop), default=1) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._sent = 0
        self.text = ""
        """Everything so far that belongs to the content."""
        self.num_tokens = 0
        """Tokens read so far."""
        self.is_stopped = False
        """Whether a stop string came; the token that completed it is the last one read."""

    def push(self, token_ids: Sequence[int]) -> None:
        """Read tokens, up to the one that completes a stop string."""
        if self.is_stopped:
            return
        if not self._stop:
            shown = b"".join(self.codec.token_bytes(one) for one in token_ids if not self.codec.is_hidden(one))
            self.text += self._decoder.decode(shown)
            self.num_tokens += len(token_ids)
            return
        for token_id in token_ids:
            self.num_tokens += 1
            if self.codec.is_hidden(token_id):
                continue
            start = max(0, len(self.text) - self._held_back)
            self.text += self._decoder.decode(self.codec.token_bytes(token_id))
            found = [at for at in (self.text.find(stop, start) for stop in self._stop) if at >= 0]
            if found:
                self.text = self.text[: min(found)]
                self.is_stopped = True
                return

    def finish(self) -> None:
        """No token follows: a character that was cut short becomes U+FFFD."""
        if not self.is_stopped:
            self.text += self._decoder.decode(b"", final=True)
            self._held_back = 0

    def take(self) -> str:
        """Text that was not taken yet and that no stop string can still reach back into."""
        end = len(self.text) if self.is_stopped else max(self._sent, len(self.text) - self._held_back)
        piece = self.text[self._sent : end]
        self._sent = end
        return piece


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


def _template_of(config: Mapping[str, Any], folder: Path) -> str:
    """The chat template inside tokenizer_config.json: a text, or a list of named ones."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one["name"]: one["template"] for one in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise TokenizerError(
            f"{folder} holds no chat template", "add chat_template.jinja, or use an instruct version of the model"
        )
    return template


def _byte_reader(parsed: Mapping[str, Any]) -> Callable[[str], bytes]:
    """How this tokenizer's vocabulary spells bytes.

    Raises:
        TokenizerError: neither byte-level nor with a byte for every fallback.
    """
    decoder = parsed.get("decoder") or {}
    kinds = {decoder.get("type")} | {one.get("type") for one in decoder.get("decoders", ())}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        return lambda token: bytes(alphabet[char] for char in token)
    if "ByteFallback" in kinds:
        return _fallback_bytes
    raise TokenizerError(
        f"the tokenizer's decoder is {decoder.get('type')!r}, which can't be read token by token",
        "use a byte-level tokenizer, or one with byte fallback",
    )


def _fallback_bytes(token: str) -> bytes:
    match = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes([int(match.group(1), 16)]) if match else token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte by the printable character that byte-level tokenizers write for it (the GPT-2 table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table
