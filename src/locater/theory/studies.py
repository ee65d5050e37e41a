"""The paper's remaining statements, each as a small study that prints a table.

A study is a question and a function that returns rows of numbers. It says nothing about the outcome: the
numbers do, and docs/studies.md reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from locater.theory._checks import Array
from locater.theory.bounds import entropy_lower_bound, entropy_nu
from locater.theory.collapse import attention_entropy, rank_over_depth
from locater.theory.gradient import OneLayer
from locater.theory.process import TokenProcess
from locater.theory.regime import regime, regime_map, regime_map_at
from locater.theory.rho import focus_limit, normal_spectrum, rho, rho_curve, rho_curve_slope
from locater.theory.softmax import piecewise_softmax, softmax, sparsemax

__all__ = ["STUDIES", "Study"]

Row: TypeAlias = dict[str, Any]  # a name to a number or a word


@dataclass(frozen=True)
class Study:
    title: str
    question: str  # the paper's statement, put as a question
    run: Callable[[int], list[Row]]  # seed → rows


def dimension(seed: int = 0) -> list[Row]:
    """Section 4: "a larger embedding dimension d is beneficial to drive attention to localization"; here, ρ."""
    del seed  # exact
    process = TokenProcess.random_walk(64)
    rows: list[Row] = []
    for d in (2, 8, 32, 128, 512, 2048):
        for setting, w, temperature in (
            ("tr W = 4λ, W = cI", np.full(d, 4 / d), 1.0),
            ("w ~ N(0.2, 0.2²), λ = √d", normal_spectrum(0.2, 0.2, d), np.sqrt(d)),
        ):
            values = rho(w, process, temperature)
            rows.append(
                {
                    "setting": setting,
                    "d": d,
                    "tr W/λ": w.sum() / temperature,
                    "η": np.sqrt((w**2).sum()) / temperature,
                    "highest ρ": values.max(),
                    "tokens at half height": int((values >= values.max() / 2).sum()),
                    "regime": str(regime(values)),
                }
            )
    return rows


def softmaxes(seed: int = 0) -> list[Row]:
    """Section 2: the piecewise linear softmax beside softmax and sparsemax, at logits of growing spread."""
    rng = np.random.default_rng(seed)
    tokens = 64
    noise = rng.standard_normal((4000, tokens))
    rows: list[Row] = []
    for std in (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
        omega = std * noise
        soft, sparse, pieces = softmax(omega), sparsemax(omega), piecewise_softmax(omega)
        piecewise = pieces.value
        normalised = piecewise / piecewise.sum(-1, keepdims=True)
        rows.append(
            {
                "std of logits": std,
                "|softmax − piecewise|₁": np.abs(soft - piecewise).sum(-1).mean(),
                "|softmax − sparsemax|₁": np.abs(soft - sparse).sum(-1).mean(),
                "Σ piecewise": piecewise.sum(-1).mean(),
                "active share": pieces.active.mean(),
                "sparsemax support": (sparse > 0).mean(),
                "entropy softmax": attention_entropy(soft).mean(),
                "entropy piecewise": attention_entropy(normalised).mean(),
                "entropy sparsemax": attention_entropy(sparse).mean(),
            }
        )
    return rows


def symmetrised(seed: int = 0) -> list[Row]:
    """Section 4: for asymmetric W_QK, ρ of its symmetric part beside the exact ρ."""
    rng = np.random.default_rng(seed)
    process = TokenProcess.random_walk(40)
    d = 32
    symmetric = rng.standard_normal((d, d))
    symmetric = 0.3 * (symmetric + symmetric.T) / np.sqrt(2) + 0.3 * np.eye(d)
    turn = rng.standard_normal((d, d))
    turn = 0.3 * (turn - turn.T) / np.sqrt(2)
    rows: list[Row] = []
    for amount in (0.0, 0.25, 0.5, 1.0, 2.0):
        w = symmetric + amount * turn
        exact = rho(_Joint(np.eye(d), w), process, np.sqrt(d))
        of_part = rho(np.linalg.eigvalsh(symmetric), process, np.sqrt(d))
        rows.append(
            {
                "antisymmetric part": amount,
                "share of ‖W‖²": ((amount * turn) ** 2).sum() / (w**2).sum(),
                "tr W²": np.trace(w @ w),
                "ρ first": exact[0],
                "symmetrised first": of_part[0],
                "ρ middle": exact[19],
                "symmetrised middle": of_part[19],
                "largest gap": np.abs(exact - of_part).max(),
            }
        )
    return rows


@dataclass(frozen=True)
class _Joint:
    w_q: Array
    w_k: Array


def limits(seed: int = 0) -> list[Row]:
    """Lemma 2: the limits of ρ(θ), approached."""
    del seed  # exact
    rows: list[Row] = []
    for r in (1.0, 2.0, 4.0, -4.0):
        for theta in (0.25, 0.5, 0.6, 0.75, 1.0):
            near = [rho_curve(theta, np.sign(r) * xi, abs(r) / xi) for xi in (1e2, 1e4, 1e6)]
            rows.append(
                {
                    "limit": f"ξη → {r:g}",
                    "θ": theta,
                    "ξ=1e2": float(near[0]),
                    "ξ=1e4": float(near[1]),
                    "ξ=1e6": float(near[2]),
                    "right limit": float(focus_limit(theta, r)),
                    "printed limit": float(0.5 <= theta <= 0.5 + 1 / r if r > 0 else 0.5 + 1 / r <= theta <= 0.5),
                }
            )
    return rows


def regimes(seed: int = 0) -> list[Row]:
    """Section 4: the shape of ρ over the (ξ, η) plane, at large T and exactly at T = 40, d = 128."""
    del seed  # exact
    xis, etas = (-10.0, -5.0, -2.0, -1.0, 0.0, 1.0, 2.0, 5.0, 10.0), (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
    maps = {
        "large T": regime_map(xis, etas),
        "exact": regime_map_at(xis, etas, dim=128, process=TokenProcess.random_walk(40)),
    }
    return [
        {"law": law, "ξ": xi} | {f"η={eta:g}": str(name) for eta, name in zip(etas, names[i], strict=True)}
        for law, names in maps.items()
        for i, xi in enumerate(xis)
    ]


def uniformity(seed: int = 0) -> list[Row]:
    """Lemma 2, limit 3: at fixed η, ξ → 0 is said to make ρ flat."""
    del seed  # exact
    theta = np.linspace(0, 1, 201)
    rows: list[Row] = []
    for form in ("asymptotic", "printed"):
        for eta in (0.1, 1.0, 10.0, 1000.0):
            curve, slope = rho_curve(theta, 1e-9, eta, form), rho_curve_slope(theta, 1e-9, eta, form)
            rows.append(
                {
                    "variance": form,
                    "η": eta,
                    "ρ(0)": curve[0],
                    "ρ(½)": curve[100],
                    "ρ(1)": curve[-1],
                    "highest/lowest": curve.max() / curve.min(),
                    "largest |ρ′|": np.abs(slope).max(),
                    "printed limit of |ρ′|": 0.0,
                }
            )
    return rows


def gradient_orders(seed: int = 0) -> list[Row]:
    """Appendix B.2: how the terms (19), (20), (21) of the QK-gradient grow with T.

    Eight independent replicates give each slope its standard error.
    """
    lengths = (50, 100, 200, 400, 800)
    rows: list[Row] = []
    for d, gain in ((4, 2.0), (16, 2.0), (16, 0.05)):
        norms = np.stack([_gradient_norms(d, gain, lengths, seed + 1000 * k) for k in range(8)])  # (8, T, 3)
        slopes = np.stack([np.polyfit(np.log(lengths), np.log(n), 1)[0] for n in norms])
        for term, name, claimed in ((0, "(19)", 8), (1, "(20)", 5), (2, "(21)", 4)):
            rows.append(
                {
                    "W_QK": f"{gain:g}·I, d = {d}",
                    "term": name,
                    "paper's bound": f"O(T^{claimed})",
                    "measured exponent": slopes[:, term].mean(),
                    "± s.e.": slopes[:, term].std(ddof=1) / np.sqrt(len(slopes)),
                    f"norm at T={lengths[0]}": norms[:, 0, term].mean(),
                    f"norm at T={lengths[-1]}": norms[:, -1, term].mean(),
                    f"relative to (19) at T={lengths[-1]}": norms[:, -1, term].mean() / norms[:, -1, 0].mean(),
                }
            )
    return rows


def _network(d: int, gain: float) -> OneLayer:
    """Random value and feed-forward matrices, fixed: the statement is about T, not about them."""
    rng = np.random.default_rng(12345)
    w_v = rng.standard_normal((d, d)) / np.sqrt(d)
    w_f = np.eye(d) + 0.5 * rng.standard_normal((d, d)) @ rng.standard_normal((d, d)) / d
    return OneLayer(gain * np.eye(d), w_v, w_f, np.sqrt(d))


def _gradient_norms(d: int, gain: float, lengths: tuple[int, ...], seed: int) -> Array:
    network = _network(d, gain)
    norms = []
    for k, tokens in enumerate(lengths):
        x = TokenProcess.random_walk(tokens + 1).sample(400, d, seed=seed + k)
        g = network.qk_gradient(x[:, :-1], x[:, -1])
        norms.append([np.linalg.norm(term) for term in (g.e19, g.e20, g.e21)])
    return np.asarray(norms)


def diagonal(seed: int = 0) -> list[Row]:
    """Section 3: the gradient reduced to (19) (Eq. 4), and further to its diagonal terms γ̃_i^i."""
    rows: list[Row] = []
    for d, gain in ((4, 2.0), (16, 2.0), (16, 0.05)):
        network = _network(d, gain)
        for tokens in (50, 200, 800):
            x = TokenProcess.random_walk(tokens + 1).sample(1000, d, seed=seed)
            g = network.qk_gradient(x[:, :-1], x[:, -1])
            reduced = network.diagonal_gradient(x[:, :-1], x[:, -1]).e19
            whole = np.linalg.norm(g.total)
            rows.append(
                {
                    "W_QK": f"{gain:g}·I, d = {d}",
                    "T": tokens,
                    "|(19)| / |∇J|": np.linalg.norm(g.e19) / whole,
                    "error of keeping (19) only": np.linalg.norm(g.e19 - g.total) / whole,
                    "error of dropping (21)": np.linalg.norm(g.e21) / whole,
                    "|diagonal (19)| / |(19)|": np.linalg.norm(reduced) / np.linalg.norm(g.e19),
                    "cosine of the two": float((reduced * g.e19).sum())
                    / (np.linalg.norm(reduced) * np.linalg.norm(g.e19)),
                }
            )
    return rows


def depth(seed: int = 0) -> list[Row]:
    """Section 5, A2: rank over depth and entropy, at fixed scale with rising |mean|, and at fixed mean."""
    d, process = 128, TokenProcess.random_walk(40)
    cells = [
        (f"√(tr W²/d) = {root:g}", share * root, np.sqrt(1 - share**2) * root)
        for root in (0.1, 0.3, 1.0)
        for share in (-1.0, -0.5, 0.0, 0.5, 1.0)
    ] + [(f"mean = {mean:g}", mean, std) for mean in (-0.3, 0.3) for std in (0.0, 0.1, 0.3, 1.0)]
    rows: list[Row] = []
    for fixed, mean, std in cells:
        w = normal_spectrum(mean, std, d)
        plain = rank_over_depth(w, process, layers=3, seed=seed)
        skip = rank_over_depth(w, process, layers=12, skip=True, seed=seed)
        row: Row = {"fixed": fixed, "mean": mean, "std": std, "entropy, layer 1": plain.entropy[0]}
        row |= {f"residual at {layer}": plain.residual[layer] for layer in range(4)}
        rows.append(row | {"with skip at 3": skip.residual[3], "with skip at 12": skip.residual[12]})
    return rows


def entropy_bound(seed: int = 0) -> list[Row]:
    """Eq. (9): measured attention entropy above the bound at the tokens' own ν."""
    d, process = 32, TokenProcess.random_walk(40)
    x = process.sample(1, d, seed=seed)[0]
    rows: list[Row] = []
    for gain in (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2):
        w = gain * np.eye(d)
        nu = entropy_nu(x, w, np.sqrt(d))
        measured = attention_entropy(softmax(x @ w @ x.T / np.sqrt(d)))
        rows.append(
            {
                "W_QK": f"{gain:g}·I",
                "ν": nu,
                "lowest entropy": measured.min(),
                "mean entropy": measured.mean(),
                "bound (Zhai)": float(entropy_lower_bound(nu, 40)),
                "printed (9)": float(entropy_lower_bound(nu, 40, "printed")),
                "ln T": np.log(40),
            }
        )
    return rows


STUDIES: dict[str, Study] = {
    "dimension": Study("Larger d (Section 4)", "Does a larger d help ρ to localise?", dimension),
    "softmax": Study("Three softmaxes (Section 2)", "How far is the piecewise softmax from softmax?", softmaxes),
    "symmetrised": Study(
        "Symmetrised ρ (Section 4)", "May an asymmetric W_QK be replaced by its symmetric part?", symmetrised
    ),
    "limits": Study("Limits of ρ(θ) (Lemma 2)", "Which limits hold, and where do boundary points go?", limits),
    "regimes": Study("Regimes (Section 4)", "Which shape has ρ, for each ξ and η?", regimes),
    "uniformity": Study("Uniformity (Lemma 2, limit 3)", "Does ξ → 0 alone make ρ flat?", uniformity),
    "orders": Study("Growth of the gradient (Appendix B.2)", "Does (19) dominate (20) and (21)?", gradient_orders),
    "diagonal": Study("Diagonal reduction (Section 3, Eq. 4)", "Do the terms γ̃_i^i suffice?", diagonal),
    "depth": Study("Rank over depth (Section 5, A2)", "Does a larger |mean| at fixed scale keep the rank?", depth),
    "entropy": Study("Entropy bound (Eq. 9)", "Does the bound hold under the measured entropy?", entropy_bound),
}
