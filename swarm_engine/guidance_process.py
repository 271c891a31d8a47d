"""The process that runs llguidance, so that what users make it do can end or hang no other one.

    python -P guidance_process.py

`swarm_engine.guidance` starts it, as a file: it imports nothing but the standard library and llguidance, in whatever
environment that is. Questions come on the standard input and answers go to the standard output, each a length in four
bytes and then that much. A question is a JSON list, its name first; an answer begins with `FINE` or `FAULT`, the latter
followed by what is wrong. A question that llguidance panics over, or that takes more time or memory than it may, has
no answer: the process ends. So it does when no question comes any more.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

FINE, FAULT = b"+", b"!"
MAX_MEMORY_BYTES = 1 << 30
"""Beyond what the process has at its start."""
MAX_CPU_S = 2.0
"""Of one question. Forms of the greatest length that is taken need a tenth of it."""
MAX_LOADING_CPU_S = 60.0
"""Of a tokenizer, which is the operator's own."""
SLOW_START_CPU_S, SLOW_TOKEN_CPU_S = 5.0, 0.02
"""What a whole reply may take, together and for each of its tokens; others wait for it."""
MAX_KEPT = 64
"""Compiled grammars; the calls of a run share a few."""
MAX_KEPT_BYTES = 256 << 20
"""Resident memory of this process beyond which compiled grammars are forgotten."""
NUM_TRIED = 24
"""Tokens that a grammar is tried with: some faults show only where it is followed."""
LIMITS = LLParserLimits(verbose_errors=False)


@dataclass(slots=True)
class Reply:
    """A reply that follows a grammar."""

    matcher: LLMatcher
    num_tokens: int = 0
    cpu_s: float = 0.0


class Guidance:
    """llguidance with one tokenizer, and the replies that follow its grammars."""

    def __init__(self) -> None:
        # A token for each byte: enough to see whether a grammar can be followed.
        self._tokenizer = LLTokenizer("byte")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._replies: dict[int, Reply] = {}

    def tokenizer(self, text: str, vocab_size: int, end_ids: list[int]) -> bytes:
        """Follow grammars over this tokenizer from now on."""
        self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=end_ids)
        return b""

    def check(self, grammar: str) -> bytes:
        """Whether a grammar is broken, and what is wrong with it, as JSON."""
        is_error, faults = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
        if not is_error and not faults:
            matcher = self._new(grammar)
            self._try(matcher)
            if matcher.is_error() and "NoExtensionBias" not in matcher.get_error():
                is_error, faults = True, [matcher.get_error()]
        return json.dumps((is_error, faults)).encode()

    def follow(self, number: int, grammar: str) -> bytes:
        """Begin a reply, to be known by a number, at the start of its grammar."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            if _resident_bytes() > MAX_KEPT_BYTES:
                self._compiled.clear()
            matcher = self._new(grammar)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        self._replies[number] = Reply(matcher.deep_copy())
        return b""

    def allowed(self, number: int, tokens: list[int]) -> bytes:
        """Take tokens, and give a bit for every token that the reply may go on with."""
        reply, begun = self._replies[number], time.process_time()
        self._take(reply, tokens)
        bits: bytes = reply.matcher.compute_bitmask()
        if reply.matcher.is_error():
            raise ValueError(reply.matcher.get_error())
        reply.cpu_s += time.process_time() - begun
        if reply.cpu_s > SLOW_START_CPU_S + SLOW_TOKEN_CPU_S * reply.num_tokens:
            raise ValueError(f"it took {reply.cpu_s:.0f} s of computing for {reply.num_tokens} tokens")
        return bits

    def accepts(self, number: int, tokens: list[int]) -> bytes:
        """Take tokens; whether the reply may end now, in one byte."""
        reply = self._replies[number]
        self._take(reply, tokens)
        return bytes([reply.matcher.is_accepting()])

    def takes(self, number: int, token: int) -> bytes:
        """Whether the reply may go on with a token, in one byte."""
        return bytes([self._replies[number].matcher.validate_tokens([token]) == 1])

    def forget(self, number: int) -> bytes:
        """The reply is over."""
        self._replies.pop(number, None)
        return b""

    def _take(self, reply: Reply, tokens: list[int]) -> None:
        for token in tokens:
            reply.matcher.consume_token(token)
        reply.num_tokens += len(tokens)

    def _new(self, grammar: str) -> LLMatcher:
        # Silent: errors come back as values, and no log is a place for a caller's schema.
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)

    def _try(self, matcher: LLMatcher) -> None:
        """Follow a grammar for a little, at random."""
        chosen = random.Random(0)
        for _ in range(NUM_TRIED):
            if matcher.is_error() or matcher.is_stopped():
                return
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            places = [place for place in range(bits.bit_length()) if bits >> place & 1]
            if not places:
                return
            matcher.consume_token(chosen.choice(places))


def _resident_bytes() -> int:
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bound_memory() -> None:
    """An allocation past the limit ends the process, and leaves no core behind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + MAX_MEMORY_BYTES, now + MAX_MEMORY_BYTES))


def _answer(guidance: Guidance, question: list[Any]) -> bytes:
    name, *arguments = question
    # The signal's default is to end the process, in the midst of native code too, also where its parent is gone.
    signal.setitimer(signal.ITIMER_PROF, MAX_LOADING_CPU_S if name == "tokenizer" else MAX_CPU_S)
    try:
        return FINE + bytes(getattr(guidance, name)(*arguments))
    except ValueError as error:
        return FAULT + str(error).encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until no question comes."""
    # Ctrl-C in a terminal reaches every process there; this one ends after those that ask it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guidance = Guidance()
    _bound_memory()
    while len(head := questions.read(4)) == 4:
        question = json.loads(questions.read(*struct.unpack("!I", head)))
        answer = _answer(guidance, question)
        answers.write(struct.pack("!I", len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    with open(0, "rb", closefd=False) as taken, open(1, "wb", closefd=False) as given:
        serve(taken, given)
