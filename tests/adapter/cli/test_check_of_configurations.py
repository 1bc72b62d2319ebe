"""``genlight check`` takes the configurations of ``genlight fit`` too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from genlight.adapter.check.checks import CHECKS
from genlight.adapter.cli import main

TRAINER = """
from genlight.adapter import StepResult

class Good:
    def setup(self, ctx): assert ctx.job.hyperparams.get("lr", 1) == 1
    def configure(self, ctx): return {}
    def prepare_batch(self, raw_batch, state, ctx): return raw_batch
    def train_step(self, batch, state, ctx): return StepResult(metrics={"loss": 1.0})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    """Writes a configuration into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # about Lightning's own use of it
    (tmp_path / "configured_trainer.py").write_text(TRAINER)
    pq.write_table(pa.table({"x": list(range(6))}), tmp_path / "a.parquet")

    def write(plugin="Good", data=None, checkpoint=None, job=None, **trainer):
        callback = {"class_path": "genlight.callbacks.Checkpoint", "init_args": {"dirpath": "c", **(checkpoint or {})}}
        model = {"plugin": f"configured_trainer:{plugin}"} | ({} if job is None else {"job": job})
        rows = {"parquet_paths": ["a.parquet"], "batch_size": 2, **(data or {})}
        config = {
            "trainer": {"max_steps": 2, "accelerator": "cpu", "logger": False, "callbacks": [callback], **trainer},
            "model": {"class_path": "genlight.adapter.ContractModule", "init_args": model},
            "data": {"class_path": "genlight.adapter.ArrowDataModule", "init_args": rows},
        }
        (tmp_path / "fit.yaml").write_text(yaml.safe_dump(config))
        return "fit.yaml"

    yield write
    sys.modules.pop("configured_trainer", None)


@pytest.fixture
def ends(monkeypatch):
    """Runs ``genlight`` with arguments and returns its exit code."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["genlight", *words])
        try:
            return main(words)
        except SystemExit as end:
            return end.code

    return run


def test_check_trains_on_the_function_of_a_configuration(configuration, ends, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(CHECKS, "ranks", lambda _: iter(()))
    (tmp_path / "configured_data.py").write_text(
        "def rows(ctx):\n    assert ctx.job.hyperparams == {'lr': 1}\n    return [{'x': i} for i in range(6)]\n"
    )
    job = {"run_id": "r", "max_steps": 2, "hyperparams": {"lr": 1}}
    config = yaml.safe_load(Path(configuration(job=job)).read_text())
    function = {"function": "configured_data:rows", "batch_size": 2}
    config["data"] = {"class_path": "genlight.adapter.FunctionDataModule", "init_args": function}
    Path("fit.yaml").write_text(yaml.safe_dump(config))
    assert ends("check", "--job", "fit.yaml", "--steps", "1", "--json") == 0, capsys.readouterr()
    levels = {each["check"]: each["level"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert levels["metrics"] == "pass", "steps were made"
    assert "steps" not in levels, "which says that there is no data"


def test_check_takes_class_hyperparameters_and_data_from_a_configuration(configuration, ends, monkeypatch, capsys):
    monkeypatch.setitem(CHECKS, "ranks", lambda _: iter(()))
    job = {"run_id": "r", "max_steps": 2, "hyperparams": {"lr": 1}}
    assert ends("check", "--job", configuration(job=job), "--steps", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["counts"]["pass"] > 5
    job["hyperparams"]["lr"] = 2
    assert ends("check", "--job", configuration(job=job), "--steps", "1") == 1
    assert ends("check", "fit.yaml") == 2
    assert "name one as MODULE:CLASS, or a job by --job fit.yaml" in capsys.readouterr().err
