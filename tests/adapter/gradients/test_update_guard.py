"""``on_nonfinite: skip`` skips updates that are not finite, as if their batch did not exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo.optimizers import AdamWithClosure
from zoo.runs import context, precision_of

from genlight.adapter import ContractError, ContractModule, RecoveryError, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Recover
from genlight.reporters import EventLogger, read_events
from support.messages import refusal
from support.trainer_class import Trains
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="precision")

BAD = 3
"""Number of the batch with infinite values, counted from 0."""
STEPS = 8


class Batches:
    """A loader with a position."""

    def __init__(self, bad=()):
        self.bad, self.next_step = bad, 0

    def __len__(self):
        return STEPS

    def __iter__(self):
        while self.next_step < STEPS:
            number, self.next_step = self.next_step, self.next_step + 1
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
            yield x * torch.inf if number in self.bad else x

    def state_dict(self):
        return {"next_step": self.next_step}

    def load_state_dict(self, state):
        self.next_step = state["next_step"]


class Normalized(Trains):
    """A network with running statistics; updates every `window` steps."""

    window = 1

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.1)

    def configure(self, ctx):
        return {**super().configure(ctx), "step": 0}

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        loss.backward()
        state["step"] += 1
        if state["step"] % self.window == 0:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {"step": state["step"]}

    def load_state_dict(self, state, payload, ctx):
        state["step"] = payload["step"]


class Accumulating(Normalized):
    window = 2


class FiniteGradients(Normalized):
    """The loss is infinite if the batch is, by a term that no weight changes."""

    def loss(self, batch, state):
        return state["model"](batch.nan_to_num(0, 0, 0)).square().mean() + batch.sum()


class Resizing(Normalized):
    """Keeps a queue of numbers in a buffer that each step extends in place."""

    first = torch.zeros(1)

    def model(self):
        model = super().model()
        model.register_buffer("queue", None if self.first is None else self.first.clone())
        return model

    def train_step(self, batch, state, ctx):
        self.add(state["model"], batch.mean())
        return super().train_step(batch, state, ctx)

    def add(self, model, number):
        model.queue.resize_(model.queue.numel() + 1)
        model.queue[-1] = number


class Replacing(Resizing):
    def add(self, model, number):
        model.queue = torch.cat([model.queue, number.reshape(1)])


class Filling(Resizing):
    first = None

    def add(self, model, number):
        model.queue = number.clone() if model.queue is None else model.queue + number


class Closure(Normalized):
    train_step = AdamWithClosure.train_step


class Lbfgs(Closure):
    def optimizer(self, parameters):
        return torch.optim.LBFGS(parameters)


class ByHand(Normalized):
    def configure(self, ctx):
        return {"model": nn.Linear(3, 1), "step": 0}


class Spoils(Normalized):
    def train_step(self, batch, state, ctx):
        with torch.no_grad():
            state["model"][0].weight[0, 0] = torch.inf
        return super().train_step(batch, state, ctx)


def fit(tmp_path, trainer_class, *, bad=(BAD,), steps=STEPS, callbacks=(), recover=None, ckpt_path=None, **more):
    trainer = quiet_trainer(
        recover or Recover(["skip"], good_steps=1, max_attempts=100),
        *callbacks,
        max_steps=steps,
        default_root_dir=tmp_path,
        **{"logger": False, "enable_checkpointing": bool(callbacks), **more},
    )
    module = ContractModule(trainer_class(), TrainingJobSpec(run_id="r", max_steps=steps, metric_every=0))
    trainer.fit(module, Batches(bad), ckpt_path=ckpt_path)
    return module.contract_state


def plain(trainer_class, *, skipped=(BAD,)):
    """Run a plain loop without the batches `skipped`."""
    trainer = trainer_class()
    state = trainer.configure(context())
    for number, batch in enumerate(Batches()):
        if number not in skipped:
            trainer.train_step(batch, state, None)
    return state


def assert_equal(actual, expected):
    for name, tensor in expected["model"].state_dict().items():
        assert torch.equal(actual["model"].state_dict()[name], tensor), name
    states = (each["optimizer"].state_dict()["state"] for each in (actual, expected))
    for mine, other in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in other)


@pytest.mark.parametrize("bad", [0, BAD])
@pytest.mark.parametrize("trainer_class", [Normalized, Closure, Resizing, Replacing, Filling])
def test_a_run_with_a_bad_batch_ends_bit_equal_to_one_without_that_batch(tmp_path, trainer_class, bad):
    """This includes weights, running statistics and the optimizer's state."""
    assert_equal(fit(tmp_path, trainer_class, bad=(bad,)), plain(trainer_class, skipped=(bad,)))


def test_an_infinite_loss_with_finite_gradients_counts_too(tmp_path):
    assert_equal(fit(tmp_path, FiniteGradients), plain(FiniteGradients))


@pytest.mark.parametrize("bad", [2, 3], ids=["first", "last"])
def test_a_bad_batch_skips_its_complete_accumulation_window(tmp_path, bad):
    """The statistics of a good batch are kept, unless the update is in its step."""
    trainer = Accumulating()
    state = trainer.configure(context())
    for number, batch in enumerate(Batches()):
        if number == bad:
            continue
        if number == bad + 1 and bad % 2 == 0:  # its step skips the update
            continue
        if number == bad - 1 and bad % 2 == 1:
            trainer.loss(batch, state)
            continue
        trainer.train_step(batch, state, None)
    assert_equal(fit(tmp_path, Accumulating, bad=(bad,)), state)


def test_a_run_resumed_between_a_bad_batch_and_its_update_ends_bit_equal_too(tmp_path):
    """The gradients show that the update has to be skipped, and a checkpoint contains them."""
    through = fit(tmp_path / "through", Accumulating, bad=(2,))
    every_3 = [Checkpoint(tmp_path / "c", every_n_steps=3)]
    fit(tmp_path, Accumulating, bad=(2,), steps=3, callbacks=every_3)
    saved = tmp_path / "c" / "step-00000003.json"
    resumed = fit(tmp_path, Accumulating, bad=(2,), callbacks=every_3, ckpt_path=saved)
    assert_equal(resumed, through)


def test_skipped_updates_are_logged_and_counted_across_a_resume(tmp_path, caplog):
    def skips():
        events = [e for e in read_events(tmp_path / "events.jsonl") if e.get("name") == "recover/skip"]
        return [(event["step"], event["value"]) for event in events]

    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=6)
    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    fit(tmp_path, Normalized, bad=(1, 5, 6), steps=6, callbacks=[checkpoint], logger=logger)
    assert skips() == [(2, 1.0), (6, 2.0)]
    assert "step 2: the loss is not finite since step 2. The update is skipped (attempt 1)" in caplog.messages
    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    saved = tmp_path / "c" / "step-00000006.json"
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=6)
    fit(tmp_path, Normalized, bad=(1, 5, 6), callbacks=[checkpoint], ckpt_path=saved, logger=logger)
    assert skips()[-1] == (7, 3.0)
    assert "attempt 2" in caplog.text  # of the same incident as before the checkpoint


@pytest.mark.parametrize(("trainer_class", "bad"), [(Normalized, (0, 3, 4, 5, 6, 7)), (Spoils, ())])
def test_a_run_that_trains_nothing_any_more_ends(tmp_path, trainer_class, bad):
    with refusal(RecoveryError):
        fit(tmp_path, trainer_class, bad=bad, recover=Recover(["skip"], good_steps=1, max_attempts=3))


def test_in_fp16_the_scaler_skips_updates_and_ordinary_overflows_are_not_logged(tmp_path):
    recover = Recover(["skip"], good_steps=1, max_attempts=100)
    state = fit(tmp_path, Normalized, recover=recover, **precision_of("16-mixed"))
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].state_dict().values())
    assert recover.state_dict()["taken"] == {"skip": 1}


@pytest.mark.parametrize(
    ("trainer_class", "words"), [(Lbfgs, r'state\["optimizer"\].*LBFGS evaluates'), (ByHand, "needs an optimizer")]
)
def test_a_trainer_whose_updates_cannot_be_skipped_is_refused(tmp_path, trainer_class, words):
    with pytest.raises(ContractError, match=words):
        fit(tmp_path, trainer_class)
