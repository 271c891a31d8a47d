"""A byte-level tokenizer small enough to work out ids by hand: id = byte, then the control tokens.

`<think>` is an added token that is not flagged special, `the` and `ab` are the only merges beside single bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MERGED = ("ab", "th", "the", "abc")
FIRST_SPECIAL = 256 + len(MERGED)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
START_ID, END_ID, PAD_ID = range(FIRST_SPECIAL, FIRST_SPECIAL + 3)
THINK_ID, UNTHINK_ID = FIRST_SPECIAL + 3, FIRST_SPECIAL + 4
NUM_IDS = FIRST_SPECIAL + 5

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(0x100 + extra)
            extra += 1
    return [table[byte] for byte in range(256)]


def make_tokenizer(special: Sequence[str] = SPECIAL, added: Sequence[str] = ("<think>", "</think>")) -> Tokenizer:
    """The tokenizer; `special` and then `added`, which is not flagged special, follow the bytes and merges."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    vocab.update({text: 256 + index for index, text in enumerate(MERGED)})
    merges = [("a", "b"), ("t", "h"), ("th", "e"), ("ab", "c")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def write_tokenizer(folder: Path, template: str = CHATML) -> Path:
    """Write a tokenizer folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def ids(text: str) -> list[int]:
    """Ids of plain text without merges, by hand."""
    return list(text.encode())
