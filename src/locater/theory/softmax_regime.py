"""What softmax attention is like, in a word, over trace and scale: the rule that scans, figures and pages share.

`regime` speaks of ρ, the paper's piecewise linear softmax; this file of softmax itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory._independent_normal import own_weight_and_entropy
from locater.theory.attention import AttentionLaw, attention_from_traces, scalars_of
from locater.theory.conditional import GivenQuery
from locater.theory.process import TokenProcess

__all__ = [
    "ATTENTION_REGIMES",
    "AttentionMap",
    "AttentionRegime",
    "attention_map",
    "attention_regime",
    "independent_regimes",
]

UNIFORM_FROM, COLLAPSED_TO = 0.9, 0.1  # of ln T
NEAR_FROM, FAR_TO = 0.75, 0.25  # of the weight, on the half of the tokens that is nearer to the query

ATTENTION_REGIMES = {
    "uniform": "uniform",
    "local near": "local, near the query",
    "local far": "local, far from the query",
    "local anywhere": "local, at no preferred distance",
    "collapsed itself": "collapsed on the query itself",
    "collapsed others": "collapsed on other tokens",
}


class AttentionRegime(str):
    """One head's, for one query: a phrase that names T and the process, and its parts."""

    name: str  # uniform, local or collapsed
    side: str  # near, far or anywhere if local; itself or others if collapsed; empty if uniform
    width: float  # e^entropy: over how many tokens attention is spread
    tokens: int
    process: str

    def __new__(cls, name: str, side: str, width: float, tokens: int, process: str) -> AttentionRegime:
        words = ATTENTION_REGIMES[f"{name} {side}".strip()]
        made = super().__new__(cls, f"{words}: {width:.3g} of {tokens} tokens ({process})")
        made.name, made.side, made.width, made.tokens, made.process = name, side, width, tokens, process
        return made

    def __getnewargs__(self) -> tuple[str, str, float, int, str]:  # type: ignore[override]
        return self.name, self.side, self.width, self.tokens, self.process


def attention_regime(law: AttentionLaw) -> AttentionRegime:
    """The rule, on exact quantities: expected entropy H, own weight, weight on the nearer half of the tokens.

    1. uniform: H is at least 0.9 ln T.
    2. collapsed: H is at most 0.1 ln T; on itself if the query's own weight is ½ or more, else on others.
    3. local otherwise; near if the half of the tokens nearest to the query has ¾ of the weight or more, far if it has
       ¼ or less, else anywhere.
    """
    if law.entropy.ndim:
        raise LocaterError(f"attention_regime takes one head, law[i], got heads of shape {law.entropy.shape}")
    name, _, side = str(_names(law)).partition(" ")
    return AttentionRegime(name, side, float(np.exp(law.entropy)), law.tokens, law.process)


def independent_regimes(
    trace: ArrayLike, trace_square: ArrayLike, scale: ArrayLike, tokens: int, temperature: float
) -> tuple[NDArray[np.str_], Array]:
    """For many heads at once: a key of ATTENTION_REGIMES and the expected entropy of each, (...).

    By the three-number law for independent tokens of variance 1, the last of which is the query: quadrature alone, a
    fraction of a millisecond a head.
    """
    share, own, near = _independent(tokens, temperature, trace, trace_square, scale)
    return _rule(share, own, near), share * np.log(tokens)


def _independent(tokens: int, temperature: float, *numbers: ArrayLike) -> tuple[Array, Array, Array]:
    """Share of the entropy, own weight, and weight on the nearer half, of independent tokens of variance 1."""
    others = check.at_least("tokens", tokens, 2) - 1
    query = GivenQuery.of(TokenProcess.independent(2))  # its variance is 1 at any T: no T × T matrix
    shape, scalars = scalars_of(query, temperature, *numbers)
    own, entropy = np.empty(shape), np.empty(shape)
    for head, of_head in scalars.items():
        own[head], entropy[head] = own_weight_and_entropy(*of_head, others)
    near = own + (1 - own) * ((tokens + 1) // 2 - 1) / others
    return entropy / np.log(tokens), own, near


def _names(law: AttentionLaw) -> NDArray[np.str_]:
    """Keys of ATTENTION_REGIMES, (...)."""
    return _rule(law.entropy_share, law.weights[..., law.query], _near(law))


def _rule(share: Array, own: Array, near: Array) -> NDArray[np.str_]:
    collapsed = share <= COLLAPSED_TO
    return np.asarray(
        np.select(
            [share >= UNIFORM_FROM, collapsed & (own >= 0.5), collapsed, near >= NEAR_FROM, near <= FAR_TO],
            ["uniform", "collapsed itself", "collapsed others", "local near", "local far"],
            "local anywhere",
        )
    )


def _near(law: AttentionLaw) -> Array:
    """Expected weight on the half of the tokens that is nearer to the query, itself included."""
    distance = np.abs(np.arange(law.tokens) - law.query)
    nearer = np.argsort(distance, kind="stable")[: (law.tokens + 1) // 2]
    return np.asarray(law.weights[..., nearer].sum(-1))


@dataclass(frozen=True)
class AttentionMap:
    """The three-number law over trace and scale, (trace, scale) each; borders are level sets of these."""

    trace: Array  # tr W/λ
    scale: Array  # √tr(WᵀW)/λ
    name: NDArray[np.str_]  # a key of ATTENTION_REGIMES
    entropy_share: Array
    own_weight: Array
    near: Array  # weight on the nearer half
    tokens: int
    process: str


def attention_map(
    trace: ArrayLike, scale: ArrayLike, process: TokenProcess, *, symmetry: float = 1.0, samples: int = 1 << 12
) -> AttentionMap:
    """Regimes of softmax for the last query over r = tr W/λ and η = √tr(W_QK Σ W_QKᵀ Σ)/λ.

    `symmetry` is tr W²/scale: 1 for a symmetric W_QK, 0 for a random one, −1 for an antisymmetric one.
    """
    r, eta = check.finite("trace", trace).reshape(-1), check.finite("scale", scale).reshape(-1)
    if (eta < 0).any() or not -1 <= check.number("symmetry", symmetry) <= 1:
        raise LocaterError("scale must not be negative, and symmetry within ±1")
    square = np.broadcast_to(eta**2, (len(r), len(eta)))
    if process.kind == "independent":
        share, own, near = _independent(process.tokens, 1.0, r[:, None], symmetry * square, square)
    else:
        law = attention_from_traces(r[:, None], symmetry * square, square, process, 1.0, samples=samples)
        share, own, near = law.entropy_share, law.weights[..., law.query], _near(law)
    return AttentionMap(r, eta, _rule(share, own, near), share, own, near, process.tokens, process.kind)
