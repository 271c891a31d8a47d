"""A device that isn't there: tensors that say they are on `DEVICE` and compute on the CPU.

As with a GPU, an operation takes tensors of one device only (but for numbers, which are at home everywhere), what it
makes is where its inputs are, and nothing is read without being brought over first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
"""PyTorch's device without memory; here its tensors have some."""
aten = torch.ops.aten
CARRIES = {aten._to_copy.default, aten.copy_.default}
"""What takes numbers from one device to another."""


class There(Tensor):
    """A tensor on the device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        there: There = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
            requires_grad=here.requires_grad,
        )
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(operation, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({self.here!r})"


class OtherDevice(TorchDispatchMode):
    """Within it, what is made on `DEVICE` or brought there is `There`."""

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(operation, args, kwargs or {})


def compute(operation: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Do it on the CPU; the result is where it belongs.

    Raises:
        RuntimeError: the inputs are on two devices.
    """
    flat, _ = tree_flatten((args, kwargs))
    tensors = [one for one in flat if isinstance(one, Tensor)]
    is_there = any(isinstance(one, There) for one in tensors)
    if is_there and operation not in CARRIES:
        strangers = [one for one in tensors if not isinstance(one, There) and one.ndim > 0]
        if strangers:
            raise RuntimeError(f"{operation} was given tensors on two devices, one of shape {strangers[0].shape}")
    asked = kwargs.get("device")
    if asked is not None:
        is_there = torch.device(asked) == DEVICE
        kwargs = kwargs | {"device": torch.device("cpu")}
    known = {id(one.here): one for one in tensors if isinstance(one, There)}
    args, kwargs = tree_map(lambda one: one.here if isinstance(one, There) else one, (args, kwargs))
    result = operation(*args, **kwargs)
    if operation is aten.copy_.default:
        is_there = id(result) in known
    if not is_there:
        return result
    return tree_map(lambda one: known.get(id(one), There(one)) if isinstance(one, Tensor) else one, result)
