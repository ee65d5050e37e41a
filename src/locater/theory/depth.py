"""A whole transformer at initialisation: entropy of attention and likeness of tokens by layer, before it is built.

The weights are random, centred and independent. Then all that the tokens at some depth have in common with each other
is their Gram matrix G_ij = E x_i·x_j/D, and a layer takes one to the next:

* a norm divides by the diagonal (what a LayerNorm's mean over D coordinates removes vanishes as 1/D);
* queries and keys of a head are K normal features with covariance ∝ G, so its logits are drawn as q kᵀ with
  q, k = L Z, L Lᵀ = G. Heads are drawn, weights of width D never: finite T and finite K are exact;
* the heads' outputs have the Gram matrix ∝ mean over heads of P G Pᵀ. Heads that share values or keys have blocks of
  W_O of their own, so no cross term is left in the mean;
* an MLP has a kernel (`kernels`), and a branch is added to the stream: centred weights leave no cross term.

What is approximated is G at finite width, by its mean: its entries fluctuate by 1/√D.

Legend: L layers, T tokens, H heads, K head width, D width, R draws; (...) are points of a grid of gains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory._threads import one_thread
from locater.theory.kernels import ACTIVATIONS, activation_kernel

__all__ = ["DepthLaw", "RandomAttention", "RandomLinear", "RandomMLP", "RandomTransformer", "depth_law", "token_gram"]

MOST_LAYERS = 1000
_MOST_FACTOR = 1e9
_TOGETHER = 1 << 23  # numbers of attention weights held at once
_JITTER = 1e-10  # of the diagonal: what rounding may leave below zero


@dataclass(frozen=True)
class RandomLinear:
    """A matrix of independent centred entries."""

    inputs: int  # its width
    std: float  # of an entry
    bias_std: float = 0.0  # of a bias's entry, 0 without

    def gram(self, gram: Array) -> Array:
        """Of what it puts out."""
        return np.asarray(self.inputs * self.std**2 * gram + self.bias_std**2)


@dataclass(frozen=True)
class RandomAttention:
    """A module of H query heads over `key_heads` heads of keys and values."""

    heads: int
    key_heads: int
    head_width: int
    query: RandomLinear
    key: RandomLinear
    value: RandomLinear
    output: RandomLinear  # its inputs are heads × head_width
    logit_scale: float  # commonly 1/√head_width
    causal: bool = True
    window: int | None = None  # keys that a causal query sees at most, itself among them
    rotary: tuple[float, ...] = ()  # angle by which a pair of coordinates turns from one position to the next
    qk_norm_eps: float | None = None  # of an RMSNorm of each head's queries and keys, if there is one


@dataclass(frozen=True)
class RandomMLP:
    """W_down φ(W_up x), or W_down (φ(W_gate x) ∘ W_up x) with W_gate like W_up."""

    up: RandomLinear
    down: RandomLinear
    activation: str
    gated: bool = False

    def gram(self, gram: Array) -> Array:
        """Of what it puts out."""
        inner = self.up.gram(gram)
        kernel = activation_kernel(self.activation, inner)
        return self.down.gram(kernel * inner if self.gated else kernel)


@dataclass(frozen=True)
class RandomTransformer:
    """Layers that are alike, each with weights of its own."""

    layers: int
    attention: RandomAttention
    mlp: RandomMLP | None = None
    norm: str = "pre"  # before each branch, or "post": after each sum; "none"
    parallel: bool = False  # both branches read the layer's input
    eps: float = 0.0  # of the norms: what they add to a token's mean square; embeddings can be as small

    def __post_init__(self) -> None:
        depth = check.at_least("layers", self.layers, 1)
        if depth > MOST_LAYERS:
            raise LocaterError(f"layers must be at most {MOST_LAYERS:,}, got {depth:,}")
        check.one_of("norm", self.norm, ("pre", "post", "none"))
        if not check.number("eps", self.eps) >= 0:
            raise LocaterError(f"eps must not be negative, got {self.eps:g}")
        if self.parallel and self.norm == "post":
            raise LocaterError("parallel branches with norms after the sums: no such model is known; use norm='pre'")
        a = self.attention
        check.at_least("heads", a.heads, 1)
        check.at_least("head_width", a.head_width, 1)
        if check.at_least("key_heads", a.key_heads, 1) > a.heads or a.heads % a.key_heads:
            raise LocaterError(f"key_heads must divide the {a.heads} heads, got {a.key_heads}")
        if a.window is not None:
            check.at_least("window", a.window, 2)
        if 2 * len(a.rotary) > a.head_width:
            raise LocaterError(f"rotary turns {len(a.rotary)} pairs of coordinates, and a head has {a.head_width}")
        if self.mlp is not None:
            check.one_of("activation", self.mlp.activation, tuple(ACTIVATIONS))


@dataclass(frozen=True)
class DepthLaw:
    """What attention and tokens do at every depth, averaged over weights; (...) points of a grid."""

    entropy: Array  # (..., L): of attention in nats, mean over queries and heads
    entropy_error: Array  # (..., L): its standard error, from draw to draw; of one draw, from its heads
    signal: Array  # (..., L): β = tr[C (diag p − p pᵀ)], mean over queries and heads, of tokens as attention gets them
    cosine: Array  # (..., L + 1): mean cosine between different tokens, of what enters each layer and leaves the last
    rank_residual: Array  # (..., L + 1): ‖X − 1x̄ᵀ‖/‖X‖
    size: Array  # (..., L + 1): mean square of a coordinate
    gram: Array  # (..., T, T): of what leaves the last layer
    most_entropy: float  # mean over queries of ln(keys seen)

    @property
    def entropy_share(self) -> Array:
        """Of the most there is."""
        return np.asarray(self.entropy / self.most_entropy)


def token_gram(similarity: ArrayLike, std: float, *, position_std: float = 0.0, shared_std: float = 0.0) -> Array:
    """G of tokens that enter a transformer: embeddings, and what learned positions and token types add to them.

    `similarity` (T, T) has the cosines of embeddings: 1 on the diagonal and where tokens repeat, 0 elsewhere. Positions
    have entries of `position_std`, what all tokens get has `shared_std`.
    """
    content = check.covariance("similarity", similarity)
    return np.asarray(std**2 * content + position_std**2 * np.eye(len(content)) + shared_std**2)


def depth_law(
    model: RandomTransformer,
    gram: ArrayLike,
    *,
    gain: ArrayLike = 1.0,
    branch: ArrayLike = 1.0,
    heads: int | None = None,
    draws: int = 1,
    seed: int = 0,
) -> DepthLaw:
    """Entropy of attention, β, likeness and size of tokens at every depth of a transformer with random weights.

    Args:
        model: Its layers.
        gram: G of what enters the first, (T, T): `token_gram`, or measured.
        gain: On the logits: W_Q and W_K are each √gain times as large. Broadcasts with `branch`; so does the result.
        branch: On what each branch adds to the stream: W_O and the MLP's last matrix times it.
        heads: How many are drawn of each layer, all of them unless given; groups that share keys stay together.
        draws: Of the whole network. One has the spread from network to network that so many heads leave.
        seed: What is drawn. Points of a grid share it, so that they differ by gain and branch alone.
    """
    start = check.covariance("gram", gram)
    if len(start) < 2:
        raise LocaterError("a Gram matrix of one token has no attention to speak of: give at least 2")
    if not np.diagonal(start).min() > 0:
        raise LocaterError(f"gram must have a positive diagonal, got {np.diagonal(start).min():.6g}: a token is zero")
    factors = [check.finite(name, value) for name, value in (("gain", gain), ("branch", branch))]
    if any(((factor < 0) | (factor > _MOST_FACTOR)).any() for factor in factors):
        raise LocaterError(f"gain and branch must be from 0 to {_MOST_FACTOR:g}")
    try:
        shape = np.broadcast_shapes(*(factor.shape for factor in factors))
    except ValueError as error:
        shapes = " and ".join(str(factor.shape) for factor in factors)
        raise LocaterError(f"gain and branch must broadcast with each other, got shapes {shapes}") from error
    gains, branches = (np.broadcast_to(factor, shape).reshape(-1) for factor in factors)
    rng = np.random.default_rng(check.at_least("seed", seed, 0))
    drawn = _drawn(model.attention, heads)
    with one_thread():
        runs = [_run(model, start, gains, branches, drawn, rng) for _ in range(check.at_least("draws", draws, 1))]
    mean = {name: np.mean([run[name] for run in runs], 0) for name in runs[0]}
    if draws > 1:  # also what earlier layers' heads do to the tokens of later ones
        mean["entropy_error"] = np.std([run["entropy"] for run in runs], 0) / np.sqrt(draws - 1)
    return DepthLaw(
        **{name: value.reshape(*shape, *value.shape[1:]) for name, value in mean.items()},
        most_entropy=most_entropy(model.attention, len(start)),
    )


def _drawn(attention: RandomAttention, heads: int | None) -> RandomAttention:
    """The module with so many heads, whole groups of them, and outputs as large as those of all."""
    group = attention.heads // attention.key_heads
    wanted = attention.heads if heads is None else check.at_least("heads", heads, 1)
    groups = min(attention.key_heads, -(-wanted // group))
    return replace(attention, heads=groups * group, key_heads=groups)


def _run(
    model: RandomTransformer, start: Array, gain: Array, branch: Array, drawn: RandomAttention, rng: np.random.Generator
) -> dict[str, Array]:
    """Every layer once, for points (N,): arrays (N, L) and (N, L + 1)."""
    gram = np.broadcast_to(start, (len(gain), *start.shape))
    power = branch[:, None, None] ** 2
    tokens, seen = [_likeness(gram)], []
    for _ in range(model.layers):

        def attend(states: Array) -> Array:
            mixed, statistics = random_heads(drawn, states, gain, rng)
            seen.append(statistics)
            return np.asarray(power * drawn.output.gram(drawn.value.gram(mixed)))

        def feed(states: Array) -> Array:
            return np.zeros_like(states) if model.mlp is None else np.asarray(power * model.mlp.gram(states))

        gram = _layer(model, gram, attend, feed)
        tokens.append(_likeness(gram))
    cosine, residual, size = (np.stack(part, -1) for part in zip(*tokens, strict=True))
    entropy, error, signal = (np.stack(part, -1) for part in zip(*seen, strict=True))
    found = {"entropy": entropy, "entropy_error": error, "signal": signal}
    return found | {"cosine": cosine, "rank_residual": residual, "size": size, "gram": gram}


def _layer(
    model: RandomTransformer, gram: Array, attend: Callable[[Array], Array], feed: Callable[[Array], Array]
) -> Array:
    if model.norm == "post":
        gram = normed(gram + attend(gram), model.eps)
        return gram if model.mlp is None else normed(gram + feed(gram), model.eps)

    def norm(states: Array) -> Array:
        return normed(states, model.eps) if model.norm == "pre" else states

    if model.parallel:
        states = norm(gram)
        return np.asarray(gram + attend(states) + feed(states))
    gram = gram + attend(norm(gram))
    return np.asarray(gram + feed(norm(gram)))


def normed(gram: Array, eps: float = 0.0) -> Array:
    """Behind a LayerNorm or an RMSNorm."""
    size = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1) + eps)
    return np.asarray(gram / size[..., :, None] / size[..., None, :])


def _likeness(gram: Array) -> tuple[Array, Array, Array]:
    """Mean cosine of different tokens, rank residual, mean square of a coordinate: (N,) each."""
    count, trace = gram.shape[-1], np.trace(gram, axis1=-2, axis2=-1)
    cosine = (normed(gram).sum((-2, -1)) - count) / (count * (count - 1))
    apart = np.maximum(trace - gram.sum((-2, -1)) / count, 0.0)
    return cosine, np.sqrt(apart / trace), trace / count


# ---------------------------------------------------------------------- heads, drawn


def random_heads(
    attention: RandomAttention, states: Array, gain: Array, rng: np.random.Generator
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Of tokens (N, T, T): the mean over heads of P G Pᵀ; entropy, its standard error and β, (N,) each."""
    tokens, width, group = states.shape[-1], attention.head_width, attention.heads // attention.key_heads
    root = np.linalg.cholesky(states + _JITTER * _diagonal(states))
    visible = _visible(attention, tokens)
    mixed, entropies, signals = np.zeros(states.shape), [], []
    together = max(1, _TOGETHER // (len(states) * tokens**2 * group))  # groups at once
    for first in range(0, attention.key_heads, together):
        groups = min(together, attention.key_heads - first)
        z_q, z_k = (rng.standard_normal((h, tokens, width)) for h in (groups * group, groups))
        noise_q, noise_k = (rng.standard_normal((h, 1, width)) for h in (groups * group, groups))
        q, k = (
            np.sqrt(linear.inputs) * linear.std * (root[:, None] @ z) + linear.bias_std * noise
            for linear, z, noise in ((attention.query, z_q, noise_q), (attention.key, z_k, noise_k))
        )  # (N, H, T, K)
        if (eps := attention.qk_norm_eps) is not None:
            q, k = (x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) for x in (q, k))
        q, k = (_rotated(x, attention.rotary) for x in (q, k))
        scale = attention.logit_scale * gain[:, None, None, None]
        logits = (scale * q) @ np.swapaxes(np.repeat(k, group, 1), -1, -2)
        weights, entropy = _softmax(np.where(visible, logits, -np.inf))
        of_tokens = weights @ states[:, None]  # (N, H, T, T)
        mixed += (of_tokens @ np.swapaxes(weights, -1, -2)).sum(1)
        entropies.append(entropy.mean(-1))
        signals.append(_signal(weights, of_tokens, states).mean(-1))
    entropy, signal = np.concatenate(entropies, 1), np.concatenate(signals, 1)
    by_group = entropy.reshape(len(states), -1, group).mean(-1)  # those that share keys are not independent
    few = attention.key_heads < 2  # one group says nothing of its spread
    error = np.full(len(states), np.nan) if few else by_group.std(1) / np.sqrt(attention.key_heads - 1)
    return mixed / attention.heads, (entropy.mean(1), error, signal.mean(1))


def _diagonal(matrices: Array) -> Array:
    return np.asarray(np.eye(matrices.shape[-1]) * matrices)


def _visible(attention: RandomAttention, tokens: int) -> Array:
    """(queries, keys)."""
    behind = np.subtract.outer(np.arange(tokens), np.arange(tokens))
    if not attention.causal:
        return np.ones((tokens, tokens), bool)
    return np.asarray((behind >= 0) & (behind < (attention.window or tokens)))


def most_entropy(attention: RandomAttention, tokens: int) -> float:
    """Mean over queries of ln(keys seen)."""
    return float(np.log(_visible(attention, tokens).sum(1)).mean())


def _rotated(x: Array, rates: tuple[float, ...]) -> Array:
    """Pairs of coordinates turned by position; which ones pair up does not matter to features that are alike."""
    if not rates:
        return x
    turned = 2 * len(rates)
    pairs = x[..., 0:turned:2] + 1j * x[..., 1:turned:2]
    pairs = pairs * np.exp(1j * np.outer(np.arange(x.shape[-2]), rates))
    return np.concatenate([pairs.real, pairs.imag, x[..., turned:]], -1)


def _softmax(logits: Array) -> tuple[Array, Array]:
    """Weights, and the entropy of each query."""
    shifted = logits - logits.max(-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    spent = np.einsum("...k,...k->...", weights, np.where(np.isfinite(shifted), shifted, 0.0))
    return weights, np.maximum(np.log(total[..., 0]) - spent, 0.0)


def _signal(weights: Array, of_tokens: Array, states: Array) -> Array:
    """tr[C (diag p − p pᵀ)] of each query (N, H, T), C = G − G_·q G_q·/G_qq."""
    size = np.diagonal(states, axis1=-2, axis2=-1)[:, None]  # (N, 1, T)
    toward = states[:, None]  # symmetric: row q is G_q·
    plain = weights @ size[..., None]
    spread = plain[..., 0] - np.einsum("nhqk,nhqk->nhq", of_tokens, weights)
    mean = np.einsum("nhqk,nhqk->nhq", weights, np.broadcast_to(toward, weights.shape))
    square = np.einsum("nhqk,nhqk->nhq", weights, np.broadcast_to(toward**2, weights.shape))
    return np.asarray(spread - (square - mean**2) / size)
