"""Reading JSON that is not there yet, or not quite JSON: where a value ends, what an object's members are."""

from __future__ import annotations

import json
import re

from swarm_engine.tracker.marks import clean
from swarm_engine.types import well_formed

COMMA = re.compile(r"\s*,")
MEMBER = re.compile(r'\s*"(?P<key>(?:[^"\\]|\\.)*)"\s*:\s*')


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


def text_of(raw: str) -> str | None:
    """The text that a JSON string spells; None where it is none, or empty.

    What its escapes spell that no text may hold is U+FFFD, for this goes out as the model's words and has to come back.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return clean(well_formed(value)) if isinstance(value, str) and value else None
