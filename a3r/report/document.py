"""A report as a value: sections of blocks whose texts hold slots. How it looks is the renderers' business. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from a3r.report import lint
from a3r.report.slots import names


class Tone(StrEnum):
    """What a paragraph is."""

    PROSE = "prose"
    ANSWER = "answer"
    """The claim that answers the question."""
    CLAIM = "claim"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text with slots."""

    text: str
    tone: Tone = Tone.PROSE

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text with slots."""
        return (self.text,)


@dataclass(frozen=True, slots=True)
class Bullets:
    """Texts with slots, one an item."""

    items: tuple[str, ...]
    tone: Tone = Tone.PROSE

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text with slots."""
        return self.items


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells with slots."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    """Columns that are set right-aligned."""
    caption: str = ""
    summary: str | None = None
    """Where given, the table is folded under these words."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text with slots."""
        return (*self.head, *(cell for row in self.rows for cell in row), self.caption)


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart."""

    name: str
    """Names its file beside the Markdown report."""
    svg: str
    caption: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text with slots."""
        return (self.caption,)


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text that is shown as it is: commands, the plan, the end of a log. It is data, so it may hold numbers."""

    text: str
    summary: str | None = None
    """Where given, the text is folded under these words."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text with slots."""
        return ()


Block = Paragraph | Bullets | Table | Figure | Verbatim


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """The report."""

    title: str
    """The question, as typed by the user."""
    subtitle: str
    """With slots."""
    sections: tuple[Section, ...]

    def lint(self) -> None:
        """See that no text types a number, and that only claims compare.

        Raises:
            ReportError: one does.
        """
        lint.check_prose(self.subtitle)
        for section in self.sections:
            lint.check_prose(section.title)
            for block in section.blocks:
                is_claim = isinstance(block, Paragraph | Bullets) and block.tone in {Tone.ANSWER, Tone.CLAIM}
                for text in block.texts:
                    lint.check_prose(text, is_claim=is_claim)

    def estimates(self) -> list[str]:
        """Keys of the estimates it quotes, in order, each once."""
        texts = (text for section in self.sections for block in section.blocks for text in block.texts)
        return list(dict.fromkeys(key for text in texts for key in names(text)))
