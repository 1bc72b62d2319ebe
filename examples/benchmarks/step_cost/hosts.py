"""The hosts in one process: genlight in several configurations, and Lightning."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.callbacks import Checkpoint, Hook, JobProgress, LogMetrics, StopRequests, WatchHangs, WriteSamples
from genlight.reporters import EventLogger

from .alternating import Alternation
from .others import others
from .workload import Automatic, Linear, Manual, floor

FAR = 10**9


@dataclass(frozen=True)
class Host:
    """A program that runs training steps, and a handwritten loop that does the same."""

    run: Callable[[Alternation, Path], None]
    floor: Callable[[], Callable[[], None]] = floor


class NoOp(Hook):
    """An overridden hook that does nothing."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None: ...


class Terminal(io.StringIO):
    """A terminal for an invisible progress bar."""

    def isatty(self) -> bool:
        return True


def bare(batches: Alternation, _: Path) -> None:
    """The floor itself, to show the cost of measuring."""
    step = floor()
    for _, _ in zip(range(batches.steps), batches, strict=False):
        step()


def fit(module: Any, batches: Any, folder: Path, *, steps: int, **settings: Any) -> None:
    """Train `module` under Lightning, without its default callbacks and logger."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in settings.get("callbacks", ())),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "max_steps": steps,
        "max_epochs": -1,
        "use_distributed_sampler": False,
    }
    pl.Trainer(**{**defaults, **settings}).fit(module, batches)


def stock(module: type[Manual], **settings: Any) -> Callable[[Alternation, Path], None]:
    """Lightning with its defaults."""

    def run(batches: Alternation, folder: Path) -> None:
        with contextlib.redirect_stderr(Terminal()), contextlib.redirect_stdout(Terminal()):
            fit(module(), batches, folder, steps=batches.steps, **settings)

    return run


def hosted(batches: Alternation, folder: Path, **settings: Any) -> None:
    """The trainer class in genlight, without callbacks."""
    hosted_as(Linear(), batches, folder, **settings)


def hosted_as(trainer: Any, batches: Alternation, folder: Path, **settings: Any) -> None:
    """Make an instance of a trainer class in genlight, without callbacks."""
    job = TrainingJobSpec(run_id="cost", max_steps=batches.steps)
    arguments = {"callbacks": [LogMetrics(0)], **settings}
    fit(ContractModule(trainer, job), batches, folder, steps=batches.steps, **arguments)


def standard_set(folder: Path, *, every: int = 10) -> list[pl.Callback]:
    """Return the callbacks of a job, without progress: stops, metrics, and two callbacks that are never due."""
    return [
        StopRequests(cancel_file=folder / "cancel", max_runtime_s=100_000),
        LogMetrics(every),
        WriteSamples(folder / "samples", FAR),
        WatchHangs(directory=folder / "hangs"),
        Checkpoint(folder / "checkpoints", every_n_steps=FAR, save_final=False),
    ]


def standard(batches: Alternation, folder: Path, *more: pl.Callback, every: int = 10, **settings: Any) -> None:
    """The trainer class in genlight, with the callbacks of a job."""
    callbacks = [*standard_set(folder, every=every), *more]
    hosted(batches, folder, callbacks=callbacks, logger=EventLogger(folder / "events.jsonl", run_id="cost"), **settings)


def with_progress(screen: type[io.StringIO]) -> Callable[[Alternation, Path], None]:
    """A job whose progress goes to `screen`."""

    def run(batches: Alternation, folder: Path) -> None:
        with contextlib.redirect_stderr(screen()):
            standard(batches, folder, JobProgress())

    return run


def _in_bf16() -> Callable[[], None]:
    return floor(autocast=True)


def hosts_of_one() -> dict[str, Host]:
    """Return the hosts by name."""
    return {
        "bare torch loop": Host(bare),
        "genlight": Host(hosted),
        "genlight, standard": Host(standard),
        "genlight, standard, events every step": Host(lambda b, f: standard(b, f, every=1)),
        "genlight, standard, progress lines": Host(with_progress(io.StringIO)),
        "genlight, standard, progress bar": Host(with_progress(Terminal)),
        "genlight, standard, 10 no-op hooks": Host(lambda b, f: standard(b, f, *[NoOp() for _ in range(10)])),
        "genlight, standard, 100 idle hooks": Host(lambda b, f: standard(b, f, *[Hook() for _ in range(100)])),
        "genlight, standard, bf16-mixed": Host(lambda b, f: standard(b, f, precision="bf16-mixed"), _in_bf16),
        "Lightning, manual": Host(stock(Manual)),
        "Lightning, automatic": Host(stock(Automatic)),
        "Lightning, automatic, progress bar": Host(stock(Automatic, enable_progress_bar=True)),
        "Lightning, manual, bf16-mixed": Host(stock(Manual, precision="bf16-mixed"), _in_bf16),
        **{name: Host(run) for name, run in others().items()},
    }
