"""Services of a training on the device: telemetry, diagnosis, recovery, replay, rollouts, and their resumes."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from device.runs import Regression, fit
from genlight.adapter import ContractModule, ReplayBuffer, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Diagnosis, Heartbeat, Hook, Recover
from genlight.callbacks.checkpoint import capture, newest_valid
from genlight.reporters.telemetry import read_events
from support.device.training import one_device
from support.recovered import Batches, Fragile, digest_of, fit_fragile, rungs_in
from support.trainers import quiet_trainer


class RecordsMemory(Hook):
    """Records the peak memory of the device after each step."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks.append(torch.accelerator.max_memory_allocated())


def check_a_heartbeat_has_the_memory_of_the_device(folder):
    memory = RecordsMemory()
    fit(Regression(), "one", steps=10, callbacks=[Heartbeat(5, path=folder / "metrics.jsonl"), memory])
    figures = [each["artifacts"] for each in read_events(folder / "metrics.jsonl") if each["event"] == "heartbeat"]
    assert len(figures) == 2
    for figure in figures:
        assert 0 < figure["memory_bytes"] <= figure["peak_memory_bytes"]
        assert memory.peaks[0] <= figure["peak_memory_bytes"] <= memory.peaks[-1]


class Poisoned(Regression):
    """Sets one weight to nan in the seventh step."""

    steps = 0

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.steps += 1
        if self.steps == 7:
            state["model"][3].weight.data[0, 0] = float("nan")
        return super().train_step(batch, state, ctx)


def check_a_diagnosis_names_the_module_and_the_step(folder):
    path = folder / "metrics.jsonl"
    fit(Poisoned(), "one", steps=12, callbacks=[Diagnosis(5, path=path, trace_modules=True)])
    found = next(event for event in read_events(path) if event["artifacts"].get("fault") == "nonfinite_loss")
    assert (found["step"], found["artifacts"]["first_step"]) == (10, 7)
    assert found["artifacts"]["origin"].endswith("3")


def check_memory_of_snapshots_is_pageable_if_too_much_would_be_pinned(folder):
    before, capture.LARGEST_PINNED = capture.LARGEST_PINNED, 0
    pinned = torch.sim.pinned_bytes()
    try:
        with _logged() as lines:
            fit(Regression(), "one", steps=5, callbacks=[Checkpoint(folder, every_n_steps=4, save_final=False)])
    finally:
        capture.LARGEST_PINNED = before
    assert ["use pageable memory" in line for line in lines] == [True], lines
    assert torch.sim.pinned_bytes() == pinned
    assert newest_valid(folder)[0].step == 4


def check_memory_of_snapshots_is_pinned_once_in_a_run_and_logged(folder):
    with _logged() as lines:
        fit(Regression(), "one", steps=14, callbacks=[Checkpoint(folder, every_n_steps=4, save_final=False)])
    assert ["of host memory are pinned for snapshots of checkpoints" in line for line in lines] == [True], lines
    assert newest_valid(folder)[0].step == 12


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the log messages about the memory of snapshots within the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(capture.__name__)
    before = log.level
    logging.disable(logging.NOTSET)
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        logging.disable(logging.CRITICAL)


class FragileOnDevice(Fragile):
    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw.to(ctx.device)


def _recover(folder: Path, rungs: list[str], faults: set[int], trainer: Any, **more: Any) -> Any:
    """Return the results of a run with faults, including random states of the device."""
    module = fit_fragile(folder, Recover(rungs, good_steps=6), Batches(faults), trainer=trainer, **more)
    return digest_of(module), [state.tolist() for state in torch.sim.get_rng_state_all()]


def check_each_rung_is_taken_in_the_same_step_as_on_the_host(folder):
    for rung in ("skip", "lower_lr", "roll_back"):
        _recover(folder / rung / "host", [rung], {8, 12}, Fragile(), steps=25)
        _recover(folder / rung / "device", [rung], {8, 12}, FragileOnDevice(), steps=25, **one_device())
        assert rungs_in(folder / rung / "host") == rungs_in(folder / rung / "device")
        assert len(rungs_in(folder / rung / "device")) >= 2


def check_a_resumed_recovery_is_bit_equal(folder):
    rungs, faults = ["skip", "lower_lr", "roll_back"], {8, 10, 12}
    expected = _recover(folder / "a", rungs, faults, FragileOnDevice(), steps=25, **one_device())
    _recover(folder / "b", rungs, faults, FragileOnDevice(), steps=12, **one_device())
    more = {"steps": 25, "resumes": True, **one_device()}
    assert _recover(folder / "b", rungs, faults, FragileOnDevice(), **more) == expected


class Acts(Regression):
    """Writes rows from the device into a replay buffer and learns from samples of it."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        row = {"x": torch.zeros(6), "y": torch.zeros(1)}
        return {**super().configure(ctx), "replay": ReplayBuffer(64, row)}

    def rollout(self, state: Any, ctx: Any) -> Any:
        x = torch.randn(8, 6, device=ctx.device)
        with torch.no_grad():
            y = 0.9 * state["model"](x) + 0.1
        state["replay"].extend({"x": x, "y": y})
        return [state["replay"].sample(4) for _ in range(2)], {"reward": [y.mean().item()]}

    def rollout_state(self, state: Any) -> dict[str, Any]:
        return {"seen": torch.ones(2, device="sim")}

    def load_rollout_state(self, state: Any, payload: Any, ctx: Any) -> None:
        assert payload["seen"].device == torch.device(ctx.device)

    def save_checkpoint(self, *, state: Any, step: int, output_dir: Any, final: bool, ctx: Any) -> None:
        state["replay"].save(Path(output_dir) / "replay")

    def load_checkpoint(self, *, state: Any, checkpoint_dir: Any, payload: Any, ctx: Any) -> None:
        state["replay"].load(Path(checkpoint_dir) / "replay")


def _act(folder: Path, steps: int) -> Any:
    newest, _ = newest_valid(folder) if folder.exists() else (None, [])
    trainer = quiet_trainer(Checkpoint(folder, every_n_steps=4, save_final=False), max_steps=steps, **one_device())
    module = ContractModule(Acts(), TrainingJobSpec("acts", steps, metric_every=0))
    trainer.fit(module, ckpt_path=None if newest is None else newest.path)
    state = module.contract_state
    return [*state["model"].state_dict().values(), *state["replay"].sample(16).values(), torch.sim.get_rng_state()]


def check_rollouts_into_a_replay_buffer_resume_bit_equal(folder):
    expected = _act(folder / "a", 12)
    _act(folder / "b", 9)
    resumed = _act(folder / "b", 12)
    assert all(torch.equal(one, other) for one, other in zip(expected, resumed, strict=True))


def check_a_row_from_the_device_is_sampled_unchanged():
    buffer = ReplayBuffer(4, {"x": torch.zeros(3)})
    buffer.extend({"x": torch.arange(12.0, device="sim").view(4, 3)})
    drawn = buffer.sample(4)
    assert torch.equal(drawn["x"], drawn["index"].float()[:, None] * 3 + torch.arange(3.0))
    with pytest.raises(ValueError, match="x"):
        buffer.extend({"x": torch.zeros(2, 5, device="sim")})
