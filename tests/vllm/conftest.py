"""`make test-heavy` runs these in the core environment and names the interpreter of vLLM's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from swarm_engine.sampler.vllm_link import PYTHON_VARIABLE

# Test modules are imported without a package; this lets one use what another starts.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _vllm_is_there() -> None:
    assert os.environ.get(PYTHON_VARIABLE), f"{PYTHON_VARIABLE} names no interpreter; `make test-heavy` makes one"
