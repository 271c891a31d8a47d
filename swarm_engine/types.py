"""The words of the engine as frozen values: calls, timelines, episodes, and the closed sets of states and outcomes.

Standard library only, for the client must start at once. Every other module of the engine speaks in these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

DEFAULT_AGENT = "main"
"""The agent of calls that name none."""

MAX_REFUSAL_CHARS = 300
"""Of a refusal's message that is kept."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    """A text that can be encoded: halves of surrogate pairs, which JSON's escapes and file names bring, are U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


class EngineState(StrEnum):
    """What the engine does now."""

    OFFLINE = "OFFLINE"
    BOOTING = "BOOTING"
    ROLLING = "ROLLING"
    """Takes new episodes."""
    ROLLING_POST = "ROLLING_POST"
    """The batch is full; running episodes may finish."""
    WEIGHT_SYNCING = "WEIGHT_SYNCING"
    """Merges, updates and hands the weights to the sampler."""
    FAILED = "FAILED"


class Mode(StrEnum):
    """What an episode is for."""

    TRAIN = "train"
    EVAL = "eval"
    """Recorded, never trained."""
    DEBUG = "debug"
    """Recorded, neither trained nor part of an evaluation."""


class Outcome(StrEnum):
    """How an episode ended. `ENV_ERROR` is nobody's fault and is never trained."""

    SUCCESS = "success"
    FAILURE = "failure"
    TRUNCATED = "truncated"
    AGENT_ERROR = "agent_error"
    ENV_ERROR = "env_error"
    TIMEOUT = "timeout"


class DropReason(StrEnum):
    """Why an ended episode takes no place in a batch."""

    ENV_ERROR = "env_error"
    NULL_REWARD = "null_reward"
    """No agent of it has a reward."""
    NO_CALLS = "no_calls"
    """In training: nothing of it can be trained, and its reward would move the baseline of those that played."""


class Author(StrEnum):
    """Who wrote a block of a timeline."""

    LLM = "llm"
    ENV = "env"
    USER = "user"


class FinishReason(StrEnum):
    """Why the sampler stopped."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    """It was broken off; see `Untrained.CANCELLED`."""


class Untrained(StrEnum):
    """Why a call's reply carries no loss."""

    GREEDY = "greedy"
    """Temperature 0 has no distribution to train."""
    CANCELLED = "cancelled"
    """Its caller did not get the whole reply: it went away, the sampler failed, or the episode ended first."""
    UNUSED_RETRY = "unused_retry"
    """Its caller asked the same again and went on from another reply."""
    CONSTRAINED = "constrained"
    """Sampled under a grammar or through `LogitsProcessors`, so from another distribution than the policy's own."""
    FROZEN = "frozen"
    """Its policy is never trained."""


class ClaimReason(StrEnum):
    """Why a claim got no episode this time."""

    ROLLING_POST = "rolling_post"
    WEIGHT_SYNCING = "weight_syncing"
    QUOTA = "quota"
    """The next batch already has every episode it needs in flight."""
    BOOTING = "booting"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class SamplingOverride:
    """How a claim has every call of its episode sampled, whatever the call asks for."""

    temperature: float = 1.0
    max_tokens: int | None = None
    """Of a reply; None leaves it to the call."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """Calls that their callers got an error for: an agent that goes on without its replies has its reward all the same.

    Journal, events and routes name its fields as they are here.
    """

    num_refused: int = 0
    last_refusal: str | None = None
    """What the last one was told, after its HTTP status, in one line; None where there was none."""

    def __bool__(self) -> bool:
        return self.num_refused > 0

    def and_one(self, status: int, message: str) -> Refusals:
        """These and one more."""
        told = well_formed(f"{status}: {message}")
        if len(told) > MAX_REFUSAL_CHARS:
            told = told[: MAX_REFUSAL_CHARS - 2] + " …"
        # It may quote what the caller sent: line breaks, a terminal's control sequences, zero bytes.
        return Refusals(self.num_refused + 1, "".join(char if char.isprintable() else " " for char in told))


@dataclass(frozen=True, slots=True)
class LogitsProcessors:
    """What is done to the logits before a token is drawn, in this order: bias, penalties, temperature, truncation."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these token ids."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt and the reply, and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token of the reply."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the token stands in the reply."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are ruled out."""
    top_k: int = 0
    """Only so many of the likeliest are left; all at 0 and -1."""
    top_p: float = 1.0
    """Only the likeliest that together reach this probability are left, at least one."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the sampler is asked for. The distribution sampled from is softmax(logits / temperature), after what is done
    to the logits.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; such a call is recorded and never trained."""
    seed: int = 0
    """Seeds this request's own random stream; see `swarm_engine.seeding`."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to report at each place beside the one sampled."""
    processors: LogitsProcessors | None = None
    """A call with any is recorded and never trained."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a timeline that one call sampled."""

    start: int
    """Index of its first token in the timeline."""
    call_id: str
    logprobs: tuple[float, ...]
    """Log-probability in nats of each token under the distribution it was sampled from."""
    policy_versions: tuple[int, ...]
    """Updates in the weights that sampled each token."""
    temperature: float
    is_trained: bool = True
    """False where the call is context only; see `Call.untrained_because`."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Log-probability in nats of each token under the teacher; None where none was asked."""

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The earlier call whose messages and reply a call's messages begin with, whatever became of their tokens."""

    call_id: str
    start: int
    """Index in the prompt of the first token that is the call's own, behind that reply."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One context exactly as the sampler saw it, with every stretch of it that was sampled.

    As recorded, a timeline is one call: its prompt, then its reply as the only span. Merging joins the spans of
    several calls into one timeline. Tokens outside the spans are context and carry no loss.
    """

    policy: str
    agent: str
    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    """In order, disjoint."""
    continues: Continuation | None = None
    """Of the call that it was recorded from."""
    num_out_of_context: int = 0
    """Trained tokens that were sampled under another context than stands before them here; only merging by text makes
    any."""

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True where a trained call sampled the token; as long as `tokens`."""
        mask = [False] * len(self.tokens)
        for span in self.spans:
            if span.is_trained:
                mask[span.start : span.end] = [True] * len(span.logprobs)
        return tuple(mask)

    @property
    def num_trained(self) -> int:
        """How many tokens carry a loss."""
        return sum(len(span.logprobs) for span in self.spans if span.is_trained)

    def absorb(self, earlier: Timeline) -> Timeline:
        """This timeline with the spans of `earlier`, which must be a prefix of it, added."""
        return replace(self, spans=tuple(sorted((*self.spans, *earlier.spans), key=lambda span: span.start)))


@dataclass(frozen=True, slots=True)
class Block:
    """One message of a timeline: author, text and tokens."""

    author: Author
    role: str
    """The message's role, or `template` for tokens that belong to none."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """None where the policy did not sample the token."""
    loss_mask: tuple[bool, ...]
    policy_version: int | None
    """Of the first sampled token; None for a block that nobody sampled."""


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM request and its reply, as served."""

    call_id: str
    index: int
    """0, 1, 2 … among the calls of its agent in this episode, in order of arrival."""
    policy: str
    agent: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """What the sampler returned, end token included."""
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    temperature: float
    finish_reason: FinishReason
    untrained_because: Untrained | None = None
    """None where the reply is trained."""
    continues: Continuation | None = None
    """Worked out where timelines merge by text, None elsewhere."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Of the reply's tokens under the teacher, in nats; None where none was asked."""

    def timeline(self) -> Timeline:
        """This call as a timeline of its own."""
        span = Span(
            start=len(self.prompt_ids),
            call_id=self.call_id,
            logprobs=self.logprobs,
            policy_versions=self.policy_versions,
            temperature=self.temperature,
            is_trained=self.untrained_because is None,
            teacher_logprobs=self.teacher_logprobs,
        )
        return Timeline(
            policy=self.policy,
            agent=self.agent,
            tokens=self.prompt_ids + self.completion_ids,
            spans=(span,) if self.completion_ids else (),
            continues=self.continues,
        )


@dataclass(frozen=True, slots=True)
class Episode:
    """One complete attempt at one task, from its claim to its reward."""

    episode_id: str
    task_id: str
    group_id: str
    """Episodes that share it are measured against each other."""
    index: int
    """Place in its group, from 0."""
    mode: Mode
    policy_version: int
    """Updates in the weights that served its claim."""
    calls: tuple[Call, ...]
    """In order of arrival."""
    rewards: Mapping[str, float | None]
    """By agent. None until judged: a judge that crashed is not an answer that was wrong."""
    outcome: Outcome
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    step_rewards: Mapping[str, float] = field(default_factory=dict)
    """By call id, for single calls, beside the reward of the whole; most episodes have none."""

    def timelines(self) -> tuple[Timeline, ...]:
        """One timeline a call, in order."""
        return tuple(call.timeline() for call in self.calls)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The recipe of one update, in the journal before the update runs."""

    step: int
    """policy_version after the update; the first update is step 1."""
    episode_ids: tuple[str, ...]
    """In claim order."""
    seed: int
