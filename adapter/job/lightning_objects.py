"""Make the Lightning objects of a job: the trainer and the data module. Nothing else makes them."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import msgspec
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy

from ... import callbacks as genlight_callbacks
from ...reporters.events.event_logger import EventLogger
from ..cluster.placement import launcher_arguments
from ..contract.exceptions import StartupContractError
from ..plumbing.devices import accelerator
from ..plumbing.redaction import safe_str
from ..plumbing.text import as_list, nearest
from .config import RunConfig
from .parser_errors import root_cause, shorten_error
from .spec import DatasetSpec
from .standard_callbacks import callbacks_of_job

_LISTS = ("callbacks", "logger", "plugins")
"""Trainer arguments that are lists: a job's own entries follow ours."""
_VALIDATION = ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches")
"""Trainer arguments that turn on Lightning's validation; without them only `validate` of the job evaluates."""
_IGNORED_ALONE = ("callbacks", "logger", "profiler", "default_root_dir", "limit_train_batches", *_VALIDATION)
"""Trainer arguments of a job that `instantiate_alone` ignores."""


def _our_arguments(config: RunConfig) -> dict[str, Any]:
    """Return arguments of the Lightning trainer that follow from the job; its ``lightning`` block overrides them."""
    return {
        "max_steps": config.job.max_steps,
        "max_epochs": epochs_of(config),
        "default_root_dir": str(config.artifacts_dir),
        "log_every_n_steps": config.job.metric_every or 50,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        **({} if any(name in config.lightning for name in _VALIDATION) else {"limit_val_batches": 0}),
    }


def _entries(value: Any) -> list[Any]:
    # For Lightning, true means its defaults and false means none.
    return [] if isinstance(value, bool) else as_list(value)


def epochs_of(config: RunConfig) -> int:
    """Return the number of passes over the data; -1 means no limit, as in Lightning."""
    if config.mock_batches is not None:
        return 1
    return -1 if config.dataset is None or config.dataset.epochs is None else config.dataset.epochs


def make_data(config: RunConfig, parquet_paths: Sequence[str] = ()) -> pl.LightningDataModule | None:
    """Make the data module of a job; None if it names no data.

    Args:
        config: The job.
        parquet_paths: Data files that the inputs fetched; by default the files that the job names.

    Raises:
        StartupContractError: ``startup.invalid_job_spec``: `dataset` has options that cannot be used, such as a
            `collate` that cannot be imported.
    """
    from ..feed import data_module

    dataset = config.dataset
    if config.mock_batches is not None:
        return data_module.MockDataModule(batches=list(config.mock_batches))
    if dataset is None:
        return None
    with _errors_of("The data"):
        # Files are not among the options of a data module, and neither are epochs, which the trainer counts.
        defaults = msgspec.to_builtins(DatasetSpec(parquet_paths=dataset.parquet_paths, epochs=dataset.epochs))
        changed = {name: value for name, value in msgspec.to_builtins(dataset).items() if value != defaults[name]}
        if config.data is not None:
            return data_module.FunctionDataModule(function=config.data, **changed)
        paths = list(parquet_paths or dataset.parquet_paths)
        return data_module.ArrowDataModule(parquet_paths=paths, **changed) if paths else None


def instantiate(
    config: RunConfig, *, parquet_paths: Sequence[str] = ()
) -> tuple[pl.Trainer, pl.LightningDataModule | None]:
    """Make the Lightning trainer and the data module of a job. The caller makes the LightningModule (`ContractModule`).

    Returns:
        The trainer and the data module; the latter is None if the job names no data.

    Raises:
        StartupContractError: ``startup.invalid_job_spec``: `lightning` or `callbacks` have arguments, or `dataset` has
            options, that cannot be used.
    """
    data = make_data(config, parquet_paths)
    callbacks = []
    for name, given in callbacks_of_job(config).items():
        with _errors_of(f"`callbacks.{name}`"):
            callbacks.append(getattr(genlight_callbacks, name)(**given))
    with _errors_of("The `lightning` block"):
        theirs = _instantiate_arguments(config.lightning)
        logger = EventLogger(config.events_path, run_id=config.run_id)
        ours = {**_our_arguments(config), "callbacks": callbacks, "logger": [logger]}
        lists = {name: [*ours.get(name, []), *_entries(theirs.get(name))] for name in _LISTS}
        return pl.Trainer(**{**ours, **theirs, **{name: made for name, made in lists.items() if made}}), data


def instantiate_alone(config: RunConfig, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
    """Make the Lightning trainer of a job for a training that writes nothing, with `callbacks` and no others.

    Devices, strategy, precision and plugins are the job's; its callbacks, loggers and validation are not used.

    Raises:
        StartupContractError: ``startup.invalid_job_spec``: the ``lightning`` block has arguments that cannot be
            used.
    """
    given = {name: value for name, value in config.lightning.items() if name not in _IGNORED_ALONE}
    with _errors_of("The `lightning` block"):
        alone = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 0, "callbacks": list(callbacks)}
        return pl.Trainer(**{**_our_arguments(config), **_instantiate_arguments(given), **alone})


@contextlib.contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """Turn an error within the block into one that names `what`, the part of the job that caused it."""
    try:
        yield
    except (ArgumentError, ValueError, TypeError, ImportError, MisconfigurationException) as error:
        text = f"{what} of the job cannot be used: {safe_str(root_cause(error))}"
        raise StartupContractError("startup.invalid_job_spec", text) from error


def _instantiate_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer arguments of a job with objects for its class paths, and with the launcher's placement."""
    known = inspect.signature(pl.Trainer).parameters.keys()
    parsed, errors = {}, []
    for name, value in copy.deepcopy(dict(given)).items():  # jsonargparse inserts its objects into the values it parses
        if name not in known:
            errors.append(f"`{name}`: there is no such argument.{nearest(name, known)}")
            continue
        # One parser for each argument, because a parser stops at its first error. Skipping the others saves time.
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(pl.Trainer, "lightning", instantiate=False, skip=known - {name})
        try:
            parsed[name] = parser, parser.parse_object({"lightning": {name: value}})
        except ArgumentError as error:
            errors.append(shorten_error(str(error)))
    if errors:
        raise ValueError("\n  - ".join(["", *errors]) if len(errors) > 1 else errors[0])
    made = {name: parser.instantiate(read).lightning[name] for name, (parser, read) in parsed.items()}
    if isinstance(made.get("strategy"), ModelParallelStrategy) and str(made.get("precision")) in ("16", "16-mixed"):
        # For sharded weights Lightning refuses this precision by name, because it cannot unscale their gradients. It
        # accepts the plugin, and `ContractModule` unscales them.
        here = None if made.get("accelerator") == "cpu" else accelerator()
        plugin = MixedPrecision("16-mixed", "cpu" if here is None else here.type)
        made = {**made, "precision": None, "plugins": [*_entries(made.get("plugins")), plugin]}
    return {**made, **launcher_arguments(made)}
