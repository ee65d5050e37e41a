"""Triton kernels for training many small language models at once: the vocabulary products, AdamW, dropout.

Nothing is summed atomically: the same call gives the same bits.

Legend: E stacked models, N tokens, V words, D width, P parameters of a model.
"""

from locater._triton import available, jit, on, tl
from locater.lab.engine._kernels._adamw import adamw_
from locater.lab.engine._kernels._dropout import dropout, dropout_add, kept, threshold_of
from locater.lab.engine._kernels._vocabulary import CAP, Tiles, candidates, exp_logits, tune, weight_gradient

__all__ = [
    "CAP",
    "Tiles",
    "adamw_",
    "available",
    "candidates",
    "dropout",
    "dropout_add",
    "exp_logits",
    "jit",
    "kept",
    "on",
    "threshold_of",
    "tl",
    "tune",
    "weight_gradient",
]
