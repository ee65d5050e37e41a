"""Sweeps on a real Ray cluster of two nodes, which loses processes, a node and its driver on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from locater.errors import LocaterError
from locater.lab.config import Config, Member, ModelConfig, members_for
from locater.lab.runs.sweep import Plan, sweep
from locater.lab.runs.train import Progress

ray: ModuleType = pytest.importorskip("ray", reason="ray is not installed: pip install 'locater[ray]'")

from locater.lab.runs import ray as _ray  # noqa: E402

STEPS, CHECKPOINT_EVERY, WITHIN = 300, 20, 200.0
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # a local cluster would enable it for the whole process
        patch.setenv("RAY_worker_niceness", "0")  # at Ray's 15, workers starve beside other tests
        patch.setenv("LOCATER_CACHE", str(tmp_path_factory.mktemp("cache")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as on the cluster, since sums depend on it
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for split, lines in {"train": 300, "valid": 40, "test": 10}.items():
        words = (
            " ".join(f"w{min(draw.randrange(1, 60), draw.randrange(1, 60))}" for _ in range(10)) for _ in range(lines)
        )
        (folder / f"{split}.txt").write_text("\n".join(words) + "\n")
    return str(folder)


@pytest.fixture(scope="module")
def config(text: str) -> Config:
    model = ModelConfig(width=16, ffn=16, layers=1, tokens=8)
    settings = {"record_every": 50, "checkpoint_every": CHECKPOINT_EVERY, "probe_blocks": 8, "valid_blocks": 16}
    return Config(model=model, data=text, batch=4, steps=STEPS, **settings)


@pytest.fixture(scope="module")
def members(config: Config) -> list[Member]:
    return members_for(config, [None, 1.0, 100.0], learning_rate=3e-3)


@pytest.fixture(scope="module")
def undisturbed(config: Config, members: list[Member], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The metrics of the same sweep, one group after the other in this process."""
    return metrics(sweep(config, members, tmp_path_factory.mktemp("local"), group_size=1))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        made.add_node(**NODE)
        yield made
    finally:
        processes = descendants(os.getpid())
        made.shutdown()
        poll(lambda: not any(map(alive, processes)))


def metrics(plan: Plan) -> dict[str, bytes]:
    return {group.name: (plan.folder / group.name / "metrics.jsonl").read_bytes() for group in plan.groups}


def poll(condition: Callable[[], Any], within: float = WITHIN) -> Any:
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def descendants(process: int) -> list[int]:
    try:
        told = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:  # it ended
        return []
    children = [int(child) for line in told for child in line.split()]
    return children + [process for child in children for process in descendants(child)]


def command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def in_the_middle(folder: Path) -> list[str]:
    """Groups that have a checkpoint, and not yet the last one."""
    newest = {path.parent.parent.name: path.stem for path in sorted(folder.glob("*/checkpoints/step-*.json"))}
    return [name for name, stem in newest.items() if stem != f"step-{STEPS:09d}"]


def newest_checkpoint(folder: Path) -> str:
    return max((path.stem for path in folder.glob("*/checkpoints/step-*.json")), default="")


def worker_of(folder: Path, group: str) -> int:
    return int(json.loads((folder / group / ".lock").read_text())["process"])


class Meanwhile(threading.Thread):
    """Does something while the sweep runs; what goes wrong there goes wrong in the test."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._do = do
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._do()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        self.join(WITHIN)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error


class Watched:
    """What a sweep told whoever watched it."""

    def __init__(self) -> None:
        self.last: dict[str, Progress] = {}
        self.notes: list[str] = []

    def __call__(self, group: str, progress: Progress) -> None:
        self.last[group] = progress
        self.notes += [f"{group}: {progress.note}"] if progress.note else []

    def died(self) -> set[str]:
        return {note.partition(":")[0] for note in self.notes if "its worker died" in note}


# ---------------------------------------------------------------------- on the cluster


def test_the_metrics_are_those_of_the_local_engine(cluster, config, members, undisturbed, tmp_path):
    watched = Watched()
    plan = sweep(config, members, tmp_path, group_size=1, engine="ray", address=cluster.address, watch=watched)
    assert metrics(plan) == undisturbed
    assert {name: progress.step for name, progress in watched.last.items()} == dict.fromkeys(undisturbed, STEPS)
    assert not watched.died()
    assert not ray.is_initialized()


def test_a_killed_worker_is_replaced_and_nothing_changes(cluster, config, members, undisturbed, tmp_path, full):
    if not full:
        pytest.skip("a fifth of a minute: LOCATER_FULL=1, or make test-full")
    killed: list[Any] = []

    def kill() -> None:
        group = poll(lambda: in_the_middle(tmp_path))[0]
        killed.extend([group, worker_of(tmp_path, group)])
        os.kill(killed[1], signal.SIGKILL)

    killer, watched = Meanwhile(kill), Watched()
    plan = sweep(config, members, tmp_path, group_size=1, engine="ray", address=cluster.address, watch=watched)
    killer.check()
    assert watched.died() == {killed[0]}
    assert worker_of(tmp_path, killed[0]) != killed[1]
    assert metrics(plan) == undisturbed


def test_a_lost_node_s_work_goes_on_on_another(cluster, config, members, undisturbed, tmp_path, full):
    if not full:
        pytest.skip("a fifth of a minute: LOCATER_FULL=1, or make test-full")
    (node,) = cluster.worker_nodes

    raylet = node.all_processes["raylet"][0].process.pid
    lost: list[str] = []

    def lose() -> None:
        lost.extend(poll(lambda: [g for g in in_the_middle(tmp_path) if worker_of(tmp_path, g) in descendants(raylet)]))
        processes = descendants(raylet)
        cluster.remove_node(node, allow_graceful=False)
        for process in filter(alive, processes):  # they would live for another second; on a lost node nothing does
            os.kill(process, signal.SIGKILL)

    loser, watched = Meanwhile(lose), Watched()
    try:
        plan = sweep(config, members, tmp_path, group_size=1, engine="ray", address=cluster.address, watch=watched)
        loser.check()
    finally:
        if not cluster.worker_nodes:
            cluster.add_node(**NODE)
    assert watched.died() == set(lost)
    assert metrics(plan) == undisturbed


def test_training_goes_on_without_the_board_for_progress_and_gets_a_new_one(cluster, config, members, tmp_path, full):
    if not full:
        pytest.skip("a quarter of a minute: LOCATER_FULL=1, or make test-full")
    went_on = threading.Event()

    class SeenError(Exception):
        pass

    def kill() -> None:
        board = poll(lambda: [p for p in descendants(os.getpid()) if b"ray::_Board" in command(p)])[0]
        os.kill(board, signal.SIGKILL)
        poll(lambda: not alive(board))
        before = newest_checkpoint(tmp_path)
        poll(lambda: newest_checkpoint(tmp_path) > before)
        went_on.set()

    def watch(_group: str, _progress: Progress) -> None:
        if went_on.is_set():
            raise SeenError

    killer = Meanwhile(kill)
    with pytest.raises(SeenError):
        sweep(config.changed(steps=10**6), members[:1], tmp_path, engine="ray", address=cluster.address, watch=watch)
    killer.check()


def test_a_failing_group_lets_the_others_finish_and_is_named(cluster, config, members, undisturbed, tmp_path, full):
    if not full:
        pytest.skip("a fifth of a minute: LOCATER_FULL=1, or make test-full")
    (tmp_path / "group-01").mkdir()
    (tmp_path / "group-01" / "run.json").write_text("not what a run writes")
    with pytest.raises(
        LocaterError, match=r"^group-01: cannot read .*run\.json as JSON: .*\(the other 2 of 3 groups"
    ) as raised:
        sweep(config, members, tmp_path, group_size=1, engine="ray", address=cluster.address)
    assert len(str(raised.value).splitlines()) == 1
    for name in ("group-00", "group-02"):
        assert (tmp_path / name / "metrics.jsonl").read_bytes() == undisturbed[name]


def test_a_group_that_dies_again_and_again_is_given_up(cluster, config, members, tmp_path, monkeypatch, full):
    if not full:
        pytest.skip("a sixth of a minute: LOCATER_FULL=1, or make test-full")
    monkeypatch.setattr(_ray, "_DEATHS", 2)
    endless = config.changed(steps=10**6, checkpoint_every=0)
    killed: list[int] = []

    def kill_both() -> None:
        lock = tmp_path / "group-00" / ".lock"
        while len(killed) < 2:
            poll(
                lambda: (
                    lock.exists() and lock.read_text().endswith("}") and worker_of(tmp_path, "group-00") not in killed
                )
            )
            killed.append(worker_of(tmp_path, "group-00"))
            os.kill(killed[-1], signal.SIGKILL)

    killer = Meanwhile(kill_both)
    with pytest.raises(LocaterError, match=r"^group-00: its worker died 2 times after step 0: WorkerCrashedError: "):
        sweep(endless, members, tmp_path, engine="ray", address=cluster.address)
    killer.check()


def test_a_bad_configuration_is_one_sentence(cluster, config, members, tmp_path):
    with pytest.raises(LocaterError, match=r"^group-00: a batch of 100000 blocks of 8 tokens is larger than") as raised:
        sweep(config.changed(batch=100_000), members, tmp_path, engine="ray", address=cluster.address)
    assert len(str(raised.value).splitlines()) == 1


def test_a_process_that_is_connected_stays_so(cluster, config, members, tmp_path):
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        with pytest.raises(LocaterError, match=f"connected to Ray at {cluster.address}; call ray.shutdown"):
            sweep(config, members, tmp_path, engine="ray", address="elsewhere:6379")
        assert ray.is_initialized()
    finally:
        ray.shutdown()


# ---------------------------------------------------------------------- a cluster of its own

CTRL_C = """
import json, sys
from locater.lab.config import Config, Member
from locater.lab.runs.sweep import sweep
config, members = json.load(sys.stdin)
sweep(Config.from_json(config), [Member(**m) for m in members], sys.argv[1], group_size=1, engine="ray")
"""


def test_ctrl_c_leaves_checkpoints_behind_and_no_processes(config, members, undisturbed, tmp_path, full):
    if not full:
        pytest.skip("a quarter of a minute: LOCATER_FULL=1, or make test-full")
    endless = config.changed(steps=10**6, checkpoint_every=10**6)  # a checkpoint is the interrupt's
    driver = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as in the foreground
    )  # fmt: skip
    try:
        assert driver.stdin is not None
        driver.stdin.write(json.dumps([endless.to_json(), [member.to_json() for member in members]]))
        driver.stdin.close()
        poll(lambda: driver.poll() is not None or [p for p in tmp_path.glob("*/metrics.jsonl") if p.stat().st_size])
        processes = descendants(driver.pid)
        os.killpg(driver.pid, signal.SIGINT)  # what a terminal does
        assert driver.wait(WITHIN) != 0
        assert driver.stdout is not None
        with driver.stdout as said:
            assert "KeyboardInterrupt" in said.read()
        assert processes
        poll(lambda: not any(map(alive, processes)))
        assert newest_checkpoint(tmp_path)
    finally:
        driver.kill()
        driver.wait()
    for name, found in metrics(sweep(endless.changed(steps=STEPS), members, tmp_path, group_size=1)).items():
        assert found.startswith(undisturbed[name])  # and may have come further before Ctrl-C


# ---------------------------------------------------------------------- without one


def test_nobody_at_the_address_is_one_sentence_soon(config, members, tmp_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{held.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(LocaterError, match=f"^no Ray cluster answers at {address}: Connection refused; give"):
            sweep(config, members, tmp_path, engine="ray", address=address)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("answer", "said"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers .* is not a Ray"), (b"", "timed out")]
)
def test_something_else_at_the_address_is_told(answer, said, monkeypatch):
    monkeypatch.setattr(_ray, "_ANSWER_WITHIN", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            connection = server.accept()[0]
            held.append(connection)
            connection.sendall(answer)

        other = Meanwhile(serve)
        with pytest.raises(LocaterError, match=said):
            _ray._check_ray_answers(f"127.0.0.1:{server.getsockname()[1]}")
        other.check()
        held[0].close()


@pytest.mark.parametrize("address", ["somewhere", ":6379", "somewhere:", "somewhere:99999"])
def test_an_address_without_a_port_is_told(address):
    with pytest.raises(LocaterError, match=f"host:port, or auto, got {address!r}"):
        _ray._check_ray_answers(address)


@pytest.mark.parametrize(
    ("cluster_has", "device", "asked", "given"),
    [
        ({"CPU": 4.0}, None, {"num_cpus": 1}, "cpu"),
        ({"CPU": 4.0, "GPU": 2.0}, None, {"num_cpus": 1, "num_gpus": 1}, "cuda"),
        ({"CPU": 4.0, "GPU": 2.0}, "cuda", {"num_cpus": 1, "num_gpus": 1}, "cuda"),
        ({"CPU": 4.0, "GPU": 2.0}, "cpu", {"num_cpus": 1}, "cpu"),
    ],
)
def test_a_group_asks_for_a_gpu_where_there_are_some(cluster_has, device, asked, given):
    assert _ray._share(cluster_has, device) == (asked, given)


@pytest.mark.parametrize(
    ("cluster_has", "device", "said"),
    [
        ({"CPU": 4.0}, "cuda", "no GPU"),
        ({}, None, "no CPU"),
        ({"CPU": 4.0, "GPU": 2.0}, "cuda:1", "the device is cuda,"),
    ],
)
def test_what_the_cluster_cannot_give_is_told(cluster_has, device, said):
    with pytest.raises(LocaterError, match=said):
        _ray._share(cluster_has, device)


def test_a_node_without_the_package_is_told():
    words = "The remote function failed to import on the worker. This may be … sys.path ['/a']:\n\nTraceback …\n"
    missing = RuntimeError(f"{words}ModuleNotFoundError: No module named 'locater'\n")
    said = "a node cannot import locater (ModuleNotFoundError: No module named 'locater'); install"
    assert _ray._reason(missing).startswith(said)


def test_groups_that_fail_alike_are_told_together():
    failed = {"group-02": "too large", "group-00": "too large", "group-01": "unreadable"}
    said = "group-00, group-02: too large; group-01: unreadable"
    assert _ray._complaint(failed, 3) == said
    assert _ray._complaint(failed, 7) == f"{said} (the other 4 of 7 groups are finished)"


def test_a_folder_that_a_node_does_not_share_is_told(config, members, tmp_path):
    plan = Plan.of(tmp_path, config, members, 1, {})
    with pytest.raises(LocaterError, match="must be on a file system that all nodes share"):
        _ray._train_group(plan, plan.groups[0], "cpu", _ray._Origin(), None)
