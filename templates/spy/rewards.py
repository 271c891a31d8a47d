"""What a civilian earns in a game of Who is the Spy, in [-1, 1]."""

from __future__ import annotations

TEAM = 0.5
"""To every civilian when the spy alone has the most votes."""
VOTE = 0.5
"""To the civilian who voted for the spy."""
ILLEGAL = -0.25
"""For each reply that is no allowed clue or vote."""
SAID_WORD = -1.0
"""All that a civilian earns who said the secret word."""

LOWEST, HIGHEST = -1.0, TEAM + VOTE


def pay(*, is_spy_out: bool, has_found_spy: bool, num_illegal: int, said_word: bool) -> float:
    """The reward of one civilian."""
    if said_word:
        return SAID_WORD
    return TEAM * is_spy_out + VOTE * has_found_spy + ILLEGAL * num_illegal
