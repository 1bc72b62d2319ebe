"""``genlight checkpoints export --to FOLDER`` of a Hugging Face model is what ``from_pretrained`` loads.

transformers lies in ``.venv/guides``; see `tests.examples.test_guides`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from support.forked import run_forked

PACKAGES = Path(sys.prefix) / "guides"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="`make` installs transformers into .venv/guides"),
]

TRAINER = """
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from genlight.adapter import StepResult

def tokenizer():
    words = {word: number for number, word in enumerate("<unk> the owl and pussycat".split())}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")

class Llama:
    def setup(self, ctx):
        torch.manual_seed(0)
        self.tokenizer, self.kind = tokenizer(), LlamaForCausalLM
    def configure(self, ctx):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, tie_word_embeddings=True, **sizes))
        model.generation_config.max_new_tokens = 7
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
        if ctx.job.hyperparams.get("two"):
            state["teacher"] = LlamaForCausalLM(LlamaConfig(vocab_size=4, **sizes)).requires_grad_(False)
        return state
    def prepare_batch(self, raw, state, ctx): return torch.tensor(raw)
    def train_step(self, batch, state, ctx):
        loss = state["model"](input_ids=batch, labels=batch).loss
        state["optimizer"].zero_grad(); loss.backward(); state["optimizer"].step()
        return StepResult(metrics={"loss": loss.item()})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""

LOADS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from genlight.callbacks.checkpoint import load_weights

folder, checkpoint = sys.argv[1:]
model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
assert type(model).__name__ == "LlamaForCausalLM"
assert not any(told.values()), told
trained = load_weights(checkpoint)
for name, weights in model.state_dict().items():
    assert torch.equal(weights, trained[f"model.{name}"]), name
assert model.generation_config.max_new_tokens == 7
assert AutoTokenizer.from_pretrained(folder)("the owl").input_ids == [1, 2]
"""


@pytest.fixture
def call(tmp_path):
    """Call a command, or the program of a file, with transformers and without network; gives what it did."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{PACKAGES}"}
    (tmp_path / "llama.py").write_text(TRAINER)
    (tmp_path / "loads.py").write_text(LOADS)

    def run(*words, program="genlight.adapter.cli"):
        return run_forked(*words, program=str(program), folder=tmp_path, environ=environ)

    return run


def train(call, folder, **hyperparams):
    job = {
        "run_id": "llama", "trainer": "llama:Llama", "max_steps": 2, "hyperparams": hyperparams,
        "mock_batches": [[[1, 2, 3, 4]]] * 2, "lightning": {"accelerator": "cpu"},
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    done = call("run", "job.json")
    assert done.returncode == 0, done.stderr
    return folder / "runs/llama"


def test_the_folder_of_a_trained_model_loads_with_its_tokenizer(call, tmp_path):
    run, out = train(call, tmp_path), tmp_path / "llama-3.1"
    done = call("checkpoints", "export", run, "--to", out)
    assert done.returncode == 0, done.stderr
    loaded = call(out, run / "checkpoints/final.json", program=tmp_path / "loads.py")
    assert loaded.returncode == 0, loaded.stderr

    (out / "model.safetensors").unlink()
    (out / "config.json").write_text("mine")
    done = call("checkpoints", "export", run, "--to", out)
    assert done.returncode == 2
    assert "exists; name another place, or replace it by --force" in done.stderr
    assert (out / "config.json").read_text() == "mine"
    assert not (out / "model.safetensors").exists()
    assert call("checkpoints", "export", run, "--to", out, "--force").returncode == 0
    assert call(out, run / "checkpoints/final.json", program=tmp_path / "loads.py").returncode == 0


def test_one_of_several_models_is_chosen_by_its_prefix(call, tmp_path):
    run = train(call, tmp_path, two=1)
    done = call("checkpoints", "export", run, "--to", tmp_path / "out")
    assert done.returncode == 2
    assert "--strip-prefix model., --strip-prefix teacher." in done.stderr
    done = call("checkpoints", "export", run, "--to", tmp_path / "out", "--strip-prefix", "teacher.")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 4
