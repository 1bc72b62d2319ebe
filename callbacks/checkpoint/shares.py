"""Which part of a checkpoint its directory's other checkpoints share, from one save to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from .base_weights import describe, is_describable
from .format.record import CheckpointRecord, LeftOut
from .saving import Prepared
from .shared_tensors import SharedFile, SharedTensors, keep_file
from .storage.commit import Staging, stage
from .storage.write_file import naming_the_checkpoint

__all__ = ["Shares"]


class Shares:
    """What checkpoints of each directory share."""

    def __init__(self) -> None:
        self._by_directory: dict[Path, SharedTensors] = {}
        self._base: dict[str, LeftOut] | None = None

    def look(self, directory: Path, tensors: Mapping[str, torch.Tensor], *, leave_out: bool) -> None:
        """Look at the model's `tensors` that training may leave as they are; without it nothing is shared there.

        With `leave_out`, checkpoints leave out what is as `remember_base` found it, or as it is now if nothing was
        loaded before.
        """
        directory = Path(os.path.abspath(directory))
        shared = self._by_directory[directory] = SharedTensors()
        shared.look(tensors, directory)
        base, self._base = self._base, None
        if leave_out:
            shared.leave_out(tensors, base)

    def remember_base(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take note of the model's `tensors` as the class built them, before a checkpoint is loaded into them."""
        self._base = {key: describe(key, tensor) for key, tensor in tensors.items() if is_describable(tensor)}

    def divide(self, record: Path, prepared: Prepared, staging: Staging | None) -> tuple[Prepared, Staging | None]:
        """`prepared` without the tensors that earlier checkpoints hold, whose files are in the staged folder then.

        Raises:
            UnwrittenCheckpointError: The folder could not be made; `staging` is discarded.
        """
        tensors, trained = self._by_directory.get(record.parent), prepared.meta.trained
        if tensors is None or trained is None:
            return prepared, staging

        def keep(file: SharedFile) -> bool:
            nonlocal staging
            staging = staging or stage(record)
            return keep_file(file, staging)

        try:
            with naming_the_checkpoint(record, prepared.nbytes):
                found = tensors.divide(prepared.entries, trained, keep)
        except BaseException:
            if staging is not None:
                staging.discard()
            raise
        divided = replace(prepared, entries=found.own, kept=found.kept, new_files=found.new_files)
        nonfinite = tensors.nonfinite_base & {left.key for left in found.left_out}
        return replace(divided, left_out=found.left_out, nonfinite_left_out=nonfinite), staging

    def learn(self, record: CheckpointRecord, prepared: Prepared) -> None:
        """Take note of what `record`, which is durable, holds of `prepared`: the next checkpoint shares it."""
        tensors = self._by_directory.get(record.path.parent)
        if tensors is not None and prepared.meta.trained is not None:
            tensors.learn(record, prepared.kept, prepared.new_files)
