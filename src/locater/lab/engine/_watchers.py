"""Who is told of a stack's attention while it runs: the lab's side of `locater.observe`.

Legend: E stacked models, B blocks, T tokens a block, N = B·T, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from locater.lab.config import ModelConfig
from locater.lab.data import PAD
from locater.lab.engine.model import See

__all__ = ["Begin", "Watchers"]

Tell = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Told of every layer: its number, what enters its attention (E, B, T, D), queries and keys (E, B, H, T, ·), scale."""

Begin = Callable[[Tensor], Tell | None]
"""Asked when a forward begins, with where its tokens (E, B, T) are no padding; None is not to be told of it."""


class Watchers:
    """Those who asked to be told; false if nobody did."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._begins: list[Begin] = []

    def __bool__(self) -> bool:
        return bool(self._begins)

    def add(self, begin: Begin) -> Callable[[], None]:
        """Returns what ends it."""
        self._begins.append(begin)
        return lambda: self._begins.remove(begin)

    def probe(self, inputs: Tensor, see: See | None = None) -> See | None:
        """`see` and everybody who wants to be told of the forward of these inputs (E, N), as one probe."""
        if not self._begins:
            return see
        tokens, scale = self._config.tokens, self._config.head_width**-0.5
        real = (inputs != PAD).unflatten(1, (-1, tokens))
        told = [tell for begin in self._begins if (tell := begin(real)) is not None]

        def together(layer: int, x: Tensor, y: Tensor, q: Tensor, k: Tensor) -> None:
            if see is not None:
                see(layer, x, y, q, k)
            if layer < self._config.layers:
                for tell in told:
                    tell(layer, y.detach().unflatten(1, (-1, tokens)), q.detach(), k.detach(), scale)

        return together
