"""Find the mistakes in a job without training, and show its settings and their sources.

The command creates and sends nothing, and contacts no server.

Exit codes: 0 the job can start, 2 it cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...callbacks.stop.sources import cancel_file_is_set
from ...reporters.uploads.destinations import target_fault
from ..check.finding import Finding, Level
from ..contract.exceptions import InputError, StartupContractError
from ..inputs.materialize import named_inputs
from ..inputs.refs import Kind, check_ref, parquet_files
from ..job.config import RunConfig, read_run_config
from ..job.sources import ConfigErrors
from ..job.spec import all_keys
from ..module.plugin_loading import misspelled_hooks, on_sys_path
from ..plumbing.redaction import redact, without_secrets
from ..plumbing.text import size_text
from ..plumbing.urls import has_scheme, safe_url
from ..run.folder import artifact_dir_faults, lock_holder
from ..run.start import decide_start
from ..run.training import import_trainer, prepare_training
from .parser import add_overrides
from .terminal import align_columns, brief, say, say_finding

LITTLE_SPACE_BYTES = 1 << 30
LOOPBACK = ("http://127.", "http://localhost:", "http://[::1]:")
Outcomes = Iterator[tuple[Level, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "job", nargs="?", metavar="JOB.json", help="the job; by default the one that TRAINER_JOB_SPEC_PATH names"
    )
    add_overrides(parser)
    parser.add_argument("--step", action="store_true", help="also take one step of the class on the first batch")
    parser.add_argument("--all", action="store_true", help="also show the settings that have their defaults")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis and return the exit code: 0 if the job can start, 2 if it cannot."""
    config, errors = read_run_config(spec_path=args.job, overrides=args.set)
    # Without a job file the table would have only defaults.
    table = _table(config, defaults=args.all) if config.sources.readable else []
    findings = list(diagnose(config, errors))
    if args.step and not any(finding.level == "fail" for finding in findings):
        from ..check.plain_loop import diagnose_first_step  # loads torch

        findings += diagnose_first_step(config)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        say_finding(finding, width=width, secrets=config.secrets)
    count = sum(finding.level == "fail" for finding in findings)
    say("", f"{count} fault{'s' * (count != 1)}: the run would not start" if count else "the run can start")
    if table:
        say("", f"settings of {config.spec_path}{'' if args.all else '; --all shows the defaults too'}")
        say(*(redact(line, config.secrets) for line in align_columns(table)))
    return 2 if count else 0


def diagnose(config: RunConfig, errors: ConfigErrors) -> Iterator[Finding]:
    """Yield every finding about a job. After a fault, the checks that are still possible follow.

    Args:
        config: The settings that could be read.
        errors: The faults of the settings.
    """
    is_sound = not errors.found
    if is_sound:
        yield Finding("settings", "pass", f"{config.spec_path} and environment are sound")
    yield from (Finding("settings", "fail", f"{error.code}: {error.text}") for error in errors.found)
    yield from (Finding("settings", "warn", warning) for warning in errors.warnings)
    yield from _findings("token", _token(config))
    if config.run_id or config.source_of("artifacts_dir") != "default":
        yield from _findings("artifacts", _artifacts(config))
    if is_sound:
        yield from _findings("checkpoints", _start(config))
        yield from _findings("stop", _stop(config))
    for fault in filter(None, map(target_fault, config.uploads.targets)):
        yield Finding("uploads", "fail", f"`uploads.targets`: {fault}")
    if config.dataset is not None:
        yield from _findings("dataset", _dataset(config))
    if config.trainer:
        yield from _findings("trainer", _trainer(config, is_sound=is_sound))
    for kind, text in named_inputs(config):
        yield from _findings("input", _input(kind, text))


def _findings(check: str, outcomes: Outcomes) -> Iterator[Finding]:
    """Yield the outcomes of a check as findings; an error that a run would raise is a fault."""
    try:
        for level, text in outcomes:
            yield Finding(check, level, text)
    except (StartupContractError, InputError) as error:
        yield Finding(check, "fail", str(error))


def _token(config: RunConfig) -> Outcomes:
    """Yield where the token is sent, and whether it travels without encryption."""
    origins, has_token = sorted(config.token_origins), config.capability_token is not None
    if origins or has_token:
        is_sent = "is sent" if has_token else "is not set, and would be sent"
        targets = f"only to {', '.join(origins)}" if origins else "to no origin"
        yield "pass" if origins and has_token else "warn", f"{is_sent} {targets}"
    for origin in origins if has_token else ():
        if origin.startswith("http://") and not origin.startswith(LOOPBACK):
            yield "warn", f"travels to {origin} without encryption; use https://"


def _artifacts(config: RunConfig) -> Outcomes:
    """Yield whether the run's folder can be written, how much space is free, and whether a live run uses it."""
    faults = artifact_dir_faults(config, create=False)
    yield from (("fail", f"startup.invalid_artifact_paths: {fault}") for fault in faults)
    if faults:
        return
    root = config.artifacts_dir
    free = shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
    yield "warn" if free < LITTLE_SPACE_BYTES else "pass", f"{root} can be written, {size_text(free)} free"
    if holder := lock_holder(root):
        yield "fail", f"startup.artifacts_in_use: {root} is in use by a live run ({holder})"


def _start(config: RunConfig) -> Outcomes:
    """Yield the checkpoint from which the run would start, and the broken ones that it would skip."""
    if config.inputs.resume_checkpoint_ref is not None:  # the run fetches it when it starts
        return
    start = decide_start(config)
    yield from (("warn", warning) for warning in start.warnings)
    if start.finished_step is not None:
        yield "pass", f"the run has completed at step {start.finished_step}; nothing to train"
    elif start.record is not None:
        yield "pass", f"the run continues after step {start.record.step}, from {start.record.path}"


def _stop(config: RunConfig) -> Outcomes:
    if config.cancel_file_path is not None and cancel_file_is_set(config.cancel_file_path):
        yield "warn", f"the cancel file {config.cancel_file_path} exists: the run stops before its first step"


def _dataset(config: RunConfig) -> Outcomes:
    """Open the Parquet files on this machine as a run does."""
    from ..feed.arrow_feed import ArrowFeed

    dataset = config.dataset
    assert dataset is not None
    remote = [text for text in dataset.parquet_paths if has_scheme(text)]
    yield from (("warn", f"{safe_url(text)} is not checked: the run reads it in place") for text in remote)
    files: list[Path] = []
    missing = 0
    for text in dataset.parquet_paths:
        try:
            files += [] if text in remote else parquet_files(text)
        except InputError as error:
            missing += 1
            yield "fail", str(error)
    if missing or not files:
        return
    # With rows of remote files, a batch may be complete although the local files alone do not fill it.
    drops = dataset.drop_last and not remote
    paths = [str(file) for file in files]
    feed = ArrowFeed(paths, batch_size=dataset.batch_size, columns=dataset.columns, drop_last=drops)
    with contextlib.closing(feed):
        size = size_text(sum(file.stat().st_size for file in files))
        yield "pass", f"{len(files)} Parquet file{'s' * (len(files) > 1)}, {size}, {feed.rows:,} rows"


def _trainer(config: RunConfig, *, is_sound: bool) -> Outcomes:
    """Import the trainer class without constructing it, and yield the faults of class and Lightning trainer."""
    with on_sys_path([config.spec_dir, Path.cwd()]):
        target = import_trainer(config)
        yield (
            "pass",
            f"{config.trainer} is {getattr(target, '__qualname__', type(target).__qualname__)}, with all hooks",
        )
        yield from (("warn", misspelled) for misspelled in misspelled_hooks(target))
        if not is_sound:  # torch need not be imported for a job that cannot be used
            return
        brings_data = bool(config.inputs.dataset_parquet_refs)
        trainer, _ = prepare_training(config, target, brings_data=brings_data)
    from lightning.pytorch.strategies import ModelParallelStrategy

    from ..gradients.refused import describe_fsdp_limits

    names = (type(each).__name__ for each in (trainer.accelerator, trainer.strategy))
    yield "pass", f"Lightning takes the job: {', '.join(names)}, {trainer.world_size} ranks, {trainer.precision}"
    if isinstance(trainer.strategy, ModelParallelStrategy):
        yield "pass", describe_fsdp_limits()


def _input(kind: Kind, text: str) -> Outcomes:
    """Check that an input exists on this machine; of an input elsewhere, check only the form of its reference."""
    ref = check_ref(kind, text)
    yield "pass", f"{ref} is here" if isinstance(ref, Path) else f"{ref.label} is fetched when the run starts"


def _table(config: RunConfig, *, defaults: bool) -> list[tuple[str, str, str]]:
    """Return name, source and value of each setting; without `defaults`, skip those with default values."""
    rows = []
    for name, key in all_keys():
        value = operator.attrgetter(name)(config) if getattr(config, name.partition(".")[0]) is not None else None
        source = config.source_of(name)
        if key.block is None and (defaults or source != "default"):
            rows.append((name, source, _render(name, value)))
    return rows


def _render(name: str, value: Any) -> str:
    """Return a value for the table, shortened and without secrets; paths are not shortened."""
    if value is None or value in ("", (), frozenset()):
        return "-"
    plain = msgspec.to_builtins(value, order="sorted", enc_hook=os.fspath)
    (shown,) = without_secrets({name.rpartition(".")[2]: plain}).values()
    return str(value) if isinstance(value, Path) else brief(shown)
