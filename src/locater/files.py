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
    """Writes beside the target, then moves it there in one step."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise LocaterError(f"cannot write {path}: {error.strerror}") from error
    return path
