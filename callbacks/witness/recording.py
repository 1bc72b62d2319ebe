"""Digests of a step: of its rows, of all random states, of its learning rates and losses.

Nothing here waits for a device. Values on a device are copied to the host while training continues, and are hashed once
they have arrived. Only evenly spaced elements of a large tensor are hashed, so that a step stays cheap.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import lightning.pytorch as pl
import msgspec
import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ...adapter.plumbing.devices import LateCopy, accelerator, random_states
from ...adapter.plumbing.generators import held_generators, state_of
from ..checkpoint.codec.references import is_dense
from ..checkpoint.codec.tensors import bytes_of, is_plain
from ..checkpoint.rank_state import loader_generators
from ..lightning_internals import logged_in_step
from .entry import Entry, Key

_SMALL_BYTES = 16 << 10
"""Tensors up to this size are hashed completely; of a larger tensor, about `_SAMPLED` elements are hashed."""
_SAMPLED = 2048
_MOST_LEAVES = 64
_DEEPEST = 5
_MOST_LOSSES = 4
_LONGEST_TEXT = 1024

Part = bytes | LateCopy


class Reading:
    """The future entry of a batch; complete once the values on devices have arrived.

    Args:
        entry: The entry without `rows`, `losses` and `loss`.
        rows: The parts of the batch to hash.
        losses: All losses: numbers, or a tensor that is being copied from a device.
    """

    def __init__(self, entry: Entry, rows: Sequence[Part], losses: Sequence[float] | LateCopy) -> None:
        self._entry, self._rows, self._losses = entry, rows, losses
        self._late = [part for part in (*rows, losses) if isinstance(part, LateCopy)]

    def is_there(self) -> bool:
        """Whether all values have arrived, so that `entry` need not wait."""
        return not self._late or all(copy.is_there() for copy in self._late)

    def entry(self) -> Entry:
        """Return the complete entry; waits for values that have not arrived yet."""
        hasher = xxhash.xxh3_64()
        for part in self._rows:
            hasher.update(bytes_of(part.read()) if isinstance(part, LateCopy) else part)
        losses = self._losses.read().numpy().tolist() if isinstance(self._losses, LateCopy) else self._losses
        change = {"losses": _digest_of_numbers(losses), "loss": losses[0]} if losses else {}
        return msgspec.structs.replace(self._entry, rows=hasher.intdigest(), **change)


class Sources(NamedTuple):
    """Generators of random numbers besides the global ones. They are looked up again after each checkpoint."""

    loaders: list[Any]
    model: list[Any]
    has_accelerator: bool

    @classmethod
    def find(cls, trainer: pl.Trainer, module: pl.LightningModule) -> Self:
        """Return the generators of a training."""
        return cls(loader_generators(trainer), generators_of_model(module), accelerator() is not None)


def read_batch(trainer: pl.Trainer, outputs: Any, batch: Any, key: Key, attempt: int, sources: Sources) -> Reading:
    """Return the reading of the batch that was trained last.

    Args:
        trainer: The trainer.
        outputs: The result of the step, as ``on_train_batch_end`` gets it.
        batch: The batch, as that hook gets it.
        key: The key of the batch.
        attempt: Number of this attempt.
        sources: Generators to read.
    """
    rates = _rates(trainer)
    rate = rates[0] if rates else float("nan")
    entry = Entry(*key, attempt, 0, _random_digests(sources), _digest_of_numbers(rates), 0, rate)
    losses = _losses(outputs) or _losses(logged_in_step(trainer))
    return Reading(entry, _parts(batch), losses)


def generators_of_model(module: pl.LightningModule) -> list[Any]:
    """Return the generators of random numbers that `module`, or the trainer class that it hosts, holds."""
    hosted = [getattr(module, name) for name in ("plugin", "contract_state") if hasattr(module, name)]
    if hosted:
        return held_generators(*hosted)
    attributes = (vars(part) for part in module.modules())
    return held_generators(*[value for own in attributes for name, value in own.items() if name not in _OF_LIGHTNING])


_OF_LIGHTNING = ("_trainer", "_fabric", "_jit_example_inputs")
"""Attributes of a LightningModule that lead to the trainer, with its loaders and callbacks."""


def _digest_of_numbers(numbers: Sequence[float]) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}d", *numbers))


def _rates(trainer: pl.Trainer) -> list[float]:
    rates = [group.get("lr") for optimizer in trainer.optimizers for group in optimizer.param_groups]
    is_late = [isinstance(rate, torch.Tensor) and rate.device.type != "cpu" for rate in rates]
    return [float(rate) for rate, late in zip(rates, is_late, strict=True) if rate is not None and not late]


def _random_digests(sources: Sources) -> tuple[int, ...]:
    """Return the digests of `Entry.random`. Reading a state of CUDA does not wait: torch keeps it on the host."""
    version, words, gauss = random.getstate()
    hasher = xxhash.xxh3_64(struct.pack(f"{len(words)}L", *words))
    hasher.update(f"{version} {gauss}".encode())
    on_devices = random_states().values() if sources.has_accelerator else ()
    return (
        hasher.intdigest(),
        xxhash.xxh3_64_intdigest(_state_of_numpy()),
        xxhash.xxh3_64_intdigest(torch.get_rng_state().numpy().data),
        _digest_of_states([state for states in on_devices for state in states]),
        _digest_of_states([generator.get_state() for generator in sources.loaders]),
        _digest_of_states([state_of(generator) for generator in sources.model]),
    )


def _state_of_numpy() -> bytes:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its stubs lack it
    if type(generator) is np.random.MT19937:
        # The words of the state and the position in them, read from memory, because `get_state` would take 20 us.
        return ctypes.string_at(generator.ctypes.state_address, 4 * (624 + 1))
    return repr(generator.state).encode()


def _digest_of_states(states: Sequence[Any]) -> int:
    """Return a digest of states of generators; 0 if there are none."""
    if not states:
        return 0
    hasher = xxhash.xxh3_64()
    for state in states:
        for part in _parts(state):
            assert not isinstance(part, LateCopy), "states of generators are on the host"
            hasher.update(part)
    return hasher.intdigest()


def _losses(outputs: Any) -> Sequence[float] | LateCopy:
    """Return the losses of a step; if they are on a device, as one tensor.

    Its losses are the values whose name contains "loss". If there are none, they are its tensors, but not its plain
    numbers, which may be times or speeds.
    """
    values = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
    scalars = {str(name): value for name, value in values.items() if _is_scalar(value)}
    found = [value for name, value in scalars.items() if "loss" in name.lower()]
    found = (found or [value for value in scalars.values() if isinstance(value, torch.Tensor)])[:_MOST_LOSSES]
    tensors = [value.detach().reshape(()) for value in found if isinstance(value, torch.Tensor)]
    if not tensors:
        return [float(value) for value in found]
    place = tensors[0].device
    if place.type == "cpu":
        return [float(value.double().numpy()) for value in tensors if value.device == place]
    kind = torch.float64 if any(value.dtype == torch.float64 for value in tensors) else torch.float32
    return LateCopy(torch.stack([value.to(kind) for value in tensors if value.device == place]))


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and not isinstance(value, DTensor) and is_plain(value)
    return isinstance(value, int | float | np.floating) and not isinstance(value, bool)


def _parts(value: Any) -> list[Part]:
    """Return the parts of a batch to hash: its structure, and the values of its first leaves."""
    if type(value) is torch.Tensor:
        return _leaf(value)
    parts: list[Part] = []
    left, waiting = _MOST_LEAVES, [(value, 0)]
    while waiting and left:
        value, depth = waiting.pop()
        members = None if depth == _DEEPEST else _members(value)
        if members is None:
            left -= 1
            parts += _leaf(value)
        else:
            parts.append(f"{type(value).__name__} {len(members)}".encode())
            waiting += [(member, depth + 1) for member in reversed(members[:_MOST_LEAVES])]
    return parts


def _members(value: Any) -> list[Any] | None:
    """Return the members of a container; None for a leaf."""
    if isinstance(value, Mapping):
        return [each for item in value.items() for each in item]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic | str | bytes | int | float | None):
        return None
    kind = type(value)
    if kind.__module__.startswith("pyarrow"):
        return _of_arrow(value)
    own = getattr(value, "__dict__", None)
    return None if own is None or isinstance(value, type) or callable(value) else list(own.values())


def _of_arrow(value: Any) -> list[Any] | None:
    """Return the columns of a table or batch, the chunks of a column, or the values of an array."""
    if hasattr(value, "columns"):
        return [value.num_rows, *value.columns]
    if hasattr(value, "chunks"):
        return list(value.chunks)
    if hasattr(value, "flatten") and hasattr(value, "value_lengths"):
        return [len(value), value.flatten()]
    if not hasattr(value, "to_numpy"):
        return None
    spaced = value[:: max(1, len(value) // _MOST_LEAVES)] if hasattr(value, "slice") else value
    try:
        return [len(value), value.to_numpy(zero_copy_only=True)]
    except (ValueError, TypeError, NotImplementedError):  # strings, nulls, booleans: not without a copy
        return [len(value), repr(spaced.to_pylist())]


def _leaf(value: Any) -> list[Part]:
    """Return the parts to hash of a value that is no container."""
    if isinstance(value, torch.Tensor):
        about = f"{value.dtype} {tuple(value.shape)}".encode()
        value = value.to_local() if isinstance(value, DTensor) else value
        if not is_plain(value):
            return [about]
        sample = _sample(value.detach().resolve_conj().resolve_neg())
        if sample.device.type != "cpu":
            return [about, LateCopy(sample)]
        # A copy, because this is hashed later, and the loader may have written the next batch to this memory.
        return [about, ctypes.string_at(sample.data_ptr(), sample.nbytes)]
    if isinstance(value, np.ndarray | np.generic):
        array_ = np.asarray(value)
        about = f"{array_.dtype} {array_.shape}".encode()
        if array_.dtype.hasobject:
            return [about]
        sampled = array_ if array_.nbytes <= _SMALL_BYTES else array_.reshape(-1)[:: _stride(array_.size)]
        return [about, np.ascontiguousarray(sampled).tobytes()]
    if isinstance(value, str):
        return [value[:_LONGEST_TEXT].encode("utf-8", "replace")]
    if isinstance(value, bytes):
        return [value[:_LONGEST_TEXT]]
    is_plain_value = isinstance(value, int | float | None)
    return [repr(value).encode() if is_plain_value else type(value).__name__.encode()]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements of a large tensor, in the order of its memory; a small one as it is."""
    if tensor.nbytes <= _SMALL_BYTES:
        return tensor.contiguous()
    if is_dense(tensor.shape, tensor.stride()):
        flat = tensor.as_strided((tensor.numel(),), (1,))
    else:  # a view with gaps: a few of its rows
        flat = tensor[:: max(1, len(tensor) // 8)].flatten()
    return flat[:: _stride(flat.numel())].contiguous()


def _stride(count: int) -> int:
    """Return an odd distance between sampled elements, so that they come from all columns of a table."""
    return (count // _SAMPLED) | 1
