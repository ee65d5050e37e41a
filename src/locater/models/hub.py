"""Models on the Hugging Face hub, by range requests: of the weights only those that are loaded are fetched."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from locater.errors import LocaterError, reason, require
from locater.io import parse_json_object
from locater.models.checkpoint import Checkpoint, configuration, local_weights, open_folder, weight_files

__all__ = ["ahead", "open_hub"]

Made = TypeVar("Made")

_ATTEMPTS, _PAUSE = 3, 0.5  # requests, and seconds after the first
_FIRST, _LARGEST = 2**16, 2**26  # bytes of a header: fetched at first, and at most; also the most of a JSON file
_KEPT = 2**25  # bytes of small tensors
_AROUND = 2**17  # bytes before and after a tensor that may come along: they take less time than another request
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def open_hub(name: str, revision: str | None) -> Checkpoint:
    """A model by its id: from the hub's cache if it is there, else by ranges of the files of one commit."""
    hub = require("huggingface_hub", "hf")
    cached, complete = "", False
    with suppress(LocaterError, ValueError):  # weights are missing, or the name is no id
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        complete = isinstance(cached, str) and bool(local_weights(Path(cached).parent))
    if complete:
        return open_folder(Path(cached).parent)
    remote = _Remote(hub, name, revision)
    files, where = weight_files(Path(name), remote.sizes, remote.json)
    try:
        remote.header(files[0])
    except _NoRangesError:
        asked = {"revision": remote.commit, "endpoint": remote.endpoint}
        for file in (*files, *remote.sizes.keys() & {"config.json", "params.json"}):
            path = remote.tried(f"{file} of {name}", partial(hub.hf_hub_download, name, file, **asked))
        return open_folder(Path(path).parent)
    remote.where = dict(where or {tensor: file for file in files for tensor in remote.header(file)})
    config = configuration(Path(name), remote.sizes, remote.json)
    traffic = lambda: (remote.fetched, sum(remote.sizes[file] or 0 for file in files))  # noqa: E731
    return Checkpoint.standard(name, config, remote.where, remote.load, traffic=traffic)


def ahead(items: Iterator[Made]) -> Iterator[Made]:
    """The same items, each made while the one before it is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


class _NoRangesError(LocaterError):
    """The server, the kind of file or the hub's library knows no ranges."""


class _Span(NamedTuple):
    dtype: torch.dtype | None  # None: not one of torch's
    shape: list[int]
    start: int  # its bytes in the file
    end: int


class _Remote:
    """The files of one commit of a model."""

    def __init__(self, hub: Any, name: str, revision: str | None) -> None:
        self.hub, self.name, self.endpoint = hub, name, hub.constants.ENDPOINT
        self.timeout = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
        asked = {"revision": revision or "main", "files_metadata": True, "timeout": self.timeout}
        info = self.tried(f"{name} is no local path and", lambda: hub.HfApi(self.endpoint).model_info(name, **asked))
        self.commit: str = info.sha
        self.sizes: dict[str, int | None] = {f.rfilename: f.size for f in info.siblings if "/" not in f.rfilename}
        self.where: dict[str, str] = {}
        self.fetched = 0
        self._tags: dict[str, str | None] = {}
        self._headers: dict[str, dict[str, _Span]] = {}
        self._near: dict[str, bytearray] = {}  # small tensors, which came along or may be asked for again
        self._alive: WeakValueDictionary[str, Tensor] = WeakValueDictionary()  # a layer of q, k and v is loaded twice

    def tried(self, what: str, request: Callable[[], Made]) -> Made:
        """Its result; what may go better a little later is tried again."""
        for attempt in itertools.count(1):
            try:
                return request()
            except LocaterError:
                raise
            except Exception as error:  # of the hub's library, its HTTP client and the system
                status = getattr(getattr(error, "response", None), "status_code", None)
                passing = status in (None, 429) or status >= 500
                if attempt == _ATTEMPTS or not passing or isinstance(error, ConnectionError):  # offline by choice
                    why = self._why(error, status)
                    raise LocaterError(f"{what} could not be fetched from the hub: {why}") from error
            time.sleep(_PAUSE * attempt)
        raise AssertionError

    def _why(self, error: Exception, status: int | None) -> str:
        if status in (401, 403):
            terms = f"accept its terms at {self.endpoint}/{self.name}"
            return f"it is gated, private or not there ({status}): {terms}, and `hf auth login` or set HF_TOKEN"
        if status == 404:
            return "it is not there (404): check the name and the revision"
        if "Timeout" in type(error).__name__:
            return f"no answer within {self.timeout} seconds; try again, or set HF_HUB_DOWNLOAD_TIMEOUT to more"
        return reason(error) if status is None else f"the server answered with status {status}; try again later"

    def json(self, file: str) -> dict[str, Any]:
        return parse_json_object(self._read(file), f"{file} of {self.name}")

    def _read(self, file: str, start: int = 0, stop: int | None = None) -> bytearray:
        return self.tried(f"{file} of {self.name}", lambda: self._request(file, start, stop))

    def _request(self, file: str, start: int, stop: int | None) -> bytearray:
        """The bytes [start, stop) of a file, or all; the answer must be what was asked for, of the same content."""
        asked = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        headers = {**self.hub.utils.build_hf_headers(), "Accept-Encoding": "identity", **asked}
        url = self.hub.hf_hub_url(self.name, file, revision=self.commit, endpoint=self.endpoint)
        session = self.hub.utils.get_session()
        with session.stream("GET", url, headers=headers, timeout=self.timeout, follow_redirects=True) as answer:
            answer.raise_for_status()
            told = [each.headers for each in (*answer.history, answer)]  # what redirected to it first
            commit = next((each["x-repo-commit"] for each in told if "x-repo-commit" in each), self.commit)
            tag = next((each["x-linked-etag"] for each in told if "x-linked-etag" in each), told[-1].get("etag"))
            if commit != self.commit or self._tags.setdefault(file, tag) != tag:
                raise LocaterError(f"{file} of {self.name} changed while it was read; scan it again")
            if stop is not None and answer.status_code == 200:
                raise _NoRangesError(f"the server stopped answering requests for parts of {file} of {self.name}")
            size = min(self.sizes.get(file) or _LARGEST, _LARGEST)
            length = size if stop is None else self._length(file, start, stop, told[-1].get("content-range", ""))
            body, at = bytearray(length), 0
            for part in answer.iter_raw():
                self.fetched += len(part)
                if at + len(part) > length:
                    raise LocaterError(f"the server sent more of {file} of {self.name} than {length} bytes")
                body[at : at + len(part)] = part
                at += len(part)
        if at < length and stop is not None:
            raise OSError(f"the server stopped after {at} of {length} bytes")
        return body if at == length else body[:at]

    def _length(self, file: str, start: int, stop: int, told: str) -> int:
        """How many bytes a range has, by the header Content-Range."""
        match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", told)
        first, last, size = map(int, match.groups()) if match else (-1, -1, -1)
        expected = self.sizes.get(file) or size
        if (first, last, size) != (start, min(stop, expected) - 1, expected):
            asked = f"bytes {start} to {stop - 1} of {expected} of {file} of {self.name}"
            raise LocaterError(f"the server was asked for {asked}, and answered with {told!r:.80}")
        self.sizes[file] = size
        return last + 1 - first

    def header(self, file: str) -> dict[str, _Span]:
        """The tensors of a safetensors file, in the order of their bytes."""
        if not file.endswith(".safetensors") or not callable(getattr(self.hub.utils.get_session(), "stream", None)):
            raise _NoRangesError(file)
        if file not in self._headers:
            what = f"the header of {file} of {self.name}"
            raw = self._read(file, 0, min(_FIRST, self.sizes[file] or _FIRST))
            size, end = self.sizes[file] or 0, 8 + int.from_bytes(raw[:8], "little")
            if end > min(size, _LARGEST):
                raise LocaterError(f"{what} has {end} bytes by its own count, and the file has {size}")
            raw = raw[:end] if end <= len(raw) else raw + self._read(file, len(raw), end)
            self._headers[file] = _spans(parse_json_object(raw[8:], what), end, size, what)
        return self._headers[file]

    def load(self, name: str) -> Tensor:
        header = self.header(self.where[name])
        span = header.get(name)
        if span is None or span.dtype is None:
            raise LocaterError(f"{self.where[name]} of {self.name} has no {name} of a type that torch knows")
        tensor = self._alive.get(name)
        if tensor is None:
            raw = self._near[name] if name in self._near else self._fetch(header, name)
            tensor = (torch.frombuffer(raw, dtype=span.dtype) if raw else torch.empty(0)).reshape(span.shape)
            self._alive[name] = tensor
        return tensor

    def _fetch(self, header: dict[str, _Span], name: str) -> bytearray:
        """A tensor and its small neighbours, by one request."""
        own = header[name]
        near = {n: s for n, s in header.items() if own.start - s.start <= _AROUND and s.end - own.end <= _AROUND}
        start, end = min(s.start for s in near.values()), max(s.end for s in near.values())
        body = self._read(self.where[name], start, end) if end > start else bytearray()
        if sum(map(len, self._near.values())) > _KEPT:
            self._near.clear()
        small = {n: s for n, s in near.items() if s.end - s.start <= _AROUND}
        self._near |= {n: body[s.start - start : s.end - start] for n, s in small.items()}
        return body if len(near) == 1 else body[own.start - start : own.end - start]


def _spans(entries: dict[str, Any], begin: int, size: int, what: str) -> dict[str, _Span]:
    """What a header says, checked: tensors inside of the file, as long as their shapes, none over another."""
    found = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = _DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
            sizes_are_right = all(type(n) is int and n >= 0 for n in (start, end, *shape)) and (
                dtype is None or math.prod(shape) * dtype.itemsize == end - start
            )
        except (LookupError, TypeError, ValueError):
            sizes_are_right = False
        if not sizes_are_right or not start <= end <= size - begin:
            raise LocaterError(f"{what} is damaged: {name:.80} does not fit into the file")
        found[name] = _Span(dtype, shape, begin + start, begin + end)
    ordered = dict(sorted(found.items(), key=lambda item: item[1][2:]))
    spans = list(ordered.values())
    if any(one.end > other.start for one, other in itertools.pairwise(spans)):
        raise LocaterError(f"{what} is damaged: its tensors overlap")
    return ordered
