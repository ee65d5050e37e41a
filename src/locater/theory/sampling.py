"""Logits of one query over token sequences, drawn in two ways, and points that cover better than random ones.

* by walks: draw the whole sequence (T·d normals) and multiply out. It shares nothing with the exact laws but the
  definition.
* given the query: draw x_q (d normals) and then all T logits at once, ω ~ N(a u, b C) (see `conditional`). That is
  d + T normals instead of d·T.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.conditional import GivenQuery
from locater.theory.law import Spectrum

__all__ = ["logits_by_walks", "logits_given", "logits_given_query", "sobol_normals"]

_SOBOL = 1024  # coordinates at most; later ones matter little
_TOGETHER = 1 << 20  # numbers drawn at a time


def logits_by_walks(law: Spectrum, given: GivenQuery, samples: int, seed: int) -> Iterator[Array]:
    """λω in batches (N, T), by drawing every token."""
    _one_head(law)
    for x in given.process.sample_batches(check.at_least("samples", samples, 1), law.dim, seed=seed):
        toward = law.toward(x[:, given.position], given.position)
        logits = np.matmul(x[:, : given.tokens], toward[:, :, None])[:, :, 0]
        shift = law.shift(x[:, given.position], given.position)
        yield logits if shift is None else logits + shift[:, : given.tokens]


def logits_given_query(law: Spectrum, given: GivenQuery, samples: int, seed: int) -> Iterator[Array]:
    """The same in law, by drawing the query and then the logits given it."""
    _one_head(law)
    rng = np.random.default_rng(seed)
    batch = max(1, _TOGETHER // (given.tokens + law.dim))
    for start in range(0, check.at_least("samples", samples, 1), batch):
        count = min(batch, samples - start)
        g, normals = rng.standard_normal((count, law.dim)), rng.standard_normal((given.tokens - 1, count))
        yield logits_given(law, given, g, normals)[0].T


def logits_given(law: Spectrum, given: GivenQuery, g: Array, normals: Array) -> tuple[Array, Array, Array]:
    """λω (T, N), a and b, from standard normals: g (N, dim) for the query, (T − 1, N) for the others."""
    query = np.sqrt(given.query_variance) * g
    toward = law.toward(query, given.position)
    a, b = (query * toward).sum(1), (toward**2).sum(1)
    logits = np.outer(given.regression, a) + np.sqrt(b) * given.noise(normals)
    shift = law.shift(query, given.position)
    if shift is not None:
        logits += shift[:, : given.tokens].T
    return logits, a, b


def _one_head(law: Spectrum) -> None:
    if law.trace.ndim:
        raise LocaterError(f"simulating takes one head at a time, got a batch of shape {law.trace.shape}")


def sobol_normals(dim: int, points: int, rng: np.random.Generator) -> Array:
    """Standard normals (dim, points), a power of two, that cover the space evenly (Sobol, digitally shifted).

    Averages over them are unbiased, and have less variance than over independent ones; several calls are independent.
    """
    covered = min(dim, _SOBOL)
    shift = rng.integers(0, 1 << 32, size=(covered, 1), dtype=np.uint32)
    normals = ndtri(((_sobol(covered, points) ^ shift) + 0.5) / (1 << 32))
    return normals if covered == dim else np.concatenate([normals, rng.standard_normal((dim - covered, points))])


@lru_cache(maxsize=8)
def _sobol(dim: int, points: int) -> NDArray[np.uint32]:
    from scipy.stats import qmc

    unit = qmc.Sobol(dim, scramble=False).random_base2(points.bit_length() - 1)
    return np.ascontiguousarray((unit * (1 << 32)).astype(np.uint32).T)
