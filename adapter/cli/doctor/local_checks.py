"""What ``genlight doctor`` looks at on this machine; nothing is created, trained or sent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....callbacks.checkpoint.format.layout import is_record_of_callback, record_paths
from ....callbacks.checkpoint.ownership import checkpoint_files
from ....callbacks.stop.sources import cancel_file_is_set
from ....reporters.uploads.targets import target_fault
from ...contract.exceptions import ContractError, InputError, StartupContractError
from ...inputs.local import parquet_files
from ...job.config import RunConfig
from ...job.spec import DatasetSpec
from ...module.plugin_loading import find_trainer, misspelled_hooks, on_sys_path
from ...plumbing.finding import Finding, Level
from ...plumbing.text import size_text
from ...plumbing.urls import has_scheme, safe_url
from ...run.artifact_dirs import artifact_dir_faults, untrusted_dirs
from ...run.artifacts_lock import lock_holder
from ...run.preflight import prepare_training
from ...run.resume import decide_start

__all__ = [
    "asks_for_devices",
    "check_artifacts",
    "check_checkpoints",
    "check_dataset",
    "check_devices",
    "check_sharding",
    "check_stop",
    "check_targets",
    "check_trainer",
    "check_training",
]

LITTLE_SPACE_BYTES = 1 << 30
FILES_OPENED = 16
"""Parquet files whose schema is read; more would take longer than anybody waits for a doctor."""


def check_artifacts(paths: Mapping[str, Path], *, resumes: bool, shared: bool = False) -> Iterator[Finding]:
    """Directories, space, other runs, and checkpoints that the run would refuse to overwrite."""
    faults = ([] if shared else untrusted_dirs(paths)) or artifact_dir_faults(paths, create=False)
    yield from (Finding("artifacts", "fail", f"startup.invalid_artifact_paths: {fault}") for fault in faults)
    if faults:
        return
    root = paths["artifacts_dir"]
    free = shutil.disk_usage(_nearest_existing(root)).free
    level: Level = "warn" if free < LITTLE_SPACE_BYTES else "pass"
    yield Finding("artifacts", level, f"{root} can be written, {size_text(free)} free")
    holder = lock_holder(root)
    if holder:
        yield Finding("artifacts", "fail", f"startup.artifacts_in_use: {root} is in use by a live run ({holder})")
    named = filter(is_record_of_callback, record_paths(paths["checkpoints_dir"]))
    records = sorted({*named, *checkpoint_files(paths["checkpoints_dir"])})
    if records and not resumes:
        yield Finding(
            "checkpoints",
            "fail",
            f"startup.artifacts_in_use: {paths['checkpoints_dir']} holds checkpoints already ({records[-1].name}). "
            "Set `resume_from_latest`, choose another directory, or run with --fresh.",
        )
    elif records:
        yield Finding("checkpoints", "pass", f"{len(records)} to resume from, the last of them {records[-1].name}")


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_dataset(dataset: DatasetSpec) -> Iterator[Finding]:
    """The Parquet files on this machine, and whether they have the columns that the job asks for."""
    files: list[Path] = []
    for text in dataset.parquet_paths:
        if has_scheme(text):
            yield Finding("dataset", "warn", f"{safe_url(text)} is not checked: the run reads it in place")
            continue
        try:
            files += parquet_files(text)
        except InputError as fault:
            yield Finding("dataset", "fail", str(fault))
    rows = 0
    for file in files[:FILES_OPENED]:
        problem, count = _look_into(file, dataset)
        rows += count
        if problem:
            yield Finding("dataset", "fail", problem)
    if files and rows == 0 and len(files) <= FILES_OPENED and not any(map(has_scheme, dataset.parquet_paths)):
        yield Finding("dataset", "fail", f"no rows in {', '.join(map(str, files))}")
    elif files:
        size = sum(file.stat().st_size for file in files)
        counted = f", {rows:,} rows" if len(files) <= FILES_OPENED else ""
        yield Finding(
            "dataset", "pass", f"{len(files)} Parquet file{'s' * (len(files) > 1)}, {size_text(size)}{counted}"
        )
        if counted and not dataset.filters and not any(map(has_scheme, dataset.parquet_paths)):
            yield from _check_batch_size(dataset, rows)


def _check_batch_size(dataset: DatasetSpec, rows: int) -> Iterator[Finding]:
    """Of one rank, since a job need not say how many there are."""
    if rows < dataset.batch_size:
        yield Finding(
            "dataset",
            "fail" if dataset.drop_last else "warn",
            f"`batch_size` is {dataset.batch_size}, and there are {rows:,} rows: no batch is full",
        )
    elif rows % dataset.batch_size:
        last = "is left out" if dataset.drop_last else "is smaller"
        yield Finding(
            "dataset",
            "pass",
            f"the last batch of an epoch has {rows % dataset.batch_size} of {dataset.batch_size} rows on one rank, and "
            f"{last}",
        )


def check_targets(targets: Sequence[str]) -> Iterator[Finding]:
    """Whether this machine knows how to reach further destinations of uploads; none of them is asked."""
    for fault in filter(None, map(target_fault, targets)):
        yield Finding("uploads", "fail", f"`uploads.targets`: {fault}")


def check_stop(config: RunConfig) -> Iterator[Finding]:
    """What would stop the run before its first step."""
    if config.canceled:
        yield Finding("stop", "warn", "`TRAINER_CANCELLED` is set: the run stops before its first step")
    if config.cancel_file is not None and cancel_file_is_set(config.cancel_file):
        yield Finding(
            "stop", "warn", f"the cancel file {config.cancel_file} is there: the run stops before its first step"
        )


def _look_into(file: Path, dataset: DatasetSpec) -> tuple[str | None, int]:
    """What is wrong with a Parquet file, and how many rows it has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ...feed.filters import as_expression, error_of

    try:
        metadata = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        return f"The file {str(file)!r} is not readable Parquet: {error}", 0
    schema = metadata.schema.to_arrow_schema()
    missing = [name for name in dataset.columns or () if name not in schema.names]
    if missing:
        text = f"{str(file)!r} has no column {', '.join(missing)}. It has {', '.join(schema.names)}."
        return text, metadata.num_rows
    expression = as_expression(dataset.filters)
    fault = None if expression is None else error_of(expression, schema)
    return fault and f"{str(file)!r}: {fault}", metadata.num_rows


def check_trainer(import_path: str, search_path: Sequence[str | os.PathLike[str]]) -> Iterator[Finding]:
    """Whether the trainer can be imported and has all hooks; its constructor is not called."""
    try:
        with on_sys_path(search_path):
            target = find_trainer(import_path)
    except ContractError as fault:
        yield Finding("trainer", "fail", f"startup.invalid_trainer: {fault}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- a module may raise anything while it is imported
        kind = type(error).__name__
        yield Finding("trainer", "fail", f"startup.invalid_trainer: importing {import_path!r} raised {kind}: {error}")
    else:
        name = getattr(target, "__qualname__", type(target).__qualname__)
        yield Finding("trainer", "pass", f"{import_path} is {name}, with all hooks")
        yield from (Finding("trainer", "warn", misspelled) for misspelled in misspelled_hooks(target))


def check_checkpoints(config: RunConfig) -> Iterator[Finding]:
    """What a run that resumes would start from, and the broken checkpoints that it would pass over."""
    try:
        start = decide_start(config)
    except (StartupContractError, InputError) as error:
        yield Finding("checkpoints", "fail", str(error))
        return
    yield from (Finding("checkpoints", "warn", warning) for warning in start.warnings)
    if start.is_finished:
        yield Finding("checkpoints", "pass", f"the run has completed at step {start.finished_step}; nothing to train")
    elif start.record is not None:
        yield Finding(
            "checkpoints", "pass", f"the run goes on after step {start.record.step}, from {start.record.path}"
        )


def check_training(config: RunConfig) -> Iterator[Finding]:
    """What the run would refuse once it has loaded the trainer class, which can be imported; it is not constructed."""
    try:
        with on_sys_path([config.spec_dir, Path.cwd()]):
            target = find_trainer(config.trainer)
            trainer, _ = prepare_training(config, target, brings_data=bool(config.inputs.dataset_parquet_refs))
    except StartupContractError as error:
        yield Finding("training", "fail", str(error))
    else:
        yield Finding("training", "pass", "the hooks take their arguments, and Lightning takes the job's")
        yield from check_sharding(trainer)


def check_sharding(trainer: Any) -> Iterator[Finding]:
    """What FSDP 2 needs and refuses, where a trainer of Lightning's shards by it."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from ...gradients.fsdp.refused import needs

    if isinstance(trainer.strategy, ModelParallelStrategy):
        yield Finding("sharding", "pass", needs())


def asks_for_devices(lightning: Mapping[str, Any]) -> bool:
    """Whether a machine could lack what the ``lightning`` block asks for; where not, torch need not be loaded."""
    accelerator = lightning.get("accelerator", "auto")
    return accelerator != "cpu" and (accelerator != "auto" or _wanted_devices(lightning.get("devices", "auto")) > 0)


def check_devices(lightning: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether this machine has the devices that the job's ``lightning`` block asks for."""
    import torch

    from ....callbacks.lightning_internals import NEWEST_TORCH, is_untested_torch

    if is_untested_torch():
        yield Finding(
            "torch", "warn", f"torch {torch.__version__} is later than {NEWEST_TORCH}, the newest that was tested"
        )
    cuda, mps = torch.cuda.device_count(), torch.backends.mps.is_available()
    names = [torch.cuda.get_device_name(index) for index in range(cuda)]
    found = ", ".join(names) if names else "one Apple GPU" if mps else "no GPU"
    accelerator = lightning.get("accelerator", "auto")
    wanted = _wanted_devices(lightning.get("devices", "auto"))
    on_gpu = accelerator in ("gpu", "cuda", "mps") or (accelerator == "auto" and (cuda or mps))
    have = {"cuda": cuda, "mps": int(mps)}.get(str(accelerator), cuda or int(mps))
    if on_gpu and have == 0:
        yield Finding("devices", "fail", f"the job asks for accelerator {accelerator!r}, and torch finds {found} here")
    elif on_gpu and wanted > have:
        yield Finding("devices", "fail", f"the job asks for {wanted} devices, and torch finds {found} here")
    else:
        yield Finding("devices", "pass", f"torch {torch.__version__}: {found}, {os.cpu_count()} CPU cores")


def _wanted_devices(devices: Any) -> int:
    """How many devices an argument asks for at least; 0 when any number will do."""
    if isinstance(devices, int) and not isinstance(devices, bool):
        return max(devices, 0)
    if isinstance(devices, list):
        return 1 + max((index for index in devices if isinstance(index, int)), default=-1)
    return int(devices) if isinstance(devices, str) and devices.isdecimal() else 0
