"""The values of a state by path, their digests, and the values in which two checkpoints of a training differ.

Each rank compares its own slices of sharded tensors; it reads the saved ones from the files of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.text import key_text, list_first
from ..checkpoint.capture import CONTRACT_KEY
from ..checkpoint.codec.state_tree import is_wrapper, wrapped_tensors
from ..checkpoint.codec.tensors import content_digests
from ..checkpoint.format.record import CheckpointRecord
from ..checkpoint.loading import load_record
from ..checkpoint.rank_state import WITNESS
from ..checkpoint.sharded.slices import sharded_like
from ..hook.hook import RUN_STATE_KEY
from ..rank_channel import Channel
from .entry import Proof, StepDifference

log = logging.getLogger(__name__)

_OF_AN_ATTEMPT = (RUN_STATE_KEY, "callbacks", "loops", "pytorch-lightning_version", "hyper_parameters")
"""Parts of a checkpoint that differ between attempts: number, files, clocks and settings of an attempt. Of the loops,
only the positions of loaders are compared, because after a resume Lightning counts epochs in another way."""
_OF_A_START = ("elapsed_s", "is_between_batches", "metrics", "changed", WITNESS)
"""Parts of `CONTRACT_KEY` that differ between attempts: duration, speed, identity, and values not restored."""
_NAMED_AT_MOST = 5


def values_in(path: str, value: Any, *, others: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yield the tensors, arrays, numbers, strings and states of generators in `value`, by path, without copies.

    A mapping, list or tuple that appears at several places is entered at each: two groups of an optimizer may share a
    pair of betas.

    Args:
        path: The path of `value`.
        value: The value.
        others: Whether to enter dataclasses too, and to yield all remaining values as texts.

    Yields:
        The path, the value, and whether it is a code within a quantized tensor, whose differences mean nothing.
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from values_in(f"{path}[{key_text(key)}]", entry, others=others)
    elif isinstance(value, list | tuple | deque):
        for i, entry in enumerate(value):
            yield from values_in(f"{path}[{i}]", entry, others=others)
    elif isinstance(value, Tensor):
        if is_lazy(value) or value.is_meta:  # it has no values
            return
        if is_wrapper(value):
            for name, part in wrapped_tensors(path, value):
                yield from ((at, leaf, not part.is_floating_point()) for at, leaf, _ in values_in(name, part))
        else:
            yield path, value.detach(), False
    elif isinstance(value, np.generic):
        yield path, value.item(), False
    elif isinstance(value, torch.Generator):
        yield path, value.get_state(), False
    elif isinstance(value, np.random.Generator):
        yield path, repr(value.bit_generator.state), False
    elif isinstance(value, random.Random | np.random.RandomState):
        state = value.getstate() if isinstance(value, random.Random) else value.get_state()
        yield path, repr(state), False
    elif isinstance(value, np.ndarray | bool | int | float | complex | str | bytes):
        yield path, value, False
    elif others and dataclasses.is_dataclass(value):
        yield from values_in(path, vars(value), others=True)
    elif others:
        yield path, repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value), False


def digest(value: Any) -> str:
    """Return a text that is equal for equal types, shapes and bits, also for NaNs; brings a tensor to the host."""
    if isinstance(value, Tensor):
        return content_digests([(value.to_dense() if value.is_sparse else value).cpu()])[0]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array {value.dtype} {value.shape} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
    return f"{type(value).__name__} {xxhash.xxh3_128_hexdigest(repr(value).encode())}"


def values_of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a checkpoint by path, without facts of the attempt such as its duration."""
    content = {key: value for key, value in state.items() if key not in _OF_AN_ATTEMPT}
    content["positions"] = state.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
    if isinstance(own := content.get(CONTRACT_KEY), Mapping):
        content[CONTRACT_KEY] = {key: value for key, value in own.items() if key not in _OF_A_START}
    return {path: value for path, value, _ in values_in("checkpoint", content, others=True)}


def differing_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the paths at which values are not bit-equal, or that only one of the two has, in order.

    Args:
        first: The result of `values_of_state`.
        second: Another result. If a tensor in `first` is sharded, its counterpart is sharded alike before comparing.
    """
    return [path for path in {**first, **second} if not _are_equal(first.get(path), second.get(path))]


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, DTensor):
        if not isinstance(second, Tensor) or second.shape != first.shape:
            return False
        first, second = first.to_local(), sharded_like(second, first).to_local()
    return digest(first) == digest(second)


def compare_with_checkpoint(state: Mapping[str, Any], record: CheckpointRecord, channel: Channel) -> Proof | None:
    """Compare the `state` of this moment with the checkpoint that an earlier attempt saved after the same step.

    Args:
        state: The state that a save would store now. Rank zero has all of it, other ranks have their slices.
        record: That checkpoint.
        channel: Connects the ranks, which all call this; or `ALONE`, if only rank zero does.

    Returns:
        The result; None if the checkpoint cannot be read, with a warning.
    """
    own_names, problem = list[str](), None
    try:
        now = values_of_state(state)
        if channel.rank:
            now = {path: value for path, value in now.items() if isinstance(value, DTensor)}
        if now:
            # Of sharded tensors, each rank reads the slices that it needs.
            share = (channel.rank, channel.size)
            before = values_of_state(load_record(record, base=state.get("state_dict"), share=share))
            own_names = [path for path in differing_values(now, before) if path in now or not channel.rank]
    except (CheckpointError, OSError) as error:
        problem = str(error)
    results = channel.gather_everywhere((own_names, problem))
    problems = [text for _, text in results if text is not None]
    if problems:
        if channel.rank == 0:
            log.warning("Step %d is not compared with its checkpoint: %s", record.step, problems[0])
        return None
    names = list(dict.fromkeys(name for found, _ in results for name in found))
    steps, ranks, against = (record.step,), channel.size, record.name
    if not names:
        return Proof(steps, ranks, against=against)
    named = list_first(names, _NAMED_AT_MOST)
    text = f"{against}, saved when the step was first trained, has other values of {named}"
    rank = next(rank for rank, (found, _) in enumerate(results) if found)
    return Proof((), ranks, StepDifference("checkpoint", (record.step, 0, 0), rank, text), against=against)
