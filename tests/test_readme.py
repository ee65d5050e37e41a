"""What the README and the pages in docs/ tell people to type, typed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib

import pytest

from markdown_pages import DOCS, ROOT, blocks, commands, run_locater, run_python

README = (ROOT / "README.md").read_text()
COMMANDS = [line for _, block in blocks(README, "sh") for line in commands(block)]
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
OWN_TEST = {"tutorial.md"}  # test_tutorial.py
WITH_PYTHON = [page for page in PAGES if blocks((DOCS / page).read_text(), "python") and page not in OWN_TEST]
MARKS = {"howto/lightning.md": [pytest.mark.filterwarnings("ignore")]}  # it warns of few workers and short epochs


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """The folder in which the README's snippets were typed, and their names."""
    folder, names = tmp_path_factory.mktemp("readme"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for _, code in blocks(README, "python"):
            run_python("README.md", code, names)
    return folder, names


def test_the_python_snippets_run_in_order_and_give_what_they_say(typed):
    _, names = typed
    assert len(names["table"]) == 64
    assert {"trace", "scale", "eigenvalue_mean", "eigenvalue_variance", "regime"} <= set(names["table"])
    assert {"entropy", "max_logit"} <= set(names["heads"])
    assert len(names["heads"]) == 64
    assert names["reg"].measure()["penalty"] > 0


@pytest.mark.long
def test_the_shell_commands_succeed_in_order(typed):
    """Where a README's reader would be after its Python: a later command reads what an earlier one wrote."""
    for command in (line for line in COMMANDS if line.startswith("locater")):
        assert run_locater(command, typed[0]), command


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make")])
def test_the_make_targets_do_what_is_said(command):
    """The commands they would run; that of the demo is run by test_cli, that of the tests is running."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    target = shlex.split(command)[1]
    told = subprocess.run(["make", "--dry-run", target], capture_output=True, text=True, cwd=ROOT, check=False)
    assert told.returncode == 0, told.stderr
    assert {"demo": "locater demo", "test": "python -m pytest"}[target] in told.stdout


def test_every_command_is_one_of_those_tested():
    assert all(line.split()[0] in ("locater", "make") for line in COMMANDS)


def test_linked_files_of_the_readme_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_tests_files_and_extras_that_the_documentation_names_exist(page):
    text = (DOCS / page).read_text()
    for file, name in re.findall(r"`([\w./]+\.py)::(\w+)`", text):
        place = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "theory" / file
        assert f"def {name}(" in place.read_text(), f"{file}::{name}"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert ((DOCS / page).parent / target).exists(), target
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"(?:locater|\.)\[([\w,]+)\]'", text + README):
        assert set(named.split(",")) <= extras.keys(), named


@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(page, [])) for page in WITH_PYTHON])
def test_the_python_of_the_pages_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    names = {}
    for _, code in blocks((DOCS / page).read_text(), "python"):
        run_python(page, code, names)
    if page == "theory.md":
        sizes = "torch.Size([12]) torch.Size([12]) torch.Size([12, 64])"
        regime = "collapsed on the query itself: 1.32 of 40 tokens (random walk)"
        printed = ["middle", "0.28", "0.28 0.997", regime, sizes, "False", "True"]
        assert capsys.readouterr().out.splitlines() == printed
        assert names["values"].shape == (40,)
