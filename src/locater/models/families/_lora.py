"""Linear layers under PEFT's LoRA: what acts is W + Σ s·B·A over the active adapters, read as they are at the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from locater.errors import LocaterError
from locater.models.registry import Site


@dataclass(frozen=True)
class LoRA:
    """The adapters of one layer."""

    layer: Any
    names: tuple[str, ...]

    @classmethod
    def of(cls, site: Site, name: str) -> LoRA | None:
        """None where the layer is not adapted; adapters of another kind are refused."""
        try:
            layer: Any = None if site.module is None else site.module.get_submodule(name)
        except AttributeError:
            return None
        if not isinstance(getattr(layer, "base_layer", None), nn.Module):
            return None
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        if kind != "peft.tuners.lora.layer.Linear" or hasattr(layer.base_layer, "base_layer"):
            raise _refusal(site, name, kind)
        variants = [*layer.lora_variant.values(), *("lora_bias" for has in layer.lora_bias.values() if has)]
        if variants:
            raise _refusal(site, name, str(variants[0]) if isinstance(variants[0], str) else type(variants[0]).__name__)
        return cls(layer, tuple(layer.lora_A))

    def tensors(self, site: Site, name: str) -> tuple[Tensor, ...]:
        """A and B of every adapter, active or not."""
        return tuple(site.tensor(f"{name}.{factor}.{one}.weight") for one in self.names for factor in _FACTORS)

    def added(self, weight: Tensor, *factors: Tensor) -> Tensor:
        """The weight that acts; adapters that are merged are in the stored one already."""
        if self.layer.merged or self.layer.disable_adapters:
            return weight
        for name, a, b in zip(self.names, factors[::2], factors[1::2], strict=True):
            if name in self.layer.active_adapters:
                change = self.layer.scaling[name] * (b @ a)
                weight = weight + (change.mT if self.layer.fan_in_fan_out else change)
        return weight


_FACTORS = ("lora_A", "lora_B")


def _refusal(site: Site, name: str, kind: str) -> LocaterError:
    return LocaterError(
        f"{site.name}.{name} is adapted by {kind}; of adapters locater reads LoRA's without biases, and what "
        "merge_and_unload() leaves of others"
    )
