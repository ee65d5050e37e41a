"""LocAteR against its rivals, where attention breaks."""

from locater.lab.arena.arena import (
    ARENAS,
    CONTENDERS,
    ENTROPY_FLOOR,
    LOGIT_CEILING,
    TRAINS_WITHIN,
    Arena,
    Contender,
    read_arena,
    run_arena,
    summary,
)

__all__ = [
    "ARENAS",
    "CONTENDERS",
    "ENTROPY_FLOOR",
    "LOGIT_CEILING",
    "TRAINS_WITHIN",
    "Arena",
    "Contender",
    "read_arena",
    "run_arena",
    "summary",
]
