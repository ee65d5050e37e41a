# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""Entropy, largest logit and logsumexp of every query in one pass over the keys: a Triton kernel.

A program owns a block of queries and keeps three numbers for each, in float32 and in bits (logits times log₂ e):
the maximum m so far, ℓ = Σ 2^(s − m) and w = Σ 2^(s − m) (s − m). When m grows by d, ℓ shrinks by 2^−d and w to
2^−d (w − d ℓ). In the end logsumexp = m + log₂ ℓ and the entropy is log₂ ℓ − w / ℓ, two terms of one sign, which a
sum of p · s, cancelling against the logsumexp, would not be.

Nothing is summed atomically: the same call gives the same bits. Other tiles may not: they are chosen from a table, not
by a clock, unless `tune` is asked to.

Legend: B batch, H query heads, G key heads, TQ queries, TK keys, D head width.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from locater._triton import INTERPRETED, available, jit, on, tl, triton

# one program for all lengths: left to itself, Triton makes another when one of these is 1
_SIZES = ["H", "R", "TQ", "TK", "left", "right"]
_jit_any: Any = jit if triton is None else triton.jit(do_not_specialize=_SIZES)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256
_LOG2_E = math.log2(math.e)


class View(NamedTuple):
    """Which keys are masked and how logits are made; positions are aligned, the last query's is the last key's."""

    scale: float
    left: int | None = None  # how many keys before its own position; None is all
    right: int | None = None  # and after it
    key_mask: Tensor | None = None  # (B, TK) bool: False masks a key for all queries
    softcap: float | None = None
    slopes: Tensor | None = None  # (H,): a logit falls by slope · |distance|
    sinks: Tensor | None = None  # (H,): a logit without a key


def applies(q: Tensor, k: Tensor, view: View) -> bool:
    """Whether the kernel takes these; a scale below 0 would make minima of its maxima."""
    return q.dtype == k.dtype and q.dtype in _DTYPES and q.shape[3] <= _WIDEST and view.scale >= 0 and available(q)


# ---------------------------------------------------------------------- the pass


@jit
@no_type_check
def _tanh(x):
    """To float32's precision also where x is small, so that a high cap leaves small logits as they are."""
    square = x * x
    series = -17 / 315 + square * (62 / 2835)
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * series)))
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # −2 log₂ e
    ratio = (1 - e) / (1 + e)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -ratio, ratio))


@jit
@no_type_check
def _keys(pointers, columns, ds, TK, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKS: tl.constexpr):
    if MASKS:
        keys = tl.load(pointers, mask=(columns < TK)[:, None] & (ds < D)[None, :], other=0.0)
    elif D != BLOCK_D:
        keys = tl.load(pointers, mask=(ds < D)[None, :], other=0.0)
    else:
        keys = tl.load(pointers)
    return keys


@jit
@no_type_check
def _absorb(
    m, total, weighted, queries, there, positions, slope, k, k_table, key_mask, b, g, start, stop, TK, k_t, unit, inner,
    left, right, MASKS: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
    MASKED: tl.constexpr, TABLE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """m, ℓ and w after the keys from start to stop; where not MASKS, none is masked for any query.

    `queries` are a block's values (BLOCK_Q, BLOCK_D), or the addresses of its first SLICE columns if SLICE < BLOCK_D.
    """
    ds, each = tl.arange(0, SLICE), tl.arange(0, BLOCK_K)
    within, stride = each[:, None] * k_t + ds[None, :], tl.cast(k_t, tl.int64)
    for column in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        columns = column + each
        if TABLE:
            keys = k_table.load([b, g, column, 0]).reshape(BLOCK_K, BLOCK_D)
            s = tl.dot(queries, tl.trans(keys.to(OPERAND)), input_precision=PRECISION)
        elif SLICE == BLOCK_D:
            keys = _keys(k + column * stride + within, columns, ds, TK, D, BLOCK_D, MASKS)
            s = tl.dot(queries, tl.trans(keys.to(OPERAND)), input_precision=PRECISION)
        else:
            s = tl.zeros((queries.shape[0], BLOCK_K), tl.float32)
            for d in tl.static_range(0, BLOCK_D, SLICE):
                some = tl.load(queries + d, mask=there & (ds + d < D)[None, :], other=0.0).to(OPERAND)
                keys = _keys(k + column * stride + within + d, columns, ds + d, TK, D, BLOCK_D, MASKS)
                s = tl.dot(some, tl.trans(keys.to(OPERAND)), s, input_precision=PRECISION)
        if CAPPED:
            s = _tanh(s * inner)
        if MASKS or SLOPED:
            s *= unit
            if SLOPED:
                s -= slope * tl.abs(positions[:, None] - columns[None, :]).to(tl.float32)
            if MASKS:
                unmasked = (columns < TK)[None, :]
                if MASKED:
                    unmasked &= (tl.load(key_mask + columns, mask=columns < TK, other=0) != 0)[None, :]
                if LEFT:
                    unmasked &= columns[None, :] >= positions[:, None] - left
                if RIGHT:
                    unmasked &= columns[None, :] <= positions[:, None] + right
                s = tl.where(unmasked, s, -1e38)  # finite, for 0 · −∞ is not 0, and far below the first m
            new = tl.maximum(m, tl.max(s, 1))
            s -= new[:, None]
        else:
            new = tl.maximum(m, tl.max(s, 1) * unit)
            s = tl.fma(s, unit, tl.broadcast_to(-new[:, None], s.shape))
        p = tl.exp2(s)
        growth = m - new
        shrink = tl.exp2(growth)
        weighted = (weighted + growth * total) * shrink + tl.sum(p * s, 1)
        total = total * shrink + tl.sum(p, 1)
        m = new
    return m, total, weighted


@_jit_any
@no_type_check
def _rows_kernel(
    q, k, k_table, key_mask, slopes, sinks, entropy, top, lse, H, R, TQ, TK, q_b, q_h, q_t, k_b, k_g, k_t, mask_b,
    unit, inner, left, right, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
    MASKED: tl.constexpr, SINKS: tl.constexpr, TABLE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; entropy, top and lse are (B, H, TQ).

    A logit in bits is unit · s, or unit · tanh(inner · s) if CAPPED; slopes and sinks are in bits too, k_table a
    descriptor of k.
    """
    ln_2: tl.constexpr = 0.6931471805599453
    pid, blocks = tl.program_id(0), tl.cdiv(TQ, BLOCK_Q)
    # blocks of a head are neighbours, which share its keys in the cache; its last has most unmasked keys and goes first
    block, head = blocks - 1 - pid % blocks, pid // blocks
    b, h = head // H, head % H
    g = h // R
    rows, ds = block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, SLICE)
    positions = rows + (TK - TQ)
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    k += b.to(tl.int64) * k_b + g.to(tl.int64) * k_g
    there = (rows < TQ)[:, None]
    queries = q + rows.to(tl.int64)[:, None] * q_t + ds[None, :]
    if SLICE == BLOCK_D:
        queries = tl.load(queries, mask=there & (ds < D)[None, :], other=0.0).to(OPERAND)
    slope = 0.0
    if SLOPED:
        slope = tl.load(slopes + h)
    if MASKED:
        key_mask += b.to(tl.int64) * mask_b
    # keys from low to high are unmasked for some query of the block, blocks from whole_low to whole_high for all
    first = block * BLOCK_Q + TK - TQ
    last = tl.minimum(block * BLOCK_Q + BLOCK_Q, TQ) - 1 + TK - TQ
    low, high, whole_low, whole_high = 0, TK, 0, TK // BLOCK_K * BLOCK_K
    if LEFT:
        low = tl.maximum(first - left, 0) // BLOCK_K * BLOCK_K
        whole_low = tl.cdiv(tl.maximum(last - left, 0), BLOCK_K) * BLOCK_K
    if RIGHT:
        high = tl.minimum(last + right + 1, TK)
        whole_high = tl.minimum(first + right + 1, TK) // BLOCK_K * BLOCK_K
    m = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total, weighted = tl.zeros((BLOCK_Q,), tl.float32), tl.zeros((BLOCK_Q,), tl.float32)
    if SINKS:  # as if it were the first key
        sink = tl.load(sinks + h)
        m = tl.where(sink == float("-inf"), m, sink)
        total = tl.where(sink == float("-inf"), total, 1.0)
    for part in tl.static_range(3):  # before the whole blocks, those, and after them; with a mask none is whole
        start, stop = whole_low, whole_high
        if part == 0:
            start, stop = low, tl.minimum(whole_low, high)
        if part == 2:
            start, stop = tl.maximum(whole_low, whole_high), high
            if MASKED:
                start = low
        if (part == 2 or not MASKED) and (part > 0 or LEFT):
            m, total, weighted = _absorb(
                m, total, weighted, queries, there, positions, slope, k, k_table, key_mask, b, g, start, stop, TK, k_t,
                unit, inner, left, right, part != 1, D, BLOCK_K, BLOCK_D, SLICE, LEFT, RIGHT, CAPPED, SLOPED, MASKED,
                TABLE, OPERAND, PRECISION, STAGES,
            )  # fmt: skip
    attends = total != 0  # also where it is NaN
    total, m = tl.where(attends, total, 1.0), tl.where(total == total, m, total)
    bits, out = tl.log2(total), head.to(tl.int64) * TQ + rows
    tl.store(entropy + out, (bits - weighted / total) * ln_2, mask=rows < TQ)
    tl.store(top + out, tl.where(attends, m * ln_2, float("-inf")), mask=rows < TQ)
    tl.store(lse + out, tl.where(attends, (m + bits) * ln_2, float("-inf")), mask=rows < TQ)


# ---------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tiles:
    """How the work is divided; the last bits of the sums depend on it."""

    rows: int  # queries that a program owns
    columns: int  # keys that it takes at a time
    warps: int
    stages: int  # of the pipeline that brings the keys
    descriptors: bool = False  # copies by the tensor memory accelerator (Hopper), where addresses allow it
    registers: int | None = None  # a thread, at most
    slice: int | None = None  # of the width that is multiplied at a time; None is all


def candidates(dtype: torch.dtype, width: int) -> list[Tiles]:
    """Tiles worth trying on an H200; the first that fits the device is used unless `tune` found another.

    At a width of 64 the exponentials of a tile take twice as long as its product, and a program's own do not overlap:
    most tiles leave room for two programs or more on a multiprocessor, so that one multiplies while the other does not.
    """
    if dtype == torch.float32:  # no tensor cores; operands pass through registers, and whole ones would spill
        tiles = [Tiles(64, 64, 8, 2, slice=16), Tiles(64, 32, 4, 2, slice=16), Tiles(32, 32, 4, 1, slice=16)]
        return tiles if width > 128 else [Tiles(64, 64, 4, 2, slice=16), Tiles(128, 64, 8, 2, slice=16), *tiles]
    if width > 128:
        return [
            Tiles(128, 64, 8, 2),
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 2, descriptors=True),
            Tiles(128, 32, 8, 3),
            Tiles(64, 32, 4, 2),
        ]
    return [
        Tiles(128, 64, 4, 3),
        Tiles(128, 64, 4, 3, descriptors=True),
        Tiles(128, 64, 8, 3),
        Tiles(128, 128, 8, 3),
        Tiles(128, 128, 8, 3, descriptors=True),
        Tiles(64, 128, 4, 3),
        Tiles(64, 64, 4, 4),
        Tiles(256, 64, 8, 3),
    ]


_TUNED: dict[tuple[Any, ...], Tiles] = {}


def row_statistics(q: Tensor, k: Tensor, view: View, *, tiles: Tiles | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, largest logit and logsumexp (B, H, TQ) in float32, of q (B, H, TQ, D) and k (B, G, TK, D).

    Rows whose keys are all masked have 0, −∞ and −∞. What `applies` refuses must not come here.
    """
    entropy, top, lse = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(3))
    tiles = tiles or _TUNED.get(_kind(q, view))
    if tiles is not None:
        _launch(q, k, view, entropy, top, lse, tiles)
        return entropy, top, lse
    *most, smallest = candidates(q.dtype, q.shape[3])
    for tiles in most:  # smaller GPUs have less shared memory
        with suppress(triton.OutOfResources):
            _launch(q, k, view, entropy, top, lse, tiles)
            return entropy, top, lse
    _launch(q, k, view, entropy, top, lse, smallest)
    return entropy, top, lse


def tune(q: Tensor, k: Tensor, view: View) -> dict[Tiles, float]:
    """Milliseconds that `row_statistics` takes with each of the `candidates` that fit the device.

    The fastest is used from then on for this dtype, width and kind of view. Compiles, waits for the device.
    """
    times = {}
    for tiles in candidates(q.dtype, q.shape[3]):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
        with suppress(triton.OutOfResources):
            for mark in marks:
                mark.record(torch.cuda.current_stream(q.device))
                row_statistics(q, k, view, tiles=tiles)
            torch.cuda.synchronize(q.device)
            # the first compiles, the second warms up
            times[tiles] = sorted(start.elapsed_time(end) for start, end in pairwise(marks[2:]))[2]
    _TUNED[_kind(q, view)] = min(times, key=times.__getitem__)
    return times


def _kind(q: Tensor, view: View) -> tuple[Any, ...]:
    return q.device, q.dtype, q.shape[3], view.key_mask is None, view.softcap is None, view.slopes is None


def _launch(q: Tensor, k: Tensor, view: View, entropy: Tensor, top: Tensor, lse: Tensor, tiles: Tiles) -> None:
    (batch, heads, tq, width), groups, tk = q.shape, k.shape[1], k.shape[2]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    mask, cap = view.key_mask, view.softcap
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
    block_d = max(16, 1 << (width - 1).bit_length())
    table = _descriptor(k, [1, 1, tiles.columns, block_d]) if tiles.descriptors and block_d == width else None
    slopes, sinks = (
        None if each is None else (each.float() * _LOG2_E).contiguous() for each in (view.slopes, view.sinks)
    )
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    if tiles.registers is not None:
        options["maxnreg"] = tiles.registers
    with on(q):
        _rows_kernel[(-(-tq // tiles.rows) * batch * heads,)](
            q, k, table, mask, slopes, sinks, entropy, top, lse, heads, heads // groups, tq, tk, *q.stride()[:3],
            *k.stride()[:3], 0 if mask is None else mask.stride(0),
            (view.scale if cap is None else cap) * _LOG2_E, 0.0 if cap is None else view.scale / cap,
            view.left or 0, view.right or 0,
            D=width, BLOCK_Q=tiles.rows, BLOCK_K=tiles.columns, BLOCK_D=block_d,
            SLICE=min(block_d, tiles.slice or block_d),
            LEFT=view.left is not None, RIGHT=view.right is not None, CAPPED=cap is not None,
            SLOPED=slopes is not None, MASKED=mask is not None, SINKS=sinks is not None, TABLE=table is not None,
            # the interpreter would multiply the bits of bfloat16
            OPERAND=tl.float32 if INTERPRETED else getattr(tl, str(q.dtype).removeprefix("torch.")),
            PRECISION="ieee", STAGES=tiles.stages, **options,
        )  # fmt: skip


def _descriptor(tensor: Tensor, block: list[int]) -> Any:
    """For the tensor memory accelerator, or None where its addresses are not multiples of 16 bytes."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    if any(address % 16 or not address for address in (tensor.data_ptr(), *strides)) or not (
        INTERPRETED or torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    ):
        return None
    table: Any = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return table(tensor, list(tensor.shape), list(tensor.stride()), block)
