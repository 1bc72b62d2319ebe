"""Reports at a cadence: the heartbeat, the load of the machine, and how a training spent its time."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Evaluate, Goodput, Heartbeat, Hook, LogMetrics, SystemMonitor, WriteSamples
from genlight.callbacks.hook.events import run_state_of
from genlight.reporters import EventLogger
from genlight.reporters.events.goodput import account_of
from genlight.reporters.events.reader import read_events as read_log
from genlight.reporters.telemetry import read_events
from support.messages import refusal
from support.trainer_class import Counts, Trains
from support.trainers import quiet_trainer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


class Reports(Counts):
    def __init__(self, **metrics: float) -> None:
        self.metrics = metrics

    def train_step(self, batch, state, ctx):
        return StepResult(metrics=self.metrics)


def rows(*counts: int) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 2 * count).reshape(count, 2) for count in counts]


def flops_of_a_step(batch: torch.Tensor) -> int:
    trains = Trains()
    state = trains.configure(SimpleNamespace(device="cpu"))
    with FlopCounterMode(display=False) as counter:
        trains.train_step(batch, state, None)
    return counter.get_total_flops()


def test_it_beats_at_its_cadence_with_what_the_contract_lists(fit, path: Path) -> None:
    fit(Trains(), [Heartbeat(2, "digits", path=path)], steps=7, batches=rows(*[3] * 7))

    events = read_events(path)
    assert [event["step"] for event in events] == [2, 4, 6]
    assert {(event["event"], event["scenario"], event["success"]) for event in events} == {
        ("heartbeat", "digits", True)
    }
    assert len({event["run_id"] for event in events}) == 1
    for event in events:
        figures = event["artifacts"]
        assert event["throughput_steps_per_sec"] == figures["steps_per_sec"] > 0
        assert event["duration_sec"] > 0
        assert event["ttfi_sec"] > 0
        assert figures["peak_memory_bytes"] >= figures["memory_bytes"] > 2**20
        assert event["flops_estimate"] == pytest.approx(flops_of_a_step(rows(3)[0]) * figures["steps_per_sec"])
    assert [event["duration_sec"] for event in events] == sorted(event["duration_sec"] for event in events)


def test_it_works_with_any_module_and_sends_its_figures_to_every_logger(fit_plain, path: Path, tmp_path: Path) -> None:
    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    fit_plain([Heartbeat(2, path=path)], steps=4, logger=logger)

    events = read_events(path)
    assert [event["step"] for event in events] == [2, 4]
    assert events[0]["flops_estimate"] > 0
    logged = [event for event in read_log(tmp_path / "events.jsonl") if event.get("name") == "perf/steps_per_sec"]
    assert [event["value"] for event in logged] == [event["throughput_steps_per_sec"] for event in events]


def test_operations_are_counted_again_when_batches_change_their_shape(fit, path: Path) -> None:
    batches = rows(*[3] * 4, *[6] * 6)

    fit(Trains(), [Heartbeat(2, path=path)], steps=10, batches=batches)

    per_step = [event["flops_estimate"] / event["throughput_steps_per_sec"] for event in read_events(path)]
    small, large = (flops_of_a_step(batch) for batch in rows(3, 6))
    # At step 6 the new shape is seen, step 7 is counted.
    assert per_step == pytest.approx([small, small, small, large, large])


def test_counting_changes_no_bit(fit, path: Path) -> None:
    weights = []
    for callbacks in ([], [Heartbeat(1, path=path)]):
        _, module = fit(Trains(), callbacks, steps=6, batches=rows(3, 3, 5, 2, 3, 3))
        weights.append(module.state_dict())

    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_step_that_fails_while_it_is_counted_leaves_torch_as_it_was(fit, path: Path) -> None:
    with refusal(RuntimeError):
        fit(Trains(), [Heartbeat(5, path=path)], steps=3, batches=[*rows(3), torch.ones(3, 5), *rows(3)])

    assert _get_current_dispatch_mode_stack() == []


def test_a_formula_that_fails_ends_the_count_and_not_the_step(fit, path: Path, monkeypatch, caplog) -> None:
    def fails(*args, **kwargs):
        raise AssertionError("no such shape")

    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.addmm, fails)
    fit(Trains(), [Heartbeat(2, path=path)], steps=4, batches=rows(*[3] * 4))

    assert [event["flops_estimate"] for event in read_events(path)] == [None, None]
    assert "cannot be counted: AssertionError: no such shape" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, (None, None, None)),
        ({"flops": 6e12, "power_watts": 300.0}, (6e12, 300.0, 2e10)),
        ({"flops_estimate": 3e12, "flops": 1.0, "watts_estimate": 100.0, "power_watts": 1.0}, (3e12, 100.0, 3e10)),
        ({"flops": 0.0, "watts_estimate": 0.0, "power_watts": 5.0}, (0.0, 0.0, None)),
    ],
)
def test_figures_that_cannot_be_measured_are_taken_from_the_metrics(fit, path: Path, metrics, expected) -> None:
    fit(Reports(**metrics), [Heartbeat(2, path=path)], steps=2)

    (event,) = read_events(path)
    assert (event["flops_estimate"], event["watts_estimate"], event["flops_per_watt"]) == pytest.approx(expected)


def test_tokens_and_the_share_of_the_peak_are_reported_if_they_are_known(fit, path: Path) -> None:
    fit(Reports(tokens=512, flops=3e9), [Heartbeat(2, path=path, peak_flops=1.2e10)], steps=2)
    fit(Reports(loss=1.0), [Heartbeat(2, path=path)], steps=2)

    known, unknown = (event["artifacts"] for event in read_events(path))
    assert known["tokens_per_sec"] == pytest.approx(512 * known["steps_per_sec"])
    assert known["mfu"] == pytest.approx(0.25)
    assert unknown["tokens_per_sec"] is unknown["mfu"] is None
    for invalid in ({"peak_flops": 0}, {"scenario": ""}):
        with refusal(ValueError):
            Heartbeat(**invalid)


def test_throughput_after_a_resume_leaves_out_the_steps_before(fit, path: Path, tmp_path: Path) -> None:
    """The rate counts the 3 steps of this attempt, not all 100."""
    for steps, resumes in ((97, {}), (100, {"ckpt_path": tmp_path / "c" / "final.json"})):
        callbacks = [Checkpoint(tmp_path / "c", replace_existing=True), Heartbeat(50, path=path)]
        fit(Counts(), callbacks, steps=steps, batches=range(200), enable_checkpointing=True, **resumes)

    first, second = read_events(path)
    assert (first["step"], second["step"]) == (50, 100)
    assert first["run_id"] == second["run_id"]
    figures = second["artifacts"]
    assert figures["attempt_steps_per_sec"] * second["duration_sec"] == pytest.approx(3)
    assert figures["steps_per_sec"] == pytest.approx(figures["attempt_steps_per_sec"])


def test_a_job_has_one_run_id_in_events_and_telemetry_and_a_cadence_of_0_is_off(fit, path: Path) -> None:
    class Names(Hook):
        def setup(self, trainer, pl_module, stage):
            run_state_of(trainer).run_id = "job-7"

    beats = [Heartbeat(1, path=path), Heartbeat(0, path=path)]
    fit(Counts(), [Names(), *beats], steps=1, job=TrainingJobSpec("job-7", 1))

    assert [event["run_id"] for event in read_events(path)] == ["job-7"]


def test_a_file_that_cannot_be_written_is_warned_of_once_and_training_goes_on(fit, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").touch()

    trainer, _ = fit(Counts(), [Heartbeat(1, path=tmp_path / "file" / "m.jsonl")], steps=5)

    assert trainer.global_step == 5
    (record,) = [record for record in caplog.records if "telemetry is not written" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert record.exc_info is None
    assert "is not a directory" in record.getMessage()


NAMES = {
    "system/cpu_percent",
    "system/memory_percent",
    "system/memory_used_bytes",
    "system/disk_free_bytes",
    "system/process_cpu_percent",
    "system/process_memory_bytes",
}


class Recorder(DummyLogger):
    def __init__(self):
        super().__init__()
        self.told = []

    def log_metrics(self, metrics, step=None):
        self.told.append((step, dict(metrics)))


class TakesTime(Hook):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(0.005)


def test_the_load_of_the_machine_comes_in_the_record_of_a_step(fit, counting_trainer):
    logger = Recorder()
    fit(counting_trainer(), [LogMetrics(10), SystemMonitor(every_s=0.001), TakesTime()], steps=30, logger=logger)

    assert [step for step, _ in logger.told if step % 10 == 0] == [10, 20, 30]
    for step, record in logger.told:
        if step % 10 == 0:
            assert "train/loss" in record
        assert record.keys() >= NAMES
        assert 0 <= record["system/cpu_percent"] <= 100
        assert 0 < record["system/memory_percent"] <= 100
        assert record["system/process_memory_bytes"] > 10e6
        assert all(type(value) is float for name, value in record.items() if name.startswith("system/"))


def test_a_machine_that_cannot_be_read_is_told_once_and_ends_nothing(fit, counting_trainer, monkeypatch, caplog):
    def refuses():
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refuses)
    monitor = SystemMonitor(every_s=0.001)
    trainer, _ = fit(counting_trainer(), [monitor, TakesTime()], steps=20)
    assert trainer.global_step == 20
    assert caplog.text.count("SystemMonitor failed in on_train_batch_end; training continues") == 1
    assert monitor.failures == {"on_train_batch_end": 20}


class Slow(Counts):
    def configure(self, ctx):
        return {**super().configure(ctx), "generate_sample": lambda: time.sleep(0.1)}

    def train_step(self, batch, state, ctx):
        time.sleep(0.002)
        return super().train_step(batch, state, ctx)

    def evaluate(self, state, ctx):
        time.sleep(0.05)
        return {"score": 1.0}

    def state_dict(self, state):
        return {}


def fit_slowly(folder: Path, *callbacks: pl.Callback, steps: int = 40) -> Path:
    module = ContractModule(Slow(), TrainingJobSpec(run_id="r", max_steps=steps))
    logger = EventLogger(folder / "events.jsonl", run_id="r")
    quiet_trainer(*callbacks, logger=logger, max_steps=steps, max_epochs=-1).fit(module, [0] * steps)
    return folder / "events.jsonl"


def test_each_part_is_what_held_training_up_and_all_of_them_are_the_whole(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=20)
    samples = WriteSamples(tmp_path / "samples", 30)
    log = fit_slowly(tmp_path, Goodput(every_s=1e-6), LogMetrics(5), Evaluate(10), samples, checkpoint)

    account = account_of(log)

    assert account is not None
    seconds = account.seconds
    assert sum(seconds.values()) == pytest.approx(account.wall_s, rel=0.01)
    assert seconds["evaluation"] >= 4 * 0.05 - 0.002
    assert 0.1 - 0.002 <= seconds["samples"] < account.wall_s
    assert seconds["checkpoint"] > 0
    assert seconds["steps"] >= 40 * 0.002
    assert seconds["start_up"] > 0
    assert seconds["lost"] == seconds["idle"] == 0


@pytest.mark.parametrize(("every_s", "steps"), [(3600.0, []), (3.0, [4, 24, 40])])
def test_the_last_step_reports_too_unless_training_is_shorter_than_the_cadence(tmp_path, monkeypatch, every_s, steps):
    seconds = itertools.count()  # one passes from look to look, at steps 1, 2, 4, 8, 16 and so on
    monkeypatch.setattr("genlight.callbacks.telemetry.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    log = fit_slowly(tmp_path, Goodput(every_s))

    assert [event["step"] for event in read_log(log) if event.get("name") == "time/steps"] == steps
