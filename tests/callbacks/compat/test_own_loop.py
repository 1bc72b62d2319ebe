"""Six-hook callbacks work in a user's own loop, with a trainer object of any class."""

import pytest

from genlight.callbacks import Checkpoint
from genlight.callbacks.compat import Callback, CallbackList, EarlyStoppingCallback, EvalCallback
from genlight.callbacks.compat.callback_list import HOOKS
from support.messages import refusal


def train(trainer, callbacks, steps=2):
    callbacks.on_train_begin(trainer)
    callbacks.on_epoch_begin(trainer)
    for _ in range(steps):
        callbacks.on_step_begin(trainer)
        callbacks.on_step_end(trainer)
    callbacks.on_epoch_end(trainer)
    callbacks.on_train_end(trainer)


def test_each_callback_gets_the_trainer_of_the_loop():
    trainer, heard = object(), []

    class Own(Callback):
        pass

    class OnlyEnds:
        def on_train_end(self, trainer):
            heard.append(("the end", trainer))

    for hook in HOOKS:
        setattr(Own, hook, lambda self, trainer, hook=hook: heard.append((hook, trainer)))
    train(trainer, CallbackList([Own(), OnlyEnds()]))

    steps = ["on_step_begin", "on_step_end"] * 2
    hooks = ["on_train_begin", "on_epoch_begin", *steps, "on_epoch_end", "on_train_end", "the end"]
    assert heard == [(hook, trainer) for hook in hooks]


def test_an_exception_of_a_callback_reaches_the_loop():
    class EndsEarly(Callback):
        def on_step_end(self, trainer):
            raise KeyError("enough")

    with refusal(KeyError):
        train(object(), CallbackList([EndsEarly()]))


@pytest.mark.parametrize("callback", [EarlyStoppingCallback(), EvalCallback(lambda trainer: {}), Checkpoint()])
def test_a_callback_that_needs_a_fit_is_refused(callback):
    with refusal(TypeError):
        train(object(), CallbackList([callback]))
