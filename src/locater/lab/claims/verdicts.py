"""What the paper says of its experiments, put to the test with the numbers of one sweep.

Verdicts are three words: reproduced, not reproduced, cannot tell. What makes them:

- Two strengths differ only if the seeds say so: Student's 95% interval of the relative change, paired by seed, excludes
  0 (t > 4.3 for three seeds, 12.7 for two). With a single seed, a difference must exceed `noise`, the relative spread
  between seeds measured in another sweep (`seed_spread`); without one, everything is left open.
- A trend over the paper's five strengths is reproduced if κ₂ = 0 and 1 differ as claimed and no step between
  neighbours goes the other way by more than the seeds' spread and a tenth of the whole change. Neighbours that do not
  differ do not break it: 0 and 10⁻³ hardly do.
- A rank correlation over strengths counts if it is at least 0.5 in each seed and its interval over seeds excludes 0;
  with a single seed, if it is at least 0.9.
- What is read off a curve over training is judged at records 1, 2 and 3 fiftieths of training apart, whatever else was
  recorded. Where these disagree, the verdict would depend on how often one looks: "cannot tell".
- A strength that was not trained, or a sweep that has not come to its end, gives "cannot tell".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from locater.errors import LocaterError
from locater.io import nulled
from locater.lab.claims.series import FIGURE_OF, Folders, Sweep, kappa_name, read_sweep
from locater.lab.claims.statistics import (
    mean_interval,
    minimum,
    phases,
    rank_correlations,
    sign_of_difference,
    stripes,
    trend,
)
from locater.lab.config import PAPER_KAPPAS

__all__ = ["Claim", "claims", "claims_markdown"]

Noise: TypeAlias = Mapping[str, float] | float | None  # the relative spread between seeds, of each quantity or of all
Finding: TypeAlias = tuple[str, str, dict[str, Any]]  # measured, verdict, evidence

REPRODUCED, NOT_REPRODUCED, CANNOT_TELL = "reproduced", "not reproduced", "cannot tell"

THROUGHOUT = 0.95  # of the recorded steps is "entirely"
HELD = 0.1  # tr W_QK this close to its target is held there
SALIENT = 0.05  # stripes of this contrast, in units of ρ, can be seen
CORRELATED = 0.5  # rank correlation that counts, if each of several seeds has it
CORRELATED_ONE_SEED = 0.9  # and if there is a single one
PHASES_AT = 10_000
SPACINGS = (1, 2, 3)  # fiftieths of training between records: 50, 25 and 16 records


class UndecidedError(Exception):
    """Why a sweep cannot tell whether a claim holds."""


@dataclass(frozen=True)
class Claim:
    statement: str
    where: str  # in the paper
    measured: str  # our numbers, in words
    verdict: str  # reproduced, not reproduced or cannot tell
    evidence: dict[str, Any]  # plain numbers, words and lists


def claims(folders: Folders, *, noise: Noise = None) -> list[Claim]:
    """The claims of Section 7 and Appendix D against a sweep: a folder, or several that differ in their seeds alone."""
    sweep = read_sweep(folders).shared()
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


def claims_markdown(folders: Folders, *, noise: Noise = None) -> str:
    """The table for a page."""
    lines = ["| the paper says | where | measured | verdict |", "|---|---|---|---|"]
    for claim in claims(folders, noise=noise):
        cells = (claim.statement, claim.where, claim.measured, f"**{claim.verdict}**")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- one claim each


def _verdict(holds: bool, fails: bool) -> str:
    return REPRODUCED if holds else NOT_REPRODUCED if fails else CANNOT_TELL


def _signed(value: float, form: str) -> str:
    return f"{value:{form}}".replace("-", "−")


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def _noise_of(quantity: str, noise: Noise) -> float | None:
    return noise.get(quantity) if isinstance(noise, Mapping) else noise


def _paired(sweep: Sweep, kappas: Sequence[float | None]) -> tuple[NDArray[np.int64], int]:
    """Indices of members (strength, seed) for the seeds all these strengths have, and how many these are."""
    missing = [kappa_name(kappa) for kappa in kappas if kappa not in sweep.kappas]
    if missing:
        raise UndecidedError(f"not trained: κ₂ = {', '.join(missing)}")
    seeds = sorted(set.intersection(*(set(sweep.of(kappa)) for kappa in kappas)))
    if not seeds:
        raise UndecidedError("the strengths have no seed in common")
    return np.array([[sweep.of(kappa)[seed] for seed in seeds] for kappa in kappas], dtype=np.int64), len(seeds)


def _trend(quantity: str, sign: int, kappas: Sequence[float | None]) -> Callable[[Sweep, Noise], Finding]:
    """Tests that a quantity rises (+1) or falls (−1) along strengths."""

    def test(sweep: Sweep, noise: Noise) -> Finding:
        rows, seeds = _paired(sweep, kappas)
        level, values = _noise_of(quantity, noise), sweep.summaries()[quantity][rows]  # (strength, seed)
        found = trend(values, level)
        holds = found.ends == sign and not found.goes_back(sign)
        no_yardstick = seeds == 1 and level is None
        signs = {1: " <", -1: " >", 0: "," if no_yardstick else " ≈"}
        chain = f"{found.means[0]:.4g}" + "".join(
            f"{signs[step]} {mean:.4g}" for step, mean in zip(found.steps, found.means[1:], strict=True)
        )
        names = ", ".join(map(kappa_name, kappas))
        mean, half = mean_interval(found.change)
        change = _signed(float(mean), "+.2%") + (f" ± {100 * half:.2f}" if seeds > 1 else "")
        why = ", and no noise to compare with" if no_yardstick else ""
        measured = f"κ₂ = {names}: {chain}; {change} from first to last ({_count(seeds)}{why})"
        evidence = {
            "seeds": seeds,
            "kappa_2": list(kappas),
            "mean": found.means,
            "values": values,
            "steps_told": found.steps,
            "ends_told": found.ends,
            "relative_change": found.change,
            "interval": [float(mean - half), float(mean + half)],
            "noise": level,
        }
        return measured, _verdict(holds, found.ends != 0), evidence

    return test


def _trace_held(sweep: Sweep, _: Noise) -> Finding:  # the yardstick is the target, not another strength
    rows, seeds = _paired(sweep, PAPER_KAPPAS)
    late = sweep.steps >= sweep.steps[-1] / 2
    gap = sweep.values["trace_gap"][rows][..., late].mean(-1)  # (strength, seed)
    without = [float(sweep.values["trace"][index, -1]) for index in sweep.of(None).values()]
    beside = f"; without LocAteR tr W_QK ends at {np.mean(without):.3g}" if without else ""
    chain = ", ".join(f"{value:.2g}" for value in gap.mean(1))
    measured = f"mean |tr W_QK − target| of heads, second half: {chain} at κ₂ = 0 to 1 ({_count(seeds)}){beside}"
    evidence = {"seeds": seeds, "kappa_2": list(PAPER_KAPPAS), "gap": gap, "held_within": HELD}
    verdict = _verdict(bool((gap <= HELD).all()), bool((gap > HELD).all(1).any()))
    return measured, verdict, evidence | {"last_trace_without": without}


def _entropy_throughout(sweep: Sweep, noise: Noise) -> Finding:
    rows, seeds = _paired(sweep, PAPER_KAPPAS)
    even = sweep.even()
    if not len(even.steps):
        raise UndecidedError("no record after the first steps yet")
    entropy = even.values["entropy"][rows]  # (strength, seed, step)
    signs = sign_of_difference(entropy[0], entropy[-1], _noise_of("entropy", noise))
    higher, lower = float((signs > 0).mean()), float((signs < 0).mean())
    in_order = float((np.diff(entropy.mean(1), axis=0) > 0).all(0).mean())
    measured = (
        f"κ₂ = 1 above 0 at {higher:.0%} of the recorded steps, below at {lower:.0%}; all five means in order at "
        f"{in_order:.0%} ({_count(seeds)})"
    )
    evidence = {"seeds": seeds, "share_higher": higher, "share_lower": lower, "share_all_in_order": in_order}
    verdict = _verdict(higher >= THROUGHOUT, lower > 1 - THROUGHOUT)
    return measured, verdict, evidence | {"records": len(even.steps)}


def _at_each_spacing(test: Callable[[Sweep, Noise], Finding]) -> Callable[[Sweep, Noise], Finding]:
    """A test at records 1, 2 and 3 fiftieths of training apart; "cannot tell" where these do not agree.

    A curve fitted to records depends on how dense they are and on where they begin, which is as late as they are
    apart. The three spacings are the same for every recording of a run: a denser one has the same verdict, and one that
    lacks a fiftieth has none.
    """

    def judged(sweep: Sweep, noise: Noise) -> Finding:
        fiftieth = sweep.config.steps // 50
        if not fiftieth:
            raise UndecidedError(f"needs 50 steps, has {sweep.config.steps}")
        try:
            spaced = {count * fiftieth: sweep.every(count * fiftieth) for count in SPACINGS}
        except LocaterError as why:
            raise UndecidedError(str(why)) from why
        found = {spacing: test(each, noise) for spacing, each in spaced.items()}
        verdicts = {spacing: verdict for spacing, (_, verdict, _) in found.items()}
        measured, verdict, evidence = found[fiftieth]
        if len(set(verdicts.values())) > 1:
            by_spacing = ", ".join(f"{each} at records every {spacing:,}" for spacing, each in verdicts.items())
            measured, verdict = f"{measured}; depends on how often one looks: {by_spacing}", CANNOT_TELL
        at_spacing = {str(spacing): each for spacing, (_, _, each) in found.items()}
        spaced_evidence = {"verdict_at_spacing": {str(k): v for k, v in verdicts.items()}, "at_spacing": at_spacing}
        return measured, verdict, evidence | spaced_evidence

    return judged


@_at_each_spacing
def _phases(sweep: Sweep, _: Noise) -> Finding:  # the yardstick is a straight line
    if sweep.steps[-1] < 2 * PHASES_AT or len(sweep.steps) < 16:
        raise UndecidedError(
            f"needs {2 * PHASES_AT:,} steps and 16 records, has {sweep.steps[-1]:,} and {len(sweep.steps)}"
        )
    lines = [index for kappa in (None, *PAPER_KAPPAS) for index in sweep.of(kappa).values()]
    quantities = {
        "log-perplexity": np.log(sweep.values["perplexity"]),
        "scale": sweep.values["scale"],
        "entropy": sweep.values["entropy"],
    }
    found = {}
    for name, values in quantities.items():
        series = values[lines]
        series = series[np.isfinite(series).all(1)]
        if not len(series):
            raise UndecidedError(f"{name} is not finite")
        found[name] = phases(sweep.steps, series, PHASES_AT)
    shares = [each.share for each in found.values()]
    measured = "; ".join(
        f"{name} bends at {each.bend:,.0f} ({each.bend_first_half:,.0f} in the first half alone, "
        f"{each.bend_later:,.0f} without the first tenth), which removes {each.removed:.0%} of a line's residual; "
        f"two phases in {each.share:.0%} of members"
        for name, each in found.items()
    )
    evidence = {"members": len(lines), "near": PHASES_AT} | {name: each._asdict() for name, each in found.items()}
    return measured, _verdict(sum(share >= 2 / 3 for share in shares) >= 2, max(shares) <= 1 / 3), evidence


def _stripes_shown(sweep: Sweep, _: Noise) -> Finding:  # the yardstick is the sampling error
    rows, seeds = _paired(sweep, (1.0, None))
    found = [[stripes(sweep.steps, sweep.rho[index], sweep.config.probe_blocks) for index in pair] for pair in rows]
    contrast = np.array([[each.contrast for each in pair] for pair in found])  # (with and without, seed)
    if not np.isfinite(contrast).all():
        raise UndecidedError("ρ was not recorded at every step")
    chance = np.array([[each.chance for each in pair] for pair in found])
    shown, shown_without = (contrast >= SALIENT) & (chance < 1e-3)
    sampling = float(np.mean([each.sampling.mean() for pair in found for each in pair]))
    measured = (
        f"contrast of ρ over positions {contrast[0].mean():.3f} with κ₂ = 1, {contrast[1].mean():.3f} without; "
        f"sampling error {sampling:.3f}, {SALIENT} is salient ({_count(seeds)})"
    )
    evidence = {"seeds": seeds, "contrast_with": contrast[0], "contrast_without": contrast[1]}
    verdict = _verdict(shown.all() and not shown_without.any(), not shown.any() or shown_without.all())
    return measured, verdict, evidence | {"chance": chance, "sampling": sampling, "salient_from": SALIENT}


def _falls_with_scale(quantity: str) -> Callable[[Sweep, Noise], Finding]:
    """Tests that, over strengths at the end of training, a quantity is the higher the smaller the scale."""

    def test(sweep: Sweep, _: Noise) -> Finding:
        kappas = [kappa for kappa in sweep.kappas if kappa is not None]
        if len(kappas) < 4:
            raise UndecidedError(f"needs four strengths to rank, has {len(kappas)}")
        rows, seeds = _paired(sweep, kappas)
        found = rank_correlations(*(sweep.values[name][rows.T, -1] for name in ("scale", quantity)))  # (seed,)
        mean, half = mean_interval(found)
        bar, told = (CORRELATED, bool(abs(mean) > half)) if seeds > 1 else (CORRELATED_ONE_SEED, True)
        chain = ", ".join(_signed(value, "+.2f") for value in found)
        over = f", mean {_signed(float(mean), '+.2f')} ± {half:.2f}" if seeds > 1 else ""
        measured = f"rank correlation over {len(kappas)} strengths {chain}{over} ({_count(seeds)})"
        verdict = _verdict(told and bool((found <= -bar).all()), told and bool((found >= bar).all()))
        evidence = {"seeds": seeds, "kappa_2": kappas, "rank_correlation": found}
        return measured, verdict, evidence | {"interval": [float(mean - half), float(mean + half)]}

    return test


@_at_each_spacing
def _entropy_falls_over_time(sweep: Sweep, _: Noise) -> Finding:
    if len(sweep.steps) < 8:
        raise UndecidedError(f"needs eight records, has {len(sweep.steps)}")
    found = rank_correlations(sweep.values["scale"], sweep.values["entropy"])
    share = float((found <= -CORRELATED).mean())
    median, low, high = (_signed(float(of(found)), "+.2f") for of in (np.median, np.min, np.max))
    measured = (
        f"rank correlation over training at most −{CORRELATED} in {share:.0%} of {len(found)} members; "
        f"median {median}, from {low} to {high}"
    )
    names = [member.name for member in sweep.members]
    evidence = {"members": names, "rank_correlation": found, "share": share}
    return measured, _verdict(share >= 0.9, share <= 0.5), evidence


def _past_one(sweep: Sweep, noise: Noise) -> Finding:
    """Where the perplexity turns, if it does: not the paper's claim but what its trend would lead one to."""
    kappas = [kappa for kappa in sweep.kappas if kappa is not None and kappa >= 1]
    if not any(kappa > 1 for kappa in kappas):
        raise UndecidedError("not trained: κ₂ > 1")
    rows, seeds = _paired(sweep, [1.0, *(kappa for kappa in kappas if kappa > 1)])
    evidence: dict[str, Any] = {"seeds": seeds, "kappa_2": kappas}
    parts, verdicts = [], []
    for quantity in ("best perplexity", "last perplexity"):
        values = sweep.summaries()[quantity][rows]
        found = minimum(values, _noise_of(quantity, noise))
        lowest_at, worse_from = kappas[found.at], None if found.rises_at is None else kappas[found.rises_at]
        turn = ", no turn told" if worse_from is None else f", worse at {worse_from:g}"
        chain = ", ".join(f"{mean:.4g}" for mean in found.means)
        parts.append(f"{quantity} {chain}: lowest at κ₂ = {lowest_at:g}{turn}")
        evidence[quantity] = {
            "mean": found.means,
            "values": values,
            "lowest_at": lowest_at,
            "better_than_at_1": found.below_first,
            "worse_from": worse_from,
        }
        to_the_end = worse_from is None and found.at == len(kappas) - 1 and found.below_first
        verdicts.append(_verdict(to_the_end, worse_from is not None))
    names = ", ".join(map(kappa_name, kappas))
    return f"κ₂ = {names}: {'; '.join(parts)} ({_count(seeds)})", verdicts[0], evidence


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
