"""The command line: parses, calls a room, prints."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD

from locater import __version__, _arena_commands, _explore_commands, _lab_commands, _measure_commands, _report_commands
from locater import _terminal as terminal
from locater._terminal import JsonOption, OutOption, RevisionOption, SeedOption
from locater.errors import LocaterError, one_line, reason
from locater.io import nulled, writable_folder, write_file

__all__ = ["app", "main"]

app = typer.Typer(
    name="locater",
    help="See, predict and control where a transformer's attention looks.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_STOPPED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM

_arena_commands.register(app)
_explore_commands.register(app)
_lab_commands.register(app)
_measure_commands.register(app)
_report_commands.register(app)


@app.command("rho")
def rho_command(
    mean: Annotated[float, typer.Option(help="Mean of the eigenvalues of W = W_QK Σ.")],
    std: Annotated[float, typer.Option(help="Their standard deviation.")] = 0.0,
    dim: Annotated[int, typer.Option(help="How many: the normal's mid-quantiles.")] = 128,
    tokens: Annotated[int, typer.Option(help="Sequence length T.")] = 40,
    temperature: Annotated[float | None, typer.Option(help="λ; √dim if not given.")] = None,
    method: Annotated[str, typer.Option(help="exact, gaussian, asymptotic, printed or montecarlo.")] = "exact",
    process: Annotated[str, typer.Option(help="walk, independent, or ar:DECAY.")] = "walk",
    samples: Annotated[int, typer.Option(help="Sequences for montecarlo.")] = 100_000,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """ρ of every token, for normally distributed eigenvalues: how likely it is on the slope of the paper's softmax."""
    import numpy as np

    from locater.theory import moments, normal_spectrum, regime, rho

    spectrum = normal_spectrum(mean, std, dim)
    tokens_process = _process(process, tokens)
    lam = float(np.sqrt(dim)) if temperature is None else temperature
    with terminal.progress(f"ρ, {method}"):
        values = rho(spectrum, tokens_process, lam, method, samples=samples, seed=seed)
    name = regime(values)
    if json_file is not None:
        exact = moments(spectrum, tokens_process, lam)
        given = {"mean": mean, "std": std, "dim": dim, "tokens": tokens, "temperature": lam}
        more = {"method": method, "process": process, "regime": name, "rho": values}
        terminal.write_json(json_file, given | more | {"z_mean": exact.mean, "z_variance": exact.variance})
    if json_file != "-":
        console = terminal.out()
        console.print(f"ρ, {method}: {name}   (tr W/λ = {spectrum.sum() / lam:.4g}, T = {tokens}, d = {dim})")
        for i in np.unique(np.linspace(0, tokens - 1, min(tokens, 40)).round().astype(int)):
            console.print(f"{i + 1:>6}  {values[i]:.6f}  {'█' * round(40 * float(values[i]))}", highlight=False)


def _process(name: str, tokens: int) -> Any:
    from locater.theory import TokenProcess

    if name == "walk":
        return TokenProcess.random_walk(tokens)
    if name == "independent":
        return TokenProcess.independent(tokens)
    kind, _, decay = name.partition(":")
    try:
        if kind == "ar":
            return TokenProcess.autoregressive(tokens, float(decay))
    except ValueError as error:
        if isinstance(error, LocaterError):
            raise
    raise LocaterError(f"process must be walk, independent or ar:DECAY (as in ar:0.9), got {name!r}")


@app.command("figure")
def figure_command(
    number: Annotated[int, typer.Argument(help="1 to 12, the paper's numbering.")],
    out: OutOption = Path("figures"),
    runs: Annotated[
        Path | None, typer.Option("--runs", metavar="DIR", help="For 6 to 12: the folder of a sweep.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Draw a figure of the paper: PNG, SVG and the data as JSON."""
    from locater.figures import draw

    with terminal.progress(f"figure {number}") as progress:
        written = draw(number, out, progress, runs=runs)
    if json_file is not None:
        terminal.write_json(json_file, {"figure": number, "files": [str(path) for path in written]})
    if json_file != "-":
        for path in written:
            print(path)


@app.command("scan")
def scan_command(
    model: Annotated[
        str, typer.Argument(help="A folder, a .safetensors, .gguf, .bin or .pt file, or a hub id (org/model@revision).")
    ],
    revision: RevisionOption = None,
    offset: Annotated[float, typer.Option(help="Under RoPE: key position minus query position.")] = 0.0,
    average_offsets: Annotated[
        int | None, typer.Option(help="Under RoPE: average W_QK over that many offsets from 0 down.")
    ] = None,
    fold_norm: Annotated[bool, typer.Option("--fold-norm", help="Fold in the norm before attention.")] = False,
    tokens: Annotated[int, typer.Option(help="Length of the walk behind the regime (the shape of ρ).")] = 64,
    top: Annotated[int, typer.Option(min=1, help="How many heads to show.")] = 20,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the whole table.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="DIR", help="Draw maps and eigenvalues.")] = None,
    json_file: JsonOption = None,
) -> None:
    """The query-key spectrum of every head of a model, the largest logits first."""
    from locater.models import scan, spectra
    from locater.models.checkpoint import open_checkpoint

    if plot is not None:
        writable_folder(plot)
    for target in (csv, None if json_file in (None, "-") else Path(str(json_file))):
        if target is not None and not target.parent.is_dir():
            raise LocaterError(f"cannot write {target}: there is no folder {target.parent}")
    checkpoint = open_checkpoint(model, revision=revision)
    options: dict[str, Any] = {"offset": offset, "average_offsets": average_offsets, "fold_norm": fold_norm}
    with terminal.progress("scanning"):
        table = scan(checkpoint, tokens=tokens, **options)
        eigenvalues: dict[str, Any] = {}  # by module (heads, d_head), complex
        if plot is not None or json_file is not None:
            eigenvalues = {
                each.attention.module: each.eigenvalues().cpu().numpy() for each in spectra(checkpoint, **options)
            }
        written = [] if plot is None else _plot_scan(table, eigenvalues, model, plot)
    if csv is not None:
        write_file(csv, table.to_csv(index=False).encode())
    if json_file is not None:
        rows = nulled(table.to_dict("records"))
        pairs = {module: _pairs(values) for module, values in eigenvalues.items()}
        terminal.write_json(
            json_file, {"model": model, **options, "tokens": tokens, "heads": rows, "eigenvalues": pairs}
        )
    if json_file == "-":
        return
    counts = table["regime"].value_counts()
    console = terminal.out()
    console.print(
        f"{model}: {len(table)} heads in {table['module'].nunique()} attention modules; shape of ρ: "
        + ", ".join(f"{count} {name}" for name, count in counts.items()),
        highlight=False,
    )
    shown = table.assign(_size=table["spectral_norm"] * table["logit_scale"].abs()).nlargest(top, "_size")
    columns = ("layer", "kind", "head", "trace", "scale", "xi", "spectral_norm", "effective_rank", "symmetric_share")
    records = [
        {name: row[name] for name in (*columns, "r", "regime")} for row in shown.to_dict("records")
    ]  # fmt: skip
    if table["kind"].nunique() == 1:
        records = [{name: cell for name, cell in row.items() if name != "kind"} for row in records]
    console.print(terminal.table(records, "", box=SIMPLE_HEAD))
    for path in written:
        print(path)


def _pairs(eigenvalues: Any) -> list[list[list[float]]]:
    """Heads × eigenvalues × real and imaginary part, in six digits, which a picture or a quantile do not exhaust."""
    return [[[float(f"{w.real:.6g}"), float(f"{w.imag:.6g}")] for w in head] for head in eigenvalues.tolist()]


def _plot_scan(table: Any, eigenvalues: dict[str, Any], model: str, folder: Path) -> list[Path]:
    """Maps of all heads, eigenvalues of at most twelve modules spread over the model."""
    from locater.figures import draw_scan

    first = table.drop_duplicates("module").to_dict("records")
    chosen = {round(k * (len(first) - 1) / min(11, max(1, len(first) - 1))) for k in range(min(12, len(first)))}
    shown = [
        (f"{row['kind']} {row['layer']}", eigenvalues[row["module"]]) for i, row in enumerate(first) if i in chosen
    ]
    return draw_scan(table, shown, "/".join(Path(model).parts[-2:]), folder)


@app.command("study")
def study_command(
    name: Annotated[str | None, typer.Argument(help="Which; none lists them.")] = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Put one of the paper's statements to the test, as a table."""
    from locater.theory import STUDIES

    if name is None:
        rows = [{"study": key, "asks": study.question, "of": study.title} for key, study in STUDIES.items()]
        if json_file is not None:
            terminal.write_json(json_file, {"studies": rows})
        if json_file != "-":
            terminal.out().print(terminal.table(rows, "locater study NAME"))
        return
    if name not in STUDIES:
        raise LocaterError(f"study must be one of {', '.join(STUDIES)}, got {name!r}")
    study = STUDIES[name]
    with terminal.progress(name):
        result = study.run(seed)
    if json_file is not None:
        answer = {"study": name, "question": study.question, "seed": seed, "rows": nulled(result)}
        terminal.write_json(json_file, answer)
    if json_file != "-":
        terminal.out().print(terminal.table(result, f"{study.title}: {study.question}"))


@app.command("demo")
def demo_command(
    out: OutOption = Path("locater-demo"),
    seed: SeedOption = 0,
    steps: Annotated[int | None, typer.Option(help="Updates of the trained models; the preset's if not given.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Predict ρ and simulate it; then train small language models with and without LocAteR."""
    from locater import demo
    from locater.figures import draw, draw_run

    config = demo.config(steps)
    folder = writable_folder(out)
    with terminal.progress("simulating") as progress:
        written = draw(5, folder, lambda share: progress(0.3 * share))
        results: list[dict[str, Any]] = []
        for done, (mean, std) in enumerate(demo.SPECTRA, start=1):
            results.append(demo.compare(mean, std, seed=seed))
            progress(0.3 + 0.7 * done / len(demo.SPECTRA))
    if json_file != "-":
        _print_predictions(results)
        print("Training three models as one program, on State of the Union addresses …", flush=True)
    with _lab_commands.watching() as watch:
        runs = demo.train_models(folder, config, seed=seed, watch=watch)
    rows = _lab_commands.summary(runs)
    written += draw_run(runs, folder, "laptop")
    page, without = None, ""
    try:
        page = demo.write_report(folder, results, runs)
    except LocaterError as error:  # plotly is an extra; all else is done
        without = f"no report: {error}"
    if json_file is not None:
        files = [str(path) for path in written]
        answer = {"spectra": results, "members": rows, "runs": str(runs), "files": files}
        terminal.write_json(json_file, {**answer, "report": None if page is None else str(page)})
    if json_file == "-":
        return
    console = terminal.out()
    names = {"none": "no LocAteR"} | {f"k{kappa:g}": f"LocAteR, κ₂ = {kappa:g}" for kappa in demo.KAPPAS if kappa}
    shown = ("perplexity", "scale", "trace", "entropy", "max logit")
    table = [{"model": names[row["member"].split("-")[0]]} | {key: row[key] for key in shown} for row in rows]
    console.print(terminal.table(table, "", box=SIMPLE_HEAD))
    console.print("perplexity: on addresses that were not trained on; scale: tr(W_QKᵀW_QK);")
    console.print("trace: tr W_QK; entropy of attention in nats.")
    for path in written:
        if path.suffix == ".png":
            console.print(str(path), highlight=False)
    console.print(without if page is None else f"All of it as a page, for a browser: {page}", highlight=False)


def _print_predictions(results: list[dict[str, Any]]) -> None:
    console = terminal.out()
    gaps = {"exact": "exact", "large T": "asymptotic", "printed": "printed"}
    rows = [
        {
            "mean": result["mean"],
            "std": result["std"],
            "shape": result["regime"],
            "predicted": _sparkline(result["rho"]["exact"]),
            "simulated": _sparkline(result["rho"]["simulated"]),
        }
        | {name: f"{result['largest_gap'][key]:.3f}" for name, key in gaps.items()}
        for result in results
    ]
    console.print("ρ, the chance that a token is on the slope of the paper's piecewise linear")
    console.print("softmax, from token 1 to the query, token 40: predicted from the mean and std of")
    console.print("the eigenvalues of W_QK (d = 128), and counted in 4,000 walks. Softmax itself")
    console.print("can look elsewhere: locater study softmax.")
    console.print(terminal.table(rows, "", box=SIMPLE_HEAD))
    console.print("exact, large T, printed: largest distance of each formula from the simulated ρ;")
    console.print(f"sampling explains up to {results[0]['four_standard_errors']:.3f} (4 standard errors).\n")


def _sparkline(values: list[float], width: int = 10) -> str:
    """Averages of `width` stretches as bars of eight heights."""
    edges = [round(k * len(values) / width) for k in range(width + 1)]
    means = (sum(values[a:b]) / (b - a) for a, b in pairwise(edges))
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * value))] for value in means)


def _version(asked: bool) -> None:
    if asked:
        print(f"locater {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where a failure comes from.")] = False,
) -> None:
    """See, predict and control where a transformer's attention looks."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line: status 0; 2 and one line for a user's mistake; 130 and 143 for Ctrl-C and SIGTERM."""
    given = sys.argv[1:] if arguments is None else arguments
    traceback = "--traceback" in given  # it may stand anywhere
    words = [word for word in given if word != "--traceback"]
    terminal.encode_what_can_be()
    code: object = None
    interrupt = _CtrlC()
    try:
        _check_working_folder()
        with interrupt:
            code = app(words or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = _STOPPED
    except SystemExit as leaving:  # by SIGTERM
        code = leaving.code
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        terminal.discard_output()
    except Exception as error:
        if traceback:
            raise
        message, code = explained(error, words[0] if words else "")
        terminal.discard_output()
        if interrupt.received:
            code = _STOPPED
        else:
            with suppress(OSError):
                print(f"locater: {message}", file=sys.stderr)
    if code in (_STOPPED, _TERMINATED):
        print("locater: stopped", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


class _CtrlC:
    """Remembers Ctrl-C: a library that is being imported may turn the KeyboardInterrupt into an error of its own."""

    received = False

    def __enter__(self) -> None:
        here = threading.current_thread() is threading.main_thread()
        self._usual = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._usual:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.default_int_handler(number, frame)


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:  # libraries fail in ways of their own then
        raise LocaterError("the working directory is gone: change to another one") from error


def explained(error: Exception, command: str) -> tuple[str, int]:
    """An exception as one line for people, and the status to leave with."""
    if isinstance(error, LocaterError):
        return one_line(str(error)), 2
    if (parser := getattr(error, "format_message", None)) is not None:
        return one_line(f"{parser()} (locater --help lists the commands, locater COMMAND --help their options)"), 2
    doing, rest = f"while running {one_line(command, 80)}", "(--traceback shows where)"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in str(error):
        return f"not enough memory for a problem of this size, {doing}", 2
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return one_line(f"{where}{reason(error)}, {doing} {rest}"), 2
    if isinstance(error, RecursionError):
        return f"something is nested too deep, {doing} {rest}", 2
    if isinstance(error, UnicodeError):
        return one_line(f"a name or a text is not Unicode ({reason(error)}), {doing} {rest}"), 2
    return one_line(
        f"{type(error).__name__} {doing}: {reason(error)}; this is a fault of locater's: please report what "
        "--traceback shows"
    ), 1
