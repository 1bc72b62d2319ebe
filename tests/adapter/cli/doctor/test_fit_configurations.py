"""``genlight doctor`` and ``genlight check`` take the configurations of ``genlight fit`` too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

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

class StepWithoutContext(Good):
    def train_step(self, batch, state): ...

class Unmade(Good):
    def __init__(self):
        raise OSError("no weights")

class Misspells(Good):
    def rollouts(self, state, ctx): ...
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


BROKEN = {
    "trainer that is not there": {"plugin": "Godo"},
    "trainer that cannot be made": {"plugin": "Unmade"},
    "hook without ctx": {"plugin": "StepWithoutContext"},
    "unknown argument of the trainer": {"max_step": 3},
    "unknown argument of a callback": {"checkpoint": {"every_n_step": 3}},
    "argument out of range": {"checkpoint": {"every_n_steps": -3}},
    "unknown precision": {"precision": "bf17"},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 1.0},
    "no such file": {"data": {"parquet_paths": ["none.parquet"]}},
    "no such column": {"data": {"columns": ["y"]}},
    "folder that is a file": {"checkpoint": {"dirpath": "a.parquet/c"}},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_what_fit_refuses_doctor_finds(configuration, ends, capsys, broken):
    name = configuration(**broken)
    assert ends("doctor", name) == 2
    assert "fault" in capsys.readouterr().out
    assert ends("fit", "--config", name) in (1, 2)


def test_a_configuration_that_doctor_finds_sound_is_fitted_and_what_is_there_then_is_a_warning(
    configuration, ends, capsys
):
    name = configuration(plugin="Misspells")
    assert ends("doctor", name) == 0
    said = capsys.readouterr().out
    assert "the run can start" in said
    assert "did you mean `rollout`?" in said
    assert ends("fit", "--config", name) == 0
    assert ends("doctor", name) == 0
    assert "c holds checkpoints already: `genlight fit` starts with --resume auto" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("run_id: r\ntrainer: m:T\nmax_steps: 3\n", "is a job spec in YAML. Write it as JSON"),
        ("- a\n", "holds no settings"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_a_file_that_holds_no_configuration_is_told_as_by_fit(configuration, ends, capsys, content, said):
    name = configuration()
    Path(name).write_text(content)
    assert ends("doctor", name) == 2
    assert said in capsys.readouterr().out
    assert ends("fit", "--config", name) == 2
    assert said in capsys.readouterr().err


def test_a_setting_for_a_configuration_is_refused(configuration, ends, capsys):
    assert ends("doctor", configuration(), "--set", "max_steps=3") == 2
    assert "--set and --step are for jobs" in capsys.readouterr().err


def test_check_trains_on_the_function_of_a_configuration(configuration, ends, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("genlight.adapter.check.checks.check_ranks", lambda *_: iter(()))
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
    monkeypatch.setattr("genlight.adapter.check.checks.check_ranks", lambda *_: iter(()))
    job = {"run_id": "r", "max_steps": 2, "hyperparams": {"lr": 1}}
    assert ends("check", "--job", configuration(job=job), "--steps", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["counts"]["pass"] > 5
    job["hyperparams"]["lr"] = 2
    assert ends("check", "--job", configuration(job=job), "--steps", "1") == 1
    assert ends("check", "fit.yaml") == 2
    assert "name one as MODULE:CLASS, or a job by --job fit.yaml" in capsys.readouterr().err
