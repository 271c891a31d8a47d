from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from experiments_db.sse import Message, Parser

STREAM = (
    "\ufeff: keeps the line open\n\n"
    "id: 1\nevent: server\ndata: {\"seq\":1}\n\n"
    "id: 2\r\nevent: step\r\ndata: first\r\ndata:second\r\n\r\n"
    "data: é 漢\r\r"
    "event: without data\n\n"
    "retry: 10\nid: 3\ndata:  two blanks\nother: x\n\n"
    "id: 4\ndata: broken o"
)  # fmt: skip
MESSAGES = [
    Message("1", "server", '{"seq":1}'),
    Message("2", "step", "first\nsecond"),
    Message("2", "message", "é 漢"),
    Message("3", "message", " two blanks"),
]


def test_a_stream_is_its_messages() -> None:
    assert Parser().feed(STREAM.encode()) == MESSAGES


@given(st.lists(st.integers(min_value=0, max_value=len(STREAM.encode()))))
def test_the_pieces_it_comes_in_do_not_matter(cuts: list[int]) -> None:
    raw = STREAM.encode()
    ends = [0, *sorted(cuts), len(raw)]
    parser = Parser()
    found = [m for start, end in pairwise(ends) for m in parser.feed(raw[start:end])]
    assert found == MESSAGES


def test_it_may_break_anywhere_once_or_everywhere() -> None:
    raw = STREAM.encode()
    for cut in range(len(raw) + 1):
        parser = Parser()
        assert parser.feed(raw[:cut]) + parser.feed(raw[cut:]) == MESSAGES
    parser = Parser()
    assert [message for byte in raw for message in parser.feed(bytes([byte]))] == MESSAGES


@given(st.binary(max_size=200))
def test_no_bytes_break_it(raw: bytes) -> None:
    parser = Parser()
    whole = Parser().feed(raw)
    assert [message for byte in raw for message in parser.feed(bytes([byte]))] == whole


def test_a_message_that_is_not_finished_waits() -> None:
    parser = Parser()
    assert parser.feed(b"id: 5\ndata: x\n") == []
    assert parser.feed(b"\n") == [Message("5", "message", "x")]
