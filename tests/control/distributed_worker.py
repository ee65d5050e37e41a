"""Trains small models on 2 ranks with LocAteR attached, and saves them: run by torchrun from test_distributed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from locater import LocAteR, observe, scan
from locater.control import DecoupledLocAteR
from locater.models import attentions

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
    ("fsdp2", "qwen2", "decoupled"),  # with biases
    ("fsdp2", "qwen3", "decoupled"),  # with norms of queries and keys
    ("fsdp2", "llama", "spoilt"),
    ("ddp", "decoder", "lengths"),
]


def batch(step: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))


def train(model, mine=slice(None), how="attach") -> LocAteR | DecoupledLocAteR:
    """The same steps on every layout; a rank sees its part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # sharded and plain weights together
    if how in ("decoupled", "spoilt"):
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
        if how == "spoilt" and step == STEPS - 1:
            gradient = attentions(model)[0].query.tensor.grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(torch.inf)
        optimizer.step()
    return reg


def replicas_of_other_lengths() -> dict[str, torch.Tensor]:
    """How far apart ranks that see texts of different lengths end, whose samples make another order of modules."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerDecoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerDecoder(layer, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    DecoupledLocAteR(model, change=1e-2).attach(optimizer)
    replicated = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(10 * step + dist.get_rank())
        text, memory = (torch.randn(4, n, 32, generator=random) for n in ((64, 20)[dist.get_rank()], 16))
        optimizer.zero_grad()
        replicated(text, memory).square().mean().backward()
        optimizer.step()
    apart = {}
    for name, p in model.named_parameters():
        both = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(both, p.detach())
        apart[name] = (both[0] - both[1]).abs().max()
    return apart


def observed(model) -> list[dict[str, object]]:
    with torch.no_grad(), observe(model) as seen:
        model(input_ids=batch(0))
    return seen.table().to_dict("records")


def trained(layout: str, family: str, how: str) -> dict[str, object]:
    if how == "lengths":
        return {"apart": replicas_of_other_lengths()}
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = build(family).double()
    half = BATCH // 2
    # of LocAteR beside the optimizer each rank's sample counts: all see the same text, as one process does
    mine = (
        slice(None) if layout == "tensor" or how in ("decoupled", "spoilt") else slice(rank * half, (rank + 1) * half)
    )
    reg = train(laid_out(model, layout), mine, how)
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, observed(model) if layout == "tensor" else [])
    scans = [None] * dist.get_world_size()
    dist.all_gather_object(scans, scan(model, fold_norm=True)[["scale", "trace"]].to_numpy().tolist())
    return {"model": whole_weights(model), "measured": reg.measure(), "rows": rows, "scans": scans}


if __name__ == "__main__":
    save_all(trained, CASES)
