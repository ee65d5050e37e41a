"""The steps of an optimizer: what runs around them, and how many were taken."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

from torch.optim import Optimizer

from locater.errors import LocaterError

__all__ = ["Clock", "Schedule", "around_step"]

Schedule: TypeAlias = Callable[[int], float]
"""Gives the strength factor after so many steps."""


def around_step(
    optimizer: Optimizer,
    undo: ExitStack,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
    once: bool = False,
) -> None:
    """Runs `before` when the gradients of a step are there, and `after` when the step is done.

    With a closure, `before` runs after each of its evaluations, or after the first of a step (`once`). Of a step that
    calls that of the class it inherits from, both of which torch runs hooks around, the outer one counts.
    """

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert before is not None
        if _is_inside_another(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args starts with the optimizer itself
        if closure is None:
            before()
            return None
        done = False

        def evaluate() -> Any:
            nonlocal done
            loss = closure()
            if not (once and done):
                before()
            done = True
            return loss

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, evaluate, *args[2:]), rest

    if before is not None:
        undo.callback(optimizer.register_step_pre_hook(before_step).remove)

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        assert after is not None
        if not _is_inside_another(optimizer):
            after()

    if after is not None:
        undo.callback(optimizer.register_step_post_hook(after_step).remove)


def _is_inside_another(optimizer: Optimizer) -> bool:
    """Whether the step whose hooks are running was called by another step of the same optimizer."""
    if sum("step" in vars(kind) for kind in type(optimizer).__mro__) <= 2:  # Optimizer's own, and one
        return False
    steps, frame = 0, sys._getframe()  # no count is kept, which a step that fails would leave behind
    while frame.f_back is not None and steps < 2:
        frame = frame.f_back
        runs_hooks = frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == Optimizer.__module__
        steps += runs_hooks and frame.f_locals.get("self") is optimizer
    return steps == 2


class Clock:
    """Counts steps; of several optimizers that step together, those of the one that took most."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        if schedule is not None and not callable(schedule):
            raise LocaterError(f"schedule must be a function of the number of steps taken, got {schedule!r:.80}")
        self.schedule = schedule
        self._from = 0
        self._taken: Counter[int] = Counter()  # since then, by optimizer

    @property
    def step(self) -> int:
        return self._from + max(self._taken.values(), default=0)

    @step.setter
    def step(self, step: int) -> None:
        self._from = int(step)
        self._taken.clear()

    def factor(self) -> float:
        """What the schedule gives now, 1 without one."""
        if self.schedule is None:
            return 1.0
        value = float(self.schedule(self.step))
        if not 0 <= value < math.inf:
            raise LocaterError(f"the schedule gives {value:g} at step {self.step}: it must be finite and not negative")
        return value

    def join(self, optimizer: Optimizer) -> None:
        """One more, which counts from now on."""
        self._taken[id(optimizer)] = self.step - self._from

    def tick(self, optimizer: Optimizer) -> None:
        """After a step of the optimizer, unless GradScaler made it skip."""
        overflow = getattr(optimizer, "found_inf", None)
        # only a schedule has to know exactly whether the step counts, so only then is it worth waiting for the device
        if self.schedule is None or overflow is None or not bool(overflow):
            self._taken[id(optimizer)] += 1
