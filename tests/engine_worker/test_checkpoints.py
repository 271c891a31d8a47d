"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from episodes import conversations
from tiny_model import build_tiny_model

from swarm_engine.config import TrainerConfig
from swarm_engine.errors import CheckpointError, ModelError
from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.trainer.checkpoints import (
    is_whole,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond `room` bytes: the same failed write as on a full disk, without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tiny_dir: Path, tmp_path: Path) -> None:
    def train(trainer: Trainer, *steps: int) -> None:
        for step in steps:
            trainer.update(BatchRecord(step, (), 0), conversations(step))

    whole = load_policy(tiny_dir)
    train(Trainer(whole.model, TrainerConfig()), 1, 2, 3, 4)
    first = load_policy(tiny_dir)
    trainer = Trainer(first.model, TrainerConfig())
    train(trainer, 1, 2)
    saved = save_checkpoint(tmp_path, 2, first, trainer.optimizer)
    again = load_policy(tiny_dir)
    trainer = Trainer(again.model, TrainerConfig())
    found = newest_checkpoint(tmp_path)
    assert found == saved
    load_checkpoint(saved, again, trainer.optimizer)
    train(trainer, 3, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))


def test_a_checkpoint_is_a_model_that_loads_on_its_own(tiny: LoadedPolicy, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 1, tiny, Trainer(tiny.model, TrainerConfig()).optimizer)
    assert torch.equal(load_policy(saved.path).model.embedding, tiny.model.embedding)
    assert (saved.path / "chat_template.jinja").is_file()


def test_resuming_takes_the_newest_whole_checkpoint_and_names_the_broken_one(
    tiny: LoadedPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = Trainer(tiny.model, TrainerConfig()).optimizer
    ten = save_checkpoint(tmp_path, 10, tiny, optimizer)
    twenty = save_checkpoint(tmp_path, 20, tiny, optimizer)
    weights = twenty.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == ten
    assert "step-000020 is incomplete" in caplog.text
    assert save_checkpoint(tmp_path, 20, tiny, optimizer) == newest_checkpoint(tmp_path)


@pytest.mark.parametrize("lost", ["manifest.json", "optimizer.safetensors", "tokenizer.json"])
def test_a_checkpoint_with_a_file_missing_is_none(tiny: LoadedPolicy, tmp_path: Path, lost: str) -> None:
    saved = save_checkpoint(tmp_path, 1, tiny, Trainer(tiny.model, TrainerConfig()).optimizer)
    assert is_whole(saved.path)
    (saved.path / lost).unlink()
    assert newest_checkpoint(tmp_path) is None


def test_the_last_three_are_kept(tiny: LoadedPolicy, tmp_path: Path) -> None:
    optimizer = Trainer(tiny.model, TrainerConfig()).optimizer
    (tmp_path / ".step-000007.partial").mkdir()
    for step in (1, 2, 3, 4, 5):
        save_checkpoint(tmp_path, step, tiny, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004", "step-000005"]


@pytest.mark.parametrize("room", [0, 200_000, 2_000_000])
def test_a_full_disk_leaves_the_checkpoint_before(tiny: LoadedPolicy, tmp_path: Path, room: int) -> None:
    optimizer = Trainer(tiny.model, TrainerConfig()).optimizer
    before = [save_checkpoint(tmp_path, step, tiny, optimizer) for step in (1, 2, 3)]
    with (
        full_disk(room),
        pytest.raises(CheckpointError, match=r"step 4 could not be written .* older checkpoints stand"),
    ):
        save_checkpoint(tmp_path, 4, tiny, optimizer)
    assert newest_checkpoint(tmp_path) == before[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000003"]
    assert save_checkpoint(tmp_path, 4, tiny, optimizer).step == 4


def test_a_checkpoint_of_another_model_is_refused(tiny: LoadedPolicy, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 1, tiny, Trainer(tiny.model, TrainerConfig()).optimizer)
    other = load_policy(build_tiny_model(tmp_path / "other", intermediate_size=64))
    with pytest.raises(ModelError, match="asks for"):
        load_checkpoint(saved, other, Trainer(other.model, TrainerConfig()).optimizer)
