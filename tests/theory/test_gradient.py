"""The QK-gradient against autograd, against its own expansion, and its growth with T."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locater import QK, LocaterError, TokenProcess
from locater.theory import OneLayer
from locater.theory.studies import STUDIES


def network(d, gain=0.3, seed=0):
    rng = np.random.default_rng(seed)
    w_qk, w_v, w_f = rng.standard_normal((3, d, d)) / np.sqrt(d)
    return OneLayer(gain * w_qk, w_v, np.eye(d) + w_f, np.sqrt(d))


def batch(tokens, d, count=64, seed=1):
    x = TokenProcess.random_walk(tokens + 1).sample(count, d, seed=seed)
    return x[:, :-1], x[:, -1]


def autograd(net, x, y):
    """J written from Section 2 in torch: the clamp's own derivative decides which tokens are active."""
    w = torch.tensor(net.w_qk, requires_grad=True)
    w_v, w_f, xt, yt = (torch.tensor(part) for part in (net.w_v, net.w_f, x, y))
    last = xt[:, -1]
    omega = torch.einsum("bd,de,bte->bt", last, w, xt) / net.temperature  # (W_Q x_T)·(W_K x_i)
    T = omega.shape[1]
    s = (omega / T - omega.sum(1, keepdim=True) / T**2 + 1 / T).clamp(0, 1)
    out = (torch.einsum("bt,btd->bd", s, xt) @ w_v.T + last) @ w_f.T
    loss = 0.5 * ((yt - out) ** 2).sum(1).mean()
    (gradient,) = torch.autograd.grad(loss, w)
    return loss.item(), gradient.numpy()


@pytest.mark.parametrize("gain", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("tokens", [2, 9, 60])
def test_equation_3_equals_autograd(gain, tokens):
    net = network(5, gain)
    x, y = batch(tokens, 5)
    loss, gradient = autograd(net, x, y)
    assert net.loss(x, y) == pytest.approx(loss, rel=1e-12)
    got = net.qk_gradient(x, y).total
    assert np.linalg.norm(got - gradient) <= 1e-10 * np.linalg.norm(gradient)


def test_the_logits_are_those_of_the_heads_own_query_and_key_maps():
    """ω_i = (W_Q x_T)·(W_K x_i)/λ with W_QK = W_QᵀW_K, as `QK` has it: W_QK is not symmetric here."""
    rng = np.random.default_rng(3)
    w_q, w_k = rng.standard_normal((2, 2, 5))
    x, _ = batch(9, 5)
    queries, keys = x[:, -1] @ w_q.T, x @ w_k.T
    dense = QK(torch.tensor(w_q), torch.tensor(w_k)).dense().numpy()
    omega = OneLayer(dense, np.eye(5), np.eye(5), 3.0)._logits(x)
    np.testing.assert_allclose(omega, np.einsum("bk,btk->bt", queries, keys) / 3.0, rtol=1e-12)


@pytest.mark.parametrize("entry", [(0, 1), (1, 0), (2, 2)])
def test_the_gradient_is_the_difference_quotient_of_the_loss_at_an_asymmetric_matrix(entry):
    net = network(3, 0.3)
    x, y = batch(9, 3)

    def loss(step):
        w_qk = net.w_qk.copy()
        w_qk[entry] += step
        return OneLayer(w_qk, net.w_v, net.w_f, net.temperature).loss(x, y)

    h = 1e-6  # no token of this batch crosses a kink within it
    quotient = (loss(h) - loss(-h)) / (2 * h)
    gradient = net.qk_gradient(x, y).total
    assert quotient == pytest.approx(gradient[entry], rel=1e-6)  # rounding of the loss over h, and h²
    assert abs(gradient - gradient.T).max() > 0.1 * abs(gradient).max()


def test_the_batch_has_active_and_clipped_tokens_on_both_sides():
    """Otherwise the test above would not see Γ or γ̃₀ at work."""
    from locater.theory import piecewise_softmax

    net = network(5, 3.0)
    x, _ = batch(60, 5)
    pieces = piecewise_softmax(net._logits(x))
    assert 0.05 < pieces.active.mean() < 0.95
    assert (pieces.linear > 1).any()
    assert (pieces.linear < 0).any()


def test_tokens_above_one_are_not_hindered_they_carry_most_of_the_weight():
    """Section 3 says that a token with z outside [0, 1] does not contribute; above one it has weight one."""
    from locater.theory import piecewise_softmax

    d, tokens = 16, 800
    x = TokenProcess.random_walk(tokens).sample(200, d, seed=0)
    pieces = piecewise_softmax(np.einsum("btd,bd->bt", x, 2 * x[:, -1]) / np.sqrt(d))
    above = pieces.linear > 1
    assert (pieces.value[above] == 1).all()
    assert pieces.value[above].sum() > 0.7 * pieces.value.sum()


@pytest.mark.parametrize("gain", [0.1, 2.0])
def test_the_expansion_19_to_21_sums_to_equation_3_term_by_term(gain):
    net = network(3, gain)
    x, y = batch(7, 3, count=20)
    fast, slow = net.qk_gradient(x, y), net.qk_gradient_by_sums(x, y)
    for name in ("e19", "e20", "e21"):
        a, b = getattr(fast, name), getattr(slow, name)
        assert np.linalg.norm(a - b) <= 1e-11 * np.linalg.norm(b)
    assert np.linalg.norm(slow.total - autograd(net, x, y)[1]) <= 1e-10 * np.linalg.norm(slow.total)


def test_appendix_b1_without_p_is_not_the_gradient():
    """Lines four and five of B.1 write XΓΓᵀXᵀ for XΓPΓᵀXᵀ."""
    from locater.theory import piecewise_softmax

    net = network(3, 0.2)
    x, y = batch(7, 3)
    pieces = piecewise_softmax(net._logits(x))
    # XΓΓᵀXᵀ W_QK x_T x_Tᵀ/λ² of the paper, transposed; tokens as rows
    linear = np.einsum("bti,bt->bi", pieces.Gamma, net._logits(x)) / net.temperature
    without_p = np.einsum("bai,bi,bak,bl->lk", pieces.Gamma, linear, x, x[:, -1], optimize=True)
    right = net.qk_gradient(x, y).e19
    assert np.linalg.norm(without_p / len(x) - right) > 0.1 * np.linalg.norm(right)


def test_the_terms_grow_like_t3_t3_t2_once_the_softmax_saturates(full):
    """The paper bounds them by T⁸, T⁵, T⁴ and concludes that (19) dominates; it does not."""
    if not full:
        pytest.skip("six seconds: LOCATER_FULL=1, or make test-full")
    rows = {(row["W_QK"], row["term"]): row for row in STUDIES["orders"].run(0)}
    for setting in ("2·I, d = 4", "2·I, d = 16"):
        for term, exponent in (("(19)", 3), ("(20)", 3), ("(21)", 2)):
            assert rows[setting, term]["measured exponent"] == pytest.approx(exponent, abs=0.15)
        assert rows[setting, "(20)"]["relative to (19) at T=800"] > 1
    # where W_QK is so small that tokens stay active, (20) grows a power slower and may be dropped
    assert rows["0.05·I, d = 16", "(20)"]["measured exponent"] == pytest.approx(2, abs=0.15)


def test_the_diagonal_reduction_is_several_times_too_large_at_every_length():
    for row in STUDIES["diagonal"].run(0):
        assert row["|diagonal (19)| / |(19)|"] > 5


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: OneLayer(np.eye(3), np.eye(2), np.eye(3), 1.0), "w_v must be 3 × 3"),
        (lambda: OneLayer(np.eye(3), np.eye(3), np.eye(3), 0.0), "temperature"),
        (lambda: network(3).qk_gradient(np.zeros((4, 3)), np.zeros((4, 3))), "tokens must be"),
        (lambda: network(3).qk_gradient(np.zeros((4, 5, 3)), np.zeros((3, 3))), "target must be"),
        (lambda: network(3).loss(np.full((4, 5, 3), np.nan), np.zeros((4, 3))), "finite"),
    ],
)
def test_bad_arguments_are_refused(call, says):
    with pytest.raises(LocaterError, match=says):
        call()
