"""The digits trainer from a LightningCLI configuration."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*passed in a `val_dataloader`.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated, use `isinstance.*"),
    pytest.mark.filterwarnings("ignore:.*args parameter is intended to run from within Python.*:UserWarning"),
]

SMALL = ["--model.init_args.job.hyperparams={width: 16, depth: 1, seed: 3}", "--trainer.enable_progress_bar=false"]


@pytest.fixture
def fit(examples, monkeypatch, tmp_path):
    """``fit`` with the example's configuration, in a directory that has the examples and nothing else."""
    (tmp_path / "examples").symlink_to(examples)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by Lightning's seed_everything; put back at the end
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # about Lightning's own use of it
    state, before = torch.get_rng_state(), set(sys.modules)

    def run(*arguments):
        return LightningCLI(
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            args=["fit", "--config", "examples/lightningcli/digits.yaml", *SMALL, *arguments],
        )

    yield run
    torch.set_rng_state(state)
    for name in set(sys.modules) - before:
        if name.startswith(("gen_worker", "examples")):
            del sys.modules[name]


def logged(name):
    rows = []
    for file in sorted(Path("runs/digits-cli").rglob("metrics.csv")):
        with file.open() as lines:
            rows += [(int(row["step"]), float(row[name])) for row in csv.DictReader(lines) if row.get(name)]
    return rows


def test_the_configuration_trains_the_class_with_its_callbacks_and_logger(fit):
    cli = fit("--trainer.max_steps=50", "--trainer.callbacks.init_args.every_n_steps=25")
    assert cli.trainer.global_step == 50
    assert {type(callback).__name__ for callback in cli.trainer.callbacks} >= {
        "ModelCheckpoint",
        "LearningRateMonitor",
        "EarlyStopping",
        "WriteSamples",
    }
    assert [step for step, _ in logged("train/loss")] == [25, 50]
    assert logged("lr-AdamW")
    pictures = sorted(str(path.relative_to("runs/digits-cli/samples")) for path in Path("runs").rglob("*.png"))
    assert pictures == [
        "step-00000025-00/digits-all.png",
        "step-00000025-01/digits-3.png",
        "step-00000050-00/digits-all.png",
        "step-00000050-01/digits-3.png",
    ]
    assert cli.model.ctx.job.hyperparams["width"] == 16
    assert cli.model.contract_state.scheduler.last_epoch == 50
