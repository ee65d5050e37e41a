"""Fig. 5's grid at the paper's size against a plain transcription of its recipe, in one run.

The transcription samples B, forms W_QK, samples 300 walks and multiplies out, for each of 10 matrices in each
cell; it is vectorised over walks, as a careful reader would write it. Both compute ρ of the last query and the
attention entropy averaged over queries. Claim: `simulate` is at least 20 times faster, with the same
statistics. With --device cuda, `simulate` is also timed there.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from locater.theory import simulate

DIM, TOKENS, WALKS, MATRICES = 128, 40, 300, 10
MEANS, STDS = np.linspace(-0.4, 0.4, 9), np.geomspace(0.01, 1.0, 9)


def transcription(mean: float, std: float, sigma: np.ndarray, rng: np.random.Generator):
    root = np.linalg.cholesky(sigma)
    isotropic = np.array_equal(sigma, np.eye(DIM))
    rho, entropy = np.empty((MATRICES, TOKENS)), np.empty(MATRICES)
    for m in range(MATRICES):
        basis = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]
        w_qk = basis @ np.diag(rng.normal(mean, std, DIM)) @ basis.T
        steps = rng.standard_normal((WALKS, TOKENS, DIM))
        x = np.cumsum(steps if isotropic else steps @ root.T, axis=1)
        logits = x @ w_qk @ x.swapaxes(1, 2) / np.sqrt(DIM)
        omega = logits[:, -1]
        z = omega / TOKENS - omega.sum(1, keepdims=True) / TOKENS**2 + 1 / TOKENS
        rho[m] = ((z >= 0) & (z <= 1)).mean(0)
        shifted = logits - logits.max(-1, keepdims=True)
        e = np.exp(shifted)
        total = e.sum(-1)
        entropy[m] = (np.log(total) - (e * shifted).sum(-1) / total).mean()
    return rho, entropy


def largest_gap(a: np.ndarray, b: np.ndarray) -> float:
    """In standard errors; matrices are the independent units on both sides."""
    error = np.sqrt((a.var(-1, ddof=1) + b.var(-1, ddof=1)) / a.shape[-1]) + 2e-3
    return float((np.abs(a.mean(-1) - b.mean(-1)) / error).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    print(f"{len(MEANS)} × {len(STDS)} cells, {MATRICES} matrices, {WALKS} walks, d = {DIM}, T = {TOKENS}")
    spent = np.zeros(2)
    for kind in ("isotropic", "anisotropic"):
        rng = np.random.default_rng(1)
        r = np.random.default_rng(5).uniform(-2.5, 2.5, (DIM, DIM))
        sigma = np.eye(DIM) if kind == "isotropic" else r.T @ r / DIM
        covariance = kind if kind == "isotropic" else sigma
        start = time.perf_counter()
        cells = [[transcription(mean, std, sigma, rng) for std in STDS] for mean in MEANS]
        middle = time.perf_counter()
        quick = simulate(MEANS, STDS, dim=DIM, tokens=TOKENS, walks=WALKS, matrices=MATRICES, covariance=covariance)
        end = time.perf_counter()
        rho = np.array([[cell[0] for cell in row] for row in cells])
        entropy = np.array([[cell[1] for cell in row] for row in cells])
        gaps = (
            largest_gap(np.moveaxis(quick.rho, 2, -1), np.moveaxis(rho, 2, -1)),
            largest_gap(quick.entropy, entropy),
        )
        spent += (middle - start, end - middle)
        print(
            f"{kind}: transcription {middle - start:.1f} s, simulate {end - middle:.2f} s, "
            f"ratio {(middle - start) / (end - middle):.0f}; largest gap in standard errors: "
            f"ρ {gaps[0]:.1f} of {rho[..., 0, :].size} values, entropy {gaps[1]:.1f} of {entropy[..., 0].size}"
        )
        if device != "cpu":
            times = []
            for _ in range(3):
                start = time.perf_counter()
                moved = simulate(
                    MEANS, STDS, dim=DIM, tokens=TOKENS, walks=WALKS, matrices=MATRICES, covariance=covariance,
                    device=device,
                )  # fmt: skip
                times.append(time.perf_counter() - start)
            same = float(np.abs(moved.entropy - quick.entropy).max())
            print(f"{kind}: simulate on {device} {min(times):.2f} s, entropy differs from the CPU's by {same:.1e}")
    ratio = spent[0] / spent[1]
    print(f"claim: at least 20 times faster: {'holds' if ratio >= 20 else 'FAILS'} ({ratio:.0f})")


if __name__ == "__main__":
    main()
