"""Any module with q and k projections under the usual names, provided heads and scale can be known.

A jointly trained W_QK (Section 2 of the paper) is a parameter `w_qk`, (D, D) or (heads, D, D).
Nothing is guessed: a module that looks like attention but does not say its head count or its scale is refused.
"""

from __future__ import annotations

import inspect
import re

from torch import nn

from locater.errors import LocaterError
from locater.models.attention import Attention, Projection
from locater.models.families._parts import Heads, separate
from locater.models.registry import Site

NAMES = (("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("wq", "wk"), ("q", "k"), ("q_lin", "k_lin"))
HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "nhead")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
SCALES = ("scaling", "scale", "softmax_scale", "attention_scale")
# members, and arguments of forward, that change the logits in ways this file does not know
OTHER_PARTS = re.compile(r"rotary|rope|softcap|relative|alibi|^(q|k|query|key|qk)_?(layer)?_?norm")
FROM_OUTSIDE = re.compile(r"position_embeddings|position_bias|rotary|rope|^cos$|^sin$|alibi|relative|freqs")


def looks_like_attention(module: nn.Module) -> bool:
    return _names(module) is not None or isinstance(getattr(module, "w_qk", None), nn.Parameter)


def read(site: Site) -> Attention:
    module = site.module
    assert module is not None
    if isinstance(getattr(module, "w_qk", None), nn.Parameter):
        return _joint(site, module)
    names = _names(module)
    assert names is not None
    others = [name for name in dir(module) if OTHER_PARTS.search(name) and getattr(module, name, None) is not None]
    others += [name for name in inspect.signature(module.forward).parameters if FROM_OUTSIDE.search(name)]
    if others:
        raise _refusal(site, f"it also has {', '.join(others)}, whose effect on the logits is not known")
    count, scale = _first(module, HEAD_COUNTS), _first(module, SCALES)
    if not isinstance(count, int):
        raise _refusal(site, f"its head count is under none of {', '.join(HEAD_COUNTS)}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise _refusal(site, f"the scale of its logits is under none of {', '.join(SCALES)} as a number")
    query: nn.Linear = getattr(module, names[0])
    groups = _first(module, KEY_HEAD_COUNTS)
    groups = groups if isinstance(groups, int) else count
    if count < 1 or groups < 1 or query.out_features % count or count % groups:
        raise _refusal(site, f"{query.out_features} outputs do not split into {count} heads in {groups} groups")
    heads = Heads(groups, count // groups, query.out_features // count)
    q, k = separate(site, *names, heads)
    return site.attention(q, k, scale=float(scale))


def _joint(site: Site, module: nn.Module) -> Attention:
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
        f"{site.name or type(site.module).__name__} ({type(site.module).__name__}) has query and key projections, but "
        f"{reason}: register its family with locater.models.register"
    )
