"""Model types of the installed transformers, small, by the benchmark that makes the table of docs/models.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import model_zoo

FEW = [
    "albert", "bart", "bloom", "cohere", "deepseek_v3", "gemma2", "glm", "gpt_oss", "granitemoehybrid", "llama4_text",
    "mistral4", "mixtral", "modernbert", "mpnet", "olmo2", "parakeet_encoder", "qwen3", "qwen3_next",
    "sam_vision_model", "smollm3", "swin", "t5", "wav2vec2", "wav2vec2-bert", "whisper",
]  # fmt: skip
# the first layer with a softmax, and the first without rotary embeddings
DEPTHS = {"qwen3_next": 4, "llama4_text": 4}


def assert_read(row):
    assert row["softmaxes"]
    assert row["read"]
    assert row["wrong"] == {}
    assert row["unread"] == {}
    assert row["gradient"] < 1e-5
    assert row["saved"] < 1e-9
    assert isinstance(row["entropy"], str) or row["entropy"] < 1e-5  # text: what cannot be compared, and why


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FEW)
def test_a_type_is_read_and_what_is_read_is_right(kind):
    assert_read(model_zoo.examine(kind, DEPTHS.get(kind, 2)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(14400)
def test_all_types_most_are_read_and_none_is_wrong(full):
    if not full:
        pytest.skip("an hour: LOCATER_FULL=1, or make test-full")
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    rows = [row for kind in MODEL_MAPPING_NAMES if (row := model_zoo.examine(kind)).get("softmaxes")]
    assert [row["type"] for row in rows if row["wrong"]] == []
    whole = [row["type"] for row in rows if row["read"] + row["unseen"] and not row["unread"]]
    assert len(whole) >= 0.85 * len(rows)
