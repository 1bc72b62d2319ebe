"""What a machine does is read by a thread, and comes with the metrics of a step."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from genlight.callbacks import Hook, LogMetrics, SystemMonitor

PATIENCE_S = 120.0
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


class WaitsForAReading(Hook):
    """Holds training up until the thread has read, before each step that is a multiple of ten."""

    def __init__(self, monitor):
        self.monitor = monitor

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step % 10 == 9:
            end = time.monotonic() + PATIENCE_S
            while self.monitor._thread.is_alive() and self.monitor.next_due_step and time.monotonic() < end:
                time.sleep(0.005)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "genlight-system-monitor"]


def test_the_load_of_the_machine_comes_in_the_record_of_a_step(fit, counting_trainer):
    logger, monitor = Recorder(), SystemMonitor(every_s=0.01)
    fit(counting_trainer(), [LogMetrics(10), monitor, WaitsForAReading(monitor)], steps=30, logger=logger)

    assert [step for step, _ in logger.told if step % 10 == 0] == [10, 20, 30]
    for step, record in logger.told:
        if step % 10 == 0:
            assert "train/loss" in record
        assert record.keys() >= NAMES
        assert 0 <= record["system/cpu_percent"] <= 100
        assert 0 < record["system/memory_percent"] <= 100
        assert record["system/process_memory_bytes"] > 10e6
        assert all(type(value) is float for name, value in record.items() if name.startswith("system/"))
    assert threads() == []


def test_a_training_that_is_shorter_than_the_interval_says_nothing_and_ends_at_once(fit, counting_trainer):
    logger = Recorder()
    fit(counting_trainer(), [LogMetrics(1), SystemMonitor(every_s=3600.0)], steps=3, logger=logger)
    assert not any(name.startswith("system/") for _, record in logger.told for name in record)
    assert threads() == []


def test_its_thread_ends_with_a_training_that_fails(fit, counting_trainer):
    class Fails(counting_trainer):
        def train_step(self, batch, state, ctx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(Fails(), [SystemMonitor(every_s=0.01)])
    assert threads() == []


def test_a_machine_that_cannot_be_read_is_told_once_and_ends_nothing(fit, counting_trainer, monkeypatch, caplog):
    def refuses():
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refuses)
    monitor = SystemMonitor(every_s=0.01)
    trainer, _ = fit(counting_trainer(), [monitor, WaitsForAReading(monitor)], steps=20)
    assert trainer.global_step == 20
    assert caplog.text.count("/proc/meminfo") >= 1
    assert monitor.failures == {"on_train_batch_end": 1}


@pytest.mark.parametrize("every_s", [0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_not_positive_is_refused(every_s):
    with pytest.raises(ValueError, match="Invalid `every_s`"):
        SystemMonitor(every_s)
