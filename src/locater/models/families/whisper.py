"""Whisper: encoder, decoder and cross attention; the key projection has no bias."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import Heads, layer_norm, separate
from locater.models.registry import Site, register


@register(
    "WhisperAttention",
    checkpoints=("whisper",),
    paths=(r"(?:.*\.)?(?:encoder|decoder)\.layers\.\d+\.(?:self_attn|encoder_attn)",),
)
def read(site: Site) -> Attention:
    side = "decoder" if "decoder." in site.name else "encoder"
    count, hidden = site.setting(f"{side}_attention_heads"), site.setting("d_model")
    heads = Heads(count, 1, hidden // count)
    query, key = separate(site, "q_proj", "k_proj", heads)
    cross = site.name.endswith("encoder_attn")
    return site.attention(
        query,
        key,
        kind="cross" if cross else side,
        scale=heads.width**-0.5,
        input_norm=None if cross else layer_norm(site, "../self_attn_layer_norm"),
    )
