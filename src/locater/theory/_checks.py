"""Turning what a caller passes into what a formula needs, or saying what is wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from locater.errors import LocaterError

Array = NDArray[np.float64]

_SYMMETRY = 1e-5  # relative to the largest entry; float32 covariances estimated from data pass
_NEGATIVE = 1e-5  # relative to the largest eigenvalue
_MOST = 2**31 - 1  # of anything that is counted


def to_numpy(value: Any) -> NDArray[Any]:
    """A numpy array of the same numbers; tensors are detached and moved to the CPU."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16
        value = value.numpy() if str(value.dtype) in ("torch.float32", "torch.float64") else _widen(value)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise LocaterError(f"expected numbers in a rectangular array, got {value!r:.80}") from error


def _widen(tensor: Any) -> NDArray[Any]:
    return np.asarray((tensor if tensor.is_complex() else tensor.double()).numpy())


def finite(name: str, value: ArrayLike) -> Array:
    """A finite float64 array."""
    array = to_numpy(value)
    if array.dtype.kind not in "biuf":
        raise LocaterError(f"{name} must be real numbers, got an array of {array.dtype}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0]
        where = f" at index {', '.join(map(str, place))}" if array.ndim else ""
        raise LocaterError(f"{name} must be finite, got {array[tuple(place)]}{where}")
    return array


def real_eigenvalues(value: ArrayLike) -> Array:
    """Eigenvalues (..., d) with d ≥ 1, finite and real."""
    array = to_numpy(value)
    if array.dtype.kind == "c":
        imaginary, size = np.abs(array.imag).max(initial=0.0), np.abs(array).max(initial=0.0)
        if not imaginary <= 1e-9 * size:
            raise LocaterError(
                f"eigenvalues must be real, got an imaginary part of {imaginary:.3g}; the eigenvalues of an "
                "asymmetric W_QK do not determine the law: pass the QK itself"
            )
        array = array.real
    array = finite("eigenvalues", array)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise LocaterError(f"eigenvalues must be a non-empty list, got shape {array.shape}")
    if np.abs(array).max(initial=0.0) > 1e100:
        raise LocaterError(
            f"eigenvalues must be at most 1e100 in size, got {np.abs(array).max():.6g}: squares overflow"
        )
    return array


def number(name: str, value: float) -> float:
    """One finite number."""
    array = finite(name, value)
    if array.ndim:
        raise LocaterError(f"{name} must be one number, got an array of shape {array.shape}")
    return float(array)


def positive(name: str, value: float) -> float:
    number = to_numpy(value)
    if number.ndim or number.dtype.kind not in "iuf" or not (np.isfinite(number) and number > 0):
        raise LocaterError(f"{name} must be one positive number, got {value!r:.80}")
    return float(number)


def not_negative(name: str, value: float) -> float:
    found = number(name, value)
    if found < 0:
        raise LocaterError(f"{name} must not be negative, got {found:g}")
    return found


def at_least(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise LocaterError(f"{name} must be a whole number of at least {least}, got {value!r:.80}")
    if value > _MOST:
        raise LocaterError(f"{name} must be at most {_MOST:,}, got a larger number")
    return int(value)


def position(name: str, value: int, count: int) -> int:
    """A position among so many, from 0; negative ones count from the last."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -count <= value < count:
        raise LocaterError(f"{name} must be a position from {-count} to {count - 1}, got {value!r:.80}")
    return int(value) % count


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise LocaterError(f"{name} must be one of {', '.join(choices)}, got {value!r:.80}")
    return value


def square(name: str, value: ArrayLike, size: int | None = None) -> Array:
    """A finite square matrix, (size, size) where size is given."""
    matrix = finite(name, value)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise LocaterError(f"{name} must be a square matrix, got shape {matrix.shape}")
    if size is not None and len(matrix) != size:
        raise LocaterError(f"{name} must be {size} × {size} to match, got {len(matrix)} × {len(matrix)}")
    return matrix


def covariance(name: str, value: ArrayLike, size: int | None = None) -> Array:
    """A symmetric positive semidefinite matrix; what rounding has made negative is 0 in it."""
    symmetric = symmetrised(name, square(name, value, size))
    eigenvalues, vectors = np.linalg.eigh(symmetric)
    if eigenvalues[0] < -_NEGATIVE * max(eigenvalues[-1], 0.0) or eigenvalues[-1] < 0:
        raise LocaterError(
            f"{name} must be positive semidefinite, its smallest eigenvalue is {eigenvalues[0]:.6g} "
            f"(largest {eigenvalues[-1]:.6g})"
        )
    return symmetric if eigenvalues[0] >= 0 else np.asarray(vectors * eigenvalues.clip(min=0) @ vectors.T)


def symmetrised(name: str, matrix: Array) -> Array:
    """(M + Mᵀ)/2 of matrices (..., n, n) that are symmetric but for rounding."""
    transposed = np.swapaxes(matrix, -1, -2)
    gap = np.abs(matrix - transposed)
    if gap.max(initial=0.0) > _SYMMETRY * np.abs(matrix).max(initial=0.0):
        row, column = np.unravel_index(gap.argmax(), gap.shape)[-2:]
        raise LocaterError(
            f"{name} must be symmetric, entries ({row}, {column}) and ({column}, {row}) differ by {gap.max():.6g}"
        )
    return np.asarray(0.5 * (matrix + transposed))


def square_root(matrix: Array) -> Array:
    """A factor L (..., n, n) with L Lᵀ = matrix, for positive semidefinite matrices, singular ones too."""
    values, vectors = np.linalg.eigh(matrix)
    floor = 1e-15 * np.abs(values).max(-1, keepdims=True)
    return np.asarray(vectors * np.sqrt(np.where(values > floor, values, 0.0))[..., None, :])
