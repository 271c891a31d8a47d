"""Games without a policy: what they show of an environment, and whom a run blames for it."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from swarm_engine.client import EpisodeResult, Task
from swarm_engine.types import Outcome
from vibe import library, render
from vibe.dry_play import DryPlay, dry_play
from vibe.envs import Env, EnvHost, EnvTimeoutError, Limits
from vibe.errors import EnvError, GameError, TooSmallError
from vibe.project import game_of, project_for
from vibe.record import Record
from vibe.runtime import Run, Settings
from vibe.turns import About

GAME = """
import time

class Game:
    def reset(self, seed):
        self.seed = seed
        return {"seat": "a", "agent": "a", "system": "s", "observation": "o"}
    def legal(self):
        return ["yes", "no"]
    def suggest(self, player):
        return "yes"
    def snapshot(self):
        return {"seed": self.seed}
    def step(self, text):
        return {"rewards": {"a": self.pay(text)}, "outcome": "success", "metrics": {}, "record": []}
    def pay(self, text):
        return float(text == "yes")
"""


def play(folder: Path, more: str = "", limits: Limits | None = None) -> DryPlay:
    """Dry games of the small game above, with these lines behind it."""
    (folder / "env.py").write_text(GAME + more, encoding="utf-8")

    async def main() -> DryPlay:
        async with EnvHost(folder, {}, limits) as host:
            return await dry_play(host)

    return asyncio.run(main())


@pytest.mark.parametrize("name", library.names())
def test_every_template_plays_dry_and_tells_replies_apart(name: str) -> None:
    template = library.load(name)

    async def main() -> DryPlay:
        async with EnvHost(template.path, template.defaults) as host:
            return await dry_play(host)

    dry = asyncio.run(main())
    rewards = template.module("rewards")
    assert dry.tells_replies_apart
    assert dry.about.bounds == (rewards.LOWEST, rewards.HIGHEST)
    assert rewards.LOWEST <= dry.lowest < dry.highest <= rewards.HIGHEST


def test_dry_games_say_what_they_paid_and_how_long_they_were(tmp_path: Path) -> None:
    assert play(tmp_path) == DryPlay(About(), 24, 1, 0.0, 1.0, tells_replies_apart=True)
    alike = play(tmp_path, "    def pay(self, text):\n        return 0.5\n")
    assert (alike.lowest, alike.highest, alike.tells_replies_apart) == (0.5, 0.5, False)
    by_deal = play(tmp_path, "    def pay(self, text):\n        return self.seed % 97 / 97\n")
    assert by_deal.lowest < by_deal.highest
    assert not by_deal.tells_replies_apart


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("    def step(self, text):\n        return self.reset(0)\n", "asked for 1000 replies and has not ended"),
        (
            "    def reset(self, seed):\n        self.seed = seed\n        return self.step('yes')\n",
            "ended all of 24 games before a seat",
        ),
        ("    def pay(self, text):\n        return '1'\n", "reward '1' for 'a'"),
        ("    def legal(self):\n        return []\n", "legal() gave []"),
        (
            "    def snapshot(self):\n        return 1 / 0\n",
            "snapshot() raised ZeroDivisionError: division by zero (env.py",
        ),
    ],
)
def test_a_fault_shows_in_the_dry_games(more: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"^the environment is at fault: ") as faulty:
        play(tmp_path, more)
    assert said in str(faulty.value)


def test_a_game_that_sleeps_for_ever_is_ended_by_the_clock(tmp_path: Path) -> None:
    with pytest.raises(EnvTimeoutError, match=r"longer than 0\.3 s for one request"):
        play(tmp_path, "    def step(self, text):\n        time.sleep(1e6)\n", Limits(wall_s=0.3))


def test_a_run_plays_dry_before_it_plays_for_good(tmp_path: Path) -> None:
    spec = project_for(game_of("tictactoe"))
    project = tmp_path / "project"
    render.write(render.render(spec), project)
    rewards = project / "rewards.py"
    rewards.write_text(rewards.read_text(encoding="utf-8") + 'REWARDS["illegal"] = -2.0\n', encoding="utf-8")
    run = Run(Settings(project, spec, tmp_path), Record(tmp_path, as_json=False, out=io.StringIO()))

    async def rollout(*_: object, **__: object) -> None:
        raise AssertionError("nothing is played for good")

    async def main() -> None:
        async with run.games(rollout):
            pass

    with pytest.raises(EnvError, match=r"reward -2\.0 for 'player'; it is a number from -0\.5 to 1 \(LOWEST and HIGH"):
        asyncio.run(main())


class FakeSwarm:
    """A swarm whose trial pays each game's eight attempts this, or loses all of them."""

    def __init__(self, reward: float | None) -> None:
        self._reward = reward

    async def play(self, tasks: list[object], *_: object, group_size: int, **__: object) -> list[EpisodeResult]:
        outcome = Outcome.ENV_ERROR if self._reward is None else Outcome.SUCCESS
        return [
            EpisodeResult(f"t{i}", f"t{i}#1", 0, f"e{i}-{k}", {"a": self._reward}, outcome, {}, 0)
            for i in range(len(tasks))
            for k in range(group_size)
        ]


def blame(folder: Path, reward: float | None, dry: DryPlay, levels: tuple[float, ...] = ()) -> str:
    """What a run says whose trial pays this reward, and what kind of error it is."""

    async def rollout(*_: object, **__: object) -> None:
        raise AssertionError("the fake swarm plays nothing")

    folder.mkdir()
    run = Run(
        Settings(folder, project_for(game_of("tictactoe")), folder), Record(folder, as_json=True, out=io.StringIO())
    )
    for player, mean in enumerate(levels):
        run.record.emit("level", player=str(player), mean=mean, ci=[None, None], n_groups=1)
    run._live, run._rollout, run._dry = FakeSwarm(reward), rollout, dry  # type: ignore[assignment]
    with pytest.raises((GameError, TooSmallError)) as blamed:
        asyncio.run(run.check_that_it_can_learn())
    return f"{type(blamed.value).__name__}: {blamed.value}"


def test_pay_that_no_play_changes_is_put_down_to_the_environment_and_not_to_the_model(tmp_path: Path) -> None:
    alike = DryPlay(About(), 24, 1, 0.5, 0.5, tells_replies_apart=False)
    assert blame(tmp_path / "1", 0.5, alike, (0.5, 0.5)).startswith(
        "GameError: the environment is at fault: it pays 0.5 whatever is played"
    )
    by_deal = DryPlay(About(), 24, 1, 0.0, 1.0, tells_replies_apart=False)
    assert "it pays each game (from 0 to 1) the same" in blame(tmp_path / "2", 0.5, by_deal)
    assert blame(tmp_path / "3", 0.5, alike, (0.5, 0.9)).startswith("TooSmallError"), "the script earns more"
    apart = DryPlay(About(), 24, 1, 0.5, 1.0, tells_replies_apart=True)
    assert blame(tmp_path / "4", 0.5, apart).startswith("TooSmallError")


def test_a_trial_that_lost_every_game_says_so(tmp_path: Path) -> None:
    dry = DryPlay(About(), 24, 1, 0.0, 1.0, tells_replies_apart=True)
    assert blame(tmp_path / "1", None, dry).startswith("GameError: all 192 games of a trial were lost")


def test_a_faulty_game_among_good_ones_is_paid_nothing_and_said(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        GAME + "    def step(self, text):\n        return {'rewards': {'a': '1'}} if self.seed else self.reset(0)\n",
        encoding="utf-8",
    )
    ended: list[tuple[object, Outcome]] = []

    class FakeEpisode:
        async def end(self, *, reward: object, outcome: Outcome) -> None:
            ended.append((reward, outcome))

    async def rollout(_episode: object, env: Env, seed: int, **_: object) -> None:
        await env.reset(seed)
        await env.step("yes")

    async def main() -> None:
        async with EnvHost(tmp_path, {}) as host:
            run._host, run._rollout = host, rollout
            for seed in (1, 0, 1):
                await run._play(temperature=1)(FakeEpisode(), Task("t", {"seed": seed}))  # type: ignore[arg-type]
            with pytest.raises(GameError, match=r"were lost, .*reward '1' for 'a'.*; look for env_error"):
                await run.check_that_it_can_learn()

    spec = project_for(game_of("tictactoe"))
    run = Run(Settings(tmp_path, spec, tmp_path), Record(tmp_path, as_json=True, out=io.StringIO()))
    run._live = FakeSwarm(None)  # type: ignore[assignment]
    asyncio.run(main())
    assert ended == [(None, Outcome.ENV_ERROR)] * 2
    assert [event["text"][:45] for event in run.record.all("phase")] == [
        "a game was lost: the environment is at fault:"
    ] * 2
