"""The softmax law against sampling at the same standard error of the entropy: whole sequences, and the query first.

Each is timed at its own number of samples; the time to a common standard error goes with its square. Prints the ratio
for a random walk, AR(1) and independent tokens.

    python benchmarks/attention_law.py [--dim 128] [--tokens 64]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from locater.theory import TokenProcess, attention, normal_spectrum
from locater.theory.attention import softmax_statistics
from locater.theory.conditional import GivenQuery
from locater.theory.law import Spectrum, spectrum_of
from locater.theory.sampling import logits_by_walks, logits_given_query


def timed(run: Callable[[], tuple[float, float]], repeats: int = 3) -> tuple[float, float, float]:
    """Entropy, its standard error, and the median time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        entropy, error = run()
        times.append(time.perf_counter() - start)
    return entropy, error, float(np.median(times))


def law(w: np.ndarray, process: TokenProcess, temperature: float) -> tuple[float, float]:
    found = attention(w, process, temperature)
    return float(found.entropy), float(found.entropy_error)


def sampled(
    sampler: Callable[..., Iterator[np.ndarray]], spectrum: Spectrum, given: GivenQuery, temperature: float, count: int
) -> tuple[float, float]:
    batches = sampler(spectrum, given, count, 1)
    entropy = np.concatenate([softmax_statistics(y.T / temperature)[given.tokens] for y in batches])
    return float(entropy.mean()), float(entropy.std() / np.sqrt(len(entropy)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    chosen = parser.parse_args()
    d, tokens, temperature = chosen.dim, chosen.tokens, np.sqrt(chosen.dim)
    print(f"d = {d}, T = {tokens}; how many times longer sampling takes to the law's standard error of the entropy")
    print("process         spectrum        entropy (law)      law      whole sequences      query first")
    for process, mean, std in (
        (TokenProcess.random_walk(tokens), 0.0, 0.05),
        (TokenProcess.random_walk(tokens), 0.3, 0.1),
        (TokenProcess.autoregressive(tokens, 0.9), 0.2, 0.5),
        (TokenProcess.independent(tokens), 0.3, 0.5),
    ):
        w = normal_spectrum(mean, std, d)
        spectrum, given = spectrum_of(w), GivenQuery.of(process)

        attention(w, process, temperature)  # the Sobol points are made once
        entropy, error, seconds = timed(partial(law, w, process, temperature))
        ratios = []
        for sampler, samples in ((logits_by_walks, 10_000), (logits_given_query, 50_000)):
            other, other_error, other_seconds = timed(partial(sampled, sampler, spectrum, given, temperature, samples))
            assert abs(other - entropy) < 5 * np.hypot(error, other_error)
            ratios.append(other_seconds * (other_error / error) ** 2 / seconds)
        print(
            f"{process.kind:15} N({mean:g}, {std:g}²)  {entropy:8.4f} ± {error:.4f}  {seconds:6.3f} s"
            f"  {ratios[0]:12.0f} ×  {ratios[1]:14.1f} ×"
        )


if __name__ == "__main__":
    main()
