"""Methods that add vectors to a model, as γ and gains are: which optimizer is to train them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor, nn
from torch.optim import Optimizer

from locater.control._parameters import add_group, held_by, projections
from locater.control.apply import Method
from locater.errors import LocaterError
from locater.models import Attention


class AddsVectors(Method):
    def _chosen(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Optimizer:
        """Of several, the one that trains the model's vectors."""
        vectors = {id(vector) for vector in _vectors(model)}
        found = next((one for one in optimizers if vectors & held_by(one)), None)
        return super()._chosen(model, optimizers) if found is None else found

    def _refuse_muon(self, optimizer: Optimizer | None) -> None:
        """It fails in its step, and not where it is given a vector."""
        if any(kind.__name__ == "Muon" for kind in type(optimizer).__mro__):
            raise LocaterError(
                f"{type(optimizer).__name__} trains matrices, and what {self.name} adds are vectors: apply {self.name} "
                "with the optimizer of the other parameters, or with a list of both"
            )

    def _train(
        self,
        added: Sequence[nn.Parameter],
        optimizer: Optimizer,
        model: nn.Module,
        known: Sequence[Attention],
        undo: ExitStack,
    ) -> None:
        """Without decay, else as the query and key weights or, where the optimizer has none, the other vectors."""
        weights, held = [one.tensor for each in known for one in projections(each)], held_by(optimizer)
        like = weights if any(id(weight) in held for weight in weights) else _vectors(model)
        add_group(optimizer, added, like, self.name, undo)


def _vectors(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.ndim < 2]
