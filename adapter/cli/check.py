"""Check a trainer class: its hooks, its state, exact resume, several ranks, half precision.

Exit codes: 0 every check passed or warned, 1 one failed, 2 usage, or no data to check training with.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config_files import is_configuration_name
from .terminal import complain, say

if TYPE_CHECKING:
    from ..check.subject import Subject
    from ..plumbing.finding import Finding

__all__ = ["add_arguments", "run"]

CONFORMING, FAULTY, USAGE = 0, 1, 2
MARKS = {"pass": "pass", "warn": "WARN", "fail": "FAIL", "skip": "skip"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "trainer", nargs="?", metavar="MODULE:CLASS", help="the trainer; without it, the one that --job names"
    )
    parser.add_argument("--data", action="append", default=[], metavar="FILE", help="a Parquet file; may be repeated")
    parser.add_argument(
        "--job",
        metavar="JOB",
        help="a job (JSON), or a configuration of `genlight fit` (YAML), whose hyperparameters and data are used",
    )
    parser.add_argument("--batch_size", type=int, default=None, help="rows per batch; by default the job's, or 32")
    parser.add_argument("--steps", type=int, default=3, help="steps before and after the interruption")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code."""
    from ..contract.exceptions import InputError, StartupContractError

    # Before torch is imported: a literal "cuda:0" must fail here, not on a machine without a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        subject = _subject(args)
    except (StartupContractError, InputError, OSError, ValueError) as error:
        return complain("check", str(error))
    from ..check.checks import run_checks

    findings = run_checks(subject)
    shown = _print_json(findings) if args.json else _print_table(findings)
    if any(finding.level == "fail" for finding in shown):
        return FAULTY
    if any(finding.check == "steps" and finding.level == "skip" for finding in shown):
        return complain("check", "training was not checked, since no data was given")
    return CONFORMING


def _subject(args: argparse.Namespace) -> Subject:
    for option in ("steps", "batch_size"):
        number = getattr(args, option)
        if number is not None and number < 1:
            raise ValueError(f"Invalid `--{option}`. Expected a number >= 1, but received {number}.")
    if args.trainer is not None and args.trainer.endswith((".json", ".yaml", ".yml")):
        raise ValueError(f"{args.trainer} is not a trainer; name one as MODULE:CLASS, or a job by --job {args.trainer}")
    if is_configuration_name(args.job):
        return _subject_of_configuration(args)
    job = _job(args)
    trainer = args.trainer or (job.trainer if job is not None else None)
    if trainer is None:
        raise ValueError("name a trainer, as MODULE:CLASS or by --job JOB.json")
    search_path = [str(Path.cwd())] if job is None else [str(job.spec_dir), str(Path.cwd())]
    from ..check.subject import Subject

    return Subject(
        import_path=trainer,
        batches=tuple(_batches(args, job, 2 * args.steps)),
        steps=args.steps,
        search_path=tuple(search_path),
        hyperparams={} if job is None else dict(job.job.hyperparams),
    )


def _subject_of_configuration(args: argparse.Namespace) -> Subject:
    from ..check.subject import Subject
    from .configured_fit import parse_configuration
    from .lightning_cli import UnusableConfigurationError

    try:
        fit = parse_configuration(args.job)
    except UnusableConfigurationError as error:
        raise ValueError(str(error)) from error
    trainer = args.trainer or fit.plugin
    if trainer is None:
        raise ValueError(f"{args.job} has no genlight.adapter.ContractModule; name a trainer, as MODULE:CLASS")
    if not args.data and fit.mock_batches is not None:
        batches = _repeated(fit.mock_batches, 2 * args.steps)
    else:
        paths = args.data or fit.dataset.get("parquet_paths") or []
        size = args.batch_size or fit.dataset.get("batch_size") or 32
        batches = _parquet_batches(paths, size, fit.dataset.get("columns"), 2 * args.steps)
    return Subject(
        import_path=trainer,
        batches=tuple(batches),
        steps=args.steps,
        search_path=(str(Path.cwd()),),
        hyperparams=fit.hyperparams,
    )


def _job(args: argparse.Namespace) -> Any:
    from ..job.config import resolve_run_config

    if args.job is None:
        return None
    overrides = [] if args.trainer is None else [f"trainer={args.trainer}"]
    return resolve_run_config(spec_path=args.job, overrides=overrides)


def _batches(args: argparse.Namespace, job: Any, count: int) -> list[Any]:
    """`count` raw batches; a shorter source starts over."""
    if not args.data and job is not None:
        return _batches_of_job(job, args.batch_size, count)
    dataset = job.dataset if job is not None else None
    size = args.batch_size or (dataset.batch_size if dataset is not None else None) or 32
    return _parquet_batches(args.data, size, dataset.columns if dataset is not None else None, count)


def _batches_of_job(job: Any, batch_size: int | None, count: int) -> list[Any]:
    """What the job's own data module hands out: filtered, shuffled and collated as in a run; nothing without data."""
    import contextlib

    import msgspec

    from ..check.batches import rank_feed
    from ..job.lightning_config import make_data
    from ..module.plugin_loading import on_sys_path

    if batch_size is not None and job.dataset is not None:
        job = msgspec.structs.replace(job, dataset=msgspec.structs.replace(job.dataset, batch_size=batch_size))
    with on_sys_path([job.spec_dir, Path.cwd()]), contextlib.ExitStack() as stack:
        data = make_data(job)
        return [] if data is None else _repeated(rank_feed(data, 0, 1, stack), count)


def _parquet_batches(paths: Sequence[str], size: int, columns: Sequence[str] | None, count: int) -> list[Any]:
    if not paths:
        return []
    from ..contract.types import ArrowFeedConfig
    from ..feed import ParquetArrowBatchFeeder

    config = ArrowFeedConfig(batch_size=size, columns=None if columns is None else tuple(columns))
    return _repeated(ParquetArrowBatchFeeder(paths, config), count)


def _repeated(source: Iterable[Any], count: int) -> list[Any]:
    batches: list[Any] = []
    for batch in source:
        batches.append(batch)
        if len(batches) == count:
            break
    return [batches[i % len(batches)] for i in range(count)] if batches else []


def _print_table(findings: Iterable[Finding]) -> list[Finding]:
    shown = []
    for finding in findings:
        shown.append(finding)
        say(f"{MARKS[finding.level]}  {finding.check:<17} {finding.detail}")
        if finding.remedy:
            say(f"{'':6}{'':<17} → {finding.remedy}")
    return shown


def _print_json(findings: Iterable[Finding]) -> list[Finding]:
    shown = list(findings)
    counts = {level: sum(finding.level == level for finding in shown) for level in MARKS}
    say(json.dumps({"findings": [finding.as_json() for finding in shown], "counts": counts}))
    return shown
