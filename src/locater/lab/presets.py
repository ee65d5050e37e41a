"""What `train` and `sweep` know by name."""

from __future__ import annotations

from dataclasses import dataclass

from locater.errors import LocaterError
from locater.lab.config import PAPER_KAPPAS, Config, ModelConfig

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True)
class Preset:
    """A configuration, the learning rate that goes with it, and the κ₂ a sweep over it takes."""

    about: str
    config: Config
    learning_rate: float
    kappas: tuple[float | None, ...] = (None, *PAPER_KAPPAS)


def _paper(width: int, layers: int) -> Preset:
    return Preset(
        f"Section 7 and Appendix D: WikiText-2, d = {width}, {layers} layer{'s' if layers > 1 else ''}",
        Config(model=ModelConfig(width=width, ffn=width, layers=layers), data="wikitext-2"),
        learning_rate=2.5e-5 if width == 128 else 1e-4,
    )


PRESETS: dict[str, Preset] = {
    **{f"paper-d{width}-l{layers}": _paper(width, layers) for width in (128, 32) for layers in (1, 3, 6)},
    "laptop": Preset(
        "the embedded corpus, d = 64, one layer: minutes on two cores",
        Config(
            model=ModelConfig(width=64, ffn=64, layers=1, tokens=64),
            vocabulary=4096,
            batch=32,
            steps=600,
            record_every=50,
            checkpoint_every=200,
            probe_blocks=128,
            valid_blocks=256,
        ),
        learning_rate=2e-3,
        kappas=(None, 1.0, 100.0),
    ),
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise LocaterError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
