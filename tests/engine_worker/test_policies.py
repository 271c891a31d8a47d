"""Several policies in one worker: what each learns from, what they share, and that it repeats itself after a kill."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted
from episodes import call, conversations, episode
from forked import forked_worker
from safetensors.torch import load_file
from worker_process import WorkerProcess

from swarm_engine import hosted
from swarm_engine.config import EngineConfig, Merge, TrainerConfig
from swarm_engine.errors import ModelError, WorkerError
from swarm_engine.models.decoder import Decoder, attend_causally
from swarm_engine.models.loading import load_policy, weights_sha256
from swarm_engine.protocol import (
    Boot,
    Export,
    Finished,
    Generate,
    Rejected,
    Sampled,
    Save,
    Saved,
    StartWeights,
    Update,
    Updated,
)
from swarm_engine.trainer.parts import combined, part_of
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord, Episode, SamplingParams
from swarm_engine.worker import Engine

LORA = {"rank": 4, "alpha": 8.0}
THREE: dict[str, dict[str, Any]] = {
    "left": {"model": "tiny", "lora": LORA},
    "right": {"model": "tiny", "lora": LORA},
    "judge": {"model": "tiny", "trainable": False},
}


def played(seed: int, **policies: str) -> list[Episode]:
    """Episodes of the agents left and right, each through the policy named for it, or of its own name."""
    return [
        replace(one, calls=tuple(replace(made, policy=policies.get(made.agent, made.agent)) for made in one.calls))
        for one in conversations(seed)
    ]


def update(step: int, episodes: list[Episode]) -> Update:
    return Update(BatchRecord(step, tuple(one.episode_id for one in episodes), step), tuple(episodes))


def boot(tiny_dir: Path, folder: Path, policies: Mapping[str, object], **config: object) -> Engine:
    config = {"policies": policies, "num_threads": 1, **config}
    return Engine.boot(Boot(config, str(tiny_dir.parent), str(folder)))


def metrics_of(engine: Engine, asked: Update) -> Updated:
    (updated,) = [answer for answer in engine.update(asked) if isinstance(answer, Updated)]
    return updated


def settle(engine: Engine) -> list[object]:
    answers: list[object] = []
    while not engine.is_idle:
        answers += engine.sample()
    return answers


# Whose is what


def test_a_policy_takes_its_own_calls_and_the_rewards_of_who_spoke_through_it() -> None:
    """Both seats of `both` count for either policy; `silent` never spoke, so its reward is anybody's."""
    calls = [
        call([5], [7], agent="a", policy="one"),
        call([5], [8], agent="b", policy="two"),
        call([5], [9], agent="both", policy="one"),
        call([5], [6], agent="both", policy="two"),
    ]
    whole = episode("e", calls, {"a": 1.0, "b": 2.0, "both": 3.0, "silent": 4.0})
    one, two = part_of(whole, "one"), part_of(whole, "two")
    assert one is not None
    assert two is not None
    assert (one.calls, one.rewards) == ((calls[0], calls[2]), {"a": 1.0, "both": 3.0, "silent": 4.0})
    assert (two.calls, two.rewards) == ((calls[1], calls[3]), {"b": 2.0, "both": 3.0, "silent": 4.0})
    assert part_of(whole, "three") is None
    nobody = episode("n", [], {"a": 1.0})
    assert part_of(nobody, "one") == nobody


def test_what_is_said_of_all_policies_by_hand() -> None:
    def one(
        reward: float | None,
        skipped: float,
        calls: float,
        tokens: float,
        ages: tuple[float, float] | None,
        **drops: int,
    ) -> Updated:
        metrics: dict[str, float | None] = {
            "reward_mean": reward,
            "staleness_mean": ages[0] if ages else None,
            "staleness_max": ages[1] if ages else None,
            "skipped": skipped,
            "nonfinite_gradient": 0.0,
            "nonfinite_loss": skipped,
            "learning_rate": 0.5,
            "num_calls": calls,
            "num_trained_tokens": tokens,
            "num_computed_tokens": 20.0,
            "optimizer_steps": 1.0,
            "update_s": 0.25,
        }
        return Updated(3, metrics, drops)

    both = combined(
        {"x": one(1.0, 0.0, 4.0, 10.0, (0.5, 2.0), stale=2), "y": one(None, 1.0, 2.0, 30.0, (1.5, 1.5), alone=1)}
    )
    assert (both.step, both.drops) == (3, {"x/stale": 2, "y/alone": 1})
    of_all = {name: value for name, value in both.metrics.items() if "/" not in name}
    assert of_all == {
        "reward_mean": 1.0,
        "staleness_mean": 1.25,  # ten tokens of 0.5 and thirty of 1.5
        "staleness_max": 2.0,
        "skipped": 0.0,
        "nonfinite_gradient": 0.0,
        "nonfinite_loss": 1.0,
        "learning_rate": 0.5,
        "num_calls": 6.0,
        "num_trained_tokens": 40.0,
        "num_computed_tokens": 40.0,
        "optimizer_steps": 2.0,
        "update_s": 0.5,
    }
    assert (both.metrics["x/num_calls"], both.metrics["y/reward_mean"]) == (4.0, None)
    silent = combined({"x": one(1.0, 0.0, 4.0, 10.0, (0.5, 2.0)), "y": one(None, 1.0, 0.0, 0.0, None)}).metrics
    assert (silent["staleness_mean"], silent["staleness_max"]) == (0.5, 2.0)
    nobody = combined({"x": one(1.0, 0.0, 0.0, 0.0, None), "y": one(None, 1.0, 0.0, 0.0, None)}).metrics
    assert (nobody["staleness_mean"], nobody["staleness_max"]) == (None, None)


def test_each_policy_ends_with_the_weights_that_a_trainer_of_its_own_gives(tiny_dir: Path, tmp_path: Path) -> None:
    """Two policies with full weights, one frozen: bit for bit those of trainers that see one policy's calls alone."""
    policies = {"left": {"model": "tiny"}, "right": {"model": "tiny"}, "judge": {"model": "tiny", "trainable": False}}
    engine = boot(tiny_dir, tmp_path, policies)
    start = load_policy(tiny_dir).model
    batches = {1: played(1), 2: played(2, right="judge")}
    for step, batch in batches.items():
        metrics = metrics_of(engine, update(step, batch)).metrics
        assert (metrics["left/skipped"], metrics["right/skipped"]) == (0.0, float(step == 2))
        assert not any(name.startswith("judge/") for name in metrics)
    for name in ("left", "right"):
        alone = Trainer(load_policy(tiny_dir).model, TrainerConfig())
        for step, batch in batches.items():
            own = [replace(one, calls=tuple(made for made in one.calls if made.policy == name)) for one in batch]
            parts = [replace(one, rewards={name: one.rewards[name]}) for one in own if one.calls]
            alone.update(update(step, batch).record, parts)
        for found, expected, before in zip(
            engine.policies[name].policy.model.parameters(), alone.model.parameters(), start.parameters(), strict=True
        ):
            assert torch.equal(found, expected)
            assert not torch.equal(found, before)
    frozen = engine.policies["judge"].policy.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(frozen, start.parameters(), strict=True))
    versions = {one.name: (one.version, one.trainable) for one in engine.ready().policies}
    assert versions == {"left": (2, True), "right": (2, True), "judge": (0, False)}


def test_frozen_policies_and_adapters_share_one_base_and_full_weights_are_their_own(
    tiny_dir: Path, tmp_path: Path
) -> None:
    engine = boot(tiny_dir, tmp_path, {**THREE, "whole": {"model": "tiny"}})
    memory = {name: one.policy.model.embedding.data_ptr() for name, one in engine.policies.items()}
    assert memory["left"] == memory["right"] == memory["judge"] != memory["whole"]
    before = {name: parameter.clone() for name, parameter in engine.policies["judge"].policy.model.named_parameters()}
    engine.update(update(1, played(1)))
    for name, parameter in engine.policies["judge"].policy.model.named_parameters():
        assert torch.equal(parameter, before[name])
    left, right = (dict(engine.policies[name].policy.model.named_parameters()) for name in ("left", "right"))
    own = [name for name in left if "branch" in name]
    assert len(own) == 3 * 4 * 2
    assert all(left[name] is not right[name] and not torch.equal(left[name], right[name]) for name in own)


def test_the_reference_of_an_adapter_is_its_start_and_copies_no_base(tiny_dir: Path, tmp_path: Path) -> None:
    engine = boot(tiny_dir, tmp_path, {"policy": {"model": "tiny", "lora": LORA}}, trainer={"kl_weight": 0.1})
    trainer = engine.policies["policy"].trainer
    assert trainer is not None
    assert trainer.reference is not None
    start = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    engine.update(update(1, played(1, left="policy", right="policy")))
    own = dict(trainer.model.named_parameters())
    for name, parameter in trainer.reference.named_parameters():
        assert torch.equal(parameter, start[name])
        assert not parameter.requires_grad
        assert (parameter is own[name]) == ("branch" not in name)
    assert any(not torch.equal(own[name], start[name]) for name in own)


@pytest.mark.parametrize("merge", [Merge.NONE, Merge.TOKEN, Merge.TREE])
def test_no_way_of_merging_changes_what_an_adapter_learns(tiny_dir: Path, merge: Merge) -> None:
    found = []
    for how in (Merge.NONE, merge):
        model = adapted(load_policy(tiny_dir, torch.float64).model)
        trainer = Trainer(model, TrainerConfig(merge=how, microbatch_tokens=40))
        trainer.update(BatchRecord(1, (), 0), conversations(1))
        found.append(torch.cat([one.detach().flatten() for one in model.parameters() if one.requires_grad]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-9


# Start weights


def test_what_policies_begin_with_is_hashed_once_a_file(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(path: Path) -> str:
        read.append(path)
        return weights_sha256(path)

    monkeypatch.setattr(hosted, "weights_sha256", counted)
    policies = {**THREE, "whole": {"model": "tiny"}, "other": {"model": "tiny"}, "nano": {"model": "nano-spy"}}
    config = EngineConfig.model_validate({"policies": policies})
    loaded = hosted.load_policies(config, str(tiny_dir.parent))
    file = hashlib.sha256((tiny_dir / "model.safetensors").read_bytes()).hexdigest()
    tiny = (StartWeights(str(tiny_dir), hashlib.sha256(file.encode()).hexdigest()),)
    assert {name: one.start_weights for name, one in loaded.items() if name != "nano"} == dict.fromkeys(
        policies.keys() - {"nano"}, tiny
    )
    (nano,) = loaded["nano"].start_weights
    assert nano.path.endswith("weights/spy.safetensors")
    assert sorted(read) == sorted([tiny_dir, Path(nano.path)])


# Sampling


def test_each_policy_samples_from_its_own_weights(tiny_dir: Path, tmp_path: Path) -> None:
    engine = boot(tiny_dir, tmp_path, THREE, trainer={"learning_rate": 0.05})

    def logprobs() -> dict[str, tuple[float, ...]]:
        for name in THREE:
            engine.generate(Generate(name, name, (5, 6, 7, 8), SamplingParams(6, temperature=0.0), is_streamed=False))
        answers = settle(engine)
        assert sum(isinstance(one, Finished) for one in answers) == 3
        versions = {one.request_id: one.policy_version for one in answers if isinstance(one, Sampled)}
        assert versions == {"left": engine.step, "right": engine.step, "judge": 0}
        return {one.request_id: one.logprobs for one in answers if isinstance(one, Sampled)}

    start = logprobs()
    assert start["left"] == start["right"] == pytest.approx(start["judge"], abs=1e-5), "an adapter begins as nothing"
    engine.update(update(1, played(1)))
    after = logprobs()
    assert after["judge"] == pytest.approx(start["judge"], abs=1e-5)
    assert len({after["left"], after["right"], after["judge"]}) == 3
    (rejected,) = engine.generate(Generate("x", "nobody", (5,), SamplingParams(1)))
    assert isinstance(rejected, Rejected)
    assert rejected.message == "there is no policy 'nobody' here, only 'left', 'right', 'judge'"


@pytest.mark.parametrize("fault", ["cache", "version", "weights"])
def test_a_sampler_that_did_not_get_the_weights_ends_the_worker(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine = boot(tiny_dir, tmp_path, {"policy": {"model": "tiny"}}, trainer={"learning_rate": 0.05})
    sampler: Any = engine.policies["policy"].sampler
    batch = played(1, left="policy", right="policy")
    engine.update(update(1, batch))
    assert settle(engine) == [], "the probe's replies are nobody's"
    match fault:
        case "cache":  # it says that the rows it holds are of the new version

            def keeps_its_prefixes(version: int) -> list[object]:
                cache = sampler._cache
                cache._versions_R[:], cache.version = version, version
                return []

            monkeypatch.setattr(sampler, "weights_changed", keeps_its_prefixes)
        case "version":
            monkeypatch.setattr(sampler, "weights_changed", lambda _: [])
        case "weights":
            sampler._model = load_policy(tiny_dir).model
    engine.update(update(2, batch))
    expected = {"version": "says that policy 'policy' at version 2 is of version 1"}
    message = expected.get(fault, r"sampler and trainer differ by .* of policy 'policy' at version 2")
    with pytest.raises(WorkerError, match=message):
        settle(engine)


def test_a_request_that_runs_goes_on_beside_the_probe(tiny_dir: Path, tmp_path: Path) -> None:
    engine = boot(tiny_dir, tmp_path, {"policy": {"model": "tiny"}}, sampler={"max_running": 1})
    engine.generate(Generate("long", "policy", (5, 6, 7), SamplingParams(40, seed=3), is_streamed=False))
    answers: list[object] = [*engine.sample(), *engine.sample()]
    sampler: Any = engine.policies["policy"].sampler
    for step in (1, 2):  # the second comes while the first one's probe still waits for the slot
        answers += engine.update(update(step, played(step, left="policy", right="policy")))
        assert [one.request_id for one in sampler._waiting] == [f"probe of version {step}"]
    answers += settle(engine)
    assert {one.request_id for one in answers if isinstance(one, Sampled | Finished)} == {"long"}


# Checkpoints


def hashes(folder: Path) -> dict[str, str]:
    """Of all that training moves."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def test_policies_and_adapters_repeat_themselves_bit_for_bit_after_a_kill(tiny_dir: Path, tmp_path: Path) -> None:
    policies = {**THREE, "whole": {"model": "tiny"}}
    batches = {step: [*played(step), *played(step + 10, left="whole")] for step in (1, 2, 3, 4)}
    for step, batch in batches.items():
        batches[step] = [replace(one, episode_id=f"{step}-{place}") for place, one in enumerate(batch)]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with WorkerProcess(tmp_path, command=forked_worker()) as front:
        front.boot(tiny_dir.parent, straight, "", policies=policies)
        for step, batch in batches.items():
            front.send(update(step, batch))
            assert front.receive(Updated).metrics["skipped"] == 0
        front.send(Save())
        expected = hashes(Path(front.receive(Saved).path or ""))
    assert sorted(expected) == [
        "left/adapter_model.safetensors",
        "left/optimizer.safetensors",
        "right/adapter_model.safetensors",
        "right/optimizer.safetensors",
        "whole/model.safetensors",
        "whole/optimizer.safetensors",
    ]
    assert len(set(expected.values())) == 6
    with WorkerProcess(tmp_path) as front:
        front.boot(tiny_dir.parent, broken, "", policies=policies)
        for step in (1, 2):
            front.send(update(step, batches[step]))
            front.receive(Updated)
        front.send(Save())
        front.receive(Saved)
        front.send(update(3, batches[3]))
        front.kill()
    with WorkerProcess(tmp_path, command=forked_worker()) as front:
        booted = front.boot(tiny_dir.parent, broken, "", policies=policies)
        assert (booted.step, {one.name: one.version for one in booted.policies}) == (
            2,
            {"left": 2, "right": 2, "judge": 0, "whole": 2},
        )
        front.send(update(3, batches[3]), update(4, batches[4]), Save())
        assert [front.receive(Updated).step for _ in (3, 4)] == [3, 4]
        assert hashes(Path(front.receive(Saved).path or "")) == expected


def learned(engine: Engine, *steps: int) -> list[dict[str, float | None]]:
    """Train the one policy on the batches of some steps; returns the metrics, without how long it took."""
    found = []
    for step in steps:
        metrics = metrics_of(engine, update(step, played(step, left="policy", right="policy"))).metrics
        assert metrics["skipped"] == 0
        found.append({name: value for name, value in metrics.items() if name != "update_s"})
    return found


def test_an_adapter_that_is_resumed_is_the_one_that_was_saved_and_no_new_one(tiny_dir: Path, tmp_path: Path) -> None:
    """B111: after five updates its B matrices are those of the file, nothing is wrapped twice, and the loss goes on."""
    policies = {"policy": THREE["left"]}
    unbroken = boot(tiny_dir, tmp_path / "run", policies)
    fresh = boot(tiny_dir, tmp_path / "fresh", policies)
    learned(unbroken, 1, 2, 3, 4, 5)
    saved = unbroken.save(Save())
    file = load_file(Path(saved.path or "") / "policy" / "adapter_model.safetensors")
    resumed = boot(tiny_dir, tmp_path / "run", policies)
    assert resumed.step == 5
    model = resumed.policies["policy"].policy.model
    tensors = dict(model.named_adapter())
    assert sorted(tensors) == sorted(file)
    assert all(torch.equal(tensors[name], file[name]) for name in file)
    halves = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    assert len(halves) == 3 * 7, "three layers of seven projections"
    assert all(tensor.count_nonzero() for tensor in halves)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in fresh.policies["policy"].policy.model.named_parameters()]
    sampled_from = dict(resumed.policies["policy"].served.named_adapter())
    assert all(torch.equal(sampled_from[name], file[name]) for name in file)
    (six,) = learned(unbroken, 6)
    assert learned(resumed, 6) == [six]
    anew = fresh.policies["policy"].train(BatchRecord(6, (), 6), played(6, left="policy", right="policy"))
    assert anew.metrics["loss"] != six["loss"]


def test_the_base_of_an_adapter_is_frozen_after_a_resume_too(tiny_dir: Path, tmp_path: Path) -> None:
    """B112: as many parameters are trained as before, in the optimizer too, and no bit of the base moves."""

    def trainable(engine: Engine) -> list[tuple[str, int]]:
        model = engine.policies["policy"].policy.model
        return [(name, one.numel()) for name, one in model.named_parameters() if one.requires_grad]

    def base(engine: Engine) -> dict[str, str]:
        model = engine.policies["policy"].policy.model
        return {
            name: hashlib.sha256(one.detach().numpy().tobytes()).hexdigest()
            for name, one in model.named_parameters()
            if "branch" not in name
        }

    policies = {"policy": THREE["left"]}
    fresh = boot(tiny_dir, tmp_path, policies)
    before, counted = base(fresh), trainable(fresh)
    # Three layers; (inputs + outputs) * rank for each of the four matrices.
    total = 3 * 4 * ((96 + 288) + (96 + 96) + (96 + 576) + (288 + 96))
    assert sum(count for _, count in counted) == total
    learned(fresh, 1, 2)
    fresh.save(Save())
    resumed = boot(tiny_dir, tmp_path, policies)
    assert (resumed.step, trainable(resumed)) == (2, counted)
    learned(resumed, 3, 4)
    assert base(fresh) == before
    assert base(resumed) == before
    trainer = resumed.policies["policy"].trainer
    assert trainer is not None
    moments = [tensor.numel() for name, tensor in trainer.optimizer.state().items() if tensor.dim() > 0]
    assert sum(moments) == 2 * total, "the two moments of what is trained"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rank", "r is 4 in its adapter_config.json and 8 in the model's"),
        ("base", "sha256 is .* in its base.json"),
    ],
)
def test_a_checkpoint_of_another_adapter_or_base_is_refused(
    tiny_dir: Path, tmp_path: Path, change: str, message: str
) -> None:
    root = tmp_path / "models"
    shutil.copytree(tiny_dir, root / "tiny")
    config: dict[str, Any] = {"policies": {"policy": {"model": "tiny", "lora": dict(LORA)}}, "num_threads": 1}
    asked = Boot(config, str(root), str(tmp_path / "checkpoints"))
    engine = Engine.boot(asked)
    engine.save(Save())
    Engine.boot(asked)
    if change == "rank":
        config["policies"]["policy"]["lora"]["rank"] = 8
    else:
        weights = root / "tiny" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        Engine.boot(asked)


def test_an_exported_adapter_starts_a_policy_frozen_or_trained(tiny_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "models"
    shutil.copytree(tiny_dir, root / "tiny")
    config: dict[str, Any] = {"policies": {"left": THREE["left"], "right": THREE["right"]}, "num_threads": 1}
    first = Engine.boot(Boot(config, str(root), str(tmp_path / "first")))
    first.update(update(1, played(1)))
    assert first.export(Export("left", str(root / "mine"))).error is None
    policies = {"trained": {"model": "mine"}, "frozen": {"model": "mine", "trainable": False}, "new": THREE["left"]}
    config = {"policies": policies, "num_threads": 1, "trainer": {"kl_weight": 0.1}}
    again = Engine.boot(Boot(config, str(root), str(tmp_path / "again")))
    left, new = (
        {**dict(engine.policies[name].policy.model.named_parameters())}
        for engine, name in ((first, "left"), (again, "new"))
    )
    for name in ("trained", "frozen"):
        policy = again.policies[name].policy
        for key, parameter in policy.model.named_parameters():
            assert torch.equal(parameter, left[key])
            assert parameter.requires_grad == (name == "trained" and "branch" in key)
        assert policy.model.embedding is new["embedding"], "one base for all"
    again.update(update(1, played(1, left="trained", right="new")))
    moved = dict(again.policies["trained"].policy.model.named_parameters())
    assert any(not torch.equal(moved[key], left[key]) for key in moved)
    trainer = again.policies["trained"].trainer
    assert trainer is not None
    assert trainer.reference is not None
    assert all(torch.equal(parameter, left[key]) for key, parameter in trainer.reference.named_parameters())
    with pytest.raises(ModelError, match="is an adapter of another form than lora says; leave lora out"):
        boot(root / "tiny", tmp_path / "other", {"policy": {"model": "mine", "lora": {"rank": 3}}})
    weights = root / "tiny" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelError, match="was trained beside other weights than model 'tiny' has now"):
        boot(root / "tiny", tmp_path / "other", {"policy": {"model": "mine"}})


def test_exports_are_an_adapter_or_merged_or_refused(tiny_dir: Path, tmp_path: Path) -> None:
    engine = boot(tiny_dir, tmp_path / "checkpoints", THREE, trainer={"learning_rate": 1e-3})
    engine.update(update(1, played(1)))
    adapter, merged, judge, none = (
        engine.export(Export(name, str(tmp_path / folder), is_merged))
        for name, folder, is_merged in (
            ("left", "adapter", False),
            ("left", "merged", True),
            ("judge", "judge", False),
            ("judge", "none", True),
        )
    )
    assert [one.error for one in (adapter, merged, judge)] == [None] * 3
    assert none.error == "policy 'judge' has no adapter to merge; export it without merged"
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    tokens = torch.randint(0, 900, (1, 30), generator=torch.Generator().manual_seed(1))

    def logits(model: Decoder) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.logits(model.hidden(tokens, torch.arange(30), attend_causally))
        return found

    trained = logits(engine.policies["left"].policy.model)
    assert (logits(load_policy(tmp_path / "merged").model) - trained).abs().max() < 1e-4
    assert (logits(load_policy(tmp_path / "judge").model) - trained).abs().max() > 1e-3
    frozen = boot(tiny_dir, tmp_path / "other", {"judge": THREE["judge"]})
    assert "every policy is frozen" in (frozen.save(Save()).error or "")
