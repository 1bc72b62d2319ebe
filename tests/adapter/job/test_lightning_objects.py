"""How the `lightning` block of a job becomes a Lightning trainer."""

import json

import pytest
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.job.config import resolve_run_config
from genlight.adapter.job.lightning_objects import instantiate
from support.jobs import write_job

SHARDED = {"accelerator": "cpu", "strategy": {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}}


@pytest.fixture
def config(tmp_path):
    return lambda lightning: resolve_run_config(spec_path=write_job(tmp_path, lightning=lightning), environ={})


@pytest.mark.parametrize("precision", ["16-mixed", 16])
def test_a_sharded_model_takes_16_mixed_by_its_name(config, precision):
    trainer, _ = instantiate(config({**SHARDED, "precision": precision}))

    assert isinstance(trainer.strategy, ModelParallelStrategy)
    assert isinstance(trainer.precision_plugin, MixedPrecision)
    assert trainer.precision == "16-mixed"


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_other_precisions_stay_as_they_are(config, precision):
    trainer, _ = instantiate(config({**SHARDED, "precision": precision}))
    assert trainer.precision == precision


WANDB = {"class_path": "lightning.pytorch.loggers.WandbLogger"}
CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "x"}}
STOPPING = "lightning.pytorch.callbacks.EarlyStopping"
SHARDED_BY = "lightning.pytorch.strategies.ModelParallelStrategy"


@pytest.mark.parametrize(
    ("lightning", "said"),
    [
        ({"logger": [WANDB]}, r"WandbLogger': Requirement 'wandb.*' not met\. HINT"),
        ({"logger": [CSV, WANDB]}, r"WandbLogger': Requirement 'wandb.*' not met\. HINT"),
        ({"logger": WANDB}, r"Requirement 'wandb.*' not met\. HINT"),
        (
            {"strategy": {"class_path": SHARDED_BY, "init_args": {"data_parallel_size": "many"}}},
            r"`lightning.strategy`: .*`data_parallel_size`: Expected 'auto' or int, but received many$",
        ),
        (
            {"callbacks": [{"class_path": STOPPING, "init_args": {"monitor": "a", "patience": "long"}}]},
            r"`lightning.callbacks`: .*EarlyStopping': `patience`: Expected int, but received long$",
        ),
        (
            {"strategy": {"class_path": "DDPStrategy", "init_args": {"start_method": "x"}}},
            "`start_method`: Expected 'popen', 'spawn', 'fork', 'forkserver', but received x",
        ),
        ({"callbacks": [{"class_path": "nowhere.Callback"}]}, "nowhere.Callback': No module named 'nowhere'$"),
    ],
)
def test_what_is_wrong_with_a_class_of_the_block_is_told_by_its_cause(config, lightning, said):
    with pytest.raises(StartupContractError, match=said) as caught:
        instantiate(config({"accelerator": "cpu", **lightning}))
    assert "\n" not in str(caught.value)
    assert "Subclass types" not in str(caught.value)


def test_making_a_trainer_leaves_the_job_as_it_was_given(config):
    """`doctor` shows the job afterwards, and a second start in this process makes a trainer from it."""
    timer = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:00:01:00"}}
    given = {"accelerator": "cpu", "callbacks": [timer]}
    before = json.dumps(given)
    made = config(given)
    instantiate(made)
    assert json.dumps(dict(made.lightning)) == before
