"""The shape of ρ in one word: the rule that scans, figures and pages share. Softmax itself can look elsewhere."""

from __future__ import annotations

from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from locater.errors import LocaterError
from locater.theory import _checks as check
from locater.theory._checks import Array
from locater.theory.process import TokenProcess
from locater.theory.rho import normal_spectrum, rho, rho_curve

__all__ = ["REGIMES", "regime", "regime_map", "regime_map_at", "spectrum_at"]

REGIMES = ("late", "middle", "early", "flat", "vanishing")

VANISHING_BELOW = 0.1  # no token is on the slope in even a tenth of the sequences
HIGH_FROM = 0.5  # of the highest ρ
ROUNDING = 1e-12  # relative: ξ = tr W/√tr W² of equal eigenvalues is √dim but for this


@overload
def regime(rho_values: list[float]) -> str: ...
@overload
def regime(rho_values: ArrayLike) -> str | NDArray[np.str_]: ...
def regime(rho_values: ArrayLike) -> str | NDArray[np.str_]:
    """The shape of ρ over token positions (..., T): late, middle, early, flat or vanishing.

    The rule, in this order:

    1. vanishing: the highest ρ is below 0.1.
    2. ρ is high on a stretch of tokens if it is at least half the highest. If it is on every tenth of the sequence
       (their means; single tokens below T = 10), ρ is flat.
    3. Otherwise the ends decide: late if ρ is high on the last tenth and not on the first, early the other
       way round, middle if on neither. If it is high at both ends around a gap, ρ is called flat.

    A single vector gives a string, a batch an array of strings.
    """
    values = check.finite("rho_values", rho_values)
    if values.ndim == 0 or values.shape[-1] < 2:
        raise LocaterError(f"rho_values must be (..., tokens) with at least 2 tokens, got shape {values.shape}")
    if (values < -1e-6).any() or (values > 1 + 1e-6).any():
        raise LocaterError(f"rho_values must be probabilities, got {values.min():.6g} to {values.max():.6g}")
    tokens = values.shape[-1]
    edges = np.linspace(0, tokens, min(10, tokens) + 1).round().astype(int)
    tenths = np.stack([values[..., a:b].mean(-1) for a, b in pairwise(edges)], -1)
    high = tenths >= HIGH_FROM * tenths.max(-1, keepdims=True)
    first, last = high[..., 0], high[..., -1]
    name = np.select(
        [values.max(-1) < VANISHING_BELOW, high.all(-1) | (first & last), last, first],
        ["vanishing", "flat", "late", "early"],
        "middle",
    )
    return str(name) if name.ndim == 0 else name


def regime_map(xi: ArrayLike, eta: ArrayLike, form: str = "asymptotic") -> NDArray[np.str_]:
    """The regime of `rho_curve` over the plane: (len(xi), len(eta)) names."""
    xi_, eta_ = check.finite("xi", xi).reshape(-1), check.finite("eta", eta).reshape(-1)
    theta = (np.arange(200) + 0.5) / 200
    return np.asarray(regime(rho_curve(theta, xi_[:, None, None], eta_[None, :, None], form)))


def regime_map_at(xi: ArrayLike, eta: ArrayLike, *, dim: int, process: TokenProcess) -> NDArray[np.str_]:
    """The same at finite T and d, from the exact ρ of `spectrum_at`; "" where no real spectrum has that ξ."""
    xi_, eta_ = check.finite("xi", xi).reshape(-1), check.finite("eta", eta).reshape(-1)
    names = np.full((len(xi_), len(eta_)), "", dtype="<U9")
    for i, x in enumerate(xi_):
        if _has_spectrum(x, dim):
            spectra = np.stack([spectrum_at(x, e, dim) for e in eta_])
            names[i] = regime(rho(spectra, process, 1.0))
    return names


def spectrum_at(xi: float, eta: float, dim: int) -> Array:
    """`dim` eigenvalues, shaped like a normal's quantiles, with tr W = ξη and tr W² = η² (λ = 1).

    |ξ| ≤ √dim is the bound (5); a single eigenvalue has ξ = ±1 and no other.
    """
    dim, eta = check.at_least("dim", dim, 1), check.positive("eta", eta)
    if not _has_spectrum(xi, dim):
        within = f"within ±√dim = ±{np.sqrt(dim):.4g}, the bound (5)"
        raise LocaterError(f"xi must be {within if dim > 1 else '1 or −1 for a single eigenvalue'}, got {xi}")
    shape = normal_spectrum(0.0, 1.0, dim)
    spread = np.sqrt((shape**2).mean()) if dim > 1 else 1.0
    std = eta * np.sqrt(max(0.0, 1 - xi**2 / dim) / dim)
    return np.asarray(xi * eta / dim + std * shape / spread)


def _has_spectrum(xi: float, dim: int) -> bool:
    """Whether `dim` real eigenvalues can have this ξ = tr W/√tr W², up to rounding."""
    size, widest = abs(xi), np.sqrt(dim) * (1 + ROUNDING)
    return bool(size <= widest and (dim > 1 or size >= 1 - ROUNDING))
