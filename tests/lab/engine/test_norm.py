"""The fused end of a residual branch against PyTorch's own operations; in Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from interpreter import DEVICE
from locater.lab.engine import _kernels
from locater.lab.engine._norm import add_norm
from locater.lab.engine._random import keep_mask, site_key


@pytest.mark.parametrize("both", [True, False])  # whether the sum is used beside what is normed
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("tokens", "width"), [(37, 32), (130, 20), (5, 128), (1, 7)])
@pytest.mark.parametrize("kernel", [True, False])
def test_values_and_gradients_are_those_of_plain_operations_in_float64(kernel, tokens, width, rate, both, request):
    if kernel:
        request.getfixturevalue("kernels")
    generator = torch.Generator().manual_seed(0)
    members = 3

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_()

    flat = draw(members, 4 * width)  # the parameters are views of a row, as in a stack
    bias, weight, shift, _ = flat.unflatten(1, (4, width)).unbind(1)
    branch, residual = draw(members, tokens, width), draw(members, tokens, width)
    key = site_key(torch.arange(members, device=DEVICE), 5, 2) if rate else None
    assert _kernels.available(branch) or not kernel
    total, normed = add_norm(branch, bias, residual, weight, shift, key, rate)
    up = [torch.randn(total.shape, generator=generator).to(DEVICE) for _ in range(2)]
    wanted = (branch, flat, residual)
    found = torch.autograd.grad((normed * up[0]).sum() + both * (total * up[1]).sum(), wanted)

    wide = [t.detach().double().requires_grad_() for t in wanted]
    b, w, s, _ = wide[1].unflatten(1, (4, width)).unbind(1)
    dropped = wide[0] + b[:, None]
    if key is not None:
        dropped = dropped * keep_mask(key, tokens * width, rate).view(dropped.shape) / (1 - rate)
    expected_total = wide[2] + dropped
    expected = functional.layer_norm(expected_total, (width,)) * w[:, None] + s[:, None]
    gradients = torch.autograd.grad((expected * up[0]).sum() + both * (expected_total * up[1]).sum(), wide)
    torch.testing.assert_close(total.double(), expected_total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)
