"""scan: the query-key spectrum of every head of a model, live or on disk, as a table; Scan: the same as a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.io import nulled
from locater.models.attention import Attention
from locater.models.spectrum import Found, Spectra, find, spectra
from locater.models.unread import warn_unread
from locater.qk import QK
from locater.theory import TokenProcess, independent_regimes, regime
from locater.theory.rho import gaussian_rho

if TYPE_CHECKING:
    import pandas as pd

    from locater.models.checkpoint import Checkpoint

__all__ = ["Scan", "Spectra", "scan", "spectra", "table_of"]

# what a file of a scan holds: type, the words for it, names
_ASKED: tuple[tuple[Any, str, str], ...] = (
    (str, "text", "model"),
    (int | float, "a number", "offset"),
    (int | None, "a whole number or null", "average_offsets"),
    (bool, "true or false", "fold_norm"),
    (int, "a whole number", "tokens"),
)
_ROW: tuple[tuple[Any, str, str], ...] = (
    (str, "text", "module kind regime"),
    (int, "a whole number", "layer head key_head d_head d_model"),
    (bool, "true or false", "rope qk_norm"),
    (
        int | float | None,
        "a number or null",
        "logit_scale trace scale trace_square xi eta r eigenvalue_mean eigenvalue_variance spectral_norm "
        "effective_rank symmetric_share rho_first rho_middle rho_last softcap",
    ),
)
# columns that files of the first versions lack, and what stands for them then
_LATER: tuple[tuple[Any, str, str], ...] = (
    (str, "text", "attention_regime"),
    (int | float | None, "a number or null", "attention_entropy"),
)
_OF_TRACE = (
    "trace", "trace_square", "xi", "r", "eigenvalue_mean", "eigenvalue_variance", "symmetric_share",
    "attention_entropy", "rho_first", "rho_middle", "rho_last",
)  # fmt: skip
_NOT_THERE: dict[str, Any] = {"attention_regime": "", "attention_entropy": None}


def scan(
    model_or_path: nn.Module | str | Path | Checkpoint,
    *,
    offset: float = 0.0,
    average_offsets: int | None = None,
    fold_norm: bool = False,
    covariance: Tensor | Mapping[str, Tensor] | None = None,
    tokens: int = 64,
    layers: Collection[int] | None = None,
    progress: Callable[[Attention], None] | None = None,
) -> pd.DataFrame:
    """A row for every query head of a live model, a checkpoint on disk, or a hub id (organisation/model@revision).

    A module that several layers share has rows for each of them, under its name and the layer's number. A warning
    says which attention modules are not read; `table.attrs["unread"]` has the reason for each.

    Args:
        offset: Under RoPE, the position of the key minus that of the query (0 or negative for causal attention).
        average_offsets: Instead, W_QK averaged over that many offsets from 0 down.
        fold_norm: Fold the gain (and centring) of the norm before attention into W_Q and W_K, where there is one.
        covariance: Σ of the states that enter attention, (d_model, d_model), or one for each module by name
            (`locater.models.covariances` estimates them); the identity if not given.
        tokens: T of `attention_*`, whose tokens are independent, and of `regime` and `rho_*`, whose are a random walk.
        layers: Only the modules of these layers; of a checkpoint the weights of others are not read.
        progress: Called with each attention module that is done.

    The columns: module, kind (self, cross, encoder, decoder), layer, head, key_head, d_head, d_model, logit_scale;
    trace tr W_QK, scale tr(W_QKᵀW_QK), trace_square tr W_QK²; xi = trace/√scale, eta = √scale · logit_scale,
    r = xi · eta; eigenvalue_mean = trace/d_model, eigenvalue_variance = scale/d_model − mean² (Eq. 8); spectral_norm,
    effective_rank (the exponential of the entropy of the singular values), symmetric_share (of ‖W_QK‖²).

    Where softmax looks, for `tokens` independent tokens of variance 1 (or Σ) and the temperature 1/logit_scale, by the
    three-number law (`theory.attention_from_traces`): attention_regime, a key of `theory.ATTENTION_REGIMES`, and
    attention_entropy, nats expected of the last query. That is what a norm without a gain gives attention: fold_norm
    counts the gain. Of the paper's piecewise linear softmax, for a random walk: regime, the shape of ρ, and ρ at the
    first, middle and last token (rho_first, rho_middle, rho_last; a normal law with exact moments).

    Where queries and keys are made of different states (keys of another width, latents), W_QK has no trace: d_model is
    the queries' width, and all that is made of the trace is NaN: trace, trace_square, xi, r, eigenvalue_*,
    symmetric_share, attention_entropy and rho_*; both regimes are "".

    rope, qk_norm, softcap: with QK-norm the logits do not grow with W_QK, and both regimes are of the raw weights.
    """
    asked: dict[str, Any] = {"offset": offset, "average_offsets": average_offsets, "fold_norm": fold_norm}
    found = find(model_or_path, **asked, covariance=covariance, layers=layers)
    warn_unread(found.unread, stacklevel=2)
    return table_of(found, tokens, lambda each: None if progress is None else progress(each.attention))


@dataclass(frozen=True, eq=False)
class Scan:
    """What `locater scan --json` writes: the table, the eigenvalues of every head, and how they were asked for."""

    table: pd.DataFrame  # as `scan` returns it
    eigenvalues: dict[str, NDArray[np.complex128]]  # by module (heads, d_head); empty if a file has none
    model: str
    offset: float
    average_offsets: int | None
    fold_norm: bool
    tokens: int
    unread: dict[str, str] = field(default_factory=dict)  # attention modules without rows, and why

    @classmethod
    def of(
        cls,
        model_or_path: nn.Module | str | Path | Checkpoint,
        *,
        name: str | None = None,
        offset: float = 0.0,
        average_offsets: int | None = None,
        fold_norm: bool = False,
        tokens: int = 64,
        layers: Collection[int] | None = None,
        progress: Callable[[Attention], None] | None = None,
    ) -> Scan:
        """Reads every weight once; the arguments are those of `scan`, and `name` is what the file calls the model."""
        if name is None:
            name = str(model_or_path) if isinstance(model_or_path, str | Path) else type(model_or_path).__name__
        eigenvalues: dict[str, NDArray[np.complex128]] = {}

        def keep(each: Spectra) -> None:
            eigenvalues[each.attention.module] = each.eigenvalues().cpu().numpy()
            if progress is not None:
                progress(each.attention)

        asked: dict[str, Any] = {"offset": offset, "average_offsets": average_offsets, "fold_norm": fold_norm}
        found = find(model_or_path, **asked, layers=layers)
        return cls(table_of(found, tokens, keep), eigenvalues, name, **asked, tokens=tokens, unread=found.unread)

    @property
    def title(self) -> str:
        """The last two parts of the model's name."""
        return "/".join(Path(self.model).parts[-2:])

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads. Eigenvalues are pairs of six digits, enough for a picture or a quantile."""
        pairs: dict[str, Any] = {
            module: [[[float(f"{w.real:.6g}"), float(f"{w.imag:.6g}")] for w in head] for head in values.tolist()]
            for module, values in self.eigenvalues.items()
        }
        missing = [module for module, values in self.eigenvalues.items() if np.isnan(values).any()]
        pairs |= {module: nulled(pairs[module]) for module in missing}
        asked = {name: getattr(self, name) for _, _, name in _ASKED}
        heads = nulled(self.table.to_dict("records"))
        return {**asked, "unread": dict(self.unread), "heads": heads, "eigenvalues": pairs}

    @staticmethod
    def recognises(value: Any) -> bool:
        """Whether a JSON value is meant to be a scan, valid or not: the first of its heads has a trace and a scale."""
        heads = value.get("heads") if isinstance(value, Mapping) else None
        first = heads[0] if isinstance(heads, list) and heads else None
        return isinstance(first, Mapping) and {"trace", "scale"} <= first.keys()

    @classmethod
    def from_json(cls, value: Any) -> Scan:
        """What `to_json` gave; files of the first versions have no eigenvalues, no `attention_*` and no `unread`."""
        import pandas as pd

        if not cls.recognises(value):
            raise LocaterError("this is no scan: its heads must be a list of rows with a trace and a scale each")
        _check(value, _ASKED, "the scan")
        for number, row in enumerate(value["heads"], start=1):
            _check(row, _ROW, f"row {number}")
        rows = [row | {k: cell for k, cell in _NOT_THERE.items() if k not in row} for row in value["heads"]]
        for number, row in enumerate(rows, start=1):
            _check(row, _LATER, f"row {number}")
        table = pd.DataFrame(rows)
        table = table.astype({name: float for name in _OF_TRACE if table[name].isna().all()})
        expected = table.groupby("module").cumcount()
        for number in np.flatnonzero(table["head"] != expected).tolist():
            raise LocaterError(f"head of row {number + 1} must be {expected[number]}, got {table['head'][number]}")
        eigenvalues = _read_eigenvalues(value.get("eigenvalues"), table)
        table.attrs["unread"] = unread = _read_unread(value.get("unread"))
        return cls(table, eigenvalues, **{name: value[name] for _, _, name in _ASKED}, unread=unread)


def _check(values: Any, kinds: tuple[tuple[Any, str, str], ...], where: str) -> None:
    for kind, words, names in kinds:
        for name in names.split():
            if not isinstance(values, Mapping) or name not in values:
                raise LocaterError(f"{where} has no {name}; scan the model again")
            value = values[name]
            if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
                raise LocaterError(f"{name} of {where} must be {words}, got {value!r:.60}")


def _read_unread(value: Any) -> dict[str, str]:
    if value is not None and not (isinstance(value, dict) and all(isinstance(why, str) for why in value.values())):
        raise LocaterError(f"unread of the scan must be reasons by module, got {value!r:.60}")
    return dict(value or {})


def _read_eigenvalues(value: Any, table: pd.DataFrame) -> dict[str, NDArray[np.complex128]]:
    made = {}
    for module, heads in table["module"].value_counts(sort=False).items() if value else ():
        try:
            pairs = np.asarray(value[module], dtype=float)  # (heads, d_head, 2)
        except (LookupError, TypeError, ValueError, OverflowError):
            pairs = np.empty(0)
        if pairs.ndim != 3 or pairs.shape[::2] != (heads, 2):
            raise LocaterError(f"eigenvalues of {module} must be pairs of numbers, in lists for each of {heads} heads")
        made[str(module)] = pairs.view(np.complex128)[..., 0]
    return made


def table_of(found: Found, tokens: int, watch: Callable[[Spectra], None]) -> pd.DataFrame:
    """The rows of all modules, and in its `attrs` those without; `watch` sees each module once it is done."""
    import pandas as pd

    process = TokenProcess.random_walk(tokens)
    frames = []
    for spectrum in found.spectra:
        frames.append(pd.DataFrame(_rows(spectrum, process)))
        watch(spectrum)
        del spectrum  # before the next one is made
    if not frames:
        raise LocaterError("no attention module is in the layers that were asked for")
    table = pd.concat(frames, ignore_index=True)
    table.attrs["unread"] = found.unread
    return table


def _rows(spectrum: Spectra, process: TokenProcess) -> dict[str, Any]:
    """The table of one module, by columns."""
    attention, qk = spectrum.attention, spectrum.stored
    groups, per_group = qk.shape
    heads = groups * per_group

    def column(values: list[Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.asarray(torch.cat([value.expand(1, per_group) for value in values]).reshape(-1).cpu())

    parts = [_numbers(one) for one in spectrum.groups()]
    scale, singular = column([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    share = singular / singular.sum(-1, keepdim=True).clamp(min=1e-300)
    root = np.sqrt(np.maximum(scale, 0))  # rounding may leave a scale of zero below it
    trace = square = entropy = np.full(heads, np.nan)
    rho, names, shapes = np.full((heads, 1), np.nan), np.full(heads, ""), np.full(heads, "")
    if qk.square:
        trace, square = column([part[2] for part in parts]), column([part[3] for part in parts])
        temperature = 1 / abs(attention.scale)
        rho = gaussian_rho(trace, scale, square, process, temperature)
        shapes = np.asarray(regime(rho))
        names, entropy = independent_regimes(
            np.sign(attention.scale) * trace, square.clip(-scale, scale), scale, process.tokens, temperature
        )
    mean = trace / qk.d_model
    return {
        "module": attention.module,
        "kind": attention.kind,
        "layer": attention.layer,
        "head": np.arange(heads),
        "key_head": np.arange(heads) // per_group,
        "d_head": qk.d_head,
        "d_model": qk.d_model,
        "logit_scale": attention.scale,
        "trace": trace,
        "scale": scale,
        "trace_square": square,
        "xi": trace / np.maximum(root, 1e-300),
        "eta": root * attention.scale,
        "r": trace * attention.scale,
        "eigenvalue_mean": mean,
        "eigenvalue_variance": scale / qk.d_model - mean**2,
        "spectral_norm": column(list(singular[..., 0].split(1))),
        "effective_rank": column(list(torch.special.entr(share).sum(-1).exp().split(1))),
        "symmetric_share": 0.5 * (1 + square / np.maximum(scale, 1e-300)),
        "attention_regime": names,
        "attention_entropy": entropy,
        "regime": shapes,
        "rho_first": rho[:, 0],
        "rho_middle": rho[:, len(rho[0]) // 2],
        "rho_last": rho[:, -1],
        "rope": attention.rope is not None,
        "qk_norm": attention.query_norm is not None,
        "softcap": attention.softcap,
    }


def _numbers(qk: QK) -> tuple[Tensor, ...]:
    """Scale and singular values; trace and trace of the square, where they exist."""
    found = qk.scale(), _singular_values(qk)
    return (*found, qk.trace(), qk.trace_square()) if qk.square else found


def _singular_values(qk: QK) -> Tensor:
    """(G, R, K), descending, through the Gram matrices: absolute error about 1e-8 of the largest.

    With W_Q W_Qᵀ = U diag(s) Uᵀ, the squares are the eigenvalues of √s Uᵀ (W_K W_Kᵀ) U √s. It costs K × K
    decompositions where a QR of the factors would cost D × K ones.
    """
    gram_q, gram_k = (qk.w_q @ qk.w_q.mT).cpu(), (qk.w_k @ qk.w_k.mT).cpu()  # as `QK` does with small matrices
    values, vectors = torch.linalg.eigh(gram_q)
    root = vectors * values.clamp(min=0).sqrt()[..., None, :]
    squares: Tensor = torch.linalg.eigvalsh(root.mT @ gram_k @ root)
    return squares.clamp(min=0).sqrt().flip(-1)
