"""A curve as text, for the terminal. The picture is drawn from the database by `experiments_db.plots`."""

from __future__ import annotations

from collections.abc import Sequence

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot at (row, column) of a braille character, which is four rows of two."""
MARK = "●"

Point = tuple[float, float]
"""(update, reward)."""


def in_text(line: Sequence[Point], marks: Sequence[Point], *, width: int, height: int, last_x: float) -> list[str]:
    """A line in braille dots with marks on it, under an axis of rewards.

    Args:
        line: e.g. the training reward of every update.
        marks: e.g. the evaluations.
        width: characters of a row, axis included; at least 20.
        height: rows.
        last_x: right end of the axis, which starts at 0.
    Returns:
        The rows, top first, all of the given width. Nothing to draw gives empty axes.
    """
    values = [y for _, y in (*line, *marks)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low < 0.1:
        low, high = low - 0.05, high + 0.05
    columns = width - 8
    cells = [[0] * columns for _ in range(height)]

    def place(point: Point) -> tuple[int, int]:
        """(dot row from the top, dot column)."""
        x, y = point
        across = min(max(x / max(last_x, 1), 0), 1) * (columns * 2 - 1)
        down = (high - y) / (high - low) * (height * 4 - 1)
        return round(down), round(across)

    dots = [place(point) for point in line]
    for (row, column), (next_row, next_column) in zip(dots, dots[1:] or dots, strict=False):
        for across in range(column, max(next_column, column + 1)):
            part = (across - column) / max(next_column - column, 1)
            down = round(row + part * (next_row - row))
            cells[down // 4][across // 2] |= DOTS[down % 4][across % 2]
    rows = [[chr(BRAILLE + bits) if bits else " " for bits in row] for row in cells]
    for row, column in (place(mark) for mark in marks):
        rows[row // 4][column // 2] = MARK
    labels = {0: f"{high:6.2f}", height - 1: f"{low:6.2f}"}
    return [f"{labels.get(number, ''):>6} ┤{''.join(row)}" for number, row in enumerate(rows)]
