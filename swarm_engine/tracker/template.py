"""A model's chat template: Jinja in a sandbox, with the settings of transformers' `apply_chat_template`.

The source of transformers, version 5.24, is the only specification there is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarm_engine.errors import BadRequestError, TokenizerError
from swarm_engine.tracker.marks import BREAKER, SENTINEL
from swarm_engine.tracker.messages import Message, Tool


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

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, add_generation_prompt: bool) -> str:
        """The conversation as the model reads it.

        Raises:
            BadRequestError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
            raise BadRequestError(
                f"the model's chat template refuses these messages ({error})",
                "check the order of the roles and which roles this model knows",
                code="template_refused",
                param="messages",
            ) from error


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


def template_of(config: Mapping[str, Any], folder: Path) -> str:
    """The chat template inside tokenizer_config.json: a text, or a list of named ones."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if not isinstance(template, str):
        raise TokenizerError(
            f"{folder} holds no chat template", "add chat_template.jinja, or use an instruct version of the model"
        )
    return template
