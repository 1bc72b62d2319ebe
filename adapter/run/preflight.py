"""The checks before a run trains; ``genlight doctor`` calls the same function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..contract.exceptions import StartupContractError
from ..job.config import RunConfig
from ..module.plugin_loading import optional_hook, signature_faults

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["check_plugin", "prepare_training"]


def prepare_training(
    config: RunConfig, plugin: Any, *, parquet_paths: Sequence[str] = (), brings_data: bool = False
) -> tuple[pl.Trainer, pl.LightningDataModule | None]:
    """The Lightning trainer and the data module of a job, whose trainer class and settings can be trained with.

    Args:
        config: The job.
        plugin: Its trainer class, or an instance of it.
        parquet_paths: Data files that its inputs brought to this machine.
        brings_data: Whether its inputs will bring such files.

    Returns:
        The trainer, and None for the data where the trainer class collects its own.

    Raises:
        StartupContractError: Hooks cannot be called, the job needs a hook that is not there, or its ``lightning``
            block has arguments that cannot be used here or with a trainer class, or does not fit the tasks of srun.
    """
    from ..cluster.slurm_environment import placement_fault
    from ..job.lightning_config import instantiate
    from ..module.supported import check_trainer_arguments

    check_plugin(config, plugin)
    trainer, data = instantiate(config, parquet_paths=parquet_paths)
    if data is None and not brings_data and optional_hook(plugin, "rollout") is None:
        raise StartupContractError(
            "startup.invalid_job_spec",
            "The job names no data, and its trainer has no `rollout`. Add `dataset.parquet_paths`, "
            "`inputs.dataset_parquet_refs` or `mock_batches`.",
        )
    check_trainer_arguments(trainer)
    fault = placement_fault(trainer)
    if fault is not None:
        raise StartupContractError("startup.invalid_job_spec", fault)
    return trainer, data


def check_plugin(config: RunConfig, plugin: Any) -> None:
    """Refuse a trainer class whose hooks cannot do what the job asks of them; needs neither torch nor Lightning.

    Raises:
        StartupContractError: ``startup.invalid_trainer``: hooks do not take their arguments;
            ``startup.invalid_job_spec``: the job has `validate`, and the trainer has no ``evaluate``.
    """
    wrong = signature_faults(plugin)
    if wrong:
        raise StartupContractError(
            "startup.invalid_trainer", f"{'; '.join(wrong)}. Give the hooks the parameters of the contract."
        )
    if config.validate is not None and optional_hook(plugin, "evaluate") is None:
        name = getattr(plugin, "__name__", type(plugin).__name__)
        raise StartupContractError(
            "startup.invalid_job_spec",
            f"{name} has no `evaluate(state, ctx)`. Add one, or leave `validate` out of the job.",
        )
