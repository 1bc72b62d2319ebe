"""The policy of hooks: the effect of failures, the ranks that get an event, and the order of hooks."""

import logging
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from hypothesis import given, settings, strategies as st
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint, ModelCheckpoint

from genlight.adapter.contract.exceptions import HookOrderError, TrainingCanceled
from genlight.callbacks.hook.events import callbacks_of, fire, run_state_of
from genlight.callbacks.hook.hook import RUN_STATE_KEY, Hook, listeners, order_callbacks, skippable
from support.messages import refusal
from support.stopping import StopsAt

LOG = "genlight.callbacks.hook.hook"


class FailingHook(Hook):
    def __init__(self, critical=False, error=None):
        self.critical = critical
        self.error = error or ValueError("no such luck")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise self.error


class Recording(Hook):
    def __init__(self, into=None, name=None):
        self.events = [] if into is None else into
        self.name = name

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.events.append(self.name or "on_train_batch_end")


def fake_trainer(*callbacks, rank=0):
    return SimpleNamespace(callbacks=list(callbacks), is_global_zero=rank == 0, lightning_module=None)


@pytest.fixture(params=["contract", "plain"])
def train(request, fit, fit_plain, counting_trainer):
    if request.param == "plain":
        return fit_plain
    return lambda callbacks, **arguments: fit(counting_trainer(), callbacks, **arguments)[0]


# failure


def test_a_failing_hook_affects_no_other_and_is_logged_once_with_its_traceback_and_in_the_end(train, caplog):
    failing, after = FailingHook(), Recording()

    trainer = train([failing, after])

    assert trainer.global_step == len(after.events) == 4
    assert failing.failures == {"on_train_batch_end": 4}
    errors = [record for record in caplog.records if record.name == LOG and record.levelno == logging.ERROR]
    warnings = [record for record in caplog.records if record.name == LOG and record.levelno == logging.WARNING]
    assert [record.getMessage() for record in errors] == [
        (
            "FailingHook failed in on_train_batch_end; training continues, "
            "and further failures of this event are only counted"
        )
    ]
    assert str(errors[0].exc_info[1]) == "no such luck"
    assert [record.getMessage() for record in warnings] == ["FailingHook failed: on_train_batch_end 4 times"]


def test_a_critical_hook_ends_the_run_with_its_own_exception_which_others_learn_of(train, caplog):
    reported = []

    class Listens(Hook):
        def on_training_failed(self, trainer, pl_module, exception):
            reported.append(exception)

    error = RuntimeError("disk full")
    with refusal(RuntimeError):
        train([FailingHook(), Listens(), FailingHook(critical=True, error=error)])

    assert reported == [error]
    assert "FailingHook failed: on_train_batch_end 1 times" in caplog.messages


@pytest.mark.parametrize("error", [TrainingCanceled("timeout"), SystemExit(3)])
def test_a_stop_passes_through_a_hook_that_is_not_critical(error):
    hook = FailingHook(error=error)

    with pytest.raises(type(error)):
        hook.on_train_batch_end(fake_trainer(hook), None, None, None, 0)

    assert hook.failures == {}


def test_a_critical_hooks_failure_ends_the_run_also_when_a_forgiving_hook_fired_the_event(train):
    class Forgiving(Hook):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            fire(trainer, "on_samples_written", {}, trainer.global_step)

    class Strict(Hook):
        critical = True

        def on_samples_written(self, trainer, pl_module, samples, step):
            raise OSError(f"step {step} is not written")

    with refusal(OSError):
        train([Forgiving(), Strict()])


def test_a_call_of_super_is_part_of_the_outer_event():
    class Parent(Hook):
        def on_train_start(self, trainer, pl_module):
            raise ValueError("in the parent")

    class Child(Parent):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            raise AssertionError("not reached")

    child = Child()
    child.on_train_start(fake_trainer(child), None)

    assert child.failures == {"on_train_start": 1}


def test_failures_of_saving_and_loading_are_always_raised():
    class Broken(Hook):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            raise ValueError("cannot save")

    with refusal(ValueError):
        Broken().on_save_checkpoint(fake_trainer(rank=1), None, {})


# ranks


@pytest.mark.parametrize("find", [lambda trainer: [callback.on_train_batch_end for callback in trainer.callbacks],
                                  lambda trainer: listeners(trainer, "on_train_batch_end")],
                         ids=["method", "listeners"])  # fmt: skip
@pytest.mark.parametrize(("ranks", "rank", "delivered"), [("zero", 0, 1), ("zero", 1, 0), ("all", 0, 1), ("all", 1, 1)])
def test_an_event_is_delivered_only_on_the_ranks_of_the_hook(find, ranks, rank, delivered):
    hook = Recording()
    hook.ranks = ranks

    trainer = fake_trainer(hook, rank=rank)
    for listener in find(trainer):
        listener(trainer, None, None, None, 0)

    assert len(hook.events) == delivered


def test_only_callbacks_that_define_an_event_listen_to_it():
    class Mixin:
        def on_mb_end(self, trainer, pl_module):
            return "of the mixin"

    class Mixed(Mixin, Hook):
        pass

    class Guest(pl.Callback):
        def on_mb_end(self, trainer, pl_module):
            return "of a guest"

    patched = Hook()
    patched.on_mb_end = lambda trainer, pl_module: "of the instance"
    heard = [call(None, None) for call in listeners(fake_trainer(Hook(), Mixed(), Guest(), patched), "on_mb_end")]

    assert heard == ["of the mixin", "of a guest", "of the instance"]
    assert listeners(fake_trainer(Hook(), pl.Callback()), "on_train_batch_end") == []


# events


class Waiting(Hook):
    ranks = "all"

    def __init__(self):
        self.called = []

    @skippable
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.called.append(trainer.global_step)
        self.next_due_step = trainer.global_step // 3 * 3 + 3


@pytest.mark.parametrize(
    ("settings", "called"),
    [({"steps": 10}, [1, 3, 6, 9]), ({"steps": 8, "batches": list(range(4)), "max_epochs": -1}, [1, 3, 5, 6])],
    ids=["one epoch", "two epochs"],
)
def test_a_waiting_hook_is_called_at_its_steps_and_in_each_epoch(fit, fit_plain, counting_trainer, settings, called):
    class Unmarked(Waiting):
        def on_train_batch_end(self, trainer, *rest):
            super().on_train_batch_end(trainer, *rest)

    class Marked(Waiting):
        @skippable
        def on_train_batch_end(self, trainer, *rest):
            super().on_train_batch_end(trainer, *rest)

    hook, unmarked, marked, plain = Waiting(), Unmarked(), Marked(), Waiting()

    fit(counting_trainer(), [hook, unmarked, marked], **settings)
    fit_plain([plain], steps=4)

    assert hook.called == marked.called == called
    assert unmarked.called == [*range(1, settings["steps"] + 1)], "an override is not skipped unless it is marked too"
    assert plain.called == [1, 2, 3, 4], "Lightning's own loop skips none"


def test_a_stop_calls_every_waiting_hook(fit, counting_trainer):
    early, late = Waiting(), Waiting()

    with pytest.raises(TrainingCanceled):
        fit(counting_trainer(), [early, StopsAt(7), late], steps=12)

    # A hook that ran before the stop was set has no later step to be called in.
    assert late.called == [1, 3, 6, 7]
    assert early.called == [1, 3, 6]


# order


def reading(name, reads=(), writes=(), optional=()):
    hook = type(name, (Recording,), {"reads": reads, "writes": writes, "optional_reads": optional})
    return hook(name=name)


def ordered(*callbacks):
    trainer = fake_trainer(*callbacks)
    order_callbacks(trainer)
    return callbacks_of(trainer)


def test_independent_hooks_and_other_callbacks_keep_their_places():
    hooks = [reading(name) for name in "CAB"]
    assert ordered(*hooks) == hooks
    hook = reading("Free", reads=("epoch", "loss_stats"), optional=("eval_scores",))  # fields of the loop
    assert ordered(hook) == [hook]
    reader, writer = reading("R", reads=("x",)), reading("W", writes=("x",))
    first, middle, last = pl.Callback(), pl.Callback(), pl.Callback()

    assert ordered(first, reader, middle, writer, last) == [first, writer, middle, reader, last]
    late = reading("Late")
    assert ordered(reader, writer, late) == [writer, reader, late]


def test_a_cycle_and_a_missing_writer_are_errors_at_the_start_that_name_only_their_members(train):
    hooks = [
        reading("Bystander", reads=("a",)),
        reading("First", reads=("a",), writes=("b",)),
        reading("Second", reads=("b",), writes=("a",)),
    ]

    with refusal(HookOrderError):
        train([reading("Lonely", reads=("eval_scores",))])
    with pytest.raises(HookOrderError) as caught:
        train(hooks)

    assert "First, Second, First" in str(caught.value) or "Second, First, Second" in str(caught.value)
    assert "Bystander" not in str(caught.value)


def test_the_order_is_computed_once_and_again_if_callbacks_are_added():
    reader, writer = reading("R", reads=("x",)), reading("W", writes=("x",))
    trainer = fake_trainer(reader, writer)
    order_callbacks(trainer)
    same = callbacks_of(trainer)
    order_callbacks(trainer)
    assert callbacks_of(trainer) is same

    early = reading("Early", writes=("x",))
    trainer.callbacks = [*same, early]
    order_callbacks(trainer)

    assert callbacks_of(trainer) == [writer, early, reader]


def test_a_saver_runs_after_all_callbacks_that_are_no_hooks_and_before_its_readers():
    class Saves(Hook, LightningCheckpoint):
        writes = ("x",)

    reader, saver, other = reading("R", reads=("x",)), Saves(), ModelCheckpoint()
    early, late = pl.Callback(), pl.Callback()

    assert ordered(early, reader, saver, late, other) == [early, late, saver, reader, other]


FIELDS = st.lists(st.sampled_from("abcde"), max_size=3, unique=True).map(tuple)


@settings(max_examples=150)
@given(st.lists(st.tuples(FIELDS, FIELDS, FIELDS), max_size=7))
def test_any_graph_is_either_ordered_correctly_or_refused(graph):
    hooks = [
        reading(f"H{i}", reads=reads, writes=writes, optional=optional)
        for i, (reads, writes, optional) in enumerate(graph)
    ]
    written = {field for hook in hooks for field in hook.writes}
    unwritten = [field for hook in hooks for field in hook.reads if field not in written]
    if unwritten or has_cycle(hooks):
        with pytest.raises(HookOrderError, match="which no hook writes" if unwritten else "wait for each other"):
            ordered(*hooks)
        return

    result = ordered(*hooks)

    assert sorted(map(id, result)) == sorted(map(id, hooks))
    assert written.issuperset(field for hook in hooks for field in hook.reads)
    place = {id(hook): i for i, hook in enumerate(result)}
    for writer, reader in edges(hooks):
        assert place[id(writer)] < place[id(reader)]


def edges(hooks):
    """Yield pairs of which the first must run first; two hooks that both update a field are no constraint."""
    for i, reader in enumerate(hooks):
        for j, writer in enumerate(hooks):
            fields = {*reader.reads, *reader.optional_reads} & set(writer.writes)
            one_way = {field for field in fields if not (field in reader.writes and field in writer.reads)}
            if i != j and (one_way or (fields and j < i)):
                yield writer, reader


def has_cycle(hooks):
    left, pairs = list(hooks), list(edges(hooks))
    while left:
        waiting = {id(reader) for writer, reader in pairs if any(writer is hook for hook in left)}
        free = [hook for hook in left if id(hook) not in waiting]
        if not free:
            return True
        left = [hook for hook in left if id(hook) in waiting]
    return False


# run state


def test_the_run_state_is_saved_in_a_checkpoint(train, tmp_path):
    class Writes(Hook):
        writes = ("eval_scores", "own_fact")

        def on_train_start(self, trainer, pl_module):
            state = run_state_of(trainer)
            state.eval_scores, state.extra["own_fact"] = {"fid": 3.0}, [1, 2]

    trainer = train([Writes()], steps=2)
    run_state_of(trainer).epoch = 5
    trainer.save_checkpoint(tmp_path / "c.ckpt", weights_only=False)

    import torch

    checkpoint = torch.load(tmp_path / "c.ckpt", weights_only=False)
    fresh = fake_trainer()
    Hook().on_load_checkpoint(fresh, None, checkpoint)

    assert run_state_of(fresh).eval_scores == {"fid": 3.0}
    assert run_state_of(fresh).extra == {"own_fact": [1, 2]}
    assert run_state_of(fresh).epoch == 5


def test_a_resumed_run_keeps_its_own_id_and_attempt_and_drops_the_last_stop_reason():
    before, after = fake_trainer(), fake_trainer()
    run_state_of(before).run_id, run_state_of(before).attempt = "old", 1
    run_state_of(before).stop_reason, run_state_of(before).agent_step = "preempted", 77
    checkpoint = {}
    Hook().on_save_checkpoint(before, None, checkpoint)

    run_state_of(after).run_id, run_state_of(after).attempt = "new", 2
    Hook().on_load_checkpoint(after, None, checkpoint)

    state = run_state_of(after)
    assert (state.run_id, state.attempt, state.stop_reason, state.agent_step) == ("new", 2, None, 77)
    Hook().on_load_checkpoint(after, None, {})
    assert (state.run_id, state.attempt, state.stop_reason, state.agent_step) == ("new", 2, None, 77)
    without_id = fake_trainer()
    Hook().on_load_checkpoint(without_id, None, {RUN_STATE_KEY: {"run_id": "saved"}})
    assert run_state_of(without_id).run_id == "saved"
