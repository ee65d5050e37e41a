"""Readers written by hand: one small file each; importing this package registers them all.

For what must be read without transformers, as from GGUF, for torch's own module, and for what the general reader does
not understand.
"""

from locater.models.families import bert, gemma, generic, gpt2, llama, mla, phi3, torch_mha

__all__ = ["bert", "gemma", "generic", "gpt2", "llama", "mla", "phi3", "torch_mha"]
