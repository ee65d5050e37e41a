"""The package as users get it: a wheel, in an environment of its own, with what its extras bring."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


def run(*command, cwd):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_wheel_installed_with_its_extras_in_an_empty_environment_runs_the_demo(tmp_path, full):
    if not full:
        pytest.skip("takes minutes and fetches packages: LOCATER_FULL=1, or make test-full")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("locater-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "locater/py.typed" in names
    assert {"locater/pages/report/page/main.js", "locater/pages/plotly/plotly.min.js"} <= set(names)
    run(sys.executable, "-m", "venv", "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    run(*install, "torch", cwd=tmp_path)
    run(*install, f"{wheel}[hf,lab]", cwd=tmp_path)
    run(python.parent / "locater", "demo", "--steps", "20", "--out", "here", cwd=tmp_path)
    assert (tmp_path / "here" / "report.html").exists()
    assert "/empty/" in run(python, "-c", "import locater; print(locater.__file__)", cwd=tmp_path)


def test_the_files_for_other_machines_call_what_make_has():
    """A workflow cannot run here; what it would run is `make test`, on the versions that pyproject.toml names."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    job = workflow["jobs"]["test"]
    assert job["steps"][-1]["run"].startswith("make test")
    classified = (ROOT / "pyproject.toml").read_text()
    for version in job["strategy"]["matrix"]["python"]:
        assert f"Programming Language :: Python :: {version}" in classified
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    targets = (ROOT / "Makefile").read_text()
    for hook in hooks:
        assert f"\n{hook['entry'].removeprefix('make ')}:" in targets
