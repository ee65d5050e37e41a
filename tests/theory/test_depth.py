"""Through depth: a whole transformer with random weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from locater import LocaterError, TokenProcess
from locater.theory import (
    ACTIVATIONS,
    RandomAttention,
    RandomLinear,
    RandomMLP,
    RandomTransformer,
    activation_kernel,
    attention_from_traces,
    depth_law,
    rank_residual,
    token_gram,
    trainability,
    trainability_map,
)
from locater.theory._threads import _switches, one_thread


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernel_of_an_activation_is_the_integral_over_two_normals(activation):
    gram = np.array([[1.0, 0.9], [0.9, 1.7]])
    x = np.linspace(-9, 12, 1201)
    grid = np.stack(np.meshgrid(x, x, indexing="ij"), -1)
    density = multivariate_normal(cov=gram).pdf(grid) * (x[1] - x[0]) ** 2
    phi = ACTIVATIONS[activation](x)
    # a kink between points of the grid costs its step squared
    assert activation_kernel(activation, gram)[0, 1] == pytest.approx(phi @ density @ phi, abs=1e-4)
    one = np.exp(-(x**2) / 2 / 1.7) / np.sqrt(2 * np.pi * 1.7) * (x[1] - x[0])
    assert activation_kernel(activation, gram)[1, 1] == pytest.approx((phi**2) @ one, abs=1e-4)


@pytest.mark.parametrize("spread", [3.0, 10.0])
def test_the_kernel_of_tanh_is_odd_and_that_of_a_sign_where_inputs_are_large(spread):
    """sign's is the arcsine law, from which tanh's is less far the larger its inputs."""
    cosines = np.array([-1.0, -0.9, -0.5, 0.5, 0.9, 1.0])
    kernels = [activation_kernel("tanh", spread**2 * np.array([[1.0, one], [one, 1.0]])) for one in cosines]
    found = np.array([kernel[0, 1] for kernel in kernels])
    np.testing.assert_allclose(found, -found[::-1], rtol=1e-6)
    assert found[-1] == pytest.approx(kernels[0][0, 0], rel=1e-9)
    sign = 2 / np.pi * np.arcsin(cosines)
    assert np.abs(found - sign)[1:-1].max() < 1.5 / spread


def transformer(layers=1, *, heads=4, width=64, std=0.3, norm="none", mlp=None, **more):
    linear = RandomLinear(16, std)
    output = RandomLinear(heads * width, 0.05)
    made = {"query": linear, "key": linear, "value": linear, "output": output, "logit_scale": width**-0.5} | more
    return RandomTransformer(layers, RandomAttention(heads, made.pop("key_heads", heads), width, **made), mlp, norm)


def test_uniform_attention_averages_what_is_seen():
    gram = token_gram(np.eye(6), 1.0, position_std=0.5, shared_std=0.3)
    law = depth_law(transformer(), gram, gain=0.0)
    average = np.tri(6) / np.arange(1, 7)[:, None]
    np.testing.assert_allclose(law.gram, gram + 256 * 0.05**2 * 16 * 0.3**2 * average @ gram @ average.T, rtol=1e-9)
    assert law.entropy[0] == pytest.approx(np.log(np.arange(1, 7)).mean())
    assert law.entropy_share[0] == pytest.approx(1)


def test_independent_tokens_of_wide_heads_obey_the_three_number_law():
    """A head of random W_Q and W_K has trace and trace_square 0 in the mean, and its scale decides."""
    count, variance = 24, 6.0
    linear = RandomLinear(1, 1.0)
    wide = RandomAttention(16, 16, 2000, linear, linear, linear, linear, np.sqrt(variance / 2000), causal=False)
    law = depth_law(RandomTransformer(1, wide, norm="none"), np.eye(count), draws=4)
    exact = attention_from_traces(0.0, 0.0, variance, TokenProcess.independent(count), 1.0)
    # b varies by √(2/K) = 3% from query to query, which moves the mean entropy by its square
    assert law.entropy[0] == pytest.approx(float(exact.entropy), abs=5 * float(law.entropy_error[0]) + 0.01)
    # C leaves the query out of the tokens there, and G of random weights does so too
    assert law.signal[0] == pytest.approx(float(exact.signal), rel=0.03)


def brute_force(x, attention, mlp, rng):
    """One Pre-LN layer with weights of width D, on tokens (T, D)."""
    width, k = x.shape[1], attention.head_width
    group = attention.heads // attention.key_heads

    def weights(rows, linear, columns):
        return linear.std * rng.standard_normal((rows, columns))

    n = x / np.sqrt((x**2).mean(1, keepdims=True))
    total = x.copy()
    for _ in range(attention.key_heads):
        key, value = (n @ weights(width, linear, k) for linear in (attention.key, attention.value))
        for _ in range(group):
            logits = attention.logit_scale * (n @ weights(width, attention.query, k)) @ key.T
            logits = np.where(np.tri(len(x), dtype=bool), logits, -np.inf)
            p = np.exp(logits - logits.max(1, keepdims=True))
            total += p / p.sum(1, keepdims=True) @ value @ weights(k, attention.output, width)
    n = total / np.sqrt((total**2).mean(1, keepdims=True))
    inner = mlp.down.inputs
    hidden = ACTIVATIONS[mlp.activation](n @ weights(width, mlp.up, inner)) * (n @ weights(width, mlp.up, inner))
    return total + hidden @ weights(inner, mlp.down, width)


def test_the_gram_matrix_behind_a_layer_is_that_of_weights_drawn_whole():
    """Grouped queries that share keys and values, a gated MLP; over 60 draws of all weights, width 400."""
    width, count, rng = 400, 6, np.random.default_rng(0)
    linear = RandomLinear(width, 0.1)
    attention = RandomAttention(4, 2, 50, linear, linear, linear, RandomLinear(200, 0.03), 50**-0.5)
    mlp = RandomMLP(linear, RandomLinear(600, 0.01), "silu", gated=True)
    similarity = np.eye(count)
    similarity[1, 3] = similarity[3, 1] = 1.0  # the same token twice
    gram = token_gram(similarity, 0.5, position_std=0.2)
    law = depth_law(RandomTransformer(1, attention, mlp), gram, draws=200)
    grams = []
    for _ in range(60):
        x = np.linalg.cholesky(gram) @ rng.standard_normal((count, width))
        x = brute_force(x, attention, mlp, rng)
        grams.append(x @ x.T / width)
    error = np.std(grams, 0) / np.sqrt(60)
    # five standard errors of 60 draws, and what a width of 400 adds to the mean: a few times 1/400 of the diagonal
    assert (np.abs(law.gram - np.mean(grams, 0)) < 5 * error + 0.01 * law.gram.diagonal().mean()).all()
    assert (law.gram.diagonal() > 1.5 * gram.diagonal()).all()  # the branches matter


def test_likeness_is_that_of_tokens_with_the_gram_matrix():
    gram = token_gram(0.3 + 0.7 * np.eye(5), 1.0)
    law = depth_law(transformer(), gram)
    x = np.linalg.cholesky(gram) * np.sqrt(5)
    assert law.rank_residual[0] == pytest.approx(float(rank_residual(x)))
    assert law.cosine[0] == pytest.approx(0.3)
    assert law.size[0] == pytest.approx(1.0)


def test_rotary_angles_leave_the_law_of_a_query_and_key_at_one_place():
    """Features are isotropic: what is turned by the same angle has the same inner products."""
    kinds = [transformer(heads=64, std=0.5, rotary=rotary) for rotary in ((), (0.5,) * 32)]
    plain, turned = (depth_law(kind, np.eye(2), draws=8) for kind in kinds)
    apart = abs(plain.entropy - turned.entropy) / np.hypot(plain.entropy_error, turned.entropy_error)
    assert apart[0] < 5
    # and of tokens that are all the same only positions tell keys apart
    same = [depth_law(kind, np.full((6, 6), 1.0) + 1e-6 * np.eye(6), gain=5.0) for kind in kinds]
    assert same[0].entropy_share[0] > 0.999
    assert same[1].entropy_share[0] < 0.9


def test_a_grid_has_what_its_points_have_alone():
    model = transformer(3, norm="pre", mlp=RandomMLP(RandomLinear(16, 0.2), RandomLinear(32, 0.2), "gelu"))
    gram = token_gram(np.eye(7), 1.0)
    grid = depth_law(model, gram, gain=[[0.5], [4.0]], branch=[1.0, 0.2, 2.0], seed=3)
    assert grid.entropy.shape == (2, 3, 3)
    one = depth_law(model, gram, gain=4.0, branch=0.2, seed=3)
    np.testing.assert_allclose(grid.entropy[1, 1], one.entropy, rtol=1e-9)
    np.testing.assert_allclose(grid.cosine[1, 1], one.cosine, rtol=1e-9)


def test_a_part_of_the_heads_that_share_keys_has_the_mean_of_all():
    """8 of 32 over one head of keys, and 2 of each of 4 groups; 5 standard errors of both."""
    for keys in (1, 4):
        model, gram = transformer(2, heads=32, key_heads=keys, std=0.6), token_gram(np.eye(8), 1.0)
        all_of_them, part = (depth_law(model, gram, heads=h, draws=100, seed=h) for h in (32, 8))
        apart = np.abs(all_of_them.entropy - part.entropy) / np.hypot(all_of_them.entropy_error, part.entropy_error)
        assert (apart < 5).all()
        assert all_of_them.cosine[1] == pytest.approx(part.cosine[1], abs=0.02)
        assert all_of_them.size[1] == pytest.approx(part.size[1], rel=0.02)


def test_the_error_is_how_far_laws_of_other_seeds_are_from_each_other():
    """In deep layers, too, where earlier layers' heads have made the tokens what they are."""
    mlp = RandomMLP(RandomLinear(16, 0.2), RandomLinear(32, 0.2), "gelu")
    model, gram = transformer(12, heads=2, std=0.6, norm="post", mlp=mlp), token_gram(np.eye(12), 1.0)
    laws = [depth_law(model, gram, draws=8, seed=seed) for seed in range(40)]
    spread = np.std([law.entropy for law in laws], 0)
    said = np.sqrt(np.mean([law.entropy_error**2 for law in laws], 0))
    # a standard deviation of 40 is good to 11%, the other's of 8 × 40 normals to 4%
    np.testing.assert_allclose(said, spread, rtol=0.5)
    assert np.isnan(depth_law(model, gram).entropy_error).all()


def test_wide_heads_are_those_of_fewer_coordinates(monkeypatch):
    """A head of 1,024 rotated coordinates is drawn with 512 of them, and with all."""
    rates = tuple(10_000.0 ** (-np.arange(512) / 512))
    model = transformer(1, heads=8, width=1024, std=0.7, rotary=rates)
    gram = token_gram(0.5 + 0.5 * np.eye(8), 1.0)
    few = depth_law(model, gram, draws=20)
    monkeypatch.setattr("locater.theory.depth.WIDEST", 1024)
    apart = np.abs(few.entropy - (all_of_them := depth_law(model, gram, draws=20, seed=1)).entropy)
    assert (apart < 5 * np.hypot(few.entropy_error, all_of_them.entropy_error) + 0.01).all()


@pytest.mark.parametrize("norm", ["output", "sandwich"])
def test_behind_a_norm_on_its_output_a_branch_adds_the_same_whatever_its_weights(norm):
    gram = token_gram(np.eye(6), 0.5)
    made = [transformer(2, norm=norm, output=RandomLinear(256, std)) for std in (0.05, 5.0)]
    small, large = (depth_law(model, gram, branch=2.0) for model in made)
    np.testing.assert_allclose(small.gram, large.gram)
    np.testing.assert_allclose(small.size, [0.25, 4.25, 8.25])
    itself = depth_law(replace(made[0], branch=2.0), gram)
    np.testing.assert_allclose(itself.gram, small.gram)
    # queries and keys read what is normed, or the stream itself
    same = depth_law(transformer(1, norm="pre" if norm == "sandwich" else "none"), gram)
    np.testing.assert_allclose(small.entropy[0], same.entropy[0])


def test_a_soft_cap_bounds_the_logits():
    gram = np.eye(16)
    free, wide, tight = (
        depth_law(transformer(std=2.0, softcap=cap, causal=False), gram) for cap in (None, 1e4, 0.5)
    )  # fmt: skip
    np.testing.assert_allclose(wide.entropy, free.entropy, rtol=1e-3)
    assert free.entropy_share[0] < 0.5
    assert tight.entropy[0] > np.log(16) - 0.5  # its logits differ by at most 1, and entropy by less than half of that


def test_a_norm_over_all_heads_takes_the_size_off_queries_and_keys():
    gram = token_gram(np.eye(6), 1.0)
    linears = (RandomLinear(16, std) for std in (0.1, 3.0))
    small, large = (
        depth_law(transformer(query=one, key=one, qk_norm_eps=0.0, qk_norm_all=True), gram) for one in linears
    )
    np.testing.assert_allclose(small.entropy, large.entropy)


def test_each_draw_takes_the_next_gram_matrix():
    grams = np.stack([np.eye(4), 3 * np.eye(4)])
    law = depth_law(transformer(), grams, draws=2)
    assert law.size[0] == pytest.approx(2)
    assert depth_law(transformer(), grams).size[0] == pytest.approx(1)
    assert trainability(transformer(), grams, draws=4).law.size[0] == pytest.approx(2)


def test_layers_may_have_rotary_embeddings_of_their_own():
    """Of tokens that are all the same only positions tell keys apart."""
    rates, gram = (0.5,) * 32, np.full((6, 6), 1.0) + 1e-6 * np.eye(6)
    model = replace(transformer(3, std=0.5), rotary=((), rates, ()))
    share = depth_law(model, gram, gain=5.0).entropy_share
    assert share[0] > 0.999
    assert share[1] < 0.9


def test_products_of_small_matrices_take_one_thread_and_give_the_others_back():
    if _switches() is None:
        pytest.skip("numpy has no OpenBLAS of its own here")
    get, put = _switches()
    before = get()
    try:
        put(2)
        with one_thread():
            assert get() == 1
        assert get() == 2
    finally:
        put(before)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_what_is_said_to_mend_it_mends_it(norm):
    mlp = RandomMLP(RandomLinear(16, 0.1), RandomLinear(32, 0.1), "relu")
    model, gram = transformer(8, norm=norm, mlp=mlp, std=0.05), token_gram(0.2 + 0.8 * np.eye(24), 1.0)
    sick = trainability(model, gram)
    assert sick.uniform == tuple(range(8))
    assert sick.frozen == ()
    assert depth_law(model, gram, gain=sick.gain, heads=4).entropy_share.max() < 0.9
    frozen = transformer(8, norm=norm, mlp=mlp, std=5.0)
    sick = trainability(frozen, gram)
    assert sick.frozen
    assert sick.gain < 1
    assert depth_law(frozen, gram, gain=sick.gain, heads=4).entropy_share.min() > 0.1
    strong = transformer(8, norm=norm, mlp=mlp, std=0.05, value=RandomLinear(16, 4.0))
    alike = trainability(strong, gram)
    assert 0 < alike.alike_from <= 8
    assert depth_law(strong, gram, branch=alike.branch, heads=4).cosine.max() < 0.9
    assert alike.depth == alike.alike_from - 1


def test_finite_lengths_approach_the_random_energy_model():
    """Entropy over ln T against the variance over 2 ln T: 1 less it as T → ∞, until all is frozen."""
    gaps = []
    for count in (16, 128, 512):
        linear, variance = RandomLinear(1, 1.0), np.log(count)  # half of where it freezes
        wide = RandomAttention(4, 4, 400, linear, linear, linear, linear, np.sqrt(variance / 400), causal=False)
        model = RandomTransformer(1, wide, norm="none")
        found = trainability_map(model, np.eye(count), [1.0], [1.0])
        assert found.freezing_gain == pytest.approx(np.sqrt(2))
        gaps.append(found.entropy_share[0, 0] - 0.5)
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 0.15


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: transformer(0), "layers must be a whole number of at least 1, got 0"),
        (lambda: transformer(10_000), "layers must be at most 1,000, got 10,000"),
        (lambda: transformer(key_heads=3), "key_heads must divide the 4 heads, got 3"),
        (lambda: transformer(norm="middle"), "norm must be one of pre, post, none"),
        (lambda: transformer(rotary=(np.nan,)), "rotary must be finite, got nan"),
        (lambda: transformer(rotary=(1.0,) * 40), "rotary turns 40 pairs of coordinates, and a head has 64"),
        (lambda: replace(transformer(3), rotary=((), ())), "rotary must be of 3 layers, got 2"),
        (lambda: depth_law(transformer(), [[1.0, 2.0], [2.0, 1.0]]), "gram must be positive semidefinite"),
        (lambda: depth_law(transformer(), [[1.0]]), "at least 2"),
        (lambda: depth_law(transformer(), np.diag([1.0, 0.0])), "a token is zero"),
        (lambda: depth_law(transformer(), np.eye(3), gain=-1.0), "gain and branch must be from 0 to 1e+09"),
        (lambda: activation_kernel("sine", np.eye(2)), "activation must be one of relu"),
        (lambda: activation_kernel("tanh", [[np.nan]]), "gram must be finite"),
        (lambda: RandomLinear(4, -1.0), "std must not be negative, got -1"),
        (lambda: RandomLinear(0, 1.0), "inputs must be a whole number of at least 1, got 0"),
        (lambda: transformer(softcap=0.0), "softcap must be one positive number"),
        (lambda: token_gram(np.eye(3), np.nan), "std must be"),
    ],
)
def test_what_is_no_transformer_is_refused_in_one_sentence(call, words):
    with pytest.raises(LocaterError) as refused:
        call()
    assert words in str(refused.value)
