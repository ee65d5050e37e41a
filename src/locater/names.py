"""Names of modules."""

from __future__ import annotations

__all__ = ["plain_name"]

# parts that torch.compile, FSDP1 and activation checkpointing put into names, and nobody else
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def plain_name(name: str) -> str:
    """A module's name as it is in the model that was wrapped.

    DDP's "module." stays: a model may have a part of that name itself.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
