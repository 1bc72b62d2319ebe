"""Values that callbacks and modules log in the hooks of a step arrive as under Lightning's own loop."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule
from genlight.callbacks import Checkpoint, Evaluate
from support.trainer_class import Trains
from support.trainers import quiet_trainer

IN_A_STEP = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip


class Updating(Trains):
    """A trainer whose step is one update."""

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        return state["model"](torch.ones(2)).sum()  # type: ignore[no-any-return]

    def evaluate(self, state: Any, ctx: Any) -> dict[str, float]:
        return {"score": 0.5}


class Stock(pl.LightningModule):
    """The same under Lightning's own loop, by automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lines(Logger):
    """The metrics that a logger gets, by step."""

    name, version = "lines", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        kept = {name: value for name, value in metrics.items() if not name.startswith(("train/", "epoch"))}
        if kept:
            self.lines.append((step, kept))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def fit(folder: Path, module: pl.LightningModule, *callbacks: pl.Callback, **settings: Any) -> Lines:
    """Train two epochs of three batches."""
    lines, ckpt = Lines(), settings.pop("ckpt", None)
    settings = {"max_epochs": 2, "log_every_n_steps": 1, "default_root_dir": folder, **settings}
    trainer = quiet_trainer(*callbacks, logger=lines, **settings)
    trainer.fit(module, DataLoader([torch.ones(1) for _ in range(3)], batch_size=None), ckpt_path=ckpt)  # type: ignore[arg-type]
    return lines


def logging_in(base: type, hook: str) -> type:
    """A subclass that logs in one hook, as a step's metric and as one of the epoch."""

    def log(self: Any, *args: Any) -> None:
        module = self if isinstance(self, pl.LightningModule) else args[1]
        module.log("seen", float(module.global_step), on_step=True, on_epoch=True)

    return type(f"Logging{base.__name__}", (base,), {hook: log})


@pytest.mark.parametrize("by", ["callback", "module"])
@pytest.mark.parametrize("hook", IN_A_STEP)
def test_values_logged_in_any_hook_of_a_step_reach_loggers_as_in_lightning(tmp_path: Path, hook: str, by: str) -> None:
    """For example, the norm of gradients in ``on_before_optimizer_step``; no other hook is needed."""

    def lines(base: type, *arguments: Any) -> list[Any]:
        module = (logging_in(base, hook) if by == "module" else base)(*arguments)
        callbacks = [logging_in(pl.Callback, hook)()] if by == "callback" else []
        return fit(tmp_path, module, *callbacks, limit_val_batches=0).lines

    assert lines(ContractModule, Updating()) == (stock := lines(Stock))
    assert len(stock) == 8


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_a_hook_that_was_put_on_the_module_itself_is_called(tmp_path: Path, hook: str) -> None:
    """Lightning checks the module, not its class."""
    called: list[int] = []
    module = ContractModule(Updating())
    setattr(module, hook, lambda *args: called.append(args[-1]))
    fit(tmp_path, module)
    assert called == [0, 1, 2, 0, 1, 2]


def test_scores_that_were_sent_before_the_checkpoint_are_not_sent_again_by_a_resumed_run(tmp_path: Path) -> None:
    """The run state of the checkpoint holds the scores of the last evaluation."""
    checkpoint = Checkpoint(tmp_path, every_n_steps=2, save_final=False)
    first = fit(tmp_path, ContractModule(Updating()), Evaluate(1), checkpoint, max_steps=2)
    assert [line for line in first.lines if "score" in line[1]] == [(1, {"score": 0.5}), (2, {"score": 0.5})]
    resumed = fit(
        tmp_path, ContractModule(Updating()), Evaluate(0), Checkpoint(tmp_path, save_final=False),
        max_steps=5, ckpt=str(tmp_path / "step-00000002.json"),
    )  # fmt: skip
    assert resumed.lines == []


def test_a_checkpoint_holds_the_changes_of_the_modules_own_hook_of_the_step(tmp_path: Path) -> None:
    """For example, a moving average; callbacks are called before the module."""

    class Averaging(ContractModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.plugin.updates += 1  # type: ignore[attr-defined]

    class Averaged(Updating):
        updates = 0

        def state_dict(self, state: Any) -> dict[str, object]:
            return {"updates": self.updates}

        def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
            self.updates = payload["updates"]

    first, second = Averaged(), Averaged()
    fit(tmp_path, Averaging(first), Checkpoint(tmp_path, every_n_steps=2, save_final=False), max_steps=3)
    saved = str(tmp_path / "step-00000002.json")
    fit(tmp_path, Averaging(second), Checkpoint(tmp_path, save_final=False), max_steps=5, ckpt=saved)
    assert (first.updates, second.updates) == (3, 5)


@pytest.mark.parametrize("profiler", [None, "simple"])
@pytest.mark.parametrize("base", [ContractModule, Stock])
def test_an_event_follows_the_modules_own_hook_of_the_step(tmp_path: Path, base: Any, profiler: str | None) -> None:
    """A save at this event includes the changes of the module; the module's hook is not replaced."""
    seen: list[str] = []

    class Own(base):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append("module")

    class Hears(pl.Callback):
        def on_module_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            seen.append("event")
            assert "on_train_batch_end" not in vars(module)

    module = Own(Updating()) if base is ContractModule else Own()
    saves = [Checkpoint(tmp_path / name, every_n_steps=3, save_final=False) for name in ("a", "b")]
    fit(tmp_path, module, *saves, Hears(), max_epochs=1, profiler=profiler)
    # Lightning's own loop has no such event: there it comes once, in the steps in which a hook waits for it.
    assert seen == (["module", "event"] * 3 if base is ContractModule else ["module", "module", "module", "event"])
    assert [len(list((tmp_path / name).glob("*.json"))) for name in ("a", "b")] == [1, 1]
