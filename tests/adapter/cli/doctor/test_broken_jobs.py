"""Whatever ``genlight run`` refuses before it trains, ``genlight doctor`` finds."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genlight.adapter.cli import main
from genlight.adapter.job.sources import VARIABLES
from genlight.adapter.run.run import RunOptions, run_job
from support.jobs import write_job

TRAINERS = """
import abc
from support.trainer_class import Counts

class Good(Counts):
    def prepare_batch(self, raw_batch, state, ctx):
        return 1.0

class Lacking:
    def setup(self, ctx): ...

class WantsArguments(Good):
    def __init__(self, lr): ...

class Abstract(Good, abc.ABC):
    @abc.abstractmethod
    def loss(self): ...

class StepWithoutContext(Good):
    def train_step(self, batch, state): ...

class EvaluatesAlone(Good):
    def evaluate(self): ...
"""


def lightning(**arguments):
    return {"lightning": {"accelerator": "cpu", **arguments}}


def trainer(name):
    return {"trainer": f"broken_jobs_trainer{name}"}


def callback(path, **arguments):
    return lightning(callbacks=[{"class_path": path, "init_args": arguments}])


BROKEN = {
    "no trainer": {"trainer": ...},
    "steps as text": {"max_steps": "many"},
    "misspelled key": {"checkpoint_evry": 5},
    "validate without evaluate": {"validate": {"every_n_steps": 1}},
    "trainer without a module": trainer("_that_is_not_there:Good"),
    "module that raises": {"trainer": "raises_at_import:Good"},
    "module with a syntax error": {"trainer": "does_not_parse:Good"},
    "trainer without hooks": trainer(":Lacking"),
    "trainer that wants arguments": trainer(":WantsArguments"),
    "abstract trainer": trainer(":Abstract"),
    "train_step without ctx": trainer(":StepWithoutContext"),
    "evaluate of nothing": {**trainer(":EvaluatesAlone"), "validate": {"every_n_steps": 1}},
    "unknown accelerator": lightning(accelerator="abacus"),
    "more GPUs than there are": lightning(accelerator="gpu", devices=999),
    "unknown strategy": lightning(strategy="dpp"),
    "FSDP 1": lightning(strategy="fsdp"),
    "DDP with a hook": lightning(strategy={"class_path": "DDPStrategy", "init_args": {"model_averaging_period": 3}}),
    "unknown precision": lightning(precision="bf17"),
    "accumulation": lightning(accumulate_grad_batches=2),
    "callback that cannot be imported": callback("no.such.Callback"),
    "callback with a wrong argument": callback("lightning.pytorch.callbacks.Timer", durations=1),
    "averaging by a callback": callback("lightning.pytorch.callbacks.StochasticWeightAveraging", swa_lrs=0.1),
    "shards at a URL": lightning(
        strategy={
            "class_path": "ModelParallelStrategy",
            "init_args": {"data_parallel_size": 1, "tensor_parallel_size": 1},
        },
        callbacks=[
            {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "memory://runs"}}
        ],
    ),
    "search for a batch size": callback("lightning.pytorch.callbacks.BatchSizeFinder"),
    "logger that cannot be imported": lightning(logger={"class_path": "no.such.Logger"}),
    "no data": {"dataset": ...},
    "no such file": {"dataset": {"parquet_paths": ["none.parquet"]}},
    "file that is not Parquet": {"dataset": {"parquet_paths": ["text.parquet"]}},
    "no such column": {"dataset": {"parquet_paths": ["a.parquet"], "columns": ["y"]}},
    "no rows": {"dataset": {"parquet_paths": ["empty.parquet"]}},
    "empty batches": {"dataset": {"parquet_paths": ["a.parquet"], "batch_size": 0}},
    "collate that cannot be imported": {
        "dataset": {"parquet_paths": ["a.parquet"], "collate": "broken_jobs_trainer:nope"}
    },
    "unknown upload target": {"uploads": {"targets": ["abacus://bucket"]}},
    "checkpoint that is not there": {"resume_checkpoint_path": "none/step-00000001.json"},
    "orchestrated without a token": {"orchestrated": True},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with trainers and data."""
    monkeypatch.chdir(tmp_path)
    for name in [*VARIABLES, "HF_ENDPOINT"]:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "broken_jobs_trainer.py").write_text(TRAINERS)
    (tmp_path / "raises_at_import.py").write_text("raise OSError('no weights')")
    (tmp_path / "does_not_parse.py").write_text("class Good:\n  def")
    (tmp_path / "text.parquet").write_text("a,b\n1,2\n")
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    return tmp_path


def write(folder, fields):
    data = {"parquet_paths": ["a.parquet"]}
    usual = {"trainer": "broken_jobs_trainer:Good", "max_steps": 2, "dataset": data, "mock_batches": ...}
    return str(write_job(folder, **{**usual, **fields}))


def diagnose(path):
    return main(["doctor", path])


@pytest.mark.parametrize("fields", BROKEN.values(), ids=BROKEN.keys())
def test_doctor_finds_every_fault_that_run_refuses(folder, capsys, fields):
    """If the doctor passes a job that then ends at once, the user has wasted a place in a queue."""
    job = write(folder, fields)
    assert diagnose(job) == 2, capsys.readouterr().out
    assert "fault" in capsys.readouterr().out
    assert run_job(RunOptions(spec_path=job)) in (1, 2)
    assert not list(folder.rglob("checkpoints/*.json"))


def test_a_stop_request_before_the_start_is_a_warning(folder, capsys, monkeypatch):
    """Whoever left the cancel file of an earlier run in place would wonder why nothing is trained."""
    (folder / "cancel").mkdir()
    monkeypatch.setenv("TRAINER_CANCELLED", "1")
    assert diagnose(write(folder, {"cancel_file_path": "cancel"})) == 0
    output = capsys.readouterr().out
    assert f"the cancel file {folder / 'cancel'} exists" in output
    assert output.count("before its first step, since it is canceled by `TRAINER_CANCELLED`") == 1


def test_a_job_that_doctor_finds_sound_is_run(folder, capsys):
    """The table above is of no use if doctor finds a fault in every job."""
    job = write(folder, {})
    assert diagnose(job) == 0, capsys.readouterr().out
    assert run_job(RunOptions(spec_path=job)) == 0


def test_a_broken_checkpoint_that_a_resume_would_skip_is_a_warning(folder, capsys):
    """The run starts some steps earlier than its user expects."""
    job = write(folder, {"resume_from_latest": True, "checkpoint_every": 1})
    assert run_job(RunOptions(spec_path=job)) == 0
    checkpoints = folder / "runs" / "r" / "checkpoints"
    (checkpoints / "final.json").write_text("{")
    assert diagnose(job) == 0
    out = capsys.readouterr().out
    assert any(line.startswith("warning") and "final" in line for line in out.splitlines()), out
