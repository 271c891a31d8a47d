"""One policy's weights, gradients and moments in shards over several ranks: PyTorch's FSDP2 around each layer.

A rank holds a slice of every matrix. A pass gathers one layer's weights at a time, and on the way back its gradient is
summed over ranks and cut up again, so no rank ever holds the whole of them but for the embedding and the output head,
which stay gathered while their pass lasts. Gradients are summed, not averaged: the weights of a loss already hold the
whole batch's denominators.

Whole weights are needed in two places, and a matrix at a time is enough for both: the first rank hands them out at the
start, and after an update puts them together again for its sampler, its checkpoints and its exports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from swarm_engine.config import Device
from swarm_engine.models.decoder import Decoder, DecoderConfig, rotary_table
from swarm_engine.models.device import find_device
from swarm_engine.trainer.adamw import AdamW, AdamWConfig


def join(store: TCPStore | FileStore, index: int, size: int, device: Device) -> DeviceMesh:
    """Meet the other ranks at a store, and wait until all are there.

    Raises:
        WorkerError: this process sees no such device.
    """
    if device is Device.CUDA:
        find_device(device)
        torch.cuda.set_device(index % torch.cuda.device_count())
    # Without a backend PyTorch takes gloo for tensors on a CPU and NCCL for those on a GPU.
    dist.init_process_group(store=store, rank=index, world_size=size)
    return init_device_mesh(device.value, (size,))


@dataclass(frozen=True, slots=True)
class ShardedRanks:
    """A rank of a process group; see `swarm_engine.trainer.ranks.Ranks`."""

    mesh: DeviceMesh

    @property
    def index(self) -> int:
        return self.mesh.get_rank()

    @property
    def size(self) -> int:
        return self.mesh.size()

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def largest(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def optimizer(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig) -> ShardedAdamW:
        return ShardedAdamW(parameters, config, self)

    def frozen_copy(self, model: Decoder) -> Decoder:
        copied = self.empty(model.config, model.norm.dtype).requires_grad_(False)
        with torch.no_grad():
            for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
                ours.copy_(theirs)
        return copied

    def sharded(self, config: DecoderConfig, dtype: torch.dtype, whole: Decoder | None) -> Decoder:
        """A model in shards, together.

        Args:
            whole: what the first rank hands out; None for the others.
        """
        model = self.empty(config, dtype)
        self.hand_out(whole, model)
        return model

    def empty(self, config: DecoderConfig, dtype: torch.dtype) -> Decoder:
        """A model in shards whose weights are uninitialised."""
        with torch.device("meta"):
            model = Decoder(config).to(dtype)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        # `logits` follows `hidden` and needs the output head, so what belongs to no layer stays until the way back.
        fully_shard(model, mesh=self.mesh, reshard_after_forward=False)
        register_fsdp_forward_method(model, "hidden")
        for module in (model, *model.blocks):
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
            # A chunk without a token to score leaves the output head out, on one rank and not on another.
            module.set_reduce_scatter_unused_params(True, recurse=False)
        model.to_empty(device=self.mesh.device_type)
        model.cos, model.sin = (table.to(model.device) for table in rotary_table(config))
        return model

    @torch.no_grad()
    def hand_out(self, whole: Decoder | None, model: Decoder) -> None:
        """Give every rank its shards of the first one's weights, together."""
        wholes = list(whole.parameters()) if whole is not None else None
        for index, shard in enumerate(model.parameters()):
            self.cut(wholes[index].detach() if wholes else None, shard)

    @torch.no_grad()
    def put_together(self, model: Decoder, whole: Decoder | None) -> None:
        """Write the weights into the first rank's whole model, together; it is None for the others."""
        assert isinstance(model, FSDPModule)
        model.reshard()
        wholes = list(whole.parameters()) if whole is not None else None
        for index, shard in enumerate(model.parameters()):
            tensor = gathered(shard)
            if wholes:
                wholes[index].copy_(tensor)

    def cut(self, whole: Tensor | None, into: Tensor) -> None:
        """Fill a sharded tensor on every rank from the first one's whole tensor, together."""
        assert isinstance(into, DTensor)
        if whole is None:
            whole = torch.empty(into.shape, dtype=into.dtype, device=into.device)
        into.copy_(distribute_tensor(whole.to(into.device, into.dtype), self.mesh, into.placements))


class ShardedAdamW(AdamW):
    """AdamW whose parameters, gradients and moments are sharded. Its state is whole, as that of any other, so that a
    checkpoint doesn't depend on how many ranks there were."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig, ranks: ShardedRanks) -> None:
        super().__init__(parameters, config)
        self._ranks = ranks

    def gradient_norm(self) -> float:
        squares = torch.zeros((), dtype=torch.float64)
        for gradient in self._gradients():
            assert isinstance(gradient, DTensor)
            squares += torch.linalg.vector_norm(gradient.to_local()).double().cpu() ** 2
        return math.sqrt(float(self._ranks.total(squares)))

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs to go on, together; the other ranks than the first get nothing."""
        state: dict[str, Tensor] = {}
        for name, tensor in super().state().items():
            whole = gathered(tensor) if isinstance(tensor, DTensor) else tensor
            if self._ranks.index == 0:
                state[name] = whole
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state, together; only the first rank's counts."""
        for kind, moments in (("first", self._first), ("second", self._second)):
            for name, shard in moments.items():
                self._ranks.cut(state[f"{kind}.{name}"] if self._ranks.index == 0 else None, shard)
        num_steps = state["num_steps"].clone() if self._ranks.index == 0 else torch.tensor(0)
        self.num_steps = int(self._ranks.total(num_steps))


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, together."""
    assert isinstance(tensor, DTensor)
    whole: Tensor = tensor.full_tensor()
    return whole
