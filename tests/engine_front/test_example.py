"""The direct example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from conftest import Served

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "direct.py"


def test_the_direct_example_trains_in_at_most_forty_lines_whatever_proxies_the_environment_names(
    serving: Callable[..., Served],
) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
    served = serving()
    command = [sys.executable, str(EXAMPLE), str(served.run_dir), "2"]
    # Nobody is at the proxy, and nothing names exceptions.
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    environment = {**os.environ, **proxies, "NO_PROXY": "", "no_proxy": ""}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["1", "2"]


def test_the_direct_example_without_its_argument_says_what_it_takes() -> None:
    shown = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert shown.returncode == 1
    assert "python examples/direct.py .a3r/swarm" in shown.stderr
    assert "Traceback" not in shown.stderr
