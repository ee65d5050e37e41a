# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""Exponentials of logits, and their products with the vocabulary's embeddings: the cross-entropy and its gradients.

The cross-entropy is shifted by the target's logit, which a gather and a dot product give beforehand. With
e_nv = exp(s_nv − s_t) the loss is log Σ_v e_nv, and the gradient of the logits is e_nv / Σ_v e_nv − [v = target]: there
is no running maximum and no rescaling, and products with that gradient need no second look at the logits.

Other tiles may give other last bits: they are chosen from a table, not by a clock, unless `tune` is asked to.

Legend: E stacked models, N tokens, V words, D width.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal, no_type_check, overload

import torch
from torch import Tensor

from locater._triton import INTERPRETED, ceil, jit, on, tl, triton
from locater.errors import LocaterError

CAP = 75.0  # of a shifted logit: a sum of a million e^75 is still a float32

_HALF = (torch.bfloat16, torch.float16)


@jit
@no_type_check
def _exp_kernel(
    a, b, b_table, shift, z, y, out, out_table, A, B, a_e, a_r, b_e, b_r, y_e, y_s, y_r, out_e, out_r, parts, steps,
    D: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of rows of a against `steps` blocks of rows of b, of one member: e = exp(a bᵀ − shift).

    a (E, A, D), b (E, B, D); z (E, parts, A) is Σ e over b's rows, y (E, parts, A, D) Σ e b, out (E, A, B) e itself.
    What is None is not wanted. shift is (E, A), or (E, B) where z is None. A table is a descriptor of b or out, for
    copies that the tensor memory accelerator makes by itself.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    largest: tl.constexpr = 75 * log2_e  # CAP
    pid, blocks = tl.program_id(0), tl.cdiv(A, BLOCK_A)
    # neighbours read the same part of b: from the cache, all but the first
    block, part, e = pid % blocks, pid // blocks % parts, pid // (blocks * parts)
    member = e.to(tl.int64)
    rows, ds = block * BLOCK_A + tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_D)
    there, wide = (rows < A)[:, None], (ds < D)[None, :]
    mine = tl.load(a + member * a_e + rows[:, None] * a_r + ds[None, :], mask=there & wide, other=0.0).to(FIRST)
    if z is not None:
        shifts = (tl.load(shift + member * A + rows, mask=rows < A, other=0.0) * -log2_e)[:, None]
    z_sum = tl.zeros((BLOCK_A,), tl.float32)
    y_sum = tl.zeros((BLOCK_A, BLOCK_D), tl.float32)
    for i in tl.range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(B, BLOCK_B)), num_stages=STAGES):
        columns = i * BLOCK_B + tl.arange(0, BLOCK_B)
        if b_table is not None:
            theirs = b_table.load([e, i * BLOCK_B, 0]).reshape(BLOCK_B, BLOCK_D)
        else:
            theirs = b + member * b_e + columns[:, None] * b_r + ds[None, :]
            theirs = tl.load(theirs, mask=((columns < B)[:, None] & wide) if EDGE else wide, other=0.0)
        if z is None:
            shifts = (tl.load(shift + member * B + columns, mask=columns < B, other=0.0) * -log2_e)[None, :]
        s = tl.dot(mine, tl.trans(theirs.to(FIRST)))
        exponential = tl.exp2(tl.minimum(tl.fma(s, log2_e, tl.broadcast_to(shifts, s.shape)), largest))
        if EDGE:
            exponential = tl.where((columns < B)[None, :], exponential, 0.0)
        if z is not None:
            z_sum += tl.sum(exponential, 1)
        half = exponential.to(tl.bfloat16)  # which has the range of float32
        if out_table is not None:
            out_table.store([e, block * BLOCK_A, i * BLOCK_B], half.reshape(1, BLOCK_A, BLOCK_B))
        elif out is not None:
            to = out + member * out_e + rows[:, None] * out_r + columns[None, :]
            mask = there & (columns < B)[None, :] if EDGE else there
            tl.store(to, half, mask=mask, eviction_policy="evict_first")  # it is larger than the cache
        if y is not None:
            y_sum = tl.dot(half.to(SECOND), theirs.to(tl.bfloat16).to(SECOND), y_sum)
    if z is not None:
        tl.store(z + (member * parts + part) * A + rows, z_sum, mask=rows < A)
    if y is not None:
        to = y + member * y_e + part.to(tl.int64) * y_s + rows[:, None] * y_r + ds[None, :]
        tl.store(to, y_sum, mask=there & wide)


@dataclass(frozen=True)
class Tiles:
    """How `exp_logits` and `weight_gradient` divide the work; the last bits of their sums depend on it."""

    rows: int  # that a program owns: tokens, or words for the gradient
    columns: int  # that it takes at a time: words, or tokens for the gradient
    warps: int
    stages: int  # of the pipeline that brings the columns
    parts: int | None = 1  # programs that share the columns of a block of rows; None is one for each tile
    descriptors: bool = False  # copies by the tensor memory accelerator (Hopper), where addresses allow it
    registers: int | None = None  # a thread, at most


def candidates(width: int, *, product: bool, store: bool) -> list[Tiles]:
    """Tiles worth trying on an H200; the first is what is used unless `tune` found another.

    Products of one program do not overlap with its own exponentials, which take nearly as long when the width is 128:
    most tiles leave room for two programs on a multiprocessor, so that one multiplies while the other does not.
    """
    if width > 64 and product:
        stages = 2 if store else 3
        return [
            Tiles(64, 64, 4, 3, descriptors=True),
            Tiles(128, 64, 8, stages, registers=128),
            Tiles(128, 64, 8, stages, registers=128, descriptors=True),
            Tiles(128, 64, 8, stages, registers=128, descriptors=True, parts=2),
            Tiles(128, 128, 8, stages),
            Tiles(128, 128, 8, 2, descriptors=True),
            Tiles(128, 64, 4, stages, descriptors=True),
            Tiles(64, 128, 4, 2, descriptors=True),
        ]
    if product:
        return [
            Tiles(64, 128, 4, 3, descriptors=True),
            Tiles(128, 64, 4, 3),
            Tiles(128, 64, 4, 3, descriptors=True),
            Tiles(128, 64, 8, 3, descriptors=True),
            Tiles(128, 128, 8, 3, registers=128, descriptors=True),
            Tiles(64, 64, 4, 4),
        ]
    tiles = [
        Tiles(128, 64, 4, 3),
        Tiles(128, 64, 4, 3, descriptors=True),
        Tiles(128, 64, 8, 3, descriptors=True),
        Tiles(128, 128, 8, 2),
        Tiles(128, 128, 8, 2, descriptors=True),
    ]
    if store:  # a grid over both sides, and what lies between
        tiles += [Tiles(128, 128, 8, 1, parts=None), Tiles(128, 64, 4, 3, parts=16, descriptors=True)]
    return tiles


_TUNED: dict[tuple[Any, ...], Tiles] = {}


@overload
def exp_logits(
    x: Tensor, w: Tensor, shift: Tensor, *, out: Tensor | None = None, product: Literal[True] = True,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def exp_logits(
    x: Tensor,
    w: Tensor,
    shift: Tensor,
    *,
    out: Tensor | None = None,
    product: Literal[False],
    tiles: Tiles | None = None,
) -> tuple[Tensor, None]: ...
def exp_logits(
    x: Tensor, w: Tensor, shift: Tensor, *, out: Tensor | None = None, product: bool = True, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor | None]:
    """z_n = Σ_v e_nv and, if `product`, y_n = Σ_v e_nv w_v, in float32, where e_nv = exp(min(x_n·w_v − shift_n, 75)).

    x (E, N, D) and w (E, V, D) in bfloat16 or float16, shift (E, N) in float32; rows of x and w must be contiguous.
    z (E, N) is summed before e is rounded to bfloat16, y (E, N, D) after, as is what `out` (E, N, V) receives.
    float16 words are rounded to bfloat16 for y.
    """
    _check_operands(x, w, shift)
    expected = (*x.shape[:2], w.shape[1])
    if out is not None and (out.shape != expected or out.dtype != torch.bfloat16 or out.stride(2) != 1):
        raise LocaterError(
            f"out must be {expected} in bfloat16 with contiguous rows, got {tuple(out.shape)} in {out.dtype}"
        )
    if out is not None and out.shape[1] * out.stride(1) >= 1 << 31:  # offsets within a member have 32 bits
        raise LocaterError(f"a member of out must have fewer than 2^31 elements, got {out.shape[1]} × {out.stride(1)}")
    z = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device) if product else None
    _exp(x, w, shift, z, y, out, tiles or _tiles(x, z, y, out))
    return z, y


def weight_gradient(
    x: Tensor, w: Tensor, shift: Tensor, *, out: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Σ_n exp(min(x_n·w_v − shift_n, 75)) x_n for each word v, (E, V, D) in float32; the exponentials are made again.

    With shift_n = target's logit + log z_n − log c_n it is the gradient of w, but for the targets' own part, of a loss
    that weighs token n with c_n > 0. Written to `out`, if given, whose rows must be contiguous.
    """
    _check_operands(x, w, shift)
    if out is None:
        out = torch.empty(w.shape, dtype=torch.float32, device=w.device)
    elif out.shape != w.shape or out.dtype != torch.float32 or out.stride(2) != 1:
        raise LocaterError(
            f"out must be {tuple(w.shape)} in float32 with contiguous rows, got {tuple(out.shape)} in {out.dtype}"
        )
    _exp(w, x, shift, None, out, None, tiles or _tiles(x, None, out, None))
    return out


def tune(
    x: Tensor, w: Tensor, shift: Tensor, *, out: Tensor | None = None, product: bool = True, gradient: bool = False
) -> dict[Tiles, float]:
    """Milliseconds that `exp_logits`, or `weight_gradient`, takes with each of the `candidates`.

    The fastest is used from then on for this width and kind of call. Compiles, waits for the device, overwrites `out`.
    """
    _check_operands(x, w, shift)
    a, b = (w, x) if gradient else (x, w)
    z = None if gradient else torch.empty_like(shift)
    y = torch.empty_like(a, dtype=torch.float32) if product or gradient else None
    times = {}
    for tiles in candidates(x.shape[2], product=y is not None, store=out is not None):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
        with suppress(triton.OutOfResources):
            for mark in marks:
                mark.record(torch.cuda.current_stream(x.device))
                _exp(a, b, shift, z, y, out, tiles)
            torch.cuda.synchronize(x.device)
            # the first compiles, the second warms up
            times[tiles] = sorted(start.elapsed_time(end) for start, end in pairwise(marks[2:]))[2]
    _TUNED[_kind(x, z, y, out)] = min(times, key=times.__getitem__)
    return times


def _kind(x: Tensor, z: Tensor | None, y: Tensor | None, out: Tensor | None) -> tuple[Any, ...]:
    return x.device, x.dtype, x.shape[2], z is None, y is None, out is None


def _tiles(x: Tensor, z: Tensor | None, y: Tensor | None, out: Tensor | None) -> Tiles:
    tuned = _TUNED.get(_kind(x, z, y, out))
    return tuned or candidates(x.shape[2], product=y is not None, store=out is not None)[0]


def _check_operands(x: Tensor, w: Tensor, shift: Tensor) -> None:
    if x.ndim != 3 or w.ndim != 3 or x.shape[::2] != w.shape[::2] or shift.shape != x.shape[:2]:
        raise LocaterError(
            "x, w and shift must be (E, N, D), (E, V, D) and (E, N), "
            f"got {tuple(x.shape)}, {tuple(w.shape)} and {tuple(shift.shape)}"
        )
    if x.dtype not in _HALF or w.dtype != x.dtype or shift.dtype != torch.float32:
        raise LocaterError(
            f"x and w must both be bfloat16 or float16 and shift float32, got {x.dtype}, {w.dtype} and {shift.dtype}"
        )
    if x.shape[2] > 128:
        raise LocaterError(f"width must be 128 at most, got {x.shape[2]}")
    if x.stride(2) != 1 or w.stride(2) != 1:
        raise LocaterError(f"rows of x and w must be contiguous, got strides {x.stride()} and {w.stride()}")


def _exp(
    a: Tensor, b: Tensor, shift: Tensor, z: Tensor | None, y: Tensor | None, out: Tensor | None, tiles: Tiles
) -> None:
    """Launches the kernel: shifts belong to the rows of a where their sums z are wanted, else to those of b."""
    (members, rows, width), columns = a.shape, b.shape[1]
    blocks, block_d = ceil(columns, tiles.columns), max(16, 1 << (width - 1).bit_length())
    steps = ceil(blocks, tiles.parts or blocks)
    parts = ceil(blocks, steps)
    # (E, parts, …): what the programs of a block of rows leave, summed in the end
    zs, ys = (None if t is None else _parts(t, parts) for t in (z, y))
    half = getattr(tl, str(a.dtype).removeprefix("torch."))
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    if tiles.registers is not None:
        options["maxnreg"] = tiles.registers
    with on(a):
        _exp_kernel[(ceil(rows, tiles.rows) * parts * members,)](
            a, b, _descriptor(b, [1, tiles.columns, block_d]) if tiles.descriptors and block_d == width else None,
            shift.contiguous(), zs, ys,
            # what it stores ends at a multiple of 16 bytes
            out, _descriptor(out, [1, tiles.rows, tiles.columns])
            if tiles.descriptors and out is not None and columns % 8 == 0 else None,
            rows, columns, *a.stride()[:2], *b.stride()[:2], *((0, 0, 0) if ys is None else ys.stride()[:3]),
            *((0, 0) if out is None else out.stride()[:2]), parts, steps,
            D=width, BLOCK_A=tiles.rows, BLOCK_B=tiles.columns, BLOCK_D=block_d, EDGE=columns % tiles.columns != 0,
            FIRST=tl.float32 if INTERPRETED else half,  # the interpreter would multiply the bits of bfloat16
            SECOND=tl.float32 if INTERPRETED else tl.bfloat16, STAGES=tiles.stages, **options,
        )  # fmt: skip
    if parts > 1:
        for total, some in ((z, zs), (y, ys)):
            if total is not None and some is not None:
                torch.sum(some, 1, out=total)


def _parts(total: Tensor, parts: int) -> Tensor:
    return total[:, None] if parts == 1 else total.new_empty(total.shape[0], parts, *total.shape[1:])


def _descriptor(tensor: Tensor, block: list[int]) -> Any:
    """For the tensor memory accelerator, or None where its addresses are not multiples of 16 bytes."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    if any(address % 16 for address in (tensor.data_ptr(), *strides)) or not (
        INTERPRETED or torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    ):
        return None
    table: Any = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return table(tensor, list(tensor.shape), list(tensor.stride()), block)
