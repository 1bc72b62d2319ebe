"""Digests of a step: of its rows, of all random states, of its learning rates and losses.

Nothing here waits for a device. Values on one are copied to the host while training continues, and are hashed once
they have arrived. Of a large tensor, evenly spaced elements are hashed, so that a step stays cheap.
"""

from __future__ import annotations

import array
import ctypes
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import msgspec
import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ...adapter.plumbing.devices import LateCopy, random_states
from ...adapter.plumbing.generators import state_of
from ..checkpoint.codec.references import is_dense
from ..checkpoint.codec.tensors import bytes_of, is_plain
from ..checkpoint.rank_state import loader_generators
from ..checkpoint.worker_states import own_generators
from .entry import Entry

_SMALL_BYTES = 16 << 10
"""Tensors up to this size are hashed completely, of larger ones `_SAMPLED` elements or a few more."""
_SAMPLED = 2048
_MOST_LEAVES = 64
_DEEPEST = 5
_MOST_LOSSES = 4
_LONGEST_TEXT = 1024

Part = bytes | LateCopy


class Reading:
    """What is known of a batch; complete once the values on devices have arrived.

    Args:
        entry: The entry without `rows`, `losses` and `loss`.
        rows: The parts of the batch to hash.
        losses: All losses: numbers, or one tensor on its way from a device.
    """

    def __init__(self, entry: Entry, rows: Sequence[Part], losses: Sequence[float] | LateCopy) -> None:
        self._entry, self._rows, self._losses = entry, rows, losses

    def is_there(self) -> bool:
        """Whether `entry` waits for nothing."""
        return all(part.is_there() for part in (*self._rows, self._losses) if isinstance(part, LateCopy))

    def entry(self) -> Entry:
        """Return the complete entry; waits for values that have not arrived yet."""
        hasher = xxhash.xxh3_64()
        for part in self._rows:
            hasher.update(bytes_of(part.read()) if isinstance(part, LateCopy) else part)
        losses = self._losses.read().tolist() if isinstance(self._losses, LateCopy) else self._losses
        change = {"losses": _digest_of_numbers(losses), "loss": losses[0]} if losses else {}
        return msgspec.structs.replace(self._entry, rows=hasher.intdigest(), **change)


def read_batch(
    trainer: pl.Trainer, outputs: Any, batch: Any, index: int, *, attempt: int, own: Sequence[Any] = ()
) -> Reading:
    """Return the reading of the batch that was trained last.

    Args:
        trainer: Trains it.
        outputs: The result of the step, as ``on_train_batch_end`` gets it.
        batch: The batch, as that hook gets it.
        index: Index of the batch in its epoch.
        attempt: Goes into the entry.
        own: Generators that the trained object holds, in a stable order.
    """
    rates = [float(rate) for rate in _rates(trainer)]
    entry = Entry(
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        batch=index,
        attempt=attempt,
        rows=0,
        random=tuple(_random_digests(trainer, own)),
        rates=_digest_of_numbers(rates),
        losses=0,
        rate=rates[0] if rates else float("nan"),
    )
    return Reading(entry, list(_parts(batch)), _losses(outputs))


def generators_of_model(module: pl.LightningModule) -> list[Any]:
    """Return the generators of random numbers that `module`, or the trainer class that it hosts, holds."""
    hosted = [getattr(module, name) for name in ("plugin", "contract_state") if hasattr(module, name)]
    if hosted:
        return own_generators(*hosted)
    attributes = (vars(part) for part in module.modules())
    return own_generators(*[value for own in attributes for name, value in own.items() if name not in _OF_LIGHTNING])


_OF_LIGHTNING = ("_trainer", "_fabric", "_jit_example_inputs")
"""Attributes of a LightningModule that lead to the trainer, with its loaders and callbacks."""


def _digest_of_numbers(numbers: Sequence[float]) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}d", *numbers))


def _rates(trainer: pl.Trainer) -> Iterator[Any]:
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is not None and not (isinstance(rate, torch.Tensor) and rate.device.type != "cpu"):
                yield rate


def _random_digests(trainer: pl.Trainer, own: Sequence[Any]) -> Iterator[int]:
    """Yield the digests of `Entry.random`. Reading a state of CUDA does not wait: torch keeps it on the host."""
    version, words, gauss = random.getstate()
    hasher = xxhash.xxh3_64(array.array("L", words).tobytes())
    hasher.update(f"{version} {gauss}".encode())
    yield hasher.intdigest()
    yield xxhash.xxh3_64_intdigest(_state_of_numpy())
    yield xxhash.xxh3_64_intdigest(bytes_of(torch.get_rng_state()))
    yield _digest_of_states([state for states in random_states().values() for state in states])
    yield _digest_of_states([generator.get_state() for generator in loader_generators(trainer)])
    yield _digest_of_states([state_of(generator) for generator in own])


def _state_of_numpy() -> bytes:
    generator: Any = np.random.get_bit_generator()
    if type(generator) is np.random.MT19937:
        # The words of the state and the position in them, as they are in memory: `get_state` takes 20 us.
        return ctypes.string_at(generator.ctypes.state_address, 4 * (624 + 1))
    return repr(generator.state).encode()


def _digest_of_states(states: Sequence[Any]) -> int:
    hasher = xxhash.xxh3_64()
    for state in states:
        for part in _parts(state):
            assert not isinstance(part, LateCopy), "states of generators are on the host"
            hasher.update(part)
    return hasher.intdigest()


def _losses(outputs: Any) -> Sequence[float] | LateCopy:
    """Return the losses of a step; those on a device as one tensor.

    Those are its values whose name contains "loss"; otherwise its tensors: a plain number may be a time or a speed.
    """
    values = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
    scalars = {str(name): value for name, value in values.items() if _is_scalar(value)}
    found = [value for name, value in scalars.items() if "loss" in name.lower()]
    found = (found or [value for value in scalars.values() if isinstance(value, torch.Tensor)])[:_MOST_LOSSES]
    on_device = [each.detach() for each in found if isinstance(each, torch.Tensor) and each.device.type != "cpu"]
    if on_device:
        kind = torch.float64 if any(each.dtype == torch.float64 for each in on_device) else torch.float32
        place = on_device[0].device
        return LateCopy(torch.stack([each.reshape(()).to(kind) for each in on_device if each.device == place]))
    return [float(value) for value in found]


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and not isinstance(value, DTensor) and is_plain(value)
    return isinstance(value, int | float | np.floating) and not isinstance(value, bool)


def _parts(value: Any) -> Iterator[Part]:
    """Yield the parts of a batch to hash: its structure, and the values of its first leaves."""
    left, waiting = _MOST_LEAVES, [(value, 0)]
    while waiting and left:
        value, depth = waiting.pop()
        members = None if depth == _DEEPEST else _members(value)
        if members is None:
            left -= 1
            yield from _leaf(value)
        else:
            yield f"{type(value).__name__} {len(members)}".encode()
            waiting += [(member, depth + 1) for member in reversed(members[:_MOST_LEAVES])]


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
    except (ValueError, TypeError, NotImplementedError):  # texts, missing values, bits: not as they are in memory
        return [len(value), repr(spaced.to_pylist())]


def _leaf(value: Any) -> Iterator[Part]:
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        if value.dtype.hasobject:
            yield repr(value.shape).encode()
            return
        yield f"{value.dtype} {value.shape}".encode()
        sample = value if value.nbytes <= _SMALL_BYTES else value.reshape(-1)[:: _stride(value.size)]
        yield np.ascontiguousarray(sample).tobytes()
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        value = value.to_local() if isinstance(value, DTensor) else value
        if is_plain(value):
            sample = _sample(value.detach().resolve_conj().resolve_neg())
            # A copy: the loader may use the memory again before values on a device have arrived.
            yield bytes(bytes_of(sample)) if sample.device.type == "cpu" else LateCopy(sample)
    elif isinstance(value, str):
        yield value[:_LONGEST_TEXT].encode("utf-8", "replace")
    elif isinstance(value, bytes):
        yield value[:_LONGEST_TEXT]
    elif isinstance(value, bool | int | float | None):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()


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
