"""Tree attention for the models of transformers: one function under a registered name, no model is patched.

    check_config(config.to_dict())
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=TREE)
    model.model(input_ids=tokens, position_ids=depths, tree=attention_for(trie, device))

The tokens of the trie are one row, their positions its depths. On a CPU the runs of the trie are attended to piece by
piece; on a GPU flex_attention does it, with a block mask made of the same one number per token. What the trie can't
express is refused: positions that depend on the longest row of a batch, states that flow from token to token, dropout.
MoE models compute each shared token once, so their auxiliary losses and expert capacities see unique tokens, not the
copies of them that unmerged training has: leave those losses off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from swarm_engine.errors import ModelError
from swarm_engine.merger.trie import Trie
from swarm_engine.trainer.tree_attention import TreeAttention

TREE = "a3r_tree"
"""For `attn_implementation`."""
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Their frequencies follow the longest position there is, so a token's numbers would depend on its neighbours'."""
DROPOUTS = ("attention_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "hidden_dropout")
STATEFUL_LAYERS = ("linear_attention", "conv", "mamba", "recurrent")
"""Layers that carry a state along the row; a branch would need a copy of it, which no mask makes."""

TESTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3", "gemma3_text")
"""`model_type`s whose gradients were compared with row-by-row training. Others may add a term to their attention, or
count positions in a way, that shows nowhere in their config."""
IGNORED = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits"})
"""Arguments of an attention function that say nothing about what it computes."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def register() -> None:
    """Make `TREE` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(TREE, attend_on_tree)
    AttentionMaskInterface.register(TREE, lambda *_, **__: None)


def check_config(config: Mapping[str, Any]) -> None:
    """See that a model computes the same on a trie as row by row.

    Args:
        config: a Hugging Face `config.json`.
    Raises:
        ModelError: it doesn't, and why; train it with merge="token" or "none".
    """
    text = config.get("text_config") or config
    reason = _refusal(text)
    if reason:
        raise ModelError(f"{text.get('model_type')} can't be trained on a tree: {reason}", 'use merge="token"')


def _refusal(config: Mapping[str, Any]) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # Models with layers of several kinds have a set of parameters for each.
    ropes = [one for one in rope.values() if isinstance(one, Mapping)] or [rope]
    for one in ropes:
        kind = one.get("rope_type", one.get("type", "default"))
        if kind in BATCH_DEPENDENT_ROPE:
            return f"its {kind} rotary embedding changes with the longest row of a batch"
    for kind in config.get("layer_types") or ():
        if any(word in kind for word in STATEFUL_LAYERS):
            return f"its {kind} layers carry a state from token to token"
    if any(config.get(name) for name in DROPOUTS):
        return "it has dropout, which draws once for a shared token and not once for each copy; set it to 0"
    if config.get("attn_logit_softcapping"):
        return "it caps its attention logits, which no kernel here does"
    if config.get("attention_chunk_size"):
        return "it attends within chunks of the row"
    if config.get("model_type") not in TESTED:
        return f"it was not compared with training row by row; {', '.join(TESTED)} were"
    return None


def attention_for(trie: Trie, device: torch.device) -> TreeAttention | FlexTreeAttention:
    """The attention that a device computes on a trie."""
    return FlexTreeAttention(trie, device) if device.type == "cuda" else TreeAttention(trie)


def attend_on_tree(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeAttention | FlexTreeAttention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer.

    Args:
        query: shape (1, H, U, D); keys and values have shape (1, K, U, D).
        scaling: of the products; None for one over the root of D.
        sliding_window: tokens of its path that a token sees, itself included; None for all.
    Returns:
        The attended values, shape (1, U, H, D), and no weights.
    Raises:
        ModelError: the call asks for something that is not computed here.
    """
    if tree is None:
        raise ModelError(f"attn_implementation={TREE!r} needs the tree", "call the model with tree=attention_for(…)")
    if attention_mask is not None or dropout or softcap:
        raise ModelError(
            f"a mask, dropout {dropout} or softcap {softcap} was asked for", "a tree has one row and no padding"
        )
    unknown = sorted(name for name, value in others.items() if value is not None and name not in IGNORED)
    if unknown:
        raise ModelError(f"the model asks its attention for {', '.join(unknown)}", 'train it with merge="token"')
    out = tree(module.layer_idx, query, key, value, scaling, sliding_window)
    return out.transpose(1, 2), None


class FlexTreeAttention:
    """How a GPU attends on a whole trie."""

    def __init__(self, trie: Trie, device: torch.device) -> None:
        self._trie = trie
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}
        self._flex = torch.compile(flex_attention)

    def __call__(
        self, _layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """The attended values, shape (1, H, U, D); as `TreeAttention`."""
        if window not in self._masks:
            length = len(self._trie)
            mask_mod = mask_mod_of(self._trie, window, self._device)
            self._masks[window] = create_block_mask(mask_mod, None, None, length, length, device=self._device)
        is_grouped = q.shape[1] != k.shape[1]
        out: Tensor = self._flex(q, k, v, block_mask=self._masks[window], scale=scale, enable_gqa=is_grouped)
        return out


def mask_mod_of(trie: Trie, window: int | None, device: torch.device | str = "cpu") -> MaskMod:
    """Whether a query sees a key, as flex_attention asks: by one number a token, and by depth within a window."""
    ends_U = torch.from_numpy(trie.ends_U).to(device)
    depths_U = torch.from_numpy(trie.depths_U).to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_ancestor = (key <= query) & (query < ends_U[key])
        return is_ancestor if window is None else is_ancestor & (depths_U[query] - depths_U[key] < window)

    return sees
