"""Files appear whole or not at all, are read within bounds, and what they name lies inside their folder."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from locater.errors import LocaterError, one_line, reason
from locater.io import (
    inside,
    json_bytes,
    nulled,
    parse_json_lines,
    read_file,
    read_json,
    remove_unfinished,
    unpacked,
    write_file,
)


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    for content in (b"old", b"new"):
        write_file(tmp_path / "a.txt", content)
        assert (tmp_path / "a.txt").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "real.txt").write_bytes(b"old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    write_file(tmp_path / "link.txt", b"new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_bytes() == b"new"


def test_a_pipe_is_written_into(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_file(tmp_path / "pipe", b"numbers")
    reader.join(10)
    assert got == [b"numbers"]
    assert (tmp_path / "pipe").is_fifo()


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(LocaterError, match=r"cannot write .*missing/a\.txt: No such file or directory"):
        write_file(tmp_path / "missing" / "a.txt", b"")
    with pytest.raises(LocaterError, match="cannot write"):
        write_file(tmp_path, b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "a/b.safetensors", "group-00", "a b", "..a", "é"])
def test_a_name_inside_its_folder_is_its_path(name):
    assert inside(Path("folder"), name, Path("folder/sweep.json")) == Path("folder") / name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/../../b", "/etc/passwd", "a//b", "C:\\x", "\\\\host", "a\0", "a\n", None, 3, ["a"]],
)
def test_a_name_that_leads_elsewhere_is_refused(name):
    with pytest.raises(LocaterError, match="is no file or folder inside folder"):
        inside(Path("folder"), name, Path("folder/sweep.json"))


DAMAGED = {
    "nested 10⁵ deep": (b'{"a":' * 100_000, "nested too deep"),
    "not UTF-8": (b'{"a": "\xff"}', "as JSON"),
    "cut off": (b'{"a": [1, ', "as JSON"),
    "empty": (b"", "as JSON"),
    "a list": (b"[1]", "should hold a JSON object, got list"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_json_that_is_none_is_one_sentence(name, tmp_path):
    content, says = DAMAGED[name]
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(LocaterError, match=says) as failure:
        read_json(tmp_path / "a.json")
    assert len(str(failure.value)) < 400


def test_whole_numbers_beyond_64_bits_are_floats(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 123456789012345678, "b": 10000000000000000000, "c": ' + "9" * 400 + "}")
    assert read_json(tmp_path / "a.json") == {"a": 123456789012345678, "b": 1e19, "c": float("inf")}


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(LocaterError, match="it is a pipe or a device"):
        read_json(tmp_path / "a.json")
    with pytest.raises(LocaterError, match="it is a folder"):
        read_file(tmp_path)


def test_a_pipe_that_nobody_reads_from_is_refused_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("locater.io._READER_WITHIN", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LocaterError, match="cannot write"):
        write_file(tmp_path / "pipe", b"numbers")


def test_what_was_compressed_comes_back_and_damage_is_told(tmp_path):
    path, content = tmp_path / "a.gz", b"0123456789" * 50_000
    packed = gzip.compress(content)
    assert unpacked(path, packed) == (content, True)
    assert unpacked(path, packed + gzip.compress(b"more")) == (content + b"more", True)
    for damaged in (packed[:-4], packed[:100], packed[:-8] + b"\0" * 8, b"\x1f\x8b"):
        found, whole = unpacked(path, damaged)
        assert not whole
        assert content.startswith(found)
    noise = bytes(range(256)) * 400 + os.urandom(100_000)
    found, whole = unpacked(path, gzip.compress(noise)[:-20_000])
    assert not whole
    assert len(found) > 100_000  # what could be had


def test_a_bomb_is_not_unpacked(tmp_path):
    bomb = gzip.compress(bytes(100 * 2**20), 9)  # a thousand times its size
    with pytest.raises(LocaterError, match="unpacks to more than 67,108,864 bytes"):
        unpacked(tmp_path / "a.gz", bomb)


def test_lines_are_told_apart_by_what_is_wrong_with_them():
    found = parse_json_lines(b'{"a": 1}\nnonsense\n\n[2]\n{"a": 3}\n{"a": ')
    assert found == [{"a": 1}, {"a": 3}]
    assert (found.numbers, found.damaged, found.cut_off) == ([1, 5], [2, 4], 6)


def test_json_has_null_for_what_is_not_finite_and_takes_any_name():
    value = nulled({"a": [1.0, float("nan")], 3: (float("inf"), "b")})
    assert value == {"a": [1.0, None], "3": [None, "b"]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes({"a": float("nan")})
    assert json.loads(json_bytes({"ρ": "\udcff"})) == {"ρ": "\udcff"}
    assert "ρ".encode() in json_bytes({"ρ": 1})


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    for name in (".a.json.x1y2.unfinished", "a.json", ".lock", "b.unfinished"):
        (tmp_path / name).write_text("")
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a.json", "b.unfinished"]


def test_a_loop_of_links_is_one_sentence(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LocaterError, match="cannot read"):
        read_file(tmp_path / "loop")
    with pytest.raises(LocaterError, match="cannot write"):
        write_file(tmp_path / "loop", b"")


def test_words_of_other_libraries_become_one_line():
    assert reason(RuntimeError("first\nsecond")) == "first"
    assert reason(RuntimeError("why Exception raised from f at g.cpp:3 (frame 0)")) == "why"
    assert reason(ValueError()) == "ValueError"
    long = one_line("a" * 10_000 + " the end")
    assert len(long) <= 700
    assert long.endswith("the end")
