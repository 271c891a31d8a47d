"""Server-sent events, taken apart. Pure: bytes in any pieces go in, whole messages come out.

Source: WHATWG HTML, section 9.2 "Server-sent events".
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a stream."""

    id: str
    """The last id that was sent, with this message or an earlier one; empty where none was."""
    event: str
    data: str


class Parser:
    """Takes a stream apart. A message that the stream breaks off in is never returned."""

    def __init__(self) -> None:
        # A BOM is skipped, and bytes that are no UTF-8 can't end a stream.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._text = ""
        self._id = ""
        self._event = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Message]:
        """The messages that this piece completes."""
        self._text += self._decoder.decode(chunk)
        # A carriage return at the end may be half of a line's end; it waits for the next piece.
        held = "\r" if self._text.endswith("\r") else ""
        text = self._text.removesuffix("\r") if held else self._text
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._text = rest + held
        return [message for line in lines if (message := self._line(line)) is not None]

    def _line(self, line: str) -> Message | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value
            case _:
                pass  # a comment, which keeps the line open, or a field of later versions
        return None

    def _dispatch(self) -> Message | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        return Message(self._id, event or "message", "\n".join(data)) if data else None
