"""Policies on disk: read a Hugging Face folder or shipped weights, and write one that transformers or peft reads.

Safetensors only; no code from a checkpoint ever runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm_engine.config import LoraConfig, ModelKind
from swarm_engine.errors import ModelError, shown
from swarm_engine.folders import describe
from swarm_engine.models import NANO_DIR
from swarm_engine.models.decoder import Decoder, DecoderConfig
from swarm_engine.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_config
from swarm_engine.protocol import ADDITIONAL_TEMPLATES, CHAT_TEMPLATE, StartWeights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE, "special_tokens_map.json")

DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})
"""Keys of `config.json` that name the numbers' type, which is this engine's to choose."""

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Numbers that are the weights themselves; integers and float8 are weights only with the scales that they were
divided by."""

CPU = torch.device("cpu")

log = logging.getLogger(__name__)

BASE = "base.json"
"""Beside an adapter: the model that it is for, with a hash of its weights."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What the branches of a policy are beside."""

    lora: LoraConfig
    base: str
    """Name of the model."""
    base_sha256: str
    """Of its weights."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """Weights in memory and what has to be known to use them."""

    model: Decoder
    config_json: dict[str, Any]
    """The checkpoint's `config.json`."""
    tokenizer_dir: Path
    end_ids: tuple[int, ...]
    """Tokens that end a reply."""
    adapter: Adapter | None = None
    """None where its weights are its own."""
    start_weights: tuple[StartWeights, ...] = ()
    """What the engine began with; empty for a policy outside of one, whose files nobody hashed."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and reply together."""
        return self.model.config.max_context


def load_policy(path: Path | str, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> LoadedPolicy:
    """Load a folder in Hugging Face layout, or one file of shipped weights, whose folder's parent holds the rest.

    Raises:
        ModelError: a file is missing, broken, or describes a model that can't be run exactly.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent.parent
    config_json = read_json(folder / "config.json")
    with _naming(folder / "config.json"):
        config = DecoderConfig.from_json(config_json)
    end_ids = _end_ids(folder, config_json, config.vocab_size)
    with _naming(folder / "config.json"), torch.device("cpu"):
        model = _allocate(config).to(dtype)
    with _naming(path):
        model.load_weights(read_tensors(path))
    return LoadedPolicy(model.to(device), config_json, folder, end_ids)


def kind_of(config: DecoderConfig) -> ModelKind:
    """Whose model has these shapes: a copy of the embedded one, however it was trained on, has them all."""
    return ModelKind.EMBEDDED if config == _embedded() else ModelKind.PUBLISHED


@functools.cache
def _embedded() -> DecoderConfig:
    return DecoderConfig.from_json(read_json(NANO_DIR / "config.json"))


def adapt(base: LoadedPolicy, name: str, base_sha256: str, lora: LoraConfig, seed: int) -> LoadedPolicy:
    """A policy with branches of its own beside the weights of a model called `name`."""
    return replace(base, model=base.model.adapted(lora, seed), adapter=Adapter(lora, name, base_sha256))


def save_policy(policy: LoadedPolicy, folder: Path, *, is_merged: bool = False) -> None:
    """Write a policy into `folder`, which must exist: as transformers reads it, or an adapter as peft does.

    Args:
        is_merged: write an adapter's model with what its branches add.
    """
    for name in tokenizer_files(policy.tokenizer_dir):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(policy.tokenizer_dir / name, folder / name)
    if policy.adapter is not None and not is_merged:
        _save_adapter(policy, policy.adapter, folder)
        return
    tensors = {name: tensor.contiguous() for name, tensor in policy.model.merged_weights()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Both keys: transformers 5 writes the first, what reads with an older one looks for the second.
    dtype = _dtype_name(policy.model.embedding.dtype)
    config = policy.config_json | dict.fromkeys(sorted(DTYPE_KEYS), dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": list(policy.end_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _save_adapter(policy: LoadedPolicy, adapter: Adapter, folder: Path) -> None:
    # A clone, for projections of one matrix share their A, and safetensors writes no tensor twice.
    tensors = {name: tensor.clone() for name, tensor in policy.model.named_adapter()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    described = peft_config(adapter.lora, adapter.base)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2) + "\n")
    base = {"model": adapter.base, "sha256": adapter.base_sha256}
    (folder / BASE).write_text(json.dumps(base, indent=2) + "\n")


def tokenizer_files(folder: Path) -> list[str]:
    """The tokenizer's files that are in a folder, its chat templates among them, by their paths in it."""
    additional = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    paths = [*(folder / name for name in TOKENIZER_FILES), *additional]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def weights_sha256(path: Path) -> str:
    """Of the weight files of a model or an adapter.

    Raises:
        ModelError: one is missing or can't be read.
    """
    files = weight_files(path)
    try:
        hashes = [describe(file)["sha256"] for file in files]
    except OSError as error:
        raise _unreadable(Path(error.filename), error) from None
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of a policy's folder holds.

    Raises:
        ModelError: it is missing or no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"there is no {path}; a policy's folder holds config.json, tokenizer and weights") from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", "put the file there, readable") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}", "copy it from the checkpoint again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {shown(content)}, no JSON object", "copy it from the checkpoint again")
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The weights of a folder, in one file or in shards, or those of one file.

    Raises:
        ModelError: a file is missing or broken.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path):
        tensors.update(_read_file(file))
    return tensors


def load_adapter(policy: LoadedPolicy, folder: Path) -> None:
    """Put the branches that a folder holds into a policy.

    Raises:
        ModelError: a file is missing or broken, they don't fit, or they were trained beside other weights.
    """
    assert policy.adapter is not None
    if (folder / BASE).is_file():
        there = read_json(folder / BASE).get("sha256")
        if there != policy.adapter.base_sha256:
            raise ModelError(
                f"the adapter in {folder} was trained beside other weights than model {policy.adapter.base!r} has now; "
                "put the model back as it was"
            )
    policy.model.load_adapter(_read_file(folder / ADAPTER_WEIGHTS))


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights of a model or an adapter.

    Raises:
        ModelError: the index of a model's shards is missing or broken.
    """
    if path.is_file():
        return [path]
    if (path / ADAPTER_CONFIG).is_file():
        return [path / ADAPTER_WEIGHTS]
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(
                f"{index} has weight_map {shown(weight_map)}, which must give the file of every tensor",
                "copy it from the checkpoint again, or remove it where model.safetensors holds all",
            )
        if strange := [name for name in weight_map.values() if not _is_shard(name)]:
            raise ModelError(
                f"{index} has a tensor in {shown(strange[0])}", "name a .safetensors file beside the index for each"
            )
        return [path / name for name in sorted(set(weight_map.values()))]
    return [path / "model.safetensors"]


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except OSError as error:
        raise _unreadable(file, error) from None
    except SafetensorError as error:
        raise ModelError(f"{file} is broken: {error}", "copy it from the checkpoint again") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            known = ", ".join(_dtype_name(dtype) for dtype in WEIGHT_DTYPES)
            raise ModelError(
                f"{file} holds tensor {name!r} as {_dtype_name(tensor.dtype)}; weights must be {known}",
                "dequantize them and save them as one of these",
            )
    return tensors


def _end_ids(folder: Path, config_json: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Every token that ends a reply, from generation_config.json before config.json: the latter often lacks some."""
    file = folder / "generation_config.json"
    found = read_json(file).get("eos_token_id") if file.exists() else None
    if found is None:
        file = folder / "config.json"
        found = config_json.get("eos_token_id")
    if found is None:
        raise ModelError(f"{folder} names no eos_token_id in generation_config.json or config.json; add it there")
    end_ids = found if isinstance(found, list) else [found]
    if not end_ids or not all(type(one) is int and one >= 0 for one in end_ids):
        raise ModelError(
            f"{file} has eos_token_id {shown(found)}, the vocabulary has the ids 0 to {vocab_size - 1}",
            "name one of them, or a list of some",
        )
    if min(end_ids) >= vocab_size:  # no error, for a policy whose replies all run to their limit can be meant
        log.warning(
            "%s has eos_token_id %s, beyond the vocabulary of %d: no reply ends by itself", file, found, vocab_size
        )
    return tuple(end_ids)


def _allocate(config: DecoderConfig) -> Decoder:
    try:
        return Decoder(config)
    except RuntimeError as error:  # torch's own for memory that the machine doesn't have
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"the model that it describes can't be allocated ({reason})", "check its sizes, or use a larger machine"
        ) from error


def _is_shard(name: object) -> bool:
    """Whether an index may name this file: nothing outside its own folder is ever opened."""
    return isinstance(name, str) and name.isprintable() and name.endswith(".safetensors") and Path(name).name == name


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unreadable(file: Path, error: OSError) -> ModelError:
    if isinstance(error, FileNotFoundError):
        return ModelError(f"there is no {file}; weights must be safetensors")
    return ModelError(f"{file} can't be read ({error})", "weights must be readable safetensors files")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Begin what is wrong with a file or a folder with its path, where it isn't named yet."""
    try:
        yield
    except ModelError as error:
        if str(path) in error.message:
            raise
        raise ModelError(f"{path}: {error.message}", error.hint) from error
