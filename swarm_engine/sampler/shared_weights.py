"""Weights in memory that processes of one machine share.

The memory has no name: it is reached by its descriptor alone and is gone with the last process that holds it, so a kill
leaves nothing behind. It lies in neither /dev/shm nor a file system, whose size containers keep small.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from swarm_engine.sampler.vllm_messages import WeightPlace

ALIGNMENT = 64
"""Bytes."""


def plan_places(weights: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[tuple[WeightPlace, ...], int]:
    """Where each weight is to lie, one after the other as `dtype`, and the bytes of all."""
    places, offset = [], 0
    for name, tensor in weights.items():
        places.append(WeightPlace(name, tuple(tensor.shape), offset))
        offset += -(-tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return tuple(places), offset


def new_memory(size: int) -> int:
    """A descriptor of fresh memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def mapped(descriptor: int) -> mmap.mmap:
    """The memory of a descriptor, which may be closed then."""
    return mmap.mmap(descriptor, 0)


def views(memory: mmap.mmap, places: Sequence[WeightPlace], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights as they lie in the memory; writing to one writes it for every process."""
    for place in places:
        yield (
            place.name,
            torch.frombuffer(memory, dtype=dtype, count=math.prod(place.shape), offset=place.offset).view(place.shape),
        )
