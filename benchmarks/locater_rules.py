"""Other rules for LocAteR auto, in an arena: how fast a head may grow, how far, and what is done to its trace.

    python benchmarks/locater_rules.py [ARENA] [--steps N] [--rates X,Y] [--seeds I,J] [--set NAME=VALUE] [RULE ...]

A rule is what differs from auto's, as in growth=300:power=2:log_from=1000:limit=2. docs/arena.md has what came of some.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from locater.cli._training import changed
from locater.control.stacked import decoupled_step, ordinary_scale, within_limit
from locater.lab.arena import ARENAS, CONTENDERS, read_arena
from locater.lab.engine._method import biases
from locater.lab.engine._weight_methods import AutoLocAteR
from locater.lab.engine.methods import METHODS
from locater.lab.runs.sweep import sweep
from locater.qk import QK

AUTO = 3.0  # the limit of `within_limit`


@dataclass(frozen=True)
class Rule:
    """A head is pressed from (update / growth)^power times its first scale on."""

    growth: float = 250
    power: float = 2
    most: float = 64  # that power is at most, …
    log_from: float = 0  # … or from which update on it grows by the logarithm
    limit: float = 3  # times that is the most it may have
    always: bool = False  # pressed whatever its scale
    strength: float = 3
    trace: bool = True  # raised; auto does not where positions are rotary
    turns: bool = True  # with rotary positions, judged by all distances and not by 0 alone

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


class Ruled(AutoLocAteR):
    chosen = Rule()

    def start(self, values, seeds):
        self._rope = self._rope if self.chosen.turns else None
        super().start(values, seeds)

    def _stepped(self, qk, step, values, hold):
        rule = self.chosen
        self._updates += step[:, 0, 0] > 0
        times = rule.times(self._updates)[:, None, None, None]
        ordinary, seen = (ordinary_scale(self._first, self.config.head_width**-0.5) * times).unbind(-1)
        target = torch.maximum(self._target(step), qk.trace())
        pull = step if rule.trace else torch.zeros_like(step)
        new = QK(*decoupled_step(qk, step, pull, target, None if rule.always else ordinary, self._rope))
        factor, _ = within_limit(AUTO / rule.limit * self._seen(new, values) / seen, hold)
        for bias in biases(values, self.config):
            bias *= factor[..., None]
        return new.w_q * factor[..., None, None], new.w_k * factor[..., None, None]


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
        METHODS["locater-auto"] = type("Ruled", (Ruled,), {"chosen": rule})
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
