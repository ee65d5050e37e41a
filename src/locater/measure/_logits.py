"""The logits of attention, a block at a time: queries, keys, and all that is done to their products.

Legend: B batch, H query heads, G key heads (H a multiple of G), R = H / G, K head width, Tq queries, Tk keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.measure import _kernels
from locater.measure._blocks import cut_from

__all__ = ["Bias", "Logits", "check_something_seen"]

Bias: TypeAlias = Tensor | Callable[[slice, slice], Tensor]

CPU_LOGITS, LOGITS = 1 << 20, 1 << 24  # in a block: smaller ones are no faster, and slow where cores are shared


@dataclass(frozen=True)
class Logits:
    """Queries, keys, and all that makes their logits, a block at a time."""

    q: Tensor
    k: Tensor
    view: _kernels.View
    bias: Bias | None
    own_keys: bool  # whether a query is the token at its place, not one of another sequence

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        causal: bool,
        scale: float | None,
        key_mask: Tensor | None,
        window: int | None,
        softcap: float | None,
        slopes: Tensor | None,
        bias: Bias | None,
    ) -> Logits:
        _check_operands(q, k)
        (b, h, tq, width), tk = q.shape, k.shape[2]
        aligned = causal or window is not None or slopes is not None
        if aligned and tq > tk:
            raise LocaterError(
                f"places aligned to the last key (causal, window, ALiBi) need at least as many keys ({tk}) "
                f"as queries ({tq})"
            )
        scale = 1 / math.sqrt(width) if scale is None else float(scale)
        if not math.isfinite(scale):
            raise LocaterError(f"scale must be finite, got {scale}")
        if window is not None and window < 1:
            raise LocaterError(f"window must be 1 or more, a query's own place being the first, got {window}")
        if softcap is not None and not 0 < softcap < math.inf:
            raise LocaterError(f"softcap must be positive and finite, got {softcap}")
        _check_key_mask(key_mask, (b, tk), q.device)
        if slopes is not None and (slopes.shape != (h,) or slopes.device != q.device):
            raise LocaterError(
                f"alibi_slopes must be ({h},) on {q.device}, one a head, got {tuple(slopes.shape)} on {slopes.device}"
            )
        left = None if window is None or window >= tk else window - 1
        view = _kernels.View(scale, left, 0 if causal else left, key_mask, softcap, slopes)
        return cls(q, k, view, bias, own_keys=aligned or tq == tk)

    @property
    def wide(self) -> torch.dtype:
        """float64, for float32 knows a logit of 50 to 1e-5 or so; float32 for half inputs and where it must be."""
        half = self.q.element_size() == self.k.element_size() == 2
        device = self.q.device.type
        return torch.float32 if device == "mps" or (half and device != "cpu") else torch.float64

    @property
    def result(self) -> torch.dtype:
        return torch.float64 if torch.float64 in (self.q.dtype, self.k.dtype) else torch.float32

    @property
    def budget(self) -> int:
        return CPU_LOGITS if self.q.device.type == "cpu" else LOGITS

    # ------------------------------------------------------------------ blocks of logits

    def products(self, out: Tensor, q: Tensor, keys: Tensor) -> Tensor:
        """Scaled products (b, h, n, c) of q (b, h, n, K) with keys (b, g, c, K), in the memory of `out`."""
        keys = keys.flatten(0, 1)
        left = q.to(keys.dtype).reshape(len(keys), -1, q.shape[3])  # (b·g, R·n, K): a group's heads share its keys
        shape = (*q.shape[:3], keys.shape[1])
        s = out[: math.prod(shape)].view(*left.shape[:2], shape[3])
        with torch.autocast(q.device.type, enabled=False):
            # half numbers are exact in TF32, should that be allowed, but not after scaling
            return torch.baddbmm(s, left, keys.mT, beta=0, alpha=self.view.scale, out=s).view(shape)

    def finish_(
        self, s: Tensor, place: Tensor, batch: slice, heads: slice, columns: slice, bias: Tensor | None
    ) -> Tensor:
        """Makes logits of products (b, h, n, c) of queries at `place` (b or 1, n), −∞ where bias or mask hide a key."""
        view = self.view
        if view.softcap is not None:
            s.div_(view.softcap).tanh_().mul_(view.softcap)
        if view.slopes is not None:
            slopes, column = view.slopes[heads].to(s.dtype), torch.arange(columns.start, columns.stop, device=s.device)
            s.addcmul_(slopes[:, None, None], (place[:, None, :, None] - column).abs().to(s.dtype), value=-1)
        if bias is not None:
            s += bias
        if view.key_mask is not None:
            s.masked_fill_(~view.key_mask[batch, None, None, columns], -math.inf)
        return s

    def hide_(self, s: Tensor, place: Tensor, columns: slice) -> None:
        """−∞ where a key (b, h, n, c) is hidden by its distance from the query at `place` (b or 1, n)."""
        column, place = torch.arange(columns.start, columns.stop, device=s.device), place[:, None, :, None]
        if self.view.left is not None:
            s.masked_fill_(column < place - self.view.left, -math.inf)
        if self.view.right is not None:
            s.masked_fill_(column > place + self.view.right, -math.inf)

    def heads(self, groups: slice) -> slice:
        per_group = self.q.shape[1] // self.k.shape[1]
        return slice(groups.start * per_group, groups.stop * per_group)

    def bias_block(self, given: Bias, batch: slice, heads: slice, rows: slice, columns: slice) -> Tensor:
        """A block of the bias, −∞ where it hides; a dimension of 1 where it repeats itself."""
        (b, h, tq, _), tk = self.q.shape, self.k.shape[2]
        shape, cut = (b, h, tq, tk), (batch, heads, rows, columns)
        if not isinstance(given, Tensor):
            given, shape = given(rows, columns), (b, h, rows.stop - rows.start, columns.stop - columns.start)
            cut = (batch, heads, slice(None), slice(None))
        try:
            given.expand(shape)
        except RuntimeError:
            raise LocaterError(f"bias must expand to {shape}, got {tuple(given.shape)}") from None
        if given.device != self.q.device or not (given.is_floating_point() or given.dtype == torch.bool):
            raise LocaterError(
                f"bias must be floating point or boolean, on {self.q.device}, got {given.dtype} on {given.device}"
            )
        given = given[(None,) * (4 - given.ndim)]
        block = cut_from(given, cut)
        if block.dtype == torch.bool:
            return torch.zeros_like(block, dtype=self.wide).masked_fill_(~block, -math.inf)
        return block.to(self.wide).masked_fill(block <= torch.finfo(block.dtype).min / 2, -math.inf)


def _check_operands(q: Tensor, k: Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or not x.is_floating_point() or 0 in x.shape:
            raise LocaterError(
                f"{name} must be (batch, heads, tokens, head width), floating point, got {tuple(x.shape)} in {x.dtype}"
            )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise LocaterError(f"q and k must share batch and head width, got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise LocaterError(f"the {q.shape[1]} query heads are no multiple of the {k.shape[1]} key heads")
    if q.device != k.device:
        raise LocaterError(f"q and k must be on one device, got {q.device} and {k.device}")


def _check_key_mask(key_mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    if key_mask is None:
        return
    if key_mask.shape != shape or key_mask.dtype != torch.bool or key_mask.device != device:
        raise LocaterError(
            f"key_mask must be {shape} (batch, keys), boolean with True where a key is visible, on {device}, "
            f"got {tuple(key_mask.shape)} in {key_mask.dtype} on {key_mask.device}"
        )
    check_something_seen(key_mask.any(1), "key_mask")


def check_something_seen(seen: Tensor, names: str) -> None:
    if not seen.all():
        number = int((~seen).nonzero()[0])
        raise LocaterError(f"nothing to measure in sequence {number} of the batch: all its keys are hidden by {names}")
