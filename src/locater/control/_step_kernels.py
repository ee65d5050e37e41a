# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""A bounded step of the optimizer in three Triton kernels, each one launch for all modules of one shape.

`project` multiplies a sample of states with weights where they are stored, and copies these in the same pass; `moments`
compares the logits of two such products, which it does not write; `mix_` writes what the rule makes of the step, and
does not read heads that stay as they are. They find weights through a table of addresses.

Legend: S modules, G key heads, R query heads for each (1 of keys), H = G·R, B sequences of a sample, n tokens of each,
N = B·n, K head width, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from torch import Tensor

from locater._triton import available, ceil, jit, on, tl
from locater.control._kernels import FULL_PRECISION, address, tile

__all__ = ["addresses", "mix_", "mixes", "moments", "project", "transposed"]

_MIX_BLOCK = 2048


@jit
@no_type_check
def _project_kernel(
    table, states, copy, out, H, R, TOKENS, D, w_g, w_r, w_k, w_d, c_k, c_d,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHT: tl.constexpr,
    COPIED: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (S, H, TOKENS, K) = states (S, TOKENS, D) @ Wᵀ of BLOCK_K rows of one head; their copy (S, H, K, D)."""
    s, h = tl.program_id(0) // H, tl.program_id(0) % H
    rows, tokens = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    weight = address(table, s, WEIGHT, ALIGNED) + (h // R) * w_g + (h % R) * w_r
    head = tl.program_id(0).to(tl.int64)
    states += s.to(tl.int64) * TOKENS * D
    copy += head * K * D
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        ds = d + tl.arange(0, BLOCK_D)
        w = tile(weight, rows, ds, w_k, w_d, K, D)
        if COPIED:
            there = copy + rows[:, None] * c_k + ds[None, :] * c_d
            tl.store(there, w, mask=(rows[:, None] < K) & (ds[None, :] < D))
        x = tile(states, tokens, ds, D, 1, TOKENS, D)
        total = tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision=PRECISION)
    out += head * TOKENS * K + tokens[:, None] * K + rows[None, :]
    tl.store(out, total, mask=(tokens[:, None] < TOKENS) & (rows[None, :] < K))


@jit
@no_type_check
def _rotated_product(
    q, k, cos, sin, n, K: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q·k (n, n) of rows (n, K) that are rotated first, pair by pair; coordinates beyond the pairs pass."""
    tokens = tl.arange(0, BLOCK_T)
    product = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    by: tl.constexpr = 2 if INTERLEAVED else 1
    other: tl.constexpr = 1 if INTERLEAVED else PAIRS
    for start in range(0, PAIRS, BLOCK_P):
        pairs = start + tl.arange(0, BLOCK_P)
        c, s = tile(cos, tokens, pairs, PAIRS, 1, n, PAIRS), tile(sin, tokens, pairs, PAIRS, 1, n, PAIRS)
        q_a, q_b = tile(q, tokens, pairs, K, by, n, PAIRS), tile(q + other, tokens, pairs, K, by, n, PAIRS)
        k_a, k_b = tile(k, tokens, pairs, K, by, n, PAIRS), tile(k + other, tokens, pairs, K, by, n, PAIRS)
        product = tl.dot(q_a * c - q_b * s, tl.trans(k_a * c - k_b * s), product, input_precision=PRECISION)
        product = tl.dot(q_b * c + q_a * s, tl.trans(k_b * c + k_a * s), product, input_precision=PRECISION)
    for start in range(2 * PAIRS, K, BLOCK_P):
        passed = start + tl.arange(0, BLOCK_P)
        q_c, k_c = tile(q, tokens, passed, K, 1, n, K), tile(k, tokens, passed, K, 1, n, K)
        product = tl.dot(q_c, tl.trans(k_c), product, input_precision=PRECISION)
    return product


@jit
@no_type_check
def _moments_kernel(
    q_old, k_old, q_new, k_new, cos, sin, out, scale, R, B, n,
    K: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`rules.decoupled.logit_moments` of one query head, from its rows and its key's (B, n, K)."""
    head = tl.program_id(0).to(tl.int64)
    q_old, q_new = q_old + head * B * n * K, q_new + head * B * n * K
    k_old, k_new = k_old + head // R * B * n * K, k_new + head // R * B * n * K
    tokens = tl.arange(0, BLOCK_T)
    seen = (tokens[:, None] >= tokens[None, :]) & (tokens[:, None] < n)
    count = (tokens + 1).to(tl.float32)[:, None]
    squares = tl.zeros((BLOCK_T,), tl.float32)
    crosses, changes = squares, squares
    for b in range(B):
        at = b * n * K
        before = scale * _rotated_product(
            q_old + at, k_old + at, cos, sin, n, K, PAIRS, INTERLEAVED, BLOCK_T, BLOCK_P, PRECISION
        )
        after = scale * _rotated_product(
            q_new + at, k_new + at, cos, sin, n, K, PAIRS, INTERLEAVED, BLOCK_T, BLOCK_P, PRECISION
        )
        old, change = tl.where(seen, before, 0.0), tl.where(seen, after - before, 0.0)
        old = tl.where(seen, old - tl.sum(old, 1)[:, None] / count, 0.0)
        change = tl.where(seen, change - tl.sum(change, 1)[:, None] / count, 0.0)
        squares += tl.sum(old * old, 1)
        crosses += tl.sum(old * change, 1)
        changes += tl.sum(change * change, 1)
    total = B * (n * (n + 1) // 2 - 1)  # the first query has one key
    tl.store(out + head * 3, tl.sum(squares, 0) / total)
    tl.store(out + head * 3 + 1, tl.sum(crosses, 0) / total)
    tl.store(out + head * 3 + 2, tl.sum(changes, 0) / total)


@jit
@no_type_check
def _mix_kernel(
    table, old, new, was, H, R, INNER, SIZE, w_g, w_r, w_outer, w_inner, n_s, n_g, n_r, o_s, o_g, o_r,
    WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one head, along the dimension that lies together, as it does in the copy."""
    s, h = tl.program_id(0) // H, tl.program_id(0) % H
    g, r = h // R, h % R
    a = tl.load(new + s * n_s + g * n_g + r * n_r).to(tl.float32)
    b = tl.load(was + s * o_s + g * o_g + r * o_r).to(tl.float32)
    if (a != 1.0) | (b != 0.0):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < SIZE
        weight = address(table, s, WEIGHT, ALIGNED) + g * w_g + r * w_r
        here = weight + at // INNER * w_outer + at % INNER * w_inner
        before = b * tl.load(old + tl.program_id(0).to(tl.int64) * SIZE + at, mask=mask).to(tl.float32)
        mixed = a * tl.load(here, mask=mask).to(tl.float32) + before
        mixed = tl.where(a == 0.0, before, mixed)  # W may not be finite
        tl.store(here, mixed.to(WEIGHT), mask=mask)


def addresses(views: Sequence[Tensor]) -> Tensor:
    """The table of addresses (S,) of tensors that are alike but for their memory."""
    where = [view.data_ptr() for view in views]
    return torch.tensor(where, pin_memory=views[0].is_cuda).to(views[0].device, non_blocking=True)


def project(table: Tensor, views: Sequence[Tensor], states: Tensor, *, copied: bool) -> tuple[Tensor, Tensor | None]:
    """(S, G, R, B, n, K) in float32 of weights (G, R, K, D) and states (S, B, n, D); and a copy of the weights.

    The copy lies as `mix_` takes it: head by head, (K, D) or (D, K), as the weights are.
    """
    view, (_, b, n, d) = views[0], states.shape
    g, r, k, _ = view.shape
    out = torch.empty(len(views), g, r, b, n, k, dtype=torch.float32, device=view.device)
    copy = torch.empty((len(views) if copied else 0, g, r, k, d), dtype=view.dtype, device=view.device)
    block_k = min(128, max(16, 1 << (k - 1).bit_length()))
    with on(view):
        _project_kernel[(len(views) * g * r, ceil(k, block_k))](
            table, states, copy, out, g * r, r, b * n, d, *view.stride(), *((1, k) if transposed(view) else (d, 1)),
            K=k, BLOCK_N=max(16, 1 << (b * n - 1).bit_length()), BLOCK_K=block_k, BLOCK_D=64, COPIED=copied,
            PRECISION=FULL_PRECISION, STAGES=3, num_warps=8, **_kind(views),
        )  # fmt: skip
    return out, copy if copied else None


def moments(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    scale: float,
    rotation: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> Tensor:
    """`rules.decoupled.logit_moments` (S, G, R, 3) of rows (S, G, R or 1, B, n, K) of queries and keys, which
    `rotation`, cosines and sines (n, pairs), rotates."""
    s, g, r, b, n, k = old[0].shape
    if n < 2:
        return old[0].new_full((s, g, r, 3), torch.nan)
    out = old[0].new_empty(s, g, r, 3)
    cos, sin = (x.contiguous() for x in rotation) if rotation is not None else (out, out)
    pairs = 0 if rotation is None else cos.shape[-1]
    with on(out):
        _moments_kernel[(s * g * r,)](
            *(x.contiguous() for x in (*old, *new)), cos, sin, out, float(scale), r, b, n,
            K=k, PAIRS=pairs, INTERLEAVED=interleaved, BLOCK_T=max(16, 1 << (n - 1).bit_length()), BLOCK_P=32,
            PRECISION=FULL_PRECISION,
        )  # fmt: skip
    return out


def mixes(views: Sequence[Tensor]) -> bool:
    """Whether `mix_` can take these (G, R, K, D); looks at no values."""
    first = views[0]
    kind = first.shape, first.stride(), first.dtype, first.device
    alike = all((x.shape, x.stride(), x.dtype, x.device) == kind for x in views)
    extent = sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    known = first.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return alike and known and extent < 1 << 31 and available(first)  # offsets have 32 bits


def mix_(table: Tensor, views: Sequence[Tensor], old: Tensor, new: Tensor, was: Tensor) -> None:
    """W ← new · W + was · old by heads, in place: weights (G, R, K, D), factors (S, G, R or 1), and `old` as `project`
    copies weights."""
    view = views[0]
    g, r, k, d = view.shape
    w_g, w_r, w_k, w_d = view.stride()
    inner, strides = (k, (w_d, w_k)) if transposed(view) else (d, (w_k, w_d))
    new, was = (x.expand(len(views), g, r) for x in (new, was))
    with on(view):
        _mix_kernel[(len(views) * g * r, ceil(k * d, _MIX_BLOCK))](
            table, old, new, was, g * r, r, inner, k * d, w_g, w_r, *strides, *new.stride(), *was.stride(),
            BLOCK=_MIX_BLOCK, **_kind(views),
        )  # fmt: skip


def transposed(view: Tensor) -> bool:
    """Whether the coordinates of a head lie together, rather than those of a state."""
    return view.stride(2) < view.stride(3)


def _kind(views: Sequence[Tensor]) -> dict[str, Any]:
    kind = getattr(tl, str(views[0].dtype).removeprefix("torch."))
    return {"WEIGHT": kind, "ALIGNED": all(view.data_ptr() % 16 == 0 for view in views)}
