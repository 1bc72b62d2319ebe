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
        if kind := ctx.job.hyperparams.get("adapter"):
            import peft
            settings = {"task_type": "CAUSAL_LM"}
            if kind == "prompt":
                adapter = peft.PromptTuningConfig(num_virtual_tokens=2, **settings)
            else:
                adapter = peft.LoraConfig(r=4, target_modules=[kind, "q_proj"], **settings)
            model = peft.get_peft_model(model, adapter)
        trained = [weights for weights in model.parameters() if weights.requires_grad]
        state = {"model": model, "optimizer": torch.optim.AdamW(trained, lr=0.01)}
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
    def save_checkpoint(self, *, state, step, output_dir, final, ctx):
        model = state["model"]
        model.save_pretrained(output_dir)
        return {"primary_path": "adapter_model.safetensors" if hasattr(model, "peft_config") else "model.safetensors"}

if __name__ == "__main__":  # the base of an adapter, as a reader has it
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, tie_word_embeddings=True, **sizes)).save_pretrained("base")
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


MERGED = """
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

merged, told = AutoModelForCausalLM.from_pretrained("merged", output_loading_info=True)
assert not any(told.values()), told
base = AutoModelForCausalLM.from_pretrained("base")
ids = torch.tensor([[1, 2, 3]])
plain = base(input_ids=ids).logits
adapted = PeftModel.from_pretrained(base, "runs/llama/checkpoints/final/trainer")(input_ids=ids).logits
assert torch.allclose(merged(input_ids=ids).logits, adapted, atol=1e-6)
assert not torch.allclose(plain, adapted, atol=1e-3)
assert merged.lm_head.weight is merged.model.embed_tokens.weight
"""


@pytest.fixture
def call(tmp_path):
    """Call a command, or the program of a file, with transformers and without network; gives what it did."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{PACKAGES}"}
    (tmp_path / "llama.py").write_text(TRAINER)
    (tmp_path / "loads.py").write_text(LOADS)
    (tmp_path / "merged.py").write_text(MERGED)

    def run(*words, program="genlight.adapter.cli"):
        return run_forked(*words, program=str(program), folder=tmp_path, environ=environ)

    return run


def train(call, folder, weights="all", **hyperparams):
    job = {
        "run_id": "llama", "trainer": "llama:Llama", "max_steps": 2, "hyperparams": hyperparams,
        "mock_batches": [[[1, 2, 3, 4]]] * 2, "lightning": {"accelerator": "cpu"}, "checkpoints": {"weights": weights},
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


def test_an_adapter_is_merged_into_the_base_that_its_checkpoint_omits(call, tmp_path):
    """The base is found by its content: peft renamed its weights, and its file has tied weights once."""
    run = train(call, tmp_path, weights="trained", adapter="v_proj")
    assert call(program=tmp_path / "llama.py").returncode == 0
    assert sum(file.stat().st_size for file in (run / "checkpoints/final").glob("*.safetensors")) < 40_000
    export = ("checkpoints", "export", run, "--to", tmp_path / "merged")
    assert "--merge" in call(*export).stderr
    assert "omits" in call(*export, "--merge").stderr
    done = call(*export, "--merge", "--base", tmp_path / "base/model.safetensors")
    assert done.returncode == 0, done.stderr
    kept = run / "checkpoints/genlight-pretrained/model/config.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"_attn_implementation": "some/kernels"}))
    done = call(*export, "--merge", "--force", "--base", tmp_path / "base/model.safetensors")
    assert done.returncode == 0, "it does not load kernels that a file names"
    (tmp_path / "merged/config.json").write_bytes((tmp_path / "base/config.json").read_bytes())
    done = call(program=tmp_path / "merged.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        ("", "the model 'model' has no adapter of PEFT"),
        ("prompt", "cannot be merged: AttributeError"),
        ("embed_tokens", "one of two weights that are tied"),
    ],
)
def test_a_model_that_cannot_be_merged_is_refused_by_name(adapter, text, call, tmp_path):
    run = train(call, tmp_path, adapter=adapter)
    done = call("checkpoints", "export", run, "--to", tmp_path / "merged", "--merge")
    assert done.returncode == 2
    assert text in done.stderr
    assert not (tmp_path / "merged/config.json").exists()
