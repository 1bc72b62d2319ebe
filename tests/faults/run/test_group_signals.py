"""A stop signal to the process group, as schedulers and terminals send it: data workers receive it too."""

import os
import signal
import time

import psutil
import pytest

from support.forked import is_alive

pytestmark = pytest.mark.slow

FEED = {
    "class_path": "genlight.adapter.ArrowDataModule",
    "init_args": {"parquet_paths": "x.parquet", "batch_size": 1, "workers": 2},
}


def own_loader(**arguments):
    return {"class_path": "loader_data.OwnLoader", "init_args": arguments}


def signal_group(job, process, number=signal.SIGTERM, *, workers_stay=True):
    """Signal the process group while a step runs, then let the step end; return the exit code."""
    job.wait_until(job.reached, process)
    workers = [worker.pid for worker in psutil.Process(process.pid).children()]
    os.killpg(process.pid, number)
    if workers_stay:
        time.sleep(0.5)
        assert all(map(is_alive, workers)), job.output()
    else:
        job.wait_until(lambda: not any(map(is_alive, workers)))
    job.go()
    return process.wait(120)


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (FEED, signal.SIGTERM),
        (own_loader(method="spawn", persistent=True), signal.SIGINT),
    ],
    ids=["feed", "spawned persistent, Ctrl-C"],
)
def test_data_workers_stay_until_the_step_is_done_and_saved(job, fit, data, number):
    assert signal_group(job, fit(data), number) == 75, job.output()
    assert list((job.folder / "checkpoints").glob("step-0000000*.json"))
    assert "DataLoader worker" not in job.output()


def test_workers_that_the_signal_ended_do_not_hide_the_stop_of_a_run(job):
    plan = {"at": "train_step:3", "holds": 60.0}
    job.write(plan=plan, trainer="fault_trainer:LosesWorkers", mock_batches=..., max_steps=4000)
    assert signal_group(job, job.fork_run(), workers_stay=False) == 75, job.output()
    failed = job.terminal_event()
    assert (failed["error"], failed["category"], failed["resumable"]) == ("preempted", "preempted", True)
    assert job.server.posted("/terminal")[-1]["error"] == "preempted"
    assert (job.out / "checkpoints" / "step-00000002.json").exists()
    assert "Traceback" not in job.output()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_worker_outlives_a_training_process_that_was_killed(job, fit, method):
    process = fit(own_loader(method=method))
    job.wait_until(job.reached, process)
    workers = [worker.pid for worker in psutil.Process(process.pid).children()]
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    job.wait_until(lambda: not any(map(is_alive, workers)))
