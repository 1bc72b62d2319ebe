"""What a checkpoint holds: the state taken apart into JSON and tensors, and a copy of the tensors of one moment.

Runs in the training thread and touches no disk. `CheckpointStore` writes what was captured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...adapter.contract.exceptions import UnstorableStateError
from ..finite import are_finite
from .codec.state_tree import encode
from .codec.tensor_table import Entry, Slice, TensorTable
from .format.layout import FROZEN_FILE, MODEL_FILE
from .format.record import LeftOut, RecordMeta
from .ownership import STATE_MARKER
from .storage.commit import Staging
from .storage.host_buffer import HostBuffer

__all__ = ["CONTRACT_KEY", "Captured", "FrozenFile", "capture", "finite_weights", "snapshot"]

CONTRACT_KEY = "genlight"
"""The member of a Lightning checkpoint that holds what the trainer contract adds; its ``state`` is the payload."""

_WEIGHTS = "state_dict"


@dataclass(frozen=True)
class FrozenFile:
    """A durable file of frozen tensors, which later checkpoints link."""

    keys: frozenset[str]
    size: int
    xxh3_128: str
    path: Path
    identity: tuple[int, int, int]
    """Inode, bytes and time of change, when it became durable."""


@dataclass
class Captured:
    """A checkpoint that was taken apart and is not written yet."""

    meta: RecordMeta
    step: int
    state: Any
    """The trainer's payload, encoded; it goes into the record."""
    rest: bytes
    """Everything else that is not a tensor; the content of the state file."""
    entries: list[Entry]
    slices: list[Entry] = field(default_factory=list)
    """What this rank holds of sharded tensors."""
    wholes: dict[tuple[str, str], Slice] = field(default_factory=dict)
    """All sharded tensors, by file and key."""
    staging: Staging | None = None
    """Where it is made; holds the files of the trainer's own hook, and the link to `linked`."""
    linked: FrozenFile | None = None
    """The file of an earlier checkpoint that this one shares."""
    earlier: FrozenFile | None = None
    """A file of an earlier attempt that may hold just the frozen tensors of this checkpoint."""
    left_out: list[LeftOut] = field(default_factory=list)
    nonfinite: frozenset[str] = frozenset()
    """Which tensors of `linked` and `left_out` are not finite."""

    @property
    def nbytes(self) -> int:
        """Bytes that will be written, about."""
        return len(self.rest) + sum(entry.nbytes for entry in (*self.entries, *self.slices))


def capture(checkpoint: Mapping[str, Any], meta: RecordMeta, staging: Staging | None = None) -> Captured:
    """Take a checkpoint apart into JSON and tensors; its tensors are referred to, not copied.

    Raises:
        UnstorableStateError: A value cannot be stored; names its path.
    """
    table = TensorTable()
    rest = {name: value for name, value in checkpoint.items() if name not in (_WEIGHTS, CONTRACT_KEY)}
    encoded = {}
    if _WEIGHTS in checkpoint:
        encoded[_WEIGHTS] = _encode_weights(checkpoint[_WEIGHTS], table)
    encoded |= {name: encode(value, table, root=("checkpoint", name)) for name, value in rest.items()}
    contract = dict(checkpoint.get(CONTRACT_KEY, {}))
    state = encode(contract.pop("state", {}), table, root="state")
    if CONTRACT_KEY in checkpoint:
        encoded[CONTRACT_KEY] = encode(contract, table, root=CONTRACT_KEY)
    _check_json(meta.trainer_checkpoint)
    entries = sorted(table.entries(), key=lambda entry: entry.file)
    step = meta.step if meta.step is not None else int(checkpoint.get("global_step", 0))
    metadata = encode(getattr(checkpoint.get(_WEIGHTS), "_metadata", None), table, root="state_dict._metadata")
    content = {"format_version": 1, "weights_metadata": metadata, "checkpoint": {"$dict": list(encoded.items())}}
    state_file = STATE_MARKER + b"," + json.dumps(content, separators=(",", ":"), allow_nan=False)[1:].encode()
    return Captured(meta, step, state, state_file, entries, table.slices, table.wholes, staging)


def snapshot(captured: Captured, buffer: HostBuffer) -> Captured:
    """`captured` with the values of now, in `buffer`; what is written once, frozen tensors, gets memory of its own."""
    once = [entry for entry in captured.entries if entry.file == FROZEN_FILE]
    again = [entry for entry in captured.entries if entry.file != FROZEN_FILE]
    copies, count = buffer.copy([*again, *captured.slices]), len(again)
    own = [replace(entry, source=entry.source.detach().to("cpu", copy=True)) for entry in once]
    return replace(captured, entries=own + copies[:count], slices=copies[count:])


def finite_weights(captured: Captured) -> bool | None:
    """Whether all parameters that this rank holds are finite; None where it cannot tell them from buffers.

    An infinite buffer is nothing unusual: a mask is one.
    """
    slices = [entry.source for entry in captured.slices if entry.file == MODEL_FILE]
    entries = [entry for entry in captured.entries if entry.file in (MODEL_FILE, FROZEN_FILE)]
    if not are_finite(slices):
        return False
    if not captured.nonfinite and _are_finite(entries):
        return True if entries or slices or captured.linked or captured.left_out else None
    names = captured.meta.parameters
    if not names:
        return None
    return captured.nonfinite.isdisjoint(names) and _are_finite(entry for entry in entries if entry.key in names)


def _are_finite(entries: Iterable[Entry]) -> bool:
    return are_finite([entry.source for entry in entries])


def _encode_weights(weights: Any, table: TensorTable) -> Any:
    """Like `encode`, with the model's own names for its tensors."""
    import torch

    if not isinstance(weights, Mapping) or not all(type(name) is str for name in weights):
        return encode(weights, table, root=("checkpoint", _WEIGHTS))
    return {
        "$dict": [
            [
                name,
                {"$tensor": table.add_model_tensor(name, value, ("checkpoint", _WEIGHTS, name))}
                if isinstance(value, torch.Tensor) and value.layout == torch.strided
                else encode(value, table, root=("checkpoint", _WEIGHTS, name)),
            ]
            for name, value in weights.items()
        ]
    }


def _check_json(value: Mapping[str, Any] | None) -> None:
    """What the hook returned goes into the record as it is, where orchestrators read it."""
    if value is None:
        return
    try:
        json.dumps({**value, "primary_path": str(value.get("primary_path"))}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnstorableStateError("save_checkpoint()", f"{type(value).__name__} ({error})", "return JSON") from None
