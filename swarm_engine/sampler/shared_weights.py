"""Weights in memory that two processes of one machine share.

The memory has no name: it is reached by its descriptor alone and is gone with the last process that holds it, so a kill
leaves nothing behind. It lies in neither /dev/shm nor a file system, whose size containers keep small.
"""

from __future__ import annotations

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


def views(descriptor: int, places: Sequence[WeightPlace], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights as they lie in the memory; writing to one writes it for both processes."""
    whole = mmap.mmap(descriptor, 0)
    for place in places:
        count = 1
        for length in place.shape:
            count *= length
        yield place.name, torch.frombuffer(whole, dtype=dtype, count=count, offset=place.offset).view(place.shape)
