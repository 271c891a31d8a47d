"""Policies on disk: read a Hugging Face folder or shipped weights, and write a folder that transformers reads.

Safetensors only; no code from a checkpoint ever runs.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm_engine.errors import ModelError
from swarm_engine.models.decoder import Decoder, DecoderConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""Copied with the weights where they are there."""

DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})
"""Keys of `config.json` that name the numbers' type, which is this engine's to choose."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """Weights in memory and what has to be known to use them."""

    model: Decoder
    config_json: dict[str, Any]
    """The checkpoint's `config.json`."""
    tokenizer_dir: Path
    end_ids: tuple[int, ...]
    """Tokens that end a reply."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and reply together."""
        return self.model.config.max_context


def load_policy(path: Path | str, dtype: torch.dtype = torch.float32) -> LoadedPolicy:
    """Load a folder in Hugging Face layout, or one file of shipped weights, whose folder's parent holds the rest.

    Raises:
        ModelError: a file is missing, broken, or describes a model that can't be run exactly.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent.parent
    config_json = read_json(folder / "config.json")
    with torch.device("cpu"):
        model = Decoder(DecoderConfig.from_json(config_json)).to(dtype)
    model.load_weights(read_tensors(path))
    return LoadedPolicy(model, config_json, folder, _end_ids(folder, config_json))


def save_policy(policy: LoadedPolicy, folder: Path) -> None:
    """Write the weights, config and tokenizer into `folder`, which must exist, as transformers reads them."""
    tensors = {name: tensor.contiguous() for name, tensor in policy.model.named_weights()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Both keys: transformers 5 writes the first, what reads with an older one looks for the second.
    dtype = str(policy.model.embedding.dtype).removeprefix("torch.")
    config = policy.config_json | dict.fromkeys(sorted(DTYPE_KEYS), dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": list(policy.end_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if (policy.tokenizer_dir / name).is_file():
            shutil.copyfile(policy.tokenizer_dir / name, folder / name)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of a policy's folder holds.

    Raises:
        ModelError: it is missing or no JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"there is no {path}; a policy's folder holds config.json, tokenizer and weights") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The weights of a folder, in one file or in shards, or those of one file.

    Raises:
        ModelError: a file is missing or broken.
    """
    if path.is_file():
        files = [path]
    elif (path / "model.safetensors.index.json").is_file():
        names = read_json(path / "model.safetensors.index.json")["weight_map"].values()
        files = [path / Path(name).name for name in sorted(set(names))]
    else:
        files = [path / "model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except FileNotFoundError:
            raise ModelError(f"there is no {file}; weights must be safetensors") from None
        except SafetensorError as error:
            raise ModelError(f"{file} is broken: {error}") from error
    return tensors


def _end_ids(folder: Path, config_json: dict[str, Any]) -> tuple[int, ...]:
    """Every token that ends a reply, from generation_config.json before config.json: the latter often lacks some."""
    generation = folder / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = config_json.get("eos_token_id")
    if found is None:
        raise ModelError(f"{folder} names no eos_token_id in generation_config.json or config.json; add it there")
    return tuple(found) if isinstance(found, list) else (int(found),)
