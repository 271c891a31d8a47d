"""Texts that others wrote, made safe to show."""

from __future__ import annotations

import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Co")
"""Unicode's categories of control, format, surrogate and private letters."""


def plain(text: str) -> str:
    """A text on one line and without control characters, so that it can't move a cursor or hide itself."""
    kept = (letter for letter in text if letter.isspace() or unicodedata.category(letter) not in HIDDEN)
    return " ".join("".join(kept).split())
