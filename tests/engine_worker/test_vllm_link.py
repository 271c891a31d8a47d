"""The worker's end of vLLM, against a fake that speaks the messages and samples from the weights it is given.

What vLLM itself does is tested in tests/vllm.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from driven_sampler import Driven, ask, num_ended
from episodes import update
from fake_vllm import fake_vllm
from pydantic import ValidationError
from sampled_weights import assert_samples_from_its_weights
from tiny_model import build_tiny_model
from worker_process import WorkerProcess

from swarm_engine.config import EngineConfig, LoraConfig, SamplerBackend, SamplerConfig, VllmDtype
from swarm_engine.errors import BadRequestError, WorkerError
from swarm_engine.models.loading import LoadedPolicy, adapt, load_policy
from swarm_engine.protocol import Boot, Failed, Finished, Rejected, Sampled, Stop, Update, Updated
from swarm_engine.sampler import Reply
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.sampler.vllm_link import PYTHON_VARIABLE
from swarm_engine.sampler.vllm_process import check_llguidance, processed
from swarm_engine.types import FinishReason, LogitsProcessors
from swarm_engine.worker import Engine

CONFIG = SamplerConfig(backend=SamplerBackend.VLLM, max_running=8)
WAIT_S = 60.0


def pid_in(home: Path) -> int:
    return int((home / "pid").read_text())


def is_gone(pid: int) -> bool:
    """Whether a process has ended within the time it may take."""
    try:
        psutil.Process(pid).wait(WAIT_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake without faults, which is the interpreter of vLLM."""
    monkeypatch.setenv(PYTHON_VARIABLE, str(fake_vllm(tmp_path / "fake")))
    return tmp_path / "fake"


@pytest.fixture(scope="module")
def shared(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driven, LoadedPolicy, Path]]:
    """One sampler for all tests that leave it as it was, its policy, and the folder of its fake."""
    home, policy = tmp_path_factory.mktemp("fake"), load_policy(tiny_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON_VARIABLE, str(fake_vllm(home)))
        driven = Driven(policy, CONFIG)
    yield driven, policy, home
    driven.sampler.close()
    assert not psutil.pid_exists(pid_in(home))


Shared = tuple[Driven, LoadedPolicy, Path]


def test_replies_are_those_of_the_process_token_by_token(shared: Shared) -> None:
    driven, tiny, _ = shared
    requests = (ask("a", top_logprobs=2), ask("b", temperature=0.0), ask("c", is_streamed=False))
    found = driven.run(*requests)
    sampler = SlotSampler(tiny.model, tiny.end_ids, is_lockstep=True)
    expected: list[Reply] = [reply for request in requests for reply in sampler.submit(request)]
    while not sampler.is_idle:
        expected += sampler.step()
    for name in "abc":
        assert [one for one in found if one.request_id == name] == [one for one in expected if one.request_id == name]
    assert len([one for one in found if one.request_id == "a" and isinstance(one, Sampled)]) == 6
    assert driven.sampler.is_idle
    assert driven.sampler.step() == []


def test_the_process_is_told_what_it_has_to_know(shared: Shared) -> None:
    _, tiny, home = shared
    told = json.loads((home / "load_model.json").read_text())
    places = {place["name"]: place for place in told["places"]}
    assert places["lm_head.weight"]["offset"] == places["model.embed_tokens.weight"]["offset"] == 0
    # One after the other, at multiples of 64 bytes: 900 x 96 numbers of 4 bytes, then a norm of 96.
    assert places["model.layers.0.input_layernorm.weight"]["offset"] == 900 * 96 * 4
    assert places["model.layers.0.self_attn.q_proj.weight"]["offset"] == 900 * 96 * 4 + 384
    assert told["config_json"]["architectures"] == ["Qwen3ForCausalLM"]
    assert (told["end_ids"], told["max_context"], told["max_running"]) == ([2], 512, 8)
    assert told["tokenizer_json"] == (tiny.tokenizer_dir / "tokenizer.json").read_text()
    # 8 contexts of 512 tokens, each in blocks of 128 and one to spare; 2 x 3 layers x 3 heads x 32 numbers of 4 bytes.
    assert told["kv_bytes"] == 8 * (512 + 128) * 2 * 3 * 3 * 32 * 4
    assert (told["dtype"], told["is_eager"]) == ("float32", True)


def test_memory_and_dtype_are_the_configs(home: Path, tiny: LoadedPolicy) -> None:
    config = CONFIG.model_copy(
        update={"vllm_kv_gib": 0.5, "vllm_eager": False, "vllm_dtype": VllmDtype.BFLOAT16, "max_running": 4096}
    )
    driven = Driven(tiny, config)
    driven.sampler.close()
    told = json.loads((home / "load_model.json").read_text())
    assert (told["kv_bytes"], told["dtype"], told["is_eager"]) == (1 << 29, "bfloat16", False)
    assert told["places"][1]["offset"] == 900 * 96 * 2


def test_a_reply_goes_on_across_an_update_and_every_token_has_its_version(shared: Shared) -> None:
    driven, tiny, _ = shared
    driven.sampler.submit(ask("a", 400))
    replies = driven.until(lambda some: len(some) >= 3)
    with torch.no_grad():
        tiny.model.embedding.mul_(1.01)
    before = driven.sampler.weights_changed(7)
    assert {one.policy_version for one in before if isinstance(one, Sampled)} <= {0}
    replies += before + driven.until(lambda some: num_ended(some) == 1)
    versions = [one.policy_version for one in replies if isinstance(one, Sampled) for _ in one.token_ids]
    assert set(versions) == {0, 7}
    assert versions == sorted(versions)
    assert not any(one.request_id.startswith("probe") for one in replies)


def test_a_cancelled_reply_ends_with_what_was_sampled(shared: Shared) -> None:
    driven, _, _ = shared
    driven.sampler.submit(ask("a", 400))
    driven.until(lambda some: len(some) >= 1)
    driven.sampler.cancel("a")
    driven.sampler.cancel("nobody")
    *_, last = driven.until(lambda some: num_ended(some) == 1)
    assert last == Finished("a", FinishReason.CANCELLED)
    assert driven.run(ask("b"))[-1] == Finished("b", FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"temperature": 0.005}, "temperature is 0.005; vLLM takes 0 and from 0.01 to 2.0", "temperature"),
        ({"temperature": 2.5}, "temperature is 2.5; vLLM takes 0 and from 0.01 to 2.0", "temperature"),
        ({"script": (7,)}, "sampler.backend to 'scripted'", None),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1", None),
    ],
)
def test_what_vllm_would_serve_otherwise_than_asked_is_refused(
    shared: Shared, fields: dict[str, Any], reason: str, param: str | None
) -> None:
    (reply,) = shared[0].sampler.submit(ask("a", **fields))
    assert isinstance(reply, Rejected)
    assert reason in reply.message
    assert reply.param == param


@pytest.mark.slow
def test_a_process_that_keeps_the_old_weights_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: LoadedPolicy
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(fake_vllm(tmp_path / "fake", never_loads_after=1)))
    driven = Driven(tiny, CONFIG)
    with torch.no_grad():
        tiny.model.blocks[1].down.mul_(1.05)
    driven.sampler.weights_changed(1)
    with torch.no_grad():
        tiny.model.blocks[1].down.mul_(1.05)
    with pytest.raises(WorkerError, match=r"on average, .* at most, the limits in float32 are 0.0001 and 0.001; vLLM"):
        driven.sampler.weights_changed(2)
    with torch.no_grad():
        tiny.model.blocks[1].down.fill_(float("nan"))
    fake_vllm(tmp_path / "fake")
    with pytest.raises(WorkerError, match=r"vLLM can't sample from the policy: .* weights are broken"):
        Driven(tiny, CONFIG)
    driven.sampler.close()


def test_a_head_that_keeps_the_old_weights_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does to a tied model that gets no `lm_head.weight`; here the model's head is of its own."""
    monkeypatch.setenv(PYTHON_VARIABLE, str(fake_vllm(tmp_path / "fake", keeps=["lm_head.weight"])))
    untied = load_policy(build_tiny_model(tmp_path / "untied", tie_word_embeddings=False))
    driven = Driven(untied, CONFIG)
    assert untied.model.head is not None
    with torch.no_grad():
        untied.model.head.add_(0.01 * torch.randn(untied.model.head.shape, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(WorkerError, match="vLLM samples from other weights than are trained"):
        driven.sampler.weights_changed(1)
    driven.sampler.close()


@pytest.mark.slow
def test_a_process_that_is_killed_or_gives_up_ends_the_worker_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: LoadedPolicy
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(fake_vllm(tmp_path / "fake", dies_at="generate")))
    driven = Driven(tiny, CONFIG)
    with pytest.raises(WorkerError, match=r"the vLLM process was killed by SIGKILL, .*worker.log"):
        driven.run(ask("a"))
    assert is_gone(pid_in(tmp_path / "fake"))
    assert driven.sampler.submit(ask("b")) == []
    fake_vllm(tmp_path / "fake", fails_at="load_weights")
    with pytest.raises(WorkerError, match="vLLM failed: out of memory"):
        Driven(tiny, CONFIG)
    fake_vllm(tmp_path / "fake", dies_at="load_model")
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        Driven(tiny, CONFIG)


def test_an_interpreter_that_is_not_there_or_has_no_vllm_is_named(
    monkeypatch: pytest.MonkeyPatch, tiny: LoadedPolicy
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(WorkerError, match=r"/nowhere/python can't be run: No such file.*in A3R_VLLM_PYTHON"):
        Driven(tiny, CONFIG)
    monkeypatch.setenv(PYTHON_VARIABLE, "")
    with pytest.raises(WorkerError, match=f"{sys.executable} can't run vLLM: No module named 'vllm'.*A3R_VLLM_PYTHON"):
        Driven(tiny, CONFIG)


def test_an_adapter_comes_merged_into_its_model(home: Path, tiny: LoadedPolicy) -> None:  # noqa: ARG001
    adapted = adapt(tiny, "tiny", "", LoraConfig(rank=2), 0)
    driven = Driven(adapted, CONFIG)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, half in adapted.model.named_adapter():
            half.add_(0.1 * torch.randn(half.shape, generator=draw))
    driven.sampler.weights_changed(1)
    driven.sampler.close()


VLLM = {"sampler": {"backend": "vllm"}}


@pytest.mark.slow
def test_a_worker_serves_and_trains_with_it(home: Path, tmp_path: Path) -> None:
    never_ends = build_tiny_model(tmp_path / "models" / "never_ends", eos_token_id=10_000)
    with WorkerProcess(tmp_path) as front:
        front.boot(never_ends.parent, tmp_path / "checkpoints", never_ends.name, **VLLM)
        front.send(ask("a", 300))
        assert front.receive(Sampled).request_id == "a"
        front.send(update(1))
        answers: list[Any] = []
        while not isinstance(answer := front.receive(object), Finished):
            answers.append(answer)
        versions = [one.policy_version for one in answers if isinstance(one, Sampled) for _ in one.token_ids]
        assert versions == sorted(versions)
        assert len(versions) == 299
        answers += [] if any(isinstance(one, Updated) for one in answers) else [front.receive(Updated)]
        (updated,) = [one for one in answers if isinstance(one, Updated)]
        assert (updated.step, updated.metrics["skipped"]) == (1, 0)
        front.send(ask("b", 1))
        assert front.receive(Sampled).policy_version == 1
        front.receive(Finished)
        pid = pid_in(home)
        front.send(Stop())
        assert front.process.wait(30) == 0
        assert not psutil.pid_exists(pid)


def test_what_sleeps_frees_its_memory_takes_requests_and_goes_on_with_the_weights_that_wake_it(
    home: Path, tiny: LoadedPolicy
) -> None:
    driven = Driven(tiny, CONFIG.model_copy(update={"vllm_sleep_mode": True}))
    assert json.loads((home / "load_model.json").read_text())["can_sleep"] is True
    driven.sampler.submit(ask("a", 40))
    before = driven.until(lambda replies: len(replies) > 0)
    driven.sampler.begin_sleep()
    before += driven.sampler.wait_asleep()
    assert (home / "slept").read_text() == "z", "before the trainer begins"
    assert driven.sampler.submit(ask("b", 3)) == []
    with torch.no_grad():
        tiny.model.embedding.mul_(1.5)
    found = driven.sampler.weights_changed(1)
    assert found == [], "nothing is sampled in its sleep"
    found = driven.until(lambda replies: num_ended(replies) == 2)
    sampled = [one for one in before + found if isinstance(one, Sampled)]
    versions = [one.policy_version for one in sampled if one.request_id == "a" for _ in one.token_ids]
    assert versions == sorted(versions)
    assert (set(versions), len(versions)) == ({0, 1}, 40)
    assert {one.policy_version for one in sampled if one.request_id == "b"} == {1}
    driven.sampler.close()


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_worker_lets_all_of_its_policies_sleep_while_it_trains_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    for name in ("tiny", "rival"):
        build_tiny_model(tmp_path / "models" / name)
    config = {
        **VLLM,
        "sampler": {**VLLM["sampler"], "vllm_sleep_mode": sleeps},
        "policies": {"policy": {"model": "tiny"}, "rival": {"model": "rival", "trainable": False}},
    }
    engine = Engine.boot(Boot(config, str(tmp_path / "models"), str(tmp_path / "checkpoints"), "run"))
    slept, seen, train = home / "slept", [], Engine.train

    def look_and_train(self: Engine, record: Update) -> Updated:
        seen.append(slept.read_text() if slept.exists() else "")
        return train(self, record)

    monkeypatch.setattr(Engine, "train", look_and_train)
    engine.update(update(1))
    assert seen == ["zz" if sleeps else ""]
    for name, version in (("policy", 1), ("rival", 0)):
        engine.generate(replace(ask(f"for {name}", 3), policy=name))
        found: list[Any] = []
        deadline = time.monotonic() + WAIT_S
        while not num_ended(found):
            assert time.monotonic() < deadline, f"{name} sleeps on"
            found += engine.sample()
        assert [one.policy_version for one in found if isinstance(one, Sampled) for _ in one.token_ids] == [version] * 3
    engine.close()


def test_two_processes_get_an_update_together_and_the_loss_of_one_is_told(
    home: Path,  # noqa: ARG001
    tiny: LoadedPolicy,
) -> None:
    others = psutil.Process().children()
    driven = Driven(tiny, CONFIG, count=2)
    processes = [process for process in psutil.Process().children() if process not in others]
    assert len(processes) == 2
    for version in (0, 7):
        if version:
            with torch.no_grad():
                tiny.model.embedding.mul_(1.01)
            assert driven.sampler.weights_changed(version) == []
        found = driven.run(ask("a"), ask("b"))  # each at another one
        expected = SlotSampler(tiny.model, tiny.end_ids, is_lockstep=True, version=version)
        for name in "ab":
            replies = expected.submit(ask(name))
            while not expected.is_idle:
                replies += expected.step()
            assert [one for one in found if one.request_id == name] == replies
    processes[0].kill()
    with pytest.raises(WorkerError, match=r"^sampler [12] of 2: the vLLM process was killed by SIGKILL"):
        driven.until(lambda _: False)
    driven.sampler.close()
    assert not any(process.is_running() for process in processes)


@pytest.mark.slow
def test_ranks_train_what_two_processes_sample_from(home: Path, tiny_dir: Path, tmp_path: Path) -> None:  # noqa: ARG001
    with WorkerProcess(tmp_path, timeout_s=300.0) as front:
        placement = {"num_workers": 2, "num_samplers": 2}
        trainer = {"learning_rate": 1e-3}
        front.boot(tiny_dir.parent, tmp_path / "checkpoints", "tiny", placement=placement, trainer=trainer, **VLLM)
        assert_samples_from_its_weights(front, 0, tmp_path)
        front.send(update(1))
        assert front.receive(Updated).step == 1
        assert_samples_from_its_weights(front, 1, tmp_path)
        family = psutil.Process(front.process.pid).children()
        assert len(family) == 3
        front.send(Stop())
        assert front.process.wait(60) == 0
        assert not any(process.is_running() for process in family)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_updates_run_beside_it_where_staleness_allows(
    home: Path,  # noqa: ARG001
    tiny_dir: Path,
    tmp_path: Path,
    staleness: int,
) -> None:
    config = {
        **VLLM,
        "num_threads": 1,
        "policies": {"policy": {"model": "tiny"}},
        "trainer": {"max_staleness": staleness},
    }
    engine = Engine.boot(Boot(config, str(tiny_dir.parent), str(tmp_path / "checkpoints")))
    (policy,) = engine.policies.values()
    assert engine.is_asynchronous is bool(staleness)
    assert not policy.has_copy
    updated = engine.train(update(1))
    assert (updated.step, policy.sampler.is_idle) == (1, True)
    assert engine.serve_weights() == []
    policy.sampler.close()


@pytest.mark.slow
def test_a_worker_that_waits_for_it_burns_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(tmp_path / "models" / "tiny", eos_token_id=10_000)
    monkeypatch.setenv(PYTHON_VARIABLE, str(fake_vllm(tmp_path / "fake", token_s=0.1)))
    with WorkerProcess(tmp_path) as front:
        front.boot(model.parent, tmp_path / "checkpoints", "tiny", **VLLM)
        process = psutil.Process(front.process.pid)
        start = process.cpu_times()
        front.send(ask("a", 20))
        while not isinstance(front.receive(object), Finished):
            pass
        end = process.cpu_times()
    # It waited for two seconds at least.
    assert end.user + end.system - start.user - start.system < 0.5


@pytest.mark.slow
def test_a_killed_process_fails_the_worker_and_a_killed_worker_leaves_none(home: Path, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "models" / "tiny", eos_token_id=10_000)
    with WorkerProcess(tmp_path) as front:
        front.boot(model.parent, tmp_path / "checkpoints", "tiny", **VLLM)
        os.kill(pid_in(home), signal.SIGKILL)
        assert "the vLLM process was killed by SIGKILL" in front.receive(Failed).reason
        assert front.process.wait(30) == 1
    with WorkerProcess(tmp_path) as front:
        front.boot(model.parent, tmp_path / "checkpoints", "tiny", **VLLM)
        front.send(ask("a", 400))
        front.receive(Sampled)
        front.kill()
        assert is_gone(pid_in(home))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"sampler": {"vllm_kv_gib": 2}}, "sampler.vllm_kv_gib is 2.0, but backend torch does not read it"),
        ({"sampler": {"vllm_eager": False}}, "sampler.vllm_eager is False, but backend torch does not read it"),
        (
            {"sampler": {"vllm_dtype": "bfloat16", "backend": "scripted"}},
            "sampler.vllm_dtype is bfloat16, but backend scripted does not read it",
        ),
        ({"sampler": {"vllm_sleep_mode": True}}, "sampler.vllm_sleep_mode is True, but backend torch does not read it"),
        (
            {"sampler": {"backend": "vllm", "vllm_sleep_mode": True}, "trainer": {"max_staleness": 1}},
            "sampler.vllm_sleep_mode is true and trainer.max_staleness is 1, but who sleeps can't",
        ),
        ({"lockstep": True, **VLLM}, "lockstep is true, but vLLM computes calls together"),
    ],
)
def test_knobs_that_would_not_be_read_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EngineConfig.model_validate(config)


def test_an_older_llguidance_takes_no_grammars() -> None:
    check_llguidance("1.9.1")
    check_llguidance("1.10.0")
    with pytest.raises(BadRequestError, match=r"has llguidance 1\.7\.6, .*install llguidance 1\.9"):
        check_llguidance("1.7.6")


def test_vllm_is_told_of_processors_in_its_own_words() -> None:
    assert processed(None) == {}
    neutral = processed(LogitsProcessors())
    assert neutral == {
        "logit_bias": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_p": 0.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    told = processed(LogitsProcessors(logit_bias=((5, 2.0),), top_p=0.0))
    assert (told["logit_bias"], told["top_p"]) == ({5: 2.0}, 1e-9)
