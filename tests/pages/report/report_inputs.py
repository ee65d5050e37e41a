"""Files as the commands write them, of any size, with names of one's choice and numbers that say where they stand."""

from __future__ import annotations

import gzip
import json

import numpy as np

from locater.lab import Config, ModelConfig, Run, members_for
from locater.lab.config import Member
from locater.lab.runs.records import write_run

HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=2">',
    "javascript:window.hacked=3",
    "\"><svg onload='window.hacked=4'>",
    '<a href="javascript:window.hacked=5">click</a>',
    "<!--<script>",
    "{{SCRIPT}}%{x}${window.hacked=6}",
    "\u2028window.hacked=7\u2029",
    "__proto__",
)


def rho_at(row, step, layer, head, tokens):
    """A ρ that tells its member, step and head apart."""
    base = 0.1 + 0.02 * row + 0.1 * layer + 0.05 * head + 0.0005 * (step % 97)
    return np.clip(base + 0.3 * np.arange(tokens) / tokens, 0, 1)


def write_sweep(
    folder, kappas=(None, 1.0), seeds=(0,), records=6, layers=1, heads=1, tokens=16, names=None, packed=False
):
    """A sweep of one group. Member e, record n, layer l, head h: scale 10 + e + n/100 + l/10 + h/1000, and so on."""
    model = ModelConfig(width=8 * heads, ffn=16, layers=layers, heads=heads, tokens=tokens)
    config = Config(model=model, steps=10 * (records - 1), record_every=10, record_early=False, probe_blocks=64)
    members = members_for(config, kappas, seeds=seeds, learning_rate=1e-3)
    if names:
        members = [Member(**{**m.to_json(), "name": name}) for m, name in zip(members, names, strict=True)]
    group = folder / "group-00"
    group.mkdir(parents=True)
    plan = {
        "format": 1,
        "config": config.to_json(),
        "groups": [{"name": "group-00", "members": []}],
        "preset": "made-up",
    }
    (folder / "sweep.json").write_text(json.dumps(plan))
    about = {"preset": "made-up", "text": "a text", "hardware": "a machine", "seconds": 12.5}
    write_run(Run(group, config, tuple(members), about))
    lines = []
    place = np.add.outer(0.1 * np.arange(layers), 0.001 * np.arange(heads))
    for n in range(records):
        for e, member in enumerate(members):
            step = 10 * n
            rho = [[rho_at(e, step, ly, h, tokens).tolist() for h in range(heads)] for ly in range(layers)]
            record = {
                "step": step,
                "member": member.name,
                "train_loss": 5.0,
                "valid_loss": 5.0,
                "perplexity": 1000 / (1 + n) + 200 + e,
                "trace": (1 + 0.1 * e + place).tolist(),
                "scale": (10 + e + n / 100 + place).tolist(),
                "trace_square": place.tolist(),
                "entropy": (2 + 0.01 * e + place).tolist(),
                "max_logit": (5 + place).tolist(),
                "rank_residual": [0.9] * (layers + 1),
                "rho": rho,
            }
            if n == records - 1:
                record["eigenvalues"] = spectrum(layers, heads, 8, e)
            lines.append(json.dumps(record) + "\n")
    raw = "".join(lines).encode()
    if packed:
        (group / "metrics.jsonl.gz").write_bytes(gzip.compress(raw))
    else:
        (group / "metrics.jsonl").write_bytes(raw)
    return folder


def spectrum(layers, heads, count, shift):
    angles = 2 * np.pi * np.arange(count) / count
    pairs = np.stack([np.cos(angles) + 0.1 * shift, np.sin(angles)], -1)
    return np.broadcast_to(pairs, (layers, heads, count, 2)).round(6).tolist()


def write_scan(file, modules=3, heads=4, width=8, model="organisation/model", names=None, eigenvalues=True, seed=0):
    """Head h of module m has trace 100·m + h; eigenvalue k of it is (100·m + h)/width + i·k, in pairs."""
    rng = np.random.default_rng(seed)
    names = names or [f"model.layers.{m}.self_attn" for m in range(modules)]
    rows = [
        {
            "module": names[m], "kind": "self", "layer": m, "head": h, "key_head": h, "d_head": width, "d_model": 64,
            "logit_scale": width**-0.5, "trace": 100.0 * m + h, "scale": float(rng.uniform(1, 2)), "trace_square": 1.0,
            "xi": float(rng.normal()), "eta": float(rng.uniform(1, 100)), "r": float(rng.normal()),
            "eigenvalue_mean": 0.1, "eigenvalue_variance": 0.2,
            "spectral_norm": float(rng.uniform(1, 3)), "effective_rank": float(rng.uniform(2, width)),
            "symmetric_share": 0.5, "regime": "late" if h % 2 else "early", "rho_first": 0.1, "rho_middle": 0.2,
            "rho_last": 0.3, "attention_regime": "uniform" if h % 2 else "local near",
            "attention_entropy": 1.0 + h / 100, "rope": True, "qk_norm": False, "softcap": None,
        }
        for m in range(modules)
        for h in range(heads)
    ]  # fmt: skip
    value = {"model": model, "offset": 0.0, "average_offsets": None, "fold_norm": False, "tokens": 64, "heads": rows}
    if eigenvalues:
        imaginary = np.arange(width) - (width - 1) / 2
        value["eigenvalues"] = {
            name: [[[(100.0 * m + h) / width, float(y)] for y in imaginary] for h in range(heads)]
            for m, name in enumerate(names)
        }
    file.write_text(json.dumps(value))
    return file


def write_predictions(file):
    """As the demo does; the first spectrum as its first versions did."""
    row = {"mean": 0.1, "std": 0.2, "regime": "late", "rho": {"exact": [0.3, 0.7], "simulated": [0.4, 0.6]}}
    weights, entropy = {"exact": [0.1, 0.9], "simulated": [0.2, 0.8]}, {"exact": 0.3, "simulated": 0.31}
    softmax = {"regime": "local near", "weights": weights, "entropy": entropy}
    file.write_text(json.dumps({"spectra": [row, row | {"softmax": softmax}]}))
    return file


def write_diagnosis(file, words="a logit of 300", model="organisation/model"):
    finding = {
        "kind": words, "module": words, "layer": 1, "heads": [2, 3], "evidence": words, "sure": True, "worst": 3.0,
        "advice": words, "code": words, "cost": words,
    }  # fmt: skip
    value = {
        "model": model, "text": words, "length": 12, "sequences": 20, "healthy": False, "sentences": [words],
        "findings": [finding, {**finding, "sure": False, "heads": []}], "notes": [words], "examined": [{}] * 6,
    }  # fmt: skip
    file.write_text(json.dumps(value))
    return file


def write_measurement(
    file, modules=2, heads=3, length=12, model="organisation/model", names=None, predicted=True, **more
):
    names = names or [f"layers.{m}.attn" for m in range(modules)]
    places = [(m, h) for m in range(modules) for h in range(heads)]
    rows = [
        {"module": names[m], "layer": m, "kind": "self", "head": h, "entropy": 1 + m + 0.1 * h,
         "entropy_share": 0.9 - 0.2 * m - 0.05 * h, "max_logit": 3.0 + m + h, "logsumexp": 4.0, "sequences": 20}
        for m, h in places
    ]  # fmt: skip
    rho = {name: [[min(1.0, 0.1 * (m + h) + 0.02 * t) for t in range(length)] for h in range(heads)]
           for m, name in enumerate(names)}  # fmt: skip
    value = {
        "model": model,
        "length": length,
        "sequences": 20,
        "heads": rows,
        "layers": [{"module": name, "layer": m, "rank_residual": 0.5, "effective_rank": 9.0, "mean_cosine": 0.2}
                   for m, name in enumerate(names)],
        "query": -1,
        "rho": rho,
        "entropy_by_position": {
            name: [[float(np.log(t + 1)) * (0.9 - 0.1 * h) for t in range(length)] for h in range(heads)]
            for name in names
        },
        **more,
    }  # fmt: skip
    if predicted:
        value["predicted"] = {
            name: {
                "sequences": 10,
                "measured": rho[name],
                "general": rho[name],
                "separable": [[0.5] * length] * heads,
                "walk": None,
                "errors": {"general": 0.0, "separable": 0.25},
                "sampling_error": 0.03,
            }
            for name in names
        }
    file.write_text(json.dumps(value))
    return file


def log_rows(steps=20, modules=2, heads=2, names=None):
    names = names or [f"h.{m}.attn" for m in range(modules)]
    return [
        {"step": 5 * n, "module": names[m], "layer": m, "kind": "self", "keys": 32, "entropy": [1.0] * heads,
         "entropy_share": [0.9 - 0.04 * n + 0.01 * h for h in range(heads)],
         "max_logit": [1.0 + n + h for h in range(heads)], "rank_residual": 0.5, "effective_rank": 3.0,
         "mean_cosine": 0.1}
        for n in range(steps)
        for m in range(modules)
    ]  # fmt: skip


def write_log(file, **sizes):
    file.write_text("".join(json.dumps(row) + "\n" for row in log_rows(**sizes)))
    return file
