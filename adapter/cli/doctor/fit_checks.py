"""What ``genlight doctor`` finds about the configuration of a fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from ....callbacks.checkpoint.ownership import checkpoint_files
from ...contract.exceptions import GenlightError
from ...job.spec import DatasetSpec
from ...module.module import ContractModule
from ...module.plugin_loading import misspelled_hooks, signature_faults
from ...module.supported import check_trainer_arguments
from ...plumbing.finding import Finding
from ...run.artifact_dirs import directory_fault
from ..config_files import configuration_fault
from ..configured_fit import ConfiguredFit, parse_configuration
from ..lightning_cli import UnusableConfigurationError, checkpoints_of
from .local_checks import check_dataset, check_sharding

__all__ = ["diagnose_fit"]


def diagnose_fit(path: str) -> Iterator[Finding]:
    """Every finding about the LightningCLI configuration `path`, whose objects are built; nothing is trained."""
    fault = configuration_fault(path)
    if fault is not None:
        yield Finding("configuration", "fail", fault)
        return
    try:
        fit = parse_configuration(path)
    except UnusableConfigurationError as error:
        yield Finding("configuration", "fail", str(error))
        return
    yield Finding("configuration", "pass", f"`genlight fit` can read {path}")
    if fit.dataset:
        known = {name: fit.dataset[name] for name in ("batch_size", "columns", "drop_last") if name in fit.dataset}
        yield from check_dataset(DatasetSpec(parquet_paths=tuple(fit.dataset["parquet_paths"]), **known))
    try:
        fit.build()
    except Exception as error:  # noqa: BLE001 -- a class of the user's may raise anything
        told = error if isinstance(error, (GenlightError, UnusableConfigurationError)) else None
        yield Finding("training", "fail", str(told or f"{type(error).__name__}: {error}"))
        return
    yield from _check_built(fit)


def _check_built(fit: ConfiguredFit) -> Iterator[Finding]:
    if isinstance(fit.model, ContractModule):
        plugin, name = fit.model.plugin, type(fit.model.plugin).__name__
        faults = signature_faults(plugin)
        yield Finding("trainer", "fail" if faults else "pass", "; ".join(faults) or f"{name}, with all hooks")
        yield from (Finding("trainer", "warn", misspelled) for misspelled in misspelled_hooks(plugin))
        try:
            check_trainer_arguments(fit.trainer)
        except (GenlightError, MisconfigurationException) as error:
            yield Finding("training", "fail", str(error))
        else:
            yield Finding("training", "pass", "Lightning's trainer can host a trainer class")
            yield from check_sharding(fit.trainer)
    else:
        yield Finding("model", "pass", f"{type(fit.model).__name__}, a LightningModule")
    directory = checkpoints_of(fit.trainer)
    if directory is None:
        yield Finding(
            "checkpoints", "warn", "none are kept that `--resume auto` finds; add genlight.callbacks.Checkpoint"
        )
        return
    yield from _check_directory(directory)


def _check_directory(directory: Path) -> Iterator[Finding]:
    fault = directory_fault("dirpath", directory, "Choose another.", create=False)
    if fault:
        yield Finding("checkpoints", "fail", fault)
    elif checkpoint_files(directory):
        yield Finding(
            "checkpoints",
            "warn",
            f"{directory} holds checkpoints already: `genlight fit` starts with --resume auto, or --resume never",
        )
    else:
        yield Finding("checkpoints", "pass", f"go to {directory}")
