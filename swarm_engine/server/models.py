"""What the control routes take, checked where it comes in."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from swarm_engine.errors import shown
from swarm_engine.server.dialects.fields import MAX_TEMPERATURE, MAX_TOKENS, MIN_TEMPERATURE
from swarm_engine.types import Mode, Outcome

Name = Annotated[str, StringConstraints(min_length=1, max_length=500)]
MAX_NAMES = 1000
"""Agents, policies, tags or metrics of one episode; each is on record with it for ever."""
MAX_CALLS = 10_000
"""Calls of one episode that a body may speak of."""
MAX_INTEGER = 2**63 - 1
"""What the journal's columns hold."""
MAX_REWARD = 1e9
"""Baselines and deviations square rewards; far larger ones would overflow there, after they are on record."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), AfterValidator(lambda value: value + 0.0)]
"""Neither a truth nor a text; -0.0 becomes 0.0, which it equals."""
Reward = Annotated[Number, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


def _in_plain_words(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """The rewards of an `end`; of a union pydantic would tell why each of its kinds was not met."""
    if isinstance(value, dict) and len(value) > MAX_NAMES:
        raise PydanticCustomError(
            "rewards",
            "it names {count} agents, an episode may have {limit}",
            {"count": len(value), "limit": MAX_NAMES},
        )
    try:
        return check(value)
    except ValidationError as error:
        raise PydanticCustomError(
            "reward",
            "it must be null, a number from -{limit} to {limit}, or an object with one of these for each agent, "
            "not {value}",
            {"limit": f"{MAX_REWARD:.0f}", "value": shown(value)},
        ) from error


Rewards = Annotated[Reward | dict[Name, Reward | None] | None, WrapValidator(_in_plain_words)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MAX_WAIT_S = 60.0


class Body(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of the request bodies."""


class Sampling(Body):
    """How every call is sampled, whatever it asks for."""

    temperature: Annotated[Number, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    """0 takes the likeliest tokens, which can't be trained."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Of a reply; null leaves it to the call."""

    @model_validator(mode="after")
    def _is_sampled(self) -> Self:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature!r} is too close to 0 to be sampled at; take 0 for the likeliest token, "
                f"or at least {MIN_TEMPERATURE}"
            )
        return self


class Claim(Body):
    """A client's wish for an episode."""

    client_id: Name
    task_id: Name
    mode: Mode = Mode.TRAIN
    group_id: Name | None = None
    policies: list[Name] = Field(default_factory=list, max_length=MAX_NAMES)
    """Policies the client is going to use; empty takes what is served."""
    agents: list[Name] = Field(default_factory=list, max_length=MAX_NAMES)
    """Agents that will speak; empty lets any name speak."""
    lease_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    """None takes the server's."""
    wait_s: float = Field(20.0, ge=0, le=MAX_WAIT_S)
    """How long to wait for an episode before the answer is a reason."""
    code_version: Name | None = None
    claim_key: Name | None = None
    """Chosen by the client, new for every episode it wants: the same key of the same client is the same episode, so a
    claim whose answer was lost can be sent again."""
    script: Annotated[list[str | Annotated[list[TokenId], Field(min_length=1)]], Field(max_length=MAX_CALLS)] | None = (
        None
    )
    """Replies for the scripted backend to play call by call, in order of arrival, whatever asks for them: as text, in
    which the template's markers are control tokens, or as token ids."""
    sampling: Sampling | None = None
    """Taken for every call in place of what it asks for; its top_p, top_k, min_p, penalties and logit_bias are not read
    then."""
    models: dict[Name, Name] = Field(default_factory=dict, max_length=MAX_NAMES)
    """Policy by the name that a call's `model` may have; other names mean the policy that is not routed to, where it is
    one."""
    tags: dict[Name, Annotated[str, StringConstraints(max_length=500)]] = Field(
        default_factory=dict, max_length=MAX_NAMES
    )
    """Kept with the episode; an evaluation says here what it measures."""

    @model_validator(mode="after")
    def _is_trained(self) -> Self:
        if self.mode is Mode.TRAIN and self.sampling is not None and self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0, at which nothing is trained; take 1, or claim with mode eval or debug"
            )
        return self


class StepReward(Body):
    """A reward for one call."""

    call_id: Name
    reward: Reward


class End(Body):
    """How an episode ended."""

    reward: Rewards
    """A bare number goes to every agent; null where it can't be judged."""
    step_rewards: list[StepReward] = Field(default_factory=list, max_length=MAX_CALLS)
    outcome: Outcome
    metrics: dict[Name, Number] = Field(default_factory=dict, max_length=MAX_NAMES)


class Abort(Body):
    """Why an episode is given up."""

    reason: Annotated[str, StringConstraints(max_length=500)] = ""


class ExportRequest(Body):
    """Which policy to write, and the folder's name under `exports/`; its weights of now, or those of a checkpoint."""

    policy: Name
    name: Name
    step: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    """Of the checkpoint to write."""
    best: bool = False
    """Write the best checkpoint."""
    merged: bool = False
    """Write an adapter's model with what the adapter adds, instead of the adapter."""

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.best and self.step is not None:
            raise ValueError("step and best name two checkpoints; give one of them")
        if self.merged and (self.best or self.step is not None):
            raise ValueError(
                "merged weights are computed of those in memory, not of a checkpoint; export the checkpoint's adapter "
                "and merge it with peft, or leave step and best out"
            )
        return self
