"""Numbers as people write them: `15 stones`, `twenty-one coins`, `4x4`, `one to three`, `three in a row`.

Pure: text in, values with their places out. What a number counts is decided by whoever knows the game. What is written
otherwise (`8/2`, `20½`, `10⁻³`, `20k`) is no number here, not in part either: `not_read` lists it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
UNITS, TENS = _UNITS.split(), _TENS.split()
WORDS = {word: value for value, word in enumerate(UNITS)} | {word: 10 * value for value, word in enumerate(TENS, 2)}
MULTIPLES = {"dozen": 12, "hundred": 100, "thousand": 1000}

_WORD = "|".join(sorted([*WORDS, "dozen"], key=len, reverse=True))
WORDED = (
    rf"(?:(?:{'|'.join(TENS)})[- ](?:{'|'.join(UNITS[1:10])})"
    rf"|(?:a|{_WORD})[ -](?:dozen|hundred|thousand)|(?:{_WORD}))(?![a-z])"
)
_DIGITS = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:\.\d+)?"
_ONE = rf"(?:{_DIGITS}|(?<![a-z]){WORDED})"
_BY = r"(?:\s*[x×*]\s*|[\s-]by[\s-])"
_MINUS = r"(?<!\w)[-−]|(?<![a-z])(?:minus|negative)\s+"
_NUMBER = re.compile(rf"(?<![\w.])(?P<minus>{_MINUS})?{_ONE}(?P<by>(?:{_BY}{_ONE})+)?", re.IGNORECASE)
_EACH = re.compile(_ONE, re.IGNORECASE)
_TO = re.compile(r"\s*(?:to|-|–|or|through|,|, or|, and|and)\s*", re.IGNORECASE)
_GOES_ON = re.compile(r"_\d|\.\d|e[+-]?\d|[km](?![^\W\d_])| ?[/⁄÷] ?\d|[:^+]\d|[⁺⁻]", re.IGNORECASE)
"""Behind digits that are only the beginning of what is written."""
_WENT_BEFORE = re.compile(r"\d(?: ?[/⁄÷] ?|[:^+])$")
"""Before digits that are only the end of it."""
_WRITTEN = re.compile(r"(?:[\w.:^+⁺⁻]|(?<=\d) ?[/⁄÷] ?(?=\d))+")
_AFTER = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


@dataclass(frozen=True, slots=True)
class Number:
    """A stated number, a size (`4x4`) or an enumeration (`one to three`, `1, 2 or 3`)."""

    text: str
    """As written."""
    start: int
    """Index of its first character."""
    end: int
    """One past its last."""
    values: tuple[float, ...]
    """One, or every member of a size or an enumeration, in order of mention."""
    is_size: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every value is an integer."""
        return all(value.is_integer() for value in self.values)


def value_of(text: str) -> float:
    """The value of one number in digits or English words.

    Raises:
        ValueError: the text is no number that `find` would have matched.
    """
    plain = text.lower().replace(",", "")
    try:
        return float(plain)
    except ValueError:
        total = 0
        for word in re.split(r"[- ]", plain):
            if word == "a":
                total = 1
            elif word in MULTIPLES:
                total = max(total, 1) * MULTIPLES[word]
            elif word in WORDS:
                total += WORDS[word]
            else:
                raise ValueError(f"{text!r} is not a number in digits or English words") from None
        return float(total)


def find(text: str) -> list[Number]:
    """Every number of a text, in order; sizes and enumerations are one number each."""
    found: list[Number] = []
    for match in _NUMBER.finditer(text):
        if not stands_alone(text, match.start(), match.end()):
            continue
        values = tuple(value_of(each[0]) for each in _EACH.finditer(match[0]))
        if match["minus"]:
            values = (-values[0], *values[1:])
        number = Number(match[0], match.start(), match.end(), values, is_size=match["by"] is not None)
        joined = _join(text, found[-1], number) if found else None
        if joined:
            found[-1] = joined
        else:
            found.append(number)
    return found


def stands_alone(text: str, start: int, end: int) -> bool:
    """Whether digits between these places are all of a number, and not the 8 of `8/2` or the 20 of `20½`."""
    return not (text[end : end + 1].isnumeric() or _GOES_ON.match(text, end) or _WENT_BEFORE.search(text[:start]))


def not_read(text: str, read: Iterable[tuple[int, int]]) -> list[str]:
    """What is written in digits or other signs for numbers and is not read; a name such as `player2` is none.

    Args:
        read: start and end of the numbers that are.
    """
    places = {place for start, end in read for place in range(start, end)}
    return [
        match[0].rstrip(".:")
        for match in _WRITTEN.finditer(text)
        if not match[0][0].isalpha()
        and any(char.isnumeric() and place not in places for place, char in enumerate(match[0], match.start()))
    ]


def _join(text: str, left: Number, right: Number) -> Number | None:
    """The two as one enumeration where only a joining word stands between them, else None."""
    if left.is_size or right.is_size or not _TO.fullmatch(text[left.end : right.start]):
        return None
    return Number(text[left.start : right.end], left.start, right.end, (*left.values, *right.values))


def words_after(text: str, end: int, count: int = 3) -> list[str]:
    """The next words after a place, lower case, up to the end of its clause."""
    clause = re.split(r"[.,;:!?()]", text[end:], maxsplit=1)[0]
    return [match[0].lower() for match in _AFTER.finditer(clause)][:count]


def words_before(text: str, start: int, count: int = 4) -> list[str]:
    """The words before a place, nearest last, lower case, from the start of its clause."""
    clause = re.split(r"[.,;:!?()]", text[:start])[-1]
    return [match[0].lower() for match in _AFTER.finditer(clause)][-count:]
