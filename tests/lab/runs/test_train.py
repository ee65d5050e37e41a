"""Runs that are killed, interrupted, damaged or refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import write_corpus

from locater import LocaterError
from locater.lab import Config, Member, ModelConfig, load_corpus, read_metrics, read_run, train
from locater.lab.runs.records import Run
from locater.lab.runs.sweep import Plan
from locater.lab.runs.train import _fingerprint

SHAPE = ModelConfig(width=16, ffn=16, layers=2, heads=2, tokens=8)
CONFIG = Config(model=SHAPE, batch=8, steps=300, record_every=10, checkpoint_every=15, probe_blocks=8, valid_blocks=8)
MEMBERS = [
    Member("plain", learning_rate=3e-3),
    Member("held", seed=1, learning_rate=3e-3, scale_strength=1e-2, mean_strength=1e-2),
]


@pytest.fixture(scope="module")
def processes():
    """A server that has torch loaded and forks a process at once when asked for one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["locater.lab"])
    return context


def run_here(config, folder, corpus):
    train(config, MEMBERS, folder, corpus=corpus, device="cpu")


def run_limited(config, folder, corpus, limit, answer):
    """With files no larger than a limit: what a full disk does."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        train(config, MEMBERS, folder, corpus=corpus, device="cpu")
    except LocaterError as error:
        answer.send(str(error))


def finish(process):
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0


def metrics(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus, processes):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(processes.Process(target=run_here, args=(CONFIG, folder, corpus)))
    return folder


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_write_a_checkpoint_and_the_run_goes_on_from_there(
    number, status, tmp_path, corpus, processes, undisturbed
):
    folder = tmp_path / "run"
    process = processes.Process(target=run_here, args=(replace(CONFIG, checkpoint_every=10_000), folder, corpus))
    process.start()
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder).splitlines()) < 12:
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(timeout=60)
    assert process.exitcode == status  # KeyboardInterrupt, SystemExit
    assert len(list((folder / "checkpoints").glob("*.safetensors"))) == 1
    finish(processes.Process(target=run_here, args=(CONFIG, folder, corpus)))
    assert metrics(folder) == metrics(undisturbed)


def test_checkpoints_from_before_positions_could_be_rotary_still_belong_to_their_runs():
    """This is what such a run was called; with rotary positions it is another."""
    run = Run(Path("runs/one"), Config(), (Member("one"),), {"corpus": "a text"})
    assert _fingerprint(run) == "2f6e381bbb219f8e"
    assert _fingerprint(replace(run, config=Config().changed(positions="rotary"))) != "2f6e381bbb219f8e"


@pytest.mark.bitwise  # beside a run of another process
@pytest.mark.parametrize("damage", ["flipped", "cut", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, corpus, undisturbed, damage):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    newest = max((folder / "checkpoints").glob("*.safetensors"))
    if damage == "manifest":
        newest.with_suffix(".json").write_text("{")
    else:
        content = bytearray(newest.read_bytes())
        content[-50] ^= 1
        newest.write_bytes(content if damage == "flipped" else content[:-100])
    seen = []
    train(CONFIG, MEMBERS, folder, corpus=corpus, device="cpu", watch=seen.append)
    assert "going on from step 285" in seen[0].note
    assert newest.name.removesuffix(".safetensors") in seen[0].note
    assert metrics(folder) == metrics(undisturbed)


def manifest_of(folder):
    return max((folder / "checkpoints").glob("*.json"))


@pytest.mark.bitwise  # beside a run of another process
@pytest.mark.parametrize("key", ["step", "sha256", "bytes", "belongs_to", "records", "manifest_sha256"])
def test_one_changed_character_in_a_manifest_is_noticed_and_the_checkpoint_before_is_used(
    tmp_path, corpus, undisturbed, key
):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    path = manifest_of(folder)
    text = path.read_text()
    at = next(i for i in range(text.index(f'"{key}":') + len(key) + 3, len(text)) if text[i].isdigit())
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    seen = []
    train(CONFIG, MEMBERS, folder, corpus=corpus, device="cpu", watch=seen.append)
    assert "going on from step 285" in seen[0].note
    assert metrics(folder) == metrics(undisturbed)


@pytest.mark.bitwise  # beside a run of another process
def test_checkpoints_from_before_manifests_had_checksums_go_on(tmp_path, corpus, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    for path in (folder / "checkpoints").glob("*.json"):
        value = json.loads(path.read_text())
        del value["manifest_sha256"], value["records"]
        path.write_text(json.dumps(value))
    run_here(CONFIG, folder, corpus)
    assert metrics(folder) == metrics(undisturbed)
    path = manifest_of(folder)
    path.write_text(path.read_text().replace('"step": 300', '"step": 290'))  # is held to its name
    seen = []
    train(CONFIG, MEMBERS, folder, corpus=corpus, device="cpu", watch=seen.append)
    assert "going on from step 285" in seen[0].note


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [line for line in lines if b'"step":40,' not in line], "step 40 in .* are missing"),
        (lambda lines: lines[:20] + lines[21:], "step 60 in .* were changed"),
        (lambda lines: [line.replace(b'"step":70,"member":"held"', b'"step":70,"member":"hold"') for line in lines],
         "step 70 in .* were changed"),
        (lambda lines: [*lines[:9], lines[9].replace(b"1", b"2", 3), *lines[10:]], "step 8 in .* were changed"),
        (lambda lines: [*lines, lines[-1].replace(b'"step":300', b'"step":299')], "step 299 in .* were added"),
        (lambda lines: lines[:-1], "step 300 in .* were changed"),
        (lambda lines: lines[:0], "step 0 in .* are missing"),
    ],
)  # fmt: skip
def test_records_that_were_lost_or_changed_are_named_when_the_run_goes_on(tmp_path, corpus, undisturbed, change, says):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    before = b"".join(change(metrics(folder).splitlines(keepends=True)))
    (folder / "metrics.jsonl").write_bytes(before)
    with pytest.raises(LocaterError, match=f"the records of {says} since the checkpoint was written"):
        run_here(replace(CONFIG, steps=310), folder, corpus)
    assert metrics(folder) == before  # nothing is made worse


@pytest.mark.parametrize("value", ['"abc"', "[]", "{}", "[[1]]", '[["a"]]', "true"])
def test_records_of_another_type_are_named_with_their_line(tmp_path, corpus, undisturbed, value):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    lines = metrics(folder).splitlines(keepends=True)
    record = json.loads(lines[5]) | {"rank_residual": json.loads(value)}
    (folder / "metrics.jsonl").write_bytes(b"".join([*lines[:5], json.dumps(record).encode() + b"\n", *lines[6:]]))
    for read in (lambda: read_metrics(folder), lambda: run_here(CONFIG, folder, corpus)):
        with pytest.raises(LocaterError, match=r"line 6 of .* is damaged"):
            read()


def test_what_a_killed_process_left_is_gone_after_the_next(tmp_path, corpus, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    (folder / ".run.json.abc.unfinished").write_text("half")
    (folder / "checkpoints" / ".unfinished-abc").write_text("half")
    (folder / "checkpoints" / "step-000000299.safetensors").write_text("no manifest")
    run_here(replace(CONFIG, steps=310), folder, corpus)
    names = [path.name for path in folder.rglob("*")]
    assert not [name for name in names if "unfinished" in name or "299" in name]


def test_when_every_checkpoint_is_damaged_it_says_so_and_keeps_them(tmp_path, corpus, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    for path in (folder / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(LocaterError, match=r"no checkpoint in .* is whole"):
        train(CONFIG, MEMBERS, folder, corpus=corpus, device="cpu")
    assert metrics(folder) == metrics(undisturbed)


@pytest.mark.bitwise  # beside a run of another process
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, corpus, processes, undisturbed):
    folder = tmp_path / "run"
    finish(processes.Process(target=run_here, args=(replace(CONFIG, steps=30), folder, corpus)))
    size = max((folder / "checkpoints").glob("*.safetensors")).stat().st_size
    ours, theirs = multiprocessing.Pipe()
    finish(processes.Process(target=run_limited, args=(CONFIG, folder, corpus, size // 2, theirs)))
    assert "cannot write the checkpoint" in ours.recv()
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == [f"step-{step:09d}.{kind}" for step in (15, 30) for kind in ("json", "safetensors")]
    run_here(CONFIG, folder, corpus)
    assert read_metrics(folder).drop_duplicates(["step", "member"]).iloc[-1].to_dict() == (
        read_metrics(undisturbed).iloc[-1].to_dict()
    )


def test_a_disk_without_space_says_that_it_is_full(tmp_path, corpus):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        with pytest.raises(LocaterError, match=r"disk is full|No space left"):
            run_here(CONFIG, disk / "run", corpus)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.bitwise  # beside a run of another process
def test_a_run_can_be_given_more_steps(tmp_path, corpus, undisturbed):
    folder = tmp_path / "run"
    run_here(replace(CONFIG, steps=150), folder, corpus)
    run_here(CONFIG, folder, corpus)
    records = [json.loads(line) for line in metrics(folder).splitlines()]
    for record in records:
        if record["step"] == 150:
            del record["eigenvalues"]  # it was the last one once
    assert records == [json.loads(line) for line in metrics(undisturbed).splitlines()]


def test_a_folder_of_another_run_is_refused_and_left_alone(tmp_path, corpus, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for config, members, says in (
        (replace(CONFIG, batch=4), MEMBERS, "batch differs"),
        (CONFIG, MEMBERS[:1], "members differs"),
        (replace(CONFIG, model=replace(CONFIG.model, norm="pre")), MEMBERS, "model differs"),
    ):
        with pytest.raises(LocaterError, match=says):
            train(config, members, folder, corpus=corpus, device="cpu")
    small = load_corpus(write_corpus(tmp_path / "small", types=20), cache=tmp_path / "cache")
    with pytest.raises(LocaterError, match="another vocabulary"):
        train(CONFIG, MEMBERS, folder, corpus=small, device="cpu")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_broken_member_is_named_with_its_step_and_the_run_ends_when_all_are_broken(tmp_path, corpus):
    wild = [replace(m, learning_rate=1e30) for m in MEMBERS]
    seen = []
    config = replace(CONFIG, steps=100)
    train(config, [wild[0], MEMBERS[1]], tmp_path / "one", corpus=corpus, device="cpu", watch=seen.append)
    assert list(seen[-1].broke_at) == ["plain"]
    assert seen[-1].step == 100
    train(config, wild, tmp_path / "all", corpus=corpus, device="cpu", watch=seen.append)
    assert list(seen[-1].broke_at) == ["plain", "held"]
    assert seen[-1].step < 100
    json.loads((tmp_path / "all" / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


def test_tensorboard_gets_every_number(tmp_path, corpus):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(replace(CONFIG, steps=20), MEMBERS, tmp_path, corpus=corpus, device="cpu", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    last = read_metrics(tmp_path).iloc[-1]
    (*_, event) = events.Scalars("perplexity/held")
    assert (event.step, event.value) == (20, pytest.approx(last["perplexity"]))
    (*_, event) = events.Scalars("entropy/1.0/held")
    assert event.value == pytest.approx(last["entropy"][1][0])


def test_two_processes_do_not_train_in_one_folder(tmp_path, corpus, processes, monkeypatch):
    from locater.lab.runs import lock

    monkeypatch.setattr(lock, "_OTHERS", 0.5)
    folder = tmp_path / "run"
    other = processes.Process(target=run_here, args=(replace(CONFIG, steps=100_000), folder, corpus))
    other.start()
    try:
        while not (folder / "metrics.jsonl").exists():
            time.sleep(0.01)
        with pytest.raises(LocaterError, match=f"is in use by process {other.pid}"):
            run_here(replace(CONFIG, steps=100_000), folder, corpus)
    finally:
        other.kill()
        other.join()


def test_a_run_says_what_it_was(undisturbed):
    run = read_run(undisturbed)
    assert run.config == CONFIG
    assert list(run.members) == MEMBERS
    assert {"hardware", "versions", "vocabulary", "seconds"} <= run.about.keys()
    assert set(read_metrics(undisturbed)["step"]) == {0, 1, 2, 4, 8, *range(10, 301, 10)}


@pytest.mark.bitwise  # beside a run of another process
@pytest.mark.parametrize("every", [10, 300])
def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path, corpus, undisturbed, every, monkeypatch):
    """Between the record of a step and its checkpoint, too."""
    folder = tmp_path / "run"

    def die(*_):
        raise MemoryError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("locater.lab.runs.checkpoint.save", die)
        with pytest.raises(MemoryError):
            run_here(replace(CONFIG, checkpoint_every=every), folder, corpus)
    assert not (folder / "checkpoints").exists()
    run_here(CONFIG, folder, corpus)
    assert metrics(folder) == metrics(undisturbed)


def test_a_run_without_checkpoints_is_not_trained_over(tmp_path, corpus):
    config, folder = replace(CONFIG, steps=30, checkpoint_every=0), tmp_path / "run"
    run_here(config, folder, corpus)
    before = metrics(folder)
    run_here(config, folder, corpus)  # finished: nothing to do
    assert metrics(folder) == before
    with pytest.raises(LocaterError, match="left no checkpoint to go on from"):
        run_here(replace(config, steps=60), folder, corpus)
    assert metrics(folder) == before


def test_fewer_steps_than_there_are_is_refused(tmp_path, corpus, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    with pytest.raises(LocaterError, match="is at step 300 already, beyond 100"):
        run_here(replace(CONFIG, steps=100), folder, corpus)
    assert read_run(folder).config.steps == 300


def test_a_damaged_line_before_the_last_is_named_to_the_run_and_to_readers(tmp_path, corpus, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    lines = metrics(folder).splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([*lines[:3], b"{damaged\n", *lines[4:]]))
    with pytest.raises(LocaterError, match=r"line 4 of .* is damaged"):
        run_here(CONFIG, folder, corpus)
    with pytest.raises(LocaterError, match=r"line 4 of .* is damaged"):
        read_metrics(folder)
    (folder / "metrics.jsonl").write_bytes(b"".join([*lines[:3], lines[3][:40]]))  # being written
    assert len(read_metrics(folder)) == 3


def test_a_run_that_broke_whole_is_not_begun_again(tmp_path, corpus):
    wild, config = [replace(m, learning_rate=1e30) for m in MEMBERS], replace(CONFIG, steps=100)
    for _ in range(2):
        train(config, wild, tmp_path, corpus=corpus, device="cpu")
        records = [json.loads(line) for line in metrics(tmp_path).splitlines()]
        assert len({(r["step"], r["member"]) for r in records}) == len(records)
    assert max(r["step"] for r in records) < 100


def test_infinite_weights_of_one_member_leave_the_others_their_last_record(tmp_path, corpus):
    wild = replace(MEMBERS[0], name="wild", scale_strength=3e38, mean_strength=1e38, learning_rate=1e38)
    train(replace(CONFIG, steps=20), [wild, MEMBERS[1]], tmp_path, corpus=corpus, device="cpu")
    last = read_metrics(tmp_path).query("step == 20").set_index("member")
    assert last.loc["wild", "broke_at"] >= 1
    assert all(value is not None for value in last.loc["held", "eigenvalues"][0][0][0])


def test_a_run_and_a_sweep_do_not_share_a_folder(tmp_path, corpus, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    plan = Plan.of(folder, CONFIG, MEMBERS, 1, {})
    with pytest.raises(LocaterError, match="holds a single run"):
        plan.write()
    Plan.of(tmp_path / "sweep", CONFIG, MEMBERS, 1, {}).write()
    with pytest.raises(LocaterError, match="holds a sweep"):
        run_here(CONFIG, tmp_path / "sweep", corpus)


def test_names_of_members_must_differ(tmp_path, corpus):
    with pytest.raises(LocaterError, match="names differ"):
        train(CONFIG, [MEMBERS[0], MEMBERS[0]], tmp_path, corpus=corpus)
    with pytest.raises(LocaterError, match="cannot run on the device 'moon'"):
        train(CONFIG, MEMBERS, tmp_path / "x", corpus=corpus, device="moon")
    assert not (tmp_path / "x").exists()
