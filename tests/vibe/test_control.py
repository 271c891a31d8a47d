"""The shuffled-reward control: the same rewards, in other hands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from swarm_engine.types import Outcome
from vibe.control import Held, Shuffled, deal

rewards = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.dictionaries(st.sampled_from("xyz"), st.floats(-1, 1), max_size=3)
)


@given(rewards, st.integers())
def test_dealing_keeps_every_reward_and_every_agent(earned: dict[str, dict[str, float]], seed: int) -> None:
    dealt = deal(earned, seed)
    assert {key: set(by_agent) for key, by_agent in dealt.items()} == {key: set(by) for key, by in earned.items()}
    before = sorted(reward for by_agent in earned.values() for reward in by_agent.values())
    assert sorted(reward for by_agent in dealt.values() for reward in by_agent.values()) == before


@given(rewards, st.integers())
def test_the_same_seed_deals_the_same(earned: dict[str, dict[str, float]], seed: int) -> None:
    assert deal(earned, seed) == deal(earned, seed)


def test_a_reward_rarely_stays_where_it_was_earned() -> None:
    earned = {str(i): {"player": float(i)} for i in range(100)}
    assert sum(deal(earned, 7)[key] == earned[key] for key in earned) < 10


@dataclass
class FakeEpisode:
    """An episode that only notes its end."""

    episode_id: str
    ended: list[Mapping[str, float]] = field(default_factory=list)
    """Rewards it ended with; empty for none."""

    async def end(self, *, reward: Mapping[str, float] | None, **_: object) -> None:
        self.ended.append(reward or {})


def test_no_episode_ends_before_all_have_come_to_their_end() -> None:
    episodes = [FakeEpisode(str(i)) for i in range(4)]

    async def play(episode: Held, reward: float) -> None:
        await episode.end(reward={"player": reward}, outcome=Outcome.SUCCESS, metrics={"won": 1.0})

    async def run() -> list[list[Mapping[str, float]]]:
        shuffled = Shuffled(play, 4, seed=3)  # type: ignore[arg-type]
        first = [asyncio.create_task(shuffled(episodes[i], float(i))) for i in range(3)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        before = [list(episode.ended) for episode in episodes]
        await asyncio.gather(*first, shuffled(episodes[3], 3.0))  # type: ignore[arg-type]
        return before

    assert asyncio.run(run()) == [[], [], [], []]
    assert sorted(episode.ended[0]["player"] for episode in episodes) == [0.0, 1.0, 2.0, 3.0]
    assert all(len(episode.ended) == 1 for episode in episodes)


def test_a_game_that_was_lost_is_paid_nothing_and_keeps_nobody_waiting() -> None:
    for lost in range(3):  # whether it is the first, the second or the last to come to its end
        episodes = [FakeEpisode(str(i)) for i in range(3)]

        async def play(episode: Held, reward: float | None) -> None:
            outcome = Outcome.ENV_ERROR if reward is None else Outcome.SUCCESS
            await episode.end(reward=None if reward is None else {"player": reward}, outcome=outcome)

        async def run(episodes: list[FakeEpisode], lost: int) -> None:
            shuffled = Shuffled(play, 3, seed=3)  # type: ignore[arg-type]
            rewards = [None if i == lost else float(i) for i in range(3)]
            async with asyncio.timeout(5), asyncio.TaskGroup() as group:
                for episode, reward in zip(episodes, rewards, strict=True):
                    group.create_task(shuffled(episode, reward))  # type: ignore[arg-type]

        asyncio.run(run(episodes, lost))
        assert episodes[lost].ended == [{}]
        paid = sorted(episode.ended[0]["player"] for i, episode in enumerate(episodes) if i != lost)
        assert paid == [float(i) for i in range(3) if i != lost]


def test_an_episode_played_again_after_the_exchange_is_paid_at_random_too() -> None:
    first, again = FakeEpisode("first"), FakeEpisode("again")

    async def play(episode: Held, reward: float) -> None:
        await episode.end(reward={"player": reward})

    async def run() -> None:
        shuffled = Shuffled(play, 1, seed=3)  # type: ignore[arg-type]
        await shuffled(first, 0.25)  # type: ignore[arg-type]
        await shuffled(again, 0.75)  # type: ignore[arg-type]

    asyncio.run(run())
    assert first.ended == again.ended == [{"player": 0.25}], "the only reward there was to deal"
