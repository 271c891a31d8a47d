"""Warm-ups: whose moves they are cloned from, when they are used again, and what they say about themselves."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from swarm_engine.models import NANO_DIR
from vibe import library, seeds, warmup
from vibe.envs import EnvHost
from vibe.judging import share_with_variance
from vibe.warmup import Card, Level, Plan

NIM = library.load("nim")
TINY = Plan(share=0.2, num_episodes=30, num_updates=3)


def demonstrations(name: str = "nim", **changes: Any) -> list[warmup.Conversation]:
    template = library.load(name)
    wanted: dict[str, Any] = {"share": 0.0, "num_episodes": 40, "seed": 0} | changes
    return asyncio.run(warmup.demonstrations(template, template.defaults, **wanted))


def replies(talks: list[warmup.Conversation]) -> list[tuple[str, str]]:
    """Every observation with its reply."""
    return [
        (asked["content"], said["content"])
        for talk in talks
        for asked, said in itertools.pairwise(talk)
        if said["role"] == "assistant"
    ]


def test_scripted_play_is_the_scripts_and_random_play_is_not() -> None:
    def left(observation: str) -> int:
        return int(observation.split()[-2])

    scripted = replies(demonstrations(share=1.0))
    assert all(int(said) == left(seen) % 4 for seen, said in scripted if left(seen) % 4)
    random_play = [int(said) == left(seen) % 4 for seen, said in replies(demonstrations()) if left(seen) % 4]
    assert 0.2 < sum(random_play) / len(random_play) < 0.55, "one of three by chance, more where fewer are left"


def test_the_same_arguments_give_the_same_conversations() -> None:
    assert demonstrations(share=0.5) == demonstrations(share=0.5)
    assert demonstrations(share=0.5) != demonstrations(share=0.5, seed=1)
    assert (
        demonstrations(share=0.5, num_episodes=20)
        == demonstrations(share=0.5)[: len(demonstrations(share=0.5, num_episodes=20))]
    )


def test_every_trained_seat_has_a_conversation_of_its_own() -> None:
    talks = demonstrations("spy", num_episodes=10)
    assert len(talks) == 30, "three civilians a game"
    assert all([message["role"] for message in talk] == ["system", *["user", "assistant"] * 2] for talk in talks)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        demonstrations(share=share)


def test_the_folder_is_named_by_all_that_decides_the_weights() -> None:
    rules = NIM.defaults
    name = warmup.folder_name(NIM, rules, TINY)
    assert name == warmup.folder_name(NIM, dict(reversed(rules.items())), TINY)
    others = [
        warmup.folder_name(NIM, rules | {"stones": 12}, TINY),
        warmup.folder_name(NIM, rules, replace(TINY, share=0.3)),
        warmup.folder_name(NIM, rules, replace(TINY, seed=1)),
        warmup.folder_name(replace(NIM, version="2"), rules, TINY),
        warmup.folder_name(library.load("spy"), library.load("spy").defaults, TINY),
    ]
    assert len({name, *others}) == 6


@dataclass(frozen=True, slots=True)
class Made:
    """A warm-up, and all that was left of it."""

    root: Path
    name: str
    card: Card
    told: list[str]

    @property
    def weights(self) -> bytes:
        return (self.root / self.name / "model.safetensors").read_bytes()


RULES = NIM.rules(stones=9)


def make(root: Path) -> Made:
    told: list[str] = []
    return Made(root, *asyncio.run(warmup.warm_up(NIM, RULES, root, plan=TINY, tell=told.append)), told)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("models"))


@pytest.mark.xdist_group("warm-up")
def test_a_warm_up_is_done_once_and_its_card_kept(made: Made) -> None:
    assert made.card.rules == RULES
    assert made.card.plan == TINY
    assert made.card.num_conversations == 30
    assert any("nim" in line and "20%" in line for line in made.told)
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "warmup.json"} <= {
        path.name for path in (made.root / made.name).iterdir()
    }
    weights = made.weights
    again = make(made.root)
    assert (again.name, again.card, again.told) == (made.name, made.card, [])
    assert again.weights == weights
    assert [path.name for path in made.root.iterdir()] == [made.name], "no draft is left"


@pytest.mark.xdist_group("warm-up")
def test_the_same_plan_gives_the_same_weights(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "NUM_LEVEL_GAMES", 2)  # measured when the weights are made
    monkeypatch.setattr(warmup, "NUM_PROBE_GROUPS", 1)
    other = make(tmp_path / "elsewhere")
    assert other.told, "it was made anew"
    assert (other.name, other.weights) == (made.name, made.weights)


def test_an_unknown_game_is_tried_with_random_play_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    async def pretend(_template: Any, _rules: Any, _root: Path, plan: Plan, _tell: Any) -> tuple[str, Any]:
        tried.append(plan.share)
        return "name", replace(CARD, plan=plan, share_with_variance=0.2 if plan.share == 0 else 0.5)

    monkeypatch.setattr(warmup, "_warm_up_once", pretend)
    unknown = replace(NIM, warm_up_share=None)
    _, card = asyncio.run(warmup.warm_up(unknown, NIM.defaults, tmp_path))
    assert tried == [0.0, warmup.FALLBACK_SHARE]
    assert card.plan.share == warmup.FALLBACK_SHARE
    tried.clear()
    asyncio.run(warmup.warm_up(NIM, NIM.defaults, tmp_path))
    assert tried == [NIM.warm_up_share]


CARD = Card(
    game="nim",
    template_version="1",
    rules={"stones": 15},
    tokenizer="ab",
    plan=TINY,
    num_conversations=30,
    loss=1.25,
    minutes=0.5,
    random=Level(0.5, 0.03, 200),
    scripted=Level(0.9, 0.02, 200),
    sampled=Level(0.4, 0.03, 200),
    greedy=Level(0.6, 0.03, 200),
    share_with_variance=0.875,
)


def test_a_card_comes_back_as_it_was_written() -> None:
    assert Card.from_json(CARD.to_json()) == CARD
    assert json.loads(CARD.to_json())["plan"]["share"] == 0.2
    assert CARD.in_words() == (
        "warmed up on nim in 0.5 min, 20% of the moves from the script: earns 0.400 (random legal play 0.500, "
        "script 0.900), different rewards in 88% of the groups"
    )


def test_a_level_is_a_mean_with_its_error() -> None:
    assert Level.of([0.0, 1.0, 1.0, 0.0]) == Level(0.5, round((1 / 3) ** 0.5 / 2, 4), 4)


def test_variance_is_counted_by_agent_within_the_attempts_at_one_game() -> None:
    ends = [{"rewards": {"a": a, "b": b}} for a, b in ((0, 1), (0, 0), (1, 1), (1, 1))]
    assert share_with_variance(warmup.by_agent(ends, 2)) == 0.25  # only b in the first game


def test_a_policy_plays_in_this_process_as_its_seed_says() -> None:
    async def play(seed: int, temperature: float) -> list[dict[str, Any]]:
        policy = warmup.blank_policy(NANO_DIR, 0)
        async with EnvHost(NIM.path, NIM.defaults) as host:
            return await warmup.play(policy, host, [seeds.build_seed(0)] * 6, temperature=temperature, seed=seed)

    first = asyncio.run(play(0, 1.0))
    assert first == asyncio.run(play(0, 1.0))
    assert first != asyncio.run(play(1, 1.0))
    assert len({end["record"][-1]["text"] for end in first}) > 1, "six attempts at one game differ"
    greedy = asyncio.run(play(0, 0.0))
    assert len({end["record"][-1]["text"] for end in greedy}) == 1
    assert all(end["rewards"] == {"player": -0.5} for end in first), "random weights know no rules"
