"""Low-rank branches beside frozen matrices (Hu et al. 2021, arXiv:2106.09685), and how peft names and stores them.

The decoder's fused matrices have one branch each: the projections that make up the matrix share its A, and each has
rows of its B. So what is trained is exactly what peft loads, as adapters of q_proj, k_proj and v_proj with equal A.

Axes: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from swarm_engine.config import LoraConfig
from swarm_engine.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix of the published layout, and its place in the fused one."""

    target: str
    """As peft calls it."""
    path: str
    """Inside its layer."""
    start: int
    stop: int
    """Rows of the fused matrix."""


class LowRank(nn.Module):
    """What is added to a matrix: B A alpha / rank, where B has rows for the targets alone."""

    rows_O: Tensor | None

    def __init__(self, num_inputs: int, projections: Sequence[Projection], config: LoraConfig, like: Tensor) -> None:
        """Begin without an effect, as B is zero; A is uninitialised.

        Args:
            projections: all of the fused matrix, in order.
            like: a weight of the model, for the numbers' type.
        """
        super().__init__()
        self.num_outputs = projections[-1].stop
        self.scale = config.alpha / config.rank
        self.targets = tuple(one for one in projections if one.target in config.targets)
        rows = [row for one in self.targets for row in range(one.start, one.stop)]
        self.a_R_I = nn.Parameter(like.new_empty(config.rank, num_inputs))
        self.b_O_R = nn.Parameter(like.new_zeros(len(rows), config.rank))
        is_whole = len(rows) == self.num_outputs
        rows_O = None if is_whole else torch.tensor(rows, device=like.device)
        self.register_buffer("rows_O", rows_O, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The branch's share of the matrix's product with `x`, which has shape (..., I)."""
        return functional.linear(functional.linear(x, self.a_R_I), self._all_rows()) * self.scale

    def product(self) -> Tensor:
        """What the branch adds to the fused matrix."""
        return self._all_rows() @ self.a_R_I * self.scale

    def randomize(self, generator: torch.Generator) -> None:
        """Draw A as peft does: evenly within one over the root of the inputs."""
        bound = 1 / math.sqrt(self.a_R_I.shape[1])
        drawn = torch.rand(self.a_R_I.shape, generator=generator, dtype=torch.float32)
        self.a_R_I.data.copy_((2 * drawn - 1) * bound)

    def halves(self) -> list[tuple[Projection, Tensor, Tensor]]:
        """A and B of each target, as views."""
        b_O_R, found, start = self.b_O_R.data, [], 0
        for one in self.targets:
            stop = start + one.stop - one.start
            found.append((one, self.a_R_I.data, b_O_R[start:stop]))
            start = stop
        return found

    def _all_rows(self) -> Tensor:
        if self.rows_O is None:
            return self.b_O_R
        empty = self.b_O_R.new_zeros(self.num_outputs, self.b_O_R.shape[1])
        return empty.index_copy(0, self.rows_O, self.b_O_R)


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """`adapter_config.json` of an adapter on the model `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


PLAIN_KEYS = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "target_modules", "bias", "init_lora_weights", "megatron_core", "qalora_group_size",
    "runtime_config",
})  # fmt: skip
"""Keys of `adapter_config.json` that plain LoRA may set; any other makes an adapter another function."""
PLAIN_VALUES = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal")}
"""The values of some of them that do so too."""


def read_peft_config(found: Mapping[str, Any], where: str) -> tuple[LoraConfig, str]:
    """The branches that an `adapter_config.json` describes, and the name of the model they are for.

    Raises:
        ModelError: it is of a kind that is not computed here.
    """
    strange = {name: value for name, value in found.items() if value and name not in PLAIN_KEYS}
    given = {name: found[name] for name in PLAIN_VALUES if found.get(name) is not None}
    strange |= {name: value for name, value in given.items() if value not in PLAIN_VALUES[name]}
    if strange:
        name, value = next(iter(strange.items()))
        raise ModelError(
            f"{where} has {name} {value!r}; this engine takes plain LoRA without dropout, for sampler and trainer must "
            "compute the same function; merge the adapter into its model with peft and name that"
        )
    try:
        targets = found["target_modules"]
        known = [name for name in LoraConfig().targets if name in targets]
        if isinstance(targets, str) or len(known) != len(targets):
            raise ModelError(f"{where} has target_modules {targets!r}; known are {', '.join(LoraConfig().targets)}")
        lora = LoraConfig(rank=found["r"], alpha=found["lora_alpha"], targets=tuple(known))
        base = found["base_model_name_or_path"]
        if not isinstance(base, str):
            raise ModelError(f"{where} has base_model_name_or_path {base!r}; name the model that it was trained beside")
        return lora, base
    except (KeyError, TypeError, ValidationError) as error:
        raise ModelError(f"{where} can't be read: {error}") from error
