"""The command `init`: what attention and tokens will do before a step is trained, from a configuration alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD

from locater.cli import _terminal as terminal
from locater.cli._terminal import JsonOption, RevisionOption, SeedOption
from locater.errors import LocaterError
from locater.io import nulled

if TYPE_CHECKING:
    from locater.models.initial import Initial
    from locater.theory import Trainability

__all__ = ["init_command"]

_SHOWN = 16  # rows of the table
_TOKENS, _MOST_TOKENS = 128, 1024
_DEEP = 128  # layers that so many tokens take seconds of; of more, fewer tokens
_MOST_SECONDS = 60
_MAP_TOKENS = 64  # of the diagram, at most
_MAP_HEADS = 64  # of all layers of the diagram
_MAP_GAINS, _MAP_BRANCHES = np.geomspace(0.1, 100, 11), np.geomspace(0.1, 3.2, 6)


def init_command(
    config: Annotated[str, typer.Argument(help="A config.json, a folder that has one, or a hub id.")],
    revision: RevisionOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Of a sequence; 128 if not given, fewer beyond 128 layers or if there are fewer positions."),
    ] = None,
    similarity: Annotated[float, typer.Option(help="Cosine of the tokens' embeddings: 0 if all are different.")] = 0.0,
    gain: Annotated[
        float, typer.Option(help="On the logits: W_Q and W_K (or the gains of their norms) times its root.")
    ] = 1.0,
    branch: Annotated[
        float, typer.Option(help="On W_O and the MLP's last matrix (or the gains of norms behind them).")
    ] = 1.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw the diagram over gain and residual strength, at most 64 tokens."
        ),
    ] = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Which layers will start with uniform or frozen attention, where tokens become alike, and what mends it.

    No weight is built: heads are drawn from the Gram matrix of the tokens, layer by layer.
    """
    from locater.figures import draw_initial
    from locater.models.initial import open_initial
    from locater.theory import trainability, trainability_map

    terminal.check_file(plot)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise LocaterError(f"--plot takes a .png or an .svg file, got {plot.name}")
    made = open_initial(config, revision).scaled(gain, branch)
    usual = _usual_tokens(made.transformer.layers)
    tokens = min(usual, made.most_tokens or usual) if tokens is None else _checked(tokens, made)
    found = trainability(made.transformer, made.grams(tokens, similarity, seed=seed), seed=seed)
    content = _json(config, made, found, tokens) | {"gain": gain, "branch": branch, "similarity": similarity}
    if plot is not None:
        few = min(tokens, _MAP_TOKENS * usual // _TOKENS)
        heads = max(1, min(4, _MAP_HEADS // made.transformer.layers))
        gram = made.grams(few, similarity, seed=seed)
        over = trainability_map(made.transformer, gram, _MAP_GAINS, _MAP_BRANCHES, heads=heads, seed=seed)
        draw_initial(over, f"{Path(config).name}: {made.family} at initialisation, {few} tokens", plot)
        names = ("gain", "branch", "entropy_share", "cosine", "freezing_gain")
        content["diagram"] = {"tokens": few} | {name: getattr(over, name) for name in names}
    if json_file is not None:
        terminal.write_json(json_file, nulled(content))
    if json_file == "-":
        return
    console = terminal.out()
    console.print("\n".join([_title(made, tokens), *sentences(found, made)]), highlight=False, markup=False)
    console.print(terminal.table(_rows(found), "", box=SIMPLE_HEAD))
    if plot is not None:
        print(plot)


def _usual_tokens(layers: int) -> int:
    return _TOKENS if layers <= _DEEP else _TOKENS // 2 if layers <= 3 * _DEEP else _TOKENS // 4


def _checked(tokens: int, made: Initial) -> int:
    """What takes over a minute is refused."""
    from locater.theory.trainability import seconds

    def quick(count: int) -> bool:
        return count <= _TOKENS or seconds(made.transformer, count) <= _MOST_SECONDS

    if (made.most_tokens is not None and tokens > made.most_tokens) or (tokens <= _MOST_TOKENS and quick(tokens)):
        return tokens  # of too many positions, the model's own limit is told
    limit = next(count for count in range(_MOST_TOKENS, 0, -32) if quick(count))
    raise LocaterError(f"--tokens must be at most {limit:,} for this model, got {tokens:,}: that would take minutes")


def _title(made: Initial, tokens: int) -> str:
    t = made.transformer
    heads = f"{t.attention.heads} heads of {t.attention.head_width}"
    return f"{made.family}, {t.layers} layers, width {made.width:,}, {heads}; {tokens} tokens"


def sentences(found: Trainability, made: Initial) -> list[str]:
    """What is wrong, and what mends it."""
    layers, said = len(found.law.entropy), []
    for where, word in ((found.uniform, "uniform"), (found.frozen, "frozen")):
        if where:
            limit = "over 90%" if word == "uniform" else "under 10%"
            said.append(f"Attention starts {word} in {_named(where, layers)}: entropy {limit} of the most there is.")
    if found.uniform and not found.frozen and found.alike_from is None:
        said.append("That alone is no fault: GPT-2 and BERT start so, and train.")
    if found.alike_from is not None:
        place = "leave the last layer" if found.alike_from == layers else f"enter layer {found.alike_from}"
        said.append(f"Tokens are alike when they {place}: their mean cosine is 0.9 or more.")
    return [*said, *_remedies(found, made)] or [
        "Attention starts neither uniform nor frozen, and tokens stay different."
    ]


def _remedies(found: Trainability, made: Initial) -> list[str]:
    normed = made.transformer.attention.qk_norm_eps is not None
    gains = "gains (1 + weight)" if made.family.startswith("gemma") else "gains"  # its weights start at zero
    what = f"the {gains} of the query and key norms" if normed else "W_Q and W_K"
    said, branch, gain = [], found.branch, found.gain
    if branch is not None and math.isnan(branch):
        said.append("No residual scale keeps tokens different.")
    elif branch is not None:
        behind = made.transformer.norm in ("sandwich", "output")
        last = f"The {gains} of the norms behind attention and MLP" if behind else "W_O and the MLP's last matrix"
        said.append(f"{last} times {branch:.3g} keep tokens different.")
    if found.depth and not made.smaller_by_depth:
        said.append(
            f"So does a model of {found.depth} such layers." if found.depth > 1 else "So does a single such layer."
        )
    then = "" if branch is None or math.isnan(branch) else "With these, "
    if gain is not None and math.isnan(gain):
        none = "no" if then else "No"
        said.append(f"{then}{none} query-key gain from 0.001 to 1,000 leaves every layer between the two.")
    elif gain == 1:
        said.append(f"{then}attention is neither uniform nor frozen.")
    elif gain is not None:
        words = f"gain of {gain:.3g} on the logits mends attention: {what} each times {math.sqrt(gain):.3g}."
        said.append(f"{then}{'a' if then else 'A'} {words}")
    return said


def _named(where: tuple[int, ...], layers: int) -> str:
    if len(where) == layers:
        return "every layer" if layers > 1 else "the only layer"
    parts: list[list[int]] = []
    for layer in where:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"{'layer' if len(where) == 1 else 'layers'} {words}"


def _rows(found: Trainability) -> list[dict[str, Any]]:
    law = found.law
    shown = np.unique(np.linspace(0, len(law.entropy) - 1, _SHOWN).round().astype(int))
    names = {"entropy": law.entropy, "of ln(keys)": law.entropy_share, "β": law.signal}
    entering = {"mean cosine": law.cosine, "rank residual": law.rank_residual, "mean square": law.size}
    return [{"layer": int(i)} | {n: float(v[i]) for n, v in (names | entering).items()} for i in shown]


def _json(config: str, made: Initial, found: Trainability, tokens: int) -> dict[str, Any]:
    law = found.law
    by_layer = ("entropy", "entropy_error", "entropy_share", "signal", "cosine", "rank_residual", "size")
    verdict = {name: getattr(found, name) for name in ("uniform", "frozen", "alike_from")}
    return {
        "config": config, "family": made.family, "layers": made.transformer.layers, "width": made.width,
        "tokens": tokens, "most_entropy": law.most_entropy, **verdict,
        "mends": {name: getattr(found, name) for name in ("gain", "branch", "depth")},
        "sentences": sentences(found, made), **{name: getattr(law, name) for name in by_layer},
    }  # fmt: skip
