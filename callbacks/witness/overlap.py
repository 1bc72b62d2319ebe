"""Compare a repeated step with the checkpoint that was saved after it, value by value.

The state is taken apart as for a save. Its JSON is compared with the checkpoint's, and its tensors with those in the
checkpoint's files, by their digests. Of sharded tensors each rank compares its slices.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...adapter.contract.exceptions import BrokenCheckpointError
from ..checkpoint.capture import CONTRACT_KEY, capture
from ..checkpoint.codec.tensors import bytes_of
from ..checkpoint.contents import read_contents, sliced_tensors
from ..checkpoint.format.headers import TypedShape
from ..checkpoint.format.record import MODEL_FILE, CheckpointRecord, FileEntry, RecordMeta, digest_of
from ..checkpoint.loading import read_tensors
from ..checkpoint.rank_state import WITNESS
from ..checkpoint.storage import Staging
from ..hook.hook import RUN_STATE_KEY
from ..rank_channel import Channel
from .entry import Difference, Proof

log = logging.getLogger(__name__)

_LEFT_OUT = frozenset({(RUN_STATE_KEY,), ("callbacks",)}) | {
    (CONTRACT_KEY, name) for name in ("elapsed_s", "is_between_batches", "metrics", WITNESS)
}
"""Places in a checkpoint that are not compared: facts about the attempt, and states that may hold times and paths."""
_POSITIONS = ("loops", "fit_loop", "state_dict", "combined_loader")
"""The part of the loops that is compared. Lightning counts epochs in another way after a resume between two of them."""
_NAMED_AT_MOST = 5


def compare_with_checkpoint(state: Mapping[str, Any], record: CheckpointRecord, channel: Channel) -> Proof | None:
    """Compare the `state` of this moment with the checkpoint that an earlier attempt saved after the same step.

    Args:
        state: What a save of this moment would store. Rank zero has all of it, other ranks their slices.
        record: That checkpoint.
        channel: All ranks call this, or only rank zero with a channel of its own.

    Returns:
        The result; None if the checkpoint cannot be read, with a warning.
    """
    try:
        of_rank, problem = list(_differences(state, record, is_first=channel.rank == 0)), None
    except (BrokenCheckpointError, OSError) as error:
        of_rank, problem = [], str(error)
    results = channel.gather_everywhere((of_rank, problem))
    problems = [text for _, text in results if text is not None]
    if problems:
        if channel.rank == 0:
            log.warning("Step %d is not compared with its checkpoint: %s", record.step, problems[0])
        return None
    names = list(dict.fromkeys(name for found, _ in results for name in found))
    steps, ranks, against = (record.step,), channel.size, record.name
    if not names:
        return Proof(steps, ranks, against=against)
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    named = ", ".join(names[:_NAMED_AT_MOST]) + more
    text = f"{against}, which was saved after its first time, has other values of {named}"
    rank = next(rank for rank, (found, _) in enumerate(results) if found)
    return Proof((), ranks, Difference("checkpoint", (record.step, 0, 0), rank, text), against=against)


def _differences(state: Mapping[str, Any], record: CheckpointRecord, *, is_first: bool) -> Iterator[str]:
    """Yield the names of values that this rank holds and that differ from the checkpoint's, in their order."""
    captured = capture(state, RecordMeta(step=record.step), Staging(record.path, record.path.parent))
    slices = {
        (tensor.file, tensor.key, stored.box): stored.xxh3_128
        for tensor in sliced_tensors(record)
        for stored in tensor.slices
    }
    whole = dict[tuple[str, str], torch.Tensor]()
    for entry, source in zip(captured.entries, captured.sources, strict=True):
        if entry.box is None:
            whole[entry.file, entry.key] = source
        elif slices.get((entry.file, entry.key, entry.box)) != _digest(source):
            yield entry.key
    if not is_first:
        return
    stored: dict[tuple[str, str], str] = {(MODEL_FILE, left.key): left.xxh3_128 for left in record.left_out}

    def read(record: CheckpointRecord, file: FileEntry) -> dict[str, TypedShape]:
        tensors, header = read_tensors(record, file)
        stored.update({(record.tensor_file(file), key): digest_of(bytes_of(each)) for key, each in tensors.items()})
        return header

    content, _, _ = read_contents(record, read)
    now = json.loads(captured.rest)
    yield from _in_json(now["checkpoint"], content["checkpoint"], ())
    yield from _in_json(json.loads(captured.state), record.state, (CONTRACT_KEY, "state"))
    for place in dict.fromkeys([*whole, *stored]):
        if place not in whole or stored.get(place) != _digest(whole[place]):
            yield place[1]


def _digest(values: torch.Tensor) -> str:
    return digest_of(bytes_of(values.detach()))


def _in_json(now: Any, before: Any, path: tuple[str, ...]) -> Iterator[str]:
    is_other_loop = path[:1] == _POSITIONS[:1] and path[: len(_POSITIONS)] != _POSITIONS[: len(path)]
    if path in _LEFT_OUT or is_other_loop:
        return
    mine, theirs = _members(now), _members(before)
    if mine is None or theirs is None:
        if now != before:
            yield ".".join(path)
        return
    for name in dict.fromkeys([*mine, *theirs]):
        place = (*path, name)
        if name in mine and name in theirs:
            yield from _in_json(mine[name], theirs[name], place)
        elif place not in _LEFT_OUT:
            yield ".".join(place)


def _members(value: Any) -> dict[str, Any] | None:
    """Return the members of an encoded container by name; None for a leaf."""
    if isinstance(value, dict):
        pairs = value.get("$dict")
        return value if not isinstance(pairs, list) else {str(pair[0]): pair[1] for pair in pairs}
    return dict(zip(map(str, range(len(value))), value, strict=True)) if isinstance(value, list) else None
