"""Attention over a prefix trie, exactly: every token attends to its ancestors and itself, and nothing is masked.

The tokens lie in depth-first order, so what a token sees is a handful of whole runs. Each run of the trie gives two
dense pieces: the run with itself, causally, and everything below it with it, in full. Pieces that share queries are
merged by their log-sum-exp, and the backward pass of a piece needs only the final output and log-sum-exp, as in
blockwise and ring attention (Liu et al. 2023, arXiv:2310.01889; FlashAttention-2, Dao 2023, arXiv:2307.08691).

A tree that is too large is computed in chunks of consecutive places. Keys and values, and what flows back into them,
are then kept for the whole tree, and chunks go forward in order and backward in reverse: everything below a chunk has
left its gradient there before the chunk hands it on.

Axes: H query heads, K key heads, U places of the trie, T places of a chunk, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swarm_engine.merger.trie import Node


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries at some places meet keys at some places: all of them, or causally where both are the same."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    is_causal: bool


def pieces_of(nodes: Sequence[Node], start: int, stop: int) -> Iterator[Piece]:
    """What the queries at places `start` to `stop` attend to; causal pieces first, one for every query."""
    inside = [node for node in nodes if node.start < stop and start < node.end]
    for node in inside:
        first, last = max(node.start, start), min(node.stop, stop)
        if first < last:
            yield Piece(first, last, first, last, is_causal=True)
    for node in inside:
        first, last = max(node.start, start), min(node.stop, stop)
        if node.start < first < last:  # a run that was cut: what lies before the cut
            yield Piece(first, last, node.start, first, is_causal=False)
        below, behind = max(node.stop, start), min(node.end, stop)
        if below < behind:
            yield Piece(below, behind, node.start, node.stop, is_causal=False)


@dataclass(slots=True)
class Kept:
    """Keys and values of one layer for the whole tree, and the gradients that have reached them; shape (1, K, U, D)."""

    k: Tensor
    v: Tensor
    grad_k: Tensor
    grad_v: Tensor


@dataclass(slots=True)
class Memory:
    """What chunks of one tree leave for each other."""

    num_places: int
    layers: dict[int, Kept] = field(default_factory=dict)

    def layer(self, index: int, like: Tensor) -> Kept:
        """The buffers of one layer, made at its first chunk.

        Args:
            like: keys of a chunk, shape (1, K, T, D).
        """
        if index not in self.layers:
            shape = (*like.shape[:2], self.num_places, like.shape[3])
            k, v = like.new_empty(shape), like.new_empty(shape)
            # Gradients come from every branch below; in 16 bits their sum would lose them.
            wide = torch.promote_types(like.dtype, torch.float32)
            self.layers[index] = Kept(k, v, k.new_zeros(shape, dtype=wide), v.new_zeros(shape, dtype=wide))
        return self.layers[index]


class TreeAttention:
    """How the layers of a decoder attend on the places `start` to `stop` of a tree; a `models.decoder.Attend`."""

    def __init__(self, nodes: Sequence[Node], start: int, stop: int, memory: Memory | None = None) -> None:
        self._pieces = tuple(pieces_of(nodes, start, stop))
        self._start, self._stop = start, stop
        self._memory = memory
        """None where the places are the whole tree."""

    def __call__(
        self, layer: int, q_B_H_T_D: Tensor, k_B_K_T_D: Tensor, v_B_K_T_D: Tensor, scale: float | None = None
    ) -> Tensor:
        """The attended values, shape (1, H, T, D)."""
        if self._memory is None:
            kept = None
        else:
            kept = self._memory.layer(layer, k_B_K_T_D)
            with torch.no_grad():
                kept.k[:, :, self._start : self._stop] = k_B_K_T_D
                kept.v[:, :, self._start : self._stop] = v_B_K_T_D
        out: Tensor = _Attended.apply(  # type: ignore[no-untyped-call]
            q_B_H_T_D, k_B_K_T_D, v_B_K_T_D, self._pieces, self._start, kept, scale
        )
        return out


class _Attended(torch.autograd.Function):
    """The pieces of some queries, merged."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pieces: tuple[Piece, ...],
        start: int,
        kept: Kept | None,
        scale: float | None,
    ) -> Tensor:
        keys, values = (k, v) if kept is None else (kept.k, kept.v)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(q.shape, dtype=wide)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        for piece in pieces:
            asked = slice(piece.q_start - start, piece.q_stop - start)
            seen = slice(piece.k_start, piece.k_stop)
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, asked], keys[:, :, seen], values[:, :, seen], 0.0, piece.is_causal, scale=scale
            )
            if piece.is_causal:
                out[:, :, asked], lse[:, :, asked] = part, part_lse
            else:
                here = lse[:, :, asked]
                out[:, :, asked].lerp_(part.to(wide), torch.sigmoid(part_lse - here).unsqueeze(-1))
                torch.logaddexp(here, part_lse, out=here)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.start, ctx.kept, ctx.scale = pieces, start, kept, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        kept: Kept | None = ctx.kept
        start: int = ctx.start
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros_like(q, dtype=wide)
        if kept is None:
            keys, values = k, v
            grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        else:
            keys, values, grad_k, grad_v = kept.k, kept.v, kept.grad_k, kept.grad_v
        for piece in ctx.pieces:
            asked = slice(piece.q_start - start, piece.q_stop - start)
            seen = slice(piece.k_start, piece.k_stop)
            part_q, part_k, part_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, asked],
                q[:, :, asked],
                keys[:, :, seen],
                values[:, :, seen],
                out[:, :, asked],
                lse[:, :, asked],
                0.0,
                piece.is_causal,
                scale=ctx.scale,
            )
            grad_q[:, :, asked] += part_q
            grad_k[:, :, seen] += part_k
            grad_v[:, :, seen] += part_v
        if kept is not None:
            own = slice(start, start + q.shape[2])
            grad_k, grad_v = grad_k[:, :, own], grad_v[:, :, own]
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None
