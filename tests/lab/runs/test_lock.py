"""One process at a time in a run's folder, and none that died."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from locater.errors import LocaterError
from locater.lab.runs import lock
from locater.lab.runs.lock import exclusive_lock

HOLD = """
import sys, time
from pathlib import Path
from locater.lab.runs.lock import exclusive_lock
with exclusive_lock(Path(sys.argv[1]), "one"):
    print("holds", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder's lock."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


@pytest.mark.parametrize("owner", [None, "another"])
def test_two_cannot_train_in_one_folder_and_the_second_names_the_first(tmp_path, monkeypatch, holder, owner):
    monkeypatch.setattr(lock, "_OTHERS", 0.3)
    for _ in range(2):  # who is refused leaves the holder's name
        said = f"^{tmp_path} is in use by process {holder.pid} on {os.uname().nodename}; wait for it to end, or end it$"
        with pytest.raises(LocaterError, match=said), exclusive_lock(tmp_path, owner):
            pass


def test_a_killed_process_leaves_no_lock(tmp_path, monkeypatch, holder):
    monkeypatch.setattr(lock, "_OTHERS", 0.3)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    for _ in range(2):  # and the lock can be taken again after its release
        with exclusive_lock(tmp_path):
            assert f'"process": {os.getpid()}' in (tmp_path / ".lock").read_text()


def test_an_earlier_worker_of_the_same_sweep_is_waited_for(tmp_path, monkeypatch, holder):
    monkeypatch.setattr(lock, "_OTHERS", 0.0)
    threading.Timer(0.5, holder.kill).start()
    with exclusive_lock(tmp_path, "one"):
        assert holder.wait(5) == -signal.SIGKILL


def test_within_a_process_two_cannot_either(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_OTHERS", 0.3)
    with exclusive_lock(tmp_path), pytest.raises(LocaterError, match=f"in use by process {os.getpid()}"):
        exclusive_lock(tmp_path).__enter__()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    import fcntl

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LocaterError, match=f"{os.strerror(number)}; choose a folder"), exclusive_lock(tmp_path):
        pass


def test_what_goes_wrong_inside_is_not_taken_for_the_lock_s(tmp_path):
    with pytest.raises(OSError, match="disk"), exclusive_lock(tmp_path):
        raise OSError("the disk is full")
    with exclusive_lock(tmp_path):
        pass
