"""What the callbacks of both trainers share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from locater.measure.alarms import Alarm, Alarms
from locater.measure.logs import AttentionLog


class LogCallback:
    """An `AttentionLog`, whose arguments it takes, that is open while a trainer runs."""

    def __init__(self, *log: Any, alarms: Alarms | Callable[[Alarm], object] | None = None, **options: Any) -> None:
        inspect.signature(AttentionLog).bind(None, *log, **options)  # an unknown one is refused now
        self._alarms = Alarms.of(alarms)
        self._log, self._options = log, {**options, "alarms": self._alarms}
        self.attention_log: AttentionLog | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """Those of the run so far, also when it is over."""
        return self._alarms.raised

    def open(self, model: Any) -> None:
        self.attention_log = AttentionLog(model, *self._log, **self._options)

    def begin(self, step: int) -> None:
        if self.attention_log is not None:
            self.attention_log.begin(step)

    def end(self) -> None:
        if self.attention_log is not None:
            self.attention_log.end()

    def close(self) -> None:
        """Leaves the model as it was found, and ends the log."""
        if self.attention_log is not None:
            self.attention_log.close()
            self.attention_log = None
