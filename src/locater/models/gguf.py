"""GGUF files: headers read without the vocabulary, tensors dequantised one by one by llama.cpp's Python package."""

from __future__ import annotations

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locater.errors import LocaterError, reason, require
from locater.io import open_file
from locater.models.checkpoint import SPLIT_GGUF, Checkpoint
from locater.models.formats import unpermuted

__all__ = ["open_gguf"]

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")  # layouts as in transformers
_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
}  # fmt: skip
_SETTINGS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "rope_theta": "rope.freq_base",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
}  # fmt: skip
# GGUF's types of values, as struct's
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_U32, _TEXT, _ARRAY, _U64 = 4, 8, 9, 10
_MOST = 2**24  # entries of a header, words of a vocabulary, bytes of a text; no model has so many
_KEPT = 2**12  # numbers of an array that is kept


def open_gguf(path: Path) -> Checkpoint:
    """One file, or all parts of a split one by the name of any."""
    headers = [_Header(part) for part in _parts(path)]
    fields = headers[0].fields
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise LocaterError(
            f"{path}: GGUF architecture {architecture!r:.80} is not one locater reads: {', '.join(_ARCHITECTURES)}"
        )
    config = _config(fields, architecture)
    stored = {name: header for header in headers for name in header.tensors}
    if any(name.startswith("rope_factors_") for name in stored):
        raise LocaterError(f"{path} uses rotary embeddings that change with the length of the text (longrope)")
    blocks = {name.split(".")[1] for name in stored if name.startswith("blk.")}
    if config["num_hidden_layers"] is not None and len(blocks) < config["num_hidden_layers"]:
        raise LocaterError(
            f"{path} holds {len(blocks)} of {config['num_hidden_layers']} blocks: it is one part of a split file; "
            "give all parts the names that llama.cpp gives them, or merge them"
        )
    if "rope_freqs.weight" in stored:
        factors = stored["rope_freqs.weight"].load("rope_freqs.weight").double().tolist()
        config["rope_parameters"] = {"rope_type": "factors", "rope_theta": config["rope_theta"], "factors": factors}
    where = {name: own for own in stored if (name := _name(own)) is not None}

    def load(name: str) -> Tensor:
        values = stored[where[name]].load(where[name])
        if architecture == "llama":
            values = unpermuted(name, values, config)
        if architecture.startswith("gemma") and name.endswith(("norm.weight", "layernorm.weight")):
            values = values - 1  # stored with the one that the model adds
        return values

    return Checkpoint(str(path), config, frozenset(where), load)


def _parts(path: Path) -> list[Path]:
    split = SPLIT_GGUF.fullmatch(path.name)
    if split is None:
        return [path]
    parts = [path.with_name(f"{split[1]}-{n:05}-of-{split[2]}.gguf") for n in range(1, int(split[2]) + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise LocaterError(f"{path.parent} lacks {missing[0]}, a part of {path.name}; fetch it again")
    return parts


class _Header:
    """A file's fields, but for long arrays, and its tensors: shape, type, first byte."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.gguf = path, 24, require("gguf", "hf")
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        try:
            with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self.raw:
                self._read()
        except (ValueError, OverflowError, OSError, struct.error) as error:
            raise LocaterError(f"{path} is truncated or not a GGUF file: {reason(error)}") from error

    def _read(self) -> None:
        magic, version, tensors, fields = struct.unpack_from("<4sIQQ", self.raw)
        if magic != b"GGUF" or version not in (2, 3) or max(tensors, fields) > _MOST:
            raise ValueError(f"it begins with {magic!r}, version {version}, {tensors} tensors and {fields} fields")
        for _ in range(fields):
            name = self._value(_TEXT)
            self.fields[name] = self._value(self._number(_U32))
        for _ in range(tensors):
            name, sizes = self._value(_TEXT), [self._number(_U64) for _ in range(self._number(_U32) % _MOST)]
            self.tensors[name] = tuple(reversed(sizes)), self._number(_U32), self._number(_U64)
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r:.80}")
        start = -(-self.at // alignment) * alignment
        blocks = self.gguf.GGML_QUANT_SIZES
        for name, (shape, kind, offset) in self.tensors.items():
            self.tensors[name] = shape, kind, start + offset
            per_block, width = blocks.get(kind, (1, 0))
            if start + offset + math.prod(shape) // per_block * width > len(self.raw):
                raise ValueError(f"{name:.80} ends beyond the end of the file")

    def _number(self, kind: int) -> Any:
        if kind not in _NUMBERS:
            raise ValueError(f"a field is of the unknown type {kind}")
        (number,) = struct.unpack_from(_NUMBERS[kind], self.raw, self.at)
        self.at += struct.calcsize(_NUMBERS[kind])
        return number

    def _value(self, kind: int) -> Any:
        if kind not in (_TEXT, _ARRAY):
            return self._number(kind)
        of, count = self._number(_U32) if kind == _ARRAY else 0, self._number(_U64)  # a text is an array of bytes
        if count > _MOST:
            raise ValueError(f"a field has {count} entries")
        if of == _TEXT:  # the vocabulary, 10^5 words and more: a tight loop
            raw, at, length = self.raw, self.at, struct.Struct("<Q").unpack_from
            for _ in range(count):
                at += 8 + length(raw, at)[0]
            self.at = at
            return None
        first, form = self.at, _NUMBERS.get(of, "<B")
        self.at += count * struct.calcsize(form)
        if of not in _NUMBERS or self.at > len(self.raw):
            raise ValueError(f"a field has {count} entries of type {of}")
        if kind == _TEXT:
            return self.raw[first : self.at].decode(errors="replace")
        return [each for (each,) in struct.iter_unpack(form, self.raw[first : self.at])] if count <= _KEPT else None

    def load(self, name: str) -> Tensor:
        shape, kind, start = self.tensors[name]
        try:
            per_block, width = self.gguf.GGML_QUANT_SIZES[kind]
            raw = np.fromfile(self.path, np.uint8, math.prod(shape) // per_block * width, offset=start)
            rows = raw.reshape(math.prod(shape[:-1]), -1)
            values = self.gguf.quants.dequantize(rows, self.gguf.GGMLQuantizationType(kind))
            return torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(shape))
        except (LookupError, ValueError, RuntimeError) as error:  # the last by gguf, of a kind that it cannot read
            raise LocaterError(f"{name} in {self.path} cannot be dequantised: {reason(error)}") from error


def _name(stored: str) -> str | None:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; None for what attention does not need."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
    if match is None or match.group(2) not in _NAMES:
        return None
    return f"model.layers.{match.group(1)}.{_NAMES[match.group(2)]}.{match.group(3)}"


def _config(fields: dict[str, Any], architecture: str) -> dict[str, Any]:
    def setting(name: str) -> Any:
        return fields.get(f"{architecture}.{name}")

    config = {ours: setting(own) for ours, own in _SETTINGS.items()}
    config["model_type"] = "gemma3_text" if architecture == "gemma3" else architecture
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if not all(isinstance(each, int) and each > 0 for each in (hidden, heads)):
        raise LocaterError(f"the GGUF file says neither {architecture}.embedding_length nor head_count")
    config["num_key_value_heads"] = config["num_key_value_heads"] or heads
    config["rope_theta"] = config["rope_theta"] or 10000.0
    width, rotary = config["head_dim"] or hidden // heads, setting("rope.dimension_count")
    if rotary is not None and rotary != width:
        config["partial_rotary_factor"] = rotary / width
    if architecture == "gemma3":
        config["rope_local_base_freq"] = setting("rope.freq_base_swa") or 10000.0
    kind = setting("rope.scaling.type")
    if kind not in (None, "none"):
        config["rope_scaling"] = {"rope_type": kind, "factor": setting("rope.scaling.factor")}
    return config
