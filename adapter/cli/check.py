"""Check a trainer class: its hooks, its state, exact resume, several ranks, half precision.

Exit codes: 0 every check passed or warned, 1 one failed, 2 usage, or no data to check training with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import msgspec

from ..job.spec import DatasetSpec
from ..plumbing.finding import Finding, Level
from .config_files import is_configuration_name
from .parser import at_least
from .terminal import complain, say, say_finding

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..check.subject import Subject
    from ..contract.types import StepContext

__all__ = ["add_arguments", "run"]

CONFORMING, FAULTY, USAGE = 0, 1, 2


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
    parser.add_argument("--batch_size", type=at_least(1), help="rows per batch; by default the job's, or 32")
    parser.add_argument("--steps", type=at_least(1), default=3, help="steps before and after the interruption")
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
    if args.trainer is not None and args.trainer.endswith((".json", ".yaml", ".yml")):
        raise ValueError(f"{args.trainer} is not a trainer; name one as MODULE:CLASS, or a job by --job {args.trainer}")
    is_job = not is_configuration_name(args.job)
    trainer, hyperparams, folders, make_data = _of_job(args) if is_job else _of_configuration(args)
    # Only now: these load Lightning, which a command that is refused need not wait for.
    from ..check.batches import rank_feed
    from ..check.subject import Subject
    from ..contract.types import StepContext, TrainingJobSpec
    from ..module.plugin_loading import on_sys_path

    count = 2 * args.steps
    job = TrainingJobSpec(run_id="check", max_steps=count, hyperparams=dict(hyperparams))
    ctx = StepContext(job, device="cpu", dtype="fp32", is_canceled=lambda: False)
    with on_sys_path(folders), contextlib.ExitStack() as stack:  # a `collate` may be a function of the user's
        data = make_data()
        if data is not None:
            batches = _repeated(rank_feed(data, ctx, stack), count)
        else:
            batches = [] if args.job is None else _repeated(_loader_of_class(trainer, ctx), count)
    return Subject(
        import_path=trainer,
        batches=tuple(batches),
        steps=args.steps,
        search_path=tuple(map(str, folders)),
        hyperparams=hyperparams,
    )


_Source: TypeAlias = tuple[str, Mapping[str, Any], list[Path], Callable[[], "pl.LightningDataModule | None"]]
"""Trainer, hyperparameters, folders of modules, and what makes the data module."""


def _of_job(args: argparse.Namespace) -> _Source:
    """What a job says, which hands out its data filtered, shuffled and collated as in a run; none need be named."""
    from ..job.config import resolve_run_config

    if args.job is None:
        if args.trainer is None:
            raise ValueError("name a trainer, as MODULE:CLASS or by --job JOB.json")
        return args.trainer, {}, [Path.cwd()], lambda: _data(args, "", {})
    overrides = [] if args.trainer is None else [f"trainer={args.trainer}"]
    job = resolve_run_config(spec_path=args.job, overrides=overrides)
    size = {} if args.batch_size is None else {"batch_size": args.batch_size}
    paths = {} if not args.data else {"parquet_paths": tuple(args.data)}
    if paths or (size and job.dataset is not None):
        dataset = msgspec.structs.replace(job.dataset or DatasetSpec(), **size, **paths)
        job = msgspec.structs.replace(job, dataset=dataset, mock_batches=None if paths else job.mock_batches)
    from ..job.lightning_objects import make_data  # loads Lightning

    return job.trainer, job.hyperparams, [job.spec_dir, Path.cwd()], lambda: make_data(job)


def _of_configuration(args: argparse.Namespace) -> _Source:
    from .lightning_cli import UnusableConfigurationError, parse_configuration

    try:
        fit = parse_configuration(args.job)
    except UnusableConfigurationError as error:
        raise ValueError(str(error)) from error
    model, given = fit.arguments_of("model")
    if model != "ContractModule" and args.trainer is None:
        raise ValueError(f"{args.job} has no genlight.adapter.ContractModule; name a trainer, as MODULE:CLASS")
    job = given.get("job") if model == "ContractModule" else None
    hyperparams = dict(job.get("hyperparams") or {}) if isinstance(job, Mapping) else {}
    return args.trainer or given["plugin"], hyperparams, [Path.cwd()], lambda: _data(args, *fit.arguments_of("data"))


def _data(args: argparse.Namespace, name: str, given: Mapping[str, Any]) -> pl.LightningDataModule | None:
    """A data module of genlight's with these arguments and those of the command line; None where nothing names data."""
    from ..feed import ArrowDataModule, FunctionDataModule
    from ..feed.mock import MockDataModule

    if name == "MockDataModule" and not args.data:
        return MockDataModule(**given)
    size = {} if args.batch_size is None else {"batch_size": args.batch_size}
    if name == "FunctionDataModule" and not args.data:
        return FunctionDataModule(**{**given, **size})
    paths = {"parquet_paths": args.data} if args.data else {}
    arguments = {**(given if name == "ArrowDataModule" else {}), **size, **paths}
    return ArrowDataModule(**arguments) if arguments.get("parquet_paths") else None


def _loader_of_class(import_path: str, ctx: StepContext) -> Iterable[Any]:
    """What the class's own ``train_loader`` gives; nothing where it has none."""
    from ..module.plugin_loading import find_trainer, loader_of_class, make_trainer, optional_hook

    target = find_trainer(import_path)
    if optional_hook(target, "train_loader") is None:
        return ()
    trainer = make_trainer(target)
    trainer.setup(ctx)
    loader: Iterable[Any] = loader_of_class(trainer, ctx)
    return loader


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
        say_finding(finding)
    return shown


def _print_json(findings: Iterable[Finding]) -> list[Finding]:
    shown = list(findings)
    counts = {level: sum(finding.level == level for finding in shown) for level in get_args(Level)}
    say(json.dumps({"findings": [finding.as_json() for finding in shown], "counts": counts}))
    return shown
