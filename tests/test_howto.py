"""How-to pages whose code needs more than one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from locater.control import DecoupledLocAteR
from locater.measure.logs import read_log
from markdown_pages import DOCS


def test_two_ranks_of_the_fsdp_page_train_as_one_process_does(tmp_path, full):
    """In float64: Adam's first steps are signs, which rounding in float32 can turn."""
    if not full:
        pytest.skip("a fifth of a minute: LOCATER_FULL=1, or make test-full")
    text = (DOCS / "howto" / "fsdp.md").read_text()
    script = tmp_path / "train.py"
    code = re.search(r'^```python title="train.py"\n(.*?)^```$', text, flags=re.DOTALL | re.MULTILINE)[1]
    # torch's threads are not always joined at an ordinary exit, which aborts
    leave = "import os, sys; dist.barrier(); sys.stdout.flush(); os._exit(0)"
    changes = {
        "for layer in model.model": "model.double()\nfor layer in model.model",
        "dist.destroy_process_group()": leave,
    }
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    script.write_text(code)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        start, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "self_attn/change" in done.stdout

    saved = torch.load(tmp_path / "trained.pt", weights_only=True)
    alone, fresh = one_process(), one_process(steps=0)
    for name, value in alone.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-6, atol=1e-6)
    assert max((value - fresh[name]).abs().max() for name, value in alone.items()) > 1e-2

    for rank in range(2):
        log = read_log(tmp_path / f"attention-{rank}.jsonl")
        assert log["step"].tolist() == [0, 0, 2, 2]


def one_process(steps=4):
    """What the script does, by hand."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=100,
        )
    ).double()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    DecoupledLocAteR(model).attach(optimizer)
    for batch in torch.randint(0, 100, (4, 8, 16), generator=torch.Generator().manual_seed(1))[:steps]:
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
