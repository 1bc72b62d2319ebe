"""The measurements of one check: hooks on optimizers and modules, times, batches, and one vector that all ranks reduce.

Nothing here waits for a device until `Check.reading` reads the reduced vector, once.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import xxhash
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..optimizer_state import with_step_hooks
from .faults import Reading

__all__ = ["LATENT_METRICS", "Check", "ModuleTrace", "RankView", "StepClock", "UpdateWatch", "fingerprint", "loss_of"]

LATENT_METRICS = {"latent_std": 1.0, "z_std": 1.0, "latent_var": 0.5, "z_var": 0.5}
"""Metrics for the spread of latent values, the first that is there counts, with the power that makes a deviation of
it."""
_NOTHING = -math.inf
"""The value of a rank that has none: the largest of all ranks counts."""
MOST_COMPARED = 64
"""How many weights of an optimizer are compared before and after an update, evenly spread."""
SAMPLES_OF_TENSOR = 1024
"""Elements of each of them that are: a copy of all would double their memory."""
_HALVES = frozenset({torch.float16, torch.bfloat16})
NOT_SEEN = -1.0
ELEMENTS = 1024
ENTRIES = 4
_PLAIN = (str, bytes, int, float, bool, type(None))
_Moment = float | torch.Event
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass
class RankView:
    """The measurements of this rank since the last check."""

    since: int
    """The step of the last check."""
    step: int
    """The step of this one."""
    losses: list[tuple[int, torch.Tensor | float]]
    """With their steps."""
    origins: list[tuple[int, torch.Tensor]]
    """The result of `ModuleTrace.origins`, with its step."""
    fingerprints: list[list[torch.Tensor] | None]
    """Of the last two batches."""
    latent: tuple[str, Any] | None


class Check:
    """The parts of a check that stay the same from one to the next, so that its vector has one length on all ranks.

    Args:
        watch: Looks at updates.
        clock: Measures this rank.
        trace: Knows the names of modules.
        has_names: Whether gradients are told by parameter, which needs the same parameters on all ranks.
        most_losses: How many losses are sent, the last ones.
        rank: Of this process.
        hosts: Of all ranks.
        device: Where the vector is.
        shares_data: Whether ranks may get equal batches on purpose.
    """

    def __init__(
        self,
        watch: UpdateWatch,
        clock: StepClock,
        trace: ModuleTrace,
        *,
        has_names: bool,
        most_losses: int,
        rank: int,
        hosts: Sequence[str],
        device: torch.device,
        shares_data: bool,
    ) -> None:
        self._watch, self._clock, self._trace = watch, clock, trace
        self._names = watch.names if has_names else []
        self._most_losses = most_losses
        self._rank, self._hosts, self._device = rank, hosts, device
        self._shares_data = shares_data
        self._places = len(trace.names) + 2

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the parts of the vector, as `vector` puts them together."""
        ranks = len(self._hosts)
        return (len(self._names), 3, self._most_losses, self._most_losses, 1, 2, 1, ranks, ranks)

    def unknown(self) -> torch.Tensor:
        """The vector of a rank that knows nothing."""
        return torch.full((sum(self.lengths),), _NOTHING, dtype=torch.float64, device=self._device)

    def vector(self, view: RankView) -> torch.Tensor:
        """What this rank has seen; the largest of all ranks' values is that of all."""
        summary = self._watch.summary(self._device)
        losses = self._losses(view.losses[-self._most_losses :] if self._most_losses else [])
        is_bad = ~torch.isfinite(losses) & (losses != _NOTHING)
        before, now = map(self._summed, view.fingerprints) if len(view.fingerprints) == 2 else (None, None)
        repeats = torch.zeros(1, dtype=torch.float64, device=self._device)
        if before is not None and now is not None:
            repeats += before == now
        parts = (
            summary[: len(self._names)],
            summary[-3:],
            torch.where(is_bad, _NOTHING, losses),
            is_bad.double(),
            self._latent(view.latent),
            self._origins(view),
            repeats,
            self._slot(self._clock.seconds()),
            self._slot(now),
        )
        return torch.cat(parts)

    def reading(self, reduced: torch.Tensor, view: RankView) -> Reading:
        """The numbers of all ranks; waits for the device, once."""
        values = iter(reduced.tolist())
        parts = [[next(values) for _ in range(length)] for length in self.lengths]
        norms, (ratio, weights_bad, rate), losses, are_bad, (latent,), origins, (repeats,), seconds, prints = parts
        steps = [number for number, _ in view.losses[-self._most_losses :]]
        forward, backward = (self._origin(value, view.since) for value in origins)
        if forward is not None and backward is not None:  # what is wrong forward is wrong backward in the same step
            forward, backward = (forward, None) if forward[0] <= backward[0] else (None, backward)
        origin = forward or backward
        has_update = max(norms, default=rate) >= 0
        return Reading(
            step=view.step,
            gradient_norms={
                name: norm if math.isfinite(norm) else math.nan for name, norm in zip(self._names, norms, strict=True)
            }
            if has_update
            else {},
            update_ratio=ratio if ratio >= 0 else None,
            weights_are_finite=weights_bad <= 0,
            losses=[
                (number, math.nan if bad > 0 else loss)
                for number, loss, bad in zip(steps, losses, are_bad, strict=False)
                if bad > 0 or loss > _NOTHING
            ],
            highest_rate=rate if rate >= 0 else None,
            latent=None if view.latent is None or latent == _NOTHING else (view.latent[0], -latent),
            step_seconds=[None if each == _NOTHING else each for each in seconds],
            hosts=self._hosts,
            repeats_batch=repeats > 0,
            ranks_share_batch=len(prints) > 1
            and not self._shares_data
            and prints[0] != _NOTHING
            and len(set(prints)) == 1,
            forward_origin=None if forward is None else forward[1],
            backward_origin=None if backward is None else backward[1],
            origin_step=None if origin is None else origin[0],
        )

    def _losses(self, losses: list[tuple[int, torch.Tensor | float]]) -> torch.Tensor:
        padded = torch.full((self._most_losses,), _NOTHING, dtype=torch.float64, device=self._device)
        values = [value for _, value in losses]
        if values and all(isinstance(value, torch.Tensor) for value in values):
            padded[: len(values)] = torch.stack([torch.as_tensor(value) for value in values]).to(padded)
        else:
            for index, value in enumerate(values):
                padded[index] = torch.as_tensor(value)
        return padded

    def _latent(self, latent: tuple[str, Any] | None) -> torch.Tensor:
        """The negative deviation: the smallest of all ranks' counts."""
        if latent is None:
            return torch.full((1,), _NOTHING, dtype=torch.float64, device=self._device)
        name, value = latent
        number = torch.as_tensor(value).detach().reshape(-1)[:1].to(self._device, torch.float64)
        return -torch.nan_to_num(number.clamp_min(0) ** LATENT_METRICS[name.rpartition("/")[2]], nan=math.inf)

    def _origins(self, view: RankView) -> torch.Tensor:
        """The first step and module of each direction as one negative number: the first of all ranks' counts."""
        if not view.origins:
            return torch.full((2,), _NOTHING, dtype=torch.float64, device=self._device)
        after = torch.tensor([[step - view.since] for step, _ in view.origins], dtype=torch.float64)
        indices = torch.stack([each for _, each in view.origins])
        return -(after.to(self._device) * self._places + indices + 1).amin(dim=0)

    def _origin(self, value: float, since: int) -> tuple[int, str] | None:
        if value == _NOTHING:
            return None
        after, index = divmod(int(-value), self._places)
        return since + after, self._trace.name_of(index - 1)

    def _summed(self, fingerprint: list[torch.Tensor] | None) -> torch.Tensor | None:
        if fingerprint is None:
            return None
        return torch.stack([part.to(self._device, torch.float64) for part in fingerprint]).sum()

    def _slot(self, value: torch.Tensor | float | None) -> torch.Tensor:
        """One place for each rank, of which this rank fills its own."""
        slots = torch.full((len(self._hosts),), _NOTHING, dtype=torch.float64, device=self._device)
        if value is not None:
            slots[self._rank] = torch.nan_to_num(torch.as_tensor(value).to(slots), nan=_NOTHING, posinf=_NOTHING)
        return slots


def loss_of(outputs: Any) -> Any:
    """The loss among what a step gave: its ``loss``, else what has that word in its name; None where there is none."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if not isinstance(outputs, Mapping):
        return None
    for name in ("loss", "train/loss", "train_loss"):
        if name in outputs:
            return outputs[name]
    return next((value for name, value in outputs.items() if isinstance(name, str) and "loss" in name.lower()), None)


def _contained(method: _Method) -> _Method:
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

    Args:
        optimizers: Those of the run; others than torch's are left out.
        named_parameters: The parameters that may be in them.
        failures: Takes what goes wrong within a step.
    """

    def __init__(
        self,
        optimizers: Iterable[Any],
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        failures: list[Exception],
    ) -> None:
        self.failures = failures
        self.optimizers = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
        held = {id(p) for optimizer in self.optimizers for p in _parameters(optimizer)}
        named = {id(p): name for name, p in named_parameters if p.requires_grad and id(p) in held}
        self.names = list(named.values())
        self._index = {key: index for index, key in enumerate(named)}
        self._handles: list[RemovableHandle] = []
        self._norms: list[tuple[list[int], torch.Tensor]] = []
        self._is_seen = False
        self._before: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._updated: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self.highest_rate: float | None = None
        """Of the last updates that were watched."""

    def attach(self) -> None:
        """Watch updates from now on, and forget those that were watched before."""
        self._norms.clear()
        self._updated.clear()
        self._weights.clear()
        self._before.clear()
        self._is_seen, self.highest_rate = False, None
        if not self._handles:
            for optimizer in with_step_hooks(self.optimizers):
                self._handles.append(optimizer.register_step_pre_hook(self._before_update))
                self._handles.append(optimizer.register_step_post_hook(self._after_update))

    def detach(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before.clear()

    def summary(self, device: torch.device) -> torch.Tensor:
        """What was seen, on `device`, so that the largest of all ranks' is that of all.

        For each of `names` the gradient's norm (-1 without any update, ``inf`` where not finite), then the ratio of
        update and weights (-1 where unknown), whether weights were not finite, and the highest learning rate (-1).
        """
        norms = torch.full((len(self.names),), 0.0 if self._is_seen else NOT_SEEN, dtype=torch.float64, device=device)
        for indices, values in self._norms:
            finite = torch.nan_to_num(values.to(device, torch.float64), nan=float("inf"))
            norms[torch.tensor(indices, device=device)] = finite
        rest = torch.full((3,), NOT_SEEN, dtype=torch.float64, device=device)
        if self._updated and self._weights:
            updated = _norm_of(self._updated, device)
            weights = _norm_of(self._weights, device)
            rest[0] = torch.where(
                torch.isfinite(updated) & torch.isfinite(weights) & (weights > 0), updated / weights, NOT_SEEN
            )
            rest[1] = (~torch.isfinite(weights)).double()
        if self.highest_rate is not None:
            rest[2] = self.highest_rate
        return torch.cat([norms, rest])

    @_contained
    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_seen = True
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.highest_rate = max([*rates, *([] if self.highest_rate is None else [self.highest_rate])], default=None)
        held = [p for p in _parameters(optimizer) if id(p) in self._index and p.grad is not None]
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for parameter in held:
            gradient = _local(parameter.grad)
            groups[gradient.device, gradient.dtype].append((self._index[id(parameter)], gradient))
        for (_, dtype), members in groups.items():
            norms = _norms([gradient for _, gradient in members], dtype)
            self._norms.append(([index for index, _ in members], norms))
        samples = [_sample(parameter) for parameter in held[:: -(-len(held) // MOST_COMPARED) or 1]]
        copies = [sample.clone() for sample in samples]
        self._before[id(optimizer)] = (samples, copies)

    @_contained
    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        samples, copies = self._before.pop(id(optimizer), ([], []))
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for sample, copy in zip(samples, copies, strict=True):
            if sample.numel():
                groups[sample.device, sample.dtype].append((sample, copy))
        for (_, dtype), members in groups.items():
            before = [copy for _, copy in members]
            change = torch._foreach_sub([sample for sample, _ in members], before)
            self._updated.append(_norms(list(change), dtype))
            self._weights.append(_norms(before, dtype))


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


def _norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The L2 norm of each; of halves in fp32, where a norm of fp16 would overflow."""
    if dtype in _HALVES:
        return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return torch.stack(list(torch._foreach_norm(list(tensors))))


def _norm_of(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of tensors whose norms are given."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat([each.to(device, torch.float64) for each in norms]))
    return norm


class ModuleTrace:
    """Watches the outputs of all modules without children, and the gradients that come back to these outputs.

    Each is one reduction on its device, which nothing waits for. The gradient at an output comes out of the backward
    of what follows: where it is the first that is not finite, the module that was passed just before is named.

    Args:
        module: Whose modules are watched, by their names in it.
        failures: Takes what goes wrong within a step.
    """

    def __init__(self, module: torch.nn.Module, failures: list[Exception]) -> None:
        self.failures = failures
        self.names = [name for name, part in module.named_modules() if name and not any(part.children())]
        self._modules = dict(module.named_modules())
        self._handles: list[RemovableHandle] = []
        self._forward: list[tuple[int, torch.Tensor]] = []
        self._backward: list[tuple[int, torch.Tensor]] = []

    def attach(self) -> None:
        """Watch from now on."""
        if not self._handles:
            for index, name in enumerate(self.names):
                hook = _ForwardHook(index, self._forward, self._backward, self.failures)
                self._handles.append(self._modules[name].register_forward_hook(hook))

    def detach(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def origins(self, device: torch.device) -> torch.Tensor:
        """Two numbers for what was seen since the last call, on `device`; nothing waits for it.

        The index in `names` of the first module whose output, and of that whose backward, was not finite; -1 for a
        backward before that of any module; ``inf`` where all was finite.
        """
        forward, backward = _first_bad(self._forward, device), _first_bad(self._backward, device, before=True)
        self._forward.clear()
        self._backward.clear()
        return torch.stack([forward, backward])

    def name_of(self, index: int) -> str:
        """The module that an index of `origins` stands for."""
        return "the loss" if index < 0 else self.names[index]


class _ForwardHook:
    def __init__(
        self,
        index: int,
        forward: list[tuple[int, torch.Tensor]],
        backward: list[tuple[int, torch.Tensor]],
        failures: list[Exception],
    ) -> None:
        self._index, self._forward, self._backward, self.failures = index, forward, backward, failures

    @_contained
    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation, or the first pass of a checkpointed one
            return
        for tensor in _floating(output):
            self._forward.append((self._index, _largest(tensor)))
            if tensor.requires_grad:
                tensor.register_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    @_contained
    def _note_gradient(self, gradient: torch.Tensor) -> None:
        self._backward.append((self._index, _largest(gradient)))


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


def _first_bad(seen: list[tuple[int, torch.Tensor]], device: torch.device, *, before: bool = False) -> torch.Tensor:
    """Index of the first that is not finite, or of the one `before` it."""
    if not seen:
        return torch.tensor(float("inf"), dtype=torch.float64, device=device)
    bad = ~torch.isfinite(torch.stack([value.to(device, non_blocking=True) for _, value in seen]))
    indices = [index for index, _ in seen]
    named = torch.tensor([-1, *indices[:-1]] if before else indices, dtype=torch.float64, device=device)
    return torch.where(bad.any(), named[bad.to(torch.int8).argmax()], float("inf"))


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

    @_contained
    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._began = self._now()

    @_contained
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

    Each is on the device of its part of the batch, because moving it would wait for that device.

    Tensors and arrays count with up to 1024 elements, evenly spread; of an Arrow batch or a sequence, the first and the
    last row do.

    Returns:
        None for a batch that does not tell what is in it, or is a plain value or empty: a trainer that makes its own
        data may get the same in each step.
    """
    if isinstance(batch, _PLAIN) or (isinstance(batch, Mapping | list | tuple) and not batch):
        return None
    parts = [_of_part(part) for part in _parts(batch)]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return [part * (index + 1) for index, part in enumerate(known)]


def _parts(batch: Any) -> list[Any]:
    if hasattr(batch, "num_rows") and hasattr(batch, "to_pylist") and batch.num_rows:
        return [batch.slice(row, 1).to_pylist() for row in {0, batch.num_rows - 1}]
    if isinstance(batch, Mapping):
        return list(batch.values())[:ENTRIES]
    if isinstance(batch, list | tuple) and any(hasattr(part, "shape") for part in batch):
        return list(batch)[:ENTRIES]
    return [batch]


def _of_part(part: Any) -> torch.Tensor | None:
    if isinstance(part, torch.Tensor):
        return _of_tensor(part)
    if hasattr(part, "__array_interface__") and getattr(part.dtype, "kind", "O") in "biuf":
        sample = part.reshape(-1)[:: max(1, part.size // ELEMENTS)]
        return _of_tensor(torch.as_tensor(sample.astype("float64")))
    text = _text(part)
    if text is None:
        return None
    # Fewer bits than a double has, so that sums of them stay exact.
    return torch.tensor(float(xxhash.xxh3_64_intdigest(text) >> 16), dtype=torch.float64)


def _of_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.layout != torch.strided or tensor.is_complex() or not tensor.numel():
        return None
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // ELEMENTS)].double()
    return (sample * torch.arange(1, len(sample) + 1, dtype=torch.float64, device=sample.device)).sum()


def _text(value: Any, depth: int = 4) -> bytes | None:
    """What a value of plain types says; of a sequence its ends. None for anything else."""
    if isinstance(value, _PLAIN):
        return repr(value if not isinstance(value, str | bytes) else value[:ELEMENTS]).encode("utf-8", "replace")
    if depth and isinstance(value, Mapping):
        value = [entry for item in list(value.items())[:ENTRIES] for entry in item]
    if depth and isinstance(value, list | tuple):
        ends = value if len(value) <= 2 * ENTRIES else [*value[:ENTRIES], *value[-ENTRIES:]]
        texts = [_text(entry, depth - 1) for entry in ends]
        return None if None in texts else b"\n".join([b"%d" % len(value), *(text for text in texts if text)])
    return None
