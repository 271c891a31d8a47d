"""A report as Markdown. Everything that comes from users, models or logs is escaped. Pure."""

from __future__ import annotations

import re
from typing import assert_never

from a3r.report.document import Block, Bullets, Document, Figure, Paragraph, Table, Tone, Verbatim
from a3r.report.slots import Source, resolve


def render(document: Document, source: Source) -> str:
    """The report's text. Charts are referred to as files beside it."""
    lines = [f"# {escape(document.title)}", "", _filled(document.subtitle, source), ""]
    for section in document.sections:
        lines += [f"## {escape(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block, source), ""]
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no line of its own."""
    one_line = re.sub(r"\s+", " ", text)
    quoted = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", quoted)


def fence(text: str) -> str:
    """Text in a code block whose fence it can't close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{text}\n{marks}"


def _filled(text: str, source: Source) -> str:
    return "".join(escape(piece.text) for piece in resolve(text, source))


def _block(block: Block, source: Source) -> list[str]:
    match block:
        case Paragraph(text, tone):
            filled = _filled(text, source)
            marks = {Tone.ANSWER: f"> **{filled}**", Tone.NOTE: f"*{filled}*"}
            return [marks.get(tone, filled)]
        case Bullets(items):
            return [f"- {_filled(item, source)}" for item in items]
        case Table():
            return _table(block, source)
        case Figure(name, _, caption):
            return [f"![{_filled(caption, source)}]({name}.svg)"]
        case Verbatim(text, summary):
            shown = fence(text)
            if summary is None:
                return [shown]
            return [f"<details><summary>{escape(summary)}</summary>", "", shown, "", "</details>"]
        case never:
            assert_never(never)


def _table(table: Table, source: Source) -> list[str]:
    def row(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(_filled(cell, source) for cell in cells) + " |"

    rule = "|" + "|".join(" ---: " if column in table.numeric else " --- " for column in range(len(table.head))) + "|"
    caption = ["", f"*{_filled(table.caption, source)}*"] if table.caption else []
    written = [row(table.head), rule, *(row(cells) for cells in table.rows), *caption]
    if table.summary is None:
        return written
    return [f"<details><summary>{escape(table.summary)}</summary>", "", *written, "", "</details>"]
