"""Small random models of every family, and what their own attention computes."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import transformers as tf
from torch import nn

from locater.models import attentions

VOCABULARY = 61
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "attn_implementation": "eager"}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, **COMMON}
GROUPED = {**SMALL, "num_key_value_heads": 2}


def _gpt2(**more):
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY, attn_implementation="eager", **more
        )
    )


def _falcon(**more):
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **COMMON, **more}
    return tf.FalconForCausalLM(tf.FalconConfig(**config))


def _whisper():
    return tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
            max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            attn_implementation="eager",
        )
    )  # fmt: skip


def _t5():
    return tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=6, num_layers=2, num_heads=4, d_ff=48, decoder_start_token_id=0,
            attn_implementation="eager",
        )
    )  # fmt: skip


def _vit():
    return tf.ViTModel(
        tf.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=8,
            patch_size=2, attn_implementation="eager",
        )
    )  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

FAMILIES = {
    "gpt2": _gpt2,
    "gpt2-scaled-by-layer": lambda: _gpt2(scale_attn_by_inverse_layer_idx=True),
    "gpt2-unscaled": lambda: _gpt2(scale_attn_weights=False),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SMALL)),
    "gptj": lambda: tf.GPTJForCausalLM(
        tf.GPTJConfig(
            n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, vocab_size=VOCABULARY,
            attn_implementation="eager",
        )
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "llama-3.1-rope": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, rope_parameters=LLAMA3)),
    "llama-linear-rope": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0})
    ),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=None)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=12)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**GROUPED, attention_multiplier=0.3)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**GROUPED, head_dim=12)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**GROUPED, head_dim=12, query_pre_attn_scalar=20, attn_logit_softcapping=2.0)
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            **{**GROUPED, "num_hidden_layers": 7}, head_dim=12, query_pre_attn_scalar=20, sliding_window=32
        )
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**GROUPED, pad_token_id=0)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32, **COMMON
        )
    ),
    "bloom": lambda: tf.BloomForCausalLM(
        tf.BloomConfig(hidden_size=36, n_layer=2, n_head=6, vocab_size=VOCABULARY, attn_implementation="eager")
    ),
    "falcon-new": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-multi-query": lambda: _falcon(multi_query=True, new_decoder_architecture=False),
    # eager attention in transformers 5.22 adds ALiBi twice for Falcon, once through the mask; sdpa adds it once
    "falcon-alibi": lambda: _falcon(
        multi_query=False, new_decoder_architecture=False, alibi=True, bias=True, attn_implementation="sdpa"
    ),
    "bert": lambda: tf.BertModel(tf.BertConfig(**SMALL)),
    "roberta": lambda: tf.RobertaModel(tf.RobertaConfig(**{**SMALL, "max_position_embeddings": 80})),
    "distilbert": lambda: tf.DistilBertModel(
        tf.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=48, **COMMON)
    ),
    "modernbert": lambda: tf.ModernBertModel(
        tf.ModernBertConfig(**{**SMALL, "num_hidden_layers": 4}, pad_token_id=0, local_attention=32)
    ),
    "vit": _vit,
    "whisper": _whisper,
    "t5": _t5,
}  # fmt: skip


def build(name, seed=0):
    """A model with weights large enough that biases, norms and positions show."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def inputs(name, tokens=13, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=generator)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=generator), "decoder_input_ids": ids}
    if name == "t5":
        longer = torch.randint(3, VOCABULARY, (2, tokens + 4), generator=generator)
        return {"input_ids": longer, "decoder_input_ids": ids}
    return {"input_ids": ids}


@contextmanager
def recorded_logits(model):
    """What each attention module hands to softmax, and the states that entered it: {name: (query, key, logits)}."""
    seen, states, softmax = {}, {}, nn.functional.softmax
    active = []

    def entering(name):
        def hook(_, args, kwargs):
            hidden = args[0] if args else kwargs.get("hidden_states")
            other = kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))
            states[name] = (hidden.detach(), hidden.detach() if other is None else other.detach())
            active.append(name)

        return hook

    def leaving(*_):
        active.pop()

    def spy(x, *args, **kwargs):
        if active:
            seen[active[-1]] = (*states[active[-1]], x.detach())
        return softmax(x, *args, **kwargs)

    names = {attention.module for attention in attentions(model)}
    handles = []
    for name, module in model.named_modules():
        if name in names:
            handles.append(module.register_forward_pre_hook(entering(name), with_kwargs=True))
            handles.append(module.register_forward_hook(leaving))

    def spy_on_sdpa(query, key, value, attn_mask=None, **kwargs):
        if active:
            logits = query @ key.mT * query.shape[-1] ** -0.5 + (0 if attn_mask is None else attn_mask)
            seen[active[-1]] = (*states[active[-1]], logits.detach())
        return sdpa(query, key, value, attn_mask=attn_mask, **kwargs)

    sdpa, tensor_softmax = nn.functional.scaled_dot_product_attention, torch.softmax
    nn.functional.softmax = torch.softmax = spy
    nn.functional.scaled_dot_product_attention = spy_on_sdpa
    try:
        yield seen
    finally:
        nn.functional.softmax, torch.softmax = softmax, tensor_softmax
        nn.functional.scaled_dot_product_attention = sdpa
        for handle in handles:
            handle.remove()
