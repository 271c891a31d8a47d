"""The worker as a process: what it answers, what it repeats, and how it ends."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from episodes import call, episode, update
from forked import forked_worker
from pydantic import ValidationError
from tiny_model import build_tiny_model
from worker_process import WorkerProcess

from swarm_engine.errors import CheckpointError, ModelError, WorkerError
from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.protocol import (
    Boot,
    Cancel,
    Export,
    Failed,
    Finished,
    Generate,
    Rejected,
    Sampled,
    Save,
    Saved,
    Stop,
    Update,
    Updated,
)
from swarm_engine.sampler import agreement
from swarm_engine.sampler.agreement import check_agreement
from swarm_engine.trainer.scoring import Row, score
from swarm_engine.types import BatchRecord, FinishReason, SamplingParams
from swarm_engine.worker import Engine


def weights_of(folder: str | Path) -> str:
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()


def test_a_conversation_with_the_worker(tiny_dir: Path, tmp_path: Path) -> None:
    with WorkerProcess(tmp_path) as front:
        booted = front.boot(tiny_dir.parent, tmp_path / "checkpoints", "tiny")
        (policy,) = booted.policies
        assert (booted.step, policy.name, policy.version, policy.trainable) == (0, "policy", 0, True)
        assert (policy.end_ids, policy.max_context) == ((2,), 512)
        assert (Path(policy.tokenizer_dir) / "chat_template.jinja").is_file()

        front.send(Generate("a", "policy", (5, 6, 7), SamplingParams(4, seed=1), is_streamed=False))
        sampled = front.receive(Sampled)
        assert (sampled.request_id, len(sampled.token_ids), sampled.policy_version) == ("a", 4, 0)
        assert all(logprob < 0 for logprob in sampled.logprobs)
        assert front.receive(Finished) == Finished("a", FinishReason.LENGTH)

        front.send(Generate("b", "other", (5,), SamplingParams(4)), Generate("c", "policy", (), SamplingParams(4)))
        assert "no policy 'other' here" in front.receive(Rejected).message
        assert "prompt is empty" in front.receive(Rejected).message

        likely = SamplingParams(40, seed=1, top_logprobs=2)
        front.send(Generate("f", "policy", (5, 6, 7), likely, is_streamed=False, grammar='start: "ab" | "abc"'))
        sampled = front.receive(Sampled)
        assert sampled.token_ids[-1] == 2
        assert sampled.top is not None
        assert [len(one) for one in sampled.top] == [min(2, len(one)) for one in sampled.top]
        assert all(
            dict(one)[token] == logprob
            for one, token, logprob in zip(sampled.top, sampled.token_ids, sampled.logprobs, strict=True)
        )
        assert front.receive(Finished) == Finished("f", FinishReason.STOP)
        front.send(Generate("g", "policy", (5,), SamplingParams(4), grammar="start: ("))
        assert "grammar can't be followed" in front.receive(Rejected).message

        front.send(update(1))
        updated = front.receive(Updated)
        assert (updated.step, updated.drops, updated.metrics["skipped"]) == (1, {}, 0)
        front.send(Generate("d", "policy", (5, 6, 7), SamplingParams(2, seed=1)))
        assert front.receive(Sampled).policy_version == 1
        assert front.receive(Sampled).policy_version == 1
        front.receive(Finished)

        front.send(Generate("e", "policy", (5,), SamplingParams(400)), Cancel("e"))
        while isinstance(answer := front.receive(object), Sampled):
            assert answer.request_id == "e"
        assert answer == Finished("e", FinishReason.CANCELLED)

        front.send(Save(), Export("policy", str(tmp_path / "out")), Export("policy", str(tmp_path / "out")))
        saved, exported, refused = (front.receive(Saved) for _ in range(3))
        assert saved == Saved(1, str(tmp_path / "checkpoints" / "step-000001"))
        assert exported.error is None
        assert weights_of(exported.path or "") == weights_of(Path(saved.path or "") / "policy")
        assert "is there already" in (refused.error or "")
        front.send(Stop())
        assert front.process.wait(30) == 0


def test_the_same_batches_give_the_same_weights_even_after_a_kill(tiny_dir: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with WorkerProcess(tmp_path, command=forked_worker()) as front:
        front.boot(tiny_dir.parent, straight, "tiny")
        for step in (1, 2, 3, 4):
            front.send(update(step))
            front.receive(Updated)
        front.send(Save())
        expected = weights_of(Path(front.receive(Saved).path or "") / "policy")
    with WorkerProcess(tmp_path) as front:
        front.boot(tiny_dir.parent, broken, "tiny")
        for step in (1, 2, 3):
            front.send(update(step))
            front.receive(Updated)
            if step == 2:
                front.send(Save())
                front.receive(Saved)
        front.send(update(4))
        front.kill()
    with WorkerProcess(tmp_path, command=forked_worker()) as front:
        booted = front.boot(tiny_dir.parent, broken, "tiny")
        assert (booted.step, booted.policies[0].version) == (2, 2)
        front.send(update(3), update(4), Save())
        assert [front.receive(Updated).step for _ in (3, 4)] == [3, 4]
        assert weights_of(Path(front.receive(Saved).path or "") / "policy") == expected


def test_a_reply_goes_on_across_an_update_and_says_which_weights_sampled_each_token(tmp_path: Path) -> None:
    never_ends = build_tiny_model(tmp_path / "models" / "never_ends", eos_token_id=10_000)
    with WorkerProcess(tmp_path, command=forked_worker()) as front:
        front.boot(never_ends.parent, tmp_path / "checkpoints", never_ends.name)
        front.send(Generate("a", "policy", (5, 6, 7), SamplingParams(300, seed=1, temperature=0.9)))
        front.receive(Sampled)
        front.send(update(1))
        versions: list[int] = [0]
        answers = []
        while not isinstance(answer := front.receive(object), Finished):
            answers.append(answer)
            if isinstance(answer, Sampled):
                versions += [answer.policy_version] * len(answer.token_ids)
        assert sum(isinstance(answer, Updated) for answer in answers) == 1
        assert len(versions) == 300
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"policies": {"policy": {"model": "nowhere"}}}, "no model 'nowhere'"),
        ({"policies": {"policy": {"model": "../x"}}}, "leads out of the model root"),
        ({"trainer": {"lerning_rate": 1}}, "lerning_rate"),
        ({"policies": {}}, "policies names none"),
    ],
)
def test_a_boot_that_cannot_be_is_refused(
    tiny_dir: Path, tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    with pytest.raises((ModelError, ValidationError), match=reason):
        Engine.boot(Boot(config, str(tiny_dir.parent), str(tmp_path)))


def test_checkpoints_of_another_run_end_the_boot(tiny_dir: Path, tmp_path: Path) -> None:
    """B117."""
    boot(tiny_dir, tmp_path).save(Save())
    config = {"policies": {"policy": {"model": "tiny"}}}
    with pytest.raises(CheckpointError, match="step-000000 was made by another run"):
        Engine.boot(Boot(config, str(tiny_dir.parent), str(tmp_path / "checkpoints"), "other"))


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 16.0}], ids=["whole", "adapter"])
def test_the_sampler_follows_every_update_and_the_reward_rises(
    tiny_dir: Path, tmp_path: Path, lora: dict[str, float] | None
) -> None:
    """B114: the sampler samples from the weights that were trained, under a version that rises by one an update.

    For an adapter, those are not the base's: the last replies have other log-probabilities there.
    """
    trainer = {"learning_rate": 5e-2 if lora else 1e-2}
    config = {"policies": {"policy": {"model": "tiny", "lora": lora}}, "num_threads": 1, "trainer": trainer}
    engine = Engine.boot(Boot(config, str(tiny_dir.parent), str(tmp_path / "checkpoints")))
    prompt, means = (5, 6, 7), []
    for step in range(1, 11):
        replies = sample(engine, prompt, count=32, seed=100 * step)
        calls = [
            call(prompt, ids, logprobs, policy_versions=(step - 1,) * len(ids)) for ids, logprobs, _ in replies.values()
        ]
        rewards = [sum(token < 450 for token in one.completion_ids) / len(one.completion_ids) for one in calls]
        means.append(sum(rewards) / len(rewards))
        for ids, logprobs, version in replies.values():
            assert version == step - 1
            row = Row(prompt + ids, tuple(range(len(prompt), len(prompt + ids))), (1.0,) * len(ids))
            with torch.no_grad():
                trained = score(engine.policies["policy"].policy.model, [row]).logprobs_N.tolist()
            assert max(abs(a - b) for a, b in zip(logprobs, trained, strict=True)) < 1e-3
        batch = tuple(
            episode(f"{step}-{place}", [one], reward)
            for place, (one, reward) in enumerate(zip(calls, rewards, strict=True))
        )
        engine.update(Update(BatchRecord(step, tuple(one.episode_id for one in batch), 0), batch))
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1, means
    with torch.no_grad():
        by_start = score(load_policy(tiny_dir).model, [row]).logprobs_N.tolist()
    assert max(abs(a - b) for a, b in zip(logprobs, by_start, strict=True)) > 0.1


def sample(
    engine: Engine, prompt: tuple[int, ...], count: int, seed: int
) -> dict[str, tuple[tuple[int, ...], tuple[float, ...], int]]:
    """Token ids, log-probabilities and policy version of some replies."""
    answers: list[object] = []
    for number in range(count):
        params = SamplingParams(6, seed=seed + number)
        answers += engine.generate(Generate(str(number), "policy", prompt, params, is_streamed=False))
    while not engine.is_idle:
        answers += engine.sample()
    return {
        one.request_id: (one.token_ids, one.logprobs, one.policy_version) for one in answers if isinstance(one, Sampled)
    }


def test_a_worker_that_cannot_boot_says_why_and_ends(tiny_dir: Path, tmp_path: Path) -> None:
    with WorkerProcess(tmp_path, command=forked_worker()) as front:
        front.send(Boot({"policies": {"policy": {"model": "nowhere"}}}, str(tiny_dir.parent), str(tmp_path)))
        assert "no model 'nowhere'" in front.receive(Failed).reason
        assert front.process.wait(30) == 1


def test_batches_come_in_order_and_never_to_a_frozen_policy(tiny_dir: Path, tmp_path: Path) -> None:
    engine = boot(tiny_dir, tmp_path)
    engine.update(update(1))
    for wrong in (1, 3):
        with pytest.raises(WorkerError, match=f"batch {wrong} was given to weights of step 1"):
            engine.update(update(wrong))
    frozen = boot(tiny_dir, tmp_path, trainable=False)
    assert not frozen.ready().policies[0].trainable
    with pytest.raises(WorkerError, match="is frozen"):
        frozen.update(update(1))


def test_a_checkpoint_that_cannot_be_written_is_an_answer_and_not_an_end(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    engine = boot(tiny_dir, tmp_path)
    saved = engine.save(Save())
    assert (saved.step, saved.path) == (0, None)
    assert "older checkpoints stand" in (saved.error or "")
    engine.update(update(1))


def boot(tiny_dir: Path, tmp_path: Path, **policy: object) -> Engine:
    config = {"policies": {"policy": {"model": "tiny"} | policy}, "num_threads": 1}
    return Engine.boot(Boot(config, str(tiny_dir.parent), str(tmp_path / "checkpoints")))


@pytest.mark.parametrize("moment", ["before boot", "idle", "in an update"])
def test_the_worker_ends_when_the_front_is_gone(tiny_dir: Path, tmp_path: Path, moment: str) -> None:
    with WorkerProcess(tmp_path) as front:
        if moment != "before boot":
            front.boot(tiny_dir.parent, tmp_path / "checkpoints", "tiny")
        if moment == "in an update":
            front.send(update(1), update(2), update(3))
        front.line.close()
        assert front.process.wait(20) == 0


def test_sampler_and_trainer_agree_and_it_is_noticed_when_they_do_not(
    tiny: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_lockstep in (False, True):
        check_agreement(tiny, is_lockstep)
    with torch.no_grad():
        tiny.model.norm.fill_(float("nan"))
    with pytest.raises(WorkerError, match="weights are broken"):
        check_agreement(tiny, False)
    whole = agreement.score

    def half_a_thousandth_off(*arguments: object) -> object:
        scores = whole(*arguments)  # type: ignore[arg-type]
        return type(scores)(scores.logprobs_N + 5e-4, scores.entropies_N)

    monkeypatch.setattr(agreement, "score", half_a_thousandth_off)
    with pytest.raises(WorkerError, match="nats about a token of"):
        check_agreement(load_policy(tiny.tokenizer_dir), False)
