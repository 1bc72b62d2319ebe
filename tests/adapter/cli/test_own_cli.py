"""``GenlightCLI`` in a user's own program: LightningCLI's arguments, stops, exit codes and resumes."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from genlight.adapter import GenlightCLI
from genlight.callbacks import Checkpoint
from genlight.callbacks.stop.signals import REASON_OF_SIGNAL

STEPS = 10


class Rows(pl.LightningDataModule):
    def __init__(self, rows: int = 48, batch_size: int = 4) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def train_dataloader(self) -> Any:
        rows = torch.arange(self.rows * 2.0).reshape(-1, 2) / 100
        return DataLoader(TensorDataset(rows), batch_size=self.batch_size, shuffle=True)


class Model(pl.LightningModule):
    """Notes the rows of each step; asks for a stop, or fails, in a given step."""

    def __init__(self, batch_size: int = 1, stop_in: int = -1, fail_in: int = -1) -> None:
        super().__init__()
        self.batch_size, self.stop_in, self.fail_in = batch_size, stop_in, fail_in
        self.layer = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.2))
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(batch[0].sum().item())
        if self.trainer.global_step == self.stop_in:
            signal.raise_signal(signal.SIGTERM)
        if self.trainer.global_step == self.fail_in:
            raise ValueError("of the user's own")
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.1)


class OwnCLI(GenlightCLI):
    """Overrides what LightningCLI documents, without a call of the base class."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.batch_size", "model.batch_size")

    def before_fit(self) -> None:
        self.events = ["before"]

    def after_fit(self) -> None:
        self.events.append("after")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run ``OwnCLI`` as a program in an empty folder; return the object, or the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # about Lightning's own use of it
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by Lightning's seed_everything; put back at the end
        monkeypatch.setenv(name, "0")
    handlers = {number: signal.getsignal(number) for number in REASON_OF_SIGNAL}

    def run(*arguments: str, **settings: Any) -> Any:
        trainer = f"--trainer.max_steps {STEPS} --trainer.accelerator cpu --trainer.logger false"
        quiet = "--trainer.enable_progress_bar false --trainer.enable_model_summary false --seed_everything 1"
        monkeypatch.setattr(sys, "argv", ["main.py", "fit", *trainer.split(), *quiet.split(), *arguments])
        try:
            return OwnCLI(Model, Rows, **settings)
        except SystemExit as end:
            return end.code

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def weights(cli: Any) -> torch.Tensor:
    return torch.cat([each.flatten() for each in cli.model.parameters()])


def test_a_completed_fit_returns_with_links_variables_and_overridden_methods(program, monkeypatch) -> None:
    monkeypatch.setenv("PL_FIT__DATA__BATCH_SIZE", "8")
    cli = program(parser_kwargs={"default_env": True}, trainer_defaults={"callbacks": ModelCheckpoint("mine")})

    assert cli.model.batch_size == cli.datamodule.batch_size == 8
    assert cli.events == ["before", "after"]
    assert cli.trainer.global_step == STEPS
    assert Path("mine").is_dir()


STANDARD: dict[str, Any] = {
    "lightning's": pytest.param((), marks=pytest.mark.slow),
    "genlight's": ("--trainer.callbacks=genlight.callbacks.Checkpoint",),
}


@pytest.mark.promise(name="stop")
@pytest.mark.parametrize("callbacks", STANDARD.values(), ids=STANDARD)
def test_a_stop_saves_by_either_callback_and_the_hint_continues_exactly(program, caplog, callbacks) -> None:
    expected = program(*callbacks, "--trainer.default_root_dir=whole")
    caplog.clear()

    assert program(*callbacks, "--model.stop_in=5") == 75
    hint = shlex.split(caplog.messages[-1].splitlines()[-1])
    assert hint[:3] == ["python", "main.py", "fit"]
    resumed = program(*callbacks, *hint[hint.index("--model.stop_in=5") + 1 :])

    assert resumed.model.seen == expected.model.seen[6:], "the rest of the epoch, in its order"
    assert torch.equal(weights(resumed), weights(expected))


@pytest.mark.promise(name="stop")
def test_the_same_command_continues_with_a_folder_of_model_checkpoint(program) -> None:
    same = ("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.dirpath=mine", "--resume=auto")
    assert program(*same, "--model.stop_in=2") == 75
    assert program(*same, "--model.stop_in=6") == 75
    cli = program(*same)
    assert cli.trainer.global_step == STEPS
    assert len(cli.model.seen) == STEPS - 7


def test_a_fit_that_could_not_save_says_so_when_it_starts(program, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert program("--trainer.enable_checkpointing=false", "--model.stop_in=2") == 75
    said = next(text for text in caplog.messages if text.startswith("a stop will save nothing"))
    assert "genlight.callbacks.Checkpoint" in said
    assert caplog.messages.index(said) < len(caplog.messages) - 1
    assert not list(Path().rglob("*.json"))


@pytest.mark.parametrize(
    ("argument", "code"), [("--model.fail_in=2", 1), ("--model.fail_inn=2", 2), ("--ckpt_path=none.json", 2)]
)
def test_a_failure_and_a_mistake_have_their_exit_codes(program, argument, code) -> None:
    assert program(argument) == code


def test_without_run_the_parts_are_made_and_nothing_is_trained(program, monkeypatch) -> None:
    arguments = ["--data.batch_size=2", "--trainer.accelerator=cpu", "--trainer.logger=false", "--seed_everything=1"]
    monkeypatch.setattr(sys, "argv", ["main.py"])
    cli = OwnCLI(Model, Rows, run=False, args=arguments, trainer_defaults={"callbacks": [Checkpoint("c")]})
    assert (cli.model.batch_size, cli.trainer.global_step) == (2, 0)
