"""One device: a small transformer under bf16-mixed, compared with the bare loop on the same device.

A device executes its work while the host continues. The benchmark shows that no step waits for the device between
metric cadences, and that the time the host adds is hidden behind the work of the device. A trace of ten steps, for
https://ui.perfetto.dev, shows both.

The same code runs on a CPU, so that its logic can be tested without a GPU. There it counts the places that would wait,
because Python reads the value of a tensor.
"""

from __future__ import annotations

import collections
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.reporters import EventLogger

from .alternating import WARM_BLOCKS, Alternation, spread
from .hosts import FAR, fit, standard_set
from .waits import Wait, watching_for_waits

METRIC_EVERY = 10
TRACED_STEPS = 10
WAITING_CALLS = {
    "cuda": {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"},
    "cpu": {"aten::_local_scalar_dense"},
}
LITTLE = {"layers": 1, "width": 16, "length": 8, "rows": 2}
"""Size of the transformer without a GPU."""
PLACES = 20
"""Maximum number of waiting places in the report."""


class Transformer:
    """The trainer class: a few encoder layers, AdamW, clipping."""

    def __init__(self, *, layers: int = 4, width: int = 256, length: int = 128, rows: int = 16) -> None:
        self.layers, self.width, self.length, self.rows = layers, width, length, rows

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        return self.configure_on(ctx.device)

    def configure_on(self, device: Any) -> dict[str, Any]:
        """Make model, optimizer and one batch in host memory, pinned if there is a device."""
        layer = torch.nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False).to(device)
        rows = torch.randn(self.rows, self.length, self.width)
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4),
            "rows": [rows.pin_memory() if torch.device(device).type == "cuda" else rows],
            "device": device,
        }

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return state["rows"][0].to(state["device"], non_blocking=True)

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["optimizer"].zero_grad()
        loss = torch.nn.functional.mse_loss(state["model"](batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Counted:
    """Batches that count the current step."""

    def __init__(self) -> None:
        self.step = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.step += 1
            with record_function(f"step {self.step}"):
                yield self.step


def measure(device: str, *, steps: int, block: int, trace: Path | None = None) -> dict[str, Any]:
    """Measure waits, times compared with the bare loop, and the calls of ten steps to the device.

    Args:
        device: ``cuda``, or ``cpu`` to try the logic.
        steps: Steps that are timed.
        block: Steps from one turn to the next.
        trace: Path of the trace.
    """
    on_cuda = torch.device(device).type == "cuda"
    size = {} if on_cuda else LITTLE
    return {
        "name": torch.cuda.get_device_name() if on_cuda else "cpu",
        "waits": waits(Transformer(**size), device, 10 * METRIC_EVERY),
        "times": times(device, size, steps=steps, block=block),
        "traced": traced(Transformer(**size), device, trace),
    }


def waits(trainer: Transformer, device: str, steps: int) -> dict[str, Any]:
    """Return the places at which a run waits for its device, in steps of the metric cadence and in others.

    The first step does not count, because memory is allocated and kernels are chosen in it. Nor does an additional last
    step, after which Lightning moves everything to the host.
    """
    batches = Counted()
    with watching_for_waits(device, lambda: batches.step) as seen:
        _fit(trainer, batches, device, steps + 1)
    in_steps = [wait for wait in seen if 1 < wait.step <= steps]
    return {
        "steps": steps,
        "at_cadence": _by_place([wait for wait in in_steps if wait.step % METRIC_EVERY == 0]),
        "elsewhere": _by_place([wait for wait in in_steps if wait.step % METRIC_EVERY]),
    }


def _by_place(seen: list[Wait]) -> dict[str, int]:
    counts = collections.Counter(wait.place for wait in seen)
    return dict(counts.most_common(PLACES))


class Meetings:
    """Waits for the device when a block begins and ends; records the times of host and device."""

    def __init__(self, device: str) -> None:
        self._on_cuda = torch.device(device).type == "cuda"
        self._notes: list[tuple[float, float, Any, Any]] = []

    def __call__(self) -> None:
        came_s, came = time.perf_counter(), self._event()
        if self._on_cuda:
            torch.cuda.synchronize()
        self._notes.append((came_s, time.perf_counter(), came, self._event()))

    def _event(self) -> Any:
        if not self._on_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def blocks(self) -> list[tuple[float, float]]:
        """Return for each block, alternately of floor and host, the seconds of the host and of the device."""
        pairs = zip(self._notes[::2], self._notes[1::2], strict=False)
        return [(end[0] - begin[1], self._device_s(begin, end)) for begin, end in pairs]

    def _device_s(self, begin: tuple[float, float, Any, Any], end: tuple[float, float, Any, Any]) -> float:
        if not self._on_cuda:
            return end[0] - begin[1]
        elapsed_ms: float = begin[3].elapsed_time(end[2])
        return elapsed_ms / 1e3


def times(device: str, size: dict[str, int], *, steps: int, block: int) -> dict[str, Any]:
    """Return the time of host and device per step, for a job and a bare loop with the same cadence of metrics."""
    meetings = Meetings(device)
    batches = Alternation(
        _floor(Transformer(**size), device), blocks=max(2, steps // block), block=block, meet=meetings, batch=0
    )
    _fit(Transformer(**size), batches, device, batches.steps)
    counted = meetings.blocks()[2 * WARM_BLOCKS :]
    floors, hosts = counted[::2], counted[1::2]
    us = 1e6 / block
    return {
        "floor_host_us": spread([host * us for host, _ in floors]),
        "floor_device_us": spread([device * us for _, device in floors]),
        "added_host_us": spread([(own[0] - floor[0]) * us for floor, own in zip(floors, hosts, strict=True)]),
        "device_ratio": spread([own[1] / floor[1] for floor, own in zip(floors, hosts, strict=True)]),
    }


def _floor(trainer: Transformer, device: str) -> Callable[[], None]:
    state = trainer.configure_on(device)
    steps = itertools.count(1)

    def step() -> None:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            result = trainer.train_step(trainer.prepare_batch(0, state, None), state, None)
        if next(steps) % METRIC_EVERY == 0:
            result.metrics["loss"].item()

    return step


def traced(trainer: Transformer, device: str, path: Path | None) -> dict[str, int]:
    """Count the waiting calls in ten steps between two cadences, and write their trace to `path`."""
    batches = Counted()
    kind = torch.device(device).type
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (kind == "cuda")
    with profile(activities=activities, schedule=schedule(wait=5, warmup=5, active=TRACED_STEPS, repeat=1)) as profiler:
        _fit(trainer, batches, device, 12 + TRACED_STEPS, every=FAR, callbacks=[_StepOf(profiler)])
    if path is not None:
        profiler.export_chrome_trace(str(path))
    return _waiting_calls(profiler.events() or [], WAITING_CALLS[kind])


def _waiting_calls(events: Iterable[Any], names: Collection[str]) -> dict[str, int]:
    """Return the calls within the steps by name, without optimizers: their step counts are in host memory."""
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    steps = [event.time_range for event in on_host if event.name.startswith("step ")]
    updates = [event.time_range for event in on_host if event.name.startswith("Optimizer.step#")]
    begin, end = min(span.start for span in steps), max(span.end for span in steps)
    calls = [event for event in on_host if event.name in names and begin <= event.time_range.start <= end]
    of_updates = [
        call
        for call in calls
        if call.name.startswith("aten::") and any(u.start <= call.time_range.start <= u.end for u in updates)
    ]
    return dict(collections.Counter(call.name for call in calls if call not in of_updates))


class _StepOf(pl.Callback):
    def __init__(self, profiler: profile) -> None:
        self._profiler = profiler

    def on_train_batch_end(self, *_: Any) -> None:
        self._profiler.step()


def _fit(trainer: Transformer, batches: Any, device: str, steps: int, **more: Any) -> None:
    """Train with the callbacks of a job, under bf16-mixed."""
    module = ContractModule(trainer, TrainingJobSpec(run_id="device", max_steps=steps))
    on_cuda = torch.device(device).type == "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        callbacks = standard_set(folder, every=more.get("every", METRIC_EVERY)) + more.get("callbacks", [])
        fit(
            module,
            batches,
            folder,
            steps=steps,
            accelerator="gpu" if on_cuda else "cpu",
            precision="bf16-mixed",
            callbacks=callbacks,
            logger=EventLogger(folder / "events.jsonl", run_id="device"),
        )


def show(found: dict[str, Any]) -> None:
    """Print the results."""
    waits, us = found["waits"], {name: line["median"] for name, line in found["times"].items()}
    floor = f"host {us['floor_host_us']:.0f} us a step, device {us['floor_device_us']:.0f} us"
    added = f"{us['added_host_us']:.0f} us of host; the device takes {us['device_ratio']:.4f} times as long"
    for line in (
        f"\n{found['name']}, small transformer, bf16-mixed, metrics every {METRIC_EVERY} steps",
        f"  bare loop: {floor}",
        f"  a job adds {added}",
        f"  waits in steps of the cadence: {waits['at_cadence'] or 'none'}",
        f"  waits in other steps: {waits['elsewhere'] or 'none'}",
        f"  calls that wait, in {TRACED_STEPS} traced steps between cadences: {found['traced'] or 'none'}",
    ):
        sys.stdout.write(line + "\n")
