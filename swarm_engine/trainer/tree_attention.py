"""Attention over a prefix trie, exactly: every token attends to its ancestors and itself.

The tokens lie in depth-first order, so what a token sees is a handful of whole runs. Each run of the trie gives two
dense pieces: the run with itself, causally, and everything below it with it, in full. No product is computed for a mask
to throw away, but at the edge of a sliding window. Pieces that share queries are
merged by their log-sum-exp, and the backward pass of a piece needs only the final output and log-sum-exp, as in
blockwise and ring attention (Liu et al. 2023, arXiv:2310.01889; FlashAttention-2, Dao 2023, arXiv:2307.08691).

A tree that is too large is computed in chunks of consecutive places. Keys and values, and what flows back into them,
are then kept for the whole tree, and chunks go forward in order and backward in reverse: everything below a chunk has
left its gradient there before the chunk hands it on.

Axes: H query heads, K key heads, U places of the trie, T places of a chunk, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swarm_engine.merger.trie import Node, Trie
from swarm_engine.trainer.pieces import Products, kernel_for


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries at some places meet keys at some places: all of them, or causally where both are the same."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    is_causal: bool
    is_windowed: bool = False
    """Whether some of the keys are too far from some of the queries."""


def pieces_of(nodes: Sequence[Node], start: int, stop: int) -> Iterator[Piece]:
    """What the queries at places `start` to `stop` attend to; causal pieces first, one for every query."""
    inside = [node for node in nodes if node.start < stop and start < node.end]
    yield from _causal_pieces(inside, start, stop)
    for node in inside:
        first, last = max(node.start, start), min(node.stop, stop)
        if node.start < first < last:  # a run that was cut: what lies before the cut
            yield Piece(first, last, node.start, first, is_causal=False)
        below, behind = max(node.stop, start), min(node.end, stop)
        if below < behind:
            yield Piece(below, behind, node.start, node.stop, is_causal=False)


def windowed_pieces_of(trie: Trie, window: int, start: int, stop: int) -> Iterator[Piece]:
    """The same where a token sees the last `window` tokens of its own path alone, itself included.

    The window counts along a path, so it is by depth and never by place. Runs are cut to the window's length; two of
    them are then near enough, out of reach, or have to be masked.
    """
    runs = [run for node in trie.nodes for run in _cut(node, window)]
    yield from _causal_pieces(runs, start, stop)
    above: list[Node] = []
    for run in runs:
        while above and above[-1].end <= run.start:
            above.pop()
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            if run.start < first:
                yield Piece(first, last, run.start, first, is_causal=False)
            nearest, farthest = int(trie.depths_U[first]), int(trie.depths_U[last - 1])
            for ancestor in reversed(above):
                if nearest - int(trie.depths_U[ancestor.stop - 1]) >= window:
                    break
                is_windowed = farthest - int(trie.depths_U[ancestor.start]) >= window
                yield Piece(first, last, ancestor.start, ancestor.stop, is_causal=False, is_windowed=is_windowed)
        above.append(run)


def _causal_pieces(runs: Sequence[Node], start: int, stop: int) -> Iterator[Piece]:
    for run in runs:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            yield Piece(first, last, first, last, is_causal=True)


def _cut(node: Node, length: int) -> Iterator[Node]:
    """A run in runs of at most `length` tokens."""
    for start in range(node.start, node.stop, length):
        yield Node(start, min(start + length, node.stop), node.end)


@dataclass(slots=True)
class Kept:
    """Keys and values of one layer for the whole tree, and the gradients that have reached them; shape (1, K, U, D)."""

    k: Tensor
    v: Tensor
    grads: tuple[Tensor, Tensor] | None = None
    """Of `k` and `v`; None before anything came back."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The buffers of the gradients, made when the first one comes: a policy that is only scored needs none."""
        if self.grads is None:
            # They come from every branch below; in 16 bits their sum would lose them.
            wide = torch.promote_types(self.k.dtype, torch.float32)
            self.grads = torch.zeros_like(self.k, dtype=wide), torch.zeros_like(self.v, dtype=wide)
        return self.grads


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
            self.layers[index] = Kept(like.new_empty(shape), like.new_empty(shape))
        return self.layers[index]


class TreeAttention:
    """How the layers of a decoder attend on the places `start` to `stop` of a trie; a `models.decoder.Attend`."""

    def __init__(self, trie: Trie, start: int = 0, stop: int | None = None, memory: Memory | None = None) -> None:
        """`memory` is None where the places are the whole trie."""
        self._trie = trie
        self._start, self._stop = start, len(trie) if stop is None else stop
        self._memory = memory
        self._depths_U = torch.from_numpy(trie.depths_U)
        self._pieces: dict[int | None, tuple[Piece, ...]] = {}
        """By window; layers of one model may have different ones."""

    def __call__(
        self,
        layer: int,
        q_B_H_T_D: Tensor,
        k_B_K_T_D: Tensor,
        v_B_K_T_D: Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """The attended values, shape (1, H, T, D).

        Args:
            scale: of the products; None for one over the root of D.
            window: tokens of its path that a token sees, itself included; None for all.
        """
        kept = None
        if self._memory is not None:
            kept = self._memory.layer(layer, k_B_K_T_D)
            with torch.no_grad():
                kept.k[:, :, self._start : self._stop] = k_B_K_T_D
                kept.v[:, :, self._start : self._stop] = v_B_K_T_D
        self._depths_U = self._depths_U.to(q_B_H_T_D.device)
        scale = 1 / math.sqrt(q_B_H_T_D.shape[-1]) if scale is None else scale
        tables = _Tables(self._pieces_within(window), self._start, self._depths_U, window, scale)
        out: Tensor = _Attended.apply(q_B_H_T_D, k_B_K_T_D, v_B_K_T_D, tables, kept)  # type: ignore[no-untyped-call]
        return out

    def _pieces_within(self, window: int | None) -> tuple[Piece, ...]:
        if window not in self._pieces:
            if window is None:
                pieces = pieces_of(self._trie.nodes, self._start, self._stop)
            else:
                pieces = windowed_pieces_of(self._trie, window, self._start, self._stop)
            self._pieces[window] = tuple(pieces)
        return self._pieces[window]


@dataclass(frozen=True, slots=True)
class _Tables:
    """What a layer's attention looks up."""

    pieces: tuple[Piece, ...]
    start: int
    """Place of the first query."""
    depths_U: Tensor
    window: int | None
    scale: float

    def products(self, piece: Piece, dtype: torch.dtype) -> Products:
        """What becomes of the products of a piece."""
        return Products(self.scale, piece.is_causal, self._mask(piece, dtype))

    def _mask(self, piece: Piece, dtype: torch.dtype) -> Tensor | None:
        if not piece.is_windowed:
            return None
        assert self.window is not None
        asked = self.depths_U[piece.q_start : piece.q_stop].unsqueeze(1)
        is_far = asked - self.depths_U[piece.k_start : piece.k_stop] >= self.window
        return torch.zeros_like(is_far, dtype=dtype).masked_fill_(is_far, -torch.inf)[None, None]


class _Attended(torch.autograd.Function):
    """The pieces of some queries, merged."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tables: _Tables, kept: Kept | None) -> Tensor:
        keys, values = (k, v) if kept is None else (kept.k, kept.v)
        kernel = kernel_for(q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(q.shape, dtype=wide)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        for piece in tables.pieces:
            asked = slice(piece.q_start - tables.start, piece.q_stop - tables.start)
            seen = slice(piece.k_start, piece.k_stop)
            how = tables.products(piece, q.dtype)
            part, part_lse = kernel.forward(q[:, :, asked], keys[:, :, seen], values[:, :, seen], how)
            if piece.is_causal:
                out[:, :, asked], lse[:, :, asked] = part, part_lse
                continue
            here = lse[:, :, asked]
            out[:, :, asked].lerp_(part.to(wide), torch.sigmoid(part_lse - here).unsqueeze(-1))
            torch.logaddexp(here, part_lse, out=here)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tables, ctx.kept = tables, kept
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        tables: _Tables = ctx.tables
        kept: Kept | None = ctx.kept
        kernel = kernel_for(q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros_like(q, dtype=wide)
        if kept is None:
            keys, values = k, v
            grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        else:
            keys, values = kept.k, kept.v
            grad_k, grad_v = kept.gradients()
        for piece in tables.pieces:
            asked = slice(piece.q_start - tables.start, piece.q_stop - tables.start)
            seen = slice(piece.k_start, piece.k_stop)
            part_q, part_k, part_v = kernel.backward(
                grad_out[:, :, asked],
                q[:, :, asked],
                keys[:, :, seen],
                values[:, :, seen],
                out[:, :, asked],
                lse[:, :, asked],
                tables.products(piece, q.dtype),
            )
            grad_q[:, :, asked] += part_q
            grad_k[:, :, seen] += part_k
            grad_v[:, :, seen] += part_v
        if kept is not None:
            own = slice(tables.start, tables.start + q.shape[2])
            grad_k, grad_v = grad_k[:, :, own], grad_v[:, :, own]
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None
