"""A checkpoint's model as transformers would build it: its modules, on the meta device, and the names of its tensors.

So that a checkpoint is read as the live model is: the same modules, in the same order, by the same rules. No code that
comes with a checkpoint runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from locater.errors import LocaterError

__all__ = ["Stored", "skeleton"]

_MOST = 10_000  # layers of anything; a file may say any number


class _Source(Protocol):
    @property
    def names(self) -> frozenset[str]: ...

    def get(self, name: str) -> Tensor | None: ...


def skeleton(config: Mapping[str, Any], origin: str) -> nn.Module | None:
    """The model on the meta device; None where transformers is not there, or does not know the type."""
    try:
        import transformers
    except ImportError:
        return None
    kind = str(config.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        return None
    for name, value in config.items():
        if "layers" in name and isinstance(value, int) and value > _MOST:
            raise LocaterError(f"{origin}: its configuration says {name} {value}")
    try:
        settings = transformers.CONFIG_MAPPING[kind].from_dict(_with_infinities(config))
        with torch.device("meta"):
            model: nn.Module = _class(config, settings)(settings)
    except Exception as error:  # a configuration can be wrong in any way
        words = " ".join(str(error).split()) or type(error).__name__  # some say it in their second line
        raise LocaterError(f"{origin}: its configuration builds no model: {words[:300]}") from error
    return model.eval()


def _with_infinities(value: Any) -> Any:
    """Numbers that JSON does not have are written as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_infinities(each) for name, each in value.items()}
    return [_with_infinities(each) for each in value] if isinstance(value, list) else value


def _class(config: Mapping[str, Any], settings: Any) -> Any:
    """The class that the checkpoint was saved from, or that of its type."""
    import transformers

    named = config.get("architectures")
    for name in named if isinstance(named, list) else []:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    found = transformers.MODEL_MAPPING.get(type(settings), None)
    if found is None:
        raise LocaterError(f"transformers has no model of type {settings.model_type!r}, only its configuration")
    return found[0] if isinstance(found, tuple) else found


class Stored:
    """The tensors of a checkpoint under the names of a model, renamed and converted as transformers does in loading."""

    def __init__(self, checkpoint: _Source, model: Any) -> None:
        self._checkpoint, self._model = checkpoint, model
        self._keys: dict[str, list[tuple[str, str | None]]] = {}  # a tensor's: those it is made of, by which pattern
        self._made_with: dict[str, str] = {}  # a tensor that is made together with another
        self._converters: dict[str, Any] = {}
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError:  # transformers 4
            self._by_prefix(dict(model.named_parameters(remove_duplicate=False)))
            return
        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        expected, base = model.state_dict(), model.base_model_prefix
        for key in sorted(checkpoint.names):
            name, pattern = rename_source_key(key, renamings, converters, base, expected)
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], base_model_prefix=base, meta_state_dict=expected)
            self._keys.setdefault(name, []).append((key, pattern))
            if pattern is not None:
                first, *others = self._converters[pattern].target_patterns
                self._made_with |= {name.replace(first, other): name for other in others}

    def _by_prefix(self, expected: Mapping[str, Any]) -> None:
        prefix = f"{self._model.base_model_prefix}."
        for key in self._checkpoint.names:
            for name in (key, key.removeprefix(prefix), prefix + key):
                if name in expected:
                    self._keys.setdefault(name, []).append((key, None))
                    break

    def get(self, name: str) -> Tensor | None:
        first = self._made_with.get(name, name)
        keys = self._keys.get(first)
        if not keys:
            return None
        if keys[0][1] is None:
            return self._checkpoint.get(keys[0][0])
        converter = copy.deepcopy(self._converters[keys[0][1]])
        for key, pattern in keys:
            converter.add_tensor(first, key, pattern, self._checkpoint.get(key))
        made: Any = converter.convert(first, model=self._model, config=self._model.config).get(name)
        tensor: Tensor | None = made[0] if isinstance(made, list) else made
        return tensor
