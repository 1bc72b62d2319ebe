"""Trainer hooks of the other style: seven events, one state, an order by fields read and written, and a policy."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from genlight.adapter import HookOrderError, RunState, StepContext, TrainingJobSpec
from genlight.adapter.check.plain_loop import plain_steps
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
from genlight.callbacks.compat import Callback, CallbackList
from genlight.callbacks.hook.events import numbers_of, run_state_of
from genlight.callbacks.trainer_hooks import TRAINER_HOOK_EVENTS, should_run, trainer_state_of
from genlight.reporters import EventLogger
from genlight.reporters.events.reader import read_events
from support.messages import refusal
from support.trainer_class import Stateless, Trains
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="old names")


class Collects(Stateless):
    def configure(self, ctx):
        policy = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        return {"policy": policy, "optimizer": optimizer, "experience": [1, 2], "other": torch.nn.Linear(1, 1)}

    def rollout(self, state, ctx):
        return [torch.ones(1, 1), torch.ones(1, 1)], {"reward": [1.0, 2.0]}

    def evaluate(self, state, ctx):
        return {"score": 3.0}


class Notes(TrainerHook):
    def __init__(self):
        super().__init__()
        self.events = []


for _event in TRAINER_HOOK_EVENTS:
    setattr(Notes, _event, lambda self, state, event=_event: self.events.append(event))


def run(plugin, hooks, *, steps=4, callbacks=(), logger=False, resume=None):
    from genlight.adapter import ContractModule

    trainer = quiet_trainer(*callbacks, *map(TrainerHookAdapter, hooks), max_steps=steps, logger=logger)
    module = ContractModule(plugin, TrainingJobSpec("r", steps, metric_every=1))
    trainer.fit(module, ckpt_path=resume)
    return trainer, module


def test_all_seven_events_come_in_the_order_of_the_training() -> None:
    hook = Notes()
    run(Collects(), [hook])

    epoch = [*("on_rollout_start", "on_rollout_end", "on_mb_end", "on_mb_end"), *("on_train_phase_end", "on_epoch_end")]
    assert hook.events == ["on_new_training_run", *epoch, *epoch, "on_training_end"]


class Epochs(TrainerHook):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_phase_end(self, state):
        self.seen.append(("phase", state.epoch))

    def on_epoch_end(self, state):
        self.seen.append(("epoch", state.epoch))


EPOCHS = [("phase", 0), ("epoch", 1), ("phase", 1), ("epoch", 2)]


def test_a_plain_loop_counts_an_epoch_after_its_training_phase_and_has_the_losses_of_each_step() -> None:
    hook, losses = Epochs(), []
    hook.on_mb_end = lambda state: losses.append(state.loss_stats["train/loss"])

    class WithHook(Collects):
        def trainer_hooks(self, state, ctx):
            return [hook]

    ctx = StepContext(TrainingJobSpec("r", 5), run_state=RunState(), device="cpu", dtype="fp32")
    list(plain_steps(WithHook(), ctx, None, steps=5))
    assert hook.seen == EPOCHS
    assert losses == [0.5] * 5


def test_trainer_state_shows_the_run_state_and_live_objects() -> None:
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


def test_an_unknown_field_is_an_error_that_suggests_the_closest_name(fit_plain) -> None:
    trainer = fit_plain()
    state = trainer_state_of(trainer, trainer.lightning_module)

    with refusal(AttributeError):
        state.eval_score = {}
    with refusal(AttributeError):
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


def test_writers_run_before_readers_in_any_order_of_registration_and_a_field_needs_a_writer() -> None:
    reports, of_callback = Reports(), Reports()
    run(Collects(), [reports, Evaluates()])
    run(Collects(), [of_callback], callbacks=[Evaluate(1)])
    with refusal(HookOrderError):
        run(Collects(), [Reports()])

    assert reports.seen == [{"score": 1}, {"score": 2}]
    assert of_callback.seen == [{"score": 3.0}, {"score": 3.0}]


class Fails(TrainerHook):
    def on_mb_end(self, state):
        raise ValueError("no such file")


def test_failures_are_counted_under_the_name_of_the_instance_and_a_critical_hook_ends_the_run(caplog) -> None:
    run(Collects(), [Fails(), Fails(instance_name="the second one")])
    assert "Fails failed: on_mb_end 4 times" in caplog.text
    assert "the second one failed: on_mb_end 4 times" in caplog.text

    with refusal(ValueError):
        run(Collects(), [Fails(critical=True)])


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (lambda: quiet_trainer(Notes(), max_steps=1).fit(BoringModel()), r"TrainerHookAdapter\(Notes\("),
        (lambda: CallbackList([Evaluates()]), r"TrainerHookAdapter\(Evaluates\("),
        (lambda: TrainerHookAdapter(Callback()), r"CallbackList\(\[Callback\("),
    ],
)
def test_a_hook_in_the_list_of_another_style_is_refused_with_the_remedy(place, text) -> None:
    with pytest.raises(TypeError, match=text):
        place()


class OfLightning:
    def on_exception(self, trainer, pl_module, exception): ...


@pytest.mark.parametrize("hook", [Notes, OfLightning()], ids=["a class", "an event of Lightning's"])
def test_an_object_without_events_is_refused(hook) -> None:
    with refusal(TypeError):
        TrainerHookAdapter(hook)


def test_a_users_own_loop_can_make_the_state():
    policy, empty = object(), TrainerState()
    state = TrainerState(agent_step=1, policy=policy)

    assert (state.agent_step, state.policy, state.optimizer, state.trainer) == (1, policy, None, None)
    state.agent_step += 1
    assert (state.run_state.agent_step, empty.agent_step) == (2, 0)
    with refusal(AttributeError):
        TrainerState(agent_steps=1)


class Learns(Collects):
    evaluate = None
    loss = Trains.loss

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "model": state["policy"]}

    def rollout(self, state, ctx):
        return [torch.randn(4, 1), torch.randn(4, 1)], {"reward": [1.0, 2.0], "agent_steps": 8}

    train_step = Trains.train_step


def test_each_epoch_has_a_checkpoint_then_an_evaluation_then_metrics(tmp_path, caplog) -> None:
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


def test_a_checkpoint_hook_without_a_checkpoint_callback_is_refused() -> None:
    with refusal(Exception):
        run(Learns(), [CheckpointHook()])


def test_an_interval_of_0_is_never_due() -> None:
    assert [epoch for epoch in range(1, 7) if should_run(epoch, 3)] == [3, 6]
    assert not should_run(3, 0)
    assert CheckpointHook({"checkpoint": {"checkpoint_interval": 4}}).wandb_interval == 4, "each checkpoint"


class Manager:
    def __init__(self):
        self.saved = []

    def load_trainer_state(self):
        return {"agent_step": 100, "epoch": 7}

    def save_agent(self, policy, epoch, metadata, wandb_run=None):
        self.saved.append((epoch, metadata["agent_step"], wandb_run))
        return f"wandb://{epoch}" if wandb_run else None


class Run:
    """The part of the result of ``wandb.init`` that hooks use."""

    def __init__(self):
        self.summary, self.logged, self.defined = {}, [], []

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def log(self, metrics):
        self.logged.append(metrics)


CONFIGURATION = {
    "checkpoint": {"checkpoint_interval": 2, "wandb_checkpoint_interval": 3},
    "evaluation": {"evaluate_interval": 2},
}


def as_objects(value):
    return (
        SimpleNamespace(**{name: as_objects(each) for name, each in value.items()})
        if isinstance(value, dict)
        else value
    )


@pytest.mark.parametrize("cfg", [CONFIGURATION, as_objects(CONFIGURATION)], ids=["mappings", "objects"])
def test_hooks_read_arguments_and_intervals_from_a_configuration(tmp_path, cfg) -> None:
    device, manager, wandb_run, stats = torch.device("cpu"), Manager(), Run(), Run()
    timer = SimpleNamespace(get_elapsed=lambda: 1.5)
    evaluated = []

    class Evaluates(EvaluationHook):
        def evaluate(self, uri, state):
            evaluated.append((uri, state.epoch, self.curriculum))
            assert state.timer is timer
            return SimpleNamespace(scores={"score": state.epoch})

    hooks = [
        MetricsHook(cfg, device, wandb_run, stats, timer),
        Evaluates(cfg, device, entry(cfg, "evaluation"), "a curriculum"),
        CheckpointHook(cfg, device, manager, wandb_run),
    ]
    run(Learns(), hooks, steps=16, callbacks=[Checkpoint(tmp_path)])

    # Epochs 2, 4, 6 and 8; the first one after every three epochs is uploaded.
    assert manager.saved == [(2, 116, None), (4, 132, wandb_run), (6, 148, wandb_run), (8, 164, None)]
    second, eighth = (str(tmp_path / f"step-{step:08d}.json") for step in (4, 16))
    assert evaluated == [
        (uri, 2 * n, "a curriculum") for n, uri in enumerate((second, "wandb://4", "wandb://6", eighth), 1)
    ]
    assert stats.logged == wandb_run.logged
    assert [(each["epoch"], each["timer/elapsed_s"]) for each in stats.logged] == [(n, 1.5) for n in range(1, 9)]
    assert stats.logged[-1]["eval/score"] == 8
    assert wandb_run.defined == [("epoch", None), ("agent_step", None), ("*", "epoch")]
    assert wandb_run.summary["model/parameters"] == 2


def entry(cfg, name):
    return cfg[name] if isinstance(cfg, dict) else getattr(cfg, name)


def test_a_manager_needs_no_checkpoint_callback() -> None:
    manager = Manager()
    run(Learns(), [CheckpointHook(None, None, manager, "a run")])
    assert [(epoch, wandb_run) for epoch, _, wandb_run in manager.saved] == [(1, "a run"), (2, "a run")]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: CheckpointHook({"lr": 1}), ValueError, "no checkpoint.checkpoint_interval; add it, or set `interval`"),
        (lambda: CheckpointHook({"checkpoint": {"checkpoint_interval": 1.5}}), ValueError, "whole number"),
        (lambda: EvaluationHook({"lr": 1}, evaluate=print), ValueError, "no evaluation.evaluate_interval"),
        (lambda: EvaluationHook(None, None, {"lr": 1}, evaluate=print), ValueError, "no evaluate_interval"),
        (lambda: EvaluationHook({}, None), TypeError, "Set `evaluate`"),
        (lambda: MetricsHook(stats_client=object()), TypeError, "Expected an object with `log`"),
        (lambda: MetricsHook(timer=1.0), TypeError, "Expected an object with `get_elapsed`"),
        (lambda: MetricsHook(interval=-1), ValueError, "Invalid `interval`"),
    ],
)
def test_an_argument_that_a_hook_cannot_use_is_refused(make, error, text) -> None:
    with pytest.raises(error, match=text):
        make()


@dataclass
class Summary:
    """Scores as fields, nested, with keys other than strings and values other than numbers."""

    mean: float
    by_task: dict
    policy: object = None


SCORES = Summary(0.5, {("maze", "small"): torch.tensor(1.0), "name": "text"}, object())
Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("scores", "numbers"),
    [
        (SCORES, {"mean": 0.5, "by_task/maze/small": 1.0}),
        (SimpleNamespace(mean=2, _hidden=1), {"mean": 2.0}),
        ({"a": 1, "b": {"c": True}}, {"a": 1.0, "b/c": 1.0}),
        (Pair(1, 2), {"a": 1.0, "b": 2.0}),
        ("text", {}),
        (None, {}),
    ],
)
def test_the_numbers_in_scores_are_found(scores, numbers) -> None:
    assert numbers_of(scores) == numbers


def test_an_object_that_contains_itself_is_supported() -> None:
    loop = SimpleNamespace(a=1.0)
    loop.loop = loop
    assert numbers_of(loop)["loop/a"] == 1.0


@pytest.mark.parametrize(
    ("scores", "stored", "warns"),
    [
        (SCORES, {"mean": 0.5, "by_task/maze/small": 1.0}, True),
        ({"score": torch.tensor(2.0)}, {"score": 2.0}, False),
        ({"a": 1.0, "why": ["text", None]}, {"a": 1.0, "why": ["text", None]}, False),
        (object(), {}, True),
    ],
)
def test_any_scores_are_logged_and_stored_as_far_as_possible(tmp_path, caplog, scores, stored, warns) -> None:
    hooks = [MetricsHook(), EvaluationHook(evaluate=lambda uri, state: scores), CheckpointHook()]
    run(Learns(), hooks, callbacks=[Checkpoint(tmp_path, every_n_steps=1)])
    assert caplog.text.count("store only the numbers of `eval_scores`") == warns
    assert not [record for record in caplog.records if record.levelname == "ERROR"]

    seen = []

    class Looks(TrainerHook):
        def on_new_training_run(self, state):
            seen.append(state.eval_scores)

    run(Learns(), [Looks()], steps=6, callbacks=[Checkpoint(tmp_path)], resume=str(tmp_path / "step-00000004.json"))
    assert seen == [stored]
