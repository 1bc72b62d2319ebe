"""The guides work, with the real packages that they use; ``tests/slurm`` runs what needs a cluster.

`make` installs these packages into `.venv/guides`, apart from everything else: torchmetrics imports an installed
transformers, and each process that loads Lightning takes a second longer.
"""

from __future__ import annotations

import configparser
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from genlight.adapter.runner.transport import read_result
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from support.snippets import run_snippets

GUIDES = Path(__file__).parents[2] / "examples" / "guides"
PACKAGES = Path(sys.prefix) / "guides"

pytestmark = pytest.mark.slow
needs_packages = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="`make` installs the packages of the guides into .venv/guides"
)


@pytest.fixture
def environ(tmp_path):
    """The environment of a reader who has installed what the guide needs, and who is not on the network."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "HF_"))}
    return mine | {
        "PYTHONPATH": str(PACKAGES),
        "HF_HUB_OFFLINE": "1",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "JUPYTER_PLATFORM_DIRS": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }


@pytest.fixture
def follow(tmp_path, environ):
    """Run a guide in an empty folder; gives the folder."""

    def run(page: str, **more: str) -> Path:
        assert run_snippets(GUIDES / page, tmp_path, environ=environ | more)
        return tmp_path

    return run


@needs_packages
def test_a_trainer_of_hugging_face_keeps_its_loop(follow):
    assert validate_events(follow("huggingface.md") / "kept/events.jsonl") == []


@needs_packages
def test_an_adapter_is_trained_alone_and_merged_at_the_end(follow):
    folder = follow("lora.md")

    files = (folder / "runs/lora/checkpoints/final").glob("*.safetensors")
    assert sum(file.stat().st_size for file in files) < (folder / "base/model.safetensors").stat().st_size
    assert (folder / "merged/config.json").exists()


@needs_packages
def test_each_logger_gets_the_metrics_of_a_job(follow):
    folder = follow("loggers.md")

    logs = folder / "logs"
    with (logs / "csv" / "version_0" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["train/loss"]] == ["5", "10", "15", "20"]
    assert list((logs / "tensorboard" / "version_0").glob("events.out.tfevents.*"))
    assert list((logs / "wandb").glob("offline-run-*/run-*.wandb"))
    (losses,) = (logs / "mlflow").rglob("metrics/train/loss")
    assert len(losses.read_text().splitlines()) == 4
    log = folder / "logged" / "runs" / "logged" / "metrics" / "events.jsonl"
    assert validate_events(log) == []
    assert next(read_events(log))["metadata"]["notes"] == "four loggers at once"


@needs_packages
def test_a_sweep_leaves_one_run_for_each_setting(follow):
    runs = follow("sweeps.md", PYTHONPATH="") / "swept" / "runs"

    assert sorted(path.name for path in runs.iterdir()) == ["lr-0.1", "trial-0.02"]


@needs_packages
def test_a_stateful_loader_resumes_exactly(follow):
    folder = follow("stateful_loader.md")

    assert (folder / "cut-2" / "final.json").exists()


@needs_packages
def test_the_notebook_runs_in_a_separate_kernel(tmp_path, environ):
    script = (
        "import nbclient, nbformat, sys\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=240).execute()\n"
        "print(notebook.cells[-1].outputs[-1]['data']['text/plain'])\n"
    )
    command = [sys.executable, "-c", script, str(GUIDES / "notebook.ipynb")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    assert "weight" in done.stdout


def test_the_notebook_is_kept_without_output():
    notebook = json.loads((GUIDES / "notebook.ipynb").read_text())

    assert [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_commands_of_the_guide_on_clusters_run_as_they_stand(tmp_path):
    environ = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}
    assert run_snippets(GUIDES / "cluster.md", tmp_path, environ=environ) == 7

    assert (tmp_path / "demo/runs/first/checkpoints/final.json").exists()
    assert read_result(tmp_path / "out/result.pickle")["text"] == "hello"


def test_the_commands_of_the_guide_on_seeing_runs_write_a_page_of_both(tmp_path):
    assert run_snippets(GUIDES / "seeing.md", tmp_path) == 9
    page = (tmp_path / "seen.html").read_text()
    assert '"run_id": "slow"' in page
    assert '"run_id": "quick"' in page


def test_each_migration_trains_as_before(tmp_path):
    """All comparisons of the guide exit with 0; with ``--rtol 0`` that means equal bits."""
    sections = (GUIDES / "migration.md").read_text().split("\n## ")[1:5]
    assert [section.splitlines()[0].removeprefix("From ") for section in sections] == [
        *("the gen_worker runtime", "a plain loop", "a LightningModule", "six-hook trainers"),
    ]
    assert all("```sh\ngenlight " in section for section in sections)
    assert run_snippets(GUIDES / "migration.md", tmp_path) == 9

    for name in ("worker", "six"):
        events = list(read_events(tmp_path / "runs" / name / "metrics" / "events.jsonl"))
        assert events[-1]["event"] == "completed"


def test_a_worker_stops_its_child_within_its_grace(follow):
    """Also the files for platforms that do not run here: they can be parsed and name the exit code."""
    folder = follow("platforms.md", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    end = list(read_events(folder / "demo" / "runs" / "child" / "metrics" / "events.jsonl"))[-1]
    assert (end["event"], end["category"], end["resumable"]) == ("failed", "preempted", True)

    sky = yaml.safe_load((folder / "sky.yaml").read_text())
    assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert yaml.safe_load((folder / "train.dstack.yml").read_text())["retry"]["duration"] == "2d"
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(folder / "genlight-demo.service")
    assert unit["Service"]["RestartPreventExitStatus"] == "2"


def test_a_lightning_project_trains_validates_and_exports(follow):
    folder = follow("lightning_project.md", PYTHONPATH=os.environ.get("PYTHONPATH", ""))

    assert validate_events(folder / "run/events.jsonl") == []
    assert (folder / "project.ckpt").exists()


def test_a_class_of_others_trains_and_stops_as_process_1(follow):
    """The entry point runs as in a container, in a namespace of processes, if this system allows that."""
    folder = follow("containers.md", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert (folder / "runs/tried/checkpoints/final.json").exists()

    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system allows no namespace of processes")
    environ = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}
    command = [*alone, "sh", "entrypoint.sh", "--set", "max_steps=10000000"]
    with subprocess.Popen(command, cwd=folder, env=environ) as outer:
        log = folder / "runs/first/metrics/events.jsonl"
        while not (log.exists() and b'"metric"' in log.read_bytes()):
            assert outer.poll() is None
            time.sleep(0.1)
        (first,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        assert b"genlight" in Path(f"/proc/{first}/cmdline").read_bytes(), "the shell is still process 1"
        os.kill(int(first), signal.SIGTERM)
        assert outer.wait(120) == 75


@pytest.mark.parametrize("name", ["gpt", "diffusion"])
def test_the_commands_of_an_example_run_as_they_stand(name, examples, tmp_path):
    for folder in (name, "digits"):
        shutil.copytree(examples / folder, tmp_path / folder, ignore=shutil.ignore_patterns("runs", "*.bin"))

    job = tmp_path / name / "job.json"
    job.write_text(json.dumps(json.loads(job.read_text()) | {"max_steps": 30, "sample_every": 10}))

    assert run_snippets(tmp_path / name / "README.md", tmp_path / name) >= 3
    written = {path.name for path in (tmp_path / name / "runs").glob("*/samples/*/*.*")}
    assert written == {"text.txt" if name == "gpt" else "digits.png"}


def test_the_page_on_determinism_has_a_program_that_runs(follow):
    follow("determinism.md", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
