"""W_Q, or W_K, of attention modules that are worked on together: multiplied with a sample, copied, mixed with a copy.

Legend: S modules, G key heads, R query heads for each, B sequences of a sample, n tokens of each, K head width, D model
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from locater.control import _step_kernels
from locater.models import Projection

__all__ = ["Copies", "Weights", "mixed_", "product_type"]

Each: TypeAlias = Tensor | list[Tensor]  # stacked, or one by one
Copies: TypeAlias = tuple[Each, Each]  # weights and biases


def product_type(weight: Tensor) -> torch.dtype:
    """In which weights are multiplied with a sample: on a GPU half precision, whose 11 bits are as many as TF32's."""
    if weight.is_cuda and weight.dtype != torch.float64:
        return torch.float16
    return torch.promote_types(weight.dtype, torch.float32)


class Weights:
    """Of modules of one shape, where they are stored, and their biases: views (G, R or 1, K, D) and (…, K).

    `kernels` work on all modules at once. Without them, `stacked` ones are copied to be multiplied and written: few
    launches for many small ones.
    """

    def __init__(self, parts: Sequence[Projection], *, kernels: bool, stacked: bool) -> None:
        self.views = [one.view(one.tensor.detach()) for one in parts]
        self.biases = [one.bias_view(one.bias_tensor.detach()) for one in parts if one.bias_tensor is not None]
        self._columns = [bias[..., None] for bias in self.biases]  # a kernel takes them as weights (G, R, K, 1)
        self._tables = [_step_kernels.addresses(x) for x in (self.views, self._columns) if x] if kernels else []
        self._stacked = stacked

    def project(self, states: Tensor) -> Tensor:
        """(S, G, R, B, n, K), at least in float32, of states (S, B, n, D) in the precision of products."""
        if self._tables:
            made, _ = _step_kernels.project(self._tables[0], self.views, states, copied=False)
            return self._with_biases(made, self.biases)
        return self._product(states, torch.stack(self.views) if self._stacked else self.views, self.biases)

    def copy_and_project(self, states: Tensor) -> tuple[Copies, Tensor]:
        """A copy as they are now, which `mix_` takes, too."""
        biases: Each = torch.stack(self.biases) if self.biases else []
        if self._tables:
            made, copy = _step_kernels.project(self._tables[0], self.views, states, copied=True)
            assert copy is not None
            return (copy, biases), self._with_biases(made, biases)
        weights: Each = torch.stack(self.views) if self._stacked else [view.clone() for view in self.views]
        return (weights, biases), self._product(states, weights, biases)

    def _product(self, states: Tensor, weights: Each, biases: Each) -> Tensor:
        g, r, k, d = self.views[0].shape
        if isinstance(weights, Tensor):
            made = states.flatten(1, 2) @ weights.reshape(len(weights), -1, d).to(states.dtype).mT
        else:
            pairs = zip(states.unbind(0), weights, strict=True)
            made = torch.stack([x.flatten(0, 1) @ w.reshape(-1, d).to(x.dtype).mT for x, w in pairs])
        made = made.to(torch.promote_types(made.dtype, torch.float32))
        return self._with_biases(made.view(*states.shape[:3], g, r, k).permute(0, 3, 4, 1, 2, 5), biases)

    @staticmethod
    def _with_biases(made: Tensor, biases: Each) -> Tensor:
        if not len(biases):
            return made
        stacked = biases if isinstance(biases, Tensor) else torch.stack(biases)  # (S, G, R, K)
        return made + stacked.to(made.dtype)[:, :, :, None, None]

    def mix_(self, old: Copies, new: Tensor, was: Tensor, biases: bool) -> None:
        """W ← new · W + was · old, factors of heads (S, G, R or 1); biases likewise, if they are trained."""
        kinds = ((self.views, old[0]), (self._columns if biases else [], old[1]))
        for index, (views, before) in enumerate(kinds):
            if views and self._tables:
                assert isinstance(before, Tensor)
                _step_kernels.mix_(self._tables[index], views, before, new, was)
                continue
            for view, one, a, b in zip(views, before, new, was, strict=bool(views)):
                mixed_(view, one.view_as(view), a[..., None, None], b[..., None, None])


def mixed_(view: Tensor, old: Tensor, new: Tensor, was: Tensor) -> None:
    """view ← new · view + was · old, at least in float32; where new is 0, view may not be finite."""
    dtype = torch.promote_types(view.dtype, torch.float32)
    before = was.to(dtype) * old.to(dtype)
    view.copy_(torch.where(new == 0, before, new.to(dtype) * view.to(dtype) + before))
