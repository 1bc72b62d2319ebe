"""A trace of a few steps by torch's profiler, among the files of the run."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ..adapter.plumbing.durable import fsync_file, make_directory, temporary_name
from .hook.cadence import NEVER
from .hook.hook import Hook, skippable

log = logging.getLogger(__name__)


class ProfileSteps(Hook):
    """Profiles the steps from `first` to `last` on rank zero, and writes a trace for Perfetto or ``chrome://tracing``.

    The file is ``steps-<first>-<last>.json.gz``. Profiled steps are slower; other steps cost nothing. A run that
    resumes after `first` profiles the remaining ones of these steps. Steps are counted from 1.

    Args:
        first: First step of the trace.
        last: Last step of the trace.
        directory: Folder of the file; None means ``<default_root_dir>/profile``.

    Raises:
        ValueError: `first` is less than 1, or `last` less than `first`.
    """

    _of_this_process = frozenset({"_profile"})
    _profile: torch.profiler.profile | None = None

    def __init__(self, first: int, last: int, directory: str | os.PathLike[str] | None = None) -> None:
        if not 1 <= first <= last:
            raise ValueError(
                f"Invalid `first` and `last`. Expected steps with 1 <= first <= last, but received {first} and {last}."
            )
        self.first, self.last = first, last
        self.directory = None if directory is None else Path(directory)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._continue(trainer)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._continue(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._profile is not None and trainer.global_step < self.first:  # training ended just before that step
            self._profile.stop()
            self._profile = None
        self._write(trainer)

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _continue(self, trainer: pl.Trainer) -> None:
        """Start the profiler just before `first`, and write the trace just after `last`."""
        step = trainer.global_step
        if step >= self.last:
            self._write(trainer)
            self.next_due_step = NEVER
        elif step >= self.first - 1:
            if self._profile is None:
                self._profile = torch.profiler.profile(record_shapes=True)
                self._profile.start()
            self.next_due_step = self.last
        else:
            self.next_due_step = self.first - 1

    def _write(self, trainer: pl.Trainer) -> None:
        """Stop the profiler, if it runs, and write its trace."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        folder = self.directory or Path(trainer.default_root_dir) / "profile"
        make_directory(folder, shared=None)
        path = folder / f"steps-{self.first}-{self.last}.json.gz"
        temporary = path.with_name(f"{temporary_name(path.name)}.json.gz")  # torch compresses a file with this suffix
        profile.export_chrome_trace(str(temporary))
        fsync_file(temporary)
        os.replace(temporary, path)
        log.info("the profile of steps %d to %d is in %s", self.first, self.last, path)
