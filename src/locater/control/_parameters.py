"""Parameters, and the parts of them that hold W_Q and W_K: who trains them, sharded ones, scaling them in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from locater.errors import LocaterError
from locater.models import Attention, Projection, attentions
from locater.models.spectrum import gathered as gathered
from locater.models.spectrum import is_sharded as is_sharded
from locater.names import plain_name


def projections(attention: Attention) -> list[Projection]:
    """W_Q and W_K; W_QK alone where a model trains that itself."""
    return [attention.key] if attention.query is None else [attention.query, attention.key]


def attentions_with_weights(model: nn.Module, name: str) -> list[Attention]:
    """The attention modules of a model that a method is to act on; refused where their weights are no numbers yet, or
    numbers with scales elsewhere."""
    known = attentions(model)
    for attention in known:
        for tensor in (tensor for projection in projections(attention) for tensor in projection.tensors):
            library, where = type(tensor).__module__.partition(".")[0], plain_name(attention.module)
            if tensor.is_meta:
                raise LocaterError(
                    f"the query and key weights of {where} are on the meta device and have no values; "
                    f"{name} comes after the weights are loaded"
                )
            if library in ("torchao", "bitsandbytes") or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                kind = str(tensor.dtype) if library == "torch" else f"{library}'s {type(tensor).__name__}"
                raise LocaterError(
                    f"the query and key weights of {where} are {kind}, whose values {name} cannot read; "
                    "train the model it was made from"
                )
    return known


def refuse_computed(known: Sequence[Attention], name: str, *, arranged: bool = False, lora: bool = False) -> None:
    """For a method that changes the stored weights themselves; `arranged`: unless they are merely rearranged; `lora`:
    unless they are LoRA's."""
    for attention in known:
        for projection in projections(attention):
            if (projection.others and not lora) or (projection.computed and not projection.others and not arranged):
                why = "is that of a latent: use LocAteR"
                if projection.others:
                    why = "is made of several (LoRA): merge_and_unload() them, or use LocAteR"
                raise LocaterError(f"{name} changes a stored weight, and that of {attention.module} {why}")


# ---------------------------------------------------------------------- sharded parameters (FSDP2, tensor parallelism)


def gathered_attention(attention: Attention) -> Attention:
    """With sharded weights, biases and gains made whole (differentiably)."""
    parts = ("query", "key", "query_norm", "key_norm")
    whole = {name: part and part.mapped(gathered) for name in parts for part in (getattr(attention, name),)}
    return replace(attention, **whole)


def sharded(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank holds whole, sharded as another. No communication."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        mesh, like.placements
    )


# ---------------------------------------------------------------------- optimizers


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside a wrapper such as accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer):
        raise LocaterError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of its parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def refuse_frozen(tensors: Sequence[Tensor]) -> None:
    """`tensors` are the query and key weights of a model; no optimizer trains them if all are frozen."""
    if not any(tensor.requires_grad for tensor in tensors):
        raise LocaterError(
            "all query and key weights of the model are frozen, and LocAteR acts on those that are trained"
        )


class HeldBy:
    """Which group of an optimizer holds a parameter, also of groups that are added later. Called, whether one does."""

    def __init__(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        """`tensors` are the query and key weights, one of which it must train."""
        self.optimizer = optimizer
        self._known: tuple[int, dict[int, int]] = (-1, {})
        refuse_frozen(tensors)
        if not any(self(tensor) for tensor in tensors if tensor.requires_grad):
            raise LocaterError(
                f"this {type(optimizer).__name__} holds none of the query and key weights of the model; "
                "attach LocAteR to the optimizer that trains them"
            )

    def ids(self) -> list[int]:
        """Of all that it holds now."""
        return [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]

    def group(self, tensor: Tensor) -> int | None:
        size = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if self._known[0] != size:
            self.refresh()
        return self._known[1].get(id(tensor))

    def refresh(self) -> None:
        """Where parameters were replaced by as many others, `group` does not notice by itself."""
        groups = enumerate(self.optimizer.param_groups)
        found = {id(parameter): i for i, group in groups for parameter in group["params"]}
        self._known = sum(len(group["params"]) for group in self.optimizer.param_groups), found

    def __call__(self, tensor: Tensor) -> bool:
        return self.group(tensor) is not None


def add_group(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], like: Sequence[Tensor], name: str, undo: ExitStack
) -> None:
    """Lets the optimizer train `parameters` without weight decay, else as it trains the first of `like`."""
    ids = [id(tensor) for tensor in like]
    group = next((g for g in optimizer.param_groups if any(id(p) in ids for p in g["params"])), None)
    if group is None:
        raise LocaterError(
            f"this {type(optimizer).__name__} holds none of the query and key weights of the model; "
            f"apply {name} with the optimizer that trains them"
        )
    if "initial_lr" in group:  # schedulers keep a rate a group, and fail when there are more
        raise LocaterError(
            f"{name} adds parameters, and a learning-rate scheduler already follows this {type(optimizer).__name__}; "
            "make the scheduler afterwards"
        )
    ours = {**{key: value for key, value in group.items() if key != "params"}, "weight_decay": 0.0}
    optimizer.add_param_group({**ours, "params": list(parameters)})
    added = optimizer.param_groups[-1]

    def forget() -> None:
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
        if "initial_lr" in added:  # a scheduler counts the groups
            added["params"] = []
        else:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not added]

    undo.callback(forget)


def owner_of(model: nn.Module, tensor: Tensor) -> tuple[str, nn.Module, str]:
    """The one module that holds a parameter: its dotted name, itself, and the parameter's name in it."""
    found = [
        (name, module, key)
        for name, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is tensor
    ]
    if len(found) != 1:
        names = ", ".join(f"{name}.{key}" for name, _, key in found)
        raise LocaterError(
            f"{names} are one parameter, shared by {len(found)} modules; untie them first"
            if found
            else f"a parameter of shape {tuple(tensor.shape)} belongs to no module of {type(model).__name__} any more"
        )
    return found[0]


def refuse_wrapped(model: nn.Module, known: Sequence[Attention], name: str) -> None:
    """A method that adds parameters comes before the wrappers that have to know all of them."""
    if isinstance(model, DistributedDataParallel):
        raise LocaterError(f"{name} adds parameters that DDP would not reduce; apply it before wrapping the model")
    if any(is_sharded(tensor) for each in known for one in projections(each) for tensor in one.tensors):
        raise LocaterError(f"{name} adds parameters, and the model is sharded already; apply it before fully_shard")


def _placed(tensor: Tensor, view: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """A whole tensor like the stored one, sharded as it: `value` where `view` shows or arranges its entries, else 0."""
    with torch.enable_grad():
        stored = torch.zeros(tensor.shape, dtype=value.dtype, device=value.device, requires_grad=True)
        shown = view(stored)
    (whole,) = torch.autograd.grad(shown, stored, value.expand_as(shown))
    return sharded(whole, tensor) if is_sharded(tensor) else whole


@torch.no_grad()
def scale_(tensor: Tensor, view: Callable[[Tensor], Tensor], factor: Tensor, *, computed: bool = False) -> None:
    """Multiplies the part of a parameter that `view` shows; of a sharded one each rank its own part."""
    if computed or is_sharded(tensor):
        tensor.detach().mul_(1 + _placed(tensor, view, factor - 1))
    else:
        view(tensor.detach()).mul_(factor)  # computed in the wider of the two precisions


@torch.no_grad()
def add_part_(target: Tensor, projection: Projection, amount: float | Tensor) -> None:
    """Adds amount · the projection's weight to its part of a tensor like the stored one."""
    source = projection.tensor.detach()
    if projection.computed or is_sharded(target):
        by = torch.as_tensor(amount, dtype=target.dtype, device=target.device)
        target.add_(source * _placed(target, projection.view, by))
    else:
        projection.view(target).add_(projection.view(source) * amount)


def rows_of(projection: Projection) -> tuple[Tensor, int]:
    """The outputs of the stored weight that are this projection's, and the dimension that outputs are stored along."""
    shape = projection.tensor.shape
    # GPT-2 stores inputs first: there a step along the view's last dimension crosses whole rows
    meta = torch.empty(shape, device="meta")
    outputs = 1 if projection.view(meta).stride(-1) != meta.stride(-1) else 0
    index = torch.arange(shape[outputs])
    index = index[:, None] if outputs == 0 else index[None]
    return projection.view(index.expand(shape))[..., 0].flatten(), outputs
