"""``genlight fit`` and stop signals: the exit code says that the fit can be resumed, whenever the signal comes."""

import signal

import psutil
import pytest

from genlight.reporters import read_events

pytestmark = pytest.mark.slow

FEED = {"class_path": "genlight.adapter.ArrowDataModule", "init_args": {"parquet_paths": "x.parquet", "batch_size": 1}}
TWO = {"devices": 2, "strategy": "ddp"}


def test_a_signal_while_data_is_prepared_ends_a_fit_before_its_first_step(job, fit):
    process = fit({"class_path": "loader_data.Prepared"}, at="nowhere")
    job.wait_until(job.reached, process)
    process.send_signal(signal.SIGINT)
    job.wait_until(lambda: "SIGINT: the run saves a checkpoint" in job.output(), process)  # acknowledged at once
    job.go()

    assert process.wait(120) == 75, job.output()
    assert "Traceback" not in job.output()
    assert not list((job.folder / "checkpoints").glob("*.json"))


def test_all_ranks_of_a_stopped_fit_end_with_the_same_code(job, fit, torchrun_environs):
    ranks = [fit(FEED, rank=1, environ=environ, **TWO) for environ in torchrun_environs(2)]
    job.wait_until(lambda: job.reached(1), ranks[1])
    ranks[1].send_signal(signal.SIGTERM)
    job.go()

    assert [process.wait(120) for process in ranks] == [75, 75], job.output()
    assert list((job.folder / "checkpoints").glob("step-*.json"))
    assert {path.name[:5] for path in (job.folder / "checkpoints").glob("*.json")} == {"step-"}


def test_a_killed_rank_is_named_and_ends_a_fit_while_rank_zero_hangs(job, fit):
    events = {"class_path": "genlight.reporters.EventLogger", "init_args": {"path": "events.jsonl", "run_id": "fit"}}
    process = fit(FEED, at="train_step:12", plan={"holds": 600.0}, logger=events, **TWO)
    job.wait_until(job.reached, process)
    (other,) = psutil.Process(process.pid).children()
    other.kill()

    assert process.wait(120) == 1, job.output()
    assert "rank 1 was killed by signal 9" in job.output()
    *_, last = read_events(job.folder / "events.jsonl")
    assert (last["event"], last["category"]) == ("failed", "train-step")
    assert "rank 1 was killed by signal 9" in last["error"]
