"""A small twin of a model: the same class from its own configuration, shrunk, with every parameter random.

Heads keep their width, so that rotary dimensions and norms over a head stay as they are; there are fewer of them, and
everything as wide as all heads together shrinks with them. Windows and the rotary embedding's original length become
shorter than the sequences the twin is given.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import logging
import math
import re
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import nn

TOKENS = 24  # of a twin's sequences
FRAMES = 80  # of a twin's sounds
_SHORT = 8  # windows and original lengths
_HEADS = re.compile(r"(^|_)(?<!d_)(heads?|num_attention_heads_per_(stage|layer))$")  # d_head is a width
_KEY_HEADS = re.compile(r"(key_value|kv)_")
_WIDTHS = re.compile(r"hidden|embd|embed|d_model|width|dims?$|channels?$|inner|projection|output_size|in_features")
_FIXED = re.compile(
    r"head|rope|rotary|patch|kernel|stride|vocab|token|position|layers|^num_(?!channels)|state|conv|index|rank|temper"
    r"|ratio|mult|factor|type|act|image|pool|dropout|_id|query|mamba|mel"
)
_INNER = re.compile(r"intermediate_size|ffn_dim|d_ff|dff|n_inner|ffn_hidden_size|mlp_dim|dim_feedforward")
_EXPERTS = re.compile(r"^(num|n|moe_num)_(\w+_)?experts$|zero_expert_num")
# windows, and other distances from which positions act otherwise
_WINDOWS = re.compile(
    r"^(sliding_window(_size)?|attention_window|local_attention|attention_chunk_size|floor_scale"
    r"|left_max_position_embeddings|\w+_max_relative_position)$"
)
_LENGTHS = re.compile(r"^(max_position_embeddings|n_positions|max_seq_len|n_ctx)$")


def nodes(config: Any) -> Iterator[Any]:
    """The configuration and those inside it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from nodes(value)


def shrunk(config: Any, *, groups: int = 2, shared: int = 3, together: bool = False) -> Any:
    """A copy of a configuration with so many key heads, and fewer experts, words and positions.

    `together`: all its parts by one ratio, which keeps widths that are to fit each other; else each by its own. Without
    groups, heads and widths stay.
    """
    config = copy.deepcopy(config)
    parts = list(nodes(config))
    common = _ratio([count for part in parts for count in _head_counts(part).values()])
    for part in parts:
        if not groups:
            _shrink(part, Fraction(1), 0)
        else:
            _shrink(part, common if together else _own_ratio(part, groups, shared), 0 if together else groups)
    return config


def _head_counts(part: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in vars(part).items():
        if _HEADS.search(name):
            given = value if isinstance(value, list | tuple) else [value]
            found |= {f"{name}.{i}" if i else name: n for i, n in enumerate(given) if isinstance(n, int) and n > 0}
    return found


def _ratio(counts: list[int]) -> Fraction:
    """What leaves the fewest heads, two at least."""
    divisor = math.gcd(*counts) if counts else 1
    return min(Fraction(1), Fraction(2 if divisor == min(counts, default=1) else 1, divisor))


def _own_ratio(part: Any, most: int, each: int) -> Fraction:
    """So many key heads, and query heads for each, where there are more."""
    counts = _head_counts(part)
    if any("." in name for name in counts):
        return _ratio(list(counts.values()))
    queries = [n for name, n in counts.items() if not _KEY_HEADS.search(name)]
    if not queries:
        return Fraction(1)
    heads, (groups, shared) = queries[0], _groups(part, queries[0])
    ratio = Fraction(min(groups, most) * min(shared, each), heads)
    whole = all((n * ratio).denominator == 1 for n in queries)
    return ratio if whole else _ratio(queries)  # heads keep their width, all of them


def _groups(part: Any, heads: int) -> tuple[int, int]:
    """Key heads, and query heads for each."""
    given = [getattr(part, name) for name in vars(part) if _HEADS.search(name) and _KEY_HEADS.search(name)]
    groups = next((n for n in given if isinstance(n, int) and n > 0 and heads % n == 0), heads)
    return groups, heads // groups


def _shrink(part: Any, ratio: Fraction, groups: int) -> None:
    size, side, tube = (getattr(part, name, None) for name in ("image_size", "patch_size", "tubelet_size"))
    side = tube[-1] if side is None and isinstance(tube, list | tuple) else side
    biased = any("relative_position" in name and value is True for name, value in vars(part).items())
    if isinstance(side, int) and not hasattr(part, "depths") and not biased:
        if isinstance(size, int):
            part.image_size = min(size, 4 * side)
        elif isinstance(size, list | tuple) and all(isinstance(n, int) for n in size):
            part.image_size = type(size)(min(n, 4 * side) for n in size)
    for name, value in list(vars(part).items()):
        if groups and _KEY_HEADS.search(name) and _HEADS.search(name) and isinstance(value, int):
            new: Any = min(value, groups)
        else:
            new = _shorter_rope(value) if name in ("rope_parameters", "rope_scaling") else _smaller(name, value, ratio)
        if new is not value:
            with contextlib.suppress(Exception):
                setattr(part, name, new)


def _smaller(name: str, value: Any, ratio: Fraction) -> Any:
    if isinstance(value, list | tuple) and value and all(isinstance(one, int) for one in value):
        return type(value)(_smaller(name, one, ratio) for one in value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        return value
    if "vocab_size" in name:
        return min(value, 256)
    if re.search(r"token_id$|token_index$|_idx$", name):
        return value % 251
    if _EXPERTS.search(name):
        return min(value, 16)
    if _WINDOWS.search(name):
        return min(value, _SHORT)
    if name == "right_max_position_embeddings":
        return min(value, _SHORT // 2)  # unlike the left one
    if name == "relative_attention_num_buckets":
        return min(value, 32)  # so that a decoder's sequences fill those that are exact
    if _LENGTHS.search(name):
        return min(value, 2 * TOKENS)
    if name in ("num_frames", "frames_per_clip"):
        return min(value, 4)
    if name == "max_source_positions":
        return min(value, FRAMES // 2)  # of a sound, after a convolution of stride 2
    if _INNER.search(name):
        return min(value, 64)
    wide = _WIDTHS.search(name) and not _FIXED.search(name) and value >= 16
    if _HEADS.search(name) or wide or name == "mamba_d_ssm":  # of all its heads together
        return int(value * ratio) if (value * ratio).denominator == 1 else value
    return value


def _shorter_rope(parameters: Any) -> Any:
    if not isinstance(parameters, dict):
        return parameters
    found = {name: _shorter_rope(value) for name, value in parameters.items()}
    if "original_max_position_embeddings" in found:
        found["original_max_position_embeddings"] = 2 * _SHORT
    return found


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the remarks of libraries on what a twin is built with and called with."""
    from transformers.utils import logging as remarks

    level = remarks.get_verbosity()
    remarks.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        remarks.set_verbosity(level)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Every parameter random: also gains, which would hide behind their 1, and biases behind their 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.requires_grad or not parameter.is_floating_point() or not parameter.numel():
            continue  # a constant, such as a table of sines
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.ndim < 2:
            noise = parameter.float() + 0.3 * noise
        else:
            noise *= 0.7 * parameter[0].numel() ** -0.5
        parameter.copy_(noise)


def alone(module: nn.Module) -> Iterator[dict[str, Any]]:
    """What an attention module may be called with by itself: states as wide as its layers take them.

    Nothing, where it takes a bias or positions that the model around it makes, and works without.
    """
    signature = inspect.signature(module.forward).parameters
    if any(_FROM_OUTSIDE.search(name) and not _ROTARY.search(name) for name in signature):
        return
    needed = [name for name, one in signature.items() if one.default is one.empty and one.kind not in _ANY]
    names = dict.fromkeys([next(iter(signature), "x"), *needed, *(name for name in signature if _ROTARY.search(name))])
    widths = [x.in_features for x in module.modules() if isinstance(x, nn.Linear)]
    widths = list(dict.fromkeys(widths + [p.shape[-1] for p in module.parameters() if p.ndim == 2]))
    generator = torch.Generator().manual_seed(2)
    for width, other in itertools.product(widths, repeat=2):
        given: dict[str, Any] = {}
        for index, name in enumerate(names):
            if _ROTARY.search(name):
                angle = torch.rand(TOKENS, _head_width(module) // 2, generator=generator)
                both = torch.cat([angle, angle], -1)
                given[name] = both.cos()[None], both.sin()[None]
            elif re.search("mask|past|cache|index|layer", name):
                given[name] = None
            else:
                given[name] = torch.randn(2, TOKENS, width if index == 0 else other, generator=generator)
        yield given


_ROTARY = re.compile("position_embeddings|rotary|rope|freqs")
_FROM_OUTSIDE = re.compile("position(?!_ids)|pos_emb|rel_|relative|alibi|bias|prev_attn")
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _head_width(module: nn.Module) -> int:
    return next(
        (n for name in ("head_dim", "d_head", "dim_head") if isinstance(n := getattr(module, name, None), int)), 2
    )


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """What a model may be called with, the most likely first: two sequences or images, one sequence padded."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    names = set(inspect.signature(model.forward).parameters)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    words = min((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), default=64)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(min(getattr(text, "vocab_size", None) or words, 250), (2, length), generator=generator)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, -4:] = 0
    main = getattr(model, "main_input_name", "input_ids")
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    if "decoder_input_ids" in names:
        more["decoder_input_ids"] = ids(TOKENS - 4)
    if "attention_mask" in names and main == "input_ids":
        yield {"input_ids": ids(TOKENS), "attention_mask": mask, **more}
    if "input_ids" in names:
        yield {"input_ids": ids(TOKENS), **more}
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    channels = channels if isinstance(channels, int) else 3
    for size in _image_sizes(config):
        if "pixel_values" in names:
            yield {"pixel_values": noise(2, channels, *size), **more}
        if "pixel_values_videos" in names or "pixel_values" in names:
            frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None) or 4
            name = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
            yield {name: noise(2, frames, channels, *size), **more}
    if "grid_thw" in names or "image_grid_thw" in names:
        side, merge = getattr(config, "patch_size", 14), getattr(config, "spatial_merge_size", 2)
        rows = 2 * merge
        width = channels * side * side * (getattr(config, "temporal_patch_size", 1) or 1)
        first = next(iter(inspect.signature(model.forward).parameters))
        yield {first: noise(rows * rows, width), "grid_thw": torch.tensor([[1, rows, rows]])}
    for name in ("input_features", "input_values"):
        if name in names:
            bins = next((n for key in _BINS if isinstance(n := getattr(config, key, None), int)), 80)
            for shape in (
                (2, bins, FRAMES),
                (2, FRAMES // 2, bins),
                (2, bins, 3000),
                (2, 4000),
                (2, 1, 8000),
                (2, 1024, 128),
            ):
                yield {name: noise(*shape), **more}
    for name in ("hidden_states", "inputs_embeds", "encoder_hidden_states", "query_embeds"):
        if name in names:
            wide: Any = getattr(config, "hidden_size", None) or getattr(config, "d_model", 64)
            yield {name: noise(2, TOKENS, wide), **more}
            if name == "query_embeds":
                other = getattr(config, "encoder_hidden_size", wide)
                yield {name: noise(2, 8, wide), "encoder_hidden_states": noise(2, TOKENS, other)}


_BINS = (
    "num_mel_bins",
    "input_feat_per_channel",
    "feature_size",
    "feature_projection_input_dim",
    "input_dim",
    "n_mels",
)


def _image_sizes(config: Any) -> Iterator[tuple[int, int]]:
    given = [getattr(config, name, None) for name in ("image_size", "img_size", "input_size", "resolution")]
    for size in (*given, 64, 224, 384):
        if isinstance(size, int):
            yield size, size
        elif isinstance(size, list | tuple) and len(size) == 2:
            yield int(size[0]), int(size[1])
