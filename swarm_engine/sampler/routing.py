"""Which of several engines a request goes to: the one that has computed most of its prompt, unless it is much fuller
than another.

What an engine has computed is not asked but kept account of, as its cache does: in whole blocks, each known by its
tokens and all before them, the longest unused forgotten first. A wrong guess costs time and changes no token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 32
"""What prompts share is counted in these; fewer tokens are not worth an imbalance."""

SPARE_REQUESTS = 4
SPARE_SHARE = 0.5
"""An engine may run this many requests more than the emptiest, or this share of its number, whichever is more."""


def blocks_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """A name for every whole block of a context: equal where the block and everything before it are."""
    names: list[int] = []
    name = 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        name = hash((name, *tokens[end - BLOCK_TOKENS : end]))
        names.append(name)
    return tuple(names)


class Prefixes:
    """The blocks that one engine has keys and values of, by our account."""

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """The longest unused first, and each after those that go on from it, so that a context is lost from its end."""

    def num_shared(self, blocks: Sequence[int]) -> int:
        """How many of a context's blocks are there, from its beginning."""
        return next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        """A context is computed, or about to be."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Nothing that was computed holds any longer."""
        self._blocks.clear()


def choose(shared: Sequence[int], running: Sequence[int], max_running: int) -> int:
    """The place of the engine that takes a request.

    Args:
        shared: of each engine, how many blocks of the prompt it has.
        running: of each engine, the requests that it has not finished.
        max_running: requests that an engine decodes side by side; where one has room none waits at another.
    """
    least = min(running)
    limit = least + max(SPARE_REQUESTS, int(SPARE_SHARE * least))
    if least < max_running:
        limit = min(limit, max_running - 1)
    fit = [place for place, number in enumerate(running) if number <= limit]
    return min(fit, key=lambda place: (-shared[place], running[place], place))
