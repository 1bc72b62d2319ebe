"""Find the mistakes of a job without training, and show its settings and where each of them comes from.

Exit codes: 0 the job can start, 2 it cannot.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...callbacks.stop.sources import cancel_file_is_set
from ...reporters.uploads.destinations import target_fault
from ..contract.exceptions import InputError, StartupContractError
from ..inputs.local import checked_ref, parquet_files
from ..inputs.materialize import named_inputs
from ..inputs.refs import LocalRef
from ..job.config import RunConfig, read_run_config
from ..job.errors import ConfigErrors
from ..job.spec import DatasetSpec, all_keys
from ..module.plugin_loading import misspelled_hooks, on_sys_path
from ..plumbing.finding import Finding, Level
from ..plumbing.redaction import redact, without_secrets
from ..plumbing.text import size_text
from ..plumbing.urls import has_scheme, safe_url
from ..run.artifact_dirs import artifact_dir_faults
from ..run.artifacts_lock import lock_holder
from ..run.resume import decide_start
from ..run.training import imported_trainer, prepare_training
from .parser import add_overrides
from .terminal import aligned, say, say_finding

__all__ = ["add_arguments", "diagnose", "run"]

SOUND, FAULTY = 0, 2
LITTLE_SPACE_BYTES = 1 << 30
LONGEST_VALUE = 100
LOOPBACK = ("http://127.", "http://localhost:", "http://[::1]:")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="job spec (JSON); else `TRAINER_JOB_SPEC_PATH`",
    )
    add_overrides(parser, "set a field, as for `genlight run`")
    parser.add_argument(
        "--step", action="store_true", help="take one real step of the class on the first batch of the job's data"
    )
    parser.add_argument("--all", action="store_true", help="show the settings that hold by default too")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis and return the exit code: 0 when the job could start, 2 when it could not."""
    config, errors = read_run_config(spec_path=args.job, overrides=args.set)
    # Without a job file the table would hold defaults alone.
    table = _table(config, defaults=args.all) if config.given.readable else []
    findings = list(diagnose(config, errors))
    if args.step and not any(finding.level == "fail" for finding in findings):
        from ..check.one_step import one_step  # loads torch

        findings += one_step(config)
    return _report(findings, table, config.secrets)


def diagnose(config: RunConfig, errors: ConfigErrors) -> Iterator[Finding]:
    """Every finding about a job, whatever else is wrong with it; nothing is created, trained or sent.

    Args:
        config: What is known of the run.
        errors: What is known to be wrong with its settings.
    """
    sound = not errors.found
    if sound:
        yield Finding("settings", "pass", f"{config.spec_path} and environment are sound")
    yield from (Finding("settings", "fail", f"{error.code}: {error.text}") for error in errors.found)
    yield from (Finding("settings", "warn", warning) for warning in errors.warnings)
    yield from check_token(config)
    if config.run_id or config.source_of("artifacts_dir") != "default":
        yield from check_artifacts(config)
    if sound:
        yield from check_start(config)
        yield from check_stop(config)
    yield from check_targets(config)
    if config.dataset is not None:
        yield from check_dataset(config.dataset)
    about_trainer = list(check_trainer(config))
    # A job that cannot be used and asks for no devices need not wait for torch.
    about_devices = list(check_devices(config.lightning)) if sound or config.lightning else []
    yield from (*about_trainer, *about_devices)
    if sound and not any(finding.level == "fail" for finding in (*about_trainer, *about_devices)):
        yield from check_training(config)
    yield from check_inputs(config)


def check_token(config: RunConfig) -> Iterator[Finding]:
    """Who gets the token."""
    origins = sorted(config.token_origins)
    if config.capability_token is None:
        if origins:
            yield Finding("token", "warn", f"none is set; {', '.join(origins)} will be asked without one")
        return
    if not origins:
        yield Finding("token", "warn", "is set, but there is no origin that it would be sent to")
        return
    yield Finding("token", "pass", f"is sent to {', '.join(origins)} and nowhere else")
    for origin in origins:
        if origin.startswith("http://") and not origin.startswith(LOOPBACK):
            yield Finding("token", "warn", f"travels to {origin} without encryption; use https://")


def check_artifacts(config: RunConfig) -> Iterator[Finding]:
    """Directories, space and other runs."""
    faults = artifact_dir_faults(config, create=False)
    yield from (Finding("artifacts", "fail", f"startup.invalid_artifact_paths: {fault}") for fault in faults)
    if faults:
        return
    root = config.artifacts_dir
    free = shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
    level: Level = "warn" if free < LITTLE_SPACE_BYTES else "pass"
    yield Finding("artifacts", level, f"{root} can be written, {size_text(free)} free")
    holder = lock_holder(root)
    if holder:
        yield Finding("artifacts", "fail", f"startup.artifacts_in_use: {root} is in use by a live run ({holder})")


def check_start(config: RunConfig) -> Iterator[Finding]:
    """Report what the run would start from, the broken checkpoints it would pass over, and those in its way."""
    if config.inputs.resume_checkpoint_ref is not None:  # which the inputs bring
        return
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


def check_stop(config: RunConfig) -> Iterator[Finding]:
    """Report what would stop the run before its first step."""
    if config.canceled:
        yield Finding("stop", "warn", "`TRAINER_CANCELLED` is set: the run stops before its first step")
    if config.cancel_file_path is not None and cancel_file_is_set(config.cancel_file_path):
        yield Finding(
            "stop", "warn", f"the cancel file {config.cancel_file_path} is there: the run stops before its first step"
        )


def check_targets(config: RunConfig) -> Iterator[Finding]:
    """Whether this machine knows how to reach further destinations of uploads; none of them is asked."""
    for fault in filter(None, map(target_fault, config.uploads.targets)):
        yield Finding("uploads", "fail", f"`uploads.targets`: {fault}")


def check_inputs(config: RunConfig) -> Iterator[Finding]:
    """Inputs on this machine; of those elsewhere, only whether their references can be read."""
    for kind, text in named_inputs(config):
        try:
            ref = checked_ref(kind, text)
        except InputError as fault:
            yield Finding("input", "fail", str(fault))
        else:
            where = "is here" if isinstance(ref, LocalRef) else "is fetched when the run starts"
            yield Finding("input", "pass", f"{ref.label} {where}")


def check_dataset(dataset: DatasetSpec) -> Iterator[Finding]:
    """The Parquet files on this machine, opened as a run opens them."""
    from ..feed import ArrowFeed  # loads pyarrow

    remote = [text for text in dataset.parquet_paths if has_scheme(text)]
    files: list[Path] = []
    for text in remote:
        yield Finding("dataset", "warn", f"{safe_url(text)} is not checked: the run reads it in place")
    for text in dataset.parquet_paths:
        try:
            files += [] if text in remote else parquet_files(text)
        except InputError as fault:
            yield Finding("dataset", "fail", str(fault))
    if not files:
        return
    drops = dataset.drop_last and not remote  # of which there may be more rows
    feed = ArrowFeed(
        [str(file) for file in files], batch_size=dataset.batch_size, columns=dataset.columns, drop_last=drops
    )
    try:
        rows = feed.rows
    except InputError as fault:
        first, *others = str(fault).splitlines()
        yield from (Finding("dataset", "fail", line.removeprefix("- ")) for line in others or [first])
        return
    finally:
        feed.close()
    size, several = size_text(sum(file.stat().st_size for file in files)), "s" * (len(files) > 1)
    yield Finding("dataset", "pass", f"{len(files)} Parquet file{several}, {size}, {rows:,} rows")


def check_trainer(config: RunConfig) -> Iterator[Finding]:
    """Whether the trainer can be imported and has all hooks; its constructor is not called."""
    if not config.trainer:  # which is an error of the settings
        return
    try:
        with on_sys_path([config.spec_dir, Path.cwd()]):
            target = imported_trainer(config)
    except StartupContractError as error:
        yield Finding("trainer", "fail", str(error))
    else:
        name = getattr(target, "__qualname__", type(target).__qualname__)
        yield Finding("trainer", "pass", f"{config.trainer} is {name}, with all hooks")
        yield from (Finding("trainer", "warn", misspelled) for misspelled in misspelled_hooks(target))


def check_devices(lightning: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether this machine has the devices that the job's ``lightning`` block asks for."""
    import torch

    from ...callbacks.lightning_internals import NEWEST_TORCH, is_untested_torch

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


def check_training(config: RunConfig) -> Iterator[Finding]:
    """Report what the run would refuse once it has loaded the trainer class, which is imported and not constructed."""
    try:
        with on_sys_path([config.spec_dir, Path.cwd()]):
            trainer, _ = prepare_training(
                config, imported_trainer(config), brings_data=bool(config.inputs.dataset_parquet_refs)
            )
    except StartupContractError as error:
        yield Finding("training", "fail", str(error))
    else:
        yield Finding("training", "pass", "the hooks take their arguments, and Lightning takes the job's")
        yield from check_sharding(trainer)


def check_sharding(trainer: Any) -> Iterator[Finding]:
    """Report what FSDP 2 needs and refuses, where a trainer of Lightning's shards by it."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from ..gradients.refused import needs

    if isinstance(trainer.strategy, ModelParallelStrategy):
        yield Finding("sharding", "pass", needs())


def _table(config: RunConfig, *, defaults: bool) -> list[tuple[str, str]]:
    """One line for each setting that a source gives, or that holds by default if asked for: name, source, value."""
    rows = []
    for name, key in all_keys():
        value = operator.attrgetter(name)(config) if getattr(config, name.partition(".")[0]) is not None else None
        source = config.source_of(name)
        if key.block is None and (defaults or source != "default"):
            rows.append((name, source, _shown(name, value)))
    styles = ["dim" if source == "default" else "" for _, source, _ in rows]
    hint = "" if defaults else "; --all shows the defaults too"
    return [("", f"settings of {config.spec_path}{hint}"), *zip(styles, aligned(rows), strict=True)]


def _shown(name: str, value: Any) -> str:
    """A value for the table, short and without secrets; a path is of use whole, or not at all."""
    if value is None or value in ("", (), frozenset()):
        return "-"
    if isinstance(value, Path):
        return str(value)
    value = without_secrets({name.rpartition(".")[2]: msgspec.to_builtins(value, order="sorted")})
    (value,) = value.values()
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _report(findings: list[Finding], table: Sequence[tuple[str, str]] = (), secrets: Sequence[str] = ()) -> int:
    """Write one line for each finding, the verdict and the table, whose lines have a style; the exit code."""
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        say_finding(finding, width=width, secrets=secrets)
    count = sum(finding.level == "fail" for finding in findings)
    say("", f"{count} fault{'s' * (count != 1)}: the run would not start" if count else "the run can start")
    for style, line in [("", ""), *table] if table else ():
        say(redact(line, secrets), style=style)
    return FAULTY if count else SOUND
