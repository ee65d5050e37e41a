"""Callbacks that are told apart from those of the same name for the other trainer."""

from __future__ import annotations

from typing import Any, ClassVar

from locater.errors import LocaterError

__all__ = ["ForHuggingFace", "ForLightning"]


class _ForOneTrainer:
    """A base of callbacks that the other trainer cannot take: it is refused at the first attribute it asks for."""

    _trainer: ClassVar[str]
    _other: ClassVar[str]
    _other_module: ClassVar[str]
    _other_asks: ClassVar[tuple[str, ...]]

    def __getattr__(self, name: str) -> Any:
        if name not in self._other_asks:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        ours = next(base for base in type(self).__mro__ if base.__module__.startswith("locater."))
        package = ours.__module__.rpartition(".")[0]
        raise LocaterError(
            f"{ours.__module__}.{ours.__name__} is for {self._trainer} Trainer; for {self._other}: "
            f"from {package}.{self._other_module} import {ours.__name__}"
        )


class ForHuggingFace(_ForOneTrainer):
    _trainer, _other, _other_module = "Hugging Face's", "Lightning's", "lightning"
    _other_asks = ("setup", "state_key", "state_dict")


class ForLightning(_ForOneTrainer):
    _trainer, _other, _other_module = "Lightning's", "Hugging Face's", "hf"
    _other_asks = ("on_init_end", "on_train_begin")
