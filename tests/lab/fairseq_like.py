"""fairseq 0.12.2's transformer_lm in PyTorch's own modules: the independent transcription the lab is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.lab import ModelConfig


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.width
        self.norm_place = config.norm
        self.attention = nn.MultiheadAttention(d, config.heads, batch_first=True)
        self.attention_norm = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, config.ffn), nn.Linear(config.ffn, d)
        self.ffn_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        pre, post = self.norm_place == "pre", self.norm_place == "post"
        y = self.attention_norm(x) if pre else x
        y, _ = self.attention(y, y, y, attn_mask=mask, need_weights=False)
        x = x + self.dropout(y)
        x = self.attention_norm(x) if post else x
        y = self.ffn_norm(x) if pre else x
        x = x + self.dropout(self.fc2(functional.relu(self.fc1(y))))
        return self.ffn_norm(x) if post else x


class LanguageModel(nn.Module):
    def __init__(self, config: ModelConfig, vocabulary: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        d = config.width
        self.config = config
        self.embedding = nn.Embedding(vocabulary, d, padding_idx=1)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(d) if config.norm == "pre" else nn.Identity()
        self.output = nn.Linear(d, vocabulary, bias=False)
        if config.tied:
            self.output.weight = self.embedding.weight
        self.dropout = nn.Dropout(config.dropout)
        half = d // 2
        frequency = torch.tensor([10_000 ** (-j / (half - 1)) for j in range(half)], dtype=torch.float64)
        angle = torch.arange(2, config.tokens + 2)[:, None] * frequency  # positions count from 2
        self.register_buffer("positions", torch.cat([angle.sin(), angle.cos()], 1))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        x = self.dropout(math.sqrt(self.config.width) * self.embedding(tokens) + self.positions[:t])
        mask = torch.triu(torch.full((t, t), -math.inf), 1).to(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.output(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """fairseq's: summed over the tokens that are no padding, then divided by their number."""
        total = functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=1, reduction="sum")
        return total / (targets != 1).sum()

    def names(self) -> dict[str, tuple[nn.Parameter, slice]]:
        """The lab's name of every parameter → the parameter here and the rows of it."""
        every = slice(None)
        found: dict[str, tuple[nn.Parameter, slice]] = {"embedding": (self.embedding.weight, every)}
        if not self.config.tied:
            found["output"] = (self.output.weight, every)
        for i, layer in enumerate(self.layers):
            at = f"layers.{i}."
            found[at + "qkv.weight"] = (layer.attention.in_proj_weight, every)
            found[at + "qkv.bias"] = (layer.attention.in_proj_bias, every)
            modules = {"out": layer.attention.out_proj, "fc1": layer.fc1, "fc2": layer.fc2}
            if self.config.norm != "none":
                modules |= {"attention_norm": layer.attention_norm, "ffn_norm": layer.ffn_norm}
            for name, module in modules.items():
                found[f"{at}{name}.weight"], found[f"{at}{name}.bias"] = (module.weight, every), (module.bias, every)
        if self.config.norm == "pre":
            found["norm.weight"], found["norm.bias"] = (self.norm.weight, every), (self.norm.bias, every)
        return found

    @torch.no_grad()
    def load(self, parameters: dict[str, Tensor]) -> LanguageModel:
        names = self.names()
        assert names.keys() == parameters.keys()
        for name, (parameter, rows) in names.items():
            parameter[rows] = parameters[name]
        return self
