"""The recording of the merging benchmark can be made again."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from trajectories import RECORDING, read_recording  # noqa: E402


def calls_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The calls of each framework's first episode."""
    groups = json.loads(gzip.decompress(file.read_bytes()))["groups"]
    return {found["framework"]: found["episodes"][0] for found in groups}


def test_recording_gives_a_file_of_the_same_structure(tmp_path: Path) -> None:
    """Of a framework whose calls continue each other, with a helper, and one that writes its calls as another text."""
    file = tmp_path / "recorded.json.gz"
    words = ["--frameworks", "LangGraph", "smolagents", "--episodes", "1", "--out", file]
    subprocess.run([sys.executable, ROOT / "scripts" / "record_trajectories.py", *words], check=True)
    written, shipped = calls_of(file), calls_of(RECORDING)
    assert list(written) == ["LangGraph", "smolagents"]
    for name, calls in written.items():
        assert [call.keys() for call in calls] == [call.keys() for call in shipped[name]]
        assert [call["reply"] for call in calls] == [call["reply"] for call in shipped[name]]
    (langgraph,), (smolagents,) = read_recording(file)
    begins = [
        [number for number, turn in enumerate(turns) if turn.continues is None] for turns in (langgraph, smolagents)
    ]
    assert begins == [[0, 8], list(range(12))], "the helper begins anew, and smolagents does with every call"
