"""Figures 6 to 12 from SYNTHETIC runs: numbers made up here, in the format a sweep leaves. No model is trained."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from locater import LocaterError
from locater.figures import draw, draw_run
from locater.lab.config import Config, ModelConfig, members_for
from locater.lab.runs.records import MetricsFile, Run, write_run

PAPER = (None, 0.0, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class Synthetic:
    """What is true by construction of a synthetic run. Effects: +1 as the paper claims, −1 the reverse, 0 none."""

    scale: float = 1
    entropy: float = 1
    perplexity: float = 1
    rank: float = 1
    seeds_disagree: bool = False  # every other seed shows the reverse of each effect
    jitter: float = 2e-4  # relative, of each seed and strength
    trace_at: float = 1.0  # where LocAteR's trace ends up
    bends: bool = True  # at 10⁴ steps; else power laws
    stripes_with: float = 0.12  # standard deviation over positions of ρ
    stripes_without: float = 0.0
    turns_at: float = 10.0  # κ₂ from which perplexity gets worse again


def synthetic_run(
    folder: Path,
    truth: Synthetic | None = None,
    *,
    kappas: Sequence[float | None] = PAPER,
    seeds: Sequence[int] = (0, 1),
    width: int = 128,
    layers: int = 1,
    steps: int = 50_000,
    records: int = 50,
    reading: str = "figures",
    until: int | None = None,
) -> Path:
    """A SYNTHETIC run's folder: plausible curves that no model made."""
    truth = truth or Synthetic()
    every = steps // records
    config = Config(
        model=ModelConfig(width=width, ffn=width, layers=layers),
        data="wikitext-2", steps=every * records, record_every=every, record_early=False, checkpoint_every=0,
    )  # fmt: skip
    members = members_for(config, kappas, seeds=seeds, learning_rate=2.5e-5, reading=reading)
    folder.mkdir(parents=True)
    write_run(Run(folder, config, tuple(members), {"note": "synthetic"}))
    file = MetricsFile(folder, keep_until=-1, expected=None)
    last = config.steps if until is None else until
    file.append([r for m in members for r in _synthetic_records(truth, config, m) if r["step"] <= last])
    file.close()
    return folder


def _synthetic_records(truth, config, member):
    blocks, shape = config.probe_blocks, (config.model.layers, config.model.heads)
    t = np.arange(0, config.steps + 1, config.record_every, dtype=float)
    rng = np.random.default_rng([member.seed, round(1e4 * (member.kappa_2 or 0)), member.kappa_2 is None])
    shared = np.random.default_rng(member.seed)  # what the members of one seed have in common
    kappa = -0.0 if member.kappa_2 is None else member.kappa_2
    strength = np.log10(1 + 30 * kappa) / np.log10(31)  # 0 at κ₂ = 0, 1 at 1
    flip = -1 if truth.seeds_disagree and member.seed % 2 else 1
    wobble = 1 + truth.jitter * rng.normal(size=4)[:, None]
    grown = _rise(t, truth.bends)
    scale = (30 + 25 * grown * (1 - 0.6 * flip * truth.scale * strength)) * wobble[0] + shared.normal() * 0.3
    entropy = (3.1 - 0.9 * grown * (1 - 0.3 * flip * truth.entropy * strength)) * wobble[1]
    residual = (0.9 - 0.2 * grown * (1 - 0.5 * flip * truth.rank * strength)) * wobble[2]
    turned = max(0.0, np.log10(max(kappa, 1e-9) / truth.turns_at)) * 0.02
    better = flip * truth.perplexity * 0.02 * strength * (member.kappa_2 is not None)
    low = 150 * (1 - better + turned) * (1 + 0.002 * shared.normal())
    perplexity = np.exp(np.log(low) + _fall(t, truth.bends) + 0.02 * np.maximum(t / 3e4 - 1, 0) ** 2) * wobble[3]
    start = shared.normal() * 0.5
    end = truth.trace_at if member.kappa_2 is not None else 3.0 + 0.5 * shared.normal()
    trace = end + (start - end) * np.exp(-t / (400 if member.kappa_2 is not None else 1e4))
    bumps = np.random.default_rng(7).normal(size=config.model.tokens)  # stripes stay where they are
    height = truth.stripes_with * strength if member.kappa_2 is not None else truth.stripes_without
    uniform = np.random.default_rng(8).random((blocks, config.model.tokens))  # the same blocks at every record
    slope = np.linspace(-0.05, 0.05, config.model.tokens)
    for k, step in enumerate(t):
        rho = np.clip(0.5 + slope + height * bumps * grown[k], 0.02, 0.98)
        counted = (uniform < rho).mean(0)
        yield {
            "step": int(step),
            "member": member.name,
            "train_loss": float(np.log(perplexity[k])),
            "valid_loss": float(np.log(perplexity[k])),
            "perplexity": float(perplexity[k]),
            **{
                name: np.full(shape, value[k]).tolist()
                for name, value in (("trace", trace), ("scale", scale), ("trace_square", scale), ("entropy", entropy))
            },
            "max_logit": np.ones(shape).tolist(),
            "rank_residual": [0.95, *[float(residual[k])] * shape[0]],
            "rho": np.broadcast_to(counted, (*shape, len(counted))).tolist(),
        }


def _rise(t, bends):
    """From 0 to 1, fast for 10⁴ steps and slowly after; or ever more slowly, at no time of its own."""
    return np.where(t < 1e4, 0.8 * t / 1e4, 0.8 + 0.2 * (t - 1e4) / 4e4) if bends else (t / 5e4) ** 0.3


def _fall(t, bends):
    return np.where(t < 1e4, 0.9 * (1 - t / 1e4), 0.0) if bends else 2 * ((t + 50) / 5e4) ** -0.2 - 2


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("synthetic") / "run")


@pytest.fixture(scope="module")
def drawn(sweep, tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    return {number: draw(number, folder, runs=sweep) for number in (6, 7)}


def load(path: Path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", [6, 7])
def test_a_figure_from_runs_is_a_picture_a_drawing_and_its_data(drawn, number):
    png, svg, data = drawn[number]
    assert [path.name for path in (png, svg, data)] == [f"figure-{number}.{kind}" for kind in ("png", "svg", "json")]
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    assert width >= 1400
    assert height >= 900
    assert svg.read_text().rstrip().endswith("</svg>")
    assert load(data)["figure"] == number


def test_figure_6_draws_the_mean_of_the_seeds_in_a_band_from_the_lowest_to_the_highest(sweep, drawn):
    data = load(drawn[6][2])
    assert data["band"] == "lowest to highest over seeds"
    assert list(data["lines"]) == ["0", "0.001", "0.01", "0.1", "1", "none"]
    line = data["lines"]["0.1"]
    assert line["seeds"] == [0, 1]
    for quantity in ("trace", "scale", "entropy", "perplexity"):
        found = {r["member"]: np.mean(r[quantity]) for r in records(sweep) if r["step"] == line["steps"][7]}
        pair = found["k0.1-s0"], found["k0.1-s1"]
        at = {name: values[7] for name, values in line[quantity].items()}
        assert at == pytest.approx({"mean": np.mean(pair), "low": min(pair), "high": max(pair)})


def test_figure_6_magnifies_where_the_perplexity_is_lowest(drawn):
    data = load(drawn[6][2])
    left, right = data["magnified"]["steps"]
    floor, ceiling = data["magnified"]["perplexity"]
    for key, line in data["lines"].items():
        lowest = min(line["perplexity"]["mean"])
        assert data["magnified"]["minima_of_means"][key]["perplexity"] == lowest
        assert left <= line["steps"][line["perplexity"]["mean"].index(lowest)] <= right
        assert floor < lowest < ceiling


def test_figure_7_shows_rho_of_one_seed_and_tells_stripes_from_sampling(sweep, drawn):
    data = load(drawn[7][2])
    found = [r["rho"][0][0] for r in records(sweep) if r["member"] == "k1-s0"]
    np.testing.assert_allclose(data["1"]["rho"], found)
    # 256 blocks, ρ near ½: √(¼/255)
    assert data["none"]["sampling"][-1] == pytest.approx(np.sqrt(0.25 / 255), rel=0.05)
    assert data["1"]["contrast"] > 0.05
    assert data["1"]["chance"] < 1e-6
    assert data["none"]["contrast"] < 0.02
    assert data["none"]["chance"] > 1e-3


@pytest.mark.parametrize(
    ("number", "width", "layers"), [(8, 32, 1), (9, 32, 3), (10, 32, 6), (11, 128, 3), (12, 128, 6)]
)
def test_each_figure_takes_the_sweep_of_its_own_model(tmp_path, number, width, layers):
    # the folder of several sweeps: the one that fits is found
    synthetic_run(tmp_path / "runs" / "fits", kappas=(None, 1.0), seeds=(0,), records=4, width=width, layers=layers)
    synthetic_run(tmp_path / "runs" / "other", kappas=(None, 1.0), seeds=(0,), records=4, width=64)
    data = load(draw(number, tmp_path / "out", runs=tmp_path / "runs")[2])
    assert data["model"] == {"width": width, "layers": layers, "heads": 1, "tokens": 64}


@pytest.mark.parametrize("number", range(6, 13))
def test_without_runs_one_sentence_says_how_to_make_them(tmp_path, number):
    with pytest.raises(
        LocaterError, match=r"^figures 6 to 12 need the folder of a sweep: --runs DIR, .*paper-d128-l1`$"
    ):
        draw(number, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_sweep_of_another_model_is_named(tmp_path, sweep):
    with pytest.raises(
        LocaterError, match=r"d = 32, 3 layers \(locater sweep paper-d32-l3\), .* holds d = 128, 1 layer$"
    ):
        draw(9, tmp_path / "new", runs=sweep)
    assert not (tmp_path / "new").exists()


def test_other_readings_are_not_drawn(tmp_path):
    synthetic_run(tmp_path / "runs" / "a", kappas=(None, 0.0, 1.0), seeds=(0,), records=4)
    synthetic_run(tmp_path / "runs" / "b", kappas=(None, 0.01, 1.0), seeds=(0,), records=4, reading="printed")
    assert list(load(draw(6, tmp_path / "out", runs=tmp_path / "runs")[2])["lines"]) == ["0", "1", "none"]


def test_a_sweep_in_groups_is_one_picture(tmp_path):
    for group, kappas in enumerate([(None, 0.0), (1.0,)]):
        synthetic_run(tmp_path / "runs" / f"group-{group}", kappas=kappas, seeds=(0, 1), records=4)
    synthetic_run(tmp_path / "one", kappas=(None, 0.0, 1.0), seeds=(0, 1), records=4)
    grouped, whole = (draw(6, tmp_path / f"out-{name}", runs=tmp_path / name)[2] for name in ("runs", "one"))
    assert load(grouped) == load(whole)


def test_the_same_member_twice_is_refused(tmp_path):
    for name in "ab":
        synthetic_run(tmp_path / "runs" / name, kappas=(None, 1.0), seeds=(0,), records=4)
    with pytest.raises(LocaterError, match=r"κ₂ = 1 with seed 0 twice; keep one of a/k1-s0 and b/k1-s0"):
        draw(6, tmp_path / "out", runs=tmp_path / "runs")


def test_strengths_beyond_the_papers_have_another_line(tmp_path):
    from locater.figures._lab import curves
    from locater.lab.claims.series import read_sweep

    folder = synthetic_run(tmp_path / "run", kappas=(*PAPER, 10.0, 1000.0), seeds=(0,), records=4)
    lines = curves(read_sweep(folder)).figure.axes[0].get_lines()[:8]  # rising, then no LocAteR, then the target
    dashes = [line._dash_pattern[1] is not None for line in lines]
    assert dashes == [False] * 5 + [True] * 3
    assert len({tuple(np.atleast_1d(line.get_color()).tolist()) for line in lines}) == 8
    luminance = [float(np.dot(line.get_color()[:3], (0.21, 0.72, 0.07))) for line in lines[:5]]
    assert luminance == sorted(luminance, reverse=True)


def test_any_run_is_drawn_in_two_pictures(tmp_path):
    folder = synthetic_run(tmp_path / "run", kappas=(None, 1.0, 100.0), seeds=(0,), width=64, steps=600, records=12)
    written = draw_run(folder, tmp_path / "out", "small")
    kinds = ("png", "svg", "json")
    assert [path.name for path in written] == [f"small-{what}.{kind}" for what in ("curves", "rho") for kind in kinds]
    assert {"100", "none"} <= load(written[5]).keys()  # the strongest


def test_a_run_that_diverged_is_drawn_as_far_as_it_came(tmp_path):
    folder = synthetic_run(tmp_path / "run", kappas=(None, 1.0), seeds=(0,), records=8)
    spoilt = [r | ({"perplexity": float("nan")} if r["step"] > 20_000 else {}) for r in records(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in spoilt))
    values = load(draw(6, tmp_path / "out", runs=folder)[2])["lines"]["1"]["perplexity"]["mean"]
    assert values[-1] is None
    assert values[1] is not None
