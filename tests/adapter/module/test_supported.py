"""Strategies that do not work with a trainer class are refused by name, with the reason and a way out."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.module.supported import check_strategy, check_trainer_arguments, prevent_wrapping
from support.messages import refusal


def blank(cls: type) -> object:
    """A strategy without a call of its constructor, because that requires packages or devices that a test lacks."""
    return object.__new__(cls)


class Homemade(ParallelStrategy):
    root_device = None


Homemade.__abstractmethods__ = frozenset()


UNSUPPORTED = {
    "DeepSpeed": blank(DeepSpeedStrategy),
    "FSDP": blank(FSDPStrategy),
    "model parallel": ModelParallelStrategy(),
    "tensor parallel": ModelParallelStrategy(1, 2),
    "PowerSGD": DDPStrategy(ddp_comm_hook=powerSGD_hook, ddp_comm_state=PowerSGDState(None)),
    "a wrapped hook": DDPStrategy(ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper),
    "a hook with a state": DDPStrategy(ddp_comm_hook=fp16_compress_hook, ddp_comm_state=object()),
    "averaged models": DDPStrategy(model_averaging_period=2),
    "one of the user": blank(Homemade),
    "spawn": DDPStrategy(start_method="spawn"),
    "fork": DDPStrategy(start_method="fork"),
}


@pytest.mark.parametrize("strategy", UNSUPPORTED)
def test_a_strategy_that_cannot_host_a_trainer_is_refused_by_name_with_the_reason(strategy):
    with refusal(StartupContractError):
        check_strategy(UNSUPPORTED[strategy])


@pytest.mark.parametrize(
    "strategy",
    [
        SingleDeviceStrategy("cpu"),
        DDPStrategy(),
        DDPStrategy(find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=5),
        DDPStrategy(ddp_comm_hook=fp16_compress_hook),
        ModelParallelStrategy(2, 1),
    ],
)
def test_strategies_that_can_host_a_trainer_pass(strategy):
    check_strategy(strategy)


def test_ddp_does_not_wrap_the_module_and_other_strategies_stay_unchanged():
    strategy, other = DDPStrategy(), SingleDeviceStrategy("cpu")
    strategy.model = model = object()

    prevent_wrapping(strategy)
    prevent_wrapping(other)
    strategy.configure_ddp()

    assert strategy.model is model
    assert "configure_ddp" not in vars(other)


def test_whole_weights_may_be_saved_to_a_url():
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint("memory://runs/r")])
    check_trainer_arguments(trainer)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (GradientAccumulationScheduler, ({0: 2},)),
        (StochasticWeightAveraging, (0.1,)),
        (LearningRateFinder, ()),
        (BatchSizeFinder, ()),
        (ModelPruning, ("l1_unstructured",)),
        (BackboneFinetuning, ()),
    ],
)
def test_callbacks_that_contradict_a_trainer_class_are_refused_by_name_with_the_way_out(tmp_path, kind, arguments):
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[kind(*arguments)], default_root_dir=tmp_path)
    with refusal(StartupContractError):
        check_trainer_arguments(trainer)
