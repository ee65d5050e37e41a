"""Trains small models on 2 ranks with LocAteR attached, and saves them: run by torchrun from test_distributed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from locater import LocAteR

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from zoo import VOCABULARY, build

STEPS, BATCH, TOKENS = 4, 4, 9
CASES = [
    ("ddp", "llama", "attach"),
    ("ddp", "gpt2", "penalty"),
    ("fsdp2", "llama", "attach"),
    ("fsdp2", "gpt2", "attach"),  # fused, stored transposed
    ("fsdp2", "llama", "penalty"),
]


def batch(step: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))


def train(model, mine=slice(None), how="attach") -> LocAteR:
    """The same steps on every layout; a rank sees its part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reg = LocAteR(model, scale_strength=0.02, mean_strength=0.03, target=1.5)
    if how == "attach":
        reg.attach(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = batch(step)[mine]
        loss = model(input_ids=ids, labels=ids).loss
        if how == "penalty":
            loss = loss + reg.penalty()
        loss.backward()
        optimizer.step()
    return reg


def trained(layout: str, family: str, how: str) -> dict[str, object]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = build(family).double()
    if layout == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        layers = model.model.layers if hasattr(model, "model") else model.transformer.h
        for layer in layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    half = BATCH // 2
    reg = train(wrapped, slice(rank * half, (rank + 1) * half), how)
    whole = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        for name, value in model.state_dict().items()
    }
    return {"model": whole, "penalty": reg.measure()["penalty"]}


def main() -> None:
    dist.init_process_group("gloo")
    saved = {case: trained(*case) for case in CASES}
    if dist.get_rank() == 0:
        torch.save(saved, sys.argv[1])
    dist.barrier()  # neither goes while the other still needs it
    dist.destroy_process_group()
    os._exit(0)  # torch's threads are not always joined at an ordinary exit, which aborts


if __name__ == "__main__":
    main()
