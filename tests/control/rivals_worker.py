"""Trains small models on 2 ranks with rivals applied, and saves them: run by torchrun from test_rivals_distributed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
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


def train(family: str, method: str | None, layout: str = "alone", rank: int = 0) -> dict[str, torch.Tensor]:
    """The same steps on every layout; a rank sees its part of each batch."""
    wrapped = model = ready(family)
    first = method == "σReparam"  # it adds parameters: before the wrapping
    handle = METHODS[method]().apply(model) if first else None
    if layout == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    elif layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
            fully_shard(layer)
        wrapped = fully_shard(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    if method is not None and not first:
        handle = METHODS[method]().apply(wrapped, optimizer)
    given = batch(family)
    part = given if layout == "alone" else {name: x[rank : rank + 1] for name, x in given.items()}
    for _ in range(STEPS):
        one_step(wrapped, optimizer, part)
    if handle is not None:
        handle.remove()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    saved = {case: train(case[1], case[2], case[0], rank) for case in CASES}
    if rank == 0:
        torch.save(saved, sys.argv[1])
    dist.barrier()  # neither goes while the other still needs it
    dist.destroy_process_group()
    os._exit(0)  # torch's threads are not always joined at an ordinary exit, which aborts


if __name__ == "__main__":
    main()
