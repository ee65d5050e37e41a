"""What workers on several ranks share: a model laid out over them, its whole weights, and results that one saves."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def laid_out(model, layout):
    """Under DDP or FSDP2; "alone" is the model itself."""
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if layout == "alone":
        return model
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
        fully_shard(layer)
    return fully_shard(model)


def whole_weights(model) -> dict[str, torch.Tensor]:
    """Sharded ones put together."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def save_all(trained, cases) -> None:
    """What `trained` gives for each of the cases, in the file that the command line names."""
    dist.init_process_group("gloo")
    saved = {case: trained(*case) for case in cases}
    if dist.get_rank() == 0:
        torch.save(saved, sys.argv[1])
    dist.barrier()  # neither goes while the other still needs it
    dist.destroy_process_group()
    os._exit(0)  # torch's threads are not always joined at an ordinary exit, which aborts
