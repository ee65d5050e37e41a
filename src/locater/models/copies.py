"""Models that no configuration builds: read by a copy with every parameter random.

A copy of the whole model shows what its attention modules are given: rotary angles, biases, the states of another
model. Where nobody knows how it is called, or it is too large, a copy of each attention module is called by itself; one
that may be given more than states is refused then.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from locater.models import twin as twins
from locater.models.flow import Compared, compared

__all__ = ["copied", "given_more", "seen_at_work", "settings"]

_MOST_CALLS = 48
_MORE = re.compile(r"rot|rope|freqs|pos|bias|rel_|prev|alibi")
_NOTHING = re.compile(r"mask|past|cache|label|target|return|index|kwargs|rot|pos|bias|key_value|class|pool|train|fold")
_STATES = re.compile(r"context|encoder_hidden|memory|cond|cross")


def copied(model: nn.Module) -> nn.Module:
    """On the CPU in float32, every parameter random; nothing is copied on another device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.is_floating_point():
            kept = not parameter.requires_grad and not parameter.is_meta  # a constant, such as a table of sines
            new = parameter.detach().to("cpu", torch.float32, copy=True) if kept else torch.ones(parameter.shape)
            memo[id(parameter)] = nn.Parameter(new, requires_grad=parameter.requires_grad)
    made = copy.deepcopy(model, memo).cpu().float().eval()
    twins.randomise(made)
    return made


def settings(model: nn.Module) -> Hashable:
    """All that the logits of a model may depend on, but the values of parameters."""

    def plain(value: Any) -> bool:
        return isinstance(value, bool | int | float | str | tuple | list | functools.partial | None) or callable(value)

    return tuple(
        (
            name,
            type(part),
            tuple((n, repr(v)) for n, v in vars(part).items() if n[:1] != "_" and n != "training" and plain(v)),
            tuple((n, p.shape) for n, p in part.named_parameters(recurse=False)),
        )
        for name, part in model.named_modules()
    )


def given_more(module: nn.Module) -> list[str]:
    """Arguments by which a model may give an attention module positions or biases."""
    return [n for n, p in inspect.signature(module.forward).parameters.items() if p.default is None and _MORE.search(n)]


@torch.no_grad()
def seen_at_work(made: nn.Module, attention: list[str]) -> tuple[list[Compared], set[str]]:
    """What a copy compares, and the modules that ran: of the calls that it takes, the one that reaches most."""
    best: tuple[list[Compared], set[str]] = [], set()
    with twins.quietly(), torch.random.fork_rng(devices=[]):
        for number, given in enumerate(calls(made)):
            if number == _MOST_CALLS:
                break
            try:
                seen, ran = compared(made, functools.partial(made, **given))
            except Exception:  # arguments that it does not take fail in any way
                continue
            if (len(seen), len(ran)) > (len(best[0]), len(best[1])):
                best = seen, ran
            if seen and ran.issuperset(attention):
                break
    return best


def calls(model: nn.Module) -> Iterator[dict[str, Any]]:
    """What a model may be called with: ids, images or states, the most likely first."""
    signature = {n: p for n, p in inspect.signature(model.forward).parameters.items() if p.kind not in (2, 4)}
    if not signature:
        return
    first, *others = signature
    needed = [name for name in others if signature[name].default is inspect.Parameter.empty]
    more = [name for name in _optional_states(model) if name not in needed]
    generator = torch.Generator().manual_seed(3)
    widths = list(dict.fromkeys(x.in_features for x in model.modules() if isinstance(x, nn.Linear)))
    for with_more in (False, True) if more else (False,):
        names = [*needed, *more[:1]] if with_more else needed
        for main in _mains(model, widths, generator):
            for width in widths if any(_STATES.search(name) for name in names) else widths[:1]:
                given = {name: _argument(name, main, width, generator) for name in names}
                yield {first: main, **given}


def _optional_states(model: nn.Module) -> list[str]:
    """Arguments for the states of another model, also those that are passed on to attention modules."""
    signature = inspect.signature(model.forward).parameters
    names = list(signature)
    if any(p.kind is p.VAR_KEYWORD for p in signature.values()):
        names += [name for part in model.modules() for name in inspect.signature(part.forward).parameters]
    return [name for name in dict.fromkeys(names) if _STATES.search(name) and not _NOTHING.search(name)]


def _mains(model: nn.Module, widths: list[int], generator: torch.Generator) -> Iterator[Tensor]:
    words = [x.num_embeddings for x in model.modules() if isinstance(x, nn.Embedding)]
    images = [x.in_channels for x in model.modules() if isinstance(x, nn.Conv2d)]
    if words:
        for length in (twins.TOKENS, 8):
            yield torch.randint(min(words), (2, length), generator=generator)
    if images:
        sizes = [getattr(x, n, None) for x in model.modules() for n in ("img_size", "image_size", "sample_size")]
        for size in dict.fromkeys([*(n[0] if isinstance(n, tuple) else n for n in sizes), 32]):
            if isinstance(size, int) and size <= 512:
                yield torch.randn(2, images[0], size, size, generator=generator)
    for width in widths:
        yield torch.randn(2, twins.TOKENS, width, generator=generator)


def _argument(name: str, main: Tensor, width: int, generator: torch.Generator) -> Tensor | None:
    if _NOTHING.search(name):
        return None
    if re.search("time", name):
        return torch.tensor([3, 5])
    if _STATES.search(name):
        return torch.randn(2, twins.TOKENS - 4, width, generator=generator)
    return main
