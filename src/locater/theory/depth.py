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
from numpy.typing import ArrayLike, NDArray

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory._threads import one_thread
from locater.theory.kernels import ACTIVATIONS, activation_kernel

__all__ = ["DepthLaw", "RandomAttention", "RandomLinear", "RandomMLP", "RandomTransformer", "depth_law", "token_gram"]

MOST_LAYERS = 1000
NORMS = ("pre", "post", "none", "sandwich", "output")
_MOST_FACTOR = 1e9
_TOGETHER = 1 << 16  # attention weights of a point of the grid held at once: those of four heads stay in the cache
WIDEST = 512  # coordinates of a head that are drawn: of more, inner products are normal to 1/√K as of these
_GONE = 1e3  # a logit so far below the largest has no weight in float64
_JITTER = 1e-10  # of the diagonal: what rounding may leave below zero


@dataclass(frozen=True)
class RandomLinear:
    """A matrix of independent centred entries."""

    inputs: int  # its width
    std: float  # of an entry
    bias_std: float = 0.0  # of a bias's entry, 0 without

    def __post_init__(self) -> None:
        check.at_least("inputs", self.inputs, 1)
        check.not_negative("std", self.std)
        check.not_negative("bias_std", self.bias_std)

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
    window: int | None = None  # keys that a causal query sees at most, itself among them; of others, on either side
    rotary: tuple[float, ...] = ()  # angle by which a pair of coordinates turns from one position to the next
    qk_norm_eps: float | None = None  # of an RMSNorm of each head's queries and keys, if there is one
    qk_norm_all: bool = False  # it is over all heads at once: so many coordinates that it divides by their mean size
    softcap: float | None = None  # c of c tanh(logit/c)


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
    norm: str = "pre"  # before each branch; "output": on what it puts out; "sandwich": both; "post": after sums; "none"
    parallel: bool = False  # both branches read the layer's input
    eps: float = 0.0  # of the norms: what they add to a token's mean square; embeddings can be as small
    branch: float = 1.0  # on what each branch adds, behind its norm if it has one
    rotary: tuple[tuple[float, ...], ...] = ()  # by layer, in the place of attention's, where layers differ in these

    def __post_init__(self) -> None:
        depth = check.at_least("layers", self.layers, 1)
        if depth > MOST_LAYERS:
            raise LocaterError(f"layers must be at most {MOST_LAYERS:,}, got {depth:,}")
        check.one_of("norm", self.norm, NORMS)
        check.not_negative("eps", self.eps)
        check.number("branch", self.branch)
        if self.parallel and self.norm == "post":
            raise LocaterError("parallel branches with norms after the sums: no such model is known; use norm='pre'")
        a = self.attention
        check.at_least("heads", a.heads, 1)
        check.at_least("head_width", a.head_width, 1)
        if check.at_least("key_heads", a.key_heads, 1) > a.heads or a.heads % a.key_heads:
            raise LocaterError(f"key_heads must divide the {a.heads} heads, got {a.key_heads}")
        check.number("logit_scale", a.logit_scale)
        if a.window is not None:
            check.at_least("window", a.window, 2)
        if a.qk_norm_eps is not None:
            check.not_negative("qk_norm_eps", a.qk_norm_eps)
        if a.softcap is not None:
            check.positive("softcap", a.softcap)
        for rates in {a.rotary, *self.rotary}:
            if 2 * len(check.finite("rotary", rates)) > a.head_width:
                raise LocaterError(f"rotary turns {len(rates)} pairs of coordinates, and a head has {a.head_width}")
        if self.rotary and len(self.rotary) != depth:
            raise LocaterError(f"rotary must be of {depth} layers, got {len(self.rotary)}")
        if self.mlp is not None:
            check.one_of("activation", self.mlp.activation, tuple(ACTIVATIONS))


@dataclass(frozen=True)
class DepthLaw:
    """What attention and tokens do at every depth, averaged over weights; (...) points of a grid."""

    entropy: Array  # (..., L): of attention in nats, mean over queries and heads
    entropy_error: Array  # (..., L): its standard error, from draw to draw; NaN of one draw
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
    for name, value in (("std", std), ("position_std", position_std), ("shared_std", shared_std)):
        check.not_negative(name, value)
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
        gram: G of what enters the first, (T, T): `token_gram`, or measured. Or several, (S, T, T), where tokens differ
            from network to network: each draw takes the next.
        gain: On the logits: W_Q and W_K are each √gain times as large. Broadcasts with `branch`; so does the result.
        branch: On what each branch adds to the stream: W_O and the MLP's last matrix times it.
        heads: How many are drawn of each layer at most, all unless given; of each group that shares keys as many.
        draws: Of the whole network. One has the spread from network to network that so many heads leave.
        seed: What is drawn. Points of a grid share it, so that they differ by gain and branch alone.
    """
    starts = token_grams(gram)
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
    drawn, count = _drawn(model, heads), check.at_least("draws", draws, 1)
    with one_thread():
        runs = [_run(drawn, starts[i % len(starts)], gains, branches, rng) for i in range(count)]
    mean = {name: np.mean([run[name] for run in runs], 0) for name in runs[0]}
    # from whole networks: what earlier layers' heads do to the tokens of later ones counts too
    spread = np.std([run["entropy"] for run in runs], 0)
    mean["entropy_error"] = spread / np.sqrt(count - 1) if count > 1 else np.full_like(spread, np.nan)
    return DepthLaw(
        **{name: value.reshape(*shape, *value.shape[1:]) for name, value in mean.items()},
        most_entropy=most_entropy(model.attention, starts.shape[-1]),
    )


def token_grams(gram: ArrayLike) -> Array:
    """One or several Gram matrices as (S, T, T), each proven to be one of tokens that are not zero."""
    several = check.finite("gram", gram)
    several = np.stack([check.covariance("gram", one) for one in (several if several.ndim == 3 else several[None])])
    if several.shape[-1] < 2:
        raise LocaterError("a Gram matrix of one token has no attention to speak of: give at least 2")
    least = np.diagonal(several, axis1=1, axis2=2).min()
    if not least > 0:
        raise LocaterError(f"gram must have a positive diagonal, got {least:.6g}: a token is zero")
    return several


def _drawn(model: RandomTransformer, heads: int | None) -> RandomTransformer:
    """With so many heads and coordinates, whose outputs are as large as those of all."""
    a = model.attention
    wanted = a.heads if heads is None else check.at_least("heads", heads, 1)
    groups = min(a.key_heads, wanted)
    width = min(a.head_width, WIDEST)

    def thinned(rates: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(rates[i * a.head_width // width] for i in range(len(rates) * width // a.head_width))

    attention = replace(
        a, heads=groups * min(a.heads // a.key_heads, wanted // groups), key_heads=groups, head_width=width,
        logit_scale=a.logit_scale * np.sqrt(a.head_width / width), rotary=thinned(a.rotary),
    )  # fmt: skip
    return replace(model, attention=attention, rotary=tuple(map(thinned, model.rotary)))


def _run(
    model: RandomTransformer, start: Array, gain: Array, branch: Array, rng: np.random.Generator
) -> dict[str, Array]:
    """Every layer once, for points (N,): arrays (N, L) and (N, L + 1)."""
    gram = np.broadcast_to(start, (len(gain), *start.shape))
    power = (model.branch * branch[:, None, None]) ** 2
    tokens, seen = [_likeness(gram)], []
    for layer in range(model.layers):
        attention = replace(model.attention, rotary=model.rotary[layer]) if model.rotary else model.attention

        def attend(states: Array, attention: RandomAttention = attention) -> Array:
            mixed, statistics = random_heads(attention, states, gain, rng)
            seen.append(statistics)
            return attention.output.gram(attention.value.gram(mixed))

        gram = layer_gram(model, gram, power, attend)
        tokens.append(_likeness(gram))
    cosine, residual, size = (np.stack(part, -1) for part in zip(*tokens, strict=True))
    entropy, signal = (np.stack(part, -1) for part in zip(*seen, strict=True))
    found = {"entropy": entropy, "signal": signal}
    return found | {"cosine": cosine, "rank_residual": residual, "size": size, "gram": gram}


def layer_gram(model: RandomTransformer, gram: Array, power: Array, attend: Callable[[Array], Array]) -> Array:
    """Of what leaves a layer; `attend` takes the Gram matrix of states to that of attention's output."""

    def norm(states: Array, *kinds: str) -> Array:
        return normed(states, model.eps) if model.norm in kinds else states

    states = norm(gram, "pre", "sandwich")
    gram = norm(gram + power * norm(attend(states), "output", "sandwich"), "post")
    if model.mlp is None:
        return gram
    states = states if model.parallel else norm(gram, "pre", "sandwich")
    return norm(gram + power * norm(model.mlp.gram(states), "output", "sandwich"), "post")


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
) -> tuple[Array, tuple[Array, Array]]:
    """Of tokens (N, T, T): the mean over heads of P G Pᵀ; entropy and β, (N,) each."""
    tokens, width, group = states.shape[-1], attention.head_width, attention.heads // attention.key_heads
    root = np.linalg.cholesky(states + _JITTER * _diagonal(states))[:, None]
    masked = ~_visible(attention, tokens)
    turns = _turns(attention.rotary, tokens)
    scale = attention.logit_scale * gain[:, None, None, None]
    mixed, entropies, signals = np.zeros(states.shape), [], []

    def features(linear: RandomLinear, heads: int) -> Array:
        """Queries or keys, (N, H, T, K)."""
        x = np.sqrt(linear.inputs) * linear.std * (root @ rng.standard_normal((heads, tokens, width)))
        if linear.bias_std:
            x += linear.bias_std * rng.standard_normal((heads, 1, width))
        if (eps := attention.qk_norm_eps) is not None:
            over_all = linear.gram(states).diagonal(axis1=-2, axis2=-1)[:, None, :, None]
            size = over_all if attention.qk_norm_all else (x**2).mean(-1, keepdims=True)
            x /= np.sqrt(size + eps)
        return _rotated(x, turns)

    together = max(1, _TOGETHER // tokens**2)  # heads at once, of one group or of whole ones
    for first in range(0, attention.key_heads, max(1, together // group)):
        groups = min(max(1, together // group), attention.key_heads - first)
        keys = np.swapaxes(features(attention.key, groups), -1, -2)
        for start in range(0, group, together):
            heads = min(together, group - start)
            q = features(attention.query, groups * heads)
            logits = (scale * q) @ np.repeat(keys, heads, 1)
            if attention.softcap is not None:
                logits = attention.softcap * np.tanh(logits / attention.softcap)
            logits[..., masked] = -np.inf
            weights, entropy = _softmax(logits)
            of_tokens = weights @ states[:, None]  # (N, H, T, T)
            mixed += (of_tokens @ np.swapaxes(weights, -1, -2)).sum(1)
            entropies.append(entropy.mean(-1))
            signals.append(_signal(weights, of_tokens, states).mean(-1))
    entropy, signal = (np.concatenate(part, 1).mean(1) for part in (entropies, signals))
    return mixed / attention.heads, (entropy, signal)


def _diagonal(matrices: Array) -> Array:
    return np.asarray(np.eye(matrices.shape[-1]) * matrices)


def _visible(attention: RandomAttention, tokens: int) -> NDArray[np.bool_]:
    """(queries, keys)."""
    behind, window = np.subtract.outer(np.arange(tokens), np.arange(tokens)), attention.window or tokens
    return np.asarray((behind >= 0) & (behind < window) if attention.causal else np.abs(behind) <= window)


def most_entropy(attention: RandomAttention, tokens: int) -> float:
    """Mean over queries of ln(keys seen)."""
    return float(np.log(_visible(attention, tokens).sum(1)).mean())


def _turns(rates: tuple[float, ...], tokens: int) -> Array | None:
    """cos and sin of the angles, (2, T, pairs)."""
    angles = np.outer(np.arange(tokens), rates)
    return np.stack([np.cos(angles), np.sin(angles)]) if rates else None


def _rotated(x: Array, turns: Array | None) -> Array:
    """Pairs of coordinates turned by position; which ones pair up does not matter to features that are alike."""
    if turns is None:
        return x
    (cos, sin), pairs = turns, turns.shape[-1]
    left, right = x[..., :pairs], x[..., pairs : 2 * pairs]
    return np.concatenate([cos * left - sin * right, sin * left + cos * right, x[..., 2 * pairs :]], -1)


def _softmax(logits: Array) -> tuple[Array, Array]:
    """Weights, and the entropy of each query."""
    shifted = logits - logits.max(-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    np.maximum(shifted, -_GONE, out=shifted)  # 0 · ∞ of what is masked
    spent = np.einsum("...k,...k->...", weights, shifted)
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
