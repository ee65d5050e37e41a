# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""W ← new · W + was · old by heads, in place, in one pass; a head that stays as it is is not read.

Legend: G key heads, R query heads for each (1 of keys), K head width, D model width.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from locater._triton import available, ceil, jit, on, tl

_BLOCK = 2048


@jit
@no_type_check
def _mix_kernel(
    weight, old, new, was, R, INNER, SIZE, w_g, w_r, w_outer, w_inner, o_g, o_r, o_outer, o_inner, n_g, n_r, s_g, s_r,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one head, along the dimension that lies together."""
    head = tl.program_id(0)
    g, r = head // R, head % R
    a, b = tl.load(new + g * n_g + r * n_r).to(tl.float32), tl.load(was + g * s_g + r * s_r).to(tl.float32)
    if (a != 1.0) | (b != 0.0):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        outer, inner, mask = at // INNER, at % INNER, at < SIZE
        here = weight + g.to(tl.int64) * w_g + r * w_r + outer * w_outer + inner * w_inner
        there = old + g.to(tl.int64) * o_g + r * o_r + outer * o_outer + inner * o_inner
        mixed = a * tl.load(here, mask=mask).to(tl.float32) + b * tl.load(there, mask=mask).to(tl.float32)
        mixed = tl.where(a == 0.0, b * tl.load(there, mask=mask).to(tl.float32), mixed)  # W may not be finite
        tl.store(here, mixed.to(weight.dtype.element_ty), mask=mask)


def mix_(view: Tensor, old: Tensor, new: Tensor, was: Tensor) -> bool:
    """Of a weight (G, R, K, D) and factors (G, R); False where kernels do not run, and nothing is done."""
    if not available(view) or view.dtype == torch.float64 or view.dtype != old.dtype:
        return False
    g, r, k, d = view.shape
    transposed = view.stride(2) < view.stride(3)
    inner = k if transposed else d

    def strides(x: Tensor) -> tuple[int, ...]:
        outer, within = (x.stride(3), x.stride(2)) if transposed else (x.stride(2), x.stride(3))
        return x.stride(0), x.stride(1), outer, within

    new, was = new.expand(g, r), was.expand(g, r)
    with on(view):
        _mix_kernel[(g * r, ceil(k * d, _BLOCK))](
            view, old, new, was, r, inner, k * d, *strides(view), *strides(old), *new.stride(), *was.stride(),
            BLOCK=_BLOCK,
        )  # fmt: skip
    return True
