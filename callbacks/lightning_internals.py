"""All protected names of Lightning that genlight reads, overrides or assigns.

Each name is looked up when this module is imported. If a release of Lightning lacks one, a clear `ImportError` is
raised, instead of a later run that fails or trains wrong. A method that genlight overrides may exist but no longer be
called, so the tests of the loop run a fit under the lowest and the highest supported release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal

import lightning.pytorch as pl
import lightning.pytorch.callbacks as stock
from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger as FabricTensorBoardLogger
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher, _PrefetchDataFetcher as PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.progress import _ProcessedTracker as ProcessedTracker, _Progress as Progress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
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

# Lightning's classes under our names. Names defined below need no entry.
__all__ = ["CheckpointConnector", "DataFetcher", "FitLoop", "PrefetchDataFetcher", "ProcessedTracker", "Progress"]
__all__ += ["ResultCollection", "TrainingEpochLoop"]

WEIGHT_AVERAGING: type[pl.Callback] | tuple[()] = getattr(stock, "WeightAveraging", ())
"""Lightning's `WeightAveraging` callback (2.6 and later); an empty tuple in older versions."""

SUPPORTED = {"lightning": "lightning>=2.5.6,<2.7,!=2.6.2,!=2.6.3", "torch": "torch>=2.9"}
"""The releases in genlight's own requirements."""

NEWEST_TORCH = "2.15"
"""The newest release on which the tests have passed; a later one causes a warning."""


def is_untested_torch() -> bool:
    """Whether torch is newer than the tested releases; this includes development builds of the next release."""
    installed, tested = ([int(part) for part in each.split(".")[:2]] for each in (version("torch"), NEWEST_TORCH))
    return installed > tested


def require_names(package: Literal["lightning", "torch"], owner: type, *names: str) -> None:
    """Check that `owner` has attributes.

    Args:
        package: The package of the class.
        owner: The class.
        names: The attributes: class attributes, annotations, or attributes that the constructor sets.

    Raises:
        ImportError: Some are missing; the message names the installed release and the supported ones.
    """
    code = getattr(inspect.unwrap(vars(owner).get("__init__", owner)), "__code__", None)
    set_by_constructor = {*getattr(code, "co_names", ()), *vars(owner).get("__annotations__", ())}
    missing = [name for name in names if not hasattr(owner, name) and name not in set_by_constructor]
    if missing:
        raise ImportError(
            f"{package} {version(package)} has no {owner.__name__}.{', '.join(missing)}, which genlight uses; "
            f"install a supported release: {SUPPORTED[package]}"
        )


_USED: Mapping[type, str] = {
    FitLoop: "setup_data on_run_start on_run_end on_advance_start advance on_advance_end reset done skip teardown "
    "reset_restart_stage restarted_mid_epoch _data_source _load_combined_loader_states "
    "_combined_loader_states_to_load _combined_loader _warn_if_modules_in_eval_mode _data_fetcher",
    TrainingEpochLoop: "on_run_start on_advance_end on_iteration_done reset run done global_step update_restart_stage "
    "on_save_checkpoint on_load_checkpoint _is_training_done _is_validation_done _save_loggers_on_train_batch_end "
    "_batches_that_stepped _results",
    Loop: "_restarting _resuming_from_checkpoint _loaded_from_state_dict restarting",
    EvaluationLoop: "_data_source",
    PrefetchDataFetcher: "__next__ setup prefetch_batches",
    CheckpointConnector: "_parse_ckpt_path resume_start restore_model restore_precision_plugin_state "
    "restore_optimizers_and_schedulers _loaded_checkpoint _ckpt_path",
    SignalConnector: "register_signal_handlers teardown received_sigterm",
    LoggerConnector: "on_batch_end update_train_step_metrics _callback_metrics _progress_bar_metrics _logged_metrics",
    CombinedLoader: "_load_state_dicts _iterator _spec",
    pl.Trainer: "_signal_connector _logger_connector _data_connector _checkpoint_connector received_sigterm",
    pl.LightningModule: "_trainer _current_fx_name",
    HyperparametersMixin: "_log_hyperparams",
    DDPStrategy: "_ddp_comm_hook _ddp_comm_state _ddp_comm_wrapper _model_averaging_period _start_method _ddp_kwargs",
    ModelParallelStrategy: "_tensor_parallel_size",
    WandbLogger: "_wandb_init _experiment _id",
    MLFlowLogger: "_run_id _initialized",
    FabricCSVLogger: "_version",  # the bases of Lightning's loggers of the same names
    FabricTensorBoardLogger: "_version",
}

for _owner, _names in _USED.items():
    require_names("lightning", _owner, *_names.split())


received_sigterm: Callable[[pl.Trainer], bool] = attrgetter("_signal_connector.received_sigterm")
"""The flag behind the property ``trainer.received_sigterm``."""

signal_connector: Callable[[pl.Trainer], SignalConnector] = attrgetter("_signal_connector")
"""The part that installs Lightning's own signal handlers, and restores the earlier ones."""

checkpoint_connector: Callable[[pl.Trainer], CheckpointConnector] = attrgetter("_checkpoint_connector")
"""The part that restores a checkpoint."""

logger_connector: Callable[[pl.Trainer], LoggerConnector] = attrgetter("_logger_connector")
"""The part that collects the values that a step logs."""

logged_step: Callable[[pl.Trainer], int] = attrgetter("fit_loop.epoch_loop._batches_that_stepped")
"""The step at which Lightning's own loop logs the next metrics; the first batch is step 0."""
training_source: Callable[[pl.Trainer], Any] = attrgetter("fit_loop._data_source.instance")
"""The data source passed to ``fit``: a loader, a data module, or the module if it makes its own batches."""

attached_trainer: Callable[[pl.LightningModule], pl.Trainer | None] = attrgetter("_trainer")
"""The trainer that a module is attached to, or None; the public property raises if there is none."""

tensor_parallel_size: Callable[[ModelParallelStrategy], int | str] = attrgetter("_tensor_parallel_size")
"""Number of ranks over which a strategy splits layers."""


def choose_start(trainer: pl.Trainer, choose: Callable[[Any], Any]) -> None:
    """Have the fit that is starting load ``choose(path)`` in place of `path`; a path of None loads nothing."""
    connector = checkpoint_connector(trainer)
    vars(connector).pop("resume_start", None)
    start = connector.resume_start

    def resume_start(path: Any = None, **options: Any) -> None:
        del connector.resume_start
        start(choose(path), **options)

    connector.resume_start = resume_start  # type: ignore[method-assign, assignment]


def trains_in_copies(trainer: pl.Trainer) -> bool:
    """Whether training runs in copies of this process, while this process only waits for them."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def load_loader_states(loader: CombinedLoader, states: list[dict[str, Any]]) -> None:
    """Load `states` into the loaders that have a state."""
    loader._load_state_dicts(states)


def batches_of_loaders(loader: CombinedLoader, batch: Any) -> list[Any]:
    """Return the parts of a `batch` of combined loaders, in the order of the loaders."""
    parts: list[Any] = loader._spec.flatten_up_to(batch)
    return parts


def only_iterator(loader: CombinedLoader) -> Iterator[Any]:
    """Return the iterator of the only loader in `loader`, whose iteration must have begun."""
    assert loader._iterator is not None
    iterator: Iterator[Any] = loader._iterator.iterators[0]
    return iterator


def call_hooks(trainer: pl.Trainer, name: str, *args: Any) -> Any:
    """Call a hook of all callbacks and of the module, timed by the profiler, as Lightning does.

    ``on_train_batch_start`` is also called on the strategy.

    Returns:
        The result of the module's hook.
    """
    _call_callback_hooks(trainer, name, *args)
    response = _call_lightning_module_hook(trainer, name, *args)
    if name == "on_train_batch_start":
        _call_strategy_hook(trainer, name, *args)
    return response


def logged_in_step(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the values that the last step of Lightning's own loop logged, on their devices."""
    results = trainer.fit_loop.epoch_loop._results
    return dict(results.metrics(on_step=True)["callback"]) if len(results) else {}


def set_callback_metrics(trainer: pl.Trainer, callback: dict[str, Any], progress_bar: dict[str, Any]) -> None:
    """Make metrics visible to monitors and progress bars when no step logs them."""
    connector = trainer._logger_connector
    connector._callback_metrics.update(callback)
    connector._progress_bar_metrics.update(progress_bar)


def attach_loaders(trainer: pl.Trainer, module: pl.LightningModule, **loaders: Any) -> None:
    """Set the loaders of ``trainer.validate`` and ``trainer.test``, named like the arguments of these methods."""
    trainer._data_connector.attach_dataloaders(module, **loaders)


def set_validation_source(trainer: pl.Trainer, loader: Any) -> None:
    """Set the loader of the validations during training."""
    trainer.fit_loop.epoch_loop.val_loop._data_source.instance = loader


def share_data_source(loop: FitLoop, other: FitLoop) -> None:
    """Have `loop` train on the data source of `other`."""
    loop._data_source = other._data_source


def ddp_settings(strategy: DDPStrategy) -> SimpleNamespace:
    """Return the private settings of `strategy`: how it starts processes and handles gradients."""
    return SimpleNamespace(
        start_method=strategy._start_method,
        communication_hook=strategy._ddp_comm_hook,
        communication_state=strategy._ddp_comm_state,
        communication_wrapper=strategy._ddp_comm_wrapper,
        model_averaging_period=strategy._model_averaging_period,
        ddp_arguments=strategy._ddp_kwargs,
    )


def set_run_of_logger(logger: WandbLogger | MLFlowLogger | CSVLogger | TensorBoardLogger, run_id: str | None) -> bool:
    """Have a logger that has not created a run yet use the run `run_id`; with None it creates a new one.

    The run of a logger that writes files is the folder of its ``version``.

    Returns:
        Whether it uses that run; False if it was configured with a different one.
    """
    if isinstance(logger, CSVLogger | TensorBoardLogger):
        logger._version = run_id if logger._version is None else logger._version
        return logger._version == run_id
    if isinstance(logger, MLFlowLogger):
        if run_id is not None and logger._run_id not in (None, run_id):
            return False
        logger._run_id, logger._initialized = run_id, False
        return True
    if logger._experiment is not None:  # the user passed an existing run as `experiment`
        return bool(logger._experiment.id == run_id)
    if run_id is not None and logger._wandb_init["id"] not in (None, run_id):
        return False
    logger._id = logger._wandb_init["id"] = run_id
    return True
