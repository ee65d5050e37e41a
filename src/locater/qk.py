"""QK: the query-key matrix W_QK = W_Qᵀ W_K, kept as its two factors.

The one object every room of the package speaks. Nothing but `dense` forms a d_model × d_model matrix: all
of W_QK's invariants live in d_head × d_head products of the factors.

Where queries and keys are made of different states (another width, another latent), W_QK maps one space to another: it
has singular values and a scale, but no trace, no eigenvalues and no symmetric part.

Legend: K head width, D model width; leading dimensions (layers, heads) broadcast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from locater.errors import LocaterError

__all__ = ["QK"]


class QK:
    """W_QK = w_qᵀ w_k for w_q, w_k of shape (..., d_head, d_model), nn.Linear's layout; w_k may have another width.

    `one_input=False` says that queries and keys are of different states, even where they are equally wide.
    Differentiable in both factors. Traces are computed in the factors' own precision (half
    precisions in float32), spectra in float64.
    """

    def __init__(self, w_q: Tensor, w_k: Tensor, *, one_input: bool = True) -> None:
        for name, factor in (("w_q", w_q), ("w_k", w_k)):
            if not isinstance(factor, Tensor) or not factor.is_floating_point():
                kind = f"a tensor of {factor.dtype}" if isinstance(factor, Tensor) else type(factor).__name__
                raise LocaterError(f"{name} must be a floating-point tensor, got {kind}")
            if factor.ndim < 2 or factor.shape[-2] == 0 or factor.shape[-1] == 0:
                raise LocaterError(f"{name} must be (..., d_head, d_model), got shape {tuple(factor.shape)}")
        if w_q.shape[-2] != w_k.shape[-2]:
            raise LocaterError(f"w_q and w_k must share d_head, got {tuple(w_q.shape)} and {tuple(w_k.shape)}")
        try:
            _broadcast(w_q.shape[:-2], w_k.shape[:-2])
        except RuntimeError as error:
            raise LocaterError(
                f"the leading dimensions of w_q and w_k do not broadcast: {tuple(w_q.shape)} and {tuple(w_k.shape)}"
            ) from error
        self.w_q = w_q
        self.w_k = w_k
        self.square = one_input and w_q.shape[-1] == w_k.shape[-1]  # whether trace and eigenvalues exist

    @classmethod
    def from_joint(cls, w_qk: Tensor) -> QK:
        """For a model that trains W_QK (..., d_model, d_model) itself."""
        if w_qk.ndim < 2 or w_qk.shape[-1] != w_qk.shape[-2]:
            raise LocaterError(f"w_qk must be (..., d_model, d_model), got shape {tuple(w_qk.shape)}")
        return cls(torch.eye(w_qk.shape[-1], dtype=w_qk.dtype, device=w_qk.device), w_qk)

    def __repr__(self) -> str:
        return f"QK(heads={tuple(self.shape)}, d_head={self.d_head}, d_model={self.d_model})"

    @property
    def shape(self) -> torch.Size:
        """The leading dimensions: layers, heads."""
        return _broadcast(self.w_q.shape[:-2], self.w_k.shape[:-2])

    @property
    def d_head(self) -> int:
        return self.w_q.shape[-2]

    @property
    def d_model(self) -> int:
        """Of the queries; the width of the keys is `w_k.shape[-1]`."""
        return self.w_q.shape[-1]

    def trace(self) -> Tensor:
        """tr W_QK = ⟨W_Q, W_K⟩."""
        self._must_be_square("trace")
        w_q, w_k = self._at_least_float32()
        return (w_q * w_k).sum((-2, -1))

    def scale(self) -> Tensor:
        """tr(W_QKᵀ W_QK) = ⟨W_Q W_Qᵀ, W_K W_Kᵀ⟩, the squared Frobenius norm."""
        w_q, w_k = self._at_least_float32()
        return ((w_q @ w_q.mT) * (w_k @ w_k.mT)).sum((-2, -1))

    def trace_square(self) -> Tensor:
        """tr(W_QK²) = tr((W_K W_Qᵀ)²); negative where rotation outweighs scaling."""
        self._must_be_square("square")
        w_q, w_k = self._at_least_float32()
        small = w_k @ w_q.mT
        return (small * small.mT).sum((-2, -1))

    def eigenvalues(self) -> Tensor:
        """The d_head eigenvalues of W_K W_Qᵀ, complex: those of W_QK but for d_model − d_head zeros."""
        self._must_be_square("eigenvalues")
        w_q, w_k = self._finite_float64()
        return _solve(torch.linalg.eigvals, w_k @ w_q.mT)

    def symmetric_eigenvalues(self) -> Tensor:
        """Eigenvalues of (W_QK + W_QKᵀ)/2, ascending: its 2·d_head non-zero ones (at most d_model).

        With R the triangular factor of (W_Q; W_K)ᵀ = O R, they are those of ½ R [[0, I], [I, 0]] Rᵀ.
        """
        self._must_be_square("symmetric part")
        w_q, w_k = (w.expand(*self.shape, -1, -1) for w in self._finite_float64())
        if 2 * self.d_head < self.d_model:
            r = torch.linalg.qr(torch.cat([w_q, w_k], -2).mT).R
            w_q, w_k = r[..., : self.d_head].mT, r[..., self.d_head :].mT
        product = w_q.mT @ w_k
        return _solve(torch.linalg.eigvalsh, 0.5 * (product + product.mT))

    def singular_values(self) -> Tensor:
        """The d_head largest singular values, descending (d_model of them where d_head > d_model)."""
        w_q, w_k = (torch.linalg.qr(w.mT).R.mT if self.d_head < w.shape[-1] else w for w in self._finite_float64())
        return _solve(torch.linalg.svdvals, w_q.mT @ w_k)

    def dense(self) -> Tensor:
        """W_QK itself, (..., d_model, d_model): for tests and small cases."""
        return self.w_q.mT @ self.w_k

    def _must_be_square(self, what: str) -> None:
        if not self.square:
            raise LocaterError(
                f"queries of width {self.d_model} and keys of width {self.w_k.shape[-1]} are made of different states: "
                f"their W_QK has no {what}"
            )

    def _at_least_float32(self) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.promote_types(self.w_q.dtype, self.w_k.dtype), torch.float32)
        return self.w_q.to(dtype), self.w_k.to(dtype)

    def _finite_float64(self) -> tuple[Tensor, Tensor]:
        for name, factor in (("w_q", self.w_q), ("w_k", self.w_k)):
            if not bool(torch.isfinite(factor).all()):
                raise LocaterError(f"{name} has NaN or infinite entries; its spectrum does not exist")
        return self.w_q.double(), self.w_k.double()


def _solve(decompose: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """On the CPU: d_head × d_head eigenproblems are 2 to 5 times faster there than on a GPU (benchmarks/)."""
    return decompose(matrices.cpu()).to(matrices.device)


def _broadcast(a: torch.Size, b: torch.Size) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(a, b)
    return shape
