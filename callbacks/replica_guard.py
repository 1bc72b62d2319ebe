"""A callback that detects when replicas drift apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..adapter.contract.exceptions import ReplicaDriftError
from ..adapter.plumbing.devices import LateCopy, gather_objects, host_group
from .checkpoint.codec.state_tree import wrapped_tensors
from .checkpoint.codec.tensors import as_uint8, content_digests, digest_of_all
from .hook.cadence import Boundaries, step_cadence
from .hook.hook import Hook
from .optimizer_state import named_values, settings_and_counters

STEPS_UNTIL_SENT = 1
"""Steps from the start of a comparison until its digest is sent; by then, the digest has been copied to the host."""
STEPS_UNTIL_READ = 4
"""Steps from the start of a comparison until its result is read; by then, all ranks have sent their digests."""

_LARGEST = 2**62 - 1
_PLAIN = {Tensor, torch.nn.Parameter}


class ReplicaGuard(Hook):
    """Compares the replicas of all ranks bit by bit and ends the run if they differ.

    Data-parallel ranks must hold equal parameters, buffers, optimizer states and trained tensors. Under every strategy,
    FSDP 2 included, they must also hold equal settings of optimizers (such as learning rates), counters and states of
    schedulers. Otherwise training continues without an error, with a different model on each rank. Typical causes are
    gradients used before they are averaged, random numbers that must not differ between ranks (such as weight noise),
    an update made by only one rank, a learning rate that follows the loss of a rank, and faulty hardware.

    By default it compares the replicas after 1, 2, 4, 8, … steps of an attempt (counted again after a roll-back), with
    each checkpoint, and at the end of training. A comparison hashes all tensors on their devices, by their bits, and
    exchanges 32 bytes over a separate process group. The result is read four steps later, so that no step waits for it.
    A save reads it at once, and fails if replicas differ. The error has the values of the first tensor that differs.
    Entries of the trainer class's ``rank_local``, sharded optimizer states and sharded tensors are not compared. With
    one rank it does nothing.

    Args:
        every_n_steps: Compare when the step crosses a multiple of this, and at the end of training; 0 turns it off.
            None means the steps named above.

    Raises:
        ValueError: `every_n_steps` is negative.
    """

    critical = True
    ranks = "all"

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.doubles = every_n_steps is None
        """Whether to compare after 1, 2, 4, 8, … steps, and with each checkpoint."""
        self.every_n_steps = step_cadence("every_n_steps", every_n_steps or 0)
        self._boundaries = Boundaries(self)
        self._first_step = self._next_double = 0
        self._compared_step = 0
        self._pending: _Comparison | None = None
        self._group: dist.ProcessGroup | None = None
        self._trains = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trains = self._is_to_compare(trainer)
        self._first_step = self._compared_step = trainer.global_step
        self._next_double = trainer.global_step + 1
        self._boundaries = Boundaries(self, trainer.global_step)
        self._pending = None
        # In a separate group, the exchange cannot be matched with another rank's collective of training. Diverged
        # ranks then fail in a collective of training, whose error names the cause.
        self._group = host_group() if _has_process_group(trainer) else None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        is_due = self._boundaries.crosses(step)
        self._trains = self._is_to_compare(trainer)
        if not self._trains:
            return
        if self._pending is not None and step >= self._pending.step + STEPS_UNTIL_SENT:
            self._pending.send()
            if step >= self._pending.step + STEPS_UNTIL_READ:
                self._read(pl_module)
        if is_due or (self.doubles and step >= self._next_double):
            self._begin(trainer, pl_module)
        self._next_double = _next_double(step, self._first_step)

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read(pl_module)
        self._first_step = self._compared_step = trainer.global_step
        self._next_double = trainer.global_step + 1

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._trains and self.doubles and trainer.global_step > self._compared_step:
            self._begin(trainer, pl_module)
        self._read(pl_module)  # before the checkpoint is committed

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._trains:
            return
        if trainer.global_step > self._compared_step:
            self._begin(trainer, pl_module)
        self._trains = False
        self._read(pl_module)

    def _is_to_compare(self, trainer: pl.Trainer) -> bool:
        return (self.doubles or self.every_n_steps > 0) and _has_process_group(trainer)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a comparison of the current replicas."""
        self._read(pl_module)
        self._compared_step = trainer.global_step
        tensors = _replicated_values(pl_module, trainer)
        number = digest_of_all(tensors, trainer.strategy.root_device) & _LARGEST if tensors else torch.tensor(0)
        settings = dict(_settings(pl_module, trainer))
        self._pending = _Comparison(trainer, self._group, torch.stack([number, -number]), settings)

    def _read(self, pl_module: pl.LightningModule) -> None:
        """Read the result of the pending comparison, if there is one.

        Raises:
            ReplicaDriftError: The replicas differ; raised on every rank.
        """
        comparison, self._pending = self._pending, None
        if comparison is not None and comparison.differs():
            named = list(_replicated(pl_module, comparison.trainer))
            raise ReplicaDriftError(
                _describe_differences(named, comparison.settings, comparison.step, comparison.group)
            )


def _has_process_group(trainer: pl.Trainer) -> bool:
    return trainer.world_size > 1 and dist.is_available() and dist.is_initialized()


class _Comparison:
    """A pending comparison. One exchange finds the maximum of the digests and of their negatives, so also the minimum.

    Args:
        trainer: The trainer of the ranks.
        group: The process group of the exchange.
        numbers: The digest of the tensors and its negative, on any device.
        settings: Numbers and strings on the host, by path.
    """

    def __init__(
        self, trainer: pl.Trainer, group: dist.ProcessGroup | None, numbers: Tensor, settings: dict[str, str]
    ) -> None:
        self.trainer, self.group, self.step = trainer, group, trainer.global_step
        self.settings = settings
        self.work: Any = None
        number = xxhash.xxh3_64_intdigest(repr(settings).encode()) & _LARGEST
        self._settings_digests = torch.tensor([number, -number], device="cpu")
        self._sent = self._settings_digests
        self._numbers = LateCopy(numbers)
        if self._numbers.is_there():
            self.send()

    def send(self) -> None:
        """Send the digests to the other ranks, unless they were sent."""
        if self.work is None:
            self._sent = torch.cat([self._numbers.read(), self._settings_digests])
            self.work = dist.all_reduce(self._sent, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def differs(self) -> bool:
        """Whether tensors or settings differ between ranks."""
        self.send()
        self.work.wait()
        tensors, negative, settings, negative_settings = self._sent.tolist()
        return (tensors, settings) != (-negative, -negative_settings)


def _next_double(step: int, first: int) -> int:
    """Return the first step after `step` that is 1, 2, 4, 8, … steps after `first`."""
    return first + (1 << (step - first).bit_length() if step > first else 1)


def _replicated(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of tensors that must be equal on all ranks, of a hosted trainer or a Lightning module."""
    own = getattr(module, "replicated_tensors", None)
    named = own() if own is not None else _of_module(module, trainer)
    settings = ((name, value) for name, value in _leaves_of_settings(module, trainer) if isinstance(value, Tensor))
    for name, tensor in (part for each in (*named, *settings) for part in wrapped_tensors(*each)):
        if _is_compared(tensor):
            yield name, tensor


def _replicated_values(module: pl.LightningModule, trainer: pl.Trainer) -> list[Tensor]:
    """Return the tensors of `_replicated`, in the same order on all ranks; faster, because it makes no names."""
    own = getattr(module, "replicated_values", None)
    if own is None:
        return [tensor for _, tensor in _replicated(module, trainer)]
    values = own() + [value for _, value in _leaves_of_settings(module, trainer) if isinstance(value, Tensor)]
    if not set(map(type, values)) <= _PLAIN:
        values = [part for value in values for _, part in wrapped_tensors("", value) if _is_compared(part)]
    return [tensor for tensor in values if tensor.layout is torch.strided and tensor.numel()]


def _is_compared(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) and tensor.layout is torch.strided and bool(tensor.numel())


def _settings(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Yield path and text of settings, counters and schedulers' states on the host; does not synchronize."""
    for name, value in _leaves_of_settings(module, trainer):
        if isinstance(value, bool | int | float | complex | str):
            yield name, repr(value)


def _leaves_of_settings(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting, counter and entry of a scheduler's state."""
    own = getattr(module, "replicated_settings", None)
    stack = list(own() if own is not None else _settings_of_trainer(trainer))[::-1]
    while stack:
        name, value = stack.pop()
        if isinstance(value, Mapping):
            stack += [(f"{name}.{key}", entry) for key, entry in value.items()][::-1]
        elif isinstance(value, list | tuple):
            stack += [(f"{name}[{i}]", entry) for i, entry in enumerate(value)][::-1]
        else:
            yield name, value


def _settings_of_trainer(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    for i, optimizer in enumerate(trainer.optimizers):
        yield from settings_and_counters(f"optimizers[{i}]", optimizer)
    for i, config in enumerate(trainer.lr_scheduler_configs):
        yield f"schedulers[{i}]", config.scheduler.state_dict()


def _of_module(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, buffers and optimizer states of a module without a trainer class."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        for i, (parameter, state) in enumerate(optimizer.state.items()):
            for key, value in named_values(state):
                if isinstance(value, Tensor):
                    yield f"{key} of {names.get(id(parameter), f'tensor {i}')}", value


def _describe_differences(
    named: Sequence[tuple[str, Tensor]], settings: dict[str, str], step: int, group: dist.ProcessGroup | None
) -> str:
    """Describe the differences between ranks. Settings come first, because they may be the cause. Collective."""
    digests = content_digests([tensor for _, tensor in named])
    tensors = {
        name: (f"shape {tuple(tensor.shape)}", digest) for (name, tensor), digest in zip(named, digests, strict=True)
    }
    everyone = gather_objects({"settings": settings, "tensors": tensors}, group)
    for what in ("settings", "tensors"):
        by_rank: list[dict[str, Any]] = [theirs[what] for theirs in everyone]
        names = list(dict.fromkeys(name for theirs in by_rank for name in theirs))
        drifted = [name for name in names if len({theirs.get(name) for theirs in by_rank}) > 1]
        if drifted:
            break
    else:
        return f"after step {step} replicas differed between ranks, but no longer do; {_ADVICE}"
    values_of_first = [theirs.get(drifted[0], "nothing") for theirs in by_rank]
    values = [value if isinstance(value, str) else value[0] for value in values_of_first]
    if what == "tensors" and len(set(values)) == 1:
        values = _values(dict(named)[drifted[0]], group)
    versions: dict[Any, list[int]] = {}
    for rank, value in enumerate(values_of_first):
        versions.setdefault(value, []).append(rank)
    groups = " and ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} ({values[ranks[0]]})" for ranks in versions.values()
    )
    return (
        f"after step {step} {len(drifted)} of {len(names)} {what} differ between ranks, the first is {drifted[0]}: "
        f"{groups} hold different values. Likely {_cause(what, drifted, len(names))}. {_ADVICE}"
    )


_ADVICE = (
    "If a difference is intended, name it in the trainer's `rank_local` (also an optimizer that shards its state); "
    "ReplicaGuard(every_n_steps=0) turns the comparison off."
)


def _values(tensor: Tensor, group: dist.ProcessGroup | None) -> list[str]:
    """Return each rank's value of the first element that differs from rank 0's."""
    mine = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    reference = mine.clone()
    dist.broadcast(reference, src=0, group=group)
    # Compare bits: as numbers, 0.0 equals -0.0, and a nan equals nothing.
    unequal = (as_uint8(mine) != as_uint8(reference)).view(len(mine), -1).any(1)
    place = int(unequal.nonzero()[0]) if unequal.any() else len(mine)
    first = min(gather_objects(place, group))
    index = first if first < len(mine) else 0
    return gather_objects(f"{mine[index].item()!r} at {index}", group)


def _cause(what: str, drifted: Sequence[str], count: int) -> str:
    """Return the likely cause of a difference, in words."""
    if what == "settings":
        return (
            "a learning rate, a schedule or a count that depends on the loss or the rows of one rank: average that "
            "value over all ranks, or decide on rank 0 and broadcast it"
        )
    if all(name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked") for name in drifted):
        return "statistics of a norm layer that each rank computes from its own rows; SyncBatchNorm makes them equal"
    if all(" of " in name for name in drifted):  # optimizer states
        return "an optimizer that shards its state, or one whose state depends on a rank's own rows"
    if 2 * len(drifted) > count:
        return (
            "gradients that are not averaged: a backward call outside of `train_step`, gradients of torch.func or "
            "torch.autograd.grad used without `.grad`, gradients changed in place after they were read, or ranks "
            "that started differently"
        )
    return "an update that some ranks did not make, or random numbers that differ between ranks, in that module"
