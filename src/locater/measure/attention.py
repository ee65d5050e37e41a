"""Entropy, largest logit and ρ of attention from its queries and keys, a chunk of queries at a time.

Legend: B batch, H query heads, G key heads (H a multiple of G), K head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from locater.errors import LocaterError

__all__ = ["AttentionStatistics", "attention_statistics"]

_CHUNK_LOGITS = 1 << 22  # in memory at a time


class AttentionStatistics(NamedTuple):
    entropy: Tensor  # (B, H, Tq), nats, of each query's attention
    max_logit: Tensor  # (B, H, Tq)
    logsumexp: Tensor  # (B, H, Tq)
    rho: Tensor  # (H, Tk): the share of the batch with z in [0, 1], for the last query


@torch.no_grad()
def attention_statistics(
    q: Tensor, k: Tensor, *, causal: bool = True, scale: float | None = None
) -> AttentionStatistics:
    """Statistics of softmax(scale · q kᵀ) for q (B, H, Tq, K) and k (B, G, Tk, K); scale is 1/√K unless given.

    Causal attention is aligned to the last key: the last query sees all of them. z is the piecewise linear softmax
    of Definition 1: 1/T + (logit − mean logit)/T over the T keys. Half precisions are computed in float32.
    """
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or not x.is_floating_point() or 0 in x.shape:
            raise LocaterError(
                f"{name} must be (batch, heads, tokens, head width), floating point, got {tuple(x.shape)}"
            )
    (b, h, tq, width), (kb, g, tk, k_width) = q.shape, k.shape
    if b != kb or width != k_width:
        raise LocaterError(f"q and k must share batch and head width, got {tuple(q.shape)} and {tuple(k.shape)}")
    if h % g:
        raise LocaterError(f"the {h} query heads are no multiple of the {g} key heads")
    if causal and tq > tk:
        raise LocaterError(
            f"causal attention aligned to the last key needs at least as many keys ({tk}) as queries ({tq})"
        )
    scale = 1 / math.sqrt(width) if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = k.to(wide).repeat_interleave(h // g, 1) if h != g else k.to(wide)
    entropy, top, lse = (torch.empty(b, h, tq, dtype=wide, device=q.device) for _ in range(3))
    place = torch.arange(tk, device=q.device)
    size = max(1, _CHUNK_LOGITS // (b * h * tk))
    for start in range(0, tq, size):
        rows = slice(start, min(start + size, tq))
        logits = scale * (q[:, :, rows].to(wide) @ keys.mT)
        if causal:
            hidden = place > torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (tk - tq)
            logits.masked_fill_(hidden, -math.inf)
        top[:, :, rows] = logits.amax(-1)
        lse[:, :, rows] = total = logits.logsumexp(-1)
        p = (logits - total[..., None]).exp()
        # lse − E[s] as E[lse − s]: every term is small where p is large
        surprise = (total[..., None] - logits).masked_fill_(p == 0, 0)
        entropy[:, :, rows] = torch.linalg.vecdot(p, surprise).clamp_(min=0)
    last = scale * (q[:, :, -1:].to(wide) @ keys.mT)[:, :, 0]  # (B, H, Tk)
    z = (1 + last - last.mean(-1, keepdim=True)) / tk
    return AttentionStatistics(entropy, top, lse, ((z >= 0) & (z <= 1)).to(wide).mean(0))
