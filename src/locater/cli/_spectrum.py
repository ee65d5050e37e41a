"""What `rho` and `attention` both ask for: normally distributed eigenvalues, a temperature, a process of tokens.

`asking` gives a command these options and hands it what they mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from locater.errors import LocaterError

if TYPE_CHECKING:
    from locater.theory import TokenProcess


@dataclass(frozen=True)
class Asked:
    """The options, and what they mean."""

    mean: float
    std: float
    dim: int
    tokens: int
    temperature: float
    process_name: str
    spectrum: Any  # (dim,)
    process: TokenProcess

    def to_json(self) -> dict[str, Any]:
        names = "mean", "std", "dim", "tokens", "temperature"
        return {name: getattr(self, name) for name in names} | {"process": self.process_name}

    def __str__(self) -> str:
        return f"tr W/λ = {float(self.spectrum.sum()) / self.temperature:.4g}, T = {self.tokens}, d = {self.dim}"

    def shown_tokens(self, most: int = 40) -> list[int]:
        """Tokens to print, from 0: all of a short sequence, else evenly spread."""
        import numpy as np

        shown: list[int] = np.unique(
            np.linspace(0, self.tokens - 1, min(self.tokens, most)).round().astype(int)
        ).tolist()
        return shown


def process_of(name: str, tokens: int) -> TokenProcess:
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


def _options(
    mean: Annotated[float, typer.Option(help="Mean of the eigenvalues of W = W_QK Σ.")],
    std: Annotated[float, typer.Option(help="Their standard deviation.")] = 0.0,
    dim: Annotated[int, typer.Option(help="How many: the normal's mid-quantiles.")] = 128,
    tokens: Annotated[int, typer.Option(help="Sequence length T.")] = 40,
    temperature: Annotated[float | None, typer.Option(help="λ; √dim if not given.")] = None,
    process: Annotated[str, typer.Option(help="walk, independent, or ar:DECAY.")] = "walk",
) -> Asked:
    from locater.theory import normal_spectrum

    spectrum, made = normal_spectrum(mean, std, dim), process_of(process, tokens)
    return Asked(mean, std, dim, tokens, dim**0.5 if temperature is None else temperature, process, spectrum, made)


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is an `Asked`, as one that takes the options above in its place."""
    shared = inspect.signature(_options, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def asked(**given: Any) -> None:
        command(_options(**{name: given.pop(name) for name in shared}), **given)

    parameters = [*shared.values(), *own]
    asked.__name__, asked.__doc__ = command.__name__, command.__doc__
    asked.__annotations__ = {each.name: each.annotation for each in parameters}
    asked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return asked
