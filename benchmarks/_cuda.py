"""Time and memory on a GPU, for the benchmarks beside this file."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch


def milliseconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The median by the device's clock, after three that are not counted."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 4)]
    for mark in marks:
        mark.record()
        run()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks[3:]))


def extra_memory(run: Callable[[], object]) -> float:
    """MB at the peak beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6
