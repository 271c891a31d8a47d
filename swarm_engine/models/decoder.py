"""The decoder that sampler and trainer share: Qwen3, Qwen2, Llama and Mistral as one functional forward.

The published weights are kept under three changes that make a small model fast on a CPU, none of which alters a number
by more than rounding: query, key and value projections are one matrix, gate and up projections another, and attention
is a function that the caller gives. So the sampler attends over its cache, the trainer over a padded batch, and neither
copies a weight. `named_weights` maps between this layout and the names of a Hugging Face checkpoint.

A matrix may have a low-rank branch, see `lora`; one without costs nothing and computes what it did.

Transformers is not imported for the common rotary embedding: that alone would double the start-up time of a worker.

Axes: B row, T position, H query head, K key/value head, D head dimension, C hidden dimension, V vocabulary.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_engine.config import LoraConfig
from swarm_engine.errors import ModelError, shown
from swarm_engine.models.lora import LowRank, Projection

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
"""Values of `model_type` that this forward computes exactly."""

ABSENT: Mapping[str, Mapping[str, int]] = {
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
"""What transformers takes where a `config.json` lacks a key for which null means something else: as many heads as
queries have, as wide as the hidden dimension allows, no window."""

ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "yarn": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
}
"""Rotary embeddings whose frequencies are fixed, with the numbers that they need. `dynamic` and `longrope` change them
with the longest row of a batch, so that a token's log-probability would depend on its neighbours."""

ROPE_OPTIONS = ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale")
"""Numbers that a rotary embedding may have."""

ROTARY_TABLES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Tensors of older checkpoints that hold what is computed from the config."""

MAX_LAYERS = 1_000
MAX_SIZE = 10_000_000
"""Of every other whole number of a `config.json`. No model comes near; a slip of the pen must not be allocated."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and constants of one decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    """The output head is the embedding matrix."""
    rope: Mapping[str, Any]
    """`rope_parameters` of the checkpoint: `rope_type`, `rope_theta` and the scaling's own values."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a Hugging Face `config.json`. A key that is null is as if it were absent, but for those in `ABSENT`.

        Raises:
            ModelError: an architecture, activation or rotary embedding that this forward does not compute exactly, or
                a value of another kind than its key has.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
        config = {**ABSENT[family], **config}
        activation = config.get("hidden_act")
        if activation not in (None, "silu"):
            raise ModelError(f"hidden_act {activation!r} is not supported; {family} models use 'silu'")
        if config.get("quantization_config") is not None:
            raise ModelError("the weights are quantized and can't be trained; dequantize and save them first")
        # Where both are there, transformers goes by the older one.
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.get(key) or {}
        if not isinstance(rope, dict):
            raise ModelError(f"{key} is {shown(rope)}, no JSON object", "copy it from the checkpoint again")
        rope = {name: value for name, value in rope.items() if value is not None}
        rope.setdefault("rope_type", rope.pop("type", "default"))
        theta = config.get("rope_theta")
        rope.setdefault("rope_theta", 10_000.0 if theta is None else theta)
        rope_type = rope["rope_type"]
        if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
            raise ModelError(f"rope_type {shown(rope_type)} is not supported; supported are {', '.join(ROPE_TYPES)}")
        for name in (*ROPE_TYPES[rope_type], *(name for name in ROPE_OPTIONS if name in rope)):
            _positive(rope, name)
        if rope_type == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
            raise ModelError(
                f"high_freq_factor is {rope['high_freq_factor']}, not above low_freq_factor, {rope['low_freq_factor']}",
                "correct one of them",
            )
        hidden_size = _count(config, "hidden_size")
        num_heads = _count(config, "num_attention_heads")
        num_kv_heads = _count(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"num_attention_heads is {num_heads}, no multiple of num_key_value_heads, {num_kv_heads}",
                "correct one of them",
            )
        head_dim = _count(config, "head_dim", hidden_size // num_heads)
        if head_dim % 2 or not head_dim:
            raise ModelError(f"head_dim is {head_dim}, the rotary embedding turns pairs of numbers", "make it even")
        max_context = _count(config, "max_position_embeddings")
        if family == "mistral" or _is_set(config, "use_sliding_window"):
            # Within the window, attention is full.
            max_context = min(max_context, _count(config, "sliding_window", max_context))
        has_bias = _is_set(config, "attention_bias")
        return cls(
            family=family,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers", limit=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            max_context=max_context,
            has_qkv_bias=family == "qwen2" or has_bias,
            has_out_bias=family != "qwen2" and has_bias,
            has_mlp_bias=family == "llama" and _is_set(config, "mlp_bias"),
            has_qk_norm=family == "qwen3",
            is_tied=_is_set(config, "tie_word_embeddings"),
            rope=rope,
        )


def _count(config: Mapping[str, Any], key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
    """A whole number of a `config.json`; `default` where it is absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= limit:
        raise ModelError(f"{key} is {_said(value)}; it must be a whole number from 1 to {limit}", "correct it")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above zero of a `config.json`; `default` where it is absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not 0 < value <= sys.float_info.max:
        raise ModelError(f"{key} is {_said(value)}; it must be a number above 0", "correct it")
    return float(value)


def _is_set(config: Mapping[str, Any], key: str) -> bool:
    """A flag of a `config.json`, off where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{key} is {shown(value)}; it must be true or false", "correct it")
    return bool(value)


def _said(value: object) -> str:
    return "missing" if value is None else shown(value)


def projections(config: DecoderConfig) -> dict[str, tuple[Projection, ...]]:
    """What each fused matrix of a layer is made of."""
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    fused = {
        "qkv": {"self_attn.q_proj": width, "self_attn.k_proj": kv_width, "self_attn.v_proj": kv_width},
        "out": {"self_attn.o_proj": hidden},
        "gate_up": {"mlp.gate_proj": inner, "mlp.up_proj": inner},
        "down": {"mlp.down_proj": hidden},
    }
    found = {}
    for matrix, widths in fused.items():
        stops = list(accumulate(widths.values()))
        found[matrix] = tuple(
            Projection(path.partition(".")[2], path, stop - rows, stop)
            for (path, rows), stop in zip(widths.items(), stops, strict=True)
        )
    return found


class Attend(Protocol):
    """How one layer's queries meet the keys and values they may see."""

    def __call__(self, layer: int, q_B_H_T_D: Tensor, k_B_K_T_D: Tensor, v_B_K_T_D: Tensor, /) -> Tensor:
        """Return the attended values, shape (B, H, T, D)."""
        ...


class Block(nn.Module):
    """One layer: attention, then the gated network, each on a norm of its own and added to what came in."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        hidden, inner = config.hidden_size, config.intermediate_size
        width = config.num_heads * config.head_dim
        qkv_width = width + 2 * config.num_kv_heads * config.head_dim

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape))

        def maybe(is_there: bool, *shape: int) -> nn.Parameter | None:
            return weight(*shape) if is_there else None

        self.attention_norm = weight(hidden)
        self.qkv = weight(qkv_width, hidden)
        self.qkv_bias = maybe(config.has_qkv_bias, qkv_width)
        self.q_norm = maybe(config.has_qk_norm, config.head_dim)
        self.k_norm = maybe(config.has_qk_norm, config.head_dim)
        self.out = weight(hidden, width)
        self.out_bias = maybe(config.has_out_bias, hidden)
        self.mlp_norm = weight(hidden)
        self.gate_up = weight(2 * inner, hidden)
        self.gate_up_bias = maybe(config.has_mlp_bias, 2 * inner)
        self.down = weight(hidden, inner)
        self.down_bias = maybe(config.has_mlp_bias, hidden)
        self.qkv_branch: LowRank | None = None
        self.out_branch: LowRank | None = None
        self.gate_up_branch: LowRank | None = None
        self.down_branch: LowRank | None = None

    def forward(self, x_B_T_C: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The next layer's input, shape (B, T, C).

        Args:
            cos, sin: of each token's position, to be broadcast over (B, T, heads, D).
        """
        config = self.config
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.norm_eps
        width = (config.hidden_size,)
        rows, length, _ = x_B_T_C.shape
        x = x_B_T_C
        y = functional.rms_norm(x, width, self.attention_norm, eps)
        qkv = linear(y, self.qkv, self.qkv_bias, self.qkv_branch).view(rows, length, heads + 2 * kv_heads, -1)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            scale = torch.cat((self.q_norm.expand(heads, -1), self.k_norm.expand(kv_heads, -1)))
            qk = functional.rms_norm(qk, (config.head_dim,), None, eps) * scale
        first, second = qk.chunk(2, dim=-1)
        qk = torch.addcmul(qk * cos, torch.cat((-second, first), dim=-1), sin).transpose(1, 2)
        q, k = torch.split(qk, [heads, kv_heads], dim=1)
        y = attend(self.index, q, k, v.transpose(1, 2))
        y = y.transpose(1, 2).reshape(rows, length, -1)
        x = x + linear(y, self.out, self.out_bias, self.out_branch)
        y = functional.rms_norm(x, width, self.mlp_norm, eps)
        gate, up = linear(y, self.gate_up, self.gate_up_bias, self.gate_up_branch).chunk(2, dim=-1)
        return x + linear(functional.silu(gate) * up, self.down, self.down_bias, self.down_branch)

    def branches(self) -> list[LowRank]:
        """Those that are there."""
        return [one for one in (self.qkv_branch, self.out_branch, self.gate_up_branch, self.down_branch) if one]


class Decoder(nn.Module):
    """A decoder-only language model; weights are uninitialised until `load_weights`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.head = None if config.is_tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and everything that is computed with them."""
        return self.embedding.device

    def hidden(self, tokens_B_T: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last layer's normed output, shape (B, T, C).

        Args:
            tokens_B_T: token ids.
            positions: of each token in its own context, shape (T,) or (B, T).
            attend: called once a layer, in order.
        """
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        x = functional.embedding(tokens_B_T, self.embedding)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        return functional.rms_norm(x, (self.config.hidden_size,), self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary, shape (..., V), of hidden states of shape (..., C)."""
        return functional.linear(hidden, self.embedding if self.head is None else self.head)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, as a view into this module's parameters."""
        config = self.config
        kv_width = config.num_kv_heads * config.head_dim
        qkv_widths = [config.num_heads * config.head_dim, kv_width, kv_width]
        yield "model.embed_tokens.weight", self.embedding.data
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            prefix = f"model.layers.{index}"
            yield f"{prefix}.input_layernorm.weight", block.attention_norm.data
            for kind, qkv in (("weight", block.qkv), ("bias", block.qkv_bias)):
                if qkv is not None:
                    for name, part in zip("qkv", torch.split(qkv.data, qkv_widths), strict=True):
                        yield f"{prefix}.self_attn.{name}_proj.{kind}", part
            yield f"{prefix}.self_attn.o_proj.weight", block.out.data
            if block.out_bias is not None:
                yield f"{prefix}.self_attn.o_proj.bias", block.out_bias.data
            if block.q_norm is not None and block.k_norm is not None:
                yield f"{prefix}.self_attn.q_norm.weight", block.q_norm.data
                yield f"{prefix}.self_attn.k_norm.weight", block.k_norm.data
            yield f"{prefix}.post_attention_layernorm.weight", block.mlp_norm.data
            for kind, gate_up in (("weight", block.gate_up), ("bias", block.gate_up_bias)):
                if gate_up is not None:
                    gate, up = gate_up.data.chunk(2)
                    yield f"{prefix}.mlp.gate_proj.{kind}", gate
                    yield f"{prefix}.mlp.up_proj.{kind}", up
            yield f"{prefix}.mlp.down_proj.weight", block.down.data
            if block.down_bias is not None:
                yield f"{prefix}.mlp.down_proj.bias", block.down_bias.data
        yield "model.norm.weight", self.norm.data
        if self.head is not None:
            yield "lm_head.weight", self.head.data

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in a checkpoint's tensors, converting their dtype.

        Raises:
            ModelError: a tensor is missing, has another shape, or has no place here.
        """
        spare = {name for name in tensors if not name.endswith(ROTARY_TABLES)}
        for name, view in self.named_weights():
            tensor = tensors.get(name)
            if tensor is None:
                raise ModelError(f"the checkpoint has no tensor {name!r}; its config.json describes another model")
            if tensor.shape != view.shape:
                raise ModelError(f"tensor {name!r} is {tuple(tensor.shape)}, config.json asks for {tuple(view.shape)}")
            view.copy_(tensor)
            spare.discard(name)
        if self.head is None and "lm_head.weight" in spare:  # some checkpoints store the tied matrix twice
            if not torch.equal(tensors["lm_head.weight"].to(self.embedding.dtype), self.embedding.data):
                raise ModelError(
                    "tie_word_embeddings is true in config.json, yet tensor 'lm_head.weight' is another one than "
                    "'model.embed_tokens.weight'",
                    "set tie_word_embeddings to false to keep the head, or remove the tensor",
                )
            spare.discard("lm_head.weight")
        if spare:
            raise ModelError(f"the checkpoint holds {len(spare)} tensors with no place here, such as {min(spare)!r}")

    def adapted(self, lora: LoraConfig, seed: int) -> Decoder:
        """A model with branches of its own beside the weights of this one, which it shares and which are frozen."""
        model = copy.deepcopy(self, {id(one): one for one in (*self.parameters(), *self.buffers())})
        model.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for block in model.blocks:
            assert isinstance(block, Block)
            for matrix, parts in projections(self.config).items():
                if any(one.target in lora.targets for one in parts):
                    weight: Tensor = getattr(block, matrix)
                    branch = LowRank(weight.shape[1], parts, lora, weight)
                    branch.randomize(generator)
                    setattr(block, f"{matrix}_branch", branch)
        return model

    def named_branches(self) -> Iterator[tuple[str, LowRank]]:
        """Every branch with the path of its layer."""
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            for branch in block.branches():
                yield f"model.layers.{index}", branch

    @property
    def has_branches(self) -> bool:
        """Whether any matrix has one."""
        return any(True for _ in self.named_branches())

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name with what its branch adds; one without a branch as a view."""
        added: dict[str, Tensor] = {}
        for layer, branch in self.named_branches():
            product = branch.product().detach()
            added |= {f"{layer}.{one.path}.weight": product[one.start : one.stop] for one in branch.targets}
        for name, weight in self.named_weights():
            yield name, weight + added[name] if name in added else weight

    def named_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Both halves of every branch under their names in peft, as views into this module's parameters."""
        for layer, branch in self.named_branches():
            for one, a_R_I, b_O_R in branch.halves():
                yield f"base_model.model.{layer}.{one.path}.lora_A.weight", a_R_I
                yield f"base_model.model.{layer}.{one.path}.lora_B.weight", b_O_R

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in an adapter's tensors, converting their dtype.

        Raises:
            ModelError: a tensor is missing, has another shape or no place here, or projections of one matrix don't
                share their A.
        """
        spare = set(tensors)
        filled: dict[int, str] = {}
        for name, view in self.named_adapter():
            tensor = tensors.get(name)
            if tensor is None:
                raise ModelError(f"the adapter has no tensor {name!r}; its adapter_config.json describes another one")
            if tensor.shape != view.shape:
                raise ModelError(f"tensor {name!r} is {tuple(tensor.shape)}, this model asks for {tuple(view.shape)}")
            first = filled.setdefault(view.data_ptr(), name)
            if not torch.equal(tensors[first], tensor):
                raise ModelError(
                    f"{first!r} and {name!r} differ; here the projections of one matrix share their A, so merge the "
                    "adapter into its model with peft and name that"
                )
            view.copy_(tensor)
            spare.discard(name)
        if spare:
            raise ModelError(f"the adapter holds {len(spare)} tensors with no place here, such as {min(spare)!r}")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, branch: LowRank | None) -> Tensor:
    """What a matrix makes of `x`, with what its branch adds."""
    y = functional.linear(x, weight, bias)
    return y if branch is None else y + branch(x)


def num_parameters(model: nn.Module) -> int:
    """How many numbers the weights are."""
    return sum(parameter.numel() for parameter in model.parameters())


def rotary_table(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each of shape (max_context, D), in float32."""
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies, scaling = 1.0 / (float(rope["rope_theta"]) ** exponents), 1.0
    if rope["rope_type"] != "default":
        from transformers import CONFIG_MAPPING
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        described = CONFIG_MAPPING[config.family](
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_context,
            rope_parameters=dict(rope),
        )
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](described)
    angles = torch.outer(torch.arange(config.max_context, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def attend_causally(_layer: int, q_B_H_T_D: Tensor, k_B_K_T_D: Tensor, v_B_K_T_D: Tensor) -> Tensor:
    """Every position sees itself and those before it: what a right-padded batch needs, without a mask."""
    is_grouped = q_B_H_T_D.shape[1] != k_B_K_T_D.shape[1]
    return functional.scaled_dot_product_attention(
        q_B_H_T_D, k_B_K_T_D, v_B_K_T_D, is_causal=True, enable_gqa=is_grouped
    )
