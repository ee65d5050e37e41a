"""One update of the paper's model (d = 128, one layer, 64 × 64 tokens, 33,280 words) on a CPU, float32.

The lab against the plain PyTorch transcription of fairseq's model, each in a process of its own with the default
malloc, taking turns; prints updates a second, peak memory, and the ratio.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from _turns import taking_turns

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "lab"))

UPDATES, ROUNDS = 6, 3


def measure(which: str) -> dict[str, float]:
    import torch
    from fairseq_like import LanguageModel

    from lab_speed import WORDS, corpus
    from locater.lab import Config, Member, ModelConfig, Stack
    from locater.lab.engine.model import initial

    model, text = ModelConfig(), corpus()
    if which == "lab":
        stack = Stack(Config(model=model), [Member("one")], text, torch.device("cpu"))
        step = stack.advance
    else:
        plain = LanguageModel(model, WORDS).load(initial(model, WORDS, 0)).train()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=2.5e-5, weight_decay=0.01)
        stream = torch.from_numpy(text.splits["train"][:4097].astype("int64"))
        inputs, targets = stream[:-1].view(64, 64), stream[1:].view(64, 64)

        def step() -> None:
            optimizer.zero_grad()
            plain.loss(inputs, targets).backward()
            optimizer.step()

    step()
    began = time.perf_counter()
    for _ in range(UPDATES):
        step()
    seconds = time.perf_counter() - began
    return {"rate": UPDATES / seconds, "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    found = taking_turns(__file__, ("plain", "lab"), ROUNDS)
    best = {which: max(r["rate"] for r in results) for which, results in found.items()}
    for which, results in found.items():
        rates = ", ".join(f"{r['rate']:.2f}" for r in results)
        print(
            f"{which:6} {best[which]:.2f} updates/s (runs: {rates}), peak {max(r['gigabytes'] for r in results):.2f} GB"
        )
    print(f"lab / plain: {best['lab'] / best['plain']:.2f}")


if __name__ == "__main__":
    main()
