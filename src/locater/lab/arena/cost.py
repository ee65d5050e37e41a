"""What a contender's update costs: all are timed in the same rounds, so that a busy machine is busy for each of them.

cost.json in an arena's folder has an entry for every timing, "none" in each: a contender that comes later is timed
beside the same reference. "rule" is the version of the method's formula that was timed.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from locater.errors import LocaterError, reason
from locater.io import json_bytes, read_json, remove_unfinished, writable_folder, write_file
from locater.lab.config import Config, Member
from locater.lab.data import Corpus
from locater.lab.engine.methods import METHODS
from locater.lab.engine.stack import Stack
from locater.lab.runs.lock import exclusive_lock

__all__ = ["REFERENCE", "Cost", "read_costs", "time_contenders", "write_timing"]

REFERENCE = "none"

_FILE = "cost.json"
_MODELS = {"cuda": 15}  # stacked while updates are timed; elsewhere two
_WARM = {"cuda": 4}  # updates before: two as they are, one that is recorded, one replayed; elsewhere two
_LEAST, _MOST = 5, 25  # rounds, in each of which every contender makes one update
_SECONDS = 5.0  # after which only the least of them begin


@dataclass(frozen=True)
class Cost:
    """Of one model and update; NaN where it is not known."""

    milliseconds: float = math.nan
    relative: float = math.nan  # milliseconds in units of those of no protection in the same timing
    bytes: float = math.nan  # at their peak, parameters and Adam's moments included; on a GPU


def time_contenders(
    entries: Mapping[str, tuple[Config, Member]], corpus: Corpus, device: torch.device
) -> dict[str, Any]:
    """Milliseconds a model and update, the median of rounds, and on a GPU bytes a model; as cost.json has them.

    All contenders are on the device at once. Where they do not fit, half as many models each are tried.
    """
    models = _MODELS.get(device.type, 2)
    while True:
        try:
            return _timed(entries, corpus, device, models)
        except torch.OutOfMemoryError as error:
            if models == 1:
                raise LocaterError(
                    f"{len(entries)} models, one a contender, do not fit on {device}: name fewer contenders"
                ) from error
        models //= 2
        _tidy(device)


def _timed(
    entries: Mapping[str, tuple[Config, Member]], corpus: Corpus, device: torch.device, models: int
) -> dict[str, Any]:
    def stacked(config: Config, member: Member) -> Stack:
        members = [replace(member, name=f"timed-{i}") for i in range(models)]
        return Stack(config, members, _short(corpus, config), device)

    if device.type == "cuda":  # what libraries allocate once for all is not the first contender's
        _seconds(stacked(*next(iter(entries.values()))), _WARM["cuda"])
        _tidy(device)
    stacks: dict[str, Stack] = {}
    found: dict[str, dict[str, float]] = {}
    for name, entry in entries.items():
        before = _allocated(device)
        stacks[name] = stacked(*entry)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _seconds(stacks[name], _WARM.get(device.type, 2))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        found[name] = {"rule": METHODS[entry[0].model.method].version}
        if peak is not None:
            found[name]["bytes"] = (peak - before) / models
    seconds: dict[str, list[float]] = {name: [] for name in stacks}
    began, rounds = time.perf_counter(), 0
    while rounds < _LEAST or (rounds < _MOST and time.perf_counter() - began < _SECONDS):
        # there and back, so that none always comes after the same neighbour
        for name in list(stacks)[:: -1 if rounds % 2 else 1]:
            seconds[name].append(_seconds(stacks[name], 1))
        rounds += 1
    for name, times in seconds.items():
        found[name]["milliseconds"] = 1e3 * median(times) / models
    stacks.clear()
    _tidy(device)
    return {"hardware": _hardware(device), "models": models, "rounds": rounds, "contenders": found}


def _seconds(stack: Stack, updates: int) -> float:
    cuda = stack.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(stack.device)
    began = time.perf_counter()
    for _ in range(updates):
        stack.advance()
    if cuda:
        torch.cuda.synchronize(stack.device)
    return time.perf_counter() - began


def _short(corpus: Corpus, config: Config) -> Corpus:
    """As much text as is read here: a corpus on the device is no cost of a method's, and every stack has its own."""
    block = config.model.tokens
    batches = max(_WARM.values()) + _MOST
    lengths = {"train": batches * config.batch * block, "valid": block, "test": block}
    return replace(corpus, splits={split: corpus.splits[split][:length] for split, length in lengths.items()})


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


# ---------------------------------------------------------------------- on disk


def read_costs(folder: Path, unsaid: Mapping[str, object]) -> dict[str, list[tuple[object, Cost]]]:
    """By contender every timing, the first one first, with the version of the method that was timed.

    `unsaid` has the version by contender where a timing does not say it, as none did at first; others are of 1.
    """
    costs: dict[str, list[tuple[object, Cost]]] = {}
    try:
        for timing in _timings(folder):
            rows = timing["contenders"]
            milliseconds = {name: float(row["milliseconds"]) for name, row in rows.items()}
            for name, row in rows.items():
                relative = milliseconds[name] / milliseconds[REFERENCE]
                cost = Cost(milliseconds[name], relative, float(row.get("bytes", math.nan)))
                costs.setdefault(name, []).append((row.get("rule", unsaid.get(name, 1)), cost))
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise LocaterError(
            f"cannot read {folder / _FILE}: {type(error).__name__} {reason(error)}; "
            "remove it, and contenders are timed again"
        ) from error
    return costs


def write_timing(folder: Path, timing: dict[str, Any]) -> None:
    """Adds what `time_contenders` gave to what the folder has."""
    with exclusive_lock(writable_folder(folder)):
        remove_unfinished(folder)
        value = {"format": 1, "timings": [*_timings(folder), timing]}
        write_file(folder / _FILE, json_bytes(value, indent=1) + b"\n")


def _timings(folder: Path) -> list[dict[str, Any]]:
    path = folder / _FILE
    return list(read_json(path)["timings"]) if path.exists() else []
