"""Ids that sort by the time they were made: 48 bits of milliseconds and 80 random bits, as 26 letters.

Within one process they rise strictly, also within one millisecond and when the clock is set back.
Source: the ULID specification, github.com/ulid/spec.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32: no I, L, O or U."""
LENGTH = 26
RANDOM_BITS = 80
MAX_MILLISECONDS = (1 << 48) - 1


def encode(number: int) -> str:
    """A number of 128 bits as 26 letters; the order of the letters is the order of the numbers."""
    return "".join(ALPHABET[number >> shift & 31] for shift in range(5 * (LENGTH - 1), -1, -5))


def decode(text: str) -> int:
    """The number behind an id; small letters are read as large ones.

    Raises:
        ValueError: it is not an id.
    """
    digits = [ALPHABET.find(letter) for letter in text.upper()]
    if len(digits) != LENGTH or min(digits) < 0 or digits[0] > 7:
        raise ValueError(f"{text!r} is no id; an id has {LENGTH} letters of {ALPHABET} and starts with 0 to 7")
    number = 0
    for digit in digits:
        number = number << 5 | digit
    return number


def made_at_s(text: str) -> float:
    """When an id was made, in Unix seconds."""
    return (decode(text) >> RANDOM_BITS) / 1000


class UlidGenerator:
    """Makes ids that rise strictly; safe to share among threads."""

    def __init__(
        self,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self._now_ms = now_ms
        self._random_bits = random_bits
        self._lock = threading.Lock()
        self._last = -1

    def new(self) -> str:
        """The next id.

        Raises:
            OverflowError: after the year 10889.
        """
        with self._lock:
            now = self._now_ms()
            if now > self._last >> RANDOM_BITS:
                self._last = now << RANDOM_BITS | self._random_bits(RANDOM_BITS)
            else:
                # The same millisecond, or an earlier one after the clock was set back: count on from the last id.
                self._last += 1
            if self._last >> RANDOM_BITS > MAX_MILLISECONDS:
                raise OverflowError(f"{now} ms is past the last moment that an id can name, {MAX_MILLISECONDS} ms")
            return encode(self._last)


_generator = UlidGenerator()


def _start_anew() -> None:
    """A forked child counts on from its parent's last id otherwise, and both would make the same ones."""
    global _generator
    _generator = UlidGenerator()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def new_ulid() -> str:
    """The next id of this process."""
    return _generator.new()
