"""The paper's language model, E of them at once: every tensor has the models as its first dimension.

The architecture is that of fairseq 0.12.2's `transformer_lm` (a decoder without encoder): embeddings scaled by √D plus
sinusoidal positions, dropout, L layers of causal self-attention and a ReLU feed-forward net, each with a residual
connection and LayerNorm after it (post), before it (pre, with one more at the end) or none, and an output table without
bias. E = 1 is an ordinary model.

Legend: E stacked models, B blocks, T tokens a block, N = B·T, D width, H heads, K head width, F ffn width, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from locater.lab._random import dropout, dropout_add, site_key
from locater.lab.config import ModelConfig
from locater.qk import QK

__all__ = ["Dropout", "body_shapes", "embed", "hidden_states", "initial", "positions", "query_key"]

PAD = 1  # its embedding starts at zero, and positions are counted from the index after it, as fairseq does

See = Callable[[int, Tensor, Tensor, Tensor], None]
"""What a probe is: called for every layer with its number, input (E, N, D), queries and keys (E, B, H, T, ·)."""


def body_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter but the two tables, of one model."""
    d, f, h = config.width, config.ffn, config.heads
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config.layers):
        at = f"layers.{i}."
        if config.joint_qk:
            shapes[at + "qk.weight"] = (h, d, d)
        else:
            shapes |= {at + "q.weight": (d, d), at + "q.bias": (d,), at + "k.weight": (d, d), at + "k.bias": (d,)}
        shapes |= {at + "v.weight": (d, d), at + "v.bias": (d,), at + "out.weight": (d, d), at + "out.bias": (d,)}
        shapes |= {at + "fc1.weight": (f, d), at + "fc1.bias": (f,), at + "fc2.weight": (d, f), at + "fc2.bias": (d,)}
        if config.norm != "none":
            for norm in ("attention_norm", "ffn_norm"):
                shapes |= {at + norm + ".weight": (d,), at + norm + ".bias": (d,)}
    if config.norm == "pre":
        shapes |= {"norm.weight": (d,), "norm.bias": (d,)}
    return shapes


def initial(config: ModelConfig, vocabulary: int, seed: int) -> dict[str, Tensor]:
    """One model's parameters as fairseq draws them: embedding (V, D), output (V, D) unless tied, and the body."""
    random = torch.Generator().manual_seed(seed)
    d = config.width

    def uniform(shape: Sequence[int], bound: float) -> Tensor:
        return torch.empty(*shape).uniform_(-bound, bound, generator=random)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        module, kind = name.split(".")[-2:]
        if "norm" in module:
            return torch.ones(shape) if kind == "weight" else torch.zeros(shape)
        if module == "out":  # Xavier
            return uniform(shape, math.sqrt(6 / (2 * d))) if kind == "weight" else torch.zeros(shape)
        if module == "qk":  # what separate factors would start with
            w_q, w_k = (uniform((d, d), math.sqrt(6 / (2 * d) / 2)).unflatten(0, (config.heads, -1)) for _ in "qk")
            joint: Tensor = w_q.mT @ w_k
            return joint
        if module in ("q", "k", "v") and kind == "weight":  # Xavier with gain 1/√2
            return uniform(shape, math.sqrt(6 / (2 * d) / 2))
        fan_in = config.ffn if module == "fc2" else d
        return uniform(shape, 1 / math.sqrt(fan_in))  # nn.Linear's default, weights and biases

    tables = {"embedding": torch.randn(vocabulary, d, generator=random) * d**-0.5}
    tables["embedding"][PAD] = 0
    if not config.tied:
        tables["output"] = torch.randn(vocabulary, d, generator=random) * d**-0.5
    return tables | {name: draw(name, shape) for name, shape in body_shapes(config).items()}


def positions(tokens: int, width: int, device: torch.device | None = None) -> Tensor:
    """(T, D): all sines, then all cosines, counted from the index after the padding's."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=device) * -(math.log(10_000) / (half - 1)))
    angles = (torch.arange(tokens, device=device) + PAD + 1)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of each model's own table (E, V, D) for its tokens (E, N)."""
    e, v, d = table.shape
    rows = tokens + v * torch.arange(e, device=tokens.device)[:, None]
    return table.view(e * v, d).index_select(0, rows.flatten()).view(e, -1, d)


class Dropout:
    """Masks that depend on the model's seed, the step and the place, and on nothing else."""

    def __init__(self, rate: float, seeds: Tensor, step: Tensor) -> None:
        self.rate, self.seeds, self.step = rate, seeds, step

    def __call__(self, x: Tensor, site: int) -> Tensor:
        return dropout(x, site_key(self.seeds, self.step, site), self.rate)

    def add(self, x: Tensor, residual: Tensor, site: int) -> Tensor:
        return dropout_add(x, residual, site_key(self.seeds, self.step, site), self.rate)


def hidden_states(
    p: Mapping[str, Tensor],
    embedded: Tensor,  # (E, N, D), rows of the embedding table
    config: ModelConfig,
    drop: Dropout | None = None,
    see: See | None = None,
) -> Tensor:
    """(E, N, D), what the output table multiplies."""
    e, _, d = embedded.shape
    t, h = config.tokens, config.heads
    place = positions(t, d, embedded.device).to(embedded.dtype)
    x = (embedded.view(e, -1, t, d) * math.sqrt(d) + place).view(e, -1, d)
    x = drop(x, 0) if drop else x

    def norm(x: Tensor, name: str) -> Tensor:
        normed = functional.layer_norm(x, (d,))
        return torch.addcmul(p[name + ".bias"][:, None], normed, p[name + ".weight"][:, None])

    def residual(x: Tensor, branch: Tensor, site: int) -> Tensor:
        return drop.add(branch, x, site) if drop else x + branch

    for i in range(config.layers):
        at = f"layers.{i}."
        y = norm(x, at + "attention_norm") if config.norm == "pre" else x
        q, k = query_key(p, at, y, config)  # (E, B, H, T, K), or D wide where W_QK is trained itself
        v = _heads(_linear(p, at + "v", y), t, h)
        if see:
            see(i, x, q, k)
        q, k, v = (a.flatten(0, 1) for a in (q, k, v))  # (E·B, H, T, K)
        scale = 1 / math.sqrt(config.head_width)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        y = _linear(p, at + "out", mixed.transpose(1, 2).reshape(e, -1, d))
        x = residual(x, y, 2 * i + 1)
        x = norm(x, at + "attention_norm") if config.norm == "post" else x

        y = norm(x, at + "ffn_norm") if config.norm == "pre" else x
        y = _linear(p, at + "fc2", functional.relu(_linear(p, at + "fc1", y)))
        x = residual(x, y, 2 * i + 2)
        x = norm(x, at + "ffn_norm") if config.norm == "post" else x
    if see:  # the last hidden states, after the last layer; they have no queries
        see(config.layers, x, x.new_empty(0), x.new_empty(0))
    return norm(x, "norm") if config.norm == "pre" else x


def query_key(p: Mapping[str, Tensor], at: str, x: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Queries and keys (E, B, H, T, ·) whose products, over √K, are the logits."""
    t, h = config.tokens, config.heads
    if not config.joint_qk:
        return _heads(_linear(p, at + "q", x), t, h), _heads(_linear(p, at + "k", x), t, h)
    e, _, d = x.shape
    keys = x.view(e, -1, 1, t, d).expand(-1, -1, h, -1, -1)
    queries = (x[:, None] @ p[at + "qk.weight"]).view(e, h, -1, t, d)  # (x_queryᵀ W_QK) x_key
    return queries.transpose(1, 2), keys


def query_key_matrix(p: Mapping[str, Tensor], layer: int, config: ModelConfig) -> QK:
    """W_QK of every model and head of a layer, leading dimensions (E, H)."""
    at = f"layers.{layer}."
    if config.joint_qk:
        return QK.from_joint(p[at + "qk.weight"])
    return QK(*(p[at + name].unflatten(1, (config.heads, -1)) for name in ("q.weight", "k.weight")))


def _linear(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight, bias = p[name + ".weight"], p[name + ".bias"]
    if len(x) == 1:  # an ordinary product is faster than a batch of one
        return functional.linear(x[0], weight[0], bias[0])[None]
    return torch.baddbmm(bias[:, None], x, weight.mT)


def _heads(x: Tensor, tokens: int, heads: int) -> Tensor:
    """(E, N, D) → (E, B, H, T, K)."""
    return x.view(len(x), -1, tokens, heads, x.shape[-1] // heads).transpose(2, 3)
