"""What a check reads: hooks on optimizers and modules, times and batches of a rank, and the `Reading` of all ranks.

Nothing here waits for a device until `Probe.read`, which moves all numbers of a rank to the host at once.
"""

from __future__ import annotations

import functools
import math
import platform
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import xxhash
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..optimizer_state import with_step_hooks
from .faults import Reading

__all__ = ["Probe", "merged"]

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


class Probe:
    """Reads the steps of this rank before a check: losses of all, times and batches of the last few, the last update.

    Args:
        trainer: The trainer, set up.
        module: Its module.
        most_losses: How many losses are kept, the newest.
        traces: Whether modules are watched in every step.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, *, most_losses: int, traces: bool) -> None:
        self._trainer = trainer
        self._traces = traces
        self._device = trainer.strategy.root_device
        self._failures: list[Exception] = []
        """What went wrong within a step."""
        parameters = dict(module.named_parameters())
        self._updates = UpdateWatch(trainer.optimizers, parameters, self._failures)
        first = next((parameters[name] for name in self._updates.names), None)
        self._clock = StepClock(self._updates.optimizers, first, self._device, self._failures)
        self._modules = ModuleTrace(module, self._device, self._failures)
        self._losses: deque[tuple[int, Any]] = deque(maxlen=most_losses)
        self._batches: list[list[torch.Tensor] | None] = []
        """Fingerprints of the last two."""
        self._is_timed = False
        if traces:
            self._modules.attach()

    def time_steps(self) -> None:
        """Measure times, and look at batches, from now on."""
        if not self._is_timed:
            self._is_timed = True
            self._clock.attach()

    def watch_step(self) -> None:
        """Look at the update and the modules of the next step."""
        self._updates.attach()
        self._modules.attach()

    def detach(self) -> None:
        """Leave optimizers, modules and parameters as they were."""
        self._is_timed = False
        self._clock.detach()
        self._updates.detach()
        self._modules.detach()

    def step_ended(self, step: int, outputs: Any, batch: Any) -> None:
        """Take over what a step gave."""
        loss = _loss_of(outputs)
        if isinstance(loss, torch.Tensor):
            # A copy: what a trainer writes its next loss to would change this one.
            self._losses.append((step, loss.detach().mean().clone()))
        elif isinstance(loss, int | float):
            self._losses.append((step, float(loss)))
        if self._is_timed:
            self._batches = [*self._batches[-1:], fingerprint(batch)]
        self._modules.step_ended(step)

    def read(self, step: int, outputs: Any) -> Reading:
        """What this rank has seen since the last call, the step with these `outputs` the last; waits for the device.

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
            self._modules.steps.clear()
            self.detach()
            if self._traces:
                self._modules.attach()

    def _reading(self, step: int, outputs: Any) -> Reading:
        latent = _latent(self._trainer, outputs)
        updates, modules = self._updates, self._modules
        prints = [
            None if print_ is None else torch.stack([p.to(self._device) for p in print_]).sum()
            for print_ in self._batches
        ]
        read = _on_host(
            self._device,
            norms=[norms for _, norms in updates.norms],
            updated=updates.updated,
            weights=updates.weights,
            losses=_stacked([loss for _, loss in self._losses if isinstance(loss, torch.Tensor)]),
            latent=[] if latent is None else [torch.as_tensor(latent[1]).reshape(-1)[:1]],
            forward=[values for seen in modules.steps for values in _stacked(seen[1])],
            backward=[values for seen in modules.steps for values in _stacked(seen[2])],
            prints=[each for each in prints if each is not None],
        )
        weights = math.hypot(*read["weights"])
        updated = math.hypot(*read["updated"])
        measured = iter(read["losses"])
        losses = [(at, next(measured) if isinstance(loss, torch.Tensor) else loss) for at, loss in self._losses]
        forward, backward, origin_step = modules.origin(read["forward"], read["backward"])
        is_known = len(prints) == 2 and None not in prints
        return Reading(
            step=step,
            gradient_norms=updates.norms_by_name(read["norms"]),
            update_ratio=updated / weights
            if read["weights"] and 0 < weights < math.inf and updated < math.inf
            else None,
            weights_are_finite=math.isfinite(weights),
            losses=[(at, loss if math.isfinite(loss) else math.nan) for at, loss in losses],
            highest_rate=updates.highest_rate,
            latent=None if latent is None else (latent[0], _deviation(latent[0], read["latent"])),
            step_seconds=[self._clock.seconds()],
            hosts=[platform.node()],
            repeats_batch=is_known and read["prints"][0] == read["prints"][1],
            batch=read["prints"][-1] if is_known else None,
            forward_origin=forward,
            backward_origin=backward,
            origin_step=origin_step,
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


def _within_step(method: _Method) -> _Method:
    """A method that torch calls within a step: what it raises goes to ``self.failures``, for the check to raise."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised by the check, under the policy of its callback
            self.failures.append(error)

    return call  # type: ignore[return-value]


class UpdateWatch:
    """Reads what optimizers are about to use, in hooks that torch's own optimizers call in their ``step``.

    So gradients are those that are used: averaged over ranks, unscaled, clipped. An update that a gradient scaler
    leaves out is not seen. Nothing here waits for a device.

    Attributes:
        names: The parameters that are updated.
        norms: Their indices, and L2 norms of their gradients.
        updated: Norms of samples of what the update changed.
        weights: Norms of these samples before it.
        highest_rate: Learning rate of the update, the highest of all groups; None without an update.

    Args:
        optimizers: Those of the run; others than torch's are left out.
        parameters: The parameters that may be in them.
        failures: Takes what goes wrong within a step.
    """

    def __init__(
        self, optimizers: Iterable[Any], parameters: Mapping[str, torch.nn.Parameter], failures: list[Exception]
    ) -> None:
        self.failures = failures
        self.optimizers = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
        updated = {id(p) for optimizer in self.optimizers for p in _parameters(optimizer)}
        named = {id(p): name for name, p in parameters.items() if p.requires_grad and id(p) in updated}
        self.names = list(named.values())
        self._index = {key: index for index, key in enumerate(named)}
        self._handles: list[RemovableHandle] = []
        self._before: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._forget()

    def _forget(self) -> None:
        self.norms: list[tuple[list[int], torch.Tensor]] = []
        self.updated: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        self.highest_rate: float | None = None
        self._is_seen = False
        self._before.clear()

    def attach(self) -> None:
        """Watch updates from now on, and forget those that were watched before."""
        self._forget()
        if not self._handles:
            for optimizer in with_step_hooks(self.optimizers):
                self._handles.append(optimizer.register_step_pre_hook(self._before_update))
                self._handles.append(optimizer.register_step_post_hook(self._after_update))

    def detach(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def norms_by_name(self, norms: Sequence[float]) -> dict[str, float]:
        """The norm of each parameter's gradient, 0 where it had none, nan if not finite; nothing without an update."""
        indices = [index for members, _ in self.norms for index in members]
        found = {self.names[index]: norm for index, norm in zip(indices, norms, strict=True)}
        given = {name: found.get(name, 0.0) for name in self.names} if self._is_seen else {}
        return {name: norm if math.isfinite(norm) else math.nan for name, norm in given.items()}

    @_within_step
    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_seen = True
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.highest_rate = max([*rates, *([] if self.highest_rate is None else [self.highest_rate])], default=None)
        used = [p for p in _parameters(optimizer) if id(p) in self._index and p.grad is not None]
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for parameter in used:
            gradient = _local(parameter.grad)
            groups[gradient.device, gradient.dtype].append((self._index[id(parameter)], gradient))
        for members in groups.values():
            self.norms.append(([index for index, _ in members], _norms([gradient for _, gradient in members])))
        samples = [_sample(parameter) for parameter in used[:: -(-len(used) // MOST_COMPARED) or 1]]
        self._before[id(optimizer)] = [(sample, sample.clone()) for sample in samples if sample.numel()]

    @_within_step
    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for sample, before in self._before.pop(id(optimizer), ()):
            groups[sample.device, sample.dtype].append((sample, before))
        for members in groups.values():
            copies = [copy for _, copy in members]
            self.updated.append(_norms(torch._foreach_sub([sample for sample, _ in members], copies)))
            self.weights.append(_norms(copies))


def _parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a gradient, dense."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    dense: torch.Tensor = local.coalesce().values() if local.is_sparse else local
    return dense


def _sample(parameter: torch.nn.Parameter) -> torch.Tensor:
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


class ModuleTrace:
    """Watches the outputs of all modules without children, and the gradients that come back to these outputs.

    Each is one reduction on its device, which nothing waits for. The gradient at an output comes out of the backward
    of what follows: where it is the first that is not finite, the module that was passed just before is named.

    Attributes:
        steps: Each step that was watched: magnitudes of outputs and of gradients, and the modules that they belong to.

    Args:
        module: Whose modules are watched, by their names in it.
        device: Where magnitudes are kept.
        failures: Takes what goes wrong within a step.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, failures: list[Exception]) -> None:
        self.failures = failures
        self.steps: list[tuple[int, list[torch.Tensor], list[torch.Tensor], list[str], list[str]]] = []
        self._parts = [(name, part) for name, part in module.named_modules() if name and not any(part.children())]
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._forward: list[tuple[str, torch.Tensor]] = []
        self._backward: list[tuple[str, torch.Tensor]] = []

    def attach(self) -> None:
        """Watch from now on."""
        if not self._handles:
            for name, part in self._parts:
                self._handles.append(part.register_forward_hook(functools.partial(self._note_output, name)))

    def detach(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step_ended(self, step: int) -> None:
        """Keep what was seen since the last call, if anything was, as that of `step`."""
        if self._forward:
            seen = [
                [value.to(self._device, non_blocking=True) for _, value in each]
                for each in (self._forward, self._backward)
            ]
            names = [[name for name, _ in each] for each in (self._forward, self._backward)]
            self.steps.append((step, seen[0], seen[1], names[0], names[1]))
        self._forward.clear()
        self._backward.clear()

    def origin(self, forward: Sequence[float], backward: Sequence[float]) -> tuple[str | None, str | None, int | None]:
        """The first module whose output, or else whose backward, was not finite, and its step.

        Args:
            forward: The magnitudes of outputs of all `steps`, one step after the other.
            backward: Those of gradients.
        """
        forwards, backwards = iter(forward), iter(backward)
        for step, _, _, outputs, gradients in self.steps:
            bad_outputs = [not math.isfinite(next(forwards)) for _ in outputs]
            bad_gradients = [not math.isfinite(next(backwards)) for _ in gradients]
            if True in bad_outputs:
                return outputs[bad_outputs.index(True)], None, step
            if True in bad_gradients:
                return None, ["the loss", *gradients][bad_gradients.index(True)], step
        return None, None, None

    @_within_step
    def _note_output(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation, or the first pass of a checkpointed one
            return
        for tensor in _floating(output):
            self._forward.append((name, _largest(tensor)))
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._note_gradient, name))  # type: ignore[no-untyped-call]

    @_within_step
    def _note_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self._backward.append((name, _largest(gradient)))


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


class StepClock:
    """Measures from one update to the last gradient before the next.

    Ranks leave the update together, as it needs the gradients of all, and wait for each other again once the last
    gradient is there. In between are the update, callbacks, data, forward and backward of this rank alone. Of sharded
    modules, whose ranks also meet in between, it says little.

    Args:
        optimizers: Torch's optimizers of the run.
        first: The parameter whose gradient comes last: the first that a forward uses.
        device: What trains; of an accelerator its own time is measured.
        failures: Takes what goes wrong within a step.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        first: torch.nn.Parameter | None,
        device: torch.device,
        failures: list[Exception],
    ) -> None:
        self.failures = failures
        self._optimizers = optimizers
        self._first = first
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._node: Node | None = None
        self._began: _Moment | None = None
        self._spans: list[tuple[_Moment, _Moment]] = []

    def attach(self) -> None:
        """Measure from now on, and forget what was measured before."""
        self._spans.clear()
        self._began = None
        if not self._handles and self._first is not None and self._first.is_leaf:
            if isinstance(self._first, DTensor):  # FSDP 2 gives it its gradient, and calls these hooks, by itself
                handle = self._first.register_post_accumulate_grad_hook(self._end)  # type: ignore[no-untyped-call]
            else:
                # A hook of the node: one of the parameter could be the class's own, and would be refused under DDP. A
                # parameter holds its node weakly.
                self._node = get_gradient_edge(self._first).node
                handle = self._node.register_hook(self._end)
            self._handles.append(handle)
            self._handles += [o.register_step_pre_hook(self._begin) for o in with_step_hooks(self._optimizers)]

    def detach(self) -> None:
        """Measure no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._node = None

    def seconds(self) -> float | None:
        """The median of what was measured; None where that is nothing. Waits for an accelerator."""
        spans = [_between(*span) for span in self._spans]
        return statistics.median(spans) if spans else None

    @_within_step
    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._began = self._now()

    @_within_step
    def _end(self, *_: Any) -> None:
        if self._began is not None:
            self._spans.append((self._began, self._now()))
            self._began = None

    def _now(self) -> _Moment:
        if self._device.type in ("cpu", "mps"):  # MPS has events, but none that belong to a stream
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


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
