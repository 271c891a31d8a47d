"""A checkpoint is whole or it is not there, and training goes on from it as if it had never stopped."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from episodes import conversations
from tiny_model import build_tiny_model

from swarm_engine.config import Schedule, TrainerConfig
from swarm_engine.errors import CheckpointError, ModelError
from swarm_engine.folders import Checkpoint, damage, find_checkpoints, remove_partial, whole_folder
from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.trainer.checkpoints import CheckpointFolder, TrainedWeights, load_checkpoint
from swarm_engine.trainer.schedule import learning_rate
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


def train(trainer: Trainer, *steps: int) -> list[float | None]:
    """Apply the batches of some steps; returns the learning rates."""
    rates = []
    for step in steps:
        torch.manual_seed(step)  # whatever is drawn from the shared generator changes nothing
        rates.append(trainer.update(BatchRecord(step, (), 0), conversations(step)).metrics["learning_rate"])
    return rates


def are_equal(one: LoadedPolicy, other: LoadedPolicy) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def resumed(model: Path, checkpoints: CheckpointFolder, config: TrainerConfig) -> tuple[LoadedPolicy, Trainer, int]:
    """What a worker has after its boot."""
    policy = load_policy(model)
    trainer = Trainer(policy.model, config)
    found = checkpoints.newest()
    if found is not None:
        load_checkpoint(found, "policy", policy, trainer.optimizer)
    return policy, trainer, found.step if found else 0


# Going on


@pytest.mark.parametrize(
    "config",
    [
        TrainerConfig(weight_decay=0.1),
        TrainerConfig(warmup_updates=2, lr_schedule=Schedule.LINEAR, total_updates=6),
        TrainerConfig(kl_weight=0.1, lr_schedule=Schedule.COSINE, total_updates=6),
    ],
    ids=["decay", "warmup and linear", "kl and cosine"],
)
@pytest.mark.parametrize("stops_at", [0, 1, 2, 3])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    tiny_dir: Path, tmp_path: Path, config: TrainerConfig, stops_at: int
) -> None:
    """B106: each of the batches after the checkpoint once, in order; weights and rates are those of an unbroken run."""
    whole = load_policy(tiny_dir)
    rates = train(Trainer(whole.model, config), 1, 2, 3, 4)
    checkpoints = CheckpointFolder(tmp_path, "run")
    first = load_policy(tiny_dir)
    trainer = Trainer(first.model, config)
    before = train(trainer, *range(1, stops_at + 1))
    if stops_at:
        checkpoints.save(stops_at, {"policy": TrainedWeights(first, trainer.optimizer)})
    again, trainer, step = resumed(tiny_dir, checkpoints, config)
    assert step == stops_at
    assert before + train(trainer, *range(step + 1, 5)) == rates
    assert are_equal(whole, again)


def test_the_learning_rate_does_not_jump_at_a_restart(tiny_dir: Path, tmp_path: Path) -> None:
    """B105: a linear decay over 100 updates, saved at 10, stands at position 10 in update 11."""
    config = TrainerConfig(learning_rate=1e-3, lr_schedule=Schedule.LINEAR, total_updates=100)
    policy = load_policy(tiny_dir)
    trainer = Trainer(policy.model, config)
    train(trainer, *range(1, 11))
    checkpoints = CheckpointFolder(tmp_path, "run")
    checkpoints.save(10, {"policy": TrainedWeights(policy, trainer.optimizer)})
    _, trainer, step = resumed(tiny_dir, checkpoints, config)
    assert train(trainer, step + 1) == [pytest.approx(1e-3 * 0.9)]


def test_schedules_by_hand() -> None:
    def rates(*steps: int, **config: object) -> list[float]:
        made = TrainerConfig.model_validate({"learning_rate": 0.8, "warmup_updates": 0, **config})
        return [learning_rate(made, step) for step in steps]

    assert rates(1, 5, 10_000) == [0.8, 0.8, 0.8]
    assert rates(1, 2, 3, 4, 5, warmup_updates=3) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    falling = {"lr_schedule": "linear", "total_updates": 4}
    assert rates(1, 2, 3, 4, 5, 99, **falling) == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    assert rates(1, 2, 3, 4, 5, warmup_updates=2, **falling) == pytest.approx([0.8 / 3, 1.6 / 3, 0.8, 0.4, 0.0])
    assert rates(1, 3, 5, lr_schedule="cosine", total_updates=4) == pytest.approx([0.8, 0.4, 0.0])
    assert rates(1, 2, 3, warmup_updates=1, lr_schedule="linear", total_updates=2) == pytest.approx([0.4, 0.8, 0.0])
    assert rates(2, 3, 4, warmup_updates=2, total_updates=2) == pytest.approx([1.6 / 3, 0.8, 0.8])


@pytest.mark.parametrize("warmup", [4, 5])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_that_would_be_at_zero_where_its_warmup_ends_is_refused(schedule: str, warmup: int) -> None:
    with pytest.raises(ValueError, match=f"warmup_updates is {warmup} and trainer.total_updates is 4, so .* lower"):
        TrainerConfig.model_validate({"lr_schedule": schedule, "warmup_updates": warmup, "total_updates": 4})


def test_a_checkpoint_is_a_model_that_loads_on_its_own(tiny: LoadedPolicy, tmp_path: Path) -> None:
    saved = save(tmp_path, 1, tiny)
    assert torch.equal(load_policy(saved.folder("policy")).model.embedding, tiny.model.embedding)
    assert (saved.folder("policy") / "chat_template.jinja").is_file()


def save(root: Path, step: int, policy: LoadedPolicy, keep_last: int = 3, *protected: int) -> Checkpoint:
    trained = TrainedWeights(policy, Trainer(policy.model, TrainerConfig()).optimizer)
    return CheckpointFolder(root, "run", keep_last).save(step, {"policy": trained}, protected)


def newest(root: Path) -> Checkpoint | None:
    return CheckpointFolder(root, "run").newest()


# Damage

IN_A_POLICY = ("policy/model.safetensors", "policy/optimizer.safetensors", "policy/tokenizer.json")


def test_resuming_takes_the_newest_whole_checkpoint_and_names_the_broken_one(
    tiny: LoadedPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B109."""
    ten, twenty = save(tmp_path, 10, tiny), save(tmp_path, 20, tiny)
    weights = twenty.folder("policy") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == ten
    assert "step-000020 is not whole: policy/model.safetensors is not what was written; going back" in caplog.text
    assert save(tmp_path, 20, tiny) == newest(tmp_path)


@pytest.mark.parametrize("file", [*IN_A_POLICY, "manifest.json"])
def test_a_flipped_bit_anywhere_sends_the_start_back_to_the_checkpoint_before(
    tiny: LoadedPolicy, tmp_path: Path, file: str
) -> None:
    ten, twenty = save(tmp_path, 10, tiny), save(tmp_path, 20, tiny)
    path = twenty.path / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert newest(tmp_path) == ten


@pytest.mark.parametrize(
    ("manifest", "found"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("7", "reads format"),
        ('{"format": 3, "step": null, "run_id": "r", "files": {"a": {}}}', "its step is None"),
        ('{"format": 3, "step": true, "run_id": "r", "files": {"a": {}}}', "its step is True"),
        ('{"format": 3, "step": 20, "files": {"a": {}}}', "its run_id is None"),
        ('{"format": 3, "step": 20, "run_id": "r", "files": {}}', "its files is {}"),
        ('{"format": 3, "step": 20, "run_id": "r", "files": ["a"]}', "its files is ['a']"),
    ],
)
def test_a_manifest_that_says_nothing_sends_the_start_back_to_the_checkpoint_before(
    tiny: LoadedPolicy, tmp_path: Path, manifest: str, found: str
) -> None:
    ten, twenty = save(tmp_path, 10, tiny), save(tmp_path, 20, tiny)
    (twenty.path / "manifest.json").write_text(manifest)
    assert found in (damage(twenty.path) or "")
    assert newest(tmp_path) == ten


@pytest.mark.parametrize("lost", ["manifest.json", *IN_A_POLICY[1:]])
def test_a_checkpoint_with_a_file_missing_is_none(tiny: LoadedPolicy, tmp_path: Path, lost: str) -> None:
    saved = save(tmp_path, 1, tiny)
    assert damage(saved.path) is None
    (saved.path / lost).unlink()
    assert newest(tmp_path) is None


def test_a_checkpoint_under_another_steps_name_is_none(tiny: LoadedPolicy, tmp_path: Path) -> None:
    saved = save(tmp_path, 1, tiny)
    shutil.copytree(saved.path, tmp_path / "step-000002")
    assert newest(tmp_path) == saved
    assert "made as step-000001" in (damage(tmp_path / "step-000002") or "")


# Kept and removed


def steps(root: Path) -> list[int]:
    """The steps whose checkpoints are there, and nothing else is."""
    found = find_checkpoints(root)
    assert sorted(path.name for path in root.iterdir()) == [one.path.name for one in found]
    assert all(damage(one.path) is None for one in found)
    return [one.step for one in found]


def test_the_last_ones_and_the_protected_are_kept(tiny: LoadedPolicy, tmp_path: Path) -> None:
    (tmp_path / ".step-000007.partial").mkdir()
    (tmp_path / "step-000009").mkdir()
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, tiny, 3, 1)
    assert steps(tmp_path) == [1, 3, 4, 5]
    save(tmp_path, 6, tiny, 1, 3)
    assert steps(tmp_path) == [3, 6]
    save(tmp_path, 7, tiny, 1)
    assert steps(tmp_path) == [7]


def test_a_new_run_in_an_old_runs_folder_removes_nothing_and_is_refused_at_the_next_start(
    tiny: LoadedPolicy, tmp_path: Path
) -> None:
    """B117."""
    trained = {"policy": TrainedWeights(tiny, Trainer(tiny.model, TrainerConfig()).optimizer)}
    for step in (80, 90, 100):
        CheckpointFolder(tmp_path, "old").save(step, trained)
    for keep_last in (3, 1):
        CheckpointFolder(tmp_path, "new", keep_last).save(10, trained)
        assert steps(tmp_path) == [10, 80, 90, 100]
    CheckpointFolder(tmp_path, "new", 1).save(11, trained)
    assert steps(tmp_path) == [11, 80, 90, 100]
    with pytest.raises(CheckpointError, match="step-000080 was made by another run"):
        CheckpointFolder(tmp_path, "new").newest()
    with pytest.raises(CheckpointError, match="of another run; move it away"):
        CheckpointFolder(tmp_path, "new").save(80, trained)


# Full disks


@pytest.mark.parametrize("room", [0, 200_000, 2_000_000])
def test_a_full_disk_leaves_the_checkpoint_before(tiny: LoadedPolicy, tmp_path: Path, room: int) -> None:
    """B118: the one checkpoint there may be stays until the next is whole."""
    before = save(tmp_path, 3, tiny, 1)
    with (
        full_disk(room),
        pytest.raises(CheckpointError, match=r"step 4 could not be written .* older checkpoints stand"),
    ):
        save(tmp_path, 4, tiny, 1)
    assert newest(tmp_path) == before
    assert steps(tmp_path) == [3]
    save(tmp_path, 4, tiny, 1)
    assert steps(tmp_path) == [4]


# Kills


def killed_at_every_file_operation(work: Callable[[], object], root: Path, check: Callable[[], None]) -> int:
    """Run `work` in child processes, each killed one operation on a file under `root` later; returns how many.

    Args:
        check: what must hold after each, and restores what the next one needs.
    """
    for number in range(1, 1000):
        with warnings.catch_warnings(action="ignore"):
            child = os.fork()
        if child == 0:
            left = number

            def count(_event: str, arguments: tuple[object, ...]) -> None:
                nonlocal left
                if any(str(root) in str(argument) for argument in arguments if isinstance(argument, str | Path)):
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            work()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check()
        if status == 0:
            return number
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("the work never came to its end")


@pytest.mark.slow
def test_whenever_a_save_is_killed_the_old_or_the_new_checkpoint_is_whole(tiny_dir: Path, tmp_path: Path) -> None:
    """At every operation: while files are written, before and after the rename, while the oldest is removed."""
    root, aside = tmp_path / "checkpoints", tmp_path / "aside"
    policy = load_policy(tiny_dir)
    trainer = Trainer(policy.model, TrainerConfig())
    checkpoints = CheckpointFolder(root, "run", keep_last=1)
    train(trainer, 1)
    trained = {"policy": TrainedWeights(policy, trainer.optimizer)}
    old = checkpoints.save(1, trained)
    shutil.copytree(root, aside)
    train(trainer, 2)
    seen = set()

    def check() -> None:
        found = checkpoints.newest()
        assert found is not None
        seen.add((found.step, len(find_checkpoints(root))))
        again = load_policy(tiny_dir)
        load_checkpoint(found, "policy", again, Trainer(again.model, TrainerConfig()).optimizer)
        assert found.step == old.step or are_equal(again, policy)
        checkpoints.tidy()
        assert {path.name for path in root.iterdir()} <= {"step-000001", "step-000002"}
        assert checkpoints.save(2, trained).step == 2
        shutil.rmtree(root)
        shutil.copytree(aside, root)

    count = killed_at_every_file_operation(lambda: checkpoints.save(2, trained), root, check)
    assert count > 40
    # Not yet renamed; renamed, and the old one still there; and at the end the new one alone.
    assert seen == {(1, 1), (2, 2), (2, 1)}


def test_whenever_an_export_is_killed_it_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "exports" / "mine"

    def work() -> None:
        with whole_folder(target) as folder:
            for name in ("a", "b"):
                (folder / name).write_text(name * 10)

    def check() -> None:
        if target.exists():
            assert {path.name: path.read_text() for path in target.iterdir()} == {"a": "a" * 10, "b": "b" * 10}
        remove_partial(target.parent)
        assert list((tmp_path / "exports").glob("*")) == [target] * target.exists()
        shutil.rmtree(tmp_path / "exports", ignore_errors=True)

    assert killed_at_every_file_operation(work, target.parent, check) > 5


# Other models


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 64}, "intermediate_size is 288 in its config.json and 64 in the model's"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-06"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tiny: LoadedPolicy, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    saved = save(tmp_path, 1, tiny)
    other = load_policy(build_tiny_model(tmp_path / "other", **changes))
    with pytest.raises(ModelError, match=f"of another model than .*{message}"):
        load_checkpoint(saved, "policy", other, Trainer(other.model, TrainerConfig()).optimizer)


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_checkpoint_of_another_tokenizer_or_template_is_refused(tmp_path: Path, file: str) -> None:
    model = build_tiny_model(tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    saved = save(tmp_path / "checkpoints", 1, load_policy(model))
    load_checkpoint(saved, "policy", again := load_policy(model), Trainer(again.model, TrainerConfig()).optimizer)
    (model / file).write_text((model / file).read_text() + "\n")
    with pytest.raises(ModelError, match=f"its {file} differs; put the model back"):
        load_checkpoint(saved, "policy", again := load_policy(model), Trainer(again.model, TrainerConfig()).optimizer)


def test_the_numbers_type_is_no_difference(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", dtype="bfloat16")
    saved = save(tmp_path / "checkpoints", 1, load_policy(model))
    assert json.loads((saved.folder("policy") / "config.json").read_text())["torch_dtype"] == "float32"
    load_checkpoint(saved, "policy", again := load_policy(model), Trainer(again.model, TrainerConfig()).optimizer)
