"""The doctor on small models of several classes, which differ in where W_O is, in biases, caps, norms and halves."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers as tf
from torch import nn

from locater import LocaterError, doctor
from locater.measure.doctor import DEAD, LOGITS, NOT_FINITE, TEXT, TOKENS, TREATMENTS, UNIFORM
from locater.models import attentions

WORDS = 64
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": WORDS}


def gpt2(**options):
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_head=4, vocab_size=WORDS, n_positions=64, **options))


def bert():
    return tf.BertModel(tf.BertConfig(**SMALL, intermediate_size=64, initializer_range=0.25))


def llama():
    config = tf.LlamaConfig(**SMALL, num_key_value_heads=4, intermediate_size=64, initializer_range=0.25)
    return tf.LlamaForCausalLM(config)


def opt():
    config = tf.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, init_std=0.25, max_position_embeddings=64)
    return tf.OPTForCausalLM(config)


def gemma2():
    config = tf.Gemma2Config(
        **SMALL, num_key_value_heads=4, head_dim=8, intermediate_size=64, query_pre_attn_scalar=8,
        attn_implementation="eager", initializer_range=0.25,
    )  # fmt: skip
    return tf.Gemma2ForCausalLM(config)


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, decoder_start_token_id=0))


class Encoder(nn.Module):
    """torch's own."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)
        with torch.no_grad():
            for layer in self.layers.layers:
                layer.self_attn.in_proj_weight.normal_(0, 0.25)
                layer.self_attn.out_proj.weight.normal_(0, 0.25)

    def forward(self, ids, src_key_padding_mask=None):
        return self.layers(self.words(ids), src_key_padding_mask=src_key_padding_mask)


MODELS = {
    "gpt2": lambda: gpt2(n_layer=3, initializer_range=0.2), "bert": bert, "llama": llama, "opt": opt, "gemma2": gemma2,
    "t5": t5, "torch": Encoder,
}  # fmt: skip


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    return {name: make() for name, make in MODELS.items()}


@pytest.fixture
def patient(made):
    """A copy to make sick, and batches."""

    def of(name):
        ids = torch.randint(2, WORDS, (8, 32), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "labels": ids} if name == "t5" else ids
        return copy.deepcopy(made[name]).eval(), [batch]

    return of


def found(diagnosis):
    return {(one.kind, one.module, one.heads) for one in diagnosis.findings}


def weights_of(name, model, layer):
    """W_V and W_O of a layer as modules: None where W_V is a part of another."""
    if name == "gpt2":
        return None, model.transformer.h[layer].attn.c_proj
    if name == "bert":
        block = model.encoder.layer[layer].attention
        return block.self.value, block.output.dense
    if name == "t5":
        attention = model.encoder.block[layer].layer[0].SelfAttention
        return attention.v, attention.o
    if name == "torch":
        return None, model.layers.layers[layer].self_attn.out_proj
    attention = (model.model.decoder if name == "opt" else model.model).layers[layer].self_attn
    return attention.v_proj, attention.out_proj if name == "opt" else attention.o_proj


def module_of(name, layer):
    return {
        "gpt2": f"transformer.h.{layer}.attn", "bert": f"encoder.layer.{layer}.attention.self",
        "llama": f"model.layers.{layer}.self_attn", "gemma2": f"model.layers.{layer}.self_attn",
        "opt": f"model.decoder.layers.{layer}.self_attn", "t5": f"encoder.block.{layer}.layer.0.SelfAttention",
        "torch": f"layers.layers.{layer}.self_attn",
    }[name]  # fmt: skip


# ---------------------------------------------------------------------- healthy


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_wrong_before_they_are_made_sick(patient, name):
    diagnosis = doctor(*patient(name))
    assert diagnosis.healthy, diagnosis.sentences()
    assert (diagnosis.layers["output"] > 0.05).all()


@pytest.mark.parametrize(
    "model",
    [
        lambda: gpt2(n_layer=24),  # W_O of std 0.02/√(2·24)
        lambda: tf.BertModel(tf.BertConfig(**SMALL, intermediate_size=64)),
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, intermediate_size=64)),
    ],
)
@pytest.mark.parametrize("sequences", [1, 8])
def test_a_model_that_has_not_been_trained_is_not_dead(model, sequences):
    torch.manual_seed(0)
    diagnosis = doctor(model(), torch.randint(0, WORDS, (sequences, 64)))
    assert {one.kind for one in diagnosis.findings} <= {UNIFORM}


# ---------------------------------------------------------------------- dead


@pytest.mark.parametrize("name", MODELS)
def test_w_o_of_zero_is_dead_attention_even_where_its_bias_is_left(patient, name):
    model, batches = patient(name)
    _, w_o = weights_of(name, model, 1)
    with torch.no_grad():
        w_o.weight.zero_()
        if w_o.bias is not None:
            w_o.bias.normal_()
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(DEAD, module_of(name, 1), ())}
    assert diagnosis.findings[0].sure
    assert "the same for every token" in diagnosis.sentences()[0]


@pytest.mark.parametrize("name", ["gpt2", "bert", "opt"])
def test_w_v_of_zero_is_dead_attention_even_where_its_bias_is_left(patient, name):
    model, batches = patient(name)
    w_v, _ = weights_of(name, model, 1)
    with torch.no_grad():
        if w_v is None:
            model.transformer.h[1].attn.c_attn.weight[:, 64:] = 0
            model.transformer.h[1].attn.c_attn.bias[64:] = 1
        else:
            w_v.weight.zero_()
            w_v.bias.normal_()
    assert found(doctor(model, batches)) == {(DEAD, module_of(name, 1), ())}


def test_most_layers_can_be_dead(patient):
    model, batches = patient("llama")
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 1e-6
    assert found(doctor(model, batches)) == {(DEAD, module_of("llama", layer), ()) for layer in (1, 2)}


def test_the_advice_for_a_dead_layer_prints_its_w_o_too(patient):
    model, batches = patient("bert")
    with torch.no_grad():
        model.encoder.layer[1].attention.output.dense.weight.zero_()
    (one,) = doctor(model, batches).findings
    printed = []
    exec(one.treatment.code, {"model": model, "print": printed.append})
    assert "encoder.layer.1.attention.output.dense.weight" in [name for name, norm in printed[0].items() if norm == 0]


def test_padded_sequences_of_torchs_own_layers_are_examined(patient):
    model, (ids,) = patient("torch")
    padding = torch.zeros(8, 32, dtype=torch.bool)
    padding[2:, 20:] = True
    fast = torch.backends.mha.get_fastpath_enabled()
    assert doctor(model, {"ids": ids, "src_key_padding_mask": padding}).healthy
    assert torch.backends.mha.get_fastpath_enabled() == fast


# ---------------------------------------------------------------------- logits


@pytest.mark.parametrize("factor", [30.0, 300.0])
def test_logits_are_judged_before_a_softcap(patient, factor):
    model, batches = patient("gemma2")
    with torch.no_grad():
        attentions(model)[1].query.weight[2] *= factor
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(LOGITS, module_of("gemma2", 1), (2,))}
    assert diagnosis.heads["max_logit"].max() <= 50
    assert "before the softcap of 50" in diagnosis.sentences()[0]


def test_a_collapse_by_logits_far_below_zero_is_found(patient):
    model, batches = patient("gpt2")
    attention, (u,) = attentions(model)[1], nn.functional.normalize(torch.randn(1, 8))
    with torch.no_grad():
        attention.query.bias[2, 0], attention.key.bias[2, 0] = -200 * u, 40 * u
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(LOGITS, module_of("gpt2", 1), (2,))}
    assert "far below zero" in diagnosis.sentences()[0]


def test_that_all_logits_are_lower_by_one_number_is_no_sickness(patient):
    model, batches = patient("gpt2")
    attention, (u,) = attentions(model)[1], nn.functional.normalize(torch.randn(1, 8))
    with torch.no_grad():  # keys that differ only across u have one and the same product with it
        attention.query.bias[2, 0], attention.key.bias[2, 0] = -200 * u, 40 * u
        attention.key.weight[2, 0] -= u[:, None] * (u @ attention.key.weight[2, 0])
    diagnosis = doctor(model, batches)
    assert diagnosis.heads["max_logit"].min() < -1000
    assert diagnosis.healthy


def test_a_sharp_head_whose_scale_is_far_beyond_the_others_is_found_under_smaller_logits(patient):
    model, batches = patient("bert")
    with torch.no_grad():
        attentions(model)[1].query.weight[2] *= 9  # 81 times the scale
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(LOGITS, module_of("bert", 1), (2,))}
    assert diagnosis.heads["max_logit"].max() < 97
    assert "times the upper quartile of all heads" in diagnosis.sentences()[0]
    assert not diagnosis.findings[0].sure


def test_sharp_heads_among_idle_ones_are_no_sickness():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 100, "initializer_range": 0.25}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(num_hidden_layers=3, num_attention_heads=8, **sizes)).eval()
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight[:5] *= 0.1  # five of eight heads
    diagnosis = doctor(model, torch.randint(0, 100, (4, 48)))
    assert diagnosis.heads["entropy_share"].min() < 0.25
    assert diagnosis.heads["scale"].max() > 64 * diagnosis.heads["scale"].median()
    assert diagnosis.healthy


def test_perfectly_sharp_heads_everywhere_are_found(patient):
    model, batches = patient("llama")
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight.mul_(1e6)
    assert found(doctor(model, batches)) == {(LOGITS, module_of("llama", layer), (0, 1, 2, 3)) for layer in range(3)}


# ---------------------------------------------------------------------- not finite


@torch.no_grad()
def spoil(tensor):
    tensor.fill_(math.nan)


NAN = {
    "all embeddings": (lambda m: spoil(m.model.embed_tokens.weight), "model.embed_tokens", -1),
    "one token's embedding": (lambda m: spoil(m.model.embed_tokens.weight[7]), "model.embed_tokens", -1),
    "W_V of the first layer": (lambda m: spoil(m.model.layers[0].self_attn.v_proj.weight), "v_proj", 0),
    "W_O of the last layer": (lambda m: spoil(m.model.layers[2].self_attn.o_proj.weight), "o_proj", 2),
    "a norm": (lambda m: spoil(m.model.layers[1].input_layernorm.weight), "model.layers.1.input_layernorm", -1),
    "an MLP": (lambda m: spoil(m.model.layers[1].mlp.up_proj.weight), "model.layers.1.mlp.up_proj", -1),
}


@pytest.mark.parametrize("spoilt", NAN)
def test_of_numbers_that_are_not_finite_only_the_first_module_is_named(patient, spoilt):
    model, batches = patient("llama")
    make_sick, where, layer = NAN[spoilt]
    make_sick(model)
    assert 7 in batches[0]
    diagnosis = doctor(model, batches)
    (one,) = diagnosis.findings
    assert (one.kind, one.layer, one.heads, one.sure) == (NOT_FINITE, layer, (), True)
    assert one.module.endswith(where)
    assert f"in {one.module}: it is the first" in diagnosis.sentences()[0]
    printed = []
    exec(one.treatment.code, {"model": model, "print": printed.append})
    assert printed == [{f"{one.module}.weight": False}]


def test_heads_are_named_where_what_is_not_finite_begins_in_their_logits(patient):
    model, batches = patient("t5")
    spoil(attentions(model)[1].query.weight[2])
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(LOGITS, module_of("t5", 1), (2,))}
    assert "encoder layer 1, head 2: logits that are not finite" in diagnosis.sentences()[0]
    assert "follows from it" in diagnosis.sentences()[0]


# ---------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("encoder.block.1.layer.0.SelfAttention", "encoder layer 1, head 2:"),
        ("decoder.block.1.layer.0.SelfAttention", "decoder layer 1, head 2:"),
        ("decoder.block.1.layer.1.EncDecAttention", "cross-attention layer 1, head 2:"),
    ],
)
def test_layers_of_one_number_are_told_apart(patient, module, place):
    model, batches = patient("t5")
    with torch.no_grad():
        next(one for one in attentions(model) if one.module == module).query.weight[2] *= 1000
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(LOGITS, module, (2,))}
    assert place in diagnosis.sentences()[0]


def test_findings_are_in_the_order_the_modules_run(patient):
    model, batches = patient("t5")
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight[2] *= 1000
    modules = [one.module for one in doctor(model, batches).findings]
    assert [name.split(".")[0] for name in modules] == ["encoder"] * 2 + ["decoder"] * 4
    assert modules[2:4] == [f"decoder.block.0.layer.{n}" for n in ("0.SelfAttention", "1.EncDecAttention")]


# ---------------------------------------------------------------------- texts


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("length", [1, 32])
def test_a_text_without_variety_is_said_to_be_one(patient, name, length):
    model, _ = patient(name)
    diagnosis = doctor(model, [torch.full((8, length), 7)])
    assert [(one.kind, one.sure) for one in diagnosis.findings] == [(TEXT, True)]
    assert "in the text" in diagnosis.sentences()[0]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_embeddings_that_are_alike_are_one_finding(patient, name):
    model, batches = patient(name)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.copy_(table[5] + 1e-4 * torch.randn_like(table))
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(TOKENS, module_of(name, 0), ())}
    assert "look at the embeddings first" in diagnosis.sentences()[0]


def test_a_norm_of_zero_before_attention_makes_its_tokens_alike(patient):
    model, batches = patient("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.zero_()
    diagnosis = doctor(model, batches)
    assert found(diagnosis) == {(TOKENS, module_of("llama", 1), ())}
    assert diagnosis.findings[0].sure
    assert diagnosis.layers["output"][1] < 1e-6
    spoil(model.model.layers[1].self_attn.v_proj.weight)
    assert doctor(model, batches).findings[0].kind == NOT_FINITE


# ---------------------------------------------------------------------- what is given, and what is printed


@pytest.mark.bitwise
def test_a_batch_by_itself_is_one_batch(patient):
    model, (ids,) = patient("gpt2")
    assert doctor(model, ids).heads.equals(doctor(model, [ids]).heads)
    assert doctor(model, {"input_ids": ids}).healthy


def test_what_is_no_batches_or_no_log_is_one_sentence(patient, tmp_path):
    model, batches = patient("gpt2")
    for wrong in (None, 3, "text"):
        with pytest.raises(LocaterError, match="doctor takes batches to run the model on, a list of tensors"):
            doctor(model, wrong)
    with pytest.raises(LocaterError, match=r"cannot read .*nowhere\.jsonl"):
        doctor(model, batches, log=tmp_path / "nowhere.jsonl")
    with pytest.raises(LocaterError, match="log must be the file of an AttentionLog"):
        doctor(model, batches, log=[1])


@pytest.mark.parametrize("kind", TREATMENTS)
def test_the_code_that_is_printed_needs_only_a_model_and_its_optimizer(patient, kind):
    model, batches = patient("llama")
    code = TREATMENTS[kind].code.replace("MODULE", ".lm_head.")
    optimizer = torch.optim.AdamW(model.parameters())
    exec(code, {"model": model, "optimizer": optimizer, "batches": batches, "print": lambda *_: None})


@pytest.mark.compiled
def test_a_compiled_model_is_examined_as_it_was_before(patient):
    model, batches = patient("gpt2")
    plain = doctor(model, batches)
    compiled = doctor(torch.compile(model, backend="eager"), batches)
    assert compiled.layers["output"].tolist() == plain.layers["output"].tolist()
