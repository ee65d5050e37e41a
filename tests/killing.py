"""Runs, sweeps and arenas killed at each of their file operations, torn in the middle of a record, or told to stop.

    make kills COUNT=300 SEED=0

After each the same command must go on and leave metrics that are those of an undisturbed run, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from corpora import write_corpus

from forking import Child, Ended
from locater.lab import Config, Member, ModelConfig, arena, load_corpus, sweep, train
from locater.lab.arena import cost as _arena_cost
from locater.lab.runs.records import MetricsFile

CONFIG = Config(
    model=ModelConfig(width=8, ffn=8, layers=1, tokens=8),
    batch=4, steps=14, record_every=4, checkpoint_every=4, probe_blocks=4, valid_blocks=4,
)  # fmt: skip
MEMBERS = [Member("plain", learning_rate=3e-3), Member("held", seed=1, learning_rate=3e-3, scale_strength=1e-2)]
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate")
ENDS = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)

Scenario = Callable[[Path], None]


def scenarios(data: Path, cache: Path) -> dict[str, Scenario]:
    corpus = load_corpus(data, cache=cache)
    config = replace(CONFIG, data=str(data))
    without = replace(config, checkpoint_every=0, record_early=False)
    small = arena.Arena("two contenders", without, (1e-3, 1e-2), (0,), ("none", "qk-norm"), tuned=False)
    return {
        "train": lambda folder: train(config, MEMBERS, folder, corpus=corpus, device="cpu") and None,
        "sweep": lambda folder: sweep(config, MEMBERS, folder, group_size=1, device="cpu") and None,
        "arena": lambda folder: arena.run_arena(small, folder, device="cpu", group_size=1),
    }


# ---------------------------------------------------------------------- in the child


class Operations:
    """Counts what is done to files in a folder, and dies right before, or after, one of them."""

    def __init__(self, folder: Path, die_at: int | None = None) -> None:
        self.count, self._folder, self._die_at = 0, str(folder), die_at
        sys.addaudithook(self._hear)
        fsync = os.fsync

        def flush(handle: int) -> None:
            self._step()
            fsync(handle)
            self._step()

        os.fsync = flush

    def _hear(self, event: str, arguments: tuple) -> None:
        if event in EVENTS and any(str(word).startswith(self._folder) for word in arguments[:2]):
            self._step()

    def _step(self) -> None:
        self.count += 1
        if self.count == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def torn(at: int) -> None:
    """The at-th append leaves a part of its bytes and dies."""
    appended, append = [0], MetricsFile.append

    def tear(self: MetricsFile, records: list) -> None:
        appended[0] += 1
        if appended[0] == at:
            whole = self.path.read_bytes()
            append(self, records)
            added = self.path.read_bytes()[len(whole) :]
            self.path.write_bytes(whole + added[: random.Random(at).randrange(1, len(added))])
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, records)

    MetricsFile.append = tear  # type: ignore[method-assign]


# ---------------------------------------------------------------------- from outside


def metrics(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("metrics.jsonl"))}


def fault_after(scenario: Scenario, folder: Path, expected: dict[str, bytes]) -> str | None:
    """Goes on, and says what is wrong with what is there then."""
    end = Child(lambda: scenario(folder)).ended()
    if end.status != 0:
        return f"cannot go on: {end.err.strip().splitlines()[-1] if end.err.strip() else end.status}"
    if metrics(folder) != expected:
        return "the metrics are not those of an undisturbed run"
    left = [path.name for path in folder.rglob("*") if "unfinished" in path.name]
    return f"left behind: {left[0]}" if left else None


def disturbed(scenario: Scenario, folder: Path, how: str, at: float) -> Ended:
    def call() -> None:
        if how == "kill":
            Operations(folder, int(at))
        elif how == "tear":
            torn(int(at))
        scenario(folder)

    child = Child(call)
    if how in ("SIGTERM", "SIGINT", "SIGKILL"):
        time.sleep(at)
        with suppress(ProcessLookupError):
            os.kill(child.pid, getattr(signal, how))
    return child.ended()


def plan(count: int, seed: int, operations: dict[str, int], seconds: dict[str, float]) -> list[tuple[str, str, float]]:
    """Scenario, way to die, and when: most at file operations, spread over all of them; the rest by signals."""
    draw = random.Random(seed)
    made: list[tuple[str, str, float]] = []
    shares = {"train": 0.4, "sweep": 0.2, "arena": 0.2}
    for name, share in shares.items():
        number = max(1, round(count * share))
        places = [1 + (k * operations[name]) // number for k in range(number)]
        made += [(name, "kill", place) for place in places]
    while len(made) < count:
        name, how = draw.choice(list(shares)), draw.choice(["SIGTERM", "SIGINT", "SIGKILL", "tear"])
        at = draw.randrange(1, 5) if how == "tear" else draw.uniform(0, 1.1 * seconds[name])
        made.append((name, how, at))
    return made[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    _arena_cost._SECONDS, _arena_cost._LEAST = 0.0, 1  # how long it times contenders
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        ways = scenarios(write_corpus(place / "corpus"), place / "cache")
        expected, operations, seconds = {}, {}, {}
        for scenario, way in ways.items():
            way(place / f"warm-{scenario}")  # what is imported on the way, children need not
            folder = place / f"undisturbed-{scenario}"

            def counted(way: Scenario = way, folder: Path = folder) -> None:
                seen = Operations(folder)
                way(folder)
                print(seen.count)

            end = Child(counted).ended()
            assert end.status == 0, end.err
            operations[scenario], seconds[scenario] = int(end.out), end.seconds
            expected[scenario] = metrics(folder)
        faults: list[str] = []
        deaths = 0
        for number, (scenario, how, at) in enumerate(plan(given.count, given.seed, operations, seconds)):
            folder = place / "runs" / f"{number}"
            folder.parent.mkdir(exist_ok=True)
            end = disturbed(ways[scenario], folder, how, at)
            deaths += end.status != 0
            fault = None if end.status in ENDS else f"left with {end.status}: {end.err[-300:]}"
            fault = fault or fault_after(ways[scenario], folder, expected[scenario])
            if fault:
                faults.append(f"{scenario}, {how} at {at:g}: {fault}")
                print(faults[-1], flush=True)
            shutil.rmtree(folder, ignore_errors=True)
        counts = ", ".join(f"{scenario} {n}" for scenario, n in operations.items())
        print(f"{given.count} kills and signals ({deaths} died), file operations: {counts}; {len(faults)} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
