"""Functions replaced by ones that also call hooks, and restored when the last hook is removed."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any, TypeAlias

from locater.hooks._compiling import untraced

Owner: TypeAlias = MutableMapping[str, Any] | type
Arguments: TypeAlias = Mapping[str, Any]
Hook: TypeAlias = Callable[[Any, Callable[[], Arguments], Any], Any]
"""Called after a call with the module, what gives the call's arguments by name, and its result."""

_lock = threading.RLock()
_patches: dict[tuple[int, str], Patch] = {}


def patch(owner: Owner, name: str, original: Callable[..., Any]) -> Patch:
    """The patch of `owner[name]` (`owner.name` of a class), made if there is none.

    `original` is the function to call: `owner` itself need not hold the name, as a local table shadows a global one.
    """
    with _lock:
        found = _patches.get((id(owner), name))
        if found is None or not found.in_place():
            found = _patches[id(owner), name] = Patch(owner, name, original)
        return found


class Patch:
    """A function in place of another, with the hooks on its calls by module, which is the first argument of each.

    Removing the last hook restores the owner, in whatever order they were added. Those of a deleted module are removed.
    """

    def __init__(self, owner: Owner, name: str, original: Callable[..., Any]) -> None:
        self.owner, self.name = owner, name
        self.instead: Callable[..., Any] | None = None  # for calls with a softcap
        # by the module's id; lists are made anew when they change: a call in progress goes on with the old one
        self._observers: dict[int, list[Hook]] = {}
        self._changers: dict[int, list[Hook]] = {}
        self._users = self._replacements = 0
        # Compiled code is compiled anew when what it traced changes; of observers that is only whether there are any.
        self._observed = self._changed = False
        observe = untraced(self._observe)
        entries = self._entries()
        self._held, self._before = name in entries, entries.get(name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            compute = original if self.instead is None or kwargs.get("softcap") is None else self.instead
            result = compute(*args, **kwargs)
            if self._changed:
                result = self._change(original, args, kwargs, result)
            if self._observed:
                observe(original, args, kwargs, result)
            return result

        self.patched = patched
        self._put(patched)

    # ------------------------------------------------------------------ adding hooks

    def observe(self, module: Any, hook: Hook, undo: ExitStack) -> None:
        """Adds a hook on the module's calls. What it returns is ignored, and torch.compile does not trace it."""
        self._add(self._observers, module, hook, undo)

    def change(self, module: Any, hook: Hook, undo: ExitStack) -> None:
        """Adds a hook that returns the results of the module's calls."""
        self._add(self._changers, module, hook, undo)

    def replace(self, module: Any, instead: Callable[..., Any], undo: ExitStack) -> None:
        """As long as the module exists, calls with a softcap are computed by another function, of any module."""

        def put_back() -> None:
            self._replacements -= 1
            self.instead = self.instead if self._replacements else None

        with _lock:
            self._replacements += 1
            self.instead = instead
            self._keep(module, put_back, undo)

    def in_place(self) -> bool:
        """Whether calls are patched; other code may have wrapped the patch, or restored what was there before."""
        function = self._entries().get(self.name)
        while function is not None and function is not self.patched:
            function = getattr(function, "__wrapped__", None)
        return function is not None

    # ------------------------------------------------------------------ calls

    def _change(self, original: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        module = _first(args, kwargs)
        for hook in self._changers.get(id(module), ()):
            result = hook(module, functools.partial(_named, original, args, kwargs), result)
        return result

    def _observe(self, original: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
        module = _first(args, kwargs)
        for hook in self._observers.get(id(module), ()):
            hook(module, functools.partial(_named, original, args, kwargs), result)

    # ------------------------------------------------------------------ the owner

    def _entries(self) -> Mapping[str, Any]:
        return vars(self.owner) if isinstance(self.owner, type) else self.owner

    def _put(self, function: Any) -> None:
        if isinstance(self.owner, type):
            setattr(self.owner, self.name, function)
        else:
            self.owner[self.name] = function

    def _add(self, hooks: dict[int, list[Hook]], module: Any, hook: Hook, undo: ExitStack) -> None:
        key = id(module)

        def put(now: list[Hook]) -> None:
            hooks[key] = now
            if not now:
                del hooks[key]
            self._observed, self._changed = bool(self._observers), bool(self._changers)

        def remove() -> None:
            put([one for one in hooks[key] if one is not hook])

        with _lock:
            put([*hooks.get(key, ()), hook])
            self._keep(module, remove, undo)

    def _keep(self, module: Any, remove: Callable[[], None], undo: ExitStack) -> None:
        """Keeps the patch, and what was added to it, until undone or until the module is deleted."""
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
            if _patches.get((id(self.owner), self.name)) is self:
                del _patches[id(self.owner), self.name]
            if self._entries().get(self.name) is not self.patched:
                return  # other code wrapped the patch: it stays, and the patch passes calls on
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
