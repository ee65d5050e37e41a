"""Verdicts on SYNTHETIC sweeps, in which each claim is true, false or undecidable by construction."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import ttest_1samp
from test_lab_figures import PAPER, Synthetic, records, synthetic_run

from locater import LocaterError
from locater.lab.claims import claims, claims_markdown, seed_spread
from locater.lab.claims.series import read_sweep

TRACE = "LocAteR holds tr W_QK"
SCALE = "the stronger κ₂, the smaller the eigenspectrum scale"
ENTROPY_THROUGHOUT = "κ₂ keeps the attention entropy higher during the updates entirely"
ENTROPY = "the stronger κ₂, the higher the attention entropy at the end"
BEST = "the stronger κ₂, the better the perplexity, at its best"
LAST = "the stronger κ₂, the better the perplexity, at the end"
BEST_AGAINST_NONE = "LocAteR (κ₂ = 1) betters the perplexity of no LocAteR, at its best"
LAST_AGAINST_NONE = "LocAteR (κ₂ = 1) betters the perplexity of no LocAteR, at the end"
PHASES = "two learning phases"
STRIPES = "ρ has lasting stripes"
ENTROPY_BY_SCALE = "the smaller the scale, the higher the entropy, across"
ENTROPY_OVER_TIME = "the smaller the scale, the higher the entropy, over training"
RANK = "the smaller the scale, the further from rank collapse"
PAST_ONE = "the stronger the better holds past κ₂ = 1"
TRENDS = (SCALE, ENTROPY_THROUGHOUT, ENTROPY, BEST, LAST, BEST_AGAINST_NONE, LAST_AGAINST_NONE)


def judged(folder, noise=None):
    made = claims(folder, noise=noise)
    json.dumps([claim.evidence for claim in made], allow_nan=False)  # plain numbers throughout
    return lambda start: next(claim for claim in made if claim.statement.startswith(start))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("synthetic")
    three = {"seeds": (0, 1, 2)}
    reverse = Synthetic(
        scale=-1, entropy=-1, perplexity=-1, trace_at=3.0, bends=False, stripes_with=0.0, stripes_without=0.12, rank=1
    )
    return {
        "true": synthetic_run(root / "true", kappas=(*PAPER, 10.0, 100.0), **three),
        "false": synthetic_run(root / "false", reverse, **three),
        "disagree": synthetic_run(root / "disagree", Synthetic(seeds_disagree=True), **three),
        "one seed": synthetic_run(root / "one", seeds=(0,)),
    }


@pytest.fixture(scope="module")
def verdicts(folders):
    return {name: judged(folder) for name, folder in folders.items()}


def changed(folder, target, change):
    """A copy of a synthetic run with `change` applied to each of its records."""
    target.mkdir()
    (target / "run.json").write_text((folder / "run.json").read_text())
    (target / "metrics.jsonl").write_text("".join(json.dumps(change(r)) + "\n" for r in records(folder)))
    return target


def times(name, of, factor):
    """Multiplies one quantity of the members whose name starts with `of`."""

    def change(record):
        hit = record["member"].startswith(of)
        return record | ({name: (np.array(record[name]) * factor).tolist()} if hit else {})

    return change


@pytest.mark.parametrize("claim", [TRACE, *TRENDS, PHASES, STRIPES, ENTROPY_BY_SCALE, RANK])
def test_what_is_true_by_construction_is_reproduced(verdicts, claim):
    assert verdicts["true"](claim).verdict == "reproduced"


# with rank = 1 the residual rises with κ₂ while the scale does too: against A2; entropy against scale stays as claimed
@pytest.mark.parametrize("claim", [TRACE, *TRENDS, PHASES, STRIPES, RANK])
def test_what_is_false_by_construction_is_not(verdicts, claim):
    assert verdicts["false"](claim).verdict == "not reproduced"


def test_entropy_still_falls_with_scale_where_both_trends_are_reversed(verdicts):
    assert verdicts["false"](ENTROPY_BY_SCALE).verdict == "reproduced"
    assert verdicts["false"](ENTROPY_OVER_TIME).verdict == "reproduced"


@pytest.mark.parametrize("claim", TRENDS)
def test_seeds_that_disagree_cannot_tell(verdicts, claim):
    found = verdicts["disagree"](claim)
    assert found.verdict == "cannot tell"
    assert found.evidence["seeds"] == 3


def test_one_seed_without_noise_cannot_tell(verdicts):
    for claim in TRENDS:
        assert verdicts["one seed"](claim).verdict == "cannot tell"
    assert "1 seed, and no noise to compare with" in verdicts["one seed"](BEST).measured
    assert verdicts["one seed"](STRIPES).verdict == "reproduced"  # its yardstick is the sampling error
    assert verdicts["one seed"](STRIPES).evidence["seeds"] == 1


def test_one_seed_tells_what_exceeds_the_noise_measured_elsewhere(folders):
    spread = seed_spread(folders["true"])
    assert set(spread) == {"scale", "entropy", "best perplexity", "last perplexity"}
    assert 0 < spread["best perplexity"] < 0.01
    judge = judged(folders["one seed"], spread)
    for claim in TRENDS:
        assert judge(claim).verdict == "reproduced"
    # κ₂ = 1 betters the perplexity by 2% by construction
    assert judged(folders["one seed"], 0.05)(BEST).verdict == "cannot tell"
    with pytest.raises(LocaterError, match="one seed only"):
        seed_spread(folders["one seed"])


def test_a_bump_on_the_way_breaks_a_trend_and_a_small_one_does_not(folders, tmp_path):
    bump = changed(folders["true"], tmp_path / "bump", times("scale", "k0.1-", 1.3))
    assert judged(bump)(SCALE).verdict == "not reproduced"
    # 1% of the scale is more than the spread of the seeds, but is less than a tenth of the change from κ₂ = 0 to 1
    small = judged(changed(folders["true"], tmp_path / "small", times("scale", "k0.001-", 1.01)))(SCALE)
    assert small.evidence["steps_told"][0] == 1
    assert small.verdict == "reproduced"


def test_the_measured_numbers_are_those_of_the_records(folders, verdicts):
    last = max(r["step"] for r in records(folders["true"]))
    found = {r["member"]: r["scale"][0][0] for r in records(folders["true"]) if r["step"] == last}
    evidence = verdicts["true"](SCALE).evidence
    expected = [[found[f"k{kappa:g}-s{seed}"] for seed in range(3)] for kappa in PAPER[1:]]
    np.testing.assert_allclose(evidence["values"], expected)
    assert evidence["step"] == last
    assert "κ₂ = 0, 0.001, 0.01, 0.1, 1: 55" in verdicts["true"](SCALE).measured


def test_entropy_that_is_higher_at_the_end_only_is_not_higher_entirely(folders, tmp_path):
    def late(record):
        early = record["member"].startswith("k1-") and record["step"] <= 25_000
        return record | ({"entropy": [[record["entropy"][0][0] * 0.5]]} if early else {})

    judge = judged(changed(folders["true"], tmp_path / "late", late))
    assert judge(ENTROPY).verdict == "reproduced"
    assert judge(ENTROPY_THROUGHOUT).verdict == "not reproduced"
    assert judge(ENTROPY_THROUGHOUT).evidence["share_lower"] == pytest.approx(0.5, abs=0.02)


def test_best_and_last_perplexity_are_judged_apart(folders, tmp_path):
    def overfits(record):
        hit = record["member"].startswith("k1-") and record["step"] > 40_000
        return record | ({"perplexity": record["perplexity"] * 1.2} if hit else {})

    judge = judged(changed(folders["true"], tmp_path / "overfits", overfits))
    assert (judge(BEST).verdict, judge(LAST).verdict) == ("reproduced", "not reproduced")
    assert (judge(BEST_AGAINST_NONE).verdict, judge(LAST_AGAINST_NONE).verdict) == ("reproduced", "not reproduced")


def test_past_one_says_where_the_perplexity_turns(verdicts):
    found = verdicts["true"](PAST_ONE)
    assert found.verdict == "not reproduced"
    assert found.evidence["best perplexity"]["lowest_at"] == 10
    assert found.evidence["best perplexity"]["worse_from"] == 100
    assert verdicts["false"](PAST_ONE).verdict == "cannot tell"
    assert verdicts["false"](PAST_ONE).measured == "not trained: κ₂ > 1"


def test_past_one_without_a_turn_goes_on(tmp_path):
    folder = synthetic_run(tmp_path / "run", Synthetic(turns_at=1e6), kappas=(1.0, 10.0, 100.0), seeds=(0, 1, 2))
    assert judged(folder)(PAST_ONE).verdict == "reproduced"


def test_strengths_that_were_not_trained_are_named(tmp_path):
    judge = judged(synthetic_run(tmp_path / "run", kappas=(None, 0.0, 1.0), seeds=(0, 1, 2)))
    for claim in (TRACE, SCALE, ENTROPY_THROUGHOUT, ENTROPY, BEST, LAST):
        assert (judge(claim).verdict, judge(claim).measured) == ("cannot tell", "not trained: κ₂ = 0.001, 0.01, 0.1")
    assert judge(BEST_AGAINST_NONE).verdict == "reproduced"
    assert judge(RANK).measured == "needs four strengths to rank, has 2"


def test_a_sweep_that_has_not_come_to_its_end_cannot_tell(tmp_path):
    folder = synthetic_run(tmp_path / "run", seeds=(0, 1, 2), until=30_000)
    for claim in claims(folder):
        assert claim.verdict == "cannot tell"
        assert claim.measured.startswith("at step 30,000 of 50,000: ")


def test_members_are_compared_at_the_steps_they_share(folders, tmp_path):
    folder = tmp_path / "short"
    changed(folders["true"], folder, lambda record: record)
    kept = [r for r in records(folder) if r["member"] != "k1-s0" or r["step"] <= 20_000]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    assert judged(folder)(SCALE).evidence["step"] == max(r["step"] for r in kept if r["member"] == "k1-s0")


def test_a_diverged_member_leaves_it_open(folders, tmp_path):
    def diverge(record):
        hit = record["member"] == "k1-s1" and record["step"] > 30_000
        return record | ({"perplexity": float("nan"), "scale": [[float("inf")]]} if hit else {})

    judge = judged(changed(folders["true"], tmp_path / "diverged", diverge))
    assert (judge(SCALE).verdict, judge(LAST).verdict) == ("cannot tell", "cannot tell")
    assert judge(BEST).verdict == "reproduced"  # it had its best before


def test_a_short_run_has_no_phases_to_tell(tmp_path):
    found = judged(synthetic_run(tmp_path / "run", steps=600, records=20))(PHASES)
    assert found.verdict == "cannot tell"
    assert found.measured == "needs a record every 12 updates, has none at 12"  # a fiftieth of 600
    found = judged(synthetic_run(tmp_path / "spaced", steps=600, records=50))(PHASES)
    assert (found.verdict, found.measured) == ("cannot tell", "needs 20,000 steps and 16 records, has 600 and 50")


def test_a_bend_that_moves_with_the_window_is_no_phase(verdicts):
    true, false = (verdicts[name](PHASES).evidence for name in ("true", "false"))
    for quantity in ("log-perplexity", "scale", "entropy"):
        assert true[quantity]["bend"] == pytest.approx(10_000, rel=0.1)
        assert true[quantity]["bend_first_half"] == pytest.approx(10_000, rel=0.1)
        assert true[quantity]["bend_later"] == pytest.approx(10_000, rel=0.1)
        # a power law: a bent line fits far better than a straight one here too, but bends where the window says
        assert false[quantity]["removed"] > 0.75
        assert false[quantity]["bend_first_half"] < 0.75 * false[quantity]["bend"]
        assert false[quantity]["bend_later"] > 1.4 * false[quantity]["bend"]


def thinned(folder, target, keep):
    """The same run, of which `keep` says which steps were recorded."""
    changed(folder, target, lambda record: record)
    kept = [record for record in records(folder) if keep(record["step"])]
    (target / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    run = json.loads((target / "run.json").read_text())
    steps = sorted({record["step"] for record in kept})
    run["config"]["record_every"] = min(b - a for a, b in pairwise(steps))
    (target / "run.json").write_text(json.dumps(run))
    return target


def starts_fast(record):
    """A transient of 600 steps, which records a thousand steps apart see and records three thousand apart do not."""
    transient = np.exp(-record["step"] / 600)
    entropy, scale = (np.array(record[name]) for name in ("entropy", "scale"))
    return record | {
        "perplexity": record["perplexity"] * np.exp(20 * transient),
        "entropy": (entropy + 20 * transient).tolist(),
        "scale": (scale - 500 * transient).tolist(),
    }


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Runs with a record every 500 steps."""
    root, dense = tmp_path_factory.mktemp("dense"), {"seeds": (0,), "records": 100}
    bends = synthetic_run(root / "bends", **dense)
    return {
        "bends": bends,
        "power laws": synthetic_run(root / "power laws", Synthetic(bends=False), **dense),
        "starts fast": changed(bends, root / "starts fast", starts_fast),
    }


@pytest.mark.parametrize(
    ("run", "phases"), [("bends", "reproduced"), ("power laws", "not reproduced"), ("starts fast", "cannot tell")]
)
def test_a_verdict_is_the_same_for_every_thinning_of_the_same_records(dense, tmp_path, run, phases):
    """Of what is read off a curve over training. A recording too sparse to judge by cannot tell."""
    whole = judged(dense[run])
    assert whole(PHASES).verdict == phases
    enough = {"every 1,000": lambda step: step % 1000 == 0, "and more": lambda step: 0 in (step % 1000, step % 1500)}
    too_few = {
        "every 1,500": lambda step: step % 1500 == 0 or step == 50_000,
        "every 2,500": lambda step: step % 2500 == 0,
        "every 5,000": lambda step: step % 5000 == 0,
        "one is missing": lambda step: step != 7000,
    }
    for name, keep in enough.items():
        found = judged(thinned(dense[run], tmp_path / name, keep))
        for claim in (PHASES, ENTROPY_OVER_TIME):
            assert (found(claim).verdict, found(claim).measured) == (whole(claim).verdict, whole(claim).measured)
    for name, keep in too_few.items():
        found = judged(thinned(dense[run], tmp_path / name, keep))
        for claim in (PHASES, ENTROPY_OVER_TIME):
            assert found(claim).verdict == "cannot tell"
            assert "needs a record every 1,000 updates" in found(claim).measured


def test_a_verdict_that_depends_on_how_often_one_looks_says_so(dense):
    found = judged(dense["starts fast"])(PHASES)
    verdicts = {"1000": "not reproduced", "2000": "not reproduced", "3000": "reproduced"}
    assert found.evidence["verdict_at_spacing"] == verdicts
    assert "depends on how often one looks: not reproduced at records every 1,000" in found.measured


def test_a_sweep_differs_in_strength_and_seed_only(tmp_path):
    folder = synthetic_run(tmp_path / "run", kappas=(None, 1.0), seeds=(0,), records=4)
    value = json.loads((folder / "run.json").read_text())
    value["members"][1]["learning_rate"] = 1e-3
    (folder / "run.json").write_text(json.dumps(value))
    with pytest.raises(LocaterError, match="differ in more than κ₂ and the seed"):
        read_sweep(folder)
    for name, width in (("a", 32), ("b", 64)):
        synthetic_run(tmp_path / "two" / name, kappas=(1.0,), seeds=(0,), records=4, width=width)
    with pytest.raises(LocaterError, match="give the folder of one sweep"):
        claims(tmp_path / "two")


# ---------------------------------------------------------------------- several folders of one sweep


@pytest.fixture(scope="module")
def by_seed(tmp_path_factory):
    """The true sweep, seed 0 in one folder and the others in another."""
    root, kappas = tmp_path_factory.mktemp("by seed"), (*PAPER, 10.0, 100.0)
    return [
        synthetic_run(root / f"seeds {seeds}" / "group-00", kappas=kappas, seeds=seeds).parent
        for seeds in ((0,), (1, 2))
    ]


def test_folders_of_seeds_are_one_sweep_in_any_order(folders, by_seed):
    whole = claims(folders["true"])
    assert claims(by_seed) == claims(by_seed[::-1]) == whole
    assert whole[1].evidence["seeds"] == 3
    assert claims_markdown(by_seed) == claims_markdown(folders["true"])


def test_the_interval_said_is_the_one_judged_by(by_seed):
    for claim in claims(by_seed):
        if "relative_change" in claim.evidence:
            changes = claim.evidence["relative_change"]
            low, high = ttest_1samp(changes, 0).confidence_interval(0.95)
            assert claim.evidence["interval"] == pytest.approx([low, high])
            assert f"{100 * np.mean(changes):+.2f}% ± {50 * (high - low):.2f} ".replace("-", "−") in claim.measured
            assert bool(claim.evidence["ends_told"]) == (low > 0 or high < 0)


def test_a_rank_correlation_whose_interval_contains_zero_cannot_tell(tmp_path):
    def unlike(record):
        """In one of two seeds κ₂ = 1 has the largest residual, not the third largest."""
        return record | ({"rank_residual": [0.95, 0.99]} if record["member"] == "k1-s1" else {})

    folder = synthetic_run(tmp_path / "run", kappas=(0.0, 1e-2, 1e-1, 1.0, 10.0, 100.0), seeds=(0, 1))
    assert judged(folder)(RANK).verdict == "reproduced"
    found = judged(changed(folder, tmp_path / "unlike", unlike))(RANK)
    assert max(found.evidence["rank_correlation"]) < -0.8
    assert found.evidence["interval"][0] < 0 < found.evidence["interval"][1]
    assert found.verdict == "cannot tell"


def with_run(folder, target, change):
    """A copy of a synthetic run whose run.json `change` has changed."""
    copy = changed(folder, target, lambda record: record)
    run = json.loads((copy / "run.json").read_text())
    change(run)
    (copy / "run.json").write_text(json.dumps(run))
    return copy


def setting(name, value):
    def change(run):
        (run["config"]["model"] if name in run["config"]["model"] else run["config"])[name] = value

    return change


def of_members(name, value):
    def change(run):
        for member in run["members"]:
            member[name] = value

    return change


DIFFERENCES = {
    "batch": setting("batch", 32),
    "dropout": setting("dropout", 0.2),
    "precision": setting("precision", "bf16"),
    "record_every": setting("record_every", 500),
    "steps": setting("steps", 60_000),
    "text": setting("data", "elsewhere"),
    "learning_rate": of_members("learning_rate", 1e-3),
    "target": of_members("target", 2.0),
    "κ₂": lambda run: run.update(members=[member for member in run["members"] if member["kappa_2"] != 100]),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_folders_that_differ_in_more_than_seeds_are_refused_by_the_name_of_what_differs(by_seed, tmp_path, name):
    other = with_run(by_seed[1] / "group-00", tmp_path / "other", DIFFERENCES[name])
    with pytest.raises(
        LocaterError, match=rf"differ in {name}; folders are one sweep only if .* but their seeds$"
    ) as said:
        claims([by_seed[0], other])
    assert str(by_seed[0]) in str(said.value)
    assert str(other) in str(said.value)


def test_how_often_checkpoints_were_written_and_where_the_text_lay_does_not_matter(by_seed, tmp_path):
    def same_text(run):
        run["corpus"] = "8296048177e57c56"

    def elsewhere(run):
        same_text(run)
        setting("data", "elsewhere")(run)
        setting("checkpoint_every", 7)(run)

    parts = [
        with_run(folder / "group-00", tmp_path / f"{seeds}", change)
        for seeds, folder, change in zip("ab", by_seed, (same_text, elsewhere), strict=True)
    ]
    assert claims(parts) == claims(by_seed)


def test_a_seed_in_two_folders_is_refused(folders, by_seed):
    with pytest.raises(LocaterError, match=r"both hold seed 1; "):
        claims([*by_seed, folders["true"]][1:])
    with pytest.raises(LocaterError, match=r"both hold seed 0; "):
        claims([by_seed[0], by_seed[0]])
    with pytest.raises(LocaterError, match="no folder"):
        claims([])


def test_the_page_has_a_row_a_claim(folders):
    made, page = claims(folders["true"]), claims_markdown(folders["true"])
    rows = page.splitlines()[2:]
    assert len(rows) == len(made)
    for row, claim in zip(rows, made, strict=True):
        assert row.replace("\\|", "").count("|") == 5  # four cells; bars inside them are escaped
        assert row.endswith(f"| **{claim.verdict}** |")
    assert {claim.verdict for claim in made} <= {"reproduced", "not reproduced", "cannot tell"}


@pytest.mark.parametrize(("setting", "value"), [("positions", "rotary"), ("norm", "pre")])
def test_a_model_that_is_not_the_paper_s_is_not_its_figure(folders, tmp_path, setting, value):
    copy = changed(folders["one seed"], tmp_path / "copy", lambda record: record)
    assert not any("another model" in claim.where for claim in claims(copy))
    run = json.loads((copy / "run.json").read_text())
    run["config"]["model"][setting] = value
    (copy / "run.json").write_text(json.dumps(run))
    assert all(claim.where.endswith("(of another model)") for claim in claims(copy))
