"""Where torch.compile stands: what of a model it has compiled, and code that it is to call and not to compile.

Compiled code checks, before it runs, that the functions it found in tables are still there: a table whose entry we
replace is noticed, and the code is compiled anew around ours. It does not check for functions of classes, nor for hooks
unless it is told to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

HOW = 'observe it inside `with torch.compiler.set_stance("force_eager"):`, where it runs as it was before'


def untraced(function: F) -> F:
    """The function, which compiled code calls; compiling what we compute would take minutes."""
    return cast(F, torch.compiler.disable(function)) if "torch._dynamo" in sys.modules else function


def compiled_parts(model: nn.Module) -> set[int]:
    """Ids of all modules that run as parts of compiled ones now."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None or dynamo.config.disable:
        return set()
    stance = getattr(getattr(dynamo.eval_frame, "_stance", None), "stance", "default")
    if stance == "force_eager":
        return set()
    compiled = [m for m in model.modules() if isinstance(m, dynamo.OptimizedModule) or m._compiled_call_impl]
    return {id(part) for module in compiled for part in module.modules()}


def make_hooks_noticed() -> None:
    """Lets compiled code check which hooks a module has. Else what was compiled for one model runs for another that has
    the same layers and other hooks, or for the same before and after it is hooked, without a word."""
    from torch._dynamo import config

    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        if has_compiled():  # and does not check
            torch.compiler.reset()


def has_compiled() -> bool:
    """Whether anything has been compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["frames"])
