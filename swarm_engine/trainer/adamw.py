"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), state as plain tensors that a checkpoint can hold.

torch.optim has the same; importing it loads the compiler, which takes longer than everything else a worker starts with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class AdamWConfig:
    """Its settings."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    """Of matrices; gains and biases do not decay."""


class AdamW:
    """The moments of each parameter, and the step that uses them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig) -> None:
        self.config = config
        self.num_steps = 0
        self._parameters = dict(parameters)
        self._first = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}
        self._second = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def step(self, learning_rate: float | None = None) -> None:
        """Move every parameter along its gradient, which must be there; without a rate by the config's."""
        config = self.config
        rate = config.learning_rate if learning_rate is None else learning_rate
        self.num_steps += 1
        first_bias = 1 - config.beta1**self.num_steps
        second_bias = 1 - config.beta2**self.num_steps
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            assert gradient is not None, name
            first, second = self._first[name], self._second[name]
            if config.weight_decay and parameter.ndim > 1:
                parameter.mul_(1 - rate * config.weight_decay)
            first.lerp_(gradient, 1 - config.beta1)
            second.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
            scale = second.sqrt().div_(math.sqrt(second_bias)).add_(EPSILON)
            parameter.addcdiv_(first, scale, value=-rate / first_bias)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def clip_gradient(self, max_norm: float) -> float:
        """Scale the gradient down to `max_norm` where it is longer; return the norm it had."""
        norm = self.gradient_norm()
        if math.isfinite(norm) and norm > max_norm:
            for gradient in self._gradients():
                gradient.mul_(max_norm / norm)
        return norm

    def gradient_norm(self) -> float:
        """The length of the whole gradient."""
        norms = [torch.linalg.vector_norm(gradient) for gradient in self._gradients()]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs to go on."""
        moments = {f"first.{name}": tensor for name, tensor in self._first.items()}
        moments |= {f"second.{name}": tensor for name, tensor in self._second.items()}
        return moments | {"num_steps": torch.tensor(self.num_steps)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that `state` returned for the same parameters.

        Raises:
            KeyError: a tensor is missing.
            RuntimeError: a tensor has another shape.
        """
        for name in self._parameters:
            self._first[name].copy_(state[f"first.{name}"])
            self._second[name].copy_(state[f"second.{name}"])
        self.num_steps = int(state["num_steps"])
