"""The two collapses of Section 5, measured: attention entropy, and the rank of the tokens over depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlogy

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.process import TokenProcess
from locater.theory.softmax import softmax

__all__ = ["DepthProfile", "attention_entropy", "rank_over_depth", "rank_residual"]


def attention_entropy(attention: ArrayLike) -> Array:
    """Shannon entropy in nats of each query's attention (..., queries, keys): (..., queries)."""
    a = check.finite("attention", attention)
    if a.ndim == 0 or (a < 0).any():
        raise LocaterError("attention must be (..., keys) of non-negative weights")
    if np.abs(a.sum(-1) - 1).max(initial=0.0) > 1e-3:
        raise LocaterError(f"attention must sum to one over the keys, got sums up to {a.sum(-1).max():.6g}")
    return np.asarray(-xlogy(a, a).sum(-1))


def rank_residual(tokens: ArrayLike) -> Array:
    """How far tokens (..., T, d) are from all being the same: ‖X − 1x̄ᵀ‖_F/‖X‖_F (Dong et al., 2021).

    Zero for a collapsed sequence, one for a centred one. x̄ is the mean token, the best in this norm.
    """
    x = check.finite("tokens", tokens)
    if x.ndim < 2:
        raise LocaterError(f"tokens must be (..., T, d), got shape {x.shape}")
    largest = np.abs(x).max((-2, -1), keepdims=True, initial=0.0)
    x = x / np.where(largest > 0, largest, 1.0)  # so that squares neither overflow nor vanish
    norm = np.linalg.norm(x, axis=(-2, -1))
    residual = np.linalg.norm(x - x.mean(-2, keepdims=True), axis=(-2, -1))
    return np.asarray(np.divide(residual, norm, out=np.zeros_like(norm), where=norm > 0))


@dataclass(frozen=True)
class DepthProfile:
    """Averages over sequences, at every depth."""

    residual: Array  # (layers + 1,): geometric mean of the rank residual, from the input on
    entropy: Array  # (layers,): mean attention entropy in nats


def rank_over_depth(
    eigenvalues: ArrayLike,
    process: TokenProcess,
    *,
    layers: int = 12,
    skip: bool = False,
    temperature: float | None = None,
    sequences: int = 64,
    seed: int = 0,
) -> DepthProfile:
    """A stack of attention-only layers X ← A X (or X + A X with `skip`) sharing one symmetric W_QK.

    Full softmax attention, W_V = I. Tokens start as `process` with Σ = I, scaled so that the average
    coordinate has variance one, and every layer's output is scaled back to that (a number per sequence,
    which no residual sees), so that depth alone moves the logits. The basis of W_QK does not matter then,
    only its `eigenvalues` (d,).
    """
    w = check.real_eigenvalues(eigenvalues)
    layers = check.at_least("layers", layers, 1)
    temperature = check.positive("temperature", np.sqrt(len(w)) if temperature is None else temperature)
    x = process.sample(sequences, len(w), seed=seed) / np.sqrt(np.trace(process.position_covariance) / process.tokens)
    residual, entropy = [rank_residual(x)], []
    for _ in range(layers):
        attention = softmax((x * w) @ x.swapaxes(-1, -2) / temperature)
        entropy.append(attention_entropy(attention).mean())
        mixed = attention @ x
        x = x + mixed if skip else mixed
        x = x / np.sqrt((x**2).mean((-2, -1), keepdims=True))
        residual.append(rank_residual(x))
    geometric = np.exp(np.log(np.maximum(np.stack(residual), 1e-300)).mean(-1))
    return DepthProfile(geometric, np.asarray(entropy))
