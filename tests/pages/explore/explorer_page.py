"""What the explorer's tests know of its page, and the same numbers from Python."""

from __future__ import annotations

import numpy as np

from locater import TokenProcess, rho
from locater.theory import normal_spectrum

DEFAULT = {"mode": "finite", "mean": 0.3, "std": 0.1, "d": 128, "T": 40, "temperature": None, "process": "walk",
           "decay": 0.9}  # fmt: skip

# what the page shows: ρ by formula, from the pictures themselves
SHOWN = """async () => {
  await explorer.settled();
  const data = document.getElementById("rho").data;
  return Object.fromEntries(data.map((trace) => [trace.name, Array.from(trace.y)]));
}"""
EXACT, GAUSSIAN, CORRECTED, PRINTED = "exact law", "Gaussian, finite T", "Eq. (6) corrected", "Eq. (6) printed"


def process_of(state):
    if state["process"] == "ar":
        return TokenProcess.autoregressive(state["T"], state["decay"])
    return (TokenProcess.random_walk if state["process"] == "walk" else TokenProcess.independent)(state["T"])


def python_rho(state, method="exact"):
    lam = np.sqrt(state["d"]) if state["temperature"] is None else state["temperature"]
    return rho(normal_spectrum(state["mean"], state["std"], state["d"]), process_of(state), lam, method)


def drawn(page, panel):
    return page.evaluate(
        """(id) => Object.fromEntries(document.getElementById(id).data.map(
          ({ name, x, y }) => [name, { x: Array.from(x), y: Array.from(y) }]))""",
        panel,
    )
