"""Scanning a model of 16 GB on a hub: the share of its bytes that is fetched, time and peak memory.

Sparse files of Llama 3.1 8B's shape (bfloat16, four shards; queries and keys are random numbers, the rest zeros) are
served on this machine with 30 ms before each answer. The scan runs in a process of its own. Claims: at most 15 % of the
bytes fetched, less than 600 MB of memory above the interpreter with torch loaded. `--layers 4` makes it shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))
from hub_server import Hub, serving

from _llama import write_config

HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, VOCABULARY, SHARDS = 4096, 14336, 32, 32, 8, 128256, 4
WIDTH = HIDDEN // HEADS

SCAN = """
import json, re, sys, time
import torch, locater.models, pandas, huggingface_hub
from locater.models.checkpoint import open_checkpoint
def peak_mb():  # of this process since it started; getrusage would count its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) / 1024
before = peak_mb()
start = time.perf_counter()
checkpoint = open_checkpoint("org/model")
opened = time.perf_counter()
layers = json.loads(sys.argv[1])
table = locater.models.scan(checkpoint, layers=layers)
end = time.perf_counter()
fetched, total = checkpoint.traffic()
print(json.dumps({"open": opened - start, "seconds": end - start, "before": before, "peak": peak_mb(),
                  "fetched": fetched, "total": total, "heads": len(table)}))
"""


def make(folder: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.k_proj.weight": (KEY_HEADS * WIDTH, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KEY_HEADS * WIDTH, HIDDEN),
        }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    names, where = list(shapes), {}
    block = (torch.randn(KEY_HEADS * WIDTH, HIDDEN) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        header, at, filled = {}, 0, []
        for name in names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]:
            end = at + 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [at, end]}
            if "q_proj" in name or "k_proj" in name:
                filled.append((at, end))
            at, where[name] = end, file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            for start, end in filled:
                opened.seek(8 + len(text) + start)
                opened.write(block * ((end - start) // len(block)))
            opened.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    write_config(folder, HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, VOCABULARY)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=LAYERS, help="how many layers to scan")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each answer")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "model").mkdir()
        make(place / "model")
        with serving(Hub(place / "model", latency=asked.latency)) as hub:
            environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(place / "home")}
            layers = json.dumps(None if asked.layers == LAYERS else list(range(asked.layers)))
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", SCAN, layers],
                capture_output=True, text=True, check=False, env=environment, cwd=place,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stderr[-1500:])
            ours = json.loads(done.stdout.splitlines()[-1])
    share = ours["fetched"] / ours["total"]
    above = ours["peak"] - ours["before"]
    print(
        f"Llama 3.1 8B's shape, {ours['total'] / 1e9:.2f} GB, {asked.latency * 1000:.0f} ms before each answer: "
        f"{ours['heads']} heads, opened in {ours['open']:.2f} s, scanned in {ours['seconds']:.1f} s, "
        f"{len(hub.addresses)} requests, each tensor's behind a redirect"
    )
    print(
        f"fetched {ours['fetched'] / 1e9:.3f} GB, {100 * share:.1f} % of the bytes, a {1 / share:.0f}th; "
        f"claim ≤ 15 %: {'holds' if share <= 0.15 else 'FAILS'}"
    )
    print(
        f"peak memory {ours['peak']:.0f} MB, {above:.0f} MB above the interpreter with torch and the hub's library; "
        f"claim ≤ 600 MB above: {'holds' if above <= 600 else 'FAILS'}"
    )


if __name__ == "__main__":
    main()
