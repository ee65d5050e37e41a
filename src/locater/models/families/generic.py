"""A W_QK that is trained jointly (Section 2 of the paper): a parameter `w_qk`, (D, D) or (heads, D, D)."""

from __future__ import annotations

from torch import nn

from locater.errors import LocaterError
from locater.models.attention import Attention
from locater.models.parts import Projection
from locater.models.registry import Site

NAMES = (("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("wq", "wk"), ("q", "k"), ("q_lin", "k_lin"))
SCALES = ("scaling", "scale", "softmax_scale", "attention_scale")


def looks_like_attention(module: nn.Module) -> bool:
    return _names(module) is not None or has_joint(module)


def has_joint(module: nn.Module) -> bool:
    return isinstance(getattr(module, "w_qk", None), nn.Parameter)


def read(site: Site) -> Attention:
    module = site.module
    assert module is not None
    weight = module.w_qk
    assert isinstance(weight, nn.Parameter)
    if weight.ndim not in (2, 3) or weight.shape[-1] != weight.shape[-2]:
        raise _refusal(site, f"w_qk must be (D, D) or (heads, D, D), got {tuple(weight.shape)}")
    scale, temperature = _first(module, SCALES), getattr(module, "temperature", None)
    if not isinstance(scale, float) and isinstance(temperature, (int, float)):
        scale = 1 / temperature
    if not isinstance(scale, float):
        raise _refusal(site, f"the scale of its logits is under none of {', '.join(SCALES)}, temperature")
    heads = 1 if weight.ndim == 2 else len(weight)
    key = Projection(weight, lambda t: t.reshape(heads, 1, *t.shape[-2:]))
    return site.attention(None, key, scale=scale)


def _names(module: nn.Module) -> tuple[str, str] | None:
    for query, key in NAMES:
        if isinstance(getattr(module, query, None), nn.Linear) and isinstance(getattr(module, key, None), nn.Linear):
            return query, key
    return None


def _first(module: nn.Module, names: tuple[str, ...]) -> object:
    return next((value for name in names if (value := getattr(module, name, None)) is not None), None)


def _refusal(site: Site, reason: str) -> LocaterError:
    return LocaterError(
        f"{site.name or type(site.module).__name__} ({type(site.module).__name__}) has a joint W_QK, but {reason}: "
        "register its family with locater.models.register"
    )
