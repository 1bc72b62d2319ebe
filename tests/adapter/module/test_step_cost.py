"""The cost of a step, in counts that do not depend on the machine: calls, memory, checks of files."""

import gc
import os
import sys
import threading
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, LogMetrics, StopRequests, WriteSamples
from genlight.reporters import EventLogger
from support.trainer_class import Stateless
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="speed")

FAR = 10**9
BARE = 3
"""Calls that hosting does not add: the two hooks of the trainer, and the counting itself."""


class Idle(Stateless):
    """A trainer whose steps do nothing, except for an action that a test chooses for one of them."""

    def __init__(self, at_step: Callable[[int], None] | None = None) -> None:
        self.at_step = at_step
        self.step = 0
        self.result = StepResult(metrics={"loss": 1.0})

    def configure(self, ctx: Any) -> dict[str, Any]:
        layer = torch.nn.Linear(1, 1)
        return {"model": layer, "optimizer": torch.optim.SGD(layer.parameters(), lr=0.1)}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.step += 1
        if self.at_step is not None:
            self.at_step(self.step)
        return self.result


class Numbers:
    """One raw batch for each step of a test."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def standard_set(folder: Path, *, metric_every: int = 10) -> list[pl.Callback]:
    """The callbacks of a job, with stops, metrics and two cadences that are never reached."""
    return [
        StopRequests(cancel_file=folder / "cancel", max_runtime_s=100_000),
        LogMetrics(metric_every),
        WriteSamples(folder / "samples", FAR),
        Checkpoint(folder / "checkpoints", every_n_steps=FAR, save_final=False),
    ]


class Updating(Idle):
    """A trainer whose step is an update of one layer."""

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["optimizer"].zero_grad()
        state["model"](torch.ones(1, 1)).sum().backward()
        state["optimizer"].step()
        return super().train_step(batch, state, ctx)


def fit(
    folder: Path,
    plugin: Idle,
    steps: int,
    callbacks: list[pl.Callback],
    *,
    events: bool = False,
    precision: Literal["32-true", "bf16-mixed"] = "32-true",
) -> None:
    """Train on one CPU with only `callbacks`."""
    trainer = quiet_trainer(
        *callbacks,
        precision=precision,
        max_steps=steps,
        logger=EventLogger(folder / "events.jsonl", run_id="cost") if events else False,
        default_root_dir=folder,
    )
    trainer.fit(ContractModule(plugin, TrainingJobSpec("cost", steps)), Numbers(steps))


def counted(
    folder: Path, callbacks: list[pl.Callback], what: Callable[[str, Any], bool], *, steps: int = 100, **settings: Any
) -> int:
    """Number of profiler events `what` of the training thread, in `steps` steps after the first 100."""
    first, last = 101, 101 + steps
    seen = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        seen += what(event, argument)

    at_step = settings.pop("at_step", None)
    trainer_class = settings.pop("trainer_class", Idle)

    def switch(step: int) -> None:
        if at_step is not None:
            at_step(step)
        if step == first - 1:
            _await_checkpoint_thread()
        elif step == first:
            sys.setprofile(count)
        elif step == last:
            sys.setprofile(None)

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # finalizers of objects from earlier tests are calls, too
    try:
        fit(folder, trainer_class(switch), last, callbacks, **settings)
    finally:
        sys.setprofile(before)
        gc.enable()
    return seen


def _await_checkpoint_thread() -> None:
    """After the first step it prepares memory for snapshots, and each step checks whether that has finished."""
    for thread in threading.enumerate():
        if thread.name == "genlight-checkpoint":
            thread.join()


def calls_per_step(folder: Path, callbacks: list[pl.Callback], **settings: Any) -> float:
    """Number of calls of Python functions in a step; `BARE` of them are not made by genlight."""
    return counted(folder, callbacks, lambda event, _: event == "call", **settings) / 100


def calls_of_standard_set(folder: Path, **settings: Any) -> float:
    """The smallest number of three fits: on a busy machine the clock triggers hooks more often in these few steps."""
    folders = [folder / str(fit) for fit in range(3)]
    return min(calls_per_step(each, standard_set(each, **settings), events=True) for each in folders)


def test_a_step_without_callbacks_makes_few_calls(tmp_path: Path) -> None:
    """Hosting a trainer class takes two calls in addition to its own two; Lightning's own loop takes some 300."""
    assert calls_per_step(tmp_path, [LogMetrics(0)]) <= BARE + 2


def test_a_step_with_everything_that_a_job_gets_makes_few_calls(tmp_path: Path) -> None:
    """Stop checks, metrics, events and the witness every 10 steps; a callback that waits is not called."""
    assert calls_of_standard_set(tmp_path) <= BARE + 14


def test_two_metrics_in_every_step_make_few_calls(tmp_path: Path) -> None:
    """They are read, published and logged, and their lines are written by one system call."""
    assert calls_of_standard_set(tmp_path, metric_every=1) <= BARE + 36


def test_mixed_precision_takes_few_calls(tmp_path: Path) -> None:
    """Autocast is entered once, by an existing object; backward and update run outside of it."""
    plain = calls_per_step(tmp_path / "plain", [LogMetrics(0)], trainer_class=Updating)
    mixed = calls_per_step(tmp_path / "mixed", [LogMetrics(0)], trainer_class=Updating, precision="bf16-mixed")
    assert mixed - plain <= 30


@pytest.mark.parametrize("metric_every", [0, 10])
def test_memory_does_not_grow_with_steps(tmp_path: Path, metric_every: int) -> None:
    sizes: dict[int, int] = {}

    def measure(step: int) -> None:
        if step == 900:
            tracemalloc.start()
        if step in (1_000, 21_000):
            sizes[step] = tracemalloc.get_traced_memory()[0]

    try:
        fit(tmp_path, Idle(measure), 21_000, standard_set(tmp_path, metric_every=metric_every), events=True)
    finally:
        tracemalloc.stop()
    assert sizes[21_000] - sizes[1_000] < 160_000, "a step keeps 8 bytes or more"  # 256 calls that wait take 110,000


@pytest.mark.parametrize("metric_every", [0, 10])
def test_no_container_grows_with_steps(tmp_path: Path, metric_every: int) -> None:
    held: dict[int, int] = {}

    def count(step: int) -> None:
        if step in (2_000, 20_000):
            gc.collect()
            held[step] = sum(1 + _length(item) for item in gc.get_objects())

    fit(tmp_path, Idle(count), 20_000, standard_set(tmp_path, metric_every=metric_every), events=True)
    # No absolute difference: threads of earlier tests may release objects meanwhile.
    assert held[20_000] - held[2_000] < 180 + 3 * 256, "something is kept in every twentieth step or more often"


def _length(item: Any) -> int:
    return len(item) if type(item) in (list, dict, set, deque, OrderedDict) else 0


def test_files_are_checked_at_most_every_50_ms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock, not the step, triggers the check of the cancel file: 1,000 steps in one second make 20 checks."""
    now = 1000.0

    callbacks = standard_set(tmp_path, metric_every=0)

    def pass_a_millisecond(_: int) -> None:
        nonlocal now
        now += 0.001
        vars(callbacks[0])["next_due_step"] = 0  # called after each step

    # Replace the name only in that module: other threads of the process read the clock, too.
    monkeypatch.setattr("genlight.callbacks.stop.stop_requests.time", SimpleNamespace(monotonic=lambda: now))
    touching = (open, os.open, os.stat, os.lstat, os.access, os.listdir, os.scandir)
    looks = counted(
        tmp_path,
        callbacks,
        lambda event, function: event == "c_call" and function in touching,
        steps=1000,
        at_step=pass_a_millisecond,
    )
    assert 18 <= looks <= 21


def test_metrics_are_read_only_at_the_cadence(tmp_path: Path) -> None:
    """A tensor of the trainer becomes a number (and waits for its device) only in every tenth step."""
    reads = 0

    class Loss:
        def __float__(self) -> float:
            nonlocal reads
            reads += 1
            return 0.5

    plugin = Idle()
    plugin.result = StepResult(metrics={"loss": Loss()})
    fit(tmp_path, plugin, 100, standard_set(tmp_path))
    assert reads == 10


def test_metrics_read_in_a_step_are_those_of_that_step(tmp_path: Path) -> None:
    """They are made on access, from the last step, and stay after the fit."""
    plugin = Idle()
    seen: list[float] = []

    def change(step: int) -> None:
        plugin.result = StepResult(metrics={"loss": float(step)})

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.append(float(trainer.callback_metrics["train/loss"]))

    plugin.at_step = change
    looks = Looks()
    trainer = quiet_trainer(looks, LogMetrics(0), max_steps=4, default_root_dir=tmp_path)
    trainer.fit(ContractModule(plugin, TrainingJobSpec("cost", 4)), Numbers(4))
    assert seen == [1.0, 2.0, 3.0, 4.0]
    assert float(trainer.callback_metrics["train/loss"]) == 4.0
