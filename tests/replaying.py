"""CUDA graphs without a GPU: what a function computes is recorded, operation by operation, and done again on the same
tensors, which shows tensors that a replayed step would not see and numbers that it would not ask for."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.done = []

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, out in self.done:
            again = function(*args, **kwargs)
            for before, now in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(before, torch.Tensor) and before.data_ptr() != now.data_ptr():  # no view, not in place
                    before.copy_(now)


class _Stream:
    def __init__(self, device: torch.device) -> None:
        pass


class _Recording(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._before = {}  # memory that was written to, as it was

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a recorded step asks for a number")
        if func._schema.is_mutable:
            for tensor in (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)):
                memory = tensor.untyped_storage()
                self._before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        out = func(*args, **(kwargs or {}))
        self._graph.done.append((func, args, kwargs or {}, out))
        return out

    def undo(self) -> None:
        """What is captured is not done yet."""
        for memory, before in self._before.values():
            memory.copy_(before)


@contextmanager
def recording(graph: Graph, **_):
    """In the place of torch.cuda.graph."""
    with _Recording(graph) as mode:
        yield
    mode.undo()


def put_in_place_of_cuda(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
