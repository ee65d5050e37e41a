"""Comparisons are made as they were planned, by seed; docs/cause.md shows what the runs in results/ give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from locater import LocaterError
from locater.lab import PRESETS, Config, Intervention, Member, ModelConfig
from locater.lab.cause import Comparison, Condition, Design, condition_of, design
from locater.lab.claims import effects, effects_markdown, has_comparisons
from locater.lab.claims.series import read_sweep
from locater.lab.runs.records import Run, write_run
from locater.lab.runs.sweep import Plan

ROOT = Path(__file__).parent.parent.parent.parent
CONFIG = Config(model=ModelConfig(width=16, ffn=16, tokens=8), steps=100)
SMALL = design(entropies=(1.0,), traces=(0.0,), scales=(2.0,), thorough=False)
SEEDS = (0, 1, 2)


def members_of(made, config=CONFIG, seeds=SEEDS, rate=1e-3):
    return made.members(config, seeds, learning_rate=rate, decay=0.01)


def written(folder, perplexities, seeds=SEEDS, steps=(0, 100), plan=SMALL, change=lambda member: member, **about):
    """A sweep's folder in which every member of a condition ends at a perplexity of seed."""
    members = [change(member) for member in members_of(plan, seeds=seeds)]
    folder.mkdir(parents=True)
    write_run(Run(folder, CONFIG, tuple(members), {"comparisons": plan.to_json(), "corpus": "a text", **about}))
    lines = []
    for step in steps:
        for each in members:
            value = perplexities(condition_of(each), each.seed) if step else 1000.0
            loss = None if value is None else float(np.log(value))
            heads = {name: [[1.0]] for name in ("trace", "scale", "trace_square", "entropy", "max_logit")}
            record = {"step": step, "member": each.name, "train_loss": loss, "valid_loss": loss, "perplexity": value}
            lines.append(json.dumps(record | heads | {"rank_residual": [0.5, 0.5]}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def by_condition(condition, seed):
    shift = {"locater": -2.0, "noise": 1.0}.get(condition, 0.0)
    return 200.0 + 10 * seed + shift + 0.1 * seed * (shift != 0) + 5 * (condition == "trace-0") * (-1) ** seed


def test_effects_are_paired_by_seed_with_student_s_interval(tmp_path):
    found = {each.name: each for each in effects(written(tmp_path / "run", by_condition)).effects}
    assert list(found) == [comparison.name for comparison in SMALL.comparisons]
    for each in found.values():
        pairs = [[by_condition(name, seed) for seed in SEEDS] for name in (each.condition, each.reference)]
        change = np.divide(*map(np.array, pairs)) - 1
        if np.ptp(change) == 0:
            assert (each.change, each.half_width) == (0, 0)
            assert each.verdict == "no effect seen"
            continue
        interval = ttest_1samp(change, 0).confidence_interval(0.95)
        assert each.change - each.half_width == pytest.approx(interval.low, rel=1e-9)
        assert each.change + each.half_width == pytest.approx(interval.high, rel=1e-9)
        expected = "lower" if interval.high < 0 else "higher" if interval.low > 0 else "no effect seen"
        assert each.verdict == expected
    assert found["LocAteR's gain"].verdict == "lower"
    assert found["noise of LocAteR's size"].verdict == "higher"
    assert found["trace held at 0"].verdict == "no effect seen"


def test_seeds_in_several_folders_are_one_sweep(tmp_path):
    one = written(tmp_path / "one", by_condition)
    parts = [written(tmp_path / f"seed-{seed}", by_condition, seeds=(seed,)) for seed in SEEDS]
    assert effects(parts) == effects(one)
    with pytest.raises(LocaterError, match="once more; give each seed once"):
        effects([one, parts[0]])
    other = written(
        tmp_path / "other", by_condition, seeds=(7,), plan=replace(SMALL, comparisons=SMALL.comparisons[1:])
    )
    with pytest.raises(LocaterError, match="different planned comparisons"):
        effects([one, other])


def test_one_seed_a_broken_member_and_an_unfinished_run_leave_it_open(tmp_path):
    (alone, *_) = effects(written(tmp_path / "alone", by_condition, seeds=(0,))).effects
    assert (alone.verdict, alone.measured) == ("cannot tell", "−1.00%, one seed")
    broken = written(tmp_path / "broken", lambda name, seed: None if name == "locater" else by_condition(name, seed))
    (first, *_) = effects(broken).effects
    assert (first.verdict, first.measured) == ("cannot tell", "broke")
    begun = effects(written(tmp_path / "begun", by_condition, steps=(0, 50)))
    assert begun.step == 50
    assert {each.verdict for each in begun.effects} == {"cannot tell"}


def test_a_member_that_broke_leaves_it_open_however_finite_its_last_perplexity(tmp_path):
    path = written(tmp_path / "run", by_condition) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if (line["step"], line["member"]) == (100, "locater-s1"):
            line["broke_at"] = 60
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = effects(path.parent)
    for each in found.effects:
        concerned = "locater" in (each.condition, each.reference)
        assert ((each.verdict, each.measured) == ("cannot tell", "broke")) == concerned
    assert [one.condition for one in found.conditions if np.isnan(one.perplexity)] == ["locater"]


def test_a_sweep_without_planned_comparisons_has_none(tmp_path):
    write_run(Run(tmp_path, CONFIG, (Member("one"),), {}))
    assert not has_comparisons(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(LocaterError, match="no comparisons were planned"):
        effects(tmp_path)


def test_the_paper_s_claims_pass_over_interventions(tmp_path):
    """Without LocAteR, and with κ₂ = 1, a seed has one member each; a flipped trace is neither."""
    lines = read_sweep(written(tmp_path / "run", by_condition)).members
    assert [line.name for line in lines] == [f"{name}-s{seed}" for name in ("none", "locater") for seed in SEEDS]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("learning_rate", lambda member: replace(member, learning_rate=1e-2)),
        ("mean_strength", lambda m: replace(m, mean_strength=9.0) if condition_of(m) == "trace-flipped" else m),
        (
            "intervention",
            lambda m: replace(m, intervention=Intervention(entropy=0.7)) if condition_of(m) == "entropy-1" else m,
        ),
    ],
)
def test_folders_in_which_a_condition_is_another_are_refused(tmp_path, name, change):
    first = written(tmp_path / "a", by_condition, seeds=(0, 1))
    second = written(tmp_path / "b", by_condition, seeds=(2,), change=change)
    with pytest.raises(LocaterError, match=rf"differ in the {name} of .*nothing but their seeds"):
        effects([first, second])


def test_before_all_planned_seeds_are_there_nothing_can_be_told(tmp_path):
    parts = [written(tmp_path / f"{seed}", by_condition, seeds=(seed,), planned_seeds=[0, 1, 2]) for seed in SEEDS]
    assert {each.verdict for each in effects(parts[:2]).effects} == {"cannot tell"}
    assert "lower" in {each.verdict for each in effects(parts).effects}


# ---------------------------------------------------------------------- designs


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.design is not None])
def test_every_preset_with_a_design_is_one_plan_and_who_follows_another_is_beside_it(name, tmp_path):
    preset = PRESETS[name]
    members = members_of(preset.design, preset.config, preset.seeds)
    plan = Plan.of(tmp_path, preset.config, members, 24, {})
    assert len(preset.seeds) >= 5
    assert [member for group in plan.groups for member in group.members] == members
    assert {condition_of(member) for member in members} == {condition.name for condition in preset.design.conditions}
    leaders = {leader for member in members if member.intervention for leader in member.intervention.leaders}
    controls = any(condition.name == "locaters-entropy" for condition in preset.design.conditions)
    followed = ("none", "locater") if controls else ()
    assert leaders == {f"{name}-s{seed}" for name in followed for seed in preset.seeds}
    if controls:
        seeds = [{member.seed for member in group.members} for group in plan.groups]
        assert sorted(seed for own in seeds for seed in own) == sorted(preset.seeds)
    compared = {each.condition for each in preset.design.comparisons} | {"none"}
    assert compared == {condition.name for condition in preset.design.conditions}


def test_the_early_preset_is_the_first_updates_of_the_whole_one():
    """Where LocAteR ends after a part of training, it ends at the same update."""
    whole, early = (PRESETS[name] for name in ("cause-d128-l1", "cause-d128-l1-early"))
    assert replace(early.config, steps=whole.config.steps) == whole.config
    assert (early.learning_rate, early.seeds) == (whole.learning_rate, whole.seeds)
    assert set(early.design.comparisons) <= set(whole.design.comparisons)
    of_whole = {condition.name: condition for condition in whole.design.conditions}
    for condition in early.design.conditions:
        own, other = condition.intervention, of_whole[condition.name].intervention
        if condition.name == "locater-first-tenth":
            assert own.until * early.config.steps == other.until * whole.config.steps == 5_000
            own = replace(own, until=other.until)
        assert replace(condition, intervention=own) == of_whole[condition.name]


def test_the_levels_without_controls_are_those_with_them():
    levels = {"entropies": (2.0,), "traces": (0.0,), "scales": (6.0, 12.0)}
    whole, part = design(**levels), design(**levels, controls=False)
    names = ["none", "locater", "entropy-2", "trace-0", "scale-6", "scale-12"]
    assert [condition.name for condition in part.conditions] == names
    assert set(part.conditions) < set(whole.conditions)
    assert part.comparisons == tuple(each for each in whole.comparisons if {each.condition, each.reference} <= {*names})


def test_members_that_follow_each_other_are_not_separated(tmp_path):
    members = members_of(SMALL)
    count = len(SMALL.conditions)
    assert [len(g.members) for g in Plan.of(tmp_path, CONFIG, members, 2 * count + 1, {}).groups] == [2 * count, count]
    with pytest.raises(LocaterError, match=f"choose a group size of {count} or more"):
        Plan.of(tmp_path, CONFIG, members, count - 1, {})
    free = [member for member in members if member.intervention is None]
    assert [len(g.members) for g in Plan.of(tmp_path, CONFIG, free, 5, {}).groups] == [5, 5, 2]


def test_comparisons_stay_as_they_were_planned(tmp_path):
    plan = Plan.of(tmp_path / "sweep", CONFIG, members_of(SMALL), 24, {"comparisons": SMALL.to_json()})
    plan.write()
    plan.check()
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["comparisons"] == SMALL.to_json()
    with pytest.raises(LocaterError, match="begun with other planned comparisons"):
        replace(plan, about={"comparisons": SMALL.to_json()[:3]}).check()


def test_a_design_that_does_not_fit_together_is_refused():
    with pytest.raises(LocaterError, match="'gain' compares some, which is no condition"):
        Design((Condition("none"),), (Comparison("gain", "some", "none"),))
    with pytest.raises(LocaterError, match="names a condition twice"):
        Design((Condition("none"), Condition("none")), ())
    for wrong in ({"name": "gain"}, {"name": "gain", "condition": 1, "reference": "none"}):
        with pytest.raises(LocaterError, match="comparison"):
            Comparison.from_json(wrong)
    deep = design(entropies=(), traces=(), scales=(), layers=6)
    with pytest.raises(LocaterError, match="layer-5-s0 acts on layer 5"):
        Plan.of("nowhere", CONFIG.changed(layers=5), members_of(deep), 24, {})


def test_a_follower_follows_the_member_of_its_own_seed():
    made = Condition("as", intervention=Intervention(entropy_of="none")).member(
        CONFIG, 3, learning_rate=1e-3, decay=0.01, kappa_1=100
    )
    assert made.intervention == Intervention(entropy_of="none-s3")
    assert (made.name, made.seed, made.kappa_2) == ("as-s3", 3, None)


# ---------------------------------------------------------------------- the page


def test_what_docs_cause_says_of_the_papers_model_is_what_its_sweeps_hold():
    page = (ROOT / "docs" / "cause.md").read_text()
    found = effects([ROOT / "results" / f"cause-d128-l1-early{more}" for more in ("", "-seeds-3-4")])
    assert {each.seeds for each in found.effects} == {5}
    of = {(each.condition, each.reference): each for each in found.effects}
    for pair in (
        ("locaters-entropy", "none"), ("locater-nones-entropy", "none"), ("trace-pulled", "none"), ("noise", "none"),
        ("locater", "trace-pulled"), ("locater", "trace-flipped"), ("noise-nones-entropy", "none"),
        ("noise-one-way", "none"), ("locater-first-tenth", "none"), ("decay-times-10", "none"),
    ):  # fmt: skip
        assert f"{100 * abs(of[pair].change):.2f}% ± {100 * of[pair].half_width:.2f}" in page, pair
    gain, alone, beside = (of[pair].change for pair in (("locater", "none"), ("locaters-entropy", "none"),
                                                        ("locater", "locater-nones-entropy")))  # fmt: skip
    assert f"{100 * alone / gain:.0f} to {100 * beside / gain:.0f}% of the gain" in page
    ends = {each.condition: each for each in found.conditions}
    assert f"({ends['locaters-entropy'].entropy:.2f} nats instead of {ends['none'].entropy:.2f}) gains" in page
    assert f"the scale then grows to {ends['locaters-entropy'].scale:.0f}" in page
    assert f"at a scale of {ends['locater-nones-entropy'].scale:.1f}" in page
    assert f"({ends['decay-times-10'].entropy:.2f} nats, {ends['decay-times-10'].scale:.0f})" in page
    # Holm's rule: the smallest p-value against 5% over all of them, the next over all but one, and so on
    wide = student.ppf(0.975, 4)
    p = sorted(2 * student.sf(abs(each.change) / each.half_width * wide, 4) for each in found.effects)
    remain = [value < 0.05 / (len(p) - i) for i, value in enumerate(p)]
    assert remain == [True] * 14 + [False] * 2
    assert "By Holm's rule for 16 comparisons all fourteen effects remain" in page


def test_what_docs_cause_says_of_six_layers_is_what_the_sweeps_over_strengths_hold():
    page = " ".join((ROOT / "docs" / "cause.md").read_text().split())
    one, six = (read_sweep([ROOT / "results" / name for name in names]) for names in (
        ["paper-d128-l1"], [f"paper-d128-l6{more}" for more in ("", "-seeds-1", "-seeds-2")]
    ))  # fmt: skip

    def ends(sweep, quantity, kappa):
        rows = sweep.of(kappa)
        return np.array([sweep.values[quantity][rows[seed], -1] for seed in sorted(rows)])

    def told(sweep, kappa, other):
        change = 100 * (ends(sweep, "perplexity", kappa) / ends(sweep, "perplexity", other) - 1)
        assert len(change) == 3
        return f"{abs(change.mean()):.2f}% ± {student.ppf(0.975, 2) * change.std(ddof=1) / 3**0.5:.2f}"

    def shrunk(sweep, kappa):
        return f"{100 * (1 - ends(sweep, 'scale', kappa).mean() / ends(sweep, 'scale', None).mean()):.0f}%"

    assert f"(+{told(six, 1.0, None)} at d = 128" in page
    assert f"ends {told(six, 0.1, None)} below no LocAteR" in page
    assert f"rises by {told(six, 1.0, 0.1)}" in page
    assert f"by {shrunk(one, 1.0)} with one layer, by {shrunk(six, 1.0)} with six" in page
    assert f"shrinks it by {shrunk(six, 0.1)}" in page


def test_what_docs_cause_says_of_where_nothing_breaks_is_what_its_sweeps_hold():
    page = (ROOT / "docs" / "cause.md").read_text()
    folders = [ROOT / "results" / name for name in ("cause-laptop", "cause-laptop-seeds-5-14")]
    gain = effects(folders).effects[0]
    assert gain.measured in page
    for folder in folders:
        of = {each.condition: each for each in effects(folder).effects if each.reference == "none"}
        assert of["locater"].verdict == "no effect seen"
        assert of["decay-times-10"].measured in page
        assert of["scale-12"].measured in page


def test_what_docs_cause_says_of_where_attention_breaks_is_of_all_seeds():
    folders = [ROOT / "results" / f"cause-laptop-rotary-3e-2{more}" for more in ("", "-seeds-10-14")]
    page = (ROOT / "docs" / "cause.md").read_text()
    told = {
        "LocAteR's gain", "LocAteR's entropy by temperature alone", "LocAteR with the entropy of no LocAteR",
        "what LocAteR adds to its entropy", "what LocAteR's direction adds to its size", "the sign of the trace",
        "noise with the entropy of no LocAteR",
    }  # fmt: skip
    found = {each.name: each for each in effects(folders).effects}
    for name in told:
        assert f"{100 * abs(found[name].change):.1f}% ± {100 * found[name].half_width:.1f}" in page, name
    of_sines = {each.name: each for each in effects(ROOT / "results" / "cause-laptop-sines-3e-2").effects}
    for name in told - {"noise with the entropy of no LocAteR"}:
        assert f"{100 * abs(of_sines[name].change):.1f}% ± {100 * of_sines[name].half_width:.1f}" in page, name
    for one in (found, of_sines):
        assert {one[f"trace held at {level}"].verdict for level in (0, 1, 4)} == {"no effect seen"}


def test_what_was_compared_in_the_papers_model_is_what_its_preset_plans():
    preset, folders = PRESETS["cause-d128-l1-early"], [ROOT / "results" / "cause-d128-l1-early"]
    folders.append(folders[0].with_name("cause-d128-l1-early-seeds-3-4"))
    for folder, seeds in zip(folders, ((0, 1, 2), (3, 4)), strict=True):
        run = json.loads((folder / "sweep.json").read_text())
        assert run["comparisons"] == preset.design.to_json()
        assert Config.from_json(run["config"]) == preset.config.changed(checkpoint_every=0)
        members = [Member.from_json(member) for group in run["groups"] for member in group["members"]]
        assert members == members_of(preset.design, preset.config, seeds, preset.learning_rate)
    assert (folders[0] / "claims.md").read_text() == effects_markdown(folders), "locater claims DIR DIR --markdown"


@pytest.mark.parametrize(
    ("name", "preset", "seeds", "rate"),
    [
        ("cause-laptop", "cause-laptop", range(5), 2e-3),
        ("cause-laptop-seeds-5-14", "cause-laptop", range(5, 15), 2e-3),
        ("cause-laptop-rotary", "cause-laptop-rotary", range(5, 10), 1e-2),
        ("cause-laptop-rotary-3e-2", "cause-laptop-rotary", range(5, 10), 3e-2),
        ("cause-laptop-rotary-3e-2-seeds-10-14", "cause-laptop-rotary", range(10, 15), 3e-2),
        ("cause-laptop-sines-3e-2", "cause-laptop-rotary", range(5, 10), 3e-2),
    ],
)
def test_what_was_compared_on_the_laptop_is_what_its_preset_plans(name, preset, seeds, rate):
    folder = ROOT / "results" / name
    run = json.loads((folder / "sweep.json").read_text())
    preset = PRESETS[preset]
    config = preset.config.changed(positions="sines") if "sines" in name else preset.config
    assert run["comparisons"] == preset.design.to_json()
    assert Config.from_json(run["config"]) == config
    members = [Member.from_json(member) for group in run["groups"] for member in group["members"]]
    assert members == preset.design.members(config, seeds, learning_rate=rate, decay=0.01)
    assert (folder / "claims.md").read_text() == effects_markdown(folder), "locater claims DIR --markdown DIR/claims.md"
