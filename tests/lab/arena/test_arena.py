"""The arena: every contender by the same rules, and a summary that says what happened."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from locater.cli import app
from locater.errors import LocaterError
from locater.figures import draw_arena
from locater.figures._arena import against_rate
from locater.lab.arena import ARENAS, CONTENDERS, outdated, read_arena, run_arena, summary, to_renew
from locater.lab.config import METHOD_NAMES
from locater.lab.engine.methods import METHODS
from markdown_pages import ROOT

SMALL = replace(
    ARENAS["laptop"],
    config=ARENAS["laptop"].config.changed(steps=3, warmup=1, record_every=3, width=16, ffn=16, tokens=16, batch=2),
    learning_rates=(1e-3, 3e-2),
    seeds=(0, 1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("arena")
    run_arena(SMALL, path, device="cpu")
    return path


def test_every_contender_that_has_a_strength_is_tried_at_as_many_and_trains_by_a_known_method():
    assert {one.method for one in CONTENDERS.values()} <= set(METHOD_NAMES)
    without = {"none", "sigma-reparam", "sigma-reparam-qk"}
    assert {name: len(one.strengths) for name, one in CONTENDERS.items()} == {
        name: 1 if name in without else 3 for name in CONTENDERS
    }
    for arena in ARENAS.values():
        assert set(arena.contenders) == set(CONTENDERS)


def test_every_contender_is_trained_at_every_rate_and_seed(folder):
    models = read_arena(folder)
    counts = models.groupby("contender").size()
    assert set(counts.index) == set(CONTENDERS)
    assert (counts == 4).all()
    assert models.loss.notna().all()
    assert (models.milliseconds > 0).all()
    assert (models.max_logit > 0).all()
    assert (models.entropy > 0).all()


def test_contenders_start_from_the_same_weights_and_read_the_same_text(folder):
    """What they do differs from the first update on, so that members of one seed agree before it, but where the
    method itself changes the model."""
    first = {}
    for name in ("none", "locater-paper", "locater-auto", "z-loss", "qk-clip", "qk-decay"):
        lines = (folder / name / "group-00" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        first[name] = [row["valid_loss"] for row in rows if row["step"] == 0 and row["member"].endswith("s1")]
    for losses in first.values():
        assert losses == pytest.approx(first["none"], rel=1e-6)


def test_an_arena_that_is_there_is_neither_trained_nor_timed_again(folder):
    def written():
        return {path: path.stat().st_mtime_ns for path in (*folder.glob("*/*/metrics.jsonl"), folder / "cost.json")}

    before = written()
    run_arena(replace(SMALL, contenders=("none",)), folder, device="cpu")
    assert written() == before
    assert (read_arena(folder).milliseconds > 0).all()


def test_what_was_cut_off_is_trained_anew_and_what_was_finished_is_not(folder, tmp_path):
    arena = replace(SMALL, contenders=("none", "qk-clip"))

    def interrupt(group, progress):
        if group.startswith("qk-clip") and progress.step == 0:  # its first records are on disk
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_arena(arena, tmp_path, device="cpu", watch=interrupt)
    finished = tmp_path / "none" / "group-00" / "metrics.jsonl"
    before = finished.stat().st_mtime_ns, (tmp_path / "cost.json").read_bytes()
    with pytest.raises(LocaterError, match=r"qk-clip in .* is not whole: x100-lr0.001-s0 has no record of step 3"):
        read_arena(tmp_path)
    run_arena(arena, tmp_path, device="cpu")
    assert (finished.stat().st_mtime_ns, (tmp_path / "cost.json").read_bytes()) == before
    losses = [read_arena(where, arena.contenders).loss for where in (tmp_path, folder)]
    assert losses[0].tolist() == pytest.approx(losses[1].tolist(), rel=1e-6)  # float32's, whatever the threads


def everything_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "name", ["../../my-valuable-run", "/my-valuable-run", "..", ".", "group-00/../../../my-valuable-run"]
)
@pytest.mark.parametrize("steps", [3, 6])
def test_a_plan_that_names_a_run_elsewhere_is_refused_and_nothing_is_removed(folder, tmp_path, name, steps):
    """A sweep.json is somebody's file: what it names is neither trained over, nor discarded as cut off."""
    arena_folder, valuable = tmp_path / "arena", tmp_path / "my-valuable-run"
    shutil.copytree(folder / "none", arena_folder / "none")
    shutil.copytree(folder / "none" / "group-00", valuable)
    lines = (valuable / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (valuable / "metrics.jsonl").write_bytes(b"".join(lines[:3]))  # as if it had been cut off
    path = arena_folder / "none" / "sweep.json"
    plan = json.loads(path.read_text())
    plan["groups"][0]["name"] = name.replace("/my", f"{tmp_path}/my") if name.startswith("/") else name
    path.write_text(json.dumps(plan))
    before = everything_in(tmp_path)
    arena = replace(SMALL, config=SMALL.config.changed(steps=steps), contenders=("none",))
    for call in (lambda: run_arena(arena, arena_folder, device="cpu"), lambda: read_arena(arena_folder)):
        with pytest.raises(LocaterError, match="is no file or folder inside"):
            call()
    assert everything_in(tmp_path) == before


def test_a_run_of_somebody_elses_in_a_group_s_place_is_refused_before_anything_is_removed(folder, tmp_path):
    for contender in ("none", "qk-norm"):
        shutil.copytree(folder / contender, tmp_path / contender)
    (tmp_path / "none" / "group-00" / "metrics.jsonl").write_bytes(b"")  # cut off: it would be trained anew
    shutil.rmtree(tmp_path / "qk-norm" / "group-00")
    shutil.copytree(folder / "softcap" / "group-00", tmp_path / "qk-norm" / "group-00")
    before = everything_in(tmp_path)
    with pytest.raises(LocaterError, match="group-00 holds a run that is not of this arena"):
        run_arena(replace(SMALL, contenders=("none", "qk-norm")), tmp_path, device="cpu")
    assert everything_in(tmp_path) == before


def make_old(folder, contender="locater-auto"):
    path = folder / contender / "sweep.json"
    plan = json.loads(path.read_text())
    assert plan.pop("rule") > 1  # which folders did not say before
    path.write_text(json.dumps(plan))


def test_what_was_trained_by_another_version_of_a_method_is_not_taken_for_this_one_s(folder, tmp_path):
    shutil.copytree(folder / "locater-auto", tmp_path / "locater-auto")
    make_old(tmp_path)
    for contenders in (("locater-auto",), ("none", "qk-norm")):
        with pytest.raises(
            LocaterError, match=r"locater-auto was trained by another version of locater-auto than this"
        ):
            run_arena(replace(SMALL, contenders=contenders), tmp_path, device="cpu")
    assert [child.name for child in tmp_path.iterdir()] == ["locater-auto"]
    assert outdated(tmp_path) == {"locater-auto"}
    assert outdated(folder) == set()


def test_what_another_version_trained_is_renewed_where_that_is_asked_for_and_nothing_else(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setitem(ARENAS, "laptop", SMALL)
    for name in ("none", "locater-auto"):
        shutil.copytree(folder / name, tmp_path / name)
    shutil.copy(folder / "cost.json", tmp_path)
    make_old(tmp_path)
    metrics = tmp_path / "locater-auto" / "group-00" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 3', '"step": 4'))  # not what is trained today
    kept = everything_in(tmp_path / "none")
    command = ["arena", "--renew", "--out", str(tmp_path), "--device", "cpu"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    assert outdated(tmp_path) == set()
    losses = [read_arena(where, ("locater-auto",)).loss for where in (tmp_path, folder)]
    assert losses[0].tolist() == pytest.approx(losses[1].tolist(), rel=1e-6)  # float32's, whatever the threads
    assert everything_in(tmp_path / "none") == kept
    before = everything_in(tmp_path)
    again = CliRunner().invoke(app, command, env={"COLUMNS": "250"})
    assert "nothing to renew" in f"{again.output} {again.exception}"
    assert everything_in(tmp_path) == before


def test_what_is_to_be_renewed_stays_until_its_turn_and_a_renewal_that_was_cut_off_goes_on(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setitem(ARENAS, "laptop", SMALL)
    for name in ("none", "locater-auto", "qk-norm"):
        shutil.copytree(folder / name, tmp_path / name)
    shutil.copy(folder / "cost.json", tmp_path)
    make_old(tmp_path)
    make_old(tmp_path, "qk-norm")
    later = everything_in(tmp_path / "qk-norm")

    def interrupt(*_):
        raise KeyboardInterrupt

    arena = replace(SMALL, contenders=("locater-auto", "qk-norm"))
    with pytest.raises(KeyboardInterrupt):
        run_arena(arena, tmp_path, device="cpu", renew=True, watch=interrupt)
    assert everything_in(tmp_path / "qk-norm") == later
    assert outdated(tmp_path) == {"qk-norm"}
    assert to_renew(tmp_path) == {"locater-auto", "qk-norm"}
    done = CliRunner().invoke(app, ["arena", "--renew", "--out", str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert to_renew(tmp_path) == set()
    losses = [read_arena(where, arena.contenders).loss for where in (tmp_path, folder)]
    assert losses[0].tolist() == pytest.approx(losses[1].tolist(), rel=1e-6)


@pytest.mark.parametrize("change", ["conditions", "groups", "others"])
def test_nothing_is_removed_for_what_cannot_be_renewed(folder, tmp_path, change):
    for name in ("none", "locater-auto"):
        shutil.copytree(folder / name, tmp_path / name)
    make_old(tmp_path)
    arena = replace(SMALL, contenders=("locater-auto",))
    if change == "conditions":
        arena, words = replace(arena, seeds=(0,)), "holds none with seeds"
    elif change == "groups":
        shutil.rmtree(tmp_path / "locater-auto" / "group-00")
        shutil.copytree(folder / "softcap" / "group-00", tmp_path / "locater-auto" / "group-00")
        words = "group-00 holds a run that is not of this arena"
    else:
        arena, words = replace(arena, contenders=("none",)), "trained by another version of locater-auto"
    before = everything_in(tmp_path)
    with pytest.raises(LocaterError, match=words):
        run_arena(arena, tmp_path, device="cpu", renew=True)
    assert everything_in(tmp_path) == before


def test_what_was_cut_off_is_trained_anew_though_it_kept_checkpoints(tmp_path):
    config = SMALL.config.changed(steps=8, record_every=2, checkpoint_every=4)
    arena = replace(SMALL, config=config, contenders=("none",), seeds=(0,))

    def interrupt(_, progress):
        if progress.step >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_arena(arena, tmp_path, device="cpu", watch=interrupt)
    assert list(tmp_path.glob("none/*/checkpoints/*.safetensors"))
    run_arena(arena, tmp_path, device="cpu")
    assert read_arena(tmp_path).loss.notna().all()


def test_what_was_trained_before_positions_could_be_rotary_is_not_trained_anew(folder, tmp_path):
    shutil.copytree(folder / "none", tmp_path / "none")
    for name in ("sweep.json", "group-00/run.json"):
        path = tmp_path / "none" / name
        value = json.loads(path.read_text())
        del value["config"]["model"]["positions"]
        path.write_text(json.dumps(value))
    before = (tmp_path / "none" / "group-00" / "metrics.jsonl").stat().st_mtime_ns
    run_arena(replace(SMALL, contenders=("none", "qk-decay")), tmp_path, device="cpu")
    assert (tmp_path / "none" / "group-00" / "metrics.jsonl").stat().st_mtime_ns == before
    assert set(read_arena(tmp_path).contender) == {"none", "qk-decay"}
    turning = replace(SMALL, config=SMALL.config.changed(positions="rotary"), contenders=("none",))
    with pytest.raises(LocaterError, match="holds none with positions sines, and none is to be trained with rotary"):
        run_arena(turning, tmp_path, device="cpu")


@pytest.mark.parametrize(("lost", "step"), [(-1, 3), (1, 0)])
def test_a_record_that_is_missing_is_no_learning_rate_that_broke(folder, tmp_path, lost, step):
    """Whether the end of the file is gone or a line in its midst."""
    shutil.copytree(folder / "none", tmp_path / "none")
    metrics = tmp_path / "none" / "group-00" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    member = json.loads(lines.pop(lost))["member"]
    metrics.write_text("".join(lines))
    with pytest.raises(LocaterError, match=rf"none in .* is not whole: {member} has no record of step {step};"):
        read_arena(tmp_path)


def test_a_loss_is_missing_where_the_record_says_that_the_model_broke(tmp_path):
    arena = replace(SMALL, contenders=("none",), learning_rates=(1e-3, 1e30), seeds=(0,))
    run_arena(arena, tmp_path, device="cpu")
    last = [json.loads(line) for line in (tmp_path / "none/group-00/metrics.jsonl").read_text().splitlines()][-2:]
    assert ["broke_at" in record for record in last] == [False, True]
    assert read_arena(tmp_path).loss.isna().tolist() == [False, True]
    assert read_arena(tmp_path).loss[0] == last[0]["valid_loss"]


def test_contenders_trained_under_other_conditions_do_not_stand_in_one_table(folder, tmp_path):
    longer = replace(SMALL, config=SMALL.config.changed(steps=4), contenders=("qk-norm",))
    shutil.copytree(folder / "none", tmp_path / "none")
    with pytest.raises(LocaterError, match=r"holds none with steps 3, and qk-norm is to be trained with 4"):
        run_arena(longer, tmp_path, device="cpu")
    assert not (tmp_path / "qk-norm").exists()

    run_arena(longer, tmp_path / "other", device="cpu")
    shutil.move(tmp_path / "other" / "qk-norm", tmp_path)
    with pytest.raises(
        LocaterError, match=r"none and qk-norm in .* one table: steps is 3 for the one and 4 for the oth"
    ):
        read_arena(tmp_path)
    assert set(read_arena(tmp_path, ["qk-norm"]).contender) == {"qk-norm"}


def test_contenders_at_other_learning_rates_or_on_another_text_are_told_apart(folder, tmp_path):
    for name in ("none", "qk-norm"):
        shutil.copytree(folder / name, tmp_path / name)
    path = tmp_path / "qk-norm" / "group-00" / "run.json"
    run = json.loads(path.read_text())
    path.write_text(json.dumps(run | {"corpus": "another"}))
    with pytest.raises(LocaterError, match=r"text is .* for the one and another for the other"):
        read_arena(tmp_path)
    rates = replace(SMALL, learning_rates=(1e-3,), contenders=("qk-clip",))
    with pytest.raises(
        LocaterError, match=r"learning rates \[0.001, 0.03\], and qk-clip is to be trained with \[0.001\]"
    ):
        run_arena(rates, tmp_path, device="cpu")


def models(**lines):
    """Losses by rate and seed, as `read_arena` would give them."""
    rows = []
    for name, by_rate in lines.items():
        for rate, (losses, logit, entropy) in by_rate.items():
            rows += [
                {
                    "contender": name.replace("_", "-"), "strength": CONTENDERS[name.replace("_", "-")].strengths[0],
                    "learning_rate": rate, "seed": seed, "loss": loss, "max_logit": logit, "entropy": entropy,
                    "rank_residual": 0.5, "milliseconds": 1.0, "relative": 1.0, "bytes": 2.0,
                }
                for seed, loss in enumerate(losses)
            ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_summary_says_where_a_contender_is_best_breaks_and_collapses():
    found = summary(
        models(
            none={1e-3: ((2.0, 2.1), 30, 2.0), 1e-2: ((2.2, 2.6), 3000, 0.1), 1e-1: ((2.0, math.nan), 9e9, 0.0)},
            qk_norm={1e-3: ((2.1, 2.1), 9, 2.0), 1e-2: ((2.0, 2.2), 10, 2.1), 1e-1: ((2.3, 2.2), 12, 2.2)},
        )
    ).set_index("contender")
    none, norm = found.loc["none"], found.loc["qk-norm"]
    assert none.loss == pytest.approx(2.05)
    assert none.best_rate == 1e-3
    assert none.trains_to == 1e-3  # 2.6 is more than 1.2 times the best of all
    assert none.holds_to == 1e-3
    assert none.max_logit == 30
    assert none.area == pytest.approx((2.05 + 2.4 + 2.3) / 3)  # what is not finite counts as the worst that is
    assert norm.trains_to == norm.holds_to == 1e-1
    assert norm.entropy == 2.0


def test_a_rate_that_is_too_low_to_learn_much_has_not_broken():
    low = {1e-4: ((3.0, 3.1), 9, 3.0)}
    found = summary(
        models(
            none={**low, 1e-3: ((2.0, 2.1), 30, 2.0), 1e-2: ((2.2, 2.2), 90, 1.0), 1e-1: ((9.0, 2.2), 99, 1.0)},
            qk_norm={**low, 1e-3: ((2.5, 2.6), 9, 2.0), 1e-2: ((2.7, 2.6), 9, 2.1), 1e-1: ((2.8, 2.7), 9, 2.2)},
        )
    ).set_index("contender")
    assert found.trains_to["none"] == 1e-2
    assert math.isnan(found.trains_to["qk-norm"])  # at its best it is not within 1.2 times the best of all


def test_a_contender_that_breaks_at_every_rate_has_no_loss_but_the_largest_area():
    found = summary(
        models(
            none={1e-3: ((math.nan, 2.0), math.inf, 0.0), 1e-2: ((math.nan, math.inf), math.inf, 0.0)},
            qk_norm={1e-3: ((2.1, 2.1), 9, 2.0), 1e-2: ((2.0, 3.0), 10, 2.1)},
        )
    ).set_index("contender")
    assert found.loc["none", ["loss", "best_rate", "trains_to", "holds_to", "max_logit", "rank_residual"]].isna().all()
    assert found.area["none"] == pytest.approx((2.5 + 3.0) / 2)  # the worst finite one, 3, in place of each that broke


def test_the_best_strength_is_that_of_the_lowest_area():
    table = models(qk_norm={1e-3: ((2.0,), 9, 2.0), 1e-2: ((3.0,), 10, 2.1)})
    other = table.assign(strength=0.3, loss=[2.1, 2.2])
    both = pd.concat([table, other])
    assert summary(both).strength.tolist() == [1.0]
    assert summary(both, "best").strength.tolist() == [0.3]
    with pytest.raises(LocaterError, match=r"qk-norm was not trained at its default strength 1 but at 0.3"):
        summary(other)


# ---------------------------------------------------------------------- the figure

BREAKS = {
    "none": {1e-3: ((2.0, 2.2, 2.1), 10, 2.0), 1e-2: ((1.9, math.nan, math.nan), math.inf, 0.0)},
    "qk_norm": {1e-3: ((2.1, 2.1, 2.1), 9, 2.0), 1e-2: ((2.0, 2.2, 2.1), 10, 2.1)},
}


def on_screen(line):
    return line.get_transform().transform(line.get_xydata()[0])


def test_where_a_seed_broke_the_line_is_interrupted_and_a_cross_stands_at_the_top():
    drawing = against_rate(models(**BREAKS), "", "words")
    loss = drawing.data["lines"]["none"]["loss"]
    assert loss == {"mean": [pytest.approx(2.1), None], "low": [2.0, None], "high": [2.2, None], "broke": [0, 2]}
    panel = drawing.figure.axes[0]
    (line,) = [line for line in panel.lines if line.get_label() == CONTENDERS["none"].label]
    assert np.isnan(line.get_ydata()).tolist() == [False, True]
    (cross,) = [line for line in panel.lines if line.get_marker() == "x"]
    assert on_screen(cross) == pytest.approx(panel.get_xaxis_transform().transform((1e-2, 1)))  # 1 is the panel's edge
    assert cross.get_color() == line.get_color()
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()][-1] == "a seed broke"


def test_crosses_of_several_contenders_at_one_rate_are_all_seen():
    both = models(**dict.fromkeys(("none", "qk_norm"), BREAKS["none"]))
    panel = against_rate(both, "", "words").figure.axes[0]
    places = np.array([on_screen(line) for line in panel.lines if line.get_marker() == "x"])
    points = np.ptp(places[:, 0]) * 72 / panel.figure.dpi
    assert points > 4  # the size of a cross
    assert places.mean(0) == pytest.approx(panel.get_xaxis_transform().transform((1e-2, 1)))  # side by side around it


@pytest.mark.parametrize(
    "lines", [BREAKS, {"none": {1e-3: ((math.nan,), math.inf, 0.0)}}, {"qk_norm": BREAKS["qk_norm"]}]
)
def test_the_figures_data_is_json_whatever_broke(lines, tmp_path):
    draw_arena(models(**lines), "", "bytes", tmp_path)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    data = json.loads((tmp_path / "arena.json").read_text(), parse_constant=refuse)
    assert set(data["lines"]) == {name.replace("_", "-") for name in lines}


# ---------------------------------------------------------------------- what was run


def test_the_tables_in_the_docs_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    for page, tables in importlib.import_module("tables").pages().items():
        text = (ROOT / "docs" / page).read_text()
        for table in tables:
            assert "\n".join(table) + "\n\n" in text, f"{page}: python docs/_site/tables.py"


def test_a_time_and_a_loss_are_marked_each_by_the_version_it_is_of(monkeypatch, tmp_path):
    """A contender that was trained again keeps the mark at a time that was not taken again."""
    shutil.copytree(ROOT / "results" / "arena-pre", tmp_path / "arena-pre")
    path = tmp_path / "arena-pre" / "cost.json"
    costs = json.loads(path.read_text())
    for timing in costs["timings"]:
        if timing["contenders"].get("locater-auto", {}).get("rule") == METHODS["locater-auto"].version:
            del timing["contenders"]["locater-auto"]
    path.write_text(json.dumps(costs))
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    tables = importlib.import_module("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "STACKED", {"pre": ("× none", "loss")})
    marked = {line.split(" | ")[0]: [cell.endswith("†") for cell in line.strip("| ").split(" | ")[-2:]]
              for line in tables.stacked()[2:]}  # fmt: skip
    assert marked.pop("| LocAteR, auto") == [True, False]
    assert set(map(tuple, marked.values())) == {(False, False)}


# ---------------------------------------------------------------------- the command


def test_the_command_prints_a_table_and_draws_a_figure(tmp_path, monkeypatch):
    monkeypatch.setitem(ARENAS, "laptop", SMALL)
    command = ["arena", "--contenders", "none,locater-auto", "--out", str(tmp_path / "a"), "--device", "cpu"]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "a.json")], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    assert "LocAteR, auto" in done.output
    assert (tmp_path / "a" / "arena.png").exists()
    value = json.loads((tmp_path / "a.json").read_text())
    assert [row["contender"] for row in value["default"]] == ["none", "locater-auto"]
    assert len(value["models"]) == 8


def test_learning_rates_seeds_and_settings_of_your_own_and_default_strengths_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(ARENAS, "laptop", replace(SMALL, tuned=True))
    command = ["arena", "--contenders", "none,locater-auto", "--out", str(tmp_path / "a"), "--device", "cpu"]
    more = ["--rates", "2e-3, 1e-3", "--seeds", "5", "--untuned", "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, [*command, *more, "--set", "positions=rotary"])
    assert done.exit_code == 0, done.output
    for path in ("a/none/sweep.json", "a.json"):
        assert json.loads((tmp_path / path).read_text())["config"]["model"]["positions"] == "rotary"
    models = json.loads((tmp_path / "a.json").read_text())["models"]
    assert {row["seed"] for row in models} == {5}
    assert sorted((row["contender"], row["learning_rate"], row["strength"]) for row in models) == [
        ("locater-auto", 1e-3, 0.1), ("locater-auto", 2e-3, 0.1), ("none", 1e-3, 0.0), ("none", 2e-3, 0.0),
    ]  # fmt: skip


def test_the_command_shows_the_contenders_it_was_asked_for(folder, monkeypatch):
    monkeypatch.setitem(ARENAS, "laptop", SMALL)
    command = ["arena", "--contenders", "qk-norm", "--out", str(folder), "--device", "cpu"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    assert CONTENDERS["qk-norm"].label in done.output
    assert CONTENDERS["softcap"].label not in done.output


def test_the_figure_is_of_all_contenders_in_the_folder_that_are_finished(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(ARENAS, "laptop", SMALL)
    for name in ("none", "qk-norm", "softcap"):
        shutil.copytree(folder / name, tmp_path / name)
    shutil.copy(folder / "cost.json", tmp_path)
    metrics = tmp_path / "softcap" / "group-00" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))  # still in training
    done = CliRunner().invoke(app, ["arena", "--contenders", "qk-norm", "--out", str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert set(json.loads((tmp_path / "arena.json").read_text())["lines"]) == {"none", "qk-norm"}


def shown(found, monkeypatch, tmp_path):
    """The table of the command for these models, a list of cells a row, and its JSON."""
    monkeypatch.setattr("locater.lab.arena.run_arena", lambda *_, **__: None)
    monkeypatch.setattr("locater.lab.arena.read_arena", lambda *_: found)
    command = ["arena", "--out", str(tmp_path / "a"), "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    table = [[cell.strip() for cell in line.split("│")] for line in done.output.splitlines() if "│" in line]
    names = [cell.strip() for line in done.output.splitlines() if "┃" in line for cell in line.strip("┃").split("┃")]
    value = json.loads((tmp_path / "a.json").read_text())
    return [dict(zip(names, cells[1:], strict=False)) for cells in table], value


def test_a_total_collapse_is_shown_as_nought_and_infinity(monkeypatch, tmp_path):
    (row,), value = shown(models(none={1e-3: ((2.0,), math.inf, 0.0)}), monkeypatch, tmp_path)
    assert (row["max logit"], row["lowest entropy"]) == ("∞", "0")
    assert row["holds to"] == "none"
    assert (value["default"][0]["max_logit"], value["default"][0]["entropy"]) == (None, 0.0)


def test_a_table_of_models_that_all_broke_says_so(monkeypatch, tmp_path):
    (row,), value = shown(models(none={1e-3: ((math.nan,), math.inf, 0.0)}), monkeypatch, tmp_path)
    assert {row[name] for name in ("loss, bits a byte", "at rate", "area", "trains to", "max logit")} == {"none"}
    assert value["default"][0]["loss"] is value["default"][0]["area"] is None


def test_what_there_is_can_be_listed():
    done = CliRunner().invoke(app, ["arena", "--list"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert all(name in done.output for name in (*ARENAS, *CONTENDERS))
    value = json.loads(CliRunner().invoke(app, ["arena", "--list", "--json", "-"]).stdout)
    assert [one["arena"] for one in value["arenas"]] == list(ARENAS)
    assert [one["contender"] for one in value["contenders"]] == list(CONTENDERS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["arena", "moon"], "there is no arena 'moon'; there are laptop, pre, post, rotary, words"),
        (["arena", "--contenders", "luck"], "there is no contender 'luck'; there are none, locater-paper"),
        (["arena", "--contenders", ","], "name at least one contender"),
        (["arena", "--rates", "1e-3,fast"], "--rates takes positive numbers with commas between them, got '1e-3,fast'"),
        (["arena", "--rates", "0"], "--rates takes positive numbers"),
        (["arena", "--seeds", "0,-1"], "--seeds takes whole numbers from 0 on with commas between them, got '0,-1'"),
        (["arena", "--steps", "0"], "steps must be a whole number of at least 1"),
        (["arena", "--set", "positions"], "--set takes NAME=VALUE, got 'positions'"),
        (["arena", "--steps", "9", "--set", "steps=8"], "steps is given twice, by --set steps=8 and by its own"),
        (["arena", "--set", "method=qk-norm"], "an arena's methods are its contenders: name them with --contenders"),
        (["arena", "--device", "tpu"], "cannot run on the device 'tpu'"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_is_written(arguments, words, tmp_path):
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "a")], env={"COLUMNS": "200"})
    assert isinstance(done.exception, LocaterError | SystemExit)
    assert words in f"{done.output} {done.exception}"
    assert not (tmp_path / "a").exists()


def test_a_folder_without_an_arena_or_with_a_sweep_of_something_else_is_named(folder, tmp_path):
    with pytest.raises(LocaterError, match="holds no arena"):
        read_arena(tmp_path)
    shutil.copytree(folder / "none", tmp_path / "some" / "none")
    path = tmp_path / "some" / "none" / "sweep.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in plan.items() if key != "contender"}))
    with pytest.raises(LocaterError, match="holds no arena"):
        read_arena(tmp_path / "some")


def test_a_contender_nobody_knows_is_named(folder, tmp_path):
    shutil.copytree(folder / "none", tmp_path / "luck")
    path = tmp_path / "luck" / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"contender": "luck"}))
    with pytest.raises(LocaterError, match="there is no contender 'luck'"):
        read_arena(tmp_path)
    with pytest.raises(LocaterError, match="there is no contender 'luck'"):
        summary(read_arena(folder, ["none"]).assign(contender="luck"))
    with pytest.raises(LocaterError, match="does not hold softcap"):
        read_arena(tmp_path, ["softcap"])
