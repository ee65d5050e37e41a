"""One small file a family; importing this package registers them all."""

from locater.models.families import (
    bert,
    bloom,
    falcon,
    gemma,
    generic,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    modernbert,
    opt,
    phi3,
    t5,
    torch_mha,
    vit,
    whisper,
)

__all__ = [
    "bert",
    "bloom",
    "falcon",
    "gemma",
    "generic",
    "gpt2",
    "gpt_neox",
    "gptj",
    "llama",
    "modernbert",
    "opt",
    "phi3",
    "t5",
    "torch_mha",
    "vit",
    "whisper",
]
