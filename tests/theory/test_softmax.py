from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from locater import LocaterError
from locater.theory import piecewise_softmax, softmax, sparsemax

logits = arrays(
    np.float64,
    array_shapes(min_dims=1, max_dims=3, min_side=2, max_side=7),
    elements=st.floats(-100, 100, allow_nan=False),
)


@given(logits)
def test_value_is_gamma_transposed_omega_plus_gamma_0(omega):
    pieces = piecewise_softmax(omega)
    rebuilt = np.einsum("...ai,...a->...i", pieces.Gamma, omega) + pieces.gamma_tilde_0
    np.testing.assert_allclose(pieces.value, rebuilt, atol=1e-12)
    assert ((pieces.value >= 0) & (pieces.value <= 1)).all()


@given(logits)
def test_active_tokens_are_those_the_cut_leaves_alone(omega):
    pieces = piecewise_softmax(omega)
    np.testing.assert_array_equal(pieces.active, pieces.value == pieces.linear)


@pytest.mark.parametrize("tokens", [2, 3, 10])
def test_gamma_is_the_derivative_of_softmax_at_the_origin(tokens):
    jacobian = torch.autograd.functional.jacobian(
        lambda w: torch.softmax(w, -1), torch.zeros(tokens, dtype=torch.float64)
    )
    pieces = piecewise_softmax(np.zeros(tokens))
    np.testing.assert_allclose(pieces.gamma, jacobian.numpy(), atol=1e-15)
    np.testing.assert_allclose(pieces.value, 1 / tokens)


@given(logits)
def test_sparsemax_is_the_nearest_point_of_the_simplex(omega):
    p = sparsemax(omega)
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-9)
    # the projection p satisfies ⟨ω − p, e_i − p⟩ ≤ 0 for every corner e_i
    gap = (omega - p) - ((omega - p) * p).sum(-1, keepdims=True)
    assert gap.max() < 1e-9 * (1 + np.abs(omega).max())


@given(logits)
def test_softmax_matches_torch(omega):
    np.testing.assert_allclose(softmax(omega), torch.softmax(torch.tensor(omega), -1).numpy(), atol=1e-14)


@pytest.mark.parametrize("bad", [np.zeros(1), np.float64(3), [np.nan, 1.0], np.zeros((3, 0))])
def test_logits_that_are_none_are_refused(bad):
    with pytest.raises(LocaterError, match="logits"):
        piecewise_softmax(bad)
