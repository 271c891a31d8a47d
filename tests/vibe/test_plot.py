"""The curve in the terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vibe.plot import MARK, in_text

points = st.lists(st.tuples(st.floats(0, 40), st.floats(-1, 1)), max_size=50).map(sorted)


def test_a_rising_line_goes_from_the_bottom_left_to_the_top_right() -> None:
    rows = in_text([(0, 0.0), (10, 1.0)], [], width=28, height=5, last_x=10)
    assert rows[-1][8] != " "
    assert rows[-1][-1] == " "
    assert rows[0][8] == " "
    assert rows[0][-2] != " "
    assert rows[0].startswith("  1.00 ┤")
    assert rows[-1].startswith("  0.00 ┤")


def test_marks_stand_where_they_were_measured() -> None:
    rows = in_text([], [(0, 0.2), (10, 0.8)], width=28, height=5, last_x=10)
    assert rows[-1][8] == MARK
    assert rows[0][-1] == MARK


def test_nothing_measured_yet_is_an_empty_frame() -> None:
    assert all(row.strip(" ┤.0123456789-") == "" for row in in_text([], [], width=30, height=4, last_x=40))


@given(points, points)
def test_any_curve_fits_its_frame(line: list[tuple[float, float]], marks: list[tuple[float, float]]) -> None:
    rows = in_text(line, marks, width=40, height=8, last_x=40)
    assert [len(row) for row in rows] == [40] * 8
