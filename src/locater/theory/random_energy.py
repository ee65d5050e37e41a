"""Depth at infinite length, where `depth_law` has a limit in closed form: Giorlandino and Goldt, arXiv 2505.24333.

Tokens of one size and one cosine keep both alike, so G is two numbers, q and p. The logits of a query are then the
energies of a Random Energy Model of variance v = b q (q − p), b that of queries and keys of size 1. Let b grow as ln T.
Up to v = 2 ln T softmax spreads over a power of T keys, and the outputs of two queries have as much in common as that
of one with itself: p. Beyond it a few keys have all the weight, Σ p_i² = 1 − √(2 ln T/v), and so much of q − p is left.
Norms, branches and the MLP act on G as at any length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.depth import RandomTransformer, layer_gram, normed

__all__ = ["LongLimit", "long_limit"]


@dataclass(frozen=True)
class LongLimit:
    """Of every layer."""

    cosine: Array  # (L + 1,) of different tokens, as they enter each layer and leave the last
    entropy_share: Array  # (L,) of attention, over ln T


def long_limit(model: RandomTransformer, cosine: float, share: float) -> LongLimit:
    """Of tokens that enter with this cosine, and logits of variance `share` · 2 ln T for queries and keys of size 1.

    The size of queries and keys is what `share` says; that of everything else is the model's. Their critical β is
    √(2/(1 − cosine)), with share = β²/2.
    """
    if not 0 <= check.number("cosine", cosine) < 1:
        raise LocaterError(f"cosine must be from 0 to below 1, got {cosine:g}")
    if not check.number("share", share) >= 0:
        raise LocaterError(f"share must not be negative, got {share:g}")
    a = model.attention
    if a.window or a.qk_norm_eps is not None or a.softcap or a.rotary or model.rotary:
        raise LocaterError("the limit is that of attention without a window, QK-norm, soft cap or rotary positions")
    gram, found, entropies = np.array([[1.0, cosine], [cosine, 1.0]]), [cosine], []

    def attend(states: Array) -> Array:
        q, p = states[0, 0], states[0, 1]
        frozen = share * q * (q - p)  # v / (2 ln T)
        entropies.append(max(0.0, 1.0 - frozen))
        left = 1 - 1 / np.sqrt(frozen) if frozen > 1 else 0.0
        mixed = np.full_like(states, p) + (q - p) * left * np.eye(2)
        return model.attention.output.gram(model.attention.value.gram(mixed))

    for _ in range(model.layers):
        gram = layer_gram(model, gram, np.asarray(model.branch**2), attend)
        found.append(float(normed(gram)[0, 1]))
    return LongLimit(np.array(found), np.array(entropies))
