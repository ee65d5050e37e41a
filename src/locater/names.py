"""Names of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["kind_of", "layer_positions", "numbers_in", "plain_name"]

# parts that torch.compile, FSDP1 and activation checkpointing put into names, and nobody else
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def plain_name(name: str) -> str:
    """A module's name as it is in the model that was wrapped.

    DDP's "module." stays: a model may have a part of that name itself.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def numbers_in(name: str) -> list[int]:
    """Those that are parts of a dotted name."""
    return [int(number) for number in re.findall(r"(?:^|\.)([0-9]{1,9})(?=\.|$)", name)]


def layer_positions(names: Iterable[str]) -> dict[str, int]:
    """Which of the numbers in each name is its layer's: the one that takes most values among names that are alike."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?:(?<=\.)|^)[0-9]{1,9}(?=\.|$)", "#", name), []).append(name)
    found: dict[str, int] = {}
    for each in alike.values():
        values = [len(set(column)) for column in zip(*map(numbers_in, each), strict=True)]
        found |= dict.fromkeys(each, max(range(len(values)), key=lambda i: (values[i], i)) if values else -1)
    return found


_CROSS = re.compile(r"cross|encoder_attn|EncDec|multihead_attn|x_attn|^attn2$", re.IGNORECASE)


def kind_of(name: str, halves: bool) -> str:
    """cross, or self; encoder or decoder in a model that has both `halves`."""
    if any(_CROSS.search(part) for part in name.split(".")[-2:]):
        return "cross"
    return "self" if not halves else "decoder" if "decoder" in name.split(".") else "encoder"
