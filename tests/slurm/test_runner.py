"""The runner as the program of a job: a function with its context, its result and its end."""

import json
import os
import subprocess
import sys

import pytest

from genlight.adapter.runner.transport import read_result, write_pickle

pytestmark = pytest.mark.slurm

TASKS = """
import time
from pathlib import Path
from genlight.adapter import JobContext

def place(factor, context: JobContext | None = None):
    return [factor * context.world_size, list(context.hostnames), context.rank]

def fail():
    raise ValueError("no such thing")

def wait(job):
    Path(f"waits-{job.rank}").touch()
    time.sleep(600)

class Note:
    requires_runner_transport = True

    def on_completed_ctx(self, context):
        job = context.job_context.job_id
        Path(f"completed-{context.emitted_by}-{job}").write_text(f"{context.status} {context.exit_code}")

    def on_end_run_job_ctx(self, context):
        Path(f"end-{context.job_context.rank}").write_text(f"{context.status} {context.error_type} {context.exit_code}")
"""


@pytest.fixture
def submit(slurm, tmp_path, monkeypatch):
    """Submits a function of the module above; two tasks call it, one on each node."""
    (tmp_path / "slurm_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    import slurm_tasks

    write_pickle(tmp_path / "callbacks", [slurm_tasks.Note()])
    sys.modules.pop("slurm_tasks")

    def start(function, *options):
        command = f"srun {sys.executable} -m genlight.adapter.runner --module slurm_tasks --function {function} "
        command += f"--output-file result --result json --callbacks-file callbacks {' '.join(options)}"
        return slurm.submit("--nodes=2", "--ntasks=2", "--output=out", f"--wrap={command}", cwd=tmp_path)

    return start


def ends(folder):
    return [(folder / f"end-{rank}").read_text() for rank in range(2)]


def test_a_function_gets_its_context_and_its_result_comes_back(slurm, submit, tmp_path):
    write_pickle(tmp_path / "args", (10,))
    assert slurm.wait(submit("place", "--args-file args")) == ("COMPLETED", 0)

    assert json.loads((tmp_path / "result").read_text()) == [20, ["n9", "n10"], 0]
    assert ends(tmp_path) == ["success None 0", "success None 0"]


def test_a_submit_that_waits_reports_how_the_function_ended(slurm, submit, tmp_path):
    environ = slurm.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    genlight = [sys.executable, "-m", "genlight", "slurm", "submit", "--sbatch=wait", "--callbacks-file=callbacks"]
    for words, code in (
        (["slurm_tasks:place", "--args", "10", "--sbatch=array=0-1", "--result=json"], 0),
        (["slurm_tasks:fail"], 1),
    ):
        done = subprocess.run(
            [*genlight, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        completed = tmp_path / f"completed-client-{done.stdout.strip()}"
        assert completed.read_text() == f"{'success' if code == 0 else 'failure'} {code}"
    assert "ValueError: no such thing" in done.stderr
    (folder,) = tmp_path.glob("place-*")
    results = [read_result(folder / f"result-{task}.json") for task in range(2)]
    assert [(factor, rank) for factor, _, rank in results] == [(10, 0)] * 2


def test_sigterm_from_the_scheduler_is_reported_before_the_function_ends(slurm, submit, tmp_path):
    job = submit("wait")
    slurm.until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, "both tasks wait")
    slurm.call("scancel", "--signal=TERM", job)

    assert slurm.wait(job) == ("FAILED", 143)
    assert ends(tmp_path) == ["failure Terminated 143", "failure Terminated 143"]
