"""Trainer hooks of the other style: all seven events, one state, order by what is read and written, and a policy."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import HookOrderError, StepResult
from genlight.callbacks import (
    Checkpoint,
    CheckpointHook,
    Evaluate,
    EvaluationHook,
    MetricsHook,
    TrainerHook,
    TrainerHookAdapter,
    TrainerState,
)
from genlight.callbacks.hook.events import run_state_of
from genlight.callbacks.trainer_hooks import TRAINER_HOOK_EVENTS, should_run, trainer_state_of
from genlight.reporters import EventLogger
from genlight.reporters.events.reader import read_events


class Collects:
    """A trainer with a rollout of two minibatches, a policy and an experience."""

    def setup(self, ctx): ...

    def configure(self, ctx):
        policy = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        return {"policy": policy, "optimizer": optimizer, "experience": [1, 2], "other": torch.nn.Linear(1, 1)}

    def rollout(self, state, ctx):
        return [torch.ones(1, 1), torch.ones(1, 1)], {"reward": [1.0, 2.0]}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        return StepResult(metrics={"loss": 0.5})

    def evaluate(self, state, ctx):
        return {"score": 3.0}

    def state_dict(self, state):
        return {}

    def load_state_dict(self, state, payload, ctx): ...


class Notes(TrainerHook):
    """Notes each event."""

    def __init__(self):
        super().__init__()
        self.events = []


for _event in TRAINER_HOOK_EVENTS:
    setattr(Notes, _event, lambda self, state, event=_event: self.events.append(event))


def run(plugin, hooks, *, steps=4, callbacks=(), logger=False, resume=None):
    from genlight.adapter import ContractModule, TrainingJobSpec

    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, logger=logger, enable_checkpointing=saves, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[*callbacks, *map(TrainerHookAdapter, hooks)],
    )  # fmt: skip
    module = ContractModule(plugin, TrainingJobSpec("r", steps, metric_every=1))
    trainer.fit(module, ckpt_path=resume)
    return trainer, module


def test_all_seven_events_come_in_the_order_of_the_training() -> None:
    hook = Notes()
    run(Collects(), [hook])

    epoch = [
        *("on_rollout_start", "on_rollout_end", "on_mb_end", "on_mb_end"),
        *("on_train_phase_end", "on_epoch_end"),
    ]
    assert hook.events == ["on_new_training_run", *epoch, *epoch, "on_training_end"]


def test_under_lightnings_own_loop_they_come_with_its_events(fit_plain) -> None:
    hook = Notes()
    fit_plain([TrainerHookAdapter(hook)], steps=3)

    assert hook.events == [
        *("on_new_training_run", "on_mb_end", "on_mb_end", "on_mb_end"),
        *("on_train_phase_end", "on_epoch_end", "on_training_end"),
    ]


def test_the_state_is_a_view_of_the_run_state_and_of_what_lives() -> None:
    seen = {}

    class Looks(TrainerHook):
        def on_mb_end(self, state):
            seen["mb_idx"] = [*seen.get("mb_idx", []), state.mb_idx]
            state.latest_wandb_uri = "wandb://x"
            state.agent_step += 10

        def on_epoch_end(self, state):
            seen.update(policy=state.policy, optimizer=state.optimizer, experience=state.experience, epoch=state.epoch)
            seen.update(rollout_stats=state.rollout_stats, loss_stats=state.loss_stats, timer=state.timer)

        def on_new_training_run(self, state):
            assert state.stop_rollout is False
            state.timer = "a stopwatch"

    trainer, module = run(Collects(), [Looks()])

    assert seen["mb_idx"] == [0, 1, 0, 1]
    assert seen["policy"] is module.contract_state["policy"]
    assert seen["optimizer"] is module.contract_state["optimizer"]
    assert seen["experience"] == [1, 2]
    assert seen["rollout_stats"] == {"reward": [1.0, 2.0]}
    assert seen["loss_stats"]["train/loss"] == 0.5
    assert (seen["epoch"], seen["timer"]) == (2, "a stopwatch")
    facts = run_state_of(trainer)
    assert facts.agent_step == 40
    assert facts.latest_wandb_uri == "wandb://x"


def test_a_field_that_there_is_not_is_an_error_that_offers_the_nearest(fit_plain) -> None:
    trainer = fit_plain()
    state = trainer_state_of(trainer, trainer.lightning_module)

    with pytest.raises(AttributeError, match=r"no field 'eval_score'. Did you mean `eval_scores`"):
        state.eval_score = {}
    with pytest.raises(AttributeError, match=r"no field 'rolout_stats'. Did you mean `rollout_stats`"):
        state.rolout_stats
    assert isinstance(state, TrainerState)


class Reports(TrainerHook):
    reads = ("eval_scores", "policy")

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, state):
        self.seen.append(dict(state.eval_scores))


class Evaluates(TrainerHook):
    writes = ("eval_scores",)
    order: list

    def on_epoch_end(self, state):
        state.eval_scores = {"score": state.epoch}


def test_an_evaluation_runs_before_what_reports_its_scores_in_whatever_order_they_are_registered() -> None:
    reports = Reports()
    run(Collects(), [reports, Evaluates()])

    assert reports.seen == [{"score": 1}, {"score": 2}]


def test_it_reads_what_a_callback_of_ours_writes() -> None:
    reports = Reports()
    run(Collects(), [reports], callbacks=[Evaluate(1)])

    assert reports.seen == [{"score": 3.0}, {"score": 3.0}]


def test_a_field_that_nobody_writes_is_an_error_that_names_both() -> None:
    with pytest.raises(HookOrderError, match="Reports reads 'eval_scores', which no hook writes"):
        run(Collects(), [Reports()])


class Fails(TrainerHook):
    def on_mb_end(self, state):
        raise ValueError("no such file")


def test_a_failure_is_counted_and_that_of_a_critical_hook_ends_the_run(caplog) -> None:
    run(Collects(), [Fails()])
    assert "Fails failed: on_mb_end 4 times" in caplog.text

    critical = Fails()
    critical.critical = True
    with pytest.raises(ValueError, match="no such file"):
        run(Collects(), [critical])


def test_in_lightnings_own_loop_a_failure_keeps_no_other_event_from_the_hook(fit_plain, caplog) -> None:
    class FailsAtPhases(TrainerHook):
        ended = 0

        def on_train_phase_end(self, state):
            raise ValueError("no such file")

        def on_epoch_end(self, state):
            self.ended += 1

    hook = FailsAtPhases()
    fit_plain([TrainerHookAdapter(hook)], steps=3)
    assert hook.ended == 1
    assert "FailsAtPhases failed: on_train_phase_end 1 times" in caplog.text


def test_only_hooks_that_ask_for_it_run_on_all_ranks() -> None:
    everywhere = Fails()
    everywhere.run_on_all_ranks = True

    assert TrainerHookAdapter(Fails()).ranks == "zero"
    assert TrainerHookAdapter(everywhere).ranks == "all"


def test_a_class_of_elsewhere_needs_no_base() -> None:
    class Elsewhere:
        def __init__(self):
            self.epochs = []

        def on_epoch_end(self, trainer_state):
            self.epochs.append(trainer_state.epoch)

    hook = Elsewhere()
    run(Collects(), [hook])

    assert hook.epochs == [1, 2]


@pytest.mark.parametrize("hook", [Notes, object()])
def test_what_is_no_trainer_hook_is_refused(hook) -> None:
    with pytest.raises(TypeError, match="Expected an object with one of the events on_new_training_run"):
        TrainerHookAdapter(hook)


def test_one_field_needs_no_tuple() -> None:
    class One(TrainerHook):
        reads = "mb_idx"

        def on_mb_end(self, state): ...

    assert TrainerHookAdapter(One()).reads == ["minibatch_index"]


def test_a_loop_of_ones_own_makes_the_state_itself():
    policy, empty = object(), TrainerState()
    state = TrainerState(agent_step=1, policy=policy)

    assert (state.agent_step, state.policy, state.optimizer, state.trainer) == (1, policy, None, None)
    state.agent_step += 1
    assert (state.run_state.agent_step, empty.agent_step) == (2, 0)
    with pytest.raises(AttributeError, match="agent_steps"):
        TrainerState(agent_steps=1)


class Learns:
    """Trains its policy on what it draws in a rollout."""

    setup, configure, prepare_batch = Collects.setup, Collects.configure, Collects.prepare_batch

    def rollout(self, state, ctx):
        return [torch.randn(4, 1), torch.randn(4, 1)], {"reward": [1.0, 2.0], "agent_steps": 8}

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        loss = (state["policy"](batch) - batch).square().mean()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state):
        return {"policy": state["policy"].state_dict(), "optimizer": state["optimizer"].state_dict()}

    def load_state_dict(self, state, payload, ctx):
        state["policy"].load_state_dict(payload["policy"])
        state["optimizer"].load_state_dict(payload["optimizer"])


def test_losses_are_those_of_the_step_at_every_event_without_another_callback(fit_plain) -> None:
    class Looks(TrainerHook):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_mb_end(self, state):
            self.seen.append(dict(state.loss_stats))

        def on_epoch_end(self, state):
            self.at_end = dict(state.loss_stats)

    looks = Looks()
    _, module = run(Learns(), [looks])  # its job has metrics in every step; nobody logs them
    assert len({each["train/loss"] for each in looks.seen}) == 4
    assert looks.at_end == looks.seen[-1]
    assert looks.seen[-1]["train/loss"] == float(module.step_result.metrics["loss"])


def test_a_checkpoint_an_evaluation_and_metrics_of_each_epoch_follow_each_other(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    evaluated = []

    def evaluate(uri, state):
        evaluated.append((uri, state.epoch))
        return {"score": 10 * state.epoch}

    hooks = [MetricsHook(), EvaluationHook(evaluate), CheckpointHook(interval=2)]  # in any order
    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    run(Learns(), hooks, steps=8, callbacks=[Checkpoint(tmp_path / "c")], logger=logger)

    second, fourth = (str(tmp_path / "c" / f"step-{step:08d}.json") for step in (4, 8))
    assert evaluated == [(second, 2), (second, 3), (fourth, 4)]
    events = [each for each in read_events(tmp_path / "events.jsonl") if each.get("event") == "metric"]
    assert [each["value"] for each in events if each["name"] == "eval/score"] == [20.0, 30.0, 40.0]
    assert [each["value"] for each in events if each["name"] == "rollout/reward"] == [1.5] * 4
    assert [(each["step"], each["value"]) for each in events if each["name"] == "agent_step"] == [
        *((2, 8), (4, 16), (6, 24), (8, 32))
    ]
    assert "Linear has 2 parameters, of which 2 train" in caplog.text
    assert "epoch 4  train/loss" in caplog.text


def test_a_run_goes_on_exactly_from_what_the_checkpoint_hook_saved(tmp_path) -> None:
    def final(folder, steps, resume=None):
        torch.manual_seed(3)
        _, module = run(Learns(), [CheckpointHook()], steps=steps, callbacks=[Checkpoint(folder)], resume=resume)
        return [each.clone() for each in module.contract_state["policy"].parameters()]

    straight = final(tmp_path / "straight", 8)
    final(tmp_path / "parts", 4)
    (tmp_path / "parts" / "final.json").unlink()
    torch.manual_seed(99)
    resumed = final(tmp_path / "parts", 8, resume=str(tmp_path / "parts" / "step-00000004.json"))
    assert all(torch.equal(left, right) for left, right in zip(straight, resumed, strict=True))


def test_a_checkpoint_hook_without_a_checkpoint_callback_says_what_is_missing() -> None:
    with pytest.raises(Exception, match="give the trainer a Checkpoint callback"):
        run(Learns(), [CheckpointHook()])


def test_names_and_policies_may_be_those_of_an_instance(caplog) -> None:
    class Fails(TrainerHook):
        def on_epoch_end(self, state):
            raise ValueError("broken")

    run(Learns(), [Fails(instance_name="the second one")])
    assert "the second one" in caplog.text
    with pytest.raises(ValueError, match="broken"):
        run(Learns(), [Fails(critical=True)])


def test_an_interval_of_0_is_never_due() -> None:
    assert [epoch for epoch in range(1, 7) if should_run(epoch, 3)] == [3, 6]
    assert not should_run(3, 0)
