"""Reading the fields of a request's body, the same for every API.

Sampling parameters are honoured or refused with a 400 that names the field; none is silently ignored. Which fields an
object may have, and what says nothing, is for `tracker.fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm_engine.errors import BadRequestError, UnsupportedError, shown
from swarm_engine.server.episodes import Effort, Script
from swarm_engine.tracker.fields import Fields
from swarm_engine.types import LogitsProcessors, Mode, SamplingOverride

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 0.01
"""Lower ones but 0 underflow: the reply is greedy, yet its log-probabilities and their gradients are 1/temperature."""
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_ID_DIGITS = 10
MAX_BIAS = 100


@dataclass(frozen=True, slots=True)
class Knob:
    """A sampling parameter that changes the distribution in a way that training can't follow."""

    low: float
    high: float
    neutral: tuple[float, ...]
    """Where it changes nothing."""
    way_out: str
    is_whole: bool = False
    is_truncation: bool = False
    """Whether it only rules out the less likely tokens, so that the likeliest stays what it is."""


PENALTY = "penalties change the distribution that training would have to rebuild; leave it at "
WHOLE = "training needs the whole distribution; leave it "
KNOBS: Mapping[str, Knob] = {
    "top_p": Knob(0, 1, (1,), WHOLE + "at 1", is_truncation=True),
    "top_k": Knob(-1, MAX_TOKEN_ID, (-1, 0), WHOLE + "out", is_whole=True, is_truncation=True),
    "min_p": Knob(0, 1, (0,), WHOLE + "out", is_truncation=True),
    "presence_penalty": Knob(-2, 2, (0,), PENALTY + "0"),
    "frequency_penalty": Knob(-2, 2, (0,), PENALTY + "0"),
    "repetition_penalty": Knob(0.01, 10, (1,), PENALTY + "1"),
}
BIAS = "logit_bias"
SAMPLING = frozenset({*KNOBS, BIAS})
"""What `processors` reads."""
OR_CLAIM = (
    ', or claim the episode with sampling: {"temperature": 1}, which goes before what its calls ask for, or for eval '
    "or debug, which are not trained"
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (0,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "best_of": (1,),
    "n": (1,),
}
"""Fields that servers of open models have, at the values that change nothing."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
"""Hints to models that were taught them, which no chat template tells its model of."""

TEMPLATE_DECIDES = "the model's own template decides how it thinks; leave it out"
WHY = {
    "echo": "the prompt is not sampled; put it before the reply yourself",
    "best_of": "ask for n choices and choose yourself",
    "reasoning": TEMPLATE_DECIDES,
    "thinking": TEMPLATE_DECIDES,
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
        "prompt_cache_options", "service_tier", "client_metadata",
    }
)  # fmt: skip

T = TypeVar("T")


def inner(raw: Mapping[str, Any], name: str, fields: Fields) -> dict[str, Any]:
    """What the object in a field says; nothing where it was left out."""
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError(f"{name} must be an object, not {shown(value)}", param=name)
    return fields.said(value, name)


def processors(raw: Mapping[str, Any], mode: Mode) -> LogitsProcessors | None:
    """What changes the distribution beside the temperature; None where nothing does.

    Raises:
        BadRequestError: a value is out of range.
        UnsupportedError: something does, and the episode is to be trained.
    """
    is_greedy = raw.get("temperature") == 0
    asked: dict[str, float] = {}
    for name, knob in KNOBS.items():
        value = raw.get(name)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int if knob.is_whole else int | float)
            or not knob.low <= value <= knob.high
        ):
            kind = "whole number" if knob.is_whole else "number"
            raise BadRequestError(
                f"{name} must be a {kind} from {knob.low} to {knob.high}, not {shown(value)}", param=name
            )
        if value not in knob.neutral and not (is_greedy and knob.is_truncation):
            asked[name] = value
    bias = _bias(raw.get(BIAS))
    ways_out = {name: KNOBS[name].way_out for name in asked} | ({BIAS: WHOLE + "out"} if bias else {})
    if mode is Mode.TRAIN and ways_out:
        name, way_out = next(iter(ways_out.items()))
        raise UnsupportedError(f"{name}={shown(raw[name])} is not taken by this server", way_out + OR_CLAIM, param=name)
    return LogitsProcessors(logit_bias=bias, **asked) if asked or bias else None  # type: ignore[arg-type]


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """What is added to the logits of some tokens, by token id."""
    given = {} if value is None else value
    if not isinstance(given, dict) or not all(map(_is_token_id, given)) or not all(map(_is_bias, given.values())):
        raise BadRequestError(
            f"{BIAS} must be an object of token ids with numbers from -{MAX_BIAS} to {MAX_BIAS}, not {shown(value)}",
            param=BIAS,
        )
    return tuple(sorted((int(token), float(bias)) for token, bias in given.items() if bias))


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS


def _is_bias(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_BIAS <= value <= MAX_BIAS


def effort(raw: Mapping[str, Any], name: str, place: str) -> Effort | None:
    """How much the model is asked to reason; None where that was left open."""
    value = raw.get(name)
    if value is None:
        return None
    one_of(value, EFFORTS, place)
    return Effort(place, is_none=value == "none")


def one_of(value: Any, known: Collection[str], place: str) -> None:
    """See that a value is one of some words.

    Raises:
        UnsupportedError: it is none of them.
    """
    if not isinstance(value, str) or value not in known:
        raise UnsupportedError(f"{place} is {shown(value)}", f"it is one of {', '.join(known)}", param=place)


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
    kept = {name: value for name, value in raw.items() if name not in SAMPLING}
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
    options = inner(raw, "stream_options", Fields(frozenset(known)))
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
