"""Slots: the only way a number gets into a report.

    {{e:contrast/group_size=8/look1.value|signed}}     a field of the estimate with this key
    {{e:contrast/group_size=8/look1.ci}}               its interval
    {{f:episodes}}                                     a fact of the plan or a count of rows

A text with slots is resolved against rows; one that names no row is an error, so a report can't say what no row says.
Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, assert_never

from a3r.errors import ReportError

SLOT = re.compile(r"\{\{(?P<kind>[ef]):(?P<name>[^{}|]+?)(?:\|(?P<how>[a-z]+))?\}\}")
MINUS = "−"


class Field(StrEnum):
    """What a slot can ask of an estimate."""

    VALUE = "value"
    CI = "ci"
    P = "p"
    P_ADJ = "p_adj"
    LEVEL = "level"
    N_SEEDS = "n_seeds"
    N_ITEMS = "n_items"
    SE_SEED = "se_seed"
    SE_EVAL = "se_eval"


@dataclass(frozen=True, slots=True)
class Number:
    """An estimate as slots read it, from its row or from a computation."""

    key: str
    estimand: str
    method: str
    value: float | None
    unit: str
    bounds: tuple[float | None, float | None]
    """Ends of the interval; None where there is no bound."""
    level: float
    n_seeds: int
    n_items: int
    p: float | None
    p_adj: float | None
    se_seed: float | None
    se_eval: float | None
    inputs_sha: str | None
    params: Mapping[str, Any] = field(default_factory=dict)
    """What else its row says, such as `censored`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of resolved text."""

    text: str
    estimate: str | None = None
    """Key of the estimate it comes from; None for plain text and facts."""


@dataclass(frozen=True, slots=True)
class Source:
    """What slots are resolved against."""

    estimates: Mapping[str, Number]
    facts: Mapping[str, str]
    """Texts that come from the plan or from rows other than estimates."""


def resolve(text: str, source: Source) -> tuple[Piece, ...]:
    """The text with every slot filled in.

    Raises:
        ReportError: a slot names no row, no field or no way to write it.
    """
    pieces: list[Piece] = []
    end = 0
    for match in SLOT.finditer(text):
        if match.start() > end:
            pieces.append(Piece(text[end : match.start()]))
        pieces.append(_fill(match["kind"], match["name"], match["how"], source))
        end = match.end()
    if end < len(text):
        pieces.append(Piece(text[end:]))
    return tuple(pieces)


def filled(text: str, source: Source) -> str:
    """The text with every slot filled in, as one string."""
    return "".join(piece.text for piece in resolve(text, source))


def names(text: str) -> list[str]:
    """Keys of the estimates that a text quotes, in order, each once."""
    keys = [match["name"].rpartition(".")[0] for match in SLOT.finditer(text) if match["kind"] == "e"]
    return list(dict.fromkeys(keys))


def without_slots(text: str) -> str:
    """The text as it was written, slots taken out."""
    return SLOT.sub("", text)


def _fill(kind: str, name: str, how: str | None, source: Source) -> Piece:
    if kind == "f":
        if name not in source.facts:
            raise ReportError(f"the slot {{{{f:{name}}}}} names no fact of this study")
        return Piece(source.facts[name])
    key, _, asked = name.rpartition(".")
    number = source.estimates.get(key)
    if number is None:
        raise ReportError(f"the slot {{{{e:{name}}}}} names no estimate of this study")
    if asked not in list(Field):
        raise ReportError(f"the slot {{{{e:{name}}}}} asks for {asked!r}; an estimate has {', '.join(Field)}")
    return Piece(_write(number, Field(asked), how), key)


def _write(number: Number, asked: Field, how: str | None) -> str:
    match asked:
        case Field.VALUE:
            return amount(number.value, number.unit, how)
        case Field.CI:
            low, high = number.bounds
            return (
                f"[{amount(low, number.unit, how, missing=MINUS + '∞')}, {amount(high, number.unit, how, missing='∞')}]"
            )
        case Field.P:
            return p_value(number.p)
        case Field.P_ADJ:
            return p_value(number.p_adj)
        case Field.LEVEL:
            return f"{number.level * 100:.4g}%"
        case Field.SE_SEED:
            return amount(number.se_seed, number.unit, how)
        case Field.SE_EVAL:
            return amount(number.se_eval, number.unit, how)
        case Field.N_SEEDS:
            return str(number.n_seeds)
        case Field.N_ITEMS:
            return str(number.n_items)
        case never:
            assert_never(never)


def amount(value: float | None, unit: str, how: str | None = None, *, missing: str = "–") -> str:
    """A number in its unit: rewards to three decimals, episodes whole, shares in percent.

    Args:
        how: `signed` writes the sign of a gain too; `abs` leaves any sign out.
        missing: what stands for None.
    """
    if value is None or not math.isfinite(value):
        return missing
    if how == "abs":
        value = abs(value)
    match unit:
        case "share":
            text = f"{abs(value) * 100:.0f}%"
        case "episodes":
            text = f"{abs(value):.0f}"
        case _:
            text = f"{abs(value):.3f}"
    is_zero = not re.search(r"[1-9]", text)
    if value < 0 and not is_zero:
        return MINUS + text
    return f"+{text}" if how == "signed" and not is_zero else text


def p_value(value: float | None) -> str:
    """A p-value; below a thousandth only that."""
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
