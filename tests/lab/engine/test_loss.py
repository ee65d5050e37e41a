"""The fused cross-entropy against PyTorch's, in float64."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from interpreter import DEVICE, runs
from locater.lab.engine import loss as lab_loss
from locater.lab.engine.loss import _AllLogits, _Chunks, _Kernels, loss_and_gradient, losses


def reference(x, table, targets, weights):
    x, table = x.double().requires_grad_(), table.double().requires_grad_()
    logits = x @ table.mT
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    gradients = torch.autograd.grad((each * weights).sum(), (x, table))
    return each.detach(), *gradients


@given(
    members=st.integers(1, 3),
    tokens=st.integers(1, 9),
    width=st.integers(1, 6),
    words=st.integers(2, 11),
    spread=st.floats(0.01, 6),
    chunk=st.integers(1, 400),
)
def test_losses_and_gradients_are_pytorchs(members, tokens, width, words, spread, chunk):
    torch.manual_seed(tokens * words)
    x, table = spread * torch.randn(members, tokens, width), spread * torch.randn(members, words, width)
    targets, weights = torch.randint(words, (members, tokens)), torch.rand(members, tokens)
    each, dx, dtable = reference(x, table, targets, weights)
    before, lab_loss._CHUNK_BYTES = lab_loss._CHUNK_BYTES, chunk
    try:
        found = loss_and_gradient(x, table, targets, weights)
        without_gradient = losses(x, table, targets)
    finally:
        lab_loss._CHUNK_BYTES = before
    within = each < 70  # beyond, the cap holds
    torch.testing.assert_close(found.losses.double()[within], each[within], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(without_gradient.double(), each, rtol=1e-4, atol=1e-4)
    if within.all():
        torch.testing.assert_close(found.x.double(), dx, rtol=1e-3, atol=1e-4 * spread)
        torch.testing.assert_close(found.table.double(), dtable, rtol=1e-3, atol=1e-4 * spread)


def test_a_hopeless_token_gives_a_large_finite_loss_and_gradient():
    x, table = torch.full((1, 1, 1), 300.0), torch.tensor([[[1.0], [-1.0]]])
    found = loss_and_gradient(x, table, torch.tensor([[1]]), torch.ones(1, 1))
    assert found.losses.item() == pytest.approx(75, abs=1e-3)
    assert found.x.isfinite().all()
    assert found.x.item() == pytest.approx(2.0, rel=1e-3)


def test_a_model_that_has_diverged_is_told_its_true_loss():
    x, table = torch.full((1, 1, 1), 300.0), torch.tensor([[[1.0], [-1.0]]])
    assert losses(x, table, torch.tensor([[1]])).item() == pytest.approx(600)


def test_float16_carries_the_loss_of_an_untrained_model():
    """Its exponentials do not fit into float16."""
    torch.manual_seed(0)
    x, table = torch.randn(1, 64, 32), torch.randn(1, 30_000, 32) * 32**-0.5
    targets, weights = torch.randint(30_000, (1, 64)), torch.full((1, 64), 1 / 64)
    each, dx, dtable = reference(x.half(), table.half(), targets, weights)
    found = loss_and_gradient(x.half(), table.half(), targets, weights)
    torch.testing.assert_close(found.losses.double(), each, rtol=1e-4, atol=1e-4)
    assert (found.x - dx).norm() < 1e-3 * dx.norm()
    assert (found.table - dtable).norm() < 1e-3 * dtable.norm()


def test_a_token_without_weight_has_no_gradient():
    x, table = torch.randn(1, 4, 3), torch.randn(1, 5, 3)
    weights = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    found = loss_and_gradient(x, table, torch.randint(5, (1, 4)), weights)
    assert (found.x[0, [1, 3]] == 0).all()
    rest = loss_and_gradient(x[:, [0, 2]], table, torch.randint(5, (1, 2)), weights[:, [0, 2]])
    assert rest.table.shape == found.table.shape


@given(members=st.integers(1, 4), tokens=st.integers(1, 9), words=st.integers(2, 11), room=st.integers(1, 2000))
def test_few_words_have_their_losses_and_gradients_by_a_softmax_of_members_at_once(members, tokens, words, room):
    torch.manual_seed(tokens * words)
    x, table = torch.randn(members, tokens, 5), torch.randn(members, words, 5)
    targets, weights = torch.randint(words, (members, tokens)), torch.rand(members, tokens)
    each, dx, dtable = reference(x, table, targets, weights)
    with patch.object(lab_loss, "_algorithm", _AllLogits), patch.object(lab_loss, "_KEPT_BYTES", room):
        found = loss_and_gradient(x, table, targets, weights)
        without_gradient = losses(x, table, targets)
    for a, b in ((found.losses, each), (without_gradient, each), (found.x, dx), (found.table, dtable)):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@runs
def test_kernels_and_chunks_give_the_same_losses_and_gradients():
    torch.manual_seed(0)
    x, table = (torch.randn(2, n, 32, device=DEVICE).bfloat16() for n in (17, 75))
    targets, weights = torch.randint(75, (2, 17), device=DEVICE), torch.rand(2, 17, device=DEVICE)
    chunks, kernels = (
        algorithm(x.to(dtype), table.to(dtype), targets)
        for algorithm, dtype in ((_Chunks, torch.float32), (_Kernels, torch.bfloat16))
    )
    torch.testing.assert_close(kernels.losses(), chunks.losses(), rtol=1e-4, atol=1e-4)
    one, other = (each.loss_and_gradient(weights, torch.empty(2, 75, 32, device=DEVICE)) for each in (chunks, kernels))
    for a, b in zip(one, other, strict=True):  # the kernels' e is bfloat16: 2^-7 of each product
        assert (a - b).norm() <= 2**-7 * a.norm()
