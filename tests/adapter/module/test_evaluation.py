"""``Trainer.validate`` and ``Trainer.test`` with a trainer class that evaluates itself."""

import csv

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from genlight.adapter import ContractModule
from genlight.adapter.contract.exceptions import ContractError, StartupContractError
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Checkpoint, DurableCheckpointIO, Evaluate, LogMetrics
from genlight.callbacks.hook.events import run_state_of
from genlight.reporters import EventLogger, read_events, validate_events
from support.messages import refusal


@pytest.fixture
def evaluated(counting_trainer):
    """A trainer whose score is the number of its steps; records the conditions of each evaluation."""

    class Evaluated(counting_trainer):
        def configure(self, ctx):
            self.dtype = ctx.dtype
            return {**super().configure(ctx), "net": torch.nn.Dropout()}

        def state_dict(self, state):
            return {name: value for name, value in super().state_dict(state).items() if name != "net"}

        def evaluate(self, state, ctx):
            self.calls.append("evaluate")
            torch.rand(1)  # must not change the random numbers of training
            self.saw = {
                "gradients": torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "training": state["net"].training,
            }
            return {"steps": state["steps"], "half": 0.5}

    return Evaluated()


@pytest.fixture
def checkpoint(fit, evaluated, tmp_path):
    """A checkpoint after four steps of that trainer."""
    fit(type(evaluated)(), [Checkpoint(tmp_path / "c")], steps=4, enable_checkpointing=True)
    return str(tmp_path / "c" / "final.json")


@pytest.mark.parametrize("command", ["validate", "test"])
def test_scores_are_those_of_the_checkpoint_that_is_named(quiet, evaluated, checkpoint, command, capsys):
    trainer = pl.Trainer(**quiet, plugins=[DurableCheckpointIO()])
    (scores,) = getattr(trainer, command)(ContractModule(evaluated), ckpt_path=checkpoint)

    assert scores == {"steps": 4.0, "half": 0.5, "step": 4.0}, "the step is the checkpoint's, for loggers"
    assert trainer.callback_metrics["half"] == 0.5
    assert "half" in capsys.readouterr().out
    assert evaluated.calls == ["setup", "configure", "load_state_dict", "evaluate"]


def test_without_a_checkpoint_the_trainer_is_evaluated_as_it_is(fit, evaluated):
    trainer, module = fit(evaluated, steps=3)

    assert trainer.validate(module) == [{"steps": 3.0, "half": 0.5}]
    assert trainer.test(module) == [{"steps": 3.0, "half": 0.5}]
    assert evaluated.calls.count("configure") == 1


def test_an_evaluation_runs_under_the_conditions_of_training(quiet, evaluated):
    before = torch.get_rng_state()
    pl.Trainer(**quiet, precision="bf16-mixed").validate(ContractModule(evaluated))

    assert evaluated.saw == {"gradients": True, "autocast": False, "training": True}
    assert evaluated.dtype == "bf16"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_after_an_evaluation_has_no_validation_in_it(fit, quiet, evaluated):
    module = ContractModule(evaluated)
    pl.Trainer(**quiet).validate(module)
    fit(None, module=module, steps=3)

    assert evaluated.calls.count("evaluate") == 1
    assert evaluated.calls.count("train_step") == 3


def test_a_data_module_passed_to_the_call_is_not_used(quiet, evaluated):
    class NoValidationData(pl.LightningDataModule):
        def train_dataloader(self):
            raise AssertionError("no training data is needed")

    (scores,) = pl.Trainer(**quiet).validate(ContractModule(evaluated), datamodule=NoValidationData())
    assert scores["half"] == 0.5


def test_a_trainer_without_evaluate_is_refused_in_one_line(quiet, counting_trainer):
    with refusal(StartupContractError):
        pl.Trainer(**quiet).validate(ContractModule(counting_trainer()))


@pytest.mark.parametrize("critical", [True, False])
def test_a_trainer_without_evaluate_is_refused_at_the_start_of_a_training_that_evaluates(
    fit, counting_trainer, critical
):
    """Also if a failed evaluation would not end the run."""
    with refusal(ContractError):
        fit(counting_trainer(), [Evaluate(2, critical=critical)])


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (0.5, "evaluate returned a float; it must be a mapping of scores"),
        ({"a": "x"}, "evaluate returned a str as 'a'; a score is one number"),
        ({"a": None}, "evaluate returned a NoneType as 'a'; a score is one number"),
        ({"a": torch.ones(2)}, "evaluate returned a Tensor as 'a'; a score is one number"),
    ],
)
def test_scores_that_are_no_mapping_of_numbers_are_refused(quiet, evaluated, scores, said):
    evaluated.evaluate = lambda state, ctx: scores
    with pytest.raises(ContractError, match=said):
        pl.Trainer(**quiet).validate(ContractModule(evaluated))


def test_val_check_interval_evaluates_within_the_training_and_its_scores_reach_monitors_and_loggers(
    fit, evaluated, tmp_path
):
    best = ModelCheckpoint(tmp_path / "best", monitor="steps", mode="max", filename="{step}")
    logger = CSVLogger(tmp_path)
    settings = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer, _module = fit(evaluated, [best], steps=6, logger=logger, enable_checkpointing=True, **settings)

    assert evaluated.calls.count("evaluate") == 3, "none of them in a sanity check"
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["half"]]
    assert [(row["step"], row["steps"]) for row in rows] == [("2", "2.0"), ("4", "4.0"), ("6", "6.0")]
    assert trainer.callback_metrics["steps"] == 6.0
    assert best.best_model_score == 6.0
    assert run_state_of(trainer).eval_scores == {"steps": 6.0, "half": 0.5}
    assert evaluated.saw == {"gradients": True, "autocast": False, "training": True}


def test_scores_of_a_validation_are_events_of_their_step_once(fit, evaluated, tmp_path):
    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    settings = {"val_check_interval": 2, "check_val_every_n_epoch": None, "enable_checkpointing": True}
    # If a checkpoint of step 2 became durable before the validation, the log would drop the scores of that step.
    fit(evaluated, [LogMetrics(1), Checkpoint(tmp_path / "c", every_n_steps=3)], steps=4, logger=logger, **settings)

    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event["step"] for event in events if event.get("name") == "half"] == [2, 4]
    assert validate_events(tmp_path / "events.jsonl") == []


def test_a_validation_schedule_without_evaluate_is_warned_of(fit, counting_trainer, caplog):
    fit(counting_trainer(), steps=4, val_check_interval=2, check_val_every_n_epoch=None)

    assert "val_check_interval=2 and check_val_every_n_epoch=None have no effect: CountingTrainer has no" in caplog.text


def test_a_validation_loader_of_the_caller_is_used(quiet, evaluated):
    class Validated(ContractModule):
        def validation_step(self, batch, batch_idx):
            self.seen = batch

    module = Validated(evaluated)
    trainer = pl.Trainer(**quiet, max_steps=2, val_check_interval=1)
    trainer.fit(module, BatchStream([0, 1]), BatchStream(["validated"]))

    assert module.seen == "validated"
    assert "evaluate" not in evaluated.calls


def test_a_validation_keeps_the_gradients_of_an_unfinished_window(fit, evaluated):
    class Accumulates(type(evaluated)):
        def configure(self, ctx):
            state = super().configure(ctx)
            return {**state, "net": torch.nn.Linear(1, 1), "gradients": []}

        def train_step(self, batch, state, ctx):
            state["net"](torch.ones(1)).sum().backward()
            state["gradients"].append(float(state["net"].weight.grad))
            return super().train_step(batch, state, ctx)

    _, module = fit(Accumulates(), steps=4, val_check_interval=1, check_val_every_n_epoch=None)
    assert module.contract_state["gradients"] == [1.0, 2.0, 3.0, 4.0]


def test_an_evaluation_due_at_a_checkpoint_runs_once_in_the_resumed_run(fit, quiet, evaluated, tmp_path):
    settings = {"val_check_interval": 2, "check_val_every_n_epoch": None, "enable_checkpointing": True}
    fit(evaluated, [Checkpoint(tmp_path, every_n_steps=2, keep_last=None)], steps=4, **settings)
    resumed, scores = type(evaluated)(), []
    resumed.evaluate = lambda state, ctx: scores.append(state["steps"]) or {"half": 0.5}

    quiet = {**quiet, **settings, "default_root_dir": tmp_path}
    trainer = pl.Trainer(**quiet, max_steps=6, plugins=[DurableCheckpointIO()])
    trainer.fit(ContractModule(resumed), BatchStream(range(100)), ckpt_path=str(tmp_path / "step-00000002.json"))
    assert scores == [2, 4, 6], "the checkpoint of step 2 was written before its validation"


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`:UserWarning")
def test_callbacks_can_measure_the_batch_of_a_validation(fit, quiet, evaluated, tmp_path):
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=2)
    logger = CSVLogger(tmp_path)
    fit(
        evaluated,
        [monitor],
        steps=4,
        batches=[[0], [1], [2], [3]],
        logger=logger,
        val_check_interval=2,
        log_every_n_steps=1,
    )
    pl.Trainer(**{**quiet, "logger": logger}, log_every_n_steps=1, callbacks=[monitor]).validate(
        ContractModule(evaluated)
    )

    with open(f"{logger.log_dir}/metrics.csv") as file:
        assert any(row.get("validate/samples") for row in csv.DictReader(file))


def test_averaged_weights_are_the_ones_that_a_validation_evaluates(fit, evaluated):
    class Swaps(pl.Callback):
        def on_validation_epoch_start(self, trainer, pl_module):
            pl_module.contract_state["steps"] *= 100

        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.contract_state["steps"] //= 100

    trainer, module = fit(evaluated, [Swaps()], steps=2, val_check_interval=2)
    assert trainer.callback_metrics["steps"] == 200.0
    assert module.contract_state["steps"] == 2


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [2, 4, 6]),
        ({"val_check_interval": 1.0}, [2, 4, 6]),
        ({"val_check_interval": 0.5}, [1, 2, 3, 4, 5, 6]),
        ({"limit_val_batches": 0}, []),
        ({"max_epochs": 6, "check_val_every_n_epoch": 3}, [6, 12]),
        ({"callbacks": [Evaluate(every_n_steps=3)]}, [3, 6]),
        ({"callbacks": [Evaluate(every_n_steps=3)], "check_val_every_n_epoch": 3}, [3, 6, 6]),
        ({"max_epochs": -1, "max_steps": 5}, [2, 4]),
    ],
)
def test_a_plain_trainer_evaluates_after_each_epoch_as_is_lightnings_default(quiet, evaluated, settings, steps):
    at = []
    evaluated.evaluate = lambda state, ctx: at.append(state["steps"]) or {"half": 0.5}
    trainer = pl.Trainer(**{**quiet, "max_epochs": 3, **settings})
    trainer.fit(ContractModule(evaluated), torch.utils.data.DataLoader([0, 1]))
    assert at == steps


def test_a_trainer_without_evaluate_is_silently_not_validated(quiet, counting_trainer, caplog):
    trainer = pl.Trainer(**quiet, max_epochs=2)
    trainer.fit(ContractModule(counting_trainer()), torch.utils.data.DataLoader([0, 1]))
    assert "validat" not in caplog.text
    assert trainer.global_step == 4


def test_early_stopping_uses_the_scores_of_the_default_validation(quiet, evaluated):
    stops = EarlyStopping("steps", mode="min", patience=1)
    trainer = pl.Trainer(**quiet, max_epochs=9, callbacks=[stops])
    trainer.fit(ContractModule(evaluated), torch.utils.data.DataLoader([0, 1]))
    assert trainer.global_step == 4, "the score of the second epoch is no better"
