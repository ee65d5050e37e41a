"""Where softmax attention looks: the expected weight of every token, the entropy, and what the head's output keeps.

Tokens are Gaussian with Cov(x_i, x_j) = K_ij Σ. Given the query the logits are N(a u, b C) (`conditional`): two
scalars, quadratic forms of the query, and K decide all that softmax does. Nothing is approximated but by sampling,
and how much that leaves open is given as a standard error.

* a has a law that `quadratic` knows exactly. Sampled queries are post-stratified by it: the share of each interval of
  a is set to its probability.
* The logits given (a, b) are drawn at shifted Sobol points, for a Markov process along its chain.
* Independent tokens need no sampling given (a, b): `_independent` has their integrals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory import _independent as integrals
from locater.theory._checks import Array
from locater.theory._strata import Strata
from locater.theory.conditional import GivenQuery
from locater.theory.law import HeadSpectrum, Spectral, SymmetricSpectrum, logit_form, spectrum_of
from locater.theory.process import TokenProcess
from locater.theory.quadratic import QuadraticForm
from locater.theory.sampling import logits_by_walks, logits_given, sobol_normals

__all__ = ["AttentionLaw", "attention", "attention_from_traces", "trace_for_entropy"]

METHODS = ("exact", "three-number", "montecarlo")

REPLICATES = 32  # independent sets of points: their means give the standard errors
_SOBOL_QUERY = 16  # coordinates of the query at Sobol points, those that matter most; the others are random


@dataclass(frozen=True)
class AttentionLaw:
    """Softmax attention of one query: (...) leading dimensions are heads, T the tokens of the process.

    The numbers that end in `_error` are standard errors, 0 where quadrature gave the value.
    """

    weights: Array  # (..., T): expected weight of every token; zero for masked ones
    entropy: Array  # (...): expected entropy, nats
    entropy_std: Array  # its standard deviation from sequence to sequence
    largest_weight: Array  # expected largest weight
    alpha: Array | None  # given x_q the mean output is Σ_i E[p_i] m_i + α (x_q − m_q) + β Σh, h = W_QKᵀ x_q/λ; E α
    signal: Array | None  # E β = E tr[C (diag p − p pᵀ)]; None, as α, where queries and keys come without their tokens
    weights_error: Array
    entropy_error: Array
    largest_weight_error: Array
    signal_error: Array | None
    tokens: int  # that the query attends to
    query: int  # its position, from 0
    process: str  # "random walk", "autoregressive", "independent" or "any"; "general" of `attention_from_gaussian`

    def __getitem__(self, head: Any) -> AttentionLaw:
        """One head of several, or some of them."""
        return AttentionLaw(**{f.name: _taken(getattr(self, f.name), head) for f in fields(self)})

    @property
    def entropy_share(self) -> Array:
        """Of ln(tokens), the most there is."""
        return np.asarray(self.entropy / np.log(max(2, self.tokens)))


def _taken(value: Any, head: Any) -> Any:
    return value[head] if isinstance(value, np.ndarray) else value


def attention(
    spectrum: Spectral,
    process: TokenProcess,
    temperature: float,
    method: str = "exact",
    *,
    query: int = -1,
    causal: bool = True,
    covariance: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> AttentionLaw:
    """What softmax attention does for one query, before any text is seen: expected weights, entropy and more.

    Args:
        spectrum: As for `rho`: eigenvalues (..., d) of W = W_QK Σ, or a `QK`.
        process: How tokens depend on each other.
        temperature: λ.
        method: How it is computed.

            - `exact`: the joint law of (a, b), the logits given them; see the head of this file.
            - `three-number`: from trace, trace_square and scale alone: a normal, b at its mean. What is left of
              `exact` where many eigenvalues matter.
            - `montecarlo`: whole sequences, every token drawn.
        query: The position of the query, from 0; negative ones count from the last.
        causal: Whether it attends to the tokens up to its own alone.
        covariance: Σ of the features, with a `QK`; the identity if not given.
        mean: Of the tokens, (d,), or of the token at each position, (tokens, d); with a `QK`. Zero if not given.
        samples: How many are drawn: 16,384, rounded up to 32 times a power of two; of `montecarlo` 100,000.
        seed: What they are drawn from.
    """
    check.one_of("method", method, METHODS)
    temperature = check.positive("temperature", temperature)
    law, given = spectrum_of(spectrum, covariance, mean), GivenQuery.of(process, query, causal)
    seed = check.at_least("seed", seed, 0)
    _check_size(law.size, given, temperature)
    if method == "three-number":
        if mean is not None:
            raise LocaterError("three-number is the law of tokens without a mean; use exact or montecarlo with one")
        numbers = law.trace, law.trace_square, law.scale
        return attention_from_traces(
            *numbers, process, temperature, query=query, causal=causal, samples=samples, seed=seed
        )
    if isinstance(law, HeadSpectrum) and law.key_mean is not None and law.key_mean.shape[-2] not in (1, process.tokens):
        raise LocaterError(
            f"mean must have a row for each of {process.tokens} tokens, or be one, got {law.key_mean.shape[-2]} rows"
        )

    def one(head: SymmetricSpectrum | HeadSpectrum) -> AttentionLaw:
        if method == "montecarlo":
            return _by_walks(head, given, temperature, 100_000 if samples is None else samples, seed)
        return _exact(head, given, temperature, points_of(samples), seed)

    return over_heads(law.trace.shape, lambda index: one(_head(law, index)))


def attention_from_traces(
    trace: ArrayLike,
    trace_square: ArrayLike,
    scale: ArrayLike,
    process: TokenProcess,
    temperature: float,
    *,
    query: int = -1,
    causal: bool = True,
    samples: int | None = None,
    seed: int = 0,
) -> AttentionLaw:
    """The three-number law: tr W, tr W² and tr(W_QK Σ W_QKᵀ Σ), which broadcast over heads, decide softmax.

    b is k·scale/λ², and a is normal with mean k·trace/λ and variance k²(trace_square + scale)/λ²: exact first two
    moments. It holds where many eigenvalues matter, however small or large they are.
    """
    given, points, seed = GivenQuery.of(process, query, causal), points_of(samples), check.at_least("seed", seed, 0)
    shape, scalars = scalars_of(given, temperature, trace, trace_square, scale)
    return over_heads(shape, lambda head: _three_number(given, scalars[head], points, seed))


def trace_for_entropy(
    entropy: float,
    scale: float,
    process: TokenProcess,
    temperature: float,
    trace_square: float | None = None,
    **options: Any,
) -> float:
    """The positive tr W at which the three-number law expects so many nats, for the last query if no other is named.

    `trace_square` is the scale, as for a symmetric W_QK, unless given; `options` are those of `attention_from_traces`.
    A larger trace draws attention to the query and to what is like it.
    """
    entropy, scale = check.positive("entropy", entropy), check.number("scale", scale)
    square = scale if trace_square is None else check.number("trace_square", trace_square)

    def excess(trace: float) -> float:
        return float(attention_from_traces(trace, square, scale, process, temperature, **options).entropy) - entropy

    without = excess(0.0) + entropy
    if not entropy < without:
        raise LocaterError(
            f"entropy must be between 0 and the {without:.4g} nats that this scale leaves at trace 0, got {entropy:.6g}"
        )
    highs = temperature * 2.0 ** np.arange(-20, 40)
    high = next((high for high in highs if excess(high) < 0), None)
    if high is None:
        raise LocaterError(f"no trace takes the entropy of this query in {process!r} to {entropy:.6g} nats")
    return float(brentq(excess, 0.0, high, xtol=1e-9 * high))


def _check_size(size: float, given: GivenQuery, temperature: float) -> None:
    if not size * max(1.0, given.query_variance) <= 1e140 * temperature:
        raise LocaterError(f"logits of size {size:.3g}/{temperature:.3g} overflow: take a larger temperature")


class Scalars(NamedTuple):
    """Of the three-number law: a is normal, b fixed."""

    mean: float
    variance: float
    b: float


def scalars_of(
    given: GivenQuery, temperature: float, trace: ArrayLike, trace_square: ArrayLike, scale: ArrayLike
) -> tuple[tuple[int, ...], dict[tuple[int, ...], Scalars]]:
    """The shape of the heads, and by index each one's scalars, if there are matrices with these numbers."""
    unit = given.query_variance / check.positive("temperature", temperature)
    t, q, s = (check.finite(n, x) for n, x in (("trace", trace), ("trace_square", trace_square), ("scale", scale)))
    try:
        t, q, s = np.broadcast_arrays(t, q, s)
    except ValueError as error:
        shapes = ", ".join(str(x.shape) for x in (t, q, s))
        raise LocaterError(f"trace, trace_square and scale must broadcast, got shapes {shapes}") from error
    if (s < 0).any():
        raise LocaterError(f"scale is a sum of squares and must not be negative, got {s.min():.6g}")
    if (np.abs(q) > 1.02 * s).any():  # bfloat16 rounds by up to 1%
        raise LocaterError("trace_square must be within ±scale, as that of every matrix is")
    q = np.clip(q, -s, s)
    _check_size(float(max(np.abs(t).max(initial=0.0), np.sqrt(s.max(initial=0.0)))), given, temperature)
    parts = unit * t, unit**2 * (q + s), unit / temperature * s
    return t.shape, {head: Scalars(*(float(part[head]) for part in parts)) for head in np.ndindex(t.shape)}


def points_of(samples: int | None) -> int:
    """Points of each replicate, a power of two."""
    wanted = check.at_least("samples", 1 << 14 if samples is None else samples, 1)
    return 1 << max(4, int(np.ceil(np.log2(max(1, wanted / REPLICATES)))))


def _head(law: SymmetricSpectrum | HeadSpectrum, index: tuple[int, ...]) -> SymmetricSpectrum | HeadSpectrum:
    if isinstance(law, SymmetricSpectrum):
        w = law.eigenvalues[index]
        return SymmetricSpectrum(w[np.argsort(-np.abs(w))])  # what matters most at the first Sobol coordinates
    means = (None if part is None else part[index] for part in (law.query_mean, law.key_mean))
    return HeadSpectrum(law.query[index], law.key[index], law.cross[index], *means)


def over_heads(shape: tuple[int, ...], one: Callable[[tuple[int, ...]], AttentionLaw]) -> AttentionLaw:
    """The laws of heads, by index, as one."""
    laws = [one(index) for index in np.ndindex(shape)]
    if not laws:
        raise LocaterError("attention of no head")
    return joined(laws, lambda parts: np.stack(parts).reshape((*shape, *parts[0].shape)))


def joined(laws: Sequence[AttentionLaw], join: Callable[[list[Array]], Array]) -> AttentionLaw:
    """Several laws as one: their arrays joined, all else the first's."""
    names = [f.name for f in fields(AttentionLaw) if isinstance(getattr(laws[0], f.name), np.ndarray)]
    arrays: dict[str, Any] = {name: join([getattr(law, name) for law in laws]) for name in names}
    return replace(laws[0], **arrays)


# ---------------------------------------------------------------------- independent tokens


def _summable(given: GivenQuery, b: float) -> bool:
    """Whether `_independent` has the integrals for it."""
    return given.independent and np.sqrt(b * given.covariance.max()) <= integrals.MOST_SPREAD


def _integrated(given: GivenQuery, sampled: Array, expected: Array) -> Array:
    """Statistics (T + 4, …) with what `_independent` expects in place of all but the largest weight."""
    own, entropy, square, signal = expected
    values = np.empty_like(sampled)
    values[: given.tokens] = (1 - own) / (given.tokens - 1)
    values[given.position] = own
    values[given.tokens :] = entropy, square, sampled[given.tokens + 2], given.covariance.max() * signal
    return values


# ---------------------------------------------------------------------- by sampling


def _exact(
    law: SymmetricSpectrum | HeadSpectrum, given: GivenQuery, temperature: float, points: int, seed: int
) -> AttentionLaw:
    """Post-stratified by the law of a."""
    drawn = [
        (_statistics(logits, given), a, b) for logits, a, b in _exact_logits(law, given, temperature, points, seed)
    ]
    own, b = (np.concatenate(parts) for parts in list(zip(*drawn, strict=True))[1:])
    values = [each for each, _, _ in drawn]
    if not law.shifts and _summable(given, b.max()):
        expected = integrals.expected(own, b * given.covariance.max(), given.tokens - 1)
        parts = np.split(expected, REPLICATES, axis=1)
        values = [_integrated(given, each, part) for each, part in zip(values, parts, strict=True)]
    a = np.split(own, REPLICATES)
    strata = Strata.of(_own_logit(law, given, temperature), a[0])
    return _law(given, *strata.estimate(values, a))


def _own_logit(law: SymmetricSpectrum | HeadSpectrum, given: GivenQuery, temperature: float) -> QuadraticForm:
    """The law of a."""
    unit = given.query_variance / temperature
    if isinstance(law, SymmetricSpectrum):
        return QuadraticForm(unit * law.eigenvalues)
    mean = np.zeros(len(law.query))
    if law.query_mean is not None:
        mean = law.query_mean[given.position if len(law.query_mean) > 1 else 0] / temperature
    # (q/λ)·κ, κ the query's own key less its mean
    return logit_form(
        mean, np.zeros(len(law.query)), unit / temperature * law.query, given.query_variance * law.key, unit * law.cross
    )


def _exact_logits(
    law: SymmetricSpectrum | HeadSpectrum, given: GivenQuery, temperature: float, points: int, seed: int
) -> Iterator[tuple[Array, Array, Array]]:
    """Logits (T, N), a and b, a replicate at a time."""
    rng, covered = np.random.default_rng(seed), min(law.dim, _SOBOL_QUERY)
    for _ in range(REPLICATES):
        normals = sobol_normals(covered + given.tokens - 1, points, rng)
        g = np.concatenate([normals[:covered].T, rng.standard_normal((points, law.dim - covered))], 1)
        logits, a, b = logits_given(law, given, g, normals[covered:])
        yield logits / temperature, a / temperature, b / temperature / temperature


def _three_number(given: GivenQuery, scalars: Scalars, points: int, seed: int) -> AttentionLaw:
    values = [_statistics(logits, given) for logits in three_number_logits(given, scalars, points, seed)]
    estimate, error = Strata.none().estimate(values, [np.zeros(points)] * REPLICATES)
    if _summable(given, scalars.b) and np.sqrt(scalars.variance) <= 10 * integrals.MOST_SPREAD:
        v = scalars.b * given.covariance.max()
        exact = integrals.expected_of_normal(scalars.mean, scalars.variance, v, given.tokens - 1)
        estimate = _integrated(given, estimate, exact)
        error = _integrated(given, error, np.zeros(4)) * (np.arange(len(error)) == given.tokens + 2)
    return _law(given, estimate, error)


def three_number_logits(given: GivenQuery, scalars: Scalars, points: int, seed: int) -> Iterator[Array]:
    """Logits (T, N), a replicate at a time."""
    rng = np.random.default_rng(seed)
    for _ in range(REPLICATES):
        normals = sobol_normals(given.tokens, points, rng)
        a = scalars.mean + np.sqrt(scalars.variance) * normals[0]
        yield np.outer(given.regression, a) + np.sqrt(scalars.b) * given.noise(normals[1:])


def softmax_statistics(logits: Array) -> Array:
    """Of logits (T, N): the weights, entropy, its square and the largest weight: (T + 3, N)."""
    shifted = logits - logits.max(0)
    weights = np.exp(shifted)
    total = weights.sum(0)
    weights /= total
    entropy = np.maximum(np.log(total) - (weights * shifted).sum(0), 0.0)
    return np.concatenate([weights, np.stack([entropy, entropy**2, 1 / total])])


def _statistics(logits: Array, given: GivenQuery) -> Array:
    """The same, and β: (T + 4, N)."""
    values = softmax_statistics(logits)
    weights = values[: given.tokens]
    signal = given.covariance.diagonal() @ weights - given.quadratic(weights)
    return np.concatenate([values, signal[None]])


def _by_walks(
    law: SymmetricSpectrum | HeadSpectrum, given: GivenQuery, temperature: float, samples: int, seed: int
) -> AttentionLaw:
    sums = squares = np.zeros(given.tokens + 4)
    for logits in logits_by_walks(law, given, samples, seed):
        values = _statistics(logits.T / temperature, given)
        sums, squares = sums + values.sum(1), squares + (values**2).sum(1)
    mean = sums / samples
    return _law(given, mean, np.sqrt(np.maximum(squares / samples - mean**2, 0) / max(1, samples - 1)))


def _law(given: GivenQuery, mean: Array, error: Array) -> AttentionLaw:
    """From the means and errors of `_statistics`."""
    count, masked = given.tokens, np.zeros(given.process.tokens - given.tokens)
    weights = np.concatenate([mean[:count], masked])
    entropy, square, largest, signal = mean[count:]
    return AttentionLaw(
        weights=weights,
        entropy=np.asarray(entropy),
        entropy_std=np.asarray(np.sqrt(max(0.0, square - entropy**2))),
        largest_weight=np.asarray(largest),
        alpha=np.asarray(given.regression @ mean[:count]),
        signal=np.asarray(signal),
        weights_error=np.concatenate([error[:count], masked]),
        entropy_error=np.asarray(error[count]),
        largest_weight_error=np.asarray(error[count + 2]),
        signal_error=np.asarray(error[count + 3]),
        tokens=count,
        query=given.position,
        process=given.process.kind,
    )
