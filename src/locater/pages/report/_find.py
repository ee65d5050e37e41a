"""What is at a path: which of the kinds that commands write, with its content; damage is named, not hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locater.errors import LocaterError, reason
from locater.io import parse_json, parse_json_lines, read_file, unpacked
from locater.lab.config import FREE_TO_COMPARE, fingerprint
from locater.lab.runs.records import read_run
from locater.models import Scan

_OURS = "what locater scan, measure, doctor, sweep or train wrote, or a log of attention"


@dataclass(frozen=True)
class Found:
    """One thing to show."""

    kind: str  # diagnosis, scan, measurement, sweep, metrics, log, summary, claims, prediction
    path: Path
    content: Any = None  # a dict, or a list of lines; of a sweep, its run folders
    notes: tuple[str, ...] = field(default=())


def collect(paths: Sequence[str | Path]) -> tuple[list[Found], list[str]]:
    """What is at the paths, and sentences about files in folders that were passed over."""
    if not paths:
        raise LocaterError("nothing to report: give files or folders")
    found: list[Found] = []
    passed: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            here = list(_folder(path, passed))
            if not here:
                more = f" ({passed[-1]})" if passed else ""
                raise LocaterError(f"{path} holds nothing to report: give a folder with {_OURS}{more}")
            found += here
        elif path.exists():
            found.append(_file(path))
        else:
            raise LocaterError(f"there is no file or folder {path}")
    once = {(each.kind, _where(each)): each for each in reversed(found)}  # a thing named twice is shown once
    return [each for each in found if once.get((each.kind, _where(each))) is each], passed


def _where(found: Found) -> tuple[Path, ...]:
    inside = found.content if found.kind == "sweep" else []
    return (found.path.resolve(), *(folder.resolve() for folder in inside))


# ---------------------------------------------------------------------- folders


def _folder(folder: Path, passed: list[str]) -> Iterator[Found]:
    """The sweep, the runs and the files in a folder and the folders below it."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise LocaterError(f"cannot read {folder}: {reason(error)}") from error
    runs = [folder] if (folder / "run.json").is_file() else []
    runs += [entry for entry in entries if _is_run(entry)]
    if (folder / "sweep.json").is_file() or (folder / "run.json").is_file():
        if runs:
            yield Found("sweep", folder, runs)
        else:
            passed.append(f"{folder} is a sweep that has not begun")
    else:
        for alike in _alike(runs):
            yield Found("sweep", folder if len(alike) > 1 else alike[0], alike)
    for entry in entries:
        if entry.name.startswith(".") or entry in runs:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if (folder / "run.json").is_file():
                continue  # a run's own: checkpoints, TensorBoard's files
            try:
                yield from _folder(entry, passed)
            except LocaterError as error:
                passed.append(str(error))
        elif entry.name.endswith((".json", ".jsonl", ".jsonl.gz")) and not _of_a_run(entry):
            try:
                yield _file(entry)
            except LocaterError as error:
                passed.append(str(error).partition(";")[0])


def _is_run(entry: Path) -> bool:
    try:
        return (entry / "run.json").is_file()
    except OSError:  # a folder that may not be read
        return False


def _of_a_run(path: Path) -> bool:
    """run.json and its metrics, or sweep.json: shown as the sweep they belong to."""
    return path.name in ("run.json", "sweep.json") or (
        path.name.startswith("metrics.jsonl") and (path.parent / "run.json").is_file()
    )


def _alike(runs: Sequence[Path]) -> list[list[Path]]:
    """Runs side by side, grouped by what must be equal for their members to be compared."""
    groups: dict[str, list[Path]] = {}
    for run in runs:
        try:
            key = fingerprint(read_run(run).config.without(FREE_TO_COMPARE))
        except LocaterError:
            key = str(run)  # on its own, where reading it says what is wrong
        groups.setdefault(key, []).append(run)
    return list(groups.values())


# ---------------------------------------------------------------------- files


def _file(path: Path) -> Found:
    """A file by what stands in it; its name says nothing."""
    raw, notes = _bytes(path)
    if not raw.strip():
        raise LocaterError(f"{path} is empty")
    try:
        value = parse_json(raw)
    except ValueError as error:
        rows, damaged = read_lines(raw, path.name)
        if not rows:
            raise LocaterError(f"{path} is not JSON, or not whole: {reason(error)}") from error
        return _lines(path, rows, (*notes, *damaged))
    if isinstance(value, dict) and "step" in value:
        return _lines(path, [value], notes)
    kind = _kind(value)
    if kind == "run":
        beside = {"run.json": [path], "sweep.json": sorted(path.parent.glob("*/run.json"))}.get(path.name)
        if not beside:
            raise LocaterError(f"{path} is the plan of a run or a sweep; give the folder that holds its records")
        return Found("sweep", path.parent, [each.parent for each in beside])
    if kind is None:
        raise LocaterError(f"{path} is JSON of another kind; a report shows {_OURS}")
    return Found(kind, path, value, notes)


def _kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("findings"), list) and isinstance(value.get("sentences"), list):
        return "diagnosis"
    if Scan.recognises(value):
        return "scan"
    heads = _rows(value, "heads")
    if heads and {"entropy", "max_logit"} <= heads[0].keys():
        return "measurement"
    if _rows(value, "spectra"):
        return "prediction"
    if isinstance(value.get("config"), dict) and ("groups" in value or "members" in value):
        return "run"
    for kind, key, beside in (("claims", "claims", "runs"), ("summary", "members", "folder")):
        if beside in value and _rows(value, key):
            return kind
    return None


def _rows(value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    rows = value.get(key)
    return rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else []


def _lines(path: Path, rows: list[dict[str, Any]], notes: tuple[str, ...]) -> Found:
    for kind, key in (("metrics", "member"), ("log", "module")):
        good = [row for row in rows if isinstance(row.get("step"), int) and isinstance(row.get(key), str)]
        if good:
            left = len(rows) - len(good)
            more = (f"{left} lines of {path.name} are of another kind and left out",) if left else ()
            return Found(kind, path, good, (*notes, *more))
    raise LocaterError(f"the lines of {path} are of another kind; a report shows {_OURS}")


def _bytes(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """A file's content, unpacked; what can be had of a compressed file that is cut off."""
    raw = read_file(path)
    if not raw.startswith(b"\x1f\x8b"):
        return raw, ()
    raw, whole = unpacked(path, raw)
    return raw, () if whole else (f"{path.name} is damaged; what could be unpacked of it is shown",)


def read_lines(raw: bytes, name: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The objects that stand on lines of their own, and a sentence about the lines that are none."""
    found = parse_json_lines(raw)
    if found.cut_off is not None and not found.damaged:
        return found, (f"the last line of {name}, line {found.cut_off}, is cut off and left out",)
    damaged = found.damaged + ([] if found.cut_off is None else [found.cut_off])
    if not damaged:
        return found, ()
    listed = ", ".join(map(str, damaged[:5])) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
    lead = "line" if len(damaged) == 1 else "lines"
    return found, (f"{lead} {listed} of {name} {'is' if len(damaged) == 1 else 'are'} damaged and left out",)


def metrics_lines(folder: Path) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The records in a run's folder."""
    for name in ("metrics.jsonl", "metrics.jsonl.gz"):
        if (folder / name).is_file():
            raw, notes = _bytes(folder / name)
            rows, damaged = read_lines(raw, f"{folder.name}/{name}")
            return rows, (*notes, *damaged)
    return [], (f"{folder.name} has no records yet",)
