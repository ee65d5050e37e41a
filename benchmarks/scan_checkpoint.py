"""Scanning a Llama-shaped checkpoint of about 2 GB: time and peak memory, beside TransformerLens on the same file.

The checkpoint (TinyLlama's shape, random bfloat16 weights, three shards) is made in a temporary folder. Each side runs
in a process of its own and computes the eigenvalues of W_QK of every head; ours also makes the whole scan table.
TransformerLens is used if it is installed (pip install transformer_lens). Claims: less than 600 MB above the
interpreter with torch loaded, and faster.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from _llama import write_config

HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, VOCABULARY = 2048, 5632, 22, 32, 4, 32000
WIDTH = HIDDEN // HEADS

MEMORY = """
import re
def peak_mb():  # of this process since it started; getrusage would count its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) / 1024
"""

OURS = (
    MEMORY
    + """
import json, sys, time
import torch, safetensors.torch
import locater.models
before = peak_mb()
start = time.perf_counter()
values = [spectrum.eigenvalues() for spectrum in locater.models.spectra(sys.argv[1])]
middle = time.perf_counter()
table = locater.models.scan(sys.argv[1])
end = time.perf_counter()
peak = peak_mb()
squares = float(sum((v ** 2).sum().real for v in values))
print(json.dumps({"seconds": middle - start, "scan": end - middle, "MB": peak - before, "squares": squares,
                  "heads": len(table)}))
"""
)

THEIRS = (
    MEMORY
    + """
import json, sys, time
import torch, transformers, transformer_lens
from tokenizers import Tokenizer, models
words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="a", eos_token="b", pad_token="b")
tokenizer.save_pretrained(sys.argv[1])  # it wants one beside the model
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
before = peak_mb()
start = time.perf_counter()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
bridge = transformer_lens.TransformerBridge.boot_transformers(sys.argv[1], hf_model=model, tokenizer=tokenizer)
values = bridge.QK.eigenvalues
end = time.perf_counter()
peak = peak_mb()
print(json.dumps({"seconds": end - start, "MB": peak - before, "squares": float((values ** 2).sum().real),
                  "heads": values.shape[0] * values.shape[1]}))
"""
)


def make(folder: Path) -> float:
    """Writes the checkpoint; its size in GB."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    shards: dict[str, dict[str, torch.Tensor]] = {f"model-0000{k + 1}-of-00003.safetensors": {} for k in range(3)}
    where: dict[str, str] = {}
    names = list(shards)

    def put(shard: str, name: str, tensor: torch.Tensor) -> None:
        shards[shard][name] = tensor
        where[name] = shard

    put(names[0], "model.embed_tokens.weight", weight(VOCABULARY, HIDDEN))
    put(names[2], "lm_head.weight", weight(VOCABULARY, HIDDEN))
    put(names[2], "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16))
    for layer in range(LAYERS):
        shard, prefix = names[layer * 3 // LAYERS], f"model.layers.{layer}"
        put(shard, f"{prefix}.self_attn.q_proj.weight", weight(HIDDEN, HIDDEN))
        put(shard, f"{prefix}.self_attn.k_proj.weight", weight(KEY_HEADS * WIDTH, HIDDEN))
        put(shard, f"{prefix}.self_attn.v_proj.weight", weight(KEY_HEADS * WIDTH, HIDDEN))
        put(shard, f"{prefix}.self_attn.o_proj.weight", weight(HIDDEN, HIDDEN))
        put(shard, f"{prefix}.mlp.gate_proj.weight", weight(INNER, HIDDEN))
        put(shard, f"{prefix}.mlp.up_proj.weight", weight(INNER, HIDDEN))
        put(shard, f"{prefix}.mlp.down_proj.weight", weight(HIDDEN, INNER))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            put(shard, f"{prefix}.{norm}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16))
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    write_config(folder, HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, VOCABULARY)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9


def run(code: str, folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"a Llama-shaped checkpoint of {make(folder):.2f} GB, {LAYERS} layers × {HEADS} heads", flush=True)
        ours = run(OURS, folder)
        print(
            f"locater: eigenvalues {ours['seconds']:.1f} s, whole scan {ours['scan']:.1f} s, peak {ours['MB']:.0f} MB "
            f"above the interpreter with torch; claim ≤ 600 MB: {'holds' if ours['MB'] <= 600 else 'FAILS'}",
            flush=True,
        )
        try:
            theirs = run(THEIRS, folder)
        except RuntimeError as error:
            print(f"TransformerLens not compared: {str(error).strip().splitlines()[-1]}")
            return
        gap = abs(ours["squares"] / theirs["squares"] - 1)
        print(
            f"TransformerLens: eigenvalues {theirs['seconds']:.1f} s, peak {theirs['MB']:.0f} MB; "
            f"ratio {theirs['seconds'] / ours['seconds']:.1f}; Σw² of all heads differs by {gap:.1e} (its float32)"
        )


if __name__ == "__main__":
    main()
