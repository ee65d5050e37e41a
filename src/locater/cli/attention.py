"""The command `attention`: where softmax looks for normally distributed eigenvalues, beside the paper's ρ."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from locater.cli import _terminal as terminal
from locater.cli._spectrum import Asked, asking, process_of
from locater.cli._terminal import JsonOption, SeedOption

if TYPE_CHECKING:
    from locater.theory import AttentionLaw

__all__ = ["attention_command"]

_BAR = 20  # letters


@asking
def attention_command(
    asked: Asked,
    method: Annotated[str, typer.Option(help="exact, three-number or montecarlo.")] = "exact",
    query: Annotated[int, typer.Option(help="Position of the query, from 0; −1 is the last.")] = -1,
    samples: Annotated[
        int | None, typer.Option(help="How many are drawn: 16,384, of montecarlo 100,000 sequences.")
    ] = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Where softmax attention looks: the expected weight of every token, entropy, regime; the paper's ρ beside it."""
    from locater.theory import attention, attention_regime

    with terminal.progress(f"attention, {method}"):
        law = attention(
            asked.spectrum, asked.process, asked.temperature, method, query=query, samples=samples, seed=seed
        )
        rho = _rho(asked, law.tokens)
    if json_file is not None:
        of_law = {field.name: getattr(law, field.name) for field in fields(law)}
        regimes = {"regime": str(attention_regime(law)), "rho_regime": None if rho is None else rho[1]}
        answer = asked.to_json() | {"method": method, "softmax": of_law, "rho": None if rho is None else rho[0]}
        terminal.write_json(json_file, answer | regimes)
    if json_file != "-":
        _print(asked, law, method, rho)


def _rho(asked: Asked, keys: int) -> tuple[Any, str] | None:
    """ρ of the tokens that the query sees, and its shape; a query that sees itself alone has none."""
    from locater.theory import regime, rho

    if keys < 2:
        return None
    process = process_of(asked.process_name, keys)
    values = rho(asked.spectrum, process, asked.temperature)
    return values, str(regime(values))


def _print(asked: Asked, law: AttentionLaw, method: str, rho: tuple[Any, str] | None) -> None:
    from math import log

    from locater.theory import attention_regime

    most, most_entropy = float(law.weights.max()), log(law.tokens)
    lines = [
        f"softmax: {attention_regime(law)}",
        f"  method {method}, {asked}",
        f"  entropy         {_with_error(law.entropy, law.entropy_error)} nats (ln {law.tokens} = {most_entropy:.4g})",
        f"  its spread      {law.entropy_std:.4g} from sequence to sequence",
        f"  largest weight  {_with_error(law.largest_weight, law.largest_weight_error)}",
        f"  α               {law.alpha:.4g} (mean output: α x + β ΣW_QKᵀx/λ of the query x)",
        f"  β, the signal   {_with_error(law.signal, law.signal_error)}",
        "ρ of the paper's piecewise linear softmax: " + ("none for one token" if rho is None else rho[1]),
        f"{'token':>6}  {f'softmax (full bar: {most:.3g})':<{_BAR + 10}}  ρ",
    ]
    for i in asked.shown_tokens():
        weight = float(law.weights[i])
        first = f"{weight:.6f}  {'█' * round(_BAR * weight / most)}" if i < law.tokens else "not seen"
        second = "" if rho is None or i >= law.tokens else f"{rho[0][i]:.4f}  {'█' * round(_BAR * float(rho[0][i]))}"
        query = "  query" if i == law.query else ""
        lines.append(f"{i + 1:>6}  {first:<{_BAR + 10}}  {second:<{_BAR + 8}}{query}".rstrip())
    terminal.out().print("\n".join(lines), highlight=False, markup=False)


def _with_error(value: Any, error: Any) -> str:
    return f"{float(value):.4g}" + (f" ± {float(error):.1g}" if error else "")
