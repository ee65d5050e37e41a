"""Checkpoints of other projects and trainers: other names, other orders of rows, float8, GGUF in parts."""

from __future__ import annotations

import functools
import json
import math
import random
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_scan import assert_same_table, write_gguf
from zoo import build

from locater import LocaterError, scan
from locater.models.checkpoint import open_checkpoint

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def state(llama):
    return {name: value.clone() for name, value in llama.state_dict().items()}


def stored(folder, llama, state, **config):
    """These tensors as safetensors beside the model's configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**llama.config.to_dict(), **config}))
    save_file(state, folder / "model.safetensors")
    return folder


# ---------------------------------------------------------------- what trainers save

SAVED = {
    "plain": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "model": lambda s: {"model": s, "optimizer": {"state": {0: {"step": torch.ones(1)}}}},
    "model_state_dict": lambda s: {"epoch": 1, "model_state_dict": s, "loss": 0.5},
    "nested twice": lambda s: {"state_dict": {"module": s}},
    "DDP": lambda s: {"model": {f"module.{name}": value for name, value in s.items()}},
    "compiled": lambda s: {"model": {f"_orig_mod.{name}": value for name, value in s.items()}},
    "DDP of compiled": lambda s: {f"module._orig_mod.{name}": value for name, value in s.items()},
    "compiled inside": lambda s: {name.replace("model.", "model._orig_mod.", 1): value for name, value in s.items()},
    "beside numbers": lambda s: {**s, "step": 7},
}


@pytest.mark.parametrize("name", SAVED)
def test_what_a_trainer_saved_is_the_model(name, llama, state, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama.config.to_dict()))
    torch.save(SAVED[name](state), tmp_path / "last.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "optimizer.pt")  # which is passed over
    assert_same_table(scan(tmp_path), scan(llama))
    assert_same_table(scan(tmp_path / "last.pt"), scan(llama))


def test_several_saved_states_in_a_folder_are_not_mixed(llama, state, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama.config.to_dict()))
    for epoch in (1, 2):
        torch.save(state, tmp_path / f"epoch{epoch}.pth")
    with pytest.raises(LocaterError, match="is in several files of"):
        scan(tmp_path)
    assert len(scan(tmp_path / "epoch2.pth")) == 8


def test_a_state_that_holds_itself_is_refused(tmp_path):
    loop = {}
    loop["model"] = loop
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(LocaterError, match="no state dict of tensors by name"):
        scan(tmp_path / "loop.pt")


# ---------------------------------------------------------------- Whisper, Llama and Mistral as their makers store them


def openai_names(state):
    """The inverse of transformers' own conversion script."""
    replaced = (
        ("model.", ""), (".layers.", ".blocks."), ("self_attn_layer_norm", "attn_ln"), ("self_attn", "attn"),
        ("encoder_attn_layer_norm", "cross_attn_ln"), ("encoder_attn", "cross_attn"), ("q_proj", "query"),
        ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"), ("final_layer_norm", "mlp_ln"), ("fc1", "mlp.0"),
        ("fc2", "mlp.2"), ("decoder.embed_tokens", "decoder.token_embedding"),
    )  # fmt: skip
    return {functools.reduce(lambda n, pair: n.replace(*pair), replaced, name): v for name, v in state.items()}


def test_openais_whisper_file_is_transformers_whisper(tmp_path):
    model = build("whisper")
    config = model.config
    dims = {
        "n_mels": 8, "n_vocab": 61, "n_audio_ctx": 20, "n_audio_state": config.d_model, "n_audio_layer": 2,
        "n_audio_head": config.encoder_attention_heads, "n_text_ctx": 32, "n_text_state": config.d_model,
        "n_text_layer": 2, "n_text_head": config.decoder_attention_heads,
    }  # fmt: skip
    names = openai_names(model.state_dict())
    assert "decoder.blocks.1.cross_attn.query.bias" in names
    torch.save({"dims": dims, "model_state_dict": names}, tmp_path / "tiny.pt")
    for options in ({}, {"fold_norm": True}):
        assert_same_table(scan(tmp_path / "tiny.pt", **options), scan(model, **options))
    torch.save({"dims": {**dims, "n_text_head": None}, "model_state_dict": names}, tmp_path / "tiny.pt")
    with pytest.raises(LocaterError, match="no whole number n_text_head"):
        scan(tmp_path / "tiny.pt")


def meta_state(llama):
    """Meta's names and rows: what transformers' conversion script turns into its own."""
    config = llama.config
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    made = {}
    for layer, block in enumerate(llama.model.layers):
        for letter in "qkvo":
            w = getattr(block.self_attn, f"{letter}_proj").weight.data
            if letter in heads:
                w = w.view(heads[letter], 2, len(w) // heads[letter] // 2, -1).transpose(1, 2).reshape(w.shape)
            made[f"layers.{layer}.attention.w{letter}.weight"] = w.contiguous()
        made[f"layers.{layer}.attention_norm.weight"] = block.input_layernorm.weight.data
        made[f"layers.{layer}.feed_forward.w2.weight"] = block.mlp.down_proj.weight.data
    return made


PARAMS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-6, "vocab_size": -1}


@pytest.mark.parametrize("shards", [1, 2])
def test_metas_folder_is_the_model_that_transformers_saved(llama, shards, tmp_path):
    parts = {name: w.chunk(shards) if "norm" not in name else [w] * shards for name, w in meta_state(llama).items()}
    for number in range(shards):
        shard = {name: w[number].clone() for name, w in parts.items()}
        torch.save(shard, tmp_path / f"consolidated.{number:02}.pth")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    for options in ({}, {"offset": -5}, {"fold_norm": True}):
        assert_same_table(scan(tmp_path, **options), scan(llama, **options))


def test_predicted_logits_are_those_of_metas_own_rotation(llama, tmp_path):
    """Meta's apply_rotary_emb: neighbours are complex numbers. W_QK at the offset must give the same."""
    weights = meta_state(llama)
    torch.save(weights, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    frequency = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones(7, 4), torch.arange(7)[:, None] * frequency)

    def rotated(w, heads):
        pairs = (x @ w.T).view(7, heads, 4, 2)
        return torch.view_as_real(torch.view_as_complex(pairs) * turn[:, None]).flatten(2)

    for attention in open_checkpoint(tmp_path).reading():
        q, k = (weights[f"layers.{attention.layer}.attention.w{letter}.weight"] for letter in "qk")
        keys = rotated(k, 2).repeat_interleave(2, 1)
        own = torch.einsum("ihk,jhk->hij", rotated(q, 4), keys) / math.sqrt(8)
        for i, j in ((6, 0), (3, 3), (5, 4)):
            w = attention.qk_at(float(j - i)).dense().flatten(0, 1)
            predicted = attention.scale * torch.einsum("d,hde,e->h", x[i], w, x[j])
            torch.testing.assert_close(predicted, own[:, i, j], rtol=1e-4, atol=1e-5)


def test_mistrals_consolidated_file_is_read_with_either_configuration(llama, tmp_path):
    save_file(meta_state(llama), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps({**PARAMS, "head_dim": 8, "rope_theta": 10000.0}))
    assert_same_table(scan(tmp_path, offset=-5), scan(llama, offset=-5))
    (tmp_path / "params.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(llama.config.to_dict()))
    assert_same_table(scan(tmp_path, offset=-5), scan(llama, offset=-5))


def test_llama_3_1_as_meta_stores_it_has_its_scaled_rope(llama, tmp_path):
    torch.save(meta_state(llama), tmp_path / "consolidated.00.pth")
    tables = []
    for more in ({}, {"use_scaled_rope": True}):
        (tmp_path / "params.json").write_text(json.dumps({**PARAMS, "rope_theta": 500000.0, **more}))
        tables.append(scan(tmp_path, offset=-5000))
    assert (tables[0]["trace"] != tables[1]["trace"]).all()
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(LocaterError, match="has no dim and n_heads"):
        scan(tmp_path)


# ---------------------------------------------------------------- float8 and other quantised weights


def quantised(w, rows, columns, dtype):
    """Codes and a scale for each block of so many rows and columns."""
    scales = torch.empty(math.ceil(len(w) / rows), math.ceil(w.shape[1] / columns))
    codes = torch.empty(w.shape, dtype=dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = w[block].abs().max() / torch.finfo(dtype).max
            codes[block] = (w[block] / scales[i, j]).to(dtype)
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("rows", "columns", "suffix", "shape"),
    [
        (12, 20, "weight_scale_inv", None),  # DeepSeek's, with blocks that are cut at the edges
        (32, 32, "weight_scale", ()),
        (32, 32, "weight_scale", (1,)),
        (1, 32, "weight_scale", (32, 1)),
        (1, 32, "weight_scale", (32,)),
    ],
)
def test_float8_is_what_its_codes_times_their_scales_are(llama, state, dtype, rows, columns, suffix, shape, tmp_path):
    codes, scales = quantised(state[f"{Q}.weight"], rows, columns, dtype)
    expected = torch.tensor(
        [[codes[i, j].item() * scales[i // rows, j // columns].item() for j in range(32)] for i in range(32)]
    )
    assert (expected - state[f"{Q}.weight"]).norm() < 0.2 * expected.norm()
    tensors = {**state, f"{Q}.weight": codes, f"{Q}.{suffix}": scales if shape is None else scales.reshape(shape)}
    method = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    folder = stored(tmp_path, llama, tensors, quantization_config=method)
    torch.testing.assert_close(open_checkpoint(folder).get(f"{Q}.weight"), expected)
    assert len(scan(folder)) == 8


def code(state):
    return state[f"{Q}.weight"].to(torch.float8_e4m3fn)


REFUSED = {
    "GPTQ": (lambda _: {f"{Q}.qweight": torch.ones(4, 32, dtype=torch.int32)}, r"q_proj\.qweight in .* is quantised"),
    "bitsandbytes 4 bits": (
        lambda _: {f"{Q}.weight": torch.ones(512, 1, dtype=torch.uint8), f"{Q}.weight.absmax": torch.ones(16)},
        "is quantised",
    ),
    "bitsandbytes 8 bits": (
        lambda s: {f"{Q}.weight": s[f"{Q}.weight"].to(torch.int8), f"{Q}.SCB": torch.ones(32)},
        "is quantised",
    ),
    "packed": (lambda _: {f"{Q}.weight_packed": torch.ones(32, 4, dtype=torch.int32)}, "is quantised"),
    "bytes": (lambda _: {f"{Q}.weight": torch.ones(32, 16, dtype=torch.uint8)}, "is torch.uint8, whose scales"),
    "float8 alone": (lambda s: {f"{Q}.weight": code(s)}, "is float8 and has no"),
    "scales of another shape": (
        lambda s: {f"{Q}.weight": code(s), f"{Q}.weight_scale_inv": torch.ones(3, 5)},
        r"has shape \(32, 32\), but scales \(3, 5\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_quantised_otherwise_are_refused_with_what_to_do(llama, state, name, tmp_path):
    make, says = REFUSED[name]
    tensors = {own: value for own, value in state.items() if own != f"{Q}.weight"} | make(state)
    folder = stored(tmp_path, llama, tensors, quantization_config={"quant_method": "x"})
    with pytest.raises(LocaterError, match=says) as failure:
        scan(folder)
    assert "\n" not in str(failure.value)
    assert "16-bit" in str(failure.value) or "scales (" in str(failure.value)


def test_quantised_experts_beside_attention_that_is_not_are_no_hindrance(llama, state, tmp_path):
    experts = {"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.ones(2, 4, 16, dtype=torch.uint8)}
    folder = stored(tmp_path, llama, {**state, **experts}, quantization_config={"quant_method": "mxfp4"})
    assert_same_table(scan(folder), scan(llama))


# ---------------------------------------------------------------- GGUF


def test_a_gguf_in_parts_is_opened_by_the_name_of_any(llama, tmp_path, monkeypatch):
    import gguf

    monkeypatch.setattr(gguf, "GGUFWriter", functools.partial(gguf.GGUFWriter, split_max_tensors=2))
    write_gguf(llama, tmp_path / "model.gguf")
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for path in (tmp_path, parts[0], parts[2]):
        assert_same_table(scan(path, offset=-5), scan(llama, offset=-5))
    parts[1].unlink()
    with pytest.raises(LocaterError, match="lacks model-00002-of-00003"):
        scan(parts[0])
    parts[0].rename(tmp_path / "part.gguf")
    with pytest.raises(LocaterError, match="2 GGUF files; name the one"):
        scan(tmp_path)
    with pytest.raises(LocaterError, match="one part of a split file"):
        scan(tmp_path / "part.gguf")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A file with words, merges, arrays of numbers and every kind of scalar, and tensors of several types."""
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "words.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"word {n} ü" for n in range(3000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    writer.add_array("llama.rope.sections", [1, 2, 3])
    for kind in ("uint8", "int8", "uint16", "int16", "int32", "uint64", "int64", "float32", "float64"):
        getattr(writer, f"add_{kind}")(f"test.{kind}", 3)
    writer.add_bool("test.bool", True)
    writer.add_embedding_length(64)
    writer.add_head_count(2)
    writer.add_block_count(1)
    values = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    for name, kind in (("attn_q", "Q4_1"), ("attn_k", "Q8_0"), ("attn_q_norm", "BF16"), ("attn_norm", "F16")):
        kind = gguf.GGMLQuantizationType[kind]
        coded = gguf.quants.quantize(values, kind) if kind.name != "F16" else values.astype(np.float16)
        writer.add_tensor(f"blk.0.{name}.weight", coded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_header_is_read_as_llama_cpps_own_package_reads_it(vocabulary):
    import gguf

    from locater.models.gguf import _Header

    reader, header = gguf.GGUFReader(vocabulary), _Header(vocabulary)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    ours = dict(header.fields)
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores"):
        assert ours.pop(name) is None
        assert theirs.pop(name)
    assert ours == theirs
    assert len(header.tensors) == len(reader.tensors) == 4
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(header.load(tensor.name).numpy(), expected)


def test_weights_of_a_kind_that_gguf_cannot_read_are_one_sentence(tmp_path):
    import gguf

    from locater.models.gguf import _Header

    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.ones((64, 64), np.int32), raw_dtype=gguf.GGMLQuantizationType.I32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LocaterError, match=r"blk\.0\.attn_q\.weight in .* cannot be dequantised: .*I32"):
        _Header(tmp_path / "whole.gguf").load("blk.0.attn_q.weight")


def test_a_cut_or_damaged_gguf_header_is_one_sentence(vocabulary, tmp_path):
    raw = vocabulary.read_bytes()
    rng = random.Random(0)
    end = raw.rindex(b"blk.0") + 80
    damaged = [raw[:at] for at in (0, 3, 10, 24, 30, 500, end // 2, end - 60, len(raw) - 100)]
    huge = [struct.pack("<Q", n) for n in (2**40, 2**63, 2**64 - 1)]
    at = raw.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8  # the count of words
    damaged += [raw[:where] + value + raw[where + 8 :] for value in huge for where in (8, 16, 24, at, at + 8)]
    for _ in range(150):
        where = rng.choice((rng.randrange(200), rng.randrange(end - 1200, end)))
        damaged.append(raw[:where] + bytes([rng.randrange(256)]) + raw[where + 1 :])
    path = tmp_path / "damaged.gguf"
    refused = [told for content in damaged if (told := refusal(path, content)) is not None]
    assert len(refused) > 60
    assert all("\n" not in told and len(told) < 500 for told in refused)


def refusal(path, content):
    """What is said of a file, or None if every tensor could be read."""
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names:
            checkpoint.get(name)
    except LocaterError as error:
        return str(error)
    return None
