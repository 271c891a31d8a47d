"""What the front and the engine worker say to each other, and how it goes over the wire.

The front listens on a local socket and starts `swarm_engine.worker --socket ADDRESS`; the worker connects to ADDRESS, a
path that no other start has, or HOST:PORT where there are no Unix sockets, and ends when that connection does. An
`Update` that was sent is finished first only if the connection lasts: the front has the batch on disk and asks again.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON: one message with its `type`. The front asks,
the worker answers; replies to different requests interleave. A message that does not fit its type is our own broken
promise, so the connection ends.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from swarm_engine.types import BatchRecord, Episode, FinishReason, SamplingParams

MAX_FRAME_BYTES = 1 << 30
RECEIVE_BYTES = 1 << 20

CHAT_TEMPLATE = "chat_template.jinja"
ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""In a model's folder, the folder of its other chat templates, `NAME.jinja` each."""


@dataclass(frozen=True, slots=True)
class Boot:
    """Load the policies. Answered by `Booted` or `Failed`."""

    config: dict[str, Any]
    """An `EngineConfig` as JSON."""
    model_root: str
    checkpoint_dir: str
    run_id: str = ""
    """Of the run folder; checkpoints of another run are refused."""
    type: Literal["boot"] = "boot"


@dataclass(frozen=True, slots=True)
class StartWeights:
    """Weights on disk that a policy begins with."""

    path: str
    """A folder, or one file of shipped weights."""
    sha256: str


@dataclass(frozen=True, slots=True)
class PolicyReady:
    """A loaded policy, as the front needs to know it."""

    name: str
    version: int
    trainable: bool
    tokenizer_dir: str
    """Holds tokenizer.json, tokenizer_config.json and the chat templates."""
    end_ids: tuple[int, ...]
    max_context: int
    """Tokens of prompt and reply together."""
    start_weights: tuple[StartWeights, ...] = ()
    """The model's, then the adapter's where it goes on from one; empty where nobody looked."""
    learning_rate: float | None = None
    """That it is trained with after its warmup; None where it is frozen, or nobody looked."""
    warmup_updates: int | None = None


@dataclass(frozen=True, slots=True)
class Booted:
    """The policies are loaded, from the newest whole checkpoint where there is one."""

    policies: tuple[PolicyReady, ...]
    step: int
    """Updates already in the weights: the front replays the batch records after it."""
    type: Literal["booted"] = "booted"


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample one reply. Answered by any number of `Sampled`, then one `Finished` or `Rejected`."""

    request_id: str
    policy: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    script: tuple[int, ...] | None = None
    """Token ids to play instead of sampling; only the scripted backend takes them."""
    is_streamed: bool = True
    """False: nobody looks before the end, so the tokens come in as few `Sampled` as their policy versions allow."""
    grammar: str | None = None
    """What the reply must be, as llguidance reads it (JSON or Lark); see `swarm_engine.sampler.grammar`."""
    type: Literal["generate"] = "generate"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next tokens of a reply."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """In nats, of the distribution sampled from; under a grammar that is what the grammar left of it."""
    policy_version: int
    top: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For each token the likeliest ones of its place with their logprobs, likeliest first and only those that could be
    sampled, so they may be fewer than asked for; None where none were asked for."""
    type: Literal["sampled"] = "sampled"


@dataclass(frozen=True, slots=True)
class Finished:
    """A reply is complete."""

    request_id: str
    finish_reason: FinishReason
    type: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that can't be served; the others go on."""

    request_id: str
    message: str
    param: str | None = None
    """The field of the request that is to blame, where there is one."""
    type: Literal["rejected"] = "rejected"


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop sampling a request; answered by `Finished(cancelled)` unless it ended first."""

    request_id: str
    type: Literal["cancel"] = "cancel"


@dataclass(frozen=True, slots=True)
class Update:
    """Train on one batch. Answered by `Updated`."""

    record: BatchRecord
    episodes: tuple[Episode, ...]
    """In the order of the record."""
    type: Literal["update"] = "update"


@dataclass(frozen=True, slots=True)
class Updated:
    """An update is in the weights and in the sampler."""

    step: int
    metrics: dict[str, float | None]
    """None where a metric could not be had."""
    drops: dict[str, int]
    """Episodes of the batch that carried no loss, by reason."""
    type: Literal["updated"] = "updated"


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of the weights as they are now. Answered by `Saved`."""

    protected_steps: tuple[int, ...] = ()
    """Older checkpoints that stay, beside the newest ones."""
    type: Literal["save"] = "save"


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint is on disk, or `error` says why not and the older one stands."""

    step: int
    path: str | None
    error: str | None = None
    type: Literal["saved"] = "saved"


@dataclass(frozen=True, slots=True)
class Export:
    """Write the policy as a Hugging Face folder, or its adapter as peft does. Answered by `Saved`."""

    policy: str
    path: str
    is_merged: bool = False
    """Write an adapter's model with what the adapter adds."""
    type: Literal["export"] = "export"


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker can't go on; it ends after this."""

    reason: str
    type: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker."""

    type: Literal["stop"] = "stop"


FromFront = Annotated[Boot | Generate | Cancel | Update | Save | Export | Stop, Field(discriminator="type")]
FromWorker = Annotated[
    Booted | Sampled | Finished | Rejected | Updated | Saved | Failed,
    Field(discriminator="type"),
]

from_front: TypeAdapter[Boot | Generate | Cancel | Update | Save | Export | Stop] = TypeAdapter(FromFront)
from_worker: TypeAdapter[Booted | Sampled | Finished | Rejected | Updated | Saved | Failed] = TypeAdapter(FromWorker)


def frame(payload: bytes) -> bytes:
    """One message, ready to send."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}; lower the batch size"
        )
    return struct.pack(">I", len(payload)) + payload


def unframe(buffer: bytearray) -> list[bytes]:
    """Take every complete message off the front of `buffer`."""
    messages: list[bytes] = []
    offset = 0
    while len(buffer) - offset >= 4:
        (length,) = struct.unpack_from(">I", buffer, offset)
        if len(buffer) - offset - 4 < length:
            break
        messages.append(bytes(buffer[offset + 4 : offset + 4 + length]))
        offset += 4 + length
    del buffer[:offset]
    return messages


def read_frames(line: socket.socket) -> Iterator[bytes]:
    """Every message of a line as it comes in, until the other end closes it."""
    buffer = bytearray()
    while chunk := line.recv(RECEIVE_BYTES):
        buffer += chunk
        yield from unframe(buffer)
