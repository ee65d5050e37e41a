"""GPT-J: RoPE on the first coordinates of a head, in neighbouring pairs."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import layer_norm, rope_from, separate, usual_attention
from locater.models.registry import Site, register
from locater.models.rope import Rope


@register("GPTJAttention", checkpoints=("gptj",), paths=(r"(?:.*\.)?h\.\d+\.attn",))
def read(site: Site) -> Attention:
    norm = layer_norm(site, "../ln_1", "layer_norm_epsilon")
    return usual_attention(site, separate, "q_proj", "k_proj", rope=_rope, input_norm=norm)


def _rope(site: Site, width: int) -> Rope:
    dim = site.setting("rotary_dim", default=width)
    return rope_from({"rope_theta": 10000.0}, dim, site, interleaved=True)
