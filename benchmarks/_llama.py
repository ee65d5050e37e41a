"""What the benchmarks of checkpoints share."""

import json
from pathlib import Path


def write_config(folder: Path, hidden: int, inner: int, layers: int, heads: int, key_heads: int, words: int) -> None:
    """The config.json of a Llama of this shape."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_heads,
        "vocab_size": words, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
