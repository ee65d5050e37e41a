"""Steps that optimizers have taken, and what a schedule makes of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from torch.optim import Optimizer

from locater.errors import LocaterError

__all__ = ["Clock", "Clocked", "Schedule"]

Schedule: TypeAlias = Callable[[int], float]


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


class Clocked:
    """One whose strength may follow a schedule."""

    _clock: Clock

    @property
    def step(self) -> int:
        """Optimizer steps taken, which a schedule is given."""
        return self._clock.step

    @step.setter
    def step(self, step: int) -> None:
        self._clock.step = step

    @property
    def schedule(self) -> Schedule | None:
        return self._clock.schedule
