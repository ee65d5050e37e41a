"""ρ: the exact law against Monte Carlo, closed forms and itself; the corrected lemmas; the printed ones."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from locater import QK, LocaterError, TokenProcess, rho
from locater.theory import (
    focus_limit,
    logit_form,
    moments,
    normal_spectrum,
    rho_curve,
    rho_curve_slope,
    rho_from_gaussian,
)
from locater.theory.law import spectrum_of
from locater.theory.simulate import rho_by_walks, rho_given_query


@pytest.fixture
def walks(full):
    """How many are simulated; the bounds are standard errors of as many."""
    return 1_000_000 if full else 150_000


def asymmetric(d_head, d_model, seed=0):
    rng = np.random.default_rng(seed)
    w_q, w_k = rng.standard_normal((2, d_head, d_model))
    r = rng.uniform(-2.5, 2.5, (d_model, d_model))
    return QK(torch.tensor(w_q), torch.tensor(w_k + 0.3 * w_q)), r.T @ r / d_model


def within_standard_errors(exact, counted, samples, how_many=4):
    """Where ρ is so near 0 or 1 that fewer than ten events are expected, the normal error is replaced by 10/n."""
    error = np.maximum(np.sqrt(exact * (1 - exact) / samples), 2.5 / samples)
    worst = np.abs((exact - counted) / error).max()
    assert worst < how_many, f"off by {worst:.2f} standard errors"


# ---------------------------------------------------------------- exact against simulation

GRID = [
    (mean, d, tokens) for mean in (-0.3, 0.0, 0.2) for d in (1, 2, 8, 128) for tokens in (2, 40, 200)
]  # fmt: skip


@pytest.mark.parametrize(("mean", "d", "tokens"), GRID)
def test_exact_rho_agrees_with_simulated_walks(mean, d, tokens, walks, full):
    """In 36 cells of up to 200 correlated tokens, 4 standard errors is the bound the design sets.

    Whole walks where that is quick (and everywhere in the full run), else walks given their query; the
    two samplers are compared below.
    """
    w, walk = mean + 0.3 * np.random.default_rng(d).standard_normal(d), TokenProcess.random_walk(tokens)
    sampler = rho_by_walks if full or d * tokens <= 320 else rho_given_query
    counted = sampler(spectrum_of(w), walk, np.sqrt(d), samples=walks, seed=tokens)
    within_standard_errors(rho(w, walk, np.sqrt(d)), counted, walks)


@pytest.mark.parametrize("tokens", [2, 40, 200])
@pytest.mark.parametrize("kind", ["random walk", "autoregressive", "independent"])
def test_exact_rho_of_an_asymmetric_qk_with_anisotropic_tokens_agrees_with_simulated_walks(tokens, kind, walks, full):
    process = {
        "random walk": TokenProcess.random_walk(tokens),
        "autoregressive": TokenProcess.autoregressive(tokens, 0.9),
        "independent": TokenProcess.independent(tokens),
    }[kind]
    qk, sigma = asymmetric(4, 9)
    exact = rho(qk, process, 2.0, covariance=sigma)
    sampler = rho_by_walks if full or tokens <= 40 else rho_given_query
    counted = sampler(spectrum_of(qk, sigma), process, 2.0, samples=walks, seed=11)
    within_standard_errors(exact, counted, walks)


def test_multiplying_out_whole_sequences_agrees_too():
    """No shortcut at all: tokens from `sample`, W_QK as a dense matrix, Definition 1 term by term."""
    qk, sigma = asymmetric(3, 5)
    process = TokenProcess.autoregressive(12, 0.8)
    x = process.sample(300_000, covariance=sigma, seed=5)
    omega = np.einsum("nid,de,ne->ni", x, qk.dense().numpy().T, x[:, -1]) / 1.5
    gamma = np.eye(12) / 12 - 1 / 144
    z = omega @ gamma + 1 / 12
    within_standard_errors(rho(qk, process, 1.5, covariance=sigma), ((z >= 0) & (z <= 1)).mean(0), len(x), how_many=4.5)


def test_the_two_samplers_agree():
    w, walk = normal_spectrum(0.1, 0.3, 16), TokenProcess.random_walk(30)
    n = 300_000
    by_walks = rho_by_walks(spectrum_of(w), walk, 4.0, samples=n, seed=1)
    given_query = rho_given_query(spectrum_of(w), walk, 4.0, samples=n, seed=2)
    p = 0.5 * (by_walks + given_query)
    within = np.abs(by_walks - given_query) < 4.5 * np.sqrt(2 * p * (1 - p) / n) + 5 / n
    assert within.all()


# ---------------------------------------------------------------- exact against closed forms


@pytest.mark.parametrize("tokens", [2, 7, 64])
@pytest.mark.parametrize("w", [1e-6, 1e-3, 0.4, 5.0, 1e3])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_two_equal_eigenvalues_and_uncorrelated_factors_give_the_laplace_law(tokens, w, temperature):
    # At the middle of an odd walk c_i = 0: x_i − x̄ and x_T are independent, y is Laplace with scale w √(s k).
    walk = TokenProcess.random_walk(2 * tokens + 1)
    i = tokens
    assert walk.query_covariance[i] == 0
    scale = w * np.sqrt(walk.centred_variance[i] * walk.query_variance)
    inside = stats.laplace.cdf(temperature * 2 * tokens, scale=scale) - stats.laplace.cdf(-temperature, scale=scale)
    assert rho([w, w], walk, temperature)[i] == pytest.approx(inside, abs=1e-12)


@pytest.mark.parametrize("w", [-3.0, 1e-4, 0.7, 100.0])
def test_one_eigenvalue_gives_the_product_of_two_correlated_normals(w):
    """d = 1, by a second route: integrate the normal probability of x_i − x̄ over the query."""
    walk = TokenProcess.random_walk(10)
    exact = rho([w], walk, 1.0)
    for i in (0, 4, 9):
        s, c, k = walk.centred_variance[i], walk.query_covariance[i], walk.query_variance
        rest = mpmath.sqrt(s - c**2 / k)

        def given_query(g, c=c, k=k, rest=rest):
            x = g * mpmath.sqrt(k)
            low, high = sorted((-1 / (w * x), 9 / (w * x)))
            mean = c / k * x
            return mpmath.npdf(g) * (mpmath.ncdf((high - mean) / rest) - mpmath.ncdf((low - mean) / rest))

        cuts = [0, 1e-4, 1e-2, 0.1, 0.5, 1, 2, 4, 9]
        both_sides = mpmath.quad(given_query, cuts) + mpmath.quad(lambda g, f=given_query: f(-g), cuts)
        assert exact[i] == pytest.approx(float(both_sides), abs=1e-8)


def test_the_characteristic_function_integrated_plainly_gives_the_same_rho():
    """Gil-Pelaez along the real line, with the product of FINDINGS' quadratic factors: no contour at all."""
    w, walk, T, lam = normal_spectrum(0.1, 0.3, 12), TokenProcess.random_walk(20), 20, 3.0
    exact = rho(w, walk, lam)
    for i in (0, 9, 15, 19):
        s, c, k = walk.centred_variance[i], walk.query_covariance[i], walk.query_variance
        t = np.linspace(1e-10, 60 / np.sqrt((s * k + c**2) * (w**2).sum()), 400_001)
        factors = 1 - 2j * c * np.outer(t, w) + (s * k - c**2) * np.outer(t**2, w**2)
        phi = np.exp(-0.5 * np.log(factors).sum(1))
        low, high = -lam, lam * (T - 1)
        integrand = (np.exp(-1j * t * low) - np.exp(-1j * t * high)) / (1j * t) * phi
        assert exact[i] == pytest.approx(np.trapezoid(integrand.real, t) / np.pi, abs=1e-6)


def test_zero_eigenvalues_do_not_count_and_all_zero_means_every_token_propagates():
    walk = TokenProcess.random_walk(12)
    np.testing.assert_allclose(rho([0.3, -0.1, 0, 0, 0], walk, 1.0), rho([0.3, -0.1], walk, 1.0), atol=1e-12)
    np.testing.assert_array_equal(rho([0.0, 0.0], walk, 1.0), 1)
    for method in ("gaussian", "montecarlo"):
        np.testing.assert_array_equal(rho([0.0], walk, 1.0, method, samples=10), 1)


def test_a_symmetric_qk_and_its_eigenvalues_give_the_same_rho():
    rng = np.random.default_rng(4)
    a = rng.standard_normal((6, 6))
    w = a + a.T
    r = rng.standard_normal((6, 6))
    sigma = r @ r.T
    walk = TokenProcess.random_walk(15)
    joint = QK.from_joint(torch.tensor(w))
    eigenvalues = np.linalg.eigvals(w @ sigma)
    for method in ("exact", "gaussian", "asymptotic", "printed"):
        np.testing.assert_allclose(
            rho(joint, walk, 2.0, method, covariance=sigma), rho(eigenvalues, walk, 2.0, method), atol=1e-9
        )
    for form in ("exact", "asymptotic", "printed"):
        np.testing.assert_allclose(
            moments(joint, walk, 2.0, form, covariance=sigma), moments(eigenvalues, walk, 2.0, form), rtol=1e-9
        )


def test_transposing_w_qk_changes_nothing():
    """The paper writes ω = XᵀW_QK x_T, a model computes (W_Q x_T)·(W_K x_i): the same law."""
    qk, sigma = asymmetric(4, 7)
    walk = TokenProcess.autoregressive(11, 0.6)
    np.testing.assert_allclose(
        rho(qk, walk, 1.0, covariance=sigma), rho(QK(qk.w_k, qk.w_q), walk, 1.0, covariance=sigma), atol=1e-10
    )


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.sampled_from([2, 3, 17, 200, 4096]),
    st.floats(-6, 3),
    st.sampled_from([-1.0, 1.0]),
)
def test_exact_rho_is_a_probability_and_scales_with_the_temperature_at_any_size(seed, d, tokens, exponent, sign):
    """Scales 1e-6 to 1e3, T 2 to 4096, either sign: multiplying W and λ by one number changes nothing."""
    w = sign * 10**exponent * np.random.default_rng(seed).uniform(-0.2, 1, d)
    walk = TokenProcess.random_walk(tokens)
    values = rho(w, walk, 1.0)
    assert ((values >= 0) & (values <= 1)).all()
    np.testing.assert_allclose(values, rho(1e3 * w, walk, 1e3), atol=2e-9)


def test_heads_are_a_leading_dimension():
    walk = TokenProcess.random_walk(9)
    w = np.random.default_rng(0).standard_normal((2, 3, 5))
    together = rho(w, walk, 2.0)
    assert together.shape == (2, 3, 9)
    np.testing.assert_allclose(together[1, 2], rho(w[1, 2], walk, 2.0), atol=1e-12)
    qk = QK(torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64))
    together = rho(qk, walk, 2.0)
    np.testing.assert_allclose(together[1, 2], rho(QK(qk.w_q[1, 2], qk.w_k[2]), walk, 2.0), atol=1e-12)


# ---------------------------------------------------------------- the general law


def random_gaussian(rng, width, mean):
    joint = rng.standard_normal((2 * width, 2 * width))
    joint = joint @ joint.T
    return mean * rng.standard_normal(width), mean * rng.standard_normal(width), joint


@pytest.mark.parametrize("mean", [0.0, 0.3, 3.0, 30.0])
def test_the_general_law_agrees_with_samples_of_query_and_key(mean):
    rng = np.random.default_rng(int(10 * mean))
    width, tokens, temperature, n = 3, 8, 2.5, 400_000
    m_q, m_u, joint = random_gaussian(rng, width, mean)
    blocks = joint[:width, :width], joint[width:, width:], joint[:width, width:]
    exact = rho_from_gaussian(m_q, m_u, *blocks, tokens=tokens, temperature=temperature)
    v = np.concatenate([m_q, m_u]) + rng.standard_normal((n, 2 * width)) @ np.linalg.cholesky(joint).T
    product = (v[:, :width] * v[:, width:]).sum(1)
    z = 1 / tokens + product / (temperature * tokens)
    within_standard_errors(exact, ((z >= 0) & (z <= 1)).mean(), n)
    form = logit_form(m_q, m_u, *blocks)
    assert form.mean() == pytest.approx(m_q @ m_u + np.trace(blocks[2]), rel=1e-12)
    assert abs(product.var() / form.variance() - 1) < 0.05


def test_the_general_law_s_normal_form_has_the_moments_of_the_product():
    rng = np.random.default_rng(8)
    root = rng.standard_normal((6, 6))
    joint, m = root @ root.T, rng.standard_normal(6)
    blocks = joint[:3, :3], joint[3:, 3:], joint[:3, 3:]
    form = logit_form(m[:3], m[3:], *blocks)
    got = rho_from_gaussian(m[:3], m[3:], *blocks, tokens=9, temperature=1.7, method="gaussian")
    normal = stats.norm(form.mean(), np.sqrt(form.variance()))
    assert got == pytest.approx(normal.cdf(1.7 * 8) - normal.cdf(-1.7), abs=1e-12)


def test_the_general_law_contains_the_random_walk():
    qk, sigma = asymmetric(3, 6)
    walk = TokenProcess.random_walk(10)
    w_q, w_k = qk.w_q.numpy(), qk.w_k.numpy()
    general = rho_from_gaussian(
        np.zeros(3),
        np.zeros((10, 3)),
        walk.query_variance * w_q @ sigma @ w_q.T,
        walk.centred_variance[:, None, None] * (w_k @ sigma @ w_k.T),
        walk.query_covariance[:, None, None] * (w_q @ sigma @ w_k.T),
        tokens=10,
        temperature=1.7,
    )
    np.testing.assert_allclose(general, rho(qk, walk, 1.7, covariance=sigma), atol=1e-10)


def test_a_constant_query_leaves_a_normal_law():
    """A bias with no variance: q fixed, so qᵀu is normal; the joint covariance is singular."""
    q, m_u, c_u = np.array([1.0, 2.0]), np.array([0.3, -0.1]), np.array([[1.0, 0.2], [0.2, 0.5]])
    got = rho_from_gaussian(q, m_u, np.zeros((2, 2)), c_u, np.zeros((2, 2)), tokens=5, temperature=0.8)
    normal = stats.norm(q @ m_u, np.sqrt(q @ c_u @ q))
    assert got == pytest.approx(normal.cdf(0.8 * 4) - normal.cdf(-0.8), abs=1e-9)


@given(st.integers(0, 100), st.lists(st.floats(-12, 12), min_size=3, max_size=3), st.booleans())
def test_the_general_law_does_not_know_how_a_product_is_divided_between_query_and_key(seed, exponents, with_means):
    """(D q)ᵀ(D⁻¹ u) = qᵀu for any diagonal D, however uneven."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(6, 6))
    joint, means = root @ root.T, with_means * rng.normal(size=6)
    d = np.concatenate([10.0 ** np.array(exponents), 10.0 ** -np.array(exponents)])

    def law(factors):
        c, m = joint * factors[:, None] * factors, means * factors
        return rho_from_gaussian(m[:3], m[3:], c[:3, :3], c[3:, 3:], c[:3, 3:], tokens=7, temperature=1.5)

    assert law(d) == pytest.approx(law(np.ones(6)), abs=1e-9)
    qk, walk = QK(*(torch.from_numpy(rng.normal(size=(3, 8))) for _ in range(2))), TokenProcess.random_walk(5)
    uneven = QK(*(torch.from_numpy(f[:, None]) * w for f, w in zip((d[:3], d[3:]), (qk.w_q, qk.w_k), strict=True)))
    np.testing.assert_allclose(rho(uneven, walk, 2.0), rho(qk, walk, 2.0), atol=1e-9)


def test_a_coordinate_that_one_of_query_and_key_does_not_have_adds_nothing():
    zero, eye = np.zeros(3), np.eye(3)
    one = rho_from_gaussian(
        zero, zero, np.diag([1.0, 1, 0]), np.diag([1.0, 1, 1e9]), 0 * eye, tokens=7, temperature=1.5
    )
    two = rho_from_gaussian(zero[:2], zero[:2], eye[:2, :2], eye[:2, :2], 0 * eye[:2, :2], tokens=7, temperature=1.5)
    assert one == pytest.approx(two, abs=1e-9)


def test_a_covariance_that_rounding_has_made_slightly_negative_is_one():
    qk, walk = QK(torch.eye(2, 4).double(), torch.ones(2, 4).double()), TokenProcess.random_walk(5)
    ready, rounded = np.diag([1.0, 1, 1, 0]), np.diag([1.0, 1, 1, -5e-6])
    np.testing.assert_allclose(rho(qk, walk, 2.0, covariance=rounded), rho(qk, walk, 2.0, covariance=ready), atol=1e-9)


def test_means_and_covariances_broadcast_over_heads_and_tokens():
    rng = np.random.default_rng(0)
    m_q, m_u = rng.standard_normal((5, 1, 2)), rng.standard_normal((5, 7, 2))
    got = rho_from_gaussian(
        m_q, m_u, np.eye(2), np.broadcast_to(np.eye(2), (7, 2, 2)), 0.2 * np.eye(2), tokens=7, temperature=1.0
    )
    assert got.shape == (5, 7)
    one = rho_from_gaussian(
        m_q[3, 0], m_u[3, 4], np.eye(2), np.eye(2), 0.2 * np.eye(2), tokens=7, temperature=1.0
    )  # fmt: skip
    assert got[3, 4] == pytest.approx(one, abs=1e-12)


# ---------------------------------------------------------------- moments: Lemma 1


@pytest.mark.parametrize("kind", ["random walk", "autoregressive", "independent"])
def test_exact_moments_agree_with_simulation_for_asymmetric_w_qk(kind):
    process = {
        "random walk": TokenProcess.random_walk(12),
        "autoregressive": TokenProcess.autoregressive(12, 0.7),
        "independent": TokenProcess.independent(12),
    }[kind]
    qk, sigma = asymmetric(4, 8, seed=3)
    mean, variance = moments(qk, process, 1.3, covariance=sigma)
    x = process.sample(400_000, covariance=sigma, seed=9)
    omega = np.einsum("nid,nd->ni", x @ qk.w_k.numpy().T, x[:, -1] @ qk.w_q.numpy().T) / 1.3
    z = (omega - omega.mean(1, keepdims=True)) / 12 + 1 / 12
    assert (np.abs(z.mean(0) - mean) < 5 * np.sqrt(variance / len(z))).all()
    # the fourth moment of a quadratic form: its kurtosis is at most 15, so Var(z²)/n ≤ 14 v²/n
    assert (np.abs(z.var(0) / variance - 1) < 5 * np.sqrt(14 / len(z))).all()


def test_moments_are_those_of_the_exact_law():
    walk, w = TokenProcess.random_walk(20), normal_spectrum(0.2, 0.5, 7)
    form = spectrum_of(w).form(walk)
    mean, variance = moments(w, walk, 3.0)
    np.testing.assert_allclose(mean, 1 / 20 + form.mean() / 60, rtol=1e-12)
    np.testing.assert_allclose(variance, form.variance() / 60**2, rtol=1e-12)


@pytest.mark.parametrize("tokens", [2, 5, 300])
def test_lemma_1_variance_at_every_t_and_in_the_limit(tokens):
    w, i, T = np.array([0.5, -0.2, 0.9]), np.arange(1, tokens + 1), tokens
    q = (w**2).sum()
    exact = moments(w, TokenProcess.random_walk(T), 1.0).variance
    np.testing.assert_allclose(exact, (2 * i**2 - 2 * i * (T + 1) + (T + 1) * (7 * T + 5) / 12) / T**2 * q, rtol=1e-10)
    right = moments(w, TokenProcess.random_walk(T), 1.0, "asymptotic").variance
    theta = i / T
    np.testing.assert_allclose(right, (2 * theta**2 - 2 * theta + 7 / 12) * q, rtol=1e-12)
    assert np.abs(exact - right).max() < 3 / T * q


def test_the_printed_variance_is_13_times_too_large_in_the_middle():
    walk = TokenProcess.random_walk(4000)
    w = np.full(3, 0.1)
    ratio = moments(w, walk, 1.0, "printed").variance / moments(w, walk, 1.0).variance
    assert ratio[1999] == pytest.approx(13, rel=1e-3)


def test_symmetrising_w_qk_makes_the_variance_too_small():
    qk, sigma = asymmetric(6, 12)
    walk = TokenProcess.random_walk(60)
    w = qk.dense().numpy()
    exact = moments(qk, walk, 1.0, covariance=sigma).variance
    symmetrised = moments(QK.from_joint(torch.tensor(0.5 * (w + w.T))), walk, 1.0, covariance=sigma).variance
    # the antisymmetric part A of Σ^½ W_QK Σ^½ adds (1 − 1/T²) ‖A‖²/12 at every token alike
    root = np.linalg.cholesky(sigma)
    m = root.T @ w @ root
    lost = (1 - 1 / 60**2) / 12 * np.linalg.norm(0.5 * (m - m.T)) ** 2
    np.testing.assert_allclose(exact - symmetrised, lost, rtol=1e-9)


# ---------------------------------------------------------------- Eq. (6) and Lemma 2


@given(st.floats(0, 1), st.floats(-30, 30), st.floats(-2, 2), st.sampled_from(["asymptotic", "printed"]))
def test_slope_is_the_derivative_of_the_curve(theta, xi, log_eta, form):
    eta, h = 10**log_eta, 1e-5
    theta = min(max(theta, h), 1 - h)
    numeric = (rho_curve(theta + h, xi, eta, form) - rho_curve(theta - h, xi, eta, form)) / (2 * h)
    assert rho_curve_slope(theta, xi, eta, form) == pytest.approx(numeric, abs=1e-4 * (1 + abs(xi) + 1 / eta))


def test_the_curve_is_what_the_asymptotic_method_evaluates():
    w, walk, lam = normal_spectrum(0.1, 0.4, 32), TokenProcess.random_walk(50), 2.0
    root = np.sqrt((w**2).sum())
    theta = np.arange(1, 51) / 50
    for form in ("asymptotic", "printed"):
        np.testing.assert_allclose(
            rho(w, walk, lam, form), rho_curve(theta, w.sum() / root, root / lam, form), atol=1e-12
        )


def test_the_exact_law_tends_to_the_corrected_curve_and_not_to_the_printed_one():
    gaps = []
    for size in (16, 64, 256, 1024):
        w, lam, walk = normal_spectrum(2 / size, 0.8 / np.sqrt(size), size), 1.0, TokenProcess.random_walk(size)
        exact = rho(w, walk, lam)
        gaps.append([np.abs(rho(w, walk, lam, form) - exact).max() for form in ("asymptotic", "printed")])
    right, printed = np.transpose(gaps)
    assert right[-1] < 0.01
    assert (np.diff(right) < 0).all()
    assert printed[-1] > 0.15


@pytest.mark.parametrize("form", ["asymptotic", "printed"])
@pytest.mark.parametrize("r", [0.5, 2.0, 4.0, -0.5, -4.0])
def test_lemma_2_focus_limits_hold_off_the_boundary_and_are_one_half_at_the_middle(form, r):
    theta = np.array([0.1, 0.3, 0.45, 0.5, 0.55, 0.7, 0.74, 0.76, 0.9])
    near = rho_curve(theta, np.sign(r) * 1e7, abs(r) / 1e7, form)
    np.testing.assert_allclose(near, focus_limit(theta, r), atol=1e-6)
    assert focus_limit(0.5, r) == 0.5  # printed: 1


def test_at_the_far_boundary_the_limit_depends_on_the_approach():
    assert np.isnan(focus_limit(0.75, 4.0))
    assert np.isnan(focus_limit(1.0, 2.0))
    xi = 1e6
    # ξη → 4 along three ways: the value at θ = ¾ goes wherever one likes
    values = [float(rho_curve(0.75, xi, (4 + shift / xi) / xi)) for shift in (-40.0, 0.0, 40.0)]
    assert values[0] > 0.99
    assert values[1] == pytest.approx(0.5, abs=1e-6)
    assert values[2] < 0.01


def test_limit_3_fails_uniformity_needs_eta_to_vanish_too():
    theta = np.linspace(0, 1, 101)
    for eta, ratio in ((1.0, 1.2346), (1e6, np.sqrt(7))):
        curve = rho_curve(theta, 0.0, eta)
        assert theta[curve.argmax()] == 0.5
        assert curve.max() / curve.min() == pytest.approx(ratio, rel=1e-3)
        assert np.abs(rho_curve_slope(theta, 0.0, eta)).max() > 0.1 * curve.max()  # the paper: → 0
    flat = rho_curve(theta, 0.0, 1e-3)
    assert flat.max() - flat.min() < 1e-12
    # and at finite size, exactly: d = 128, T = 40, η = 3
    w = normal_spectrum(0, 1, 128)
    w *= 3 / np.sqrt((w**2).sum())
    exact = rho(w, TokenProcess.random_walk(40), 1.0)
    assert exact[19] > 2.1 * exact[[0, 39]].max()


@given(st.floats(0, 1), st.floats(-20, 20))
def test_limit_4_the_signal_vanishes_with_eta(theta, xi):
    assert rho_curve(theta, xi, 1e8) < 1e-7
    assert rho_curve(theta, xi, 1e8, "printed") < 1e-7


def test_variance_zero_alone_does_not_localise():
    """Summary A1: W = cI has a spectrum of variance zero for every c; tr W/λ decides."""
    walk = TokenProcess.random_walk(40)
    tiny, some, huge = (rho(np.full(128, c), walk, np.sqrt(128)) for c in (1e-3, 0.4, 1e4))
    assert tiny.min() > 0.99
    assert some.max() > 0.99
    assert some.min() < 1e-6
    assert huge.max() < 0.1


def test_late_focus_needs_more_than_r_above_zero_at_finite_t():
    """The step at θ = ½ for every r > 0 needs r > 2/(T − 1), because γ₀ = 1/T is not negligible."""
    walk = TokenProcess.random_walk(40)
    for r, first in ((0.5 * 2 / 39, 1.0), (2.0 * 2 / 39, 0.0)):
        w = np.full(100_000, r / 100_000)  # d so large that the law is its mean
        assert rho(w, walk, 1.0)[0] == pytest.approx(first, abs=0.01)


# ---------------------------------------------------------------- bad input

walk5 = TokenProcess.random_walk(5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rho([], walk5, 1.0), "non-empty"),
        (lambda: rho(3.0, walk5, 1.0), "non-empty"),
        (lambda: rho([1.0, np.nan], walk5, 1.0), "eigenvalues must be finite, got nan at index 1"),
        (lambda: rho([np.inf], walk5, 1.0), "finite, got inf"),
        (lambda: rho([1e200], walk5, 1.0), "at most 1e100 in size, got 1e\\+200"),
        (lambda: rho([1 + 1j, 1 - 1j], walk5, 1.0), "pass the QK itself"),
        (lambda: rho(["a"], walk5, 1.0), "real numbers"),
        (lambda: rho([1.0], walk5, 0.0), "temperature must be one positive number, got 0.0"),
        (lambda: rho([1.0], walk5, -1), "temperature must be one positive number, got -1"),
        (lambda: rho([1.0], walk5, np.nan), "temperature"),
        (lambda: rho([1.0], walk5, [1.0, 2.0]), "temperature must be one positive number"),
        (lambda: rho([1.0], walk5, 1.0, "exakt"), "method must be one of exact, gaussian.* got 'exakt'"),
        (lambda: moments([1.0], walk5, 1.0, "gaussian"), "form must be one of"),
        (lambda: rho([1.0], TokenProcess.independent(5), 1.0, "printed"), "random walk's"),
        (lambda: rho([1.0], walk5, 1.0, covariance=np.eye(1)), "goes with a QK"),
        (lambda: rho([1.0], walk5, 1.0, "montecarlo", samples=0), "samples must be"),
        (lambda: rho(np.ones((2, 3)), walk5, 1.0, "montecarlo"), "one head at a time"),
        (lambda: rho(asymmetric(2, 4)[0], walk5, 1.0, covariance=np.eye(3)), "4 × 4 to match, got 3 × 3"),
        (lambda: rho(asymmetric(2, 3)[0], walk5, 1.0, covariance=-np.eye(3)), "positive semidefinite"),
        (lambda: rho(asymmetric(2, 3)[0], walk5, 1.0, covariance=np.triu(np.ones((3, 3)))), "symmetric"),
        (lambda: rho_curve(1.2, 1, 1), "theta must be within"),
        (lambda: rho_curve(0.5, 1, 0), "eta must be positive"),
        (lambda: rho_curve(0.5, 1, 1, "exact"), "form must be one of"),
        (lambda: rho_curve([0.1, 0.2], [1, 2, 3], 1), "broadcast"),
        (lambda: normal_spectrum(0, -1, 4), "std must not be negative"),
        (lambda: normal_spectrum(0, 1, 0), "dim must be"),
        (
            lambda: rho_from_gaussian([0, 0], [0], np.eye(2), np.eye(2), np.eye(2), tokens=4, temperature=1),
            "same head width",
        ),
        (
            lambda: rho_from_gaussian([0, 0], [0, 0], np.eye(3), np.eye(2), np.eye(2), tokens=4, temperature=1),
            "query_covariance must end in 2 × 2",
        ),
        (
            lambda: rho_from_gaussian([0, 0], [0, 0], np.eye(2), np.eye(2), 2 * np.eye(2), tokens=4, temperature=1),
            "positive semidefinite",
        ),
        (
            lambda: rho_from_gaussian([0], [0], [[1]], [[1]], [[0]], tokens=1, temperature=1),
            "tokens must be a whole number of at least 2",
        ),
        (
            lambda: rho_from_gaussian(np.zeros((2, 1)), np.zeros((3, 1)), [[1]], [[1]], [[0]], tokens=4, temperature=1),
            "do not broadcast",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_sentence(call, says):
    with pytest.raises(LocaterError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
