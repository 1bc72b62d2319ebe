"""The events of callbacks beyond Lightning's own, and the run state that all callbacks of a trainer share."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import numbers
import time
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl

from ...adapter.contract.types import RunState
from ...reporters.telemetry import make_run_id

log = logging.getLogger(__name__)

FIGURES_FIELD = "figures"
"""Entry in ``writes`` of a hook that publishes figures, so that `LogMetrics` runs after it in the same step."""

_PLAIN = (type(None), bool, int, float, str)
_WARNED_ATTRIBUTE = "_genlight_has_warned_of_scores"
_DEEPEST_NAME = 8
"""Depth to which `numbers_of` searches nested objects; without a limit, an object that refers to itself has no end."""
_RUN_STATE_ATTRIBUTE = "_genlight_run_state"
_ANNOUNCES_ATTRIBUTE = "_genlight_announces_its_end"


def run_state_of(trainer: pl.Trainer) -> RunState:
    """Return the run state that all hooks of `trainer` share; the first call makes it."""
    state: RunState | None = getattr(trainer, _RUN_STATE_ATTRIBUTE, None)
    if state is None:
        state = RunState()
        share_run_state(trainer, state)
    return state


def run_id_of(trainer: pl.Trainer) -> str:
    """Return the id that all callbacks of a run share. If there is none, generate it; checkpoints then store it."""
    state = run_state_of(trainer)
    state.run_id = state.run_id or make_run_id()
    return state.run_id


def share_run_state(trainer: pl.Trainer, state: RunState) -> None:
    """Have `run_state_of` return `state` for `trainer`."""
    setattr(trainer, _RUN_STATE_ATTRIBUTE, state)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks of `trainer`; Lightning sets the attribute without declaring it."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def fire(trainer: pl.Trainer, event: str, *args: Any) -> None:
    """Deliver one of genlight's own events to every callback that has a method of this name."""
    module = trainer.lightning_module
    for callback in callbacks_of(trainer):
        method = getattr(callback, event, None)
        if method is not None:
            method(trainer, module, *args)


def is_own_loop(trainer: pl.Trainer) -> bool:
    """Whether `trainer` has genlight's loop, which fires genlight's events; valid once a fit has begun."""
    return bool(getattr(trainer.fit_loop, "raises_stops", False))


def hosted_by(pl_module: Any) -> Any:
    """Return the `HostedTrainer` of a module that hosts a trainer class; None for any other module."""
    return getattr(pl_module, "hosted_trainer", None)


def model_of(pl_module: Any) -> Any:
    """Return the ``model`` of a hosted trainer, or its only module, or `pl_module`."""
    model = get_entry(getattr(pl_module, "contract_state", None), "model")
    if model is not None:
        return model
    modules = list(getattr(getattr(pl_module, "discovered", None), "modules", ()))
    return modules[0].value if len(modules) == 1 else pl_module


def get_entry(state: Any, name: str) -> Any:
    """Return an entry of a trainer's state: a mapping's value or an object's attribute; None if it has none."""
    entry = state.get(name) if isinstance(state, Mapping) else None
    return getattr(state, name, None) if entry is None else entry


def is_number(value: Any) -> bool:
    """Whether a metric is one number."""
    return isinstance(value, int | float) or (hasattr(value, "numel") and value.numel() == 1)


def numbers_of(value: Any, name: str = "") -> dict[str, float]:
    """Return the numbers in a mapping, or in the fields of an object, by name; slashes join nested names."""
    if isinstance(value, numbers.Real) or (hasattr(value, "item") and getattr(value, "shape", None) == ()):
        return {name: float(value)}
    if isinstance(value, Mapping):
        entries = value
    elif dataclasses.is_dataclass(value):
        entries = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        entries = value._asdict()  # a named tuple
    else:
        entries = getattr(value, "__dict__", {})
    found: dict[str, float] = {}
    for key, entry in entries.items() if name.count("/") < _DEEPEST_NAME else ():
        part = "/".join(map(str, key)) if isinstance(key, tuple) else str(key)
        if not part.startswith("_"):
            found |= numbers_of(entry, f"{name}/{part}" if name else part)
    return found


def facts_to_store(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the run state for a checkpoint. If ``eval_scores`` are not plain values, only their numbers are included.

    Other objects could be loaded only in a process that has imported their class.
    """
    facts = run_state_of(trainer).state_dict()
    scores = facts["eval_scores"]
    if not _is_plain(scores):
        kept = facts["eval_scores"] = numbers_of(scores)
        is_complete = isinstance(scores, Mapping) and len(kept) == len(scores)
        if not is_complete and not hasattr(trainer, _WARNED_ATTRIBUTE):
            setattr(trainer, _WARNED_ATTRIBUTE, True)
            names = ", ".join(kept) or "there are none"
            log.warning("Checkpoints store only the numbers of `eval_scores` (%s), not all of %r", names, type(scores))
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in _PLAIN


def step_metrics(trainer: pl.Trainer, pl_module: Any) -> dict[str, float]:
    """Return the metrics of the last step, read from the device: a hosted trainer's, or the module's logged ones."""
    hosted = hosted_by(pl_module)
    if hosted is not None:
        return dict(hosted.metrics()) if hosted.step_result is not None else {}
    return {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}


def data_wait_s(trainer: pl.Trainer) -> float | None:
    """Return the seconds that training has waited for data so far; None if the loader does not report them."""
    waited_s: float | None = getattr(trainer.train_dataloader, "wait_seconds", None)
    return waited_s


def publish_metrics(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    """Call ``on_metrics`` of every callback with the metrics of `step`; store them as ``loss_stats``."""
    run_state_of(trainer).loss_stats = metrics
    fire(trainer, "on_metrics", metrics, step)


def publish_scores(trainer: pl.Trainer, scores: dict[str, float], step: int) -> None:
    """Call ``on_scores`` of every callback with the scores after `step`; store them as ``eval_scores``.

    A hook that evaluates calls this in its ``on_train_batch_end`` and states ``writes = ("eval_scores",)``, so that
    `LogMetrics` runs after it and sends the scores to the loggers at the same step.
    """
    run_state_of(trainer).eval_scores = scores
    fire(trainer, "on_scores", scores, step)


def publish_figures(trainer: pl.Trainer, figures: Mapping[str, float]) -> None:
    """Send `figures` to every logger of the trainer.

    `LogMetrics` sends them in one record with the metrics of the step. Without it, rank zero sends a separate record.
    """
    if any(hasattr(callback, "on_figures") for callback in callbacks_of(trainer)):
        fire(trainer, "on_figures", figures)
    elif trainer.is_global_zero:
        log_to_loggers(trainer, figures, trainer.global_step)


def log_to_loggers(trainer: pl.Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Send metrics of `step` to every logger of the trainer, in a separate record."""
    for logger in trainer.loggers if metrics else ():
        logger.log_metrics(metrics=dict(metrics), step=step)


@contextlib.contextmanager
def timed(trainer: pl.Trainer, what: str) -> Iterator[None]:
    """Measure how long the block delays training, and report it by ``on_time_spent`` under the name `what`."""
    began_s = time.monotonic()
    fire(trainer, "on_hold_up", what)
    try:
        yield
    finally:
        fire(trainer, "on_hold_up", None)
        fire(trainer, "on_time_spent", what, time.monotonic() - began_s)


def awaits_module_hook(trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
    """Whether ``on_module_batch_end`` is still to come in this step; for a callback's ``on_train_batch_end``.

    genlight's loop fires that event itself. Under Lightning's own loop, this call wraps the module's
    ``on_train_batch_end`` for this step, so that the event is fired after it.

    Returns:
        False if the module does not override ``on_train_batch_end``, so there is nothing to wait for.
    """
    hook = pl_module.on_train_batch_end
    if getattr(hook, "__func__", None) is pl.LightningModule.on_train_batch_end:
        return False
    is_fired_by_loop: bool | None = getattr(trainer.fit_loop.epoch_loop, "fires_module_batch_end", None)
    if is_fired_by_loop is not None:
        return is_fired_by_loop
    if not hasattr(hook, _ANNOUNCES_ATTRIBUTE):
        _announce_end_of_hook(trainer, pl_module)
    return True


def _announce_end_of_hook(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Wrap the module's ``on_train_batch_end``: its next call removes the wrapper, then fires the event at its end."""
    hook = pl_module.on_train_batch_end
    is_of_instance = "on_train_batch_end" in vars(pl_module)

    def hook_and_event(*args: Any) -> None:
        if is_of_instance:
            pl_module.on_train_batch_end = hook  # type: ignore[method-assign]
        else:
            del pl_module.on_train_batch_end
        hook(*args)
        fire(trainer, "on_module_batch_end")

    setattr(hook_and_event, _ANNOUNCES_ATTRIBUTE, True)
    pl_module.on_train_batch_end = hook_and_event  # type: ignore[method-assign, assignment]
