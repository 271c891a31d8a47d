"""Batches of agents' calls, made up in the shapes that real ones have, and one recorded from agents of six frameworks.

A call is a context and the reply to it. Made-up lengths are those of a full-size batch; `scale` shrinks them all. In a
group of eight the episodes share their prompt, and each answer's first few tokens with the others of its call. The
recording stays as long as it is; scripts/record_trajectories.py made it and says what it holds.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RECORDING = Path(__file__).with_name("recorded.json.gz")
VOCAB_SIZE = 4096
NUM_TURNS = 12
PROMPT, ANSWER, OBSERVATION = 1500, 90, 60
THOUGHT, SHORT_ANSWER, LONG_ANSWER = 80, 40, 450
RULES, PERSONA, UTTERANCE, NUM_AGENTS, NUM_ROUNDS = 800, 100, 60, 5, 4
SUMMARY, COMPACT_EVERY = 200, 5
MAX_OPENING = 6
"""Tokens with which answers to one prompt may begin alike."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of an episode."""

    context: Tokens
    reply: Tokens
    continues: tuple[int, int] | None = None
    """Number of the turn whose messages and reply this one's messages begin with, and where its own part begins."""


@dataclass(slots=True)
class Writer:
    """Makes up tokens: what a group shares, and what one episode adds."""

    scale: float
    shared: random.Random
    own: random.Random = field(default_factory=random.Random)

    def text(self, length: int) -> Tokens:
        """Tokens of one episode alone."""
        return self._draw(self.own, length)

    def common(self, length: int) -> Tokens:
        """Tokens that every episode of the group has."""
        return self._draw(self.shared, length)

    def _draw(self, source: random.Random, length: int) -> Tokens:
        return tuple(source.randrange(VOCAB_SIZE) for _ in range(max(1, round(length * self.scale))))


Episode = Callable[[Writer], list[Turn]]
"""Writes the calls of one episode; what it asks of `common` comes out the same in every episode of a group."""


def react(writer: Writer) -> list[Turn]:
    """Reason, act, observe: every call continues the one before."""
    context, turns, known = writer.common(PROMPT), list[Turn](), None
    for turn in range(NUM_TURNS):
        reply = opened(writer, ANSWER) if turn == 0 else writer.text(ANSWER)
        turns.append(Turn(context, reply, known))
        context += reply
        known = (turn, len(context))
        context += writer.text(OBSERVATION)
    return turns


def drift(writer: Writer) -> list[Turn]:
    """The same where three answers in ten come back as other tokens from some place on, as after tokenizing again."""
    context, turns, known = writer.common(PROMPT), list[Turn](), None
    for turn in range(NUM_TURNS):
        reply = writer.text(ANSWER)
        turns.append(Turn(context, reply, known))
        if writer.own.random() < 0.3:
            place = writer.own.randrange(len(reply))
            reply = (*reply[:place], *writer.text(2), *reply[place + 1 :])
        context += reply
        known = (turn, len(context))
        context += writer.text(OBSERVATION)
    return turns


def single_turn(writer: Writer) -> list[Turn]:
    """One question, one long answer."""
    return [Turn(writer.common(PROMPT), opened(writer, LONG_ANSWER))]


def thinking(writer: Writer) -> list[Turn]:
    """Every reply thinks first, and the template takes the thoughts out of history."""
    context, turns, known = writer.common(PROMPT), list[Turn](), None
    for turn in range(NUM_TURNS):
        thought, answer = writer.text(THOUGHT), writer.text(SHORT_ANSWER)
        turns.append(Turn(context, thought + answer, known))
        context += answer
        known = (turn, len(context))
        context += writer.text(OBSERVATION)
    return turns


def agents(writer: Writer, thought: int = 0) -> list[Turn]:
    """Agents in turn, each with a role of its own, over one log of all that was said."""
    rules = writer.common(RULES)
    roles = [writer.common(PERSONA) for _ in range(NUM_AGENTS)]
    log: Tokens = ()
    turns: list[Turn] = []
    for move in range(NUM_AGENTS * NUM_ROUNDS):
        said = writer.text(UTTERANCE)
        thoughts = writer.text(thought) if thought else ()
        before = move - NUM_AGENTS
        known = (before, len(turns[before].context) + len(said)) if before >= 0 else None
        turns.append(Turn(rules + roles[move % NUM_AGENTS] + log, thoughts + said, known))
        log += said
    return turns


def thinking_agents(writer: Writer) -> list[Turn]:
    """The same with thoughts that nobody sees, their thinker's next turn included."""
    return agents(writer, THOUGHT)


def compaction(writer: Writer) -> list[Turn]:
    """A long task: history is folded into a summary now and then, some calls are tried twice, one goes to a helper."""
    prompt = writer.common(PROMPT)
    context, turns, known = prompt, list[Turn](), None
    for turn in range(15):
        reply = writer.text(ANSWER)
        if turn % 4 == 1:
            turns.append(Turn(context, writer.text(ANSWER), known))
        turns.append(Turn(context, reply, known))
        context += reply
        known = (len(turns) - 1, len(context))
        context += writer.text(OBSERVATION)
        if turn % COMPACT_EVERY == COMPACT_EVERY - 1:
            context, known = prompt + writer.text(SUMMARY), None
    context, known = writer.common(RULES), None
    for _ in range(8):
        reply = writer.text(ANSWER)
        turns.append(Turn(context, reply, known))
        context += reply
        known = (len(turns) - 1, len(context))
        context += writer.text(OBSERVATION)
    return turns


def wide_group(writer: Writer) -> list[Turn]:
    """Where there is little to share: a short prompt, long answers."""
    return [Turn(writer.common(64), writer.text(256))]


def opened(writer: Writer, length: int) -> Tokens:
    """An answer that begins like the others of its group for a few tokens."""
    reply = writer.text(length)
    opening = tuple(writer.shared.randrange(VOCAB_SIZE) for _ in range(MAX_OPENING))
    count = writer.own.randint(0, min(MAX_OPENING, len(reply) - 1))
    return opening[:count] + reply[count:]


@dataclass(frozen=True, slots=True)
class Batch:
    """The calls of some episodes, episode by episode."""

    name: str
    episodes: Sequence[Sequence[Turn]]


def group(name: str, episode: Episode, size: int, scale: float, seed: int = 0) -> Batch:
    """A group of episodes."""
    episodes = []
    for index in range(size):
        # The shared source starts anew for every episode, so that all of them draw the same.
        writer = Writer(scale, random.Random(f"{name}/{seed}"), random.Random(f"{name}/{seed}/{index}"))
        episodes.append(episode(writer))
    return Batch(name, episodes)


SETS: dict[str, tuple[Episode, int]] = {
    "react x1": (react, 1),
    "react x8": (react, 8),
    "drift x1": (drift, 1),
    "drift x8": (drift, 8),
    "group x8": (single_turn, 8),
    "thinking x1": (thinking, 1),
    "thinking x8": (thinking, 8),
    "agents x1": (agents, 1),
    "agents x8": (agents, 8),
    "thinking agents x1": (thinking_agents, 1),
    "thinking agents x8": (thinking_agents, 8),
    "compaction x1": (compaction, 1),
    "compaction x8": (compaction, 8),
    "wide group x16": (wide_group, 16),
}
RECORDED = {"recorded": (1, 6), "recorded x1": (1, None), "recorded x4": (4, None)}
"""Sets of the recording: how many episodes of each framework they have, and how many of their first calls (None: all).
Unmerged they are 87 thousand, 231 thousand and a million tokens."""
NAMES = (*SETS, *RECORDED)


def batch_of(name: str, scale: float) -> Batch:
    """A set by its name; no scale changes a recorded one."""
    if name in RECORDED:
        groups = read_recording(RECORDING)
        num_episodes, num_calls = RECORDED[name]
        return Batch(name, [turns[:num_calls] for episodes in groups for turns in episodes[:num_episodes]])
    return group(name, *SETS[name], scale)


def read_recording(path: Path) -> list[list[list[Turn]]]:
    """The calls by framework and episode; ids are folded where the tokenizer had more of them than we have here."""
    groups = []
    for written in json.loads(gzip.decompress(path.read_bytes()))["groups"]:
        earlier: list[Tokens] = []
        episodes = []
        for calls in written["episodes"]:
            turns = []
            for call in calls:
                number, length = call["shares"] or (0, 0)
                shared = earlier[number][:length] if length else ()
                context = shared + tuple(token % VOCAB_SIZE for token in call["context"])
                reply = tuple(token % VOCAB_SIZE for token in call["reply"])
                known = call["continues"]
                turns.append(Turn(context, reply, known and (known[0], known[1])))
                earlier.append(context + reply)
            episodes.append(turns)
        groups.append(episodes)
    return groups
