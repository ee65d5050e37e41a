"""Checkpoints that survive being killed at any moment.

A checkpoint is `step-N.safetensors` and, written after it, `step-N.json`, the manifest: what run it belongs to and the
checksum of the tensors. Both appear under their names whole or not at all, and the one before is removed only when the
new one is complete: one good checkpoint is there at all times after the first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from locater.errors import LocaterError
from locater.files import write_file

__all__ = ["Loaded", "load_newest", "save"]

_KEPT = 2


class Loaded(NamedTuple):
    state: dict[str, Tensor]
    step: int
    damaged: list[str]  # newer ones that could not be used, and why


def save(folder: Path, step: int, state: dict[str, Tensor], belongs_to: str) -> None:
    """Writes the checkpoint of a step, then removes all but the newest two."""
    path = folder / f"step-{step:09d}.safetensors"
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".unfinished-")
        os.close(handle)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, temporary)
        checksum = _checksum(Path(temporary))
        _flush(Path(temporary))
        os.replace(temporary, path)
    except Exception as error:  # safetensors has an exception of its own for what the disk says
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        why = "the disk is full" if full else str(error)
        raise LocaterError(f"cannot write the checkpoint {path}: {why}; the one before it is intact") from error
    manifest = {"step": step, "sha256": checksum, "bytes": path.stat().st_size, "belongs_to": belongs_to}
    _flush(write_file(path.with_suffix(".json"), (json.dumps(manifest) + "\n").encode()))
    _flush(folder)
    _remove_old(folder)


def load_newest(folder: Path, belongs_to: str) -> Loaded | None:
    """The newest checkpoint that is whole; None where there is none at all."""
    damaged: list[str] = []
    for manifest in sorted(folder.glob("step-*.json"), reverse=True):
        path = manifest.with_suffix(".safetensors")
        try:
            written = json.loads(manifest.read_text())
            expected = written["sha256"], written["bytes"]
            if written["belongs_to"] != belongs_to:
                raise LocaterError(
                    f"{path} is the checkpoint of a run with another configuration; choose another folder"
                )
            if (_checksum(path), path.stat().st_size) != expected:
                raise ValueError("its checksum is not the one in its manifest")
            state = load_file(path)
        except LocaterError:
            raise
        except Exception as error:  # whatever a damaged file makes its readers say
            damaged.append(f"{path.name}: {error}")
            continue
        return Loaded(state, int(written["step"]), damaged)
    if damaged:
        raise LocaterError(f"no checkpoint in {folder} is whole: {'; '.join(damaged)}; remove the folder to start anew")
    return None


def _remove_old(folder: Path) -> None:
    manifests = sorted(folder.glob("step-*.json"))
    kept = {manifest.stem for manifest in manifests[-_KEPT:]}
    for path in folder.iterdir():
        # also what a killed process left: tensors without a manifest, unfinished files
        if re.match(r"step-|\.unfinished-|\.step-", path.name) and path.stem not in kept:
            path.unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """To the disk itself, not only to the operating system."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
