"""Attention of some queries on some keys, as tree attention puts it together: with the log-sum-exp of every query, and
a way back that takes that of the whole.

`fused` is PyTorch's kernel for CPUs. `plain` is matrix products alone and runs on every device; it holds the products
of `MAX_PRODUCTS` at once.

Axes: H query heads, K key heads, G query heads of a key head, Q queries, S keys, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_PRODUCTS = 1 << 26
"""Products of queries and keys, 256 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a piece is computed."""

    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]
    """(q, k, v, is_causal, mask, scale) to what is attended to, of shape (1, H, Q, D), and the log-sum-exp of the
    scaled and masked products, (1, H, Q), -inf where a query sees nothing. q is (1, H, Q, D), k and v are (1, K, S, D).
    A causal piece has as many keys as queries; a mask is added to the products and has shape (1, 1, Q, S)."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor, Tensor]
    ]
    """(gradient of out, q, k, v, out, lse, is_causal, mask, scale) to the gradients of q, k and v, where `out` and
    `lse` are those of all pieces that these queries have."""


def kernel_for(device: torch.device) -> Kernel:
    """The fastest kernel of a device."""
    return FUSED if device.type == "cpu" else PLAIN


def _fused(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    if mask is not None:  # where a query sees none of the keys the kernel gives zeros
        lse = lse.masked_fill(mask.isinf().all(-1), -torch.inf)
    return out, lse


def _fused_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return grads


FUSED = Kernel(_fused, _fused_backward)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    outs, lses = [], []
    for some in _parts(q, k):
        products = _products(q[:, :, some], k, some, is_causal, mask, scale)
        lse_K_G_Q = products.logsumexp(-1)
        shares = torch.exp(products - lse_K_G_Q.masked_fill(lse_K_G_Q == -torch.inf, 0.0).unsqueeze(-1))
        outs.append((shares @ v.squeeze(0).unsqueeze(1).to(wide)).flatten(0, 1))
        lses.append(lse_K_G_Q.flatten(0, 1))
    return torch.cat(outs, dim=1).unsqueeze(0), torch.cat(lses, dim=1).unsqueeze(0)


def _plain_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    keys_K_1_S_D, values_K_1_S_D = (one.squeeze(0).unsqueeze(1).to(wide) for one in (k, v))
    grad_q = []
    grad_k, grad_v = torch.zeros_like(k[0], dtype=wide), torch.zeros_like(v[0], dtype=wide)
    for some in _parts(q, k):
        asked, flows, sums = (_by_key_head(one[:, :, some].to(wide), k) for one in (q, grad_out, out))
        shares = torch.exp(
            _products(q[:, :, some], k, some, is_causal, mask, scale)
            - _by_key_head(lse[:, :, some].to(wide).unsqueeze(-1), k)
        )
        grad_v += (shares.transpose(-1, -2) @ flows).sum(1)
        into_shares = flows @ values_K_1_S_D.transpose(-1, -2) - (flows * sums).sum(-1, keepdim=True)
        into_products = shares * into_shares * scale
        grad_q.append((into_products @ keys_K_1_S_D).flatten(0, 1))
        grad_k += (into_products.transpose(-1, -2) @ asked).sum(1)
    return torch.cat(grad_q, dim=1).unsqueeze(0), grad_k.unsqueeze(0), grad_v.unsqueeze(0)


PLAIN = Kernel(_plain, _plain_backward)


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Queries that are computed at once."""
    step = max(1, MAX_PRODUCTS // (q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        yield slice(start, min(start + step, q.shape[2]))


def _by_key_head(per_query: Tensor, k: Tensor) -> Tensor:
    """What query heads have, shape (1, H, Q, …), by the key head that they read: (K, G, Q, …)."""
    return per_query.squeeze(0).reshape(k.shape[1], -1, *per_query.shape[2:])


def _products(q: Tensor, k: Tensor, some: slice, is_causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    """Scaled and masked products of some queries with all keys, shape (K, G, Q, S)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    asked = _by_key_head(q.to(wide), k)
    products: Tensor = asked @ k.squeeze(0).unsqueeze(1).transpose(-1, -2).to(wide) * scale
    if mask is not None:
        products = products + mask[0, :, some]
    if is_causal:
        places_Q = torch.arange(some.start, some.stop, device=q.device)
        is_later_Q_S = torch.arange(k.shape[2], device=q.device) > places_Q.unsqueeze(1)
        products = products.masked_fill(is_later_Q_S, -math.inf)
    return products
