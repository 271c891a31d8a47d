"""A model's chat template: Jinja in a sandbox, with the settings of transformers' `apply_chat_template`.

The source of transformers, version 5.24, is the only specification there is. Beyond it, what a template makes of a
conversation is bounded in size and time (see `bounds`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta

from swarm_engine.errors import BadRequestError, TemplateBoundError, TokenizerError
from swarm_engine.protocol import ADDITIONAL_TEMPLATES, CHAT_TEMPLATE
from swarm_engine.tracker.bounds import MAX_SOURCE_CHARS, BoundedEnvironment, TooMuchError
from swarm_engine.tracker.marks import BREAKER, SENTINEL
from swarm_engine.tracker.messages import Message, Tool
from swarm_engine.waiting import TakesLongError, is_event_loop

MAX_TOLD_CHARS = 500

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the templates that transformers takes by itself, the second for requests with tools."""
EFFORT = "reasoning_effort"
"""The variable by which templates are told how much the model is to reason."""


class RawArguments(str):
    """Arguments that are no JSON object, as the model wrote them; a template's `tojson` leaves them as they are."""


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
    if isinstance(value, RawArguments):
        return str(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Escaped, our own characters would become text that the model reads.
    return text.replace("\\ufdd0", BREAKER).replace("\\ufdd1", SENTINEL) if ensure_ascii else text


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
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = now.strftime
        if len(source) > MAX_SOURCE_CHARS:
            raise TokenizerError(
                f"the chat template has {len(source)} characters, {MAX_SOURCE_CHARS} are taken",
                "check the model's folder",
            )
        self._environment = environment
        try:
            self._template = environment.from_string(source)
            self.reads_effort = EFFORT in jinja2.meta.find_undeclared_variables(environment.parse(source))
            """Whether it tells the model how much to reason, where its caller says so."""
        except Exception as error:  # of Jinja, and of Python, which compiles what Jinja writes
            raise TokenizerError(
                f"the chat template is not valid Jinja ({_told(error)})", "check the model's folder"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, add_generation_prompt: bool) -> str:
        """The conversation as the model reads it.

        Raises:
            BadRequestError: the template refuses these messages.
            TemplateBoundError: it makes more of them than it may.
            TakesLongError: it may be too long for the event loop, which this is.
        """
        try:
            rendered = self._environment.render(
                self._template,
                is_waited_for=is_event_loop(),
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            rendered.encode()  # a template may write half of a surrogate pair, which no tokenizer takes
        except TakesLongError:
            raise
        except (TooMuchError, MemoryError) as error:
            raise TemplateBoundError(
                f"the model's chat template makes too much of these messages ({error or 'out of memory'})",
                "shorten them; if it does so of short ones too, check the model's chat template",
                param="messages",
            ) from error
        except Exception as error:  # a template can raise whatever Python has
            raise BadRequestError(
                f"the model's chat template refuses these messages ({_told(error)})",
                "check the order of the roles and which roles this model knows",
                code="template_refused",
                param="messages",
            ) from error
        return rendered


def _told(error: Exception) -> str:
    """What an error says; a template can make it as long as a conversation."""
    said = str(error) or type(error).__name__
    return said if len(said) <= MAX_TOLD_CHARS else said[:MAX_TOLD_CHARS] + " …"


def simpler_message(message: Message) -> Message:
    """A message without what some templates refuse: reasoning beside calls, arguments that are no object."""
    simpler = {key: item for key, item in message.items() if key not in ("reasoning_content", "reasoning", "thinking")}
    if calls := message.get("tool_calls"):
        simpler["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"arguments": str(call["function"]["arguments"])}}}
            if isinstance(call["function"]["arguments"], RawArguments)
            else call
            for call in calls
        ]
    return simpler


def read_templates(folder: Path, config: Mapping[str, Any]) -> tuple[str, str | None]:
    """The templates of requests without tools and with them; None where the first is for both.

    Files go before tokenizer_config.json, where the template is a text, or several with a name each.

    Raises:
        TokenizerError: there is none for requests without tools.
        OSError, ValueError: a file can't be read.
    """
    named: dict[str, str] = {}
    if files := _template_files(folder):
        named = {name: path.read_text(encoding="utf-8") for name, path in files.items() if name in (DEFAULT, TOOL_USE)}
        names = sorted(files)
    else:
        given = config.get("chat_template")
        if isinstance(given, list):
            pairs = [(one.get("name"), one.get("template")) for one in given if isinstance(one, dict)]
        else:
            pairs = list(given.items()) if isinstance(given, dict) else [(DEFAULT, given)]
        named = {name: one for name, one in pairs if isinstance(name, str) and isinstance(one, str)}
        names = sorted(named)
    if DEFAULT not in named:
        raise TokenizerError(
            f"{folder} holds no chat template" + (f" named {DEFAULT!r}, only {', '.join(names)}" if names else ""),
            "add chat_template.jinja, or use an instruct version of the model",
        )
    return named[DEFAULT], named.get(TOOL_USE)


def _template_files(folder: Path) -> dict[str, Path]:
    files = {path.stem: path for path in sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))}
    default = folder / CHAT_TEMPLATE
    return {DEFAULT: default} | files if default.exists() else files
