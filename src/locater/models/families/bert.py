"""BERT, RoBERTa and DistilBERT: separate projections with biases; the norm comes after attention."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import separate, usual_attention
from locater.models.registry import Site, register


@register(
    "BertSelfAttention",
    "BertCrossAttention",
    "RobertaSelfAttention",
    "RobertaCrossAttention",
    "ViTSelfAttention",
    checkpoints=("bert", "roberta"),
    paths=(r"(?:.*\.)?layer\.\d+\.attention\.self", r"(?:.*\.)?layer\.\d+\.crossattention\.self"),
)
def read(site: Site) -> Attention:
    kind = "cross" if "crossattention" in site.name else "self"
    return usual_attention(site, separate, "query", "key", kind=kind)


@register(
    "DistilBertSelfAttention",
    "MultiHeadSelfAttention",
    checkpoints=("distilbert",),
    paths=(r"(?:.*\.)?layer\.\d+\.attention",),
)
def read_distilbert(site: Site) -> Attention:
    return usual_attention(site, separate, "q_lin", "k_lin")
