"""A report as one HTML file that needs nothing else: no script, no font, no picture from anywhere. Pure.

Every number that comes from an estimate is a link to its row at the end. Text is escaped, whoever wrote it; the only
markup is ours.
"""

from __future__ import annotations

import re
from html import escape
from importlib import resources
from typing import assert_never

from a3r.report.document import Block, Bullets, Document, Figure, Paragraph, Section, Table, Tone, Verbatim
from a3r.report.slots import Source, resolve

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load for the page: nothing."""


def render(document: Document, source: Source) -> str:
    """The whole page."""
    style = (resources.files("a3r.report") / "report.css").read_text(encoding="utf-8")
    short = ((section.id, section.id.replace("-", " ").capitalize()) for section in document.sections)
    links = "".join(f'<a href="#{place}">{name}</a>' for place, name in short)
    sections = "\n".join(_section(section, source) for section in document.sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f'<header><p class="kicker">A3R study</p><h1>{escape(document.title)}</h1>'
        f'<p class="subtitle">{_filled(document.subtitle, source)}</p></header>\n'
        f"<nav>{links}</nav>\n<main>\n{sections}\n</main>\n</body>\n</html>\n"
    )


def anchor(key: str) -> str:
    """Where on the page an estimate's row is."""
    return "n-" + re.sub(r"[^A-Za-z0-9]+", "-", key)


def _section(section: Section, source: Source) -> str:
    blocks = "\n".join(_block(block, source, section.id) for block in section.blocks)
    return f'<section id="{section.id}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>'


def _filled(text: str, source: Source, *, is_linked: bool = True) -> str:
    parts: list[str] = []
    for piece in resolve(text, source):
        shown = escape(piece.text)
        if piece.estimate is not None and is_linked:
            title = escape(piece.estimate, quote=True)
            parts.append(f'<a class="number" href="#{anchor(piece.estimate)}" title="{title}">{shown}</a>')
        else:
            parts.append(shown)
    return "".join(parts)


def _block(block: Block, source: Source, section: str) -> str:
    match block:
        case Paragraph(text, tone):
            css = "" if tone is Tone.PROSE else f' class="{tone.value}"'
            return f"<p{css}>{_filled(text, source)}</p>"
        case Bullets(items, tone):
            css = "" if tone is Tone.PROSE else f' class="{tone.value}"'
            return f"<ul{css}>" + "".join(f"<li>{_filled(item, source)}</li>" for item in items) + "</ul>"
        case Table():
            return _table(block, source, is_appendix=section == "numbers")
        case Figure(_, svg, caption):
            return f"<figure>{svg}<figcaption>{_filled(caption, source)}</figcaption></figure>"
        case Verbatim(text, summary):
            shown = f"<pre>{escape(text)}</pre>"
            return shown if summary is None else f"<details><summary>{escape(summary)}</summary>{shown}</details>"
        case never:
            assert_never(never)


def _table(table: Table, source: Source, *, is_appendix: bool) -> str:
    def cells(row: tuple[str, ...], tag: str) -> str:
        written = []
        for column, cell in enumerate(row):
            css = ' class="num"' if column in table.numeric else ""
            written.append(f"<{tag}{css}>{_filled(cell, source, is_linked=not is_appendix)}</{tag}>")
        return "".join(written)

    rows: list[str] = []
    for row in table.rows:
        place = ""
        if is_appendix:
            place = f' id="{anchor("".join(piece.text for piece in resolve(row[0], source)))}"'
        rows.append(f"<tr{place}>{cells(row, 'td')}</tr>")
    caption = f"<caption>{_filled(table.caption, source)}</caption>" if table.caption else ""
    written = (
        f'<div class="table"><table>{caption}<thead><tr>{cells(table.head, "th")}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    if table.summary is None:
        return written
    return f"<details><summary>{escape(table.summary)}</summary>{written}</details>"
