"""Reading the fields of a request's body, the same for every API.

Sampling parameters are honoured or refused with a 400 that names the field; none is silently ignored. Fields that only
label a request (`user`, `metadata`, …) are taken and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm_engine.errors import BadRequestError, UnsupportedError, shortened, shown
from swarm_engine.server.episodes import Script
from swarm_engine.types import SamplingOverride

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 0.01
"""Lower ones but 0 underflow: the reply is greedy, yet its log-probabilities and their gradients are 1/temperature."""
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1

SAMPLING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
"""What would change the distribution in a way that training can't follow, at the values that change nothing."""

PENALTY = "penalties change the distribution that training would have to rebuild; leave it at "
WHOLE = "training needs the whole distribution; leave it "
OR_CLAIM = ', or claim the episode with sampling: {"temperature": 1}, which goes before what its calls ask for'
WHY = {
    "top_p": WHOLE + "at 1" + OR_CLAIM,
    "top_k": WHOLE + "out" + OR_CLAIM,
    "min_p": WHOLE + "out" + OR_CLAIM,
    "presence_penalty": PENALTY + "0" + OR_CLAIM,
    "frequency_penalty": PENALTY + "0" + OR_CLAIM,
    "repetition_penalty": PENALTY + "1" + OR_CLAIM,
    "logit_bias": "a bias changes the distribution that training would have to rebuild; leave it out" + OR_CLAIM,
    "echo": "the prompt is not sampled; put it before the reply yourself",
    "best_of": "ask for n choices and choose yourself",
    "reasoning_effort": "the model's own template decides how it thinks; leave it out",
    "reasoning": "the model's own template decides how it thinks; leave it out",
    "thinking": "the model's own template decides how it thinks; leave it out",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "truncation": "the prompt is served as it is or refused; shorten it yourself",
    "conversation": "send the messages, or previous_response_id",
    "background": "stream the reply instead",
}
"""The way out, for fields whose refusal needs one."""

OPENAI_LABELS = frozenset(
    {
        "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "service_tier",
    }
)  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rules:
    """Which fields an API has here."""

    read: frozenset[str]
    labels: frozenset[str]
    """They say nothing about the reply."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that are taken only at values that change nothing."""

    def check(self, raw: Mapping[str, Any]) -> None:
        """See that every field is read, a label or neutral.

        Raises:
            UnsupportedError: one is not.
        """
        for name, value in raw.items():
            if name in self.read or name in self.labels or value is None:
                continue
            neutral = self.neutral.get(name)
            if neutral is None:
                name = shortened(name)
                raise UnsupportedError(f"{name} is not taken by this server", WHY.get(name, "leave it out"), param=name)
            # True is 1 to Python, and no number to a caller.
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
                raise UnsupportedError(
                    f"{name}={shown(value)} is not taken by this server", WHY.get(name, "leave it out"), param=name
                )


def text(raw: Mapping[str, Any], name: str) -> str | None:
    """A string, or None where it was left out."""
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"{name} must be a string", param=name)
    return value


def flag(raw: Mapping[str, Any], name: str, default: bool = False, *, where: str = "") -> bool:
    """True or false; `where` is the place of `raw` in the body, where it is not the body itself."""
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        place = f"{where}.{name}" if where else name
        raise BadRequestError(f"{place} must be true or false, not {shown(value)}", param=place)
    return value


def integer(raw: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number, or None where it was left out."""
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequestError(f"{name} must be a whole number from {low} to {high}, not {shown(value)}", param=name)
    return value


def limit(raw: Mapping[str, Any], *names: str) -> int | None:
    """The reply's limit in tokens: the first of these fields that was given."""
    found = [integer(raw, name, 1, MAX_TOKENS) for name in names]
    return next((value for value in found if value is not None), None)


def seed(raw: Mapping[str, Any]) -> int | None:
    """The request's own seed."""
    return integer(raw, "seed", -(2**63), 2**63 - 1)


def temperature(raw: Mapping[str, Any]) -> float:
    """The temperature, 1 where it was left out."""
    value = raw.get("temperature")
    if value is None:
        return 1.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_TEMPERATURE:
        raise BadRequestError(f"temperature must be a number from 0 to 2, not {value!r:.80}", param="temperature")
    if 0 < value < MIN_TEMPERATURE:
        raise BadRequestError(
            f"temperature {value!r} is too close to 0 to be sampled at and trained",
            f"take 0 for the likeliest token, or at least {MIN_TEMPERATURE}",
            param="temperature",
        )
    return float(value)


def overridden(raw: Mapping[str, Any], sampling: SamplingOverride | None) -> Mapping[str, Any]:
    """A body whose fields of sampling are those of its episode's claim: others that shape the distribution are gone."""
    if sampling is None:
        return raw
    kept = {name: value for name, value in raw.items() if name not in SAMPLING_NEUTRAL}
    return {**kept, "temperature": sampling.temperature}


def stops(raw: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """The texts that end the reply before them."""
    value = raw.get(name)
    found = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(found, list)
        or len(found) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in found)
    ):
        raise BadRequestError(
            f"{name} must be a text or a list of up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters",
            param=name,
        )
    return tuple(found)


def script(raw: Mapping[str, Any]) -> Script | None:
    """The reply to play."""
    value = raw.get("script")
    if value is None:
        return None
    return value if isinstance(value, str) else token_ids(value, "script")


def stream_options(raw: Mapping[str, Any], *known: str) -> Mapping[str, Any]:
    """How a stream is to be told: flags, each one of `known`."""
    options = raw.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object", param="stream_options")
    if unknown := [name for name in options if name not in known]:
        raise UnsupportedError(
            f"stream_options takes {' and '.join(known)} only", param=f"stream_options.{shortened(unknown[0])}"
        )
    for name in known:
        flag(options, name, where="stream_options")
    return options


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """A list of token ids."""
    if not isinstance(value, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= MAX_TOKEN_ID for one in value
    ):
        raise BadRequestError(f"{name} must be a text or a list of token ids", param=name)
    return tuple(value)


def items(value: Any, where: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """The objects of a list, each with its place for error messages."""
    if not isinstance(value, list):
        raise BadRequestError(f"{where} must be a list", param=where)
    for index, one in enumerate(value):
        if not isinstance(one, dict):
            raise BadRequestError(f"{where}[{index}] must be an object", param=f"{where}[{index}]")
    return [(f"{where}[{index}]", one) for index, one in enumerate(value)]


def blaming(name: str, make: Callable[[], T]) -> T:
    """What `make` returns; its refusal names the field it was made for, also where an API has no place for that."""
    try:
        return make()
    except BadRequestError as error:
        raise type(error)(f"{name}: {error.message}", error.hint, code=error.code, param=name) from error
