"""Entropy, largest logit, logsumexp and ρ of causal attention on a GPU, beside PyTorch's attention itself.

bfloat16, 16 heads × 64, T = 16,384 and 65,536; times of scaled_dot_product_attention's forward on the same q, k and v,
memory beyond inputs, every tile of the kernel's table, and the eager way: softmax of a T × T, or what stops it.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from _cuda import extra_memory, milliseconds
from locater.measure import _kernels, attention_statistics

HEADS, WIDTH, LENGTHS = 16, 64, (16_384, 65_536)


def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What one would write without this package."""
    s = (q @ k.mT).float() / math.sqrt(WIDTH)
    tokens = q.shape[2]
    s.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu_(1), -math.inf)
    return torch.special.entr(s.softmax(-1)).sum(-1), s.amax(-1), s.logsumexp(-1)


def error(q: Tensor, k: Tensor, entropy: Tensor) -> float:
    """The largest difference from float64, over 1 + H, for 64 queries of each head."""
    tokens = q.shape[2]
    rows = torch.linspace(0, tokens - 1, 64, device=q.device).long()
    s = q[:, :, rows].double() @ k.double().mT / math.sqrt(WIDTH)
    s.masked_fill_(torch.arange(tokens, device=q.device) > rows[:, None], -math.inf)
    expected = torch.special.entr(s.softmax(-1)).sum(-1)
    return float(((entropy[:, :, rows] - expected).abs() / (1 + expected)).max())


def line(name: str, ms: float, unit: float, note: str = "") -> None:
    print(f"  {name:<58} {ms:9.3f} ms  {ms / unit:6.2f} × attention's  {note}", flush=True)


def describe(tiles: _kernels.Tiles) -> str:
    how = ", descriptors" if tiles.descriptors else ""
    return f"{tiles.rows} × {tiles.columns}, {tiles.warps} warps, {tiles.stages} stages{how}"


def report(tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    # logits of a trained model's size: a standard deviation of 4
    q, k, v = (torch.randn(1, HEADS, tokens, WIDTH, device="cuda", generator=generator) for _ in range(3))
    q, k, v = (2 * q).bfloat16(), (2 * k).bfloat16(), v.bfloat16()

    def attention() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def measured() -> object:
        return attention_statistics(q, k)

    print(f" {tokens:,} tokens")
    unit = milliseconds(attention)
    line("scaled_dot_product_attention, forward", unit, unit, f"{extra_memory(attention):,.0f} MB")
    first = milliseconds(measured)
    line("attention_statistics", first, unit, f"{extra_memory(measured):,.0f} MB")
    times = _kernels.tune(q, k, _kernels.View(WIDTH**-0.5, right=0))
    for tiles, ms in times.items():
        line(f"  its kernel, {describe(tiles)}", ms, unit, "fastest" if ms == min(times.values()) else "")
    line("attention_statistics, tuned", milliseconds(measured), unit)
    print(f"  entropy within {error(q, k, attention_statistics(q, k).entropy):.1e} · (1 + H) of float64")
    try:
        memory = extra_memory(lambda: eager(q, k))
        line("eager, T × T", milliseconds(lambda: eager(q, k), 3), unit, f"{memory:,.0f} MB")
    except torch.OutOfMemoryError:
        square = 2e-9 * HEADS * tokens**2
        print(f"  eager, T × T: out of memory (its logits alone, in bfloat16, are {square:.0f} GB)")
    torch.cuda.empty_cache()


def main() -> None:
    if not torch.cuda.is_available() or not _kernels.available(torch.empty(1, device="cuda")):
        print("attention_statistics needs a CUDA device and Triton: nothing to measure")
        return
    start = time.perf_counter()
    print(
        torch.cuda.get_device_name(),
        f"torch {torch.__version__}, bfloat16, {HEADS} heads × {WIDTH}, causal",
        flush=True,
    )
    for tokens in LENGTHS:
        _kernels._TUNED.clear()
        report(tokens)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
