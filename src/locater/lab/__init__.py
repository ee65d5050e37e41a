"""Does it help? The paper's language models, trained with and without LocAteR."""

from locater.lab.config import READINGS, Config, Member, ModelConfig, members_for, parsed
from locater.lab.data import Corpus, load_corpus
from locater.lab.engine.stack import Stack
from locater.lab.intervention import Intervention
from locater.lab.presets import PRESETS, Preset, preset
from locater.lab.runs.records import Run, read_metrics, read_run, read_runs
from locater.lab.runs.sweep import sweep
from locater.lab.runs.train import Progress, train

__all__ = [
    "PRESETS",
    "READINGS",
    "Config",
    "Corpus",
    "Intervention",
    "Member",
    "ModelConfig",
    "Preset",
    "Progress",
    "Run",
    "Stack",
    "load_corpus",
    "members_for",
    "parsed",
    "preset",
    "read_metrics",
    "read_run",
    "read_runs",
    "sweep",
    "train",
]
