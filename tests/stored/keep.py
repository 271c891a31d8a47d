"""Keep what this version stores, so that every later one is tried on it (tests/test_stored.py).

    python tests/stored/keep.py NAME

Writes one packed folder of each kind into tests/stored/NAME, a megabyte in all. A journal says where the package lies,
so run it from a checkout in a folder that anybody may read of:

- `training`: a project of vibe's and a run folder of it that was killed between two updates, with no checkpoint
- `swarm`: a run folder of the engine's with a checkpoint of two policies, one of them an adapter, killed after one more
- `home`: a study that was answered, with its report, and one that was killed while a job ran

and `said.json`: what they held, as this version reads it. Weights are said by the norm of each tensor, and by a digest
for a machine that computes as this one does.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS / "engine_front"), str(TESTS / "a3r")]

import psutil  # noqa: E402
import torch  # noqa: E402
from conftest import serve_process  # noqa: E402
from fake_lab import Lab, begin_and_cut_power, end_jobs  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_kills import saved_from_journal  # noqa: E402
from test_lifecycle import wait_for_step  # noqa: E402
from tiny_model import build_tiny_model  # noqa: E402

from swarm_engine.client import SwarmClient, SyncEpisode, Task  # noqa: E402
from vibe import render  # noqa: E402
from vibe.project import game_of, project_for  # noqa: E402

QUESTION = "Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?"
EFFECT = {"group_size=8": {"rise": 0.6}}
TRAINING = (
    *("--updates", "4", "--eval-games", "4", "--eval-every", "2"),
    *("--set", "trainer.group_size=2", "--set", "trainer.tasks_per_update=2", "--set", "lockstep=true"),
    *("--set", "trainer.checkpoint_every=99", "--set", "num_threads=1"),
)
"""Of train.py; the run is killed after its third update."""
SWARM: dict[str, Any] = {
    "seed": 5,
    "num_threads": 1,
    "policies": {"policy": {"model": "tiny"}, "adapter": {"model": "tiny", "lora": {"rank": 2}}},
    "trainer": {"group_size": 2, "tasks_per_update": 1, "checkpoint_every": 2},
    "sampler": {"max_tokens": 4},
}
SMALL = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def machine() -> str:
    """What two machines have in common that compute the same bits."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__.split('+')[0]}"


def weights(folder: Path) -> dict[str, Any]:
    """Of a checkpoint: each policy's tensors by their norms, and a digest of its files' bytes."""
    files = sorted(folder.glob("*/*.safetensors"))
    norms = {
        f"{file.parent.name}/{name}": round(float(tensor.double().norm()), 9)
        for file in files
        if file.stem in ("model", "adapter_model")
        for name, tensor in load_file(file).items()
    }
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.stem in ("model", "adapter_model") else b"")
    return {"norms": norms, "sha256": digest.hexdigest()}


def keep_training(folder: Path) -> dict[str, Any]:
    """A project and a run of it."""
    render.write(render.render(project_for(game_of("tictactoe"))), folder / "project")
    command = [
        sys.executable,
        str(folder / "project" / "train.py"),
        "--run-dir",
        str(folder / "run"),
        "--json",
        *TRAINING,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout
    family: list[psutil.Process] = []
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["step"] == 3:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for one in family:
                one.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(family)
    return {"weights": weights_of_training(folder)}


def weights_of_training(folder: Path) -> dict[str, Any]:
    """What the journal of the project's run comes to."""
    config = json.loads((folder / "project" / "spec.json").read_text())["config"]
    set_ones = {name: value for name, value in config["trainer"].items() if value is not None}
    config |= {
        "trainer": set_ones | {"group_size": 2, "tasks_per_update": 2},
        "policies": {"policy": {"model": "nano-tictactoe"}},
        "lockstep": True,
        "num_threads": 1,
    }
    with tempfile.TemporaryDirectory() as aside:
        _, saved = saved_from_journal(folder / "run", Path(aside), config)
        return weights(saved)


def keep_swarm(folder: Path) -> dict[str, Any]:
    """An engine's run folder."""
    build_tiny_model(folder / "models" / "tiny", **SMALL)
    (folder / "config.json").write_text(json.dumps(SWARM))
    served = serve_process(folder, "--start", "--config", str(folder / "config.json"))

    def rollout(episode: SyncEpisode, _: Task) -> None:
        for policy in ("policy", "adapter"):
            episode.chat([{"role": "user", "content": "Your move?"}], policy=policy, agent=policy)
        episode.end(reward=float(episode._lease.index))

    with served.client() as client:
        for step in range(1, 4):
            client.run([Task(f"t{step}")], rollout, group_size=2, concurrency=1)
            wait_for_step(client, step)
    for one in (*psutil.Process(served.pid).children(recursive=True), psutil.Process(served.pid)):
        one.kill()
    served.stop()
    with tempfile.TemporaryDirectory() as aside:
        return go_on_with_swarm(shutil.copytree(folder, Path(aside) / "swarm"))


def go_on_with_swarm(folder: Path) -> dict[str, Any]:
    """Start an engine again in its folder and stop it: what it says of its past, and the weights that it comes to."""
    served = serve_process(folder, "--start", "--config", str(folder / "config.json"))
    try:
        with served.client() as client:
            wait_for_step(client, 3)
            said = read_swarm(client)
            client.stop()
            return said | {"weights": weights(Path(client.checkpoints()[-1].path))}
    finally:
        served.stop()


def read_swarm(client: SwarmClient) -> dict[str, Any]:
    """What a server says of its past."""
    events = [event for event in client.events(follow=False) if event.kind in ("episode", "batch", "step")]
    episodes = [event.payload["episode_id"] for event in events if event.kind == "episode"]
    return {
        "events": [[event.seq, event.kind, event.payload] for event in events],
        "timelines": [client._control("GET", f"/episodes/{one}/timelines") for one in episodes],
    }


def keep_home(folder: Path) -> dict[str, Any]:
    """A home with two studies."""
    lab = Lab(folder, {"*": {"step_s": 0.05}} | EFFECT, processes=2)
    answered = lab.begin(QUESTION)
    lab.go(answered)
    stopped = begin_and_cut_power(lab, QUESTION)
    lab.deps.database.close()
    end_jobs(folder)
    report = folder / "studies" / answered / "report"
    return {
        "answered": answered,
        "open": stopped,
        "report": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(report.iterdir())},
    }


def main() -> int:
    """Keep one of each."""
    (name,) = sys.argv[1:]
    kept = Path(__file__).parent / name
    kept.mkdir()
    torch.set_num_threads(1)
    said: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="kept-") as scratch:
        for kind, keep in (("training", keep_training), ("swarm", keep_swarm), ("home", keep_home)):
            folder = Path(scratch) / kind
            folder.mkdir()
            said[kind] = keep(folder)
            with tarfile.open(kept / f"{kind}.tar.xz", "w:xz") as packed:
                packed.add(folder, arcname=kind)
    (kept / "said.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
