"""What the worker and its vLLM process say to each other, in the frames of `swarm_engine.protocol`.

Whoever starts the process gives it one end of a socket pair and a piece of shared memory as large as the weights; it
ends when the line does. `LoadModel` comes first and makes the engine, its weights still noise; then and after every
update the weights are written into the shared memory and `LoadWeights` is said. `Sleep` may come before an update.
Requests and replies are those of the front: `Generate`, `Cancel`, `Sampled`, `Finished`, `Rejected`. A process that
can't go on says `Failed`.

An adapter comes merged into the weights of its model; kept apart, it would be a message beside `LoadWeights` with
places of its own in the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from swarm_engine.protocol import Cancel, Failed, Finished, Generate, Rejected, Sampled


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Where one weight lies in the shared memory."""

    name: str
    """That of a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    offset: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Make the engine."""

    config_json: dict[str, Any]
    """`config.json` of a Hugging Face checkpoint."""
    places: tuple[WeightPlace, ...]
    dtype: str
    """Of the weights and of the computation, as torch names it: `float32`, `bfloat16`."""
    tokenizer_json: str
    """The text of that file, for grammars: the process may be on a machine that has no folder of the model."""
    end_ids: tuple[int, ...]
    max_context: int
    max_running: int
    kv_bytes: int
    is_eager: bool
    can_sleep: bool
    """Whether `Sleep` will come, for which memory has to be set aside in another way."""
    type: Literal["load_model"] = "load_model"


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """The shared memory holds the weights of `version`. Answered by `WeightsLoaded`, with every token sampled under the
    old ones before it; what runs goes on, its keys and values computed again."""

    version: int
    probes: tuple[Generate, ...]
    """Requests of the worker's own, sampled before any other under the new weights; no end token ends their replies."""
    type: Literal["load_weights"] = "load_weights"


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """The memory may be written again, and every later token is of `version`."""

    version: int
    type: Literal["weights_loaded"] = "weights_loaded"


@dataclass(frozen=True, slots=True)
class Sleep:
    """Hold neither weights nor keys and values on a GPU, and sample nothing, until `LoadWeights` comes. Answered by
    `Asleep`, with every token sampled before it; requests are taken, and wait."""

    type: Literal["sleep"] = "sleep"


@dataclass(frozen=True, slots=True)
class Asleep:
    """The memory is free."""

    type: Literal["asleep"] = "asleep"


ToVllm = LoadModel | LoadWeights | Sleep | Generate | Cancel
FromVllm = WeightsLoaded | Asleep | Sampled | Finished | Rejected | Failed

to_vllm: TypeAdapter[ToVllm] = TypeAdapter(Annotated[ToVllm, Field(discriminator="type")])
from_vllm: TypeAdapter[FromVllm] = TypeAdapter(Annotated[FromVllm, Field(discriminator="type")])
