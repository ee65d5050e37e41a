"""Functions replaced in their place by ones that also tell who listens, and put back when nobody does."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any, TypeAlias

from locater.hooks._compiling import untraced

__all__ = ["Patch", "patch"]

Owner: TypeAlias = MutableMapping[str, Any] | type
Arguments: TypeAlias = Mapping[str, Any]
Hear: TypeAlias = Callable[[Any, Callable[[], Arguments], Any], Any]
"""Told of a call once it is done: the module, what gives its arguments by name, and its result."""

_lock = threading.RLock()
_taps: dict[tuple[int, str], Patch] = {}


def patch(owner: Owner, name: str, original: Callable[..., Any]) -> Patch:
    """Ours at `owner[name]` (`owner.name` of a class), there now or from now on.

    `original` is what a call does: `owner` itself need not hold the name, as where a local table shadows a global one.
    """
    with _lock:
        found = _taps.get((id(owner), name))
        if found is None or not found.in_place():
            found = _taps[id(owner), name] = Patch(owner, name, original)
        return found


class Patch:
    """A function in its place, and who has a say in its calls, by module: the first argument of each.

    The last to leave restores the owner, in whatever order they come and go. A module that is no more has left.
    """

    def __init__(self, owner: Owner, name: str, original: Callable[..., Any]) -> None:
        self.owner, self.name = owner, name
        self.instead: Callable[..., Any] | None = None  # for calls with a softcap
        # by the module's id; lists are made anew when they change: a call in progress goes on with the old one
        self._observers: dict[int, list[Hear]] = {}
        self._changers: dict[int, list[Hear]] = {}
        self._users = self._replacements = 0
        # Observers come and go. Compiled code, which is compiled anew when what it has traced is not as it was, is to
        # know no more of them than that there are some.
        self._observed = self._changed = False
        tell = untraced(self._tell)
        entries = self._entries()
        self._held, self._before = name in entries, entries.get(name)

        @functools.wraps(original)
        def told(*args: Any, **kwargs: Any) -> Any:
            compute = original if self.instead is None or kwargs.get("softcap") is None else self.instead
            result = compute(*args, **kwargs)
            if self._changed:
                result = self._change(original, args, kwargs, result)
            if self._observed:
                tell(original, args, kwargs, result)
            return result

        self.told = told
        self._put(told)

    # ------------------------------------------------------------------ those who come

    def observe(self, module: Any, hear: Hear, undo: ExitStack) -> None:
        """Lets `hear` be told of the module's calls; what it gives is ignored, and torch.compile does not trace it."""
        self._add(self._observers, module, hear, undo)

    def change(self, module: Any, hear: Hear, undo: ExitStack) -> None:
        """Lets `hear` be told of the module's calls and give their results."""
        self._add(self._changers, module, hear, undo)

    def replace(self, module: Any, instead: Callable[..., Any], undo: ExitStack) -> None:
        """While the module is there, calls with a softcap are computed by another function, whoever makes them."""

        def put_back() -> None:
            self._replacements -= 1
            self.instead = self.instead if self._replacements else None

        with _lock:
            self._replacements += 1
            self.instead = instead
            self._keep(module, put_back, undo)

    def in_place(self) -> bool:
        """Whether calls come by here; somebody may have wrapped it, or put back what was there before."""
        function = self._entries().get(self.name)
        while function is not None and function is not self.told:
            function = getattr(function, "__wrapped__", None)
        return function is not None

    # ------------------------------------------------------------------ calls

    def _change(self, original: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        module = _first(args, kwargs)
        for hear in self._changers.get(id(module), ()):
            result = hear(module, functools.partial(_named, original, args, kwargs), result)
        return result

    def _tell(self, original: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
        module = _first(args, kwargs)
        for hear in self._observers.get(id(module), ()):
            hear(module, functools.partial(_named, original, args, kwargs), result)

    # ------------------------------------------------------------------ the place

    def _entries(self) -> Mapping[str, Any]:
        return vars(self.owner) if isinstance(self.owner, type) else self.owner

    def _put(self, function: Any) -> None:
        if isinstance(self.owner, type):
            setattr(self.owner, self.name, function)
        else:
            self.owner[self.name] = function

    def _add(self, hearers: dict[int, list[Hear]], module: Any, hear: Hear, undo: ExitStack) -> None:
        key = id(module)

        def put(hearing: list[Hear]) -> None:
            hearers[key] = hearing
            if not hearing:
                del hearers[key]
            self._observed, self._changed = bool(self._observers), bool(self._changers)

        def remove() -> None:
            put([one for one in hearers[key] if one is not hear])

        with _lock:
            put([*hearers.get(key, ()), hear])
            self._keep(module, remove, undo)

    def _keep(self, module: Any, remove: Callable[[], None], undo: ExitStack) -> None:
        """Keeps the tap in its place, and what has been added, until undone or until the module is no more."""
        self._users += 1
        leave = weakref.finalize(module, self._leave, remove)
        leave.atexit = False
        undo.callback(leave)

    def _leave(self, remove: Callable[[], None]) -> None:
        with _lock:
            remove()
            self._users -= 1
            if self._users:
                return
            if _taps.get((id(self.owner), self.name)) is self:
                del _taps[id(self.owner), self.name]
            if self._entries().get(self.name) is not self.told:
                return  # somebody replaced it after us: theirs stays, and ours passes calls on
            if self._held:
                self._put(self._before)
            elif isinstance(self.owner, type):
                delattr(self.owner, self.name)
            else:
                del self.owner[self.name]


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, those of **kwargs among the others."""
    signature = inspect.signature(function)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    return bound
