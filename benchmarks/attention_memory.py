"""Statistics of causal attention at T = 8,192, one head × 64, float32 on a CPU: in blocks, and materialised.

Each in processes of its own with two threads, taking turns; prints seconds, the memory at the peak beyond what was
there before, and the ratios of their medians. The materialised version is what one would write: logits, softmax, and
the sum of p ln p.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _turns import taking_turns

TOKENS, WIDTH, THREADS, ROUNDS, REPEATS = 8192, 64, 2, 5, 3


def memory(name: str) -> float:
    """MB of this process: VmRSS now, or VmHWM at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1e3
    raise OSError(name)


def extra_memory(run: Callable[[], object]) -> float:
    """MB at the peak beyond what was there before."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = memory("VmRSS")
        run()
        return memory("VmHWM") - before
    except OSError:  # no Linux: the peak so far may hide some of it
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        unit = 1e6 if sys.platform == "darwin" else 1e3
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit


def measure(which: str) -> dict[str, float]:
    import torch
    from torch import Tensor

    from locater.measure import attention_statistics

    def materialised(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = q.shape[2]
        s = q @ k.mT / math.sqrt(q.shape[3])
        s.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
        entropy = torch.special.entr(s.softmax(-1)).sum(-1)
        last = s[:, :, -1]
        z = (1 + last - last.mean(-1, keepdim=True)) / tokens
        return entropy, s.amax(-1), s.logsumexp(-1), ((z >= 0) & (z <= 1)).float().mean(0)

    torch.set_num_threads(THREADS)
    run = attention_statistics if which == "blocks" else materialised
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, TOKENS, WIDTH, generator=generator) for _ in range(2))
    run(q[:, :, :256], k[:, :, :256])  # libraries are loaded, threads started
    found = {"megabytes": extra_memory(lambda: run(q, k))}
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        entropy = run(q, k)[0]
        times.append(time.perf_counter() - began)
    return found | {"seconds": statistics.median(times), "entropy": entropy.double().mean().item()}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    found = taking_turns(__file__, ("materialised", "blocks"), ROUNDS)
    for which, results in found.items():
        seconds = ", ".join(f"{r['seconds']:.2f}" for r in results)
        peaks = ", ".join(f"{r['megabytes']:.0f}" for r in results)
        print(f"{which:12} {seconds} s; {peaks} MB; mean entropy {results[0]['entropy']:.6f} nats")
    slow, fast = (statistics.median(r["seconds"] for r in results) for results in found.values())
    large, little = (statistics.median(r["megabytes"] for r in results) for results in found.values())
    print(f"materialised / blocks: {slow / fast:.1f} times the time, {large / little:.0f} times the memory")


if __name__ == "__main__":
    main()
