"""The table of clients in docs/frameworks.md names the versions that are installed for the tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def pins() -> dict[str, str]:
    """Version of each package that `make clients` installs, by its registry's name."""
    found: dict[str, str] = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    for name in ("constraints-openhands.txt", "constraints-clients.txt"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        found |= dict(line.split("==") for line in lines if "==" in line)
    return {name.replace("_", "-"): version for name, version in found.items()}


def test_each_row_of_a_tested_client_names_the_versions_that_are_pinned() -> None:
    text = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    tested = text.partition("## Clients that people run")[2].partition("tried by hand")[0]
    named = dict(re.findall(r"`([@\w/.-]+)` (\d[\d.]*)", tested))
    assert len(named) >= 15
    assert named == {name: pins().get(name) for name in named}
