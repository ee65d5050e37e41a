"""A trained model as transformers loads it, and a text in its tokens; what goes wrong with either, in one sentence."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from locater.errors import LocaterError, reason, require

if TYPE_CHECKING:
    import torch

__all__ = ["Pretrained", "device_of", "quiet"]


@dataclass(frozen=True)
class Pretrained:
    """A hub id, a folder, or a .gguf file; nothing is loaded until it is asked for."""

    name: str
    files: dict[str, Any]  # as keywords of transformers

    @classmethod
    def called(cls, name: str, revision: str | None = None) -> Pretrained:
        """Code that comes with a model is not run, nor asked about."""
        path = Path(name)
        common: dict[str, Any] = {"trust_remote_code": False}
        if path.exists() and revision is not None:
            raise LocaterError(f"{name} is on this machine and has no revision {revision}: leave --revision out")
        if path.is_dir():
            return cls(name, {"pretrained_model_name_or_path": str(path), **common})
        if path.is_file():
            if path.suffix != ".gguf":
                raise LocaterError(f"{name} is no model to run: give its folder, a .gguf file, or a hub id")
            require("gguf", "hf")
            return cls(name, {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, **common})
        if path.exists():
            raise LocaterError(f"{name} is a pipe or a device, not a model")
        if path.suffix == ".gguf" or path.is_absolute() or len(path.parts) > 2 or name.startswith("."):
            raise LocaterError(
                f"{name} does not exist; give a folder, a .gguf file, or a hub id like organisation/model"
            )
        plain, _, tag = name.partition("@")
        if tag and revision is not None:
            raise LocaterError(f"the revision is given twice, {tag} and {revision}")
        if tag or revision:
            common["revision"] = tag or revision
        if not _hub_has_an_address():
            common["local_files_only"] = True
        return cls(name, {"pretrained_model_name_or_path": plain, **common})

    def sequences(self, text: str, length: int, source: str) -> tuple[torch.Tensor, int]:
        """The text as (sequences, length) token ids, and how many at the end of each only frame it."""
        self._check_length(length)
        ids, suffix = _cut(self.name, self._tokenizer(), text, length, source)
        size = getattr(self._config.get_text_config(), "vocab_size", None)
        if isinstance(size, int) and int(ids.max()) >= size:
            raise LocaterError(
                f"the tokenizer of {self.name} gives token {int(ids.max())}, but the model has only {size}"
            )
        return ids, suffix

    def network(self, device: torch.device) -> tuple[Any, str]:
        """The model without its head; of an encoder and decoder the encoder, since a text is nothing to decode."""
        import torch
        import transformers

        dtype: Any = torch.float32 if device.type == "cpu" else "auto"
        options = {"config": self._config, "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        with _explained(f"{self.name} cannot be loaded"):
            network, info = transformers.AutoModel.from_pretrained(**self.files, **options)
            missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
            for name, stored, expected in info["mismatched_keys"]:
                raise LocaterError(
                    f"{name} is {tuple(stored)} in its weights and {tuple(expected)} by its configuration"
                )
            if missing:  # transformers fills them with random numbers
                raise LocaterError(f"its weights lack {', '.join(missing[:3])}{' and others' if missing[3:] else ''}")
            whole = network.to(device).eval()
            if network.config.is_encoder_decoder:
                return whole.get_encoder(), "encoder"
        return whole, ""

    @cached_property
    def _config(self) -> Any:
        import transformers

        with _explained(f"{self.name} cannot be loaded"):
            return transformers.AutoConfig.from_pretrained(**self.files)

    def _check_length(self, length: int) -> None:
        longest = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        if isinstance(longest, int) and 0 < longest < length:
            raise LocaterError(f"--length {length} is more than {self.name} takes, which is {longest} tokens")

    def _tokenizer(self) -> Any:
        import transformers

        wanted = f"{self.name} has no tokenizer that can be loaded, as from a tokenizer.json beside its weights"
        with _explained(wanted):
            tokenizer = transformers.AutoTokenizer.from_pretrained(**self.files, config=self._config)
            # without files, transformers makes one that knows special tokens alone
            if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
                raise LocaterError("its vocabulary is empty")
        return tokenizer


def _hub_has_an_address() -> bool:
    """Whether its name can be resolved; without, the hub's library would ask for every file for half a minute."""
    host = urlsplit(require("huggingface_hub", "hf").constants.ENDPOINT).hostname
    if "https" in getproxies():  # which resolves it
        return True
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def _cut(model: str, tokenizer: Any, text: str, length: int, source: str) -> tuple[torch.Tensor, int]:
    import torch

    prefix, suffix = _frame(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    inner = length - len(prefix) - len(suffix)
    if inner < 1:
        raise LocaterError(
            f"--length {length} leaves no room for text beside the {length - inner} special tokens of {model}"
        )
    count = len(ids) // inner
    if count == 0:
        raise LocaterError(
            f"{source} is {len(ids)} tokens long for {model}, and one sequence takes {inner} of them: "
            f"give more text or a smaller --length"
        )
    body = torch.tensor(ids[: count * inner]).view(count, inner)
    first, last = (torch.tensor(part, dtype=body.dtype).expand(count, -1) for part in (prefix, suffix))
    return torch.cat([first, body, last], 1), len(suffix)


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    framed, bare = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (True, False))
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def device_of(name: str | None) -> torch.device:
    """The device of this name; without one a GPU, if there is any."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise LocaterError(f"cannot run on the device {name!r}: {reason(error)}") from error
    return device


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and remarks of transformers, which would end up between ours."""
    from transformers.utils import logging as remarks

    level, bars = remarks.get_verbosity(), remarks.is_progress_bar_enabled()
    remarks.set_verbosity(logging.ERROR)
    remarks.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        remarks.set_verbosity(level)
        if bars:
            remarks.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Loading fails in many ways, with errors of many libraries; one sentence of each will do."""
    try:
        yield
    except Exception as error:
        raise LocaterError(f"{what}: {reason(error).removesuffix(' from one of:')}") from error
