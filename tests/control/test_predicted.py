"""Predicted entropy and signal as tensors: gradients reach the weights of a head, and can be followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locater import QK, LocaterError, TokenProcess
from locater.control import predicted_attention
from locater.theory import attention_from_traces

PROCESS = TokenProcess.independent(32)


def predicted(w_q, w_k, **options):
    qk = QK(w_q, w_k)
    return predicted_attention(qk.trace(), qk.trace_square(), qk.scale(), PROCESS, 4.0, **options)


def by_quadrature(w_q, w_k):
    qk = QK(w_q.detach(), w_k.detach())
    return attention_from_traces(qk.trace(), qk.trace_square(), qk.scale(), PROCESS, 4.0, samples=512)


def test_values_are_those_of_the_three_number_law():
    torch.manual_seed(0)
    qk = QK(torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64))
    entropy, signal = predicted_attention(qk.trace(), qk.trace_square(), qk.scale(), PROCESS, 4.0)
    law = attention_from_traces(qk.trace(), qk.trace_square(), qk.scale(), PROCESS, 4.0)
    assert entropy.shape == signal.shape == (3,)
    np.testing.assert_allclose(entropy, law.entropy, atol=0.01)  # sampled here, by quadrature there
    np.testing.assert_allclose(signal, law.signal, atol=0.01)


@pytest.mark.parametrize("which", [0, 1], ids=["entropy", "signal"])
def test_gradients_of_the_weights_are_difference_quotients(which):
    torch.manual_seed(1)
    w_q, w_k = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gradients, direction = [], torch.randn(4, 8, dtype=torch.float64)
    for seed in range(8):
        value = predicted(w_q, w_k, seed=seed)[which]
        gradients.append(float((torch.autograd.grad(value, w_q)[0] * direction).sum()))
    up, down = (by_quadrature(w_q + sign * 1e-3 * direction, w_k) for sign in (1, -1))
    name = ("entropy", "signal")[which]
    quotient = float(getattr(up, name) - getattr(down, name)) / 2e-3
    # eight independent sets of points give the standard error
    assert np.mean(gradients) == pytest.approx(quotient, abs=5 * np.std(gradients, ddof=1) / np.sqrt(8))
    assert np.std(gradients) < 0.1 * abs(quotient)


def test_following_the_gradient_brings_a_head_to_a_chosen_entropy():
    torch.manual_seed(2)
    w_q, w_k = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([w_q, w_k], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        entropy, _ = predicted(w_q, w_k, samples=1024)
        ((entropy - 2.0) ** 2).backward()
        optimizer.step()
    assert float(by_quadrature(w_q, w_k).entropy) == pytest.approx(2.0, abs=0.05)


def test_what_no_matrix_has_is_refused():
    one = torch.tensor(1.0)
    with pytest.raises(LocaterError, match="trace_square must be within"):
        predicted_attention(one, 2 * one, one, PROCESS, 1.0)
    with pytest.raises(LocaterError, match="tensors that broadcast"):
        predicted_attention(torch.ones(2), torch.ones(3), one, PROCESS, 1.0)
    entropy, _ = predicted_attention(1.0, 1.0, 1.0, PROCESS, 1.0, samples=64)  # plain numbers will do
    assert 0 < float(entropy) < np.log(32)
