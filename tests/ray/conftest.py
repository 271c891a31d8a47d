"""A Ray cluster for all tests of this folder."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import build_tiny_model

CLUSTER = """
import sys, ray
context = ray.init(address="local", num_cpus=3, include_dashboard=False)
print("at", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session", autouse=True)
def _cluster() -> Iterator[None]:
    """A cluster of three CPUs, which whoever asks for Ray joins; it ends with the process that started it."""
    # Left to itself Ray keeps a token in the home folder, and ends actors when others fill the machine's memory.
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_memory_monitor_refresh_ms": "0",
    }
    os.environ |= settings
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    while not (line := process.stdout.readline()).startswith("at "):
        assert process.poll() is None
    os.environ["RAY_ADDRESS"] = line.split()[1]
    yield
    for name in ("RAY_ADDRESS", *settings):
        del os.environ[name]
    process.stdin.close()
    process.stdout.close()
    assert process.wait(60) == 0


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny").parent
