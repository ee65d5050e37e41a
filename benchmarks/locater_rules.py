"""Other rules for LocAteR auto, in an arena: how fast a head may grow, how far, and what is done to its trace.

    python benchmarks/locater_rules.py [ARENA] [--steps N] [--rates X,Y] [--seeds I,J] [--set NAME=VALUE] [RULE ...]

A rule is what differs from auto's, as in growth=300:power=2:log_from=1000:limit=2. docs/rivals.md has some results.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from locater.cli._training import changed
from locater.control.heads import Heads
from locater.control.rules.decoupled import Decoupled, baseline_scale, decoupled_step, limit_factors
from locater.lab.arena import ARENAS, CONTENDERS, read_arena
from locater.lab.engine.methods import METHODS, AutoLocAteR
from locater.lab.runs.sweep import sweep

LIMIT = 3.0  # of `limit_factors`


@dataclass(frozen=True)
class Rule:
    """A head is shrunk from (update / growth)^power times its initial scale on."""

    growth: float = 250
    power: float = 2
    most: float = 64  # that power is at most, …
    log_from: float = 0  # … or from which update on it grows by the logarithm
    limit: float = 3  # times that is the most it may have
    always: bool = False  # shrunk whatever its scale
    strength: float = 3
    trace: bool = True  # raised; auto does not where positions are rotary
    offsets: bool = True  # with rotary positions, judged by all offsets and not by 0 alone

    @classmethod
    def of(cls, words: str) -> Rule:
        given = dict(word.split("=") for word in words.split(":"))
        kinds = {field.name: bool if field.type == "bool" else float for field in fields(cls)}
        return cls(**{name: kinds[name](float(value)) for name, value in given.items()})

    def times(self, update: Tensor) -> Tensor:
        if not self.log_from:
            return ((update / self.growth) ** self.power).clamp(1, self.most)
        grown = (update.clamp(max=self.log_from) / self.growth) ** self.power
        return (grown * (1 + self.power * (update / self.log_from).clamp(min=1).log())).clamp(min=1)

    def start(self, heads: Heads) -> Tensor:
        return Decoupled().start(self._judged(heads))

    def step(self, heads, initial, update, rates, strength, factor) -> Heads:
        """As `Decoupled.step`, with these settings."""
        heads, size = self._judged(heads), rates[0] * strength * factor
        baselines = baseline_scale(initial, heads.logit_scale) * self.times(update)
        baseline, effective = baselines.unbind(-1)
        target = torch.maximum(torch.full_like(size, 2 / heads.logit_scale), heads.qk.trace())
        pull = size if self.trace else torch.zeros_like(size)
        moved = decoupled_step(heads.qk, size, pull, target, None if self.always else baseline, heads.rope)
        new = heads.with_weights(*moved)
        return new.scaled(*limit_factors(LIMIT / self.limit * new.effective_scale() / effective, factor))

    def _judged(self, heads: Heads) -> Heads:
        return heads if self.offsets else replace(heads, rope=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arena", nargs="?", default="laptop", choices=ARENAS)
    parser.add_argument(
        "rules", nargs="*", default=["growth=250", "growth=50:power=1:most=1e9:limit=4", "most=1:limit=4"]
    )
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
    print("rule: at every learning rate the mean loss in nats, how far seeds are apart, largest logit, lowest entropy")
    for words in given.rules:
        rule = Rule.of(words)
        METHODS["locater-auto"] = type("Ruled", (AutoLocAteR,), {"rule": rule})
        CONTENDERS["locater-auto"] = replace(CONTENDERS["locater-auto"], strengths=(rule.strength,))
        with tempfile.TemporaryDirectory() as folder:
            config, members = arena.planned("locater-auto")
            sweep(config, members, Path(folder) / "one", about={"contender": "locater-auto"}, group_size=45)
            at = read_arena(folder).groupby("learning_rate")
        found = [at.loss.mean(), at.loss.max() - at.loss.min(), at.max_logit.max(), at.entropy.min()]
        cells = [
            f"{rate:g} {a:.4f} ({b:.3f}) {c:.0f} {d:.2f}" for rate, a, b, c, d in zip(at.groups, *found, strict=True)
        ]
        print(f"{words}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
