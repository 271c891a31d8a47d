"""What a command does not need, it does not wait for."""

from __future__ import annotations

import subprocess
import sys

SLOW = ("sqlalchemy", "alembic", "scipy", "matplotlib", "torch", "transformers")


def test_neither_a_training_without_rows_nor_a_project_waits_for_the_database() -> None:
    code = f"import sys, vibe.runtime, vibe.writing; print([name for name in {SLOW!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"
