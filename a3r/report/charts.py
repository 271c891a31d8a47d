"""Charts as SVG, drawn here so that they are small, sharp at any size, and follow a reader's dark mode. Pure.

Every run is shown: thin lines and dots are seeds, thick lines are means, bands and bars are intervals over seeds. The
colours are Okabe and Ito's, told apart by colour-blind readers and in grey.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle, pairwise

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
WIDTH = 760
STYLE = (
    "<style>"
    ".a3r{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    ".a3r .ink{fill:#1f2430}.a3r .dim{fill:#667085}.a3r .axis{stroke:#98a2b3;stroke-width:1}"
    ".a3r .grid{stroke:#e4e7ec;stroke-width:1}.a3r .zero{stroke:#475467;stroke-width:1.25}"
    ".a3r .safe{fill:#667085;opacity:.13}.a3r .halo{stroke:#fff;stroke-width:1.5}"
    "@media (prefers-color-scheme:dark){.a3r .ink{fill:#e6e9ef}.a3r .dim{fill:#98a2b3}.a3r .axis{stroke:#667085}"
    ".a3r .grid{stroke:#2b3240}.a3r .zero{stroke:#98a2b3}.a3r .safe{fill:#98a2b3}.a3r .halo{stroke:#12161f}}"
    "</style>"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One arm's learning curve."""

    label: str
    episodes: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """Lower end of the interval over seeds; the mean itself where there is none."""
    high: tuple[float, ...]
    seeds: tuple[tuple[str, tuple[int, ...], tuple[float, ...]], ...]
    """Name, episodes and rewards of every run."""


@dataclass(frozen=True, slots=True)
class Dots:
    """One arm's runs, each as its number."""

    label: str
    values: tuple[tuple[str, float, bool], ...]
    """Name, value, and whether the run failed and was given the worst value."""
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Gap:
    """An arm against the reference."""

    label: str
    value: float
    low: float
    """Ends of the interval that a difference is judged by."""
    high: float
    inner_low: float
    """Ends of the narrower one that equivalence is judged by."""
    inner_high: float


def curves(lines: Sequence[Line], *, x_label: str, y_label: str, title: str) -> str:
    """Learning curves: one thin line a run, the mean, and a band."""
    height, left, right, top, bottom = 380, 62, 150, 20, 48
    low, high = _curve_range(lines)
    last = max((line.episodes[-1] for line in lines), default=1)
    x, y = _Scale(0, last, left, WIDTH - right), _Scale(low, high, height - bottom, top)
    middle = (top + height - bottom) / 2
    parts = [
        tag(
            "clipPath", tag("rect", x=left, y=top, width=WIDTH - right - left, height=height - bottom - top), id="plot"
        ),
        *_y_axis(low, high, y, left, WIDTH - right),
        *_x_axis(0, last, x, height - bottom, whole=True),
        text((left + WIDTH - right) / 2, height - 8, x_label, "dim", "middle"),
        tag(
            "text",
            escape(y_label),
            class_="dim",
            text_anchor="middle",
            transform=f"translate(16 {middle:.1f}) rotate(-90)",
        ),
    ]
    for line, colour in zip(lines, cycle(COLOURS), strict=False):
        upper = [(x(at), y(min(value, high))) for at, value in zip(line.episodes, line.high, strict=True)]
        lower = [(x(at), y(max(value, low))) for at, value in zip(line.episodes, line.low, strict=True)]
        band = _points([*upper, *reversed(lower)])
        parts.append(tag("polygon", points=band, fill=colour, opacity=0.13, clip_path="url(#plot)"))
        for name, episodes, rewards in line.seeds:
            run = _points([(x(at), y(value)) for at, value in zip(episodes, rewards, strict=True)])
            tip = tag("title", escape(name))
            parts.append(tag("polyline", tip, points=run, fill="none", stroke=colour, stroke_width=1, opacity=0.45))
    for line, colour in zip(lines, cycle(COLOURS), strict=False):
        points = [(x(at), y(value)) for at, value in zip(line.episodes, line.mean, strict=True)]
        parts.append(
            tag(
                "polyline",
                points=_points(points),
                fill="none",
                stroke=colour,
                stroke_width=2.75,
                stroke_linejoin="round",
            )
        )
        for (across, down), at, value in zip(points, line.episodes, line.mean, strict=True):
            tip = tag("title", escape(f"{line.label}, {at} episodes: mean {value:.3f}"))
            parts.append(tag("circle", tip, class_="halo", cx=across, cy=down, r=4, fill=colour))
    places = _apart([y(line.mean[-1]) for line in lines], 18)
    for line, place, colour in zip(lines, places, cycle(COLOURS), strict=False):
        parts.append(tag("text", escape(line.label), x=WIDTH - right + 12, y=place + 4, fill=colour, font_weight=600))
    return _svg(height, title, parts)


def dots(arms: Sequence[Dots], *, x_label: str, title: str) -> str:
    """Every run as a dot, the mean as a diamond, its interval as a bar."""
    row, left, right, top, bottom = 54, 170, 28, 14, 50
    height = top + row * len(arms) + bottom
    ends = [value for arm in arms for value in (arm.low, arm.high) if math.isfinite(value)]
    low, high = _padded([*(value for arm in arms for _, value, _ in arm.values), *ends])
    x = _Scale(low, high, left, WIDTH - right)
    parts = _x_axis(low, high, x, height - bottom, grid_to=top)
    parts.append(text((left + WIDTH - right) / 2, height - 10, x_label, "dim", "middle"))
    for index, (arm, colour) in enumerate(zip(arms, cycle(COLOURS), strict=False)):
        middle = top + row * (index + 0.5)
        parts.append(text(left - 14, middle + 5, arm.label, "ink", "end"))
        parts.append(_bar(x(max(arm.low, low)), x(min(arm.high, high)), middle + 12, colour, opacity=0.55))
        parts.append(_diamond(x(arm.mean), middle + 12, 7, colour, f"{arm.label}: mean {arm.mean:.3f}"))
        for name, value, has_failed in arm.values:
            tip = tag("title", escape(f"{name}: {value:.3f}{' (failed: the worst value)' if has_failed else ''}"))
            look = (
                {"fill": "none", "stroke": colour, "stroke_width": 2}
                if has_failed
                else {"fill": colour, "class_": "halo"}
            )
            parts.append(tag("circle", tip, cx=x(value), cy=middle - 8, r=5.5, **look))
    return _svg(height, title, parts)


def gaps(rows: Sequence[Gap], *, margin: float, told: float | None, x_label: str, title: str) -> str:
    """Differences with their intervals, beside zero and the band that does not matter.

    Args:
        told: smallest difference that the design tells; drawn as two dashed lines.
    """
    row, left, right, top, bottom = 48, 170, 28, 34, 50
    height = top + row * len(rows) + bottom
    ends = [value for gap in rows for value in (gap.value, gap.low, gap.high) if math.isfinite(value)]
    reach = 1.12 * max([margin, told or 0.0, *map(abs, ends)])
    x = _Scale(-reach, reach, left, WIDTH - right)
    safe = tag("rect", class_="safe", x=x(-margin), y=top, width=x(margin) - x(-margin), height=row * len(rows))
    parts = [safe, text(x(0), top - 8, "does not matter", "dim", "middle")]
    parts += _x_axis(-reach, reach, x, height - bottom, signed=True)
    parts.append(tag("line", class_="zero", x1=x(0), x2=x(0), y1=top, y2=height - bottom))
    if told is not None:
        for at in (x(-told), x(told)):
            parts.append(tag("line", class_="axis", stroke_dasharray="4 4", x1=at, x2=at, y1=top, y2=height - bottom))
        if x(told) - x(0) > 110:
            parts.append(text(min(x(told), WIDTH - right - 36), top - 8, "can be told", "dim", "middle"))
    parts.append(text((left + WIDTH - right) / 2, height - 10, x_label, "dim", "middle"))
    for index, (gap, colour) in enumerate(zip(rows, cycle(COLOURS[1:]), strict=False)):
        middle = top + row * (index + 0.5)
        parts.append(text(left - 14, middle + 5, gap.label, "ink", "end"))
        for low, high, width in ((gap.low, gap.high, 1.5), (gap.inner_low, gap.inner_high, 4.5)):
            parts.append(_bar(x(max(low, -reach)), x(min(high, reach)), middle, colour, width=width))
        tip = f"{gap.label}: {gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
        parts.append(_diamond(x(gap.value), middle, 8, colour, tip))
    return _svg(height, title, parts)


def tag(name: str, *inside: str, **attributes: str | float) -> str:
    """An SVG element; `stroke_width` becomes stroke-width, `class_` class."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{''.join(inside)}</{name}>" if inside else f"<{name}{written}/>"


def text(x: float, y: float, content: str, css: str, anchor: str) -> str:
    """A text, escaped."""
    return tag("text", escape(content), class_=css, x=x, y=y, text_anchor=anchor)


def _attribute(value: str | float) -> str:
    return escape(value, quote=True) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


class _Scale:
    """A straight map from values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = low, start
        self._slope = (end - start) / ((high - low) or 1)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._slope


def _curve_range(lines: Sequence[Line]) -> tuple[float, float]:
    """Ends of the reward axis: all runs, and of the bands as much as does not dwarf them.

    A band over few seeds can be wider than all rewards there are.
    """
    low, high = _padded(
        [value for line in lines for value in (*line.mean, *(v for _, _, run in line.seeds for v in run))]
    )
    bands = [value for line in lines for value in (*line.low, *line.high) if math.isfinite(value)]
    room = 0.3 * (high - low)
    return min(low, max(min(bands, default=low), low - room)), max(high, min(max(bands, default=high), high + room))


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis that leaves some air around the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    air = 0.08 * (high - low) or 0.05 * max(1.0, abs(high))
    return low - air, high + air


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values within an interval: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    return tag(
        "svg",
        STYLE,
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        class_="a3r",
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label=title,
    )


def _y_axis(low: float, high: float, y: _Scale, left: float, right: float) -> list[str]:
    parts: list[str] = []
    for value in ticks(low, high):
        parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y(value), y2=y(value)))
        parts.append(text(left - 9, y(value) + 4, _tick(value), "dim", "end"))
    return parts


def _x_axis(
    low: float,
    high: float,
    x: _Scale,
    bottom: float,
    *,
    whole: bool = False,
    signed: bool = False,
    grid_to: float | None = None,
) -> list[str]:
    parts = [tag("line", class_="axis", x1=x(low), x2=x(high), y1=bottom, y2=bottom)]
    for value in ticks(low, high, 6):
        if grid_to is not None:
            parts.append(tag("line", class_="grid", x1=x(value), x2=x(value), y1=grid_to, y2=bottom))
        parts.append(tag("line", class_="axis", x1=x(value), x2=x(value), y1=bottom, y2=bottom + 5))
        shown = f"{value:.0f}" if whole else _tick(value)
        parts.append(text(x(value), bottom + 20, f"+{shown}" if signed and value > 1e-12 else shown, "dim", "middle"))
    return parts


def _tick(value: float) -> str:
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text in {"-0", ""} else text.replace("-", "−")


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _bar(start: float, end: float, y: float, colour: str, *, width: float = 3.0, opacity: float = 1.0) -> str:
    line = f"M{start:.1f} {y:.1f}L{end:.1f} {y:.1f}"
    return tag("path", d=line, stroke=colour, stroke_width=width, stroke_linecap="round", opacity=opacity)


def _diamond(x: float, y: float, size: float, colour: str, tip: str) -> str:
    path = f"M{x - size:.1f} {y:.1f}L{x:.1f} {y - size:.1f}L{x + size:.1f} {y:.1f}L{x:.1f} {y + size:.1f}Z"
    return tag("path", tag("title", escape(tip)), class_="halo", d=path, fill=colour)


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """The places, moved so that none is nearer to the next than `gap`."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for earlier, later in pairwise(order):
        moved[later] = max(moved[later], moved[earlier] + gap)
    return moved
