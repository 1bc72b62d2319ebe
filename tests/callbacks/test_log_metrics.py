"""Metrics of a hosted trainer reach loggers, monitors and the run state at the cadence, and only then."""

import json
from fractions import Fraction
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from genlight.adapter import ContractModule
from genlight.adapter.contract.types import StepControlHints, StepResult, TrainingJobSpec
from genlight.callbacks import Hook, LogMetrics
from genlight.callbacks.hook.events import callbacks_of, publish_figures, publish_scores, run_state_of
from support.messages import refusal
from support.rank_processes import run_ranks


class Recorder(DummyLogger):
    def __init__(self):
        super().__init__()
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, metrics))


@pytest.mark.parametrize(
    ("every", "steps", "start", "reported"),
    [(1, 3, 0, [1, 2, 3]), (2, 5, 0, [2, 4]), (5, 4, 0, []), (0, 4, 0, []), (3, 10, 4, [6, 9])],
)
def test_every_logger_gets_metrics_at_the_cadence(fit, counting_trainer, every, steps, start, reported):
    loggers = [Recorder(), Recorder()]
    module = ContractModule(counting_trainer())
    module.resume_from(step=start)

    fit(None, [LogMetrics(every)], module=module, steps=steps, logger=loggers)

    assert [[step for step, _ in logger.calls] for logger in loggers] == [reported, reported]


def test_progress_bars_see_the_last_metrics_at_any_step_and_afterwards(fit, counting_trainer):
    seen = []

    class Bar(Hook):
        optional_reads = ("loss_stats",)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(trainer.progress_bar_metrics.get("train/loss"))

    trainer, _ = fit(counting_trainer(), [LogMetrics(2), Bar()], steps=5)

    assert seen == [None, 0.5, 0.5, 0.25, 0.25]
    assert trainer.progress_bar_metrics["train/loss"] == 0.25


def test_metrics_have_names_of_the_contract_the_rate_and_plain_floats(fit, counting_trainer):
    class Mine(counting_trainer):
        def train_step(self, batch, state, ctx):
            super().train_step(batch, state, ctx)
            return StepResult(metrics={"Loss": torch.tensor(0.25, requires_grad=True), "grad_norm": 2})

    logger = Recorder()
    trainer, _ = fit(Mine(), [LogMetrics(1)], steps=1, logger=logger)

    expected = {"train/loss": 0.25, "grad_norm": 2.0, "train/lr": 0.5}
    assert logger.calls == [(1, expected)]
    assert run_state_of(trainer).loss_stats == expected
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == expected
    assert trainer.progress_bar_metrics == expected


def test_a_step_that_skips_cadences_is_not_reported_later_either(fit, counting_trainer):
    class Mine(counting_trainer):
        def train_step(self, batch, state, ctx):
            result = super().train_step(batch, state, ctx)
            hints = StepControlHints(skip_cadence_emit=batch == 1)
            return SimpleNamespace(metrics=result.metrics, control=hints)

    logger = Recorder()
    fit(Mine(), [LogMetrics(2)], steps=5, logger=logger)

    assert [step for step, _ in logger.calls] == [4]


def test_a_module_adds_log_metrics_with_the_cadence_of_the_job_unless_there_is_one(fit, counting_trainer):
    job = TrainingJobSpec(run_id="r", max_steps=4, metric_every=2)

    trainer, _ = fit(counting_trainer(), [], job=job)
    assert [c.every_n_steps for c in callbacks_of(trainer) if isinstance(c, LogMetrics)] == [2]

    trainer, _ = fit(counting_trainer(), [LogMetrics(3)], job=job)
    assert [c.every_n_steps for c in callbacks_of(trainer) if isinstance(c, LogMetrics)] == [3]


def test_a_metric_that_is_no_number_ends_the_run_with_its_name(fit, counting_trainer):
    class Mine(counting_trainer):
        def train_step(self, batch, state, ctx):
            return StepResult(metrics={"loss": torch.zeros(2)})

    with refusal(TypeError):
        fit(Mine(), [LogMetrics(1)])


def test_a_module_that_hosts_no_trainer_class_causes_a_warning(fit_plain, caplog):
    logger = Recorder()

    trainer = fit_plain([LogMetrics(1)], logger=logger)

    assert trainer.global_step == 4
    assert logger.calls == []
    assert "LogMetrics sends no metrics of steps: Plain does not host a trainer and logs by itself" in caplog.messages


@pytest.mark.parametrize("value", [2**70, Fraction(1, 3), np.uint64(2**64 - 1), np.longdouble(0.25)])
def test_monitors_see_numbers_that_have_no_torch_type(fit, counting_trainer, value):
    class Mine(counting_trainer):
        def train_step(self, batch, state, ctx):
            super().train_step(batch, state, ctx)
            return StepResult(metrics={"count": value})

    trainer, _ = fit(Mine(), [LogMetrics(0)])

    assert trainer.callback_metrics["count"].item() == pytest.approx(float(value))


class Measures(Hook):
    critical = True
    writes = ("figures",)

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps:
            publish_figures(trainer, {"measured": float(trainer.global_step)})


def rows(fit, plugin, callbacks, **settings):
    logger = Recorder()
    trainer, _ = fit(plugin, callbacks, logger=logger, **settings)
    others = [(step, {name: row[name] for name in row if not name.startswith("train/")}) for step, row in logger.calls]
    return trainer, others


def test_loss_rollout_scores_and_figures_of_a_step_are_one_record(quiet, counting_trainer):
    class Acts(counting_trainer):
        def rollout(self, state, ctx):
            values = {"reward": [0.5, 1.5], "length": torch.tensor(3), "map": "maze", "empty": [], "none": None}
            return range(2), {**values, "nested": {"a": 1}}

    class Scores(Hook):
        writes = ("eval_scores",)

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                publish_scores(trainer, {"val": 0.25}, 4)

    hooks = [LogMetrics(2), Measures({4}), Scores()]  # in the wrong order
    logger = Recorder()
    trainer = pl.Trainer(**{**quiet, "logger": logger}, callbacks=hooks, max_steps=4)
    trainer.fit(ContractModule(Acts(), TrainingJobSpec("r", 4)))

    assert [step for step, _ in logger.calls] == [2, 4]
    record = logger.calls[1][1]
    assert {"train/loss": 0.25, "val": 0.25, "measured": 4.0}.items() <= record.items()
    rollout = {"rollout/reward": 1.0, "rollout/length": 3.0}
    assert {name: value for name, value in record.items() if name.startswith("rollout/")} == rollout
    assert "measured" not in trainer.callback_metrics


@pytest.mark.parametrize("every", [0, 1000])
def test_figures_are_logged_at_their_step_also_between_two_cadences(fit, counting_trainer, every):
    _, logged = rows(fit, counting_trainer(), [LogMetrics(every), Measures({3})], steps=5)
    assert logged == [(3, {"measured": 3.0})]


def test_a_late_score_is_logged_with_its_step(fit, counting_trainer):
    class Scores(Hook):
        writes = ("eval_scores",)

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                publish_scores(trainer, {"val": 0.25}, 2)

    _, logged = rows(fit, counting_trainer(), [LogMetrics(0), Scores()], steps=4)
    assert logged == [(4, {"val": 0.25, "trainer/evaluated_step": 2.0})]


def test_metrics_of_several_ranks_are_rank_zeros_or_their_mean(tmp_path):
    run_ranks("log_metrics_ranks.py", tmp_path)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert zero["zero"]["logged"] == [[step, {"train/loss": 0.0}] for step in (2, 4, 6)]
    mean = {"train/loss": 5.0, "only/one": 7.0}
    # Rank 1 suppressed its metrics of step 4.
    assert zero["mean"]["logged"] == [[2, mean], [4, {"train/loss": 0.0}], [6, mean]]
    assert zero["mean"]["losses"] == [5.0, 0.0, 5.0]
    assert one["zero"]["losses"] == one["mean"]["losses"] == [], "only rank zero reports"
    for rank in (zero, one):
        assert rank["mean"]["exchanges"] - rank["zero"]["exchanges"] == 3, "one exchange for each report"


def test_an_unknown_reduction_is_refused():
    with refusal(ValueError):
        LogMetrics(reduce="sum")
