# ruff: noqa: N803  # capitals are Triton's way to mark constants, and the legend's
"""Rules on weights in two Triton kernels: one reads W_Q and W_K of all modules of a shape and leaves their `Grams`, one
writes what a `Move` makes of them.

Weights stay where they are, and nothing of their size is made: the kernels find them through a table of addresses. The
second passes over heads that do not move. Products are TF32: three digits of a head's scale, and of the small change
that a step makes, are enough; what is left of the weights is not multiplied with matrices.

Legend: S modules, G key heads, R query heads for each, K head width, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch import Tensor

from locater._triton import INTERPRETED, ceil, jit, on, tl
from locater.control._kernels import _address, _tile, supported
from locater.control.grams import Grams, Move
from locater.models import Norm, Rope

__all__ = ["Modules"]


@jit
@no_type_check
def _columns(pointer, rows, ds, by_k, by_d, K, D, ACROSS: tl.constexpr):
    """A tile (K, BLOCK_D) in float32, read along the dimension in which a weight is contiguous."""
    if ACROSS:
        found = tl.trans(_tile(pointer, ds, rows, by_d, by_k, D, K))
    else:
        found = _tile(pointer, rows, ds, by_k, by_d, K, D)
    return found.to(tl.float32)


@jit
@no_type_check
def _gram_kernel(
    table, grams, vectors, traces, G, D, base, q_g, q_r, q_k, q_d, k_g, k_k, k_d,
    K: tl.constexpr, R: tl.constexpr, KINDS: tl.constexpr, NORMED: tl.constexpr, SHIFTED: tl.constexpr,
    WEIGHT: tl.constexpr, GAIN: tl.constexpr, ALIGNED: tl.constexpr, ACROSS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of one head (the key's is R): its weight times itself, plain or folded, or folded queries times folded keys.

    grams (S·G, R + 1, KINDS, K, K); vectors (S·G, R + 1, 2, K): sums of the folded rows, and products with the shift;
    traces (S·G, R).
    """
    pid = tl.program_id(0)
    kind, head, sg = pid % KINDS, pid // KINDS % (R + 1), pid // (KINDS * (R + 1))
    s, g = sg // G, sg % G
    key = _address(table, s * 4 + 1, WEIGHT, ALIGNED) + g * k_g
    mine, by_k, by_d = key, k_k, k_d
    if head < R:
        mine = _address(table, s * 4, WEIGHT, ALIGNED) + g * q_g + head * q_r
        by_k, by_d = q_k, q_d
    rows, columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    gram = tl.zeros((BLOCK_K, BLOCK_K), tl.float32)
    trace = tl.zeros((BLOCK_K,), tl.float32)
    total, shifted = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        ds = start + columns
        x = _columns(mine, rows, ds, by_k, by_d, K, D, ACROSS)
        if kind == 0:
            gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
            if head < R:
                trace += tl.sum(x * _columns(key, rows, ds, k_k, k_d, K, D, ACROSS), 1)
        else:
            gain = tl.full((BLOCK_D,), 1.0, tl.float32)
            if NORMED:
                gain = base + tl.load(_address(table, s * 4 + 2, GAIN, False) + ds, mask=ds < D, other=0.0).to(
                    tl.float32
                )
            y = x * gain[None, :]
            if kind == 1:
                gram = tl.dot(y, tl.trans(y), gram, input_precision=PRECISION)
                total += tl.sum(y, 1)
                if SHIFTED:
                    shift = tl.load(_address(table, s * 4 + 3, GAIN, False) + ds, mask=ds < D, other=0.0).to(tl.float32)
                    shifted += tl.sum(x * shift[None, :], 1)
            else:
                z = _columns(key, rows, ds, k_k, k_d, K, D, ACROSS) * gain[None, :]
                gram = tl.dot(y, tl.trans(z), gram, input_precision=PRECISION)
    at = sg * (R + 1) + head
    out = grams + (at * KINDS + kind) * K * K + rows[:, None] * K + rows[None, :]
    tl.store(out, gram, mask=(rows[:, None] < K) & (rows[None, :] < K))
    if kind == 0:
        if head < R:
            tl.store(traces + sg * R + head, tl.sum(trace, 0))
    elif kind == 1:
        tl.store(vectors + at * 2 * K + rows, total, mask=rows < K)
        tl.store(vectors + (at * 2 + 1) * K + rows, shifted, mask=rows < K)


@jit
@no_type_check
def _moved(
    weight, by_k, by_d, shrink, pulled, factor, rows, ds, D,
    K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """factor · (weight − shrink weight − pulled): a tile (K, BLOCK_D), worked out transposed as in `_kernels`."""
    total = tl.zeros((BLOCK_D, BLOCK_K), tl.float32)
    for c in tl.range(0, K, BLOCK_C, num_stages=STAGES):
        inner = c + tl.arange(0, BLOCK_C)
        left = _tile(weight, ds, inner, by_d, by_k, D, K).to(tl.float32)
        right = tl.trans(_tile(shrink, rows, inner, K, 1, K, K))
        total = tl.dot(left, right, total, input_precision=PRECISION)
    own = _tile(weight, ds, rows, by_d, by_k, D, K).to(tl.float32)
    return factor * (own - (total + pulled))


@jit
@no_type_check
def _move_kernel(
    table, shrinks, pulls, factors, moving, G, D, q_g, q_r, q_k, q_d, k_g, k_k, k_d,
    K: tl.constexpr, R: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PULLED: tl.constexpr,
    WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_D columns of one key and its query heads: each needs the others as they were.

    shrinks (S·G, R + 1, K, K), the key's last; pulls (S·G, 2, R), of queries and of the key; factors (S·G, R + 1).
    """
    pid = tl.program_id(0)
    sg = pid // tl.cdiv(D, BLOCK_D)
    if tl.load(moving + sg) != 0:
        s, g = sg // G, sg % G
        ds = pid % tl.cdiv(D, BLOCK_D) * BLOCK_D + tl.arange(0, BLOCK_D)
        rows = tl.arange(0, BLOCK_K)
        mask = (ds[:, None] < D) & (rows[None, :] < K)
        key = _address(table, s * 4 + 1, WEIGHT, ALIGNED) + g * k_g
        shrinks += sg * (R + 1) * K * K
        from_queries = tl.zeros((BLOCK_D, BLOCK_K), tl.float32)
        nothing = tl.zeros((BLOCK_D, BLOCK_K), tl.float32)
        for r in range(R):
            query = _address(table, s * 4, WEIGHT, ALIGNED) + g * q_g + r * q_r
            pulled = nothing
            if PULLED:
                pulled = tl.load(pulls + sg * 2 * R + r) * _tile(key, ds, rows, k_d, k_k, D, K).to(tl.float32)
                if KEYS:
                    old = _tile(query, ds, rows, q_d, q_k, D, K).to(tl.float32)
                    from_queries += tl.load(pulls + (sg * 2 + 1) * R + r) * old
            if QUERIES:
                factor = tl.load(factors + sg * (R + 1) + r)
                new = _moved(
                    query, q_k, q_d, shrinks + r * K * K, pulled, factor, rows, ds, D,
                    K, BLOCK_C, BLOCK_D, BLOCK_K, PRECISION, STAGES,
                )  # fmt: skip
                out = query + ds[:, None] * q_d + rows[None, :] * q_k
                tl.store(out, new.to(WEIGHT), mask=mask)
        if KEYS:
            factor = tl.load(factors + sg * (R + 1) + R)
            new = _moved(
                key, k_k, k_d, shrinks + R * K * K, from_queries, factor, rows, ds, D,
                K, BLOCK_C, BLOCK_D, BLOCK_K, PRECISION, STAGES,
            )  # fmt: skip
            tl.store(key + ds[:, None] * k_d + rows[None, :] * k_k, new.to(WEIGHT), mask=mask)


@dataclass(frozen=True)
class Modules:
    """The weights of modules of one shape, where they are: made again when one of them is moved."""

    w_q: Sequence[Tensor]  # S of (G, R, K, D)
    w_k: Sequence[Tensor]  # S of (G, 1, K, D)
    norms: Sequence[Norm]  # S, or none
    table: Tensor  # (S, 4): addresses of queries, keys, gain and shift
    aligned: bool

    @classmethod
    def of(cls, w_q: Sequence[Tensor], w_k: Sequence[Tensor], norms: Sequence[Norm]) -> Modules | None:
        """None where the kernels do not apply; looks at no values."""
        if not supported(list(w_q), list(w_k), None, None) or w_q[0].dtype == torch.float64:
            return None
        vectors = [x for norm in norms for x in (norm.stored, norm.bias) if x is not None]
        if norms and (len(norms) != len(w_q) or any(norm.stored is None for norm in norms)):
            return None
        if any(x.dtype != vectors[0].dtype or not x.is_contiguous() or x.device != w_q[0].device for x in vectors):
            return None
        rows = [[q.data_ptr(), k.data_ptr(), 0, 0] for q, k in zip(w_q, w_k, strict=True)]
        for row, norm in zip(rows, norms, strict=False):
            assert norm.stored is not None
            row[2:] = norm.stored.data_ptr(), 0 if norm.bias is None else norm.bias.data_ptr()
        aligned = all(address % 16 == 0 for row in rows for address in row[:2])
        return cls(w_q, w_k, norms, torch.tensor(rows, device=w_q[0].device), aligned)

    @property
    def addresses(self) -> list[int]:
        """What must not change."""
        vectors = [x for norm in self.norms for x in (norm.stored, norm.bias) if x is not None]
        return [x.data_ptr() for x in (*self.w_q, *self.w_k, *vectors)]

    def grams(self, biases: tuple[Tensor | None, Tensor | None], rope: Rope | None, *, pulled: bool) -> Grams:
        """Of all modules, leading dimensions (S, G)."""
        (groups, heads, k, d), modules = self.w_q[0].shape, len(self.w_q)
        norm = self.norms[0] if self.norms else None
        kinds = 3 if pulled else 2 if norm is not None else 1
        made = self.table.new_empty(modules, groups, heads + 1, kinds, k, k, dtype=torch.float32)
        vectors = made.new_empty(modules, groups, heads + 1, 2, k)
        traces = made.new_empty(modules, groups, heads)
        shifted = norm is not None and norm.bias is not None
        gain = None if norm is None or norm.stored is None else norm.stored.dtype
        with on(self.table):
            _gram_kernel[(modules * groups * (heads + 1) * kinds,)](
                self.table, made, vectors, traces, groups, d, 0.0 if norm is None else norm.base, *self._strides,
                KINDS=kinds, ACROSS=self.w_q[0].stride(2) == 1, NORMED=gain is not None, SHIFTED=shifted,
                GAIN=_named(gain or torch.float32),
                **self._common, BLOCK_D=64, STAGES=1 if INTERPRETED else 3,
            )  # fmt: skip
        plain = made[..., 0, :, :]
        folded, cross = made[..., min(1, kinds - 1), :, :], made[..., :heads, 2, :, :] if pulled else None
        if norm is not None and norm.centred:  # D coordinates of mean 0 are D long in D − 1 dimensions
            total, longer = vectors[..., 0, :], d / max(1, d - 1)
            folded = longer * (folded - total[..., :, None] * total[..., None, :] / d)
            if cross is not None:
                key = total[..., heads:, :]
                cross = longer * (cross - total[..., :heads, :, None] * key[..., None, :] / d)
        shifts = (vectors[..., :heads, 1, :], vectors[..., heads:, 1, :]) if shifted else (None, None)
        return Grams(
            plain[..., :heads, :, :], plain[..., heads:, :, :], traces,
            (folded[..., :heads, :, :], folded[..., heads:, :, :]), cross, shifts, biases, rope,
        )  # fmt: skip

    def move_(self, move: Move, trained: tuple[bool, bool]) -> None:
        """Writes the weights that are trained."""
        (groups, heads, _, d), modules = self.w_q[0].shape, len(self.w_q)
        shrinks = torch.cat([x.expand(modules, groups, -1, -1, -1) for x in move.shrink], 2).contiguous()
        factors = shrinks.new_ones(modules, groups, heads + 1)
        if move.factors is not None:
            factors = torch.cat([x.expand(modules, groups, -1) for x in move.factors], 2).contiguous()
        pulls = shrinks.new_zeros(1)
        moving = move.shrunk.expand(modules, groups, -1).any(-1) | (factors != 1).any(-1)
        if move.pull is not None:
            pulls = torch.stack([x.expand(modules, groups, heads) for x in move.pull], 2).contiguous()
            moving |= (pulls != 0).flatten(2).any(-1)
        block = 64
        with on(self.table):
            _move_kernel[(modules * groups * ceil(d, block),)](
                self.table, shrinks, pulls, factors, moving.to(torch.int32), groups, d, *self._strides,
                QUERIES=trained[0], KEYS=trained[1], PULLED=move.pull is not None, **self._common,
                BLOCK_C=min(32, self._common["BLOCK_K"]), BLOCK_D=block, STAGES=1 if INTERPRETED else 2,
            )  # fmt: skip

    @property
    def _strides(self) -> tuple[int, ...]:
        q, k = self.w_q[0].stride(), self.w_k[0].stride()
        return (*q, k[0], *k[2:])

    @property
    def _common(self) -> dict[str, Any]:
        _, heads, k, _ = self.w_q[0].shape
        block = 1 << (k - 1).bit_length()
        return {
            "K": k, "R": heads, "WEIGHT": _named(self.w_q[0].dtype), "ALIGNED": self.aligned, "BLOCK_K": block,
            "PRECISION": "tf32", "num_warps": 8 if block >= 128 else 4,
        }  # fmt: skip


def _named(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))
