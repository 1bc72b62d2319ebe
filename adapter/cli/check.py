"""Check a trainer class: its hooks, its state, exact resume, several ranks, half precision.

Exit codes: 0 every check passed or warned, 1 one failed, 2 usage, or no data to check training with.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from ..job.spec import DatasetSpec
from ..plumbing.finding import Level
from .config_files import is_configuration_name
from .parser import at_least
from .terminal import complain, say, say_finding

if TYPE_CHECKING:
    from ..check.subject import Subject
    from ..job.config import RunConfig

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

    findings = []
    for finding in run_checks(subject):
        findings.append(finding)
        if not args.json:
            say_finding(finding)
    if args.json:
        counts = {level: sum(finding.level == level for finding in findings) for level in get_args(Level)}
        say(json.dumps({"findings": [finding.as_json() for finding in findings], "counts": counts}))
    if any(finding.level == "fail" for finding in findings):
        return FAULTY
    if any(finding.check == "steps" and finding.level == "skip" for finding in findings):
        return complain("check", "training was not checked, since no data was given")
    return CONFORMING


def _subject(args: argparse.Namespace) -> Subject:
    if args.trainer is not None and args.trainer.endswith((".json", ".yaml", ".yml")):
        raise ValueError(f"{args.trainer} is not a trainer; name one as MODULE:CLASS, or a job by --job {args.trainer}")
    config = _job(args)
    # Only now: these load Lightning, which a command that is refused need not wait for.
    from ..check.batches import job_batches
    from ..check.plain_loop import plain_context
    from ..check.subject import Subject
    from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path, optional_hook

    ctx, count = dataclasses.replace(plain_context(config), device="cpu"), 2 * args.steps
    folders = [config.spec_dir, Path.cwd()]
    with on_sys_path(folders), contextlib.ExitStack() as stack:  # a `collate` may be a function of the user's
        _, batches = job_batches(config, None, ctx, stack)
        if batches is None and args.job is not None:
            target = find_trainer(config.trainer)
            if optional_hook(target, "train_loader") is not None:
                trainer = make_trainer(target)
                trainer.setup(ctx)
                _, batches = job_batches(config, trainer, ctx, stack)
        taken = list(itertools.islice(batches or (), count))
    return Subject(
        import_path=config.trainer,
        batches=tuple(taken[i % len(taken)] for i in range(count)) if taken else (),
        steps=args.steps,
        search_path=tuple(map(str, folders)),
        hyperparams=config.hyperparams,
    )


def _job(args: argparse.Namespace) -> RunConfig:
    """The job that is checked, of so many steps and with the data of the command line; a configuration becomes one."""
    from ..job.config import resolve_run_config

    steps = 2 * args.steps
    overrides = [] if args.trainer is None else [f"trainer={args.trainer}"]
    with tempfile.TemporaryDirectory() as folder:
        path: Any = args.job
        environ: dict[str, str] | None = None
        if args.job is None or is_configuration_name(args.job):
            path, environ = Path(folder) / "job.json", {}
            spec = {"run_id": "check", "max_steps": steps, "base_dir": str(Path.cwd()), **_of_configuration(args)}
            path.write_text(json.dumps(spec))
        job = resolve_run_config(spec_path=path, overrides=overrides, environ=environ)
    job = msgspec.structs.replace(job, max_steps=steps)
    if args.data:
        data = {"dataset": job.dataset or DatasetSpec(), "mock_batches": None, "data": None}
        job = msgspec.structs.replace(job, **data)
    dataset = job.dataset
    if args.batch_size and dataset is not None:
        dataset = dataclasses.replace(dataset, batch_size=args.batch_size)
    if args.data and dataset is not None:
        dataset = dataclasses.replace(dataset, parquet_paths=tuple(args.data))
    return msgspec.structs.replace(job, dataset=dataset)


def _of_configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Keys of a job that a configuration of a fit has: its class, hyperparameters, and data if genlight makes them."""
    if args.job is None:
        if args.trainer is None:
            raise ValueError("name a trainer, as MODULE:CLASS or by --job JOB.json")
        return {}
    from .lightning_cli import UnusableConfigurationError, parse_configuration

    try:
        fit = parse_configuration(args.job)
    except UnusableConfigurationError as error:
        raise ValueError(str(error)) from error
    (model, given), (data, options) = fit.arguments_of("model"), fit.arguments_of("data")
    if model != "ContractModule" and args.trainer is None:
        raise ValueError(f"{args.job} has no genlight.adapter.ContractModule; name a trainer, as MODULE:CLASS")
    job = given.get("job") if model == "ContractModule" else None
    spec = {"hyperparams": dict(job.get("hyperparams") or {})} if isinstance(job, Mapping) else {}
    if args.trainer is None:
        spec["trainer"] = given["plugin"]
    options = {name: value for name, value in options.items() if value is not None and name != "val_paths"}
    if data == "MockDataModule":
        return {**spec, "mock_batches": options["batches"]}
    if data == "FunctionDataModule":
        return {**spec, "data": options.pop("function"), "dataset": options}
    return {**spec, "dataset": options} if data == "ArrowDataModule" else spec
