"""The command line as a user meets it: real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from locater import TokenProcess, __version__, rho
from locater.cli import explained, main
from locater.theory import ATTENTION_REGIMES, STUDIES, attention, attention_regime, normal_spectrum

LOCATER = [sys.executable, "-m", "locater"]


def run(*arguments, cwd=None, **more):
    """As a user does, in a process of its own."""
    return subprocess.run([*LOCATER, *arguments], capture_output=True, text=True, cwd=cwd, timeout=240, **more)


@pytest.fixture
def here(capfd, monkeypatch):
    """The same in this process, which has everything loaded."""

    def call(*arguments, cwd=None):
        if cwd is not None:
            monkeypatch.chdir(cwd)
        with pytest.raises(SystemExit) as leaving:
            main(list(arguments))
        return subprocess.CompletedProcess(arguments, leaving.value.code, *capfd.readouterr())

    return call


def test_rho_prints_what_the_library_computes():
    done = run("rho", "--mean", "0.1", "--std", "0.3", "--dim", "16", "--tokens", "12", "--json", "-")
    assert done.returncode == 0
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    expected = rho(normal_spectrum(0.1, 0.3, 16), TokenProcess.random_walk(12), 4.0)
    np.testing.assert_allclose(answer["rho"], expected, rtol=1e-12)
    assert answer["regime"] in ("late", "middle", "early", "flat", "vanishing")
    for person in (run("rho", "--mean", "0.1", "--std", "0.3", "--dim", "16", "--tokens", "12"),):
        assert f"{expected[0]:.6f}" in person.stdout


ASKED = ("--mean", "0.1", "--std", "0.3", "--dim", "16", "--tokens", "12", "--samples", "2000")


def test_a_temperature_beyond_all_logits_is_uniform_attention(here):
    answer = json.loads(here("attention", "--mean", "1", "--temperature", "1e200", "--json", "-").stdout)
    assert answer["regime"].startswith("uniform: 40 of 40 tokens")


@pytest.mark.parametrize(
    ("more", "method", "query"),
    [
        ((), "exact", -1),
        (("--method", "three-number"), "three-number", -1),
        (("--method", "montecarlo", "--query", "5"), "montecarlo", 5),
    ],
)
def test_attention_prints_what_the_library_computes_beside_rho(more, method, query, here):
    answer = json.loads(here("attention", *ASKED, *more, "--json", "-").stdout)
    spectrum, walk = normal_spectrum(0.1, 0.3, 16), TokenProcess.random_walk(12)
    law = attention(spectrum, walk, 4.0, method, query=query, samples=2000)
    for name, value in answer["softmax"].items():
        expected = getattr(law, name)
        assert value == expected if isinstance(expected, str) else np.allclose(value, expected, rtol=1e-12), name
    assert {"weights", "entropy", "entropy_std", "largest_weight", "alpha", "signal"} <= answer["softmax"].keys()
    assert sum(answer["softmax"]["weights"]) == pytest.approx(1, abs=1e-12)
    assert answer["regime"] == str(attention_regime(law))
    seen = TokenProcess.random_walk(query % 12 + 1)  # by a causal query
    np.testing.assert_allclose(answer["rho"], rho(spectrum, seen, 4.0), rtol=1e-12)


def test_people_see_both_bars_of_every_token_and_the_entropy_with_its_error(here):
    done = here("attention", *ASKED)
    law = attention(normal_spectrum(0.1, 0.3, 16), TokenProcess.random_walk(12), 4.0, samples=2000)
    assert str(attention_regime(law)) in done.stdout
    assert f"{law.entropy:.4g} ± {law.entropy_error:.1g} nats (ln 12 = 2.485)" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[1] for row in rows] == [f"{weight:.6f}" for weight in law.weights]
    assert rows[-1][-1] == "query"
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_query_that_sees_itself_alone_has_no_rho(here):
    done = here("attention", *ASKED, "--query", "0")
    assert "none for one token" in done.stdout
    assert done.stdout.count("not seen") == 11
    assert json.loads(here("attention", *ASKED, "--query", "0", "--json", "-").stdout)["rho"] is None


@pytest.mark.parametrize("method", ["exact", "gaussian", "asymptotic", "printed", "montecarlo"])
def test_every_method_has_its_word(method, here):
    arguments = ("--mean", "0.2", "--dim", "8", "--tokens", "6", "--samples", "2000", "--json", "-")
    answer = json.loads(here("rho", *arguments, "--method", method).stdout)
    assert answer["method"] == method
    assert len(answer["rho"]) == 6


@pytest.mark.parametrize("command", ["rho", "attention"])
@pytest.mark.parametrize("process", ["walk", "independent", "ar:0.5"])
def test_every_process_has_its_word(command, process, here):
    assert here(command, "--mean", "0.2", "--dim", "8", "--tokens", "6", "--process", process).returncode == 0


def test_json_goes_to_a_file_while_people_read_the_screen(tmp_path, here):
    target = tmp_path / "rho.json"
    done = here("rho", "--mean", "0.2", "--tokens", "5", "--dim", "4", "--json", str(target))
    assert json.loads(target.read_text())["tokens"] == 5
    assert "tr W/λ" in done.stdout


@pytest.mark.long
def test_demo_predicts_simulates_trains_and_draws(tmp_path):
    done = run("demo", "--out", "here", "--steps", "2", "--json", "demo.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("figure-5.png", "laptop-curves.png", "laptop-rho.png"):
        assert (tmp_path / "here" / name).exists()
    answer = json.loads((tmp_path / "demo.json").read_text())
    assert [row["steps"] for row in answer["members"]] == [2, 2, 2]
    spectra = answer["spectra"]
    assert max(result["largest_gap"]["exact"] for result in spectra) < spectra[0]["four_standard_errors"] * 1.1
    assert max(result["softmax"]["standard_errors"] for result in spectra) < 4
    assert {result["softmax"]["regime"] for result in spectra} == set(ATTENTION_REGIMES)  # each of them once
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "here/figure-5.png" in done.stdout.replace("\n", "")
    assert "here/report.html" in done.stdout.splitlines()[-1]
    assert answer["report"] == "here/report.html"
    page = (tmp_path / "here" / "report.html").read_text()
    assert len(page) < 6_000_000
    assert "predicted and simulated" in page
    assert "κ₂ = 100, seed 0" in page


@pytest.mark.parametrize("name", [name for name in STUDIES if name not in ("orders", "diagonal", "depth")])
def test_studies_print_tables_and_json(name, here):
    answer = json.loads(here("study", name, "--json", "-").stdout)
    assert answer["study"] == name
    assert len(answer["rows"]) >= 5


def test_study_without_a_name_lists_them(here):
    done = here("study")
    assert all(name in done.stdout for name in STUDIES)


def test_version_and_help(here):
    assert here("--version").stdout.strip() == f"locater {__version__}"
    assert here().returncode == 0
    assert "Commands" in here().stdout


MISTAKEN_SPECTRA = {
    (): "Missing option '--mean'",
    ("--mean", "x"): "--mean",
    ("--mean", "nan"): "mean must be finite",
    ("--mean", "1e200", "--json", "-"): "overflow",
    ("--mean", "0.1", "--std", "-1"): "std must not be negative",
    ("--mean", "0.1", "--dim", "0"): "dim must be",
    ("--mean", "0.1", "--dim", "1" + "0" * 19): "dim must be at most",
    ("--mean", "0.1", "--tokens", "1"): "tokens must be a whole number of at least 2, got 1",
    ("--mean", "0.1", "--temperature", "0"): "temperature must be one positive number",
    ("--mean", "0.1", "--process", "ar:fast"): "ar:DECAY",
    ("--mean", "0.1", "--process", "ar:2"): "between -1 and 1",
    ("--mean", "0.1", "--json", "no/such/folder/x.json"): "cannot write no/such/folder/x.json",
    ("--mena", "1"): "No such option",
}
MISTAKES = [
    *(((command, *words), says) for command in ("rho", "attention") for words, says in MISTAKEN_SPECTRA.items()),
    (("rho", "--mean", "0.1", "--method", "magic"), "exact, gaussian, asymptotic, printed, montecarlo"),
    (("attention", "--mean", "0.1", "--method", "gaussian"), "exact, three-number, montecarlo"),
    (("attention", "--mean", "0.1", "--query", "40"), "query must be a position from -40 to 39, got 40"),
    (("attention", "--mean", "0.1", "--samples", "0"), "samples must be a whole number of at least 1, got 0"),
    (("attention", "--mean", "1", "--temperature", "1e-200"), "overflow: take a larger temperature"),
    (("figure", "13"), "figure must be one of"),
    (("figure", "one"), "12, spectra, regimes, got one"),
    (("figure", "9" * 5000), "figure must be one of"),
    (("figure", "1", "--out", "/dev/null"), "cannot write into the folder /dev/null"),
    (("study", "nothing"), "study must be one of"),
    (("study", "limits", "--json", "."), "it is a folder"),
    (("figure", "4", "--json", "no/such/folder/x.json"), "there is no folder"),
    (("demo", "--out", "/dev/null/deeper"), "cannot write into the folder"),
    (("demo", "--seed", "-1"), "seed"),
    (("demo", "--steps", "-1"), "steps must be a whole number of at least 1, got -1"),
    (("train", "laptop", "--set", "steps=" + "9" * 400), "steps must be below 2^63"),
    (("scan", "x" * 5000), "File name too long"),
    (("scan", "org/model@v1", "--revision", "v2"), "the revision is given twice, v1 and v2"),
    (("scan", ".", "--revision", "v2"), "has no revision v2"),
    (("rhoo",), "No such command 'rhoo'"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES)
def test_a_mistake_is_one_line_and_status_2(arguments, says, tmp_path, here):
    done = here(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("locater: ")
    assert done.stderr.count("\n") == 1
    assert says.lower() in done.stderr.lower()
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def started(*arguments, cwd):
    """A process that hears Ctrl-C, as one in the foreground does."""
    return subprocess.Popen(
        [*LOCATER, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def until_loaded(process, library):
    """Waits until a process has mapped a library of this name."""
    maps = Path(f"/proc/{process.pid}/maps")
    if not maps.exists():
        pytest.skip("no /proc to see what a process has loaded")
    while process.poll() is None and library not in maps.read_text():
        time.sleep(0.005)


@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "_ufuncs"])
def test_ctrl_c_ends_quietly_while_libraries_are_loaded_and_later(library, tmp_path):
    process = started("rho", "--mean", "0.1", "--method", "montecarlo", "--samples", "100000000", cwd=tmp_path)
    if library == "libtorch_cpu":
        process.kill()
        process.communicate()
        process = started("train", "laptop", "--steps", "100000", "--out", "run", cwd=tmp_path)
    until_loaded(process, library)
    if library == "_ufuncs":
        time.sleep(0.5)  # it is simulating
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (out, err) in (("", "locater: stopped\n"), ("", ""))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("study", "limits"), ("rho", "--mean", "0.1", "--tokens", "2000"), ("presets",)])
def test_a_closed_pipe_is_no_error(words):
    command = " ".join([*map(shlex.quote, LOCATER), *words, "|", "head", "-1"])
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_behind_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*LOCATER, "presets"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "locater: No space left on device, while running presets (--traceback shows where)\n"


def test_without_greek_letters_their_names_are_printed():
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run("rho", "--mean", "0.1", "--dim", "4", "--tokens", "5", env=ascii_only)
    assert done.returncode == 0
    assert "rho, exact: flat   (tr W/lambda" in done.stdout


def test_a_working_directory_that_is_gone_is_one_line(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {shlex.quote(str(gone))}; exec {' '.join(map(shlex.quote, LOCATER))} presets"
    done = subprocess.run(["bash", "-c", command], cwd=gone, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "locater: the working directory is gone: change to another one\n")


def test_what_nobody_expected_is_one_line_and_shown_whole_if_asked_for(here, monkeypatch):
    def fail(*_):
        raise TypeError("a fault\nException raised from frame 1 at C.cpp")

    monkeypatch.setattr("locater.theory.normal_spectrum", fail)
    done = here("rho", "--mean", "0.1")
    assert done.returncode == 1
    assert done.stderr == (
        "locater: TypeError while running rho: a fault; this is a fault of locater's: "
        "please report what --traceback shows\n"
    )
    with pytest.raises(TypeError, match="a fault"):
        main(["rho", "--mean", "0.1", "--traceback"])


def test_ctrl_c_that_a_library_turns_into_an_error_of_its_own_is_ctrl_c(here, monkeypatch):
    """As an import that is cut off in the middle does."""

    def half_imported(*_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise AttributeError("partially initialized module") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("locater.theory.normal_spectrum", half_imported)
    try:
        done = here("rho", "--mean", "0.1")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (130, "locater: stopped\n")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(36, "File name too long", "x" * 5000), "File name too long, while running scan"),
        (RecursionError("deep"), "something is nested too deep, while running scan"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), "is not Unicode"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
    ],
)
def test_what_the_system_refuses_is_one_line_that_says_what_was_being_done(error, says):
    message, status = explained(error, "scan")
    assert status == 2
    assert says in message
    assert len(message) < 800


def test_a_progress_bar_is_shown_on_a_terminal_and_only_there(tmp_path):
    command = ["rho", "--mean", "0.1", "--dim", "8", "--tokens", "20", "--method", "montecarlo", "--samples", "100000"]
    silent = run(*command, cwd=tmp_path)
    assert silent.stderr == ""
    keyboard, screen = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
    process = subprocess.Popen(
        [*LOCATER, *command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=screen, env=environment
    )
    os.close(screen)
    seen = b""
    try:
        while chunk := os.read(keyboard, 4096):
            seen += chunk
    except OSError:
        pass  # the terminal closed with the process
    assert process.wait(timeout=60) == 0
    assert "ρ, montecarlo".encode() in seen
    assert re.search("━|╸".encode(), seen)


def test_importing_the_package_loads_nothing_it_does_not_need():
    """torch comes with the first name that needs it; plotting, tables and the command line when they are used."""
    optional = ("torch", "pandas", "matplotlib", "typer", "transformers")
    code = f"import sys, locater; print(*(name for name in {optional} if name in sys.modules)); locater.QK"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_theory_needs_numpy_and_scipy_only():
    """No file of the room imports torch, except to move a simulation to its device."""
    import locater.theory

    for path in Path(locater.theory.__file__).parent.glob("*.py"):
        imports = re.findall(r"^(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE)
        assert set(imports) - sys.stdlib_module_names <= {"locater", "numpy", "scipy"}, path.name


def test_a_missing_extra_is_named_with_the_command_that_installs_it():
    from locater.errors import LocaterError, require

    with pytest.raises(LocaterError, match=r"pip install 'locater\[hf\]'"):
        require("a_module_that_is_not_there", "hf")
    assert require("json", "hf") is json
