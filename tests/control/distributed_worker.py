"""Trains small models on 2 ranks with LocAteR attached, and saves them: run by torchrun from test_distributed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from locater import LocAteR, observe, scan
from locater.control import DecoupledLocAteR

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from ranks import laid_out, save_all, whole_weights
from zoo import VOCABULARY, build

STEPS, BATCH, TOKENS = 4, 4, 9
CASES = [
    ("ddp", "llama", "attach"),
    ("ddp", "gpt2", "penalty"),
    ("fsdp2", "llama", "attach"),
    ("fsdp2", "gpt2", "attach"),  # fused, stored transposed
    ("fsdp2", "llama", "penalty"),
    ("tensor", "llama", "attach"),
    ("tensor", "llama", "decoupled"),
]


def batch(step: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))


def train(model, mine=slice(None), how="attach") -> LocAteR | DecoupledLocAteR:
    """The same steps on every layout; a rank sees its part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # sharded and plain weights together
    if how == "decoupled":
        reg = DecoupledLocAteR(model)
    else:
        reg = LocAteR(model, scale_strength=0.02, mean_strength=0.03, target=1.5)
    if how != "penalty":
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


def observed(model) -> list[dict[str, object]]:
    with torch.no_grad(), observe(model) as seen:
        model(input_ids=batch(0))
    return seen.table().to_dict("records")


def trained(layout: str, family: str, how: str) -> dict[str, object]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = build(family).double()
    half = BATCH // 2
    mine = slice(None) if layout == "tensor" else slice(rank * half, (rank + 1) * half)
    reg = train(laid_out(model, layout), mine, how)
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, observed(model) if layout == "tensor" else [])
    scans = [None] * dist.get_world_size()
    dist.all_gather_object(scans, scan(model, fold_norm=True)[["scale", "trace"]].to_numpy().tolist())
    return {"model": whole_weights(model), "measured": reg.measure(), "rows": rows, "scans": scans}


if __name__ == "__main__":
    save_all(trained, CASES)
