"""The callback that decides when a checkpoint is saved, which ones stay, and what a resumed run takes over."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...adapter.contract.exceptions import CheckpointError, GenlightError, StartupContractError
from ...adapter.contract.run_state import RunState
from ..hook.cadence import Boundaries, StepCadence, crossed, suppressed
from ..hook.events import callbacks_of, fire, run_state_of
from ..hook.hook import Hook, ending_the_run
from ..hook.listeners import after_failure, skippable
from .checkpoint_io import DurableCheckpointIO, SaveRequest
from .earlier_runs import find_ours, in_use_fault, note_directory
from .format.layout import FINAL_NAME, TRAINER_FOLDER, step_name
from .format.record import CheckpointRecord, RecordMeta
from .loader_positions import warn_of_loaders_without_position
from .ownership import require_replaceable
from .rank_state import (
    SHARDED_GRADIENTS,
    capture_rng_of_ranks,
    gather_gradients,
    gradients_of,
    gradients_of_rank,
    restore_gradients,
    restore_rng_of_rank,
    sharded_gradients_of,
)
from .remote import is_remote
from .retention import WRITER, Retention, best, is_named, own_records, to_delete
from .saving import CONTRACT_KEY
from .selection import list_checkpoints
from .sharded.boxes import is_sharded
from .sharded.save import require_shared_directory
from .sharded.strategy import rank_groups_of, save_through_plugin
from .storage.commit import Staging, delete_checkpoint, require_space, stage, sweep
from .storage.host_buffer import ALIGNMENT
from .storage.write_errors import naming_the_checkpoint

__all__ = ["Checkpoint", "WritesTrainerFiles"]

log = logging.getLogger(__name__)

_ADAM_STATES = 2
"""Copies of the parameters that the usual optimizer adds; for the estimate before it exists."""


@runtime_checkable
class WritesTrainerFiles(Protocol):
    """A LightningModule whose trainer has files of its own to add; asked on rank zero, inside the checkpoint."""

    def save_trainer_files(self, *, output_dir: Path, step: int, final: bool) -> Mapping[str, Any] | None:
        """Write into `output_dir`, which becomes ``trainer/`` of the checkpoint; the result goes into the record."""
        ...


class Checkpoint(Hook, LightningCheckpoint):
    """Saves whole, durable checkpoints from which a run resumes to the same bits.

    Works in any ``Trainer(callbacks=[Checkpoint("checkpoints", every_n_steps=200)])``: it brings its own
    `DurableCheckpointIO`, stores the random state of every rank and the gradients of an unfinished accumulation window,
    and restores them with ``ckpt_path``. Every callback hears of a durable checkpoint by ``on_checkpoint_durable``, in
    the training thread of rank zero. Before a stop that the ranks agreed on (``stop_reason`` of the run state), the
    step that was reached is saved.

    On several ranks rank zero writes, and gets what differs from rank to rank from the others. Tensors that are sharded
    under ``ModelParallelStrategy`` are not gathered: each rank writes its slices, and the checkpoint exists once all
    parts are durable. Any number of ranks, sharded or not, resumes from it, and each reads what it needs. What is not
    sharded, such as buffers, is rank zero's; of a `ContractModule`, what other ranks have otherwise is stored too, and
    each gets its own back. What is sharded twice in one dimension (FSDP within tensor parallel) is gathered.

    `dirpath` has to be on a file system that all nodes share where tensors are sharded, which is looked at before
    training; else for a resume, because every rank reads the checkpoint.

    Args:
        dirpath: Where checkpoints go; None means ``<default_root_dir>/checkpoints``.
        every_n_steps: Save when ``trainer.global_step`` crosses a multiple of this; 0 never does.
        every_n_epochs: Save at the end of every such epoch; 0 never does.
        monitor: Metric that `keep_best` goes by, as logged.
        mode: Whether a smaller (``min``) or a larger (``max``) value of `monitor` is better.
        keep_last: How many of the newest step checkpoints stay; None keeps all. Only what this callback wrote in the
            same run counts and is ever removed, and not while a link in `dirpath` points to it.
        keep_best: How many of the best stay, where `monitor` is set.
        keep_every: Checkpoints whose step is a multiple of this stay; 0 means none for that reason.
        save_final: Save ``final`` when training has ended as planned, and wait until it is durable.
        asynchronous: Training goes on while a checkpoint is written, after its tensors were copied.
        when_busy: What a save does while the one before it is still being written: ``wait`` for it, or save the
            ``newest`` state as soon as it is done, leaving out those in between.
        on_error: Whether a failed save ends the run (``stop``) or is logged (``continue``).
        save_gradients: Whether gradients are stored; None means where an unfinished accumulation window needs them.
        replace_existing: Whether training may begin at step 0 although `dirpath` holds checkpoints of another process's
            run, which are then replaced; otherwise that is refused.

    Raises:
        ValueError: An argument is out of range.
    """

    ranks: Literal["zero", "all"] = "all"
    optional_reads = ("stop_reason", "loss_stats", "eval_scores")
    writes = ("latest_checkpoint_uri",)
    every_n_steps = StepCadence()

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int = 0,
        every_n_epochs: int = 0,
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
    ) -> None:
        if every_n_epochs < 0:
            raise ValueError(f"Invalid `every_n_epochs`. Expected a number >= 0, but received {every_n_epochs}.")
        if when_busy not in ("wait", "newest"):
            raise ValueError(f"Invalid `when_busy`. Expected 'wait' or 'newest', but received {when_busy!r}.")
        if on_error not in ("stop", "continue"):
            raise ValueError(f"Invalid `on_error`. Expected 'stop' or 'continue', but received {on_error!r}.")
        self.dirpath = None if dirpath is None else _local(dirpath)
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.retention = Retention(keep_last, keep_best, monitor, mode, keep_every)
        self.save_final = save_final
        self.asynchronous = asynchronous
        self.when_busy = when_busy
        self.critical = on_error == "stop"
        self.save_gradients = save_gradients
        self.replace_existing = replace_existing
        self._trained_in: Path | None = None
        """Known to copies in other processes, too, which a launcher makes for a second fit."""
        self.run = RecordMeta()
        """What every record of this run says; the runtime fills in run_id, attempt, max_steps and spec digest."""
        self.note_save_time: Callable[[float], None] = _do_nothing
        """Told, on rank zero, how many seconds each save took until durable, its wait for the last one included."""
        self._save_began_s = 0.0
        self._durable: deque[CheckpointRecord] = deque()
        self._being_reported: CheckpointRecord | None = None
        self._awaited: list[Callable[[], Collection[Path]]] = []
        self._io: DurableCheckpointIO | None = None
        self._gives_plugin_back = False
        self._boundaries = Boundaries(self)
        self._run_state: RunState | None = None
        self._is_overdue = False
        self._is_warm = False
        self._last_saved_step: int | None = None
        self._is_between_batches = False
        self._resumes_within_epoch = False
        self._pending: dict[str, Any] = {}
        self._elapsed_before_s = 0.0
        self._started_at_s: float | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "_io": None,
            "_durable": deque(),
            "_being_reported": None,
            "_awaited": [],
            "_run_state": None,
        }
        return {**super().__getstate__(), **own}

    # Events

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._gives_plugin_back = not isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO)
        self._io = _install(trainer)
        self._io.on_background_save(self._wake)
        save_through_plugin(trainer.strategy)
        directory = self.place_under(trainer)
        if stage == "fit" and trainer.is_global_zero:
            sweep(directory)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run_state = run_state_of(trainer)
        self._boundaries = Boundaries(self, trainer.global_step)
        self._is_overdue, self._is_warm, self._is_between_batches, self._last_saved_step = False, False, False, None
        self._started_at_s = time.monotonic()
        restore_gradients(pl_module, self._pending.pop("gradients", {}))
        if self._resumes_within_epoch and trainer.is_global_zero:
            warn_of_loaders_without_position(trainer)
        self._resumes_within_epoch = False
        if not self.saves_anything:
            return
        self._refuse_to_mix_runs(trainer)
        groups = rank_groups_of(trainer.strategy)
        if groups is not None and any(isinstance(p, DTensor) for p in pl_module.parameters()):
            require_shared_directory(groups.training, self.directory)
        if trainer.is_global_zero:
            if self.save_final:  # lest the run ends in vain, long from now
                require_replaceable(self.directory / f"{FINAL_NAME}.json")
            require_space(self.directory, _estimate(pl_module))

    def _refuse_to_mix_runs(self, trainer: pl.Trainer) -> None:
        """On all ranks, where rank zero finds another run's checkpoints and none was named to go on from."""
        fault = None
        begins_anew = trainer.ckpt_path is None and trainer.global_step == 0
        if begins_anew and trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            may_replace = self.replace_existing or self._trained_in == self.directory
            fault = None if may_replace else in_use_fault(self.directory)
        fault = trainer.strategy.broadcast(fault)
        if fault is not None:
            raise ending_the_run(StartupContractError("startup.artifacts_in_use", fault))
        note_directory(self.directory)
        self._trained_in = self.directory

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_settled = self._io is None or self._io.is_settled  # before the poll, which sees what ends meanwhile
        self.poll(trainer)
        is_crossed = self._boundaries.crosses(trainer.global_step)
        if not is_settled:
            self._wake()
        self._save_if_due(trainer, pl_module, is_crossed=is_crossed and not suppressed(pl_module))

    def _save_if_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, is_crossed: bool) -> None:
        self._is_between_batches = True
        run_state = self._run_state or run_state_of(trainer)
        if run_state.stop_reason is not None:
            self._after_own_hook(trainer, pl_module, self._save_before_stop)
            return
        if not is_crossed and not self._is_overdue:
            if not self._is_warm:
                self._warm_up(trainer, pl_module)
        elif self._must_skip(trainer):
            self._wake()
        else:
            self._after_own_hook(trainer, pl_module, self.save)

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
        try:
            self.wait(trainer)
        except GenlightError as error:
            log.error("the checkpoint in flight: %s", error)  # noqa: TRY400 - its message says all
        except Exception:
            log.exception("The checkpoint in flight could not be written")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        parts = checkpoint.setdefault(CONTRACT_KEY, {})
        parts["is_between_batches"] = self._stands_between_batches(trainer)
        parts["is_last_batch"] = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        parts["elapsed_s"] = self.elapsed_s
        if "rng" not in parts:
            parts["rng"] = capture_rng_of_ranks()
        needs_gradients = self._needs_gradients(trainer, pl_module)
        gradients = gradients_of(pl_module) if needs_gradients else {}
        if trainer.strategy.reduce_boolean_decision(bool(gradients), all=False):
            parts["gradients"] = gather_gradients(gradients)
        sharded = sharded_gradients_of(pl_module) if needs_gradients else {}
        if sharded:
            parts[SHARDED_GRADIENTS] = sharded

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        parts = checkpoint.get(CONTRACT_KEY, {})
        self._elapsed_before_s = parts.get("elapsed_s", 0.0)
        gradients = gradients_of_rank(parts.get("gradients", []), trainer.global_rank)
        self._pending["gradients"] = gradients | parts.get(SHARDED_GRADIENTS, {})
        self._resumes_within_epoch = bool(parts.get("is_between_batches")) and not parts.get("is_last_batch")
        if "rng" in parts:
            # Now, for what draws before the first batch; where batches went before, once more at the next one,
            # because making the loader's iterator anew draws what the interrupted epoch had drawn already.
            restore_rng_of_rank(parts["rng"], trainer.global_rank, trainer.world_size)
            if parts.get("is_between_batches"):
                self._pending["rng"] = parts["rng"]
                # After the last batch Lightning's loop goes on with an epoch whose iterator draws as it would have.
                if self._resumes_within_epoch:
                    # Of the instance, and until then: a hook that is there is called in every step.
                    self.on_train_batch_start = self._before_first_batch  # type: ignore[method-assign, assignment]

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self._gives_plugin_back and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            # Through it this process hands its weights to the one that has started it, which knows no other.
            trainer.strategy.checkpoint_io = TorchCheckpointIO()

    # What the runtime calls as well

    def place_under(self, trainer: pl.Trainer) -> Path:
        """Decide where checkpoints of `trainer` go, and say it."""
        if self.dirpath is None:
            self.dirpath = _local(trainer.default_root_dir) / "checkpoints"
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
        records = [] if self.dirpath is None else own_records(list_checkpoints(self.directory))
        chosen = best(records, self.retention) or records[-1:]
        return str(chosen[0].path) if chosen else ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        # Lightning tells it in a process whose children have trained; there no `setup` says where checkpoints are.
        if path:
            self.dirpath = self._trained_in = Path(path).parent

    @property
    def saves_anything(self) -> bool:
        """Whether a run with this callback saves checkpoints of its own accord."""
        return bool(self.every_n_steps or self.every_n_epochs or self.save_final)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, over all attempts."""
        here = 0.0 if self._started_at_s is None else time.monotonic() - self._started_at_s
        return self._elapsed_before_s + here

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
        self._save_began_s = time.monotonic()
        step = trainer.global_step
        path = self.directory / f"{FINAL_NAME if final else step_name(step)}.json"
        if getattr(trainer, "fast_dev_run", False):
            return path
        assert self._io is not None
        self._is_overdue, self._is_warm = False, True
        self._last_saved_step = step
        if trainer.is_global_zero:
            self._expect(trainer, pl_module, path, step=step, final=final, wait=wait)
        else:
            _join_in_trainer_files(pl_module, step, final)
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except BaseException:
            self._io.forget(path)
            raise
        if wait:
            self.wait(trainer)
        self.poll(trainer)
        return path

    def wait(self, trainer: pl.Trainer) -> None:
        """Return when the save in flight is durable and reported.

        Raises:
            Exception: It could not be written.
        """
        if self._io is not None:
            self._io.wait()
        self._report(trainer)

    def poll(self, trainer: pl.Trainer) -> None:
        """Report what became durable since the last call, and raise what a save in the background raised."""
        if self._durable:
            self._report(trainer)
        if self._io is not None:
            self._io.poll()

    def spare(self, awaited: Callable[[], Collection[Path]]) -> None:
        """Keep checkpoints of which `awaited` names a file, because somebody still has to read it: an upload, say.

        It is asked on rank zero, in the thread that wrote, when older checkpoints are about to go; what it kept goes
        after the first save that finds it no longer named.
        """
        if awaited not in self._awaited:
            self._awaited.append(awaited)

    def restore_pending_rng(self, trainer: pl.Trainer) -> None:
        """Take over the random state that was loaded; once, at the point from which a run draws as it did before."""
        vars(self).pop("on_train_batch_start", None)
        states = self._pending.pop("rng", None)
        if states is not None:
            restore_rng_of_rank(states, trainer.global_rank, trainer.world_size)

    # How

    def _wake(self) -> None:
        """From now on something goes on in the background: look after each step for how it ended."""
        self.next_due_step = 0

    def _after_own_hook(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        save: Callable[[pl.Trainer, pl.LightningModule], object],
    ) -> None:
        """Save once the module's own ``on_train_batch_end`` has run, where it has one.

        Lightning calls it after those of all callbacks, and what it changes, a moving average say, belongs to the step.
        """
        hook = pl_module.on_train_batch_end
        has_none = getattr(hook, "__func__", None) is pl.LightningModule.on_train_batch_end
        is_called = getattr(trainer.fit_loop.epoch_loop, "calls_module_on_train_batch_end", True)  # of genlight's loop
        if has_none or not is_called:
            save(trainer, pl_module)
            return
        was_its_own = "on_train_batch_end" in vars(pl_module)

        def hook_and_save(*event: Any) -> None:
            if was_its_own:
                pl_module.on_train_batch_end = hook  # type: ignore[method-assign]
            else:
                del pl_module.on_train_batch_end
            hook(*event)
            try:
                save(trainer, pl_module)
            except Exception as error:  # noqa: BLE001  # raised again where the policy of this hook says so
                after_failure(self.on_train_batch_end, "on_train_batch_end", error)

        pl_module.on_train_batch_end = hook_and_save  # type: ignore[method-assign, assignment]

    def _before_first_batch(self, trainer: pl.Trainer, *_: Any) -> None:
        self.restore_pending_rng(trainer)

    def _stands_between_batches(self, trainer: pl.Trainer) -> bool:
        """Whether a batch was trained to its end and the next one of its epoch not begun."""
        # Lightning declares the counters as a base class with fewer fields.
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        epochs: Any = trainer.fit_loop.epoch_progress.current
        # An epoch also ends, for Lightning, where ``max_steps`` ends the run within it; a longer run goes on with that.
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        is_epoch_over = is_last and epochs.processed == epochs.started
        return self._is_between_batches and batches.ready == batches.processed and not is_epoch_over

    def _save_before_stop(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All ranks have agreed to end after this step; what it reached must be on disk before the run ends."""
        if self._last_saved_step != trainer.global_step:
            self.save(trainer, pl_module, wait=True)
        else:
            self.wait(trainer)

    def _warm_up(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the memory for snapshots ready before the first save: touching fresh pages costs more than the copy.

        Once, after a first step, when the optimizers have their state; in the background, where it disturbs nobody.
        """
        self._is_warm = True
        io = self._io
        if io is None or not (self.asynchronous and self.every_n_steps) or io.writer.is_busy:
            return
        nbytes = _size_of_snapshot(trainer, pl_module)
        pinned = trainer.strategy.root_device.type == "cuda"
        self._wake()
        io.writer.start(lambda: io.buffer.reserve(nbytes, pinned=pinned))

    def _must_skip(self, trainer: pl.Trainer) -> bool:
        """Whether a due save has to wait for its turn."""
        is_busy = self.when_busy == "newest" and self._io is not None and self._io.writer.is_busy
        if self.when_busy == "newest":
            self._is_overdue = trainer.strategy.broadcast(is_busy)
        return self._is_overdue

    def _expect(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: Path, *, step: int, final: bool, wait: bool
    ) -> None:
        assert self._io is not None
        staging, trainer_checkpoint = self._trainer_files(pl_module, path, step, final)
        state = run_state_of(trainer)
        meta = replace(
            self.run,
            step=step,
            run_id=self.run.run_id or state.run_id,
            final=final,
            trainer_checkpoint=trainer_checkpoint,
            elapsed_s=self.elapsed_s,
            world_size=trainer.world_size,
            metrics=self._monitored(trainer),
            writer=WRITER,
            parameters=frozenset(name for name, _ in pl_module.named_parameters()),
        )
        asynchronous = self.asynchronous and not wait
        self._io.expect(path, SaveRequest(meta, staging, asynchronous, self._on_durable))

    @staticmethod
    def _trainer_files(
        pl_module: pl.LightningModule, path: Path, step: int, final: bool
    ) -> tuple[Staging | None, Mapping[str, Any] | None]:
        if not isinstance(pl_module, WritesTrainerFiles):
            return None, None
        with naming_the_checkpoint(path):
            staging = stage(path)
        try:
            output = staging.folder(TRAINER_FOLDER)
            result = pl_module.save_trainer_files(output_dir=output, step=step, final=final)
        except BaseException:
            staging.discard()
            raise
        return staging, result

    def _on_durable(self, record: CheckpointRecord) -> None:
        """In the thread that wrote: only now may older ones go."""
        self.note_save_time(time.monotonic() - self._save_began_s)
        self._durable.append(record)
        # One that was not reported yet stays: whoever hears of it (an upload) must still find it.
        spared = {unreported.path for unreported in (*self._durable, self._being_reported) if unreported is not None}
        listed = list_checkpoints(self.directory)
        awaited = {os.path.realpath(path) for ask in self._awaited for path in ask()}
        awaited |= {os.path.realpath(entry) for entry in os.scandir(self.directory) if entry.is_symlink()}
        of_this_run = [old for old in own_records(listed) if old.run_id == record.run_id]
        for old in to_delete(of_this_run, self.retention):
            if old.path not in spared and not is_named(old, awaited):
                _try_to_delete(old.path)

    def _report(self, trainer: pl.Trainer) -> None:
        while self._durable:
            self._being_reported = record = self._durable[0]  # Set before it is popped: one of both spares it.
            self._durable.popleft()
            run_state_of(trainer).latest_checkpoint_uri = str(record.path)
            try:
                fire(trainer, "on_checkpoint_durable", record.path, record.step)
            finally:
                self._being_reported = None

    def _monitored(self, trainer: pl.Trainer) -> dict[str, float]:
        name = self.retention.monitor
        if name is None:
            return {}
        state = run_state_of(trainer)
        for source in (trainer.callback_metrics, state.eval_scores or {}, state.loss_stats or {}):
            if name in source:
                return {name: float(source[name])}
        log.warning(
            "The metric %r that checkpoints are kept by was not logged up to step %d", name, trainer.global_step
        )
        return {}

    def _needs_gradients(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        if self.save_gradients is not None:
            return self.save_gradients
        if not pl_module.automatic_optimization:
            return True  # Only the module knows its windows; one that clears its gradients has none to store.
        progress = trainer.fit_loop.epoch_loop.batch_progress
        window = trainer.accumulate_grad_batches
        is_open = progress.current.ready % window != 0 and not progress.is_last_batch
        return is_open and self._stands_between_batches(trainer)


def _local(path: str | os.PathLike[str]) -> Path:
    if is_remote(path):
        raise ValueError(
            f"Invalid `dirpath`. Checkpoint writes to a local file system, from which a run resumes, but received "
            f"{os.fspath(path)!r}. Name a local `dirpath`, and `uploads.targets` of a job, or `targets` of "
            "UploadArtifacts, for copies elsewhere."
        )
    return Path(os.fspath(path).removeprefix("file://"))


def _do_nothing(seconds: float) -> None:
    """Where nobody wants to know how long saves take."""


def _try_to_delete(path: Path) -> None:
    """Remove an old checkpoint; one that cannot be removed costs space, not the run, and is tried again next time."""
    try:
        delete_checkpoint(path)
    except (OSError, CheckpointError) as error:
        log.warning("Could not remove the old checkpoint %s: %s", path, error)


def _join_in_trainer_files(pl_module: pl.LightningModule, step: int, final: bool) -> None:
    """On ranks other than zero, whose files do not count: what a trainer asks of sharded modules needs all ranks."""
    if isinstance(pl_module, WritesTrainerFiles) and any(isinstance(p, DTensor) for p in pl_module.parameters()):
        with tempfile.TemporaryDirectory() as scratch:
            pl_module.save_trainer_files(output_dir=Path(scratch), step=step, final=final)


def _install(trainer: pl.Trainer) -> DurableCheckpointIO:
    """The plugin of `trainer`; put in place of Lightning's own default, but of nobody else's.

    Raises:
        TypeError: The trainer was given another checkpoint plugin.
    """
    plugin = trainer.strategy.checkpoint_io
    if isinstance(plugin, DurableCheckpointIO):
        return plugin
    if type(plugin) is not TorchCheckpointIO:
        raise TypeError(
            f"Invalid `plugins`. Checkpoint writes through DurableCheckpointIO, but the trainer was given "
            f"{type(plugin).__name__}; leave that plugin out."
        )
    installed = DurableCheckpointIO()
    trainer.strategy.checkpoint_io = installed
    return installed


def _estimate(module: pl.LightningModule) -> int:
    """Bytes of a first checkpoint: the weights, and what the usual optimizer keeps for each that is trained."""
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return int(weights + _ADAM_STATES * trained)


def _size_of_snapshot(trainer: pl.Trainer, module: pl.LightningModule) -> int:
    """Bytes that this rank will copy, rounded up as in the snapshot: its slices, on rank zero also what is whole."""
    moments = (t for o in trainer.optimizers for entry in o.state.values() for t in entry.values())
    tensors = (t for t in (*module.parameters(), *module.buffers(), *moments) if isinstance(t, torch.Tensor))
    own = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if is_sharded(t) or trainer.is_global_zero)
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in own)


def _directories(trainer: pl.Trainer) -> list[Path]:
    """Where the callbacks of `trainer` keep their checkpoints."""
    return [callback.place_under(trainer) for callback in callbacks_of(trainer) if isinstance(callback, Checkpoint)]


find_ours(_directories)
