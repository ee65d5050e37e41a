"""One attention layer with given weights on Gaussian tokens: the exact mean of its output, and its covariance, closed.

Tokens x_i = m_i + y_i have any means and Cov(y_i, y_j) = K_ij Σ; the query is x_q. Given it, x_i = m_i + u_i y_q + n_i
with u = K_·q/K_qq and noise of covariance C ⊗ Σ (`conditional`), and logits ω_i = h·x_i with h = W_QKᵀ x_q/λ. Stein's
lemma, E p_i n_i = Σ_j E[∂p_i/∂ω_j] Cov(n_i, ω_j) with ∂p_i/∂ω_j = p_i(δ_ij − p_j), gives for one head

    E[Σ p_i x_i | x_q] = Σ_i E[p_i] m_i + α y_q + β Σh,    α = Σ_i u_i E[p_i],    β = E tr[C (diag p − p pᵀ)].

The weights' expectations given x_q are those of normal logits; no token but the query is drawn, and what is left of
sampling is given as a standard error. W_V and W_O are linear, and heads add up.

Covariances have a law, too. Given the tokens at two queries, the noise of every token is a part along the Σh of both
queries and all heads, of which the logits are made, and a rest of covariance C ⊗ Σ⊥ that no logit depends on. Given
the logits as well, outputs are therefore normal, of covariance Σ_ab (p_aᵀ C p_b) O_a Σ⊥ O_bᵀ over heads (O = W_O W_V);
that of their means over all logits is added to it.

It is not of the form K′_ij Σ′, which the next layer's tokens would need. `AttentionLayer.closure` takes Σ′ as the mean
over positions and the K′ nearest with it, and measures how far that, and normality, are from it.

Legend: T tokens, D width, K head width, H heads, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.attention import REPLICATES, points_of, softmax_statistics
from locater.theory.conditional import GivenQuery
from locater.theory.process import TokenProcess
from locater.theory.sampling import sobol_normals

__all__ = ["AttentionLayer", "LayerClosure", "LayerLaw"]


@dataclass(frozen=True)
class LayerLaw:
    """The output o of one query, summed over heads; errors are standard errors."""

    mean: Array  # (D,): E o
    mean_error: Array
    cross: Array  # (D, D): E o (x_q − m_q)ᵀ, what the output keeps of the query
    cross_error: Array
    alpha: Array  # (H,)
    signal: Array  # (H,): E β
    weights: Array  # (H, T)


@dataclass(frozen=True)
class LayerClosure:
    """The output of every query as K′ ⊗ Σ′, and how wrong that is. Σ′ has a mean diagonal entry of 1."""

    mean: Array  # (T, D)
    position_covariance: Array  # K′ (T, T)
    covariance: Array  # Σ′ (D, D)
    separable_error: float  # ‖Cov − K′ ⊗ Σ′‖/‖Cov‖, less what counting so many sequences adds
    excess_kurtosis: float  # of the outputs' coordinates, mean over positions and principal directions; 0 if normal


@dataclass(frozen=True)
class AttentionLayer:
    """Given weights: nn.Linear's layout, heads first.

    Args:
        w_q: (H, K, D).
        w_k: (H, K, D).
        w_v: (H, V, D).
        w_o: (H, D, V).
        temperature: λ, √K unless given.
        causal: Whether a query sees no later token.
    """

    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    temperature: float | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("w_q", "w_k", "w_v", "w_o"):
            array = check.finite(name, getattr(self, name))
            if array.ndim != 3:
                raise LocaterError(f"{name} must have heads and a matrix for each, got shape {array.shape}")
            object.__setattr__(self, name, array)
            if not array.size:
                raise LocaterError(f"{name} must have at least one head, row and column, got shape {array.shape}")
        heads, _, width = self.w_q.shape
        if self.w_k.shape != self.w_q.shape or self.w_v.shape[::2] != (heads, width):
            shapes = f"{self.w_q.shape}, {self.w_k.shape} and {self.w_v.shape}"
            raise LocaterError(f"w_q, w_k and w_v must be (heads, head width, D) alike, got {shapes}")
        if self.w_o.shape != (heads, width, self.w_v.shape[1]):
            raise LocaterError(f"w_o must be {(heads, width, self.w_v.shape[1])}, to match w_v, got {self.w_o.shape}")
        chosen = np.sqrt(self.w_q.shape[1]) if self.temperature is None else self.temperature
        object.__setattr__(self, "temperature", check.positive("temperature", chosen))

    @property
    def width(self) -> int:
        return int(self.w_q.shape[-1])

    def law(
        self,
        process: TokenProcess,
        *,
        covariance: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        query: int = -1,
        samples: int | None = None,
        seed: int = 0,
    ) -> LayerLaw:
        """The mean of one query's output and of its product with the query, by the law at the head of this file.

        `mean` is (D,) or (T, D), zero unless given; `covariance` is Σ, the identity unless given.
        """
        tokens = _Tokens.of(process, self.width, covariance, mean)
        given = GivenQuery.of(process, query, self.causal)
        points, rng = points_of(samples), np.random.default_rng(check.at_least("seed", seed, 0))
        found = []
        for _ in range(REPLICATES):
            y = np.sqrt(given.query_variance) * rng.standard_normal((points, self.width)) @ tokens.root.T
            output, weights, signal = self._given(tokens, given, y, rng)
            found.append((output.mean(0), output.T @ y / points, weights.mean(-1), signal.mean(-1)))
        means, crosses, weights, signals = (np.stack(part) for part in zip(*found, strict=True))
        weights = weights.mean(0)
        masked = np.zeros((len(weights), process.tokens - given.tokens))
        return LayerLaw(
            mean=means.mean(0),
            mean_error=_standard_error(means),
            cross=crosses.mean(0),
            cross_error=_standard_error(crosses),
            alpha=weights @ given.regression,
            signal=signals.mean(0),
            weights=np.concatenate([weights, masked], 1),
        )

    def given_query(
        self,
        state: ArrayLike,
        process: TokenProcess,
        *,
        covariance: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        query: int = -1,
        samples: int | None = None,
        seed: int = 0,
    ) -> tuple[Array, Array]:
        """E[o | x_q = state] (D,) and its standard error."""
        tokens = _Tokens.of(process, self.width, covariance, mean)
        given = GivenQuery.of(process, query, self.causal)
        x = check.finite("state", state)
        if x.shape != (self.width,):
            raise LocaterError(f"state must be ({self.width},), the query's own, got shape {x.shape}")
        y = (x - tokens.mean[given.position])[None]
        rng, points = np.random.default_rng(check.at_least("seed", seed, 0)), points_of(samples)
        outputs = np.stack([self._given(tokens, given, y.repeat(points, 0), rng)[0].mean(0) for _ in range(REPLICATES)])
        return outputs.mean(0), _standard_error(outputs)

    def _given(
        self, tokens: _Tokens, given: GivenQuery, y: Array, rng: np.random.Generator
    ) -> tuple[Array, Array, Array]:
        """For queries m_q + y (N, D): outputs (N, D), their weights (H, T, N) and β (H, N), one draw of logits each."""
        x, output, weights, signals = y + tokens.mean[given.position], np.zeros_like(y), [], []
        means = tokens.mean[: given.tokens]
        for w_q, w_k, w_v, w_o in zip(self.w_q, self.w_k, self.w_v, self.w_o, strict=True):
            h = (x @ w_q.T) @ w_k / self.temperature  # (N, D)
            toward = h @ tokens.covariance  # Σh
            spread = np.sqrt(np.maximum((toward * h).sum(1), 0.0))
            noise = given.noise(sobol_normals(given.tokens - 1, len(y), rng))
            logits = means @ h.T + np.outer(given.regression, (y * h).sum(1)) + spread * noise
            p = softmax_statistics(logits)[: given.tokens]
            beta = given.covariance.diagonal() @ p - given.quadratic(p)
            mixed = p.T @ means + (given.regression @ p)[:, None] * y + beta[:, None] * toward
            output += mixed @ (w_o @ w_v).T
            weights.append(p)
            signals.append(beta)
        return output, np.stack(weights), np.stack(signals)

    def output_covariance(
        self,
        process: TokenProcess,
        queries: tuple[int, int] = (-1, -1),
        *,
        covariance: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        samples: int | None = None,
        seed: int = 0,
    ) -> tuple[Array, Array]:
        """Cov(o_i, o_j) (D, D) of the outputs of two queries, or of one with itself, and its standard error."""
        tokens = _Tokens.of(process, self.width, covariance, mean)
        given = _GivenQueries.of(process, queries, self.causal)
        points, rng = points_of(samples), np.random.default_rng(check.at_least("seed", seed, 0))
        found = np.stack([self._covariance(tokens, given, points, rng) for _ in range(REPLICATES)])
        first, second = (given.positions.index(query) for query in given.queries)
        return found.mean(0)[first, second], _standard_error(found)[first, second]

    def _covariance(self, tokens: _Tokens, given: _GivenQueries, points: int, rng: np.random.Generator) -> Array:
        """Of the outputs of S queries (S, S, D, D), by one draw of their tokens and of all logits.

        S·H is queries × heads: the directions whose products with the tokens are the logits.
        """
        heads, count, width = len(self.w_q), len(given.positions), self.width
        mean, through = tokens.mean[: given.tokens], self.w_o @ self.w_v  # (T, D), (H, D, D)
        y = given.root_own @ rng.standard_normal((points, count, width)) @ tokens.root.T  # (N, S, D)
        q = np.einsum("hkd,nsd->nshk", self.w_q, y + mean[given.positions])
        h = np.einsum("hkd,nshk->nshd", self.w_k, q).reshape(points, -1, width) / self.temperature  # (N, SH, D)
        # noise of a token is toward · z + rest, with standard normals z and a rest that is independent of all logits
        root, inverse = _roots(h @ tokens.covariance @ np.swapaxes(h, -1, -2))
        toward = np.swapaxes(h @ tokens.covariance, -1, -2) @ inverse  # (N, D, SH)
        z = given.root @ rng.standard_normal((points, given.root.shape[1], count * heads))  # (N, T, SH)
        known = mean + given.regression @ y  # (N, T, D): each token's mean given the queries'
        logits = np.swapaxes(known @ np.swapaxes(h, -1, -2) + z @ np.swapaxes(root, -1, -2), -1, -2)
        logits = np.where(given.seen[:, None], logits.reshape(points, count, heads, -1), -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)  # (N, S, H, T)
        rows = p.reshape(points, count * heads, -1)
        mixed = rows @ known + rows @ z @ np.swapaxes(toward, -1, -2)  # (N, SH, D)
        outputs = np.einsum("hed,nshd->nse", through, mixed.reshape(points, count, heads, width))
        outputs -= outputs.mean(0)
        of_means = np.einsum("nsd,nte->stde", outputs, outputs) / (points - 1)
        # Σ⊥ = Σ − toward towardᵀ
        overlap = (rows @ given.covariance @ np.swapaxes(rows, -1, -2)).reshape(points, count, heads, count, heads)
        each = through @ tokens.covariance @ np.swapaxes(through, -1, -2)[:, None]  # (H, H, D, D): [h, g] is O_g Σ O_hᵀ
        of_rest = np.einsum("sgth,hgde->stde", overlap.mean(0), each)
        turned = through @ toward[:, None]  # (N, H, D, SH)
        for s, t in np.ndindex(count, count):
            weighed = np.einsum("ngh,nher->nger", overlap[:, s, :, t], turned)
            of_rest[s, t] -= np.tensordot(turned, weighed, ((0, 1, 3), (0, 1, 3))) / points
        return np.asarray(of_means + of_rest)

    def outputs(self, x: Array) -> Array:
        """What the layer puts out for sequences (N, T, D), every token drawn: what the law is tested against."""
        x = check.finite("x", x)
        if x.ndim != 3 or x.shape[-1] != self.width:
            raise LocaterError(f"x must be sequences (N, T, {self.width}), got shape {x.shape}")
        visible = np.tri(x.shape[1], dtype=bool) if self.causal else np.ones((x.shape[1],) * 2, bool)
        total = np.zeros_like(x)
        for w_q, w_k, w_v, w_o in zip(self.w_q, self.w_k, self.w_v, self.w_o, strict=True):
            logits = (x @ w_q.T) @ np.swapaxes(x @ w_k.T, -1, -2) / self.temperature
            logits = np.where(visible, logits, -np.inf)
            p = np.exp(logits - logits.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            total += p @ (x @ w_v.T) @ w_o.T
        return total

    def closure(
        self,
        process: TokenProcess,
        *,
        covariance: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        skip: float = 0.0,
        samples: int = 20_000,
        seed: int = 0,
    ) -> LayerClosure:
        """Every query's output, plus `skip` times its token, as K′ ⊗ Σ′ by sampling, and how far it is from that.

        The result's `position_covariance`, `covariance` and `mean` are what the next layer's law would be given.
        """
        tokens = _Tokens.of(process, self.width, covariance, mean)
        samples, size = check.at_least("samples", samples, 8), process.tokens * self.width
        skip, seed = check.number("skip", skip), check.at_least("seed", seed, 0)
        if size > 4096:
            raise LocaterError(f"tokens × width must be at most 4,096 for a covariance of all, got {size:,}")
        halves = []
        for half in range(2):  # two halves: their difference is what counting adds
            drawn = [o + skip * x for x, o in self._sequences(tokens, process, samples // 2, seed + half)]
            halves.append(np.concatenate(drawn).reshape(-1, size))
        return _closed(halves, process.tokens, self.width)

    def _sequences(
        self, tokens: _Tokens, process: TokenProcess, samples: int, seed: int
    ) -> Iterator[tuple[Array, Array]]:
        for y in process.sample_batches(samples, covariance=tokens.covariance, seed=seed):
            x = y + tokens.mean
            yield x, self.outputs(x)


def _closed(halves: list[Array], count: int, width: int) -> LayerClosure:
    """From outputs (N, T·D) in two independent halves."""
    covariances = [np.cov(half.T).reshape(count, width, count, width) for half in halves]
    whole = np.mean(covariances, 0)
    sigma = np.einsum("iaib->ab", whole)
    if not np.trace(sigma) > 0:
        raise LocaterError("the outputs do not vary, so that they have no covariance to close")
    sigma = sigma * width / np.trace(sigma)
    k = np.einsum("iajb,ab->ij", whole, sigma) / (sigma**2).sum()  # the nearest, given Σ′
    apart = [each - np.einsum("ij,ab->iajb", k, sigma) for each in covariances]
    square = max(0.0, float((apart[0] * apart[1]).sum()))  # noise of the halves is independent: it averages out
    size = float((covariances[0] * covariances[1]).sum())
    x = np.concatenate(halves)
    basis = np.linalg.eigh(sigma)[1]
    turned = (x - x.mean(0)).reshape(-1, count, width) @ basis
    second, fourth = (turned**2).mean(0), (turned**4).mean(0)
    there = second > 1e-9 * second.max()
    return LayerClosure(
        mean=x.mean(0).reshape(count, width),
        position_covariance=0.5 * (k + k.T),
        covariance=0.5 * (sigma + sigma.T),
        separable_error=float(np.sqrt(square / size)),
        excess_kurtosis=float((fourth[there] / second[there] ** 2).mean() - 3),
    )


@dataclass(frozen=True)
class _Tokens:
    """Σ, a root of it, and the mean of every token."""

    covariance: Array
    root: Array
    mean: Array  # (T, D)

    @classmethod
    def of(cls, process: TokenProcess, width: int, covariance: ArrayLike | None, mean: ArrayLike | None) -> _Tokens:
        if not isinstance(process, TokenProcess):
            raise LocaterError(f"process must be a TokenProcess, got {type(process).__name__}")
        sigma = np.eye(width) if covariance is None else check.covariance("covariance", covariance, width)
        m = np.zeros(width) if mean is None else check.finite("mean", mean)
        if m.shape not in ((width,), (process.tokens, width)):
            raise LocaterError(f"mean must be ({width},) or ({process.tokens}, {width}), got shape {m.shape}")
        return cls(sigma, check.square_root(sigma), np.broadcast_to(m, (process.tokens, width)))


@dataclass(frozen=True)
class _GivenQueries:
    """The tokens that one or two queries see, given those at the queries: x_t = m_t + U_t· y + noise, of C ⊗ Σ."""

    queries: tuple[int, int]
    positions: list[int]  # of the queries, each once: S
    seen: NDArray[np.bool_]  # (S, T)
    regression: Array  # U (T, S)
    covariance: Array  # C (T, T)
    root: Array  # of C
    root_own: Array  # of K between the queries (S, S)

    @property
    def tokens(self) -> int:
        return len(self.covariance)

    @classmethod
    def of(cls, process: TokenProcess, queries: tuple[int, int], causal: bool) -> _GivenQueries:
        if not isinstance(queries, Sequence) or len(queries) != 2:
            raise LocaterError(f"queries must be two positions, got {queries!r:.80}")
        first, second = (check.position("queries", query, process.tokens) for query in queries)
        positions = sorted({first, second})
        k = process.position_covariance
        if causal:
            k = k[: positions[-1] + 1, : positions[-1] + 1]
        own = k[np.ix_(positions, positions)]
        u = k[:, positions] @ np.linalg.pinv(own, hermitian=True)
        c = k - u @ k[positions]
        c[positions], c[:, positions] = 0.0, 0.0  # but for rounding they are
        last = np.array(positions if causal else [len(k)] * len(positions))[:, None]
        root, root_own = check.square_root(0.5 * (c + c.T)), check.square_root(own)
        return cls((first, second), positions, np.arange(len(k)) <= last, u, c, root, root_own)


def _roots(gram: Array) -> tuple[Array, Array]:
    """L and R (..., n, n): L Lᵀ = gram, R Rᵀ is its pseudo-inverse, and Rᵀ L = I where gram is not singular."""
    values, vectors = np.linalg.eigh(gram)
    there = values > 1e-12 * values.max(-1, keepdims=True)
    size = np.sqrt(np.where(there, values, 0.0))[..., None, :]
    return vectors * size, vectors * np.divide(1.0, size, out=np.zeros_like(size), where=size > 0)


def _standard_error(replicates: Array) -> Array:
    return np.asarray(replicates.std(0, ddof=1) / np.sqrt(len(replicates)))
