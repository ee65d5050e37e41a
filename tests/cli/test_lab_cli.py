"""train, sweep and figure as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from xml.etree import ElementTree

import pytest
from corpora import write_corpus

from locater.cli import main

LOCATER = [sys.executable, "-m", "locater"]
SMALL = [
    *("--set", "width=16", "--set", "ffn=16", "--set", "tokens=8", "--set", "batch=4", "--set", "record_every=20"),
    *("--set", "probe_blocks=8", "--set", "valid_blocks=8", "--set", "checkpoint_every=20"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(*arguments, cwd, status=0):
    """In this process, which has everything loaded."""
    out, err = StringIO(), StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as leaving:
        main([str(word) for word in arguments])
    assert leaving.value.code == status, err.getvalue()
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def test_a_sweep_is_trained_summed_up_and_drawn(tmp_path, text):
    options = ["--data", text, "--steps", 60, "--kappa-2", "none,0,1", "--seeds", "0,1", "--out", "here", *SMALL]
    done = run("sweep", "paper-d32-l1", *options, "--group-size", 4, "--json", "sweep.json", cwd=tmp_path)
    assert "step 60 of 60" in done.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["members"]
    assert [row["member"] for row in rows] == ["none-s0", "none-s1", "k0-s0", "k0-s1", "k1-s0", "k1-s1"]
    assert all(row["steps"] == 60 and row["perplexity"] > 1 for row in rows)
    assert sorted(path.name for path in (tmp_path / "here").glob("[!.]*")) == ["group-00", "group-01", "sweep.json"]
    again = run("sweep", "paper-d32-l1", *options, "--group-size", 4, "--json", "-", cwd=tmp_path)
    assert json.loads(again.stdout)["members"] == rows  # nothing is trained twice
    refused = run("figure", 8, "--runs", "here", "--out", "pictures", cwd=tmp_path, status=2)
    assert "d = 32" in refused.stderr  # this one is 16 wide
    assert not (tmp_path / "pictures").exists()
    assert "need the folder of a sweep" in run("figure", 6, cwd=tmp_path, status=2).stderr


def test_seeds_trained_later_are_judged_and_drawn_with_the_first(tmp_path, text):
    options = [
        "laptop",
        "--data",
        text,
        "--steps",
        40,
        "--kappa-2",
        "none,0,1",
        "--set",
        "width=128",
        "--set",
        "heads=1",
    ]
    for seeds, out, more in (("0", "a", []), ("1,2", "b", []), ("2,3", "c", []), ("4", "d", ["--set", "dropout=0.3"])):
        run("sweep", *options, *SMALL[4:], *more, "--set", "layers=1", "--seeds", seeds, "--out", out, cwd=tmp_path)
    done = run("claims", "a", "b", "--markdown", "claims.md", "--json", "claims.json", cwd=tmp_path)
    assert "3 seeds" in done.stdout
    written = json.loads((tmp_path / "claims.json").read_text())
    assert written["runs"] == ["a", "b"]
    assert {claim["evidence"].get("seeds", 3) for claim in written["claims"]} == {3}
    assert "(3 seeds)" in (tmp_path / "claims.md").read_text()
    refused = run("claims", "a", "b", "--plot", "effects.png", cwd=tmp_path, status=2)
    assert "--plot draws planned comparisons" in refused.stderr
    run("report", "claims.json", cwd=tmp_path)
    assert "claims: a and b" in (tmp_path / "report.html").read_text()
    run("figure", 6, "--runs", "a", "--runs", "b", "--out", "pictures", cwd=tmp_path)
    assert json.loads((tmp_path / "pictures" / "figure-6.json").read_text())["lines"]["1"]["seeds"] == [0, 1, 2]
    for folders, says in ((("b", "c"), "b and c both hold seed 2"), (("a", "d"), "a and d differ in dropout")):
        for command in (("claims", *folders), ("figure", 6, "--runs", folders[0], "--runs", folders[1])):
            refused = run(*command, cwd=tmp_path, status=2)
            assert says in refused.stderr
            assert len(refused.stderr.splitlines()) == 1


def test_one_model_is_trained(tmp_path, text):
    done = run("train", "laptop", "--data", text, "--steps", 20, "--kappa-2", "10", *SMALL, cwd=tmp_path)
    assert "k10-s0" in done.stdout
    assert (tmp_path / "runs" / "laptop-k10-s0" / "metrics.jsonl").exists()


def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path, text):
    command = ["train", "laptop", "--data", str(text), "--steps", "1000000", "--out", "run", *SMALL]
    process = subprocess.Popen(
        [*LOCATER, *command],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not list(tmp_path.glob("run/checkpoints/*.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "locater: stopped"
    steps = int(max(path.stem for path in tmp_path.glob("run/checkpoints/*.json")).removeprefix("step-"))
    command[command.index("1000000")] = str(steps + 20)
    assert f"going on from step {steps}" in run(*command, cwd=tmp_path).stderr


MISTAKES = {
    "an unknown preset": (["train", "paper-d7"], "there is no preset 'paper-d7'; there are paper-d128-l1"),
    "an unknown setting": (["train", "laptop", "--set", "colour=red"], "unknown setting 'colour'"),
    "a setting without a value": (["train", "laptop", "--set", "width"], "--set takes NAME=VALUE"),
    "an impossible setting": (["train", "laptop", "--set", "width=0"], "width must be a whole number"),
    "a flag that is none": (["train", "laptop", "--set", "tied=maybe"], "tied takes true or false"),
    "a number that is none": (["train", "laptop", "--set", "dropout=abc"], "dropout takes a number"),
    "a seed without end": (["train", "laptop", "--seed", "99999999999999999999"], "seed"),
    "a strength that is none": (["train", "laptop", "--kappa-2", "much"], "--kappa-2 takes a number or none"),
    "a negative strength": (["sweep", "laptop", "--kappa-2", "-1"], "κ₂ must be"),
    "a seed twice": (["sweep", "laptop", "--seeds", "1,1"], "names a value twice"),
    "a seed that is none": (["sweep", "laptop", "--seeds", "one"], "--seeds takes whole numbers"),
    "no such folder": (["train", "laptop", "--data", "nowhere"], "nowhere"),
    "an unknown precision": (["train", "laptop", "--precision", "fp8"], "precision must be one of fp32, bf16, fp16"),
    "an unknown device": (["train", "laptop", "--device", "abacus"], "cannot run on the device 'abacus'"),
    "an unknown engine": (["sweep", "laptop", "--engine", "steam"], "engine must be local or ray"),
    "an address without Ray": (["sweep", "laptop", "--address", "here:1"], "add --engine ray"),
    "an unknown reading": (["sweep", "laptop", "--readings", "mine"], "reading must be one of"),
    "an empty group": (["sweep", "laptop", "--group-size", "0"], "a group needs at least one member"),
    "a strength beside conditions": (["sweep", "cause-laptop", "--kappa-2", "1"], "has conditions of its own"),
    "a level out of reach": (["sweep", "cause-laptop", "--set", "tokens=8"], "lies between 0 and 1.326"),
    "a layer that is not there": (["sweep", "cause-pre-l6", "--set", "layers=2"], "acts on layer 2, but"),
    "followers apart": (["sweep", "cause-laptop", "--group-size", "4"], "choose a group size of 19 or more"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, mistake, monkeypatch, capsys):
    arguments, says = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert says in err
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["train", "sweep", "arena"])
def test_nothing_is_trained_among_other_files(tmp_path, command, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(SystemExit) as stopped:
        main([command, "laptop", "--steps", "2", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "holds other files" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_setting_is_read_by_its_kind(tmp_path, text):
    options = ["--set", "norm=none", "--set", "tied=no", "--set", "valid_blocks=none"]
    run("train", "laptop", "--data", text, "--steps", 2, *SMALL, *options, "--out", "run", cwd=tmp_path)
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (config["model"]["norm"], config["model"]["tied"], config["valid_blocks"]) == ("none", False, None)


def test_the_presets_are_listed(tmp_path):
    names = json.loads(run("presets", "--json", "-", cwd=tmp_path).stdout)
    assert {"laptop", "paper-d128-l1", "paper-d32-l6"} <= names.keys()


def test_a_planned_sweep_prints_its_comparisons(tmp_path, text):
    small = ["--set", "width=16", "--set", "ffn=16", "--set", "batch=2", "--set", "record_every=2", "--set"]
    options = ["--data", text, "--steps", 2, "--seeds", "0,1", *small, "valid_blocks=2", "--set", "probe_blocks=2"]
    run("sweep", "cause-laptop", *options, "--out", "cause", "--json", "-", cwd=tmp_path)
    done = run(
        "claims", "cause", "--json", "claims.json", "--markdown", "claims.md", "--plot", "effects.svg", cwd=tmp_path
    )
    found = json.loads((tmp_path / "claims.json").read_text())
    assert {each["name"] for each in found["effects"]} <= texts_of(tmp_path / "effects.svg")
    assert found["effects"][0]["name"] == "LocAteR's gain"
    # two of the five seeds that are planned
    assert all(each["seeds"] == 2 and each["verdict"] == "cannot tell" for each in found["effects"])
    assert "paired by seed" in done.stdout  # a narrow terminal breaks longer lines
    assert "| `locaters-entropy` | `none` |" in (tmp_path / "claims.md").read_text()
    for options, says in (
        (["--seeds-from", "cause"], "--seeds-from is for the paper's claims"),
        (["--plot", "effects.pdf"], "a picture is a .png or an .svg file, got effects.pdf"),
    ):
        assert says in run("claims", "cause", *options, cwd=tmp_path, status=2).stderr


def texts_of(svg):
    return {"".join(each.itertext()) for each in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}
