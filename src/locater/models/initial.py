"""How a model of transformers starts, from its configuration alone: what `theory.depth_law` needs, and no weight built.

Every family's weights are drawn by transformers' `_init_weights`, which a test compares with this reader, weight by
weight. Biases start at zero and norms at one in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from locater.errors import LocaterError, one_line, reason, require
from locater.io import read_json
from locater.models.checkpoint import configuration
from locater.models.pretrained import Pretrained, quiet
from locater.theory import RandomAttention, RandomLinear, RandomMLP, RandomTransformer, token_gram
from locater.theory.depth import MOST_LAYERS, normed

__all__ = ["FAMILIES", "Initial", "initial", "open_initial"]

_ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu", "quick_gelu": "quick_gelu", "tanh": "tanh",
}  # fmt: skip
_LARGEST, _WIDEST = 1 << 24, 1 << 12  # of any width, and of a head's; a file may say any number


@dataclass(frozen=True)
class Initial:
    """A transformer as it starts, and what its tokens enter it as."""

    family: str
    width: int
    transformer: RandomTransformer
    token_std: float  # of an embedding's entries; of a patch's, for pixels of variance 1
    position_std: float = 0.0  # of learned positions
    shared_std: float = 0.0  # of what every token gets: the type's embedding
    first_std: float | None = None  # of a first token that is no content: [CLS] of an image
    normed: bool = False  # a norm behind the embeddings
    most_tokens: int | None = None  # positions there are

    def scaled(self, gain: float = 1.0, branch: float = 1.0) -> Initial:
        """With so many times the logits, and so many times what the branches add."""
        for name, value in (("gain", gain), ("branch", branch)):
            if not 0 < value <= 1e9:
                raise LocaterError(f"{name} must be a positive number of at most 1e9, got {value:g}")
        t, a = self.transformer, self.transformer.attention
        output, mlp = replace(a.output, std=branch * a.output.std), t.mlp
        if mlp is not None:
            mlp = replace(mlp, down=replace(mlp.down, std=branch * mlp.down.std))
        attention = replace(a, logit_scale=gain * a.logit_scale, output=output)
        return replace(self, transformer=replace(t, attention=attention, mlp=mlp))

    def gram(self, tokens: int, similarity: float = 0.0) -> Any:
        """G of `tokens` different tokens whose embeddings have this cosine."""
        if not 0 <= similarity < 1:
            raise LocaterError(f"similarity must be a cosine from 0 to below 1, got {similarity:g}")
        if tokens < 2 or (self.most_tokens is not None and tokens > self.most_tokens):
            most = (
                "" if self.most_tokens is None else f" and at most the {self.most_tokens:,} that it has positions for"
            )
            raise LocaterError(f"tokens must be at least 2{most}, got {tokens}")
        return self.gram_of((1 - similarity) * np.eye(tokens) + similarity)

    def gram_of(self, similarity: Any) -> Any:
        """G of tokens whose embeddings have these cosines (T, T); of an image, of the patches and the first token."""
        if self.first_std is None:
            content, std = np.asarray(similarity, float), self.token_std
        else:
            content, std = np.array(similarity, float) * self.token_std**2, 1.0
            content[0] = content[:, 0] = 0.0
            content[0, 0] = self.first_std**2
        made = token_gram(content, std, position_std=self.position_std, shared_std=self.shared_std)
        return normed(made, self.transformer.eps) if self.normed else made


def open_initial(name: str, revision: str | None = None) -> Initial:
    """From a config.json, a folder that has one, or a hub id; of a hub's model nothing else is fetched."""
    path = Path(name)
    if path.is_dir():
        files = [each.name for each in path.glob("*.json")]
        return initial(configuration(path, files, lambda file: read_json(path / file)), name)
    if path.is_file() and path.suffix != ".gguf":
        return initial(read_json(path), name)
    require("transformers", "hf")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(**Pretrained.called(name, revision).files)
    except LocaterError:
        raise
    except Exception as error:  # of many libraries
        raise LocaterError(f"{name} has no configuration that can be read: {reason(error)}") from error
    return initial(config.to_dict(), name)


def initial(config: Mapping[str, Any], origin: str) -> Initial:
    """From a configuration as transformers writes it; `origin` is what messages call it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise LocaterError(f"{origin}: how a model of type {kind!r:.60} starts is not known here, only that of {known}")
    transformers = require("transformers", "hf")
    try:
        with quiet():
            settings = transformers.CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # a configuration can be wrong in any way
        raise LocaterError(f"{origin}: its configuration is none of {kind}: {one_line(str(error), 300)}") from error
    try:
        made = FAMILIES[kind](_Fields(settings, origin))
    except LocaterError as error:
        told = str(error)
        raise LocaterError(told if told.startswith(origin) else f"{origin}: {told}") from error
    return replace(made, family=kind)


@dataclass(frozen=True)
class _Fields:
    """A configuration whose numbers are checked as they are read."""

    config: Any
    origin: str

    def whole(self, name: str, most: int = _LARGEST) -> int:
        value = getattr(self.config, name, None)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise LocaterError(f"{self.origin}: {name} must be a whole number from 1 to {most:,}, got {value!r:.60}")
        return value

    def layers(self) -> int:
        return self.whole("num_hidden_layers", MOST_LAYERS)

    def std(self, name: str) -> float:
        """As transformers reads it: nothing means 0.02. With 0 some classes start from 0.02 and some from zero."""
        value = getattr(self.config, name, None)
        value = 0.02 if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise LocaterError(f"{self.origin}: {name} must be a positive number, got {value!r:.60}")
        return float(value)

    def eps(self, name: str) -> float:
        value = getattr(self.config, name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise LocaterError(f"{self.origin}: {name} must be a number from 0 to below 1, got {value!r:.60}")
        return float(value)

    def activation(self, name: str) -> str:
        value = getattr(self.config, name, None)
        if value not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise LocaterError(f"{self.origin}: {name} {value!r:.60} is not known here, only {known}")
        return _ACTIVATIONS[value]

    def refuse(self, name: str, why: str) -> None:
        if getattr(self.config, name, None):
            raise LocaterError(f"{self.origin}: {name} {why}")

    def head_width(self, width: int, heads: int) -> int:
        if getattr(self.config, "head_dim", None) is not None:
            return self.whole("head_dim", _WIDEST)
        if width % heads:
            raise LocaterError(f"{self.origin}: a width of {width} is not {heads} heads of one width")
        if width // heads > _WIDEST:
            raise LocaterError(f"{self.origin}: heads must be at most {_WIDEST:,} wide, got {width // heads:,}")
        return width // heads

    def window(self) -> int | None:
        """Of all layers; those where only some have one are not alike."""
        size, kinds = getattr(self.config, "sliding_window", None), getattr(self.config, "layer_types", None)
        if size is None or (kinds and "sliding_attention" not in kinds):
            return None
        if kinds and len(set(kinds)) > 1:
            raise LocaterError(
                f"{self.origin}: only some layers have a sliding window, and layers are taken to be alike"
            )
        if (found := self.whole("sliding_window")) < 2:
            raise LocaterError(f"{self.origin}: a sliding_window of {found} leaves attention one key, itself")
        return found

    def rotary(self, width: int, *, partial: bool = False) -> tuple[tuple[float, ...], float]:
        """Angles a position of each pair of coordinates, and the factor on the logits that some variants have.

        `partial`: whether the class's plain embedding rotates a part of the coordinates only; Llama's does not.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        given: dict[str, Any] = getattr(self.config, "rope_parameters", None) or {}
        share = self._rope_number(given, "partial_rotary_factor", 1.0, 1.0)
        base = self._rope_number(given, "rope_theta", 10_000.0, math.inf)
        kind = given.get("rope_type", "default")
        if kind == "default":
            turned = int(width * (share if partial else 1.0)) // 2 * 2
            return tuple((base ** (-np.arange(0, turned, 2) / max(1, turned))).tolist()), 1.0
        try:
            rates, factor = ROPE_INIT_FUNCTIONS[kind](self.config, "cpu")
            on_logits = float(factor) ** 2
        except Exception as error:
            raise LocaterError(f"{self.origin}: rope_parameters cannot be read: {reason(error)}") from error
        if on_logits != 1 and 2 * len(rates) < width:
            raise LocaterError(
                f"{self.origin}: rope_parameters scale a part of the coordinates only, which is not known here"
            )
        return tuple(rates.double().tolist()), on_logits

    def _rope_number(self, given: Mapping[str, Any], name: str, default: float, most: float) -> float:
        value = given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most or value == math.inf:
            limit = "" if most == math.inf else f" of at most {most:g}"
            raise LocaterError(f"{self.origin}: {name} must be a positive number{limit}, got {value!r:.60}")
        return float(value)


def _attention(
    width: int, heads: int, std: float, *, key_heads: int | None = None, head_width: int | None = None, **more: Any
) -> RandomAttention:
    """All projections alike, logits divided by √K, unless `more` says otherwise."""
    head_width = width // heads if head_width is None else head_width
    linear = RandomLinear(width, std)
    standard: dict[str, Any] = {
        "query": linear, "key": linear, "value": linear, "output": RandomLinear(heads * head_width, std),
        "logit_scale": head_width**-0.5,
    }  # fmt: skip
    return RandomAttention(heads, key_heads or heads, head_width, **(standard | more))


def _gpt2(c: _Fields) -> Initial:
    c.refuse("scale_attn_by_inverse_layer_idx", "makes layers differ, and they are taken to be alike")
    width, heads, layers, std = (
        c.whole("n_embd"),
        c.whole("n_head"),
        c.whole("n_layer", MOST_LAYERS),
        c.std("initializer_range"),
    )
    inner = c.whole("n_inner") if c.config.n_inner is not None else 4 * width
    last = std / math.sqrt(2 * layers)  # c_proj, of both branches
    scale = c.head_width(width, heads) ** -0.5 if c.config.scale_attn_weights else 1.0
    attention = _attention(width, heads, std, output=RandomLinear(width, last), logit_scale=scale)
    mlp = RandomMLP(RandomLinear(width, std), RandomLinear(inner, last), c.activation("activation_function"))
    positions = c.whole("n_positions")
    made = RandomTransformer(layers, attention, mlp, eps=c.eps("layer_norm_epsilon"))
    return Initial("gpt2", width, made, std, position_std=std, most_tokens=positions)


def _llama(c: _Fields, *, qk_norm: bool = False, window: bool = False) -> Initial:
    width, heads, std = c.whole("hidden_size"), c.whole("num_attention_heads"), c.std("initializer_range")
    key_heads = c.whole("num_key_value_heads") if c.config.num_key_value_heads is not None else heads
    head_width = c.head_width(width, heads)
    rotary, factor = c.rotary(head_width)
    attention = _attention(
        width, heads, std, key_heads=key_heads, head_width=head_width, rotary=rotary,
        qk_norm_eps=c.eps("rms_norm_eps") if qk_norm else None, logit_scale=factor * head_width**-0.5,
        window=c.window() if window else None,
    )  # fmt: skip
    inner = RandomLinear(c.whole("intermediate_size"), std)
    mlp = RandomMLP(RandomLinear(width, std), inner, c.activation("hidden_act"), gated=True)
    return Initial("llama", width, RandomTransformer(c.layers(), attention, mlp, eps=c.eps("rms_norm_eps")), std)


def _windowed(c: _Fields) -> Initial:
    return _llama(c, window=True)


def _qwen3(c: _Fields) -> Initial:
    return _llama(c, qk_norm=True, window=True)


def _plain(
    c: _Fields, std: float, inner: str, activation: str, eps: float, **attention: Any
) -> tuple[int, RandomTransformer]:
    """What BERT, ViT, GPT-NeoX and OPT have in common."""
    width, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    head_width = c.head_width(width, heads)
    mlp = RandomMLP(RandomLinear(width, std), RandomLinear(c.whole(inner), std), c.activation(activation))
    made = _attention(width, heads, std, head_width=head_width, **attention)
    return width, RandomTransformer(c.layers(), made, mlp, eps=eps)


def _bert(c: _Fields) -> Initial:
    std = c.std("initializer_range")
    width, made = _plain(
        c, std, "intermediate_size", "hidden_act", c.eps("layer_norm_eps"), causal=bool(c.config.is_decoder)
    )
    return Initial(
        "bert", width, replace(made, norm="post"), std, position_std=std, shared_std=std, normed=True,
        most_tokens=c.whole("max_position_embeddings"),
    )  # fmt: skip


def _vit(c: _Fields) -> Initial:
    std = c.std("initializer_range")
    width, made = _plain(c, std, "intermediate_size", "hidden_act", c.eps("layer_norm_eps"), causal=False)
    side, image = c.whole("patch_size"), c.whole("image_size")
    pixels = c.whole("num_channels") * side**2
    return Initial(
        "vit",
        width,
        made,
        std * math.sqrt(pixels),
        position_std=std,
        first_std=std,
        most_tokens=(image // side) ** 2 + 1,
    )


def _gpt_neox(c: _Fields) -> Initial:
    std = c.std("initializer_range")
    rotary, factor = c.rotary(c.head_width(c.whole("hidden_size"), c.whole("num_attention_heads")), partial=True)
    width, made = _plain(c, std, "intermediate_size", "hidden_act", c.eps("layer_norm_eps"), rotary=rotary)
    scaled = replace(made.attention, logit_scale=factor * made.attention.logit_scale)
    made = replace(made, attention=scaled, parallel=bool(c.config.use_parallel_residual))
    return Initial("gpt_neox", width, made, std)


def _opt(c: _Fields) -> Initial:
    std = c.std("init_std")
    width, made = _plain(c, std, "ffn_dim", "activation_function", 1e-5)  # nn.LayerNorm's own
    narrow = c.whole("word_embed_proj_dim")
    token_std = std if narrow == width else std * std * math.sqrt(narrow)  # project_in
    return Initial(
        "opt", width, made if c.config.do_layer_norm_before else replace(made, norm="post"), token_std,
        position_std=std, most_tokens=c.whole("max_position_embeddings"),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[_Fields], Initial]] = {
    "bert": _bert, "gpt2": _gpt2, "gpt_neox": _gpt_neox, "llama": _llama, "mistral": _windowed, "opt": _opt,
    "qwen2": _windowed, "qwen3": _qwen3, "vit": _vit,
}  # fmt: skip
"""Readers by `model_type`."""
