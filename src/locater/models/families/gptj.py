"""GPT-J: RoPE on the first coordinates of a head, in neighbouring pairs."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import Heads, layer_norm, rope_from, separate
from locater.models.registry import Site, register


@register("GPTJAttention", checkpoints=("gptj",), paths=(r"(?:.*\.)?h\.\d+\.attn",))
def read(site: Site) -> Attention:
    heads = Heads.of(site)
    query, key = separate(site, "q_proj", "k_proj", heads)
    dim = site.setting("rotary_dim", default=heads.width)
    return site.attention(
        query,
        key,
        scale=heads.width**-0.5,
        rope=rope_from({"rope_theta": 10000.0}, dim, site, interleaved=True),
        input_norm=layer_norm(site, "../ln_1", "layer_norm_epsilon"),
    )
