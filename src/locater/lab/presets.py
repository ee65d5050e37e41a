"""What `train` and `sweep` know by name."""

from __future__ import annotations

from dataclasses import dataclass

from locater.errors import LocaterError
from locater.lab.arena import ARENAS
from locater.lab.cause import Design, design
from locater.lab.config import PAPER_KAPPAS, Config, ModelConfig

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True)
class Preset:
    """A configuration, the learning rate that goes with it, and what a sweep over it trains: κ₂, or a design."""

    about: str
    config: Config
    learning_rate: float
    kappas: tuple[float | None, ...] = (None, *PAPER_KAPPAS)
    design: Design | None = None
    seeds: tuple[int, ...] = (0,)


def _paper(width: int, layers: int) -> Preset:
    return Preset(
        f"Section 7 and Appendix D: WikiText-2, d = {width}, {layers} layer{'s' if layers > 1 else ''}",
        Config(model=ModelConfig(width=width, ffn=width, layers=layers), data="wikitext-2"),
        learning_rate=2.5e-5 if width == 128 else 1e-4,
    )


_FIVE = (0, 1, 2, 3, 4)


def _cause(layers: int, norm: str, levels: Design, about: str, steps: int = 50_000) -> Preset:
    paper = _paper(128, layers)
    config = paper.config.changed(norm=norm, precision="bf16", steps=steps, record_every=1_000, details=False)
    return Preset(
        f"does localisation cause LocAteR's gain? {about}", config, paper.learning_rate, design=levels, seeds=_FIVE
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
    # levels around those that models without and with κ₂ = 1 have in results/
    "cause-d128-l1": _cause(
        1,
        "post",
        design(entropies=(2.25, 2.5, 2.6, 2.7), traces=(0.0, 1.0, 4.0), scales=(6.0, 12.0, 24.0)),
        "the paper's model, d = 128, one layer",
    ),
    # the learning rate is constant, so that these are the first updates of the preset above; with a quarter of them
    # "locater-first-tenth" ends where it does there, at update 5,000
    "cause-d128-l1-early": _cause(
        1,
        "post",
        design(entropies=(), traces=(), scales=(), first=0.25),
        "the same, the controls alone, 20,000 updates",
        steps=20_000,
    ),
    # levels around those that models without and with LocAteR have after so many updates of the preset above
    "cause-d128-l1-levels": _cause(
        1,
        "post",
        design(entropies=(2.25, 2.45, 2.7), traces=(0.0, 1.0, 4.0), scales=(6.0, 12.0, 24.0), controls=False),
        "the same, the levels alone, 20,000 updates",
        steps=20_000,
    ),
    "cause-pre-l6": _cause(
        6,
        "pre",
        design(entropies=(2.0, 2.5, 3.0), traces=(1.0, 4.0), scales=(6.0, 24.0), layers=6),
        "six Pre-LN layers, d = 128",
    ),
    "cause-post-l6": _cause(
        6,
        "post",
        design(entropies=(), traces=(), scales=(), layers=6, first=0.25),
        "the paper's model, d = 128, six layers, the controls alone, 20,000 updates",
        steps=20_000,
    ),
    "cause-laptop": Preset(
        "the same on the embedded corpus, d = 64, one layer: a quarter of an hour on two cores",
        Config(
            model=ModelConfig(width=64, ffn=64, layers=1, tokens=64),
            vocabulary=1024,
            batch=16,
            steps=600,
            record_every=100,
            record_early=False,
            checkpoint_every=200,
            probe_blocks=128,
            valid_blocks=256,
            details=False,
        ),
        learning_rate=2e-3,
        design=design(entropies=(1.5, 2.0, 2.5, 3.0), traces=(0.0, 1.0, 4.0), scales=(6.0, 12.0, 24.0), thorough=False),
        seeds=_FIVE,
    ),
    # the best rate without LocAteR, and levels between those of models with and without it, in
    # results/arena-laptop-rotary, whose seeds are others
    "cause-laptop-rotary": Preset(
        "the same in a Pre-LN decoder: two layers, rotary positions, bytes of the embedded corpus",
        ARENAS["laptop"].config.changed(positions="rotary"),
        learning_rate=1e-2,
        design=design(entropies=(0.5, 1.0, 2.0, 3.0), traces=(0.0, 1.0, 4.0), scales=(1.0, 4.0, 32.0), layers=2),
        seeds=(5, 6, 7, 8, 9),
    ),
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise LocaterError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
