"""Putting files on disk so that a reader sees the old one or the whole new one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from locater.errors import LocaterError

__all__ = ["writable_folder", "write_file"]


def writable_folder(folder: Path) -> Path:
    """Makes the folder and proves, before any work is done, that files can be put there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise LocaterError(f"cannot write into the folder {folder}: {error.strerror}; choose another one") from error


def write_file(path: Path, content: bytes) -> Path:
    """Writes beside the target, then moves it there in one step.

    A link stays, and its target is written; into what is no file, a pipe or /dev/stdout, the content is put.
    """
    temporary = None
    try:
        target = path.resolve()
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as pipe:
                pipe.write(content)
            return path
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise LocaterError(f"cannot write {path}: {error.strerror}") from error
    return path
