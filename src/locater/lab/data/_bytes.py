"""Files as streams of bytes: read whole, and cut into what is trained on and what is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from locater.errors import LocaterError
from locater.io import read_file, unpacked

Bytes = NDArray[np.uint8]


def read_bytes(path: Path) -> Bytes:
    """All of a file, of a .gz what is in it."""
    raw = read_file(path)
    if path.suffix == ".gz":
        raw, whole = unpacked(path, raw)
        if not whole:
            raise LocaterError(f"cannot read {path}: it is cut off, damaged, or no gzip")
    if len(raw) < 20:
        raise LocaterError(f"{path} holds {len(raw)} bytes, too few for a text")
    return np.frombuffer(raw, dtype=np.uint8)


def cut(whole: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """Nine tenths to train on, then a twentieth and a twentieth."""
    twentieth = len(whole) // 20
    valid, test = np.array_split(whole[len(whole) - 2 * twentieth :], 2)
    return whole[: len(whole) - 2 * twentieth], valid, test
