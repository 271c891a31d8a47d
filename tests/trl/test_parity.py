"""Loss and gradient beside TRL's GRPOTrainer, on one batch: same weights, tokens, rewards and old log-probabilities.

TRL makes masks, advantages, old and reference log-probabilities itself; only its generation is given. `make test-heavy`
runs this in an environment of its own, which has TRL.

Three definitions differ, so the cases are those where they are one. TRL divides advantages by the sample deviation
plus 1e-4, ours by the population's. TRL weighs its KL term by the ratio unless told not to. Our `dapo` leaves flat
groups out of the denominators; TRL's `dapo` loss counts them, which is our `grpo`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch
from tiny_model import build_tiny_model
from torch import Tensor

from swarm_engine.config import TrainerConfig
from swarm_engine.models.decoder import Decoder
from swarm_engine.models.loading import load_policy
from swarm_engine.trainer.samples import make_samples
from swarm_engine.trainer.trainer import Sums, Trainer
from swarm_engine.types import Call, Episode, FinishReason, Mode, Outcome

pytestmark = [
    pytest.mark.heavy,
    # What TRL and its dependencies warn of is theirs to mend.
    pytest.mark.filterwarnings("ignore"),
]

GROUP_SIZE = 3
REWARDS = (1.0, 0.0, 0.25, -1.0, 2.0, 0.5, 0.5, 0.5, 0.5)
"""By episode; the last group is flat."""
TEMPERATURE = 0.7
MAX_TOKENS = 40
"""Of a completion, tool results included."""
TOLERANCE = 1e-5
SPREAD = 0.03
"""Deviation of the step that the weights took since they sampled: enough for ratios beyond every clip here."""


@dataclass(frozen=True)
class Played:
    """An episode of two calls with a tool's result between them, as token ids."""

    prompt: list[int]
    first: list[int]
    result: list[int]
    second: list[int]

    @property
    def completion(self) -> list[int]:
        """All behind the prompt."""
        return self.first + self.result + self.second

    @property
    def mask(self) -> list[int]:
        """1 where the policy sampled."""
        return [1] * len(self.first) + [0] * len(self.result) + [1] * len(self.second)


@dataclass(frozen=True)
class Case:
    """One loss, as TRL and as ours say it."""

    name: str
    trl: Mapping[str, Any]
    own: Mapping[str, Any]
    beta: float = 0.0
    is_on_policy: bool = False
    own_clip: Mapping[str, float] = field(default_factory=lambda: {"clip_low": 0.1, "clip_high": 0.3})

    def __str__(self) -> str:
        return f"{self.name}{', beta' if self.beta else ''}{', on policy' if self.is_on_policy else ''}"


CLIPS = {"epsilon": 0.1, "epsilon_high": 0.3}
PLAIN = {"algorithm": "grpo", "normalize_by_std": False}
LOSSES = (
    Case("grpo", {"loss_type": "grpo", **CLIPS}, {**PLAIN, "aggregation": "sequence_mean"}),
    Case("bnpo", {"loss_type": "bnpo", **CLIPS}, {**PLAIN, "aggregation": "token_mean"}),
    Case("dapo", {"loss_type": "dapo", **CLIPS}, {**PLAIN, "aggregation": "token_mean"}),
    Case("dr_grpo", {"loss_type": "dr_grpo", **CLIPS}, {"algorithm": "dr_grpo", "loss_length": MAX_TOKENS}),
    # The ratio of a whole sample stays nearer to 1.
    Case(
        "gspo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
        {"algorithm": "gspo", "normalize_by_std": False},
        own_clip={"clip_low": 0.02, "clip_high": 0.03},
    ),
    # TRL's bound is that of the ratio, ours that of its distance from 1.
    Case(
        "cispo",
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"algorithm": "cispo", "normalize_by_std": False},
        own_clip={"clip_high": 0.3},
    ),
)
CASES = [
    Case(one.name, one.trl, one.own, beta, is_on_policy, one.own_clip)
    for one in LOSSES
    for beta, is_on_policy in ((0.0, False), (0.2, False), (0.0, True))
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", spread=0.05)


@pytest.fixture(scope="module")
def batch() -> list[Played]:
    """Episodes of uneven lengths; those of a group share their prompt."""
    draw = torch.Generator().manual_seed(3)

    def ids(shortest: int, longest: int) -> list[int]:
        length = int(torch.randint(shortest, longest + 1, (), generator=draw))
        return torch.randint(3, 900, (length,), generator=draw).tolist()

    played = []
    for _ in range(len(REWARDS) // GROUP_SIZE):
        prompt = ids(5, 12)
        played += [Played(prompt, ids(1, 9), ids(2, 5), ids(1, 14)) for _ in range(GROUP_SIZE)]
    return played


def trl_trainer(model_dir: Path, batch: Sequence[Played], folder: Path, **options: Any) -> Any:
    """A GRPOTrainer that is given its completions."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder),
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=len(batch),
        max_completion_length=MAX_TOKENS,
        temperature=TEMPERATURE,
        scale_rewards=options.pop("scale_rewards", "none"),
        use_bias_correction_kl=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **options,
    )

    def generated(_prompts: Any, _trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [list(one.prompt) for one in batch],
            "completion_ids": [list(one.completion) for one in batch],
            "logprobs": [[0.0] * len(one.completion) for one in batch],
            "env_mask": [list(one.mask) for one in batch],
        }

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=lambda **_: list(REWARDS),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "say"}] * len(batch)),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        rollout_func=generated,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def take_a_step(model: torch.nn.Module) -> None:
    """Move weights as an optimizer might."""
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * SPREAD)


def own_episodes(batch: Sequence[Played], logprobs_B_T: Tensor) -> list[Episode]:
    """The batch as our server records it, with these log-probabilities of every completion's tokens."""
    episodes = []
    for place, one in enumerate(batch):
        name, group = f"e{place}", f"g{place // GROUP_SIZE}"
        known: list[float] = logprobs_B_T[place].tolist()
        behind = len(one.first) + len(one.result)
        calls = (
            own_call(f"{name}-0", one.prompt, one.first, known),
            own_call(f"{name}-1", one.prompt + one.first + one.result, one.second, known[behind:]),
        )
        episodes.append(
            Episode(name, group, group, place, Mode.TRAIN, 0, calls, {"main": REWARDS[place]}, Outcome.SUCCESS)
        )
    return episodes


def own_call(name: str, prompt: Sequence[int], reply: Sequence[int], known: Sequence[float]) -> Call:
    return Call(
        call_id=name,
        index=int(name[-1]),
        policy="policy",
        agent="main",
        prompt_ids=tuple(prompt),
        completion_ids=tuple(reply),
        logprobs=tuple(known[: len(reply)]),
        policy_versions=(0,) * len(reply),
        temperature=TEMPERATURE,
        finish_reason=FinishReason.STOP,
    )


def own_gradient(model: Decoder) -> dict[str, Tensor]:
    """The gradient under the names that a Hugging Face model has."""
    twin = Decoder(model.config)
    for theirs, ours in zip(twin.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        theirs.data = ours.grad
    return dict(twin.named_weights())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_are_those_of_trl(case: Case, model_dir: Path, batch: list[Played], tmp_path: Path) -> None:
    # Of two iterations over a batch TRL keeps the log-probabilities that the first began with.
    iterations = 1 if case.is_on_policy else 2
    trl = trl_trainer(model_dir, batch, tmp_path, beta=case.beta, num_iterations=iterations, **case.trl)
    inputs = trl._generate_and_score_completions([{"prompt": "say"}] * len(batch))
    old_B_T = inputs.get("old_per_token_logps")
    assert (old_B_T is None) == case.is_on_policy
    model = load_policy(model_dir).model
    own = Trainer(model, TrainerConfig(**case.own, **case.own_clip, kl_weight=case.beta))
    if not case.is_on_policy:
        take_a_step(trl.model)
    with torch.no_grad():
        model.load_weights(dict(trl.model.named_parameters()))
        now_B_T = logprobs_of(trl, inputs)
    loss = trl.compute_loss(trl.model, inputs)
    loss.backward()

    episodes = own_episodes(batch, now_B_T if old_B_T is None else old_B_T)
    samples = make_samples(episodes, own.config, 0)
    sums = Sums()
    own_loss = own.accumulate_gradient(own.weigh(own.rows(samples), samples, range(len(samples))), 0, sums)

    assert (sums.num_clipped > 0) != case.is_on_policy, "off policy a clip has work to do"
    assert own_loss == pytest.approx(loss.item(), abs=TOLERANCE)
    gradient = own_gradient(model)
    theirs = {name: parameter.grad for name, parameter in trl.model.named_parameters()}
    assert gradient.keys() == theirs.keys()
    whole = math.sqrt(sum(float(one.square().sum()) for one in theirs.values()))
    assert whole > 1e-3
    for name, one in theirs.items():
        assert float((gradient[name] - one).norm()) <= TOLERANCE * whole, name


def logprobs_of(trl: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities of the completions under TRL's weights as they are."""
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    found: Tensor = trl._get_per_token_logps_and_entropies(trl.model, ids, mask, inputs["completion_ids"].shape[1])[0]
    return found


def test_advantages_differ_from_trl_by_its_deviation_alone(
    model_dir: Path, batch: list[Played], tmp_path: Path
) -> None:
    trl = trl_trainer(model_dir, batch, tmp_path, scale_rewards="group")
    inputs = trl._generate_and_score_completions([{"prompt": "say"}] * len(batch))
    samples = make_samples(own_episodes(batch, torch.zeros(len(batch), MAX_TOKENS)), TrainerConfig(group_size=3), 0)
    ours = [sample.advantage for sample in samples]
    # Of 1, 0, 1/4: mean 5/12, squares of the distances 49/144, 25/144 and 4/144, so their sum is 78/144 = 13/24.
    assert ours[0] == pytest.approx((7 / 12) / math.sqrt(13 / 72))
    assert float(inputs["advantages"][0]) == pytest.approx((7 / 12) / (math.sqrt(13 / 48) + 1e-4), rel=1e-5)
    assert ours[6:] == inputs["advantages"][6:].tolist() == [0.0] * 3
