"""Attention modules that are not read, in words."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

__all__ = ["NO_SOFTMAX", "in_words", "warn_unread"]

NO_SOFTMAX = "it computes no softmax over q·k"  # the reason for a layer of linear attention


def in_words(unread: Mapping[str, str]) -> list[str]:
    """A sentence for modules that are not read, with the reason of the first; one for layers of linear attention."""
    names = [name for name, why in unread.items() if why != NO_SOFTMAX]
    linear = len(unread) - len(names)
    said = []
    if names:
        others = f" and {_counted(len(names) - 2, 'other')}" if len(names) > 2 else ""
        first = f"{' and '.join(names[:2])}" if not others else ", ".join(names[:2])
        same = all(unread[name] == unread[names[0]] for name in names)
        said.append(f"not read: {first}{others}: {unread[names[0]]}{'' if same else ' (the first)'}")
    if linear:
        said.append(f"{_counted(linear, 'layer')} {'computes' if linear == 1 else 'compute'} no softmax over q·k")
    return said


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def warn_unread(unread: Mapping[str, str], *, stacklevel: int) -> None:
    """Says it once, for the caller `stacklevel` functions up; nothing where all is read."""
    if unread:
        warnings.warn("; ".join(in_words(unread)), stacklevel=stacklevel + 1)
