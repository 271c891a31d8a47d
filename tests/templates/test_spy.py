"""Who is the spy: what seats know, what votes do, what saying the word costs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vibe import library

ENV = library.load("spy").module("env")
REWARDS = library.load("spy").module("rewards")
PLAYERS = library.load("spy").module("players")


def deal(
    word: str = "apple", spy_word: str = "pear", spy_seat: int = 4, clues: list[str] | None = None, **rules: Any
) -> tuple[Any, Any]:
    """A game with these secrets whose spy gives these clues, its word's own where None; and its first turn."""

    class Dealt(ENV.Game):  # type: ignore[misc, name-defined]
        def _next(self) -> Any:
            if len(self.queue) == len(self.seats) * (self.rounds + 1):
                self.word, self.spy_word, self.spy_seat = word, spy_word, spy_seat
                self.luck = {"clues": clues or ENV.clues_of(spy_word), "votes": list(self.seats)}
            return super()._next()

    game = Dealt(**rules)
    return game, game.reset(0)


def test_a_civilian_is_told_its_own_word_and_clues_only() -> None:
    _, turn = deal()
    assert turn["system"] == (
        "Your word is apple, one of 4 players has another word. Your clues: cider/core/crisp/fruit/pie/red. "
        "Give one. Vote for the clue that does not fit your word."
    )
    assert turn["observation"] == "clue?"


def test_clues_of_a_round_are_heard_after_the_round() -> None:
    game, turn = deal()
    for clue in ("core", "pie", "red"):
        assert turn["observation"] == "clue?"
        turn = game.step(clue)
    assert turn["observation"] == "pie/red/bell\nvote?"
    turn = game.step("bell")
    assert turn["observation"] == "core/red/bell\nvote?"


def test_a_second_round_hears_the_first() -> None:
    game, turn = deal(rounds=2)
    for clue in ("core", "pie", "red"):
        turn = game.step(clue)
    assert turn["observation"] == "pie/red/bell\nclue?"
    for clue in ("core", "core", "core"):
        turn = game.step(clue)
    assert turn["observation"] == "core/core/fruit\nvote?"
    assert game.legal() == ["pie", "red", "bell", "core", "fruit"]


def finish(votes: tuple[str, str, str], clues: tuple[str, str, str] = ("core", "pie", "red")) -> dict[str, Any]:
    game, turn = deal()
    for reply in (*clues, *votes):
        turn = game.step(reply)
    return dict(turn)


def test_the_spy_out_pays_the_team_and_the_own_vote_each() -> None:
    # The scripted spy votes for player 1's clue, which does not fit its word.
    assert finish(("bell", "bell", "bell"))["rewards"] == {"seat-1": 1.0, "seat-2": 1.0, "seat-3": 1.0}
    assert finish(("bell", "bell", "core"))["rewards"] == {"seat-1": 0.5, "seat-2": 0.5, "seat-3": 0.0}, "2 to 2: a tie"
    assert finish(("bell", "bell", "pie"))["rewards"] == {"seat-1": 1.0, "seat-2": 1.0, "seat-3": 0.5}
    assert finish(("pie", "core", "core"))["rewards"] == {"seat-1": 0.0, "seat-2": 0.0, "seat-3": 0.0}


def test_a_vote_counts_against_every_other_player_who_gave_the_clue() -> None:
    end = finish(("pie", "red", "pie"), clues=("pie", "pie", "red"))
    # Player 1 accuses 2; player 2 accuses 3; player 3 accuses 1 and 2; the spy accuses 1.
    assert [note["note"] for note in end["record"]][4:] == [
        "votes against seat-2",
        "votes against seat-3",
        "votes against seat-1 and seat-2",
        "votes against seat-1 and seat-2, the spy",
    ]


def test_a_reply_that_is_not_allowed_costs_a_quarter_and_counts_as_nothing() -> None:
    end = finish(("core", "bell", "bell"), clues=("bell", "pie", "red"))
    assert end["rewards"]["seat-1"] == 0.5 - 0.25 - 0.25, "another word's clue, a vote for one nobody gave"
    assert end["metrics"]["illegal"] == 2.0


def test_a_silent_seat_is_heard_as_silent() -> None:
    game, _ = deal()
    for reply in ("nothing of use", "pie", "red", "bell"):
        turn = game.step(reply)
    assert turn["observation"].startswith("-/")
    assert "-" in game.legal()


@pytest.mark.parametrize(
    "leak",
    [
        "apple", "APPLE", "apples", "Apple!", "my word is apple", "a-p-p-l-e", "a p p l e", "a.p.p.l.e", "ápple",
        "apple" * 50, "ａｐｐｌｅ", "a\u200bpple", "red apple", "pie (apple)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("when", ["clue", "vote"])
def test_saying_the_word_costs_everything(leak: str, when: str) -> None:
    game, turn = deal()
    for reply in (leak, "pie", "red", "bell", "bell") if when == "clue" else ("core", "pie", "red", leak, "pie", "red"):
        assert "rewards" not in turn
        turn = game.step(reply)
    end = turn
    assert end["rewards"]["seat-1"] == REWARDS.SAID_WORD
    assert end["metrics"]["fouls"] == 1.0


def test_who_said_the_word_is_out_and_is_not_asked_again() -> None:
    game, _ = deal()
    game.step("apple")
    game.step("pie")
    turn = game.step("red")
    assert turn["seat"] == "seat-2"
    assert turn["observation"] == "-/red/bell\nvote?"


@pytest.mark.parametrize("word", sorted(ENV.WORDS))
def test_no_clue_holds_its_word_and_pairs_share_exactly_one(word: str) -> None:
    words = list(ENV.WORDS)
    partner = words[words.index(word) ^ 1]
    clues = ENV.clues_of(word)
    assert len(set(clues)) == len(clues) == 6
    assert len(set(clues) & set(ENV.clues_of(partner))) == 1
    assert not any(ENV.says(word, clue) or ENV.says(partner, clue) for clue in clues)
    assert clues == sorted(clues), "the order of a list tells nothing"


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("spy_seat", [1, 2, 4])
def test_another_seats_secret_never_reaches_an_observation(spy_seat: int, rounds: int) -> None:
    """Two deals differ in the spy's word alone; where the same clues are said, civilians see the same to the byte."""

    def watched(spy_word: str) -> list[Any]:
        game, turn = deal(spy_word=spy_word, spy_seat=spy_seat, clues=["sweet"] * 6, rounds=rounds)
        chance, seen = random.Random(1), []
        while "rewards" not in turn:
            seen.append((turn["seat"], turn["agent"], turn["system"], turn["observation"]))
            turn = game.step(chance.choice(game.legal()))
        return seen

    assert watched("pear") == watched("knight")


def test_observations_name_no_role_and_no_other_word() -> None:
    for seed in range(200):
        game = ENV.Game()
        turn = game.reset(seed)
        while "rewards" not in turn:
            text = turn["system"] + turn["observation"]
            assert "spy" not in text
            assert f" {game.spy_word}" not in text
            assert "scripted" not in text
            turn = game.step(game.suggest("random"))


def test_a_vote_is_not_seen_before_the_game_is_over() -> None:
    def second_vote(first: str) -> str:
        game, turn = deal()
        for reply in ("core", "pie", "red", first):
            turn = game.step(reply)
        return str(turn["observation"])

    assert second_vote("pie") == second_vote("bell")


def test_the_spy_plays_by_its_own_word_alone() -> None:
    said = [(1, "core"), (2, "fruit"), (3, "green"), (4, "bell")]
    assert PLAYERS.vote_by_clues(4, ENV.clues_of("pear"), said, [3, 2, 1, 4]) == "core"
    assert PLAYERS.vote_by_clues(1, ENV.clues_of("apple"), said, [1, 2, 4, 3]) == "bell"
    assert PLAYERS.vote_by_clues(1, ENV.clues_of("apple"), [(1, "core"), (2, "pie"), (3, "red")], [1, 3, 2]) == "red"


def test_every_seat_is_its_own_agent_and_the_spys_seat_none() -> None:
    for seed in range(50):
        game = ENV.Game()
        turn = game.reset(seed)
        asked = set()
        while "rewards" not in turn:
            assert turn["agent"] == turn["seat"]
            asked.add(turn["agent"])
            turn = game.step(game.suggest("random"))
        assert asked == set(turn["rewards"]) == {f"seat-{seat}" for seat in range(1, 5)} - {f"seat-{game.spy_seat}"}


def test_the_spys_word_is_the_other_one_of_the_pair() -> None:
    words = list(ENV.WORDS)
    pairs = {frozenset(words[start : start + 2]) for start in range(0, len(words), 2)}
    game, dealt = ENV.Game(), set()
    for seed in range(400):
        game.reset(seed)
        assert {game.word, game.spy_word} in pairs
        dealt.add((game.word, game.spy_word))
    assert len(dealt) == len(words), "each word of a pair is the civilians' at times"


def test_every_seat_is_the_spy_equally_often() -> None:
    game = ENV.Game()
    counts = [0] * 4
    for seed in range(4000):
        game.reset(seed)
        counts[game.spy_seat - 1] += 1
    assert min(counts) > 900
