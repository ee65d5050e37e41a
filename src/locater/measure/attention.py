"""Entropy, largest logit and ρ of attention from its queries and keys; no T × T is ever formed.

Two implementations: blocks of logits in PyTorch, which run anywhere and are the reference, and a Triton kernel
(`_kernels`) on NVIDIA's GPUs. Both keep three numbers for each query while they pass over the keys: the maximum m so
far, ℓ = Σ e^(s − m) and w = Σ e^(s − m) (s − m). The logsumexp is m + ln ℓ, the entropy ln ℓ − w / ℓ. See `_blocks`.

Legend: B batch, H query heads, G key heads (H a multiple of G), R = H / G, K head width, Tq queries, Tk keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.hooks import Bias
from locater.measure import _propagation
from locater.measure._logits import Logits, check_unmasked
from locater.measure._rows import row_statistics

__all__ = ["AttentionStatistics", "Bias", "attention_statistics", "signal_propagation"]


class AttentionStatistics(NamedTuple):
    entropy: Tensor  # (B, H, Tq), nats, of each query's attention
    max_logit: Tensor  # (B, H, Tq)
    logsumexp: Tensor  # (B, H, Tq)
    rho: Tensor | None  # (H, Tk): the share of the batch with z in [0, 1], for the last query


@torch.no_grad()
def attention_statistics(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Bias | None = None,
    sinks: Tensor | None = None,
    rho: bool = True,
) -> AttentionStatistics:
    """Statistics of the softmax over each query's unmasked keys, of q (B, H, Tq, K) and k (B, G, Tk, K).

    A logit is s = scale · q·k, with scale 1/√K unless given; softcap · tanh(s / softcap) if a `softcap` is; less
    slope · |distance| with `alibi_slopes` (H,); plus `bias`. Distances are between aligned positions: the last query is
    at the last key, so that queries may be the last ones of longer keys (a cache).

    Masked keys: with `causal` those after a query's own position; with a `window` those `window` or more positions
    away; those where `key_mask` (B, Tk) is False (padding). `bias` is a tensor that expands to (B, H, Tq, Tk), or a
    function that takes two slices, of queries and of keys, and gives that block, so that T × T need not exist. Where it
    is −∞, or the lowest number of its dtype, or False if it is boolean, the key is masked.

    `sinks` (H,) are logits without a key, as gpt-oss has them: softmax, and so every statistic, has one key more, which
    is never masked, has no product with q, no cap and no bias.

    A query whose keys are all masked has entropy 0, and for max_logit and logsumexp its sink, or −∞. A padded query is
    measured like any other; drop it by `key_mask`.

    rho is `signal_propagation` for one query of each sequence, its last, or the last that `key_mask` does not mask;
    None, and not computed, with `rho=False`.

    Results are float64 for float64 inputs, else float32. Inputs and their autograd graph are left alone.
    """
    masks = {"key_mask": key_mask, "window": window, "bias": bias}
    logits = Logits.of(q, k, scale, softcap, alibi_slopes, sinks, causal=causal, **masks)
    entropy, top, lse = row_statistics(logits)
    if sinks is None and (bias is not None or (key_mask is not None and window is not None)):
        names = " and ".join(name for name, value in masks.items() if value is not None)
        check_unmasked((top != -math.inf).flatten(1).any(1), names)
    terms = k.shape[2] + (sinks is not None)
    entropy.clamp_(0, math.log(terms))  # rounding may carry equal logits beyond what they can have
    return AttentionStatistics(entropy, top, lse, _propagation.last_propagation(logits) if rho else None)


@torch.no_grad()
def signal_propagation(q: Tensor, k: Tensor, *, queries: Sequence[int] = (-1,), **options: Any) -> Tensor:
    """Measured ρ (H, queries, Tk): the share of the batch where key i has z_i in [0, 1] for the chosen queries.

    z is the piecewise linear softmax of Definition 1: z_i = 1/T + (s_i − mean s)/T over the query's T unmasked keys,
    its sink among them if there is one.
    Softmax itself can look elsewhere.
    A sequence counts for a key that is unmasked for its query; where none of the batch does, ρ is NaN.

    Queries are rows of q; negative ones count back from each sequence's last unmasked token: -1 is the last that
    `key_mask` does not mask. A sequence whose query is padding, or before its start, does not count. In cross-attention
    (neither aligned nor of one length) queries have no keys of their own, and none is padding. Other options are those
    of `attention_statistics`.
    """
    logits = Logits.of(q, k, **options)
    rows, tq = [int(query) for query in queries], q.shape[2]
    if not rows or not all(-tq <= row < tq for row in rows):
        raise LocaterError(f"queries must be one or more rows from {-tq} to {tq - 1}, got {rows}")
    return _propagation.signal_propagation(logits, torch.tensor(rows))
