"""A configuration of transformers whose numbers are checked as they are read: `Fields`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from locater.errors import LocaterError, reason
from locater.theory.depth import MOST_LAYERS

__all__ = ["Fields"]

_ACTIVATIONS = {
    "relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "silu": "silu", "swish": "silu", "quick_gelu": "quick_gelu", "tanh": "tanh",
}  # fmt: skip
_LARGEST, _WIDEST = 1 << 24, 1 << 12  # of any width, and of a head's; a file may say any number
_FULL, _SLIDING = "full_attention", "sliding_attention"  # as `layer_types` has them


@dataclass(frozen=True)
class Fields:
    """Fields by the names that most classes have; messages have the class's own."""

    config: Any
    origin: str

    def __getitem__(self, name: str) -> Any:
        return getattr(self.config, name, None)

    def fail(self, words: str) -> NoReturn:
        raise LocaterError(f"{self.origin}: {words}")

    def refuse(self, name: str, why: str) -> None:
        if self[name]:
            self.fail(f"{name} {why}")

    def whole(self, name: str, most: int = _LARGEST) -> int:
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            own = self.config.attribute_map.get(name, name)
            self.fail(f"{own} must be a whole number from 1 to {most:,}, got {value!r:.60}")
        return value

    @property
    def width(self) -> int:
        return self.whole("hidden_size")

    @property
    def heads(self) -> int:
        return self.whole("num_attention_heads")

    @property
    def layers(self) -> int:
        return self.whole("num_hidden_layers", MOST_LAYERS)

    def number(self, name: str, most: float = 1e6) -> float:
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most:
            self.fail(f"{name} must be a positive number, got {value!r:.60}")
        return float(value)

    def std(self, name: str = "initializer_range") -> float:
        """As transformers reads it: nothing means 0.02. With 0 some classes start from 0.02 and some from zero."""
        return 0.02 if self[name] is None else self.number(name)

    def eps(self, name: str) -> float:
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.fail(f"{name} must be a number from 0 to 1, got {value!r:.60}")
        return float(value)

    def activation(self, name: str) -> str:
        value = self[name]
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            self.fail(f"{name} {value!r:.60} is not known here, only {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def sides(self, name: str) -> tuple[int, int]:
        """Of an image or a patch: a number, or two."""
        value = self[name] if isinstance(self[name], list | tuple) else [self[name]] * 2
        if len(value) != 2 or any(isinstance(v, bool) or not isinstance(v, int) or not 1 <= v < 2**20 for v in value):
            self.fail(f"{name} must be a whole number from 1, or two, got {self[name]!r:.60}")
        return value[0], value[1]

    # ------------------------------------------------------------------ attention

    def head_width(self, *, own: bool = False) -> int:
        """`own`: whether the class reads head_dim. What is null there breaks it, unless the configuration fills it."""
        width, heads = self.width, self.heads
        if own and hasattr(self.config, "head_dim"):
            return self.whole("head_dim", _WIDEST)
        if width % heads:
            self.fail(f"a width of {width} is not {heads} heads of one width")
        if width // heads > _WIDEST:
            self.fail(f"heads must be at most {_WIDEST:,} wide, got {width // heads:,}")
        return width // heads

    @property
    def causal(self) -> bool:
        """Of a class whose mask is causal by itself."""
        return bool(getattr(self.config, "is_causal", True))

    def window(self) -> int | None:
        """Of a class that has one in all layers or in none."""
        if self["sliding_window"] is None:
            return None
        found = self.whole("sliding_window")
        if found < 2:
            self.fail(f"a sliding_window of {found} leaves attention one key, itself")
        return found

    def windows(self) -> tuple[int | None, int | None]:
        """Of a class with `layer_types`: the window of all layers; the tokens up to which layers are alike."""
        kinds = set(self.layer_types())
        if _SLIDING not in kinds:
            return None, None
        if (found := self.window()) is None:
            self.fail("layer_types have a sliding_attention, and sliding_window is null")
        return (found, None) if len(kinds) == 1 else (None, found)

    def layer_types(self) -> list[str]:
        kinds = self["layer_types"] or [_FULL] * self.layers
        if not set(kinds) <= {_FULL, _SLIDING}:
            self.fail(f"layer_types other than {_FULL} and {_SLIDING} are not known here")
        return list(kinds)

    def sliding(self) -> list[bool]:
        return [kind == _SLIDING for kind in self.layer_types()]

    # ------------------------------------------------------------------ rotary embeddings

    def rotary(
        self, width: int, *, partial: bool = False, layer_type: str | None = None
    ) -> tuple[tuple[float, ...], float]:
        """Angles a position of each pair of coordinates, and the factor on the logits that some variants have.

        `partial`: whether the class can rotate a part of the coordinates only; Llama's rotates all of them whatever
        the factor says, and fails where another variant heeds it. `layer_type`: that of a class whose layers differ.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        given: dict[str, Any] = self["rope_parameters"] or {}
        if layer_type is not None:
            given = given.get(layer_type) or {}
        elif any(isinstance(value, Mapping) for value in given.values()):
            self.fail("rope_parameters by type of layer are not known of this class")
        share = self._rope_number(given, "partial_rotary_factor", 1.0, 0.0, 1.0)
        base = self._rope_number(given, "rope_theta", 10_000.0, math.ulp(0.0), 1e308)
        kind, factor = given.get("rope_type", "default"), 1.0
        if kind == "default":
            turned = int(width * share) // 2 * 2 if partial else width
            rates = base ** (-np.arange(0, turned, 2) / max(1, turned))
        else:
            by_type = {} if layer_type is None else {"layer_type": layer_type}
            try:
                made, on_both = ROPE_INIT_FUNCTIONS[kind](self.config, "cpu", **by_type)
                rates, factor = made.double().numpy(), float(on_both) ** 2
            except Exception as error:
                raise LocaterError(f"{self.origin}: rope_parameters cannot be read: {reason(error)}") from error
        if not (np.isfinite(rates).all() and 0 < factor < math.inf):
            self.fail("rope_parameters cannot be read: they make angles or a factor that are no numbers")
        if not partial and 2 * len(rates) != width:
            self.fail(f"rope_parameters rotate {2 * len(rates)} of a head's {width} coordinates, and the class all")
        if factor != 1 and 2 * len(rates) < width:
            self.fail("rope_parameters scale a part of the coordinates only, which is not known here")
        return tuple(rates.tolist()), factor

    def _rope_number(self, given: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
        value = given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            limit = f"number from 0 to {most:g}" if least == 0 else "positive number"
            self.fail(f"{name} must be a {limit}, got {value!r:.60}")
        return float(value)
