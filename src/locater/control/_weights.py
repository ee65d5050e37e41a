"""W_Q, or W_K, of attention modules in a step of their optimizer: multiplied with a sample, copied before the step,
mixed with the copy after it.

Legend: S modules, G key heads, R query heads for each, B sequences of a sample, n tokens of each, K head width, D model
width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from locater.control import _step_kernels
from locater.control._parameters import is_sharded, sharded
from locater.models import Projection

__all__ = ["Copy", "Stored", "Weights", "product_type", "stored_of", "without_repeats"]

Copy: TypeAlias = Tensor | list[Tensor]  # stacked, or one by one


def product_type(weight: Tensor) -> torch.dtype:
    """In which weights are multiplied with a sample: on a GPU half precision, whose 11 bits are as many as TF32's."""
    if weight.is_cuda and weight.dtype != torch.float64:
        return torch.float16
    return torch.promote_types(weight.dtype, torch.float32)


# ---------------------------------------------------------------------- tensors that a step may be taken back of


class Stored:
    """One trained tensor of every module, and the part of it that is meant: views (G, R or 1, K, D), whose heads have
    factors of their own. Without a `view` it is a whole tensor that all heads share, a factor of LoRA's: then the
    smallest factor of a module counts, its `root`-th power where several tensors are multiplied."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        index: int,
        view: Callable[[Tensor], Tensor] | None = None,
        *,
        root: float = 1.0,
        is_weight: bool = False,
    ) -> None:
        self.index = index  # 0 of W_Q, 1 of W_K
        self.is_weight = is_weight  # W_Q or W_K itself, which `Weights.rows` copies
        self._view, self._root = view, root
        self._sharded = is_sharded(tensors[0])
        self.views = [one.detach() if self._sharded else self._shown(one.detach()) for one in tensors]
        by_kernel = not self._sharded and _step_kernels.mixes(self.views)
        self._table = _step_kernels.addresses(self.views) if by_kernel else None

    def _shown(self, tensor: Tensor) -> Tensor:
        return tensor[(None,) * (4 - tensor.ndim)] if self._view is None else self._view(tensor)

    def copied(self) -> Copy:
        """As it is now."""
        if self._sharded or (self._table is not None and _step_kernels.transposed(self.views[0])):
            return [view.clone() for view in self.views]
        return torch.stack(self.views)

    def mix_(self, old: Copy, keep: Tensor, factor: Tensor) -> None:
        """W ← factor · (old + keep · (W − old)), factors of heads (S, G, R or 1)."""
        if self._view is None:
            keep, factor = (x.amin((1, 2), keepdim=True) for x in (keep, factor))
            factor = factor**self._root
        new, was = factor * keep, factor * (1 - keep)
        if self._table is not None and isinstance(old, Tensor):
            _step_kernels.mix_(self._table, self.views, old, new, was)
            return
        for view, before, a, b in zip(self.views, old, new[..., None, None], was[..., None, None], strict=True):
            if self._sharded:
                self._mix_shard(view, before, a, b)
            else:
                _mix(view, before, a, b)

    def _mix_shard(self, tensor: Tensor, old: Tensor, new: Tensor, was: Tensor) -> None:
        """Of each rank its own part."""

        def placed(value: Tensor) -> Tensor:
            whole = torch.zeros(tensor.shape, dtype=value.dtype, device=value.device)
            shown = self._shown(whole)
            shown.copy_(value.expand_as(shown))
            return local(sharded(whole, tensor))

        def local(x: Tensor) -> Tensor:
            return x.to_local()  # type: ignore[no-any-return, attr-defined]

        _mix(local(tensor), local(old), 1 + placed(new - 1), placed(was))


def _mix(view: Tensor, old: Tensor, new: Tensor, was: Tensor) -> None:
    """view ← new · view + was · old, at least in float32; where new is 0, view may not be finite."""
    dtype = torch.promote_types(view.dtype, torch.float32)
    before = was.to(dtype) * old.to(dtype)
    view.copy_(torch.where(new == 0, before, new.to(dtype) * view.to(dtype) + before))


def stored_of(parts: Sequence[Projection], index: int, trained: Callable[[Tensor], bool]) -> Iterator[Stored]:
    """What is trained of one projection of every module: weights and biases, or the factors of LoRA's."""
    first = parts[0]
    if first.bias_tensor is not None and trained(first.bias_tensor):
        biases = [one.bias_tensor for one in parts if one.bias_tensor is not None]
        yield Stored(biases, index, lambda bias: first.bias_view(bias)[..., None])
    if trained(first.tensor):
        plain = not first.others
        yield Stored([one.tensor for one in parts], index, first.view if plain else None, is_weight=plain)
    for pair in zip(range(0, len(first.others), 2), range(1, len(first.others), 2), strict=True):  # LoRA's A and B
        both = [at for at in pair if trained(first.others[at])]
        yield from (Stored([one.others[at] for one in parts], index, root=1 / len(both)) for at in both)


def without_repeats(found: Sequence[Stored]) -> list[Stored]:
    """W_Q and W_K may be one tensor, and LoRA's factors of a fused layer are those of queries and of keys."""
    known: dict[Any, Stored] = {}
    for one in found:
        view = one.views[0]
        key = id(view) if is_sharded(view) else (view.data_ptr(), view.shape, view.stride())
        known.setdefault(key, one)
    return list(known.values())


# ---------------------------------------------------------------------- what they make of a sample


class Weights:
    """One projection of every module, all of one shape. `kernels` read the weights where they are, all at once; without
    them, `stacked` ones are multiplied together: few launches for many small ones."""

    def __init__(self, parts: Sequence[Projection], *, kernels: bool, stacked: bool) -> None:
        self._parts, self._stacked = parts, stacked
        self._views = [] if parts[0].others else [one.view(one.tensor.detach()) for one in parts]
        self._biases = [one.bias_view(one.bias_tensor.detach()) for one in parts if one.bias_tensor is not None]
        self._table = _step_kernels.addresses(self._views) if kernels else None

    def rows(self, states: Tensor, *, copied: bool = False) -> tuple[Tensor, Tensor | None]:
        """(S, G, R, B, n, K), at least in float32, of states (S, B, n, D) in the precision of products; and, if wanted
        and where that costs nothing, a copy of the weights for `Stored.mix_`."""
        copy = None
        if self._table is not None:
            made, copy = _step_kernels.project(self._table, self._views, states, copied=copied)
        else:
            made = self._product(states)
        if self._biases:
            made = made + torch.stack(self._biases).to(made.dtype)[:, :, :, None, None]  # (S, G, R, 1, 1, K)
        return made, copy

    def _product(self, states: Tensor) -> Tensor:
        weights = self._views or [one.weight.detach() for one in self._parts]
        g, r, k, d = weights[0].shape
        if self._stacked:
            made = states.flatten(1, 2) @ torch.stack(weights).reshape(len(weights), -1, d).to(states.dtype).mT
        else:
            pairs = zip(states.unbind(0), weights, strict=True)
            made = torch.stack([x.flatten(0, 1) @ w.reshape(-1, d).to(x.dtype).mT for x, w in pairs])
        made = made.to(torch.promote_types(made.dtype, torch.float32))
        return made.view(*states.shape[:3], g, r, k).permute(0, 3, 4, 1, 2, 5)
