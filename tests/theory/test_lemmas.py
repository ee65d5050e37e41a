"""Lemmas 3 and 4 against Isserlis' theorem by brute force, and against simulation."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from locater import LocaterError, TokenProcess
from locater.theory import equation_22, lemma_3, lemma_4


def isserlis(indices, mean, covariance):
    """E Π x_i for a Gaussian vector: sum over ways to pair some factors, the rest giving their means."""
    if not indices:
        return 1.0
    first, *rest = indices
    total = mean[first] * isserlis(rest, mean, covariance)
    for position, partner in enumerate(rest):
        others = rest[:position] + rest[position + 1 :]
        total += covariance[first, partner] * isserlis(others, mean, covariance)
    return total


def expected_product(factors, mean, covariance):
    """E Π_f x_{f}ᵀ M_f x_{f′} where each factor is (offset, M, offset′) into one long Gaussian vector."""
    d = len(factors[0][1])
    total = 0.0
    for choice in product(range(d), repeat=2 * len(factors)):
        weight, indices = 1.0, []
        for (left, m, right), a, b in zip(factors, choice[::2], choice[1::2], strict=True):
            weight *= m[a, b]
            indices += [left + a, right + b]
        total += weight * isserlis(indices, mean, covariance)
    return total


seeds = st.integers(0, 2**32 - 1)


def random_case(seed, d=2):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((d, d))
    r = rng.standard_normal((d, d))
    return w + w.T, r @ r.T + 0.1 * np.eye(d), rng


@given(seeds)
def test_lemma_3_equals_isserlis(seed):
    w, sigma, rng = random_case(seed)
    a, m = rng.standard_normal((2, 2))
    got = lemma_3(w, a, m, sigma)
    assert got.quadratic == pytest.approx(expected_product([(0, w, 0)], m, sigma))
    second = [[isserlis([i, j], m, sigma) for j in range(2)] for i in range(2)]
    np.testing.assert_allclose(got.second_moment, second)
    cubic = sum(
        (w @ a)[i] * w[j, k] * isserlis([i, j, k], m, sigma) for i, j, k in product(range(2), repeat=3)
    )  # fmt: skip
    assert got.cubic == pytest.approx(cubic, rel=1e-9, abs=1e-9)
    assert got.quartic == pytest.approx(expected_product([(0, w, 0), (0, w, 0)], m, sigma), rel=1e-9)


def walk_covariance(positions, sigma):
    return np.kron(np.minimum.outer(positions, positions).astype(float), sigma)


@given(seeds, st.integers(1, 6), st.integers(0, 6), st.integers(0, 6))
def test_lemma_4_and_equation_22_equal_isserlis(seed, i, more, beyond):
    w, sigma, _ = random_case(seed)
    j = i + more
    T = j + beyond
    covariance, zero = walk_covariance(np.array([i, j, T]), sigma), np.zeros(6)
    at_i, at_j, at_t = 0, 2, 4
    got = lemma_4(w, sigma, i, j)
    close = {"rel": 1e-9, "abs": 1e-9}
    assert got.e15 == pytest.approx(expected_product([(at_i, w, at_i)], zero, covariance), **close)
    assert got.e16 == pytest.approx(expected_product([(at_i, w, at_i)] * 2, zero, covariance), **close)
    assert got.e17 == pytest.approx(expected_product([(at_i, w, at_j)] * 2, zero, covariance), **close)
    assert got.e18 == pytest.approx(expected_product([(at_i, w, at_j), (at_j, w, at_j)], zero, covariance), **close)
    e22 = expected_product([(at_i, w, at_t), (at_j, w, at_t)], zero, covariance)
    assert equation_22(w, sigma, i, j, T) == pytest.approx(e22, **close)


def test_lemma_4_agrees_with_simulated_walks_and_its_printed_form_does_not():
    d, i, j, T = 4, 3, 5, 8
    w, sigma, _ = random_case(3, d)
    x = TokenProcess.random_walk(T).sample(1_000_000, covariance=sigma, seed=1)
    xi, xj, xt = x[:, i - 1], x[:, j - 1], x[:, T - 1]

    def form(a, b):
        return ((a @ w) * b).sum(1)

    counted = {
        "e15": form(xi, xi),
        "e16": form(xi, xi) ** 2,
        "e17": form(xi, xj) ** 2,
        "e18": form(xi, xj) * form(xj, xj),
    }
    right, printed = lemma_4(w, sigma, i, j)._asdict(), lemma_4(w, sigma, i, j, "printed")._asdict()
    for name, samples in counted.items():
        error = samples.std() / np.sqrt(len(samples))
        assert abs(samples.mean() - right[name]) < 4.5 * error
        assert abs(samples.mean() - printed[name]) > 20 * error
    e22 = form(xi, xt) * form(xj, xt)
    error = e22.std() / np.sqrt(len(e22))
    assert abs(e22.mean() - equation_22(w, sigma, i, j, T)) < 4.5 * error
    assert abs(e22.mean() - equation_22(w, sigma, i, j, T, "printed")) > 20 * error


def test_equation_22_sums_to_the_variance_of_lemma_1():
    """Var z_i from its definition as a double sum of (22): the step at which the printed proof loses 2T²i."""
    from locater.theory import moments

    w, sigma, _ = random_case(0, 3)
    T, t = 9, np.trace(w @ sigma)
    e22 = np.array([[equation_22(w, sigma, min(a, b), max(a, b), T) for a in range(1, T + 1)] for b in range(1, T + 1)])
    eigenvalues = np.linalg.eigvals(w @ sigma)
    variance = moments(eigenvalues, TokenProcess.random_walk(T), 1.0).variance
    for i in range(1, T + 1):
        gamma = np.full(T, -1 / T**2)
        gamma[i - 1] += 1 / T
        mean = gamma @ np.arange(1, T + 1) * t
        assert gamma @ e22 @ gamma - mean**2 == pytest.approx(variance[i - 1], rel=1e-9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lemma_4(np.eye(2), np.eye(2), 3, 2), "i ≤ j"),
        (lambda: lemma_4(np.eye(2), np.eye(2), 0, 2), "i must be"),
        (lambda: lemma_4(np.eye(2), np.eye(3), 1, 2), "2 × 2 to match"),
        (lambda: lemma_4([[0, 1], [0, 0]], np.eye(2), 1, 2), "w must be symmetric"),
        (lambda: lemma_4(np.eye(2), np.eye(2), 1, 2, "wrong"), "form must be one of"),
        (lambda: equation_22(np.eye(2), np.eye(2), 1, 5, 4), "tokens must be at least j = 5"),
        (lambda: lemma_3(np.eye(2), [1, 2, 3], [0, 0], np.eye(2)), r"shape \(2,\)"),
    ],
)
def test_bad_arguments_are_refused(call, says):
    with pytest.raises(LocaterError, match=says):
        call()
