"""The one place where a job becomes Lightning objects.

`lightning_config` says in LightningCLI's own terms what a job stands for; ``genlight run`` makes the objects from it,
and ``genlight run --print_config`` prints it for ``genlight fit --config``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import msgspec
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException

from ..cluster.placement import placed_by_launcher
from ..contract.exceptions import StartupContractError
from ..plumbing.redaction import text_of
from ..plumbing.text import as_list
from .config import RunConfig
from .parser_errors import root_cause, shortened
from .trainer_arguments import trainer_arguments

__all__ = ["epochs_of", "instantiate", "instantiate_alone", "lightning_config", "make_data"]

_LISTS = ("callbacks", "logger", "plugins")
"""Trainer arguments of which a job's own entries come after ours."""
_VALIDATION = ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches")
"""Trainer arguments by which a job asks Lightning to validate; without them only its `validate` evaluates."""
_LEAVES_SOMETHING = ("callbacks", "logger", "profiler", "default_root_dir", "limit_train_batches", *_VALIDATION)
"""Trainer arguments that a training without callbacks and results does not take over."""


def lightning_config(
    config: RunConfig, *, parquet_paths: Sequence[str] = (), model_handles: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The LightningCLI configuration that a job stands for: ``trainer``, ``model`` and ``data``.

    Args:
        config: The job.
        parquet_paths: Data files that its inputs brought here; otherwise those that it names.
        model_handles: What its inputs brought here for the trainer.
    """
    data = _data(config, parquet_paths)
    return {
        "trainer": _trainer(config),
        "model": {
            "class_path": "genlight.adapter.ContractModule",
            "init_args": {
                "plugin": config.trainer,
                "job": dataclasses.asdict(config.job),
                "model_handles": dict(model_handles or {}),
                **({"keep_on_resume": list(config.resume.keep)} if config.resume.keep else {}),
            },
        },
        **({} if data is None else {"data": data}),
    }


def _trainer(config: RunConfig) -> dict[str, Any]:
    ours, theirs = _our_arguments(config), _their_arguments(config)
    lists = {name: ours.get(name, []) + _listed(theirs.get(name)) for name in _LISTS}
    return {**ours, **theirs, **{name: entries for name, entries in lists.items() if entries}}


def _their_arguments(config: RunConfig) -> Mapping[str, Any]:
    """The job's own ``lightning`` block, in words that Lightning takes.

    For a sharded model it refuses ``"16-mixed"``, since it cannot unscale shards itself, but takes the plugin that this
    stands for. `ContractModule` does unscale them.
    """
    theirs = config.lightning
    strategy = theirs.get("strategy")
    name = str(strategy.get("class_path") if isinstance(strategy, Mapping) else strategy).rpartition(".")[2]
    if name not in ("ModelParallelStrategy", "FSDP2Strategy") or str(theirs.get("precision")) not in ("16", "16-mixed"):
        return theirs
    from ..plumbing.devices import accelerator

    here = None if theirs.get("accelerator") == "cpu" else accelerator()
    device = "cpu" if here is None else here.type
    plugin = _class("lightning.pytorch.plugins.MixedPrecision", precision="16-mixed", device=device)
    rest = {name: value for name, value in theirs.items() if name != "precision"}
    return {**rest, "plugins": [*_listed(theirs.get("plugins")), plugin]}


def _our_arguments(config: RunConfig) -> dict[str, Any]:
    """Arguments of the Lightning trainer that follow from the job; its ``lightning`` block may say otherwise."""
    return {
        "max_steps": config.job.max_steps,
        "max_epochs": epochs_of(config),
        "default_root_dir": str(config.artifacts_dir),
        "log_every_n_steps": config.job.metric_every or 50,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        **({} if any(name in config.lightning for name in _VALIDATION) else {"limit_val_batches": 0}),
        "callbacks": _callbacks(config),
        "logger": [
            _class(
                "genlight.reporters.EventLogger",
                path=config.events_path.name,
                run_id=config.run_id,
                save_dir=str(config.events_path.parent),
            )
        ],
    }


def _listed(value: Any) -> list[Any]:
    return (
        [] if isinstance(value, bool) else as_list(value)
    )  # true and false are Lightning's words for its own, or none


def epochs_of(config: RunConfig) -> int:
    """Passes over the data; -1 is Lightning's word for no limit."""
    if config.mock_batches is not None:
        return 1
    return -1 if config.dataset is None or config.dataset.epochs is None else config.dataset.epochs


def _callbacks(config: RunConfig) -> list[dict[str, Any]]:
    """The standard callbacks as the job's `callbacks` changes them, then those that it adds."""
    chosen = _standard_arguments(config)
    for name, change in config.callbacks.items():
        if change is False:
            chosen.pop(name, None)
        else:
            chosen[name] = {**chosen.get(name, {}), **(change if isinstance(change, dict) else {})}
    return [_class(f"genlight.callbacks.{name}", **arguments) for name, arguments in chosen.items()]


def _standard_arguments(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The callbacks that a job runs without naming them, in order, with their arguments."""
    checkpoints = config.checkpoints
    given = {
        "StopRequests": {
            "cancel_file": None if config.cancel_file is None else str(config.cancel_file),
            "max_runtime_s": config.max_runtime_s,
            "canceled": config.canceled,
        },
        "Evaluate": _plain(config.validate),
        "LogMetrics": {"every_n_steps": config.metric_every},
        "WriteSamples": {
            "directory": str(config.samples_dir),
            "every_n_steps": config.sample_every,
            "requests": [
                {name: value for name, value in _plain(request).items() if value not in (None, "")}
                for request in config.sample_prompts
            ],
            "seed": config.sample_seed,
        },
        "JobProgress": {},
        "Goodput": {},
        "SystemMonitor": {},
        "Recover": _plain(config.recover),
        "WatchNonfinite": {"policy": config.on_nonfinite, "every_n_steps": config.metric_every or 50},
        "WatchHangs": {"directory": str(config.artifacts_dir / "hangs")},
        "Checkpoint": {
            "dirpath": str(config.checkpoints_dir),
            **_plain(checkpoints),
            "keep_last": checkpoints.keep_last or None,
        },
    }
    unwanted = {"Evaluate": config.validate is None, "Recover": config.recover is None}
    unwanted["WatchNonfinite"] = config.recover is not None
    return {name: arguments for name, arguments in given.items() if not unwanted.get(name)}


def _plain(block: msgspec.Struct | None) -> dict[str, Any]:
    """A block as keyword arguments that YAML can write."""
    given = {} if block is None else dict(msgspec.to_builtins(block))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def make_data(config: RunConfig, parquet_paths: Sequence[str] = ()) -> pl.LightningDataModule | None:
    """The data module of a job, made anew; None where it names no data.

    Args:
        config: The job.
        parquet_paths: Data files that its inputs brought here; otherwise those that it names.

    Raises:
        StartupContractError: ``startup.invalid_job_spec``: `dataset` has options that cannot be used, such as a
            `collate` that cannot be imported.
    """
    described = _data(config, parquet_paths)
    try:
        made: pl.LightningDataModule | None = None if described is None else _make(described)
    except (ValueError, TypeError) as error:
        raise StartupContractError(
            "startup.invalid_job_spec", f"The `dataset` of the job cannot be used: {text_of(error)}"
        ) from error
    return made


def _data(config: RunConfig, parquet_paths: Sequence[str]) -> dict[str, Any] | None:
    """The data module of a job; None where it names no data, as with a trainer that collects its own."""
    if config.mock_batches is not None:
        return _class("genlight.adapter.MockDataModule", batches=list(config.mock_batches))
    dataset = config.dataset
    paths = list(parquet_paths) or (list(dataset.parquet_paths) if dataset is not None else [])
    if dataset is None or not paths:
        return None
    options = {name: value for name, value in _plain(dataset).items() if value is not None and name != "epochs"}
    return _class("genlight.adapter.ArrowDataModule", **{**options, "parquet_paths": paths})


def _class(class_path: str, /, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def instantiate(
    config: RunConfig, *, parquet_paths: Sequence[str] = ()
) -> tuple[pl.Trainer, pl.LightningDataModule | None]:
    """The Lightning trainer and the data module of a job; its module is made by the caller, who has loaded its class.

    Returns:
        The trainer, and None for the data where the job names none.

    Raises:
        StartupContractError: ``startup.invalid_job_spec``: the ``lightning`` block has arguments, or `dataset` has
            options, that cannot be used.
    """
    data = make_data(config, parquet_paths)
    with _lightning_errors():
        theirs = _instantiated_by_jsonargparse(_their_arguments(config))
        ours = _our_arguments(config)
        theirs = {**theirs, **placed_by_launcher(theirs)}
        lists = {name: [_make(entry) for entry in ours.pop(name, [])] + _listed(theirs.get(name)) for name in _LISTS}
        return pl.Trainer(**{**ours, **theirs, **{name: made for name, made in lists.items() if made}}), data


def instantiate_alone(config: RunConfig, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
    """The Lightning trainer of a job for a training that leaves nothing behind, with `callbacks` and no others.

    Devices, strategy, precision and plugins are the job's; its callbacks, loggers and validation are left out.

    Raises:
        StartupContractError: ``startup.invalid_job_spec``: the ``lightning`` block has arguments that cannot be
            used.
    """
    ours = {name: value for name, value in _our_arguments(config).items() if name not in ("callbacks", "logger")}
    given = {name: value for name, value in _their_arguments(config).items() if name not in _LEAVES_SOMETHING}
    with _lightning_errors():
        theirs = _instantiated_by_jsonargparse(given)
        theirs = {**theirs, **placed_by_launcher(theirs)}
        alone = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 0, "callbacks": list(callbacks)}
        return pl.Trainer(**{**ours, **theirs, **alone})


@contextlib.contextmanager
def _lightning_errors() -> Iterator[None]:
    try:
        yield
    except (ArgumentError, ValueError, TypeError, ImportError, MisconfigurationException) as error:
        raise StartupContractError(
            "startup.invalid_job_spec", f"The `lightning` block of the job cannot be used: {root_cause(error)}"
        ) from error


def _instantiated_by_jsonargparse(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Trainer arguments as a job gives them, with a class path and its arguments turned into an instance."""
    if not arguments:
        return {}
    arguments = copy.deepcopy(dict(arguments))  # jsonargparse puts objects of its own into what it parses
    parser = ArgumentParser(exit_on_error=False)
    # Reading the types of the other forty takes longer than making the trainer.
    others = set(trainer_arguments()).difference(arguments)
    parser.add_class_arguments(pl.Trainer, "lightning", instantiate=False, skip=others)
    errors = [error for name, value in arguments.items() if (error := _argument_error(parser, name, value))]
    if errors:
        raise ValueError("\n  - ".join(["", *errors]) if len(errors) > 1 else errors[0])
    made = parser.instantiate(parser.parse_object({"lightning": dict(arguments)})).lightning
    return {name: getattr(made, name) for name in arguments}


def _argument_error(parser: ArgumentParser, name: str, value: Any) -> str | None:
    """What is wrong with one argument; jsonargparse stops at the first that is."""
    try:
        parser.parse_object({"lightning": {name: value}})
    except ArgumentError as error:
        return shortened(str(error))
    return None


def _make(described: Mapping[str, Any]) -> Any:
    """An instance of one of our own classes; jsonargparse would read the texts in its arguments as YAML once more."""
    module, _, name = described["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**described["init_args"])
