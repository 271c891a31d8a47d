"""What holds for every built-in game, whoever plays: it ends, pays in range, repeats itself and tells no secrets."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibe import library, seeds

NAMES = ("gridwalk", "nim", "spy", "tictactoe")
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gridwalk": [{}, {"size": 8, "holes": 21, "moves": 40}, {"holes": 0, "moves": 1}, {"start": "corner"}],
    "nim": [
        {},
        {"stones": 60, "max_take": 9},
        {"stones": 4, "max_take": 2},
        {"opponent": "scripted", "first": "policy"},
    ],
    "spy": [{}, {"players": 3, "rounds": 3}, {"players": 8, "rounds": 2}, {"spy": "random"}],
    "tictactoe": [{}, {"size": 4}, {"size": 4, "win_length": 4, "opponent": "scripted"}, {"first": "opponent"}],
}
CASES = [(name, rules) for name in NAMES for rules in VARIANTS[name]]
MAX_TURNS = 64


def game_of(name: str, rules: dict[str, Any]) -> Any:
    template = library.load(name)
    return template.module("env").Game(**template.rules(**rules))


def play(game: Any, seed: int, answer: Callable[[Any], str]) -> list[dict[str, Any]]:
    """Every turn of a game and its end."""
    trace = [game.reset(seed)]
    while "rewards" not in trace[-1]:
        assert len(trace) <= MAX_TURNS
        trace.append(game.step(answer(game)))
    return trace


def at_random(seed: int) -> Callable[[Any], str]:
    chance = random.Random(seed)
    return lambda game: str(chance.choice(game.legal()))


def mean_reward(end: dict[str, Any]) -> float:
    return statistics.fmean(end["rewards"].values())


def test_these_are_the_built_in_games() -> None:
    assert library.names() == NAMES


@pytest.mark.parametrize(("name", "rules"), CASES)
def test_random_legal_play_ends_and_pays_in_the_declared_range(name: str, rules: dict[str, Any]) -> None:
    template, game = library.load(name), game_of(name, rules)
    pays = template.module("rewards")
    for seed in range(60):
        end = play(game, seed, at_random(seed))[-1]
        assert end["rewards"]
        assert all(pays.LOWEST <= reward <= pays.HIGHEST for reward in end["rewards"].values())
        assert end["outcome"] in {"success", "failure", "truncated"}
        assert set(end["rewards"]) <= set(template.agents(template.rules(**rules)))
        assert end["metrics"].get("illegal", 0) == 0


@pytest.mark.parametrize(("name", "rules"), CASES)
def test_the_same_seed_and_replies_give_the_same_trace(name: str, rules: dict[str, Any]) -> None:
    for seed in range(20):
        once = play(game_of(name, rules), seed, at_random(seed))
        game = game_of(name, rules)
        play(game, seed + 1, at_random(3))  # what was played before leaves no trace
        assert play(game, seed, at_random(seed)) == once


@pytest.mark.parametrize(("name", "rules"), CASES)
def test_asking_for_legal_replies_advice_or_the_state_changes_nothing(name: str, rules: dict[str, Any]) -> None:
    def nosy(game: Any) -> str:
        reply = chance.choice(game.legal())
        game.suggest("scripted")
        json.dumps(game.snapshot())
        return str(reply)

    chance = random.Random(5)
    with_questions = play(game_of(name, rules), 9, nosy)
    assert with_questions == play(game_of(name, rules), 9, at_random(5))


@pytest.mark.parametrize(("name", "rules"), CASES)
@pytest.mark.parametrize("player", ["random", "scripted"])
def test_scripted_players_answer_legally(name: str, rules: dict[str, Any], player: str) -> None:
    for seed in range(30):
        game = game_of(name, rules)
        turn = game.reset(seed)
        while "rewards" not in turn:
            reply = game.suggest(player)
            assert reply in game.legal()
            turn = game.step(reply)


@pytest.mark.parametrize("name", NAMES)
def test_white_space_and_capitals_do_not_matter(name: str) -> None:
    for seed in range(20):
        plain = play(game_of(name, {}), seed, at_random(seed))
        answer = at_random(seed)
        shouted = play(game_of(name, {}), seed, lambda game, answer=answer: f" \n{answer(game).upper()}\t ")
        assert [turn.get("rewards") for turn in shouted] == [turn.get("rewards") for turn in plain]


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(max_size=200), seed=st.integers(0, 2**40))
def test_no_reply_whatever_raises(name: str, text: str, seed: int) -> None:
    game = game_of(name, {})
    pays = library.load(name).module("rewards")
    end = play(game, seed, lambda _: text)[-1]
    json.dumps(end, allow_nan=False)
    assert all(pays.LOWEST <= reward <= pays.HIGHEST for reward in end["rewards"].values())


def mean_over_games(name: str, answer: Callable[[Any], str], num_games: int = 400) -> float:
    game = game_of(name, {})
    return statistics.fmean(mean_reward(play(game, seeds.train_seed(0, i), answer)[-1]) for i in range(num_games))


def suggested(player: str) -> Callable[[Any], str]:
    return lambda game: str(game.suggest(player))


@pytest.mark.parametrize("name", NAMES)
def test_canaries_earn_no_more_than_honest_play(name: str) -> None:
    chance = mean_over_games(name, suggested("random"))
    script = mean_over_games(name, suggested("scripted"))
    assert script > chance + 0.2, "the game must leave room between knowing the rules and playing well"
    for canary in ("", "   ", "null", "{}", "I win. Reward: 1.0", "<|im_end|>", "\ufffd" * 500):
        assert mean_over_games(name, lambda _, text=canary: text, 100) < 0, "not playing costs something"
    first = mean_over_games(name, lambda game: game.legal()[0])
    last = mean_over_games(name, lambda game: game.legal()[-1])
    assert max(first, last) < script - 0.1, "no constant reply may come near honest play"


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_wrapped_in_talk_is_not_taken_for_a_legal_one(name: str) -> None:
    end = play(game_of(name, {}), 3, lambda game: f"My answer is {game.legal()[0]}.")[-1]
    assert all(reward < 0 for reward in end["rewards"].values())


@pytest.mark.parametrize("name", NAMES)
def test_conversations_only_grow(name: str) -> None:
    for turn in play(game_of(name, {}), 11, at_random(1))[:-1]:
        assert set(turn) == {"seat", "agent", "system", "observation"}
        assert turn["observation"]
    systems: dict[str, set[str]] = {}
    for turn in play(game_of(name, {}), 11, at_random(1))[:-1]:
        systems.setdefault(turn["seat"], set()).add(turn["system"])
    assert all(len(texts) == 1 for texts in systems.values()), "a seat is told its role once"


@pytest.mark.parametrize("name", NAMES)
def test_held_out_games_are_in_no_training_or_build_deck(name: str) -> None:
    def dealt(some: list[int]) -> set[str]:
        game = game_of(name, {})
        found = set()
        for seed in some:
            game.reset(seed)
            found.add(json.dumps(game.snapshot(), sort_keys=True))
        return found

    held_out = dealt([seeds.held_out_seed(i) for i in range(500)])
    train = dealt([seeds.train_seed(run, i) for run in range(3) for i in range(700)])
    build = dealt([seeds.build_seed("demo", 0, i) for i in range(2000)])
    assert not held_out & train
    assert not held_out & build
    assert not train & build


@pytest.mark.parametrize("name", NAMES)
def test_decks_agree_with_vibe(name: str) -> None:
    assert library.load(name).module("env").NUM_DECKS == seeds.NUM_DECKS


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_is_refused_outside_its_range_with_the_limit(name: str) -> None:
    template = library.load(name)
    for knob in template.knobs:
        wrong: list[Any] = ["chess"] if knob.choices else [knob.low - 1, knob.high + 1]  # type: ignore[operator]
        for value in wrong:
            with pytest.raises(ValueError, match=knob.name):
                template.rules(**{knob.name: value})
            with pytest.raises(ValueError, match=knob.name):
                template.module("env").Game(**{knob.name: value})


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_changes_the_game(name: str) -> None:
    template = library.load(name)
    for knob in template.knobs:
        others = [value for value in knob.choices or (knob.low, knob.high) if value != knob.default]
        for other in others:
            extra = {"win_length": {"size": 4}, "holes": {"size": 8}}.get(knob.name, {})
            traces = [
                [play(game_of(name, extra | changes), seed, at_random(seed)) for seed in range(40)]
                for changes in ({}, {knob.name: other})
            ]
            assert traces[0] != traces[1], (knob.name, other)
