"""One update of the paper's model (d = 128, one layer, 64 × 64 tokens, 33,280 words) on a GPU.

Times, in one run: the plain PyTorch transcription of fairseq's model, eager and compiled, one model; and the lab's
stacked sweep, whole training loop with LocAteR, per model. Prints the ratios.

    python benchmarks/lab_speed.py [--width 128] [--layers 1] [--members 12,24]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "lab"))
from fairseq_like import LanguageModel

from locater.lab import Config, Corpus, ModelConfig, Stack, members_for
from locater.lab.engine.model import initial

WORDS = 33_280


def corpus() -> Corpus:
    """Words as frequent as Zipf's law has them: how often rows of a table repeat is all that matters here."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, WORDS - 3)
    stream = random.choice(np.arange(4, WORDS), size=2_088_628, p=weights / weights.sum()).astype(np.int32)
    words = ("<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(4, WORDS)))
    return Corpus("zipf", words, {"train": stream, "valid": stream[:200_000], "test": stream[:200_000]}, "", "")


def timed(step, warm: int, repeats: int) -> float:
    """Milliseconds a call, after warm-up: the best of three stretches."""
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / repeats * 1e3)
    return min(times)


def plain(model_config: ModelConfig, batches: list[tuple[torch.Tensor, torch.Tensor]], compiled: bool) -> float:
    model = LanguageModel(model_config, WORDS).load(initial(model_config, WORDS, 0)).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-5, weight_decay=0.01, fused=True)
    loss_of = torch.compile(model.loss, mode="reduce-overhead") if compiled else model.loss
    count = iter(range(10**9))

    def step() -> None:
        inputs, targets = batches[next(count) % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()

    return timed(step, warm=20 if compiled else 5, repeats=30)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--members", default="12,24")
    parser.add_argument("--no-plain", action="store_true", help="leave out the single models")
    parser.add_argument("--tune", action="store_true", help="first time every tiling of the vocabulary products")
    parser.add_argument("--profile", action="store_true", help="also where the time goes")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("lab_speed needs a CUDA device; benchmarks/lab_cpu.py is the one for CPUs")
        return
    model = ModelConfig(width=chosen.width, ffn=chosen.width, layers=chosen.layers)
    config = Config(model=model, precision="bf16")
    text = corpus()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; d = {model.width}, {model.layers} layer(s)")
    times: dict[str, float] = {}
    for number in map(int, chosen.members.split(",")):
        kappas = [None, *(10.0**k for k in range(-3, number - 4))]
        stack = Stack(config, members_for(config, kappas, learning_rate=2.5e-5), text, torch.device("cuda"))
        if chosen.tune:
            _tune(stack)
        torch.cuda.reset_peak_memory_stats()
        times[f"stacked, {number} models"] = timed(stack.advance, warm=10, repeats=40) / number
        print(f"  {number} stacked: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        if chosen.profile:
            _profile(stack, number)
        del stack
        torch.cuda.empty_cache()
    if not chosen.no_plain:
        blocks = torch.from_numpy(text.splits["train"][: 64 * 64 * 8 + 1].astype(np.int64)).cuda()
        batches = [
            (blocks[i : i + 4096].view(64, 64), blocks[i + 1 : i + 4097].view(64, 64)) for i in range(0, 32768, 4096)
        ]
        times["one eager, bf16"] = plain(model, batches, compiled=False)
        times["one compiled, bf16"] = plain(model, batches, compiled=True)
    best = min(value for name, value in times.items() if name.startswith("stacked"))
    for name, value in times.items():
        print(f"{name:22} {value:7.3f} ms a model and update   {value / best:6.2f} × the best stacked", flush=True)


def _tune(stack: Stack) -> None:
    from locater.lab.engine import _kernels

    table = stack.output.low
    x = torch.randn(len(stack), 4096, table.shape[-1], device="cuda").to(table.dtype)
    shift = torch.zeros(len(stack), 4096, device="cuda")
    out = torch.empty(len(stack), 4096, WORDS, dtype=torch.bfloat16, device="cuda")
    for options in ({"out": out}, {"out": out, "product": False}, {"product": False}, {"gradient": True}):
        print("  ", *("e stored" if name == "out" else f"{name}={value}" for name, value in options.items()))
        for tiles, ms in sorted(_kernels.tune(x, table, shift, **options).items(), key=lambda item: item[1]):
            print(f"    {ms / len(stack) * 1e3:8.1f} µs a model  {tiles}", flush=True)
    big = torch.bmm
    for name, call in {
        "x wᵀ": lambda: big(x, table.mT, out=out),
        "e w": lambda: big(out, table),
        "eᵀ x in float32": lambda: big(out.mT, x, out_dtype=torch.float32),
    }.items():
        print(f"    {timed(call, 3, 10) / len(stack) * 1e3:8.1f} µs a model  cuBLAS {name}", flush=True)


def _profile(stack: Stack, number: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for _ in range(5):
            stack.advance()
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total / 5e3 / number, e.count // 5, e.key) for e in prof.key_averages()]
    for ms, count, name in sorted(rows, reverse=True)[:28]:
        print(f"    {ms * 1e3:8.1f} µs a model  ×{count:<4} {name[:100]}")


if __name__ == "__main__":
    main()
