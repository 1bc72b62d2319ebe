"""A run warns of hyperparameters that are never read; for the class they behave like a dictionary."""

import copy
import io
import json
import pickle

import pytest
import torch

from genlight.adapter.cli import main
from genlight.adapter.plumbing.counted_dict import CountedDict, uncounted
from genlight.callbacks.checkpoint.codec.state_tree import encode
from genlight.callbacks.checkpoint.codec.tensors import TensorTable

TRAINER = """
from genlight.adapter import StepResult


class Keeps:
    def setup(self, ctx): self.rate = ctx.job.hyperparams.get("lr", 0.1)
    def configure(self, ctx): return {"all": ctx.job.hyperparams}
    def prepare_batch(self, raw_batch, state, ctx): return raw_batch
    def train_step(self, batch, state, ctx): return StepResult(metrics={"loss": self.rate})
    def state_dict(self, state): return {"all": state["all"]}
    def load_state_dict(self, state, payload, ctx): assert type(payload["all"]) is dict
"""


@pytest.mark.parametrize("cadence", [{"checkpoint_every": 1}, {"metric_every": 1, "checkpoint_every": 0}, {}], ids=str)
def test_a_run_names_them_once_and_a_class_may_store_them(tmp_path, caplog, cadence):
    (tmp_path / "keeps.py").write_text(TRAINER)
    job = {"trainer": "keeps:Keeps", "max_steps": 2, "mock_batches": [1, 2, 3, 4], "run_id": "r"}
    job |= {"hyperparams": {"lrr": 0.3, "layers": [2]}, "lightning": {"accelerator": "cpu"}, **cadence}
    (tmp_path / "job.json").write_text(json.dumps(job))

    assert main(["run", str(tmp_path / "job.json")]) == 0
    warnings = [message for message in caplog.messages if "has not been used" in message]
    assert len(warnings) == 1
    assert "`hyperparams.lrr`, `hyperparams.layers`" in warnings[0]
    record = json.loads((tmp_path / "runs/r/checkpoints/final.json").read_text())
    assert record["state"]["all"] == job["hyperparams"]

    resumed = ["--set", "resume_from_latest=true", "--set", "max_steps=3"]
    assert main(["run", str(tmp_path / "job.json"), *resumed]) == 0


@pytest.mark.parametrize(
    "use",
    [
        dict,
        lambda given: {**given},
        lambda given: dict(**given),
        copy.copy,
        copy.deepcopy,
        lambda given: given.copy(),
        lambda given: json.loads(json.dumps(given)),
        lambda given: given | {},
        lambda given: {} | given,
        lambda given: pickle.loads(pickle.dumps(given)),
    ],
)
def test_a_copy_is_a_plain_dictionary_and_reads_all(use):
    given = CountedDict({"lr": 1, "name": "x"})
    assert given.unread == ["lr", "name"]
    made = use(given)

    assert made == {"lr": 1, "name": "x"}
    assert not isinstance(made, CountedDict)
    assert given.unread == []


def test_only_requested_keys_count():
    given = CountedDict({"lr": 1, "name": "x", "deep": {"a": 1}, "last": 2})
    assert (given["lr"], given.get("absent"), "deep" in given, given.pop("last")) == (1, None, True, 2)
    assert given.unread == ["name"]
    assert uncounted(given) == {"lr": 1, "name": "x", "deep": {"a": 1}}
    encode({"all": given}, TensorTable(), root="state")
    assert given.unread == ["name"]


def test_torch_reads_a_file_with_it_without_pickle():
    file = io.BytesIO()
    torch.save({"all": CountedDict({"lr": 1})}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"all": {"lr": 1}}
