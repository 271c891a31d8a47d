"""Noncharacters, which Unicode keeps for a program's own use; no other text holds them."""

from __future__ import annotations

import re

BREAKER = "\ufdd0"
"""Breaks text that spells a control token."""
SENTINEL = "\ufdd1"
"""Stands for an answer when the tracker asks a template where it puts it."""
MARK = "\ufdd2"
"""Stands before a control token of the markup that was sampled as one."""
ANY = "\ufdd3"
"""Stands for the id of a call in markup."""

_OURS = re.compile(f"[{BREAKER}-{ANY}]")


def clean(text: str) -> str:
    """Text that others wrote, without the noncharacters that this package keeps for itself."""
    return _OURS.sub("\ufffd", text)
