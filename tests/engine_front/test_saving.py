"""Checkpoints and exports through a server with the real worker: which are kept, what loads, what full disks leave."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import children_with
from conftest import Process, serve_process, serve_thread, spoken
from forked import forked_worker
from safetensors.torch import load_file, save_file
from test_lifecycle import wait_for_state, wait_for_step
from tiny_model import build_tiny_model
from typer.testing import CliRunner

from swarm_engine.cli import app
from swarm_engine.client import (
    EpisodeLostError,
    SwarmClient,
    SwarmError,
    SwarmRequestError,
    SwarmUnavailableError,
    SyncEpisode,
    Task,
)
from swarm_engine.config import LoraConfig
from swarm_engine.folders import find_checkpoints
from swarm_engine.models.loading import adapt, load_policy, save_policy
from swarm_engine.server.checkpoints import best_step
from swarm_engine.server.worker_link import WORKER_COMMAND
from swarm_engine.types import EngineState, Mode

TRAINER: dict[str, Any] = {"group_size": 2, "tasks_per_update": 1, "checkpoint_every": 1, "keep_last": 1}
CONFIG: dict[str, Any] = {
    "seed": 3,
    "num_threads": 1,
    "policies": {"policy": {"model": "tiny"}},
    "trainer": TRAINER,
    "sampler": {"max_tokens": 4},
}
HI = [{"role": "user", "content": "Your move?"}]
RUN = CliRunner()


def prepared(run_dir: Path) -> Path:
    build_tiny_model(run_dir / "models" / "tiny")
    return run_dir


def train(client: SwarmClient, *rewards: float) -> None:
    """An update with each of these mean rewards, and its checkpoint, which may fail."""
    for reward in rewards:
        status = client.status()
        step = status.step + 1

        def rollout(episode: SyncEpisode, _: Task, reward: float = reward) -> None:
            episode.chat(HI)
            episode.end(reward=reward + (1 if episode._lease.index else -1))

        client.run([Task(f"t{step}")], rollout, group_size=2, concurrency=1)
        wait_for_step(client, step)
        saved = (event.payload for event in client.events(after=status.last_seq) if event.kind == "checkpoint")
        assert any(one["step"] == step for one in saved)


def evaluate(client: SwarmClient, *rewards: float | None, **tags: str) -> None:
    for reward in rewards:
        client.episode("e", mode=Mode.EVAL, tags=tags).end(reward=reward)


def listed(client: SwarmClient) -> list[tuple[int, float | None, float | None, bool]]:
    return [(one.step, one.reward, one.evaluation, one.is_best) for one in client.checkpoints()]


# Which are kept


@pytest.mark.parametrize(
    ("rewards", "best"),
    [({}, None), ({1: 0.5}, 1), ({1: 0.5, 2: 0.5, 3: 0.4}, 1), ({1: -2.0, 3: -1.0}, 3), ({4: 9.0}, None)],
)
def test_the_best_is_the_highest_of_equals_the_earliest_and_never_one_without_a_number(
    rewards: dict[int, float], best: int | None
) -> None:
    assert best_step([3, 2, 1], rewards) == best


def test_the_best_checkpoint_outlives_newer_ones_and_exports_choose_between_them(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "run")
    with serve_thread(run_dir, worker=forked_worker()) as served, served.client() as client:
        client.start({**CONFIG, "trainer": {**TRAINER, "best_by": "reward"}}, wait=True)
        assert listed(client) == []
        train(client, 5.0)
        # The first batch was sampled by the start weights, so the first checkpoint has earned nothing yet.
        assert listed(client) == [(1, None, None, False)]
        train(client, 3.0, 2.0, 2.5)
        evaluate(client, 1.0, None, 0.0)
        assert listed(client) == [(1, 3.0, None, True), (4, None, 0.5, False)]
        shown = RUN.invoke(app, ["checkpoints", "--run-dir", str(run_dir)]).stdout.splitlines()
        assert shown[0].startswith("step 1: reward 3, evaluation -, ")
        assert shown[0].endswith("step-000001  best")
        assert shown[1].startswith("step 4: reward -, evaluation 0.5, ")
        exported = RUN.invoke(app, ["export", "best", "--best", "--run-dir", str(run_dir), "--json"]).stdout
        best = Path(json.loads(exported)["path"])
        now = Path(client.export("policy", "now"))
        client.stop()
        client.start({**CONFIG, "trainer": {**TRAINER, "best_by": "evaluation"}}, wait=True)
        train(client, 0.0)
        assert listed(client) == [(4, 0.0, 0.5, True), (5, None, None, False)]
        client.stop()
        # A checkpoint needs no engine.
        with pytest.raises(SwarmRequestError, match=r"no checkpoint 1; there are checkpoints of the steps: 4, 5") as no:
            client.export("policy", "lost", step=1)
        assert (no.value.status, no.value.code) == (404, "no_checkpoint")
        fourth = Path(client.export("policy", "fourth", step=4))
        with pytest.raises(SwarmRequestError, match="exports/fourth is there already; name another folder"):
            client.export("policy", "fourth", step=5)
        with pytest.raises(SwarmRequestError, match="step and best name two checkpoints"):
            client.export("policy", "both", step=4, best=True)
        with pytest.raises(SwarmRequestError, match="policy 'other' is not served here"):
            client.export("other", "none", step=4)
        (weights := find_checkpoints(run_dir / "checkpoints")[1].folder("policy") / "model.safetensors").write_bytes(
            b""
        )
        with pytest.raises(
            SwarmRequestError, match=r"step-000005 is not whole: policy/model.safetensors is not what was"
        ):
            client.export("policy", "broken", step=5)
        weights.unlink()
    assert sorted(path.name for path in (run_dir / "exports").iterdir()) == ["best", "fourth", "now"]
    files = {"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    for folder in (best, now, fourth):
        assert {path.name for path in folder.iterdir()} == files | {"tokenizer_config.json"}
    assert read(now) == read(fourth) != read(best)
    for folder in (now, best):
        assert_loads(folder)


def test_the_best_is_the_best_evaluated_one_and_may_be_the_start(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "run")
    with serve_thread(run_dir, worker=WORKER_COMMAND) as served, served.client() as client:
        client.start(CONFIG, wait=True)
        evaluate(client, 0.6, temperature="1", label="before")
        evaluate(client, 0.9, temperature="0", label="before")
        assert listed(client) == []
        train(client, 5.0)
        assert listed(client) == [(0, 5.0, 0.9, True), (1, None, None, False)]
        start = Path(client.export("policy", "start", best=True))
        assert load_file(start / "model.safetensors").keys()
        evaluate(client, 0.7, temperature="1", label="during")
        # Greedy play earned more at the start, but nobody knows what it would have earned later.
        assert listed(client) == [(0, 5.0, 0.6, False), (1, None, 0.7, True)]
        train(client, 9.0)
        evaluate(client, 0.1, temperature="1", label="after")
        assert listed(client) == [(1, 9.0, 0.7, True), (2, None, 0.1, False)]
    given, exported = (load_file(folder / "model.safetensors") for folder in (run_dir / "models" / "tiny", start))
    assert all(torch.equal(given[name].float(), tensor) for name, tensor in exported.items())


def read(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def assert_loads(folder: Path) -> None:
    """With real transformers, the export samples what it is, and its template is there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nYour move?<|im_end|>\n<|im_start|>assistant\n"


def test_a_damaged_checkpoint_is_trained_again_from_the_one_before_to_the_same_bits(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "run")
    with serve_thread(run_dir, worker=forked_worker()) as served, served.client() as client:
        client.start({**CONFIG, "trainer": {**TRAINER, "keep_last": 2}}, wait=True)
        train(client, 1.0, 2.0, 3.0)
        client.stop()
        newest = find_checkpoints(run_dir / "checkpoints")[-1].folder("policy")
        before = read(newest)
        flipped = bytearray(before)
        flipped[len(flipped) // 2] ^= 1
        (newest / "model.safetensors").write_bytes(flipped)
        assert client.start(wait=True).saved_step == 2
        assert (
            "step-000003 is not whole: policy/model.safetensors is not what was written"
            in (run_dir / "worker.log").read_text()
        )
        assert client.status().step == 3
        client.checkpoint()
        assert read(newest) == before
        client.stop()
        model = run_dir / "models" / "tiny" / "config.json"
        model.write_text(model.read_text().replace("1e-06", "1e-05"))
        with pytest.raises(SwarmUnavailableError, match=r"of another model than .* rms_norm_eps is 1e-06 in its"):
            client.start(wait=True)


# Start weights


def move(folder: Path, file: str = "model.safetensors") -> Callable[[], None]:
    """Add 0.5 to all weights of a folder; what is returned puts them back."""
    weights = folder / file
    before = weights.read_bytes()
    save_file({name: tensor + 0.5 for name, tensor in load_file(weights).items()}, weights)

    def put_back() -> None:
        weights.write_bytes(before)

    return put_back


def refusal(client: SwarmClient) -> str:
    """Why a start does not come to its end."""
    with pytest.raises(SwarmUnavailableError) as refused:
        client.start(wait=True)
    return str(refused.value)


@pytest.mark.slow
def test_a_start_from_other_weights_than_the_run_began_with_is_refused_until_they_are_back(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "run")
    models = run_dir / "models"
    for name in ("rival", "base", "adapter"):
        build_tiny_model(models / name)
    save_policy(adapt(load_policy(models / "base"), "base", "", LoraConfig(rank=2), seed=0), models / "adapter")
    for file in ("model.safetensors", "base.json"):
        (models / "adapter" / file).unlink()
    policies = {
        "policy": {"model": "tiny"},
        "rival": {"model": "rival", "trainable": False},
        "branch": {"model": "base", "lora": {"rank": 2}},
        "old": {"model": "adapter", "trainable": False},
    }
    with serve_thread(run_dir, worker=forked_worker()) as served, served.client() as client:
        client.start({**CONFIG, "policies": policies, "trainer": {**TRAINER, "checkpoint_every": 99}}, wait=True)
        client.stop()
        move(models / "tiny")
        client.start(wait=True)  # nothing was made from the weights of before
        for reward in (0.0, 1.0):
            spoken(client.episode("t"), "policy").end(reward=reward)
        wait_for_step(client, 1)
        (worker,) = children_with("swarm_engine.worker")
        worker.kill()
        wait_for_state(client, EngineState.FAILED)
        # Before the first checkpoint: the batch would be trained again from whatever there is.
        for policy, folder, file in (
            ("policy", "tiny", "model.safetensors"),
            ("rival", "rival", "model.safetensors"),
            ("branch", "base", "model.safetensors"),
            ("old", "adapter", "adapter_model.safetensors"),
        ):
            put_back = move(models / folder, file)
            said = refusal(client)
            assert f"policy '{policy}' began with other weights than {models / folder} holds now; " in said
            assert "put them back, or use a new run folder" in said
            put_back()
        client.start(wait=True)
        client.stop()
        assert find_checkpoints(run_dir / "checkpoints")[-1].step == 1
        put_back = move(models / "tiny")
        assert "policy 'policy' began with other weights" in refusal(client), "from a checkpoint too"


def test_a_run_folder_that_does_not_know_its_start_weights_learns_them_at_the_next_start(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "run")
    with serve_thread(run_dir, worker=forked_worker()) as served, served.client() as client:
        client.start(CONFIG, wait=True)
        train(client, 1.0)
        client.stop()
    with contextlib.closing(sqlite3.connect(run_dir / "journal.db")) as database, database:
        ((text,),) = database.execute("SELECT value FROM meta WHERE key = 'policies'")
        known = json.loads(text)
        assert known["policy"].pop("start_weights")
        database.execute("UPDATE meta SET value = ? WHERE key = 'policies'", (json.dumps(known),))
    with serve_thread(run_dir, worker=forked_worker()) as served, served.client() as client:
        assert client.start(wait=True).step == 1
        client.stop()
        move(run_dir / "models" / "tiny")
        assert "policy 'policy' began with other weights" in refusal(client)


# Full disks


MEGABYTE = 1 << 20


class SmallDisk:
    """A server whose run folder is a file system of its own, seen from outside through its process."""

    def __init__(self, run_dir: Path) -> None:
        mount = f'mount -t tmpfs -o size=64m tmpfs "{run_dir}" && exec "$0" "$@"'
        command = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount)
        if subprocess.run([*command, "true"], capture_output=True).returncode:
            pytest.skip("this system lets nobody mount a file system of their own")
        self.served: Process = serve_process(run_dir, worker=WORKER_COMMAND, prefix=command)
        self.run_dir = Path(f"/proc/{self.served.pid}/root") / run_dir.relative_to("/")
        self._ballast = self.run_dir / "ballast"

    def leave(self, room: int) -> None:
        """Fill it up to so many bytes."""
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.run_dir).free - room)

    def make_room(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (run_dir := tmp_path / "run").mkdir()
    disk = SmallDisk(run_dir)
    prepared(disk.run_dir)
    yield disk
    assert disk.served.stop() == 0


def test_on_a_full_disk_training_goes_on_without_checkpoints_and_says_so(disk: SmallDisk) -> None:
    """B118: a file system that is really full, first for checkpoints and exports, then for the journal too."""
    with disk.served.client() as client:
        client.start(CONFIG, wait=True)
        train(client, 1.0)
        disk.leave(3 * MEGABYTE)
        train(client, 1.0, 1.0)
        status = client.status()
        assert (status.step, status.saved_step, status.state) == (3, 1, EngineState.ROLLING)
        assert "No space left" in (status.save_error or "")
        failed = [event.payload for event in client.events(follow=False) if event.kind == "checkpoint"][-1]
        assert (failed["step"], failed["path"]) == (3, None)
        assert "step 3 could not be written" in failed["error"]
        shown = RUN.invoke(app, ["status", "--url", disk.served.url, "--token-file", str(disk.run_dir / "token.json")])
        assert "saved     NOT SAVED since step 1: checkpoint of step 3 could not be written" in shown.stdout
        for refused in ({}, {"step": 1}):
            disk.make_room()
            disk.leave(MEGABYTE)
            with pytest.raises(SwarmRequestError, match="No space left") as caught:
                client.export("policy", "mine", **refused)
            assert (caught.value.status, caught.value.code) == (507, "checkpoint")
        assert names(disk.run_dir / "exports") == []
        assert names(disk.run_dir / "checkpoints") == ["step-000001"]

        episode = client.episode("late")
        disk.make_room()
        disk.leave(0)
        with pytest.raises(SwarmError):  # which of the journal's writes is the first to find no room is left open
            fill_journal(client)
        wait_for_state(client, EngineState.FAILED)
        assert "is full" in (client.status().reason or "")

        disk.make_room()
        status = client.start(wait=True)
        assert (status.step, status.saved_step, status.save_error) == (3, 1, None)
        with pytest.raises(EpisodeLostError):
            episode.end(reward=0.0)
        train(client, 1.0)
        assert client.status().saved_step == 4
        assert Path(client.export("policy", "mine")).name == "mine"
        assert names(disk.run_dir / "checkpoints") == ["step-000001", "step-000004"]


def fill_journal(client: SwarmClient) -> None:
    for _ in range(1000):  # the pages that SQLite has already take the first ones
        client.episode("e", mode=Mode.EVAL).end(reward=0.0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_that_is_required_fails_the_engine(disk: SmallDisk) -> None:
    with disk.served.client() as client:
        client.start({**CONFIG, "trainer": {**TRAINER, "checkpoint_required": True}}, wait=True)
        train(client, 1.0)
        disk.leave(3 * MEGABYTE)
        spoken(client.episode("t")).end(reward=1.0)
        spoken(client.episode("t")).end(reward=0.0)
        wait_for_state(client, EngineState.FAILED)
        assert "checkpoint of step 2 could not be written" in (client.status().reason or "")
        disk.make_room()
        assert client.start(wait=True).step == 2
