"""What the README tells people to type, typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands():
    lines = (line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines())
    return [line for line in lines if line]


def test_the_python_snippets_run_in_order_and_print_what_their_comments_say(capsys):
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "middle"
    assert float(out.splitlines()[1]) == pytest.approx(0.28, abs=0.005)
    assert out.splitlines()[2] == "torch.Size([12]) torch.Size([12]) torch.Size([12, 64])"
    assert names["values"].shape == (40,)
    assert len(names["table"]) == 64


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("locater")])
def test_the_shell_commands_succeed(command, tmp_path):
    arguments = [sys.executable, "-c", "from locater.cli import main; main()", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("make")])
def test_the_make_targets_exist(command):
    target = shlex.split(command)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_every_command_is_one_of_those_tested():
    assert all(line.split()[0] in ("locater", "make") for line in commands())


def test_linked_files_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_tests_and_files_that_the_documentation_names_exist(page):
    text = (ROOT / "docs" / page).read_text()
    for file, name in re.findall(r"`([\w./]+\.py)::(\w+)`", text):
        place = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "theory" / file
        assert f"def {name}(" in place.read_text(), f"{file}::{name}"
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("page", ["models.md", "locater.md", "lab.md", "measure.md"])
def test_the_python_of_the_how_to_pages_runs(page, tmp_path, monkeypatch):
    text = (ROOT / "docs" / page).read_text()
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, page, "exec"), names)
