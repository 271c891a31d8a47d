"""Refuses prose that states what no row says: numbers outside slots, and comparisons outside claims. Pure."""

from __future__ import annotations

import re

from a3r.errors import ReportError
from a3r.report.slots import without_slots

_NUMERAL = re.compile(r"\d")
_WORDED = re.compile(
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|hundred|thousand|dozen|"
    r"twice|thrice|half|halved?s?|doubled?s?|tripled?s?|percent|threefold|twofold)\b",
    re.IGNORECASE,
)
_COMPARISON = re.compile(
    r"\b(?:better|worse|faster|slower|quicker|superior|inferior|outperforms?|beats?|improves?|improvement|"
    r"no difference|as fast as|as good as|significant(?:ly)?)\b",
    re.IGNORECASE,
)


def check_prose(text: str, *, is_claim: bool = False) -> None:
    """Look at one text with slots.

    Args:
        is_claim: it is the text of a verified claim, which may compare.
    Raises:
        ReportError: it types a number, or compares without being a claim.
    """
    left = without_slots(text)
    if match := _NUMERAL.search(left) or _WORDED.search(left):
        raise ReportError(
            f"the report types the number {match[0]!r} in {left!r}; numbers come from rows, through slots"
        )
    if not is_claim and (match := _COMPARISON.search(left)):
        raise ReportError(f"the report says {match[0]!r} outside a claim, in {left!r}; only a verified claim compares")
