"""The paper's language model, E of them at once: every tensor has the models as its first dimension.

The architecture is that of fairseq 0.12.2's `transformer_lm` (a decoder without encoder): embeddings scaled by √D plus
sinusoidal positions, dropout, L layers of causal self-attention and a ReLU feed-forward net, each with a residual
connection and LayerNorm after it (post), before it (pre, with one more at the end) or none, and an output table without
bias. Positions may be rotary instead, which fairseq's are not. E = 1 is a single model.

Legend: E stacked models, B blocks, T tokens a block, N = B·T, D width, H heads, K head width, F ffn width, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from locater.lab.config import ModelConfig
from locater.lab.data import PAD
from locater.lab.engine._norm import add, add_norm, norm
from locater.lab.engine._random import dropout, site_key
from locater.lab.engine.heads import Parameters, rope_of
from locater.lab.engine.methods import Method

__all__ = [
    "Dropout",
    "add_rows_",
    "body_shapes",
    "dropout_sites",
    "embed",
    "hidden_states",
    "initial",
    "positions",
]

Probe = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Called for every layer with its number, the residual stream before it and what its attention reads
of that (E, N, D), queries and keys (E, B, H, T, ·)."""


def body_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter but the two tables, of one model."""
    d, f, h = config.width, config.ffn, config.heads
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config.layers):
        at = f"layers.{i}."
        if config.joint_qk:
            shapes |= {at + "qk.weight": (h, d, d), at + "v.weight": (d, d), at + "v.bias": (d,)}
        else:  # queries, keys and values, one above the other
            shapes |= {at + "qkv.weight": (3 * d, d), at + "qkv.bias": (3 * d,)}
        shapes |= {at + "out.weight": (d, d), at + "out.bias": (d,)}
        shapes |= {at + "fc1.weight": (f, d), at + "fc1.bias": (f,), at + "fc2.weight": (d, f), at + "fc2.bias": (d,)}
        if config.method == "qk-norm":
            shapes |= {at + "q_gain": (config.head_width,), at + "k_gain": (config.head_width,)}
        if config.method.startswith("sigma-reparam"):
            ends = {"qkv": 3, "out": 1, "fc1": 1, "fc2": 1} if config.method == "sigma-reparam" else {"qkv": 2}
            shapes |= {f"{at}{name}.gamma": (count,) for name, count in ends.items()}
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
        if kind in ("gamma", "q_gain", "k_gain"):
            return torch.ones(shape)  # until the method says otherwise
        if "norm" in module:
            return torch.ones(shape) if kind == "weight" else torch.zeros(shape)
        if module == "out":  # Xavier
            return uniform(shape, math.sqrt(6 / (2 * d))) if kind == "weight" else torch.zeros(shape)
        if module == "qk":  # what separate factors would start with
            w_q, w_k = (uniform((d, d), math.sqrt(6 / (2 * d) / 2)).unflatten(0, (config.heads, -1)) for _ in "qk")
            joint: Tensor = w_q.mT @ w_k
            return joint
        if module in ("qkv", "v") and kind == "weight":  # Xavier with gain 1/√2, each of the three by itself
            return uniform(shape, math.sqrt(6 / (2 * d) / 2))
        fan_in = config.ffn if module == "fc2" else d
        return uniform(shape, 1 / math.sqrt(fan_in))  # nn.Linear's default, weights and biases

    tables = {"embedding": torch.randn(vocabulary, d, generator=random) * d**-0.5}
    tables["embedding"][PAD] = 0  # as fairseq has it; positions are counted from the index after it
    if not config.tied:
        tables["output"] = torch.randn(vocabulary, d, generator=random) * d**-0.5
    return tables | {name: draw(name, shape) for name, shape in body_shapes(config).items()}


def positions(
    tokens: int, width: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(T, D): all sines, then all cosines, counted from the index after the padding's."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=device, dtype=dtype) * -(math.log(10_000) / (half - 1)))
    angles = (torch.arange(tokens, device=device) + PAD + 1)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of each model's own table (E, V, D) for its tokens (E, N)."""
    e, v, d = table.shape
    rows = tokens + v * torch.arange(e, device=tokens.device)[:, None]
    return table.view(e * v, d).index_select(0, rows.flatten()).view(e, -1, d)


def add_rows_(table: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """table[e, tokens[e, n]] += rows[e, n], by operations that add in the same order on every run."""
    e, v, d = table.shape
    at = (tokens + v * torch.arange(e, device=tokens.device)[:, None]).flatten()
    if table.is_cuda:
        table.view(e * v, d).index_put_((at,), rows.reshape(-1, d), accumulate=True)
    else:
        table.view(e * v, d).index_add_(0, at, rows.reshape(-1, d))


class Dropout:
    """Masks that depend on the model's seed, the step and the place, and on nothing else."""

    def __init__(self, rate: float, seeds: Tensor, step: Tensor, sites: int) -> None:
        self.rate = rate
        self._keys = site_key(seeds, step, torch.arange(sites, device=seeds.device)[:, None])  # (S, E)

    def key(self, site: int) -> Tensor:
        return self._keys[site]


def dropout_sites(config: ModelConfig) -> int:
    """The embeddings, and two branches a layer."""
    return 1 + 2 * config.layers


def hidden_states(
    p: Parameters,
    embedded: Tensor,  # (E, N, D), rows of the embedding table
    config: ModelConfig,
    drop: Dropout | None = None,
    probe: Probe | None = None,
    method: Method | None = None,
) -> Tensor:
    """(E, N, D), what the output table multiplies."""
    method = method or Method(config, embedded)
    p = method.weights(p)
    (e, _, d), t, dtype, device = embedded.shape, config.tokens, embedded.dtype, embedded.device
    rope, x = rope_of(config, device), embedded * math.sqrt(d)
    if rope is None:
        sines = positions(t, d, device, torch.promote_types(dtype, torch.float32))
        x = (x.view(e, -1, t, d) + sines.to(dtype)).view(e, -1, d)
    else:
        angles = rope.angles(torch.arange(t, device=device), dtype)
    stream = _ResidualStream(p, config, drop, dropout(x, drop.key(0), drop.rate) if drop else x)
    for i in range(config.layers):
        at = f"layers.{i}."
        method.entering(i, stream.normed)
        q, k, v = _query_key_value(p, at, stream.normed, config)  # (E, B, H, T, ·)
        q, k = method.before_rope(p, i, q, k)
        if rope is not None:
            q, k = rope.rotate_by(q, *angles), rope.rotate_by(k, *angles)
        q, k = method.compare(p, i, q, k)
        if probe:
            probe(i, stream.x, stream.normed, q, k)
        mixed = method.attend(q, k, v, 1 / math.sqrt(config.head_width))  # (E·B, H, T, ·)
        stream.add(mixed.transpose(1, 2).reshape(e, -1, d), at + "out")
        stream.add(functional.relu(_linear(p, at + "fc1", stream.normed)), at + "fc2")
    if probe:  # the hidden states after the last layer; they have no queries
        probe(config.layers, stream.x, stream.normed, x.new_empty(0), x.new_empty(0))
    return stream.normed


class _ResidualStream:
    """x (E, N, D), to which branches are added, two a layer; and `normed`, what the next branch reads of it.

    LayerNorm stands after each branch and is part of the stream (post), or before each and the output (pre).
    """

    def __init__(self, p: Parameters, config: ModelConfig, drop: Dropout | None, x: Tensor) -> None:
        own = [f"layers.{i}.{name}" for i in range(config.layers) for name in ("attention_norm", "ffn_norm")]
        self._norms = iter([*own[1:], "norm"] if config.norm == "pre" else own)  # after each branch
        self._sites = iter(range(1, dropout_sites(config)))
        self._p, self._kind, self._drop = p, config.norm, drop
        self.x = x
        self.normed = norm(x, p[own[0] + ".weight"], p[own[0] + ".bias"]) if config.norm == "pre" else x

    def add(self, inner: Tensor, linear: str) -> None:
        """Adds a branch: a linear layer of `inner`, dropped."""
        p, after, site = self._p, next(self._norms), next(self._sites)
        key, rate = (self._drop.key(site), self._drop.rate) if self._drop else (None, 0.0)
        branch, bias = _product(inner, p[linear + ".weight"]), p[linear + ".bias"]
        if self._kind == "none":
            self.x = self.normed = add(branch, bias, self.x, key, rate)
            return
        total, self.normed = add_norm(branch, bias, self.x, p[after + ".weight"], p[after + ".bias"], key, rate)
        self.x = self.normed if self._kind == "post" else total


def _query_key_value(p: Parameters, at: str, x: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(E, B, H, T, ·) each; products of queries and keys, over √K, are the logits."""
    (e, _, d), t, h = x.shape, config.tokens, config.heads
    if not config.joint_qk:
        q, k, v = _split(_linear(p, at + "qkv", x).view(e, -1, t, 3, h, d // h))
        return q, k, v
    queries = (x[:, None] @ p[at + "qk.weight"]).view(e, h, -1, t, d).transpose(1, 2)  # (x_queryᵀ W_QK) x_key
    keys = x.view(e, -1, 1, t, d).expand(-1, -1, h, -1, -1)
    values = _linear(p, at + "v", x).view(e, -1, t, h, d // h).transpose(2, 3)
    return queries, keys, values


def _linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    weight, bias = p[name + ".weight"], p[name + ".bias"]
    if len(x) == 1:  # a plain product is faster than a batch of one
        return functional.linear(x[0], weight[0], bias[0])[None]
    found: Tensor = _products(x, weight, bias)
    return found


def _product(x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = functional.linear(x[0], weight[0])[None] if len(x) == 1 else _products(x, weight, None)
    return found


class _Products(torch.autograd.Function):
    """x wᵀ + bias of every model; autograd's own gradient of w would be a transposed one, to be copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *ups: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        (up,) = ups
        return torch.bmm(up, weight), torch.bmm(up.mT, x), up.sum(1) if ctx.biased else None


class _SplitQKV(torch.autograd.Function):
    """Queries, keys and values (E, B, H, T, K), views of (E, B, T, 3, H, K); their gradients are copied once."""

    @staticmethod
    def forward(ctx: Any, together: Tensor) -> tuple[Tensor, ...]:
        ctx.shape = together.shape
        return tuple(together.permute(3, 0, 1, 4, 2, 5).unbind(0))

    @staticmethod
    def backward(ctx: Any, *ups: Any) -> Tensor:
        out: Tensor = ups[0].new_empty(ctx.shape)
        for i, up in enumerate(ups):
            out[:, :, :, i].copy_(up.transpose(2, 3))
        return out


_products: Any = _Products.apply
_split: Any = _SplitQKV.apply
