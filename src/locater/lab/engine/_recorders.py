"""The lab's side of `locater.observe`: recorders of a stack's attention while it runs.

Legend: E stacked models, B blocks, T tokens a block, N = B·T, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from locater.lab.config import ModelConfig
from locater.lab.data import PAD
from locater.lab.engine.model import Probe

Record = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Given every layer's number, what enters its attention (E, B, T, D), queries and keys (E, B, H, T, ·), logit scale."""

Begin = Callable[[Tensor], Record | None]
"""Called when a forward begins, with where its tokens (E, B, T) are no padding; None does not record it."""


class Recorders:
    """False if there are none."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._begins: list[Begin] = []

    def __bool__(self) -> bool:
        return bool(self._begins)

    def add(self, begin: Begin) -> Callable[[], None]:
        """Returns what removes it."""
        self._begins.append(begin)
        return lambda: self._begins.remove(begin)

    def probe(self, inputs: Tensor, own: Probe | None = None) -> Probe | None:
        """`own` and all recorders of the forward of these inputs (E, N), as one probe."""
        if not self._begins:
            return own
        tokens, scale = self._config.tokens, self._config.head_width**-0.5
        real = (inputs != PAD).unflatten(1, (-1, tokens))
        recorders = [record for begin in self._begins if (record := begin(real)) is not None]

        def together(layer: int, x: Tensor, normed: Tensor, q: Tensor, k: Tensor) -> None:
            if own is not None:
                own(layer, x, normed, q, k)
            if layer < self._config.layers:
                for record in recorders:
                    record(layer, normed.detach().unflatten(1, (-1, tokens)), q.detach(), k.detach(), scale)

        return together
