"""Which fields an object of a request may have, and what says nothing, at every level of a request alike.

A field is read, or it is a label, or it is taken at the values that change nothing. Whatever is empty says nothing:
null, an empty text, list or object, an object of such values; so does a flag that is off, where nothing here reads it.
All else is refused with its place, for none of it may be passed over in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm_engine.errors import UnsupportedError, shortened, shown


def is_empty(value: Any) -> bool:
    """Whether a value says nothing; a zero and a false say something."""
    if value and not isinstance(value, dict):
        return False  # most values, and at once
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += one.values()
        elif one is not None and one != "" and one != []:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one kind of object."""

    read: frozenset[str]
    labels: frozenset[str] = frozenset()
    """They say nothing about the reply."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that are taken only at values that change nothing."""
    kept: frozenset[str] = frozenset()
    """Of those that are read, where an empty text, list or object is a value of its own."""
    presence: frozenset[str] = frozenset()
    """Fields that ask for something by an empty object too."""
    why: Mapping[str, str] = field(default_factory=dict)
    """The way out, for fields whose refusal needs one."""

    def said(
        self, raw: Mapping[str, Any], where: str = "", *, outer: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What an object says in the fields that are read.

        Args:
            where: its place in the request; empty where it is the request itself.
            outer: the object that it is a part of, whose fields it may repeat.
        Raises:
            UnsupportedError: a field is neither read nor a label, and says something.
        """
        said = {}
        for name, value in raw.items():
            if name in self.read:
                if not (value is None if name in self.kept else is_empty(value)):
                    said[name] = value
            elif not self._says_nothing(name, value) and (outer is None or name not in outer or outer[name] != value):
                raise self._refusal(name, value, where)
        return said

    def _says_nothing(self, name: str, value: Any) -> bool:
        if name in self.labels or value is None:
            return True
        neutral = self.neutral.get(name)
        if neutral is None:
            return value is False or (is_empty(value) and name not in self.presence)
        # True is 1 to Python, and no number to a caller.
        same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
        return is_empty(value) or any(same)

    def _refusal(self, name: str, value: Any, where: str) -> UnsupportedError:
        is_known = name in self.neutral
        way_out = self.why.get(name, "leave it out")
        name = shortened(name)
        place = f"{where}.{name}" if where else name
        what = f"{place}={shown(value)}" if is_known else place
        if where and not is_known:
            way_out += f"; known: {', '.join(sorted(self.read | self.labels))}"
        return UnsupportedError(f"{what} is not taken by this server", way_out, param=place)
