"""Where the time of a step goes."""

from __future__ import annotations

import time
from typing import Any

import torch

from ...callbacks.optimizer_state import with_step_hooks
from ..discovery.discover import discover
from ..gradients.precision import StepPrecision
from ..gradients.step import StepHooks, StepRouter
from .subject import Subject

__all__ = ["step_times"]


def step_times(subject: Subject) -> dict[str, float]:
    """Seconds a step in ``prepare``, ``forward``, ``backward`` and ``optimizer``; medians, the first step left out.

    What is none of the others (metrics, an EMA update) counts as forward.
    """
    # One step on a module of Lightning's gives the context; the clock runs on the bare class.
    ctx = subject.train(stop_after=1).module.ctx
    trainer = subject.make()
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    clock = _Clock()
    discovered = discover(state, trainer)
    for optimizer in with_step_hooks(found.value for found in discovered.optimizers):
        optimizer.register_step_pre_hook(lambda *_: clock.start())
        optimizer.register_step_post_hook(lambda *_: clock.stop("optimizer"))
    hooks = StepHooks(before_backward=lambda _: clock.start(), after_backward=lambda: clock.stop("backward"))
    router = StepRouter(discovered, torch.device("cpu"), precision=StepPrecision("fp32"), hooks=hooks)
    steps = [_timed(trainer, raw, state, ctx, router, clock) for raw in subject.batches][1:]
    return {name: sorted(step[name] for step in steps)[len(steps) // 2] for name in steps[0]}


def _timed(trainer: Any, raw: Any, state: Any, ctx: Any, router: StepRouter, clock: _Clock) -> dict[str, float]:
    clock.seconds = {"backward": 0.0, "optimizer": 0.0}
    began = time.perf_counter()
    batch = trainer.prepare_batch(raw, state, ctx)
    prepared = time.perf_counter()
    with router:
        trainer.train_step(batch, state, ctx)
    took = time.perf_counter() - prepared
    inside = clock.seconds
    return {
        "prepare": prepared - began,
        "forward": max(took - inside["backward"] - inside["optimizer"], 0.0),
        **inside,
    }


class _Clock:
    """Nested parts (the backward inside of an optimizer's closure) count for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began: list[float] = []
        self._inner: list[float] = []

    def start(self) -> None:
        self._began.append(time.perf_counter())
        self._inner.append(0.0)

    def stop(self, name: str) -> None:
        took = time.perf_counter() - self._began.pop()
        self.seconds[name] += took - self._inner.pop()
        if self._inner:
            self._inner[-1] += took
