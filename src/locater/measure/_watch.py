"""One attention module under observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from locater.hooks import AttentionSite, Call
from locater.measure._moments import Moments
from locater.measure._tally import HeadTally, TokenTally

__all__ = ["Keep", "Watch"]

Keep: TypeAlias = Callable[[AttentionSite, Sequence[Call], Tensor | None], None]
"""Also told of each measured call, with the hidden states that entered the module."""


class Watch:
    """One module, what is kept of it, and what is known of the call in progress."""

    def __init__(self, place: AttentionSite, keep: Keep | None = None, covariances: int | None = None) -> None:
        self.place, self.keep = place, keep
        self._covariances = covariances
        self.reset()
        self.heard = False  # anything at all
        self.calls = 0  # outside of the model's forwards
        self.called = False  # since the encoder layer around it was
        self.awaited = False  # a call that is to be measured has begun, and was not heard yet
        self.states: Tensor | None = None  # that entered

    def reset(self) -> None:
        self.heads, self.tokens = HeadTally(), TokenTally()
        self.moments = None if self._covariances is None else Moments(self._covariances)

    def members(self) -> list[dict[str, Any]]:
        """What the rows of each member begin with; one of a model that is no stack."""
        place = self.place
        known = {"module": place.name, "layer": place.layer, "kind": place.kind}
        # the member in the module's name too: what is kept by module, as logs are, keeps members apart
        named = [{**known, "member": member, "module": f"{member}/{place.name}"} for member in place.members]
        return named or [known]

    def add(self, calls: Sequence[Call], queries: tuple[int, ...]) -> None:
        self.heard = True
        if self.keep is not None:
            self.keep(self.place, calls, self.states)
        states, self.states = self.states, None
        for call in calls:
            if 0 in call.sizes:
                continue  # a batch without a sequence, or nothing to look at
            self.heads.add(call, queries)
            if states is None:
                continue
            own = states if call.tokens is None else states.flatten(0, -2)[None, call.tokens]
            self.tokens.add(own, call.real, call.members)
            _, _, tq, tk = call.sizes
            if self.moments is not None and (tq == tk or self.place.cross):  # not those that go on from a cache
                self.moments.add(own, call.real, call.members)
