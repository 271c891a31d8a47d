"""Every knob of the engine. Unknown keys fail; defaults are the setting last verified by benchmarks/learning.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self, assert_never
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator

POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


class Frozen(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True):
    """Base of the config models. An error does not show the value, which may be what was to be kept secret."""


class SamplerBackend(StrEnum):
    """What turns prompts into tokens."""

    TORCH = "torch"
    SCRIPTED = "scripted"
    """Plays given replies as real token ids with the model's true log-probabilities."""
    VLLM = "vllm"
    """vLLM in a process and an environment of its own, see docs/vllm.md."""


class Device(StrEnum):
    """What weights are computed with."""

    CPU = "cpu"
    CUDA = "cuda"
    """The first GPU that a process sees, or one for each rank on a machine."""


class VllmDtype(StrEnum):
    """What vLLM computes in; the trainer's weights are float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Algorithm(StrEnum):
    """How rewards become a loss; each is a file of `swarm_engine.trainer.algorithms`, compared in docs/trainer.md."""

    GRPO = "grpo"
    """PPO's clipped surrogate over advantages within a group (Shao et al. 2024, arXiv:2402.03300)."""
    DR_GRPO = "dr_grpo"
    """Without the two divisions that favour easy tasks and long failures (Liu et al. 2025, arXiv:2503.20783)."""
    RLOO = "rloo"
    """REINFORCE against the mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)."""
    REINFORCE_PP = "reinforce_pp"
    """Advantages normalized over the whole batch, not the group (Hu et al. 2025, arXiv:2501.03262)."""
    DAPO = "dapo"
    """Flat groups count nowhere, and what is too long is punished softly (Yu et al. 2025, arXiv:2503.14476)."""
    GSPO = "gspo"
    """One ratio for a whole sample (Zheng et al. 2025, arXiv:2507.18071)."""
    CISPO = "cispo"
    """Clips the weight of a token and never its gradient (MiniMax 2025, arXiv:2506.13585)."""
    PPO_CLIP = "ppo_clip"
    """The clipped surrogate, several epochs over one batch (Schulman et al. 2017, arXiv:1707.06347); no critic."""
    SFT = "sft"
    """Imitates the episodes whose reward is above zero, all alike."""


class OffPolicy(StrEnum):
    """What is done about tokens that other weights sampled, be they older or computed otherwise."""

    NONE = "none"
    """The ratio is that of policy and sampling; an algorithm without a ratio does nothing."""
    TRUNCATED = "truncated"
    """Decoupled objective: the ratio is that of policy and proximal policy, the weights this update began with, and
    every token is weighted by exp(proximal - sampling), at most `off_policy_high`."""
    MASKED = "masked"
    """The same, but a token whose weight is outside [`off_policy_low`, `off_policy_high`] is left out of the loss."""


class Merge(StrEnum):
    """How timelines of one batch are folded before the update; all but `text` leave the loss as it was."""

    NONE = "none"
    TOKEN = "token"
    """Within an episode, a context goes into the latest later one that continues it."""
    TEXT = "text"
    """The same where messages are equal by role, name, content and tool calls, whatever became of their tokens. Later
    replies are then trained under a history that the sampler did not see; `out_of_context_tokens` counts them."""
    TREE = "tree"
    """Over the whole batch, what contexts share is computed once."""


class Schedule(StrEnum):
    """How the learning rate goes on after its warmup."""

    CONSTANT = "constant"
    LINEAR = "linear"
    """Down in a line; `total_updates` is the last update whose rate is above zero."""
    COSINE = "cosine"
    """The same on half a cosine."""


class BestBy(StrEnum):
    """What makes a checkpoint the best: the highest mean reward that its own weights earned."""

    REWARD = "reward"
    """In training: that of the batch they sampled, so it is known with the next update."""
    EVALUATION = "evaluation"
    """In eval episodes that were claimed while they were served; of those with different tags, the ones that most
    versions have played."""


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token_mean"
    """Sum over the batch, divided by all its trained tokens."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over each agent's sampled tokens of an episode, then over these."""
    CONSTANT = "constant"
    """Sum over each agent's sampled tokens of an episode, divided by `loss_length`; then the mean over these."""


class History(StrEnum):
    """What a request goes on from whose history holds an earlier reply."""

    RECORDED = "recorded"
    """The recorded ids, unless the chat template takes something out of history by its own rule (reasoning, old tool
    results); there the template is followed, and the request starts a timeline of its own."""
    APPEND = "append"
    """The recorded ids, whatever the template takes out of history."""


class ModelKind(StrEnum):
    """Whose weights a policy began with."""

    EMBEDDED = "embedded"
    """The small model that ships here, or one of its architecture and vocabulary: warmed up for other rules, say."""
    PUBLISHED = "published"
    """Any other."""


class SamplerConfig(Frozen):
    """How replies are sampled."""

    backend: SamplerBackend = SamplerBackend.TORCH
    max_running: int = Field(64, ge=1, le=4096)
    """Requests decoded side by side; more wait their turn."""
    max_tokens: int = Field(512, ge=1)
    """Tokens of a reply where the request sets no limit; the context's rest bounds it too."""
    vllm_dtype: VllmDtype | None = None
    """None takes float32."""
    vllm_kv_gib: float | None = Field(None, gt=0)
    """GiB for keys and values; None takes what `max_running` whole contexts need, 4 at most."""
    vllm_eager: bool | None = None
    """Run the model as it is; False compiles it at the start, which takes minutes. None is yes."""
    vllm_sleep_mode: bool | None = None
    """Give the memory of its card to the trainer while an update runs. None is no."""

    @model_validator(mode="after")
    def _only_vllm_reads_its_knobs(self) -> Self:
        for name in ("vllm_dtype", "vllm_kv_gib", "vllm_eager", "vllm_sleep_mode"):
            value = getattr(self, name)
            if value is not None and self.backend is not SamplerBackend.VLLM:
                raise ValueError(
                    f"sampler.{name} is {value}, but backend {self.backend} does not read it; leave {name} out, or set "
                    "backend to 'vllm'"
                )
        return self


@dataclass(frozen=True, slots=True)
class Knobs:
    """What an algorithm runs with: its own values, or the config's where that names one. None: it does not read it."""

    aggregation: Aggregation
    loss_length: int | None = None
    normalize_by_std: bool | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    epochs: int | None = None
    minibatches: int | None = None
    sft_weight: float | None = None
    teacher_weight: float | None = None
    overlong_limit: int | None = None
    """None too where no length is punished."""
    overlong_margin: int | None = None
    off_policy: OffPolicy | None = None
    off_policy_low: float | None = None
    off_policy_high: float | None = None


_REINFORCE: Mapping[str, Any] = {"sft_weight": 0.0, "teacher_weight": 0.0, "off_policy": OffPolicy.NONE}
_CLIPPED: Mapping[str, Any] = {
    **_REINFORCE,
    "aggregation": Aggregation.TOKEN_MEAN,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "epochs": 1,
    "minibatches": 1,
}

OWN_VALUES: Mapping[Algorithm, Mapping[str, Any]] = {
    Algorithm.GRPO: {**_CLIPPED, "clip_high": 0.28, "normalize_by_std": True},
    Algorithm.DR_GRPO: {**_CLIPPED, "aggregation": Aggregation.CONSTANT},
    Algorithm.RLOO: {**_REINFORCE, "aggregation": Aggregation.CONSTANT},
    Algorithm.REINFORCE_PP: {**_CLIPPED, "normalize_by_std": True},
    Algorithm.DAPO: {
        **_CLIPPED,
        "clip_high": 0.28,
        "normalize_by_std": True,
        "overlong_limit": None,
    },
    Algorithm.GSPO: {
        **_CLIPPED,
        "aggregation": Aggregation.SEQUENCE_MEAN,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "normalize_by_std": True,
    },
    # No lower bound, as in the paper, which leaves the upper one to tuning; 5 = 1 + 4 is that of ScaleRL
    # (Khatri et al. 2025, arXiv:2510.13786).
    Algorithm.CISPO: {
        **{name: value for name, value in _CLIPPED.items() if name != "clip_low"},
        "clip_high": 4.0,
        "normalize_by_std": True,
    },
    Algorithm.PPO_CLIP: {**_CLIPPED, "normalize_by_std": True, "epochs": 4, "minibatches": 4},
    Algorithm.SFT: {"aggregation": Aggregation.TOKEN_MEAN},
}
"""What each algorithm reads, and its own value of it. A knob that is missing here is refused with that algorithm."""

LOSS_LENGTH = 512
"""Own value of `loss_length`: the longest reply of `SamplerConfig.max_tokens`. It scales the learning rate alone."""

WEIGHT_BOUNDS: Mapping[OffPolicy, Mapping[str, float]] = {
    OffPolicy.NONE: {},
    OffPolicy.TRUNCATED: {"off_policy_high": 2.0},
    OffPolicy.MASKED: {"off_policy_low": 0.5, "off_policy_high": 5.0},
}
"""The bounds that each correction reads, and its own values of them."""


EMBEDDED_RATE, PUBLISHED_RATE, PUBLISHED_LORA_RATE = 1e-3, 1e-6, 1e-5
"""Own values of `learning_rate`, by what is trained. The embedded model's is the one that benchmarks/learning.py
verifies, of its branches too; the others are those of TRL's guide to reinforcement learning with and without LoRA,
after Schulman et al. 2025 (LoRA without regret): ten times as much for branches. At the embedded model's rate one
update destroys a published model."""
EMBEDDED_EPISODES = 64
"""Episodes per update that the embedded model's rate is for; for fewer it falls in proportion, because Adam's steps are
as long and noisier. With the root of their share nim still collapsed."""
EMBEDDED_WARMUP = 5
"""Own value of `warmup_updates` for the embedded model; 0 for any other, as public trainers have it. Adam's first step
moves every weight by the whole rate, noise or not: its moments are the one gradient that it has seen."""


MAX_COUNT = 10**9
"""Tokens or updates that any knob may name; far more than this has no float to be divided by."""
MAX_WEIGHT = 1e3
"""Of a term of the loss, beside 1 for the algorithm's own."""
MAX_RATIO = 1e6
"""Bound of a ratio that is as good as none; float32, which ratios are in, ends at 3.4e38."""


class TrainerConfig(Frozen):
    """How a batch becomes an update. A knob that is None takes the algorithm's own value, see `OWN_VALUES`; one that
    the algorithm does not read is refused."""

    algorithm: Algorithm = Algorithm.GRPO
    group_size: int = Field(8, ge=2, le=1024)
    """Episodes per task. Advantages are relative, so one alone teaches nothing."""
    tasks_per_update: int = Field(8, ge=1, le=4096)
    """Complete groups per update; times `group_size` it is the episodes per update."""
    learning_rate: float | None = Field(None, gt=0, le=1)
    """None takes what fits the kind of model that is trained, see `EMBEDDED_RATE`; in a run folder that was used, what
    it was begun with."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    """Times the learning rate, it is what a step takes off each matrix, so that product is below 1."""
    max_grad_norm: float = Field(1.0, ge=1e-6, le=1e6)
    """Below, a gradient would vanish beside AdamW's epsilon; above, its squares could leave float32."""
    clip_low: float | None = Field(None, ge=0, lt=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; see `OffPolicy` for what it is a ratio to."""
    clip_high: float | None = Field(None, ge=0, le=MAX_RATIO)
    normalize_by_std: bool | None = None
    """Divide advantages by the standard deviation of what they are measured against."""
    aggregation: Aggregation | None = None
    loss_length: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Tokens; what aggregation `constant` divides by."""
    epochs: int | None = Field(None, ge=1, le=64)
    """Times that a batch is gone through in one update."""
    minibatches: int | None = Field(None, ge=1, le=4096)
    """Optimizer steps an epoch, each with a share of the batch's samples; every epoch cuts them anew."""
    kl_weight: float = Field(0.0, ge=0, le=MAX_WEIGHT)
    """Pull towards the start weights; at 0 no reference policy is loaded."""
    entropy_weight: float = Field(0.0, ge=0, le=MAX_WEIGHT)
    sft_weight: float | None = Field(None, ge=0, le=MAX_WEIGHT)
    """Weight of the negative log-likelihood of samples with a reward above zero, beside 1 for the algorithm's loss."""
    teacher_weight: float | None = Field(None, ge=0, le=MAX_WEIGHT)
    """Weight of the teacher's word in a token's advantage: log(teacher / sampling), in nats, beside what rewards give.
    Needs `teacher`, which says whom to ask."""
    overlong_limit: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Trained tokens of one agent in one episode beyond which 1 is taken off its reward; None punishes no length."""
    overlong_margin: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Tokens before the limit over which that punishment grows in a line from 0; None takes a fifth of the limit."""
    off_policy: OffPolicy | None = None
    off_policy_low: float | None = Field(None, ge=0, le=1)
    """Bounds of a token's weight exp(proximal - sampling), which is 1 where the weights that sampled it are those that
    the update began with."""
    off_policy_high: float | None = Field(None, ge=1, le=MAX_RATIO)
    max_staleness: int | None = Field(None, ge=0, le=MAX_COUNT)
    """Updates between the weights that sampled a sample's oldest trained token and those being trained; a sample beyond
    it is dropped as `stale`. Above 0 sampling goes on while an update runs, for as many batches ahead as this allows;
    None and 0 are on policy, and None drops none."""
    merge: Merge = Merge.TREE
    ignore_tools: bool | None = None
    """Whether calls that were offered other tools continue each other; only merging by text reads it, None is no."""
    microbatch_tokens: int = Field(2048, ge=1, le=MAX_COUNT)
    """Tokens, padding included, whose activations are held at once; never changes the gradient."""
    checkpoint_every: int = Field(10, ge=1, le=MAX_COUNT)
    """Updates between checkpoints."""
    keep_last: int = Field(3, ge=1, le=MAX_COUNT)
    """Newest checkpoints that are kept; the best is kept beside them."""
    best_by: BestBy | None = None
    """None is by evaluation where a checkpoint has one, by reward elsewhere."""
    checkpoint_required: bool = False
    """Whether a checkpoint that can't be written fails the engine. Without one training goes on, and the status says
    so: nothing is lost, but the next start has more to train again."""
    warmup_updates: int | None = Field(None, ge=0, le=MAX_COUNT)
    """Updates over which the learning rate rises in a line; the first after them has all of it. None is as for
    `learning_rate`."""
    lr_schedule: Schedule = Schedule.CONSTANT
    total_updates: int = Field(1000, ge=1, le=MAX_COUNT)
    """The last update of a schedule that falls; after it the rate is zero and updates change nothing. `constant` does
    not read it."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether sampling goes on while an update runs."""
        return bool(self.max_staleness)

    def resolved(self, kind: ModelKind, *, has_lora: bool) -> Self:
        """The same with a learning rate and a warmup, where none is named those of a model's kind.

        Args:
            has_lora: branches beside the model are trained, not the model.
        """
        match kind:
            case ModelKind.EMBEDDED:
                share = min(1.0, self.group_size * self.tasks_per_update / EMBEDDED_EPISODES)
                rate, warmup = EMBEDDED_RATE * share, EMBEDDED_WARMUP
            case ModelKind.PUBLISHED:
                rate, warmup = PUBLISHED_LORA_RATE if has_lora else PUBLISHED_RATE, 0
            case _:
                assert_never(kind)
        if self.lr_schedule is not Schedule.CONSTANT:
            warmup = min(warmup, self.total_updates - 1)
        return self.model_copy(
            update={
                "learning_rate": rate if self.learning_rate is None else self.learning_rate,
                "warmup_updates": warmup if self.warmup_updates is None else self.warmup_updates,
            }
        )

    def going_on_from(self, begun: TrainerConfig) -> Self:
        """The same where nothing is named with what a run was begun with."""
        names = (name for name in RESOLVED if getattr(self, name) is None)
        return self.model_copy(update={name: getattr(begun, name) for name in names})

    @property
    def knobs(self) -> Knobs:
        """What the algorithm runs with."""
        return Knobs(**(self._own_values() | self._given()))

    @model_validator(mode="after")
    def _tools_matter_to_text(self) -> Self:
        if self.ignore_tools is not None and self.merge is not Merge.TEXT:
            raise ValueError(f"trainer.ignore_tools goes with merge: text, not {self.merge}; leave one of them out")
        return self

    @model_validator(mode="after")
    def _a_schedule_has_room_to_fall(self) -> Self:
        if self.lr_schedule is not Schedule.CONSTANT and (self.warmup_updates or 0) >= self.total_updates:
            raise ValueError(
                f"trainer.warmup_updates is {self.warmup_updates} and trainer.total_updates is {self.total_updates}, "
                f"so lr_schedule {self.lr_schedule} would be at zero where the warmup ends; lower warmup_updates or "
                "raise total_updates"
            )
        return self

    @model_validator(mode="after")
    def _decay_leaves_something(self) -> Self:
        rate = self.learning_rate or EMBEDDED_RATE  # the largest of those that a model's kind may bring
        if (taken := rate * self.weight_decay) >= 1:
            raise ValueError(
                f"trainer.weight_decay is {self.weight_decay:g} and trainer.learning_rate is {rate:g}: "
                f"every step would take {taken:g} times a weight off it, and the limit is below 1; lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _every_knob_is_read(self) -> Self:
        own, given = self._own_values(), self._given()
        for name, value in given.items():
            if name not in own:
                raise ValueError(f"trainer.{name} is {value}, but {self._why_unread(name)}; leave {name} out")
        limit, margin = given.get("overlong_limit"), given.get("overlong_margin")
        if limit is not None and margin is not None and margin > limit:
            raise ValueError(
                f"trainer.overlong_margin is {margin} tokens and lies before trainer.overlong_limit, which is {limit}; "
                "lower the margin or raise the limit"
            )
        return self

    def _given(self) -> dict[str, Any]:
        """The knobs that the config names itself."""
        named = {field.name: getattr(self, field.name) for field in fields(Knobs)}
        return {name: value for name, value in named.items() if value is not None}

    def _own_values(self) -> dict[str, Any]:
        """What is read under this config, with the algorithm's own values."""
        own = dict(OWN_VALUES[self.algorithm])
        if (self.aggregation or own["aggregation"]) is Aggregation.CONSTANT:
            own["loss_length"] = LOSS_LENGTH
        if "overlong_limit" in own and self.overlong_limit is not None:
            own["overlong_margin"] = max(1, self.overlong_limit // 5)
        if "off_policy" in own:
            own |= WEIGHT_BOUNDS[self.off_policy or own["off_policy"]]
        return own

    def _why_unread(self, name: str) -> str:
        reads = OWN_VALUES[self.algorithm]
        match name:
            case "loss_length":
                return f"only aggregation constant divides by it, not {self.aggregation or reads['aggregation']}"
            case "overlong_margin" if "overlong_limit" in reads:
                return "overlong_limit is not set, so no length is punished"
            case "off_policy_low" | "off_policy_high" if "off_policy" in reads:
                return f"off_policy {self.off_policy or reads['off_policy']} does not read it"
        readers = [str(algorithm) for algorithm, own in OWN_VALUES.items() if _ENABLED_BY.get(name, name) in own]
        return f"algorithm {self.algorithm} does not read it; it belongs to {', '.join(readers)}"


RESOLVED = ("learning_rate", "warmup_updates")
"""Fields of the trainer whose own value depends on what is trained."""

_ENABLED_BY: Mapping[str, str] = {
    "overlong_margin": "overlong_limit",
    "off_policy_low": "off_policy",
    "off_policy_high": "off_policy",
}
"""Knobs that another one brings with it."""


class Target(StrEnum):
    """A projection of every layer that may have a low-rank branch, as peft calls it."""

    Q = "q_proj"
    K = "k_proj"
    V = "v_proj"
    OUT = "o_proj"
    GATE = "gate_proj"
    UP = "up_proj"
    DOWN = "down_proj"


_NO_DROPOUT = "sampler and trainer would compute different functions"
_NO_VARIANT = "only plain LoRA is computed here"
UNSUPPORTED_LORA: Mapping[str, str] = {
    "dropout": _NO_DROPOUT,
    "lora_dropout": _NO_DROPOUT,
    "use_rslora": _NO_VARIANT + "; alpha scales by alpha / rank, so set it to alpha times the root of the rank",
    "use_dora": _NO_VARIANT,
}
"""Keys that other tools know, and why they are none here."""


class LoraConfig(Frozen):
    """Low-rank branches beside frozen matrices (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = Field(16, ge=1, le=1024)
    alpha: float = Field(32.0, gt=0, le=1e6)
    """What a branch adds is scaled by alpha / rank."""
    targets: tuple[Target, ...] = tuple(Target)
    """Kept in the order of `Target`, however they are named."""

    @model_validator(mode="before")
    @classmethod
    def _is_plain(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, why in UNSUPPORTED_LORA.items():
                if given.get(name):
                    raise ValueError(f"lora.{name} is {given[name]}, but {why}; leave it out")
        return given

    @field_validator("targets")
    @classmethod
    def _targets_are_a_set(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if not targets or len(set(targets)) != len(targets):
            raise ValueError(
                f"lora.targets is {[str(one) for one in targets]}; name each once, one at least, of {', '.join(Target)}"
            )
        return tuple(target for target in Target if target in targets)


class PolicyConfig(Frozen):
    """One named set of weights."""

    model: str = "nano-tictactoe"
    """A name from `swarm_engine.models`, or a folder under the server's model root."""
    trainable: bool = True
    lora: LoraConfig | None = None
    """Trains branches beside the model's weights, which stay as they are and are in memory once for all policies that
    do so; None trains the weights themselves."""
    history: History = History.RECORDED

    @model_validator(mode="after")
    def _lora_is_trained(self) -> Self:
        if self.lora is not None and not self.trainable:
            raise ValueError(
                "lora begins without an effect and trainable is false, so it would never have one; leave lora out"
            )
        return self


class TeacherConfig(Frozen):
    """Who says how likely it finds what was sampled: a server with OpenAI's completions route and vLLM's
    `prompt_logprobs`, on a model with the policy's tokenizer."""

    base_url: str = Field(pattern=r"^https?://\S*$")
    """Up to and including `/v1`. Its key, where it wants one, is in the server's environment (`A3R_TEACHER_API_KEY`):
    a config comes over HTTP and is kept and shown, and one that could name a variable could have any secret sent to
    any address."""
    model: str = Field(min_length=1)
    max_running: int = Field(16, ge=1, le=1024)
    """Requests at once."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            has_host = bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise ValueError(f"no URL: {error}") from None
        if not has_host:
            raise ValueError("no URL: it names no host; it goes like http://localhost:8000/v1")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(
                "it holds a user name, a password or a query, and a config is kept and shown: leave them out, and put "
                "the key into A3R_TEACHER_API_KEY in the environment of `swarm serve`"
            )
        return value


class PlacementKind(StrEnum):
    """Who starts what runs beside the engine worker: the trainer's other ranks, and vLLM."""

    LOCAL = "local"
    """The engine worker, as processes of this machine."""
    RAY = "ray"
    """The Ray cluster that RAY_ADDRESS names, that runs here, or that is started here, as actors."""


class PlacementConfig(Frozen):
    """How many processes train and sample, and where. It changes how long an update takes and what it holds in memory,
    and weights by rounding alone."""

    num_workers: int = Field(1, ge=1, le=4096)
    """Ranks that share every update and hold a shard of the weights each; the first is the engine worker itself."""
    num_samplers: int = Field(1, ge=1, le=4096)
    """vLLM engines of each policy, with all of its weights each."""
    kind: PlacementKind = PlacementKind.LOCAL
    resources: dict[str, float] | None = None
    """What Ray reserves for each rank but the first, by its own names (`CPU`, `GPU`, …); None is one CPU."""
    sampler_resources: dict[str, float] | None = None
    """What Ray reserves for each vLLM engine; None is one CPU."""
    timeout_s: float | None = Field(None, gt=0)
    """How long Ray may look for room, or a cluster grow until it has it; None is a minute."""

    @property
    def rank_bundle(self) -> dict[str, float]:
        """What Ray reserves for a rank."""
        return ONE_CPU if self.resources is None else self.resources

    @property
    def sampler_bundle(self) -> dict[str, float]:
        """What Ray reserves for a vLLM engine."""
        return ONE_CPU if self.sampler_resources is None else self.sampler_resources

    @model_validator(mode="after")
    def _resources_are_read(self) -> Self:
        if self.resources is not None and self.num_workers == 1:
            raise ValueError(
                "placement.resources are for the ranks beside the first, but placement.num_workers is 1; raise "
                "num_workers or leave resources out"
            )
        for key, resources in (("resources", self.resources), ("sampler_resources", self.sampler_resources)):
            if resources is not None and self.kind is not PlacementKind.RAY:
                raise ValueError(f"placement.{key} are Ray's, but placement.kind is {self.kind}; leave one of them out")
            for name, amount in (resources or {}).items():
                if amount <= 0:
                    raise ValueError(f"placement.{key}.{name} is {amount}; leave out what is not needed")
        if self.timeout_s is not None and self.kind is not PlacementKind.RAY:
            raise ValueError(f"placement.timeout_s is Ray's, but placement.kind is {self.kind}; leave one of them out")
        return self


ONE_CPU = {"CPU": 1.0}
"""Own value of what Ray reserves."""


class EngineConfig(Frozen):
    """What `POST /engine/start` takes."""

    seed: int = Field(0, ge=0, lt=2**63)
    lockstep: bool = False
    """Every call is computed alone and its numbers depend on nothing else, so that a run repeats itself bit for bit."""
    policies: dict[str, PolicyConfig] = Field(default_factory=lambda: {"policy": PolicyConfig()})
    """By name; a call says which of them answers."""
    episode_timeout_s: float = Field(600.0, gt=0)
    """An episode that runs longer than this ends as `timeout`, and its place in the group is given out again."""
    lease_s: float = Field(60.0, gt=0)
    """A client silent for this long about an episode has lost it; every call and heartbeat renews the lease."""
    device: Device = Device.CPU
    """Of the engine worker, its ranks and the embedded sampler; vLLM has the device that its build is for."""
    num_threads: int | None = Field(None, ge=1, le=1024)
    """Threads of the worker; None takes one for a model too small to share, otherwise the cores that are there."""
    sampler: SamplerConfig = SamplerConfig()
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig = PlacementConfig()
    teacher: TeacherConfig | None = None
    """Whose word `trainer.teacher_weight` weighs; None asks nobody."""

    @model_validator(mode="after")
    def _teacher_is_weighed(self) -> Self:
        weight = self.trainer.knobs.teacher_weight or 0.0
        if self.teacher is not None and weight == 0:
            raise ValueError(
                "teacher is given, but trainer.teacher_weight is 0; set it (1 is usual) or leave teacher out"
            )
        if self.teacher is None and weight > 0:
            raise ValueError(
                f"trainer.teacher_weight is {weight:g}, but there is no teacher; name its base_url and model"
            )
        return self

    @model_validator(mode="after")
    def _lockstep_is_ours(self) -> Self:
        if self.lockstep and self.sampler.backend is SamplerBackend.VLLM:
            raise ValueError(
                "lockstep is true, but vLLM computes calls together, so their numbers depend on each other; leave "
                "lockstep out, or set sampler.backend to 'torch'"
            )
        return self

    @model_validator(mode="after")
    def _lockstep_is_on_a_cpu(self) -> Self:
        if self.lockstep and self.device is not Device.CPU:
            raise ValueError(
                f"lockstep is true and device is {self.device}, whose sums nobody has seen come out the same twice; "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _ray_reserves_gpus(self) -> Self:
        placement = self.placement
        has_ray_ranks = placement.kind is PlacementKind.RAY and placement.num_workers > 1
        if self.device is Device.CUDA and has_ray_ranks and "GPU" not in placement.rank_bundle:
            raise ValueError(
                f"device is cuda, but placement.resources is {placement.rank_bundle}, so Ray hides the GPUs from "
                "ranks; add GPU: 1 to it"
            )
        return self

    @model_validator(mode="after")
    def _policies_have_names(self) -> Self:
        if not self.policies:
            raise ValueError('policies names none; name one at least, as in {"policy": {"model": "nano-tictactoe"}}')
        if strange := [name for name in self.policies if not POLICY_NAME.fullmatch(name)]:
            raise ValueError(
                f"policies names {strange[0]!r}; a name has 1 to 100 letters, digits, '_' or '-' and begins with a "
                "letter or a digit, for calls name POLICY@AGENT, metrics POLICY/METRIC, and a checkpoint has a folder "
                "of that name"
            )
        return self

    @model_validator(mode="after")
    def _lockstep_is_synchronous(self) -> Self:
        if self.lockstep and self.trainer.is_asynchronous:
            raise ValueError(
                f"lockstep is true and trainer.max_staleness is {self.trainer.max_staleness}, but a sampler that goes "
                "on during updates gets new weights when the clock has it, and no such run repeats itself; set "
                "max_staleness to 0, or lockstep to false"
            )
        return self

    @model_validator(mode="after")
    def _what_sleeps_does_not_sample(self) -> Self:
        if self.sampler.vllm_sleep_mode and self.trainer.is_asynchronous:
            raise ValueError(
                f"sampler.vllm_sleep_mode is true and trainer.max_staleness is {self.trainer.max_staleness}, but who "
                "sleeps can't sample during updates; set max_staleness to 0, or vllm_sleep_mode to false"
            )
        return self

    @model_validator(mode="after")
    def _what_is_placed_is_there(self) -> Self:
        placement, backend = self.placement, self.sampler.backend
        if backend is SamplerBackend.VLLM:
            return self
        if placement.kind is PlacementKind.RAY and placement.num_workers == 1:
            raise ValueError(
                f"placement.kind is ray, but placement.num_workers is 1 and sampler.backend is {backend}, so all runs "
                "in the engine's own process; raise num_workers, set sampler.backend to 'vllm', or leave kind out"
            )
        for name in ("num_samplers", "sampler_resources"):
            if (value := getattr(placement, name)) != PlacementConfig.model_fields[name].default:
                raise ValueError(
                    f"placement.{name} is {value}, but sampler.backend is {backend}, which samples in the engine's own "
                    f"process; leave {name} out, or set backend to 'vllm'"
                )
        return self

    @model_validator(mode="after")
    def _ranks_train_one_whole_policy(self) -> Self:
        if self.placement.num_workers == 1:
            return self
        trained = [policy for policy in self.policies.values() if policy.trainable]
        reason = None
        if len(trained) != 1:
            reason = f"{len(trained)} policies are trainable and ranks train exactly 1"
        elif trained[0].lora is not None:
            reason = "the policy that is trained has lora, whose branches are not sharded"
        elif self.trainer.is_asynchronous:
            reason = f"trainer.max_staleness is {self.trainer.max_staleness}, and ranks train between episodes only"
        if reason is not None:
            raise ValueError(f"placement.num_workers is {self.placement.num_workers}, but {reason}; leave it out")
        return self
