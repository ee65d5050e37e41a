"""BERT and RoBERTa: separate projections with biases; the norm comes after attention."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import separate, usual_attention
from locater.models.registry import Site, register


@register(
    checkpoints=("bert", "roberta"),
    paths=(r"(?:.*\.)?layer\.\d+\.attention\.self", r"(?:.*\.)?layer\.\d+\.crossattention\.self"),
)
def read(site: Site) -> Attention:
    kind = "cross" if "crossattention" in site.name else "self"
    return usual_attention(site, separate, "query", "key", kind=kind)
