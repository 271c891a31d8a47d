"""Weights on another device than the CPU. No GPU is needed: see tests/helpers/other_device.py."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted
from episodes import conversations
from other_device import DEVICE, OtherDevice, There
from tiny_model import build_tiny_model
from torch import Tensor
from torch.nn import functional

from swarm_engine.config import Device, EngineConfig, Merge, SamplerBackend, TrainerConfig
from swarm_engine.errors import WorkerError
from swarm_engine.models.decoder import Decoder
from swarm_engine.models.device import find_device
from swarm_engine.models.loading import load_policy
from swarm_engine.protocol import Generate, Sampled
from swarm_engine.sampler.agreement import Probe, check_agreement
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.trainer.pieces import FUSED, PLAIN, Products
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord, SamplingParams


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), num_attention_heads=4, num_key_value_heads=2)


def test_the_stand_in_refuses_two_devices_and_unread_numbers() -> None:
    with OtherDevice():
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        assert (there + 1).device == DEVICE
        assert (there + 1).cpu().tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(RuntimeError, match="two devices"):
            there + here
        with pytest.raises((TypeError, RuntimeError)):
            there.numpy()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("max_products", [40, 1 << 26])
def test_plain_attention_is_that_of_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool, max_products: int
) -> None:
    monkeypatch.setattr("swarm_engine.trainer.pieces.MAX_PRODUCTS", max_products)
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    for seed in range(20):
        sizes = random.Random(seed)
        queries = sizes.randint(1, 9)
        keys = queries if is_causal else sizes.randint(1, 9)
        q, flow = drawn(1, 4, queries, 8), drawn(1, 4, queries, 8)
        k, v = drawn(1, 2, keys, 8), drawn(1, 2, keys, 8)
        mask = None
        if not is_causal and seed % 2:  # some queries see nothing
            mask = torch.zeros(1, 1, queries, keys, dtype=torch.float64)
            mask[torch.rand(mask.shape, generator=draw) < 0.6] = -torch.inf
        how = Products(0.3, is_causal, mask)
        out, lse = FUSED.forward(q, k, v, how)
        found = PLAIN.forward(q, k, v, how)
        torch.testing.assert_close(found, (out, lse), rtol=0, atol=1e-12)
        # As in a tree, these keys are not all that the queries see.
        whole = (flow, q, k, v, out + drawn(*out.shape), functional.softplus(drawn(*lse.shape)) + lse.clamp(min=-9))
        expected = FUSED.backward(*whole, how)
        torch.testing.assert_close(PLAIN.backward(*whole, how), expected, rtol=0, atol=1e-11)


def moved(model: Decoder) -> Decoder:
    """The same on the other device."""
    return copy.deepcopy(model).to(DEVICE)


def brought(model: Decoder) -> list[Tensor]:
    assert all(isinstance(parameter.data, There) for parameter in model.parameters())
    return [parameter.detach().cpu() for parameter in model.parameters()]


CASES: dict[str, dict[str, Any]] = {
    "tree": {"merge": Merge.TREE, "kl_weight": 0.1, "entropy_weight": 0.01},
    "chunks": {"merge": Merge.TREE, "microbatch_tokens": 24, "kl_weight": 0.1, "entropy_weight": 0.01},
    "rows": {"merge": Merge.TOKEN, "microbatch_tokens": 64, "weight_decay": 0.1},
    "whole samples": {"algorithm": "gspo", "minibatches": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_the_cpu(policy_dir: Path, case: str) -> None:
    config = TrainerConfig.model_validate(CASES[case])
    model = load_policy(policy_dir, torch.float64).model
    if case == "chunks":
        model = adapted(model, "q_proj", "v_proj", "down_proj")
    record, batch = BatchRecord(1, (), 1), conversations(1, num_groups=1, num_turns=2)
    with OtherDevice():
        there_model = moved(model)
        there = Trainer(there_model, config)
        found = there.update(record, batch).metrics
        weights, state = brought(there_model), there.optimizer.state()
        there.optimizer.load_state({name: one.cpu() for name, one in state.items()})
    here = Trainer(model, config)
    expected = here.update(record, batch).metrics
    assert found.keys() == expected.keys()
    for name in found.keys() - {"update_s"}:
        if expected[name] is None:
            assert found[name] is None, name
        else:
            assert found[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
    assert found["optimizer_steps"]
    for one, other in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", [SamplerBackend.TORCH, SamplerBackend.SCRIPTED])
def test_replies_are_those_of_the_cpu(policy_dir: Path, backend: SamplerBackend) -> None:
    """Prompts that share a beginning, that outgrow their rows, and requests that come while others run."""
    policy = load_policy(policy_dir)

    def replies(model: Decoder) -> dict[str, tuple[list[int], list[float]]]:
        sampler = SlotSampler(model, policy.end_ids, backend=backend, max_running=3)
        found: dict[str, tuple[list[int], list[float]]] = {}
        waiting = [[5, 6, 7, *range(20, 20 + 9 * number)] for number in range(5)]
        for number in range(40):
            if waiting and number % 3 == 0:
                script = (9, 8, 7) if backend is SamplerBackend.SCRIPTED else None
                params = SamplingParams(6, 0.0 if number == 6 else 0.8, seed=number, top_logprobs=2)
                sampler.submit(Generate(f"{number}", "", tuple(waiting.pop()), params, script))
            if number == 8:
                sampler.weights_changed(1)
            for reply in sampler.step():
                if isinstance(reply, Sampled):
                    tokens, logprobs = found.setdefault(reply.request_id, ([], []))
                    tokens += reply.token_ids
                    logprobs += reply.logprobs
        assert sampler.is_idle
        return found

    expected = replies(policy.model)
    with OtherDevice():
        found = replies(moved(policy.model))
    assert len(found) == 5
    for name, (tokens, logprobs) in found.items():
        assert tokens == expected[name][0]
        assert logprobs == pytest.approx(expected[name][1], abs=1e-5)


def test_sampler_and_trainer_are_compared_there_too(policy_dir: Path) -> None:
    policy = load_policy(policy_dir)
    with OtherDevice():
        there = replace(policy, model=moved(policy.model))
        check_agreement(there, is_lockstep=False)
        sampler = SlotSampler(there.model, there.end_ids)
        probe = Probe("policy", there, sampler, SamplerBackend.TORCH)
        probe.begin(0)
        assert probe.take(sampler.step()) == []
        there.model.embedding.data.mul_(1.1)
        probe.begin(0)
        there.model.embedding.data.mul_(1.1)
        with pytest.raises(WorkerError, match="sampler and trainer differ"):
            probe.take(sampler.step())


def test_no_gpu_is_an_error_that_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(WorkerError, match="device is cuda, but PyTorch"):
        find_device(Device.CUDA)


def test_what_a_gpu_does_not_do_is_refused() -> None:
    with pytest.raises(ValueError, match="lockstep is true and device is cuda"):
        EngineConfig.model_validate({"lockstep": True, "device": "cuda"})
    placement = {"num_workers": 2, "kind": "ray"}
    with pytest.raises(ValueError, match="add GPU: 1 to it"):
        EngineConfig.model_validate({"device": "cuda", "placement": placement})
    EngineConfig.model_validate({"device": "cuda", "placement": placement | {"resources": {"CPU": 4, "GPU": 1}}})
