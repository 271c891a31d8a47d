"""Attention of some queries on some keys, as tree attention puts it together: with the log-sum-exp of every query, and
a way back that takes that of the whole.

`FUSED` is PyTorch's kernel for CPUs. `PLAIN` is matrix products alone and runs on every device; it holds `MAX_PRODUCTS`
products at once.

Axes: H query heads, K key heads, G query heads of a key head, Q queries, S keys, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MAX_PRODUCTS = 1 << 26
"""Products of queries and keys, 256 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Products:
    """What becomes of the products of queries and keys before the softmax."""

    scale: float
    is_causal: bool = False
    """Each query sees the key at its own place and those before it; there are as many of each."""
    mask: Tensor | None = None
    """Added to the scaled products, shape (1, 1, Q, S)."""


class Kernel(Protocol):
    """How a piece is computed; q has shape (1, H, Q, D), k and v have (1, K, S, D)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Products) -> tuple[Tensor, Tensor]:
        """What is attended to, of shape (1, H, Q, D), and the log-sum-exp of the products, of shape (1, H, Q), -inf
        where a query sees nothing."""
        ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Products
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, where `out` and `lse` are those of all pieces that the queries have."""
        ...


def kernel_for(device: torch.device) -> Kernel:
    """The fastest kernel of a device."""
    return FUSED if device.type == "cpu" else PLAIN


class Fused:
    """PyTorch's kernel for CPUs; see `Kernel`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Products) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, how.is_causal, attn_mask=how.mask, scale=how.scale
        )
        if how.mask is not None:  # where a query sees none of the keys the kernel gives zeros
            lse = lse.masked_fill(how.mask.isinf().all(-1), -torch.inf)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Products
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, how.is_causal, attn_mask=how.mask, scale=how.scale
        )
        return grads


class Plain:
    """Matrix products; see `Kernel`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Products) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        outs, lses = [], []
        for some in _parts(q, k):
            products = _products(q, k, some, how)
            lse_K_G_Q = products.logsumexp(-1)
            shares = torch.exp(products - lse_K_G_Q.masked_fill(lse_K_G_Q == -torch.inf, 0.0).unsqueeze(-1))
            outs.append((shares @ v.squeeze(0).unsqueeze(1).to(wide)).flatten(0, 1))
            lses.append(lse_K_G_Q.flatten(0, 1))
        return torch.cat(outs, dim=1).unsqueeze(0), torch.cat(lses, dim=1).unsqueeze(0)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Products
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        keys_K_1_S_D, values_K_1_S_D = (one.squeeze(0).unsqueeze(1).to(wide) for one in (k, v))
        grad_q = []
        grad_k, grad_v = torch.zeros_like(k[0], dtype=wide), torch.zeros_like(v[0], dtype=wide)
        for some in _parts(q, k):
            asked, flows, sums = (_by_key_head(one[:, :, some].to(wide), k) for one in (q, grad_out, out))
            lse_K_G_Q_1 = _by_key_head(lse[:, :, some].to(wide).unsqueeze(-1), k)
            shares = torch.exp(_products(q, k, some, how) - lse_K_G_Q_1)
            grad_v += (shares.transpose(-1, -2) @ flows).sum(1)
            into_shares = flows @ values_K_1_S_D.transpose(-1, -2) - (flows * sums).sum(-1, keepdim=True)
            into_products = shares * into_shares * how.scale
            grad_q.append((into_products @ keys_K_1_S_D).flatten(0, 1))
            grad_k += (into_products.transpose(-1, -2) @ asked).sum(1)
        return torch.cat(grad_q, dim=1).unsqueeze(0), grad_k.unsqueeze(0), grad_v.unsqueeze(0)


FUSED, PLAIN = Fused(), Plain()


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Queries that are computed at once."""
    step = max(1, MAX_PRODUCTS // (q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        yield slice(start, min(start + step, q.shape[2]))


def _by_key_head(per_query: Tensor, k: Tensor) -> Tensor:
    """What query heads have, shape (1, H, Q, …), by the key head that they read: (K, G, Q, …)."""
    return per_query.squeeze(0).reshape(k.shape[1], -1, *per_query.shape[2:])


def _products(q: Tensor, k: Tensor, some: slice, how: Products) -> Tensor:
    """Products of some of the queries with all keys, shape (K, G, Q, S)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    asked = _by_key_head(q[:, :, some].to(wide), k)
    products: Tensor = asked @ k.squeeze(0).unsqueeze(1).transpose(-1, -2).to(wide) * how.scale
    if how.mask is not None:
        products = products + how.mask[0, :, some]
    if how.is_causal:
        places_Q = torch.arange(some.start, some.stop, device=q.device)
        is_later_Q_S = torch.arange(k.shape[2], device=q.device) > places_Q.unsqueeze(1)
        products = products.masked_fill(is_later_Q_S, -math.inf)
    return products
