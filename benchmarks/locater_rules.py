"""Other bounds for LocAteR auto, in an arena.

    python benchmarks/locater_rules.py [ARENA] [--steps N] [--rates X,Y] [--seeds I,J] [--set NAME=VALUE] [BOUNDS …]

BOUNDS are CHANGE:SPREAD, in nats, as in 0.1:4.9.

docs/rivals.md has what else was tried.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from locater.cli._training import changed
from locater.control.rules.decoupled import Decoupled
from locater.lab.arena import ARENAS, CONTENDERS, read_arena
from locater.lab.engine import methods
from locater.lab.runs.sweep import sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arena", nargs="?", default="laptop", choices=ARENAS)
    parser.add_argument("bounds", nargs="*", default=["0.1:4.9", "0.03:4.9", "1e9:4.9"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--set", action="append", dest="settings")
    given = parser.parse_intermixed_args()
    arena = ARENAS[given.arena]
    arena = replace(arena, config=changed(arena.config, given.settings, steps=given.steps), tuned=False)
    arena = replace(arena, seeds=tuple(map(int, given.seeds.split(","))))
    if given.rates:
        arena = replace(arena, learning_rates=tuple(map(float, given.rates.split(","))))
    print(
        "bounds: at every learning rate the mean loss in nats, how far seeds are apart, largest logit, lowest entropy"
    )
    for bounds in given.bounds:
        change, spread = map(float, bounds.split(":"))
        methods.Decoupled = partial(Decoupled, spread=spread)  # type: ignore[misc]
        CONTENDERS["locater-auto"] = replace(CONTENDERS["locater-auto"], strengths=(change,))
        with tempfile.TemporaryDirectory() as folder:
            config, members = arena.planned("locater-auto")
            sweep(config, members, Path(folder) / "one", about={"contender": "locater-auto"}, group_size=45)
            at = read_arena(folder).groupby("learning_rate")
        found = [at.loss.mean(), at.loss.max() - at.loss.min(), at.max_logit.max(), at.entropy.min()]
        cells = [
            f"{rate:g} {a:.4f} ({b:.3f}) {c:.0f} {d:.2f}" for rate, a, b, c, d in zip(at.groups, *found, strict=True)
        ]
        print(f"{bounds}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
