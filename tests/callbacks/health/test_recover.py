"""The exact effect of each rung, its reports, and refusals before the first step."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from zoo.runs import precision_of

from genlight.adapter import ContractError, RecoveryError, TrainingCanceled
from genlight.callbacks import Diagnosis, EarlyStopping, Heartbeat, Hook, LogMetrics, Recover, WatchNonfinite
from genlight.callbacks.checkpoint import list_checkpoints
from genlight.reporters import EventLogger
from genlight.reporters.events.reader import read_events as read_log
from genlight.reporters.events.validation import validate_events
from genlight.reporters.telemetry import read_events
from support.messages import refusal
from support.recovered import Batches, Fragile, digest_of, fit_fragile, rungs_in
from support.stopping import StopsAt

pytestmark = pytest.mark.promise(name="resume")


def weights_of(module):
    return [tensor.clone() for tensor in module.contract_state["model"].state_dict().values()]


# Effects of the rungs.


def test_a_skipped_update_changes_no_weight(tmp_path):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append((weights_of(pl_module), trainer.global_step))

    fit_fragile(tmp_path, Recover(["skip"], good_steps=2), Batches({11}), steps=14, every=0, callbacks=[Look()])
    (before, _), (after, step) = seen[10:12]
    assert step == 12  # the step counts
    assert all(map(torch.equal, before, after))
    assert all(torch.isfinite(tensor).all() for tensor in seen[-1][0])
    assert not all(map(torch.equal, after, seen[12][0]))
    assert rungs_in(tmp_path) == [(12, "skip"), (14, "recovered")]


def test_a_lowered_rate_lasts_for_some_steps_and_does_not_affect_the_schedule(tmp_path):
    trainer = Fragile()
    ladder = Recover(["lower_lr"], lr_factor=0.5, lower_lr_steps=4, good_steps=3)
    module = fit_fragile(tmp_path, ladder, Batches({11, 13}), trainer=trainer, steps=25, every=0)
    untouched = [0.05 * 0.9 ** (step // 7) for step in range(25) if step not in (11, 13)]
    factors = [1.0] * 11 + [0.5] + [0.25] * 4 + [1.0] * 7
    assert trainer.rates == pytest.approx([rate * factor for rate, factor in zip(untouched, factors, strict=True)])
    assert module.contract_state["optimizer"].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**3)
    assert rungs_in(tmp_path) == [(12, "lower_lr"), (14, "lower_lr"), (18, "rate_restored"), (21, "recovered")]


@pytest.mark.parametrize("window", [1, 2])
def test_a_rolled_back_run_equals_one_resumed_from_the_checkpoint_with_later_data(tmp_path, window):
    ladder = Recover(["roll_back"], good_steps=5)
    # With a window of 2, the next step uses the gradients of batch 12, so the fault shows there.
    recovered = fit_fragile(tmp_path / "a", ladder, Batches({12}), trainer=Fragile(window=window), steps=20)
    broken_at = 12 + window
    fit_fragile(tmp_path / "b", None, Batches(), trainer=Fragile(window=window), steps=10)

    class StartsBehindTheFault(Batches):
        def load_state_dict(self, state):
            self.next = broken_at

    expected = fit_fragile(
        tmp_path / "b", None, StartsBehindTheFault(), trainer=Fragile(window=window), steps=20, resumes=True
    )
    assert digest_of(recovered) == digest_of(expected)
    assert recovered.trainer.global_step == 20
    assert recovered.trainer.train_dataloader.next == broken_at + 10
    assert rungs_in(tmp_path) == [(broken_at, "roll_back"), (broken_at + 5, "recovered")]


def test_checkpoints_of_undone_steps_are_removed_and_the_restored_one_is_saved_again(tmp_path):
    def records():
        return {e.record.name: e.record.created_at_ms for e in list_checkpoints(tmp_path / "checkpoints")}

    before, after = {}, {}

    class Look(Hook):
        def on_roll_back(self, trainer, pl_module):
            before.update(records())

    # Step 13 is skipped, step 15 is saved within the incident, and step 17 rolls back to a step before it.
    trainer = Fragile(lambda calls: after.update(records() if calls == 18 else {}))
    ladder = Recover(["skip", "roll_back"], good_steps=6)
    fit_fragile(tmp_path, ladder, Batches({12, 16}), trainer=trainer, steps=24, callbacks=[Look()])
    assert rungs_in(tmp_path) == [(13, "skip"), (17, "roll_back"), (23, "recovered")]
    assert list(before) == ["step-00000005", "step-00000010", "step-00000015"]
    assert list(after) == ["step-00000005", "step-00000010"]
    assert before["step-00000005"] == after["step-00000005"]
    assert before["step-00000010"] < after["step-00000010"]


def test_before_the_first_checkpoint_a_roll_back_is_a_skip(tmp_path, caplog):
    module = fit_fragile(tmp_path, Recover(["roll_back"], good_steps=3), Batches({2}), steps=8)
    assert module.contract_state["steps"] == 8
    assert rungs_in(tmp_path)[0] == (3, "roll_back")
    assert "because there is no good checkpoint from before the incident" in caplog.text


# Faults.


def test_a_loss_spike_is_a_fault_if_requested(tmp_path, caplog):
    batches = {45: 1e3}
    ignored = fit_fragile(tmp_path / "a", Recover(["skip"]), Batches(batches), steps=50, every=0)
    ladder = Recover(["skip"], ["loss_spike"], good_steps=4)
    skipped = fit_fragile(tmp_path / "b", ladder, Batches(batches), steps=50, every=0)
    assert rungs_in(tmp_path) == [(46, "skip"), (50, "recovered")]
    assert "the loss of step 46 is" in caplog.text
    assert digest_of(ignored) != digest_of(skipped)


def test_a_fault_within_an_accumulation_window_skips_its_update_and_counts_once(tmp_path):
    ladder, trainer = Recover(["skip"], ["loss_spike", "nonfinite"], good_steps=4), Fragile(window=2)
    fit_fragile(tmp_path, ladder, Batches({10: float("nan"), 70: 1e3}), trainer=trainer, steps=77, every=0)
    assert rungs_in(tmp_path) == [(12, "skip"), (16, "recovered"), (72, "skip"), (76, "recovered")]
    assert len(trainer.rates) == 38 - 2


def test_under_16_mixed_an_overflow_is_no_fault_but_a_nonfinite_loss_is(tmp_path):
    class Overflows(Fragile):
        def train_step(self, batch, state, ctx):
            (first, *_) = state["model"].parameters()
            hook = first.register_hook(lambda gradient: gradient * (torch.inf if self.calls == 6 else 1.0))
            result = super().train_step(batch, state, ctx)
            hook.remove()
            return result

    scales = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            scales.append(trainer.precision_plugin.state_dict()["scale"])

    ladder = Recover(["skip", "roll_back"], good_steps=4)
    module = fit_fragile(
        *(tmp_path, ladder, Batches({12, 14})),
        **{"trainer": Overflows(), "steps": 24, "callbacks": [Look()], **precision_of("16-mixed")},
    )
    assert rungs_in(tmp_path) == [(13, "skip"), (15, "roll_back"), (19, "recovered")]
    assert scales[:7] == [1024.0] * 5 + [512.0] * 2  # the overflow is not one of the faults
    assert scales[14] == 128.0  # the scaler takes a nonfinite loss for an overflow too
    assert scales[15] == 512.0  # as in the checkpoint
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(module))


# The end of the ladder.


def test_a_run_without_attempts_left_fails_once_and_lists_its_attempts(tmp_path):
    log = EventLogger(tmp_path / "events.jsonl", run_id="r")
    ladder = Recover(good_steps=5, lower_lr_steps=3, max_attempts=4)
    with refusal(RecoveryError) as raised:
        fit_fragile(tmp_path, ladder, Batches(range(11, 80)), steps=30, logger=log)
    events = list(read_log(tmp_path / "events.jsonl"))
    (failed,) = (event for event in events if event["event"] in ("failed", "completed"))
    assert failed["category"] == "train-step"
    assert failed["error"] == f"train-step:{raised.value}"
    assert failed["resumable"]
    assert validate_events(tmp_path / "events.jsonl") == []


# Reports to other parts.


def test_loggers_and_the_event_log_get_each_rung_and_the_repeated_steps(tmp_path):
    log = EventLogger(tmp_path / "events.jsonl", run_id="r")
    ladder = Recover(["skip", "roll_back"], good_steps=6)
    fit_fragile(tmp_path, ladder, Batches({12, 16}), steps=24, callbacks=[LogMetrics(every_n_steps=1)], logger=log)
    assert validate_events(tmp_path / "events.jsonl") == []
    metrics = [event for event in read_log(tmp_path / "events.jsonl") if event["event"] == "metric"]
    logged = [(e["name"], e["step"], e["value"]) for e in metrics if e["name"].startswith(("recover/", "trainer/"))]
    assert logged == [
        ("recover/attempt", 13, 1.0),
        ("recover/skip", 13, 1.0),
        ("recover/attempt", 17, 2.0),
        ("recover/roll_back", 17, 1.0),
        ("trainer/rolled_back_to_step", 17, 10.0),
        ("recover/attempt", 23, 0.0),
    ]
    losses = [event["step"] for event in metrics if event["name"] == "train/loss"]
    assert losses == [*range(1, 18), *range(11, 25)]  # none is missed at any cadence


def test_callbacks_that_count_steps_continue_from_the_restored_step(tmp_path):
    class StopsAtTheFault(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            trainer.should_stop = pl_module.plugin.calls == 18  # the roll-back withdraws the request

    others = [
        EarlyStopping("train/loss", patience=100),
        Diagnosis(5, path=tmp_path / "diagnosis.jsonl"),
        Heartbeat(4, path=tmp_path / "beats.jsonl", count_flops=False),
        LogMetrics(every_n_steps=3),
        WatchNonfinite("warn", every_n_steps=1),
    ]
    callbacks = [*others, StopsAtTheFault()]
    fit_fragile(tmp_path, Recover(["roll_back"], good_steps=6), Batches({17}), steps=24, callbacks=callbacks)
    beats = [event["step"] for event in read_events(tmp_path / "beats.jsonl")]
    assert beats == [4, 8, 12, 16, 16, 20, 24]
    assert all(callback.failures == {} for callback in others)


def test_a_stop_in_the_step_of_a_roll_back_keeps_the_restored_checkpoint(tmp_path):
    with pytest.raises(TrainingCanceled):
        fit_fragile(tmp_path, Recover(["roll_back"]), Batches({12}), callbacks=[StopsAt(13)])
    assert [entry.record.step for entry in list_checkpoints(tmp_path / "checkpoints")] == [5, 10]
    resumed = fit_fragile(tmp_path, Recover(["roll_back"]), Batches({12}), resumes=True, steps=12)
    assert resumed.trainer.train_dataloader.next == 15


def test_another_fit_with_the_same_callback_begins_at_the_first_rung(tmp_path):
    ladder = Recover(["skip"], max_attempts=1, good_steps=50)
    for attempt in ("a", "b"):
        fit_fragile(tmp_path / attempt, ladder, Batches({3}), steps=6, every=0)
    assert rungs_in(tmp_path) == [(4, "skip"), (4, "skip")]


# Refusals.


def test_all_invalid_arguments_are_named_at_once():
    with refusal(ValueError):
        Recover(["skip", "jump"], ["heat"], lr_factor=1.5, lower_lr_steps=-1, good_steps=0, max_attempts=1)
    for ladder in ([], "skip"):
        with refusal(ValueError):
            Recover(ladder)


def test_all_missing_requirements_are_named_before_the_first_step(tmp_path):
    class Adaptive(Fragile):
        def configure(self, ctx):
            state = super().configure(ctx)
            state["adaptive"] = torch.optim.Adafactor([state["model"][0].weight], lr=0.1)
            state["adaptive"].param_groups[0]["lr"] = None
            return state

        def rollout(self, state, ctx): ...

    with refusal(RecoveryError):
        fit_fragile(tmp_path, Recover(), Batches(), trainer=Adaptive(), every=0, callbacks=[WatchNonfinite("stop")])


def test_a_plain_module_and_a_class_without_an_optimizer_are_refused(tmp_path, quiet):
    class ByHand(Fragile):
        def configure(self, ctx):
            return {"model": torch.nn.Linear(3, 1)}

    trainer = pl.Trainer(**quiet, max_steps=2, callbacks=[Recover(["skip"])])
    with refusal(RecoveryError):
        trainer.fit(BoringModel())
    with refusal(ContractError):
        fit_fragile(tmp_path, Recover(["skip"]), Batches(), trainer=ByHand())


def test_a_class_that_cannot_be_restored_within_a_run_is_refused_by_name(tmp_path):
    class Forgets(Fragile):
        def load_state_dict(self, state, payload, ctx):
            state["steps"] = payload["steps"]  # but not the average

    with refusal(RecoveryError):
        fit_fragile(tmp_path, Recover(["roll_back"]), Batches({12}), trainer=Forgets())
