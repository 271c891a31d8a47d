"""Constrained decoding: which tokens a grammar lets a reply go on with.

A grammar is llguidance's, as JSON or in its dialect of Lark. The end tokens are allowed exactly where it is complete.
In it every added token of the tokenizer is a control token: text never matches one, its name in angle brackets does
(`<tool_call>`), so nothing inside a JSON string can be taken for markup.

The library and the tokenizer's tables are loaded with the first grammar that comes: whoever sends none pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from swarm_engine.errors import BadRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TOKENIZER_FILE = "tokenizer.json"
DEAD_END = "NoExtensionBias"
"""What llguidance calls it."""
MAX_FAULT_CHARS = 400
MAX_KEPT = 64
"""Compiled grammars; the calls of a run share a few."""


class Grammars:
    """Grammars over one policy's tokenizer."""

    def __init__(self, tokenizer: Path | str, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Read nothing yet.

        Args:
            tokenizer: the folder that has `tokenizer.json`, or what that file says.
        """
        self._tokenizer_source = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = [token for token in sorted(set(end_ids)) if token < vocab_size]
        self._tokenizer: LLTokenizer | None = None
        self._compile = lru_cache(maxsize=MAX_KEPT)(self._compile_anew)

    def start(self, grammar: str) -> Constraint:
        """The place before a reply's first token.

        Raises:
            BadRequestError: the grammar is broken, or too large.
        """
        return Constraint(self._compile(grammar).deep_copy(), self._vocab_size)

    def _compile_anew(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        # Silent: errors come back as values, and the log is no place for a caller's schema.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._load_tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise BadRequestError(f"the grammar can't be followed: {_short(matcher.get_error())}")
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            if not self._end_ids:
                raise BadRequestError("the policy has no end token, so a reply could not end where its grammar does")
            text = self._tokenizer_source
            if isinstance(text, Path):
                text = (text / TOKENIZER_FILE).read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._end_ids)
        return self._tokenizer


class Constraint:
    """How far a reply has come in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Of every token id, whether the reply may go on with it; shape (V,).

        Raises:
            BadRequestError: nothing fits, or the grammar has become too complex to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            if DEAD_END in self._matcher.get_error():
                raise BadRequestError("the grammar has come to a dead end: no token of the vocabulary fits it here")
            raise BadRequestError(f"the grammar can't be followed any further: {_short(self._matcher.get_error())}")
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def takes(self, token: int) -> bool:
        """Whether the grammar can go on with `token`.

        Where only one text is possible `allowed` has just the token that the tokenizer would begin it with; the grammar
        itself takes any that spell it.
        """
        return self._matcher.validate_tokens([token]) == 1

    @property
    def is_complete(self) -> bool:
        """Whether the reply may end here."""
        is_accepting: bool = self._matcher.is_accepting()
        return is_accepting

    def take(self, token: int) -> None:
        """The reply went on with `token`; where that is too complex to follow, `allowed` says so."""
        self._matcher.consume_token(token)


def _short(fault: str) -> str:
    """llguidance's words on one line; some list the whole vocabulary."""
    fault = " ".join(fault.removesuffix("<non-verbose/>").split())
    return fault if len(fault) <= MAX_FAULT_CHARS else f"{fault[:MAX_FAULT_CHARS]} …"
