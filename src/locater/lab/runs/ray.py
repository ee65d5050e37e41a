"""A sweep's groups on the nodes of a Ray cluster.

A group is one Ray task, and all it knows is on disk: a group whose worker or node died is sent out again and goes on
from its last checkpoint, wherever it lands. The folder must therefore be on a file system that all nodes share, and
locater installed on all of them. The folder this process runs in and its LOCATER_ variables apply there too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import socket
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from locater.errors import LocaterError, one_line, reason, require
from locater.lab.runs.checkpoint import newest_step
from locater.lab.runs.train import Progress, train

if TYPE_CHECKING:
    from locater.lab.runs.sweep import Group, Plan

__all__ = ["run_on_cluster"]

_POLL_EVERY = 0.5  # seconds, for progress of the groups
_ANSWER_WITHIN = 10.0  # seconds, for the server at an address
_STOP_WITHIN = 60.0  # seconds, for the groups to write their checkpoints after Ctrl-C
_DEATHS = 4  # of a group's workers without a new checkpoint; then it is the group, not the cluster
_OBJECT_STORE = 100 * 2**20  # bytes, of a cluster started here: nothing large goes through it


def run_on_cluster(
    plan: Plan, *, address: str | None, device: str | None, watch: Callable[[str, Progress], None]
) -> None:
    """Trains the plan's groups, as many at a time as the cluster has GPUs, or else CPUs.

    `address` is a cluster's host:port, or auto; without one, $RAY_ADDRESS, and else one is started here for as long
    as the sweep lasts. A group that fails lets the others finish, and is named then. On Ctrl-C the groups write their
    checkpoints before KeyboardInterrupt goes on.
    """
    ray = require("ray", "ray")
    with _connection(ray, address):
        resources, kind = _share(ray.cluster_resources(), device)
        _Driver(ray, plan, resources, kind, watch).run()


# ---------------------------------------------------------------------- the cluster


@contextlib.contextmanager
def _connection(ray: ModuleType, address: str | None) -> Iterator[None]:
    """Connected to the cluster; a connection, or a cluster, that began here also ends here."""
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise LocaterError(f"this process is connected to Ray at {here}; call ray.shutdown() to go to {address}")
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        settings |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    elif address != "auto":
        _check_ray_answers(address)
    try:
        try:
            ray.init(address, **settings)
        except Exception as error:  # Ray raises many classes
            what = "cannot start Ray here" if address == "local" else f"cannot connect to a Ray cluster at {address}"
            raise LocaterError(f"{what}: {reason(error)}") from error
        yield
    finally:
        ray.shutdown()


def _check_ray_answers(address: str) -> None:
    """By the first frame of HTTP/2, which Ray's server speaks and its dashboard, on the next port, does not.

    Ray itself tries for minutes, and where its settings shorten that (RAY_gcs_rpc_server_reconnect_timeout_s) it ends
    the process instead of raising.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise LocaterError(f"the address of a Ray cluster is host:port, or auto, got {address!r}")
    way_out = "give the address that ray start --head printed there"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_WITHIN) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
                return
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # and empty settings
            answer = connection.recv(4)
    except OSError as error:
        why = error.strerror or str(error)
        raise LocaterError(f"no Ray cluster answers at {address}: {why}; {way_out}") from error
    if answer[3:] != b"\4":  # the kind of a frame with settings
        raise LocaterError(f"what answers at {address} is not a Ray cluster; {way_out}")


def _share(cluster: Mapping[str, float], device: str | None) -> tuple[dict[str, int], str]:
    """What a group asks of the cluster, and the device it trains on then."""
    if device is not None and device.startswith("cuda:"):
        raise LocaterError(f"on a cluster every group gets a GPU of its own: the device is cuda, not {device}")
    if device in (None, "cuda") and cluster.get("GPU", 0) >= 1:
        return {"num_cpus": 1, "num_gpus": 1}, "cuda"
    for name, wanted in ("GPU", device == "cuda"), ("CPU", True):
        if wanted and cluster.get(name, 0) < 1:
            raise LocaterError(f"the Ray cluster has no {name}; add a node that has one")
    return {"num_cpus": 1}, device or "cpu"


# ---------------------------------------------------------------------- where the sweep was started


class _Driver:
    """Sends the groups out, and again when they die, until each has finished or failed."""

    def __init__(
        self,
        ray: ModuleType,
        plan: Plan,
        resources: dict[str, int],
        device: str,
        watch: Callable[[str, Progress], None],
    ) -> None:
        self.ray, self.plan, self.watch = ray, plan, watch
        affinity = require("ray.util.scheduling_strategies", "ray").NodeAffinitySchedulingStrategy
        near = affinity(ray.get_runtime_context().get_node_id(), soft=True)
        self._board = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=near)(_Board).remote()
        self._asked: Any = None  # the board for news, and not yet answered
        # Ray's own retries would not see whether a group gets anywhere, and never end where memory is too small
        self._task = ray.remote(**resources, max_retries=0)(_train_group)
        self._device, self._origin = device, _Origin()
        self._running: dict[Any, Group] = {}  # by the reference to the result
        self._deaths: dict[str, Counter[int]] = {group.name: Counter() for group in plan.groups}  # by checkpoint
        self._failed: dict[str, str] = {}  # and why
        self._traceback: Exception | None = None  # of one of them, for --traceback

    def run(self) -> None:
        try:
            for group in self.plan.groups:
                self._send(group)
            while self._running:
                done, _ = self.ray.wait(list(self._running), timeout=_POLL_EVERY)
                self._report()
                for result in done:
                    self._collect(result, self._running.pop(result))
        except BaseException:
            self._stop()
            raise
        if self._failed:
            raise LocaterError(_complaint(self._failed, len(self.plan.groups))) from self._traceback

    def _send(self, group: Group) -> None:
        result = self._task.options(name=group.name).remote(self.plan, group, self._device, self._origin, self._board)
        self._running[result] = group

    def _collect(self, result: Any, group: Group) -> None:
        errors = self.ray.exceptions
        try:
            last = self.ray.get(result)
        except errors.RayTaskError as error:  # an exception over there
            self._failed[group.name], self._traceback = _reason(error.cause), error
        except errors.TaskCancelledError:
            self._failed[group.name] = "it was cancelled"
        except errors.RayError as error:  # the worker, or its node, is gone
            self._send_again(group, error)
        else:
            self.watch(group.name, last)

    def _send_again(self, group: Group, error: Exception) -> None:
        reached = newest_step(self.plan.folder / group.name / "checkpoints")
        deaths = self._deaths[group.name]
        deaths[reached] += 1
        if deaths[reached] >= _DEATHS:
            self._failed[group.name] = f"its worker died {_DEATHS} times after step {reached}: {_described(error)}"
            return
        note = f"its worker died ({type(error).__name__}); going on from step {reached}"
        self.watch(group.name, Progress(reached, self.plan.config.steps, 0.0, math.inf, {}, {}, {}, note))
        self._send(group)

    def _report(self) -> None:
        """Passes on what the groups reported; without the board there is nothing to see, and the training goes on."""
        self._asked = self._asked or self._board.take.remote()
        if not self.ray.wait([self._asked], timeout=_POLL_EVERY)[0]:
            return
        asked, self._asked = self._asked, None
        try:
            news = self.ray.get(asked)
        except self.ray.exceptions.RayError:
            return
        running = {group.name for group in self._running.values()}
        for name, progress in news:
            if name in running:  # the others have given their last progress
                self.watch(name, progress)

    def _stop(self) -> None:
        """Cancelled tasks get a KeyboardInterrupt, at which train() writes a checkpoint, or they never begin."""
        with contextlib.suppress(self.ray.exceptions.RayError):
            for result in self._running:
                self.ray.cancel(result)
            if self._running:
                self.ray.wait(list(self._running), num_returns=len(self._running), timeout=_STOP_WITHIN)


def _complaint(failed: dict[str, str], groups: int) -> str:
    names: dict[str, list[str]] = {}
    for name, why in failed.items():
        names.setdefault(why, []).append(name)
    said = "; ".join(f"{', '.join(sorted(group))}: {why}" for why, group in names.items())
    others = groups - len(failed)
    return said + (f" (the other {others} of {groups} groups are finished)" if others else "")


def _reason(cause: BaseException) -> str:
    if isinstance(cause, LocaterError):
        return str(cause)
    if "failed to import on the worker" in str(cause):  # Ray's words, before sys.path and a traceback
        last = str(cause).strip().splitlines()[-1].strip()
        return f"a node cannot import locater ({one_line(last, 200)}); install the same version on all nodes"
    return _described(cause)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {reason(error)}"


# ---------------------------------------------------------------------- on the nodes


class _Board:
    """Where the groups put up their progress, and the driver takes it down."""

    def __init__(self) -> None:
        self._news: deque[tuple[str, Progress]] = deque(maxlen=1000)

    def put(self, group: str, progress: Progress) -> None:
        self._news.append((group, progress))

    def take(self) -> list[tuple[str, Progress]]:
        news = list(self._news)
        self._news.clear()
        return news


@dataclass(frozen=True)
class _Origin:
    """The process that started the sweep, so that data are found where it would find them."""

    driver: str = field(default_factory=lambda: uuid.uuid4().hex)
    folder: str = field(default_factory=os.getcwd)
    variables: dict[str, str] = field(
        default_factory=lambda: {name: value for name, value in os.environ.items() if name.startswith("LOCATER_")}
    )

    def adopt(self) -> None:
        with contextlib.suppress(OSError):  # it need not exist on every node
            os.chdir(self.folder)
        os.environ.update(self.variables)


def _train_group(plan: Plan, group: Group, device: str, origin: _Origin, board: Any) -> Progress:
    """Runs in a worker; gives the last of the group's progress."""
    ray = require("ray", "ray")
    if not (plan.folder / "sweep.json").is_file():
        raise LocaterError(
            f"there is no {plan.folder}/sweep.json on the node {platform.node()}; "
            f"the folder of a sweep must be on a file system that all nodes share"
        )
    origin.adopt()
    if device == "cpu":
        torch.set_num_threads(1)  # the CPU it was given
    last: deque[Progress] = deque(maxlen=1)

    def report(progress: Progress) -> None:
        last.append(progress)
        with contextlib.suppress(ray.exceptions.RayError):
            board.put.remote(group.name, progress)

    folder = plan.folder / group.name
    train(plan.config, group.members, folder, device=device, watch=report, about=plan.about, owner=origin.driver)
    return last.pop()
