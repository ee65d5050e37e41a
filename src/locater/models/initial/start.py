"""What a model of transformers starts as: `Initial`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from locater.errors import LocaterError
from locater.theory import RandomTransformer, token_gram
from locater.theory.depth import normed

__all__ = ["Initial"]

_PIXELS = 1024  # from so many on, patches of noise have the Gram matrix of their mean


@dataclass(frozen=True)
class Initial:
    """A transformer as it starts, and what its tokens enter it as."""

    family: str
    width: int
    transformer: RandomTransformer
    token_std: float  # of an embedding's entries; of a patch's, for pixels of variance 1
    position_std: float = 0.0  # of learned positions
    shared_std: float = 0.0  # of what every token gets: the type's embedding
    first_std: float | None = None  # of a first token that is no content: [CLS] of an image
    pixels: int | None = None  # of a patch, for an image
    normed: bool = False  # a norm behind the embeddings
    most_tokens: int | None = None
    most_because: str = "that it has positions for"
    smaller_by_depth: bool = False  # its weights are smaller in deeper models

    def scaled(self, gain: float = 1.0, branch: float = 1.0) -> Initial:
        """With so many times the logits, and so many times what the branches add."""
        for name, value in (("gain", gain), ("branch", branch)):
            if not 0 < value <= 1e9:
                raise LocaterError(f"{name} must be a positive number of at most 1e9, got {value:g}")
        t = self.transformer
        attention = replace(t.attention, logit_scale=gain * t.attention.logit_scale)
        return replace(self, transformer=replace(t, attention=attention, branch=branch * t.branch))

    def gram(self, tokens: int, similarity: float = 0.0) -> Any:
        """G of `tokens` different tokens whose embeddings have this cosine."""
        return self.gram_of(self._cosines(tokens, similarity))

    def grams(self, tokens: int, similarity: float = 0.0, *, count: int = 16, seed: int = 0) -> Any:
        """(S, T, T): G of one image of noise after the other, whose patches have few pixels; else `gram` alone."""
        cosines = self._cosines(tokens, similarity)
        if self.pixels is None or self.pixels >= _PIXELS:
            return self.gram_of(cosines)[None]
        noise = np.random.default_rng([seed, 1]).standard_normal((count, tokens, self.pixels))
        patches = np.linalg.cholesky(cosines) @ noise
        return np.stack([self.gram_of(one @ one.T / self.pixels) for one in patches])

    def gram_of(self, similarity: Any) -> Any:
        """G of tokens whose embeddings have these cosines (T, T); of an image, of the patches and the first token."""
        if self.first_std is None:
            content, std = np.asarray(similarity, float), self.token_std
        else:
            content, std = np.array(similarity, float) * self.token_std**2, 1.0
            content[0] = content[:, 0] = 0.0
            content[0, 0] = self.first_std**2
        made = token_gram(content, std, position_std=self.position_std, shared_std=self.shared_std)
        return normed(made, self.transformer.eps) if self.normed else made

    def _cosines(self, tokens: int, similarity: float) -> Any:
        if not 0 <= similarity < 1:
            raise LocaterError(f"similarity must be a cosine from 0 to below 1, got {similarity:g}")
        if tokens < 2 or (self.most_tokens is not None and tokens > self.most_tokens):
            most = "" if self.most_tokens is None else f" and at most the {self.most_tokens:,} {self.most_because}"
            raise LocaterError(f"tokens must be at least 2{most}, got {tokens}")
        return (1 - similarity) * np.eye(tokens) + similarity
