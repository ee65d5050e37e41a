"""Trains small models on 2 ranks with rivals applied, and saves them: run by torchrun from test_rivals_distributed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from ranks import laid_out, save_all, whole_weights
from rivals import METHODS, batch, one_step, ready

CASES = [
    ("ddp", "gpt2", "QK-clip"),
    ("fsdp2", "llama", "QK-clip"),
    ("fsdp2", "gpt2", "QK-clip"),  # fused, stored transposed
    ("fsdp2", "gpt2", "QK weight decay"),
    ("fsdp2", "gpt2", "σReparam"),
    ("ddp", "llama", "attention z-loss"),
    ("fsdp2", "gpt2", "LocAteR, decoupled"),
    ("fsdp2", "llama", "LocAteR, decoupled"),
]
STEPS = 3


def train(layout: str, family: str, method: str | None) -> dict[str, torch.Tensor]:
    """The same steps on every layout; a rank sees its part of each batch."""
    model = ready(family)
    first = method == "σReparam"  # it adds parameters: before the wrapping
    handle = METHODS[method]().apply(model) if first else None
    wrapped = laid_out(model, layout)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    if method is not None and not first:
        handle = METHODS[method]().apply(wrapped, optimizer)
    given = batch(family)
    part = given if layout == "alone" else {name: x[[dist.get_rank()]] for name, x in given.items()}
    for _ in range(STEPS):
        one_step(wrapped, optimizer, part)
    if handle is not None:
        handle.remove()
    return whole_weights(model)


if __name__ == "__main__":
    save_all(train, CASES)
