"""Where small eigenproblems are solved faster: batches of d_head × d_head matrices in float64, GPU beside CPU.

Decides where `QK.eigenvalues` and `scan` send them when the weights are on a GPU.
"""

from __future__ import annotations

import statistics
import time

import torch


def milliseconds(run, repeats: int = 3) -> float:
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to compare")
        return
    print(torch.cuda.get_device_name(), f"beside {torch.get_num_threads()} CPU threads, torch {torch.__version__}")
    for batch, width in ((12, 64), (144, 64), (32, 128), (256, 128)):
        a = torch.randn(batch, width, width, dtype=torch.float64, device="cuda")
        symmetric = a @ a.mT
        for name, solve, matrix in (
            ("eigenvalues of a general matrix", torch.linalg.eigvals, a),
            ("eigenvalues of a symmetric matrix", torch.linalg.eigvalsh, symmetric),
            ("eigenvectors of a symmetric matrix", torch.linalg.eigh, symmetric),
        ):
            gpu = milliseconds(lambda solve=solve, matrix=matrix: solve(matrix))
            cpu = milliseconds(lambda solve=solve, matrix=matrix: solve(matrix.cpu()))
            print(f"{batch} × {width} × {width}, {name}: GPU {gpu:.1f} ms, CPU {cpu:.1f} ms, ratio {gpu / cpu:.1f}")


if __name__ == "__main__":
    main()
