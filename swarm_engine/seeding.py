"""Every random number of the engine comes from what it is for, never from a shared generator.

So two processes, or two orders of arrival, draw the same numbers for the same call.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part and on their order.

    Typical parts: run seed, group, episode index, attempt, agent, call index.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
