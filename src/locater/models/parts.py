"""What attention modules are made of: projections inside the tensors that store them, and norms.

Legend: G key heads (groups), R query heads per group, K head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

__all__ = ["Norm", "Projection", "eps_of"]


@dataclass(frozen=True)
class Projection:
    """A projection's weight inside the tensor that stores it.

    `view` maps the stored tensor, or its gradient, to (G, R or 1, K, D) without copying: what is written
    there is written into the model. Where the weight is `computed`, it makes it of `tensor` and `others` instead:
    gradients reach them through autograd. Without others, it arranges entries of `tensor`, each at most once, among
    constants.
    """

    tensor: Tensor
    view: Callable[..., Tensor]
    bias_tensor: Tensor | None = None
    bias_view: Callable[[Tensor], Tensor] = lambda tensor: tensor
    others: tuple[Tensor, ...] = ()
    computed: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every parameter of the weight."""
        return (self.tensor, *self.others)

    @property
    def weight(self) -> Tensor:
        return self.view(*self.tensors)

    @property
    def shape(self) -> torch.Size:
        """The weight's, none of which is made."""
        return self.view(*(torch.empty(tensor.shape, device="meta") for tensor in self.tensors)).shape

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Projection:
        """Made of what the function makes of each parameter."""
        bias = None if self.bias_tensor is None else function(self.bias_tensor)
        return replace(self, tensor=function(self.tensor), others=tuple(map(function, self.others)), bias_tensor=bias)

    @property
    def bias(self) -> Tensor | None:
        """(G, R or 1, K)."""
        return None if self.bias_tensor is None else self.bias_view(self.bias_tensor)


@dataclass(frozen=True)
class Norm:
    """RMSNorm or LayerNorm with its gain, over the last dimension."""

    stored: Tensor | None  # the gain, or what is added to `base` to give it
    eps: float
    centred: bool = False  # LayerNorm subtracts the mean
    bias: Tensor | None = None
    base: float = 0.0
    joint: bool = False  # over all heads (B, G, R, T, K) of a token together
    after_rope: bool = False

    @property
    def gain(self) -> Tensor | None:
        """As it is now: what is stored may be trained."""
        return self.stored if self.stored is None or not self.base else self.base + self.stored

    def __call__(self, x: Tensor) -> Tensor:
        over = (-4, -3, -1) if self.joint else (-1,)
        if self.centred:
            x = x - x.mean(over, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(over, keepdim=True) + self.eps)
        if (gain := self.gain) is not None:
            x = x * gain
        return x if self.bias is None else x + self.bias

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Norm:
        """Made of what the function makes of gain and bias."""
        stored, bias = (None if x is None else function(x) for x in (self.stored, self.bias))
        return replace(self, stored=stored, bias=bias)

    def fold(self, weight: Tensor) -> Tensor:
        """The linear part of the norm (gain, centring) folded into a weight (..., D) that follows it."""
        if (gain := self.gain) is not None:
            weight = weight * gain.to(weight.dtype)
        return weight - weight.mean(-1, keepdim=True) if self.centred else weight


def eps_of(norm: nn.Module | None, default: float) -> float:
    """What a module that normalises adds to the mean square; the default where it does not say, or is not there."""
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    return next((value for name in names if isinstance(value := getattr(norm, name, None), float)), default)
