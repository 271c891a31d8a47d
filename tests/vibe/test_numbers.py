"""Numbers in the words of a description."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibe import numbers


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("15 stones", (15,)),
        ("four players", (4,)),
        ("twenty-one coins", (21,)),
        ("Twenty One coins", (21,)),
        ("a dozen eggs", (12,)),
        ("two hundred games", (200,)),
        ("1,000 rounds", (1000,)),
        ("a penalty of 0.25", (0.25,)),
        ("a reward of -1", (-1,)),
        ("a reward of −2", (-2,)),
        ("a reward of minus three", (-3,)),
        ("a 4x4 grid", (4, 4)),
        ("a 3 × 5 grid", (3, 5)),
        ("four by four cells", (4, 4)),
        ("an 8-by-8 board", (8, 8)),
        ("one to three matches", (1, 3)),
        ("take 1, 2 or 3", (1, 2, 3)),
        ("1-3 coins", (1, 3)),
    ],
)
def test_a_number_is_found_in_digits_and_in_words(text: str, values: tuple[float, ...]) -> None:
    (number,) = numbers.find(text)
    assert number.values == values
    assert number.text in text
    assert text[number.start : number.end] == number.text


def test_numbers_of_different_things_stay_apart() -> None:
    found = numbers.find("four players, three rounds and 15 stones on a 4x4 board")
    assert [number.values for number in found] == [(4,), (3,), (15,), (4, 4)]
    assert [number.is_size for number in found] == [False, False, False, True]


@pytest.mark.parametrize(
    "text",
    [
        "8/2",
        "8 / 2",
        "20½",
        "½",
        "²0",
        "20²",
        "10⁻³",
        "Ⅳ",
        "2^3",
        "10:30",
        "20k",
        "1e3",
        "1_000",
        "1.5.2",
        ".5",
        "2½x3",
    ],
)
def test_what_is_no_plain_number_is_listed_whole_and_not_read_in_part(text: str) -> None:
    sentence = f"The 7 robots take {text}. They win (4x4)"
    found = numbers.find(sentence)
    assert [number.values for number in found] == [(7,), (4, 4)]
    assert numbers.not_read(sentence, [(number.start, number.end) for number in found]) == [text]


def test_names_and_plain_numbers_are_not_listed() -> None:
    text = "player2 and v1.2 take 3-4 stones, 1,000 coins, ٣ eggs, a 3rd turn and 20% or 5. Then 6"
    found = numbers.find(text)
    assert [value for number in found for value in number.values] == [3, 4, 1000, 3, 3, 20, 5, 6]
    assert numbers.not_read(text, [(number.start, number.end) for number in found]) == []


@pytest.mark.parametrize("text", ["someone", "often", "weight", "tent", "none", "player2", "v1.2.3b"])
def test_a_number_inside_a_word_is_none(text: str) -> None:
    assert all(number.text in {"1.2", "3"} for number in numbers.find(text))


@given(st.text(max_size=200))
def test_every_number_stands_where_it_says(text: str) -> None:
    for number in numbers.find(text):
        assert text[number.start : number.end] == number.text
        assert number.values
