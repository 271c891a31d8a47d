"""Games of a project without a policy, before anything is paid for: what is wrong with them shows here.

A few games are played through by random legal replies, and by replies that no game can want. Each answer is checked
as in training. Where a game pays the same whatever is played, there is nothing to learn.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from vibe import seeds
from vibe.envs import Env, EnvCrashedError, EnvHost, EnvTimeoutError
from vibe.turns import About, fault

NUM_GAMES = 8
"""Each is played by two random players and by one who answers nonsense."""
TRIES = 2
"""For a game whose process died or was too slow: the machine may be to blame once."""
NONSENSE = "\N{WHITE SQUARE}"

Choose = Callable[[Env], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class DryPlay:
    """What came of it."""

    about: About
    num_games: int
    """Played to the end, over all players."""
    most_turns: int
    """Replies that the longest of them took."""
    lowest: float
    highest: float
    """Of the rewards paid."""
    tells_replies_apart: bool
    """Whether some game paid an agent differently when it was played differently."""


async def dry_play(host: EnvHost) -> DryPlay:
    """Play through a few games.

    Raises:
        EnvError: the environment is at fault; the message says how.
    """
    paid: defaultdict[tuple[int, str], set[float]] = defaultdict(set)
    lengths = []
    for game in range(NUM_GAMES):
        chances = [random.Random(seeds.build_seed("dry play", game, player)) for player in range(2)]
        for choose in (*map(_at_random, chances), _nonsense):
            rewards, num_turns = await _played(host, seeds.build_seed("dry play", game), choose)
            lengths.append(num_turns)
            for agent, reward in rewards.items():
                paid[game, agent].add(reward)
    if not any(lengths):
        raise fault(f"reset() ended all of {len(lengths)} games before a seat was asked to move")
    every = set[float]().union(*paid.values())
    return DryPlay(
        about=await host.about(),
        num_games=len(lengths),
        most_turns=max(lengths),
        lowest=min(every),
        highest=max(every),
        tells_replies_apart=any(len(rewards) > 1 for rewards in paid.values()),
    )


def _at_random(chance: random.Random) -> Choose:
    async def choose(env: Env) -> str:
        return chance.choice(await env.legal())

    return choose


async def _nonsense(_env: Env) -> str:
    return NONSENSE


async def _played(host: EnvHost, seed: int, choose: Choose) -> tuple[dict[str, float], int]:
    """Rewards of one game by agent, and the replies that it took."""
    for left in reversed(range(TRIES)):
        env, num_turns = host.env(), 0
        try:
            turn = await env.reset(seed)
            await env.snapshot()
            while "rewards" not in turn:
                turn, num_turns = await env.step(await choose(env)), num_turns + 1
            await env.close()
            return turn["rewards"], num_turns
        except (EnvCrashedError, EnvTimeoutError):
            if not left:
                raise
    raise AssertionError("the last try returns or raises")
