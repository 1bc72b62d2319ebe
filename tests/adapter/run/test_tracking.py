"""The loggers of a run that is killed and resumed have one run, and each step of it once.

The tests use the real packages, offline; `make` installs them into `.venv/guides`.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from genlight.adapter.run.start import RUNS_FILE
from genlight.reporters import read_events
from support.forked import Forked
from support.snippets import blocks

PACKAGES = Path(sys.prefix) / "guides"
GUIDE = Path(__file__).parents[3] / "examples" / "guides" / "loggers.md"

pytestmark = [
    pytest.mark.promise(name="resume"),
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="`make` installs the packages of the guides into .venv/guides"),
]

STEPS = 460
TRAINER = """
import os, signal, sys, time
from support.trainer_class import Counts


def stored(step):  # trackio keeps rows in memory for half a second
    from trackio.sqlite_storage import SQLiteStorage
    return any(row["step"] == step for row in SQLiteStorage.get_logs("demo", "tracked"))


class Killed(Counts):
    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        if state["steps"] == int(os.environ["KILL_AT"]):
            while "trackio" in sys.modules and not stored(state["steps"] - 1):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        result.metrics["batch"] = float(batch)
        return result
"""
JOB = {
    "run_id": "tracked",
    "trainer": "killed:Killed",
    "max_steps": STEPS,
    "metric_every": 1,
    "checkpoint_every": 200,
    "resume_from_latest": True,
    "mock_batches": list(range(STEPS)),
    "lightning": {
        "accelerator": "cpu",
        "logger": [
            {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"save_dir": ".", "offline": True}},
            {
                "class_path": "lightning.pytorch.loggers.MLFlowLogger",
                "init_args": {"experiment_name": "demo", "tracking_uri": "file:mlflow"},
            },
            {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "files", "name": "csv"}},
            {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "files"}},
        ],
    },
}
READ = """
import json, struct, sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from wandb.proto.wandb_internal_pb2 import Record

def rows(path):  # the records of a LevelDB log: blocks of 32 KiB, in which a record may come in parts
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            items = Record.FromString(record).history.item
            record = b""
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            if "batch" in row:
                yield row["trainer/global_step"], row["batch"]

parts = [path.stem.removeprefix("run-") for path in sorted(Path("wandb").glob("offline-run-*/*.wandb"))]
client = MlflowClient("file:mlflow")
(experiment,) = [found for found in client.search_experiments() if found.name == "demo"]
runs = []
for run in client.search_runs([experiment.experiment_id]):
    history = {key: client.get_metric_history(run.info.run_id, key) for key in ("train/loss", "batch")}
    runs.append({
        "id": run.info.run_id,
        "status": run.info.status,
        **{key: [[metric.step, metric.value] for metric in metrics] for key, metrics in history.items()},
    })
files = sorted(Path("wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.parent.name)
print(json.dumps({"wandb": parts, "rows": [list(rows(path)) for path in files], "mlflow": runs}))
"""


@pytest.fixture
def environ(tmp_path):
    """Environment of a user with wandb and mlflow, but no network; the job is in the folder."""
    (tmp_path / "killed.py").write_text(TRAINER)
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW"))}
    offline = {"WANDB_SILENT": "true", "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
    path = os.pathsep.join(
        [str(PACKAGES), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return (
        mine
        | offline
        | {
            "PYTHONPATH": path,
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
    )


@pytest.fixture
def command(tmp_path, environ):
    """Run Python code in the folder of the job."""

    def run(code):
        arguments = [sys.executable, "-c", code]
        return subprocess.run(
            arguments, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=280
        )

    return run


@pytest.fixture
def genlight(tmp_path, environ):
    """Run ``genlight``, kill it at a step if there is one, and return its output. It must end as planned."""

    def run(*words, kill_at):
        log = tmp_path / f"said-{kill_at}"
        settings = environ | {"KILL_AT": str(kill_at)}
        process = Forked("genlight.adapter.cli", *words, environ=settings, folder=tmp_path, log=log)
        try:
            assert process.wait(280) == (-signal.SIGKILL if kill_at > 0 else 0), log.read_text()
        finally:
            process.kill_session()
        return log.read_text()

    return run


def test_a_run_that_is_killed_twice_is_one_run_with_each_step_once(genlight, command, tmp_path):
    for kill_at in (350, 405, 0):
        genlight("run", "job.json", kill_at=kill_at)

    found = json.loads(command(READ).stdout)

    expected = [[step, 1.0 / step, float(step - 1)] for step in range(1, STEPS + 1)]
    assert len(found["wandb"]) == 3
    assert len(set(found["wandb"])) == 1
    check_rows(found["rows"], [[step, batch] for step, _, batch in expected], kills=(350, 405))
    (run,) = found["mlflow"]
    assert run["status"] == "FINISHED"
    assert run["train/loss"] == [row[:2] for row in expected]
    assert run["batch"] == [[step, batch] for step, _, batch in expected]
    with (tmp_path / "files/csv/version_0/metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["batch"]] == list(range(1, STEPS + 1))
    board = EventAccumulator(str(tmp_path / "files/lightning_logs/version_0"), {"scalars": 0}).Reload()
    assert [event.step for event in board.Scalars("batch")] == list(range(1, STEPS + 1))
    metrics = tmp_path / "runs" / "tracked" / "metrics"
    runs = json.loads((metrics / RUNS_FILE).read_text())
    files = {"CSVLogger-2": "version_0", "TensorBoardLogger-3": "version_0"}
    assert runs == {"WandbLogger-0": found["wandb"][0], "MLFlowLogger-1": run["id"], **files}
    assert [event["event"] for event in read_events(metrics / "events.jsonl")].count("started") == 3


def check_rows(attempts, expected, kills):
    """No step twice; rows that W&B still held in memory at a kill may be missing."""
    rows = [row for attempt in attempts for row in attempt]
    steps = [step for step, _ in rows]
    assert steps == sorted(set(steps))
    assert all(row in expected for row in rows)
    for attempt, first in zip(attempts, (expected[0][0], *kills), strict=True):
        assert [step for step, _ in attempt] == list(range(first, first + len(attempt)))
    assert attempts[-1][-1] == expected[-1]


def test_trackio_gets_each_step_once_by_the_logger_of_the_guide(genlight, command, tmp_path):
    if not (PACKAGES / "trackio").is_dir():
        pytest.importorskip("trackio")
    (text,) = [text for _, title, text in blocks(GUIDE) if title == "logged/trackio_logger.py"]
    (tmp_path / "trackio_logger.py").write_text(text)
    logger = {"class_path": "trackio_logger.TrackioLogger", "init_args": {"project": "demo", "run": "tracked"}}
    (tmp_path / "job.json").write_text(json.dumps(JOB | {"lightning": {"accelerator": "cpu", "logger": logger}}))
    for kill_at in (350, 0):
        genlight("run", "job.json", kill_at=kill_at)
    reads = "from trackio.sqlite_storage import SQLiteStorage as S; import json; rows = S.get_logs('demo', 'tracked')"
    found = command(f"{reads}; print(json.dumps([[row['step'], row['batch']] for row in rows]))")
    assert sorted(json.loads(found.stdout)) == [[step, float(step - 1)] for step in range(1, STEPS + 1)]


MODULE = """
import os, signal
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel


class Killed(BoringModel):
    def training_step(self, batch, batch_idx):
        if self.global_step == int(os.environ["KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("train/loss", 1.0 / (1 + self.global_step))
        self.log("batch", float(self.global_step))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(300, 32))

    def val_dataloader(self):
        return []
"""
FIT = {
    "model": {"class_path": "module.Killed"},
    "trainer": {
        "max_steps": 300,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "logger": [
            *JOB["lightning"]["logger"][:2],
            {"class_path": "genlight.reporters.EventLogger", "init_args": {"path": "events.jsonl", "run_id": "fit"}},
        ],
        "callbacks": [
            {
                "class_path": "genlight.callbacks.Checkpoint",
                "init_args": {"dirpath": "checkpoints", "every_n_steps": 100, "asynchronous": False},
            }
        ],
    },
}


def test_a_fit_of_any_module_that_is_killed_is_one_run_with_each_step(genlight, command, tmp_path):
    """Lightning's own loop counts its first batch as step 0."""
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "fit.yaml").write_text(json.dumps(FIT))
    for kill_at in (250, -1):
        said = genlight("fit", "--config", "fit.yaml", "--resume", "auto", kill_at=kill_at)

    found = json.loads(command(READ).stdout)

    assert len(set(found["wandb"])) == 1
    expected = [[step, float(step)] for step in range(300)]
    (run,) = found["mlflow"]
    assert run["status"] == "FINISHED"
    assert run["batch"] == expected
    check_rows(found["rows"], expected, kills=(250,))
    assert "not checkpoint records" not in said


ARTIFACTS = """
import lightning.pytorch as pl
import wandb
from lightning.pytorch.demos.boring_classes import BoringModel
from genlight.callbacks import Checkpoint, CheckpointHook, TrainerHook, TrainerHookAdapter

class Notes(TrainerHook):
    optional_reads = ("latest_wandb_uri",)

    def on_epoch_end(self, trainer_state):
        print("noted", trainer_state.epoch, trainer_state.latest_wandb_uri, trainer_state.latest_checkpoint_uri)

run = wandb.init(project="demo", id="r1")
logged = []
keep = run.log_artifact
run.log_artifact = lambda artifact, **options: (logged.append(artifact), keep(artifact, **options))
hooks = [TrainerHookAdapter(hook) for hook in (Notes(), CheckpointHook(interval=2, wandb_run=run))]
trainer = pl.Trainer(
    accelerator="cpu", max_epochs=2, limit_train_batches=2, logger=False, enable_progress_bar=False,
    callbacks=[Checkpoint("c"), *hooks],
)
trainer.fit(BoringModel())
(artifact,) = logged
print("noted", artifact.name, artifact.type, *sorted(artifact.manifest.entries))
run.finish()
"""


def test_a_checkpoint_hook_keeps_whole_checkpoints_as_artifacts_of_wandb(command, tmp_path):
    done = command(ARTIFACTS)
    assert done.returncode == 0, done.stderr

    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("noted ")]
    first, second, artifact = lines
    assert first == ["1", "None", "None"]
    epoch, uri, record = second
    assert (epoch, record) == ("2", str(tmp_path / "c" / "step-00000004.json"))
    assert uri.startswith("wandb://")
    assert uri.endswith("/demo/r1-checkpoint:epoch-2")
    name, kind, *entries = artifact
    assert (name, kind) == ("r1-checkpoint", "model")
    files = [path for path in (tmp_path / "c").rglob("*") if "00000004" in str(path) and path.is_file()]
    assert entries == sorted(str(path.relative_to(tmp_path / "c")) for path in files)
