"""The Gaussian law of a query and its keys, estimated from sequences: means, covariances, and regressions.

Each key is regressed on the query. With n sequences and a head width K, plain least squares explains K/n of a key that
has nothing to do with the query, so every position has a ridge of its own: the query's own key goes with it closely,
that of a distant token hardly at all. The ridge is chosen by generalised cross-validation, which needs nothing but the
covariances: with q = m + V √λ g, D = Cov(g, k) and the filter f_j = λ_j/(λ_j + ridge), the residual sum of squares is
tr Cov(k) − Σ_j f_j(2 − f_j) |D_j|² and the degrees of freedom Σ_j f_j. Squares are of logits: |x|² is xᵀ E[q qᵀ] x.

Legend: n sequences, R query heads of one key head, T keys, K head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_RIDGES = torch.logspace(-4, 5, 37, dtype=torch.float64)  # times the mean variance of the query's coordinates


class QueryKeyLaw(NamedTuple):
    """In the order of `theory.attention_from_gaussian`."""

    query_mean: Tensor  # (R, K)
    key_mean: Tensor  # (T, K)
    query_covariance: Tensor  # (R, K, K)
    key_covariance: Tensor  # (R, T, K, K)
    cross_covariance: Tensor  # (R, T, K, K)


def query_key_law(q: Tensor, k: Tensor) -> QueryKeyLaw:
    """Of queries (n, R, K) and keys (n, T, K), float64."""
    degrees, (tokens, width) = len(q) - 1, k.shape[1:]
    query_mean, key_mean = q.mean(0), k.mean(0)
    q, k = q - query_mean, k - key_mean
    s_q = torch.einsum("nrk,nrl->rkl", q, q) / degrees
    s_k = torch.einsum("ntk,ntl->tkl", k, k) / degrees
    values, vectors = torch.linalg.eigh(s_q)  # (R, K), (R, K, K)
    values = values.clamp(min=0)
    there = values > 1e-12 * values[:, -1:]
    white = torch.einsum("nrk,rkj->rjn", q, vectors * torch.where(there, values, torch.inf).rsqrt()[:, None])
    d = (white @ k.flatten(1) / degrees).unflatten(2, (tokens, width)).transpose(1, 2)  # (R, T, K, K): Cov(g, k_i)
    square = s_q + query_mean[:, :, None] * query_mean[:, None]
    filters = _filters(values, (d @ square[:, None] * d).sum(-1), torch.einsum("tkl,rkl->rt", s_k, square), degrees)
    explained = filters * (2 - filters)  # (R, T, K)
    rest = (s_k - d.mT @ (explained[..., None] * d)) * (degrees / (degrees - explained.sum(-1)))[..., None, None]
    d = filters[..., None] * d
    return QueryKeyLaw(query_mean, key_mean, s_q, rest + d.mT @ d, (vectors * values.sqrt()[:, None])[:, None] @ d)


def _filters(values: Tensor, explained: Tensor, total: Tensor, degrees: int) -> Tensor:
    """f (R, T, K) of the ridge with the least cross-validated error at each position, or of none of the regression.

    `values` (R, K) are λ, `explained` (R, T, K) what each coordinate of the query explains of `total` (R, T).
    """
    ridges = _RIDGES[:, None, None] * values.mean(1)[:, None]
    filters = values / (values + ridges).clamp(min=1e-300)  # (ridges, R, K)
    filters = torch.cat([filters, torch.zeros_like(filters[:1])])
    left = 1 - filters.sum(-1) / degrees
    filters, left = filters[(left > 0.05).all(1)], left[(left > 0.05).all(1)]
    error = (total - torch.einsum("mrj,rtj->mrt", filters * (2 - filters), explained)) / left[..., None] ** 2
    best = error.argmin(0)  # (R, T)
    return torch.take_along_dim(filters.transpose(0, 1), best[..., None], 1)
