"""What a game may answer, checked where it comes in, so that a faulty one is named before it does harm. Pure.

A game is somebody else's code. What is wrong with its answer is told with the place, the agent, the field and the
value; it is never left to a traceback of ours, and never put down to the policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from swarm_engine.errors import shown
from swarm_engine.types import Outcome
from vibe.errors import EnvError

MAX_TURNS = 1000
"""Replies that a game may ask for where its env.py sets no MAX_TURNS of its own."""
MAX_REWARD = 1e9
"""What a reward may be at most, up or down, where rewards.py declares no range: what the engine takes."""
MAX_NAMES, MAX_NAME_CHARS = 1000, 500
"""Of the agents that an end pays and of its metrics: what the engine takes."""
TURN_FIELDS = ("seat", "agent", "system", "observation")
NOTE_FIELDS = ("seat", "text", "note")


@dataclass(frozen=True, slots=True)
class About:
    """What a game says of itself."""

    lowest: float | None = None
    highest: float | None = None
    """Range of its rewards, LOWEST and HIGHEST of rewards.py; None where it declares none."""
    max_turns: int = MAX_TURNS
    """MAX_TURNS of env.py."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The range of its rewards; None where it declares none."""
        return None if self.lowest is None or self.highest is None else (self.lowest, self.highest)


def check_about(reply: Mapping[str, Any]) -> About:
    """What a game says of itself, from the answer of its process.

    Raises:
        EnvError: a name is there and holds nothing that can be meant by it.
    """
    lowest, highest, max_turns = reply["lowest"], reply["highest"], reply["max_turns"]
    if (lowest is None) != (highest is None):
        raise fault("rewards.py has one of LOWEST and HIGHEST; it takes both to declare the range of its rewards")
    if lowest is not None and not (_is_number(lowest) and _is_number(highest) and lowest < highest):
        raise fault(
            f"rewards.py declares rewards from LOWEST {shown(lowest)} to HIGHEST {shown(highest)}; "
            "these are two numbers, the first below the second"
        )
    if max_turns is None:
        max_turns = MAX_TURNS
    elif not isinstance(max_turns, int) or isinstance(max_turns, bool) or max_turns < 1:
        raise fault(f"env.py sets MAX_TURNS to {shown(max_turns)}; it is a whole number from 1 on")
    return About(lowest, highest, max_turns)


def check_turn(op: str, reply: object, about: About, agents: Iterable[str]) -> dict[str, Any]:
    """What `reset` or `step` gave: the next turn, or the end of the game.

    Args:
        agents: those that the game has asked so far.
    Raises:
        EnvError: it is neither.
    """
    if not isinstance(reply, dict):
        raise fault(f"{op}() gave {shown(reply)}; it gives a dict: the next turn, or with `rewards` the end")
    if "rewards" in reply:
        _check_end(op, reply, about, agents)
    else:
        _check_fields(f"the turn that {op}() gave", reply, TURN_FIELDS)
        for name in ("seat", "agent"):
            _check_name(f"{name} of the turn that {op}() gave", reply[name])
    return reply


def check_legal(reply: object) -> list[str]:
    """What `legal` gave: the replies that are allowed to the seat to move.

    Raises:
        EnvError: it is no list of them, or an empty one.
    """
    if not isinstance(reply, list) or not reply:
        raise fault(f"legal() gave {shown(reply)} while a seat is to move; it gives a list of at least one reply")
    for text in reply:
        _check_text("a reply that legal() gave", text)
    if len(set(reply)) < len(reply):
        twice = next(text for text in reply if reply.count(text) > 1)
        raise fault(f"legal() gave {shown(twice)} twice; it gives each reply once")
    return reply


def check_suggested(player: str, reply: object) -> str:
    """What `suggest` gave: a reply.

    Raises:
        EnvError: it is no text.
    """
    return _check_text(f"what suggest({player!r}) gave", reply)


def check_snapshot(reply: object) -> dict[str, Any]:
    """What `snapshot` gave: the state by name.

    Raises:
        EnvError: it is no dict.
    """
    if not isinstance(reply, dict):
        raise fault(f"snapshot() gave {shown(reply)}; it gives a dict")
    return reply


def too_long(about: About) -> EnvError:
    """The fault of a game that has not ended after all the replies that it may ask for."""
    return fault(
        f"a game asked for {about.max_turns} replies and has not ended; let it end, or set MAX_TURNS in env.py to the "
        "replies that its longest game takes"
    )


def _check_end(op: str, end: Mapping[str, Any], about: About, agents: Iterable[str]) -> None:
    rewards = end["rewards"]
    if not isinstance(rewards, dict) or not rewards:
        raise fault(f"{op}() ended a game with rewards {shown(rewards)}; they are a dict with a number for each agent")
    _check_count(f"{op}() ended a game with rewards for", rewards)
    for agent, reward in rewards.items():
        _check_name(f"an agent in the rewards that {op}() gave", agent)
        _check_reward(op, agent, reward, about)
    if missing := [agent for agent in agents if agent not in rewards]:
        raise fault(
            f"{op}() ended a game with rewards for {', '.join(map(shown, rewards))} and none for {shown(missing[0])}, "
            "who was asked to move; every agent that moved gets one"
        )
    outcome = end.get("outcome")
    if outcome not in list(Outcome):
        raise fault(f"{op}() ended a game with outcome {shown(outcome)}; it is one of {', '.join(Outcome)}")
    metrics = end.get("metrics")
    if not isinstance(metrics, dict):
        raise fault(
            f"{op}() ended a game with metrics {shown(metrics)}; they are a dict of numbers, which may be empty"
        )
    _check_count(f"{op}() ended a game with metrics for", metrics)
    for name, value in metrics.items():
        _check_name(f"the name of a metric that {op}() gave", name)
        if not _is_number(value):
            raise fault(f"{op}() ended a game with metric {shown(name)} {shown(value)}; it is a finite number")
    record = end.get("record")
    if not isinstance(record, list):
        raise fault(f"{op}() ended a game with record {shown(record)}; it is a list of moves, which may be empty")
    for index, move in enumerate(record):
        if not isinstance(move, dict):
            raise fault(f"{op}() ended a game whose record has {shown(move)} at {index}; it is a dict of texts")
        _check_fields(f"move {index} in the record that {op}() gave", move, NOTE_FIELDS)


def _check_reward(op: str, agent: str, reward: object, about: About) -> None:
    low, high = about.bounds or (-MAX_REWARD, MAX_REWARD)
    declared = "LOWEST and HIGHEST in rewards.py" if about.bounds else "rewards.py declares no LOWEST and HIGHEST"
    crumb = 1e-9 * max(abs(low), abs(high))  # what adding up shares of a reward may leave
    if not _is_number(reward) or not low - crumb <= reward <= high + crumb:
        raise fault(
            f"{op}() ended a game with reward {shown(reward)} for {shown(agent)}; it is a number from {low:g} to "
            f"{high:g} ({declared})"
        )


def _check_fields(what: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if name not in given:
            raise fault(f"{what} has no {name}, only {', '.join(map(shown, given)) or 'nothing'}")
        _check_text(f"{name} of {what}", given[name])


def _check_text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise fault(f"{what} is {shown(value)}; it is a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = "which holds half of a surrogate pair; it is valid Unicode"
        raise fault(f"{what} is {shown(value)}, {problem}") from error
    return value


def _check_name(what: str, value: object) -> None:
    if not 0 < len(_check_text(what, value)) <= MAX_NAME_CHARS:
        raise fault(f"{what} is {shown(value)}; it has 1 to {MAX_NAME_CHARS} characters")


def _check_count(what: str, named: Mapping[str, Any]) -> None:
    if len(named) > MAX_NAMES:
        raise fault(f"{what} {len(named)} names; the limit is {MAX_NAMES}")


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite one that fits a float; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def fault(what: str) -> EnvError:
    """An error that puts it down to the environment."""
    return EnvError(f"the environment is at fault: {what}")
