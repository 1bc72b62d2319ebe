"""``Trainer.validate`` and ``Trainer.test`` with a trainer class that evaluates itself."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import ContractModule
from genlight.adapter.contract.exceptions import ContractError, StartupContractError
from genlight.callbacks import Checkpoint, DurableCheckpointIO


@pytest.fixture
def evaluated(counting_trainer):
    """A trainer whose score is the number of its steps; notes under which conditions it was evaluated."""

    class Evaluated(counting_trainer):
        def configure(self, ctx):
            self.dtype = ctx.dtype
            return {**super().configure(ctx), "net": torch.nn.Dropout()}

        def state_dict(self, state):
            return {name: value for name, value in super().state_dict(state).items() if name != "net"}

        def evaluate(self, state, ctx):
            self.calls.append("evaluate")
            torch.rand(1)  # must not change what training draws
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


def test_an_evaluation_sees_what_it_would_see_in_training(quiet, evaluated):
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


def test_data_that_comes_with_the_call_is_not_asked_for(quiet, evaluated):
    class NoValidationData(pl.LightningDataModule):
        def train_dataloader(self):
            raise AssertionError("no training data is needed")

    (scores,) = pl.Trainer(**quiet).validate(ContractModule(evaluated), datamodule=NoValidationData())
    assert scores["half"] == 0.5


def test_a_trainer_without_evaluate_is_refused_in_one_line(quiet, counting_trainer):
    with pytest.raises(StartupContractError, match=r"CountingTrainer has no `evaluate\(state, ctx\)` to validate"):
        pl.Trainer(**quiet).validate(ContractModule(counting_trainer()))


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
