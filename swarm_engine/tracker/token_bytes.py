"""The bytes that a tokenizer's tokens stand for; text is read from them, since one character may be several tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from swarm_engine.errors import TokenizerError


def byte_reader(parsed: Mapping[str, Any]) -> Callable[[str], bytes]:
    """How this tokenizer's vocabulary spells bytes.

    Raises:
        TokenizerError: neither byte-level nor with a byte for every fallback.
    """
    decoder = parsed.get("decoder") or {}
    kinds = {decoder.get("type")} | {one.get("type") for one in decoder.get("decoders", ())}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        return lambda token: bytes(alphabet[char] for char in token)
    if "ByteFallback" in kinds:
        return fallback_bytes
    raise TokenizerError(
        f"the tokenizer's decoder is {decoder.get('type')!r}, which can't be read token by token",
        "use a byte-level tokenizer, or one with byte fallback",
    )


def fallback_bytes(token: str) -> bytes:
    match = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes([int(match.group(1), 16)]) if match else token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte by the printable character that byte-level tokenizers write for it (the GPT-2 table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table
