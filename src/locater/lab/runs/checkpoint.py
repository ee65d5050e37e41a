"""Checkpoints that survive being killed at any moment.

A checkpoint is `step-N.safetensors` and, written after it, `step-N.json`, the manifest: what run it belongs to, the
checksum of the tensors, those of the run's records up to it, and one of the manifest itself. Both appear under their
names whole or not at all, and the one before is removed only when the new one is complete: one good checkpoint is
there at all times after the first.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from locater.errors import LocaterError, reason
from locater.io import checksum, json_bytes, read_json, write_file
from locater.lab.runs.records import Checksums

__all__ = ["Loaded", "load_newest", "newest_step", "save"]

_KEPT = 2


class Loaded(NamedTuple):
    state: dict[str, Tensor]
    step: int
    records: Checksums | None  # None in checkpoints that were written before there were any
    damaged: list[str]  # newer ones that could not be used, and why


def save(folder: Path, step: int, state: dict[str, Tensor], belongs_to: str, records: Checksums) -> None:
    """Writes the checkpoint of a step, then removes all but the newest two."""
    path = folder / f"step-{step:09d}.safetensors"
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".unfinished-")
        os.close(handle)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, temporary)
        digest = checksum(Path(temporary))
        _flush(Path(temporary))
        os.replace(temporary, path)
    except Exception as error:  # safetensors has an exception of its own for what the disk says
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        why = "the disk is full" if full else reason(error)
        raise LocaterError(f"cannot write the checkpoint {path}: {why}; the one before it is intact") from error
    manifest = {"step": step, "sha256": digest, "bytes": path.stat().st_size, "belongs_to": belongs_to}
    manifest["records"] = sorted(records.items())
    manifest["manifest_sha256"] = _of_manifest(manifest)
    _flush(write_file(path.with_suffix(".json"), json_bytes(manifest) + b"\n"))
    _flush(folder)
    _remove_old(folder)


def load_newest(folder: Path, belongs_to: str) -> Loaded | None:
    """The newest checkpoint that is whole; None where there is none at all."""
    damaged: list[str] = []
    for path in sorted(folder.glob("step-*.json"), reverse=True):
        tensors = path.with_suffix(".safetensors")
        try:
            manifest = _read_manifest(path)
            if (checksum(tensors), tensors.stat().st_size) != (manifest["sha256"], manifest["bytes"]):
                raise ValueError("its checksum is not the one in its manifest")
            state = load_file(tensors)
        except Exception as error:  # whatever a damaged file makes its readers say
            damaged.append(f"{tensors.name}: {reason(error)}")
            continue
        if manifest["belongs_to"] != belongs_to:
            raise LocaterError(
                f"{tensors} is the checkpoint of a run with another configuration; choose another folder"
            )
        records = dict(manifest["records"]) if "records" in manifest else None
        return Loaded(state, manifest["step"], records, damaged)
    if damaged:
        raise LocaterError(f"no checkpoint in {folder} is whole: {'; '.join(damaged)}; remove the folder to start anew")
    return None


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint by its name, whole or not; 0 where there is none."""
    steps = (re.fullmatch(r"step-(\d{1,18})", path.stem) for path in folder.glob("step-*.json"))
    return max((int(match[1]) for match in steps if match), default=0)


def _read_manifest(path: Path) -> dict[str, Any]:
    """A manifest that is as it was written; those from before they had a checksum are held to their name."""
    manifest = read_json(path)
    written = manifest.pop("manifest_sha256", None)
    if written is not None and written != _of_manifest(manifest):
        raise ValueError("its manifest is damaged")
    if path.stem != f"step-{manifest['step']:09d}" or not isinstance(manifest["belongs_to"], str):
        raise ValueError("its manifest is another's")
    return manifest


def _of_manifest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json_bytes(manifest)).hexdigest()


def _remove_old(folder: Path) -> None:
    manifests = sorted(folder.glob("step-*.json"))
    kept = {manifest.stem for manifest in manifests[-_KEPT:]}
    for path in folder.iterdir():
        # also what a killed process left: tensors without a manifest, unfinished files
        if re.match(r"step-|\.unfinished-|\.step-", path.name) and path.stem not in kept:
            path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """To the disk itself, not only to the operating system."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
