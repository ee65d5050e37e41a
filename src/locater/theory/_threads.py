"""One thread for products of many small matrices: OpenBLAS shares out each of them, and waits for longer than it saves.

On a machine that is busy besides, four to twenty times longer. numpy has no switch for it once it is loaded;
its own copy of the library has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

__all__ = ["one_thread"]

_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")


@lru_cache(maxsize=1)
def _switches() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """What says how many threads there are, and what sets it; None where numpy came without OpenBLAS."""
    for file in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"):
        with suppress(OSError):
            library = ctypes.CDLL(str(file))
            for name in _NAMES:
                with suppress(AttributeError):
                    return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """As many threads as before afterwards."""
    found = _switches()
    if found is None:
        yield
        return
    get, put = found
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)
