"""BERT, RoBERTa and DistilBERT: separate projections with biases; the norm comes after attention."""

from __future__ import annotations

from locater.models.attention import Attention
from locater.models.families._parts import Heads, separate
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
    return _read(site, "query", "key", "cross" if "crossattention" in site.name else "self")


@register(
    "DistilBertSelfAttention",
    "MultiHeadSelfAttention",
    checkpoints=("distilbert",),
    paths=(r"(?:.*\.)?layer\.\d+\.attention",),
)
def read_distilbert(site: Site) -> Attention:
    return _read(site, "q_lin", "k_lin", "self")


def _read(site: Site, query_name: str, key_name: str, kind: str) -> Attention:
    heads = Heads.of(site)
    query, key = separate(site, query_name, key_name, heads)
    return site.attention(query, key, kind=kind, scale=heads.width**-0.5)
