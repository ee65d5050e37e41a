"""The arena: every contender by the same rules, and a summary that says what happened."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
from typer.testing import CliRunner

from locater.cli import app
from locater.errors import LocaterError
from locater.lab.arena import ARENAS, CONTENDERS, read_arena, run_arena, summary
from locater.lab.config import METHOD_NAMES

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


def test_every_contender_is_tried_at_as_many_strengths_and_trains_by_a_known_method():
    assert {one.method for one in CONTENDERS.values()} <= set(METHOD_NAMES)
    assert {len(one.strengths) for name, one in CONTENDERS.items() if name != "none"} == {3}
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


def test_an_arena_that_is_there_is_not_trained_again(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/metrics.jsonl")}
    run_arena(replace(SMALL, contenders=("none",)), folder, device="cpu")
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*/metrics.jsonl")} == before


def models(**lines):
    """Losses by rate and seed, as `read_arena` would give them."""
    rows = []
    for name, by_rate in lines.items():
        for rate, (losses, logit, entropy) in by_rate.items():
            rows += [
                {
                    "contender": name.replace("_", "-"), "strength": CONTENDERS[name.replace("_", "-")].strengths[0],
                    "learning_rate": rate, "seed": seed, "loss": loss, "max_logit": logit, "entropy": entropy,
                    "rank_residual": 0.5, "milliseconds": 1.0, "bytes": 2.0,
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


def test_the_best_strength_is_that_of_the_lowest_area():
    table = models(qk_norm={1e-3: ((2.0,), 9, 2.0), 1e-2: ((3.0,), 10, 2.1)})
    other = table.assign(strength=0.3, loss=[2.1, 2.2])
    both = pd.concat([table, other])
    assert summary(both).strength.tolist() == [1.0]
    assert summary(both, "best").strength.tolist() == [0.3]


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


def test_what_there_is_can_be_listed():
    done = CliRunner().invoke(app, ["arena", "--list"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert all(name in done.output for name in (*ARENAS, *CONTENDERS))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["arena", "moon"], "there is no arena 'moon'; there are laptop, pre, post, words"),
        (["arena", "--contenders", "luck"], "there is no contender 'luck'; there are none, locater-paper"),
        (["arena", "--contenders", ","], "name at least one contender"),
        (["arena", "--steps", "0"], "steps must be a whole number of at least 1"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_is_written(arguments, words, tmp_path):
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "a")], env={"COLUMNS": "200"})
    assert isinstance(done.exception, LocaterError | SystemExit)
    assert words in f"{done.output} {done.exception}"
    assert not (tmp_path / "a").exists()


def test_a_folder_without_an_arena_is_named(tmp_path):
    with pytest.raises(LocaterError, match="holds no arena"):
        read_arena(tmp_path)
