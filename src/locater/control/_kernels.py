# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""LocAteR's closed-form gradient in two Triton kernels that allocate nothing of a weight's size.

The first reads both factors and leaves their d_head × d_head Gram matrices and the traces; the second reads them
again and adds the gradient in place. Weights and gradients stay where they are: the kernels find them through a table
of addresses, so that all modules of one shape take two launches.

Legend: S modules, G key heads, R query heads for each, K head width, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch import Tensor

from locater._triton import INTERPRETED, available, ceil, jit, on, tl

_GRAM_BYTES = 32 << 20  # for the Gram matrices of the modules worked on together, as parts of a sum
_PROGRAMS = 264  # of the first kernel, at most, when D is split: two for each multiprocessor of an H200
# How float32 multiplies where TF32 is not allowed: to 2^-21, on tensor cores. "ieee" takes twice as long (H200).
FULL_PRECISION = "tf32x3"


@jit
@no_type_check
def address(table, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + index).to(tl.pointer_type(DTYPE))
    # unlike an argument's, the alignment of a loaded address is not known, and vector loads need it
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@jit
@no_type_check
def tile(pointer, rows, columns, row_stride, column_stride, height, width):
    pointer += rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(pointer, mask=(rows[:, None] < height) & (columns[None, :] < width), other=0.0)


@jit
@no_type_check
def _gram_kernel(
    table, partial, traces, G, D, splits, q_g, q_r, q_k, q_d, k_g, k_k, k_d,
    K: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, STEPS: tl.constexpr, WEIGHT: tl.constexpr, OPERAND: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """STEPS blocks of D of W_K W_Kᵀ, or of Σ_r W_Q W_Qᵀ and the traces: BLOCK_M of its rows.

    partial (S·G, 2, splits, K, K), the key's first; traces (S·G, R, splits · TILES).
    """
    pid = tl.program_id(0)
    factor, m = pid % 2, pid // 2 % TILES  # both factors read the same part of W_K: they are neighbours
    split, sg = pid // (2 * TILES) % splits, pid // (2 * TILES * splits)
    s, g = sg // G, sg % G
    rows, every = m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    start = split * (STEPS * BLOCK_D) + tl.arange(0, BLOCK_D)
    w_k = address(table, s * 4 + 1, WEIGHT, ALIGNED) + g * k_g
    gram = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    if factor == 0:
        for i in tl.range(0, STEPS, num_stages=STAGES):
            ds = start + i * BLOCK_D
            mine = tile(w_k, rows, ds, k_k, k_d, K, D).to(OPERAND)
            whole = mine if TILES == 1 else tile(w_k, every, ds, k_k, k_d, K, D).to(OPERAND)
            gram = tl.dot(mine, tl.trans(whole), gram, input_precision=PRECISION)
    else:
        for r in range(R):
            w_q = address(table, s * 4, WEIGHT, ALIGNED) + g * q_g + r * q_r
            trace = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # summed at the end
            for i in tl.range(0, STEPS, num_stages=STAGES):
                ds = start + i * BLOCK_D
                mine = tile(w_q, rows, ds, q_k, q_d, K, D).to(OPERAND)
                key = tile(w_k, rows, ds, k_k, k_d, K, D)
                whole = mine if TILES == 1 else tile(w_q, every, ds, q_k, q_d, K, D).to(OPERAND)
                gram = tl.dot(mine, tl.trans(whole), gram, input_precision=PRECISION)
                trace += mine.to(tl.float32) * key.to(tl.float32)
            tl.store(traces + ((sg * R + r) * splits + split) * TILES + m, tl.sum(tl.sum(trace, 1), 0))
    out = partial + ((sg * 2 + factor) * splits + split) * K * K + rows[:, None] * K + every[None, :]
    tl.store(out, gram, mask=(rows[:, None] < K) & (every[None, :] < K))


@jit
@no_type_check
def _add_product(
    gradient, g_k, g_d, gram, weight, w_k, w_d, other, o_r, o_k, o_d, traces, parts, scale, mean, target, rows, ds, D,
    OTHERS: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """gradient += scale · gram @ weight + Σ over OTHERS of mean · (trace − target) · other: one tile of it.

    Worked out transposed, (D, K): the weight passes through registers and the Gram matrix, being symmetric, lies as
    Hopper's tensor cores want a right factor in float32. The other way round, weights are read 4 bytes at a time.
    """
    total = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    for c in tl.range(0, K, BLOCK_C, num_stages=STAGES):
        inner = c + tl.arange(0, BLOCK_C)
        # half weights are widened and multiply in TF32: its 2^-10 is about what they are known to themselves
        left = tile(weight, ds, inner, w_d, w_k, D, K).to(tl.float32) * scale
        right = tl.trans(tile(gram, rows, inner, K, 1, K, K))
        total = tl.dot(left, right, total, input_precision=PRECISION)
    part = tl.arange(0, PARTS)
    for r in range(OTHERS):
        trace = tl.sum(tl.load(traces + r * parts + part, mask=part < parts, other=0.0), 0)
        total += mean * (trace - target) * tile(other + r * o_r, ds, rows, o_d, o_k, D, K).to(tl.float32)
    total += tile(gradient, ds, rows, g_d, g_k, D, K).to(tl.float32)
    out = gradient + ds[:, None] * g_d + rows[None, :] * g_k
    tl.store(out, total.to(gradient.dtype.element_ty), mask=(ds[:, None] < D) & (rows[None, :] < K))


@jit
@no_type_check
def _update_kernel(
    table, gram, traces, scale, mean, target, G, D, parts, q_g, q_r, q_k, q_d, k_g, k_k, k_d,
    dq_g, dq_r, dq_k, dq_d, dk_g, dk_k, dk_d,
    K: tl.constexpr, R: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, WEIGHT: tl.constexpr,
    QUERY_GRADIENT: tl.constexpr, KEY_GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, ON_DEVICE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one gradient: of query head r < R, or of the key, which counts as head R."""
    pid = tl.program_id(0)
    head = HEAD + pid % HEADS  # neighbours: the heads of a group read the same part of W_K
    sg = pid // (HEADS * TILES * tl.cdiv(D, BLOCK_D))
    s, g = sg // G, sg % G
    if ON_DEVICE:
        scale, mean = tl.load(scale), tl.load(mean)
    rows = pid // HEADS % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    ds = pid // (HEADS * TILES) % tl.cdiv(D, BLOCK_D) * BLOCK_D + tl.arange(0, BLOCK_D)
    w_q = address(table, s * 4, WEIGHT, ALIGNED) + g * q_g
    w_k = address(table, s * 4 + 1, WEIGHT, ALIGNED) + g * k_g
    gram, traces = gram + sg * (2 * K * K), traces + sg * R * parts
    if head < R:
        d_q = address(table, s * 4 + 2, QUERY_GRADIENT, ALIGNED) + g * dq_g + head * dq_r
        _add_product(
            d_q, dq_k, dq_d, gram, w_q + head * q_r, q_k, q_d, w_k, 0, k_k, k_d, traces + head * parts, parts,
            scale, mean, target, rows, ds, D, 1, K, BLOCK_M, BLOCK_C, BLOCK_D, PARTS, PRECISION, STAGES,
        )  # fmt: skip
    else:
        d_k = address(table, s * 4 + 3, KEY_GRADIENT, ALIGNED) + g * dk_g
        _add_product(
            d_k, dk_k, dk_d, gram + K * K, w_k, k_k, k_d, w_q, q_r, q_k, q_d, traces, parts,
            scale, mean, target, rows, ds, D, R, K, BLOCK_M, BLOCK_C, BLOCK_D, PARTS, PRECISION, STAGES,
        )  # fmt: skip


def supported(w_q: list[Tensor], w_k: list[Tensor], g_q: list[Tensor] | None, g_k: list[Tensor] | None) -> bool:
    """Whether `add_gradients_` can take these; looks at no values."""
    lists = [tensors for tensors in (w_q, w_k, g_q, g_k) if tensors is not None]
    if not w_q or any(len(tensors) != len(w_q) for tensors in lists) or w_q[0].ndim != 4 or not available(w_q[0]):
        return False
    device, dtype, (groups, heads, k, d) = w_q[0].device, w_q[0].dtype, w_q[0].shape
    fits = 16 <= k <= 256 and d >= 16 and dtype in (torch.float32, torch.bfloat16, torch.float16)
    for tensors in lists:
        shape = (groups, heads if tensors is w_q or tensors is g_q else 1, k, d)
        stride, kind = tensors[0].stride(), tensors[0].dtype
        fits &= kind == dtype or (kind == torch.float32 and tensors is not w_k)
        fits &= all((t.shape, t.stride(), t.dtype, t.device) == (shape, stride, kind, device) for t in tensors)
        # offsets have 32 bits
        fits &= len(stride) == 4 and sum((n - 1) * by for n, by in zip(shape, stride, strict=True)) < 1 << 31
    return fits


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

    w_q and g_q hold S tensors (G, R, K, D), w_k and g_k S tensors (G, 1, K, D): see `supported`. The host waits for
    nothing. Gradients must not overlap, except that a g_q may be the same tensor as its g_k (tied factors).
    """
    lists = (w_q, w_k, g_q or w_q, g_k or w_k)  # a gradient that is not wanted is not written
    rows = [[tensor.data_ptr() for tensor in tensors] for tensors in zip(*lists, strict=True)]
    layout = Layout.of(w_q[0], w_k[0], None if g_q is None else g_q[0], None if g_k is None else g_k[0])
    layout.add_(rows, scale_coefficient, mean_coefficient, target)


@dataclass(frozen=True)
class Layout:
    """What all modules of a list share: only their addresses are left to say."""

    device: torch.device
    shape: tuple[int, int, int, int]  # G, R, K, D
    strides: tuple[tuple[int, ...], ...]  # of w_q, w_k, g_q, g_k
    dtypes: tuple[torch.dtype, ...]
    wanted: tuple[bool, bool]  # query, key

    @classmethod
    def of(cls, w_q: Tensor, w_k: Tensor, g_q: Tensor | None, g_k: Tensor | None) -> Layout:
        tensors = (w_q, w_k, w_q if g_q is None else g_q, w_k if g_k is None else g_k)
        groups, heads, k, d = w_q.shape
        strides, dtypes = tuple(tensor.stride() for tensor in tensors), tuple(tensor.dtype for tensor in tensors)
        return cls(w_q.device, (groups, heads, k, d), strides, dtypes, (g_q is not None, g_k is not None))

    def add_(
        self, rows: list[list[int]], scale_coefficient: float | Tensor, mean_coefficient: float | Tensor, target: float
    ) -> None:
        """`add_gradients_` for S rows of the addresses of w_q, w_k, g_q and g_k."""
        device, (groups, heads, k, d), modules = self.device, self.shape, len(rows)
        launches = [(0, heads)] * self.wanted[0] + [(heads, 1)] * self.wanted[1]  # first head, how many
        if all(self.wanted) and all(row[2] != row[3] for row in rows):
            launches = [(0, heads + 1)]  # the key's after the queries' of its group
        table = torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)  # (S, 4)
        q, key, dq, dk = self.strides
        w_strides, g_strides = (*q, key[0], *key[2:]), (*dq, dk[0], *dk[2:])
        weight, _, d_q, d_k = (getattr(tl, str(dtype).removeprefix("torch.")) for dtype in self.dtypes)
        aligned = all(address % 16 == 0 for row in rows for address in row)
        common = {"K": k, "R": heads, "WEIGHT": weight, "ALIGNED": aligned}
        operand = tl.float32 if INTERPRETED else weight  # the interpreter would multiply the bits of bfloat16
        given = (scale_coefficient, mean_coefficient)
        on_device = any(isinstance(value, Tensor) for value in given)
        coefficients = [_scalar(value, device) if on_device else float(value) for value in given]

        # modules go together as long as their Gram matrices are small; where that leaves few programs, D is split
        gram_blocks, update_blocks = _blocks(k, self.dtypes[0] != torch.float32)
        size = 2 * groups * k * k * 4  # bytes for one module
        step = ceil(modules, ceil(modules, max(1, _GRAM_BYTES // size)))
        tiles, blocks = ceil(k, gram_blocks["BLOCK_M"]), ceil(d, gram_blocks["BLOCK_D"])
        steps = ceil(blocks, max(1, min(_PROGRAMS // (2 * tiles * step * groups), _GRAM_BYTES // (size * step))))
        splits = ceil(blocks, steps)
        parts, update_tiles = splits * tiles, ceil(k, update_blocks["BLOCK_M"])
        with on(table):
            for addresses in table.split(step):
                pairs = len(addresses) * groups
                partial = torch.empty(pairs, 2, splits, k, k, dtype=torch.float32, device=device)
                traces = torch.empty(pairs, heads, parts, dtype=torch.float32, device=device)
                _gram_kernel[(2 * parts * pairs,)](
                    addresses, partial, traces, groups, d, splits, *w_strides,
                    TILES=tiles, STEPS=steps, OPERAND=operand, **common, **gram_blocks,
                )  # fmt: skip
                gram = partial.sum(2) if splits > 1 else partial
                for first, count in launches:
                    _update_kernel[(count * update_tiles * ceil(d, update_blocks["BLOCK_D"]) * pairs,)](
                        addresses, gram, traces, *coefficients, float(target), groups, d, parts, *w_strides, *g_strides,
                        HEAD=first, HEADS=count, TILES=update_tiles, PARTS=1 << (parts - 1).bit_length(),
                        QUERY_GRADIENT=d_q, KEY_GRADIENT=d_k, ON_DEVICE=on_device, **common, **update_blocks,
                    )  # fmt: skip


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float32)
    return torch.full((), value, dtype=torch.float32, device=device)  # not copied from the host, which would wait


def _blocks(k: int, half: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tiles of the two kernels: most leave room for 16 warps on a multiprocessor, at 128 registers a thread."""
    matmul: Any = torch.backends.cuda.matmul
    switch = getattr(matmul, "fp32_precision", None)  # since 2.9; the older one then raises if this one was used
    tensor_cores = half or (matmul.allow_tf32 if switch is None else switch == "tf32")
    block_k = 1 << (k - 1).bit_length()
    common = {"PRECISION": "tf32" if tensor_cores else FULL_PRECISION, "num_warps": 8 if block_k >= 64 else 4}
    depth, large = 32 if tensor_cores else 16, block_k == 256  # where the whole Gram matrix would fill all registers
    gram = {"BLOCK_K": block_k, "BLOCK_M": 64 if large else block_k, "BLOCK_D": depth, "STAGES": 2 if large else 3}
    update = {"BLOCK_M": min(block_k, 128), "BLOCK_C": min(block_k, depth), "STAGES": 3}
    return gram | common, update | common | {"BLOCK_D": 64 if block_k >= 128 else 128}
