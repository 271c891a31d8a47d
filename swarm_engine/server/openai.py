"""OpenAI's chat-completion requests and replies, read and written by hand: the hot path makes no models of them.

Sampling parameters are honoured or refused with a 400 that names the field; none is silently ignored. Fields that only
label a request (`user`, `metadata`, …) are taken and dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm_engine.errors import BadRequestError, SwarmEngineError, UnsupportedError
from swarm_engine.server.episodes import CallRequest
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import parse_messages
from swarm_engine.types import FinishReason

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MIN_TEMPERATURE = 0.01
"""Lower ones but 0 underflow: the reply is greedy, yet its log-probabilities and their gradients are 1/temperature."""

READ = {
    "model", "messages", "temperature", "max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs",
    "stop", "seed", "script",
}  # fmt: skip
"""Fields that this server reads."""

LABELS = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"}
"""Fields that say nothing about the reply."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}
"""Fields that are taken only at values that change nothing."""

WHY = {
    "tools": "this server does not call tools yet; describe them in a message",
    "n": "send one request a choice; they run side by side",
    "top_p": "training needs the whole distribution; leave it at 1",
    "top_k": "training needs the whole distribution; leave it out",
    "min_p": "training needs the whole distribution; leave it out",
    "presence_penalty": "penalties change the distribution that training would have to rebuild; leave it at 0",
    "frequency_penalty": "penalties change the distribution that training would have to rebuild; leave it at 0",
    "repetition_penalty": "penalties change the distribution that training would have to rebuild; leave it at 1",
    "response_format": "only free text is sampled; check the reply's form yourself",
    "top_logprobs": "only the sampled token's own log-probability is kept; leave it at 0",
}

FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "stop"}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat-completion request."""

    model: str
    """As it was sent; empty where it was left out."""
    call: CallRequest
    is_stream: bool
    has_usage_chunk: bool
    has_logprobs: bool


def parse_chat(body: bytes) -> ChatRequest:
    """Read a request.

    `max_completion_tokens` goes before the older `max_tokens`.

    Raises:
        BadRequestError: a field is malformed.
        UnsupportedError: a field or value that this server doesn't take.
    """
    try:
        return _parse(json.loads(body))
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON ({error})") from error
    except RecursionError as error:
        raise BadRequestError("the body is nested too deeply", "send flat messages") from error


def _parse(raw: Any) -> ChatRequest:
    if not isinstance(raw, dict):
        raise BadRequestError("the body must be a JSON object")
    _refuse_unsupported(raw)
    limits = [_integer(raw, name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    options = raw.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise UnsupportedError("stream_options takes include_usage only", param="stream_options")
    return ChatRequest(
        model=_model(raw.get("model")),
        call=CallRequest(
            messages=parse_messages(raw.get("messages")),
            max_tokens=limits[0] if limits[0] is not None else limits[1],
            temperature=_temperature(raw.get("temperature")),
            seed=_integer(raw, "seed", -(2**63), 2**63 - 1),
            stop=_stop(raw.get("stop")),
            script=_script(raw.get("script")),
        ),
        is_stream=_flag(raw, "stream"),
        has_usage_chunk=_flag(options, "include_usage"),
        has_logprobs=_flag(raw, "logprobs"),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for name, value in raw.items():
        if name in READ or name in LABELS or value is None:
            continue
        neutral = NEUTRAL.get(name)
        if neutral is None:
            raise UnsupportedError(f"{name} is not taken by this server", "leave it out", param=name)
        if value not in neutral:
            raise UnsupportedError(
                f"{name}={value!r} is not taken by this server", WHY.get(name, "leave it out"), param=name
            )


def _model(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequestError("model must be a string", param="model")
    return value


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false, not {value!r}", param=name)
    return value


def _integer(raw: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequestError(f"{name} must be a whole number of at least {low}, not {value!r}", param=name)
    return value


def _temperature(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 2:
        raise BadRequestError(f"temperature must be a number from 0 to 2, not {value!r}", param="temperature")
    if 0 < value < MIN_TEMPERATURE:
        raise BadRequestError(
            f"temperature {value!r} is too close to 0 to be sampled at and trained",
            f"take 0 for the likeliest token, or at least {MIN_TEMPERATURE}",
            param="temperature",
        )
    return float(value)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops)
    ):
        raise BadRequestError(
            f"stop must be a text or a list of up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters",
            param="stop",
        )
    return tuple(stops)


def _script(value: Any) -> str | tuple[int, ...] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(one, int) and one >= 0 for one in value):
        raise BadRequestError("script must be a text or a list of token ids", param="script")
    return tuple(value)


def token_logprobs(codec: ChatCodec, token_ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    """One entry for every sampled token, the end token included, so there are `usage.completion_tokens` of them."""
    entries = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        raw = codec.token_bytes(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        entries.append({"token": text, "logprob": logprob, "bytes": list(raw), "top_logprobs": []})
    return entries


def usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Token counts."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def error_body(error: SwarmEngineError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
