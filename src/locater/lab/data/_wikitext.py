"""WikiText-2 from the Hugging Face hub: three parquet files of one commit, checked against what they should hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

from locater.errors import LocaterError

CHECKSUMS = {
    "train": "a099527d7563ddf101d164cb2864b5c1ebfc65c130f460918f1b5df17839ae07",
    "valid": "2a23b4001c00c517d70c8df9facbc347948be921abd15b8f7fc51699896c81e0",
    "test": "ef995194d149bc9928197d8cae11613a46edf4356a4983561eeb4b198d870f7a",
}


def fetched(cache: Path | None) -> dict[str, list[Path]]:
    """The file of each split, from the hub or from what it left on this machine."""
    import_module("pyarrow.parquet")  # to read what comes, so asked for before anything is fetched
    hub = import_module("huggingface_hub")

    def fetch(split: str) -> Path:
        at = {
            "repo_id": "Salesforce/wikitext",
            "filename": f"wikitext-2-v1/{split}-00000-of-00001.parquet",
            "repo_type": "dataset",
            "revision": "b08601e04326c79dfdd32d625aee71d232d685c3",  # a commit: what was fetched once needs no network
        }
        known = hub.try_to_load_from_cache(**at)  # by whatever else uses the hub on this machine
        return Path(known if isinstance(known, str) else hub.hf_hub_download(**at, cache_dir=cache and cache / "hub"))

    names = {"train": "train", "valid": "validation", "test": "test"}
    files = {split: [fetch(name)] for split, name in names.items()}
    for split, (path,) in files.items():
        if sorted_checksum(parquet_lines(path)) != CHECKSUMS[split]:
            raise LocaterError(f"{path} is not the {split} text of WikiText-2; remove it, and it is fetched again")
    return files


def sorted_checksum(lines: Iterable[list[str]]) -> str:
    """Of the lines in the order of their code points: articles may stand in another order and be the same text."""
    return hashlib.sha256("\n".join(sorted(" ".join(words) for words in lines)).encode()).hexdigest()


def parquet_lines(path: Path) -> Iterator[list[str]]:
    try:
        table = import_module("pyarrow.parquet").read_table(path, columns=["text"])
    except Exception as error:  # as many classes as the hub's
        raise LocaterError(
            f"{path} is not the parquet file it should be; remove it, and it is fetched again"
        ) from error
    return (line.split() for line in table.column("text").to_pylist())  # a row a line, empty ones too
