"""The logits of attention, a block at a time: queries, keys, and all that is done to their products.

Legend: B batch, H query heads, G key heads (H a multiple of G), R = H / G, K head width, Tq queries, Tk keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.hooks import Visibility
from locater.measure._kernels import View

CPU_LOGITS, LOGITS = 1 << 20, 1 << 24  # in a block: smaller ones are no faster, and slow where cores are shared


@dataclass(frozen=True)
class Logits:
    """Queries, keys, and all that makes their logits, a block at a time."""

    q: Tensor
    k: Tensor
    visibility: Visibility
    scale: float
    softcap: float | None
    slopes: Tensor | None  # (H,): a logit falls by slope · |distance|
    sinks: Tensor | None  # (H,): a logit without a key

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        *,
        causal: bool = True,
        **masks: Any,
    ) -> Logits:
        """By the options of `attention_statistics`; `masks` are those of a `Visibility`: window, key_mask, bias."""
        _check_operands(q, k)
        window = masks.get("window")
        (b, h, tq, width), tk = q.shape, k.shape[2]
        if tq > tk and (causal or window is not None or alibi_slopes is not None):
            raise LocaterError(
                f"positions aligned to the last key (causal, window, ALiBi) need at least as many keys ({tk}) "
                f"as queries ({tq})"
            )
        scale = 1 / math.sqrt(width) if scale is None else float(scale)
        if not math.isfinite(scale):
            raise LocaterError(f"scale must be finite, got {scale}")
        if window is not None and window < 1:
            raise LocaterError(f"window must be 1 or more, a query's own position being the first, got {window}")
        if softcap is not None and not 0 < softcap < math.inf:
            raise LocaterError(f"softcap must be positive and finite, got {softcap}")
        _check_key_mask(masks.get("key_mask"), (b, tk), q.device)
        for name, each in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if each is not None and (each.shape != (h,) or each.device != q.device):
                raise LocaterError(
                    f"{name} must be ({h},) on {q.device}, one a head, got {tuple(each.shape)} on {each.device}"
                )
        visibility = Visibility((b, h, tq, tk), q.device, causal, **masks)
        return cls(q, k, visibility, scale, softcap, alibi_slopes, sinks)

    @property
    def view(self) -> View:
        """What the kernel is given."""
        masks, far = self.visibility, self.k.shape[2] - 1
        left, right = (None if reach >= far else reach for reach in (masks.left, masks.right))
        return View(self.scale, left, right, masks.key_mask, self.softcap, self.slopes, self.sinks)

    @property
    def own_keys(self) -> bool:
        """Whether a query is the token at its position, and not one of another sequence."""
        masks = self.visibility
        return masks.causal or masks.window is not None or self.slopes is not None or masks.offset == 0

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
            return torch.baddbmm(s, left, keys.mT, beta=0, alpha=self.scale, out=s).view(shape)

    def finish_(
        self, s: Tensor, positions: Tensor, batch: slice, heads: slice, columns: slice, bias: Tensor | None
    ) -> Tensor:
        """Makes logits of products (b, h, n, c) of queries at `positions` (b or 1, n), masked by all but distance."""
        key_mask = self.visibility.key_mask
        if self.softcap is not None:
            s.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.slopes is not None:
            slopes, column = self.slopes[heads].to(s.dtype), torch.arange(columns.start, columns.stop, device=s.device)
            s.addcmul_(slopes[:, None, None], (positions[:, None, :, None] - column).abs().to(s.dtype), value=-1)
        if bias is not None:
            s += bias
        if key_mask is not None:
            s.masked_fill_(~key_mask[batch, None, None, columns], -math.inf)
        return s

    def heads(self, groups: slice) -> slice:
        per_group = self.q.shape[1] // self.k.shape[1]
        return slice(groups.start * per_group, groups.stop * per_group)


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
            f"key_mask must be {shape} (batch, keys), boolean with False where a key is masked, on {device}, "
            f"got {tuple(key_mask.shape)} in {key_mask.dtype} on {key_mask.device}"
        )
    check_unmasked(key_mask.any(1), "key_mask")


def check_unmasked(unmasked: Tensor, names: str) -> None:
    """That each sequence (B,) has an unmasked key."""
    if not unmasked.all():
        number = int((~unmasked).nonzero()[0])
        raise LocaterError(f"nothing to measure in sequence {number} of the batch: all its keys are masked by {names}")
