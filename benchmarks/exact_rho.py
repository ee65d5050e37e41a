"""The exact ρ against this package's own Monte Carlo at a standard error of 1e-3; d = 128, T = 64.

Claim: exact takes at most 1/100 of the time of `rho(..., method="montecarlo")`, which draws whole walks. For
the record also against the quicker sampler that draws the query and then the logits given it.
"""

from __future__ import annotations

import time

import numpy as np

from locater import TokenProcess, rho
from locater.theory import normal_spectrum
from locater.theory.law import spectrum_of
from locater.theory.simulate import rho_given_query

DIM, TOKENS, STANDARD_ERROR = 128, 64, 1e-3


def seconds(run, repeats: int) -> tuple[float, np.ndarray]:
    """The best of `repeats`, and the result."""
    best, result = np.inf, None
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - start)
    return best, result


def main() -> None:
    w, walk, temperature = normal_spectrum(0.1, 0.3, DIM), TokenProcess.random_walk(TOKENS), np.sqrt(DIM)
    exact_time, exact = seconds(lambda: rho(w, walk, temperature), 5)
    highest_variance = (exact * (1 - exact)).max()
    samples = int(np.ceil(highest_variance / STANDARD_ERROR**2))
    law = spectrum_of(w)
    walks_time, by_walks = seconds(lambda: rho(w, walk, temperature, "montecarlo", samples=samples), 1)
    query_time, by_query = seconds(lambda: rho_given_query(law, walk, temperature, samples=samples, seed=0), 1)
    print(f"exact ρ, d = {DIM}, T = {TOKENS}: {1e3 * exact_time:.1f} ms")
    for name, spent, counted in (("whole walks", walks_time, by_walks), ("given the query", query_time, by_query)):
        gap = np.abs(counted - exact).max() / STANDARD_ERROR
        print(
            f"Monte Carlo, {name}: {spent:.2f} s for {samples:,} sequences (standard error ≤ {STANDARD_ERROR:g}, "
            f"largest gap {gap:.1f} of them); ratio to exact {spent / exact_time:.0f}"
        )
    print(f"claim: exact ≤ 1/100 of whole walks: {'holds' if walks_time >= 100 * exact_time else 'FAILS'}")


if __name__ == "__main__":
    main()
