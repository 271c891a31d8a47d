"""A trainer of several ranks learns what one does: real processes, real collectives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_process import parted, play
from safetensors.torch import load_file
from tiny_model import build_tiny_model

from swarm_engine.config import EngineConfig
from swarm_engine.errors import WorkerError
from swarm_engine.models.loading import load_policy
from swarm_engine.trainer.first_rank import SharedTrainer

pytestmark = pytest.mark.xdist_group("ranks")
"""All compare what was played once."""

HELPERS = Path(__file__).parents[1] / "helpers"
STEPS = list(range(1, 21))
LONG = ("chunks", "whole samples")
"""Cases that are played for 20 updates in float32 as well."""

CASES: dict[str, dict[str, Any]] = {
    # 64 places at once put the batch's tries into chunks, another number of them on each rank.
    "chunks": {"trainer": {"microbatch_tokens": 64, "weight_decay": 0.1}},
    "regularized": {"trainer": {"kl_weight": 0.1, "entropy_weight": 0.01, "merge": "none", "microbatch_tokens": 256}},
    "whole samples": {"trainer": {"algorithm": "gspo", "kl_weight": 0.1, "clip_high": 3.0, "microbatch_tokens": 96}},
    "proximal": {"trainer": {"algorithm": "ppo_clip", "epochs": 2, "minibatches": 2, "off_policy": "masked"}},
    "imitation": {"trainer": {"sft_weight": 0.3, "merge": "token", "max_grad_norm": 0.1, "microbatch_tokens": 128}},
    # One row for two ranks: the other one has nothing to do but to keep step.
    "idle": {"trainer": {"algorithm": "sft", "microbatch_tokens": 24}, "num_groups": 1},
}


def runs(folder: Path, num_ranks: int, cases: list[dict[str, Any]]) -> None:
    """Play cases on so many processes."""
    folder.joinpath("cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-W", "error", str(HELPERS / "rank_process.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])}
    processes = [
        subprocess.Popen([*command, str(index), str(num_ranks), str(folder)], env=environment, stderr=subprocess.PIPE)
        for index in range(num_ranks)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=300)
            assert process.returncode == 0, said.decode()
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an output head of its own and sizes that two ranks can't halve."""
    shape = {"hidden_size": 33, "intermediate_size": 65, "head_dim": 10, "num_hidden_layers": 2}
    folder = tmp_path_factory.mktemp("models") / "odd"
    return build_tiny_model(folder, tie_word_embeddings=False, vocab_size=901, **shape)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, odd: Path) -> tuple[Path, Path]:
    """Folders of what one rank and what two made of the cases, each case resumed by the other number of ranks too."""
    alone, shared = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("shared")
    exact = [
        case(name, odd, dtype="float64", steps=[1, 2, 3], **{"num_groups": 2, **changes})
        for name, changes in CASES.items()
    ]
    long = [case(f"long {name}", odd, dtype="float32", steps=STEPS, **CASES[name]) for name in LONG]
    half = case("half", odd, dtype="float32", steps=STEPS[:10], **CASES["chunks"])
    rest = {**half, "name": "rest", "steps": STEPS[10:], "resume": "half"}
    for one in [*exact, *long, half]:
        play(alone, one)
    shutil.copy(alone / "half.safetensors", shared)
    runs(shared, 2, [*exact, *long, rest, half])
    shutil.copy(shared / "half.safetensors", alone)
    play(alone, rest)
    return alone, shared


def case(name: str, model: Path, **changes: Any) -> dict[str, Any]:
    return {"name": name, "model": str(model), "num_groups": 2, **changes}


def distance(one: Path, other: Path) -> float:
    """Length of the difference of two cases' weights, relative to that of the weights."""
    ours, theirs = (torch.cat([part.flatten() for part in parted(load_file(path))[0]]) for path in (one, other))
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    """Those of each step that could be had, but for what it took."""
    updates = json.loads((folder / f"{name}.json").read_text())
    taken = {"update_s", "num_computed_tokens"}
    return [{key: value for key, value in one.items() if value is not None and key not in taken} for one in updates]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_what_one_trains_in_float64(played: tuple[Path, Path], name: str) -> None:
    alone, shared = played
    assert distance(shared / f"{name}.safetensors", alone / f"{name}.safetensors") <= 1e-12
    for ours, theirs in zip(metrics(shared, name), metrics(alone, name), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_two_ranks_train_what_one_trains_over_20_updates_in_float32(played: tuple[Path, Path], name: str) -> None:
    alone, shared = played
    assert distance(shared / f"long {name}.safetensors", alone / f"long {name}.safetensors") <= 1e-5
    for ours, theirs in zip(metrics(shared, f"long {name}"), metrics(alone, f"long {name}"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_training_goes_on_with_another_number_of_ranks(played: tuple[Path, Path]) -> None:
    """Ten updates by one rank and ten by two, and the other way round, are twenty by one; so are the moments."""
    alone, _ = played
    whole = load_file(alone / "long chunks.safetensors")
    for folder in played:
        found = load_file(folder / "rest.safetensors")
        assert distance(folder / "rest.safetensors", alone / "long chunks.safetensors") <= 1e-5
        assert found.keys() == whole.keys()
        assert int(found["num_steps"]) == 20
        for name, value in found.items():
            assert value.shape == whole[name].shape
            torch.testing.assert_close(value, whole[name], rtol=1e-3, atol=1e-5)


def test_more_ranks_than_gpus_are_told_of_before_any_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    policy = load_policy(build_tiny_model(tmp_path / "tiny"))
    config = EngineConfig.model_validate({"device": "cuda", "placement": {"num_workers": 2}})
    with pytest.raises(WorkerError, match="each rank takes a GPU, and PyTorch sees 1; lower num_workers"):
        SharedTrainer.start(policy, config, 1, None, pytest.fail)
