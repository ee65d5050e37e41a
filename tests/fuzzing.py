"""Commands given damaged files and odd arguments: each must end with status 0, or with 2 and one line.

    make fuzz COUNT=5000 SEED=0

A case is a command over good inputs, one of which is mutated: bytes flipped, cut, repeated or set; values of JSON
replaced by odd ones; names turned into paths that lead elsewhere. None may show a traceback, take longer than 20 s or
1 GB, or touch a file outside its output.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from corpora import write_corpus

from forking import Child, Ended
from locater.cli import main as command_line
from locater.lab import Stack
from locater.lab.arena import cost as _arena_cost

SECONDS, BYTES = 20.0, 2**30

DEEP = b'{"a":' * 100_000
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 0.5, 3, 1e308, -1e308, 7**30, 2**63, -(2**63), 10**19, 10**400, float("nan"), float("inf"),
    "", "abc", "NaN", "1e999", "x" * 5000, "\ud800", "\0", [], [[]], {}, {"a": 1}, [None], [[1, "b"]], [[[[[]]]]],
    "../../victim/run", "/etc/passwd", "C:\\x", "a/../../victim", ".", "..", ["../../victim"],
]  # fmt: skip
ODD_WORDS = [
    "", "-1", "0", "1e308", "nan", "inf", "-inf", "10000000000000000000", "9" * 400, "abc", "x" * 5000, "\udcff\udcfe",
    "ρ", "1,1", ",", "none", "a=b", "=", "--", "%s", "\n", "loop", "pipe", "../../victim/run", "/dev/null", "/dev/full",
    "/" + "y" * 300 + "/z",
]  # fmt: skip


# ---------------------------------------------------------------------- mutations


def mutated_bytes(raw: bytes, draw: random.Random) -> bytes:
    made = bytearray(raw)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        if not made:
            break
        at = draw.randrange(len(made)) if draw.random() < 0.5 else draw.randrange(min(len(made), 400))
        size = draw.choice([1, 2, 4, 8, 64, 1000])
        match draw.choice(["flip", "cut", "drop", "repeat", "set", "insert"]):
            case "flip":
                made[at] ^= 1 << draw.randrange(8)
            case "cut":
                del made[at:]
            case "drop":
                del made[at : at + size]
            case "repeat":
                made[at:at] = made[at : at + size]
            case "set":
                value = draw.choice([b"\xff", b"\0", b"\x7f", b"\x80"])
                made[at : at + size] = value * len(made[at : at + size])
            case "insert":
                made[at:at] = draw.randbytes(size)
    return bytes(made)


def mutated_json(raw: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.25:
        return draw.choice(
            [mutated_bytes(raw, draw), DEEP, b"[" * 100_000, b"", b"null", b"[]", b"\xff\xfe{}", b"1e999"]
        )
    value = json.loads(raw)
    for _ in range(draw.choice([1, 1, 2, 4])):
        value = _with_odd_value(value, draw)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _with_odd_value(value: Any, draw: random.Random) -> Any:
    """One value anywhere in it replaced, removed or renamed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        made = dict(value)
        if draw.random() < 0.1:
            del made[key]
        elif draw.random() < 0.1:
            made[draw.choice([key + "x", "", "name", "step", "member"])] = made.pop(key)
        else:
            made[key] = _with_odd_value(value[key], draw)
        return made
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], _with_odd_value(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD_VALUES)


def mutated_lines(raw: bytes, draw: random.Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    if draw.random() < 0.3:
        return mutated_bytes(raw, draw)
    if draw.random() < 0.2:
        return b"".join(draw.sample(lines, draw.randrange(len(lines) + 1)))
    lines[at] = mutated_json(lines[at], draw) + b"\n"
    return b"".join(lines)


def mutated_gzip(raw: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return mutated_bytes(raw, draw)
    if draw.random() < 0.1:
        return gzip.compress(bytes(200 * 2**20), 9)  # a bomb
    return gzip.compress(mutated_lines(gzip.decompress(raw), draw))


def mutated_pickle(raw: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.7:
        return mutated_bytes(raw, draw)
    return pickle.dumps(
        draw.choice([*ODD_VALUES[:20], {1: torch.ones(2)}, {"a": {"b": torch.ones(3)}}, {"state_dict": 3}])
    )


MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": mutated_json,
    ".jsonl": mutated_lines,
    ".gz": mutated_gzip,
    ".pt": mutated_pickle,
}


# ---------------------------------------------------------------------- good inputs


@dataclass(frozen=True)
class Input:
    """A folder of files that a command takes, and which of them is mutated."""

    command: tuple[str, ...]  # run in a copy of the folder; what it writes goes to out/ or into the folder
    folder: Path
    files: tuple[str, ...]
    writes: tuple[str, ...] = ("out",)


_TOKENS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
BERT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_TOKENS}
LLAMA = BERT | {"num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **_TOKENS}


def prepared(place: Path) -> list[Input]:
    """Small models in every format, runs, a sweep, an arena, logs: made by the package's own commands."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**LLAMA)),
        "gpt2": GPT2Model(GPT2Config(**GPT2)),
        "bert": BertModel(BertConfig(**BERT)),
    }
    made: list[Input] = []
    for name, model in models.items():
        model.save_pretrained(place / name / "model")
        files = ("model/config.json", "model/model.safetensors")
        made.append(Input(("scan", "model", "--json", "out/scan.json"), place / name, files))
    models["llama"].save_pretrained(place / "sharded" / "model", max_shard_size="20KB")
    shards = sorted(path.name for path in (place / "sharded" / "model").glob("*.safetensors"))
    files = ("model/model.safetensors.index.json", "model/config.json", f"model/{shards[0]}")
    made.append(Input(("scan", "model", "--fold-norm", "--offset", "3"), place / "sharded", files))
    (place / "pickled" / "model").mkdir(parents=True)
    torch.save(models["llama"].state_dict(), place / "pickled" / "model" / "model.pt")
    shutil.copy(place / "llama" / "model" / "config.json", place / "pickled" / "model")
    made.append(Input(("scan", "model/model.pt"), place / "pickled", ("model/model.pt",)))
    made.append(_gguf(place / "gguf", models["llama"]))
    made += _runs(place)
    return made + _reports(place)


def _gguf(place: Path, model: Any) -> Input:
    import gguf

    place.mkdir(parents=True)
    writer = gguf.GGUFWriter(place / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(50)])
    names = {"attn_q": "q_proj", "attn_k": "k_proj"}
    for layer in range(2):
        attention = model.model.layers[layer].self_attn
        for stored, own in names.items():
            writer.add_tensor(f"blk.{layer}.{stored}.weight", getattr(attention, own).weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Input(("scan", "model.gguf"), place, ("model.gguf",))


_SMALL = ("--set", "width=8", "--set", "ffn=8", "--set", "tokens=8", "--set", "batch=4", "--set", "record_every=4")
_FEW = (*_SMALL, "--set", "checkpoint_every=4", "--set", "probe_blocks=4", "--set", "valid_blocks=4", "--steps", "8")


def _runs(place: Path) -> list[Input]:
    for name in ("train", "sweep", "packed", "arena"):
        write_corpus(place / name / "text", words=600)
    train = ("train", "laptop", "--data", "text", "--out", "run", *_FEW)
    sweep = ("sweep", "laptop", "--data", "text", "--out", "run", "--kappa-2", "none,0,1", *_FEW)
    arena = ("arena", "laptop", "--data", "text", "--out", "run", "--contenders", "none,qk-norm", "--rates", "1e-3")
    arena = (*arena, *_SMALL, "--set", "probe_blocks=4", "--set", "valid_blocks=4", "--steps", "8")
    for name, command in (("train", train), ("sweep", sweep), ("packed", sweep), ("arena", arena)):
        end = Child(lambda name=name, command=command: _run(place / name, command)).ended(120)  # type: ignore[misc]
        assert end.status == 0, end.err
    for path in sorted((place / "packed" / "run").glob("*/metrics.jsonl")):
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    newest = max((place / "train" / "run" / "checkpoints").glob("*.safetensors")).name
    own = ("run/run.json", "run/metrics.jsonl")
    checkpoint = (f"run/checkpoints/{newest}", f"run/checkpoints/{newest.replace('safetensors', 'json')}")
    of_sweep = ("run/sweep.json", "run/group-00/run.json", "run/group-00/metrics.jsonl")
    packed = ("run/sweep.json", "run/group-00/run.json", "run/group-00/metrics.jsonl.gz")
    of_arena = (
        "run/none/sweep.json",
        "run/cost.json",
        "run/none/group-00/run.json",
        "run/qk-norm/group-00/metrics.jsonl",
    )
    return [
        Input((*train[:-1], "10"), place / "train", (*own, *checkpoint), ("run",)),
        Input(sweep, place / "sweep", of_sweep, ("run",)),
        Input(("claims", "run", "--json", "out/claims.json"), place / "packed", packed),
        Input(("report", "run", "--out", "out/report.html"), place / "packed", packed),
        Input(("report", "run", "--out", "out/report.html"), place / "sweep", of_sweep),
        Input(arena, place / "arena", of_arena, ("run",)),
    ]


def _reports(place: Path) -> list[Input]:
    folder = place / "reports"
    folder.mkdir()
    end = Child(lambda: _run(place / "llama", ("scan", "model", "--json", str(folder / "scan.json")))).ended(60)
    assert end.status == 0, end.err
    softmax = {"regime": "uniform", "weights": {"exact": [0.4, 0.6]}, "entropy": {"exact": 0.6, "simulated": 0.6}}
    spectrum = {"mean": 0.1, "std": 0.2, "softmax": softmax, "regime": "late", "rho": {"exact": [0.1, 0.2]}}
    (folder / "predictions.json").write_text(json.dumps({"spectra": [spectrum]}))
    heads = [
        {"module": "a", "layer": 0, "kind": "self", "head": 0, "entropy": 1.0, "entropy_share": 0.5, "max_logit": 3.0}
    ]
    layers = [
        {
            "module": "a",
            "layer": 0,
            "kind": "self",
            "rank_residual": 0.5,
            "entropy": 1.0,
            "entropy_share": 0.5,
            "max_logit": 3.0,
        }
    ]
    measured = {"model": "m", "length": 8, "sequences": 4, "query": -1, "heads": heads, "layers": layers}
    measured |= {"rho": {"a": [[0.5] * 8]}, "entropy_by_position": {"a": [[0.5] * 8]}}
    (folder / "measured.json").write_text(json.dumps(measured))
    line = {"step": 0, "module": "a", "layer": 0, "kind": "self", "keys": 8, "entropy": [1.0], "entropy_share": [0.5]}
    line |= {"max_logit": [3.0], "logsumexp": [1.0], "rank_residual": 0.5, "effective_rank": 2.0, "mean_cosine": 0.1}
    (folder / "log.jsonl").write_text("".join(json.dumps(line | {"step": 10 * i}) + "\n" for i in range(5)))
    return [
        Input(("report", name, "--out", "out/report.html"), folder, (name,))
        for name in ("scan.json", "predictions.json", "measured.json", "log.jsonl")
    ]


# ---------------------------------------------------------------------- arguments


NAMED = ("out",)  # and whatever else the arguments name, but for what is there already
COMMANDS = """
rho --mean 0.1 --std 0.1 --dim 4 --tokens 5 --process walk --method exact --json out/x.json
rho --mean 0.1 --dim 4 --tokens 5 --method montecarlo --samples 50 --seed 1
attention --mean 0.1 --std 0.1 --dim 4 --tokens 5 --process ar:0.5 --query 2 --samples 64 --json out/y.json
attention --mean 0.1 --dim 4 --tokens 5 --method three-number --temperature 2 --process independent
figure 1 --out out
figure 6 --runs run --out out
study limits --json out/x.json --seed 3
scan model --offset 1 --tokens 8 --top 3 --csv out/x.csv --json out/x.json
scan model --average-offsets 4 --plot out
scan org/model@main --revision v1
claims run --seeds-from run --markdown out/x.md
report run --out out/x.html
presets --json out/x.json
arena laptop --contenders none --rates 1 --seeds 0 --steps 0 --set a=b
train laptop --steps 0 --kappa-2 1 --learning-rate 1 --decay 1 --precision fp32 --device cpu --set width=8
sweep laptop --kappa-2 1,2 --seeds 0 --readings figures --group-size 0 --engine local --address x
measure model --text text.txt --length 8 --batch 1 --since x.json
explore --out out/x.html
demo --steps 0 --seed 1
""".strip().splitlines()


def odd_arguments(draw: random.Random) -> tuple[str, ...]:
    """A quick command with some of its words replaced."""
    words = draw.choice(COMMANDS).split()
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(words))
        match draw.choice(["replace", "replace", "replace", "drop", "repeat", "add"]):
            case "replace":
                words[at] = draw.choice(ODD_WORDS)
            case "drop":
                del words[at]
            case "repeat":
                words.insert(at, words[at])
            case "add":
                words.insert(at, draw.choice([*ODD_WORDS, "--json", "--out", "--traceback"]))
        if not words:
            break
    return tuple(word for word in words if word != "--traceback")


# ---------------------------------------------------------------------- a case


def _run(folder: Path, command: tuple[str, ...], *, training: bool = True) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    if not training:  # a command that is taken at its word, and would train for minutes
        Stack.advance = lambda _: sys.exit(0)  # type: ignore[method-assign]
    command_line(list(command))


def fault(folder: Path, command: tuple[str, ...], writes: tuple[str, ...], *, training: bool = True) -> str | None:
    """Runs a command in a folder and says what is wrong with how it ends."""
    (folder / "out").mkdir(exist_ok=True)
    before = _seen(folder, writes)
    end = Child(lambda: _run(folder, command, training=training), most_bytes=4 * BYTES).ended(SECONDS)
    after = _seen(folder, writes)
    changed = [name for name in before if before[name] != after.get(name)]
    added = [] if writes == NAMED else [name for name in after if name not in before]
    return wrong(end) or (f"it touched {changed + added}" if changed or added else None)


def wrong(end: Ended) -> str | None:
    if end.hung:
        return f"hangs for {SECONDS:g} s"
    if end.bytes > BYTES:
        return f"takes {end.bytes / 2**20:.0f} MB"
    if end.status not in (0, 2) or "Traceback" in end.err:
        return f"status {end.status}: {end.err[-600:]}"
    told = [line for line in end.err.splitlines() if line.startswith("locater: ")]
    if end.status == 2 and (len(told) != 1 or len(told[0]) > 800):
        return f"not one line: {end.err[:600]}"
    return None


def _seen(folder: Path, writes: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """All files but those that may be written; size and time of change."""
    found = {}
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).parts
        if inside[0] not in writes and path.is_file() and not path.is_symlink():
            about = path.stat()
            found[str(path)] = about.st_size, about.st_mtime_ns
    return found


def surroundings(folder: Path) -> None:
    """What a bad name may lead to: somebody's run, a loop of links, a pipe, a folder that cannot be read."""
    victim = folder / "victim" / "run"
    victim.mkdir(parents=True)
    (victim / "run.json").write_text('{"config": {}, "members": []}')
    (victim / "metrics.jsonl").write_text("{}\n")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    (folder / "text.txt").write_text("some words " * 50)


def case(inputs: list[Input], seed: int, place: Path) -> tuple[str, str | None]:
    """One mutated input or command, by a seed of its own; what it was, and what is wrong with its end."""
    draw = random.Random(seed)
    work = place / "work"
    shutil.rmtree(work, ignore_errors=True)
    folder = work / "a" / "b"
    if draw.random() < 0.25:
        folder.mkdir(parents=True)
        for name in ("llama/model", "packed/run"):
            shutil.copytree(place / "good" / name, folder / Path(name).name)
        surroundings(folder)
        command = odd_arguments(draw)
        return f"{seed}: {' '.join(command)!r:.300}", fault(folder, command, NAMED, training=False)
    given = draw.choice(inputs)
    shutil.copytree(given.folder, folder)
    surroundings(folder)
    name = draw.choice(given.files)
    target = folder / name
    if draw.random() < 0.03:
        target.unlink()
        draw.choice([target.mkdir, lambda: target.symlink_to(target.name), lambda: os.mkfifo(target)])()
    else:
        mutate = MUTATIONS.get(target.suffix, mutated_bytes)
        target.write_bytes(mutate(target.read_bytes(), draw))
    return f"{seed}: {given.command[0]}, {name}", fault(folder, given.command, given.writes)


def taken(given: Input, place: Path) -> object:
    """The status of a command over good inputs, in this process: what it imports and makes once, children have."""
    work = place / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(given.folder, work)
    (work / "out").mkdir(exist_ok=True)
    with chdir(work), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            command_line(list(given.command))
        except SystemExit as leaving:
            return leaving.code
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    given = parser.parse_args()
    torch.set_num_threads(1)

    _arena_cost._SECONDS, _arena_cost._LEAST = 0.0, 1  # how long contenders are timed
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        inputs = prepared(place / "good")
        for one in inputs:
            assert taken(one, place) == 0, one.command
        faults = 0
        for seed in range(given.seed, given.seed + given.count):
            about, found = case(inputs, seed, place)
            if found is not None:
                faults += 1
                print(f"{about}: {found}", flush=True)
        print(f"{given.count} inputs from seed {given.seed}: {faults} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
