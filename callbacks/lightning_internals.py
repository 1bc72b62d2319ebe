"""Everything of Lightning that is protected and that genlight reads, overrides or assigns.

Each name is looked up when this module is imported, so that a release of Lightning that no longer has it is one clear
`ImportError`, and not a run that fails, or trains wrong, in its middle. Names that are only overridden would fail in
silence; the tests of the loop run a fit under the lowest and the highest supported release.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import lightning.pytorch as pl
import lightning.pytorch.callbacks as stock
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher, _PrefetchDataFetcher as PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.progress import _ProcessedTracker as ProcessedTracker, _Progress as Progress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.call import (
    _call_callback_hooks,
    _call_lightning_module_hook,
    _call_strategy_hook,
)
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector as CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector as LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector as SignalConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader

__all__ = [
    "NEWEST_TORCH",
    "SUPPORTED",
    "is_untested_torch",
    "WEIGHT_AVERAGING",
    "CheckpointConnector",
    "DataFetcher",
    "FitLoop",
    "PrefetchDataFetcher",
    "ProcessedTracker",
    "Progress",
    "ResultCollection",
    "TrainingEpochLoop",
    "attach_loaders",
    "attached_trainer",
    "call_hooks",
    "checkpoint_connector",
    "load_loader_states",
    "DDPSettings",
    "ddp_settings",
    "logger_connector",
    "metric_name",
    "only_iterator",
    "set_run_of_logger",
    "received_sigterm",
    "require_names",
    "set_callback_metrics",
    "set_validation_source",
    "share_data_source",
    "tensor_parallel_size",
    "training_source",
    "signal_connector",
]

WEIGHT_AVERAGING: tuple[type[pl.Callback], ...] = tuple(
    getattr(stock, name) for name in ("WeightAveraging",) if hasattr(stock, name)
)
"""Lightning's callback that trains with averages next to the weights; since 2.6."""

SUPPORTED = {"lightning": "lightning>=2.5.6,<2.7", "torch": "torch>=2.9"}
"""The releases that genlight's own requirements name."""

NEWEST_TORCH = "2.15"
"""The newest release that the tests have passed on; a later one is used with a warning."""


def is_untested_torch() -> bool:
    """Whether torch is later than what was tested; a development build of the next release is."""
    installed, tested = ([int(part) for part in each.split(".")[:2]] for each in (version("torch"), NEWEST_TORCH))
    return installed > tested


def require_names(package: Literal["lightning", "torch"], owner: type, *names: str) -> None:
    """Make sure that `owner` has attributes.

    Args:
        package: Whose class it is.
        owner: The class.
        names: The attributes: of the class, or those that its constructor sets or that it declares.

    Raises:
        ImportError: It lacks some; names the release that is installed, and those to install.
    """
    code = getattr(inspect.unwrap(vars(owner).get("__init__", owner)), "__code__", None)
    set_by_constructor = {*getattr(code, "co_names", ()), *vars(owner).get("__annotations__", ())}
    missing = [name for name in names if not hasattr(owner, name) and name not in set_by_constructor]
    if missing:
        raise ImportError(
            f"{package} {version(package)} has no {owner.__name__}.{', '.join(missing)}, which genlight uses; "
            f"install a release that it supports: {SUPPORTED[package]}"
        )


_USED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        FitLoop,
        (
            *("setup_data", "on_run_start", "on_run_end", "on_advance_start", "advance", "on_advance_end", "reset"),
            *("done", "skip", "teardown", "reset_restart_stage", "restarted_mid_epoch", "_data_source"),
            *("_load_combined_loader_states", "_combined_loader_states_to_load", "_combined_loader"),
            *("_warn_if_modules_in_eval_mode", "_data_fetcher"),
        ),
    ),
    (
        TrainingEpochLoop,
        (
            *("on_run_start", "on_advance_end", "on_iteration_done", "reset", "run", "done", "global_step"),
            *("update_restart_stage", "on_save_checkpoint", "on_load_checkpoint", "_is_training_done"),
            *("_is_validation_done", "_save_loggers_on_train_batch_end", "_batches_that_stepped", "_results"),
        ),
    ),
    (Loop, ("_restarting", "_resuming_from_checkpoint", "_loaded_from_state_dict", "restarting")),
    (EvaluationLoop, ("_data_source",)),
    (PrefetchDataFetcher, ("__next__", "setup", "prefetch_batches")),
    (
        CheckpointConnector,
        (
            *("_parse_ckpt_path", "resume_start", "restore_model", "restore_precision_plugin_state"),
            *("restore_optimizers_and_schedulers", "_loaded_checkpoint", "_ckpt_path"),
        ),
    ),
    (SignalConnector, ("register_signal_handlers", "teardown", "received_sigterm")),
    (
        LoggerConnector,
        (
            *("on_batch_end", "update_train_step_metrics", "_callback_metrics", "_progress_bar_metrics"),
            *("_logged_metrics", "_first_loop_iter"),
        ),
    ),
    (CombinedLoader, ("_load_state_dicts", "_iterator")),
    (
        pl.Trainer,
        ("_signal_connector", "_logger_connector", "_data_connector", "_checkpoint_connector", "received_sigterm"),
    ),
    (pl.LightningModule, ("_trainer", "_current_fx_name")),
    (HyperparametersMixin, ("_log_hyperparams",)),
    (
        DDPStrategy,
        (
            "_ddp_comm_hook",
            "_ddp_comm_state",
            "_ddp_comm_wrapper",
            "_model_averaging_period",
            "_start_method",
            "_ddp_kwargs",
        ),
    ),
    (ModelParallelStrategy, ("_tensor_parallel_size",)),
    (WandbLogger, ("_wandb_init", "_experiment", "_id", "_prefix")),
    (MLFlowLogger, ("_run_id", "_initialized", "_prefix")),
)

for _owner, _names in _USED:
    require_names("lightning", _owner, *_names)


def received_sigterm(trainer: pl.Trainer) -> bool:
    """The flag behind the property ``trainer.received_sigterm``."""
    return trainer._signal_connector.received_sigterm


def signal_connector(trainer: pl.Trainer) -> SignalConnector:
    """The part that installs Lightning's own signal handlers, and puts back those that it found."""
    return trainer._signal_connector


def checkpoint_connector(trainer: pl.Trainer) -> CheckpointConnector:
    """The part that restores a checkpoint."""
    return trainer._checkpoint_connector


def load_loader_states(loader: CombinedLoader, states: list[dict[str, Any]]) -> None:
    """Have the loaders that keep a state go on from these."""
    loader._load_state_dicts(states)


def only_iterator(loader: CombinedLoader) -> Iterator[Any]:
    """The iterator of the one loader that `loader` combines, once it was asked for one."""
    assert loader._iterator is not None
    iterator: Iterator[Any] = loader._iterator.iterators[0]
    return iterator


def call_hooks(trainer: pl.Trainer, name: str, *args: Any) -> Any:
    """Call a hook of all callbacks, the module and the strategy as Lightning does, under its profiler's names.

    Returns:
        What the module's hook returned.
    """
    _call_callback_hooks(trainer, name, *args)
    response = _call_lightning_module_hook(trainer, name, *args)
    if name == "on_train_batch_start":
        _call_strategy_hook(trainer, name, *args)
    return response


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """The trainer that `module` is attached to; its public property raises where there is none."""
    return module._trainer


def set_callback_metrics(trainer: pl.Trainer, callback: dict[str, Any], progress_bar: dict[str, Any]) -> None:
    """Leave metrics where monitors and progress bars look outside of a step that logs them."""
    connector = trainer._logger_connector
    connector._callback_metrics.update(callback)
    connector._progress_bar_metrics.update(progress_bar)


def attach_loaders(trainer: pl.Trainer, module: pl.LightningModule, **loaders: Any) -> None:
    """Have ``trainer.validate`` and ``trainer.test`` use these loaders, named as their arguments are."""
    trainer._data_connector.attach_dataloaders(module, **loaders)


def set_validation_source(trainer: pl.Trainer, loader: Any) -> None:
    """Have the validations within a training use this loader."""
    trainer.fit_loop.epoch_loop.val_loop._data_source.instance = loader


def training_source(trainer: pl.Trainer) -> Any:
    """The source of data that ``fit`` was given: a loader, a data module, or the module that makes its own batches."""
    return trainer.fit_loop._data_source.instance


def share_data_source(loop: FitLoop, other: FitLoop) -> None:
    """Have `loop` train on what `other` was given."""
    loop._data_source = other._data_source


def logger_connector(trainer: pl.Trainer) -> LoggerConnector:
    """The part that takes over the values that a step logs."""
    return trainer._logger_connector


@dataclass(frozen=True)
class DDPSettings:
    """Settings of a `DDPStrategy` that have no public name."""

    start_method: str | None
    communication_hook: Any
    communication_state: Any
    communication_wrapper: Any
    model_averaging_period: int | None
    ddp_arguments: Mapping[str, Any]
    """The arguments that are meant for ``DistributedDataParallel``."""


def ddp_settings(strategy: DDPStrategy) -> DDPSettings:
    """How `strategy` starts its processes, and what it does with gradients."""
    return DDPSettings(
        start_method=strategy._start_method,
        communication_hook=strategy._ddp_comm_hook,
        communication_state=strategy._ddp_comm_state,
        communication_wrapper=strategy._ddp_comm_wrapper,
        model_averaging_period=strategy._model_averaging_period,
        ddp_arguments=strategy._ddp_kwargs,
    )


def tensor_parallel_size(strategy: ModelParallelStrategy) -> int | str:
    """Over how many ranks `strategy` splits layers."""
    return strategy._tensor_parallel_size


def set_run_of_logger(logger: WandbLogger | MLFlowLogger, run_id: str | None) -> bool:
    """Have a logger that has made no run yet use the run `run_id`; None lets it make one, whatever it was given before.

    Returns:
        Whether it does; False where it was configured with another one.
    """
    if isinstance(logger, MLFlowLogger):
        if run_id is not None and logger._run_id not in (None, run_id):
            return False
        logger._run_id, logger._initialized = run_id, False
        return True
    if logger._experiment is not None:  # it was given one
        return bool(logger._experiment.id == run_id)
    if run_id is not None and logger._wandb_init["id"] not in (None, run_id):
        return False
    logger._id = logger._wandb_init["id"] = run_id
    return True


def metric_name(logger: WandbLogger | MLFlowLogger, name: str) -> str:
    """The name of the metric `name` in a logger's run."""
    prefixed = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}" if logger._prefix else name
    return re.sub("[^a-zA-Z0-9_/. -]+", "", prefixed) if isinstance(logger, MLFlowLogger) else prefixed
