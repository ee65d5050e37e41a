"""Triton, where there is one: on a GPU, or its interpreter on a CPU."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
with suppress(ImportError):  # optional: without it nothing is `available`
    triton, tl = import_module("triton"), import_module("triton.language")
jit: Any = (lambda function: function) if triton is None else triton.jit

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def available(tensor: Tensor) -> bool:
    """Whether kernels run where the tensor is, with TF32 and bfloat16; looks at no values."""
    if triton is None or tensor.device.type != ("cpu" if INTERPRETED else "cuda"):
        return False
    return INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) >= (8, 0))


def on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the tensor's device, whichever is the current one."""
    return nullcontext() if tensor.device.type == "cpu" else torch.cuda.device(tensor.device)


def ceil(a: int, b: int) -> int:
    """How many blocks of b cover a."""
    return -(-a // b)
