"""What the paper says of its experiments, put to the test with the numbers of one sweep.

Verdicts are three words: reproduced, not reproduced, cannot tell. What makes them:

- Two strengths differ only if the seeds say so: the differences, paired by seed, are all of one sign and their mean
  exceeds twice their standard deviation (for three seeds t > 3.5, a two-sided p below 0.08). With a single seed, a
  difference must exceed `noise`, the relative spread between seeds measured in another sweep (`seed_spread`); without
  one, nothing can be told.
- A trend over the paper's five strengths is reproduced if κ₂ = 0 and 1 differ as claimed and no step between
  neighbours goes the other way by more than the seeds' spread and a tenth of the whole change. Neighbours that cannot
  be told apart do not break it: 0 and 10⁻³ hardly differ.
- A strength that was not trained, or a sweep that has not come to its end, gives "cannot tell".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from locater.io import nulled
from locater.lab.claims._comparing import (
    Noise,
    UndecidedError,
    comparable,
    kappa_name,
    noise_for,
    paired,
    relative,
    seed_spread,
    summaries,
    told_apart,
)
from locater.lab.claims.series import FIGURE_OF, Array, Sweep, broken_line, read_sweep, stripes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PAPER_KAPPAS", "Claim", "claims", "claims_markdown", "claims_table", "seed_spread"]

Finding: TypeAlias = tuple[str, str, dict[str, Any]]  # measured, verdict, evidence

PAPER_KAPPAS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
REPRODUCED, NOT_REPRODUCED, CANNOT_TELL = "reproduced", "not reproduced", "cannot tell"

MATERIAL = 0.1  # of the whole change: a smaller step back does not break a trend
THROUGHOUT = 0.95  # of the recorded steps is "entirely"
HELD = 0.1  # tr W_QK this close to its target is held there
SALIENT = 0.05  # stripes of this contrast, in units of ρ, can be seen
CORRELATED = 0.5  # rank correlation that counts, if several seeds have it; one seed needs ALONE
ALONE = 0.9
PHASES_AT = 10_000
PHASES_REMOVE = 0.75  # of a straight line's squared residuals, by breaking it
PHASES_STAY = 1.25  # factor by which a break may move when only the first half of training is seen


@dataclass(frozen=True)
class Claim:
    statement: str
    where: str  # in the paper
    measured: str  # our numbers, in words
    verdict: str  # reproduced, not reproduced or cannot tell
    evidence: dict[str, Any]  # plain numbers, words and lists


def claims(folder: str | Path, *, noise: Noise = None) -> list[Claim]:
    """The claims of Section 7 and Appendix D against the sweep in this folder."""
    sweep = comparable(read_sweep(folder))
    end, model = int(sweep.steps[-1]), sweep.config.model
    alike = model.norm == "post" and model.positions == "sines" and model.heads == 1
    number = FIGURE_OF.get((model.width, model.layers)) if alike else None
    figure, beside = f"Fig. {number or 6}", "" if number else " (of another model)"
    made = []
    for statement, place, test in _TESTS:
        try:
            measured, verdict, evidence = test(sweep, noise)
        except UndecidedError as why:
            measured, verdict, evidence = str(why), CANNOT_TELL, {}
        if end < sweep.config.steps:
            measured, verdict = f"at step {end:,} of {sweep.config.steps:,}: {measured}", CANNOT_TELL
        evidence = {"step": end, "steps": sweep.config.steps} | evidence
        made.append(Claim(statement, place.format(figure=figure) + beside, measured, verdict, nulled(evidence)))
    return made


def claims_table(folder: str | Path, *, noise: Noise = None) -> pd.DataFrame:
    """A row a claim: claim, where, measured, verdict, seeds."""
    import pandas as pd

    rows = [
        (claim.statement, claim.where, claim.measured, claim.verdict, claim.evidence.get("seeds"))
        for claim in claims(folder, noise=noise)
    ]
    return pd.DataFrame(rows, columns=["claim", "where", "measured", "verdict", "seeds"])


def claims_markdown(folder: str | Path, *, noise: Noise = None) -> str:
    """The table for a page."""
    lines = ["| the paper says | where | measured | verdict |", "|---|---|---|---|"]
    for claim in claims(folder, noise=noise):
        cells = (claim.statement, claim.where, claim.measured, f"**{claim.verdict}**")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


# --- judging ------------------------------------------------------------------------------------------------------


def _signed(value: float, form: str) -> str:
    return f"{value:{form}}".replace("-", "−")


def _seeds(seeds: Sequence[int]) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _trend(quantity: str, sign: int, kappas: Sequence[float | None]) -> Callable[[Sweep, Noise], Finding]:
    """Tests that a quantity rises (+1) or falls (−1) along strengths."""

    def test(sweep: Sweep, noise: Noise) -> Finding:
        rows, seeds = paired(sweep, kappas)
        level = noise_for(noise, quantity)
        values = summaries(sweep)[quantity][rows]  # (strength, seed)
        means = values.mean(1)
        steps = [int(told_apart(a, b, level)) for a, b in pairwise(values)]
        ends = int(told_apart(values[0], values[-1], level))
        change = relative(values[0], values[-1])
        with np.errstate(invalid="ignore"):
            material = np.abs(np.diff(means)) > MATERIAL * np.abs(means[-1] - means[0])
        back = [told == -sign and bool(large) for told, large in zip(steps, material, strict=True)]
        verdict = CANNOT_TELL
        if ends:
            verdict = REPRODUCED if ends == sign and not any(back) else NOT_REPRODUCED
        alone = len(seeds) == 1 and level is None
        signs = {1: " <", -1: " >", 0: "," if alone else " ≈"}
        chain = f"{means[0]:.4g}" + "".join(
            f"{signs[told]} {mean:.4g}" for told, mean in zip(steps, means[1:], strict=True)
        )
        names = ", ".join(map(kappa_name, kappas))
        why = ", and no noise to compare with" if alone else ""
        measured = (
            f"κ₂ = {names}: {chain}; {_signed(float(change.mean()), '+.2%')} from first to last ({_seeds(seeds)}{why})"
        )
        evidence = {"seeds": len(seeds), "kappa_2": list(kappas), "mean": means, "values": values, "steps_told": steps}
        return measured, verdict, evidence | {"ends_told": ends, "relative_change": change, "noise": level}

    return test


def _trace_held(sweep: Sweep, noise: Noise) -> Finding:
    del noise  # the yardstick is the target, not another strength
    rows, seeds = paired(sweep, PAPER_KAPPAS)
    late = sweep.steps >= sweep.steps[-1] / 2
    gap = sweep.values["trace_gap"][rows][..., late].mean(-1)  # (strength, seed)
    held = gap <= HELD
    without = [float(sweep.values["trace"][index, -1]) for index in sweep.of(None).values()]
    verdict = REPRODUCED if held.all() else NOT_REPRODUCED if (gap > HELD).all(1).any() else CANNOT_TELL
    beside = f"; without LocAteR tr W_QK ends at {np.mean(without):.3g}" if without else ""
    chain = ", ".join(f"{value:.2g}" for value in gap.mean(1))
    measured = f"mean |tr W_QK − target| of heads, second half: {chain} at κ₂ = 0 to 1 ({_seeds(seeds)}){beside}"
    evidence = {"seeds": len(seeds), "kappa_2": list(PAPER_KAPPAS), "gap": gap, "held_within": HELD}
    return measured, verdict, evidence | {"last_trace_without": without}


def _entropy_throughout(sweep: Sweep, noise: Noise) -> Finding:
    rows, seeds = paired(sweep, PAPER_KAPPAS)
    even = sweep.even()
    if not len(even.steps):
        raise UndecidedError("no record after the first steps yet")
    entropy = even.values["entropy"][rows]  # (strength, seed, step)
    told = told_apart(entropy[0], entropy[-1], noise_for(noise, "entropy"))
    higher, lower = float((told > 0).mean()), float((told < 0).mean())
    in_order = float((np.diff(entropy.mean(1), axis=0) > 0).all(0).mean())
    verdict = REPRODUCED if higher >= THROUGHOUT else NOT_REPRODUCED if lower > 1 - THROUGHOUT else CANNOT_TELL
    measured = (
        f"κ₂ = 1 above 0 at {higher:.0%} of the recorded steps, below at {lower:.0%}; all five means in order at "
        f"{in_order:.0%} ({_seeds(seeds)})"
    )
    evidence = {"seeds": len(seeds), "share_higher": higher, "share_lower": lower, "share_all_in_order": in_order}
    return measured, verdict, evidence | {"records": len(even.steps)}


def _phases(sweep: Sweep, noise: Noise) -> Finding:
    """Two phases are a line with one bend near 10⁴ that stays when only the first half of training is seen.

    That it stays is what counts. A curve without a time of its own, such as a power law, also follows a bent line far
    better than a straight one; but its bend moves with the end of the window.
    """
    del noise
    even = sweep.even()
    early = even.steps <= sweep.steps[-1] / 2
    if sweep.steps[-1] < 2 * PHASES_AT or early.sum() < 8:
        raise UndecidedError(
            f"needs {2 * PHASES_AT:,} steps and 16 records, has {sweep.steps[-1]:,} and {len(even.steps)}"
        )
    lines = [index for kappa in (None, *PAPER_KAPPAS) for index in sweep.of(kappa).values()]
    found: dict[str, Any] = {}
    for name, values in (
        ("log-perplexity", np.log(even.values["perplexity"])),
        ("scale", even.values["scale"]),
        ("entropy", even.values["entropy"]),
    ):
        series = values[lines]
        series = series[np.isfinite(series).all(1)]
        if not len(series):
            raise UndecidedError(f"{name} is not finite")
        bend, removed = broken_line(even.steps, series)
        bend_early, _ = broken_line(even.steps[early], series[:, early])
        moved = np.maximum(bend / bend_early, bend_early / bend)
        near = (bend >= PHASES_AT / 2) & (bend <= 2 * PHASES_AT)
        phases = (removed >= PHASES_REMOVE) & near & (moved <= PHASES_STAY)
        found[name] = {
            "share": float(phases.mean()),
            "bend": float(np.median(bend)),
            "bend_first_half": float(np.median(bend_early)),
            "removed": float(np.median(removed)),
        }
    shares = [each["share"] for each in found.values()]
    agree = sum(share >= 2 / 3 for share in shares)
    verdict = REPRODUCED if agree >= 2 else NOT_REPRODUCED if max(shares) <= 1 / 3 else CANNOT_TELL
    measured = "; ".join(
        f"{name} bends at {each['bend']:,.0f} ({each['bend_first_half']:,.0f} in the first half alone), which removes "
        f"{each['removed']:.0%} of a line's residual; two phases in {each['share']:.0%} of members"
        for name, each in found.items()
    )
    return measured, verdict, {"members": len(lines), "near": PHASES_AT} | found


def _stripes_shown(sweep: Sweep, noise: Noise) -> Finding:
    del noise  # the yardstick is the sampling error
    rows, seeds = paired(sweep, (1.0, None))
    found = [[stripes(sweep.steps, sweep.rho[index], sweep.config.probe_blocks) for index in pair] for pair in rows]
    contrast = np.array([[each.contrast for each in pair] for pair in found])  # (with and without, seed)
    if not np.isfinite(contrast).all():
        raise UndecidedError("ρ was not recorded at every step")
    chance = np.array([[each.chance for each in pair] for pair in found])
    salient = (contrast >= SALIENT) & (chance < 1e-3)
    if salient[0].all() and not salient[1].any():
        verdict = REPRODUCED
    else:
        verdict = NOT_REPRODUCED if not salient[0].any() or salient[1].all() else CANNOT_TELL
    sampling = float(np.mean([each.sampling.mean() for pair in found for each in pair]))
    measured = (
        f"contrast of ρ over positions {contrast[0].mean():.3f} with κ₂ = 1, {contrast[1].mean():.3f} without; "
        f"sampling error {sampling:.3f}, {SALIENT} is salient ({_seeds(seeds)})"
    )
    evidence = {"seeds": len(seeds), "contrast_with": contrast[0], "contrast_without": contrast[1]}
    return measured, verdict, evidence | {"chance": chance, "sampling": sampling, "salient_from": SALIENT}


def _rank_correlation(x: Array, y: Array) -> float:
    from scipy.stats import rankdata

    if not (np.isfinite(x).all() and np.isfinite(y).all()) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def _falls_with_scale(quantity: str) -> Callable[[Sweep, Noise], Finding]:
    """Tests that, over strengths at the end of training, a quantity is the higher the smaller the scale."""

    def test(sweep: Sweep, noise: Noise) -> Finding:
        del noise
        kappas = [kappa for kappa in sweep.kappas if kappa is not None]
        if len(kappas) < 4:
            raise UndecidedError(f"needs four strengths to rank, has {len(kappas)}")
        rows, seeds = paired(sweep, kappas)
        scale, other = sweep.values["scale"][rows][..., -1], sweep.values[quantity][rows][..., -1]
        found = np.array([_rank_correlation(scale[:, seed], other[:, seed]) for seed in range(len(seeds))])
        bar = CORRELATED if len(seeds) > 1 else ALONE
        verdict = REPRODUCED if (found <= -bar).all() else NOT_REPRODUCED if (found >= bar).all() else CANNOT_TELL
        chain = ", ".join(_signed(value, "+.2f") for value in found)
        measured = f"rank correlation over {len(kappas)} strengths {chain} ({_seeds(seeds)})"
        return measured, verdict, {"seeds": len(seeds), "kappa_2": kappas, "rank_correlation": found}

    return test


def _entropy_falls_over_time(sweep: Sweep, noise: Noise) -> Finding:
    del noise
    even = sweep.even()
    if len(even.steps) < 8:
        raise UndecidedError(f"needs eight records, has {len(even.steps)}")
    pairs = zip(even.values["scale"], even.values["entropy"], strict=True)
    found = np.array([_rank_correlation(scale, entropy) for scale, entropy in pairs])
    share = float((found <= -CORRELATED).mean())
    verdict = REPRODUCED if share >= 0.9 else NOT_REPRODUCED if share <= 0.5 else CANNOT_TELL
    measured = (
        f"rank correlation over training at most −{CORRELATED} in {share:.0%} of {len(found)} members; "
        f"median {_signed(float(np.median(found)), '+.2f')}, "
        f"from {_signed(found.min(), '+.2f')} to {_signed(found.max(), '+.2f')}"
    )
    names = [member.name for member in even.members]
    return measured, verdict, {"members": names, "rank_correlation": found, "share": share}


def _past_one(sweep: Sweep, noise: Noise) -> Finding:
    """Where the perplexity turns, if it does: not the paper's claim but what its trend would lead one to."""
    kappas = [kappa for kappa in sweep.kappas if kappa is not None and kappa >= 1]
    if not any(kappa > 1 for kappa in kappas):
        raise UndecidedError("not trained: κ₂ > 1")
    rows, seeds = paired(sweep, [1.0, *(kappa for kappa in kappas if kappa > 1)])
    evidence: dict[str, Any] = {"seeds": len(seeds), "kappa_2": kappas}
    parts, verdicts = [], []
    for quantity in ("best perplexity", "last perplexity"):
        level, values = noise_for(noise, quantity), summaries(sweep)[quantity][rows]
        means = values.mean(1)
        low = int(np.where(np.isfinite(means), means, np.inf).argmin())
        worse = [k for k in range(low + 1, len(kappas)) if told_apart(values[low], values[k], level) > 0]
        better = bool(told_apart(values[0], values[low], level) < 0)
        turn = f", worse at {kappas[worse[0]]:g}" if worse else ", no turn told"
        chain = ", ".join(f"{mean:.4g}" for mean in means)
        parts.append(f"{quantity} {chain}: lowest at κ₂ = {kappas[low]:g}{turn}")
        evidence[quantity] = {
            "mean": means,
            "values": values,
            "lowest_at": kappas[low],
            "better_than_at_1": better,
            "worse_from": kappas[worse[0]] if worse else None,
        }
        to_the_end = low == len(kappas) - 1 and better
        verdicts.append(NOT_REPRODUCED if worse else REPRODUCED if to_the_end else CANNOT_TELL)
    names = ", ".join(map(kappa_name, kappas))
    return f"κ₂ = {names}: {'; '.join(parts)} ({_seeds(seeds)})", verdicts[0], evidence


_TESTS: tuple[tuple[str, str, Callable[[Sweep, Noise], Finding]], ...] = (
    ("LocAteR holds tr W_QK at its target, 1", "Section 6, {figure}A", _trace_held),
    ("the stronger κ₂, the smaller the eigenspectrum scale", "{figure}B", _trend("scale", -1, PAPER_KAPPAS)),
    ("κ₂ keeps the attention entropy higher during the updates entirely", "{figure}C", _entropy_throughout),
    ("the stronger κ₂, the higher the attention entropy at the end", "{figure}C", _trend("entropy", +1, PAPER_KAPPAS)),
    (
        "the stronger κ₂, the better the perplexity, at its best over training",
        "{figure}D",
        _trend("best perplexity", -1, PAPER_KAPPAS),
    ),
    (
        "the stronger κ₂, the better the perplexity, at the end",
        "{figure}D",
        _trend("last perplexity", -1, PAPER_KAPPAS),
    ),
    (
        "LocAteR (κ₂ = 1) betters the perplexity of no LocAteR, at its best over training",
        "Section 7",
        _trend("best perplexity", -1, (None, 1.0)),
    ),
    (
        "LocAteR (κ₂ = 1) betters the perplexity of no LocAteR, at the end",
        "Section 7",
        _trend("last perplexity", -1, (None, 1.0)),
    ),
    ("two learning phases, before and after 10⁴ iterations", "Section 7", _phases),
    ("ρ has lasting stripes with LocAteR (κ₂ = 1) and none without", "Fig. 7", _stripes_shown),
    ("the smaller the scale, the higher the entropy, across strengths", "Section 7, A2", _falls_with_scale("entropy")),
    ("the smaller the scale, the higher the entropy, over training", "Section 7, A2", _entropy_falls_over_time),
    (
        "the smaller the scale, the further from rank collapse, across strengths",
        "Section 5, A2",
        _falls_with_scale("rank_residual"),
    ),
    ("the stronger the better holds past κ₂ = 1 too", "beyond {figure}D", _past_one),
)
