"""GPT-NeoX and Pythia: q, k, v fused head by head; RoPE on a part of each head."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import Heads, interleaved, layer_norm, rope
from locater.models.registry import Site, register


@register("GPTNeoXAttention", checkpoints=("gpt_neox",), paths=(r"(?:.*\.)?layers\.\d+\.attention",))
def read(site: Site) -> Attention:
    heads = Heads.of(site)
    query, key = interleaved(site, "query_key_value", heads)
    return site.attention(
        query,
        key,
        scale=heads.width**-0.5,
        rope=rope(site, heads.width),
        input_norm=layer_norm(site, "../input_layernorm", "layer_norm_eps"),
    )
