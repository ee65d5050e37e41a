"""What the doctor takes a sickness to come from: the weights, the type of number, or the text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from locater import doctor
from locater.cli import app
from locater.measure.doctor import DEAD, LOGITS, NOT_FINITE, TEXT, TOKENS, TRAINING
from locater.models import attentions

WORDS = 64
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": WORDS}
ENGLISH = Path(__file__).parents[2] / "docs" / "idea.md"


def llama(**options):
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(**SMALL, num_key_value_heads=4, intermediate_size=64, initializer_range=0.25, **options)
    ).eval()


def opt():
    torch.manual_seed(0)
    config = tf.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, init_std=0.25, max_position_embeddings=64)
    return tf.OPTForCausalLM(config).eval()


def bert():
    torch.manual_seed(0)
    return tf.BertModel(tf.BertConfig(**SMALL, intermediate_size=64, initializer_range=0.25)).eval()


@pytest.fixture
def ids():
    return torch.randint(3, WORDS, (8, 32), generator=torch.Generator().manual_seed(1))


def found(diagnosis):
    return {(one.kind, one.layer, one.heads) for one in diagnosis.findings}


def printed(code, model):
    """What the code prints where it is given nothing but a model."""
    lines = []
    exec(code, {"model": model, "print": lines.append})
    return lines[0] if lines else None


# ---------------------------------------------------------------------- logits, as softmax sees them


@torch.no_grad()
def with_constant(model, constant):
    """One number added to all logits of head 2 of layer 1: by a direction in which keys differ no longer."""
    attention, u = attentions(model)[1], functional.normalize(torch.arange(1.0, 9.0), dim=0)
    attention.key.weight[2, 0] -= u[:, None] * (u @ attention.key.weight[2, 0])
    attention.query.bias[2, 0] = u * abs(constant)
    attention.key.bias[2, 0] = u * math.copysign(8**0.5, constant)
    return model


@pytest.mark.parametrize("constant", [2000.0, -2000.0])
def test_one_number_added_to_all_logits_of_a_head_changes_nothing(ids, constant):
    plain, moved = (doctor(with_constant(opt(), c), ids) for c in (1e-9, constant))
    entropies = [one.heads.query("layer == 1 and head == 2")["entropy"].item() for one in (plain, moved)]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-3)
    assert moved.heads["max_logit"].abs().max() > 1000
    assert plain.healthy
    assert moved.healthy, moved.sentences()


def test_logits_so_large_that_no_head_stands_out_are_sure_by_the_softmax_law(ids):
    model = llama()
    with torch.no_grad():
        for attention in attentions(model):
            attention.query.weight.mul_(1e4)
    diagnosis = doctor(model, ids)
    assert found(diagnosis) == {(LOGITS, layer, (0, 1, 2, 3)) for layer in range(3)}
    assert all(one.sure for one in diagnosis.findings)
    assert "the softmax law expects of such weights" in diagnosis.sentences()[0]


def test_a_sharp_head_of_large_logits_whose_weights_are_like_the_others_is_likely_at_most(ids):
    model = with_constant(opt(), 2000.0)
    with torch.no_grad():
        attentions(model)[1].query.weight[2] *= 7  # sharp, and 49 times the scale
    diagnosis = doctor(model, ids)
    assert diagnosis.heads.query("layer == 1 and head == 2")["entropy_share"].item() < 0.25
    assert found(diagnosis) == {(LOGITS, 1, (2,))}
    assert not diagnosis.findings[0].sure


# ---------------------------------------------------------------------- not finite


def overflow_of_a_weight():
    model = opt()
    with torch.no_grad():
        model.model.decoder.layers[1].fc2.weight[3] = -60000.0
    return model


def overflow_of_the_residual():
    model = llama(mlp_bias=True)
    with torch.no_grad():
        for layer in model.model.layers[:2]:
            layer.mlp.down_proj.bias[3] = -65000.0
    return model


@pytest.mark.parametrize(
    ("make", "module"),
    [(overflow_of_a_weight, "model.decoder.layers.1.fc2"), (overflow_of_the_residual, "model.layers.1")],
)
def test_an_overflow_to_minus_infinity_is_named_where_it_begins_and_by_its_type_of_number(ids, make, module):
    diagnosis = doctor(make().half(), ids)
    one, sentence = diagnosis.findings[0], diagnosis.sentences()[0]
    assert (one.kind, one.module, one.sure) == (NOT_FINITE, module, True)
    assert "its weights are all finite: what it computes overflows float16" in sentence
    assert "run it in bfloat16 or float32" in sentence
    assert "checkpoint" not in sentence
    model = make().half()
    exec(one.treatment.code, {"model": model})
    assert not [one for one in doctor(model, ids).findings if one.kind == NOT_FINITE]


def test_a_mask_among_the_buffers_of_a_module_is_no_weight_that_is_not_finite(ids):
    model = overflow_of_the_residual()
    model.model.layers[1].register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    assert "its weights are all finite" in doctor(model.half(), ids).sentences()[0]
    model.model.layers[1].mask.fill_(math.nan)
    (one, *_) = doctor(model.half(), ids).findings
    assert "finite:" not in one.evidence
    assert printed(one.treatment.code, model)["model.layers.1.mask"] is False


def test_what_overflows_in_float32_has_weights_that_are_too_large(ids):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 1e38
    (one,) = doctor(model, ids).findings
    assert one.module == "model.layers.1.mlp.down_proj"
    assert "its weights are all finite: what it computes overflows float32" in one.evidence
    assert "bfloat16" not in one.treatment.advice
    assert printed(one.treatment.code, model) == {"model.layers.1.mlp.down_proj.weight": pytest.approx(1e38, rel=1)}


def test_numbers_that_enter_the_model_not_finite_are_not_blamed_on_its_weights():
    model, x = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2), torch.randn(8, 9, 32)
    x[0, 3] = math.nan
    (one,) = doctor(model, x).findings
    assert "what it is given is not finite" in one.evidence
    assert "overflows" not in one.evidence


def test_a_mask_of_minus_infinity_is_no_overflow(ids):
    class Masked(nn.Module):
        """Attention whose mask is what a module puts out, and passes through one with weights."""

        def __init__(self):
            super().__init__()
            self.words, self.qkv, self.o = nn.Embedding(WORDS, 32), nn.Linear(32, 96), nn.Linear(32, 32)
            self.mask, self.scaled = nn.Identity(), nn.Linear(1, 1)
            nn.init.constant_(self.scaled.weight, 1.0)

        def forward(self, x):
            x = self.words(x)
            mask = self.mask(torch.full((x.shape[1],) * 2, -math.inf).triu(1))
            mask = self.scaled(mask[..., None])[..., 0]
            q, k, v = self.qkv(x).unflatten(-1, (4, 24)).transpose(1, 2).split(8, -1)
            return self.o(functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    assert NOT_FINITE not in {one.kind for one in doctor(Masked(), ids).findings}


def test_a_router_that_puts_out_minus_infinity_is_not_blamed_for_what_another_module_does(ids):
    class Routed(nn.Module):
        """A router whose choices of experts are −∞ where they are not chosen, and what comes after it."""

        def __init__(self):
            super().__init__()
            self.words, self.attention = nn.Embedding(WORDS, 32), nn.MultiheadAttention(32, 4, batch_first=True)
            self.router, self.after = Router(), nn.Linear(32, 32)

        def forward(self, x):
            x = self.words(x)
            x = x + self.attention(x, x, x)[0] * self.router(x).softmax(-1)[..., :1]
            return self.after(x)

    class Router(nn.Linear):
        def __init__(self):
            super().__init__(32, 4)

        def forward(self, x):
            made = super().forward(x)
            chosen = made.topk(2).indices
            return torch.full_like(made, -math.inf).scatter(-1, chosen, made.gather(-1, chosen))

    model = Routed()
    assert doctor(model, ids).healthy
    with torch.no_grad():
        model.after.weight[0, 0] = math.nan
    (one,) = doctor(model, ids).findings
    assert one.module == "after"


# ---------------------------------------------------------------------- texts


def framed(ids):
    return torch.cat([torch.full((8, 1), 1), ids, torch.full((8, 1), 2)], 1)


def test_one_token_in_a_frame_is_a_text_without_variety():
    diagnosis = doctor(bert(), framed(torch.full((8, 30), 7)))
    assert [(one.kind, one.sure) for one in diagnosis.findings] == [(TEXT, True)]


def test_one_token_that_is_padded_is_a_text_without_variety():
    ids, mask = framed(torch.full((8, 30), 7)), torch.ones(8, 32, dtype=torch.long)
    ids[1:, 10:], mask[1:, 10:] = 0, 0
    assert [one.kind for one in doctor(bert(), {"input_ids": ids, "attention_mask": mask}).findings] == [TEXT]


def test_a_text_that_hardly_varies_is_the_texts_fault_and_not_the_layers(ids):
    hardly = torch.where(torch.rand(8, 32, generator=torch.Generator().manual_seed(2)) < 0.95, 7, ids)
    diagnosis = doctor(bert(), hardly)
    assert [one.kind for one in diagnosis.findings] == [TEXT]
    assert "% of the median sequence" in diagnosis.sentences()[0]
    assert "tokenizer" in diagnosis.sentences()[0]


def test_a_text_half_of_which_is_one_token_has_variety(ids):
    half = torch.where(torch.rand(8, 32, generator=torch.Generator().manual_seed(2)) < 0.6, 7, ids)
    for model in (bert(), llama()):
        assert doctor(model, half).healthy
        assert doctor(model, framed(half)).healthy


@pytest.mark.parametrize("length", [2, 3, 4])
def test_short_sequences_have_variety_as_long_as_two_tokens_differ(ids, length):
    assert TEXT not in {one.kind for one in doctor(llama(), ids[:, :length]).findings}


def test_a_few_sequences_of_one_token_are_no_reason_to_give_up(ids):
    ids[:3] = 7
    assert doctor(llama(), ids).healthy


# ---------------------------------------------------------------------- what is printed


@torch.no_grad()
def blow_up(model, layer, head, factor):
    attentions(model)[layer].query.weight[head] *= factor


def test_of_several_findings_the_numbers_say_whose_they_are(ids):
    model = llama()
    blow_up(model, 0, 1, 30)
    blow_up(model, 2, 3, 3000)
    (sentence,) = doctor(model, ids).sentences()
    assert "in layer 0, head 1; layer 2, head 3: worst in layer 2, head 3: a logit of" in sentence
    blow_up(model, 0, 1, 1e5)
    assert ": worst in layer 0, head 1: a logit of" in doctor(model, ids).sentences()[0]


def test_of_several_heads_of_one_layer_the_worst_is_named_too(ids):
    model = llama()
    blow_up(model, 1, 0, 30)
    blow_up(model, 1, 2, 3000)
    assert "in layer 1, heads 0, 2: worst in head 2: a logit of" in doctor(model, ids).sentences()[0]


def test_of_one_head_nothing_is_worst(ids):
    model = llama()
    blow_up(model, 1, 2, 3000)
    assert "in layer 1, head 2: a logit of" in doctor(model, ids).sentences()[0]


def test_of_several_alarms_the_first_in_time_is_told(ids):
    rows = [
        {
            "step": step, "module": f"model.layers.{layer}.self_attn", "layer": layer, "keys": 64,
            "entropy_share": [0.9], "max_logit": [3.0 * max(1, step - start) ** 2], "rank_residual": 0.8,
        }
        for step in range(30) for layer, start in ((0, 15), (2, 2))
    ]  # fmt: skip
    diagnosis = doctor(llama(), ids, log=pd.DataFrame(rows))
    assert [(one.kind, one.layer) for one in diagnosis.findings] == [(TRAINING, 0), (TRAINING, 2)]
    assert "first in layer 2, head 0: at step" in diagnosis.sentences()[0]


def sick_models():
    dead, spoilt = llama(), llama()
    with torch.no_grad():
        dead.model.layers[1].self_attn.o_proj.weight.zero_()
        spoilt.model.layers[1].mlp.up_proj.weight.fill_(math.nan)
    return {DEAD: dead, NOT_FINITE: spoilt}


@pytest.mark.parametrize("kind", [DEAD, NOT_FINITE])
def test_the_code_fits_the_model_with_a_head_and_without_one(ids, kind):
    whole = sick_models()[kind]
    (one,) = doctor(whole.model, ids).findings  # as the command loads it
    with_head, without = printed(one.treatment.code, whole), printed(one.treatment.code, whole.model)
    assert with_head == {f"model.{name}": value for name, value in without.items()}
    assert [name for name, value in with_head.items() if not value] == [
        f"model.layers.1.{'self_attn.o_proj' if kind == DEAD else 'mlp.up_proj'}.weight"
    ]


def test_the_code_for_layer_1_prints_nothing_of_layer_11(ids):
    model = overflow_of_the_residual()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(math.nan)
    (one,) = doctor(model, ids).findings
    twelve = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2) for _ in range(12)])})
    names = printed(replace(one, module="layers.1").treatment.code, twelve)
    assert list(names) == ["layers.1.weight", "layers.1.bias"]


# ---------------------------------------------------------------------- logs


@pytest.mark.parametrize("content", ["", "\n", '{"step": 0, "module": "model.lay'])
def test_a_log_without_a_whole_line_is_a_note(ids, tmp_path, content):
    (tmp_path / "log.jsonl").write_text(content)
    diagnosis = doctor(llama(), ids, log=tmp_path / "log.jsonl")
    assert diagnosis.healthy
    assert any("no whole line" in note for note in diagnosis.notes)


def test_a_log_without_a_whole_line_is_a_note_of_the_command_too(tmp_path):
    folder = tmp_path / "model"
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=bytes_only())
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=256, n_positions=64, initializer_range=0.2)
    ).save_pretrained(folder)
    (tmp_path / "log.jsonl").write_text("\n")
    page, numbers = tmp_path / "page.html", tmp_path / "doctor.json"
    options = ["--text", str(ENGLISH), "--length", "32", "--out", str(page), "--json", str(numbers)]
    done = CliRunner().invoke(app, ["doctor", str(folder), *options, "--log", str(tmp_path / "log.jsonl")])
    assert done.exit_code == 0, done.output
    assert "no whole line" in " ".join(done.output.split())
    assert any("no whole line" in note for note in json.loads(numbers.read_text())["notes"])
    assert '"kind":"scan"' in page.read_text().replace(" ", "")  # the weights were read all the same


def bytes_only():
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(alphabet))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


# ---------------------------------------------------------------------- advice that the model takes


def qwen3():
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "initializer_range": 0.25}
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL, **sizes)).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_norm.weight *= 500
    return model


def deepseek():
    torch.manual_seed(0)
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    config = tf.DeepseekV3Config(**SMALL, **sizes, **experts, intermediate_size=64, moe_intermediate_size=32)
    model = tf.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_b_proj.weight *= 1e5
    return model


def deberta():
    torch.manual_seed(0)
    kinds = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]}
    model = tf.DebertaV2Model(tf.DebertaV2Config(**SMALL, **kinds, intermediate_size=64, initializer_range=0.25)).eval()
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query_proj.weight *= 1000
    return model


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [qwen3, deepseek, deberta])
def test_where_locater_bounds_no_logits_the_advice_is_what_the_model_takes(ids, make):
    model = make()
    (one,) = (one for one in doctor(model, ids).findings if one.kind == LOGITS)
    assert one.layer == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = doctor(model, ids).heads["max_logit"].max()
    exec(one.treatment.code, {"model": model, "optimizer": optimizer})
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids)[0].square().mean().backward()
        optimizer.step()
    assert doctor(model, ids).heads["max_logit"].max() < before


def test_alike_tokens_and_large_logits_have_advice_that_goes_together(ids):
    model = llama()
    with torch.no_grad():
        attentions(model)[0].query.weight[2] *= 100
        model.model.layers[1].input_layernorm.weight.zero_()
    findings = doctor(model, ids).findings
    assert {one.kind for one in findings} == {LOGITS, TOKENS}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for one in findings:
        exec(one.treatment.code, {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


# ---------------------------------------------------------------------- what is added after a norm


def test_a_norm_after_attention_that_lets_nothing_through_makes_it_dead(ids):
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 64, "initializer_range": 0.25}
    model = tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL, **sizes, query_pre_attn_scalar=8)).eval()
    assert doctor(model, ids).healthy
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.fill_(-1)  # the gain is 1 + this
    assert found(doctor(model, ids)) == {(DEAD, 1, ())}


# ---------------------------------------------------------------------- alarms of one step


def test_of_alarms_at_one_step_the_module_that_runs_first_is_the_first(ids):
    rows = [
        {
            "step": step, "module": f"model.layers.{layer}.self_attn", "layer": layer, "keys": 32,
            "entropy_share": [0.9], "max_logit": [None if step == 2 and layer else 3.0], "rank_residual": 0.8,
        }
        for step in range(3) for layer in range(3)
    ]  # fmt: skip
    sentences = doctor(llama(), ids, log=pd.DataFrame(rows)).sentences()
    assert "first in layer 1, head 0: at step 2" in sentences[0]
