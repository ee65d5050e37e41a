"""The steps of an optimizer: what runs around them, and how many were taken."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.optim import Optimizer

from locater.errors import LocaterError

__all__ = ["Clock", "Schedule", "around_step"]

Schedule: TypeAlias = Callable[[int], float]
"""Gives the strength factor after so many steps."""


_STEPS = "_locater_steps"  # an attribute of the optimizer; not in its state, nor in a copy of it


@dataclass(eq=False, frozen=True)
class _Around:
    before: Callable[[], None] | None
    after: Callable[[], None] | None
    once: bool
    innermost: bool


def around_step(
    optimizer: Optimizer,
    undo: ExitStack,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
    once: bool = False,
    innermost: bool = False,
) -> None:
    """Runs `before` when the gradients of a step are there, and `after` when the step is done.

    With a closure, `before` runs after each of its evaluations, or only after the first of a step (`once`). `innermost`
    functions run closest to the optimizer's own work, in whatever order functions were added. Where a step calls
    super().step(), torch runs hooks around both; only the outer one counts.
    """
    steps = vars(optimizer).get(_STEPS)  # stored on the optimizer, and so freed with it
    if steps is None:
        steps = vars(optimizer)[_STEPS] = _Steps(optimizer)
    added = _Around(before, after, once, innermost)
    steps.around.append(added)
    undo.callback(steps.remove, added)


class _Steps:
    """All that runs around the steps of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.around: list[_Around] = []
        self._hooks = ExitStack()
        self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
        self._hooks.callback(vars(optimizer).pop, _STEPS)

    def remove(self, one: _Around) -> None:
        self.around.remove(one)
        if not self.around:
            self._hooks.close()

    def _before(self, *, again: bool) -> None:
        for one in sorted(self.around, key=lambda one: one.innermost):
            if one.before is not None and not (one.once and again):
                one.before()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_inside_another(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args starts with the optimizer itself
        if closure is None:
            self._before(again=False)
            return None
        again = False

        def evaluate() -> Any:
            nonlocal again
            loss = closure()
            self._before(again=again)
            again = True
            return loss

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, evaluate, *args[2:]), rest

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not _is_inside_another(optimizer):
            for one in sorted(self.around, key=lambda one: not one.innermost):
                if one.after is not None:
                    one.after()


def _is_inside_another(optimizer: Optimizer) -> bool:
    """Whether the step whose hooks are running was called from another step of the same optimizer."""
    if sum("step" in vars(kind) for kind in type(optimizer).__mro__) <= 2:  # of Optimizer and of one class
        return False
    steps, frame = 0, sys._getframe()  # not a counter, which a step that raises would leave wrong
    while frame.f_back is not None and steps < 2:
        frame = frame.f_back
        runs_hooks = frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == Optimizer.__module__
        steps += runs_hooks and frame.f_locals.get("self") is optimizer
    return steps == 2


class Clock:
    """Counts steps. Of several optimizers, the one that took most counts."""

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
        """The schedule's value now; 1 without a schedule."""
        if self.schedule is None:
            return 1.0
        value = float(self.schedule(self.step))
        if not 0 <= value < math.inf:
            raise LocaterError(f"the schedule gives {value:g} at step {self.step}: it must be finite and not negative")
        return value

    def join(self, optimizer: Optimizer) -> None:
        """Adds an optimizer, whose steps count from now on."""
        self._taken[id(optimizer)] = self.step - self._from

    def tick(self, optimizer: Optimizer) -> None:
        """After a step of the optimizer, unless GradScaler made it skip."""
        overflow = getattr(optimizer, "found_inf", None)
        # reading found_inf waits for the device; only a schedule needs an exact count
        if self.schedule is None or overflow is None or not bool(overflow):
            self._taken[id(optimizer)] += 1
