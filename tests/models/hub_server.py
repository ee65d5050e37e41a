"""A server on this machine that speaks the hub's addresses: a model's files at one commit, behind a redirect."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


@dataclass
class Answer:
    """What is about to be sent; a fault changes it."""

    file: str
    start: int
    stop: int
    size: int
    status: int = 206
    headers: dict[str, str] = field(default_factory=dict)
    extra: bytes = b""
    cut: int = 0  # bytes at the end that are not sent, though announced
    wait: float = 0.0


@dataclass
class Hub:
    folder: Path
    latency: float = 0.0
    fault: Callable[[Answer], None] = lambda _: None
    named: str = "org/model"
    token: str | None = None
    sizes: bool = True  # whether the list of files tells them
    asked: list[tuple[str, int, int]] = field(default_factory=list)  # file, first byte, end
    sent: int = 0
    addresses: list[tuple[str, str | None]] = field(default_factory=list)  # with the authorization
    endpoint: str = ""
    elsewhere: str = ""  # another origin, which has the files and must not get the token

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        time.sleep(self.latency)
        path = request.path.split("?")[0]
        authorization = request.headers.get("Authorization")
        self.addresses.append((path, authorization))
        listed, files = f"/api/models/{self.named}/revision/", f"/{self.named}/resolve/{COMMIT}/"
        if self.token is not None and not path.startswith("/cdn/") and authorization != f"Bearer {self.token}":
            self._head(request, 401, {"X-Error-Code": "GatedRepo", "Content-Length": "0"})
        elif path in (f"{listed}main", f"{listed}{COMMIT}"):
            siblings = [
                {"rfilename": each.relative_to(self.folder).as_posix()}
                | ({"size": each.stat().st_size} if self.sizes else {})
                for each in sorted(self.folder.rglob("*.*"))
            ]
            body = json.dumps({"id": self.named, "sha": COMMIT, "siblings": siblings}).encode()
            self._head(request, 200, {"Content-Length": str(len(body)), "Content-Type": "application/json"})
            request.wfile.write(body)
        elif path.startswith(files) and (self.folder / path.removeprefix(files)).is_file():
            name = path.removeprefix(files)
            told = {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{name}"', "ETag": f'"{name}"', "Content-Length": "0"}
            told["X-Linked-Size"] = str((self.folder / name).stat().st_size)
            self._head(request, 302, told | {"Location": f"{self.elsewhere}/cdn/{name}"})
        elif path.startswith("/cdn/"):
            self._file(request, path.removeprefix("/cdn/"))
        else:
            self._head(request, 404, {"X-Error-Code": "EntryNotFound", "Content-Length": "0"})

    def _file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        size = (self.folder / name).stat().st_size
        wanted = request.headers.get("Range")
        first, last = wanted.removeprefix("bytes=").split("-") if wanted else ("0", str(size - 1))
        answer = Answer(name, int(first), min(int(last) + 1, size), size, 206 if wanted else 200)
        if wanted:
            answer.headers["Content-Range"] = f"bytes {answer.start}-{answer.stop - 1}/{size}"
        self.fault(answer)
        time.sleep(answer.wait)
        if answer.status == 200:
            answer.start, answer.stop = 0, size
            answer.headers.pop("Content-Range", None)
        length = answer.stop - answer.start if answer.status < 300 else 0
        self._head(request, answer.status, {"Content-Length": str(length + len(answer.extra)), **answer.headers})
        if request.command == "HEAD" or not length:
            return
        self.asked.append((name, answer.start, answer.stop))
        with (self.folder / name).open("rb") as opened:
            opened.seek(answer.start)
            left = length - answer.cut
            while left > 0:
                part = opened.read(min(left, 2**20))
                request.wfile.write(part)
                self.sent += len(part)
                left -= len(part)
        request.wfile.write(answer.extra)
        if answer.cut:
            request.close_connection = True

    @staticmethod
    def _head(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()


@contextmanager
def serving(hub: Hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open

        def do_GET(self):
            try:
                hub.handle(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    hub.endpoint, hub.elsewhere = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.daemon_threads = True
            server.shutdown()
            server.server_close()
            thread.join()
