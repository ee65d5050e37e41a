"""What is recorded of one attention module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from locater.errors import LocaterError
from locater.hooks import AttentionSite, Call, first_head
from locater.measure._moments import Moments
from locater.measure._split import SplitRecorder
from locater.measure._tally import HeadTally, TokenTally


class SiteRecorder:
    """Statistics of the heads of one module, and of the tokens that enter it."""

    def __init__(
        self,
        site: AttentionSite,
        queries: tuple[int, ...],
        covariances: int | None = None,
        by_position: bool = False,
        predict: int | None = None,
    ) -> None:
        self.site = site
        self._queries, self._covariances, self._by_position, self._predict = queries, covariances, by_position, predict
        self.reset()

    def reset(self) -> None:
        self.heads, self.tokens = HeadTally(self._queries, self._by_position), TokenTally()
        self.first_head = 0  # of those this rank computes
        self.moments = None if self._covariances is None else Moments(self._covariances)
        predicted = self._predict is not None and not self.site.cross
        self.split = SplitRecorder(self.site, self._queries, self._predict) if predicted else None
        self.not_split: LocaterError | None = None  # why what came by cannot be predicted

    def members(self) -> list[dict[str, Any]]:
        """The first columns of the rows of each member; one of a model that is no stack."""
        site = self.site
        columns = {"module": site.name, "layer": site.layer, "kind": site.kind}
        # the member in the module's name too: what is kept by module, as logs are, keeps members apart
        named = [{**columns, "member": member, "module": f"{member}/{site.name}"} for member in site.members]
        return named or [columns]

    def add(self, calls: Sequence[Call], states: Tensor | None) -> None:
        if self.split is not None and self.not_split is None:
            try:
                self.split.add(calls, states)
            except LocaterError as error:
                self.not_split = error  # raised where a prediction is asked for: the rest is measured all the same
        for call in calls:
            if 0 in call.sizes:
                continue  # a batch without a sequence, or without a key
            self.heads.add(call)
            if self.site.way != "stack":
                self.first_head = first_head(self.site.module, call.sizes[1])
            if states is None:
                continue
            own = states if call.tokens is None else states.flatten(0, -2)[None, call.tokens]
            self.tokens.add(own, call.real, call.members)
            _, _, tq, tk = call.sizes
            if self.moments is not None and (tq == tk or self.site.cross):  # not those that go on from a cache
                self.moments.add(own, call.real, call.members)
