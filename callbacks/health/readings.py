"""The readings of a check: hooks on optimizers and modules, times and batches of a rank, the `Reading` of all ranks.

Nothing here waits for a device until `Probe.read`, which moves all numbers of a rank to the host at once.
"""

from __future__ import annotations

import functools
import math
import platform
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import xxhash
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..optimizer_state import parameters_of, with_step_hooks
from .faults import Reading

__all__ = ["Probe", "merged", "scaled_by"]

LATENT_METRICS = {"latent_std": 1.0, "z_std": 1.0, "latent_var": 0.5, "z_var": 0.5}
"""Metrics for the spread of latent values, the first that is there counts, with the power that makes a deviation of
it."""
MOST_COMPARED = 64
"""How many weights of an optimizer are compared before and after an update, evenly spread."""
SAMPLES_OF_TENSOR = 1024
"""Elements of each of them, and of each tensor of a batch, that are: a copy of all would double their memory."""
MOST_LEAVES = 16
"""How many parts of a batch are looked at."""
_HALVES = frozenset({torch.float16, torch.bfloat16})
_PLAIN = (str, bytes, int, float, bool, type(None))
_Moment = float | torch.Event
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _within_step(method: _Method) -> _Method:
    """A method that torch calls within a step: what it raises goes to ``self._failures``, for the check to raise."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised by the check, under the policy of its callback
            self._failures.append(error)

    return call  # type: ignore[return-value]


class Probe:
    """Reads the steps of this rank before a check: losses of all, times and batches of the last few, the last update.

    - The update is read in hooks that torch's own optimizers call in their ``step``. So gradients are those that are
      used: averaged over ranks, unscaled, clipped. An update that a gradient scaler leaves out is not seen.
    - A time is that from one update to the last gradient before the next. Ranks leave the update together, as it needs
      the gradients of all, and wait for each other again once the last gradient is there. In between are the update,
      callbacks, data, forward and backward of this rank alone. Of sharded modules, whose ranks also meet in between, it
      says little.
    - Of all modules without children the outputs are read, and the gradients that come back to them; each is one
      reduction on its device. The gradient at an output comes out of the backward of what follows: where it is the
      first that is not finite, the module that was passed just before is named.

    Args:
        trainer: The trainer, set up.
        module: Its module.
        most_losses: How many losses are kept, the newest.
        traces: Whether modules are watched in every step.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, *, most_losses: int, traces: bool) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self._traces = traces
        given: Sequence[Any] = trainer.optimizers
        optimizers = [optimizer for optimizer in given if isinstance(optimizer, Optimizer)]
        self._optimizers = with_step_hooks(optimizers)
        updated = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        named = {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) in updated}
        self._names = list(named)
        self._index = {id(p): index for index, p in enumerate(named.values())}
        self._first: Any = next(iter(named.values()), None)
        """The parameter whose gradient comes last: the first that a forward uses."""
        self._parts = [(name, part) for name, part in module.named_modules() if name and not any(part.children())]
        self._is_attached = False
        self._handles: list[RemovableHandle] = []
        self._traced: list[RemovableHandle] = []
        self._node: Node | None = None
        self._failures: list[Exception] = []
        """Faults within a step."""
        self._losses: deque[tuple[int, Any]] = deque(maxlen=most_losses)
        self._batches: list[list[torch.Tensor] | None] = []
        """Fingerprints of the last two."""
        self._began: _Moment | None = None
        self._spans: list[tuple[_Moment, _Moment]] = []
        self._seen: list[_Seen] = []
        self._forget_update(reads_next=False)
        if traces:
            self._trace_modules()

    def attach(self, *, is_last: bool) -> None:
        """Watch the next step: its time and its batch, and in the last one before a check its update and modules."""
        self._forget_update(reads_next=is_last)
        if is_last:
            self._trace_modules()
        if self._is_attached:
            return
        self._is_attached = True
        self._spans, self._began = [], None
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(optimizer.register_step_post_hook(self._after_update))
        if isinstance(self._first, DTensor):  # FSDP 2 gives it its gradient, and calls these hooks, by itself
            hook = self._first.register_post_accumulate_grad_hook(self._note_last_gradient)  # type: ignore[no-untyped-call]
            self._handles.append(hook)
        elif self._first is not None and self._first.is_leaf:
            # A hook of the node: one of the parameter could be the class's own, and would be refused under DDP. A
            # parameter holds its node weakly.
            self._node = get_gradient_edge(self._first).node
            self._handles.append(self._node.register_hook(self._note_last_gradient))

    def _trace_modules(self) -> None:
        if not self._traced:
            for name, part in self._parts:
                self._traced.append(part.register_forward_hook(functools.partial(self._note_output, name)))

    def detach(self) -> None:
        """Leave optimizers, modules and parameters as they were."""
        for handle in (*self._handles, *self._traced):
            handle.remove()
        self._handles, self._traced, self._node = [], [], None
        self._is_attached = False

    def step_ended(self, step: int, outputs: Any, batch: Any) -> None:
        """Take over what a step gave."""
        loss = _loss_of(outputs)
        if isinstance(loss, torch.Tensor):
            # A copy: what a trainer writes its next loss to would change this one.
            self._losses.append((step, loss.detach().mean().clone()))
        elif isinstance(loss, int | float):
            self._losses.append((step, float(loss)))
        if self._is_attached:
            self._batches = [*self._batches[-1:], fingerprint(batch)]

    def read(self, step: int, outputs: Any) -> Reading:
        """The reading of this rank since the last call, the step with these `outputs` the last; waits for the device.

        Raises:
            Exception: What went wrong within a step.
        """
        try:
            if self._failures:
                raise self._failures[0]
            return self._reading(step, outputs)
        finally:
            self._losses.clear()
            self._failures.clear()
            self._seen.clear()
            self.detach()
            if self._traces:
                self._trace_modules()

    def _reading(self, step: int, outputs: Any) -> Reading:
        latent = _latent(self._trainer, outputs)
        prints = [
            None if print_ is None else torch.stack([p.to(self._device) for p in print_]).sum()
            for print_ in self._batches
        ]
        read = _on_host(
            self._device,
            norms=[norms for _, norms in self._norms],
            updated=self._updated,
            weights=self._weights,
            losses=_stacked([loss for _, loss in self._losses if isinstance(loss, torch.Tensor)]),
            latent=[] if latent is None else [torch.as_tensor(latent[1]).reshape(-1)[:1]],
            seen=_stacked([each.largest.to(self._device, non_blocking=True) for each in self._seen]),
            prints=[each for each in prints if each is not None],
        )
        weights, updated = math.hypot(*read["weights"]), math.hypot(*read["updated"])
        measured = iter(read["losses"])
        losses = [(at, next(measured) if isinstance(loss, torch.Tensor) else loss) for at, loss in self._losses]
        forward, backward, origin_step = _origin(self._seen, read["seen"])
        is_known = len(prints) == 2 and None not in prints
        spans = [_between(*span) for span in self._spans]
        return Reading(
            step=step,
            gradient_norms=self._norms_by_name(read["norms"]),
            update_ratio=updated / weights
            if read["weights"] and 0 < weights < math.inf and updated < math.inf
            else None,
            weights_are_finite=math.isfinite(weights),
            losses=[(at, loss if math.isfinite(loss) else math.nan) for at, loss in losses],
            highest_rate=self._highest_rate,
            latent=None if latent is None else (latent[0], _deviation(latent[0], read["latent"])),
            step_seconds=[statistics.median(spans) if spans else None],
            hosts=[platform.node()],
            repeats_batch=is_known and read["prints"][0] == read["prints"][1],
            batch=read["prints"][-1] if is_known else None,
            forward_origin=forward,
            backward_origin=backward,
            origin_step=origin_step,
        )

    def _norms_by_name(self, norms: Sequence[float]) -> dict[str, float]:
        """The norm of each parameter's gradient, 0 where it had none, nan if not finite; nothing without an update."""
        indices = [index for members, _ in self._norms for index in members]
        found = {self._names[index]: norm for index, norm in zip(indices, norms, strict=True)}
        given = {name: found.get(name, 0.0) for name in self._names} if self._is_updated else {}
        return {name: norm if math.isfinite(norm) else math.nan for name, norm in given.items()}

    # The hooks, which torch calls within a step.

    def _forget_update(self, *, reads_next: bool) -> None:
        self._reads_update = reads_next
        self._is_updated = False
        self._norms: list[tuple[list[int], torch.Tensor]] = []
        """Indices of parameters, and L2 norms of their gradients."""
        self._before: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._updated: list[torch.Tensor] = []
        """Norms of samples of what the update changed."""
        self._weights: list[torch.Tensor] = []
        """Norms of these samples before it."""
        self._highest_rate: float | None = None

    @_within_step
    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._began = self._now()
        if not self._reads_update:
            return
        self._is_updated = True
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self._highest_rate = max([*rates, *([] if self._highest_rate is None else [self._highest_rate])], default=None)
        used = [p for p in parameters_of(optimizer) if id(p) in self._index and p.grad is not None]
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for parameter in used:
            gradient = _local(parameter.grad)
            groups[gradient.device, gradient.dtype].append((self._index[id(parameter)], gradient))
        for members in groups.values():
            self._norms.append(([index for index, _ in members], _norms([gradient for _, gradient in members])))
        samples = [_sample(parameter) for parameter in used[:: -(-len(used) // MOST_COMPARED) or 1]]
        self._before[id(optimizer)] = [(sample, sample.clone()) for sample in samples if sample.numel()]

    @_within_step
    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for sample, before in self._before.pop(id(optimizer), ()):
            groups[sample.device, sample.dtype].append((sample, before))
        for members in groups.values():
            copies = [copy for _, copy in members]
            self._updated.append(_norms(torch._foreach_sub([sample for sample, _ in members], copies)))
            self._weights.append(_norms(copies))

    @_within_step
    def _note_last_gradient(self, *_: Any) -> None:
        if self._began is not None:
            self._spans.append((self._began, self._now()))
            self._began = None

    def _now(self) -> _Moment:
        if self._device.type in ("cpu", "mps"):  # MPS has events, but none that belong to a stream
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    @_within_step
    def _note_output(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation, or the first pass of a checkpointed one
            return
        for tensor in _floating(output):
            self._see(name, tensor, is_gradient=False)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._note_gradient, name))  # type: ignore[no-untyped-call]

    @_within_step
    def _note_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self._see(name, gradient, is_gradient=True)

    def _see(self, name: str, tensor: torch.Tensor, *, is_gradient: bool) -> None:
        self._seen.append(_Seen(self._trainer.global_step + 1, name, is_gradient, _largest(tensor)))


@dataclass(frozen=True)
class _Seen:
    """The largest magnitude of an output of a module, or of the gradient that came back to it."""

    step: int
    name: str
    is_gradient: bool
    largest: torch.Tensor


def _origin(seen: Sequence[_Seen], values: Sequence[float]) -> tuple[str | None, str | None, int | None]:
    """The first module whose output was not finite, or whose backward was the first to be so, and its step."""
    index = next((index for index, value in enumerate(values) if not math.isfinite(value)), None)
    if index is None:
        return None, None, None
    found = seen[index]
    if not found.is_gradient:
        return found.name, None, found.step
    before = seen[index - 1]  # there is one: a gradient comes back to an output
    return None, before.name if before.is_gradient else "the loss", found.step


def scaled_by(trainer: pl.Trainer, module: Any) -> str:
    """The scaler, in words, that scales losses and leaves out updates by itself; empty where there is none."""
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "16-mixed, which leaves out updates by itself"
    return (
        "a gradient scaler of the trainer's own"
        if getattr(module, "discovered", None) and module.discovered.scalers
        else ""
    )


def merged(readings: Sequence[Reading], *, shares_data: bool) -> Reading:
    """The reading of all ranks: the largest norms, rates and losses, and the first module that was not finite.

    Args:
        readings: Of each rank that could read.
        shares_data: Whether ranks may get equal batches on purpose.
    """
    norms: dict[str, float] = {}
    losses: dict[int, float] = {}
    for reading in readings:
        for name, norm in reading.gradient_norms.items():
            norms[name] = _larger(norms.get(name, 0.0), norm)
        for step, loss in reading.losses:
            losses[step] = _larger(losses.get(step, -math.inf), loss)
    origins = [reading for reading in readings if reading.origin_step is not None]
    # What is wrong forward is wrong backward in the same step.
    origin = min(origins, key=lambda reading: (reading.origin_step, reading.forward_origin is None), default=None)
    latents = [reading.latent for reading in readings if reading.latent is not None]
    return Reading(
        step=readings[0].step,
        gradient_norms=norms,
        update_ratio=max((r.update_ratio for r in readings if r.update_ratio is not None), default=None),
        weights_are_finite=all(reading.weights_are_finite for reading in readings),
        losses=sorted(losses.items()),
        highest_rate=max((r.highest_rate for r in readings if r.highest_rate is not None), default=None),
        latent=min(latents, key=lambda latent: latent[1], default=None),
        step_seconds=[seconds for reading in readings for seconds in reading.step_seconds],
        hosts=[host for reading in readings for host in reading.hosts],
        repeats_batch=any(reading.repeats_batch for reading in readings),
        ranks_share_batch=len(readings) > 1
        and not shares_data
        and readings[0].batch is not None
        and len({reading.batch for reading in readings}) == 1,
        forward_origin=None if origin is None else origin.forward_origin,
        backward_origin=None if origin is None else origin.backward_origin,
        origin_step=None if origin is None else origin.origin_step,
    )


def _larger(one: float, other: float) -> float:
    """The larger number; nan where one of them is."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def _on_host(device: torch.device, **tensors: Sequence[torch.Tensor]) -> dict[str, list[float]]:
    """The elements of tensors as numbers, by name; waits for `device` once."""
    rows = {
        name: [part.detach().reshape(-1).to(device, torch.float64) for part in parts] for name, parts in tensors.items()
    }
    every = [part for parts in rows.values() for part in parts]
    values = iter(torch.cat(every).tolist() if every else ())
    return {name: [next(values) for part in parts for _ in range(len(part))] for name, parts in rows.items()}


def _stacked(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Numbers as one tensor, so that they are moved at once; none where there are none."""
    return [torch.stack(list(values))] if values else []


def _loss_of(outputs: Any) -> Any:
    """The loss among what a step gave: its ``loss``, else what has that word in its name; None where there is none."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if not isinstance(outputs, Mapping):
        return None
    for name in ("loss", "train/loss", "train_loss"):
        if name in outputs:
            return outputs[name]
    return next((value for name, value in outputs.items() if isinstance(name, str) and "loss" in name.lower()), None)


def _latent(trainer: pl.Trainer, outputs: Any) -> tuple[str, Any] | None:
    """The first metric of `LATENT_METRICS` of this step, whatever stands before a slash in its name."""
    given = outputs if isinstance(outputs, Mapping) else {}
    metrics = {**trainer.callback_metrics, **{name: value for name, value in given.items() if isinstance(name, str)}}
    by_name = {name.rpartition("/")[2]: name for name in metrics}
    found = next((by_name[name] for name in LATENT_METRICS if name in by_name), None)
    return None if found is None else (found, metrics[found])


def _deviation(name: str, value: Sequence[float]) -> float:
    """The standard deviation that a metric of `LATENT_METRICS` reports; nothing is known of one that is nan."""
    number = value[0] if value else math.nan
    return math.inf if math.isnan(number) else max(number, 0.0) ** LATENT_METRICS[name.rpartition("/")[2]]


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a gradient, dense."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    dense: torch.Tensor = local.coalesce().values() if local.is_sparse else local
    return dense


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """A view of some elements of a weight, evenly spread; empty where it cannot be viewed as one row."""
    local = _local(parameter)
    if not local.is_floating_point() or not local.is_contiguous():
        return local.new_empty(0)
    return local.view(-1)[:: max(1, local.numel() // SAMPLES_OF_TENSOR)]


def _norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of each, all of one type; of halves in fp32, where a norm of fp16 would overflow."""
    if tensors[0].dtype in _HALVES:
        return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return torch.stack(list(torch._foreach_norm(list(tensors))))


def _floating(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.numel() and output.layout == torch.strided:
            yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _floating(part)
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _floating(part)


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, nan where there is one; a sum of squares could overflow."""
    largest: torch.Tensor = torch.linalg.vector_norm(tensor.detach(), float("inf")).float()
    return largest


def _between(began: _Moment, ended: _Moment) -> float:
    if isinstance(began, torch.Event):
        assert isinstance(ended, torch.Event)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000
    assert isinstance(ended, float)
    return ended - began


def fingerprint(batch: Any) -> list[torch.Tensor] | None:
    """Numbers that are equal for equal batches, and hardly ever for others: 0-d tensors, to be summed at the check.

    Each is on the device of its part of the batch, because moving it would wait for that device. Tensors and arrays
    count with up to 1024 elements, evenly spread; of an Arrow batch the first and the last row do.

    Returns:
        None for a batch that does not say what is in it, or is a plain value or empty: a trainer that makes its own
        data may get the same in each step.
    """
    if isinstance(batch, _PLAIN):
        return None
    if hasattr(batch, "to_pylist") and getattr(batch, "num_rows", None):
        batch = [batch.slice(row, 1).to_pylist() for row in (0, batch.num_rows - 1)]
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    parts = [_of_leaf(leaf) for leaf in leaves[:MOST_LEAVES]]
    known = [part for part in parts if part is not None]
    return [part * (index + 1) for index, part in enumerate(known)] if known and len(known) == len(parts) else None


def _of_leaf(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, _PLAIN):
        # Fewer bits than a double has, so that sums of them stay exact.
        return torch.tensor(
            float(xxhash.xxh3_64_intdigest(repr(leaf).encode("utf-8", "replace")) >> 16), dtype=torch.float64
        )
    if hasattr(leaf, "__array_interface__") and getattr(leaf.dtype, "kind", "O") in "biuf":
        leaf = torch.as_tensor(leaf.reshape(-1)[:: max(1, leaf.size // SAMPLES_OF_TENSOR)].astype("float64"))
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or leaf.is_complex() or not leaf.numel():
        return None
    flat = leaf.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES_OF_TENSOR)].double()
    return (sample * torch.arange(1, len(sample) + 1, dtype=torch.float64, device=sample.device)).sum()
