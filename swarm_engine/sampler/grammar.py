"""Constrained decoding: which tokens a grammar lets a reply go on with.

A grammar is llguidance's, as JSON or in its dialect of Lark. The end tokens are allowed exactly where it is complete.
In it every added token of the tokenizer is a control token: text never matches one, its name in angle brackets does
(`<tool_call>`), so nothing inside a JSON string can be taken for markup.

llguidance runs in a process of its own (`swarm_engine.guidance`), started with the first grammar that comes: whoever
sends none pays nothing. A reply's next mask is asked for as soon as its last token is there, so it is made while the
model computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swarm_engine.errors import BadRequestError
from swarm_engine.guidance import Asked, Guidance, GuidanceProcess, LostError, RefusedError

TOKENIZER_FILE = "tokenizer.json"
DEAD_END = "NoExtensionBias"
"""What llguidance calls it."""
MAX_FAULT_CHARS = 400
NUM_TRIES = 3
"""Replies whose process ended over another one are taken up by the next."""


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
        self._guidance: Guidance | None = None
        self._numbers = itertools.count()

    def check(self, grammar: str) -> None:
        """See that a grammar can be followed.

        Raises:
            BadRequestError: it is broken, or too large.
        """
        constraint = self.start(grammar)
        try:
            constraint.check()
        finally:
            constraint.close()

    def start(self, grammar: str) -> Constraint:
        """The place before a reply's first token; what is wrong with the grammar is found out when it is followed.

        Raises:
            BadRequestError: no reply could follow any.
        """
        if self._guidance is None:
            self._guidance = self._begin()
        return Constraint(self._guidance, next(self._numbers), grammar, self._vocab_size)

    def _begin(self) -> Guidance:
        if not self._end_ids:
            raise BadRequestError("the policy has no end token, so a reply could not end where its grammar does")
        text = self._tokenizer_source
        if isinstance(text, Path):
            text = (text / TOKENIZER_FILE).read_text(encoding="utf-8")
        return Guidance(("tokenizer", text, self._vocab_size, self._end_ids))


class Constraint:
    """How far a reply has come in its grammar. Not thread-safe, nor are several of one policy."""

    def __init__(self, guidance: Guidance, number: int, grammar: str, vocab_size: int) -> None:
        self._guidance = guidance
        self._number = number
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._num_told = 0
        """Of them, those that the process knows."""
        self._process: GuidanceProcess | None = None
        """The one that follows the reply; None before it is known to any."""
        self._begun: Asked | None = None
        self._mask: Asked | None = None
        """The question for what `allowed` gives, where it is on its way."""

    def check(self) -> None:
        """See that the grammar can be followed from its start.

        Raises:
            BadRequestError: it can't.
        """
        self._ask("takes", 0)

    def prepare(self) -> None:
        """Have the mask made, without waiting for it; why that can't be done is for `allowed` to say."""
        if self._process is not None and self._mask is None:
            self._mask = self._process.ask("allowed", self._number, self._untold())

    def allowed(self) -> NDArray[np.bool_]:
        """Of every token id, whether the reply may go on with it; shape (V,).

        Raises:
            BadRequestError: nothing fits, or the grammar has become too complex to follow.
        """
        bits = np.frombuffer(self._ask("allowed"), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def takes(self, token: int) -> bool:
        """Whether the grammar can go on with `token`.

        Where only one text is possible `allowed` has just the token that the tokenizer would begin it with; the grammar
        itself takes any that spell it.

        Raises:
            BadRequestError: the grammar can't be followed any further.
        """
        return self._ask("takes", token) == b"\1"

    def is_complete(self) -> bool:
        """Whether the reply may end here.

        Raises:
            BadRequestError: the grammar can't be followed any further.
        """
        return self._ask("accepts") == b"\1"

    def take(self, token: int) -> None:
        """The reply went on with `token`; where that is too complex to follow, `allowed` says so."""
        self._tokens.append(token)
        self._mask = None

    def close(self) -> None:
        """The reply is over."""
        if self._process is not None:
            self._process.ask("forget", self._number)
            self._process = None

    def _ask(self, name: str, *arguments: int) -> bytes:
        for _ in range(NUM_TRIES):
            try:
                process = self._follow()
                if name == "allowed":
                    self.prepare()
                    asked, self._mask = self._mask, None
                    assert asked is not None, "it is followed, so it was prepared"
                elif name == "accepts":
                    asked = process.ask(name, self._number, self._untold())
                else:
                    asked = process.ask(name, self._number, *arguments)
                return process.answer(asked)
            except LostError:
                self._process = None
            except RefusedError as error:
                raise BadRequestError(_told(str(error), is_begun=bool(self._tokens))) from error
        raise BadRequestError("the grammar can't be followed: llguidance ended over others again and again")

    def _follow(self) -> GuidanceProcess:
        """The process that follows the reply.

        Raises:
            LostError: it ended over another one.
            RefusedError: over this one, or it can't be followed.
        """
        process = self._process
        if process is None or process.has_ended:
            process = self._process = self._guidance.process()
            self._begun = process.ask("follow", self._number, self._grammar)
            self._mask, self._num_told = None, 0
        if self._begun is not None:
            begun, self._begun = self._begun, None
            try:
                process.answer(begun)
            except RefusedError:
                self._process = None
                raise
        return process

    def _untold(self) -> list[int]:
        told, self._num_told = self._num_told, len(self._tokens)
        return self._tokens[told:]


def _told(fault: str, *, is_begun: bool) -> str:
    if DEAD_END in fault:
        return "the grammar has come to a dead end: no token of the vocabulary fits it here"
    return f"the grammar can't be followed{' any further' if is_begun else ''}: {_short(fault)}"


def _short(fault: str) -> str:
    """llguidance's words on one line; some list the whole vocabulary."""
    fault = " ".join(fault.removesuffix("<non-verbose/>").split())
    return fault if len(fault) <= MAX_FAULT_CHARS else f"{fault[:MAX_FAULT_CHARS]} …"
