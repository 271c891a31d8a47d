"""The offline brain: which template a description means, what its numbers change, and what it says it can't do.

The descriptions were written before the mapper and are not tuned to it.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibe.brain import NoTemplateError, OfflineBrain
from vibe.errors import UsageError
from vibe.spec import GameSpec

ISSUE_SENTENCE = (
    "Who is the spy: four players get a word, one of them a similar one; everyone describes it, then all vote"
)

PARAPHRASES = [
    ("spy", ISSUE_SENTENCE),
    (
        "spy",
        "There is an undercover agent at the table! Five friends each receive a secret word. The odd one out got a "
        "slightly different word. Take turns giving a one-word clue, then everybody points at who they think has "
        "the other word.",
    ),
    (
        "spy",
        "A party game about hidden identities: civilians share the same noun, the impostor sees a related noun. "
        "After one round of hints the group eliminates a suspect by majority vote.",
    ),
    ("tictactoe", "Play noughts and crosses on a 3x3 board against someone who moves at random."),
    (
        "tictactoe",
        "Two players alternate placing X and O; whoever first gets three in a row, column or diagonal wins.",
    ),
    ("tictactoe", "I want an agent that hardly ever loses at tic tac toe when it goes first"),
    (
        "gridwalk",
        "A robot starts in the corner of a 4x4 grid and has to walk to the goal without falling into holes.",
    ),
    (
        "gridwalk",
        "Find your way across a frozen lake: step up, down, left or right, avoid the holes in the ice, and reach the "
        "flag in at most 8 moves.",
    ),
    (
        "gridwalk",
        "Maze navigation. The walker sees a small map with pits and an exit. It picks a direction each turn; stepping "
        "in a pit ends it.",
    ),
    ("nim", "Take turns removing one to three matchsticks from a pile of 15; whoever takes the last one wins."),
    ("nim", "The game of Nim: on your turn take some stones off the heap, and try to be the one who empties it."),
    (
        "nim",
        "There are eleven coins on the table. Each player may grab 1, 2 or 3 of them per turn, and the one who picks "
        "up the final coin is the winner.",
    ),
]

FIT_NONE = [
    "Texas hold'em poker with six players, blinds of 5 and 10, and a round of betting after each card.",
    "Chess: checkmate the opponent's king on an 8x8 board, with castling and en passant.",
    "Sort a list of ten numbers into ascending order using as few swaps as possible.",
    "Two companies negotiate the price of a shipment; each has a secret limit and they trade offers until they agree.",
    "Fill in a crossword: every clue gives a word, and the words cross each other on the board.",
    "asdf qwer zxcv ;;; 12",
]

MEANINGLESS = ["", "   \n", "???", "🙂🙂", "a game", "12", "the of and"]


@pytest.mark.parametrize(("template", "description"), PARAPHRASES)
def test_a_paraphrase_goes_to_its_template(template: str, description: str) -> None:
    assert OfflineBrain().read(description).template == template


@pytest.mark.parametrize("description", FIT_NONE)
def test_what_fits_no_template_is_refused_with_the_nearest_named(description: str) -> None:
    with pytest.raises(NoTemplateError) as refused:
        OfflineBrain().read(description)
    assert refused.value.nearest in {"spy", "tictactoe", "gridwalk", "nim"}
    message = str(refused.value)
    assert refused.value.nearest in message
    for template in ("spy", "tictactoe", "gridwalk", "nim"):
        assert template in message, "the message says what the brain can do"


@pytest.mark.parametrize("description", MEANINGLESS)
def test_a_meaningless_description_is_refused_with_what_can_be_said(description: str) -> None:
    with pytest.raises(NoTemplateError) as refused:
        OfflineBrain().read(description)
    assert "tictactoe" in str(refused.value)
    assert "describe" in str(refused.value).lower()


def values_used(spec: GameSpec) -> set[object]:
    """Rule values that a requirement of the spec ties to a sentence."""
    tied = {rule for requirement in spec.requirements for rule in requirement.rules}
    return {spec.rules[rule] for rule in tied}


NUMBERS_USED = [
    ("spy", ISSUE_SENTENCE, 4),
    ("spy", "Who is the spy, with five players", 5),
    ("spy", "Undercover: 6 people get a word, one gets a similar word, they describe it and vote the spy out.", 6),
    ("nim", "Nim with a heap of 12 stones, taking the last stone wins.", 12),
    ("nim", "Take turns removing one to four matchsticks from a pile; whoever takes the last one wins.", 4),
    ("nim", "There are fifteen coins. On each turn a player takes up to 3 coins; the last coin wins.", 15),
    ("gridwalk", "A robot walks across a 4x4 grid to the goal and must not step into holes.", 4),
    ("gridwalk", "Walk over a frozen lake of four by four cells to the goal; avoid the holes.", 4),
    ("gridwalk", "Grid walk to the exit with three pits on the map.", 3),
    ("gridwalk", "Walk through the grid to the goal in at most 9 moves, avoiding holes.", 9),
]


@pytest.mark.parametrize(("template", "description", "number"), NUMBERS_USED)
def test_a_stated_number_becomes_a_rule_tied_to_its_sentence(template: str, description: str, number: int) -> None:
    spec = OfflineBrain().read(description)
    assert spec.template == template
    assert number in values_used(spec), spec.rules


NUMBERS_USED_OR_NAMED = [
    ("Who is the spy with 40 players; all describe their word and vote.", "40"),
    ("Who is the spy: four players, three rounds of descriptions, then a vote.", "three"),
    ("Tic-tac-toe on a 7x7 board, five in a row wins.", "7x7"),
    ("Tic-tac-toe on a 7x7 board, five in a row wins.", "five"),
    ("Noughts and crosses, best of 9 games.", "9"),
    ("Nim with three heaps of stones; take as many stones as you like from one heap.", "three"),
    ("A pile of 500 stones, take one or two per turn, whoever takes the last stone wins.", "500"),
    ("Nim with minus 20 stones", "minus 20"),
    ("Nim with 40/2 stones", "40/2"),
    ("Nim with 20½ stones", "20½"),
    ("Nim with ²0 stones", "²0"),
    (f"Nim with 1{'0' * 400} stones", "0 stones"),
    ("A robot walks through a 30x30 grid with holes to the goal.", "30x30"),
    ("A frozen lake walk to the goal with holes and a penalty of 0.25 for every step.", "0.25"),
    ("Who is the spy for four players; each has 45 seconds to describe the word, then they vote.", "45"),
]


@pytest.mark.parametrize(("description", "number"), NUMBERS_USED_OR_NAMED)
def test_a_stated_number_is_a_rule_or_is_named_as_not_used(description: str, number: str) -> None:
    spec = OfflineBrain().read(description)
    as_rule = any(number in requirement.text and requirement.rules for requirement in spec.requirements)
    as_unused = any(number in note.text and note.reason for note in spec.unused)
    assert as_rule or as_unused, (spec.requirements, spec.unused)


def test_a_number_out_of_range_is_not_bent_into_the_range() -> None:
    spec = OfflineBrain().read("Who is the spy with 40 players; all describe their word and vote.")
    (note,) = [note for note in spec.unused if "40" in note.text]
    assert 40 not in spec.rules.values()
    assert "players" in note.reason
    assert any(character.isdigit() for character in note.reason.replace("40", "")), "the reason states the limits"


def test_characters_that_steer_a_terminal_are_spaces() -> None:
    (sentence,) = OfflineBrain().read("Nim\x1b with\x07 20\x9b stones").source_sentences
    assert sentence == "Nim  with  20  stones"


def test_a_description_in_another_encoding_is_refused() -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        OfflineBrain().read("tic-tac-toe \udcff")


def test_every_requirement_points_at_a_sentence_kept_word_for_word() -> None:
    for _, description in PARAPHRASES:
        spec = OfflineBrain().read(description)
        assert "".join(spec.source_sentences).replace(" ", "") == description.replace(" ", "")
        for requirement in spec.requirements:
            assert requirement.text in spec.source_sentences[requirement.sentence]


def test_a_sentence_nobody_understood_is_listed() -> None:
    spec = OfflineBrain().read(
        "Play tic-tac-toe against a random opponent. The winner gets a pony. After each game sing the national anthem."
    )
    listed = [note.text for note in spec.unused]
    assert any("pony" in text for text in listed)
    assert any("anthem" in text for text in listed)


def test_two_different_numbers_for_one_rule_are_not_silently_merged() -> None:
    spec = OfflineBrain().read("Who is the spy with four players. There are five players. They describe and vote.")
    assert spec.rules["players"] == 4 if "players" in spec.rules else 4 in spec.rules.values()
    assert any("five" in note.text for note in spec.unused)


def test_reading_twice_gives_the_same_spec() -> None:
    for _, description in PARAPHRASES:
        assert OfflineBrain().read(description) == OfflineBrain().read(description)


def test_capitals_and_spaces_do_not_matter_to_the_choice() -> None:
    for template, description in PARAPHRASES:
        assert OfflineBrain().read(f"  {description.upper()}  ").template == template


@given(st.text(max_size=300))
def test_any_text_is_mapped_or_refused_and_never_crashes(text: str) -> None:
    try:
        spec = OfflineBrain().read(text)
    except NoTemplateError:
        return
    assert GameSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_spec_refuses_fields_it_does_not_know() -> None:
    spec = OfflineBrain().read(ISSUE_SENTENCE)
    with pytest.raises(ValueError, match="extra"):
        GameSpec.model_validate({**spec.model_dump(), "mood": "cheerful"})


@pytest.mark.parametrize(
    ("description", "asked", "instead"),
    [
        ("Nim with 15 stones; whoever takes the last stone loses.", "last stone loses", "last stone wins"),
        ("Nim with three heaps.", "three heaps", "heaps = 1"),
        (
            "A robot walks over slippery ice on a frozen lake to the goal, avoiding holes.",
            "slippery",
            "where it is told",
        ),
        ("Who is the spy with two spies; all describe and vote.", "two spies", "spies = 1"),
        ("Tic-tac-toe in 3D, three in a row wins.", "3D", "flat"),
    ],
)
def test_what_the_game_does_otherwise_is_said(description: str, asked: str, instead: str) -> None:
    notes = OfflineBrain().read(description).unused
    assert any(note.text == asked and instead in note.reason for note in notes), notes


@pytest.mark.parametrize(
    ("description", "rule", "value"),
    [
        ("Tic-tac-toe where the opponent moves first.", "first", "opponent"),
        ("Tic-tac-toe; our player moves first.", "first", "policy"),
        ("Tic-tac-toe against a good opponent.", "opponent", "scripted"),
        ("Train a good player of tic-tac-toe against a random opponent.", "opponent", "random"),
        ("A robot starts in the upper left corner of a grid and walks to the goal, avoiding holes.", "start", "corner"),
        ("Two players take turns taking 1-3 stones; whoever takes the last stone wins.", "max_take", 3),
    ],
)
def test_a_choice_goes_by_the_words_beside_it(description: str, rule: str, value: object) -> None:
    assert OfflineBrain().read(description).rules[rule] == value


def test_a_number_that_is_so_anyway_is_not_called_unused() -> None:
    spec = OfflineBrain().read("Nim for two players with 12 stones.")
    assert not spec.unused
    assert any(item.text == "two players" and not item.rules for item in spec.requirements)


@pytest.mark.parametrize(
    ("description", "text", "rule"),
    [
        ("A robot walks over a 4x4 grid to the goal, starting in the corner, avoiding holes.", "corner", "start"),
        ("Tic-tac-toe; the opponent is perfect.", "opponent", "opponent"),
        ("Nim where the policy starts.", "starts", "first"),
        ("Tic-tac-toe against a random opponent. It should be strong.", "strong", "opponent"),
    ],
)
def test_a_choice_that_sets_nothing_is_listed(description: str, text: str, rule: str) -> None:
    notes = OfflineBrain().read(description).unused
    assert any(note.text == text and rule in note.reason for note in notes), notes


def test_a_choice_that_another_sentence_makes_is_not_called_unused() -> None:
    assert not OfflineBrain().read("Tic-tac-toe against someone. The opponent moves at random.").unused


def test_a_word_that_another_choice_was_read_from_is_used() -> None:
    assert not OfflineBrain().read("Nim; the opponent starts.").unused


def test_the_name_of_the_game_is_no_choice() -> None:
    assert not OfflineBrain().read("Who is the spy with five players.").unused


def test_undercover_is_a_name_of_the_game() -> None:
    spec = OfflineBrain().read("Undercover for 5 players")
    assert (spec.template, spec.rules["players"]) == ("spy", 5)
