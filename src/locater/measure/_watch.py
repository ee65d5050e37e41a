"""One attention module under observation, and ears for those that call torch's functions themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.overrides import TorchFunctionMode

from locater.measure import _calls
from locater.measure._compiling import untraced
from locater.measure._moments import Moments
from locater.measure._sites import Place
from locater.measure._tally import HeadTally, TokenTally

__all__ = ["Ears", "Keep", "Watch"]

Keep: TypeAlias = Callable[[Place, Sequence[_calls.Call], Tensor | None], None]
"""Also told of each measured call, with the hidden states that entered the module."""


class Watch:
    """One module, what is kept of it, and what is known of the call in progress."""

    def __init__(self, place: Place, keep: Keep | None = None, covariances: int | None = None) -> None:
        self.place, self.keep = place, keep
        self._covariances = covariances
        self.reset()
        self.heard = False  # anything at all
        self.calls = 0  # outside of the model's forwards
        self.called = False  # since the encoder layer around it was
        self.states: Tensor | None = None  # that entered
        self.ears: list[Ears | None] = []

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

    def add(self, calls: Sequence[_calls.Call], queries: tuple[int, ...]) -> None:
        self.heard = True
        if self.keep is not None:
            self.keep(self.place, calls, self.states)
        states, self.states = self.states, None
        for call in calls:
            self.heads.add(call, queries)
            if states is None:
                continue
            own = states if call.tokens is None else states.flatten(0, -2)[None, call.tokens]
            self.tokens.add(own, call.real, call.members)
            _, _, tq, tk = call.sizes
            if self.moments is not None and (tq == tk or self.place.cross):  # not those that go on from a cache
                self.moments.add(own, call.real, call.members)


class Ears(TorchFunctionMode):
    """Hears the first softmax, or scaled_dot_product_attention, while a module runs."""

    def __init__(self, watch: Watch, queries: tuple[int, ...]) -> None:
        super().__init__()
        self._watch, self._queries, self.heard = watch, queries, False
        self._listen = untraced(self._hear)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("softmax", "scaled_dot_product_attention"):
            self._listen(name, args, kwargs)
        return result

    def _hear(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.heard:
            return
        if name == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            logits = self._logits(args[0] if args else kwargs["input"], dim)
            if logits is None:
                return
            call = _calls.of_logits(logits, cross=self._watch.place.cross)
        else:
            call = _calls.of_sdpa(_SDPA.bind(*args, **kwargs).arguments)
        self.heard = True
        self._watch.add([call], self._queries)

    def _logits(self, x: Tensor, dim: int | None) -> Tensor | None:
        """What softmax was given as (B, H, Tq, Tk), if it is that, which the states that entered tell."""
        states = self._watch.states
        if dim not in (-1, x.ndim - 1) or x.ndim not in (3, 4):
            return None
        if x.ndim == 3:  # (B·H, Tq, Tk)
            if states is None or states.ndim != 3 or len(x) % len(states):
                return None
            x = x.unflatten(0, (len(states), -1))
        if states is not None and states.ndim == 3 and (x.shape[0], x.shape[2]) != states.shape[:2]:
            return None
        return x if self._watch.place.cross or x.shape[2] <= x.shape[3] else None


def _sdpa_signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None: ...


_SDPA = inspect.signature(_sdpa_signature)
