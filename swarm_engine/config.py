"""Every knob of the engine. Unknown keys fail; defaults are the setting last verified by benchmarks/learning.py."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, Field, model_validator


class Frozen(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of the config models."""


class SamplerBackend(StrEnum):
    """What turns prompts into tokens."""

    TORCH = "torch"
    SCRIPTED = "scripted"
    """Plays given replies as real token ids with the model's true log-probabilities."""


class Algorithm(StrEnum):
    """How rewards become a loss."""

    GRPO = "grpo"
    """PPO's clipped surrogate over advantages within a group (Shao et al. 2024, arXiv:2402.03300)."""


class Merge(StrEnum):
    """How timelines of one batch are folded before the update; never changes the loss."""

    NONE = "none"
    TOKEN = "token"
    """Within an episode, a context goes into the latest later one that continues it."""
    TREE = "tree"
    """Over the whole batch, what contexts share is computed once."""


class Schedule(StrEnum):
    """How the learning rate goes on after its warmup."""

    CONSTANT = "constant"
    LINEAR = "linear"
    """Down to zero in a line, at `total_updates`."""
    COSINE = "cosine"
    """Down to zero on half a cosine, at `total_updates`."""


class BestBy(StrEnum):
    """What makes a checkpoint the best: the highest mean reward that its own weights earned."""

    REWARD = "reward"
    """In training: that of the batch they sampled, so it is known with the next update."""
    EVALUATION = "evaluation"
    """In all eval episodes that were claimed while they were served."""


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token_mean"
    """Sum over the batch, divided by all its trained tokens."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over each agent's sampled tokens of an episode, then over these."""


class History(StrEnum):
    """What a request goes on from whose history holds an earlier reply."""

    RECORDED = "recorded"
    """The recorded ids, unless the chat template takes something out of history by its own rule (reasoning, old tool
    results); there the template is followed, and the request starts a timeline of its own."""
    APPEND = "append"
    """The recorded ids, whatever the template takes out of history."""


class CollectionRule(StrEnum):
    """When the batch is full."""

    TASKS = "tasks"
    """`tasks_per_update` complete groups."""


class SamplerConfig(Frozen):
    """How replies are sampled."""

    backend: SamplerBackend = SamplerBackend.TORCH
    max_running: int = Field(64, ge=1, le=4096)
    """Requests decoded side by side; more wait their turn."""
    max_tokens: int = Field(512, ge=1)
    """Tokens of a reply where the request sets no limit; the context's rest bounds it too."""


class TrainerConfig(Frozen):
    """How a batch becomes an update."""

    algorithm: Algorithm = Algorithm.GRPO
    group_size: int = Field(8, ge=2, le=1024)
    """Episodes per task. Advantages are relative, so one alone teaches nothing."""
    tasks_per_update: int = Field(8, ge=1, le=4096)
    """Complete groups per update; times `group_size` it is the episodes per update."""
    learning_rate: float = Field(1e-3, gt=0, le=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.28, ge=0)
    normalize_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO) or not (Dr. GRPO)."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    kl_weight: float = Field(0.0, ge=0)
    """Pull towards the start weights; at 0 no reference policy is loaded."""
    entropy_weight: float = Field(0.0, ge=0)
    merge: Merge = Merge.TREE
    microbatch_tokens: int = Field(2048, ge=1)
    """Tokens, padding included, computed at once; bounds memory, never changes the gradient."""
    checkpoint_every: int = Field(10, ge=1)
    """Updates between checkpoints."""
    keep_last: int = Field(3, ge=1)
    """Newest checkpoints that are kept; the best is kept beside them."""
    best_by: BestBy = BestBy.REWARD
    checkpoint_required: bool = False
    """Whether a checkpoint that can't be written fails the engine. Without one training goes on, and the status says
    so: nothing is lost, but the next start has more to train again."""
    warmup_updates: int = Field(0, ge=0)
    """Updates over which the learning rate rises in a line; the first after them has all of it."""
    lr_schedule: Schedule = Schedule.CONSTANT
    total_updates: int = Field(1000, ge=1)
    """The last update of a schedule that falls; the learning rate is zero after it. `constant` does not read it."""


class PolicyConfig(Frozen):
    """One named set of weights."""

    model: str = "nano-tictactoe"
    """A name from `swarm_engine.models`, or a folder under the server's model root."""
    trainable: bool = True
    history: History = History.RECORDED


class EngineConfig(Frozen):
    """What `POST /engine/start` takes."""

    seed: int = Field(0, ge=0, lt=2**63)
    lockstep: bool = False
    """Every call is computed alone and its numbers depend on nothing else, so that a run repeats itself bit for bit."""
    policies: dict[str, PolicyConfig] = Field(default_factory=lambda: {"policy": PolicyConfig()})
    rule: CollectionRule = CollectionRule.TASKS
    episode_timeout_s: float = Field(600.0, gt=0)
    """An episode that runs longer than this ends as `timeout`, and its place in the group is given out again."""
    lease_s: float = Field(60.0, gt=0)
    """A client silent for this long about an episode has lost it; every call and heartbeat renews the lease."""
    num_threads: int | None = Field(None, ge=1, le=1024)
    """Threads of the worker; None takes one for a model too small to share, otherwise the cores that are there."""
    sampler: SamplerConfig = SamplerConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if len(self.policies) != 1:
            raise ValueError(
                f"policies names {len(self.policies)} policies, this engine serves exactly 1; start one server a policy"
            )
        return self
