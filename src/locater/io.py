"""Files: written whole or not at all, read within bounds, and named inside their folder.

Every file that a command reads or writes goes through here, so that a damaged one, a pipe in its place or a name that
points elsewhere is one `LocaterError` that says which file and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from locater.errors import LocaterError, reason

__all__ = [
    "JsonLines",
    "checksum",
    "inside",
    "json_bytes",
    "nulled",
    "open_file",
    "parse_json",
    "parse_json_lines",
    "parse_json_object",
    "read_file",
    "read_json",
    "remove_unfinished",
    "unpacked",
    "writable_folder",
    "write_file",
]

_JSON_LARGEST = 256 * 2**20  # bytes of a JSON document
_UNPACKED_LEAST = 64 * 2**20  # bytes that any gzip file may unpack to
_UNPACKED_RATIO = 40  # and what a larger one may, in units of its size; our metrics have 4 to 10
_INT64_DIGITS = 18  # a whole number of so many digits fits into 64 bits
_READER_WITHIN = 10.0  # seconds, for somebody to read from a pipe that we write into
_UNFINISHED = ".unfinished"  # how the names of files end that are being written


# ---------------------------------------------------------------------- names


def inside(folder: Path, name: object, named_in: Path) -> Path:
    """The path of a file or folder in `folder`, by a name that was read from the file `named_in`.

    What a file says must not reach outside its folder: no absolute paths, no "..", no other drive. Links in the
    folder itself are the user's own and are followed.
    """
    parts = re.split(r"[/\\]", name) if isinstance(name, str) else []
    if (
        not parts
        or any(part in ("", ".", "..") for part in parts)
        or re.match("[A-Za-z]:", parts[0])
        or any(ord(character) < 32 for part in parts for character in part)
    ):
        raise LocaterError(f"{named_in} names {name!r:.80}, which is no file or folder inside {folder}")
    return folder.joinpath(*parts)


# ---------------------------------------------------------------------- reading


def open_file(path: Path) -> BufferedReader:
    """A regular file, for reading; a pipe or a device, which would block or never end, is refused."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise LocaterError(f"cannot read {path}: {reason(error)}") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise LocaterError(f"cannot read {path}: it is a {'folder' if stat.S_ISDIR(mode) else 'pipe or a device'}")
    return os.fdopen(handle, "rb")


def checksum(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: Path, *, largest: int | None = None) -> bytes:
    """The content of a regular file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            raise LocaterError(f"cannot read {path}: it has {size:,} bytes, more than {largest:,}")
        try:
            return file.read()
        except OSError as error:
            raise LocaterError(f"cannot read {path}: {reason(error)}") from error


def unpacked(path: Path, raw: bytes) -> tuple[bytes, bool]:
    """What is in gzip's bytes, and whether all of it is; of a damaged file what could be had."""
    most = max(_UNPACKED_LEAST, _UNPACKED_RATIO * len(raw))
    parts: list[bytes] = []
    size = 0
    unpacking = zlib.decompressobj(wbits=31)
    with contextlib.suppress(zlib.error):
        for start in range(0, len(raw), 4096):  # which unpack to 4 MB at most
            part = raw[start : start + 4096]
            while part:
                if unpacking.eof:  # several files, packed one after the other
                    unpacking = zlib.decompressobj(wbits=31)
                parts.append(unpacking.decompress(part))
                part = unpacking.unused_data
                size += len(parts[-1])
                if size > most:
                    raise LocaterError(f"{path} unpacks to more than {most:,} bytes; unpack it yourself if it should")
        return b"".join(parts), unpacking.eof
    return b"".join(parts), False


# ---------------------------------------------------------------------- JSON


def _whole(digits: str) -> int | float:
    """Whole numbers beyond 64 bits as floats: no count of ours is so large, and torch and numpy refuse such an int."""
    return int(digits) if len(digits) <= _INT64_DIGITS else float(digits)


def parse_json(raw: bytes | bytearray) -> Any:
    """A JSON value; ValueError for whatever is none, nested too deep included."""
    try:
        return json.loads(raw, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_json_object(read_file(path, largest=_JSON_LARGEST), path)


def parse_json_object(raw: bytes | bytearray, what: object) -> dict[str, Any]:
    """The JSON object in what was read from a file or an address, which an error names."""
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise LocaterError(f"cannot read {what} as JSON: {reason(error)}") from error
    if not isinstance(value, dict):
        raise LocaterError(f"{what} should hold a JSON object, got {type(value).__name__}")
    return value


class JsonLines(list[dict[str, Any]]):
    """The objects that stand on lines of their own, and which lines hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[bytes] = []  # of each object, without its end
        self.numbers: list[int] = []  # of each object's line, from 1
        self.damaged: list[int] = []  # of lines that hold no object
        self.cut_off: int | None = None  # the last line, if it has no end and is no object: it is being written


def parse_json_lines(raw: bytes) -> JsonLines:
    found = JsonLines()
    lines = raw.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
            found.lines.append(line)
            found.numbers.append(number)
        elif number == len(lines):
            found.cut_off = number
        else:
            found.damaged.append(number)
    return found


def json_bytes(value: Any, *, indent: int | None = None) -> bytes:
    """JSON in UTF-8; ValueError for NaN and infinity, which it has no word for."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, default=_plain)
    try:
        return text.encode()
    except UnicodeEncodeError:  # the name of a file that is no Unicode
        return json.dumps(value, allow_nan=False, indent=indent, default=_plain).encode()


def nulled(value: Any) -> Any:
    """The same with None for what JSON has no number for, and lists for arrays."""
    if isinstance(value, Mapping):
        return {str(key): nulled(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [nulled(each) for each in value]
    if hasattr(value, "tolist"):
        return nulled(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    return value.tolist()


# ---------------------------------------------------------------------- writing


def writable_folder(folder: Path) -> Path:
    """Makes the folder and proves, before any work is done, that files can be put there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise LocaterError(f"cannot write into the folder {folder}: {reason(error)}; choose another one") from error


def write_file(path: Path, content: bytes) -> Path:
    """Writes beside the target, then moves it there in one step.

    A link stays, and its target is written; into what is no file, a pipe or /dev/stdout, the content is put.
    """
    temporary = None
    try:
        target = path.resolve()
        if target.exists() and not target.is_file() and not target.is_dir():
            with _opened_pipe(target) as pipe:
                pipe.write(content)
            return path
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=_UNFINISHED)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError | ValueError):  # RuntimeError: a loop of links
            raise LocaterError(f"cannot write {path}: {reason(error)}") from error
        raise
    return path


def _opened_pipe(path: Path) -> BinaryIO:
    """A device, or a pipe that somebody reads from; one that nobody opens would block for ever."""
    until = time.monotonic() + _READER_WITHIN
    while True:
        try:
            handle = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > until:
                raise
            time.sleep(0.02)
            continue
        os.set_blocking(handle, True)
        return os.fdopen(handle, "wb")


def remove_unfinished(folder: Path) -> None:
    """Removes what `write_file` left in a folder when its process was killed; only where nobody else is writing."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f".*{_UNFINISHED}"):
            path.unlink(missing_ok=True)
