"""How a model of transformers starts, from its configuration alone: what `theory.depth_law` needs, and no weight built.

Every family's weights are drawn by transformers' `_init_weights`, which a test compares with this reader, weight by
weight. Biases start at zero and norms at one in all of them, but for what `families` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from locater.errors import LocaterError, one_line, reason, require
from locater.io import read_json
from locater.models.checkpoint import configuration
from locater.models.initial.families import FAMILIES
from locater.models.initial.fields import Fields
from locater.models.initial.start import Initial
from locater.models.pretrained import Pretrained, quiet

__all__ = ["FAMILIES", "Initial", "initial", "open_initial"]


def open_initial(name: str, revision: str | None = None) -> Initial:
    """From a config.json, a folder that has one, or a hub id; of a hub's model nothing else is fetched."""
    path = Path(name)
    if path.is_dir():
        files = [each.name for each in path.glob("*.json")]
        return initial(configuration(path, files, lambda file: read_json(path / file)), name)
    if path.is_file() and path.suffix != ".gguf":
        return initial(read_json(path), name)
    if path.suffix == ".json":
        raise LocaterError(f"{name} does not exist")
    require("transformers", "hf")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(**Pretrained.called(name, revision).files)
    except LocaterError:
        raise
    except Exception as error:  # of many libraries
        raise LocaterError(f"{name} has no configuration that can be read: {reason(error)}") from error
    return initial(config.to_dict(), name)


def initial(config: Mapping[str, Any], origin: str) -> Initial:
    """From a configuration as transformers writes it; `origin` is what messages call it."""
    kind = config.get("model_type")
    if kind is None:
        raise LocaterError(f"{origin} names no model_type, which says how a model starts")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise LocaterError(f"{origin}: how a model of type {kind!r:.60} starts is not known here, only that of {known}")
    transformers = require("transformers", "hf")
    try:
        with quiet():
            settings = transformers.CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # a configuration can be wrong in any way
        told = "a number in it is 0" if isinstance(error, ZeroDivisionError) else one_line(str(error), 300)
        raise LocaterError(f"{origin}: its configuration is none of {kind}: {told}") from error
    try:
        made = FAMILIES[kind](Fields(settings, origin))
    except LocaterError as error:
        told = str(error)
        raise LocaterError(told if told.startswith(origin) else f"{origin}: {told}") from error
    return replace(made, family=kind)
