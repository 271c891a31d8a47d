"""A tiny policy, made once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import build_tiny_model

from swarm_engine.models.loading import LoadedPolicy, load_policy

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a 0.44M-parameter Qwen3 of random weights."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(tiny_dir: Path) -> LoadedPolicy:
    """The tiny policy, loaded fresh in float32."""
    return load_policy(tiny_dir)
