"""SIGTERM to the whole process group, as schedulers and container runtimes send it: data workers get it too."""

import json
import os
import signal

import pytest

pytestmark = pytest.mark.slow


def terminate_group(job, process):
    job.wait_until(job.reached, process)
    os.killpg(process.pid, signal.SIGTERM)
    job.go()
    return process.wait(120)


def test_workers_of_the_feed_stay_until_the_step_is_done_and_saved(job, fork_server, kill_after):
    checkpoint = {"class_path": "genlight.callbacks.Checkpoint", "init_args": {"dirpath": "checkpoints"}}
    plan = {"at": "train_step:3", "holds": 60.0}
    data = {"parquet_paths": "x.parquet", "batch_size": 1, "workers": 2}
    trained = {"run_id": "faulty", "max_steps": 4000, "hyperparams": plan}
    config = {
        "trainer": {"max_steps": 4000, "accelerator": "cpu", "logger": False, "callbacks": [checkpoint]},
        "model": {
            "class_path": "genlight.adapter.ContractModule",
            "init_args": {"plugin": "fault_trainer:Faulty", "job": trained},
        },
        "data": {"class_path": "genlight.adapter.ArrowDataModule", "init_args": data},
    }
    (job.folder / "fit.yaml").write_text(json.dumps(config))
    process = fork_server.start(job, "fit", "--config", "fit.yaml")
    kill_after(process)

    assert terminate_group(job, process) == 75, (job.folder / "stderr").read_text()
    assert list((job.folder / "checkpoints").glob("step-0000000*.json"))
    assert "DataLoader worker" not in (job.folder / "stderr").read_text()


def test_workers_of_a_loader_of_the_users_own_are_lost_to_the_signal_which_is_told_as_the_stop(
    job, fork_server, kill_after
):
    job.write(
        plan={"at": "train_step:3", "holds": 60.0},
        trainer="fault_trainer:LoadsInWorkers",
        mock_batches=...,
        max_steps=4000,
        resume_from_latest=True,
    )
    process = fork_server.start(job, "run", str(job.spec))
    kill_after(process)

    assert terminate_group(job, process) == 75, (job.folder / "stderr").read_text()
    failed = job.terminal_event()
    assert (failed["error"], failed["category"], failed["resumable"]) == ("preempted", "preempted", True)
    assert job.server.posted("/terminal")[-1]["error"] == "preempted"
    assert (job.out / "checkpoints" / "step-00000002.json").exists()
    assert "Traceback" not in (job.folder / "stderr").read_text()
