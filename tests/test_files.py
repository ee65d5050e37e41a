"""Files appear whole or not at all; links and pipes stay what they are."""

from __future__ import annotations

import os
import threading

import pytest

from locater.errors import LocaterError
from locater.files import write_file


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
