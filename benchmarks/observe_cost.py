"""What logging every 50th step costs a training run: GPT-2's shape, 12 layers × 768, 16 × 1,024 tokens, bfloat16.

Steps that `AttentionLog` observes are timed among steps that it does not, on the wall, the log's file included; the
cost is that of one in fifty. On a CPU a small model shows that the script works.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from locater.measure.logs import AttentionLog

EVERY = 50


def main() -> None:
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    size = (
        {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}
        if cuda
        else {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128}
    )
    batch, turns = (16, 8) if cuda else (2, 4)
    config = GPT2Config(attn_implementation="sdpa", **size)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (batch, config.n_positions), device=device)

    def step(log: AttentionLog, number: int) -> None:
        optimizer.zero_grad()
        with log.step(number), torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()

    def milliseconds(number: int) -> float:
        """Of one step, the log's file included where it is logged."""
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        step(log, number)
        if cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder, AttentionLog(model, EVERY, file=Path(folder) / "log.jsonl") as log:
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(turns + 1):  # the first is not counted: kernels are compiled
            for number in range(EVERY * turn, EVERY * turn + 5):  # only the first of them is logged
                found = milliseconds(number)
                if turn:
                    times[number % EVERY == 0].append(found)
    plain, observed = (statistics.median(times[key]) for key in (False, True))
    name = torch.cuda.get_device_name() if cuda else "CPU"
    shape = f"{config.n_layer} layers × {config.n_embd}, {batch} × {ids.shape[1]} tokens"
    print(f"{name}, torch {torch.__version__}; {shape}")
    print(f"a step          {plain:8.2f} ms")
    print(f"one observed    {observed:8.2f} ms")
    print(f"every {EVERY}th step observed costs {100 * (observed / plain - 1) / EVERY:.2f}%")


if __name__ == "__main__":
    main()
