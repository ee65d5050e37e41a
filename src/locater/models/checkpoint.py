"""Checkpoints read lazily: tensor by tensor, the model never built, other weights never read.

A checkpoint is tensors by name and a configuration. Folders of safetensors (sharded or not), single files, GGUF and
pickled weights (only with torch's weights_only reader) look alike from here on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError, reason, require
from locater.io import inside, read_json
from locater.models.attention import Attention
from locater.models.registry import Site, family, known_checkpoints

__all__ = ["Checkpoint", "open_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """Names, a way to load one tensor, and the configuration."""

    origin: str
    config: Mapping[str, Any]
    names: frozenset[str]
    load: Callable[[str], Tensor]

    def get(self, name: str) -> Tensor | None:
        if name not in self.names:
            return None
        tensor = self.load(name)
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise LocaterError(
                f"{name} in {self.origin} is stored as {tensor.dtype}, whose scales locater does not read"
            )
        if not torch.isfinite(tensor).all():
            raise LocaterError(f"{name} in {self.origin} has NaN or infinite entries; its spectrum does not exist")
        return tensor

    def attentions(self) -> Iterator[Attention]:
        """Every attention module, one at a time: only its query and key weights are in memory."""
        config = self.config
        known = family(checkpoint=config.get("model_type"))
        if known is None and isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]  # the language half of a multimodal model
            known = family(checkpoint=config.get("model_type"))
        if known is None:
            raise LocaterError(
                f"{self.origin} is of type {self.config.get('model_type')!r}, which locater does not know; it knows "
                f"{', '.join(known_checkpoints())}: register the family with locater.models.register"
            )
        pattern = re.compile("(" + "|".join(f"(?:{path})" for path in known.paths) + r")\.")
        found = {match.group(1) for name in self.names if (match := pattern.match(name))}
        if config is not self.config:
            found = {name for name in found if not _OTHER_TOWER.search(name)}
        if not found:
            raise LocaterError(f"{self.origin} has no attention module of {config.get('model_type')}")
        for name in sorted(found, key=_natural):
            try:
                yield known.read(Site(name, config, self))
            except LocaterError:
                raise
            except Exception as error:  # families take the configuration at its word
                raise LocaterError(
                    f"{self.origin}: the configuration does not describe {name}: {type(error).__name__} {reason(error)}"
                ) from error


_OTHER_TOWER = re.compile(r"vision|visual|audio|image|speech")


def _natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """The encoder before the decoder, layers.2 before layers.10."""
    parts = name.split(".")
    numbers = re.compile("[0-9]{1,9}")
    return "decoder" in parts, [(int(part), "") if numbers.fullmatch(part) else (-1, part) for part in parts]


def open_checkpoint(path: str | Path, *, revision: str | None = None) -> Checkpoint:
    """A folder, a .safetensors, .gguf, .bin or .pt file, or the id of a model on the Hugging Face hub.

    Of a model on the hub the `revision`, a branch, a tag or a commit, may also stand behind an @.
    """
    if not isinstance(path, (str, Path)):
        raise LocaterError(f"expected a model, a path or a hub id, got {type(path).__name__}")
    local = Path(path)
    if local.exists():
        if revision is not None:
            raise LocaterError(f"{path} is on this machine and has no revision {revision}: leave --revision out")
        return _folder(local) if local.is_dir() else _file(local)
    name, _, tag = str(path).partition("@")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).parent.exists():
        if tag and revision is not None:
            raise LocaterError(f"the revision is given twice, {tag} and {revision}")
        return _folder(_from_hub(name, tag or revision))
    raise LocaterError(f"{path} does not exist; give a folder, a file, or a hub id like organisation/model")


def _file(path: Path) -> Checkpoint:
    if not path.is_file():
        raise LocaterError(f"{path} is a pipe or a device, not a checkpoint")
    kind = path.suffix
    if kind == ".gguf":
        from locater.models.gguf import open_gguf

        return open_gguf(path)
    if kind == ".safetensors":
        return _safetensors([path], path.parent)
    if kind in (".bin", ".pt", ".pth"):
        return _pickled([path], path.parent)
    raise LocaterError(f"{path} is not a checkpoint locater reads: .safetensors, .gguf, .bin, .pt or a folder")


def _from_hub(name: str, revision: str | None) -> Path:
    hub = require("huggingface_hub", "hf")
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the hub's own errors have many classes
        raise LocaterError(f"{name} is no local path and could not be fetched from the hub: {reason(error)}") from error


def _folder(folder: Path) -> Checkpoint:
    for suffix, read in ((".safetensors", _safetensors), (".bin", _pickled)):
        index = next(iter(sorted(folder.glob(f"*{suffix}.index.json"))), None)
        if index is not None:
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise LocaterError(f"{index} has no weight_map of tensor names to files")
            shards = sorted({inside(folder, shard, index) for shard in weight_map.values()})
            missing = [shard.name for shard in shards if not shard.is_file()]
            if missing:
                raise LocaterError(f"{folder} lacks {missing[0]}, which {index.name} names; fetch it again")
            return read(shards, folder)
        files = sorted(path for path in folder.glob(f"*{suffix}") if path.is_file())
        if files:
            return read(files, folder)
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) > 1:
        raise LocaterError(f"{folder} has {len(gguf_files)} GGUF files; name the one to scan")
    if gguf_files:
        return _file(gguf_files[0])
    raise LocaterError(f"{folder} has no .safetensors, .bin or .gguf file")


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise LocaterError(f"{folder} has no config.json, which says how many heads there are and of what kind")
    return read_json(path)


def _safetensors(files: list[Path], folder: Path) -> Checkpoint:
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

    return Checkpoint(str(folder), _config(folder), frozenset(where), load)


def _pickled(files: list[Path], folder: Path) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a pickle can fail in any way; none of its code has run
            raise LocaterError(
                f"{file} cannot be read without running code it may carry (weights_only): {reason(error)}; "
                "save it as safetensors"
            ) from error
        state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
        ):
            raise LocaterError(f"{file} holds no state dict of tensors by name")
        tensors.update(state)
    return Checkpoint(str(folder), _config(folder), frozenset(tensors), tensors.__getitem__)
