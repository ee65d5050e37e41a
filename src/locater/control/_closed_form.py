"""LocAteR's gradient added into `.grad`, for attention modules of one shape together.

Legend: S modules worked on together, G key heads, R query heads for each, K head width, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from locater.control import _kernels
from locater.control._groups import Group, Ids
from locater.control._parameters import gathered, is_sharded, projections, sharded
from locater.control.rules.locater import GradientFactors, joint_gradient
from locater.models import Attention, Projection
from locater.qk import QK


class Coefficients(NamedTuple):
    """Of the penalty; a loss scale makes the strengths tensors."""

    scale_strength: float | Tensor
    mean_strength: float | Tensor
    target: float


class GradientGroup(Group):
    """Modules whose gradients are added together."""

    with_biases = False

    def add_gradient_(self, c: Coefficients) -> None:
        """Adds the penalty's gradient for the weights that are trained."""
        if self._add_by_kernels(c):
            return
        # on a GPU small modules wait for launches, not for arithmetic: stack them; on a CPU there are none to save
        stacks = self.stacks() if self.members[0].key.tensor.is_cuda else ([member] for member in self.members)
        for members in stacks:
            self.add_stacked(members, c)

    def _add_by_kernels(self, c: Coefficients) -> bool:
        """On a GPU with Triton: all modules in two launches, nothing of a weight's size allocated."""
        if self._layout is None:
            return False
        rows = []
        for member, (at_q, at_k) in zip(self.members, self._offsets, strict=True):
            assert member.query is not None
            q, k = member.query.tensor, member.key.tensor
            g_q, g_k = (_gradient_of(x) if wanted else x for x, wanted in zip((q, k), self.trained, strict=True))
            if g_q.stride() != q.stride() or g_k.stride() != k.stride() or g_q.dtype != q.dtype or g_k.dtype != k.dtype:
                return False
            rows.append([q.data_ptr() + at_q, k.data_ptr() + at_k, g_q.data_ptr() + at_q, g_k.data_ptr() + at_k])
        self._layout.add_(rows, 2 * c.scale_strength, 2 * c.mean_strength, c.target)
        return True

    @cached_property
    def _layout(self) -> _kernels.Layout | None:
        """How the kernels find their way in these modules; None where they do not apply."""
        keys = [member.key for member in self.members]
        queries = [member.query for member in self.members if member.query is not None]
        if not queries or not keys[0].tensor.is_cuda or is_sharded(keys[0].tensor):
            return None
        if any(p.computed for p in (*queries, *keys)):
            return None
        w_q, w_k = ([p.weight for p in parts] for parts in (queries, keys))
        if not _kernels.supported(w_q, w_k, None, None):
            return None
        g_q, g_k = (weights[0] if wanted else None for weights, wanted in zip((w_q, w_k), self.trained, strict=True))
        return _kernels.Layout.of(w_q[0], w_k[0], g_q, g_k)

    @cached_property
    def _offsets(self) -> list[tuple[int, int]]:
        """Where each view starts in the tensor that stores it, in bytes."""

        def offset(projection: Projection) -> int:
            return projection.weight.data_ptr() - projection.tensor.data_ptr()

        return [(offset(member.query), offset(member.key)) for member in self.members if member.query is not None]

    def add_stacked(self, members: Sequence[Attention], c: Coefficients) -> None:
        """The same by batched products: one module in place, several through a stack."""
        made = {id(p): _Computed(p, self.computed) for one in members for p in projections(one) if p.computed}
        stores = {id(p.tensor): _Store(p.tensor) for one in members for p in projections(one) if not p.computed}

        def weights(parts: list[Projection]) -> Tensor:
            return _stack([made[id(p)].weight if p.computed else p.view(stores[id(p.tensor)].weight) for p in parts])

        def gradients(parts: list[Projection]) -> _Target:
            return _Target(
                [made[id(p)].gradient if p.computed else p.view(stores[id(p.tensor)].gradient()) for p in parts]
            )

        keys = [member.key for member in members]
        queries = [member.query for member in members if member.query is not None]
        w_k = weights(keys)  # (S, G, 1, K, D)
        # a copy of a Python number to the device would wait
        scale, mean = (x.to(w_k) if isinstance(x, Tensor) else w_k.new_full((), x) for x in c[:2])
        if not queries:
            gradients(keys).add_(joint_gradient(w_k, scale, mean, c.target))
        else:
            w_q = weights(queries)  # (S, G, R, K, D)
            qk = QK(w_q, w_k, one_input=members[0].one_input)
            of_q, of_k, pull = GradientFactors.of(qk, scale, mean, c.target)
            if self.trained[0]:
                gradients(queries).add_product_(of_q, w_q, pull, w_k)
            if self.trained[1]:
                gradients(keys).add_product_(of_k.sum(-3, keepdim=True), w_k, pull, w_q)
        for store in stores.values():
            store.finish()
        for one in made.values():
            one.finish()


def _gradient_of(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad


class _Store:
    """One parameter: its whole weight, and a whole gradient to write into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.weight = gathered(tensor)
        self._whole: Tensor | None = None

    def gradient(self) -> Tensor:
        if self._whole is None:
            sharded = self.weight is not self.tensor
            self._whole = torch.zeros_like(self.weight) if sharded else _gradient_of(self.tensor)
        return self._whole

    def finish(self) -> None:
        """Adds each rank's part of a gradient that every rank holds whole. No communication."""
        if self._whole is None or self.weight is self.tensor:
            return
        _add_to_gradient(self.tensor, self._whole)


class _Computed:
    """A weight that is computed from parameters: its gradient goes back to those that are trained."""

    def __init__(self, projection: Projection, trained: Ids) -> None:
        self._tensors = projection.tensors
        self._wanted = [i for i, tensor in enumerate(self._tensors) if id(tensor) in trained]
        self._leaves = [gathered(tensor).detach() for tensor in self._tensors]
        with torch.enable_grad():
            for i in self._wanted:
                self._leaves[i].requires_grad_()
            self._made = projection.view(*self._leaves)
        self.weight = self._made.detach()

    @cached_property
    def gradient(self) -> Tensor:
        return torch.zeros_like(self.weight)

    def finish(self) -> None:
        if not self._made.requires_grad or "gradient" not in self.__dict__:
            return
        leaves = [self._leaves[i] for i in self._wanted]
        found = torch.autograd.grad(self._made, leaves, self.gradient, allow_unused=True)
        for i, gradient in zip(self._wanted, found, strict=True):
            if gradient is not None:
                _add_to_gradient(self._tensors[i], gradient)


def _add_to_gradient(tensor: Tensor, whole: Tensor) -> None:
    """Of a sharded one each rank its own part."""
    part = sharded(whole, tensor) if is_sharded(tensor) else whole
    if tensor.grad is None:
        tensor.grad = part.to(tensor.dtype)
    else:
        tensor.grad.add_(part)


def _stack(views: list[Tensor]) -> Tensor:
    """(S, …), at least float32; a single one stays where it is."""
    stacked = views[0][None] if len(views) == 1 else torch.stack(views)
    return stacked.float() if stacked.dtype in (torch.bfloat16, torch.float16) else stacked


class _Target:
    """Gradients (S, G, R or 1, K, D) to add to: one in place, several through a stack."""

    def __init__(self, views: list[Tensor]) -> None:
        self.views = views

    def add_(self, gradient: Tensor) -> None:
        parts = [part.to(view.dtype) for view, part in zip(self.views, gradient.unbind(0), strict=True)]
        torch._foreach_add_(self.views, parts)

    def add_product_(self, gram: Tensor, weight: Tensor, pull: Tensor | None, other: Tensor) -> None:
        """Adds gram @ weight + pull · other, the latter summed over R where the gradient is shared by R heads."""
        shared = self.views[0].shape[-3] == 1 < other.shape[-3]
        view = self.views[0]
        if len(self.views) > 1 or view.dtype != weight.dtype or not _flattens(view):
            product = gram @ weight
            if pull is not None:
                product = (
                    product.add_((other * pull).sum(-3, keepdim=True)) if shared else product.addcmul_(other, pull)
                )
            self.add_(product)
            return
        # one large module: accumulate into its gradient without a copy of its size
        heads, (k, d) = view.shape[0] * view.shape[1], view.shape[-2:]
        flat = view.view(heads, k, d)
        grams = gram[0].expand(*view.shape[:2], k, k).reshape(heads, k, k)
        flat.baddbmm_(grams, weight[0].reshape(heads, k, d))
        if pull is None:
            return
        for r in range(other.shape[-3] if shared else 1):
            view.addcmul_(other[0, :, r : r + 1] if shared else other[0], pull[0, :, r : r + 1] if shared else pull[0])


def _flattens(view: Tensor) -> bool:
    """Whether the two head dimensions can be one without copying."""
    return view.shape[1] == 1 or view.stride(0) == view.shape[1] * view.stride(1)
