"""The rules of each game, on games worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from vibe import library


def game_of(name: str, **rules: Any) -> Any:
    template = library.load(name)
    return template.module("env").Game(**template.rules(**rules))


# Tic-tac-toe


def board_game(luck: list[int], *, first: str = "policy", **rules: Any) -> Any:
    """A game whose opponent prefers cells in this order, counted from 0."""
    game = game_of("tictactoe", first=first, **rules)
    game.reset(0)
    game.luck = luck
    return game


def test_three_in_a_row_win() -> None:
    game = board_game([3, 4, 8, 5, 6, 7, 0, 1, 2])
    assert game.step("1")["observation"] == "X|2|3\nO|5|6\n7|8|9"
    assert game.step("2")["observation"] == "X|X|3\nO|O|6\n7|8|9"
    end = game.step("3")
    assert end["rewards"] == {"player": 1.0}
    assert end["outcome"] == "success"


def test_the_opponents_three_in_a_row_lose() -> None:
    game = board_game([3, 4, 5, 0, 1, 2, 6, 7, 8])
    game.step("1")
    game.step("2")
    end = game.step("9")
    assert end["rewards"] == {"player": 0.0}
    assert [move["note"] for move in end["record"]][-1] == "X|X|3\nO|O|O\n7|8|X"


def test_a_full_board_is_half_a_win() -> None:
    game = board_game([4, 2, 3, 7, 0, 1, 5, 6, 8])
    for move in ("1", "7", "6", "2"):
        assert "rewards" not in game.step(move)
    end = game.step("9")
    assert end["rewards"] == {"player": 0.5}


@pytest.mark.parametrize("reply", ["1", "0", "10", "01", "one", "", "5 "])
def test_only_the_number_of_a_free_cell_is_a_move(reply: str) -> None:
    game = board_game([3, 4, 5, 0, 1, 2, 6, 7, 8])
    game.step("1")
    after = game.step(reply)
    if reply == "5 ":
        assert "rewards" not in after
    else:
        assert after["rewards"] == {"player": -0.5}


def test_a_win_length_below_the_size_counts_everywhere_on_the_board() -> None:
    lines = library.load("tictactoe").module("env").winning_lines(4, 3)
    assert len(lines) == 24  # 8 in rows, 8 in columns, 4 + 4 in diagonals
    assert (5, 10, 15) in lines
    assert (7, 10, 13) in lines


def test_the_scripted_player_wins_before_it_blocks() -> None:
    play = library.load("tictactoe").module("players").play_scripted
    lines = library.load("tictactoe").module("env").winning_lines(3, 3)
    both_threaten = ["X", "X", ".", "O", "O", ".", ".", ".", "."]
    assert play(both_threaten, "X", "O", lines, range(9)) == 2
    assert play(both_threaten, "O", "X", lines, range(9)) == 5
    only_theirs = [".", "X", ".", "O", "O", ".", ".", ".", "X"]
    assert play(only_theirs, "X", "O", lines, range(9)) == 5


def test_a_random_opponent_takes_every_free_cell_equally_often() -> None:
    game = game_of("tictactoe", first="opponent")
    counts = [0] * 9
    for seed in range(9000):
        game.reset(seed)
        counts[game.cells.index("O")] += 1
    assert min(counts) > 850
    assert max(counts) < 1150


# Nim


def test_whoever_takes_the_last_stone_wins() -> None:
    game = game_of("nim", stones=4, first="policy")
    game.reset(0)
    game.luck = [1, 2, 1, 1]
    assert game.step("1")["observation"] == "They take 1. 2 left."
    assert game.step("2")["rewards"] == {"player": 1.0}


def test_the_opponent_wins_with_the_last_stone_too() -> None:
    game = game_of("nim", stones=4, first="policy")
    game.reset(0)
    game.luck = [1, 2, 3, 1]
    end = game.step("1")
    assert end["rewards"] == {"player": 0.0}
    assert [move["text"] for move in end["record"]] == ["1", "3"]


@pytest.mark.parametrize("reply", ["0", "4", "-1", "1.0", "two", ""])
def test_no_more_than_allowed_can_be_taken(reply: str) -> None:
    game = game_of("nim", first="policy")
    game.reset(0)
    assert game.step(reply)["rewards"] == {"player": -0.5}


def test_no_more_than_is_left_can_be_taken() -> None:
    game = game_of("nim", stones=4, first="policy")
    game.reset(0)
    game.luck = [1, 1, 1, 1]
    game.step("1")
    assert game.legal() == ["1", "2"]
    assert game.step("3")["rewards"] == {"player": -0.5}


@pytest.mark.parametrize(("left", "best"), [(1, 1), (2, 2), (3, 3), (5, 1), (6, 2), (7, 3), (15, 3), (13, 1)])
def test_the_script_leaves_a_multiple_of_four(left: int, best: int) -> None:
    assert library.load("nim").module("players").play_scripted(left, 3, 2) == best


def test_the_script_against_itself_is_won_by_who_moves_first_from_15() -> None:
    game = game_of("nim", opponent="scripted", first="policy")
    for seed in range(20):
        turn = game.reset(seed)
        while "rewards" not in turn:
            turn = game.step(game.suggest("scripted"))
        assert turn["rewards"] == {"player": 1.0}


# Grid walk


def walk(start: tuple[int, int], goal: tuple[int, int], pits: list[tuple[int, int]], moves: int = 6) -> Any:
    game = game_of("gridwalk", moves=moves)
    game.reset(0)
    game.place, game.goal, game.pits, game.left = start, goal, pits, moves
    return game


def test_a_walk_to_the_goal_pays() -> None:
    game = walk((0, 0), (2, 1), [(1, 0)])
    assert game.step("right")["observation"] == "goal 3,2 you 1,2"
    game.step("down")
    end = game.step("down")
    assert end["rewards"] == {"walker": 1.0}
    assert end["outcome"] == "success"


def test_a_hole_ends_the_walk() -> None:
    end = walk((0, 0), (2, 1), [(1, 0)]).step("down")
    assert end["rewards"] == {"walker": 0.0}
    assert end["metrics"]["fell"] == 1.0


def test_a_walk_ends_when_its_moves_are_used_up() -> None:
    game = walk((0, 0), (2, 2), [], moves=2)
    game.step("right")
    end = game.step("left")
    assert end["outcome"] == "truncated"
    assert end["rewards"] == {"walker": 0.0}


@pytest.mark.parametrize("reply", ["up", "left", "north", "", "right right"])
def test_off_the_grid_is_no_move(reply: str) -> None:
    assert walk((0, 0), (2, 2), []).step(reply)["rewards"] == {"walker": -0.5}


@pytest.mark.parametrize("rules", [{}, {"size": 5, "holes": 8, "moves": 8}, {"holes": 0, "moves": 1}])
def test_every_map_has_a_safe_way_within_the_limit(rules: dict[str, Any]) -> None:
    game = game_of("gridwalk", **rules)
    for seed in range(100):
        turn = game.reset(seed)
        assert len(game.pits) == game.holes
        while "rewards" not in turn:
            turn = game.step(game.suggest("scripted"))
        assert turn["rewards"] == {"walker": 1.0}


def test_the_first_observation_alone_names_the_holes() -> None:
    game = walk((1, 1), (2, 2), [(0, 0), (0, 2)])
    assert game._ask()["observation"] == "holes 1,1 1,3\ngoal 3,3 you 2,2"
    assert "holes" not in game.step("left")["observation"]


def test_random_steps_are_legal_and_different() -> None:
    game = game_of("gridwalk")
    game.reset(1)
    assert {game.suggest("random") for _ in range(50)} == set(game.legal())
