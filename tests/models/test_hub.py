"""Models on the hub: only what is loaded is fetched, from one commit; whatever a server gets wrong is one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct

import numpy as np
import pytest
import torch
from hub_server import COMMIT, Hub, serving
from huggingface_hub.utils import close_session
from zoo import build

from locater import LocaterError, scan
from locater.models import hub as hub_module
from locater.models.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    llama.save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """A Llama in several files on a server; requests carry nothing but what they ask for."""
    shutil.copytree(saved, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 20)
    monkeypatch.setattr(hub_module, "_AROUND", 0)
    monkeypatch.setattr(hub_module, "_PAUSE", 0.01)
    with serving(Hub(tmp_path / "model")) as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.endpoint)
        address = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address)
        yield served
    close_session()


def tensor_requests(hub):
    return [each for each in hub.asked if each[0].endswith(".safetensors") and each[1] > 0]


def test_a_model_on_the_hub_gives_the_live_models_table_from_its_queries_and_keys(hub, llama):
    checkpoint = open_checkpoint("org/model")
    np.testing.assert_allclose(scan(checkpoint, offset=-3)["trace"], scan(llama, offset=-3)["trace"], rtol=1e-6)
    wanted = [p for n, p in llama.named_parameters() if "q_proj" in n or "k_proj" in n or "input_layernorm" in n]
    assert sum(stop - start for _, start, stop in tensor_requests(hub)) == sum(4 * p.numel() for p in wanted)
    fetched, total = checkpoint.traffic()
    assert fetched == hub.sent
    assert total == sum(path.stat().st_size for path in hub.folder.glob("*.safetensors"))
    assert all(COMMIT in path for path, _ in hub.addresses if "/resolve/" in path)


def test_of_other_layers_nothing_is_fetched(hub, llama):
    table = scan("org/model", layers=[1])
    assert set(table["layer"]) == {1}
    np.testing.assert_allclose(table["trace"], scan(llama, layers=[1])["trace"], rtol=1e-6)
    assert len(tensor_requests(hub)) == 3  # queries, keys and the norm
    with pytest.raises(LocaterError, match="no attention module is in the layers"):
        scan("org/model", layers=[7])


def test_small_neighbours_come_with_one_request(hub, llama, monkeypatch):
    monkeypatch.setattr(hub_module, "_AROUND", 2**17)
    scan("org/model")
    shards = len(list(hub.folder.glob("*.safetensors")))
    assert len(tensor_requests(hub)) <= shards
    before = len(hub.asked)
    checkpoint = open_checkpoint("org/model")
    name = "model.layers.0.self_attn.q_proj.weight"
    loaded = checkpoint.load(name)
    torch.testing.assert_close(loaded, llama.get_parameter(name).data)
    assert checkpoint.load(name) is loaded
    assert len(hub.asked) - before == 4  # the configuration, the index, a header, a tensor


def test_a_revision_and_a_single_file_whose_sizes_are_not_listed(hub, llama):
    for path in hub.folder.glob("*.safetensors*"):
        path.unlink()
    llama.save_pretrained(hub.folder)
    hub.sizes = False
    np.testing.assert_allclose(scan(f"org/model@{COMMIT}")["trace"], scan(llama)["trace"], rtol=1e-6)


def test_a_token_opens_a_gated_model_and_stays_with_the_hub(hub, llama, monkeypatch):
    hub.token = "hf_secret"
    with pytest.raises(LocaterError, match=r"gated.*accept its terms at http.*/org/model.*HF_TOKEN") as failure:
        scan("org/model")
    assert "\n" not in str(failure.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert len(scan("org/model")) == len(scan(llama))
    away = [given for path, given in hub.addresses if path.startswith("/cdn/")]
    assert away
    assert not any(away)


def test_a_complete_snapshot_in_the_cache_is_used_without_the_network(hub, llama, tmp_path):
    place = tmp_path / "cache" / "models--org--model"
    snapshot = place / "snapshots" / COMMIT
    llama.save_pretrained(snapshot)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    np.testing.assert_allclose(scan("org/model")["trace"], scan(llama)["trace"])
    assert not hub.addresses
    os.remove(snapshot / "model.safetensors")  # as after loading a configuration only
    np.testing.assert_allclose(scan("org/model")["trace"], scan(llama)["trace"])
    assert hub.addresses


def refuse_ranges(answer):
    if answer.file.endswith(".safetensors"):
        answer.status = 200


def test_whole_files_are_fetched_where_ranges_are_refused(hub, llama):
    hub.fault = refuse_ranges
    np.testing.assert_allclose(scan("org/model")["trace"], scan(llama)["trace"], rtol=1e-6)
    sent = hub.sent
    np.testing.assert_allclose(scan("org/model")["trace"], scan(llama)["trace"], rtol=1e-6)
    assert hub.sent - sent < sent / 2  # what is in the cache is not fetched again


def test_whole_files_are_fetched_where_there_are_no_safetensors(hub, llama):
    for path in hub.folder.glob("*.safetensors*"):
        path.unlink()
    (hub.folder / "onnx").mkdir()  # what is in folders is not the model
    shutil.copy(hub.folder / "config.json", hub.folder / "onnx" / "model.safetensors")
    torch.save(llama.state_dict(), hub.folder / "pytorch_model.bin")
    np.testing.assert_allclose(scan("org/model")["trace"], scan(llama)["trace"], rtol=1e-6)


def test_an_answer_that_fails_once_is_asked_for_again(hub, llama):
    failed = []

    def once(answer):
        if answer.start > 0 and not failed:
            failed.append(answer.file)
            answer.status = 503

    hub.fault = once
    assert len(scan("org/model")) == len(scan(llama))
    assert failed


# ---------------------------------------------------------------- what servers get wrong


def tensors_only(change):
    """A fault of requests for tensors, after the headers."""
    return lambda answer: change(answer) if answer.start > 0 and answer.file.endswith(".safetensors") else None


def shorter(answer):
    answer.stop -= 4


def longer(answer):
    answer.extra = b"more"


def elsewhere(answer):
    answer.headers["Content-Range"] = f"bytes {answer.start + 8}-{answer.stop + 7}/{answer.size}"


def another_size(answer):
    answer.headers["Content-Range"] = f"bytes {answer.start}-{answer.stop - 1}/{answer.size + 9}"


def untold(answer):
    del answer.headers["Content-Range"]


def interrupted(answer):
    answer.cut = 100


def changed(answer):
    answer.headers["X-Linked-Etag"] = '"another"'


def other_commit(answer):
    answer.headers["X-Repo-Commit"] = "d" * 40


def slow(answer):
    answer.wait = 1.2


def gone(answer):
    answer.status = 404


def forbidden(answer):
    answer.status = 403


def broken(answer):
    answer.status = 500


def nothing_there(answer):
    answer.status = 416


FAULTS = {
    shorter: "stopped after .* bytes",
    longer: "sent more of model-0000.*safetensors of org/model than",
    elsewhere: r"was asked for bytes .* and answered with 'bytes",
    another_size: r"was asked for bytes .* and answered with 'bytes",
    untold: "answered with ''",
    interrupted: "could not be fetched from the hub",
    changed: "changed while it was read; scan it again",
    other_commit: "changed while it was read; scan it again",
    refuse_ranges: "stopped answering requests for parts",
    slow: "no answer within 1 seconds.*HF_HUB_DOWNLOAD_TIMEOUT",
    gone: "it is not there",
    forbidden: "accept its terms",
    broken: "status 500",
    nothing_there: "status 416",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_server_that_gets_it_wrong_is_one_sentence(hub, fault, monkeypatch):
    if fault is slow:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
        monkeypatch.setattr(hub_module, "_ATTEMPTS", 1)
    if fault in (changed, other_commit):  # the redirect comes first, and says what the content is
        monkeypatch.setattr(Hub, "_head", staticmethod(changing(Hub._head, fault)))
    else:
        hub.fault = tensors_only(fault)
    with pytest.raises(LocaterError, match=FAULTS[fault]) as failure:
        scan("org/model")
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) < 400


def changing(head, fault):
    """The header of the third file that is redirected, and of all after it, as `fault` changes it."""
    seen = []

    def changed_head(request, status, headers):
        if status == 302:
            seen.append(headers["Location"])
            if seen.count(headers["Location"]) > 1:
                answer = type("Redirect", (), {"headers": headers})
                fault(answer)
        head(request, status, headers)

    return changed_head


def test_what_the_hub_does_not_have_is_one_sentence(hub):
    for name in ("org/other", "org/model@v9"):
        with pytest.raises(LocaterError, match=r"could not be fetched from the hub: it is not there") as failure:
            open_checkpoint(name)
        assert "\n" not in str(failure.value)
    (hub.folder / "config.json").unlink()
    with pytest.raises(LocaterError, match="no config"):
        open_checkpoint("org/model")


def header_of(change):
    def rewritten(raw):
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        names = [name for name in header if name != "__metadata__"]
        change(header, names)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    return rewritten


def set_entry(key, value):
    return header_of(lambda header, names: header[names[0]].__setitem__(key, value))


def overlapping(header, names):
    header["other"] = header[names[0]]


DAMAGED = {
    "longer than the file": (lambda raw: struct.pack("<Q", 10**7) + raw[8:], "by its own count"),
    "2**63 bytes": (lambda raw: struct.pack("<Q", 2**63) + raw[8:], "by its own count"),
    "empty": (lambda _: b"", "could not be fetched|was asked for|by its own count"),
    "five bytes": (lambda raw: raw[:5], "by its own count"),
    "no JSON": (lambda raw: raw[:8] + b"{" * 40 + raw[48:], "as JSON"),
    "a list": (lambda raw: struct.pack("<Q", 2) + b"[]" + raw[10:], "should hold a JSON object"),
    "overlapping": (header_of(overlapping), "its tensors overlap"),
    "beyond the end": (set_entry("data_offsets", [0, 10**9]), "does not fit into the file"),
    "backwards": (set_entry("data_offsets", [8, 0]), "does not fit into the file"),
    "negative": (set_entry("data_offsets", [-8, 0]), "does not fit into the file"),
    "three offsets": (set_entry("data_offsets", [0, 4, 8]), "does not fit into the file"),
    "another shape": (set_entry("shape", [3, 5]), "does not fit into the file"),
    "a shape of words": (set_entry("shape", ["a"]), "does not fit into the file"),
    "a type that is a list": (set_entry("dtype", []), "does not fit into the file"),
    "no entry": (header_of(lambda header, names: header.__setitem__(names[0], 7)), "does not fit into the file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_one_sentence(hub, name):
    change, says = DAMAGED[name]
    for path in hub.folder.glob("*.safetensors"):
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(LocaterError, match=says) as failure:
        scan("org/model")
    assert "\n" not in str(failure.value)


def test_an_index_that_names_what_its_file_does_not_hold_is_refused(hub):
    path = hub.folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.0.self_attn.q_proj.weight"
    index["weight_map"][name] = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])
    path.write_text(json.dumps(index))
    with pytest.raises(LocaterError, match=f"has no {re.escape(name)}"):
        scan("org/model")
    index["weight_map"][name] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(LocaterError, match="is no file or folder inside"):
        scan("org/model")


def test_the_command_says_how_much_was_fetched_and_writes_nothing_after_a_failure(hub, tmp_path, capfd):
    from locater.cli import main

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(["scan", "org/model", *arguments])
        return leaving.value.code, *capfd.readouterr()

    code, out, _ = run("--layers", "0,5-7", "--csv", "s.csv")
    assert code == 0
    assert re.match(r"fetched \S+ kB of 79.94 kB\n", out)
    assert (tmp_path / "s.csv").read_text().count("\n") == 5
    hub.fault = tensors_only(gone)
    code, _, error = run("--json", "b.json")
    assert code == 2
    assert error.count("\n") == 1
    assert not (tmp_path / "b.json").exists()
    for layers in ("a", "3-1", "", "-2", "1,,2"):
        assert run("--layers", layers)[0] == 2
