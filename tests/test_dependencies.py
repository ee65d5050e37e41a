"""Dependencies point one way, and a room never reaches into another room's private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import locater

SOURCE = Path(locater.__file__).parent
FOUNDATION = ("errors", "io", "names", "_triton")  # what any room may use

# each may import those before it
ROOMS = ("qk", "models", "hooks", "measure", "control", "lab", "figures", "pages", "cli")
LAB = ("config", "data", "engine", "runs", "arena", "claims")
NUMBERS = {"theory": (), "measure": ("theory",), "models": ("theory",)}  # theory has numpy and scipy only


def imports(file: Path) -> Iterator[tuple[str, list[str]]]:
    """The dotted names under `locater` that a file imports, each with the names it takes from there."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "locater":
            yield (node.module or "").removeprefix("locater").lstrip("."), [alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            yield from ((a.name.removeprefix("locater."), []) for a in node.names if a.name.startswith("locater."))


def edges(source: Path, rooms: tuple[str, ...], inside: str = "") -> Iterator[tuple[str, str, str, list[str]]]:
    """File, its room, the room it imports from, and what it takes there with the way to it."""
    for file in sorted(source.rglob("*.py")):
        room = file.relative_to(source).parts[0].removesuffix(".py")
        for module, names in imports(file):
            if inside and module.split(".")[0] != inside:
                continue
            path = [part for part in (*module.split("."), *names) if part][bool(inside) :]
            if path and path[0] in rooms and path[0] != room:
                yield str(file.relative_to(SOURCE)), room, path[0], path[1:]


@pytest.mark.parametrize(
    ("source", "rooms", "inside"), [(SOURCE, ("theory", *ROOMS), ""), (SOURCE / "lab", LAB, "lab")], ids=["all", "lab"]
)
def test_no_room_reaches_into_anothers_private_names(source, rooms, inside):
    found = [(file, taken) for file, _, _, taken in edges(source, rooms, inside)]
    assert found
    assert not [f"{file}: {'.'.join(taken)}" for file, taken in found if any(part.startswith("_") for part in taken)]


@pytest.mark.parametrize(("source", "rooms", "inside"), [(SOURCE, ROOMS, ""), (SOURCE / "lab", LAB, "lab")])
def test_dependencies_point_one_way(source, rooms, inside):
    found = [edge for edge in edges(source, rooms, inside) if edge[1] in rooms]
    assert found
    assert not [f"{file} imports {to}" for file, room, to, _ in found if rooms.index(to) > rooms.index(room)]


def test_theory_needs_numpy_and_scipy_only():
    taken = {module.split(".")[0] for file in (SOURCE / "theory").glob("*.py") for module, _ in imports(file)}
    assert taken <= {"theory", "errors"}


def test_no_command_stands_outside_of_cli():
    files = {path.stem for path in SOURCE.glob("*.py")}
    assert files == {"__init__", "__main__", "qk", *FOUNDATION}
