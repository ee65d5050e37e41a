"""Every model type of the installed transformers, built small and run: is its attention read, and read right?

    python benchmarks/model_zoo.py                       # all types, a line each, and the counts
    python benchmarks/model_zoo.py llama mixtral         # some
    python benchmarks/model_zoo.py --part 3/16 --out zoo-3.jsonl
    python benchmarks/model_zoo.py --table zoo-*.jsonl   # the table of docs/models.md

The softmaxes are seen by an interception of this file's own: torch's functions, called in the forward of each module.
Every parameter is random, one sequence is padded, sequences are longer than windows and the rotary embedding's original
length. A type counts as read if every attention module in which a softmax over q·k is seen is read. For those that are,
LocAteR's gradient is compared with autograd's, observe's entropy with that of the softmax itself, and the scan of the
live model with the scan of its saved weights.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from locater import LocAteR, observe, scan
from locater.errors import LocaterError
from locater.models import Alibi
from locater.models import twin as twins
from locater.models.checkpoint import open_checkpoint
from locater.models.registry import is_pretrained, reading

SECONDS = 300  # for a type
CLOSE = 1e-4  # of the range of logits
DEPTH = 8  # layers of each kind of stack: what differs between layers, differs among the first eight
LAYERS = re.compile(r"^(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers|depth)$")
# what a configuration's defaults leave out, and its model needs
NEEDED = {
    "autoformer": {"prediction_length": 6}, "informer": {"prediction_length": 6},
    "time_series_transformer": {"prediction_length": 6},
    "hunyuan_v1_dense": {"head_dim": 64}, "hunyuan_v1_moe": {"head_dim": 64}, "hunyuan_vl_text": {"head_dim": 64},
    "ministral": {"head_dim": 64}, "nemotron": {"num_key_value_heads": 8}, "esm": {"vocab_size": 33},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2}, "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 16},
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 1e4, "clip_qkv": 8}},
    "granitemoehybrid": {"layer_types": ["attention", "mamba"] * 16},
}  # fmt: skip


class Softmaxes(TorchFunctionMode):
    """The logits (…, Tq, Tk) of every softmax that follows a product of two activations of those sizes."""

    def __init__(self, model):
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.stack, self.seen, self.products = [], [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.add(*_sdpa(*args, **kwargs))
        result = func(*args, **kwargs)
        if name in ("matmul", "bmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__"):
            given = [x for x in _flat((args, kwargs)) if isinstance(x, torch.Tensor)][-2:]
            if len(given) == 2 and not any(x.untyped_storage().data_ptr() in self.parameters for x in given):
                self.products.append((result.shape[-2:], self.stack[-1:]))
        if name in ("softmax", "_softmax"):
            x = args[0] if args else kwargs["input"]
            sizes = {(*shape, *where) for shape, where in self.products[-6:]}
            ours = [(x.shape[-2], x.shape[-1] - extra, *self.stack[-1:]) for extra in (0, 1)]
            found = next((i for i, one in enumerate(ours) if one in sizes), None) if x.ndim >= 3 else None
            if found is not None:
                x = x.detach().clone()
                self.add(x[..., : x.shape[-1] - found], x[..., x.shape[-1] - found :] if found else None)
        return result

    def add(self, logits, sink=None):
        self.seen.append((tuple(self.stack), logits, sink))


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    del value, dropout_p
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.detach(), None


def _flat(x):
    if isinstance(x, list | tuple):
        return [y for one in x for y in _flat(one)]
    return [y for one in x.values() for y in _flat(one)] if isinstance(x, dict) else [x]


@torch.no_grad()
def watch(model, part, given):
    """The softmaxes of one call of a part of the model, and the states that enter every module: the first time."""
    mode, states, angles = Softmaxes(model), {}, {}

    def begin(name):
        def hook(_, args, kwargs):
            mode.stack.append(name)
            given = {n: x for n, x in kwargs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
            given |= {i: x for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()}
            turns = [x for x in (*args, *kwargs.values()) if isinstance(x, tuple) and len(x) == 2]
            states.setdefault(name, given)
            angles.setdefault(name, next((x for x in turns if isinstance(x[0], torch.Tensor)), None))

        return hook

    with contextlib.ExitStack() as undo:
        for name, module in model.named_modules():
            undo.callback(module.register_forward_pre_hook(begin(name), with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(lambda *_: mode.stack.pop() and None, always_call=True).remove)
        with mode:
            part(**given)
    return mode.seen, states | {("angles", name): x for name, x in angles.items()}


def run(model):
    seen, states = [], {}
    for name, part in model.named_modules():
        if not is_pretrained(part) or any(one.startswith(f"{name}.") for stack, *_ in seen for one in stack if name):
            continue
        for given in twins.inputs(part):
            try:
                more, entered = watch(model, part, given)
            except Exception:  # the wrong arguments fail in any way
                continue
            seen, states = seen + more, entered | states
            break
    return seen, states


def states_of(attention, model, states):
    """What enters the layers of queries and of keys; of a module with latents, what enters the module."""
    whole = next(iter(states.get(attention.module, {}).values()), None)
    found = []
    for projection, made in ((attention.query, attention.query_input), (attention.key, attention.key_input)):
        owner = next(
            (n for n, m in model.named_modules() if any(p is projection.tensor for p in m._parameters.values())), ""
        )
        given = states.get(owner, {})
        if made is not None:
            found.append(whole)
        elif owner == attention.module and projection is attention.key:  # torch's own module
            found.append(given.get("key", given.get(1, whole)))
        else:
            found.append(next(iter(given.values()), None))
    return found


def difference(attention, model, events, states):
    """Largest difference of visible logits, as a share of their range, in whichever order tokens and sequences are."""
    q, k = states_of(attention, model, states)
    if q is None or k is None:
        return math.nan
    best = math.inf
    for real, sink in events:
        tq, tk = real.shape[-2:]
        real = real.reshape(-1, attention.heads, tq, tk)
        orders = [(q.reshape(-1, tq, q.shape[-1]), k.reshape(-1, tk, k.shape[-1]))]
        if q.ndim == 3:
            orders.append((q.transpose(0, 1), k.transpose(0, 1)))
        for a, b in orders:
            if a.shape[1] != tq or b.shape[1] != tk or len(a) != len(real):
                continue
            for positions in _positions(attention, states.get(("angles", attention.module)), tq, tk):
                best = min(best, _off(attention, a, b, real, sink is not None, positions))
    if best == math.inf and attention.rope is not None and not attention.rope.on_a_line:
        return math.nan  # the angles of its patches are not among its arguments
    return best


def _positions(attention, given, tq, tk):
    """None; of the patches of an image, the angles of cos and sin that the module is given, in any layout."""
    if attention.rope is None or attention.rope.on_a_line:
        yield None
    elif given is not None:
        pairs = attention.rope.pairs
        angle = torch.atan2(given[1], given[0]).flatten(0, -2).double()
        for one in (angle[:, :pairs], angle[:, ::2]):
            if one.shape[1] == pairs and len(one) <= min(tq, tk):
                q, k = (torch.cat([one.new_zeros(t - len(one), pairs), one]) for t in (tq, tk))  # no patch: not rotated
                yield from ((q, k), (-q, -k))


def _off(attention, a, b, real, shifted, positions):
    rebuilt = attention.logits(a, b, positions=positions)
    visible = real > real.amax(-1, keepdim=True) - 50
    if shifted or bool((real.amax(-1) == 0).all()) or isinstance(attention.position_bias, Alibi):
        count = visible.sum(-1, keepdim=True).clamp(min=1)
        real, rebuilt = (x - x.masked_fill(~visible, 0).sum(-1, keepdim=True) / count for x in (real, rebuilt))
    kept = real[visible]
    return float((rebuilt - real)[visible].abs().max() / (kept.max() - kept.min()))


def shallow(config, depth):
    """With at most so many layers; lists of something for each layer are cut as well."""
    for part in twins.nodes(config):
        counts = {n: v for n, v in vars(part).items() if LAYERS.search(n) and type(v) is int and v > depth}
        for name, value in list(vars(part).items()):
            if name in counts:
                setattr(part, name, depth)
            elif isinstance(value, list) and len(value) in counts.values():
                setattr(part, name, value[:depth])
    return config


def built(kind, depth=DEPTH):
    import transformers

    config = transformers.AutoConfig.for_model(kind, **NEEDED.get(kind, {}))
    error = None
    for options in ({"groups": 4, "shared": 4}, {"groups": 2}, {"together": True}, {"groups": 0}):
        try:
            small = shallow(twins.shrunk(config, **options), depth)
            small._attn_implementation = None  # what a user gets
            with torch.device("meta"):
                size = sum(p.numel() for p in transformers.AutoModel.from_config(small).parameters())
            if size > 400e6:
                raise ValueError(f"{size / 1e6:.0f} million parameters")
            model = transformers.AutoModel.from_config(small).float().eval()
        except Exception as raised:
            error = error or raised
            continue
        twins.randomise(model, seed=7)
        yield model
    if error is not None:
        raise error


def examine(kind, depth=DEPTH):
    began, best, any_built = time.time(), None, False
    try:
        for model in built(kind, depth):
            any_built = True
            seen, states = run(model)
            if seen:
                best = model, seen, states
                break
    except Exception as error:
        if best is None and not any_built:  # else it is the next larger one that does not build
            return {"type": kind, "built": False, "why": f"{type(error).__name__}: {str(error)[:200]}"}
    if best is None:
        return {"type": kind, "built": True, "softmaxes": 0}
    model, seen, states = best
    result = {"type": kind, "built": True, "softmaxes": len(seen), "read": [], "wrong": {}, "unread": {}, "unseen": []}
    try:
        found = reading(model)
        attentions, reasons = list(found), found.unread
    except Exception as error:
        attentions, reasons = [], {"": str(error)[:300]}
    covered = set()
    for attention in attentions:
        events = [(x, sink) for stack, x, sink in seen if attention.module in stack]
        covered |= {i for i, (stack, *_) in enumerate(seen) if attention.module in stack}
        try:
            off = difference(attention, model, events, states) if events else math.nan
        except Exception as error:
            off = math.inf
            result.setdefault("errors", []).append(f"{attention.module}: {error!r:.200}")
        if math.isnan(off):
            result["unseen"].append(attention.module)
        elif off <= CLOSE:
            result["read"].append(attention.module)
        else:
            result["wrong"][attention.module] = off
    for i, (stack, *_) in enumerate(seen):
        if i not in covered:
            near = next((n for n in reversed(stack) if n in reasons), next((n for n in reasons if not n), None))
            result["unread"][stack[-1]] = reasons.get(near, "no reader") if near is not None else "no reader"
    if attentions and not result["wrong"]:
        result |= agreements(model, attentions)
        if isinstance(result["saved"], str):  # a configuration whose layers were cut may not be read again
            with contextlib.suppress(Exception):
                whole = next(built(kind, depth=10**6))
                result["saved"] = _saved(whole, list(reading(whole)))
    result["seconds"] = round(time.time() - began, 1)
    return result


def agreements(model, attentions):
    """LocAteR = autograd, scan(live) = scan(saved), observe = materialised; what they raise, where they do."""
    found = {}
    for name, check in (("gradient", _gradient), ("saved", _saved), ("entropy", _entropy)):
        try:
            found[name] = check(model, attentions)
        except Exception as error:
            found[name] = f"{error!r:.200}"
    return found


def _saved(model, attentions):
    """Names of all modules, numbers of the first and last."""
    layers = {attentions[0].layer, attentions[-1].layer}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        names = [site.name for _, site in open_checkpoint(folder).reading().sites]
        if names != [attention.module for attention in attentions]:
            return f"other modules: {len(names)}, not {len(attentions)}"
        live, saved = (scan(one, layers=layers) for one in (model, folder))
    numbers = live.select_dtypes("number").columns
    scale = live[numbers].abs().max().clip(lower=1e-30)
    return float(((live[numbers] - saved[numbers]).abs() / scale).max().max())


def _entropy(model, attentions):
    """The largest difference of a head's mean entropy, in nats, over sequences without padding."""
    for given in (one for one in twins.inputs(model) if "attention_mask" not in one):
        for name in given.keys() & {"input_ids", "decoder_input_ids"}:
            pad = getattr(model.config.get_text_config(), "pad_token_id", None)
            given[name] = torch.where(given[name] == pad, pad + 1, given[name]) if isinstance(pad, int) else given[name]
        try:
            with observe(model) as table:
                seen, _ = watch(model, model, given)
        except LocaterError:
            raise
        except Exception:  # the wrong arguments fail in any way
            continue
        break
    else:
        return "no inputs"
    found, worst, count = table.table(), 0.0, 0
    for attention in attentions:
        events = [(x, sink) for stack, x, sink in seen if attention.module in stack]
        rows = found[found["module"] == attention.module]
        if len(events) != 1 or len(rows) != attention.heads:
            continue
        logits, sink = events[0]
        logits = logits.reshape(-1, attention.heads, *logits.shape[-2:])
        apart = getattr(model.get_submodule(attention.module.partition("@")[0]), "sinks", None)
        if sink is None and apart is not None:  # it multiplies what attention makes, instead of being a key
            sink = apart.detach().view(-1, 1, 1).expand(*logits.shape[:-1], 1)
        p = (
            (logits if sink is None else torch.cat([logits, sink.reshape(*logits.shape[:-1], 1)], -1))
            .double()
            .softmax(-1)
        )
        wanted = torch.special.entr(p).sum(-1).mean((0, 2))
        worst, count = max(worst, float((wanted - torch.tensor(rows["entropy"].to_numpy())).abs().max())), count + 1
    return worst if count else "nothing to compare"


def _gradient(model, attentions):
    del attentions
    for p in model.parameters():
        p.grad, p.requires_grad = None, True
    regulariser = LocAteR(model, scale_strength=0.3, mean_strength=0.7)
    regulariser.penalty().backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    regulariser.add_gradient_()
    made = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if wanted.keys() != made.keys():
        return f"other parameters: {sorted(wanted.keys() ^ made.keys())[:3]}"
    return max(float((wanted[n] - made[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-30)) for n in wanted)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", nargs="+", type=Path)
    asked = parser.parse_args()
    if asked.table:
        return table([json.loads(line) for path in asked.table for line in path.read_text().splitlines()])
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    part, parts = map(int, asked.part.split("/"))
    rows = []
    for kind in asked.types or list(MODEL_MAPPING_NAMES)[part - 1 :: parts]:
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(SECONDS)
        try:
            row = examine(kind)
        except Late:
            row = {"type": kind, "built": True, "softmaxes": 0, "why": f"more than {SECONDS} s"}
        except Exception:
            row = {"type": kind, "built": True, "softmaxes": 0, "why": traceback.format_exc()[-400:]}
        finally:
            signal.alarm(0)
        rows.append(row)
        line = json.dumps(row)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(line + "\n")
        else:
            print(line, flush=True)
        gc.collect()
    return table(rows)


class Late(BaseException):
    """Not an Exception: those of wrong arguments are passed over."""


def _late(*_):
    raise Late


def outcome(row):
    """read, partly or refused; wrong, where anything is."""
    if row["wrong"]:
        return "wrong"
    if not row["unread"] and row["read"] + row["unseen"]:
        return "read"
    return "partly" if row["read"] else "refused"


# why a module is not read, by what its reason says
REASONS = {
    "queries or keys out of several layers": "several (layers|products)",
    "keys in blocks, bands, pools or n-grams": "which are no|no reader|as long as",
    "logits that are more than q·k, a factor and positions that are known": "times a factor|clamped",
    "a forward that the twin's inputs do not reach": "reach|cannot be",
    "no projection of the queries": "no softmax",
}


def table(rows):
    """The counts, as the lines between the marks in docs/models.md."""
    seen = [row for row in rows if row.get("softmaxes")]
    by = {
        name: [row["type"] for row in seen if outcome(row) == name] for name in ("read", "partly", "refused", "wrong")
    }
    share = len(by["read"]) / max(1, len(seen))
    lines = [
        f"Of {len(rows)} model types {sum(row['built'] for row in rows)} build; {len(seen)} have a softmax over q·k: "
        f"**{len(by['read'])} ({share:.0%}) are read whole**, {len(by['partly'])} partly, {len(by['refused'])} "
        f"refused, {len(by['wrong'])} read wrong.",
        "",
        "| not read, or partly | types |",
        "|---|---|",
    ]
    left = {row["type"]: " ".join(row["unread"].values()) for row in seen if outcome(row) in ("partly", "refused")}
    for words, pattern in REASONS.items():
        kinds = [kind for kind, why in left.items() if re.search(pattern, why)]
        left = {kind: why for kind, why in left.items() if kind not in kinds}
        if kinds:
            lines.append(f"| {words} | {', '.join(kinds)} |")
    if left:
        lines.append(f"| other | {', '.join(left)} |")
    print("\n".join(lines))
    for name, most in (("gradient", 1e-5), ("saved", 1e-9), ("entropy", 1e-5)):
        numbers = [(row[name], row["type"]) for row in seen if isinstance(row.get(name), float)]
        off = [f"{kind} {value:.2g}" for value, kind in numbers if not value <= most]
        print(f"{name}: {len(numbers)} types compared, off by more than {most:g}: {', '.join(off) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
