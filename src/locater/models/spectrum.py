"""W_QK of every attention module of a model, live or on disk, one at a time; and which modules are not read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.models.attention import Attention
from locater.models.formats import UNQUANTISED
from locater.models.howto import with_ten_lines
from locater.models.registry import LiveTensors, reading
from locater.models.unread import warn_unread
from locater.names import plain_name
from locater.qk import QK

if TYPE_CHECKING:
    from locater.models.checkpoint import Checkpoint

__all__ = ["Found", "Spectra", "find", "gathered", "is_sharded", "spectra"]


@dataclass(frozen=True)
class Spectra:
    """One attention module's heads: W_QK (G, R) as it was asked for."""

    attention: Attention
    stored: QK  # in the precision of its weights

    @property
    def qk(self) -> QK:
        """In float64."""
        return QK(self.stored.w_q.double(), self.stored.w_k.double(), one_input=self.attention.one_input)

    def groups(self) -> Iterator[QK]:
        """One key head's after the other, (1, R): all of a large module's in float64 are hundreds of megabytes."""
        w_q, w_k = self.stored.w_q, self.stored.w_k
        for one in range(self.stored.shape[0]):
            parts = (x[one : one + 1] if x.shape[0] > 1 else x for x in (w_q, w_k))
            yield QK(*(x.double() for x in parts), one_input=self.attention.one_input)

    def eigenvalues(self) -> Tensor:
        """(heads, d_head), complex; one NaN a head where W_QK has none."""
        if not self.stored.square:
            return torch.full((self.stored.shape.numel(), 1), torch.nan, dtype=torch.complex128)
        return torch.cat([one.eigenvalues() for one in self.groups()]).flatten(0, 1)


@dataclass(frozen=True)
class Found:
    """The spectra of the modules that are read, each made when it is asked for; and why others are not."""

    spectra: Iterator[Spectra]
    unread: dict[str, str]  # module to reason


def spectra(model_or_path: nn.Module | str | Path | Checkpoint, **asked: Any) -> Iterator[Spectra]:
    """W_QK of every attention module, one at a time; what is asked is as in `scan`. A warning names the unread."""
    found = find(model_or_path, **asked)
    warn_unread(found.unread, stacklevel=2)
    return found.spectra


def find(
    model_or_path: nn.Module | str | Path | Checkpoint,
    *,
    covariance: Tensor | Mapping[str, Tensor] | None = None,
    offset: float = 0.0,
    average_offsets: int | None = None,
    fold_norm: bool = False,
    layers: Collection[int] | None = None,
) -> Found:
    """What `spectra` gives, and which modules it leaves out."""
    if not abs(offset) < float("inf"):
        raise LocaterError(f"offset must be a finite number, got {offset}")
    if average_offsets is not None and (not isinstance(average_offsets, int) or average_offsets < 1 or offset != 0):
        raise LocaterError("average_offsets must be a positive whole number, and offset 0 with it")
    if layers is not None:
        try:
            layers = {index(layer) for layer in layers}
        except TypeError:
            raise LocaterError(f"layers must be a list of whole numbers, got {layers!r:.80}") from None
    modules, unread = _modules(model_or_path, layers)

    def each() -> Iterator[Spectra]:
        with torch.no_grad():
            for attention in modules:
                uses = [use for use in attention.per_layer() if layers is None or use.layer in layers]
                if not uses:
                    continue
                qk = _through(_w_qk(attention, offset, average_offsets, fold_norm), attention.module, covariance)
                yield from (Spectra(use, qk) for use in uses)
                del attention, uses, qk  # before the next one is made

    return Found(each(), unread)


def _w_qk(attention: Attention, offset: float, average_offsets: int | None, fold_norm: bool) -> QK:
    fold = fold_norm and attention.input_norm is not None
    if average_offsets is None:
        qk = attention.qk_at(offset, fold_norm=fold)
    else:
        qk = attention.qk_mean(average_offsets, fold_norm=fold)
    if not (torch.isfinite(qk.w_q).all() and torch.isfinite(qk.w_k).all()):
        raise LocaterError(f"{attention.module} has NaN or infinite weights; its spectrum does not exist")
    return qk


def _through(qk: QK, module: str, covariance: Tensor | Mapping[str, Tensor] | None) -> QK:
    """W_QK seen through Σ^½ on both sides: the invariants of W = W_QK Σ."""
    sigma = covariance
    if isinstance(covariance, Mapping):
        sigma = next((covariance[name] for name in covariance if module in (name, plain_name(name))), None)
    if not isinstance(sigma, Tensor):
        if covariance is not None:
            raise LocaterError(f"the covariances name no module {module}")
        return qk
    if not qk.square:
        raise LocaterError(f"queries and keys of {module} are made of different states; one covariance is not of both")
    if tuple(sigma.shape) != (qk.d_model, qk.d_model):
        raise LocaterError(
            f"the covariance for {module} must be {qk.d_model} × {qk.d_model}, got shape {tuple(sigma.shape)}"
        )
    qk = QK(qk.w_q.double(), qk.w_k.double())
    values, vectors = torch.linalg.eigh(sigma.to(qk.w_q))
    if bool(values[0] < -1e-7 * values[-1]):
        raise LocaterError(f"the covariance for {module} must be positive semidefinite, it has {values[0]:.6g}")
    root = vectors * values.clamp(min=0).sqrt()
    return QK(qk.w_q @ root, qk.w_k @ root)


# ---------------------------------------------------------------------- modules, live and on disk


def _modules(
    model_or_path: nn.Module | str | Path | Checkpoint, layers: Collection[int] | None
) -> tuple[Iterator[Attention], dict[str, str]]:
    """Those that are read, of these layers; why others are not. Names are those of the model before torch.compile."""
    from locater.models.checkpoint import Checkpoint, layers_in, open_checkpoint
    from locater.models.hub import ahead

    with with_ten_lines():
        if isinstance(model_or_path, nn.Module):
            first, *_ = *model_or_path.named_parameters(), None
            if first is not None and all(parameter.is_meta for parameter in model_or_path.parameters()):
                raise LocaterError(f"{first[0]} {_META}")
            found = reading(model_or_path, _LiveWeights(model_or_path))
            modules = iter(found)
        else:
            stored = model_or_path if isinstance(model_or_path, Checkpoint) else open_checkpoint(model_or_path)
            found = stored.reading(layers)
            modules = iter(found)
            if stored.traffic is not None:  # from the hub, where a request takes as long as a spectrum
                modules = ahead(modules)
    unread = {
        plain_name(name): why
        for name, why in found.unread.items()
        if layers is None or not layers_in(name).isdisjoint(layers)
    }
    return (replace(attention, module=plain_name(attention.module)) for attention in modules), unread


class _LiveWeights:
    """The parameters of a live model, each whole: gathered where it is sharded, refused where it is no number."""

    def __init__(self, model: nn.Module) -> None:
        self._live = LiveTensors(model)

    def get(self, name: str) -> Tensor | None:
        tensor = self._live.get(name)
        return None if tensor is None else _whole(tensor, name)


_META = "is on the meta device and has no values: load the weights, or scan the checkpoint"


def _whole(tensor: Tensor, name: str) -> Tensor:
    if tensor.is_meta:
        raise LocaterError(f"{name} {_META}")
    if is_sharded(tensor):
        tensor = gathered(tensor.detach())
    library = type(tensor).__module__.partition(".")[0]
    if library in ("torchao", "bitsandbytes") or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        kind = tensor.dtype if library == "torch" else f"{library}'s {type(tensor).__name__}"
        raise LocaterError(f"{name} is {kind}, and its scales are not read; {UNQUANTISED}")
    return tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor: FSDP2, tensor parallelism."""
    return hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; itself where it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole
