"""Alarms over a log of attention: entropy collapse, logit growth, rank collapse, each with its reason.

    log = AttentionLog(model, every=50, alarms=print)          # while it trains
    alarms_of(read_log("attention.jsonl"))                     # afterwards, by the same rule
    alarms_between(before, now)                                # of two readings: by the thresholds alone

Every attention module has alarms of its own. An alarm is raised once, when it begins. It ends when its number is well
on the good side again, and only then can it be raised anew.

entropy collapse    The heads' mean entropy share is a small part of the highest it has been, while logits are larger
                    than healthy training needs. A mean, and with logits, because single heads are sharp in healthy
                    models too: those that look one token back, at a copy, or at a sink.
logit growth        The largest logit of a head is beyond a level, and a multiple of what it was at the log's beginning.
                    Logits that are not finite raise it at once.
both                Half way to the threshold is enough where the number has doubled, or halved, against its median of
                    the last 20 logged steps.
rank collapse       The tokens that enter are nearly one and the same, and stay so. They are for a while in healthy
                    training, when a model that knows nothing yet learns how frequent words are.

What a log begins with is taken for healthy: a model that is trained further may have sharp heads and large logits.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from locater.errors import LocaterError, reason
from locater.theory import entropy_lower_bound

if TYPE_CHECKING:
    import pandas

__all__ = ["Alarm", "Alarms", "Thresholds", "alarms_between", "alarms_of"]

NEEDED = ("step", "module", "keys", "entropy_share", "max_logit", "rank_residual")

ENTROPY, LOGITS, RANK = "entropy collapse", "logit growth", "rank collapse"

_GROWTH = 2.0  # times the first logged largest logit, at least
_SUDDEN = 0.5  # of the way is enough for a number that doubled, or halved, against its median of
_MEMORY = 20  # logged steps
_WELL = 0.4  # of the way to the threshold: an alarm ends


@dataclass(frozen=True)
class Alarm:
    step: int
    kind: str  # entropy collapse, logit growth, rank collapse
    module: str
    head: int | None  # where one head is the cause
    reason: str  # a sentence with the numbers

    def __str__(self) -> str:
        return f"step {self.step}, {self.module}: {self.kind}: {self.reason}"


@dataclass(frozen=True)
class Thresholds:
    """Where alarms begin.

    The defaults are what benchmarks/alarms.py chose: twice as far as any healthy run of one half of its seeds went for
    half as long, with the patience that leads by most there. docs/measure.md has what they did on the other half.
    """

    entropy: float = 0.18  # the heads' mean entropy share, as a part of the highest it has been
    logit: float = 97.0  # the largest; the entropy's alarm needs half of it
    rank: float = 0.02  # the rank residual of the tokens that enter, as a part of the highest it has been
    patience: int = 2  # logged steps in a row, for entropy and logits
    rank_patience: int = 8  # and for the rank

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name.endswith("patience")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise LocaterError(f"{field.name} must be a {'whole ' * whole}number, got {value!r:.80}")
            if not (value >= 1 if whole else 0 < value < math.inf):
                raise LocaterError(f"{field.name} must be {'1 or more' if whole else 'positive'}, got {value!r}")


class Alarms:
    """The rule, a logged step at a time. `tell` is called with each alarm that begins; `raised` has them all."""

    def __init__(self, thresholds: Thresholds | None = None, tell: Callable[[Alarm], object] | None = None) -> None:
        self.thresholds = Thresholds() if thresholds is None else thresholds
        self.tell = tell
        self.raised: list[Alarm] = []
        self._modules: dict[str, _Module] = {}
        self._last: int | None = None

    @classmethod
    def of(cls, wish: Alarms | Callable[[Alarm], object] | None) -> Alarms:
        """An Alarms as it is, one that calls a function, or, for None, one that warns through Python's logging."""
        if isinstance(wish, Alarms):
            return wish
        if wish is not None and not callable(wish):
            raise LocaterError(f"alarms must be an Alarms, a function to call with each, or None, got {wish!r:.80}")
        return cls(tell=wish if wish is not None else logging.getLogger(__name__).warning)

    def update(self, step: int, rows: Iterable[Mapping[str, Any]]) -> list[Alarm]:
        """The alarms that begin with this step; `rows` are its lines, a mapping a module.

        A step that is not after the last one begins another run, and all before it is forgotten.
        """
        found = self._found(step, rows)
        if self.tell is not None:
            for alarm in found:
                self.tell(alarm)
        return found

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Takes the lines of a log in their order, as `update` would, without calling `tell`."""
        for step, lines in groupby(rows, key=_step):
            self._found(step, lines)

    def forget(self) -> None:
        """As new."""
        self.raised, self._modules, self._last = [], {}, None

    def _found(self, step: int, rows: Iterable[Mapping[str, Any]]) -> list[Alarm]:
        if self._last is not None and step <= self._last:
            self.forget()
        self._last = step
        found = []
        for row in rows:
            line = _Line.of(step, row)
            found += self._modules.setdefault(line.module, _Module()).update(line, self.thresholds)
        self.raised += found
        return found


def alarms_of(log: pandas.DataFrame, thresholds: Thresholds | None = None) -> list[Alarm]:
    """The alarms of a whole log, such as `read_log` gives: those that were raised while it was written."""
    alarms = Alarms(thresholds)
    alarms.recall({str(name): value for name, value in row.items()} for row in log.to_dict("records"))
    return alarms.raised


def alarms_between(
    before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]], thresholds: Thresholds | None = None
) -> list[Alarm]:
    """What has collapsed from one reading of a model to a later one, which are steps 0 and 1.

    A reading is lines as a log has them, a module each. Nothing has to last and nothing counts as sudden, as nothing
    is known of the steps between.
    """
    at = replace(thresholds or Thresholds(), patience=1, rank_patience=1)
    modules: dict[str, _Module] = {}
    found = []
    for step, rows in enumerate((before, now)):
        for row in rows:
            line = _Line.of(step, {**row, "step": step})
            found += modules.setdefault(line.module, _Module(sudden=False)).update(line, at)
    return [alarm for alarm in found if alarm.step == 1]


# ---------------------------------------------------------------------- a line


def _step(row: Mapping[str, Any]) -> int:
    missing = [name for name in NEEDED if name not in row]
    if missing:
        raise LocaterError(
            f"alarms need the columns {', '.join(NEEDED)} of an AttentionLog; missing: {', '.join(missing)}"
        )
    return int(row["step"])


@dataclass(frozen=True)
class _Line:
    step: int
    module: str
    keys: int
    share: float  # mean over heads; NaN where no query had two keys, or nothing is finite
    logits: list[float]  # the largest of each head
    rank: float  # NaN where it is not known

    @classmethod
    def of(cls, step: int, row: Mapping[str, Any]) -> _Line:
        _step(row)
        try:
            shares = [share for share in map(_number, row["entropy_share"]) if math.isfinite(share)]
            mean = sum(shares) / len(shares) if shares else math.nan
            logits = [_number(logit) for logit in row["max_logit"]]
            return cls(step, str(row["module"]), int(row["keys"]), mean, logits, _number(row["rank_residual"]))
        except (TypeError, ValueError, OverflowError) as error:
            raise LocaterError(f"a line of step {step} is no line of an AttentionLog: {reason(error)}") from error


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


# ---------------------------------------------------------------------- the rule


class _Past:
    """What a number has been: at first, at its highest, lately."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None  # and at which step
        self.highest, self.highest_at = -math.inf, 0
        self._lately: deque[float] = deque(maxlen=_MEMORY)
        self.median = math.nan  # of the logged steps before this one

    def add(self, value: float, step: int) -> None:
        if self.first is None:
            self.first = value, step
        if value > self.highest:
            self.highest, self.highest_at = value, step
        self.median = statistics.median(self._lately) if self._lately else value
        self._lately.append(value)


class _Bell:
    """Rings after so many steps in a row beyond a threshold, and stops after as many well on its good side."""

    def __init__(self) -> None:
        self.since = 0  # the first step of the row
        self._ringing = False
        self._row = 0

    def begins(self, step: int, beyond: bool, well: bool, patience: int) -> bool:
        """Whether it begins to ring with this step."""
        if not (well if self._ringing else beyond):
            self._row = 0
            return False
        if self._row == 0:
            self.since = step
        self._row += 1
        if self._row < patience:
            return False
        self._ringing, self._row = not self._ringing, 0
        return self._ringing


class _Module:
    """What is remembered of one attention module, and whether what is sudden counts."""

    def __init__(self, sudden: bool = True) -> None:
        self._sudden = sudden
        self._logit, self._share, self._rank = _Past(), _Past(), _Past()
        self._logit_bell, self._entropy_bell, self._rank_bell = _Bell(), _Bell(), _Bell()

    def update(self, line: _Line, at: Thresholds) -> list[Alarm]:
        found = (self._logits(line, at), self._entropy(line, at), self._ranks(line, at))
        return [alarm for alarm in found if alarm is not None]

    def _logits(self, line: _Line, at: Thresholds) -> Alarm | None:
        wild = [head for head, logit in enumerate(line.logits) if not math.isfinite(logit)]
        if wild:
            if not self._logit_bell.begins(line.step, beyond=True, well=False, patience=1):
                return None
            return Alarm(line.step, LOGITS, line.module, wild[0], f"the logits of head {wild[0]} are not finite")
        if not line.logits:
            return None
        past, largest, bell = self._logit, max(line.logits), self._logit_bell
        past.add(largest, line.step)
        assert past.first is not None
        began, when = past.first
        limit = max(at.logit, _GROWTH * began)
        excess = largest / limit
        sudden = self._sudden and excess > _SUDDEN and largest > past.median / _SUDDEN
        if not bell.begins(line.step, excess > 1 or sudden, excess < _WELL, at.patience):
            return None
        head = line.logits.index(largest)
        than = f"{limit:.4g}" if excess > 1 else f"half of {limit:.4g} and twice {past.median:.3g}, its median lately,"
        reason = (
            f"head {head} has a logit of {largest:.4g}, more than {than} since step {bell.since}; "
            f"the module's largest was {began:.3g} at step {when}"
        )
        return Alarm(line.step, LOGITS, line.module, head, reason)

    def _entropy(self, line: _Line, at: Thresholds) -> Alarm | None:
        if math.isnan(line.share):
            return None
        past, bell = self._share, self._entropy_bell
        past.add(line.share, line.step)
        finite = [logit for logit in line.logits if math.isfinite(logit)]
        low = _times(at.entropy * past.highest, line.share)
        large = max(finite, default=0.0) / (at.logit / 2)
        sudden = self._sudden and low > _SUDDEN and line.share < past.median * _SUDDEN
        beyond = large > 1 and (low > 1 or sudden)
        if not bell.begins(line.step, beyond, min(low, large) < _WELL, at.patience):
            return None
        steep = f"half of its median lately, {past.median:.2g}, and below {at.entropy / _SUDDEN:g}"
        part = f"{at.entropy:g}" if low > 1 else steep
        reason = (
            f"the heads' mean entropy share is {line.share:.3f}, below {part} of its highest, {past.highest:.3f} "
            f"at step {past.highest_at}, since step {bell.since}; {_allowed(line, finite)}"
        )
        return Alarm(line.step, ENTROPY, line.module, None, reason)

    def _ranks(self, line: _Line, at: Thresholds) -> Alarm | None:
        if not math.isfinite(line.rank):
            return None
        past, bell = self._rank, self._rank_bell
        past.add(line.rank, line.step)
        excess = _times(at.rank * past.highest, line.rank)
        if not bell.begins(line.step, excess > 1, excess < _WELL, at.rank_patience):
            return None
        reason = (
            f"the tokens that enter are alike, with a rank residual of {line.rank:.2g}, below {at.rank:g} of its "
            f"highest, {past.highest:.2g} at step {past.highest_at}, since step {bell.since}"
        )
        return Alarm(line.step, RANK, line.module, None, reason)


def _times(limit: float, value: float) -> float:
    """How many times below the limit."""
    return limit / max(value, 1e-30)


def _allowed(line: _Line, logits: list[float]) -> str:
    """How low logits of this size allow the entropy to be: Zhai et al.'s bound, averaged over the heads.

    If logits lie between −m and m, a key can be ahead of all others by 2m. One key ahead by so much and the others
    level is what the bound is attained by, with ν = 2m √((T−1)/T).
    """
    keys = line.keys
    if keys < 2 or not logits:
        return f"the largest logit is {max(logits, default=math.nan):.4g}"
    ahead = 2 * np.maximum(logits, 0)
    floor = float(entropy_lower_bound(ahead * math.sqrt((keys - 1) / keys), keys).mean())
    return f"logits up to {max(logits):.4g} allow {floor:.2f} of the {math.log(keys):.3g} nats of {keys} keys"
