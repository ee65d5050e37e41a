"""What the explorer's tests know of its page, and the same numbers from Python."""

from __future__ import annotations

import numpy as np

from locater import TokenProcess, rho
from locater.theory import attention, normal_spectrum

DEFAULT = {"mode": "finite", "mean": 0.3, "std": 0.1, "d": 128, "T": 40, "temperature": None, "process": "walk",
           "decay": 0.9, "map": "rho"}  # fmt: skip

# what the page shows: ρ by formula, from the pictures themselves
SHOWN = """async () => {
  await explorer.settled();
  const data = document.getElementById("rho").data.filter(({ name }) => name !== "softmax");
  return Object.fromEntries(data.map((trace) => [trace.name, Array.from(trace.y)]));
}"""
EXACT, GAUSSIAN, CORRECTED, PRINTED = "exact law", "Gaussian, finite T", "Eq. (6) corrected", "Eq. (6) printed"


CORNERS = [
    DEFAULT | {"mean": 0.0, "std": 0.0},  # W = 0
    DEFAULT | {"d": 1},  # one eigenvalue
    DEFAULT | {"d": 1, "T": 2, "temperature": 0.01},
    DEFAULT | {"d": 2, "mean": 0.6745, "std": 1.0},  # one of two all but vanishes: the other dominates
    DEFAULT | {"d": 4, "mean": -2.0, "std": 4.0, "T": 128, "temperature": 0.01},
    DEFAULT | {"d": 256, "T": 128, "mean": 0.0, "std": 4.0, "temperature": 0.01},
    DEFAULT | {"d": 256, "T": 128, "mean": 2.0, "std": 0.0},
    DEFAULT | {"d": 256, "T": 128, "mean": 1e-4, "std": 1e-5, "temperature": 1000.0},
    DEFAULT | {"d": 3, "process": "ar", "decay": 1.0},  # all tokens are the same: x_i − x̄ = 0
    DEFAULT | {"process": "ar", "decay": -1.0, "T": 5},
]


def random_states(count, seed):
    """Settings over the whole range of the sliders and beyond, corners and repeated values among them."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        d = int(rng.choice([1, 2, 3, 4, 5, 8, 16, 33, 64, 128, 255, 256]))
        yield DEFAULT | {
            "mean": float(rng.choice([0, 1, -1]) * 10 ** rng.uniform(-4, 0.7)),
            "std": float(rng.choice([0, 1, 1]) * 10 ** rng.uniform(-4, 0.7)),
            "d": d,
            "T": int(rng.choice([2, 3, 4, 5, 10, 16, 31, 64, 100, 128])),
            "temperature": None if rng.random() < 0.5 else float(10 ** rng.uniform(-2, 3)),
            "process": str(rng.choice(["walk", "ar", "independent"])),
            "decay": float(rng.choice([rng.uniform(-1, 1), 1 - 10 ** rng.uniform(-6, -1), -1, 0, 1])),
        }


def process_of(state):
    if state["process"] == "ar":
        return TokenProcess.autoregressive(state["T"], state["decay"])
    return (TokenProcess.random_walk if state["process"] == "walk" else TokenProcess.independent)(state["T"])


def python_rho(state, method="exact"):
    lam = np.sqrt(state["d"]) if state["temperature"] is None else state["temperature"]
    return rho(normal_spectrum(state["mean"], state["std"], state["d"]), process_of(state), lam, method)


def python_attention(state, **more):
    lam = np.sqrt(state["d"]) if state["temperature"] is None else state["temperature"]
    return attention(normal_spectrum(state["mean"], state["std"], state["d"]), process_of(state), lam, **more)


def drawn(page, panel):
    return page.evaluate(
        """(id) => Object.fromEntries(document.getElementById(id).data.map(
          ({ name, x, y }) => [name, { x: Array.from(x), y: Array.from(y) }]))""",
        panel,
    )


def regimes_of(page):
    found = page.evaluate(
        """async () => {
          const { xi, eta, regimes, names } = await explorer.planeSettled();
          const found = Array.from(regimes, (n) => names[n] ?? ""); // "" where no spectrum is
          return { xi: Array.from(xi), eta: Array.from(eta), regimes: found };
        }"""
    )
    xi, eta = np.array(found["xi"]), np.array(found["eta"])
    return {"xi": xi, "eta": eta, "regimes": np.array(found["regimes"]).reshape(len(eta), len(xi))}
