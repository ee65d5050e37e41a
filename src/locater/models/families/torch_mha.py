"""torch.nn.MultiheadAttention, and with it TransformerEncoderLayer and TransformerDecoderLayer."""

from __future__ import annotations

from torch import Tensor, nn

from locater.errors import LocaterError
from locater.models.attention import Attention
from locater.models.parts import Projection
from locater.models.registry import Site, register


@register("MultiheadAttention")
def read(site: Site) -> Attention:
    module = site.module
    assert isinstance(module, nn.MultiheadAttention)
    if site.name.split(".")[-1] == "base_layer":  # PEFT merges its change into the weights for each forward
        raise LocaterError(f"{site.name}: adapters of nn.MultiheadAttention are not read; merge_and_unload() them")
    d, heads = module.embed_dim, module.num_heads
    if module.bias_k is not None or module.add_zero_attn:
        raise LocaterError(f"{site.name}: add_bias_kv and add_zero_attn add keys that no token has; not supported")
    shape = (heads, 1, d // heads)
    bias = site.optional("in_proj_bias")

    def first(tensor: Tensor) -> Tensor:
        return tensor[:d].view(*shape, *tensor.shape[1:])

    def second(tensor: Tensor) -> Tensor:
        return tensor[d : 2 * d].view(*shape, *tensor.shape[1:])

    if module._qkv_same_embed_dim:
        weight = site.tensor("in_proj_weight")
        query, key = Projection(weight, first, bias, first), Projection(weight, second, bias, second)
    else:
        query = Projection(site.tensor("q_proj_weight"), first, bias, first)
        key = Projection(site.tensor("k_proj_weight"), first, bias, second)
    return site.attention(
        query,
        key,
        kind="cross" if site.name.split(".")[-1] == "multihead_attn" or module.kdim != d else "self",
        scale=(d // heads) ** -0.5,
    )
