"""What each rank has for itself in a checkpoint of a trainer class: collected for a save, given back on resume."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy

from ...callbacks.checkpoint.rank_differences import Differing, apply_differences, differences_of_ranks
from ...callbacks.checkpoint.saving import CONTRACT_KEY
from ...callbacks.checkpoint.sharded.rank_channel import Channel
from ...callbacks.checkpoint.sharded.strategy import rank_groups_of

__all__ = ["collect_from_ranks", "rank_channel_of", "take_own_part"]

log = logging.getLogger(__name__)

_OF_RANKS = "of_ranks"
"""The member of the contract's part that holds, for each rank, what it has otherwise than rank zero."""
_OF_THE_DUMP = ("state_dict", "optimizer_states", "lr_schedulers")
_OF_THE_CONTRACT = ("state", "unmanaged", "phase")
_NAMED_AT_MOST = 8


def rank_channel_of(trainer: pl.Trainer) -> Channel | None:
    """How the ranks of a training compare what they save; None on a single one. Collective."""
    if trainer.world_size == 1:
        return None
    groups = rank_groups_of(trainer.strategy)
    return Channel() if groups is None else groups.training


def collect_from_ranks(checkpoint: dict[str, Any], trainer: pl.Trainer, channel: Channel) -> None:
    """Add to `checkpoint`, on rank zero, what other ranks have otherwise than it. Collective.

    Raises:
        UnstorableStateError: A value of this rank cannot be stored; names its path.
        CheckpointError: A container that differs between ranks holds a sharded tensor.
    """
    if channel.size == 1:
        return
    own = checkpoint[CONTRACT_KEY]
    compared = {name: own[name] for name in _OF_THE_CONTRACT if name in own}
    if not isinstance(trainer.strategy, ModelParallelStrategy) or rank_groups_of(trainer.strategy) is not None:
        # Else torch gathers the weights on rank zero, and the other ranks have nothing to compare.
        compared |= {name: checkpoint[name] for name in _OF_THE_DUMP if name in checkpoint}
    if "optimizer_states" in compared:
        # One that is consolidated, rank zero alone has: as Lightning does, all get it back whole.
        compared["optimizer_states"] = [
            None if hasattr(optimizer, "consolidate_state_dict") else state
            for optimizer, state in zip(trainer.optimizers, compared["optimizer_states"], strict=True)
        ]
    found = differences_of_ranks(compared, channel)
    if any(found):
        checkpoint[CONTRACT_KEY][_OF_RANKS] = [
            [{"path": list(differing.path), "value": differing.value} for differing in of_rank] for of_rank in found
        ]


def take_own_part(checkpoint: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Put what this rank had for itself into its copy of a loaded `checkpoint`; says what cannot be kept.

    A checkpoint that has no such part, as older ones, is left as it is.

    Returns:
        The weights of this rank that differ from rank zero's, which have to be loaded once more after the weights of
        all ranks were made equal.

    Raises:
        BrokenCheckpointError: The parts do not belong together.
    """
    contract = checkpoint[CONTRACT_KEY]
    stored = contract.get(_OF_RANKS, [])
    parts = [[Differing(tuple(entry["path"]), entry["value"]) for entry in of_rank] for of_rank in stored]
    if parts and len(parts) != world_size and rank == 0:
        log.warning("%s", _what_is_lost(parts, world_size))
    own = parts[rank] if rank < len(parts) else []
    tree = {**checkpoint, **{name: contract[name] for name in _OF_THE_CONTRACT if name in contract}}
    apply_differences(tree, own)
    checkpoint |= {name: tree[name] for name in _OF_THE_DUMP if name in tree}
    contract |= {name: tree[name] for name in _OF_THE_CONTRACT if name in tree}
    if any(differing.path == ("state_dict",) for differing in own):
        return dict(tree["state_dict"])
    return {differing.path[1]: differing.value for differing in own if differing.path[0] == "state_dict"}


def _what_is_lost(parts: Sequence[Sequence[Differing]], world_size: int) -> str:
    head = f"The checkpoint was saved by {len(parts)} ranks and is resumed by {world_size}: "
    if world_size < len(parts):
        lost = [differing for of_rank in parts[world_size:] for differing in of_rank]
        what = f"what was stored for {_ranks(world_size, len(parts))} is lost: {_named(lost)}"
    else:
        shared = [differing for of_rank in parts for differing in of_rank]
        what = (
            f"the ranks differed in what follows, and {_ranks(len(parts), world_size)} can only be given what rank 0 "
            f"had: {_named(shared)}"
        )
    return f"{head}{what}. The run will not be bit-equal to one that was never interrupted"


def _ranks(begin: int, end: int) -> str:
    return f"rank {begin}" if end - begin == 1 else f"ranks {begin} to {end - 1}"


def _named(found: Sequence[Differing]) -> str:
    names = list(dict.fromkeys(str(differing) for differing in found))
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
