"""The command `rho`: ρ of every token for normally distributed eigenvalues."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption, SeedOption
from locater.errors import LocaterError

__all__ = ["rho_command"]


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
