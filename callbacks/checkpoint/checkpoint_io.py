"""Lightning's checkpoint plugin that writes whole, durable checkpoints without pickle."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from typing_extensions import override

from . import remote
from .format.layout import record_path
from .format.record import CheckpointRecord, RecordMeta
from .format.record_file import read_record
from .lightning_reader import let_lightning_read
from .loading import Base, MapLocation, load, load_for_slices
from .local_paths import is_file_of_torch, load_torch_file, local_path, remove_at, warn_of_nonfinite
from .saving import Prepared, prepare, write
from .selection import find_checkpoint
from .sharded.rank_channel import Channel, EndOfSave, RankGroups
from .sharded.save import only_slices, plan_save, write_together
from .shares import Shares
from .storage.background_writer import BackgroundWriter
from .storage.commit import Staging
from .storage.host_buffer import HostBuffer
from .storage.write_file import naming_the_checkpoint

__all__ = ["DurableCheckpointIO", "SaveRequest", "give_back_plugin", "install_plugin"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveRequest:
    """How the next save of one path is to be done; for callers that know more than Lightning hands through."""

    meta: RecordMeta = field(default_factory=RecordMeta)
    staging: Staging | None = None
    """Holds the files of the trainer's own hook."""
    asynchronous: bool | None = None
    """None leaves it to the plugin."""
    on_durable: Callable[[CheckpointRecord], None] | None = None
    """Called in the thread that wrote, once the checkpoint is durable."""


class DurableCheckpointIO(CheckpointIO):
    """Writes each checkpoint completely or not at all, verifies it on loading, and stores no pickle.

    ``Trainer(plugins=[DurableCheckpointIO()])`` works for any LightningModule; ``ModelCheckpoint`` and ``ckpt_path``
    behave as with Lightning's own plugin. The checkpoint ``P.ckpt`` consists of a record file ``P.ckpt`` and a folder
    ``P/`` next to it (``P~1/`` if that name is taken). ``P`` may be a URL that fsspec can open. ``.ckpt`` files of
    stock Lightning can be loaded too, always with ``weights_only=True``, whatever the caller asks for, so that loading
    never executes code.

    Importing this class also teaches Lightning to read these checkpoints where it opens a file itself, for example in
    ``load_from_checkpoint`` or in a Trainer without this plugin. ``torch.load`` fails with a message that says what to
    use instead.

    Args:
        asynchronous: Copy the tensors and write in the background. The next save waits for the one in flight; a failed
            save is raised by the next call.
    """

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self.writer = BackgroundWriter()
        self.buffer = HostBuffer()
        self._requests: dict[Path, SaveRequest] = {}
        self._shares = Shares()
        self._base: Callable[[], Base] | None = None
        self._remembers_base = False
        self._on_background_save: list[Callable[[], None]] = []
        self._end_of_save: EndOfSave | None = None
        """Set while ranks write a checkpoint together in the background."""

    def __getstate__(self) -> dict[str, Any]:
        # What is in flight, expected or listened for belongs to the process that began it.
        fresh = vars(DurableCheckpointIO(asynchronous=self.asynchronous))
        kept = {name: value for name, value in vars(self).items() if name not in fresh}
        return {**kept, "asynchronous": self.asynchronous}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**vars(DurableCheckpointIO()), **state})

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in flight on any rank, and nothing failed that `poll` has yet to raise."""
        return self._end_of_save is None and not self.writer.is_busy and self.writer.failure is None

    def on_background_save(self, call: Callable[[], None]) -> None:
        """Have `call` called, in the training thread, before each save in the background."""
        if call not in self._on_background_save:
            self._on_background_save.append(call)

    def look(self, directory: Path, tensors: Mapping[str, torch.Tensor], *, leave_out: bool = False) -> None:
        """Look at the model's `tensors` that training is not to change, so that checkpoints in `directory` share them.

        Called once, on the rank that writes, before the first step. Each save with a `RecordMeta.trained` looks again.

        Args:
            directory: Where the checkpoints go.
            tensors: By name in the model's ``state_dict``.
            leave_out: Whether checkpoints leave them out, for as long as they are as the class built them.
        """
        self._shares.look(directory, tensors, leave_out=leave_out)

    def take_base_from(self, base: Callable[[], Base], *, remember: bool = False) -> None:
        """Take what a checkpoint leaves out from the model's tensors, which `base` gives when it is loaded.

        Args:
            base: Called before a checkpoint is loaded that leaves tensors out.
            remember: Whether checkpoints of this process may leave tensors out, so that each load notes what they are.
        """
        self._base, self._remembers_base = base, remember

    def expect(self, path: str | os.PathLike[str], request: SaveRequest) -> None:
        """State how the next `save_checkpoint` to `path` is to be done."""
        self._requests[record_path(path)] = request

    def forget(self, path: str | os.PathLike[str]) -> None:
        """Drop what `expect` was told of a save that did not come about, and the files staged for it."""
        request = self._requests.pop(record_path(path), None)
        if request is not None and request.staging is not None:
            request.staging.discard()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint`; durable when this returns, unless it is asynchronous.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it.
            UnwrittenCheckpointError: It could not be written; the checkpoint that was there before still is.
            TypeError: `storage_options` is given.
        """
        if storage_options is not None:
            raise TypeError(
                f"Invalid `storage_options`. {type(self).__name__} writes to a local file system and takes none, "
                f"but received {storage_options!r}."
            )
        if remote.is_remote(path):
            prepared = prepare(checkpoint, RecordMeta())
            self.wait()
            self._save(prepared, self.asynchronous, lambda p: remote.save(os.fspath(path), p))
            return
        record = record_path(local_path(path))
        request = self._requests.pop(record, None) or SaveRequest()
        try:
            prepared = prepare(checkpoint, request.meta)
            # Here, not in the background: a caller may put a link beside the checkpoint (``save_last="link"``).
            with naming_the_checkpoint(record, prepared.nbytes):
                record.parent.mkdir(parents=True, exist_ok=True)
            self.wait()
            prepared, staging = self._shares.divide(record, prepared, request.staging)
            request = replace(request, staging=staging)
        except BaseException:
            if request.staging is not None:
                request.staging.discard()
            raise
        asynchronous = self.asynchronous if request.asynchronous is None else request.asynchronous
        self._save(prepared, asynchronous, lambda p: self._write(record, p, request))

    def save_in_parts(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], groups: RankGroups) -> None:
        """`save_checkpoint` on all ranks, each of which writes the slices of sharded tensors that it holds.

        Rank zero's request and settings count.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it, or another rank failed.
            UnwrittenCheckpointError: It could not be written; the checkpoint that was there before still is.
        """
        record = record_path(local_path(path))
        request = self._requests.pop(record, None) or SaveRequest()
        self._end_of_save = None
        try:
            request = replace(request, meta=replace(request.meta, world_size=groups.training.size))
            share, request = self._try_to_prepare(checkpoint, record, request)
            asynchronous = self.asynchronous if request.asynchronous is None else request.asynchronous
            plan = plan_save(groups.training, record, share, request.staging, asynchronous=asynchronous)
        except BaseException:
            if request.staging is not None:
                request.staging.discard()
            raise
        assert isinstance(share, Prepared)
        is_first = groups.training.rank == 0
        request = replace(request, staging=request.staging or Staging(record, plan.staging))
        if plan.is_sharded:
            prepared = share if is_first else only_slices(share)
            self._save(prepared, plan.asynchronous, lambda p: self._write_together(groups.writing, record, p, request))
            self._end_of_save = EndOfSave(groups.training) if plan.asynchronous else None
        elif is_first:
            self._save(share, plan.asynchronous, lambda p: self._write(record, p, request))

    def _try_to_prepare(
        self, checkpoint: dict[str, Any], record: Path, request: SaveRequest
    ) -> tuple[Prepared | Exception, SaveRequest]:
        """This rank's share of a save, or why there is none: the other ranks wait to hear of it."""
        try:
            self.wait()
            prepared, staging = self._shares.divide(record, prepare(checkpoint, request.meta), request.staging)
        except Exception as error:  # noqa: BLE001 - `plan_save` raises it
            return error, request
        return prepared, replace(request, staging=staging)

    def _write(self, record: Path, prepared: Prepared, request: SaveRequest) -> None:
        self._note(write(record, prepared, staging=request.staging), prepared, request)

    def _write_together(self, channel: Channel, record: Path, prepared: Prepared, request: SaveRequest) -> None:
        assert request.staging is not None
        try:
            written = write_together(channel, record, prepared, request.staging)
        except BaseException:
            if channel.rank == 0:
                request.staging.discard()
            raise
        if written is not None:
            self._note(written, prepared, request)

    def _note(self, written: CheckpointRecord, prepared: Prepared, request: SaveRequest) -> None:
        """What is durable may be shared, and older checkpoints may go."""
        self._shares.learn(written, prepared)
        if request.on_durable is not None:
            request.on_durable(written)

    def _save(self, prepared: Prepared, asynchronous: bool, save: Callable[[Prepared], None]) -> None:
        if not asynchronous:
            save(prepared)
            return
        for call in self._on_background_save:
            call()
        copies, count = self.buffer.copy([*prepared.entries, *prepared.slices]), len(prepared.entries)
        new_files = [file.copied() for file in prepared.new_files]
        copied = replace(prepared, entries=copies[:count], slices=copies[count:], new_files=new_files)
        self.writer.start(lambda: save(copied))

    def poll(self) -> None:
        """Raise what a save in the background raised; after the same step on all ranks that wrote it together."""
        if self._end_of_save is None:
            if self.writer.failure is not None:
                self.writer.raise_failure()
        elif self._end_of_save.has_come(is_busy=self.writer.is_busy):
            self._end_of_save = None
            self.wait()

    def wait(self) -> None:
        """Return when nothing is in flight.

        Raises:
            Exception: What the last save raised; once.
        """
        # `_end_of_save` stays: a rank may wait by itself, and the others go on asking whether all have ended.
        self.writer.wait()

    def load_in_parts(self, path: str | os.PathLike[str], groups: RankGroups) -> dict[str, Any]:
        """`load_checkpoint` on all ranks, which reads of sharded tensors only what is used of them. Collective.

        Raises:
            BrokenCheckpointError: It differs from what was saved.
            CheckpointError: Another rank could not read it.
            FileNotFoundError: There is none.
        """
        channel = groups.training
        checkpoint: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            self.wait()
            record = find_checkpoint(local_path(path))
            if channel.rank == 0:
                warn_of_nonfinite(record)
            share, base = slice(channel.rank, None, channel.size), self._base_for(record)
            is_of_torch = is_file_of_torch(record)
            checkpoint = load_torch_file(record) if is_of_torch else load_for_slices(record, share=share, base=base)
        except Exception as error:  # noqa: BLE001 - `agree` raises it, once all ranks know
            problem = error
        channel.agree(problem, f"load {os.fspath(path)}")
        return checkpoint

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint at `path`, proven before any of it is used.

        Raises:
            BrokenCheckpointError: It differs from what was saved.
            FileNotFoundError: There is none.
        """
        self.wait()
        if remote.is_remote(path):
            with tempfile.TemporaryDirectory(prefix="genlight-") as scratch:
                return self.load_checkpoint(remote.fetch(os.fspath(path), Path(scratch)), map_location)
        record = find_checkpoint(local_path(path))
        warn_of_nonfinite(record)
        base = self._base_for(record)
        if is_file_of_torch(record):
            return load_torch_file(record, map_location)
        return load(record, map_location, base=base)

    def _base_for(self, record: Path) -> Base | None:
        """The model's tensors, if they are needed to load `record`, or to leave them out later."""
        if self._base is None:
            return None
        leaves_out = not is_file_of_torch(record) and bool(read_record(record).left_out)
        base = self._base() if leaves_out or self._remembers_base else None
        if base is not None and self._remembers_base:
            self._shares.remember_base(base)
        return base

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path`, after the save in flight has become durable.

        A file or folder there that is not a checkpoint stays, with a warning.
        """
        if remote.is_remote(path):
            self.writer.afterwards(lambda: remote.remove(os.fspath(path)))
            return
        local = local_path(path)
        self.writer.afterwards(lambda: remove_at(local))

    @override
    def teardown(self) -> None:
        """Wait for the save in flight.

        Raises:
            Exception: That save failed. Logged instead while another exception ends the run, which is the root cause.
        """
        is_failing = sys.exc_info()[1] is not None
        self.buffer = HostBuffer()
        self._end_of_save = None
        try:
            self.wait()
        except Exception:
            if not is_failing:
                raise
            log.exception("The checkpoint in flight could not be written")


def install_plugin(trainer: pl.Trainer) -> DurableCheckpointIO:
    """The `DurableCheckpointIO` of `trainer`, which replaces Lightning's own default but no other plugin.

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


def give_back_plugin(trainer: pl.Trainer) -> None:
    """Undo `install_plugin` where a process hands its weights to the one that started it, which knows no other."""
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        trainer.strategy.checkpoint_io = TorchCheckpointIO()


let_lightning_read()
