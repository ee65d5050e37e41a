"""The lab's kernels on a GPU beside the hardware's limits and what PyTorch offers, in ms for each of 12 models.

The limit of a line is the larger of its products at 790 TFLOP/s and its memory traffic at 4.2 TB/s, which an H200
reaches in long products and copies. A batch has 4,096 tokens, of 33,280 words; widths are 128 and 32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from _cuda import milliseconds
from locater.lab.engine import _kernels
from locater.lab.engine._random import site_key

E, N, V = 12, 4096, 33280
FLOPS, BYTES = 790e12, 4.2e12


def each(run: Callable[[], object], repeats: int = 7) -> float:
    """Milliseconds for one of the models, which are done together."""
    return milliseconds(run, repeats) / E


def line(name: str, ms: float, flops: float, traffic: float, note: str = "") -> None:
    limit = 1e3 * max(flops / FLOPS, traffic / BYTES)
    print(f"  {name:<66} {ms:7.4f} ms  {ms / limit:5.2f} × the limit of {limit:.4f}  {note}", flush=True)


def describe(tiles: _kernels.Tiles) -> str:
    parts = {1: "", None: ", a program a tile"}.get(tiles.parts, f", {tiles.parts} parts")
    registers = "" if tiles.registers is None else f", {tiles.registers} registers"
    how = ", descriptors" if tiles.descriptors else ""
    return f"{tiles.rows} × {tiles.columns}, {tiles.warps} warps, {tiles.stages} stages{parts}{registers}{how}"


class Problem:
    def __init__(self, width: int) -> None:
        self.width, self.product = width, 2.0 * N * V * width
        self.x = torch.randn(E, N, width, device="cuda").bfloat16()
        self.w = torch.randn(E, V, width, device="cuda").mul_(width**-0.5).bfloat16()
        self.targets = torch.randint(V, (E, N), device="cuda")
        chosen = self.w.gather(1, self.targets[..., None].expand(-1, -1, width))
        self.shift = (self.x.float() * chosen.float()).sum(-1)
        self.exponentials = torch.empty(E, N, V, dtype=torch.bfloat16, device="cuda")
        self.small = 2.0 * (N + V) * width  # bytes of x and w

    def kernels(self) -> None:
        """Each way of each call; a tile's first call, which compiles, is not counted."""
        stored = 2.0 * N * V
        for name, store, product, gradient, products in (
            ("sums, products and exponentials kept", True, True, False, 2),
            ("sums and products", False, True, False, 2),
            ("sums, exponentials kept", True, False, False, 1),
            ("sums only: evaluation", False, False, False, 1),
            ("gradient of the words, exponentials made again", False, True, True, 2),
        ):
            out = self.exponentials if store else None
            traffic = self.small + (stored if store else 0) + (4.0 * V * self.width if gradient else 0)
            times = _kernels.tune(self.x, self.w, self.shift, out=out, product=product, gradient=gradient)
            print(f" {name}")
            for tiles, ms in times.items():
                best = "fastest" if ms == min(times.values()) else ""
                line(describe(tiles), ms / E, products * self.product, traffic, best)

    def pytorch(self) -> None:
        print(" PyTorch's batched products, bfloat16")
        x, w, e, width = self.x, self.w, self.exponentials, self.width
        traffic = self.small + 2.0 * N * V
        words, tokens = torch.empty_like(w), torch.empty_like(x)
        forward = each(lambda: torch.bmm(x, w.mT, out=e))
        e.fill_(1e-4)
        to_x = each(lambda: torch.bmm(e, w, out=tokens))
        to_w = each(lambda: torch.bmm(e.mT, x, out=words))
        line("logits", forward, self.product, traffic)
        line("logits' gradient with the words: the tokens' gradient", to_x, self.product, traffic)
        line("logits' gradient with the tokens: the words' gradient", to_w, self.product, traffic)
        try:
            wide = each(lambda: torch.bmm(e.mT, x, out_dtype=torch.float32))
        except (RuntimeError, TypeError) as error:
            print(f"  the same summed and left in float32: {str(error).splitlines()[0][:80]}")
        else:
            line("the same, left in float32", wide, self.product, traffic + 2.0 * V * width)

    def whole(self) -> None:
        """Loss and both gradients: the ways that are left to choose from, and PyTorch's."""
        print(" loss and both gradients")
        products, out = 3 * self.product, self.exponentials

        def stored(product: bool) -> None:
            z, y = _kernels.exp_logits(self.x, self.w, self.shift, out=out, product=product)  # type: ignore[call-overload]
            if y is None:
                torch.bmm(out, self.w)
            torch.bmm(out.mT, (self.x / z[..., None]).bfloat16())

        def again() -> None:
            z, _ = _kernels.exp_logits(self.x, self.w, self.shift)
            _kernels.weight_gradient(self.x, self.w, self.shift + z.log())

        def autograd() -> None:  # one model after the other: all logits in float32 would take 6.5 GB
            for x, w, targets in zip(self.x, self.w, self.targets, strict=True):
                x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
                torch.nn.functional.cross_entropy(x @ w.mT, targets).backward()

        line("exponentials kept, one product of PyTorch's", each(lambda: stored(True)), products, self.small)
        line("exponentials kept, two products of PyTorch's", each(lambda: stored(False)), products, self.small)
        line("exponentials made again, no product of PyTorch's", each(again), products, self.small)
        line("PyTorch's cross-entropy, bfloat16, by autograd", each(autograd, 3), products, self.small)


def adamw(width: int) -> None:
    count = 2 * V * width
    p, g, m, v = (torch.rand(E, count, device="cuda") for _ in range(4))
    low, one = p.bfloat16(), torch.ones(E, device="cuda")
    given = {"learning_rate": 1e-3 * one, "decay": 0.1 * one, "step": 10 * one, "active": one}
    print(f" AdamW on {count:,} parameters")
    line("this", each(lambda: _kernels.adamw_(p, g, m, v, low, **given)), 0, 30.0 * count)
    parameter = torch.nn.Parameter(p)
    parameter.grad = g
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def pytorch() -> None:
        optimizer.step()
        low.copy_(p)

    line("PyTorch's, fused, and the copy in bfloat16", each(pytorch), 0, 30.0 * count)


def dropout(width: int) -> None:
    x = torch.randn(E, N, width, device="cuda").bfloat16()
    key, rate = site_key(torch.arange(E, device="cuda"), 3, 1), 0.1
    seeds, sites = torch.arange(E, device="cuda"), torch.arange(5, device="cuda")[:, None]
    step = torch.tensor(3, device="cuda")
    traffic = 4.0 * N * width
    print(f" dropout on {N:,} × {width} in bfloat16")
    line("this", each(lambda: _kernels.dropout(x, key, rate)), 0, traffic)
    line("this, added to a residual", each(lambda: _kernels.dropout_add(x, x, key, rate)), 0, 1.5 * traffic)
    line("keys of five sites", each(lambda: site_key(seeds, step, sites)), 0, traffic)
    line("PyTorch's", each(lambda: torch.nn.functional.dropout(x, rate)), 0, traffic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 32])
    widths = parser.parse_args().widths
    if not torch.cuda.is_available() or not _kernels.available(torch.empty(1, device="cuda")):
        print("lab_kernels needs a CUDA device and Triton: nothing to measure")
        return
    start = time.perf_counter()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, ms for one of {E} models", flush=True)
    for width in widths:
        print(f"width {width}, {time.perf_counter() - start:.0f} s")
        problem = Problem(width)
        problem.kernels()
        problem.pytorch()
        problem.whole()
        del problem
        adamw(width)
        dropout(width)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
