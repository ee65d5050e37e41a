"""From the outputs of a layer to heads, as a rule says it: which outputs are whose, and the norm that follows.

Legend: G key heads, R query heads for each, K head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from locater.errors import LocaterError
from locater.models.families._parts import projection
from locater.models.parts import Norm, Projection, eps_of
from locater.models.registry import Site

__all__ = ["Heads", "Layout", "NormRule", "Side", "Unread", "setting"]


class Unread(LocaterError):  # noqa: N818  what it says is the reason
    """What of an attention module is not understood."""


class Heads(NamedTuple):
    groups: int
    shared: int
    width: int


def setting(site: Site, name: str) -> Any:
    """An attribute of the module, or of its configuration, or of a part of either."""
    owner, _, last = name.rpartition(".")
    module = site.module if site.module is None or not owner else getattr(site.module, owner, None)
    found = getattr(module, last, ...)
    if found is not ...:
        return found
    part = site.config.get(owner) if owner else site.config
    return part.get(last) if isinstance(part, Mapping) else None


@dataclass(frozen=True)
class Layout:
    """Which outputs of a layer are whose, counted in widths of a head; (a, b) stands for a + b·R.

    "together": the outputs of all heads of this side follow one another, and begin at G·first. "by group": those of a
    key head, of all sides, are `step`; this side's begin at `first`. "by head": the same for every query head.
    """

    kind: str
    first: tuple[int, int]
    step: tuple[int, int] = (0, 0)

    def rows(self, x: Tensor, heads: Heads, each: int) -> Tensor:
        """(G, each, K, …) of (outputs, …): a view."""
        groups, shared, width = heads
        first, step = (a + b * shared for a, b in (self.first, self.step))
        blocks = x.unflatten(0, (-1, width))
        if self.kind == "together":
            found: Tensor = blocks[groups * first : groups * (first + each)].unflatten(0, (groups, each))
        elif self.kind == "by group":
            found = blocks[: groups * step].unflatten(0, (groups, step))[:, first : first + each]
        else:
            found = blocks[: groups * each * step].unflatten(0, (groups, each, step))[:, :, first]
        return found


@dataclass(frozen=True)
class NormRule:
    gain: str | None = None
    bias: str | None = None
    centred: bool = False
    base: float = 0.0
    joint: bool = False
    after_rope: bool = False
    eps: float = 1e-6  # where no module has it

    def read(self, site: Site, heads: tuple[int, int, int] | None = None) -> Norm:
        """`heads`: (G, R or 1, K) of queries or keys."""

        def shaped(name: str | None) -> Tensor | None:
            if name is None:
                return None
            x = site.named(name)
            return x if heads is None or x.numel() == heads[2] else x.view(*heads[:2], 1, heads[2])

        owner = None if self.gain is None else site.part(self.gain.rpartition(".")[0])
        stored, bias = shaped(self.gain), shaped(self.bias)
        return Norm(stored, eps_of(owner, self.eps), self.centred, bias, self.base, self.joint, self.after_rope)


@dataclass(frozen=True)
class Side:
    """Queries, or keys."""

    weight: str
    bias: str | None
    transposed: bool
    layout: Layout
    blocks: int  # widths of a head among the outputs of the twin's layer
    norm: NormRule | None = None

    def projection(self, site: Site, heads: Heads, each: int) -> Projection:
        def rows(x: Tensor) -> Tensor:
            return self.layout.rows(x, heads, each)

        layer, _, name = self.weight.rpartition(".")
        if name == "weight" and self.bias in (None, f"{layer}.bias"):
            around = replace(site, name=site.prefix.removesuffix("."), module=site.model)
            return projection(around, layer, rows, transposed=self.transposed)
        bias = None if self.bias is None else site.named(self.bias)
        return Projection(site.named(self.weight), lambda x: rows(x.mT if self.transposed else x), bias, rows)

    def outputs(self, site: Site) -> int:
        """How many widths of a head the layer makes."""
        layer = self.weight.removesuffix("weight")
        adapted = site.tensors.get(f"{site.prefix}{layer}base_layer.weight")
        shape = (site.named(self.weight) if adapted is None else adapted).shape
        return int(shape[1 if self.transposed else 0])
