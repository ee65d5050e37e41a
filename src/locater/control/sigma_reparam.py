"""σReparam on a model: Ŵ of `rules.sigma_reparam` as a torch parametrization of the weights.

Legend: P matrices in one stored weight (O outputs, I inputs); u (O, P) and v (I, P) are their singular vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from locater.control._parameters import (
    attentions_with_weights,
    gathered,
    owner_of,
    projections,
    refuse_computed,
    refuse_wrapped,
    rows_of,
    scale_,
)
from locater.control._vectors import AddsVectors
from locater.control.apply import Installed, Method
from locater.control.rules.sigma_reparam import first_singular_vectors, power_iteration, row_factors, spectral_norms
from locater.errors import LocaterError
from locater.hooks import in_backward
from locater.models import Attention
from locater.names import plain_name

__all__ = ["SigmaReparam"]


class SigmaReparam(AddsVectors):
    """σReparam on the query and key weights (`where="qk"`), or on all linear layers (`where="all"`).

    γ starts at σ₁(W), from a converged estimate, so that a trained model goes on as it was. It has a group of its own
    in the optimizer, without weight decay.

    The weights are torch parametrizations: `layer.weight` is Ŵ, the parameter that is trained is
    `layer.parametrizations.weight.original`, and the state dict has `parametrizations.weight.original` and
    `parametrizations.weight.0.gamma, .u, .v` in place of `weight`: it is loaded into a model that σReparam is
    applied to. `remove()` writes Ŵ into the weights, under their old names, with the output as it was.

    Weights that layers share with others (tied embeddings) are left out of "all".
    """

    name = "σReparam"
    at_inference = "Nothing once it is removed, which writes Ŵ into the weights; before that, a product a layer."
    at_start = (
        "The output is unchanged: bitwise in evaluation mode, and in training mode to the change that one power "
        "iteration makes to a converged σ₁, a rounding error or so."
    )

    def __init__(self, where: Literal["qk", "all"] = "qk") -> None:
        if where not in ("qk", "all"):
            raise LocaterError(f'where must be "qk" or "all", got {where!r:.80}')
        self.where = where

    def contradicts(self, other: Method) -> str | None:
        if other.name == "LocAteR":
            return "LocAteR's penalty is on the weights themselves, whose scale σReparam divides out"
        if other.name == "QK-norm":
            return "QK-norm divides out the scale of q and k, so that their γ would do nothing"
        return None

    def _install(self, model: nn.Module, optimizer: Optimizer | None, undo: ExitStack) -> Installed:
        self._refuse_muon(optimizer)
        _refuse_parametrized(model)
        known = attentions_with_weights(model, self.name)
        refuse_computed(known, self.name)
        refuse_wrapped(model, known, self.name)
        if self.where == "qk":
            for attention in known:
                if attention.query_norm is not None or attention.key_norm is not None:
                    raise LocaterError(
                        f"{attention.module} normalises q and k itself, so σReparam's γ would do nothing"
                    )
        targets = _targets(model, known, everything=self.where == "all")
        gammas = []
        for target in targets:
            sigma = _Sigma(target)
            parametrize.register_parametrization(
                target.module, target.name, sigma, unsafe=True
            )  # a check would iterate
            undo.callback(_bake, target.module, target.name)
            gammas.append(sigma.gamma)
        if optimizer is not None:
            self._train(gammas, optimizer, model, known, undo)

        def measure() -> dict[str, float]:
            return {
                f"{plain_name(target.path)}/gamma{f'.{index}' if gamma.numel() > 1 else ''}": float(value)
                for target, gamma in zip(targets, gammas, strict=True)
                for index, value in enumerate(gathered(gamma.detach()))
            }

        modules = [model.get_submodule(attention.module) for attention in known]
        return Installed([*dict.fromkeys([*modules, *(target.module for target in targets)])], gammas, measure)


class _Target:
    """A parameter, and which of its outputs belong to which matrix: `part` (O,), −1 for those left alone."""

    def __init__(self, path: str, module: nn.Module, name: str, outputs: int) -> None:
        self.path = f"{path}.{name}" if path else name
        self.module, self.name, self.outputs = module, name, outputs
        self.tensor: Tensor = getattr(module, name)
        self.part = torch.full((_as_matrix(self.tensor, outputs).shape[0],), -1)
        self.parts = 0

    def add(self, rows: Tensor) -> None:
        self.part[rows] = self.parts
        self.parts += 1


def _targets(model: nn.Module, known: list[Attention], *, everything: bool) -> list[_Target]:
    found: dict[int, _Target] = {}
    for attention in known:
        for projection in projections(attention):
            if attention.query is None:  # W_QK itself: a matrix a head
                heads, _, d, _ = projection.weight.shape
                rows, outputs = list(torch.arange(heads * d).split(d)), 0
            else:
                one, outputs = rows_of(projection)
                rows = [one]
            if id(projection.tensor) not in found:
                found[id(projection.tensor)] = _Target(*owner_of(model, projection.tensor), outputs)
            for some in rows:
                found[id(projection.tensor)].add(some)
    if everything:
        for target in found.values():  # the values of a fused layer
            rest = (target.part < 0).nonzero()[:, 0]
            if len(rest):
                target.add(rest)
        for target in _linear_layers(model, found.keys()):
            found[id(target.tensor)] = target
    return list(found.values())


def _linear_layers(model: nn.Module, taken: Collection[int]) -> Iterator[_Target]:
    """The weights of linear layers that are nobody else's."""
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for path, module in model.named_modules():
        outputs = 1 if type(module).__name__ == "Conv1D" else 0  # transformers', which stores inputs first
        if outputs == 0 and not isinstance(module, (nn.Linear, nn.MultiheadAttention)):
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.ndim != 2 or not name.endswith("weight"):
                continue
            if id(parameter) not in taken and holders[id(parameter)] == 1:
                target = _Target(path, module, name, outputs)
                target.add(torch.arange(len(target.part)))
                yield target


def _refuse_parametrized(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            ours = any(isinstance(part, _Sigma) for part in module.modules())
            raise LocaterError(
                f"{name or type(module).__name__} is "
                + ("under σReparam already; remove() that first" if ours else "parametrized already; remove that first")
            )


def _as_matrix(weight: Tensor, outputs: int) -> Tensor:
    """(O, I); W_QK of several heads (heads, D, D) as one below the other."""
    matrix = weight.mT if outputs == 1 else weight
    return matrix.flatten(0, -2)


class _Sigma(nn.Module):
    """The parametrization: W → Ŵ."""

    gamma: nn.Parameter
    u: Tensor
    v: Tensor
    part: Tensor

    def __init__(self, target: _Target) -> None:
        super().__init__()
        self.outputs = target.outputs
        weight = target.tensor.detach()
        self.register_buffer("part", target.part.to(weight.device), persistent=False)
        u, v = first_singular_vectors(self._matrix(weight), self.part, target.parts)
        self.register_buffer("u", u)
        self.register_buffer("v", v)
        sigma = self.sigma(weight)
        if not bool((sigma > 0).all()):
            raise LocaterError(f"{target.path} is all zero, and σReparam divides by its largest singular value")
        self.gamma = nn.Parameter(sigma, requires_grad=target.tensor.requires_grad)  # (P,): FSDP2 shards it

    def _matrix(self, weight: Tensor) -> Tensor:
        """(O, I), at least in float32."""
        return _as_matrix(weight, self.outputs).to(torch.promote_types(weight.dtype, torch.float32))

    def sigma(self, weight: Tensor) -> Tensor:
        """σ₁ (P,) as the present vectors give it, uᵀWv; differentiable in W."""
        matrix = self._matrix(weight)
        # copies: the next iteration must not change this one's graph
        return spectral_norms(matrix, *(x.to(matrix.dtype, copy=True) for x in (self.u, self.v)))

    @torch.no_grad()
    def iterate(self, weight: Tensor) -> None:
        matrix = self._matrix(weight)
        u, v = power_iteration(matrix, self.u.to(matrix.dtype), self.part)
        self.u.copy_(u)
        self.v.copy_(v)

    def ratio(self, weight: Tensor, gamma: Tensor) -> Tensor:
        """γ/σ₁ by output, 1 for those left alone, in a shape that multiplies the stored weight."""
        by_output = row_factors(gamma, self.sigma(weight), self.part).to(weight.dtype)
        return by_output if self.outputs == 1 else by_output.view(*weight.shape[:-1], 1)

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            if self.training and not in_backward():  # what checkpointing computes again is to be the same
                self.iterate(weight)
            return weight * self.ratio(weight, self.gamma)


def _bake(module: nn.Module, name: str) -> None:
    """Ends the parametrization with Ŵ in the parameter, which stays the one the optimizer holds."""
    assert isinstance(module.parametrizations, nn.ModuleDict)
    parts = module.parametrizations[name]
    assert isinstance(parts, parametrize.ParametrizationList)
    sigma, original = parts[0], parts.original
    assert isinstance(sigma, _Sigma)
    assert isinstance(original, Tensor)
    with torch.no_grad():
        ratio = sigma.ratio(gathered(original), gathered(sigma.gamma))
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    scale_(original, lambda tensor: tensor, ratio)
