"""Pages of text, and what they tell people to type."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """Language and content of the fenced blocks of these languages, in their order."""
    wanted = "|".join(map(re.escape, languages))
    return re.findall(rf"^```({wanted})\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    """The lines of a shell block, without comments."""
    lines = (line.split(" #")[0].strip() for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def run_python(page: str, code: str, names: dict[str, Any]) -> None:
    exec(compile(code, page, "exec"), names)


def run_locater(command: str, folder: Path) -> str:
    """What `locater …` prints, run as users run it."""
    program, *arguments = shlex.split(command)
    assert program == "locater", command
    start = [sys.executable, "-m", "locater"]
    done = subprocess.run([*start, *arguments], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
