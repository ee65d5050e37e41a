"""σReparam: Ŵ = (γ / σ₁(W)) W, γ learned, σ₁ followed by one power iteration a training forward.

A stored weight may hold several matrices, each with its own γ: W_Q, W_K and W_V in one fused layer.

Legend: P matrices in a weight (…, O outputs, I inputs); u (…, O, P) and v (…, I, P) are their first singular vectors,
u being 0 outside of its matrix; part (O,) says to which matrix an output belongs, −1 for those left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

__all__ = ["first_singular_vectors", "power_iteration", "row_factors", "spectral_norms"]


def first_singular_vectors(w: Tensor, part: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """u and v, by subspace iteration: eight vectors at once, so that a second σ near the first does not matter.

    The start is the same for every matrix and takes nothing from torch's random numbers.
    """
    found = []
    for index in range(parts):
        matrix = w * (part == index).to(w)[:, None]
        width = min(8, *matrix.shape[-2:])
        start = torch.randn(matrix.shape[-1], width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        basis = start.to(matrix)
        for _ in range(60):
            basis = torch.linalg.qr(matrix.mT @ torch.linalg.qr(matrix @ basis).Q).Q
        u, _, w_h = torch.linalg.svd(matrix @ basis, full_matrices=False)
        found.append((u[..., 0], (basis @ w_h[..., :1, :].mT)[..., 0]))
    us, vs = zip(*found, strict=True)
    return torch.stack(us, -1), torch.stack(vs, -1)


def power_iteration(w: Tensor, u: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """u and v one iteration further, of all matrices at once."""
    v = normalize(w.mT @ u, dim=-2)
    inside = part[:, None] == torch.arange(u.shape[-1], device=part.device)  # (O, P)
    return normalize((w @ v) * inside.to(w.dtype), dim=-2), v


def spectral_norms(w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """σ₁ (…, P) as these vectors give it, uᵀ W v; differentiable in W."""
    return (u * (w @ v)).sum(-2)


def row_factors(gamma: Tensor, sigma: Tensor, part: Tensor) -> Tensor:
    """γ/σ₁ (…, O) by output, 1 for those left alone: Ŵ is W times this."""
    ratios = gamma.to(sigma.dtype) / sigma
    return torch.cat([torch.ones_like(ratios[..., :1]), ratios], -1)[..., part + 1]
