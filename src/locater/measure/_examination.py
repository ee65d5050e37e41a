"""A model run over batches for the doctor: its attention observed, and what its modules put out.

Every module has a hook meanwhile. Three things are kept: how much attention adds, the first numbers that are not
finite, and how often sequences repeat one token.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.hooks import attention_sites, hidden_states
from locater.measure.observe import Observation, observe
from locater.names import plain_name


@dataclass(frozen=True)
class Fault:
    """The first module that put out a number that is not finite."""

    module: str
    weights: bool  # whether all of its own, and of what is inside it, are finite
    given: bool  # whether all that it was given is
    dtype: str  # of what it put out


@dataclass(frozen=True)
class Examination:
    """A model that has run over some batches: what its attention did, and what its modules put out."""

    seen: Observation
    # by attention module, in the order they ran: standard deviation over tokens of what its branch puts out (after W_O,
    # also where another module has it, and the norm of some models after it), over that of what enters
    output: dict[str, float]
    not_finite: Fault | None = None
    # share of the commonest token in the median sequence, its first and last and padding left out; NaN if not known
    repeated: float = math.nan


def examine(
    model: nn.Module, batches: Iterable[Any], run: Callable[[Any], object] | None = None, **options: Any
) -> Examination:
    """`run` runs the model on a batch, if `doctor`'s way does not do; `options` are those of `observe`."""
    modes = {module: module.training for module in model.modules()}
    ran, repeated = False, list[float]()
    try:
        model.eval()
        with ExitStack() as undo, torch.no_grad():
            if "torch._dynamo" in sys.modules:  # compiled code would not call hooks, or keep them for good
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            outputs = _Outputs(model, undo)
            seen = undo.enter_context(observe(model, **options))
            for batch in _listed(batches):
                ran = True
                repeated += _repeated(model, batch)
                if run is not None:
                    run(batch)
                elif isinstance(batch, Mapping):
                    model(**batch)
                else:
                    model(batch)
    finally:
        for module, training in modes.items():
            module.training = training
    if not ran:
        raise LocaterError("there is no batch to run the model on: give one or more")
    return Examination(seen, outputs.ratios(), outputs.not_finite, statistics.median(repeated or [math.nan]))


def _listed(batches: Any) -> Iterable[Any]:
    """Batches; a tensor or a mapping is one by itself."""
    if isinstance(batches, Tensor | Mapping):
        return [batches]
    if isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
        raise LocaterError(
            "doctor takes batches to run the model on, a list of tensors or of mappings with the keyword arguments of "
            f"its forward, got {batches!r:.80}"
        )
    return batches


def _repeated(model: nn.Module, batch: Any) -> list[float]:
    """Of each sequence of ids (B, T) the share of its commonest; of states (B, T, D) 1 where all are one, else 0.

    Nothing where neither is known.
    """
    given = batch if isinstance(batch, Mapping) else {}
    x = given.get(getattr(model, "main_input_name", "input_ids")) if isinstance(batch, Mapping) else batch
    if not isinstance(x, Tensor) or x.ndim < 2:
        return []
    if x.ndim > 2 or x.is_floating_point():
        return (x == x[:, :1]).flatten(1).all(1).double().tolist()
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != x.shape:
        mask = torch.ones_like(x)
    real = mask.to(x.device).bool()
    return [share for ids, each in zip(x, real, strict=True) for share in _commonest(ids[each])]


def _commonest(ids: Tensor) -> list[float]:
    inner = ids[1:-1] if len(ids) > 3 else ids  # of the first and last, which may frame it, the others tell enough
    return [float(inner.unique(return_counts=True)[1].max()) / len(inner)] if len(inner) else []


def block_of(module: str) -> str:
    """The attention block a module belongs to: BERT has W_O in `attention.output`, beside `attention.self`."""
    around = module.rpartition(".")[0]
    return around if "att" in around.rpartition(".")[2].lower() else module


class _Outputs:
    """What the modules of a model put out while it runs."""

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        self.not_finite: Fault | None = None
        self._below: Fault | None = None  # the first that had −∞ among numbers that were all finite otherwise
        self._sites = {id(site.module): site.name for site in attention_sites(model)}
        self._spreads: dict[str, tuple[_Spread, _Spread]] = {}  # of what enters each attention module, and leaves
        self._left: tuple[str, Tensor] | None = None  # the attention module that ran last, and what it put out
        self._branch: Tensor | None = None  # and that after W_O
        self._attach(model, undo)

    def _attach(self, model: nn.Module, undo: ExitStack) -> None:
        # torch's own encoder layers have a fast path that calls no module inside them
        undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        undo.callback(self._flush)
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                hook = self._hook(plain_name(name))
                undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

    def ratios(self) -> dict[str, float]:
        return {name: leaves.over(enters) for name, (enters, leaves) in self._spreads.items()}

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            out = _first_tensor(result)
            if out is None:
                return
            if self.not_finite is None:
                self._look_for_fault(name, module, args or tuple(kwargs.values()), out)
            if id(module) in self._sites:
                self._attention_left(self._sites[id(module)], hidden_states(module, args, kwargs), out)
            elif self._is_in_branch(name, module, args):
                self._branch = out

        return hook

    def _look_for_fault(self, name: str, module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
        """Inner modules end before those around them, so that the first is the place itself."""
        low, high = (float(one) for one in out.aminmax())
        if low > -math.inf and high < math.inf:
            return
        weights, entered = list(module.parameters()), _first_tensor(given)
        below = low == -math.inf and high < math.inf
        if below and (self._below is not None or not weights):
            return  # what no weight made can be a mask
        finite = all(map(_is_finite, weights)) and not any(map(_is_spoilt, module.buffers()))
        given_finite = entered is None or _is_finite(entered)
        fault = Fault(name, finite, given_finite, str(out.dtype).removeprefix("torch."))
        if below:
            self._below = fault  # a mask all the same, unless another module makes something else of it
        else:
            follows = finite and not given_finite
            self.not_finite = (self._below if follows else None) or fault

    def _is_in_branch(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether it goes on with what the attention that ran last put out, before that is added.

        It is W_O, given the very output and beside it in one block, or a norm after that (Gemma 2, OLMo 2).
        """
        weight = getattr(module, "weight", None)
        if self._left is None or not args or not isinstance(weight, Tensor):
            return False
        if weight.ndim == 1:
            return args[0] is self._branch
        beside = weight.ndim == 2 and name.startswith(f"{block_of(self._left[0])}.")
        return beside and args[0] is self._left[1]

    def _attention_left(self, name: str, entered: list[Tensor], out: Tensor) -> None:
        self._flush()
        if entered:
            enters, _ = self._spreads.setdefault(name, (_Spread(), _Spread()))
            enters.add(entered[0])
            self._left, self._branch = (name, out), out

    def _flush(self) -> None:
        """Adds what the last attention put out, as no W_O can follow any more."""
        if self._left is not None and self._branch is not None:
            self._spreads[self._left[0]][1].add(self._branch)
        self._left = self._branch = None


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _is_spoilt(x: Tensor) -> bool:
    """As a buffer, which may be a mask."""
    return bool((x.isnan() | (x == math.inf)).any())


def _first_tensor(result: Any) -> Tensor | None:
    """What a module puts out, of what it returns: attention weights and caches come after it."""
    while isinstance(result, tuple | list | Mapping):
        result = next(iter(result.values() if isinstance(result, Mapping) else result), None)
    usable = isinstance(result, Tensor) and result.is_floating_point() and not result.is_nested and result.numel()
    return result if usable else None


class _Spread:
    """Standard deviation of tokens (…, D) about the mean of all.

    Of all sequences together: where attention is uniform, the tokens of one sequence get the same.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sum: Tensor | None = None  # (D,) in float64: constants and what varies about them may be far apart
        self._square: Tensor | None = None

    def add(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).to(torch.float32 if x.device.type == "mps" else torch.float64)
        total, square = x.sum(0), x.square().sum()
        self._count += len(x)
        self._sum = total if self._sum is None else self._sum + total
        self._square = square if self._square is None else self._square + square

    def over(self, other: _Spread) -> float:
        mine, theirs = self._deviation(), other._deviation()
        if theirs == 0:
            return mine and mine * math.inf  # 0, ∞ or NaN
        return mine / theirs

    def _deviation(self) -> float:
        if self._sum is None or self._square is None:
            return math.nan
        variance = float(self._square - self._sum.square().sum() / self._count) / self._count
        return math.sqrt(variance) if variance > 0 else 0.0 if variance <= 0 else math.nan
