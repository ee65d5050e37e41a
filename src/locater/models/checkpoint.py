"""Checkpoints read lazily: tensor by tensor, the model never built, other weights never read.

A checkpoint is tensors by name and a configuration. Folders of safetensors (sharded or not), single files, GGUF,
pickled weights (only with torch's weights_only reader) and models on the hub look alike from here on, under the names
that transformers uses.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError, reason
from locater.io import inside, read_json
from locater.models.formats import UNQUANTISED, llama_config, standard, state_dict, whisper_config
from locater.models.registry import TEN_LINES, Family, Reading, Site, family, reading
from locater.models.rules import Rule
from locater.models.skeleton import Stored, skeleton

__all__ = [
    "SPLIT_GGUF",
    "Checkpoint",
    "configuration",
    "layers_in",
    "local_weights",
    "open_checkpoint",
    "open_folder",
    "weight_files",
]

_KINDS = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
_NOT_WEIGHTS = re.compile(r"(?:training_args|optimizer|scheduler|scaler|rng_state)[\w.]*")  # what trainers also save
_SHARD = re.compile(r"consolidated\.\d+\.pth")  # Meta's: each has a part of every tensor
SPLIT_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Checkpoint:
    """Names, a way to load one tensor, and the configuration."""

    origin: str
    config: Mapping[str, Any]
    names: frozenset[str]
    load: Callable[[str], Tensor]
    traffic: Callable[[], tuple[int, int]] | None = None  # bytes fetched so far, and those of all weights on the hub
    whole: bool = False  # the configuration is transformers', and a model can be built from it

    @classmethod
    def standard(
        cls, origin: str, config: Mapping[str, Any], names: Iterable[str], load: Callable[[str], Tensor], **more: Any
    ) -> Checkpoint:
        """Of tensors as they are stored: under transformers' names, in its order of rows, not quantised."""
        return cls(origin, config, *standard(origin, config, names, load), whole=True, **more)

    def get(self, name: str) -> Tensor | None:
        if name not in self.names:
            return None
        tensor = self.load(name)
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise LocaterError(
                f"{name} in {self.origin} is {tensor.dtype}, whose scales locater does not read; {UNQUANTISED}"
            )
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # as isfinite(tensor), in no memory
            raise LocaterError(f"{name} in {self.origin} has NaN or infinite entries; its spectrum does not exist")
        return tensor

    def reading(self, layers: Collection[int] | None = None) -> Reading:
        """How its attention modules, or those that may be of these layers, are read: as those of the live model."""
        known = family(checkpoint=self.config.get("model_type"))
        model = None
        if self.whole and (known is None or known.built_in):
            model = skeleton(self.config, self.origin)
        found = self._by_patterns(known) if model is None else reading(model, Stored(self, model))
        if layers is not None:  # which of the numbers in a name is the layer, its reader knows
            found.sites[:] = [(read, site) for read, site in found.sites if _may_be_of(layers, read, site)]
        return found

    def _by_patterns(self, known: Family | None) -> Reading:
        """By the names that a family's modules have, where no model can be built: without transformers, from GGUF."""
        kind = self.config.get("model_type")
        if known is None:
            code = ", or needs code that comes with it, which is not run" if "auto_map" in self.config else ""
            unknown = f"{self.origin} is of type {kind!r}, which transformers does not know{code}"
            raise LocaterError(f"{unknown}; {TEN_LINES}")
        pattern = re.compile("(" + "|".join(f"(?:{path})" for path in known.paths) + r")\.")
        found = {match.group(1) for name in self.names if (match := pattern.match(name))}
        if not found:
            raise LocaterError(f"{self.origin} has no attention module of {kind}")
        return Reading([(known.read, Site(name, self.config, self)) for name in sorted(found, key=_natural)], {})


def _may_be_of(layers: Collection[int], read: Any, site: Site) -> bool:
    rule = getattr(read, "__self__", None)
    if isinstance(rule, Rule):
        return not rule.layers_in(site).isdisjoint(layers)
    numbers = layers_in(site.name)  # one of which may be the layer's
    return not numbers or len(numbers) > 1 or not numbers.isdisjoint(layers)


def _natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """The encoder before the decoder, layers.2 before layers.10."""
    parts = name.split(".")
    numbers = re.compile("[0-9]{1,9}")
    return "decoder" in parts, [(int(part), "") if numbers.fullmatch(part) else (-1, part) for part in parts]


def layers_in(name: str) -> set[int]:
    """The numbers in a dotted name; its layer is one of them."""
    return {int(number) for number in re.findall(r"(?:^|\.)([0-9]{1,9})(?=\.|$)", name)}


def open_checkpoint(path: str | Path, *, revision: str | None = None) -> Checkpoint:
    """A folder, a .safetensors, .gguf, .bin, .pt or .pth file, or the id of a model on the Hugging Face hub.

    Of a model on the hub the `revision`, a branch, a tag or a commit, may also stand behind an @.
    """
    if not isinstance(path, (str, Path)):
        raise LocaterError(f"expected a model, a path or a hub id, got {type(path).__name__}")
    local = Path(path)
    if local.exists():
        if revision is not None:
            raise LocaterError(f"{path} is on this machine and has no revision {revision}: leave --revision out")
        return open_folder(local) if local.is_dir() else _file(local)
    name, _, tag = str(path).partition("@")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).parent.exists():
        if tag and revision is not None:
            raise LocaterError(f"the revision is given twice, {tag} and {revision}")
        from locater.models.hub import open_hub

        return open_hub(name, tag or revision)
    raise LocaterError(f"{path} does not exist; give a folder, a file, or a hub id like organisation/model")


def _file(path: Path) -> Checkpoint:
    if not path.is_file():
        raise LocaterError(f"{path} is a pipe or a device, not a checkpoint")
    if path.suffix not in _KINDS:
        raise LocaterError(f"{path} is not a checkpoint locater reads: .safetensors, .gguf, .bin, .pt or a folder")
    return _opened([path], path.parent)


def open_folder(folder: Path) -> Checkpoint:
    return _opened(local_weights(folder), folder)


def local_weights(folder: Path) -> list[Path]:
    """The files of a folder that hold the model."""
    names, _ = weight_files(folder, _files(folder), lambda name: read_json(folder / name))
    return [folder / name for name in names]


def _files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*") if path.is_file()]


def weight_files(
    folder: Path, files: Collection[str], read: Callable[[str], Mapping[str, Any]]
) -> tuple[list[str], Mapping[str, str] | None]:
    """Those of the `files` in a folder that hold the model; also where each tensor is, if an index says so."""
    for kind in _KINDS:
        index = min((name for name in files if name.endswith(f"{kind}.index.json")), default=None)
        if index is not None:
            weight_map = read(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise LocaterError(f"{folder / index} has no weight_map of tensor names to files")
            shards = sorted(
                {inside(folder, shard, folder / index).relative_to(folder).as_posix() for shard in weight_map.values()}
            )
            missing = [shard for shard in shards if shard not in files]
            if missing:
                raise LocaterError(f"{folder} lacks {missing[0]}, which {index} names; fetch it again")
            return shards, weight_map
        if f"model{kind}" in files:
            return [f"model{kind}"], None
        found = sorted(name for name in files if name.endswith(kind) and not _NOT_WEIGHTS.fullmatch(name))
        if kind == ".gguf" and len(found) > 1 and len({SPLIT_GGUF.sub(r"\1", name) for name in found}) > 1:
            raise LocaterError(f"{folder} has {len(found)} GGUF files; name the one to scan")
        if found:
            return found, None
    raise LocaterError(f"{folder} has no .safetensors, .bin or .gguf file, nor .pt or .pth")


def _opened(files: list[Path], folder: Path) -> Checkpoint:
    if files[0].suffix == ".gguf":
        from locater.models.gguf import open_gguf

        return open_gguf(files[0])
    if files[0].suffix == ".safetensors":
        return Checkpoint.standard(str(folder), *_safetensors(files, folder))
    return Checkpoint.standard(str(folder), *_pickled(files, folder))


def configuration(folder: Path, files: Collection[str], read: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any]:
    """config.json, or Meta's params.json in its terms."""
    if "config.json" in files:
        return read("config.json")
    if "params.json" in files:
        return llama_config(read("params.json"), folder / "params.json")
    raise LocaterError(f"{folder} has no config.json, which says how many heads there are and of what kind")


def _config(folder: Path) -> Mapping[str, Any]:
    return configuration(folder, _files(folder), lambda name: read_json(folder / name))


def _safetensors(files: list[Path], folder: Path) -> tuple[Mapping[str, Any], Collection[str], Callable[[str], Tensor]]:
    from safetensors import SafetensorError, safe_open

    where: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as handle:
                where.update(dict.fromkeys(handle.keys(), file))
        except (SafetensorError, OSError) as error:
            raise LocaterError(f"{file} is truncated or not a safetensors file: {reason(error)}") from error

    def load(name: str) -> Tensor:
        # opened for each tensor: what was mapped is given back at once
        with safe_open(where[name], "pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
            return tensor

    return _config(folder), where, load


def _pickled(files: list[Path], folder: Path) -> tuple[Mapping[str, Any], Collection[str], Callable[[str], Tensor]]:
    parts: dict[str, list[Tensor]] = {}
    config: Mapping[str, Any] | None = None
    for file in files:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except Exception as error:  # a pickle can fail in any way; none of its code has run
            raise LocaterError(
                f"{file} cannot be read without running code it may carry (weights_only): {reason(error)}; "
                "save it as safetensors"
            ) from error
        for name, tensor in state_dict(loaded, file).items():
            parts.setdefault(name, []).append(tensor)
        for key, made in (("dims", whisper_config), ("model_args", llama_config)):  # OpenAI's Whisper, llama2.c
            if isinstance(loaded.get(key), dict) and not (folder / "config.json").exists():
                config = made(loaded[key], file)
    shared = {name for name, of in parts.items() if len(of) > 1}
    if shared and not all(_SHARD.fullmatch(file.name) for file in files):
        raise LocaterError(f"{min(shared)} is in several files of {folder}; name the one to scan")
    rows = re.compile(
        r".*\.w[qk]\.weight"
    )  # which Meta's shards divide; norms are in each, the rest is not attention's
    names = {name for name in parts if name not in shared or rows.fullmatch(name) or name.endswith("norm.weight")}

    def load(name: str) -> Tensor:
        return torch.cat(parts[name]) if name in shared and rows.fullmatch(name) else parts[name][0]

    return config or _config(folder), names, load
