"""Where the weights are, and what is computed with them."""

from __future__ import annotations

import os

import torch

from swarm_engine.config import Device
from swarm_engine.errors import WorkerError


def find_device(device: Device) -> torch.device:
    """A device of this process, told to add up in the same order every time as far as it can.

    Raises:
        WorkerError: there is none of that kind.
    """
    if device is Device.CUDA:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not torch.cuda.is_available():
            raise WorkerError(
                f"device is cuda, but PyTorch {torch.__version__} sees no GPU",
                "install PyTorch's build for CUDA and look whether nvidia-smi lists the GPU, or leave device out",
            )
        torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(device)
