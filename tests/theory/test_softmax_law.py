"""The law of softmax attention, against whole sequences multiplied out, quadrature, and each other."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import entr

from locater import QK, LocaterError
from locater.theory import (
    TokenProcess,
    attention,
    attention_from_traces,
    attention_gradient,
    attention_map,
    attention_regime,
    normal_spectrum,
    softmax,
    trace_for_entropy,
)
from locater.theory.conditional import GivenQuery


def random_covariance(size, rng, spread=1.0):
    root = rng.standard_normal((size, size)) / np.sqrt(size)
    return root @ root.T + spread * np.diag(rng.uniform(0.1, 1.0, size))


@dataclass(frozen=True)
class Setting:
    process: TokenProcess
    qk: QK
    covariance: np.ndarray | None = None
    mean: np.ndarray | None = None
    query: int = -1
    causal: bool = True
    temperature: float = 1.0

    def law(self, **options):
        given = {"covariance": self.covariance, "mean": self.mean, "query": self.query, "causal": self.causal}
        return attention(self.qk, self.process, self.temperature, **given, **options)


def qk_of(w_q, w_k):
    return QK(torch.from_numpy(w_q), torch.from_numpy(w_k))


def _head(dim, width, gain, rng):
    return qk_of(*(rng.standard_normal((2, width, dim)) * np.sqrt(gain / dim)))


def _settings():
    rng = np.random.default_rng(0)
    walk, auto, free = TokenProcess.random_walk, TokenProcess.autoregressive, TokenProcess.independent

    def any_k(tokens):
        return TokenProcess(random_covariance(tokens, rng))

    def eye(d, c):
        return qk_of(c * np.eye(d), np.eye(d))

    def wide(d):
        return random_covariance(d, rng)

    made = {
        "walk, d = 1, T = 2": Setting(walk(2), eye(1, 0.7)),
        "walk, d = 1, negative": Setting(walk(5), eye(1, -0.4)),
        "walk, d = 4, asymmetric": Setting(walk(8), _head(4, 4, 0.2, rng)),
        "walk, d = 16, T = 24": Setting(walk(24), _head(16, 8, 0.05, rng)),
        "walk, d = 64, collapsed": Setting(walk(32), eye(64, 0.3), temperature=8.0),
        "walk, anisotropic": Setting(walk(20), _head(12, 6, 0.1, rng), covariance=wide(12)),
        "walk, query in the middle": Setting(walk(20), _head(8, 8, 0.1, rng), query=7),
        "walk, query in the middle, all keys": Setting(walk(16), _head(8, 8, 0.1, rng), query=7, causal=False),
        "walk, mean": Setting(walk(16), _head(8, 8, 0.1, rng), mean=rng.standard_normal(8)),
        "walk, T = 512": Setting(walk(512), eye(2, 0.01)),
        "AR(1), d = 2": Setting(auto(6, 0.9), _head(2, 2, 2.0, rng)),
        "AR(1), d = 32": Setting(auto(48, 0.8), _head(32, 8, 4.0, rng), temperature=2.0),
        "AR(1), alternating": Setting(auto(9, -0.7), eye(6, 0.5)),
        "AR(1), means by position": Setting(auto(10, 0.5), _head(6, 6, 1.0, rng), mean=rng.standard_normal((10, 6))),
        "AR(1), first query": Setting(auto(10, 0.5), _head(6, 6, 1.0, rng), query=1),
        "AR(1), T = 256": Setting(auto(256, 0.97), _head(8, 4, 1.0, rng)),
        "independent, d = 1": Setting(free(8), eye(1, 1.5)),
        "independent, d = 3": Setting(free(40), _head(3, 3, 2.0, rng)),
        "independent, d = 256": Setting(free(12), _head(256, 16, 16.0, rng), temperature=4.0),
        "independent, itself": Setting(free(16), eye(64, 1.0), temperature=8.0),
        "independent, means by position": Setting(free(12), _head(6, 4, 1.0, rng), mean=rng.standard_normal((12, 6))),
        "a constant feature": Setting(
            auto(5, 0.5), qk_of(np.eye(4)[[0, 3]], np.array([[0.5, 1, 0, 0], [0, 0, 1, 0]])),
            np.diag([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 3.0]),
        ),
        "any K, d = 2": Setting(any_k(7), _head(2, 2, 2.0, rng), covariance=wide(2)),
        "any K, mean, anisotropic": Setting(any_k(20), _head(10, 5, 1.0, rng), wide(10), rng.standard_normal(10)),
        "any K, all keys": Setting(any_k(15), _head(8, 8, 0.5, rng), query=3, causal=False),
    }  # fmt: skip
    assert len(made) == 25
    return made


SETTINGS = _settings()


def by_definition(setting, samples, seed):
    """Entropy and weights of softmax over sequences in d dimensions, with their standard errors."""
    process, w_q, w_k = setting.process, np.asarray(setting.qk.w_q), np.asarray(setting.qk.w_k)
    d, query = w_q.shape[1], setting.query % setting.process.tokens
    values, vectors = np.linalg.eigh(np.eye(d) if setting.covariance is None else setting.covariance)
    root = vectors * np.sqrt(values.clip(min=0))
    positions = np.linalg.cholesky(process.position_covariance + 1e-13 * np.eye(process.tokens))
    rng, drawn = np.random.default_rng(seed), []
    batch = max(1, (1 << 21) // (process.tokens * d))
    for start in range(0, samples, batch):
        x = positions @ rng.standard_normal((min(batch, samples - start), process.tokens, d)) @ root.T
        x = x if setting.mean is None else x + setting.mean
        keys = x[:, : query + 1] if setting.causal else x
        logits = np.einsum("nk,ntk->nt", x[:, query] @ w_q.T, keys @ w_k.T) / setting.temperature
        weights = softmax(logits)
        drawn.append(np.column_stack([entr(weights).sum(1), weights]))
    found = np.concatenate(drawn)
    return found.mean(0), found.std(0) / np.sqrt(samples)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_law_agrees_with_whole_sequences(name):
    setting = SETTINGS[name]
    tokens = setting.process.tokens
    law = setting.law()
    samples = int(min(100_000, 1e7 / (tokens * setting.qk.d_model)))
    mean, error = by_definition(setting, samples, seed=1)
    assert law.weights.sum() == pytest.approx(1, abs=1e-9)
    assert (law.weights[len(mean) - 1 :] == 0).all()
    law_mean = np.r_[law.entropy, law.weights[: len(mean) - 1]]
    law_error = np.r_[law.entropy_error, law.weights_error[: len(mean) - 1]]
    shown = np.r_[True, law.weights[: len(mean) - 1] > 1e-4]
    z = ((law_mean - mean) / np.hypot(law_error, error))[shown]
    assert np.abs(z).max() < 5, f"largest |z| {np.abs(z).max():.2f} of {shown.sum()}"


@pytest.mark.parametrize("name", ["walk, d = 4, asymmetric", "independent, d = 3", "any K, mean, anisotropic"])
def test_its_own_montecarlo_agrees_in_every_field(name):
    law, drawn = SETTINGS[name].law(), SETTINGS[name].law(method="montecarlo", samples=40_000)
    for field in ("entropy", "largest_weight", "signal"):
        a, b = (float(getattr(one, field)) for one in (law, drawn))
        error = np.hypot(*(float(getattr(one, f"{field}_error")) for one in (law, drawn)))
        assert abs(a - b) < 5 * error, field
    # of a standard deviation s the error is about s/√(2N), more for heavy tails
    assert float(law.entropy_std) == pytest.approx(float(drawn.entropy_std), rel=0.05)
    assert float(law.alpha) == pytest.approx(float(drawn.alpha), abs=0.02)


def test_the_example_of_the_paper_collapses_on_the_last_three_tokens():
    """ρ is near 1 on tokens 22 to 29 here; softmax is elsewhere."""
    law = attention(normal_spectrum(0.3, 0.1, 128), TokenProcess.random_walk(40), np.sqrt(128))
    assert law.weights[20:32].sum() < 1e-5
    assert law.weights[-3:].sum() == pytest.approx(0.997, abs=0.001)
    assert float(law.entropy) == pytest.approx(0.27, abs=0.01)
    assert str(attention_regime(law)) == "collapsed on the query itself: 1.32 of 40 tokens (random walk)"


def test_signal_is_what_the_head_s_output_turns_towards_its_keys():
    """Stein: E[Σ p_i x_i | x_q] = α x_q + β Σh. Seen along h: E Σ p_i h·x_i = E[α a + β b], the mean logit."""
    d, process = 24, TokenProcess.autoregressive(12, 0.6)
    x = process.sample(50_000, d, seed=5)
    w = normal_spectrum(0.1, 0.3, d)
    logits = np.einsum("ntd,nd->nt", x, x[:, -1] * w)
    weights = softmax(logits)
    mixed = np.einsum("nt,ntd->nd", weights, x)
    b = (x[:, -1] * w) ** 2
    left = (mixed * (x[:, -1] * w)).sum(1)
    alpha = weights @ process.position_covariance[-1]
    given_query = GivenQuery.of(process)
    beta = given_query.covariance.diagonal() @ weights.T - given_query.quadratic(weights.T)
    right = alpha * logits[:, -1] + beta * b.sum(1)
    assert left.mean() == pytest.approx(right.mean(), abs=5 * (left - right).std() / np.sqrt(len(x)))
    law = attention(w, process, 1.0)
    assert float(law.signal) == pytest.approx(beta.mean(), abs=5 * np.hypot(beta.std() / 223.6, law.signal_error))
    assert float(law.alpha) == pytest.approx(alpha.mean(), abs=5 * alpha.std() / 223.6 + 1e-3)


# ---------------------------------------------------------------------- three numbers, derivatives


@pytest.mark.parametrize("kind", ["random walk", "autoregressive", "independent"])
def test_three_numbers_are_enough_where_many_eigenvalues_matter(kind):
    d = 2048
    process = {
        "random walk": TokenProcess.random_walk(16),
        "autoregressive": TokenProcess.autoregressive(16, 0.9),
        "independent": TokenProcess.independent(16),
    }[kind]
    w = normal_spectrum(0.004, 1.0, d) * (0.2 if kind == "random walk" else 1.0)
    exact, three = (attention(w, process, np.sqrt(d), method) for method in ("exact", "three-number"))
    error = 5 * np.hypot(exact.entropy_error, three.entropy_error) + 0.5 / np.sqrt(d)
    assert float(exact.entropy) == pytest.approx(float(three.entropy), abs=float(error))
    assert np.abs(exact.weights - three.weights).max() < 0.01


@pytest.mark.parametrize(
    ("process", "numbers"),
    [
        (TokenProcess.independent(32), (0.7, 0.5, 0.9)),
        (TokenProcess.random_walk(12), (0.1, -0.01, 0.03)),
        (TokenProcess.autoregressive(12, 0.8), (1.0, 0.5, 0.9)),
    ],
    ids=["independent", "walk", "AR(1)"],
)
def test_closed_form_derivatives_are_difference_quotients(process, numbers):
    found = attention_gradient(*numbers, process, 1.0, samples=1 << 17)
    for i in range(3):
        step = 0.02 * max(abs(numbers[i]), 0.1)
        up, down = (
            attention_from_traces(*(x + sign * step * (j == i) for j, x in enumerate(numbers)), process, 1.0,
                                  samples=1 << 17)
            for sign in (1, -1)
        )  # fmt: skip
        for name in ("entropy", "signal"):
            quotient = float(getattr(up, name) - getattr(down, name)) / (2 * step)
            gradient, error = (getattr(found, f"{name}_{part}")[i] for part in ("gradient", "gradient_error"))
            # both from the same points: what is left is the quotient's curvature
            assert gradient == pytest.approx(quotient, rel=5e-3, abs=5 * error)


def test_the_trace_for_an_entropy_gives_that_entropy():
    for process in (TokenProcess.independent(64), TokenProcess.random_walk(20)):
        scale = 0.01 if process.kind == "random walk" else 16.0
        trace = trace_for_entropy(1.5, scale, process, 8.0)
        law = attention_from_traces(trace, scale, scale, process, 8.0)
        assert float(law.entropy) == pytest.approx(1.5, abs=1e-6)
    with pytest.raises(LocaterError, match="that this scale leaves at trace 0"):
        trace_for_entropy(4.1, 500.0, TokenProcess.independent(64), 8.0)


# ---------------------------------------------------------------------- what must hold of any


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=6),
    st.integers(2, 12),
    st.sampled_from(["walk", "auto", "free", "any"]),
    st.integers(0, 1000),
)
def test_weights_sum_to_one_and_entropy_is_within_its_bounds(eigenvalues, tokens, kind, seed):
    process = {
        "walk": TokenProcess.random_walk(tokens),
        "auto": TokenProcess.autoregressive(tokens, -0.5),
        "free": TokenProcess.independent(tokens),
        "any": TokenProcess(random_covariance(tokens, np.random.default_rng(seed))),
    }[kind]
    for method in ("exact", "three-number"):
        law = attention(eigenvalues, process, 1.3, method, samples=512, seed=seed)
        assert law.weights.sum() == pytest.approx(1, abs=1e-7)
        assert (law.weights > -1e-9).all()
        assert -1e-9 <= float(law.entropy) <= np.log(tokens) + 1e-7
        assert float(law.signal) >= -1e-9
        # a weighted mean of the weights is at most the largest, and that at most 1
        assert 1 / tokens - 1e-9 <= float(law.largest_weight) <= 1 + 1e-9


def test_no_attention_matrix_is_uniform_attention():
    law = attention(np.zeros(4), TokenProcess.random_walk(10), 1.0)
    np.testing.assert_allclose(law.weights, 0.1, atol=1e-12)
    assert float(law.entropy) == pytest.approx(np.log(10))
    assert str(attention_regime(law)) == "uniform: 10 of 10 tokens (random walk)"


def test_a_regime_is_a_phrase_and_its_parts_and_survives_a_copy():
    regime = attention_regime(attention([0.5, 0.4], TokenProcess.random_walk(10), 1.0))
    assert regime.startswith(regime.name)
    assert (regime.tokens, regime.process) == (10, "random walk")
    again = pickle.loads(pickle.dumps(regime))
    assert (again, again.side, again.width) == (regime, regime.side, regime.width)


def test_heads_are_computed_each_as_if_alone():
    spectra = np.stack([normal_spectrum(0.1, 0.2, 8), normal_spectrum(-0.2, 0.1, 8)])
    process = TokenProcess.random_walk(9)
    both = attention(spectra, process, 3.0)
    assert both.weights.shape == (2, 9)
    for head in range(2):
        one = attention(spectra[head], process, 3.0)
        np.testing.assert_array_equal(both[head].weights, one.weights)
        assert both[head].entropy == one.entropy


def test_a_markov_process_is_drawn_along_its_chain_and_has_the_same_law():
    rng = np.random.default_rng(7)
    normals = rng.standard_normal((11, 50_000))
    for process in (TokenProcess.random_walk(12), TokenProcess.autoregressive(12, 0.7), TokenProcess.independent(12)):
        for query, causal in ((-1, True), (4, False)):
            given_query = GivenQuery.of(process, query, causal)
            assert given_query._chain is not None
            noise = given_query.noise(normals[: given_query.tokens - 1])
            covariance = noise @ noise.T / normals.shape[1]
            # an entry of a sample covariance has the error √((c_ii c_jj + c_ij²)/N)
            c = given_query.covariance
            error = np.sqrt((np.outer(c.diagonal(), c.diagonal()) + c**2) / normals.shape[1])
            assert (np.abs(covariance - c) <= 5 * error + 1e-12).all()
            p = rng.dirichlet(np.ones(given_query.tokens), 5).T
            np.testing.assert_allclose(given_query.quadratic(p), np.einsum("in,ij,jn->n", p, c, p), rtol=1e-10)


def test_regimes_of_softmax_over_trace_and_scale():
    walk = attention_map([-8, -1, 0, 1, 8], [0.01, 10.0], TokenProcess.random_walk(40))
    assert walk.name[:, 0].tolist() == ["collapsed others", "local far", "uniform", "local near", "collapsed itself"]
    assert walk.name[2, 1] == "collapsed others"
    free = attention_map([0, 20], [0.1, 2.0], TokenProcess.independent(64))
    assert free.name.tolist() == [["uniform", "local anywhere"], ["collapsed itself", "collapsed itself"]]
    assert (free.tokens, free.process) == (64, "independent")


# ---------------------------------------------------------------------- bad input

WALK = TokenProcess.random_walk(4)
SQUARE = qk_of(np.eye(2), np.eye(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention([1.0], WALK, 0.0), "temperature must be one positive number"),
        (lambda: attention([np.nan], WALK, 1.0), "eigenvalues must be finite"),
        (lambda: attention([], WALK, 1.0), "non-empty"),
        (lambda: attention([1 + 1j], WALK, 1.0), "must be real"),
        (lambda: attention([1.0], WALK, 1e-200), "overflow: take a larger temperature"),
        (lambda: attention_from_traces(1.0, 1.0, 1.0, WALK, 1e-200), "overflow: take a larger temperature"),
        (lambda: attention(SQUARE, WALK, 1.0, mean=[1e160, 0.0]), "at most 1e100"),
        (lambda: attention(SQUARE, WALK, 1.0, covariance=1e200 * np.eye(2)), "overflow"),
        (lambda: attention_from_traces(1.7e308, 0.0, 1.0, WALK, 1.0), "overflow"),
        (lambda: attention([1.0], WALK, 1.0, seed=-1), "seed must be a whole number"),
        (lambda: attention([1.0], np.eye(4), 1.0), "process must be a TokenProcess, got ndarray"),
        (lambda: attention_gradient([], [], [], WALK, 1.0), "no head"),
        (lambda: attention_from_traces([1.0, 2.0], [0.0] * 3, 9.0, WALK, 1.0), "must broadcast, got shapes"),
        (lambda: trace_for_entropy([1.0], 1.0, WALK, 1.0), "entropy must be one positive number"),
        (lambda: trace_for_entropy(0.1, 0.0, TokenProcess(np.ones((3, 3))), 1.0), "no trace takes the entropy"),
        (lambda: attention_map([1.0], [1.0], WALK, symmetry=2), "symmetry within"),
        (lambda: attention([1.0], WALK, 1.0, "guess"), "method must be one of"),
        (lambda: attention([1.0], WALK, 1.0, query=4), "query must be a position from -4 to 3"),
        (lambda: attention([1.0], WALK, 1.0, query=0.5), "query must be a position"),
        (lambda: attention([1.0], WALK, 1.0, samples=0), "samples must be a whole number"),
        (lambda: attention([1.0], WALK, 1.0, mean=[1.0]), "mean goes with a QK"),
        (lambda: attention([1.0], WALK, 1.0, covariance=[[1.0]]), "covariance goes with a QK"),
        (lambda: attention(SQUARE, WALK, 1.0, covariance=-np.eye(2)), "positive semidefinite"),
        (lambda: attention(SQUARE, WALK, 1.0, mean=np.ones(3)), "mean must be"),
        (lambda: attention(SQUARE, WALK, 1.0, mean=np.ones((3, 2))), "a row for each of 4 tokens"),
        (lambda: attention([1.0], TokenProcess(np.eye(1)), 1.0), "at least 2 tokens"),
        (lambda: attention_from_traces(1.0, 2.0, 1.0, WALK, 1.0), "trace_square must be within"),
        (lambda: attention_from_traces(1.0, 0.0, -1.0, WALK, 1.0), "scale is a sum of squares"),
        (lambda: attention_map([1.0], [-1.0], WALK), "scale must not be negative"),
        (lambda: attention_regime(attention([[1.0], [2.0]], WALK, 1.0)), "takes one head"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(LocaterError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_numbers_may_be_rounded_as_their_dtype_rounds(dtype):
    torch.manual_seed(0)
    for _ in range(20):
        w = torch.randn(8, 8)
        qk = QK.from_joint((w + w.T).to(dtype))
        law = attention_from_traces(qk.trace(), qk.trace_square(), qk.scale(), WALK, 10.0, samples=64)
        assert np.isfinite(law.entropy)


def test_the_first_query_sees_itself_alone():
    law = attention([1.0, 2.0], WALK, 1.0, query=0)
    assert law.weights.tolist() == [1, 0, 0, 0]
    assert float(law.entropy) == 0


def test_logits_of_any_size_are_met():
    for size in (1e-200, 1e-12, 1e12, 1e60):
        for process in (WALK, TokenProcess.independent(4)):
            law = attention([size, -size], process, 1.0)
            assert np.isfinite(law.weights).all()
            assert law.weights.sum() == pytest.approx(1)
