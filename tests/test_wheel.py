"""The wheel works where there is no checkout: its templates are inside, its commands answer and train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment that holds the wheel and sees this environment's other packages."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python3.*")) / "site-packages"
    # The third-party packages are those of the tested set; only ours come from the wheel, ahead of the checkout.
    ours = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(site),
            str(wheel),
        ],
        check=True,
    )
    (site / "others.pth").write_text(f"{ours}\n", encoding="utf-8")
    return home / "bin"


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "A3R_HOME", "VIRTUAL_ENV"}}
    return subprocess.run(
        [str(installed / "python"), "-m", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )


def test_the_wheel_holds_every_template_and_the_start_weights(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for template in (path.name for path in (ROOT / "templates").iterdir() if (path / "env.py").exists()):
        assert f"vibe/_templates/{template}/env.py" in names
    assert any(name.startswith("swarm_engine/models/nano/weights/") for name in names)
    assert any(name.startswith("experiments_db/migrations/versions/") for name in names)
    assert not any(name.startswith(("tests/", "templates/", "benchmarks/")) for name in names)


@pytest.mark.slow
def test_the_wheel_trains_and_shows_its_run_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "a3r", "--help")
    assert where.returncode == 0, where.stderr
    trained = run(
        installed, tmp_path, "vibe", "train", "Play tic-tac-toe against a random opponent",
        "--updates", "2", "--eval-games", "4", "--json",
        "--set", "trainer.group_size=2", "--set", "trainer.tasks_per_update=2",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert json.loads(trained.stdout.splitlines()[-1])["event"] == "result"
    runs = run(installed, tmp_path, "a3r", "runs", "--json")
    assert runs.returncode == 0, runs.stderr
    assert "tictactoe" in runs.stdout
