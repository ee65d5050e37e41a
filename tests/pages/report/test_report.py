"""Reports: what stands in the files stands on the page, names are text, and bad input is one sentence."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from report_inputs import (
    HOSTILE,
    log_rows,
    rho_at,
    write_diagnosis,
    write_log,
    write_measurement,
    write_predictions,
    write_scan,
    write_sweep,
)

from locater import QK, LocaterError
from locater.cli import main
from locater.lab.claims import claims, seed_spread
from locater.lab.claims.series import read_sweep
from locater.measure.alarms import alarms_of
from locater.measure.logs import read_log
from locater.pages import _page
from locater.pages.report import LARGEST, report
from locater.pages.report import _page as report_page
from locater.pages.report._numbers import averaged, centres, chosen, packed, rounded

RESULTS = Path(__file__).parents[3] / "results"


def unpacked(value):
    raw = base64.b64decode(value.get("i2") or value.get("f4"))
    if "f4" in value:
        return np.frombuffer(raw, "<f4").reshape(value["shape"]).astype(float)
    whole = np.frombuffer(raw, "<i2").astype(float)
    return np.where(whole == -32768, np.nan, whole * value["step"]).reshape(value["shape"])


def data_of(html):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    return json.loads(text)


# ---------------------------------------------------------------------- numbers


@given(arrays(float, (3, 4), elements=st.floats(-1e9, 1e9) | st.just(np.nan)))
def test_packed_numbers_come_back_within_a_step_and_missing_ones_stay_missing(values):
    back = unpacked(packed(values))
    known = np.isfinite(values)
    assert (np.isfinite(back) == known).all()
    largest = np.abs(values[known]).max() if known.any() else 0.0
    # half a step of 1/32767 of the largest, and the nine digits of the step itself
    assert (np.abs(back - values)[known] <= largest * (0.5 / 32767 + 1e-8)).all()
    exact = unpacked(packed(values, floats=True))
    assert np.array_equal(exact, values.astype(np.float32).astype(float), equal_nan=True)


@given(st.integers(1, 3000), st.integers(2, 300))
def test_thinning_keeps_both_ends_and_no_more_than_is_asked(count, most):
    kept = chosen(count, most)
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert len(kept) <= max(most, 1)
    assert len(set(kept)) == len(kept)
    assert len(kept) == min(count, most)


@given(st.integers(1, 400), st.integers(1, 60))
def test_stretches_keep_the_mean_and_know_where_they_lie(count, most):
    values = np.random.default_rng(count).normal(size=(2, count))
    means, size = averaged(values, most)
    assert means.shape[1] <= most
    middles = centres(count, size)
    assert len(middles) == means.shape[1]
    weights = np.array([len(range(start, min(start + size, count))) for start in range(0, count, size)])
    np.testing.assert_allclose((means * weights).sum(1) / count, values.mean(1), atol=1e-12)
    assert np.isclose((np.array(middles) * weights).sum() / count, (count + 1) / 2)


def test_rounding_keeps_five_digits_and_leaves_whole_numbers_whole():
    assert rounded([1.0, 0.123456789, float("nan"), 123456.0]) == [1, 0.12346, None, 123460]


# ---------------------------------------------------------------------- what is shown


@pytest.mark.parametrize("name", ["paper-d32-l1", "paper-d32-l6"])
def test_the_curves_and_maps_of_a_sweep_are_those_of_the_lab(name):
    (section,) = report([RESULTS / name]).sections
    sweep = read_sweep(RESULTS / name)
    assert [member["name"] for member in section["members"]] == [member.name for member in sweep.members]
    assert section["steps"] == sweep.steps.tolist()
    for quantity in ("perplexity", "scale", "entropy", "trace"):
        shown = unpacked(section["curves"][quantity])[..., 0]
        np.testing.assert_allclose(shown, sweep.values[quantity], rtol=1e-7)  # float32
    rho = unpacked(section["rho"]["values"])  # (E, parts, N, T)
    np.testing.assert_allclose(rho[:, 0], sweep.rho.mean(2), atol=1e-4)  # sixteen bits
    if sweep.rho.shape[2] > 1:
        np.testing.assert_allclose(rho[:, 1:], np.moveaxis(sweep.rho, 2, 1), atol=1e-4)
    assert [row["verdict"] for row in section["claims"]] == [claim.verdict for claim in claims(RESULTS / name)]


def test_one_seed_is_judged_by_the_spread_of_another_sweep():
    noise = seed_spread(RESULTS / "paper-d128-l1")
    (section,) = report([RESULTS / "paper-d32-l1"], seeds_from=RESULTS / "paper-d128-l1").sections
    expected = [claim.verdict for claim in claims(RESULTS / "paper-d32-l1", noise=noise)]
    assert [row["verdict"] for row in section["claims"]] == expected
    assert "claims_note" not in section
    (alone,) = report([RESULTS / "paper-d32-l1"]).sections
    assert "--seeds-from" in alone["claims_note"]


def test_the_spectra_of_a_sweep_have_the_traces_it_recorded():
    (section,) = report([RESULTS / "paper-d32-l3"]).sections
    spectra = unpacked(section["spectra"]["values"])  # (E, layers × heads, eigenvalues, 2)
    traces = unpacked(section["curves"]["trace"])[:, -1, 1:]  # the last record, by layer
    np.testing.assert_allclose(spectra[..., 0].sum(-1), traces, atol=2e-3)  # 32 numbers of sixteen bits


def test_a_member_is_described_by_strength_and_seed_or_by_its_name(tmp_path):
    (section,) = report([write_sweep(tmp_path / "a", kappas=(None, 0.5), seeds=(0, 3))]).sections
    assert [each["label"] for each in section["members"]] == [
        "no LocAteR, seed 0", "no LocAteR, seed 3", "κ₂ = 0.5, seed 0", "κ₂ = 0.5, seed 3",
    ]  # fmt: skip
    # two learning rates of one strength: only names tell them apart
    group = write_sweep(tmp_path / "b", kappas=(None, 1.0)) / "group-00"
    run = json.loads((group / "run.json").read_text())
    run["members"][1]["kappa_2"] = None
    (group / "run.json").write_text(json.dumps(run))
    (section,) = report([tmp_path / "b"]).sections
    assert [each["label"] for each in section["members"]] == ["none-s0", "k1-s0"]


def test_a_run_is_shown_from_its_folder_its_plan_or_its_metrics(tmp_path):
    folder = write_sweep(tmp_path / "sweep", kappas=(None, 1.0, 2.0))
    whole = report([folder]).sections[0]
    for path in (folder / "sweep.json", folder / "group-00", folder / "group-00" / "run.json"):
        section = report([path]).sections[0]
        assert section["curves"] == whole["curves"]
        assert section["rho"] == whole["rho"]
    bare = report([folder / "group-00" / "metrics.jsonl"]).sections[0]
    assert bare["curves"] == whole["curves"]
    assert "run.json" in bare["notes"][-1]
    assert bare["claims"] is None


def test_runs_side_by_side_are_together_if_they_compare_and_apart_if_not(tmp_path):
    (tmp_path / "runs").mkdir()
    for name, layers in (("one", 1), ("two", 1), ("three", 2)):
        write_sweep(tmp_path / name, layers=layers, kappas=(None,))
        (tmp_path / name / "group-00").rename(tmp_path / "runs" / name)
    sections = report([tmp_path / "runs"]).sections
    assert sorted(len(section["members"]) for section in sections) == [1, 2]
    together = next(section for section in sections if len(section["members"]) == 2)
    assert {member["name"] for member in together["members"]} == {"one/none-s0", "two/none-s0"}


def test_a_scan_keeps_its_rows_and_the_eigenvalues_of_each_head(tmp_path):
    (section,) = report([write_scan(tmp_path / "scan.json", modules=3, heads=4, width=8)]).sections
    assert section["columns"]["trace"] == [100 * m + h for m in range(3) for h in range(4)]
    assert section["grid"] == {"module": [m for m in range(3) for _ in range(4)], "head": [0, 1, 2, 3] * 3}
    for module, clouds in enumerate(section["eigenvalues"]):
        sums = unpacked(clouds)[..., 0].sum(1)
        np.testing.assert_allclose(sums, [100 * module + h for h in range(4)], rtol=1e-3)  # sixteen bits
    for name, words in (("regime", ["early", "late"]), ("attention_regime", ["local near", "uniform"])):
        assert [section[name]["names"][index] for index in section[name]["rows"][:2]] == words
    assert section["columns"]["attention_entropy"][:2] == [1, 1.01]
    assert ["softmax", "6 uniform, 6 local near"] in section["facts"]


def test_a_scan_of_a_version_before_softmax_is_shown_with_that_column_empty(tmp_path):
    file = write_scan(tmp_path / "scan.json")
    changed(file, lambda scan: [row.pop(name) for row in scan["heads"] for name in list(row) if "attention" in name])
    (section,) = report([file]).sections
    assert section["attention_regime"] == {"names": [], "rows": [None] * 12}
    assert section["columns"]["attention_entropy"] == [None] * 12
    assert any("no attention regime in this file" in note for note in section["notes"])


def test_predictions_of_softmax_stand_beside_rho_and_may_be_missing(tmp_path):
    (section,) = report([write_predictions(tmp_path / "predictions.json")]).sections
    before, now = section["spectra"]
    assert before["softmax"] is None
    assert now["softmax"]["regime"] == "local, near the query"
    assert now["softmax"]["entropy"] == {"exact": 0.3, "simulated": 0.31}
    np.testing.assert_allclose(unpacked(now["softmax"]["weights"]["exact"]), [0.1, 0.9], rtol=1e-6)


def test_a_scan_of_a_version_that_kept_no_eigenvalues_is_shown_without_them(tmp_path):
    (section,) = report([write_scan(tmp_path / "scan.json", eigenvalues=False)]).sections
    assert section["eigenvalues"] is None
    assert any("scan again with --json" in note for note in section["notes"])
    assert len(section["columns"]["trace"]) == 12


def test_a_measurement_counts_measured_against_predicted(tmp_path):
    (section,) = report([write_measurement(tmp_path / "m.json", modules=2, heads=3, length=12)]).sections
    predicted = section["predicted"]
    assert predicted["laws"] == ["general", "separable"]
    general, separable = (np.array(predicted["counts"][law]) for law in predicted["laws"])
    assert general.sum() == separable.sum() == 2 * 3 * 12
    assert general.trace() == general.sum()  # a perfect prediction is the diagonal
    assert (separable.sum(0) > 0).sum() == 1  # a constant one a column
    measured = unpacked(section["rho"]["modules"][1])
    np.testing.assert_allclose(measured[2], [0.3 + 0.02 * t for t in range(12)], atol=2e-5)


def test_a_log_keeps_modules_heads_and_steps_apart(tmp_path):
    (section,) = report([write_log(tmp_path / "log.jsonl", steps=7, modules=3, heads=2)]).sections
    logits = unpacked(section["heads"]["max_logit"])  # (modules, heads, steps)
    expected = np.broadcast_to(1 + np.arange(2)[:, None] + np.arange(7), (3, 2, 7))
    np.testing.assert_array_equal(logits, expected)
    assert section["steps"] == [5 * n for n in range(7)]


def test_alarms_of_a_file_are_shown_with_their_reasons(tmp_path):
    alarm = {"step": 40, "kind": "collapse", "module": "layers.0.attn", "head": 1, "reason": "its entropy fell"}
    (section,) = report([write_measurement(tmp_path / "m.json", alarms=[alarm])]).sections
    assert section["alarms"] == [alarm]
    (section,) = report([write_measurement(tmp_path / "none.json")]).sections
    assert section["alarms"] is None  # nobody looked: the page says nothing


def test_a_log_shows_the_alarms_that_were_raised_while_it_was_written(tmp_path):
    rows = log_rows(steps=20, modules=2)
    for row in rows:
        if row["module"] == "h.1.attn" and row["step"] >= 50:
            row["max_logit"] = [5.0, 500.0]
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (section,) = report([file]).sections
    expected = alarms_of(read_log(file))
    assert section["alarms"] == [asdict(alarm) for alarm in expected]
    assert {alarm.module for alarm in expected} == {"h.1.attn"}
    for row in rows:
        del row["keys"]  # as logs were before there were alarms
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (section,) = report([file]).sections
    assert section["alarms"] is None
    assert "missing: keys" in section["notes"][0]


def test_a_folder_gives_all_it_holds_once_and_names_what_it_passes_over(tmp_path):
    write_sweep(tmp_path / "runs" / "sweep")
    write_scan(tmp_path / "scan.json")
    (tmp_path / "deep").mkdir()
    write_log(tmp_path / "deep" / "log.jsonl")
    (tmp_path / "other.json").write_text('{"figure": 5}')
    made = report([tmp_path, tmp_path / "scan.json"])
    assert sorted(section["kind"] for section in made.sections) == ["log", "scan", "sweep"]
    assert len(made.passed) == 1
    assert "other.json" in made.passed[0]


def test_tables_that_sweep_and_claims_write_are_shown(tmp_path, capsys):
    folder = write_sweep(tmp_path / "sweep")
    with pytest.raises(SystemExit) as stopped:
        main(["claims", str(folder), "--json", str(tmp_path / "claims.json")])
    assert stopped.value.code == 0
    capsys.readouterr()
    (section,) = report([tmp_path / "claims.json"]).sections
    assert [row["verdict"] for row in section["claims"]] == [claim.verdict for claim in claims(folder)]
    members = [{"member": "none-s0", "steps": 50, "perplexity": 210.5, "broke at": None}]
    (tmp_path / "members.json").write_text(json.dumps({"folder": str(folder), "members": members}))
    (section,) = report([tmp_path / "members.json"]).sections
    assert {column["name"] for column in section["columns"]} == {"member", "steps", "perplexity", "broke at"}


# ---------------------------------------------------------------------- size


def test_twenty_four_members_and_a_thousand_heads_fit_and_what_does_not_is_thinned(tmp_path, monkeypatch, full):
    if not full:
        pytest.skip("six seconds: LOCATER_FULL=1, or make test-full")
    write_sweep(tmp_path / "sweep", kappas=(None, 0, 0.1, 0.5, 1, 2, 10, 100), seeds=(0, 1, 2), records=200, tokens=64)
    write_scan(tmp_path / "scan.json", modules=32, heads=32, width=64)
    made = report([tmp_path])
    assert len(made.html.encode()) < LARGEST == 6_000_000
    assert all(section["notes"] == [] for section in made.sections)  # nothing was thinned
    monkeypatch.setattr("locater.pages.report.LARGEST", 1_130_000)
    thinned = report([tmp_path])
    assert len(thinned.html.encode()) < 1_130_000
    sweep, scan = sorted(thinned.sections, key=lambda section: section["kind"], reverse=True)
    assert any("of 200 recorded steps" in note for note in sweep["notes"])
    assert any("of the 64 eigenvalues" in note for note in scan["notes"])
    assert len(scan["columns"]["trace"]) == 1024  # heads are never left out
    assert len(sweep["members"]) == 24


def test_what_cannot_be_made_small_enough_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("locater.pages.report.LARGEST", 500_000)  # less than plotly takes
    with pytest.raises(LocaterError, match="give fewer at a time"):
        report([write_scan(tmp_path / "scan.json")])


def test_long_sequences_and_many_records_are_thinned_and_the_page_says_so(tmp_path):
    write_sweep(tmp_path / "sweep", kappas=(None,), records=700, tokens=8)
    (section,) = report([tmp_path / "sweep"]).sections
    assert len(section["steps"]) <= 600
    assert section["steps"][-1] == 6990
    assert any("of 700 recorded steps" in note for note in section["notes"])
    write_measurement(tmp_path / "long.json", length=2048, predicted=False)
    (section,) = report([tmp_path / "long.json"]).sections
    assert any("stretches of 8" in note for note in section["notes"])
    assert len(section["rho"]["positions"]) == 256


def test_the_same_files_make_the_same_page(tmp_path):
    write_scan(tmp_path / "scan.json")
    assert report([tmp_path]).html == report([tmp_path]).html


# ---------------------------------------------------------------------- one file, and safe


def hostile_files(folder):
    """Every name in every file an attack."""
    names = [f"{name}{k}" for k, name in enumerate(HOSTILE)]
    folder.mkdir()
    scan = json.loads(write_scan(folder / "scan.json", len(names), 2, names=names, model=HOSTILE[0]).read_text())
    for row in scan["heads"]:
        row.update(kind=row["module"], regime=row["module"])
    (folder / "scan.json").write_text(json.dumps(scan))
    alarms = [{"step": 1, "kind": name, "module": name, "head": 0, "reason": name} for name in names]
    write_measurement(folder / "measure.json", modules=len(names), names=names, model=HOSTILE[1], alarms=alarms)
    write_log(folder / "log.jsonl", modules=len(names), names=names)
    write_diagnosis(folder / "doctor.json", words=HOSTILE[0], model=HOSTILE[1])
    sweep = write_sweep(folder / "sweep", kappas=(None, 1.0, 2.0))
    run_file = sweep / "group-00" / "run.json"
    run = json.loads(run_file.read_text()) | {"preset": HOSTILE[0], "text": HOSTILE[1], "hardware": HOSTILE[3]}
    run_file.write_text(json.dumps(run))
    metrics = (sweep / "group-00" / "metrics.jsonl").read_text().replace('"none-s0"', json.dumps(HOSTILE[0]))
    (folder / "bare.jsonl").write_text(metrics)
    claim = {"statement": HOSTILE[0], "where": HOSTILE[1], "measured": HOSTILE[4], "verdict": "constructor"}
    (folder / "claims.json").write_text(json.dumps({"runs": HOSTILE[1], "claims": [claim]}))
    members = [{"member": HOSTILE[0], HOSTILE[1]: HOSTILE[4], "__proto__": 1}]
    (folder / "summary.json").write_text(json.dumps({"folder": HOSTILE[0], "members": members}))
    (folder / f"{HOSTILE[2]}.json").write_text("{}")
    return folder


def test_hostile_names_are_data(tmp_path):
    html = report([hostile_files(tmp_path / "in")]).html
    scripts = re.findall(r"<script[^>]*>", html)
    assert scripts == [
        '<script type="application/json" id="data">', '<script type="application/gzip" id="plotly">', "<script>",
    ]  # fmt: skip
    assert html.count("</script") == 3
    for name in HOSTILE:
        if set(name) & set("<>\u2028"):
            assert name not in html
    data = data_of(html)
    assert len(data["sections"]) == 8
    scan = next(section for section in data["sections"] if section["kind"] == "scan")
    assert [module["name"] for module in scan["modules"]] == [f"{name}{k}" for k, name in enumerate(HOSTILE)]
    assert not re.search(r"[<>&\u2028\u2029]", re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_the_policy_lets_only_the_pages_own_scripts_run_and_nothing_be_fetched(tmp_path):
    html = report([write_scan(tmp_path / "scan.json")]).html
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    (library,) = re.findall(r'id="plotly">(.*?)</script>', html, flags=re.DOTALL)
    allowed = {
        f"'sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}'"
        for source in (script.encode(), gzip.decompress(base64.b64decode(library)))
    }
    assert set(rules["script-src"].split()) == allowed
    outside = html.replace(library, "").replace(script, "")
    assert re.findall(r"(?:src|href|action)\s*=\s*[\"']?([^\"'\s>]*)", outside) == ["data:,"]  # an empty icon
    assert not re.search(r"https?:|url\(|@import", outside + script)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", script)


def test_plotly_has_only_the_traces_of_pages_and_its_licence_beside_it():
    folder = Path(_page.__file__).parent / "plotly"
    source = (folder / "plotly.min.js").read_text()
    assert set(re.findall(r'moduleType:"trace",name:"(\w+)"', source)) == {"scatter", "heatmap"}
    version = re.match(r"/\*! plotly\.js ([\d.]+),", source)[1]
    assert f"plotly.js {version} (MIT)" in (folder / "LICENSE.txt").read_text()
    assert f"plotly.js@{version}" in (folder / "README.md").read_text()


# ---------------------------------------------------------------------- bad input


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["report", *map(str, arguments)])
    return stopped.value.code


def test_a_file_that_is_read_is_not_written(tmp_path, capsys):
    path = bad(tmp_path, "log.jsonl", "{}")
    for option in ("--out", "--json"):
        assert run(path, option, path) == 2
        assert "is read: give another file" in capsys.readouterr().err
    assert path.read_bytes() == b"{}"


def bad(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cut(sweep, name, content):
    (sweep / "group-00" / name).write_text(content)
    return sweep


def changed(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


BAD = {
    "no such": (lambda f: f / "nothing.json", "no file or folder"),
    "empty folder": (lambda f: (f / "empty").mkdir() or f / "empty", "holds nothing to report"),
    "empty file": (lambda f: bad(f, "x.json", ""), "is empty"),
    "another kind": (lambda f: bad(f, "x.json", '{"figure": 5}'), "another kind"),
    "a list": (lambda f: bad(f, "x.json", "[1, 2]"), "another kind"),
    "lines of another kind": (lambda f: bad(f, "x.jsonl", '{"a": 1}\n{"a": 2}\n'), "another kind"),
    "not json": (lambda f: bad(f, "x.json", "hello"), "is not JSON, or not whole"),
    "binary": (lambda f: bad(f, "x.json", bytes(range(256))), "is not JSON, or not whole"),
    "truncated": (
        lambda f: bad(f, "x.json", write_scan(f / "s.json").read_bytes()[:5000]),
        "is not JSON, or not whole",
    ),
    "too deep": (lambda f: bad(f, "x.json", "[" * 100_000), "is not JSON, or not whole"),
    "a damaged scan": (
        lambda f: changed(write_scan(f / "scan.json"), lambda v: v["heads"][3].update(head="<b>")),
        "scan.json: head of row 4 must be a whole number, got '<b>'",
    ),
    "a measurement's head that is none": (
        lambda f: changed(write_measurement(f / "m.json"), lambda v: v["heads"][3].update(head="<b>")),
        "head of its row 4",
    ),
    "flat rho": (
        lambda f: write_measurement(f / "m.json", rho={"layers.0.attn": [1, 2, 3]}),
        "must have 2 dimensions",
    ),
    "a sweep without records": (
        lambda f: cut(write_sweep(f / "s"), "metrics.jsonl", ""),
        "holds no records yet",
    ),
    "a run that is damaged": (
        lambda f: cut(write_sweep(f / "s"), "run.json", '{"config"'),
        "cannot read",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_sentence(name, tmp_path, capsys):
    make, says = BAD[name]
    path = make(tmp_path)
    out = tmp_path / "report.html"
    assert run(path, "--out", out) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.startswith("locater: ")
    assert told.count("\n") == 1
    assert not out.exists()


def test_an_output_that_cannot_be_written_is_one_clear_sentence(tmp_path, capsys):
    scan = write_scan(tmp_path / "scan.json")
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    outs = [tmp_path, tmp_path / "no" / "such" / "report.html", Path("/dev/null/report.html")]
    outs += [sealed / "report.html"] if os.geteuid() else []
    for out in outs:
        assert run(scan, "--out", out) == 2
        told = capsys.readouterr().err
        assert "cannot write" in told
        assert told.count("\n") == 1


def test_of_truncated_lines_the_good_ones_are_shown_and_the_rest_is_named(tmp_path, capsys):
    log = write_log(tmp_path / "log.jsonl", steps=6, modules=1)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([lines[0], "not json\n", *lines[1:5], lines[5][:40]]))
    assert run(log, "--out", tmp_path / "report.html", "--json", tmp_path / "told.json") == 0
    (section,) = json.loads((tmp_path / "told.json").read_text())["sections"]
    assert section["notes"] == ["lines 2, 7 of log.jsonl are damaged and left out"]
    assert section["notes"][0] in capsys.readouterr().out
    assert data_of((tmp_path / "report.html").read_text())["sections"][0]["steps"] == [0, 5, 10, 15, 20]


@pytest.mark.parametrize("packed_up", [False, True])
def test_of_a_sweep_that_was_cut_off_the_whole_records_are_shown(tmp_path, packed_up):
    rng = np.random.default_rng(0)
    folder = write_sweep(tmp_path / "sweep", records=40, packed=packed_up, tokens=64)
    (file,) = (folder / "group-00").glob("metrics*")
    if packed_up:  # numbers that do not compress into one block
        rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
        for row in rows:
            row["rho"] = rng.random((1, 1, 64)).tolist()
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (section,) = report([folder]).sections
    assert 5 < len(section["steps"]) < 40
    assert any("left out" in note for note in section["notes"])
    assert packed_up == any("what could be unpacked" in note for note in section["notes"])


def test_a_folder_below_that_cannot_be_read_is_passed_over_and_named(tmp_path, monkeypatch):
    write_sweep(tmp_path / "all" / "sweep", records=5)
    (tmp_path / "all" / "secret").mkdir()
    whole, is_file = Path.iterdir, Path.is_file

    def refused(path):
        if "secret" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", lambda path: refused(path) or whole(path))
    monkeypatch.setattr(Path, "is_file", lambda path: refused(path) or is_file(path))
    made = report([tmp_path / "all"])
    assert len(made.sections) == 1
    assert made.passed == [f"cannot read {tmp_path / 'all' / 'secret'}: Permission denied"]


def test_records_of_another_shape_are_counted_not_fatal(tmp_path):
    folder = write_sweep(tmp_path / "sweep", records=5)
    file = folder / "group-00" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["rho"] = "<script>"
    rows[2]["scale"] = {"a": 1}
    rows[3]["trace"] = [["ten"]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (section,) = report([folder]).sections
    for name in ("rho", "scale", "trace"):
        assert f"1 record has no {name} that can be read" in section["notes"]
    scale = unpacked(section["curves"]["scale"])[..., 0]
    assert np.isnan(scale).sum() == 1


def test_the_scripts_of_the_page_declare_every_name_once():
    """They share one scope, in which a later function silently replaces an earlier one of its name."""
    scripts = Path(report_page.__file__).parent / "page"
    text = "\n".join(path.read_text() for path in scripts.glob("*.js"))
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", text, flags=re.MULTILINE)
    assert sorted(names) == sorted(set(names))


# ---------------------------------------------------------------------- from the commands themselves


def test_a_scans_json_carries_eigenvalues_whose_sums_are_its_traces(tmp_path, capsys):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["scan", str(tmp_path / "model"), "--json", str(tmp_path / "scan.json")])
    assert stopped.value.code == 0
    written = json.loads((tmp_path / "scan.json").read_text())
    for module, clouds in written["eigenvalues"].items():
        rows = [row for row in written["heads"] if row["module"] == module]
        sums = np.array(clouds).sum(1)  # of real parts, and of imaginary ones, which come in pairs
        size = np.abs(clouds).sum((1, 2)).max()
        np.testing.assert_allclose(sums[:, 0], [row["trace"] for row in rows], atol=1e-5 * size)  # six digits
        np.testing.assert_allclose(sums[:, 1], 0, atol=1e-5 * size)
    attention = model.model.layers[0].self_attn
    w_q = attention.q_proj.weight.detach().double().view(4, 8, 32)[0]
    w_k = attention.k_proj.weight.detach().double().view(2, 8, 32)[0]
    expected = np.sort_complex(QK(w_q, w_k).eigenvalues().numpy())
    found = np.sort_complex([complex(*pair) for pair in written["eigenvalues"][rows_module(written)][0]])
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    (section,) = report([tmp_path / "scan.json"]).sections
    assert all(section["eigenvalues"])


def rows_module(written):
    return written["heads"][0]["module"]


def test_made_up_rho_is_what_the_page_holds(tmp_path):
    (section,) = report([write_sweep(tmp_path / "s", layers=2, heads=2, tokens=8)]).sections
    values = unpacked(section["rho"]["values"])
    place = section["rho"]["parts"].index("layer 1, head 0")
    np.testing.assert_allclose(values[1, place, 3], rho_at(1, 30, 1, 0, 8), atol=2e-5)
    assert len(log_rows()) == 40
