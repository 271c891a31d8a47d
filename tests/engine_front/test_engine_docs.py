"""docs/engine.md has every key of the config with its default."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from swarm_engine.config import EngineConfig, LoraConfig, PolicyConfig

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
ROW = re.compile(r"^\| `([a-zA-Z0-9_.]+)` \| `([^`]+)` \| \S.* \|$", re.MULTILINE)


def defaults(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below a config with its default as JSON has it."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name == "policies":
            yield from defaults(PolicyConfig(), f"{prefix}policies.NAME.")
            yield from defaults(LoraConfig(), f"{prefix}policies.NAME.lora.")
        elif isinstance(value, BaseModel):
            yield from defaults(value, f"{prefix}{name}.")
        else:
            yield prefix + name, config.model_dump(mode="json")[name]


def test_the_page_has_a_row_with_the_right_default_for_every_key() -> None:
    rows = {key: json.loads(default) for key, default in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    known = dict(defaults(EngineConfig()))
    assert sorted(known.keys() - rows.keys()) == [], "keys of the config without a row in docs/engine.md"
    assert sorted(rows.keys() - known.keys()) == [], "rows of docs/engine.md without a key in the config"
    assert rows == known
