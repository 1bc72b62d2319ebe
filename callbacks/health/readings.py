"""The readings of a rank: updates, modules, times and batches; nothing waits for a device before `Probe.read`."""

from __future__ import annotations

import functools
import math
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import numpy as np
import torch
import xxhash
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..checkpoint.codec.tensors import digest_of_all
from ..optimizer_state import parameters_of, with_step_hooks
from .rules import Reading

LATENT_METRICS = {"latent_std": 1.0, "z_std": 1.0, "latent_var": 0.5, "z_var": 0.5}
"""Metrics for the spread of latent values, each with the power that converts it to a standard deviation. The first that
a step reports counts."""
MOST_COMPARED = 64
"""Maximum number of weights of an optimizer that are compared before and after an update, evenly spread."""
SAMPLES_OF_TENSOR = 256
"""Approximate number of elements of each weight that are compared; a copy of all elements would double the memory. With
16,000 elements in total the norm is accurate to one percent, which is enough for every rule."""
LOSSES = ("loss", "train/loss", "train_loss")
"""Names of the loss among the results of a step; the first one present counts."""
_PLAIN = (str, bytes, int, float, bool, type(None))
_Moment = float | torch.Event
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _within_step(method: _Method) -> _Method:
    """Wrap a method so that its exceptions do not end the step; `Probe.read` raises the first of them."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised by the check, under the policy of its callback
            self._failures.append(error)

    return call  # type: ignore[return-value]


class Probe:
    """Reads the steps before a check: the losses of all steps, the times of a few, the rest only in the last step.

    - The update is read in hooks that torch's own optimizers call in their ``step``. So gradients are read as the
      update uses them: averaged over ranks, unscaled, clipped. An update that a gradient scaler skips is not read.
    - A time runs from the end of a step to the last gradient of the next. Ranks leave the update together, because it
      needs the gradients of all, and wait for each other again at the last gradient. In between are only this rank's
      callbacks, data, forward and backward. Sharded modules are not timed, because their ranks also meet in between.
    - The outputs of all modules without children are read, and the gradients at these outputs; each costs one reduction
      on its device. The backward of the next module computes the gradient at an output. So if that gradient is the
      first value that is not finite, the module whose backward ran just before is named.

    Args:
        trainer: The trainer, set up.
        module: The module that it trains.
        most_losses: Number of newest losses that are kept.
        traces: Whether modules are watched in every step.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, *, most_losses: int, traces: bool) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        all_optimizers: Sequence[Any] = trainer.optimizers
        optimizers = [optimizer for optimizer in all_optimizers if isinstance(optimizer, Optimizer)]
        self._optimizers = with_step_hooks(optimizers)
        updated = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        named = {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) in updated}
        self._names = {id(p): name for name, p in named.items()}
        self._first: Any = next(iter(named.values()), None)
        """The first parameter: usually the forward uses it first, so that its gradient comes last."""
        self._parts = [(name, part) for name, part in module.named_modules() if name and not any(part.children())]
        """The modules without children, with their names."""
        self._timer: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = []
        self._failures: list[Exception] = []
        """Exceptions within a step."""
        self._losses: deque[tuple[int, torch.Tensor | float]] = deque(maxlen=most_losses)
        self._batches: deque[tuple[torch.Tensor, ...]] = deque(maxlen=2)
        self._running_step = trainer.global_step + 1
        self._began: _Moment | None = None
        """Time at the end of the last step; None once the last gradient of this step has come."""
        self._spans: list[tuple[_Moment, _Moment]] = []
        """The measured times: each from the end of a step to the last gradient of the next."""
        self._seen: list[tuple[tuple[int, bool, str], torch.Tensor]] = []
        """Step, direction (whether in the backward) and module, with the largest magnitude of its values."""
        self._traced = self._trace_modules() if traces else []

    def watch_next(self, *, is_checked: bool) -> None:
        """Time the next step; if it `is_checked`, watch its update and its modules too."""
        if not self._timer and self._first is not None and self._first.is_leaf and not isinstance(self._first, DTensor):
            # On the parameter's node in the autograd graph: under DDP, a hook on the parameter itself would count as
            # the class's own, and be refused. The node is kept here, because the parameter holds it only weakly.
            self._node = get_gradient_edge(self._first).node
            self._timer = [self._node.register_hook(self._note_last_gradient)]
        self._began = self._now()
        if not is_checked or self._handles:
            return
        self._is_updated = False
        self._norms: list[tuple[list[str], torch.Tensor]] = []
        """Names of parameters, and L2 norms of their gradients."""
        self._before: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        """Some weights of each optimizer, and samples of these weights before the update."""
        self._changes: list[torch.Tensor] = []
        """Norms of the update's changes to the samples."""
        self._weights: list[torch.Tensor] = []
        """Norms of the samples before the update."""
        self._rates: list[float] = []
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(optimizer.register_step_post_hook(self._after_update))
        if not self._traced:
            self._handles += self._trace_modules()

    def _trace_modules(self) -> list[RemovableHandle]:
        return [part.register_forward_hook(functools.partial(self._note_output, name)) for name, part in self._parts]

    def close(self) -> None:
        """Leave optimizers, modules and parameters as they were."""
        for handle in (*self._timer, *self._handles, *self._traced):
            handle.remove()

    def note_loss(self, step: int, outputs: Any) -> None:
        """Keep the loss of a step: one copy on its device. Steps far from a check cost nothing else."""
        self._running_step = step + 1
        loss = _loss_of(outputs)
        if isinstance(loss, torch.Tensor):
            # A copy, because the trainer may write its next loss into the same tensor.
            loss = loss.detach()
            self._losses.append((step, loss.mean() if loss.ndim else loss.clone()))
        elif isinstance(loss, int | float):
            self._losses.append((step, float(loss)))

    @_within_step
    def note_batch(self, batch: Any) -> None:
        """Keep a fingerprint of a batch, to notice if the next step or another rank gets the same batch."""
        self._batches.append(fingerprint(batch, self._device))

    def read(self, step: int, outputs: Any) -> Reading:
        """Return this rank's reading since the last call, up to the step with these `outputs`; waits for the device.

        Raises:
            Exception: An error within a step.
        """
        try:
            if self._failures:
                raise self._failures[0]
            return self._reading(step, outputs)
        finally:
            self._losses.clear()
            self._failures.clear()
            self._seen.clear()
            self._spans.clear()
            for handle in (*self._timer, *self._handles):
                handle.remove()
            self._timer, self._handles = [], []

    def _reading(self, step: int, outputs: Any) -> Reading:
        """Return the reading of this rank, with one transfer from the device."""
        latent = _latent(self._trainer, outputs)
        read = _on_host(
            self._device,
            norms=[norms for _, norms in self._norms],
            changes=self._changes,
            weights=self._weights,
            losses=_stack_numbers([torch.as_tensor(loss) for _, loss in self._losses], self._device),
            latent=[] if latent is None else [torch.as_tensor(latent[1]).reshape(-1)[:1]],
            seen=_stack_numbers([largest for _, largest in self._seen], self._device),
            batches=_stack_numbers([number for numbers in self._batches for number in numbers], self._device),
        )
        norms = dict.fromkeys(self._names.values(), 0.0) if self._is_updated else {}
        names = [name for names, _ in self._norms for name in names]
        norms.update(zip(names, map(_or_nan, read["norms"]), strict=True))
        weights, changes = math.hypot(*read["weights"]), math.hypot(*read["changes"])
        return Reading(
            step=step,
            gradient_norms=norms,
            losses=[(at, _or_nan(loss)) for (at, _), loss in zip(self._losses, read["losses"], strict=True)],
            update_ratio=_or_nan(changes / weights) if weights else math.nan,
            rate=max(self._rates, default=math.nan),
            latent=None if latent is None else (latent[0], _deviation(latent[0], read["latent"])),
            origin=_origin([key for key, _ in self._seen], read["seen"]),
            ranks=[(platform.node(), statistics.median(map(_seconds_of, self._spans)) if self._spans else math.nan)],
            batches=[tuple(read["batches"]) if len(read["batches"]) == 2 else ()],
        )

    # The hooks that torch calls within a step.

    @_within_step
    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note rates, gradient norms and samples of the weights."""
        self._is_updated = True
        self._rates += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        used = [p for p in parameters_of(optimizer) if id(p) in self._names and p.grad is not None]
        if used:
            names = [self._names[id(parameter)] for parameter in used]
            self._norms.append((names, _norms([_local_values(parameter.grad) for parameter in used], self._device)))
            compared = used[:: -(-len(used) // MOST_COMPARED)]
            self._before[id(optimizer)] = compared, self._samples(compared)

    @_within_step
    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        compared, before = self._before.pop(id(optimizer), ([], None))
        if before is not None:
            self._weights.append(before.norm())
            self._changes.append((self._samples(compared) - before).norm())

    def _samples(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy some elements of the weights, evenly spread."""
        flat = [_local_values(parameter).reshape(-1) for parameter in parameters]
        samples = [values[:: max(1, len(values) // SAMPLES_OF_TENSOR)] for values in flat]
        return torch.cat([sample.to(self._device) for sample in samples]).double()

    @_within_step
    def _note_last_gradient(self, *_: Any) -> None:
        if self._began is not None:
            self._spans.append((self._began, self._now()))
            self._began = None

    def _now(self) -> _Moment:
        if self._device.type in ("cpu", "mps"):  # the events of MPS belong to no stream
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    @_within_step
    def _note_output(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Note the outputs of a module, and later the gradients at them."""
        if not torch.is_grad_enabled():  # an evaluation, or the first forward of a module with gradient checkpointing
            return
        for tensor in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.layout == torch.strided:
                self._note_magnitude(tensor, name=name, in_backward=False)
                if tensor.requires_grad:
                    hook = functools.partial(self._note_magnitude, name=name, in_backward=True)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    @_within_step
    def _note_magnitude(self, tensor: torch.Tensor, *, name: str, in_backward: bool) -> None:
        # The largest magnitude, or nan if there is one; a sum of squares could overflow.
        if tensor.numel():
            largest: torch.Tensor = torch.linalg.vector_norm(tensor.detach(), float("inf"))
            self._seen.append(((self._running_step, in_backward, name), largest))


def _origin(seen: Sequence[tuple[int, bool, str]], values: Sequence[float]) -> tuple[int, bool, str] | None:
    """Return step and name of the first module whose output or backward was not finite, and which of the two it was."""
    index = next((index for index, value in enumerate(values) if not math.isfinite(value)), None)
    if index is None or not seen[index][1]:
        return None if index is None else seen[index]
    _, is_gradient, name = seen[index - 1]  # exists: the output comes before the gradient at it
    return seen[index][0], True, name if is_gradient else "the loss"


def scaled_by(trainer: pl.Trainer, module: Any) -> str:
    """Name the scaler that scales losses and skips updates by itself; empty if there is none."""
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "16-mixed, which skips updates by itself"
    discovered = getattr(module, "discovered", None)
    return "a gradient scaler of the trainer's own" if discovered is not None and discovered.scalers else ""


def _on_host(device: torch.device, **tensors: Sequence[torch.Tensor]) -> dict[str, list[float]]:
    """Return the elements of tensors as numbers, by name; waits for `device` once."""
    rows = {
        name: [part.detach().reshape(-1).to(device, torch.float64) for part in parts] for name, parts in tensors.items()
    }
    every = [part for parts in rows.values() for part in parts]
    values = iter(torch.cat(every).tolist() if every else ())
    return {name: [next(values) for part in parts for _ in range(len(part))] for name, parts in rows.items()}


def _stack_numbers(values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return numbers as one tensor, so that they are moved at once."""
    return [torch.stack([value.to(device) for value in values])] if values else []


def _or_nan(number: float) -> float:
    return number if math.isfinite(number) else math.nan


def _loss_of(outputs: Any) -> Any:
    """Return the loss among a step's results: ``loss``, or a result with that word in its name; None without one."""
    if not isinstance(outputs, Mapping):
        return outputs
    for name in LOSSES:
        if name in outputs:
            return outputs[name]
    return next((value for name, value in outputs.items() if "loss" in str(name).lower()), None)


def _latent(trainer: pl.Trainer, outputs: Any) -> tuple[str, Any] | None:
    """Return the first metric of `LATENT_METRICS` that this step reported, with any prefix in front of a slash."""
    given = outputs if isinstance(outputs, Mapping) else {}
    metrics = {**trainer.callback_metrics, **{name: value for name, value in given.items() if isinstance(name, str)}}
    by_name = {name.rpartition("/")[2]: name for name in metrics}
    found = next((by_name[name] for name in LATENT_METRICS if name in by_name), None)
    return None if found is None else (found, metrics[found])


def _deviation(name: str, value: Sequence[float]) -> float:
    """Convert a metric of `LATENT_METRICS` to a standard deviation."""
    return max(value[0], 0.0) ** LATENT_METRICS[name.rpartition("/")[2]] if value else math.nan


def _local_values(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor as a dense tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    dense: torch.Tensor = local.coalesce().values() if local.is_sparse else local
    return dense


def _norms(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the L2 norm of each tensor, at least in fp32, because a norm in fp16 would overflow."""
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    norms = torch._foreach_norm(list(tensors), 2, torch.float64 if is_double else torch.float32)
    return _stack_numbers(norms, device)[0]


def _seconds_of(span: tuple[_Moment, _Moment]) -> float:
    began, ended = span
    if isinstance(began, torch.Event) and isinstance(ended, torch.Event):
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000
    return cast("float", ended) - cast("float", began)


def fingerprint(batch: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return a digest of a batch as one tensor on `device`, in a tuple, without waiting for the device.

    Of an Arrow batch only the first and the last row count.

    Returns:
        An empty tuple if the content of the batch is unknown, or if it is empty or a plain value: a trainer that makes
        its own data may get the same batch in each step.
    """
    if hasattr(batch, "to_pylist") and getattr(batch, "num_rows", None):
        batch = [batch.slice(row, 1).to_pylist() for row in (0, batch.num_rows - 1)]
    leaves = [] if isinstance(batch, _PLAIN) else tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors, on_host = [], xxhash.xxh3_64()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            tensors.append(leaf.detach())
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            on_host.update(leaf.tobytes())
        elif isinstance(leaf, _PLAIN):
            on_host.update(repr(leaf).encode("utf-8", "replace"))
        else:
            return ()
    sizable = [tensor for tensor in tensors if tensor.numel()]
    host_digest = torch.tensor(on_host.intdigest() >> 1, dtype=torch.int64)
    return (digest_of_all([host_digest, *sizable], device),) if leaves else ()
