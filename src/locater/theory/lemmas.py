"""Lemmas 3 and 4: moments of quadratic forms in Gaussian tokens, in their right forms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array

__all__ = ["Lemma3", "Lemma4", "equation_22", "lemma_3", "lemma_4"]


class Lemma3(NamedTuple):
    """For x ~ N(m, Σ) and symmetric W."""

    quadratic: float  # (11)  E xᵀWx
    second_moment: Array  # (12)  E xxᵀ
    cubic: float  # (13)  E aᵀWx · xᵀWx
    quartic: float  # (14)  E (xᵀWx)²


class Lemma4(NamedTuple):
    """For tokens i ≤ j of the random walk and symmetric W."""

    e15: float  # E x_iᵀWx_i
    e16: float  # E (x_iᵀWx_i)²
    e17: float  # E (x_iᵀWx_j)²
    e18: float  # E x_iᵀWx_j · x_jᵀWx_j


def lemma_3(w: ArrayLike, a: ArrayLike, mean: ArrayLike, covariance: ArrayLike) -> Lemma3:
    w_ = check.symmetrised("w", check.square("w", w))
    d = len(w_)
    sigma = check.covariance("covariance", covariance, d)
    a_, m = check.finite("a", a), check.finite("mean", mean)
    if a_.shape != (d,) or m.shape != (d,):
        raise LocaterError(f"a and mean must have shape ({d},) to match w, got {a_.shape} and {m.shape}")
    ws = w_ @ sigma
    t, q = np.trace(ws), np.trace(ws @ ws)
    wm = w_ @ m
    mwm = m @ wm
    return Lemma3(
        quadratic=float(t + mwm),
        second_moment=sigma + np.outer(m, m),
        cubic=float(2 * (w_ @ a_) @ sigma @ wm + (a_ @ wm) * (t + mwm)),
        quartic=float(2 * q + t**2 + 4 * wm @ sigma @ wm + 2 * t * mwm + mwm**2),
    )


def lemma_4(w: ArrayLike, covariance: ArrayLike, i: int, j: int, form: str = "exact") -> Lemma4:
    """With t = tr(WΣ) and q = tr(WΣWΣ): it, i²(2q + t²), (i² + ij)q + i²t², ij(2q + t²).

    form "printed" gives the paper's coefficients, which count the first token's covariance as zero in places.
    """
    t, q = _traces(w, covariance)
    i, j = _ordered(i, j)
    check.one_of("form", form, ("exact", "printed"))
    if form == "exact":
        return Lemma4(i * t, i**2 * (2 * q + t**2), (i**2 + i * j) * q + i**2 * t**2, i * j * (2 * q + t**2))
    square = i**2 - 2 * i + 2
    return Lemma4(
        (i - 1) * t,
        square * (2 * q + t**2),
        (i**2 + i * j - 3 * i - j + 4) * q + square * t**2,
        (i * j - i - j + 2) * (2 * q + t**2),
    )


def equation_22(w: ArrayLike, covariance: ArrayLike, i: int, j: int, tokens: int, form: str = "exact") -> float:
    """E x_iᵀWx_T · x_jᵀWx_T for i ≤ j ≤ T: i(T + j)q + ij·t²."""
    t, q = _traces(w, covariance)
    i, j = _ordered(i, j)
    if check.at_least("tokens", tokens, 1) < j:
        raise LocaterError(f"tokens must be at least j = {j}, got {tokens}")
    check.one_of("form", form, ("exact", "printed"))
    if form == "exact":
        return i * (tokens + j) * q + i * j * t**2
    return (i * j + (tokens - 2) * i - j - (tokens - 4)) * q + (i * j - i - j + 2) * t**2


def _traces(w: ArrayLike, covariance: ArrayLike) -> tuple[float, float]:
    w_ = check.symmetrised("w", check.square("w", w))
    ws = w_ @ check.covariance("covariance", covariance, len(w_))
    return float(np.trace(ws)), float(np.trace(ws @ ws))


def _ordered(i: int, j: int) -> tuple[int, int]:
    i, j = check.at_least("i", i, 1), check.at_least("j", j, 1)
    if i > j:
        raise LocaterError(f"the lemma is stated for i ≤ j, got i = {i}, j = {j}")
    return i, j
