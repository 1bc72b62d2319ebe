"""The callback that decides when a checkpoint is saved, which ones stay, and what a resumed run takes over."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from typing_extensions import override

from ...adapter.contract.run_state import RunState
from ...adapter.plumbing.run_metadata import metadata_of_module
from ..hook.cadence import Boundaries, StepCadence, crossed, suppressed
from ..hook.events import fire, run_state_of
from ..hook.hook import Hook
from ..hook.listeners import skippable
from ..hook.module_hook import awaits_module_hook
from ..hook.run_context import RunContext
from .base_weights import base_of
from .checkpoint_io import DurableCheckpointIO, SaveRequest, give_back_plugin, install_plugin
from .durable_reports import DurableReports, wait_after_failure
from .earlier_runs import find_ours
from .format.layout import FINAL_NAME, step_name
from .format.record import CheckpointRecord, RecordMeta
from .remote import local_directory
from .resume_state import ResumeState, capture_parts, stands_between_batches
from .retention import Retention, best_path, own_records
from .save_meta import meta_of_save, said_to_stay
from .save_triggers import SaveTriggers
from .saving import CONTRACT_KEY
from .score_joining import ScoreJoining
from .selection import list_checkpoints
from .sharded.strategy import save_through_plugin, sharded_url_faults
from .start_checks import check_directory, require_cadences, require_choice
from .storage.commit import sweep
from .trainer_files import join_in_trainer_files, stage_trainer_files
from .warm_up import reserve_memory

__all__ = ["Checkpoint"]


class Checkpoint(Hook, LightningCheckpoint):
    """Saves durable checkpoints from which a run resumes bit for bit.

    ``Trainer(callbacks=[Checkpoint("checkpoints", every_n_steps=200)])`` is all you need. The callback installs
    `DurableCheckpointIO`. It also stores the random state of every rank and the gradients of an unfinished accumulation
    window, and restores them when you pass ``ckpt_path``. When a checkpoint is durable, every callback receives
    ``on_checkpoint_durable``, in the training thread of rank zero. When the ranks agree to stop (``stop_reason`` of the
    run state), the current step is saved first.

    On several ranks, rank zero writes the checkpoint, including state that differs between ranks. Tensors sharded by
    ``ModelParallelStrategy`` are not gathered: each rank writes its own slices, and the checkpoint exists once all
    slices are durable. You can resume on any number of ranks, sharded or not; each rank reads only what it needs. State
    that is not sharded, such as buffers, is taken from rank zero. For a `ContractModule`, values that differ on other
    ranks are stored as well and restored on those ranks. Tensors sharded twice along one dimension (FSDP within tensor
    parallel) are gathered.

    All nodes must share `dirpath` to resume, because every rank reads the checkpoint. With sharded tensors they must
    share it to save, too; this is checked before training starts.

    Args:
        dirpath: Where checkpoints go; None means ``<default_root_dir>/checkpoints``.
        every_n_steps: Save when ``trainer.global_step`` crosses a multiple of this; 0 never does.
        every_n_epochs: Save at the end of every such epoch; 0 never does.
        every_minutes: Save when this many minutes have passed since the last save, by rank zero's clock; 0 never does.
        save_on_improvement: Save when `monitor` reaches a new best; on several ranks at most 10 steps later.
        monitor: Logged metric that decides what `keep_best` keeps.
        mode: Whether a smaller (``min``) or a larger (``max``) value of `monitor` is better.
        keep_last: How many of the newest step checkpoints are kept; None keeps all. Only checkpoints that this callback
            wrote in the same run count, and none is removed while a link in `dirpath` points to it.
        keep_best: How many of the best are kept, if `monitor` is set; a score that comes later counts for its own step.
        keep_every: Checkpoints whose step is a multiple of this are kept; 0 keeps none for that reason.
        save_final: Save ``final`` when training has ended as planned, and wait until it is durable.
        asynchronous: Copy the tensors, then write the checkpoint in the background while training continues.
        when_busy: What a save does while the previous one is still being written: ``wait`` for it, or skip this state
            and save the ``newest`` one as soon as the writer is free.
        on_error: Whether a failed save ends the run (``stop``) or is logged (``continue``).
        save_gradients: Whether to store gradients; None stores them when an unfinished accumulation window needs them.
        replace_existing: Allow training to begin at step 0 when `dirpath` holds checkpoints of another run, and replace
            them. By default this is refused.
        weights: ``all`` stores every weight; those that training does not change are written once and shared.
            ``trained`` stores only the others: a resume takes the rest from the class and verifies its digests.

    Raises:
        ValueError: An argument is out of range.
    """

    ranks: Literal["zero", "all"] = "all"
    optional_reads = ("stop_reason", "loss_stats", "eval_scores", "rolls_back")
    writes = ("latest_checkpoint_uri",)
    every_n_steps = StepCadence()

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int = 0,
        every_n_epochs: int = 0,
        every_minutes: float = 0,
        save_on_improvement: bool = False,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_last: int | None = 2,
        keep_best: int = 1,
        keep_every: int = 0,
        save_final: bool = True,
        asynchronous: bool = True,
        when_busy: Literal["wait", "newest"] = "wait",
        on_error: Literal["stop", "continue"] = "stop",
        save_gradients: bool | None = None,
        replace_existing: bool = False,
        weights: Literal["all", "trained"] = "all",
    ) -> None:
        require_cadences(every_n_epochs, every_minutes, needs_monitor=save_on_improvement, monitor=monitor)
        require_choice("when_busy", when_busy, "wait", "newest")
        require_choice("on_error", on_error, "stop", "continue")
        require_choice("weights", weights, "all", "trained")
        self.dirpath = None if dirpath is None else local_directory(dirpath)
        self.every_n_steps, self.every_n_epochs = every_n_steps, every_n_epochs
        self.retention = Retention(keep_last, keep_best, monitor, mode, keep_every)
        self.triggers = SaveTriggers(every_minutes, monitor if save_on_improvement else None, mode)
        self.asynchronous, self.when_busy = asynchronous, when_busy
        self.critical, self.save_gradients, self.weights = on_error == "stop", save_gradients, weights
        self.save_final, self.replace_existing = save_final, replace_existing
        self._trained_in: Path | None = None
        """Known to copies in other processes, too, which a launcher makes for a second fit."""
        self.run = RecordMeta()
        """What every record of this run says; the runtime fills in run_id, attempt, max_steps and spec digest."""
        self.reports, self._scores = DurableReports(), ScoreJoining(monitor)
        self._resume = ResumeState()
        self._io: DurableCheckpointIO | None = None
        self._gives_plugin_back = False
        self._boundaries = Boundaries(self)
        self._run_state: RunState | None = None
        self._is_overdue = self._is_warm = self._saves_after_module_hook = self._is_between_batches = False
        self._last_saved_step: int | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_io": None, "reports": DurableReports(), "_run_state": None}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._gives_plugin_back = not isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO)
        self._io = install_plugin(trainer)
        self._io.on_background_save(self._wake)
        self._io.take_base_from(functools.partial(base_of, pl_module), remember=self.weights == "trained")
        save_through_plugin(trainer.strategy)
        if faults := sharded_url_faults(trainer):
            raise ValueError("; ".join(faults))
        directory = self.place_under(trainer)
        if stage == "fit" and trainer.is_global_zero:
            sweep(directory)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run_state = run_state_of(trainer)
        self._boundaries = Boundaries(self, trainer.global_step)
        self.triggers.begin(trainer.global_step)
        self._is_overdue, self._is_warm, self._is_between_batches, self._last_saved_step = False, False, False, None
        self._saves_after_module_hook = False
        self._resume.begin_training(trainer, pl_module)
        if self.saves_anything:
            replaces = self.replace_existing or self._trained_in == self.directory
            check_directory(trainer, pl_module, self.directory, replaces=replaces, saves_final=self.save_final)
            self._trained_in = self.directory
            if trainer.is_global_zero and self._io is not None:
                self.run = replace(self.run, metadata=self.run.metadata or metadata_of_module(pl_module))
                self._io.look(self.directory, said_to_stay(pl_module), leave_out=self.weights == "trained")

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_settled = self._io is None or self._io.is_settled  # before the poll, which sees what ends meanwhile
        self.poll(trainer)
        is_crossed = self._boundaries.crosses(trainer.global_step)
        if self.triggers:
            is_crossed |= self.triggers.look(self, trainer, pl_module)
        if not is_settled:
            self._wake()
        self._save_if_due(trainer, pl_module, is_crossed=is_crossed and not suppressed(pl_module))

    def _save_if_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, is_crossed: bool) -> None:
        self._is_between_batches = True
        if (run_state := self._run_state or run_state_of(trainer)).rolls_back:
            return  # to a checkpoint, which is then saved anew
        stops = run_state.stop_reason is not None
        if not stops and not is_crossed and not self._is_overdue:
            if not self._is_warm:
                self._is_warm = True
                if self._io is not None and self.asynchronous and self.every_n_steps:
                    self._wake()
                    reserve_memory(self._io, trainer, pl_module)
        elif not stops and self._must_skip(trainer):
            self._wake()
        elif awaits_module_hook(trainer, pl_module):  # what that changes, a moving average say, belongs to the step
            self._saves_after_module_hook = True
        else:
            self._save_what_is_due(trainer, pl_module)

    def _save_what_is_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if run_state_of(trainer).stop_reason is None:
            self.save(trainer, pl_module)
        # All ranks have agreed to end after this step; what it reached must be on disk before the run ends.
        elif self._last_saved_step != trainer.global_step:
            self.save(trainer, pl_module, wait=True)
        else:
            self.wait(trainer)

    @override
    def on_module_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._saves_after_module_hook:
            self._saves_after_module_hook = False
            self._save_what_is_due(trainer, pl_module)

    @override
    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        if trainer.is_global_zero:
            self._scores.hear(trainer, self.directory, self.run, scores, step, self._last_saved_step)

    @override
    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        if record.path.parent == self.directory:
            self._scores.note_durable(record)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch
        if crossed(epoch, epoch + 1, self.every_n_epochs):
            self.save(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.save_final:
            self.save(trainer, pl_module, final=True, wait=True)
        self.wait(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        wait_after_failure(lambda: self.wait(trainer))

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        parts = checkpoint.setdefault(CONTRACT_KEY, {})
        parts["elapsed_s"] = self._resume.elapsed_s
        is_between_batches = self._is_between_batches and stands_between_batches(trainer)
        capture_parts(
            trainer, pl_module, parts, is_between_batches=is_between_batches, save_gradients=self.save_gradients
        )

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        parts = checkpoint.get(CONTRACT_KEY, {})
        self._resume.load(trainer, parts)
        if self._resume.restores_rng_at_first_batch:
            # Of the instance, and until then: a hook that is there is called in every step.
            self.on_train_batch_start = self.restore_pending_rng  # type: ignore[method-assign, assignment]

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self._gives_plugin_back:
            give_back_plugin(trainer)

    @override
    def join_run(self, run: RunContext) -> None:
        if run.record is not None:
            self.run = run.record
            self.replace_existing = True  # the run has decided already what it goes on from

    def place_under(self, trainer: pl.Trainer) -> Path:
        """Decide where checkpoints of `trainer` go, and say it."""
        if self.dirpath is None:
            self.dirpath = local_directory(trainer.default_root_dir) / "checkpoints"
        self.dirpath = self.dirpath.absolute()
        return self.dirpath

    @property
    def directory(self) -> Path:
        """Where checkpoints go; known from ``setup`` on."""
        assert self.dirpath is not None
        return self.dirpath

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, or the newest without a monitor, which ``ckpt_path="best"`` asks for; empty for none."""
        return "" if self.dirpath is None else best_path(own_records(list_checkpoints(self.directory)), self.retention)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        # Lightning tells it in a process whose children have trained; there no `setup` says where checkpoints are.
        if path:
            self.dirpath = self._trained_in = Path(path).parent

    @property
    def saves_anything(self) -> bool:
        """Whether a run with this callback saves checkpoints of its own accord."""
        return bool(self.every_n_steps or self.every_n_epochs or self.save_final or self.triggers)

    def save(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, final: bool = False, wait: bool = False
    ) -> Path:
        """Save a checkpoint of this moment. Collective.

        Returns:
            Where its record is, or will be once it is durable.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it.
            UnwrittenCheckpointError: It, or the one before it, could not be written.
        """
        began_s = time.monotonic()
        step = trainer.global_step
        path = self.directory / f"{FINAL_NAME if final else step_name(step)}.json"
        if getattr(trainer, "fast_dev_run", False):
            return path
        assert self._io is not None
        self._is_overdue, self._is_warm, self._last_saved_step = False, True, step
        self.triggers.note_save()
        if trainer.is_global_zero:
            staging, trainer_checkpoint = stage_trainer_files(pl_module, path, step, final)
            meta = meta_of_save(
                trainer, self.run, self.retention.monitor, self._resume.elapsed_s, trainer_checkpoint, final=final
            )
            on_durable = functools.partial(self.reports.note, retention=self.retention, began_s=began_s)
            self._io.expect(path, SaveRequest(meta, staging, self.asynchronous and not wait, on_durable))
        else:
            join_in_trainer_files(pl_module, step, final)
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except BaseException:
            self._io.forget(path)
            raise
        if wait:
            self.wait(trainer)
        fire(trainer, "on_time_spent", "checkpoint", time.monotonic() - began_s)
        self.poll(trainer)
        return path

    def wait(self, trainer: pl.Trainer) -> None:
        """Return when the save in flight is durable and reported.

        Raises:
            Exception: It could not be written.
        """
        if self._io is not None:
            self._io.wait()
        self.reports.report(trainer)

    def poll(self, trainer: pl.Trainer) -> None:
        """Report what became durable since the last call, and raise what a save in the background raised."""
        if self.reports:
            self.reports.report(trainer)
        if self._io is not None:
            self._io.poll()

    def spare(self, awaited: Callable[[], Collection[Path]]) -> None:
        """Keep checkpoints of which `awaited` names a file, because it still has to be read, by an upload say.

        It is asked on rank zero, in the thread that wrote, when older checkpoints are about to go; what it kept goes
        after the first save that finds it no longer named.
        """
        self.reports.spare(awaited)

    def restore_pending_rng(self, trainer: pl.Trainer, *_: Any) -> None:
        """Take over the random state that was loaded; once, at the point from which a run draws as it did before."""
        vars(self).pop("on_train_batch_start", None)
        self._resume.restore_rng(trainer)

    def _wake(self) -> None:
        """From now on something goes on in the background: look after each step for how it ended."""
        self.next_due_step = 0

    def _must_skip(self, trainer: pl.Trainer) -> bool:
        """Whether a due save has to wait for its turn."""
        is_busy = self.when_busy == "newest" and self._io is not None and self._io.writer.is_busy
        if self.when_busy == "newest":
            self._is_overdue = trainer.strategy.broadcast(is_busy)
        return self._is_overdue


find_ours(Checkpoint)
