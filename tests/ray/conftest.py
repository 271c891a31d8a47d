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

from swarm_engine.sampler.vllm_link import PYTHON_VARIABLE

CLUSTER = """
import sys, ray
context = ray.init(address="local", num_cpus=3, include_dashboard=False)
print("at", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that says what the cluster's nodes run as vLLM's interpreter: that of A3R_VLLM_PYTHON, until a test writes
    another into it. The program beside it does as it says."""
    file = tmp_path_factory.mktemp("vllm") / "interpreter"
    file.write_text(os.environ.get(PYTHON_VARIABLE, ""))
    program = file.with_name("python")
    program.write_text(f'#!/bin/sh\nexec "$(cat {file})" "$@"\n')
    program.chmod(0o755)
    return file


@pytest.fixture(scope="session", autouse=True)
def _cluster(interpreter: Path) -> Iterator[None]:
    """A cluster of three CPUs, which whoever asks for Ray joins; it ends with the process that started it."""
    # Left to itself Ray keeps a token in the home folder, and ends actors when others fill the machine's memory.
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_memory_monitor_refresh_ms": "0",
    }
    os.environ |= settings
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {PYTHON_VARIABLE: str(interpreter.with_name("python"))},
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
