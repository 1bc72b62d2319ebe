"""The policy of checkpoints: when to save one, which ones to keep, and the state that a resumed run restores."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...adapter.contract.exceptions import (
    BrokenCheckpointError,
    CheckpointError,
    ResumeDifferenceError,
    StartupContractError,
    UnstorableStateError,
)
from ...adapter.contract.types import RunState
from ...adapter.plumbing.text import require
from ...reporters.events.run_metadata import metadata_of_module
from ..hook.cadence import Boundaries, crossed, step_cadence, suppressed
from ..hook.events import awaits_module_hook, callbacks_of, fire, run_state_of, timed
from ..hook.hook import Hook, RunContext, ending_the_run, judge, skippable
from ..lightning_internals import checkpoint_connector, choose_start
from ..rank_channel import ALONE, Channel, RankGroups
from ..witness.entry import Proof
from ..witness.state import compare_with_checkpoint
from ..witness.witness import Witness
from .budget import Budget, SaveClock, seconds_of
from .capture import CONTRACT_KEY
from .export import keep_configurations
from .format.record import FINAL_NAME, CheckpointRecord, RecordMeta, local_path, read_record, step_name
from .frozen import Frozen, frozen_in
from .listing import Listed, files_in_the_way, list_checkpoints
from .loader_position import forget_positions, keep_positions, put_positions_back, set_positions_aside
from .memory_tier import POINTER, discard_memory, is_in_memory, memory_folder, open_memory, retire_memory, spans_nodes
from .peers import Ring, first_ranks, forget_copies, open_ring, save_newest
from .plugins import install_plugin, rank_groups_of, remove_plugin, url_faults
from .rank_state import WITNESS, ResumeState, capture_parts
from .selection import WRITER, Retention, add_score, best_first, find_checkpoint, own_records, to_delete
from .storage import Staging, move_out_of_the_way, require_space, stage, sweep
from .store import CheckpointStore, wait_after_failure
from .writing import require_shared_directory

log = logging.getLogger(__name__)

_ADAM_STATES = 2
"""Number of copies of the parameters in the state of Adam; used to estimate the size of a checkpoint."""

_trained_here: set[Path] = set()
"""Directories in which this process has already begun a training; a further fit may save there without a refusal."""


@runtime_checkable
class WritesTrainerFiles(Protocol):
    """A LightningModule whose trainer class adds its own files to a checkpoint."""

    def save_trainer_files(self, *, output_dir: Path, step: int, final: bool) -> Mapping[str, Any] | None:
        """Write into `output_dir`, which becomes ``trainer/`` of the checkpoint; the result goes into the record.

        Called on rank zero. If parameters are sharded, all ranks call it, because gathering them needs every rank; the
        files of the other ranks are discarded.
        """
        ...


@dataclass(frozen=True)
class MemoryTier:
    """The checkpoints of a training in the memory of its node."""

    directory: Path
    groups: RankGroups | None
    """Channels for the saves in memory that all ranks write; None if only rank zero writes.

    Saves on disk have other channels, because a save in memory and a save on disk may be in flight at the same time.
    """
    store: CheckpointStore = field(default_factory=CheckpointStore)

    def keep_newest(self) -> None:
        """Remove all but the newest checkpoint, once the save in flight has ended."""
        self.store.prune(
            self.directory, lambda listed: [each.record for each in listed[:-1] if each.record is not None]
        )


class Checkpoint(Hook, LightningCheckpoint):
    """Saves durable checkpoints from which a run resumes bit for bit.

    ``Trainer(callbacks=[Checkpoint("checkpoints", every_n_steps=200)])`` is all you need. Files of other callbacks,
    such as ``ModelCheckpoint``, keep Lightning's format, unless you install `DurableCheckpointIO`, train a trainer
    class or train under ``ModelParallelStrategy``. Then they have this format as well, and stock Lightning cannot load
    them (``genlight checkpoints export`` converts one).

    The callback also stores the random state of every rank and the gradients of an unfinished accumulation window, and
    restores them when you pass ``ckpt_path``. When a checkpoint is durable, every callback receives
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
        dirpath: Folder for checkpoints; None means ``<default_root_dir>/checkpoints``.
        every_n_steps: Save when ``trainer.global_step`` crosses a multiple of this; 0 never does.
        every_n_epochs: Save at the end of every such epoch; 0 never does.
        every_minutes: Save when this many minutes have passed since the last save, by rank zero's clock; 0 never does.
        memory_every_n_steps: Save in ``/dev/shm``, the memory of the node, when ``trainer.global_step`` crosses a
            multiple of this; 0 never does. Such a checkpoint outlives a killed process, but not the node. Only the
            newest one is kept; a resume takes it if it is newer than those in `dirpath`. It is neither uploaded nor
            reported to callbacks. When training ends with an error, it is moved to `dirpath`. If the memory has no
            room, or a strategy shards over several nodes, nothing is saved there, and a warning gives the reason. On
            several nodes, a resume first copies the checkpoint to `dirpath`.
        peer_copies: On several nodes, send each checkpoint in memory from node to node, in the background. A resume
            takes the newest one that any node has, even if all other nodes were replaced. This takes memory for three
            checkpoints on each node, and sends their bytes unencrypted over the network of training.
        lose_at_most: Instead of a cadence: how much training a crash may cost, such as ``60s`` or ``5min``. The time
            between saves follows from how long they stall training and how long they take until they are durable. It is
            logged when it changes, with the costs of half and of twice that time. A resumed run starts with the times
            that saves took before.
        pay_at_most: With `lose_at_most` or instead of it: the largest share of the time in which saves stall training,
            such as 0.02. If both limits cannot be kept, `lose_at_most` has priority, and a warning says so.
        keep_last: How many of the newest step checkpoints to keep; None keeps all. Only checkpoints that this callback
            wrote in the same run count, and none is removed while a link in `dirpath` points to it.
        keep_best: How many of the best checkpoints to keep, if `monitor` is set.
        monitor: Logged metric, or score, that decides which checkpoints `keep_best` keeps. A score that comes later,
            for example from an `EvaluateCommand`, counts for the checkpoint of its own step.
        mode: Whether a smaller (``min``) or a larger (``max``) value of `monitor` is better.
        save_final: Save ``final`` when training has ended as planned, and wait until it is durable.
        asynchronous: Copy the tensors, then write the checkpoint in the background while training continues. The next
            save waits until this one is written.
        copy_while_training: With `asynchronous`, also copy large tensors in host memory while training continues. The
            next update of an optimizer waits until they are copied. No code may then write to a tensor without torch,
            for example through its ``data_ptr()``.
        on_error: Whether a failed save ends the run (``stop``) or is logged (``continue``).
        replace_existing: Allow training to begin at step 0 when `dirpath` holds checkpoints of another run, and replace
            them. By default this is refused.
        weights: ``all`` stores every weight; those that are frozen from the start (they require no gradient and no
            optimizer holds them) are written once and shared by all checkpoints. ``trained`` omits the frozen
            weights: a resume takes them from the class and verifies their digests.
        on_difference: The reaction if a repeated step of a resumed run differs from the same step of the earlier
            attempt: ``warn`` logs the difference, ``stop`` also ends the run.
        overlap: Whether a run that resumes from an older checkpoint of `dirpath` compares its weights, optimizers,
            random states and positions with the newest checkpoint, when it reaches the step of that checkpoint.

    Raises:
        ValueError: An argument is out of range.
    """

    ranks: Literal["zero", "all"] = "all"
    optional_reads = ("stop_reason", "loss_stats", "eval_scores", "rolls_back")
    writes = ("latest_checkpoint_uri",)
    _of_this_process = frozenset({"_channel", "_run_state", "_witness", "_overlapped", "_memory", "_ring"})
    _channel = ALONE
    _run_state: RunState | None = None
    _witness: Witness | None = None
    _memory: MemoryTier | None = None
    _ring: Ring | None = None
    _overlapped: CheckpointRecord | None = None
    """The newest checkpoint of a run that resumed from an older one. States are compared at its step; see `overlap`."""

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int = 0,
        every_n_epochs: int = 0,
        every_minutes: float = 0,
        memory_every_n_steps: int = 0,
        peer_copies: bool = False,
        lose_at_most: str | None = None,
        pay_at_most: float | None = None,
        keep_last: int | None = 2,
        keep_best: int = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_final: bool = True,
        asynchronous: bool = True,
        copy_while_training: bool = False,
        on_error: Literal["stop", "continue"] = "stop",
        replace_existing: bool = False,
        weights: Literal["all", "trained"] = "all",
        on_difference: Literal["warn", "stop"] = "warn",
        overlap: bool = False,
    ) -> None:
        require(
            (0 <= every_minutes < math.inf, "every_minutes", "a number >= 0", every_minutes),
            (pay_at_most is None or 0 < pay_at_most < 1, "pay_at_most", "0 < `pay_at_most` < 1", pay_at_most),
            (on_error in ("stop", "continue"), "on_error", "'stop' or 'continue'", on_error),
            (weights in ("all", "trained"), "weights", "'all' or 'trained'", weights),
            (on_difference in ("warn", "stop"), "on_difference", "'warn' or 'stop'", on_difference),
        )
        self.every_n_steps = step_cadence("every_n_steps", every_n_steps)
        self.every_n_epochs = step_cadence("every_n_epochs", every_n_epochs)
        self.memory_every_n_steps = step_cadence("memory_every_n_steps", memory_every_n_steps)
        self._budget: Budget | None = None
        if lose_at_most is not None or pay_at_most is not None:
            if self.every_n_steps or self.every_n_epochs or every_minutes:
                raise ValueError(
                    "`lose_at_most` and `pay_at_most` choose the time between checkpoints. Remove `every_n_steps`, "
                    "`every_n_epochs` and `every_minutes`, or these two."
                )
            self._budget = Budget(math.inf if lose_at_most is None else seconds_of(lose_at_most), pay_at_most or 1.0)
        self.dirpath = None if dirpath is None else local_path(dirpath)
        self.retention = Retention(keep_last, keep_best, monitor, mode)
        self.save_final, self.asynchronous, self.critical = save_final, asynchronous, on_error == "stop"
        self.every_minutes, self.replace_existing, self.weights = every_minutes, replace_existing, weights
        self.on_difference, self.overlap, self.copy_while_training = on_difference, overlap, copy_while_training
        self.run = RecordMeta()
        """Facts for every record of this run; `join_run` sets run id, attempt, max_steps and spec digest."""
        self._clock = SaveClock(every_minutes, 0)
        self._scores: dict[int, float] = {}
        """Monitored scores by step."""
        self._is_scored = False
        """Whether `monitor` names a score of an evaluation. If so, a step without an evaluation has no such value."""
        self._resume = ResumeState()
        self._store = CheckpointStore()
        self._boundaries = Boundaries(self)
        self._memory_boundaries = Boundaries(self, every=self.memory_every_n_steps)
        self._durable: deque[tuple[CheckpointRecord, float]] = deque()
        """Durable checkpoints not yet reported, with the seconds that each took; two threads use it."""
        self._in_use: list[Callable[[], Collection[Path]]] = []
        self._saves_after_module_hook = self._is_between_batches = self._only_in_memory = False
        self.peer_copies = peer_copies
        self.takes_newest = False
        """Whether the run resumes from the newest checkpoint, not from one that the user named; the commands set it."""
        self._keeps_memory = False
        """Whether checkpoints in memory stay when training fails: a supervisor may start the run again from them."""
        self._last_saved_step: int | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_durable": deque(), "_in_use": []}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise TypeError(
                f"Checkpoint does not save under {type(trainer.strategy).__name__}, which has its own format that no "
                "plugin can write. Use Lightning's ModelCheckpoint, or ModelParallelStrategy (FSDP 2) with Checkpoint."
            )
        # Stock Lightning cannot load a trainer class, so all its files may have genlight's format.
        is_of_trainer_class = hasattr(type(pl_module), "contract_state")
        self._store = install_plugin(trainer.strategy, for_others=is_of_trainer_class).store
        if faults := url_faults(trainer):
            raise ValueError("; ".join(faults))
        groups = rank_groups_of(trainer.strategy)
        self._channel = Channel() if groups is None else groups.training
        if self._wake not in self._store.before_background_save:  # several callbacks share the store
            self._store.before_background_save.append(self._wake)
        self._store.copies_later |= self.copy_while_training
        self._store.base = lambda: dict(pl_module.named_parameters(remove_duplicate=False))
        self.dirpath = (self.dirpath or local_path(trainer.default_root_dir) / "checkpoints").absolute()
        if stage == "fit":
            if self.memory_every_n_steps and _is_on_several_nodes(trainer):
                choose_start(trainer, functools.partial(self._newest_of_nodes, trainer))
            keep_positions(trainer, self._restore_rng_before_batch, self._resume.restore_generators)

    def _newest_of_nodes(self, trainer: pl.Trainer, path: str | os.PathLike[str] | None) -> Any:
        """Copy the newest checkpoint in the memory of any node to the disk, and return its path. Collective.

        Args:
            trainer: The trainer.
            path: The checkpoint that the fit was asked to load; returned if none in memory is newer.
        """
        if not self.takes_newest and (path is None or not os.path.isdir(path)):
            return path
        step = -1
        with contextlib.suppress(FileNotFoundError, BrokenCheckpointError):
            step = -1 if path is None else read_record(find_checkpoint(path)).step

        def accept(record: CheckpointRecord) -> bool:
            run = self.run
            is_of_run = not run.run_id or (record.run_id, record.spec_digest) == (run.run_id, run.spec_digest)
            return is_of_run and record.step > step and record.finite_weights is not False

        if (record := save_newest(self._channel, self.directory, accept)) is None:
            return path
        if trainer.is_global_zero:
            log.info("continuing after step %d, from the memory of the nodes", record.step)
        return str(record.path)

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._scores = {step: score for step, score in self._scores.items() if step <= trainer.global_step}
        if self._memory is not None:  # close it, or a save or a copy of a step that was undone could still complete
            self._end_memory(trainer, retires=False)
            self._open_memory(trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run_state, self._scores = run_state_of(trainer), {}
        self._boundaries = Boundaries(self, trainer.global_step)
        self._memory_boundaries = Boundaries(self, trainer.global_step, every=self.memory_every_n_steps)
        self._clock = SaveClock(self.every_minutes, trainer.global_step, self._budget)
        self._is_between_batches = self._saves_after_module_hook = False
        self._last_saved_step = None
        if trainer.ckpt_path is not None:  # the loaded run state was saved earlier, and names an older checkpoint
            loaded = self._store.loaded
            self._run_state.latest_checkpoint_uri = os.fspath(trainer.ckpt_path if loaded is None else loaded.path)
            digests = self._channel.gather_everywhere("" if loaded is None else loaded.digest)
            if len(set(digests)) > 1:
                raise CheckpointError(
                    f"the ranks have loaded different checkpoints; rank {self._channel.rank} has {trainer.ckpt_path}. "
                    f"All nodes must see the same folder of checkpoints; without its file {POINTER!r}, memory is not "
                    "used"
                )
        self._resume.begin_training(trainer, pl_module)
        listed = list_checkpoints(self.directory) if trainer.is_global_zero else []
        if trainer.is_global_zero:
            sweep(self.directory, listed)
        if not self.saves_anything or getattr(trainer, "fast_dev_run", False):
            return
        self._check_directory(trainer, pl_module, listed)
        if trainer.is_global_zero:
            self.run = replace(self.run, metadata=self.run.metadata or metadata_of_module(pl_module))
            self._share_frozen(self._store, self.directory, trainer, pl_module)
            keep_configurations(self.directory, pl_module)
        self._open_memory(trainer, pl_module)
        if next(saver for saver in savers_of(trainer) if saver.saves_anything) is self:
            resumed = "" if trainer.ckpt_path is None else self._resume.run
            self._witness = Witness(trainer, self.directory, resumed, self._channel)
        if self.overlap and trainer.ckpt_path is not None:
            self._overlapped = self._channel.share(self._newest_after(trainer.global_step, listed))

    def _check_directory(self, trainer: pl.Trainer, pl_module: pl.LightningModule, listed: list[Listed]) -> None:
        """Refuse to train if checkpoints could not be saved, rather than fail at the first save. Collective.

        Raises:
            StartupContractError: The directory holds another run's checkpoints, and the user named none to resume from;
                or a file that is not a checkpoint has the name of one.
            CheckpointError: The disk has no space for a checkpoint, or a rank does not see the directory.
        """
        fault = self._directory_fault(trainer, listed) if trainer.is_global_zero else None
        fault = trainer.strategy.broadcast(fault)  # all ranks must raise, or the others would wait for rank zero
        if fault is not None:
            raise ending_the_run(StartupContractError("startup.artifacts_in_use", fault))
        _trained_here.add(self.directory)
        groups = rank_groups_of(trainer.strategy)
        if groups is not None and any(isinstance(p, DTensor) for p in pl_module.parameters()):
            require_shared_directory(groups.training, self.directory)
        if trainer.is_global_zero:
            require_space(self.directory, _estimated_bytes(pl_module))

    def _open_memory(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare to save in memory, or log why that is not possible. Collective."""
        folder = self._memory = None
        if not self.memory_every_n_steps:
            return
        groups, is_on_several = rank_groups_of(trainer.strategy), _is_on_several_nodes(trainer)
        ranks = first_ranks(self._channel) if is_on_several else [0]
        if self._channel.rank in ranks[1:]:
            forget_copies(self.directory)  # an earlier attempt may have left them
        # A rank knows the bytes of its own part of a sharded tensor, and the parts are of about the same size.
        nbytes = trainer.world_size if any(isinstance(p, DTensor) for p in pl_module.parameters()) else 1
        nbytes *= _estimated_bytes(pl_module)
        has_copies = self.peer_copies and is_on_several
        open_here = functools.partial(
            open_memory, self.directory, self._run_id, nbytes, self._store.loaded, has_copies=has_copies
        )
        if trainer.is_global_zero:
            try:
                if is_on_several and groups is not None:
                    raise CheckpointError("on several nodes the strategy must not shard")
                folder = open_here()
            except (CheckpointError, OSError) as error:
                log.warning("Checkpoints are not saved in memory: %s", error)
        folder = self._channel.share(folder)
        if folder is None:
            return
        self._memory = memory = MemoryTier(folder, None if groups is None else RankGroups())
        memory.store.before_background_save.append(self._wake)
        memory.store.copies_later = self.copy_while_training
        if trainer.is_global_zero:
            self._share_frozen(memory.store, folder, trainer, pl_module)
        if has_copies:
            open_copies = functools.partial(open_here, name=folder.name)
            self._ring = open_ring(self._channel, ranks, self.directory, open_copies)

    def _share_frozen(
        self, store: CheckpointStore, folder: Path, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        """Have the checkpoints that `store` saves in `folder` share the frozen weights of the module, or omit them."""
        frozen = frozen_in(pl_module, trainer.optimizers)
        store.begin(folder, Frozen(frozen, leaves_out=self.weights == "trained", loaded=self._store.loaded))

    def _newest_after(self, step: int, listed: list[Listed]) -> CheckpointRecord | None:
        """Return the newest checkpoint of this run, without the final one, if it is after `step`; otherwise None."""
        for record in (record for each in reversed(listed) for record in own_records([each])):
            if record.run_id == self._run_id and not record.final:
                return record if record.step > step else None
        return None

    def _directory_fault(self, trainer: pl.Trainer, listed: list[Listed]) -> str | None:
        """Return the reason why this training must not save into its directory, or None."""
        starts_over = trainer.ckpt_path is None and trainer.global_step == 0
        if starts_over and not self.replace_existing and (fault := _in_use_fault(self.directory, listed)):
            return fault
        loaded = self._store.loaded
        is_of_this_run = loaded is not None and (
            loaded.path.parent == Path(os.path.realpath(self.directory)) or is_in_memory(loaded.path)
        )
        return _handle_foreign_files(self.directory, moves_aside=self.replace_existing or is_of_this_run)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_settled = self._store.is_settled  # read before the poll, which may change it
        self.poll(trainer)
        is_due = self._boundaries.crosses(trainer.global_step)
        is_due_in_memory = self._is_due_in_memory(trainer.global_step)
        if self._overlapped is not None:
            is_due |= trainer.global_step == self._overlapped.step
            self._wake()
        if self.every_minutes or self._budget is not None:
            is_due |= self._clock.is_due(self, trainer, pl_module)
        if not is_settled:
            self._wake()
        self._is_between_batches = True
        if (run_state := self._run_state or run_state_of(trainer)).rolls_back:
            return  # the run is about to be rolled back; it reaches this step again, and saves it then
        if (witness := self._witness) is not None:
            if (proof := witness.observe(trainer, pl_module, outputs, batch, batch_idx)) is not None:
                self._report(trainer, proof)
            self.next_due_step = min(self.next_due_step, witness.next_step)
        if run_state.stop_reason is None and (not (is_due or is_due_in_memory) or suppressed(pl_module)):
            return
        self._only_in_memory = not is_due
        if awaits_module_hook(trainer, pl_module):  # it may still change state of this step, such as a moving average
            self._saves_after_module_hook = True
        else:
            self._save_what_is_due(trainer, pl_module)

    def _is_due_in_memory(self, step: int) -> bool:
        """Whether a save in memory is due; `next_due_step` becomes the next step at which any save is due."""
        if self._memory is None:
            return False
        next_due_step = self.next_due_step
        is_due = self._memory_boundaries.crosses(step)
        self.next_due_step = min(next_due_step, self.next_due_step)
        return is_due

    def _report(self, trainer: pl.Trainer, proof: Proof | None) -> None:
        """Log the result of a comparison with the earlier attempt, and report it to all callbacks on rank zero.

        Raises:
            ResumeDifferenceError: There is a difference, and `on_difference` is ``stop``; raised on every rank.
        """
        if proof is None:
            return
        if trainer.is_global_zero:
            log.log(logging.INFO if proof.difference is None else logging.WARNING, "%s", proof.text)
            fire(trainer, "on_resume_proof", proof)
        if proof.difference is not None and self.on_difference == "stop":
            raise ending_the_run(ResumeDifferenceError(proof.text))

    def _save_what_is_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save this step on disk or in memory. Before a stop, save it on disk; if that was done, wait for that save."""
        # If all ranks have agreed to stop after this step, its state must be on disk before the run ends.
        is_ending = run_state_of(trainer).stop_reason is not None
        if self._only_in_memory and not is_ending:
            self._save_in_memory(trainer, pl_module)
        elif is_ending and self._last_saved_step == trainer.global_step:
            self.wait(trainer)
        else:
            self.save(trainer, pl_module, wait=is_ending)

    def save_between_steps(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last completed step of this fit, if there is one, and wait until it is durable.

        `StopRequests` calls it when it stops the run during a wait for the next batch.
        """
        if self._is_between_batches:
            save = functools.partial(self._save_what_is_due, trainer, pl_module)
            save() if self.critical else wait_after_failure(save)

    @override
    def on_module_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._saves_after_module_hook:
            self._saves_after_module_hook = False
            self._save_what_is_due(trainer, pl_module)

    @override
    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        value = float(scores.get(self.retention.monitor or "", math.nan))
        if trainer.is_global_zero and self.retention.monitor is not None and math.isfinite(value):
            self._is_scored, self._scores[step] = True, value  # for a checkpoint of this step that is saved later
            for name in (step_name(step), FINAL_NAME):
                with contextlib.suppress(FileNotFoundError, BrokenCheckpointError):
                    self._add_score(read_record(self.directory / f"{name}.json"))

    def _add_score(self, record: CheckpointRecord) -> None:
        """Store the score of the step of `record` next to its files, if the score came after the record was written."""
        name, value = self.retention.monitor or "", self._scores.get(record.step)
        is_own = record.writer == WRITER and record.run_id == self._run_id
        if is_own and value is not None and record.metrics.get(name) != value:
            try:
                add_score(record, name, value)
            except OSError as error:
                log.warning("%s of step %d could not be stored: %s", name, record.step, error.strerror or error)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch
        if crossed(epoch, epoch + 1, self.every_n_epochs):
            self.save(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._witness is not None and self._witness.is_comparing:  # an earlier attempt had more steps
            self._report(trainer, self._witness.conclude())
        if self.save_final:
            self.save(trainer, pl_module, final=True, wait=True)
        self.wait(trainer)
        self._store.background.finish()
        self._close_witness()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        wait_after_failure(lambda: self.wait(trainer))
        if not self._keeps_memory:
            self._end_memory(trainer)
        self._close_witness()

    def _end_memory(self, trainer: pl.Trainer, *, retires: bool = True) -> None:
        """End the saves in memory. Copy the newest checkpoint in memory to the disk if the disk has only older ones.

        Then remove all checkpoints in memory.

        Args:
            trainer: The trainer.
            retires: Whether to copy and remove them; False leaves the checkpoints in the memory of this node.
        """
        memory, self._memory = self._memory, None
        ring, self._ring = self._ring, None
        if memory is not None:
            wait_after_failure(memory.store.close)
        if retires and trainer.is_global_zero and self.dirpath is not None:  # an earlier attempt may have saved there
            retire_memory(self.directory, has_copies=ring is not None)
        if ring is not None and ring.close() and trainer.is_global_zero and memory_folder(self.directory) is None:
            discard_memory(self.directory)  # no node has a copy now: also remove the file `POINTER` on disk

    def _close_witness(self) -> None:
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.close()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        parts = checkpoint.setdefault(CONTRACT_KEY, {})
        parts["elapsed_s"] = self._resume.elapsed_s
        if self._witness is not None:
            parts[WITNESS] = self._witness.run
        set_positions_aside(trainer, checkpoint, parts, self._channel)
        capture_parts(trainer, pl_module, parts, has_trained=self._is_between_batches, channel=self._channel)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        parts = checkpoint.get(CONTRACT_KEY, {})
        put_positions_back(trainer, checkpoint, parts)
        try:
            self._resume.load(trainer, checkpoint, parts)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            loaded = self._store.loaded
            name = os.fspath(trainer.ckpt_path or "the checkpoint") if loaded is None else loaded.name
            reason = f"its random states or gradients cannot be restored: {error!r:.500}"
            raise BrokenCheckpointError(name, reason) from error
        if self._resume.is_within_epoch:
            # Set on the instance, and only until the first batch: a method of the class would be called in every step.
            self.on_train_batch_start = self.restore_pending_rng  # type: ignore[method-assign, assignment]

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":  # also if nothing was left to train, because a kill came after the final checkpoint
            self._end_memory(trainer)
        forget_positions(trainer)
        remove_plugin(trainer)

    @override
    def join_run(self, run: RunContext) -> None:
        if run.record is not None:
            self.run = run.record
            self.replace_existing = True  # the run has already decided what to resume from
        self._keeps_memory = run.is_supervised

    @property
    def _run_id(self) -> str:
        return self.run.run_id or (self._run_state.run_id if self._run_state is not None else "")

    @property
    def directory(self) -> Path:
        """Folder for checkpoints; known after ``setup``."""
        assert self.dirpath is not None
        return self.dirpath

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint (of the newest without a monitor), for ``ckpt_path="best"``; empty if none."""
        own = [] if self.dirpath is None else own_records(list_checkpoints(self.directory))
        chosen = best_first(own, self.retention.monitor, self.retention.mode)[:1] or own[-1:]
        return "".join(str(record.path) for record in chosen)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        # Lightning sets it in a process whose children have trained. That process may resume without a `setup`.
        if path:
            self.dirpath, self.replace_existing = Path(path).parent, True

    @property
    def saves_while_training(self) -> bool:
        """Whether it saves before the end of training."""
        cadences = (self.every_n_steps, self.every_n_epochs, self.every_minutes, self.memory_every_n_steps)
        return any(cadences) or self._budget is not None

    @property
    @override
    def state_key(self) -> str:
        # Lightning requires callbacks of the same class to have different keys if they have a state.
        return f"{super().state_key}[{self.dirpath}]"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._budget is None else {"budget": self._budget.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._budget is not None and "budget" in state_dict:
            self._budget.load_state_dict(state_dict["budget"])

    @property
    def saves_anything(self) -> bool:
        """Whether a run with this callback saves checkpoints on its own."""
        return self.saves_while_training or self.save_final

    def save(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, final: bool = False, wait: bool = False
    ) -> Path:
        """Save a checkpoint of this moment. Collective.

        Returns:
            The path of the record; it exists once the checkpoint is durable.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it.
            UnwrittenCheckpointError: This checkpoint, or the one before it, could not be written.
        """
        with timed(trainer, "checkpoint"):
            path = self._save(trainer, pl_module, final=final, wait=wait)
        if self._durable:
            self._wake()  # report durable checkpoints only after the next step: an evaluation of this step may follow
        return path

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, final: bool, wait: bool) -> Path:
        """Save on disk, and measure how long that stalls training; see `save`."""
        began_s, step = time.monotonic(), trainer.global_step
        waited_s = self._store.overlap.waited_s  # the last save's copy stalled training after `note_stall`; add it now
        path = self.directory / f"{FINAL_NAME if final else step_name(step)}.json"
        if getattr(trainer, "fast_dev_run", False):
            return path
        self._last_saved_step = step
        self._clock.note_save()
        if self._witness is not None:
            self._witness.note_save(step, forgets=self.retention.keep_last is not None)
            self._wake()
        self._store.wait()
        groups = rank_groups_of(trainer.strategy)
        future = self._begin_save(trainer, pl_module, path, self._store, groups, final=final, wait=wait)
        if future is not None:
            future.add_done_callback(lambda ended: self._note_end(ended, began_s))
        trainer.strategy.barrier("Checkpoint.save")
        if self._budget is not None and not wait:
            self._budget.note_stall(time.monotonic() - began_s + waited_s)
        if wait:
            self.wait(trainer)
        return path

    def _begin_save(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        path: Path,
        store: CheckpointStore,
        groups: RankGroups | None,
        *,
        final: bool,
        wait: bool,
    ) -> Future[CheckpointRecord | None] | None:
        """Have `store` save this moment; return its result, or None on a rank that saves nothing. Collective."""
        self._end_copy_in_memory()
        step = trainer.global_step
        with contextlib.ExitStack() as undo:  # removes `staging` after a failure; later, `store.save` does that
            staging, trainer_checkpoint = _write_trainer_files(trainer, pl_module, path, step, final, undo)
            with trainer.profiler.profile("save_checkpoint"):  # type: ignore[attr-defined]
                state = checkpoint_connector(trainer).dump_checkpoint(weights_only=False)
            undo.pop_all()
        if self._overlapped is not None and step >= self._overlapped.step:
            record, self._overlapped = self._overlapped, None
            if step == record.step:
                proof = compare_with_checkpoint(state, record, self._channel)
                self._report(trainer, proof)
        if not trainer.is_global_zero and groups is None:
            return None
        meta = self._meta(trainer, trainer_checkpoint, state[CONTRACT_KEY]["elapsed_s"], final=final)
        asynchronous = self.asynchronous and not wait
        failed = functools.partial(judge, self, "a save") if store is self._store else None
        return store.save(
            path, state, meta, staging=staging, asynchronous=asynchronous, groups=groups, on_failure=failed
        )

    def _save_in_memory(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save this moment in the memory of the node. After a failure, save nothing there any more. Collective.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
        """
        memory, problem = self._memory, ""
        assert memory is not None
        with timed(trainer, "checkpoint"):
            try:
                self._channel.agreed(memory.store.wait, "save in memory")
                path = memory.directory / f"{step_name(trainer.global_step)}.json"
                save = self._begin_save(trainer, pl_module, path, memory.store, memory.groups, final=False, wait=False)
                if save is not None and self._ring is not None:
                    save.add_done_callback(self._ring.offer_saved)
            except UnstorableStateError:
                raise
            except (CheckpointError, OSError) as error:
                problem = str(error)
            if problem := self._channel.share(problem):
                self._end_copy_in_memory()
                self._memory = None
        if trainer.is_global_zero and problem:
            log.warning("From now on no checkpoint is saved in memory: %s", problem)
        elif trainer.is_global_zero:
            memory.keep_newest()

    def _meta(
        self, trainer: pl.Trainer, trainer_checkpoint: Mapping[str, Any] | None, elapsed_s: float, *, final: bool
    ) -> RecordMeta:
        """Return the facts for the record of a checkpoint of this moment."""
        return replace(
            self.run,
            step=trainer.global_step,
            run_id=self._run_id,
            final=final,
            trainer_checkpoint=trainer_checkpoint,
            elapsed_s=elapsed_s,
            world_size=trainer.world_size,
            metrics=self._metrics(trainer),
            writer=WRITER,
            parameters=frozenset(name for name, _ in trainer.lightning_module.named_parameters(remove_duplicate=False)),
        )

    def _metrics(self, trainer: pl.Trainer) -> dict[str, float]:
        """Return the monitored value of this step; a score of an earlier step belongs to another checkpoint."""
        name, step = self.retention.monitor, trainer.global_step
        if name is None:
            return {}
        if self._is_scored:
            return {name: self._scores[step]} if step in self._scores else {}
        logged: dict[str, Any] = {**(run_state_of(trainer).loss_stats or {}), **trainer.callback_metrics}
        if name in logged:
            return {name: float(logged[name])}
        log.warning(
            "The metric %r by which checkpoints are kept had not been logged by step %d; logged metrics: %s",
            name,
            step,
            ", ".join(sorted(logged)) or "none",
        )
        return {}

    def _note_end(self, ended: Future[CheckpointRecord | None], began_s: float) -> None:
        """Remember a checkpoint that has become durable. Called in the writing thread; the store handles a failure."""
        record = None if ended.exception() is not None else ended.result()
        if record is not None:
            self._durable.append((record, time.monotonic() - began_s))

    def wait(self, trainer: pl.Trainer) -> None:
        """Return when the save in flight is durable and reported.

        Raises:
            Exception: The save failed.
        """
        if (memory := self._memory) is not None:
            wait_after_failure(lambda: memory.store.wait())
            memory.store.background.finish()  # wait for `keep_newest`, which removes older checkpoints there
        self.wait_until_durable()
        self.report_durable(trainer)

    def wait_until_durable(self) -> None:
        """Return when the save in flight is durable; its checkpoint is reported to callbacks after a later step.

        Raises:
            Exception: The save failed.
        """
        self._store.wait()

    def poll(self, trainer: pl.Trainer) -> None:
        """Report checkpoints that became durable since the last call, and raise a failed background save."""
        if self._durable:
            self.report_durable(trainer)
        self._end_copy_in_memory()
        self._store.poll()

    def _end_copy_in_memory(self) -> None:
        if self._memory is not None:
            self._memory.store.overlap.end()

    def report_durable(self, trainer: pl.Trainer) -> None:
        """Report durable checkpoints to all callbacks; only then may older ones be removed.

        Training calls this after a step. A session calls it before it ends a process whose training hangs in a step.
        """
        while self._durable:
            record, seconds = self._durable.popleft()
            run_state_of(trainer).latest_checkpoint_uri = str(record.path)
            fire(trainer, "on_checkpoint_timed", seconds)
            if self._budget is not None and not record.final and (report := self._budget.note_durable(seconds)):
                fire(trainer, "on_checkpoint_budget", *report)
            fire(trainer, "on_checkpoint_durable", record)
            self._add_score(record)
            if self.retention.keep_last is not None:
                self._store.prune(self.directory, self._surplus)

    def keep_while_in_use(self, files_in_use: Callable[[], Collection[Path]]) -> None:
        """Keep checkpoints that have a file in the result of `files_in_use`, for example because a command reads it.

        `files_in_use` is called on rank zero, in the background, before older checkpoints are removed. A checkpoint
        that was kept because of it is removed after the first save at which it is no longer in use.
        """
        if files_in_use not in self._in_use:
            self._in_use.append(files_in_use)

    def _surplus(self, listed: list[Listed]) -> list[CheckpointRecord]:
        """Return checkpoints of the run that no rule keeps, nothing uses, and no link in the directory points to."""
        own = [record for record in own_records(listed) if record.run_id == self._run_id]
        with os.scandir(self.directory) as entries:
            needed = {os.path.realpath(entry) for entry in entries if entry.is_symlink()}
        needed |= {os.path.realpath(path) for ask in self._in_use for path in ask()}
        return to_delete(own, self.retention, needed)

    def restore_pending_rng(self, trainer: pl.Trainer, *_: Any) -> None:
        """Restore the loaded random state once: just before the run draws the first number after the checkpoint."""
        vars(self).pop("on_train_batch_start", None)
        self._resume.restore_rng(trainer)

    def _restore_rng_before_batch(self, trainer: pl.Trainer) -> None:
        if "on_train_batch_start" in vars(self):  # fetching the first batch may draw numbers before that hook runs
            self.restore_pending_rng(trainer)

    def _wake(self) -> None:
        """Have the loop call this hook after the next step, because the witness or a background save needs it."""
        self.next_due_step = 0


def _is_on_several_nodes(trainer: pl.Trainer) -> bool:
    return trainer.num_nodes > 1 or spans_nodes(os.environ)


def _estimated_bytes(pl_module: pl.LightningModule) -> int:
    """Estimate the bytes of tensors in a checkpoint."""
    weights = sum(tensor.nbytes for tensor in (*pl_module.parameters(), *pl_module.buffers()))
    return weights + _ADAM_STATES * sum(p.nbytes for p in pl_module.parameters() if p.requires_grad)


def _in_use_fault(directory: Path, listed: list[Listed]) -> str | None:
    """Return why a training must not begin at step 0 in `directory`: it has checkpoints of another training.

    None if there are none, or if this process has trained there.
    """
    if directory in _trained_here:
        return None
    # A broken checkpoint may still be the user's only copy.
    files = (entry for entry in reversed(listed) if not entry.path.is_symlink())
    newest = next((entry for entry in files if own_records([entry]) or entry.is_own_but_broken), None)
    if newest is None:
        return None
    return (
        f"{os.fspath(directory)!r} holds checkpoints of another run. Resume from them with "
        f"`trainer.fit(…, ckpt_path={os.fspath(newest.path)!r})`, choose another `dirpath`, move them away, "
        "or replace them with `Checkpoint(replace_existing=True)`."
    )


def _handle_foreign_files(directory: Path, *, moves_aside: bool) -> str | None:
    """Handle files that would make a later save fail: they are not checkpoints, but have the name of one.

    Args:
        directory: The folder of checkpoints.
        moves_aside: Rename them with a warning, because the folder belongs to the run.

    Returns:
        The reason to refuse the training, or None.
    """
    try:
        paths = files_in_the_way(directory)
        moved = {path.name: move_out_of_the_way(path).name for path in paths} if moves_aside else {}
    except OSError as error:
        return f"{error.filename}: {error.strerror}; let this user read it, or move it away"
    if moved:
        renamed = ", ".join(f"{name} -> {free}" for name, free in moved.items())
        log.warning("These files are not checkpoints, but have the name of one; renamed in %s: %s", directory, renamed)
        return None
    if not paths:
        return None
    names = ", ".join(path.name for path in paths)
    return (
        f"{os.fspath(directory)!r} holds {names}, which is not a checkpoint but has the name of one that this run may "
        "save. Move it away, or choose another `dirpath`."
    )


def _write_trainer_files(
    trainer: pl.Trainer, pl_module: pl.LightningModule, path: Path, step: int, final: bool, undo: contextlib.ExitStack
) -> tuple[Staging | None, Mapping[str, Any] | None]:
    """Have the trainer class of `pl_module` write its own files for the checkpoint whose record will be `path`.

    If parameters are sharded, all ranks call the class, because gathering them needs every rank; the files of ranks
    other than zero are discarded.

    Returns:
        The folder that holds them until the checkpoint is committed, and the result of the hook; None and None if
        there is no such trainer.

    Raises:
        UnwrittenCheckpointError: The folder cannot be made.
    """
    if not isinstance(pl_module, WritesTrainerFiles):
        return None, None
    if not trainer.is_global_zero:
        if any(isinstance(p, DTensor) for p in pl_module.parameters()):
            with tempfile.TemporaryDirectory() as scratch:
                pl_module.save_trainer_files(output_dir=Path(scratch), step=step, final=final)
        return None, None
    staging = stage(path)
    undo.callback(staging.discard)
    return staging, pl_module.save_trainer_files(output_dir=staging.folder(), step=step, final=final)


def savers_of(trainer: pl.Trainer) -> list[Checkpoint]:
    """Return the `Checkpoint` callbacks of `trainer`, in their order."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, Checkpoint)]
