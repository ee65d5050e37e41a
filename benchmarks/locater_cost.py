"""What LocAteR costs: its closed form beside dense autograd and a training step, its decoupled form beside AdamW.

On a GPU: 12 layers × 12 heads of 64 × 768 (GPT-2 small, a step at 32 × 1,024 tokens) and 32 × 32 heads of 128 × 4096
(Llama-7B's shape, float32 weights, TF32 products), with extra memory and the ratio to the memory traffic it cannot
avoid. The decoupled step is timed on Hugging Face's GPT-2 small, and on the attention of Llama 16 × 1024 and of
Llama-8B's shape, beside AdamW's own (fused). A training loop, compiled or not, has it beside its rivals, on a CPU a
small one. On a CPU: the first, against dense autograd, and the decoupled step of GPT-2 small.

    python benchmarks/locater_cost.py [--only gradient|decoupled|loop]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from torch import nn

from _cuda import extra_memory
from locater import LocAteR
from locater.control import DecoupledLocAteR, QKClip, QKNorm, ZLoss


class Projections(nn.Module):
    """The part of an attention layer that LocAteR sees."""

    def __init__(self, heads: int, width: int, d_model: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, width**-0.5
        self.q_proj = nn.Linear(d_model, heads * width, bias=False)
        self.k_proj = nn.Linear(d_model, heads * width, bias=False)


def stack(layers: int, heads: int, width: int, d_model: int, device: str) -> nn.Module:
    with torch.device(device):
        model = nn.ModuleList(Projections(heads, width, d_model) for _ in range(layers))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def milliseconds(run, device: str, repeats: int) -> float:
    """The median, after a warm-up."""
    times = []
    for repeat in range(repeats + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def dense_autograd(reg: LocAteR):
    """What one would write: form every W_QK, sum the penalty, backward; layer by layer, so that it fits."""

    def run() -> None:
        for attention in reg.attentions:
            w = attention.qk().dense()
            trace = w.diagonal(dim1=-2, dim2=-1).sum(-1)
            (reg.scale_strength * w.square().sum() + reg.mean_strength * (trace - 1).square().sum()).backward()

    return run


def report(name: str, shape: tuple[int, int, int, int], device: str, repeats: int) -> float:
    model = stack(*shape, device)
    reg = LocAteR(model, scale_strength=1e-4, mean_strength=1e-4)
    closed = milliseconds(reg.add_gradient_, device, repeats)
    dense = milliseconds(dense_autograd(reg), device, max(3, repeats // 10))
    line = f"{name}: closed form {closed:.2f} ms, dense autograd {dense:.1f} ms, ratio {dense / closed:.0f}"
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    if device == "cuda":
        one_layer = weights / shape[0] / 1e6
        # read both weights for the Gram matrices and again for the products, read and write both gradients
        limit = 1e3 * 4 * weights / bandwidth()
        extra, dense_extra = extra_memory(reg.add_gradient_), extra_memory(dense_autograd(reg))
        line += (
            f"; extra memory {extra:.0f} MB, dense {dense_extra:.0f} MB (one layer's W_Q, W_K: {one_layer:.0f} MB); "
            f"{closed / limit:.1f} times the {limit:.2f} ms of its traffic"
        )
    print(line, flush=True)
    return closed


def bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    a = torch.empty(1 << 28, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / (1e-3 * milliseconds(lambda: b.copy_(a), "cuda", 10))


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor):
    """One step, on a GPU in bf16 autocast."""

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()

    return run


def gpt2_step(batch: int, tokens: int) -> float:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", use_cache=False)).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = training_step(model, optimizer, torch.randint(0, 50257, (batch, tokens), device="cuda"))
    plain = milliseconds(run, "cuda", 5)
    reg = LocAteR(model, scale_strength=1e-4, mean_strength=1e-4).attach(optimizer)
    attached = milliseconds(run, "cuda", 5)
    alone = milliseconds(reg.add_gradient_, "cuda", 50)
    print(
        f"GPT-2 small, {batch} × {tokens} tokens, bf16: a step {plain:.1f} ms, with LocAteR {attached:.1f} ms; "
        f"LocAteR alone {alone:.2f} ms, {100 * alone / plain:.2f}% of a step",
        flush=True,
    )
    return plain


def llama_step(tokens: int) -> None:
    """A step of Llama-7B's shape: float32 weights, bf16 autocast, plain SGD so that it fits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(intermediate_size=11008, use_cache=False)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run = training_step(model, optimizer, torch.randint(0, 32000, (1, tokens), device="cuda"))
    plain = milliseconds(run, "cuda", 3)
    reg = LocAteR(model, scale_strength=1e-4, mean_strength=1e-4)
    alone = milliseconds(reg.add_gradient_, "cuda", 10)
    print(
        f"Llama-7B's shape, 1 × {tokens} tokens, bf16, SGD: a step {plain:.0f} ms; LocAteR alone {alone:.2f} ms, "
        f"{100 * alone / plain:.2f}% of a step",
        flush=True,
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def llama_attention(layers: int, width: int, heads: int, key_heads: int) -> nn.Module:
    """The attention of a Llama, and the norms before it."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        intermediate_size=8, vocab_size=8, use_cache=False,
    )  # fmt: skip
    return LlamaModel(config)


def decoupled(name: str, model: nn.Module, device: str, repeats: int) -> float:
    """Beyond AdamW's step alone, all in one run: no head bounded, all of them, and on every tenth step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    ids = torch.randint(8, (2, 64), device=device)

    def step() -> float:
        return milliseconds(lambda: [optimizer.step() for _ in range(10)], device, repeats) / 10

    def beyond(reg: DecoupledLocAteR) -> float:
        """Before, with it, and after: a step alone takes longer or shorter from one second to the next."""
        reg.attach(optimizer)
        model.train()(input_ids=ids)  # states enter
        taken = step()
        reg.detach()
        return taken

    for parameter in model.parameters():
        parameter.grad = 1e-6 * torch.randn_like(parameter)
    plain = step()
    quiet = beyond(DecoupledLocAteR(model))
    busy, seldom = beyond(DecoupledLocAteR(model, change=1e-9)), beyond(DecoupledLocAteR(model, every=10))
    plain = (plain + step()) / 2
    quiet, busy, seldom = quiet - plain, busy - plain, seldom - plain
    line = (
        f"{name}: AdamW {plain:.2f} ms; DecoupledLocAteR beyond it {quiet:.2f} ms where no head is bounded, "
        f"{busy:.2f} ms where all are, {seldom:.3f} ms on every tenth step"
    )
    if device == "cuda":
        reg = DecoupledLocAteR(model).attach(optimizer)
        memory = extra_memory(optimizer.step)
        reg.detach()
        weights = sum(4 * p.weight.numel() for one in reg.attentions for p in (one.query, one.key))
        limit = 1e3 * 4 * weights / bandwidth()  # copied and read before the step, read after it
        line += f"; {memory:.0f} MB; {quiet / limit:.1f} and {busy / limit:.1f} times the {limit:.2f} ms of its traffic"
    print(line, flush=True)
    return quiet


METHODS = {
    "AdamW alone": lambda *_: None,
    "DecoupledLocAteR": lambda model, optimizer: DecoupledLocAteR(model).attach(optimizer),
    "DecoupledLocAteR(every=10)": lambda model, optimizer: DecoupledLocAteR(model, every=10).attach(optimizer),
    "QK-norm": lambda model, optimizer: QKNorm().apply(model, optimizer),
    "QK-clip": lambda model, optimizer: QKClip().apply(model, optimizer),
    "z-loss": lambda model, optimizer: ZLoss().apply(model, optimizer),
}


def loop(build, ids: torch.Tensor, compiled: bool, rounds: int, steps: int) -> None:
    """A training step with each method, taking turns in another order each time; the median of the rounds, and the
    middle half of them. QK-clip and z-loss look at q and k in every forward, and are not compiled."""
    runs, kept = {}, []
    for name in list(METHODS)[: 4 if compiled else None]:
        torch.manual_seed(0)
        model = build().to(ids.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        kept.append(METHODS[name](model, optimizer))
        runs[name] = training_step(torch.compile(model) if compiled else model, optimizer, ids)
        for _ in range(25):  # also those that act on every tenth
            runs[name]()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name, run in order.sample(list(runs.items()), len(runs)):
            start = time.perf_counter()
            for _ in range(steps):
                run()
            if ids.is_cuda:
                torch.cuda.synchronize()
            taken[name].append(1e3 * (time.perf_counter() - start) / steps)
    plain = statistics.median(taken["AdamW alone"])
    for name, times in taken.items():
        low, middle, high = statistics.quantiles(times, n=4)
        print(
            f"  {name}: {middle:.2f} ms a step ({low:.2f} to {high:.2f}), {100 * (middle / plain - 1):+.1f}%, "
            f"{middle - plain:+.2f} ms",
            flush=True,
        )


def loops(device: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if device == "cpu":
        # the demo's size, and one where a step is next to nothing
        for layers, vocabulary, batch in ((1, 4096, 32), (2, 256, 8)):
            print(f"GPT-2, layers: {layers}, width 64, vocabulary {vocabulary:,}, {batch} × 64 tokens:")
            small = GPT2Config(
                n_embd=64, n_layer=layers, n_head=2, n_positions=64, vocab_size=vocabulary,
                bos_token_id=None, eos_token_id=None,
            )  # fmt: skip
            ids = torch.randint(vocabulary, (batch, 64))
            loop(lambda config=small: GPT2LMHeadModel(config), ids, compiled=False, rounds=20, steps=10)
        return
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408,
        vocab_size=256, use_cache=False,
    )  # fmt: skip
    for compiled in (True, False):
        print(f"Llama, 24 million parameters, 32 × 512 tokens, bf16, {'' if compiled else 'not '}compiled:")
        ids = torch.randint(256, (32, 512), device=device)
        loop(lambda: LlamaForCausalLM(config), ids, compiled, rounds=8, steps=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=["gradient", "decoupled", "loop"])
    given = parser.parse_args()
    device = given.device
    torch.manual_seed(0)
    if device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    if given.only in (None, "gradient"):
        gradient(device)
    if given.only in (None, "decoupled"):
        repeats = 10 if device == "cuda" else 1
        decoupled("GPT-2 small", gpt2().to(device), device, repeats)
        if device == "cuda":
            for name, shape in {"Llama 16 × 1024": (16, 1024, 16, 4), "Llama 32 × 4096": (32, 4096, 32, 8)}.items():
                with torch.device(device):
                    model = llama_attention(*shape)
                decoupled(f"{name}, {shape[2]}:{shape[3]} heads", model, device, 5)
    if given.only in (None, "loop"):
        loops(device)


def gradient(device: str) -> None:
    small = report("12 × 12 heads of 64 × 768, float32", (12, 12, 64, 768), device, 50 if device == "cuda" else 10)
    if device == "cuda":
        step = gpt2_step(32, 1024)
        torch.set_float32_matmul_precision("high")  # TF32
        large = report("32 × 32 heads of 128 × 4096, TF32", (32, 32, 128, 4096), device, 20)
        llama_step(4096)
        print(f"claims: {small:.2f} ≤ 0.6 ms, {100 * small / step:.2f} ≤ 1% of a step, {large:.2f} ≤ 8 ms")


if __name__ == "__main__":
    main()
