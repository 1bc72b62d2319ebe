"""Hooks that a trainer class defines: the events they receive, their order among others, and exact resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genlight.adapter import ContractError, StepResult
from genlight.adapter.check.plain_loop import plain_steps
from genlight.adapter.contract.types import RunState, StepContext, TrainingJobSpec
from genlight.callbacks import Checkpoint, TrainerHook, TrainerHookAdapter
from genlight.callbacks.trainer_hooks import TRAINER_HOOK_EVENTS
from support.messages import refusal

from .test_phases import Placed, fit


class Loss:
    """A part of the objective whose weight changes in another way with each kind of event; it does not use genlight."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.heard: list[tuple[Any, ...]] = []

    def _hear(self, event: str, state: Any, factor: float) -> None:
        self.heard.append((event, state.epoch, state.update_epoch, state.mb_idx))
        self.weight *= factor

    def on_rollout_start(self, state: Any) -> None:
        self._hear("on_rollout_start", state, 1.01)

    def on_rollout_end(self, state: Any) -> None:
        self._hear("on_rollout_end", state, 0.98)

    def on_mb_end(self, state: Any) -> None:
        self._hear("on_mb_end", state, 1.05)

    def on_train_phase_end(self, state: Any) -> None:
        self._hear("on_train_phase_end", state, 0.9)

    def on_epoch_end(self, state: Any) -> None:
        self._hear("on_epoch_end", state, 1.03)


class WithLoss(Placed):
    """A trainer whose loss is an object."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        return {**super().configure(ctx), "loss": Loss()}

    def trainer_hooks(self, state: Any, ctx: Any) -> list[Any]:
        return [state["loss"]]

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        loss = state["loss"].weight * (self.model(batch["x"]) - batch["noise"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        state["losses"].append(loss.item())
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"weight": state["loss"].weight}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["loss"].weight = payload["weight"]


class Notes(TrainerHook):
    """Records the events that a trainer hook of the job receives."""

    def __init__(self, heard: list[Any]) -> None:
        super().__init__()
        self.heard = heard


for _event in TRAINER_HOOK_EVENTS:
    setattr(Notes, _event, lambda self, state, event=_event: self.heard.append((f"{event} of the job",)))


def test_they_get_every_event_before_the_hooks_of_the_job(tmp_path: Path) -> None:
    plugin = WithLoss()
    configured = plugin.configure

    def configure(ctx: Any) -> dict[str, Any]:
        state = configured(ctx)
        state["loss"].heard = heard
        return state

    heard: list[tuple[Any, ...]] = []
    plugin.configure = configure  # type: ignore[method-assign]
    fit(tmp_path, plugin, TrainerHookAdapter(Notes(heard)), steps=6)
    names = [entry[0] for entry in heard if entry[0] != "on_new_training_run of the job"]
    phase = ["on_rollout_start", "on_rollout_end", *["on_mb_end"] * 6, "on_train_phase_end", "on_epoch_end"]
    both = [name for event in phase for name in (event, f"{event} of the job")]
    assert names == [*both, "on_training_end of the job"]
    minibatches = [entry[1:] for entry in heard if entry[0] == "on_mb_end"]
    assert minibatches == [(0, epoch, index) for epoch in (0, 1) for index in (0, 1, 2)]
    assert [entry for entry in heard if entry[0] == "on_epoch_end"] == [("on_epoch_end", 1, 1, 2)]


def test_their_changes_in_an_event_are_in_the_checkpoint_of_the_step(tmp_path: Path) -> None:
    """A run resumed after any step, also after the last minibatch of a phase, continues with the same bits."""
    whole = fit(tmp_path, WithLoss(), Checkpoint(tmp_path / "c", every_n_steps=1, keep_last=None), steps=14)
    losses, weight = whole.contract_state["losses"], whole.contract_state["loss"].weight
    for step in range(1, 14):
        path = tmp_path / "c" / f"step-{step:08d}.json"
        resumed = fit(tmp_path, WithLoss(), Checkpoint(tmp_path / "d"), steps=14, ckpt_path=path)
        assert resumed.contract_state["losses"] == losses[step:], step
        assert resumed.contract_state["loss"].weight == weight, step


def test_a_plain_loop_sends_them_the_same_events() -> None:
    """A comparison with a plain loop then compares the same training."""
    job = TrainingJobSpec("plain", 8)
    plugin = WithLoss()
    state: dict[str, Any] = {}
    configured = plugin.configure
    plugin.configure = lambda ctx: state.update(configured(ctx)) or state  # type: ignore[method-assign,func-returns-value]
    ctx = StepContext(job=job, device="cpu", dtype="fp32", run_state=RunState())
    list(plain_steps(plugin, ctx, None, steps=8))
    names = [entry[0] for entry in state["loss"].heard]
    phase = ["on_rollout_start", "on_rollout_end", *["on_mb_end"] * 6, "on_train_phase_end", "on_epoch_end"]
    assert names == [*phase, *phase[:4]]


def test_a_loss_may_end_an_update_and_so_may_a_trainer_hook(tmp_path: Path) -> None:
    """The trainer state has the same flag as the run state."""

    class Limit(TrainerHook):
        def on_mb_end(self, state: Any) -> None:
            state.stop_update_epoch = state.mb_idx == 1

    own = WithLoss()
    own.trainer_hooks = lambda state, ctx: [Limit()]  # type: ignore[method-assign]
    fit(tmp_path, own, steps=6)
    assert own.rollouts == 3

    of_the_job = Placed()
    fit(tmp_path, of_the_job, TrainerHookAdapter(Limit()), steps=6)
    assert of_the_job.rollouts == 3


def test_their_failures_end_the_run(tmp_path: Path) -> None:
    """They are part of the training, whatever their class declares."""

    class Fails(TrainerHook):
        critical = False

        def on_rollout_end(self, state: Any) -> None:
            raise OSError("no experience")

    plugin = WithLoss()
    plugin.trainer_hooks = lambda state, ctx: [Fails()]  # type: ignore[method-assign]
    with refusal(OSError):
        fit(tmp_path, plugin, steps=2)


def test_another_fit_does_not_send_events_twice(tmp_path: Path) -> None:
    plugin = WithLoss()
    module = fit(tmp_path, plugin, steps=2)
    trainer = module.trainer
    module.contract_state["loss"].heard.clear()
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module)
    assert len([entry for entry in module.contract_state["loss"].heard if entry[0] == "on_mb_end"]) == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"ppo": Loss()}, "trainer_hooks returned a dict; it must be a list of objects with events"),
        (None, "trainer_hooks returned a NoneType"),
        ([object()], "trainer_hooks of WithLoss: Invalid `hook` <object object"),
        ([Loss], "Loss'>. Expected an object with one of the events on_new"),
    ],
)
def test_a_result_other_than_a_list_of_hooks_is_refused(tmp_path: Path, returned: Any, message: str) -> None:
    plugin = WithLoss()
    plugin.trainer_hooks = lambda state, ctx: returned  # type: ignore[method-assign]
    with pytest.raises(ContractError, match=message):
        fit(tmp_path, plugin, steps=2)


def test_events_reach_losses_that_contain_modules(tmp_path: Path) -> None:
    class Learned(Loss):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(2, 1)

    class Holds(WithLoss):
        def configure(self, ctx: Any) -> dict[str, Any]:
            state = {**super().configure(ctx), "loss": Learned()}
            state["optimizer"] = torch.optim.SGD(state["loss"].model.parameters(), 0.1)
            return state

    module = fit(tmp_path, Holds(), steps=2)
    assert module.discovered is not None
    assert 'state["loss"].model' in [found.path for found in module.discovered.modules]
