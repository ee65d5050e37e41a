"""GPT-NeoX and Pythia: q, k, v fused head by head; RoPE on a part of each head."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import interleaved, layer_norm, rope, usual_attention
from locater.models.registry import Site, register


@register("GPTNeoXAttention", checkpoints=("gpt_neox",), paths=(r"(?:.*\.)?layers\.\d+\.attention",))
def read(site: Site) -> Attention:
    norm = layer_norm(site, "../input_layernorm", "layer_norm_eps")
    return usual_attention(site, interleaved, "query_key_value", rope=rope, input_norm=norm)
