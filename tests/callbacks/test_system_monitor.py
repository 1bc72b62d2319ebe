"""The load of the machine comes with the metrics of a step."""

from __future__ import annotations

import time

import psutil
from lightning.pytorch.loggers.logger import DummyLogger

from genlight.callbacks import Hook, LogMetrics, SystemMonitor

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
    """Each step takes longer than the interval of the monitor."""

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


def test_a_training_that_is_shorter_than_the_interval_says_nothing(fit, counting_trainer):
    logger = Recorder()
    fit(counting_trainer(), [LogMetrics(1), SystemMonitor(every_s=3600.0)], steps=3, logger=logger)
    assert [step for step, _ in logger.told] == [1, 2, 3]
    assert not any(name.startswith("system/") for _, record in logger.told for name in record)


def test_a_machine_that_cannot_be_read_is_told_once_and_ends_nothing(fit, counting_trainer, monkeypatch, caplog):
    def refuses():
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refuses)
    monitor = SystemMonitor(every_s=0.001)
    trainer, _ = fit(counting_trainer(), [monitor, TakesTime()], steps=20)
    assert trainer.global_step == 20
    assert caplog.text.count("SystemMonitor failed in on_train_batch_end; training continues") == 1
    assert monitor.failures == {"on_train_batch_end": 20}
