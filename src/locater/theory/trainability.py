"""What a transformer's initialisation will do to attention and tokens, in words, and what mends it.

A layer's attention is uniform or frozen by the share of its entropy in the most there is, as `attention_regime` has it;
tokens are alike from a mean cosine of 0.9 on. What mends either is solved for on `depth_law`: with the same seed it is
a continuous function of gain and branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.depth import WIDEST, DepthLaw, RandomTransformer, depth_law, most_entropy, normed, token_grams
from locater.theory.softmax_regime import COLLAPSED_TO, UNIFORM_FROM

__all__ = ["Trainability", "TrainabilityMap", "freezing_gain", "logit_variance", "trainability", "trainability_map"]

ALIKE_FROM = 0.9  # mean cosine
_GAINS, _BRANCHES = (1e-3, 1e3), (1e-3, 1.0)  # where remedies are looked for
_REMEDY_POINTS = 12  # that are commonly looked at to find them
_MARGIN = 0.02  # of a share or a cosine: a remedy is to be on the right side of its border


@dataclass(frozen=True)
class Trainability:
    """Which layers are how at initialisation, and the nearest values that mend it; None where nothing is to mend.

    NaN: there is something to mend, and no value does it.
    """

    law: DepthLaw
    uniform: tuple[int, ...]  # layers, from 0
    frozen: tuple[int, ...]
    alike_from: int | None  # the first layer whose input tokens are alike; L: what leaves the last
    gain: float | None  # on the logits, at which no layer is uniform or frozen, with `branch` if that is given
    branch: float | None  # on what each branch adds, at which tokens are alike nowhere
    depth: int | None  # how many of these layers leave tokens that are not alike


def trainability(model: RandomTransformer, gram: ArrayLike, *, draws: int | None = None, seed: int = 0) -> Trainability:
    """Of a transformer with random weights and the Gram matrices of what enters it, as `depth_law` has them.

    Unless `draws` is given, as many networks and heads of each are drawn as take a few seconds.
    """
    gram = token_grams(gram)
    tokens = gram.shape[-1]
    effort, less = _LAW.spent(model, tokens), _REMEDY.spent(model, tokens)
    law = depth_law(model, gram, seed=seed, **(effort if draws is None else effort | {"draws": draws}))
    share, alike = law.entropy_share, np.flatnonzero(law.cosine >= ALIKE_FROM)
    first = int(alike[0]) if len(alike) else None

    def drawn(gain: float, branch: float) -> DepthLaw:
        return depth_law(model, gram, gain=gain, branch=branch, seed=seed, **less)

    # what fewer heads are off by here is taken off everywhere; of as many, it would be noise
    few = drawn(1.0, 1.0) if less["heads"] < effort["heads"] else law

    def shares(gain: float, branch: float) -> Array:
        return np.asarray(drawn(gain, branch).entropy_share + share - few.entropy_share)

    def likeness(gain: float, branch: float) -> float:
        return float((drawn(gain, branch).cosine + law.cosine - few.cosine).max())

    def keeping_apart(gain: float) -> float:
        return _solved(lambda b: likeness(gain, b) - ALIKE_FROM + _MARGIN, _BRANCHES[0])

    branch = None if first is None else keeping_apart(1.0)
    beside = branch if branch and np.isfinite(branch) else 1.0
    gain = _gain(lambda g: shares(g, beside), share)
    if gain and np.isfinite(gain) and gain != 1 and np.isfinite(beside) and likeness(gain, beside) >= ALIKE_FROM:
        branch = keeping_apart(gain)  # attention that is no longer frozen makes tokens alike
        if not (np.isfinite(branch) and _between(shares(gain, branch))):
            gain = float("nan")
    return Trainability(
        law=law,
        uniform=tuple(np.flatnonzero(share >= UNIFORM_FROM).tolist()),
        frozen=tuple(np.flatnonzero(share <= COLLAPSED_TO).tolist()),
        alike_from=first,
        gain=gain,
        branch=branch,
        depth=None if first is None else max(0, first - 1),
    )


@dataclass(frozen=True)
class _Effort:
    """How many networks are drawn, and heads of each layer of theirs."""

    seconds: float
    most_heads: int  # of a layer, in all draws: more are not needed
    least_heads: int  # in a draw
    least_draws: int

    def spent(self, model: RandomTransformer, tokens: int) -> dict[str, int]:
        units = int(self.seconds / _unit(model, tokens))
        together = min(self.most_heads, units // self.least_draws - 1)
        heads = min(model.attention.heads, max(self.least_heads, together))
        return {"heads": heads, "draws": max(self.least_draws, min(self.most_heads // heads, units // (heads + 1)))}


_LAW, _REMEDY = _Effort(2.5, 64, 1, 4), _Effort(0.2, 16, 2, 1)  # the spread of four draws is the law's error


def seconds(model: RandomTransformer, tokens: int) -> float:
    """What `trainability` takes of one core, roughly, where there is something to mend."""
    efforts = [(effort.spent(model, tokens), times) for effort, times in ((_LAW, 1), (_REMEDY, _REMEDY_POINTS))]
    return _unit(model, tokens) * sum(times * e["draws"] * (e["heads"] + 1) for e, times in efforts)


def _unit(model: RandomTransformer, tokens: int) -> float:
    """Seconds of one head in every layer; the rest of a layer takes about as long."""
    width = min(model.attention.head_width, WIDEST)
    return model.layers * (2e-4 + 2e-10 * tokens**2 * (tokens + width))


def _gain(shares: Callable[[float], Array], now: Array) -> float | None:
    """What leaves no layer uniform or frozen, if some are `now`."""
    if _between(now):
        return None
    start = shares(1.0)
    if _between(start):
        return 1.0
    if start.max() >= UNIFORM_FROM:
        gain = _solved(lambda g: float(shares(g).max()) - UNIFORM_FROM + _MARGIN, _GAINS[1])
    else:
        gain = _solved(lambda g: float(shares(g).min()) - COLLAPSED_TO - _MARGIN, _GAINS[0])
    return gain if np.isfinite(gain) and _between(shares(gain)) else float("nan")


def _between(shares: Array) -> bool:
    return bool(shares.min() > COLLAPSED_TO and shares.max() < UNIFORM_FROM)


def _solved(excess: Callable[[float], float], end: float) -> float:
    """Where `excess` changes its sign between 1 and the `end`, on a logarithmic scale, to 4%; NaN if it does not."""

    @cache
    def at(x: float) -> float:
        return excess(float(np.exp(x)))

    low, at_low = 0.0, at(0.0)
    for high in (np.log(end) * np.array([0.1, 0.25, 0.5, 1.0])).tolist():
        at_high = at(high)
        if at_low * at_high <= 0:
            return float(np.exp(brentq(at, low, high, xtol=0.04)))
        low, at_low = high, at_high
    return float("nan")


# ---------------------------------------------------------------------- over gain and residual strength


@dataclass(frozen=True)
class TrainabilityMap:
    """Over query-key gain (columns) and the branches' factor (rows)."""

    gain: Array  # (G,)
    branch: Array  # (B,)
    entropy_share: Array  # (B, G): of the median layer
    cosine: Array  # (B, G): of what leaves the last layer
    freezing_gain: float  # where the large-T theory freezes the first layer


def trainability_map(
    model: RandomTransformer, gram: ArrayLike, gain: ArrayLike, branch: ArrayLike, *, heads: int = 4, seed: int = 0
) -> TrainabilityMap:
    """Entropy and cosine at every pair of a `gain` and a `branch`."""
    gains, branches = (np.atleast_1d(check.finite(n, v)) for n, v in (("gain", gain), ("branch", branch)))
    law = depth_law(model, gram, gain=gains, branch=branches[:, None], heads=heads, seed=seed)
    share = np.median(law.entropy_share, -1)
    return TrainabilityMap(gains, branches, share, law.cosine[..., -1], freezing_gain(model, gram))


def logit_variance(model: RandomTransformer, gram: ArrayLike) -> float:
    """Of the first layer's logits over the keys of a query, at gain 1: what the Random Energy Model knows of a head."""
    attention, states = model.attention, token_grams(gram).mean(0)
    states = normed(states, model.eps) if model.norm in ("pre", "sandwich") else states
    count = len(states)
    apart = np.trace(states) / count - (states.sum() - np.trace(states)) / (count * (count - 1))
    q, k = (1.0, 1.0 / states.diagonal().mean()) if attention.qk_norm_eps is not None else (
        attention.query.gram(states).diagonal().mean(), attention.key.inputs * attention.key.std**2
    )  # fmt: skip
    return float(attention.logit_scale**2 * attention.head_width * q * k * apart)


def freezing_gain(model: RandomTransformer, gram: ArrayLike) -> float:
    """Where the first layer freezes as T → ∞: the logits' variance is 2 ln(keys) (Giorlandino and Goldt, 2025)."""
    variance = logit_variance(model, gram)
    seen = most_entropy(model.attention, token_grams(gram).shape[-1])
    return float(np.sqrt(2 * seen / variance)) if variance > 0 else float("inf")
