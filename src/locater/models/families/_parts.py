"""What families share: projections inside linear layers, norms, rotary frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.models.attention import Attention
from locater.models.families._lora import LoRA
from locater.models.parts import Norm, Projection
from locater.models.registry import Site
from locater.models.rope import Rope


@dataclass(frozen=True)
class Heads:
    """G key heads, R query heads for each, K wide."""

    groups: int
    per_group: int
    width: int

    @classmethod
    def of(cls, site: Site) -> Heads:
        """From the usual names in a configuration."""
        heads = site.setting("num_attention_heads", "n_head", "num_heads", "n_heads")
        groups = site.setting("num_key_value_heads", default=heads)
        hidden = site.setting("hidden_size", "n_embd", "d_model", "dim", default=None)
        width = site.setting("head_dim", default=None)
        if not all(isinstance(n, int) and n > 0 for n in (heads, groups)):
            raise LocaterError(f"{site.name}: head counts must be positive whole numbers, got {heads!r} and {groups!r}")
        if heads % groups:
            raise LocaterError(f"{site.name}: {heads} query heads cannot share {groups} key heads evenly")
        if width is None:
            if not isinstance(hidden, int):
                raise LocaterError(f"the configuration of {site.name} has neither head_dim nor hidden_size")
            width = hidden // heads
        if not isinstance(width, int) or width < 1:
            raise LocaterError(f"{site.name}: the width of a head must be a positive whole number, got {width!r:.80}")
        return cls(groups, heads // groups, width)

    @property
    def query_rows(self) -> int:
        return self.groups * self.per_group * self.width

    @property
    def key_rows(self) -> int:
        return self.groups * self.width

    @property
    def query_shape(self) -> tuple[int, int, int]:
        return self.groups, self.per_group, self.width

    @property
    def key_shape(self) -> tuple[int, int, int]:
        return self.groups, 1, self.width


def projection(
    site: Site, name: str, rows: Callable[[Tensor], Tensor], *, transposed: bool = False, computed: bool = False
) -> Projection:
    """The linear layer `name`; `rows` picks (G, R, K) out of its output dimension, which comes first.

    `transposed`: GPT-2's Conv1D stores (D, outputs). `computed`: rows arranges entries, and is no view of them.
    """
    adapters = LoRA.of(site, name)
    stored = name if adapters is None else f"{name}.base_layer"
    weight, bias = site.tensor(f"{stored}.weight"), site.optional(f"{stored}.bias")

    def view(tensor: Tensor, *factors: Tensor) -> Tensor:
        whole = tensor if adapters is None else adapters.added(tensor, *factors)
        return rows(whole.mT if transposed else whole)

    made = Projection(
        weight,
        view,
        bias,
        rows,
        others=() if adapters is None else adapters.tensors(site, name),
        computed=computed or adapters is not None,
    )
    try:
        dimensions = len(made.shape)
    except RuntimeError as error:
        raise LocaterError(
            f"{site.name}.{name}.weight has shape {tuple(weight.shape)}, "
            "which does not fit the heads of the configuration"
        ) from error
    if dimensions != 4:
        raise LocaterError(f"{site.name}.{name}.weight has shape {tuple(weight.shape)}, not that of a linear layer")
    return made


def separate(site: Site, query: str, key: str, heads: Heads) -> tuple[Projection, Projection]:
    """Two linear layers, heads one after the other."""
    return (
        projection(site, query, lambda t: t.unflatten(0, heads.query_shape)),
        projection(site, key, lambda t: t.unflatten(0, heads.key_shape)),
    )


def stacked(site: Site, name: str, heads: Heads, *, transposed: bool = False) -> tuple[Projection, Projection]:
    """One linear layer with all of q first, then all of k."""
    q_end, k_end = heads.query_rows, heads.query_rows + heads.key_rows
    return (
        projection(site, name, lambda t: t[:q_end].unflatten(0, heads.query_shape), transposed=transposed),
        projection(site, name, lambda t: t[q_end:k_end].unflatten(0, heads.key_shape), transposed=transposed),
    )


def usual_attention(
    site: Site,
    layout: Callable[..., tuple[Projection, Projection]],
    *layers: str,
    rope: Callable[[Site, int], Rope] | None = None,
    **parts: Any,
) -> Attention:
    """Heads from the configuration, q and k by `layout` (one of the above) from `layers`, logits divided by √K."""
    heads = Heads.of(site)
    query, key = layout(site, *layers, heads)
    rotary = None if rope is None else rope(site, heads.width)
    return site.attention(query, key, scale=heads.width**-0.5, rope=rotary, **parts)


def rms_norm(site: Site, name: str, *, plus_one: bool = False) -> Norm | None:
    """RMSNorm by the name of its module; Gemma stores its gain minus one."""
    gain = site.optional(f"{name}.weight")
    if gain is None:
        return None
    eps = site.setting("rms_norm_eps", "layer_norm_rms_epsilon", default=1e-6)
    return Norm(gain, eps, base=1.0 if plus_one else 0.0)


def layer_norm(site: Site, name: str, *eps: str, default: float = 1e-5) -> Norm | None:
    gain = site.optional(f"{name}.weight")
    if gain is None:
        return None
    return Norm(gain, site.setting(*eps, default=default), centred=True, bias=site.optional(f"{name}.bias"))


def rope_parameters(site: Site, layer_type: str | None = None) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] | None = site.setting("rope_parameters", default=None)
    if parameters is not None:
        return parameters[layer_type] if layer_type is not None and layer_type in parameters else parameters
    theta = site.setting("rope_theta", "rotary_emb_base", default=10000.0)
    return {"rope_theta": theta, **(site.setting("rope_scaling", default=None) or {})}


def rope(site: Site, width: int, *, layer_type: str | None = None, interleaved: bool = False) -> Rope:
    """Rotary frequencies from a configuration, in its present form (rope_parameters) or its older one."""
    parameters = rope_parameters(site, layer_type)
    share = parameters.get("partial_rotary_factor")
    if share is None:
        share = site.setting("partial_rotary_factor", "rotary_pct", default=1.0)
    if not _positive(share) or share > 1:
        raise LocaterError(f"{site.name}: the rotary part of a head must be in (0, 1], got {share!r:.80}")
    return rope_from(parameters, int(width * share), site, interleaved=interleaved)


def rope_from(parameters: Mapping[str, Any], dim: int, site: Site, *, interleaved: bool = False) -> Rope:
    theta = parameters.get("rope_theta") or site.setting("rope_theta", "rotary_emb_base", default=10000.0)
    factor = parameters.get("factor", 1.0)
    if not _positive(theta) or not _positive(factor):
        raise LocaterError(
            f"{site.name}: rope_theta and factor must be positive numbers, got {theta!r:.80} and {factor!r:.80}"
        )
    frequency = float(theta) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return Rope(frequency, interleaved)
    if kind == "linear":
        return Rope(frequency / parameters["factor"], interleaved)
    if kind == "llama3":
        return Rope(_llama3(frequency, parameters), interleaved)
    if kind == "factors":  # GGUF stores Llama 3.1's as a divisor for each frequency
        return Rope(frequency / torch.tensor(parameters["factors"], dtype=torch.float64), interleaved)
    raise LocaterError(
        f"{site.name} uses rotary embeddings of type {kind!r}, which change with the length of the text; "
        "locater reads default, linear and llama3"
    )


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _llama3(frequency: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    cycles = parameters["original_max_position_embeddings"] * frequency / (2 * math.pi)  # over the old context
    smooth = ((cycles - low) / (high - low)).clamp(0, 1)
    blended: Tensor = (1 - smooth) * frequency / factor + smooth * frequency
    return blended
