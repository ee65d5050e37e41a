"""The lab's decoder in Hugging Face's own classes: OPT's (sines), GPT-NeoX's (rotary positions)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPTNeoXConfig, GPTNeoXModel, OPTConfig, OPTModel

from locater.lab import ModelConfig
from locater.lab.engine.heads import rope_of
from locater.lab.engine.model import positions


class Twin(nn.Module):
    """A Pre-LN decoder between the lab's two tables, in float64."""

    def __init__(self, config: ModelConfig, words: int, attention: str) -> None:
        super().__init__()
        assert config.norm == "pre"
        assert not config.tied
        self.config = config
        self.embedding, self.output = (nn.Parameter(torch.zeros(words, config.width)) for _ in range(2))
        shared = {"hidden_size": config.width, "num_hidden_layers": config.layers, "attn_implementation": attention}
        shared |= {"num_attention_heads": config.heads, "vocab_size": 2, "max_position_embeddings": config.tokens}
        if config.positions == "sines":
            made = OPTConfig(
                **shared, ffn_dim=config.ffn, word_embed_proj_dim=config.width, dropout=0.0, attention_dropout=0.0
            )
            self.decoder = OPTModel(made).decoder
        else:
            made = GPTNeoXConfig(
                **shared, intermediate_size=config.ffn, hidden_act="relu", use_parallel_residual=False, rotary_pct=1.0,
                attention_dropout=0.0, hidden_dropout=0.0,
            )  # fmt: skip
            self.decoder = GPTNeoXModel(made)
            self.decoder.rotary_emb = Angles(config)
        unused = self.decoder.get_input_embeddings().weight  # inputs are embedded here
        unused.requires_grad_(False)
        self.double()
        if config.positions == "sines":
            table = self.decoder.embed_positions.weight.requires_grad_(False)
            table.zero_()[2:] = positions(config.tokens, config.width, dtype=torch.float64)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As fairseq's: over the tokens that are no padding."""
        embedded = math.sqrt(self.config.width) * functional.embedding(tokens, self.embedding)
        x = self.decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return functional.cross_entropy((x @ self.output.T).flatten(0, 1), targets.flatten(), ignore_index=1)

    def parts(self) -> dict[str, list[Tensor]]:
        """The lab's name of every parameter → the tensors here, whose rows one after the other are it."""
        found = {"embedding": [self.embedding], "output": [self.output]}
        sines = self.config.positions == "sines"
        for i, layer in enumerate(self.decoder.layers):
            if sines:
                attention, norms = layer.self_attn, (layer.self_attn_layer_norm, layer.final_layer_norm)
                qkv, out = [attention.q_proj, attention.k_proj, attention.v_proj], attention.out_proj
                fc1, fc2 = layer.fc1, layer.fc2
            else:
                attention, norms = layer.attention, (layer.input_layernorm, layer.post_attention_layernorm)
                qkv, out = [attention.query_key_value], attention.dense
                fc1, fc2 = layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h
            linear = {"qkv": qkv, "out": [out], "fc1": [fc1], "fc2": [fc2]}
            for name, modules in (linear | {"attention_norm": [norms[0]], "ffn_norm": [norms[1]]}).items():
                at = f"layers.{i}.{name}"
                found[f"{at}.weight"] = [original(module) for module in modules]
                found[f"{at}.bias"] = [module.bias for module in modules]
                if name in linear and "parametrizations" in dict(modules[0].named_children()):
                    found[f"{at}.gamma"] = [
                        module.parametrizations.weight[0].gamma
                        for module in modules
                        if "parametrizations" in dict(module.named_children())
                    ]
            if hasattr(attention, "locater_qk_norm"):
                gains = attention.locater_qk_norm
                found |= {f"layers.{i}.q_gain": [gains.query], f"layers.{i}.k_gain": [gains.key]}
        last = self.decoder.final_layer_norm
        return found | {"norm.weight": [last.weight], "norm.bias": [last.bias]}

    def parameter(self, name: str) -> Tensor:
        whole = torch.cat([part.detach() for part in self.parts()[name]])
        return self._in_thirds(whole) if ".qkv." in name and not name.endswith("gamma") else whole

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> Twin:
        for name, parts in self.parts().items():
            value = values[name]
            if ".qkv." in name and self.config.positions == "rotary":  # a head's q, k and v, then the next head's
                value = value.unflatten(0, (3, self.config.heads, -1)).transpose(0, 1).flatten(0, 2)
            for part, rows in zip(parts, value.split([len(part) for part in parts]), strict=True):
                part.copy_(rows)
        return self

    def _in_thirds(self, qkv: Tensor) -> Tensor:
        if self.config.positions == "sines":
            return qkv
        return qkv.unflatten(0, (self.config.heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def original(module: nn.Module) -> Tensor:
    """The weight that is trained, under a parametrization too."""
    under = getattr(module, "parametrizations", None)
    return module.weight if under is None else under.weight.original


class Angles(nn.Module):
    """GPT-NeoX's rotary angles, in float64; its own are rounded to float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rope = rope_of(config, torch.device("cpu"))
        self.inv_freq = nn.Buffer(self.rope.frequencies, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].double() * self.rope.frequencies
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)
