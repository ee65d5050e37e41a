"""Functions replaced in their place by ones that also tell who listens, and put back when nobody does."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from locater.measure._compiling import untraced

__all__ = ["Listener", "tap"]

Arguments: TypeAlias = Mapping[str, Any]
Owner: TypeAlias = MutableMapping[str, Any] | type


@dataclass(frozen=True, eq=False)
class Listener:
    """Asked with the first argument of each call, a module; told all of them, by name, after those it wants."""

    wants: Callable[[Any], bool]
    tell: Callable[[Arguments], None]


_lock = threading.RLock()
_taps: dict[tuple[int, str], _Tap] = {}


def tap(owner: Owner, name: str, original: Callable[..., Any], listener: Listener) -> Callable[[], None]:
    """Lets `listener` hear of each call of `owner[name]` (`owner.name` of a class).

    `original` is what a call does: `owner` itself need not hold the name, as where a local table shadows a global one.
    Returns what ends the listening. The first to listen changes the owner and the last to end restores it, in whatever
    order they come and go.
    """
    with _lock:
        found = _taps.get((id(owner), name))
        if found is None:
            found = _taps[id(owner), name] = _Tap(owner, name, original)
        # a new list each time: a call in progress goes on with the old one
        found.listeners = [*found.listeners, listener]

    def end() -> None:
        with _lock:
            found.listeners = [one for one in found.listeners if one is not listener]
            if not found.listeners and _taps.get((id(owner), name)) is found:
                del _taps[id(owner), name]
                found.restore()

    return end


class _Tap:
    def __init__(self, owner: Owner, name: str, original: Callable[..., Any]) -> None:
        self.owner, self.name = owner, name
        self.listeners: list[Listener] = []
        entries = vars(owner) if isinstance(owner, type) else owner
        self.held, self.before = name in entries, entries.get(name)

        tell = untraced(self._tell)

        @functools.wraps(original)
        def told(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            tell(original, args, kwargs)
            return result

        self.told = told
        self._put(told)

    def _tell(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0] if args else next(iter(kwargs.values()), None)
        for listener in self.listeners:
            if listener.wants(first):
                listener.tell(_named(original, args, kwargs))

    def _put(self, function: Any) -> None:
        if isinstance(self.owner, type):
            setattr(self.owner, self.name, function)
        else:
            self.owner[self.name] = function

    def restore(self) -> None:
        entries = vars(self.owner) if isinstance(self.owner, type) else self.owner
        if entries.get(self.name) is not self.told:
            return  # somebody replaced it after us: theirs stays, and ours passes calls on
        if self.held:
            self._put(self.before)
        elif isinstance(self.owner, type):
            delattr(self.owner, self.name)
        else:
            del self.owner[self.name]


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, those of **kwargs among the others."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    return bound
