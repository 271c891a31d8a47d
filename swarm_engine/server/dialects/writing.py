"""What the writers share: events, token log-probabilities, and the heads, usage, ends and errors of OpenAI's APIs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from swarm_engine.errors import SwarmEngineError
from swarm_engine.server.episodes import RunningAsk, RunningCall
from swarm_engine.tracker.answers import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.types import FinishReason

PieceKind = type[TextDelta] | type[ReasoningDelta] | int
"""What belongs into one block of a reply: its text, its reasoning, or the call of this place."""

DONE = b"data: [DONE]\n\n"


def piece_kind(delta: Delta) -> PieceKind:
    """Which block of a reply takes a piece of it."""
    return delta.index if isinstance(delta, ToolCallDelta) else type(delta)


def encode(body: Mapping[str, Any]) -> bytes:
    """A JSON body."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event without a name, as OpenAI's older APIs write it."""
    return b"data: " + encode(body) + b"\n\n"


def named_events(bodies: Iterable[Mapping[str, Any]]) -> bytes:
    """Events that carry their type as their name too."""
    return b"".join(b"event: " + str(body["type"]).encode() + b"\n" + event(body) for body in bodies)


def openai_error(error: SwarmEngineError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def openai_head(ask: RunningAsk, kind: str, created: int) -> dict[str, Any]:
    """How a reply of OpenAI's older APIs begins."""
    versions = ask.calls[0].generation.policy_versions
    version = versions[-1] if versions else ask.policy_version
    return {
        "id": ask.call_id,
        "object": kind,
        "created": created,
        "model": ask.policy,
        "system_fingerprint": f"{ask.policy}@{version}",
    }


def openai_usage(ask: RunningAsk) -> dict[str, Any]:
    """Token counts; those of all choices together."""
    num_prompt, num_completion = ask.num_prompt_tokens, ask.num_completion_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens_details": {"reasoning_tokens": ask.num_reasoning_tokens},
    }


def openai_end(ask: RunningAsk, head: Mapping[str, Any], *, has_usage: bool) -> bytes:
    """The last events of a stream: the usage, where it was asked for, and the end."""
    if not has_usage:
        return DONE
    return event({**head, "choices": [], "usage": openai_usage(ask)}) + DONE


def openai_finish(call: RunningCall) -> str:
    """Why a choice ended."""
    if call.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if call.answer.tool_calls else "stop"


def token_text(codec: ChatCodec, token_id: int) -> tuple[str, bytes]:
    """A token for people, and its true bytes."""
    raw = codec.token_bytes(token_id)
    try:
        return raw.decode(), raw
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def token_entry(codec: ChatCodec, token_id: int, logprob: float) -> dict[str, Any]:
    """One token with its log-probability."""
    text, raw = token_text(codec, token_id)
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def token_entries(call: RunningCall, tokens: range) -> list[dict[str, Any]]:
    """An entry for each of these sampled tokens; over a reply there are `usage.completion_tokens` of them.

    The end token is one of them, and so is every token of reasoning and tool calls.
    """
    codec, generation = call.reply.codec, call.generation
    entries = []
    for place in tokens:
        entry = token_entry(codec, generation.token_ids[place], generation.logprobs[place])
        top = generation.top[place] if generation.top else ()
        entry["top_logprobs"] = [token_entry(codec, token_id, logprob) for token_id, logprob in top]
        entries.append(entry)
    return entries
