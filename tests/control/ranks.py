"""What workers on several ranks share: a model laid out over them, its whole weights, and results that one saves."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def laid_out(model, layout):
    """Under DDP, FSDP2, or with heads spread over the ranks ("tensor"); "alone" is the model itself."""
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if layout == "alone":
        return model
    if layout == "tensor":
        return _with_heads_spread(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
        fully_shard(layer)
    return fully_shard(model)


def _with_heads_spread(model):
    """Query, key and value heads over the ranks, and the columns of what puts them together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, plan)
    return model


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
