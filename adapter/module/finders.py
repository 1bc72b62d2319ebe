"""Lightning's `LearningRateFinder` and `BatchSizeFinder`, and its `Tuner`, with a trainer class.

Lightning's own search exchanges optimizers and schedulers, which a trainer class owns. Here the class itself is
stepped, in a `Rehearsal`, and is then configured with the hyperparameter that the search found. The search is
Lightning's in what it tries and in what it suggests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.memory import is_oom_error
from torch.optim import Optimizer

from ...callbacks.hook.events import callbacks_of
from ...callbacks.lightning_internals import (
    BatchSizeSettings,
    LearningRateSettings,
    RangeTest,
    TunerExit,
    batch_size_settings,
    learning_rate_settings,
    training_loader,
    training_source,
)
from ...callbacks.optimizer_state import with_step_hooks
from ..contract.exceptions import ContractError, StartupContractError
from ..contract.types import TrainingJobSpec
from .rehearsal import Rehearsal, value_of

if TYPE_CHECKING:
    from .module import ContractModule

__all__ = ["fault_of_finder", "host_finders"]

log = logging.getLogger(__name__)

_RATES = ("lr", "learning_rate")
_SMOOTHING = 0.98
"""Of the loss, as in Lightning's own search."""


def fault_of_finder(callback: pl.Callback, trainer: pl.Trainer, job: TrainingJobSpec, data: Any) -> str | None:
    """Why `callback`, where it is a finder, cannot search for a training of `job`, with the way out.

    Args:
        callback: Any callback.
        trainer: Whose callback it is.
        job: What the trainer class is given.
        data: The data module; None where there is none.
    """
    name = type(callback).__name__
    if not isinstance(callback, LearningRateFinder | BatchSizeFinder):
        return None
    if isinstance(trainer.strategy, ModelParallelStrategy):
        return f"{name} cannot shard anew what ModelParallelStrategy has sharded; search on one device, or with ddp"
    if isinstance(callback, LearningRateFinder):
        rate = learning_rate_settings(callback)
        try:
            _rate_name(rate, job.hyperparams)
        except LookupError as error:
            return f"{name}: {error}"
        return None
    size = batch_size_settings(callback)
    if trainer.world_size > 1:
        return f"{name} searches on one device only: one rank may run out of memory while others wait for it"
    if not _is_hyperparameter(size.name, job.hyperparams) and not _is_of_data(size.name, data):
        return (
            f"{name}: there is no {size.name!r} in the hyperparameters or in the data module. Feed the run by "
            "`dataset`, by a data module that has it, or name a hyperparameter by `batch_arg_name`"
        )
    return None


def host_finders(module: ContractModule) -> Rehearsal | None:
    """Have the finders of the module's trainer search with the trainer class.

    Returns:
        What they search with; None where there are none, or nothing is trained.
    """
    trainer = module.trainer
    finders = [each for each in callbacks_of(trainer) if isinstance(each, LearningRateFinder | BatchSizeFinder)]
    for finder in finders:
        if isinstance(finder, LearningRateFinder):
            finder.lr_find = functools.partial(_find_learning_rate, finder)  # type: ignore[method-assign]
        else:
            finder.setup = functools.partial(_set_up, finder)  # type: ignore[method-assign]
            finder.scale_batch_size = functools.partial(_find_batch_size, finder)  # type: ignore[method-assign]
    if not finders or trainer.state.fn != TrainerFn.FITTING:
        return None
    if module.configured and (module.rehearsal is None or module.completed_steps):
        log.warning("nothing is searched: the trainer class has been trained already, and a search would start over")
        return None
    return module.rehearsal or Rehearsal(module)


def _set_up(finder: BatchSizeFinder, trainer: pl.Trainer, module: pl.LightningModule, stage: str | None = None) -> None:
    if not hasattr(module, "rehearsal"):
        type(finder).setup(finder, trainer, module, stage)


def _find_learning_rate(finder: LearningRateFinder, trainer: pl.Trainer, module: Any) -> None:
    """In place of ``LearningRateFinder.lr_find``."""
    if not hasattr(module, "rehearsal"):
        type(finder).lr_find(finder, trainer, module)
        return
    settings = learning_rate_settings(finder)
    if _may_search(finder, module):
        finder.optimal_lr = _learning_rate(settings, module)
    if settings.ends_fit:
        raise TunerExit


def _find_batch_size(finder: BatchSizeFinder, trainer: pl.Trainer, module: Any) -> None:
    """In place of ``BatchSizeFinder.scale_batch_size``."""
    if not hasattr(module, "rehearsal"):
        type(finder).scale_batch_size(finder, trainer, module)
        return
    settings = batch_size_settings(finder)
    if _may_search(finder, module):
        finder.optimal_batch_size = _batch_size(settings, module)
    if settings.ends_fit:
        raise TunerExit


def _may_search(finder: pl.Callback, module: ContractModule) -> bool:
    rehearsal, name = module.rehearsal, type(finder).__name__
    if rehearsal is None:
        return False
    if rehearsal.resumes:
        log.info("%s does not search: the run goes on from a checkpoint, with what was found then", name)
        return False
    if rehearsal.is_over:
        raise ContractError(
            f"{name} searches before the first step only: later on, a trainer class could not be put back to the bit. "
            "Leave its `on_fit_start` as it is."
        )
    if module.trainer.fast_dev_run:  # type: ignore[attr-defined]
        log.warning("%s does not search with fast_dev_run", name)
        return False
    return True


# --- the learning rate


def _learning_rate(settings: LearningRateSettings, module: ContractModule) -> RangeTest | None:
    rehearsal, trainer = module.rehearsal, module.trainer
    assert rehearsal is not None
    hyperparams = module.given_job.hyperparams
    name = _rate_name(settings, hyperparams)
    given = None if name is None else value_of(hyperparams, name)
    test = RangeTest(settings.mode, settings.lowest, settings.highest, settings.steps)
    with rehearsal.searching():
        rates, losses, is_stopped = _range_test(settings, module, rehearsal, given)
        if is_stopped:
            return None  # the loop ends the run as it begins
        test.results.update(trainer.strategy.broadcast({"lr": rates, "loss": losses}))
        test._total_batch_idx = len(rates) - 1
        best = test.suggestion() if name else None
        if name and best is not None:
            rehearsal.found["hyperparams"][name] = best
    if name and best is not None:
        log.info("the learning rate is %g from now on (hyperparameter %r), after %d steps", best, name, len(rates))
        _warn_of_ignored(name, best, module)
    elif name:
        log.warning("no learning rate could be suggested after %d steps; the run keeps its own", len(rates))
    return test


def _range_test(
    settings: LearningRateSettings, module: ContractModule, rehearsal: Rehearsal, given: Any
) -> tuple[list[float], list[float], bool]:
    """The rates that were tried, the smoothed loss after the step with each, and whether a stop was asked for."""
    trainer = module.trainer
    rates: list[float] = []
    losses: list[float] = []
    average = best = 0.0
    optimizers = [found.value for found in module.discovered.optimizers] if module.discovered else []
    is_stopped = False
    with rehearsal.steps() as steps, _rates_set(optimizers, module, given) as set_rate:
        for index in range(settings.steps):
            rates.append(_rate(settings, index))
            set_rate(rates[-1])
            metrics = next(steps)
            if "train/loss" not in metrics:
                raise ContractError(
                    f"LearningRateFinder goes by the metric 'loss', and train_step returned {sorted(metrics)}"
                )
            loss = torch.tensor(metrics["train/loss"], device=trainer.strategy.root_device, dtype=torch.float64)
            loss = trainer.strategy.reduce(loss, reduce_op="mean")
            average = _SMOOTHING * average + (1 - _SMOOTHING) * float(loss)
            losses.append(average / (1 - _SMOOTHING ** (index + 2)))
            is_stopped = trainer.strategy.reduce_boolean_decision(module.is_canceled(), all=False)
            diverges = index > 0 and settings.stop_factor is not None and losses[-1] > settings.stop_factor * best
            if is_stopped or diverges:  # the loss is that of all ranks
                break
            best = losses[-1] if index == 0 else min(best, losses[-1])
    return rates, losses, is_stopped


def _rate(settings: LearningRateSettings, index: int) -> float:
    """The rate of a step, counted from 0, as Lightning's own schedulers raise it."""
    if index == 0:
        return settings.lowest
    share = (index + 1) / settings.steps
    if settings.mode == "linear":
        return settings.lowest + share * (settings.highest - settings.lowest)
    return settings.lowest * float((settings.highest / settings.lowest) ** share)


@contextlib.contextmanager
def _rates_set(optimizers: Sequence[Optimizer], module: ContractModule, given: Any) -> Iterator[Any]:
    """A function that sets the rate of all updates to come, whatever schedulers of the trainer set in between.

    Groups keep their proportions to the rate that was `given`: what has twice that has it in the search too.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    if not groups:
        raise StartupContractError(
            "startup.invalid_trainer",
            f"LearningRateFinder: `configure` of {type(module.plugin).__name__} makes no optimizer that has an `lr`.",
        )
    own = [float(group.get("initial_lr", group["lr"])) for group in groups]
    reference = float(given or 0) or max(own)
    shares = [rate / reference if reference and any(own) else 1.0 for rate in own]
    current = 0.0

    def put(*_: Any) -> None:
        for group, share in zip(groups, shares, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(current * share)
            else:
                group["lr"] = current * share

    def set_rate(rate: float) -> None:
        nonlocal current
        current = rate
        put()

    handles = [optimizer.register_step_pre_hook(put) for optimizer in with_step_hooks(optimizers)]
    try:
        yield set_rate
    finally:
        for handle in handles:
            handle.remove()


def _rate_name(settings: LearningRateSettings, hyperparams: Mapping[str, Any]) -> str | None:
    """The hyperparameter that is the learning rate; None where it is left as it is.

    Raises:
        LookupError: It is not there, or two could be meant.
    """
    if not settings.updates:
        return None
    named = [settings.name] if settings.name else _RATES
    found = [name for name in named if _is_hyperparameter(name, hyperparams)]
    if len(found) == 1:
        return found[0]
    if found:
        raise LookupError(f"the hyperparameters have {' and '.join(found)}; say which by `attr_name`")
    wanted = " or ".join(map(repr, named))
    raise LookupError(
        f"the hyperparameters have no {wanted} that `configure` could read the learning rate from. Add it to "
        "`hyperparams`, name another by `attr_name` (`optimizer.lr` within a group), or set `update_attr` to false"
    )


def _warn_of_ignored(name: str, rate: float, module: ContractModule) -> None:
    assert module.discovered is not None
    groups = [group for found in module.discovered.optimizers for group in found.value.param_groups]
    rates = {float(group.get("initial_lr", group.get("lr", 0))) for group in groups}
    if any(rates) and not any(math.isclose(rate, each, rel_tol=1e-6) for each in rates):
        log.warning(
            "no optimizer has the learning rate that was found, %g: check that `configure` of %s takes it from the "
            "hyperparameter %r",
            rate,
            type(module.plugin).__name__,
            name,
        )


# --- the batch size


def _batch_size(settings: BatchSizeSettings, module: ContractModule) -> int | None:
    rehearsal, data = module.rehearsal, module.trainer.datamodule  # type: ignore[attr-defined]
    assert rehearsal is not None
    if training_source(module.trainer) is not data and _is_of_data(settings.name, data):
        data = None
    parts = {"hyperparams": _is_hyperparameter(settings.name, module.given_job.hyperparams)}
    parts["data"] = _is_of_data(settings.name, data)
    with rehearsal.searching():
        best = _largest(settings, module, rehearsal, parts)
        if best is None:
            return None  # stopped; the loop ends the run as it begins
        if settings.mode == "binsearch":
            best = max(1, int(best * (1 - settings.margin)))
        for part in (name for name, takes in parts.items() if takes):
            rehearsal.found[part][settings.name] = best
    log.info("the batch size is %d from now on (%r)", best, settings.name)
    return best


def _largest(
    settings: BatchSizeSettings, module: ContractModule, rehearsal: Rehearsal, parts: Mapping[str, bool]
) -> int | None:
    """The largest size that was trained with; None where a stop was asked for."""
    low, high, size = 0, 0, settings.first
    must_rebuild = False
    for _ in range(settings.trials):
        trial = {part: {settings.name: size} for part, takes in parts.items() if takes}
        rehearsal.apply(**trial)
        if must_rebuild or parts["hyperparams"]:
            rehearsal.rebuild(sets_up_strategy=True)
        error = _trained(settings, rehearsal)
        if module.is_canceled():
            return None
        must_rebuild = error is not None
        if error is None:
            low = max(low, size)
            most = min(settings.most, _rows(module))
            if size >= most or (high and (settings.mode == "power" or high - low <= 1)):
                break
            size = (low + high) // 2 if high else min(2 * size, most)
        else:
            high = size
            if size <= 1:
                raise error
            if low and (settings.mode == "power" or high - low <= 1):
                break
            size = (low + high) // 2 or 1
    if not low:
        raise ContractError(f"BatchSizeFinder: memory ran out at each of {settings.trials} sizes, {high} the smallest")
    return low


def _trained(settings: BatchSizeSettings, rehearsal: Rehearsal) -> RuntimeError | None:
    """The error of a trial for which memory was too small."""
    try:
        with rehearsal.steps() as steps:
            for _ in range(settings.steps):
                next(steps)
    except RuntimeError as error:
        if not is_oom_error(error):
            raise
        return error.with_traceback(None)  # whose frames hold tensors of the step
    return None


def _rows(module: ContractModule) -> int:
    """Rows of an epoch: more fit into no batch."""
    loaders = training_loader(module.trainer).flattened
    rows = [getattr(loader, "rows", None) or sized_len(getattr(loader, "dataset", None)) for loader in loaders]
    return max((count for count in rows if count), default=sys.maxsize)


def _is_hyperparameter(name: str, hyperparams: Mapping[str, Any]) -> bool:
    try:
        value_of(hyperparams, name)
    except (KeyError, TypeError):
        return False
    return True


def _is_of_data(name: str, data: Any) -> bool:
    return data is not None and (hasattr(data, name) or name in data.hparams)
