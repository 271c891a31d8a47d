"""Several policies behind one address: who answers, what is recorded of whom, and what an update makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
from conftest import Served, serve_process, serve_thread, started
from forked import forked_worker
from rich.console import Console
from tiny_model import build_tiny_model
from typer.testing import CliRunner

from swarm_engine.cli import app
from swarm_engine.client import SwarmClient, SwarmRequestError, SyncEpisode, Task
from swarm_engine.config import EngineConfig, PolicyConfig
from swarm_engine.errors import NotFoundError
from swarm_engine.server.inference import choose_policy
from swarm_engine.types import Mode
from swarm_engine.watch import status_lines, step_lines, step_table

HI: list[Any] = [{"role": "user", "content": "Your move?"}]
CONFIG: dict[str, Any] = {
    "seed": 3,
    "num_threads": 1,
    "policies": {
        "tiny": {"model": "tiny", "lora": {"rank": 2}},
        "twin": {"model": "tiny", "lora": {"rank": 2}},
        "nano": {"model": "nano-tictactoe", "trainable": False},
    },
    "trainer": {"group_size": 2, "tasks_per_update": 1, "checkpoint_every": 2, "learning_rate": 0.01},
    "sampler": {"max_tokens": 6},
}
NAMES = "tiny, twin, nano"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    run_dir = tmp_path_factory.mktemp("several") / "run"
    build_tiny_model(run_dir / "models" / "tiny", max_position_embeddings=64)
    with started(run_dir, CONFIG, worker=forked_worker()) as served:
        yield served


@pytest.fixture
def episode(real: Served) -> Iterator[SyncEpisode]:
    with real.client() as client:
        claimed = client.episode("several", mode=Mode.DEBUG)
        yield claimed
        claimed.abort()


def ask(episode: SyncEpisode, method: str, route: str, body: object = None, **headers: str) -> httpx.Response:
    headers = {
        "authorization": f"Bearer {episode.api_key}",
        **{name.replace("_", "-"): headers[name] for name in headers},
    }
    return httpx.request(method, f"{episode.base_url}/{route}", json=body, headers=headers)


def test_the_model_names_the_policy_and_the_agent_in_every_api(real: Served, episode: SyncEpisode) -> None:
    with (
        openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as one,
        anthropic.Anthropic(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as other,
    ):
        told = [
            one.chat.completions.create(model="tiny", messages=HI).model,
            one.responses.create(model="nano@white", input="Your move?").model,
            one.completions.create(model="twin@black", prompt="Your move?", max_tokens=3).model,
            other.messages.create(model="nano", messages=HI, max_tokens=3).model,
        ]
    assert told == ["tiny", "nano", "twin", "nano"]
    with real.client() as client:
        lines = client.timelines(episode.episode_id)
    assert [(line["policy"], line["agent"]) for line in lines] == [
        ("tiny", "main"),
        ("nano", "white"),
        ("nano", "main"),
        ("twin", "black"),
    ]
    numbers = {line["call_ids"][0].rpartition("-")[2]: line["policy"] for line in lines}
    assert numbers == {"0": "tiny", "1": "nano", "2": "twin", "3": "nano"}
    # One template, two vocabularies: every token was encoded and is shown by its own policy's.
    texts = {line["policy"]: "".join(block["text"] for block in line["blocks"][:-1]) for line in lines}
    assert texts["tiny"] == "<|im_start|>user\nYour move?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("model", ["gpt-4o", "tinier@white", "@white", None])
def test_a_model_that_is_none_is_a_404_that_lists_them_in_every_apis_shape(
    episode: SyncEpisode, model: str | None
) -> None:
    named = {} if model is None else {"model": model}
    bodies = {
        "chat/completions": {"messages": HI},
        "responses": {"input": "hi"},
        "completions": {"prompt": "hi"},
        "messages": {"messages": HI, "max_tokens": 3},
        "messages/count_tokens": {"messages": HI},
    }
    what = "the request names no model" if model is None else f"model '{model}' names no policy of this episode"
    for route, body in bodies.items():
        answer = ask(episode, "POST", route, {**body, **named})
        error = answer.json()["error"]
        assert answer.status_code == 404
        hint = f"it has {NAMES}; name one of them, or say in its claim's models which one this name means"
        assert error["message"] == f"{what}; {hint}"
        kind = error["type"] if route.startswith("messages") else (error["code"], error["param"])
        assert kind == ("not_found_error" if route.startswith("messages") else ("model_not_found", "model"))


def test_choosing_a_policy_by_hand() -> None:
    several: Any = {"a": None, "b-1": None}
    assert [choose_policy(model, several, {}) for model in ("a", "b-1", "a@x", "b-1@")] == ["a", "b-1", "a", "b-1"]
    one: Any = {"a": None}
    assert {choose_policy(model, one, {}) for model in ("a", "", "gpt-4o", "x@y", "@")} == {"a"}


def test_names_that_a_claim_routes_go_before_those_of_policies_and_the_rest_means_the_one_that_is_left() -> None:
    served: Any = {"learner": None, "old": None}
    routed = {"gpt-4o-mini": "old", "learner-titles": "old"}
    said = [choose_policy(model, served, routed) for model in ("gpt-4o-mini", "gpt-4o-mini@x", "old", "learner-titles")]
    assert said == ["old"] * 4
    assert {choose_policy(model, served, routed) for model in ("gpt-4o", "", "learner", "x@y")} == {"learner"}
    assert choose_policy("learner", served, {"learner": "old"}) == "old"
    assert choose_policy("other", {"learner": served}, {"gpt-4o-mini": "learner"}) == "learner"
    for several, routes in (({**served, "third": None}, routed), (served, {"a": "old", "b": "learner"}), (served, {})):
        with pytest.raises(NotFoundError, match="names no policy of this episode"):
            choose_policy("other", several, routes)


def test_an_episode_lists_its_policies_and_a_claim_restricts_them(real: Served, episode: SyncEpisode) -> None:
    listed = ask(episode, "GET", "models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("tiny", 64), ("twin", 64), ("nano", 1024)]
    theirs = ask(episode, "GET", "models", anthropic_version="2023-06-01").json()
    assert (theirs["first_id"], theirs["last_id"]) == ("tiny", "nano")
    assert ask(episode, "GET", "models/twin").json()["id"] == "twin"
    assert ask(episode, "GET", "models/other").status_code == 404
    with real.client() as client:
        with client.episode("few", mode=Mode.DEBUG, policies=["nano"]) as few:
            assert ask(few, "POST", "chat/completions", {"messages": HI, "model": "tiny"}).json()["model"] == "nano"
            assert [model["id"] for model in ask(few, "GET", "models").json()["data"]] == ["nano"]
            few.abort()
        with client.episode("few", mode=Mode.DEBUG, policies=["nano", "twin"]) as few:
            assert few.chat(HI, policy="twin", agent="x").call_id
            with pytest.raises(SwarmRequestError, match="'tiny' names no policy of this episode; it has twin, nano"):
                few.chat(HI, policy="tiny")
            few.abort()
        with pytest.raises(SwarmRequestError, match="policy 'x' is not served here; this server has 'tiny', 'twin'"):
            client.episode("few", policies=["nano", "x"])
        with pytest.raises(SwarmRequestError, match=r"policy 'nano' is frozen \(trainable: false\); claim with mode"):
            client.episode("few", policies=["nano"])


def test_each_policy_has_its_own_tokenizer_context_and_grammar(episode: SyncEpisode) -> None:
    long = [{"role": "user", "content": "x y z " * 40}]
    counts = {
        name: ask(episode, "POST", "messages/count_tokens", {"model": name, "messages": long}).json()["input_tokens"]
        for name in ("nano", "tiny")
    }
    assert counts["tiny"] != counts["nano"]
    asked = {"model": "tiny", "messages": long}
    refused = ask(episode, "POST", "chat/completions", asked).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert "together may have 64" in refused["message"]
    assert ask(episode, "POST", "chat/completions", {**asked, "model": "nano"}).status_code == 200
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    for name in ("tiny", "nano"):
        body = {"model": name, "messages": HI, "response_format": schema, "max_tokens": 30}
        said = ask(episode, "POST", "chat/completions", body).json()["choices"][0]["message"]["content"]
        assert isinstance(json.loads(said) if said.lstrip("-").isdigit() else 0, int)
        assert said.strip().lstrip("-").isdigit(), said


def test_names_that_cannot_be_are_refused() -> None:
    for name in ("", "a@b", "a/b", "a.b", "-a", "x" * 101):
        with pytest.raises(ValueError, match="a name has 1 to 100 letters"):
            EngineConfig(policies={name: PolicyConfig()})


def test_what_a_policy_said_is_shown_when_others_are_served_too(serving: Callable[..., Served]) -> None:
    """A folder without train episodes may change its policies; one that is gone still has its tokens shown."""
    served = serving()
    with served.client() as client:
        seen = []
        for name in ("first", "second"):
            client.start({"policies": {name: {}}}, wait=True)
            with client.episode("e", mode=Mode.EVAL) as episode:
                episode.chat(HI)
                seen.append(episode.episode_id)
                episode.end(reward=1.0)
            client.stop()
        assert served.front is not None
        served.front.engine._shown.clear()  # as in a server that was started anew
        for name, episode_id in zip(("first", "second"), seen, strict=True):
            (line,) = client.timelines(episode_id)
            assert line["policy"] == name
            assert "Your move?" in "".join(block["text"] for block in line["blocks"])


def test_scripts_are_played_in_the_words_of_each_policy(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    build_tiny_model(run_dir / "models" / "tiny")
    config = {**CONFIG, "sampler": {"backend": "scripted"}}
    with serve_thread(run_dir, worker=forked_worker()) as served, served.client() as client:
        client.start(config, wait=True)
        said = "I take cell 5."
        with client.episode("e", mode=Mode.EVAL, script=[said, said]) as episode:
            assert [episode.chat(HI, policy=name).text for name in ("tiny", "nano")] == [said, said]
            assert episode.chat(HI, policy="twin", script="7").text == "7"
            episode.end(reward=0.0)
        ids = {line["policy"]: line["blocks"][-1]["token_ids"] for line in client.timelines(episode.episode_id)}
        assert len(ids) == 3
        assert ids["tiny"] != ids["nano"]


def test_an_update_of_several_policies_in_words() -> None:
    payload = {
        "step": 3,
        "seconds": 1.5,
        "metrics": {
            "a/reward_mean": 0.25,
            "a/skipped": 0.0,
            "b/reward_mean": None,
            "b/skipped": 1.0,
            "reward_mean": 0.25,
            "skipped": 0.0,
        },
        "drops": {"b/alone": 2, "timeout": 4},
        "health": [{"policy": "a", "kind": "entropy_collapse", "message": "policy 'a': entropy fell"}],
    }
    assert step_lines(payload) == [
        "step 3: 1.50 s, a, reward_mean 0.25",
        "step 3: 1.50 s, b, nothing trained: 2 episodes alone in their group",
        "  warning: policy 'a': entropy fell",
    ]
    alone = {**payload, "metrics": {"reward_mean": 0.5, "skipped": 1.0}, "drops": {"alone": 1}, "health": []}
    assert step_lines(alone) == ["step 3: 1.50 s, reward_mean 0.5, nothing trained: 1 episode alone in their group"]


# Training


def play(client: SwarmClient, *, frozen: float = 5.0) -> None:
    """One update: `tiny` and `twin` get rewards that differ, the frozen opponent the same ones for ever."""

    def rollout(episode: SyncEpisode, _: Task) -> None:
        for agent, policy in (("a", "tiny"), ("b", "twin"), ("c", "nano")):
            episode.chat(HI, agent=agent, policy=policy)
        place = episode._lease.index
        episode.end(reward={"a": float(place), "b": 1.0 - place, "c": frozen})

    step = client.status().step + 1
    client.run([Task(f"t{step}")], rollout, group_size=2, concurrency=1)
    deadline = time.monotonic() + 120
    while client.status().step < step or client.status().state not in ("ROLLING", "FAILED"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.status().state == "ROLLING", client.status().reason


@pytest.mark.parametrize("merge", ["tree", "text"])
def test_an_update_trains_each_policy_and_says_so_of_each(tmp_path: Path, merge: str) -> None:
    run_dir = tmp_path / "run"
    build_tiny_model(run_dir / "models" / "tiny")
    with serve_thread(run_dir, worker=forked_worker()) as served, served.client() as client:
        client.start({**CONFIG, "trainer": {**CONFIG["trainer"], "merge": merge}}, wait=True)
        for _ in range(2):
            play(client)
        status = client.status()
        assert {name: (one.version, one.trainable) for name, one in status.policies.items()} == {
            "tiny": (2, True),
            "twin": (2, True),
            "nano": (0, False),
        }
        assert "policy    nano at version 0, frozen" in status_lines(status)
        with client.episode("e", mode=Mode.EVAL) as evaluated:
            versions = {name: evaluated.chat(HI, agent=name, policy=name).call_id for name in ("tiny", "nano")}
            assert len(versions) == 2
            evaluated.end(reward={"tiny": 0.25, "nano": 9.0})
        lines = {line["policy"]: line["blocks"][-1] for line in client.timelines(evaluated.episode_id, merge=merge)}
        assert {name: block["policy_version"] for name, block in lines.items()} == {"tiny": 2, "nano": 0}
        assert {name: block["untrained_because"] for name, block in lines.items()} == {"tiny": None, "nano": "frozen"}
        assert [any(lines[name]["loss_mask"]) for name in ("tiny", "nano")] == [True, False]
        with client.episode("f", mode=Mode.EVAL, policies=["nano"]) as of_frozen:
            assert of_frozen.policy_version == 0
            of_frozen.chat(HI)
            of_frozen.end(reward=7.0)
        client.checkpoint()
        (saved,) = client.checkpoints()
        # What the frozen opponent earned beside `tiny` is no number of a checkpoint.
        assert (saved.step, saved.evaluation) == (2, 0.25)
        folder = Path(saved.path)
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "tiny", "twin"]
        adapter = Path(client.export("tiny", "adapter", step=2))
        assert (adapter / "adapter_model.safetensors").read_bytes() == (
            folder / "tiny" / "adapter_model.safetensors"
        ).read_bytes()
        assert not (adapter / "optimizer.safetensors").exists()
        words = ["export", "merged", "--policy", "twin", "--merged", "--run-dir", str(run_dir)]
        merged = CliRunner().invoke(app, words)
        assert (run_dir / "exports" / "merged" / "model.safetensors").is_file(), merged.output
        with pytest.raises(SwarmRequestError, match="does not hold policy 'nano': it is frozen; export it without"):
            client.export("nano", "none", step=2)
        with pytest.raises(SwarmRequestError, match="merged weights are computed of those in memory"):
            client.export("tiny", "none", step=2, merged=True)
        steps = [event for event in client.events(follow=False) if event.kind == "step"]
        assert len(steps) == 2
        metrics = steps[-1].payload["metrics"]
        assert (metrics["tiny/reward_mean"], metrics["twin/reward_mean"], metrics["reward_mean"]) == (0.5, 0.5, 0.5)
        assert (metrics["tiny/skipped"], metrics["skipped"], metrics["tiny/num_calls"]) == (0.0, 0.0, 2.0)
        assert not any(name.startswith("nano/") for name in metrics)
        assert {name for name in metrics if "/" not in name} == {
            "reward_mean",
            "staleness_mean",
            "staleness_max",
            "learning_rate",
            "skipped",
            "nonfinite_gradient",
            "nonfinite_loss",
            "num_calls",
            "num_trained_tokens",
            "num_computed_tokens",
            "optimizer_steps",
            "update_s",
        }
        with (console := Console(width=120)).capture() as shown:
            console.print(step_table(steps))
        rows = shown.get().splitlines()
        assert [("tiny" in row, "twin" in row) for row in rows[-4:]] == [(True, False), (False, True)] * 2


def test_the_example_of_two_policies_trains_one_of_them_in_at_most_sixty_lines(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "two_policies.py"
    assert len(example.read_text().splitlines()) <= 60
    run_dir = tmp_path / "run"
    with serve_thread(run_dir, worker=forked_worker()):
        command = [sys.executable, str(example), str(run_dir), "2"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stderr
    *steps, adapter = shown.stdout.splitlines()
    assert [line.split()[0] for line in steps] == ["1", "2"]
    assert json.loads((Path(adapter) / "adapter_config.json").read_text())["r"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["front", "worker"])
def test_the_journal_gives_every_policy_its_weights_after_sigkill(tmp_path: Path, victim: str) -> None:
    run_dir = tmp_path / "run"
    build_tiny_model(run_dir / "models" / "tiny")
    policies = {**CONFIG["policies"], "twin": {"model": "tiny"}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "policies": policies}))
    words = ("--start", "--config", str(tmp_path / "config.json"))
    served = serve_process(run_dir, *words)
    try:
        with served.client() as client:
            _until(client, "ROLLING")
            for _ in range(3):  # a checkpoint at step 2; step 3 is the journal's alone
                play(client)
            before = [Path(client.export(name, f"{name}-before")) for name in ("tiny", "twin")]
        if victim == "front":
            served.stop(signal.SIGKILL)
            served = serve_process(run_dir, "--start")
        else:
            (worker,) = psutil.Process(served.pid).children()
            os.kill(worker.pid, signal.SIGKILL)
        with served.client() as client:
            if victim == "worker":
                _until(client, "FAILED")
                client.start()
            _until(client, "ROLLING")
            assert client.status().step == 3
            after = [Path(client.export(name, f"{name}-after")) for name in ("tiny", "twin")]
        for one, other, file in zip(before, after, ("adapter_model.safetensors", "model.safetensors"), strict=True):
            assert (one / file).read_bytes() == (other / file).read_bytes()
    finally:
        served.stop()


def _until(client: SwarmClient, state: str) -> None:
    deadline = time.monotonic() + 120
    while client.status().state != state:
        assert time.monotonic() < deadline, client.status()
        time.sleep(0.05)
