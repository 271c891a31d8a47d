"""The markup of reasoning and tool calls as it shows in sampled tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from swarm_engine.tracker.formats import LOOKS_LIKE_A_TAG, CallSyntax, Family, Reasoning, ReplyFormat
from swarm_engine.tracker.marks import ANY, MARK

CHANNEL_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
START, CHANNEL, MESSAGE, END = CHANNEL_TAGS[:4]

TAG = re.compile(LOOKS_LIKE_A_TAG)


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
        middle = _relaxed(calls.middle, "id") or r"(?=\{)"
        self.named_head = re.compile(rf"{opens}\s*{_relaxed(calls.call_opens)}\s*(?P<name>[\w.:/-]+)\s*{middle}\s*")
        """A named call up to its arguments; `id` is the model's own, where the markup has a place for one."""

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


def _relaxed(markup: str, name: str | None = None) -> str:
    """A pattern for markup in which white space counts for nothing and an id is any id; `name` is the first one's."""
    parts = re.findall(rf"{MARK}?[^\s{MARK}]+", markup)
    pattern = r"\s*".join(map(re.escape, parts))
    if name is not None:
        pattern = pattern.replace(ANY, rf"(?P<{name}>{ANY})", 1)
    return pattern.replace(ANY, r"[^\s<>\[\]]*")
