# ruff: noqa: N803, N806  # capitals are the legend's, and Triton's way to mark constants
"""LocAteR's closed-form gradient in two Triton kernels that allocate nothing of a weight's size.

The first reads both factors and leaves their d_head × d_head Gram matrices and the traces; the second reads them
again and adds the gradient in place. Weights and gradients stay where they are: the kernels find them through a table
of addresses, so that all modules of one shape cost two launches.

Legend: S modules, G key heads, R query heads for each, K head width, D model width.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, no_type_check

import torch
from torch import Tensor

__all__ = ["add_gradients_", "supported"]

triton: Any = None
tl: Any = None
try:
    triton, tl = import_module("triton"), import_module("triton.language")
except ImportError:  # optional: `supported` says no
    pass

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_GRAM_BYTES = 32 << 20  # for the Gram matrices of the modules worked on together, split sums included
_PROGRAMS = 264  # of the first kernel: two for each multiprocessor of an H100 or H200
_FULL = "ieee"  # how float32 is multiplied where TF32 is not allowed; "tf32x3" is as exact to 2^-21 on tensor cores

_jit: Any = (lambda function: function) if triton is None else triton.jit


@_jit
@no_type_check
def _address(table, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + index).to(tl.pointer_type(DTYPE))
    # unlike an argument's, the alignment of a loaded address is not known, and vector loads need it
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@_jit
@no_type_check
def _tile(pointer, rows, columns, row_stride, column_stride, height, width):
    offsets = rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(pointer + offsets, mask=(rows[:, None] < height) & (columns[None, :] < width), other=0.0)


@_jit
@no_type_check
def _gram_kernel(
    table, partial, traces, S, first, G, D, splits,
    q_g, q_r, q_k, q_d, k_g, k_k, k_d,
    K: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, STEPS: tl.constexpr, WEIGHT: tl.constexpr, OPERAND: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of D of W_K W_Kᵀ, or of Σ_r W_Q W_Qᵀ and the traces: BLOCK_M of its rows.

    partial (S·G, 2, splits, K, K), the key's Gram matrix first; traces (S·G, R, splits · TILES).
    """
    pid = tl.program_id(0)
    factor = pid % 2  # neighbours: both read the same part of W_K
    m = pid // 2 % TILES
    split = pid // (2 * TILES) % splits
    sg = pid // (2 * TILES * splits)
    s, g = first + sg // G, sg % G

    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    every = tl.arange(0, BLOCK_K)
    start = split * (STEPS * BLOCK_D) + tl.arange(0, BLOCK_D)
    w_k = _address(table, S + s, WEIGHT, ALIGNED) + g * k_g
    gram = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    if factor == 0:
        for i in tl.range(0, STEPS, num_stages=STAGES):
            mine = _tile(w_k, rows, start + i * BLOCK_D, k_k, k_d, K, D).to(OPERAND)
            if TILES == 1:
                whole = mine
            else:
                whole = _tile(w_k, every, start + i * BLOCK_D, k_k, k_d, K, D).to(OPERAND)
            gram = tl.dot(mine, tl.trans(whole), gram, input_precision=PRECISION)
    else:
        w_q = _address(table, s, WEIGHT, ALIGNED) + g * q_g
        for r in range(R):
            trace = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # summed at the end
            for i in tl.range(0, STEPS, num_stages=STAGES):
                mine = _tile(w_q + r * q_r, rows, start + i * BLOCK_D, q_k, q_d, K, D).to(OPERAND)
                key = _tile(w_k, rows, start + i * BLOCK_D, k_k, k_d, K, D)
                if TILES == 1:
                    whole = mine
                else:
                    whole = _tile(w_q + r * q_r, every, start + i * BLOCK_D, q_k, q_d, K, D).to(OPERAND)
                gram = tl.dot(mine, tl.trans(whole), gram, input_precision=PRECISION)
                trace += mine.to(tl.float32) * key.to(tl.float32)
            tl.store(traces + ((sg * R + r) * splits + split) * TILES + m, tl.sum(tl.sum(trace, 1), 0))
    out = partial + ((sg * 2 + factor) * splits + split) * K * K
    mask = (rows[:, None] < K) & (every[None, :] < K)
    tl.store(out + rows[:, None] * K + every[None, :], gram, mask=mask)


@_jit
@no_type_check
def _add_product(
    gradient, g_k, g_d, gram, weight, w_k, w_d, other, o_r, o_k, o_d, traces, parts, scale, mean, target, rows, ds, D,
    OTHERS: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """gradient += scale · gram @ weight + Σ over OTHERS of mean · (trace − target) · other: one tile of it."""
    total = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    for c in tl.range(0, K, BLOCK_C, num_stages=STAGES):
        inner = c + tl.arange(0, BLOCK_C)
        left = _tile(weight, ds, inner, w_d, w_k, D, K).to(tl.float32) * scale
        right = tl.trans(_tile(gram, rows, inner, K, 1, K, K))
        total = tl.dot(left, right, total, input_precision=PRECISION)
    part = tl.arange(0, PARTS)
    for r in range(OTHERS):
        trace = tl.sum(tl.load(traces + r * parts + part, mask=part < parts, other=0.0), 0)
        total += mean * (trace - target) * _tile(other + r * o_r, ds, rows, o_d, o_k, D, K).to(tl.float32)
    at = gradient + ds[:, None] * g_d + rows[None, :] * g_k
    mask = (ds[:, None] < D) & (rows[None, :] < K)
    total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(gradient.dtype.element_ty), mask=mask)


@_jit
@no_type_check
def _update_kernel(
    table, gram, traces, scale, mean, target, S, first, G, D, parts,
    q_g, q_r, q_k, q_d, k_g, k_k, k_d, dq_g, dq_r, dq_k, dq_d, dk_g, dk_k, dk_d,
    K: tl.constexpr, R: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, WEIGHT: tl.constexpr,
    QUERY_GRADIENT: tl.constexpr, KEY_GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, ON_DEVICE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one gradient: of query head r < R, or of the key, which counts as head R."""
    pid = tl.program_id(0)
    head = HEAD + pid % HEADS  # neighbours: the heads of a group read the same part of W_K
    m = pid // HEADS % TILES
    blocks = tl.cdiv(D, BLOCK_D)
    block = pid // (HEADS * TILES) % blocks
    sg = pid // (HEADS * TILES * blocks)
    s, g = first + sg // G, sg % G
    if ON_DEVICE:
        scale = tl.load(scale)
        mean = tl.load(mean)

    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    ds = block * BLOCK_D + tl.arange(0, BLOCK_D)
    w_q = _address(table, s, WEIGHT, ALIGNED) + g * q_g
    w_k = _address(table, S + s, WEIGHT, ALIGNED) + g * k_g
    gram += sg * (2 * K * K)
    traces += sg * R * parts
    if head < R:
        d_q = _address(table, 2 * S + s, QUERY_GRADIENT, ALIGNED) + g * dq_g + head * dq_r
        _add_product(
            d_q, dq_k, dq_d, gram, w_q + head * q_r, q_k, q_d, w_k, 0, k_k, k_d, traces + head * parts, parts,
            scale, mean, target, rows, ds, D, 1, K, BLOCK_M, BLOCK_C, BLOCK_D, PARTS, PRECISION, STAGES,
        )  # fmt: skip
    else:
        d_k = _address(table, 3 * S + s, KEY_GRADIENT, ALIGNED) + g * dk_g
        _add_product(
            d_k, dk_k, dk_d, gram + K * K, w_k, k_k, k_d, w_q, q_r, q_k, q_d, traces, parts,
            scale, mean, target, rows, ds, D, R, K, BLOCK_M, BLOCK_C, BLOCK_D, PARTS, PRECISION, STAGES,
        )  # fmt: skip


def supported(w_q: list[Tensor], w_k: list[Tensor], g_q: list[Tensor] | None, g_k: list[Tensor] | None) -> bool:
    """Whether `add_gradients_` can take these. Costs no more than a look at shapes and strides."""
    lists = [w_q, w_k, *(gradients for gradients in (g_q, g_k) if gradients is not None)]
    if triton is None or not w_q or any(len(tensors) != len(w_q) for tensors in lists):
        return False
    query, key = w_q[0], w_k[0]
    on_device = query.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(query.device) >= (8, 0)
    if query.ndim != 4 or not (on_device or _INTERPRETED):
        return False
    groups, _, k, d = query.shape
    return (
        16 <= k <= 256
        and d >= 16
        and key.shape == (groups, 1, k, d)
        and query.dtype == key.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(gradients[0].dtype in (query.dtype, torch.float32) for gradients in lists[2:])
        and (g_q is None or g_q[0].shape == query.shape)
        and (g_k is None or g_k[0].shape == key.shape)
        and all(_alike(tensor, tensors[0], query.device) for tensors in lists for tensor in tensors)
        and all(_reach(tensors[0]) < 1 << 31 for tensors in lists)  # offsets are 32 bits wide
    )


def _alike(one: Tensor, other: Tensor, device: torch.device) -> bool:
    return (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), other.dtype, device)


def _reach(tensor: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@torch.no_grad()
def add_gradients_(
    w_q: list[Tensor],
    w_k: list[Tensor],
    g_q: list[Tensor] | None,
    g_k: list[Tensor] | None,
    scale_coefficient: float | Tensor,
    mean_coefficient: float | Tensor,
    target: float,
) -> None:
    """Adds scale_coefficient · ½∇tr(WᵀW) + mean_coefficient · ½∇(tr W − target)² to the gradients that are given.

    w_q and g_q hold S tensors (G, R, K, D), w_k and g_k S tensors (G, 1, K, D), with whatever strides; see
    `supported`. Nothing waits for the device. No element may be in two gradients of one list; a g_q and a g_k that
    are the same tensor (tied factors) are written one after the other.
    """
    device, (groups, heads, k, d), modules = w_q[0].device, w_q[0].shape, len(w_q)
    table, aligned = _table([w_q, w_k, g_q, g_k], device)
    on_device = isinstance(scale_coefficient, Tensor) or isinstance(mean_coefficient, Tensor)
    if on_device:
        scale_coefficient, mean_coefficient = (_scalar(c, device) for c in (scale_coefficient, mean_coefficient))
    q, key = w_q[0].stride(), w_k[0].stride()
    dq, dk = (g_q or w_q)[0].stride(), (g_k or w_k)[0].stride()
    weight, query_gradient, key_gradient = (_dtype(ts[0]) for ts in (w_q, g_q or w_q, g_k or w_k))
    sides = [(0, heads)] * (g_q is not None) + [(heads, 1)] * (g_k is not None)  # first head, how many
    if g_q is not None and g_k is not None and all(a.data_ptr() != b.data_ptr() for a, b in zip(g_q, g_k, strict=True)):
        sides = [(0, heads + 1)]  # one launch, in which each weight is read from memory once
    gram_blocks, update_blocks = _blocks(k, w_q[0].dtype != torch.float32)
    common = {"K": k, "R": heads, "WEIGHT": weight, "ALIGNED": aligned}
    # the interpreter would multiply the bits of bfloat16
    gram_blocks["OPERAND"] = tl.float32 if _INTERPRETED else weight

    # modules are taken together as long as their Gram matrices are small; where that leaves few programs, D is split
    each = 2 * groups * k * k * 4  # bytes of one module's Gram matrices
    step = triton.cdiv(modules, triton.cdiv(modules, max(1, _GRAM_BYTES // each)))
    tiles, blocks = triton.cdiv(k, gram_blocks["BLOCK_M"]), triton.cdiv(d, gram_blocks["BLOCK_D"])
    steps = triton.cdiv(blocks, max(1, min(_PROGRAMS // (2 * tiles * step * groups), _GRAM_BYTES // (each * step))))
    splits = triton.cdiv(blocks, steps)
    with torch.cuda.device_of(w_q[0]):
        for first in range(0, modules, step):
            count = min(step, modules - first)
            partial = torch.empty(count * groups, 2, splits, k, k, dtype=torch.float32, device=device)
            traces = torch.empty(count * groups, heads, splits * tiles, dtype=torch.float32, device=device)
            _gram_kernel[(2 * tiles * splits * count * groups,)](
                table, partial, traces, modules, first, groups, d, splits, *q, key[0], *key[2:],
                TILES=tiles, STEPS=steps, **common, **gram_blocks,
            )  # fmt: skip
            gram = partial.sum(2) if splits > 1 else partial
            for head, count_heads in sides:
                rows = triton.cdiv(k, update_blocks["BLOCK_M"])
                grid = count_heads * rows * triton.cdiv(d, update_blocks["BLOCK_D"]) * count * groups
                _update_kernel[(grid,)](
                    table, gram, traces, scale_coefficient, mean_coefficient, target, modules, first, groups, d,
                    splits * tiles, *q, key[0], *key[2:], *dq, dk[0], *dk[2:],
                    HEAD=head, HEADS=count_heads, TILES=rows, PARTS=triton.next_power_of_2(splits * tiles),
                    QUERY_GRADIENT=query_gradient, KEY_GRADIENT=key_gradient, ON_DEVICE=on_device,
                    **common, **update_blocks,
                )  # fmt: skip


def _table(lists: list[list[Tensor] | None], device: torch.device) -> tuple[Tensor, bool]:
    """The addresses (4, S) on the device, and whether all are multiples of 16 bytes. Copied without waiting."""
    length = len(lists[0] or ())
    rows = [[0] * length if tensors is None else [tensor.data_ptr() for tensor in tensors] for tensors in lists]
    host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True), all(address % 16 == 0 for row in rows for address in row)


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float32)
    return torch.full((), value, dtype=torch.float32, device=device)


def _dtype(tensor: Tensor) -> Any:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensor.dtype]


def _blocks(k: int, half: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tiles of the two kernels: what leaves room for 16 warps on a multiprocessor at 128 registers a thread."""
    # Since 2.9 the older switch raises once the newer is used.
    matmul: Any = torch.backends.cuda.matmul
    switch = getattr(matmul, "fp32_precision", None)
    tensor_cores = half or (matmul.allow_tf32 if switch is None else switch == "tf32")
    block_k = triton.next_power_of_2(k)
    large = block_k == 256
    common = {"PRECISION": "tf32" if tensor_cores else _FULL, "num_warps": 8 if block_k >= 64 else 4}
    gram = {
        "BLOCK_K": block_k,
        "BLOCK_M": 64 if large else block_k,
        "BLOCK_D": 32 if tensor_cores else 16,
        "STAGES": 2 if large else 3,
    }
    update = {
        "BLOCK_M": min(block_k, 128),
        "BLOCK_C": min(block_k, 32 if tensor_cores else 16),
        "BLOCK_D": 64 if block_k >= 128 else 128,
        "STAGES": 3,
    }
    return gram | common, update | common
