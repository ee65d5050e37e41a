"""QK: every cheap method against its dense twin, values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locater import QK, LocaterError

shapes = st.tuples(
    st.sampled_from([((), ()), ((3,), (3,)), ((2, 4), (2, 4)), ((2, 4), (4,)), ((4,), (1,)), ((2, 1), (3,))]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 2**31),
)


def make(case, dtype=torch.float64):
    (lead_q, lead_k), d_head, d_model, seed = case
    generator = torch.Generator().manual_seed(seed)
    w_q = torch.randn(*lead_q, d_head, d_model, generator=generator, dtype=torch.float64).to(dtype)
    w_k = torch.randn(*lead_k, d_head, d_model, generator=generator, dtype=torch.float64).to(dtype)
    return QK(w_q, w_k)


def dense_trace(w):
    return w.diagonal(dim1=-2, dim2=-1).sum(-1)


TRACES = {
    "trace": dense_trace,
    "scale": lambda w: (w.mT @ w).diagonal(dim1=-2, dim2=-1).sum(-1),
    "trace_square": lambda w: (w @ w).diagonal(dim1=-2, dim2=-1).sum(-1),
}


@given(shapes)
def test_traces_equal_their_dense_twins(case):
    qk = make(case)
    for name, dense in TRACES.items():
        got = getattr(qk, name)()
        assert got.shape == qk.shape
        torch.testing.assert_close(got, dense(qk.dense()))


@given(shapes)
def test_singular_values_equal_the_dense_ones(case):
    qk = make(case)
    dense = torch.linalg.svdvals(qk.dense())[..., : qk.d_head]
    torch.testing.assert_close(qk.singular_values(), dense, rtol=1e-9, atol=1e-9)


@given(shapes)
def test_symmetric_eigenvalues_equal_the_dense_ones_but_for_zeros(case):
    qk = make(case)
    dense = qk.dense()
    expected = torch.linalg.eigvalsh(0.5 * (dense + dense.mT))
    got = qk.symmetric_eigenvalues()
    assert got.shape == (*qk.shape, min(2 * qk.d_head, qk.d_model))
    padded = torch.cat([got, got.new_zeros(*qk.shape, qk.d_model - got.shape[-1])], -1).sort(-1).values
    torch.testing.assert_close(padded, expected, rtol=1e-9, atol=1e-9)


@given(shapes)
def test_eigenvalues_have_the_dense_matrix_power_sums(case):
    """Order and near-degenerate pairs make eigenvalues hard to compare one by one; their power sums are not."""
    qk = make(case)
    values, w = qk.eigenvalues(), qk.dense()
    assert values.shape == (*qk.shape, qk.d_head)
    size = torch.linalg.matrix_norm(w, 2)
    power = w
    for p in (1, 2, 3):
        got = (values**p).sum(-1)
        scale = (1 + size**p * qk.d_head).max().item()
        torch.testing.assert_close(got.real, dense_trace(power), rtol=0, atol=1e-10 * scale)
        torch.testing.assert_close(got.imag, torch.zeros_like(got.imag), rtol=0, atol=1e-10 * scale)
        power = power @ w


def test_eigenvalues_equal_the_dense_non_zero_ones():
    qk = make((((), ()), 4, 9, 0))
    dense = torch.linalg.eigvals(qk.dense())
    largest = dense[dense.abs().argsort(descending=True)[:4]]
    distance = (qk.eigenvalues()[:, None] - largest[None]).abs()
    assert distance.min(0).values.max() < 1e-10
    assert distance.min(1).values.max() < 1e-10


METHODS = {
    **TRACES,
    "singular_values": lambda w: torch.linalg.svdvals(w)[..., :3],
    "symmetric_eigenvalues": lambda w: torch.linalg.eigvalsh(0.5 * (w + w.mT)),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("lead", [((2,), (2,)), ((2, 2), (2,))])
def test_gradients_equal_those_of_the_dense_twin(name, lead):
    qk = make((lead, 3, 8, 5))
    w_q, w_k = qk.w_q.requires_grad_(), qk.w_k.requires_grad_()
    got = torch.autograd.grad((getattr(QK(w_q, w_k), name)() ** 2).sum(), (w_q, w_k))
    expected = torch.autograd.grad((METHODS[name](w_q.mT @ w_k) ** 2).sum(), (w_q, w_k))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_eigenvalues_are_differentiable():
    qk = make((((), ()), 3, 8, 1))
    w_q, w_k = qk.w_q.requires_grad_(), qk.w_k.requires_grad_()
    got = torch.autograd.grad((QK(w_q, w_k).eigenvalues() ** 2).sum().real, (w_q, w_k))
    expected = torch.autograd.grad(QK(w_q, w_k).trace_square(), (w_q, w_k))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_and_single_precision_weights_work(dtype):
    exact = make((((2, 3), (3,)), 4, 16, 2))
    qk = QK(exact.w_q.to(dtype), exact.w_k.to(dtype))
    rounded = QK(qk.w_q.double(), qk.w_k.double())  # what the stored numbers are
    for name in TRACES:
        assert getattr(qk, name)().dtype == torch.float32
        torch.testing.assert_close(getattr(qk, name)().double(), getattr(rounded, name)(), rtol=1e-4, atol=1e-3)
    assert qk.eigenvalues().dtype == torch.complex128
    torch.testing.assert_close(qk.singular_values(), rounded.singular_values())
    torch.testing.assert_close(qk.symmetric_eigenvalues(), rounded.symmetric_eigenvalues())


def test_a_jointly_trained_w_qk_is_its_own_dense_matrix():
    w = torch.randn(3, 6, 6, dtype=torch.float64)
    qk = QK.from_joint(w)
    torch.testing.assert_close(qk.dense(), w)
    torch.testing.assert_close(qk.trace(), dense_trace(w))
    torch.testing.assert_close(qk.singular_values(), torch.linalg.svdvals(w))


def test_nothing_but_dense_forms_a_model_by_model_matrix():
    """At d_model = 60,000 such a matrix would hold 29 GB."""
    qk = QK(torch.randn(2, 60_000), torch.randn(2, 60_000))
    for name in ("trace", "scale", "trace_square", "eigenvalues", "symmetric_eigenvalues", "singular_values"):
        assert torch.isfinite(torch.view_as_real(getattr(qk, name)().to(torch.complex128))).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: QK(torch.zeros(2, 3), torch.zeros(4, 3)), r"share d_head, got \(2, 3\) and \(4, 3\)"),
        (lambda: QK(torch.zeros(5, 2, 3), torch.zeros(4, 2, 3)), "do not broadcast"),
        (lambda: QK(torch.zeros(3), torch.zeros(3)), r"must be \(..., d_head, d_model\), got shape \(3,\)"),
        (lambda: QK(torch.zeros(0, 3), torch.zeros(0, 3)), "d_head, d_model"),
        (lambda: QK(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)), "floating-point tensor"),
        (lambda: QK([[1.0]], torch.zeros(1, 1)), "w_q must be a floating-point tensor, got list"),
        (lambda: QK.from_joint(torch.zeros(2, 3)), "d_model, d_model"),
        (lambda: QK(torch.full((1, 2), float("nan")), torch.zeros(1, 2)).eigenvalues(), "w_q has NaN"),
    ],
)
def test_factors_that_do_not_fit_are_refused(call, says):
    with pytest.raises(LocaterError, match=says):
        call()
