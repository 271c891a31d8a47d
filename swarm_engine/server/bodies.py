"""Bodies of requests: read up to a bound, unpacked up to it, and parsed to JSON that can be stored and served again."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from swarm_engine.errors import BadRequestError, TooLargeError, UnsupportedEncodingError, shortened, shown

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Headers = Sequence[tuple[bytes, bytes]]

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Of an inference request: a long context, or its token ids."""
MAX_CONTROL_BYTES = 1024 * 1024
"""Of a control request, which is parsed on the event loop: JSON of this length takes it 20 ms and some 30 MB."""
MAX_VALUES = 2_000_000
"""Of one body: token ids, mostly. Reading them takes no other request's turn for longer than 0.2 s."""
MAX_PARTS = 200_000
"""Texts, lists and objects of one body, names of fields included; each takes the time and memory of many numbers."""

ZLIB_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Encodings that are unpacked, with zlib's name for their frame."""
RAW_DEFLATE = -15
"""What some senders mean by `deflate`, without the frame that the word stands for."""
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Halves of pairs are escapes: as bytes of their own they are no UTF-8."""


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes | None:
    """A request's body, unpacked; None where the caller went away.

    Raises:
        TooLargeError: it has more bytes than the limit, as sent or unpacked.
        UnsupportedEncodingError: it is packed in another way than those of `ZLIB_BITS`.
        BadRequestError: it can't be unpacked.
    """
    given = {name: value.decode("latin-1").strip() for name, value in headers}
    encoding = given.get(b"content-encoding", "").lower()
    if encoding not in ("", "identity") and encoding not in ZLIB_BITS:
        raise UnsupportedEncodingError(
            f"the body's Content-Encoding is {shown(encoding)}, which this server does not unpack",
            "send it as it is, or as gzip or deflate",
        )
    # The parser in front has seen that it is a number.
    if int(given.get(b"content-length", "0")[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            break
    body = b"".join(parts)
    return await asyncio.to_thread(_unpack, body, encoding, limit) if body and encoding in ZLIB_BITS else body


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"the body has more than {limit} bytes", "send less in one request")


def _unpack(body: bytes, encoding: str, limit: int) -> bytes:
    bits = ZLIB_BITS[encoding]
    if encoding == "deflate" and not (body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0):
        bits = RAW_DEFLATE
    stream = zlib.decompressobj(bits)
    try:
        unpacked = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequestError(f"the body is no {encoding} ({error})", "see its Content-Encoding") from error
    if len(unpacked) > limit:
        raise _too_large(limit)
    if not stream.eof or stream.unused_data:
        what = "has something behind its end" if stream.eof else "breaks off"
        raise BadRequestError(f"the body's {encoding} stream {what}", "send one whole stream")
    return unpacked


def parse_json(body: bytes, load: Callable[[str], Any] = json.loads) -> Any:
    """A body as JSON.

    Args:
        load: reads the text; Python's own lets NaN and infinity pass as numbers.
    Raises:
        TooLargeError: it consists of too many values.
        BadRequestError: it is none, is nested too deeply, or holds half of a surrogate pair, which no text may.
    """
    _check_count(body)
    try:
        value = load(body.decode("utf-8-sig"))
        if ESCAPED_SURROGATE.search(body):
            _check_texts(value, "")
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON ({shortened(str(error))})") from error
    except RecursionError as error:
        raise BadRequestError("the body is nested too deeply", "send it flatter") from error
    return value


def _check_count(body: bytes) -> None:
    """See that JSON has no more values than can be read at once: the parser lets no other thread run meanwhile, and
    makes 800 MB of 32 MB of empty lists.

    Raises:
        TooLargeError: it has.
    """
    if len(body) <= MAX_PARTS:
        return
    # Without escapes every quote is the bound of a text, and every second piece between them lies outside.
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_parts, num_values = bare.count(b'"') // 2, 0
    if num_parts <= MAX_PARTS:
        outside = b"".join(bare.split(b'"')[::2])
        num_parts += outside.count(b"[") + outside.count(b"{")
        num_values = outside.count(b",")
    if num_parts > MAX_PARTS:
        raise TooLargeError(
            f"the body has more than {MAX_PARTS} texts, lists and objects", "send fewer of them in one request"
        )
    if num_values > MAX_VALUES:
        raise TooLargeError(f"the body has more than {MAX_VALUES} values", "send fewer in one request")


def _check_texts(value: Any, where: str) -> None:
    """See that every text can be encoded, names of fields included.

    Raises:
        BadRequestError: one can't.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            where = shortened(where) or "the body"
            raise BadRequestError(
                f"{where} holds a lone surrogate at character {error.start}", "send valid Unicode text", param=where
            ) from error
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_texts(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_texts(key, where)
            _check_texts(item, f"{where}.{key}" if where else key)
