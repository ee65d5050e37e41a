"""Latent attention (MLA): DeepSeek V2 and V3, Kimi, GLM-4-MoE-lite, LongCat, MiniCPM3 and those built like them.

Queries are made of a normed latent (of the hidden states where there is none), keys of a normed latent and of one
rotary key that all heads share. W_Q of a head is its rows of q_b_proj; W_K is W_UK beside an identity that passes the
shared key on, as it is before rotation. Both are between different spaces: W_QK has no trace. The rotary rows of a head
are stored last, and read first.

Legend: H heads, N rows without rotation, P rotary rows, K = P + N, L width of the key latent.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.models.attention import Attention
from locater.models.families._parts import projection, rope_from, rope_parameters
from locater.models.parts import Norm, eps_of
from locater.models.positions import QueryGain
from locater.models.registry import Reader, Site, register
from locater.models.rope import Rope

_SIZES = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_EPS = 1e-6  # of the latents' norms, where no module says it: not that of the other norms


class Variant(NamedTuple):
    """What differs between models, and settings do not say, or not all of them."""

    rotary: str = "interleaved"  # or "halves", "none"
    widened: bool = False  # latents are multiplied by √(hidden size / their width)
    growing: bool = False  # queries grow with their position, as Llama 4's


_OF_TYPES = {
    "minicpm3": Variant("halves"),
    "kimi_linear": Variant("none"),
    "longcat_flash": Variant(widened=True),
}


def candidates() -> Iterator[Reader]:
    """Readers among which a proof decides."""
    yield read  # by what is known of the type
    for values in itertools.product(("interleaved", "halves", "none"), (False, True), (False, True)):
        yield functools.partial(_read, variant=Variant(*values))


@register(
    checkpoints=(
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3",
        "kimi_k2", "youtu", "axk1",
    ),
    paths=(r"(?:.*\.)?layers\.\d+\.self_attn(?:\.\d+)?",),
)  # fmt: skip
def read(site: Site) -> Attention:
    """By the model's type and its settings, where nothing was proven."""
    variant = _OF_TYPES.get(site.setting("model_type", default=""), Variant())
    halves = variant.rotary == "interleaved" and not site.setting("rope_interleave", default=True)
    return _read(site, variant._replace(rotary="halves") if halves else variant)


def _read(site: Site, variant: Variant) -> Attention:
    sizes = [site.setting(name) for name in _SIZES]
    heads, nope, rotary, values, latent = sizes
    least = (1, 1, 0, 1, 1)  # a head may have no rotary rows
    if not all(isinstance(size, int) and size >= n for size, n in zip(sizes, least, strict=True)):
        raise LocaterError(f"{site.name}: {', '.join(_SIZES)} must be positive whole numbers, got {sizes!r:.80}")
    parameters = rope_parameters(site)

    def of_query(t: Tensor) -> Tensor:
        t = t.unflatten(0, (heads, 1, -1))  # a gate of the values may follow
        return torch.cat([t[:, :, nope : nope + rotary], t[:, :, :nope]], 2)  # (H, 1, K, …)

    def of_key(t: Tensor) -> Tensor:
        """(H, 1, K, L + P): the shared key first, as its rows; W_UK below."""
        up = t.unflatten(0, (heads, 1, nope + values))[:, :, :nope]
        passed = torch.eye(rotary, latent + rotary, dtype=t.dtype, device=t.device).expand(heads, 1, -1, -1)
        return torch.cat([passed, torch.nn.functional.pad(up, (rotary, 0))], 2)

    gated = site.optional("q_gate_proj.weight") is not None  # of the latent, normed and not
    compressed = site.optional("q_a_layernorm.weight") is not None
    name = "q_gate_proj" if gated else "q_b_proj" if compressed else "q_proj"
    query = projection(site, name, of_query, computed=True)
    key = projection(site, "kv_b_proj", of_key, computed=True)
    down, norm = _linear(site, "kv_a_proj_with_mqa"), _norm(site, "kv_a_layernorm")
    hidden = site.setting("hidden_size") if variant.widened else None

    def widened(x: Tensor) -> Tensor:
        return x if hidden is None else x * (hidden / x.shape[-1]) ** 0.5

    def key_input(states: Tensor) -> Tensor:
        x = down(states)
        return torch.cat([x[..., latent:], widened(norm(x[..., :latent]))], -1)

    query_input = None
    if compressed:
        query_down, query_norm = _linear(site, "q_a_proj"), _norm(site, "q_a_layernorm")

        def query_input(states: Tensor) -> Tensor:
            x = query_down(states)
            return torch.cat([query_norm(x), x], -1) if gated else widened(query_norm(x))

    gain = None
    if variant.growing:
        gain = QueryGain(parameters["llama_4_scaling_beta"], parameters["original_max_position_embeddings"])
    numbers = [int(n) for n in re.findall(r"(?:^|\.)(\d+)(?=\.|$)", site.name)[-2:]]
    return site.attention(
        query,
        key,
        scale=(nope + rotary) ** -0.5 * _logarithmic(parameters, parameters.get("mscale_all_dim") or 0.0) ** 2,
        rope=None if variant.rotary == "none" else _rope(site, parameters, rotary, variant.rotary == "interleaved"),
        query_input=query_input,
        key_input=key_input,
        query_gain=gain,
        shared_key_rows=rotary,
        layer=2 * numbers[0] + numbers[1] if variant.widened and len(numbers) == 2 else site.layer,
    )


def _norm(site: Site, name: str) -> Norm:
    return Norm(site.tensor(f"{name}.weight"), eps_of(getattr(site.module, name, None), _EPS))


def _linear(site: Site, name: str) -> Callable[[Tensor], Tensor]:
    """The linear layer as a function."""
    layer = projection(site, name, lambda t: t[None, None])

    def apply(x: Tensor) -> Tensor:
        bias = layer.bias
        return torch.nn.functional.linear(x, layer.weight[0, 0], None if bias is None else bias[0, 0])

    return apply


def _logarithmic(parameters: Mapping[str, Any], share: float = 1.0) -> float:
    """YaRN's factor for a context that is longer by `factor`."""
    factor = parameters.get("factor") or 1.0
    return 0.1 * share * math.log(factor) + 1 if _type(parameters) != "default" and factor > 1 else 1.0


def _type(parameters: Mapping[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _rope(site: Site, parameters: Mapping[str, Any], width: int, interleaved: bool) -> Rope:
    """YaRN: frequencies that turn often in the original context stay, slow ones are divided by `factor`."""
    if _type(parameters) != "yarn":
        return rope_from(parameters, width, site, interleaved=interleaved)
    rope = rope_from({**parameters, "rope_type": "default"}, width, site, interleaved=interleaved)
    theta = float(parameters["rope_theta"])
    context = parameters.get("original_max_position_embeddings") or site.setting("max_position_embeddings")

    def pair(turns: float) -> float:
        """The one that turns so often in the original context."""
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(parameters.get("beta_fast") or 32), pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slow = ((torch.arange(rope.pairs, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    gain = parameters.get("attention_factor")
    if gain is None:
        shares = [parameters.get(name) or 0.0 for name in ("mscale", "mscale_all_dim")]
        one, other = (_logarithmic(parameters, share) for share in (shares if all(shares) else (1.0, 0.0)))
        gain = one / other
    frequencies = rope.frequencies * (1 - slow + slow / parameters["factor"])
    return Rope(frequencies, interleaved, float(gain))
