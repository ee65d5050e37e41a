"""The command `rho`: the paper's ρ of every token for normally distributed eigenvalues."""

from __future__ import annotations

from typing import Annotated

import typer

from locater.cli import _terminal as terminal
from locater.cli._spectrum import Asked, asking
from locater.cli._terminal import JsonOption, SeedOption

__all__ = ["rho_command"]


@asking
def rho_command(
    asked: Asked,
    method: Annotated[str, typer.Option(help="exact, gaussian, asymptotic, printed or montecarlo.")] = "exact",
    samples: Annotated[int, typer.Option(help="Sequences for montecarlo.")] = 100_000,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """The paper's ρ of every token: how likely it is on the slope of a piecewise linear softmax.

    Softmax itself looks elsewhere: locater attention.
    """
    from locater.theory import moments, regime, rho

    with terminal.progress(f"ρ, {method}"):
        values = rho(asked.spectrum, asked.process, asked.temperature, method, samples=samples, seed=seed)
    name = regime(values)
    if json_file is not None:
        exact = moments(asked.spectrum, asked.process, asked.temperature)
        more = {"method": method, "regime": name, "rho": values, "z_mean": exact.mean, "z_variance": exact.variance}
        terminal.write_json(json_file, asked.to_json() | more)
    if json_file != "-":
        console = terminal.out()
        console.print(f"ρ, {method}: {name}   ({asked})")
        for i in asked.shown_tokens():
            console.print(f"{i + 1:>6}  {values[i]:.6f}  {'█' * round(40 * float(values[i]))}", highlight=False)
