"""Check a trainer class: its hooks, its state, exact resume, several ranks, half precision.

Exit codes: 0 every check passed or warned; 1 one failed; 2 wrong usage, or no data to check training with.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ..check.finding import Level
from ..contract.exceptions import ContractError
from .parser import add_json, add_overrides, at_least
from .terminal import print_error, say_finding, say_json

if TYPE_CHECKING:
    from ..check.subject import Subject
    from ..job.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "subject", metavar="MODULE:CLASS|JOB.json", help="the class, or a job with its class, hyperparameters and data"
    )
    parser.add_argument("--data", action="append", default=[], metavar="FILE", help="a Parquet file; may be repeated")
    # Seven is not a multiple of 2 to 6, so the interruption is inside a window of so many accumulated steps. It is also
    # inside the second epoch, because `Subject` gives the job's own data epochs of `steps - 2` steps.
    parser.add_argument("--steps", type=at_least(1), default=7, help="steps before and after the interruption")
    add_overrides(parser, "dataset.batch_size=8 or hyperparams.lr=0.001")
    add_json(parser, "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, 1 if a check failed, or 2 without data.

    Raises:
        StartupContractError: The job cannot be used.
        InputError: Its data cannot be read.
    """
    # Hide the GPUs before torch is imported: a literal "cuda:0" in the class must fail in this check, also on a machine
    # with a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    subject = _subject(_job(args), args.steps)
    from ..check.checks import run_checks

    findings = []
    for finding in run_checks(subject):
        findings.append(finding)
        if not args.json:
            say_finding(finding)
    if args.json:
        counts = {level: sum(finding.level == level for finding in findings) for level in get_args(Level)}
        say_json([{"findings": [dataclasses.asdict(finding) for finding in findings], "counts": counts}])
    if any(finding.level == "fail" for finding in findings):
        return 1
    if any(finding.check == "steps" and finding.level == "skip" for finding in findings):
        return print_error("check", "training was not checked, since no data was given")
    return 0


def _job(args: argparse.Namespace) -> RunConfig:
    """Return the job to check, with steps and data from the command line; for a class, create a job."""
    from ..job.config import resolve_run_config

    overrides = [*args.set, f"max_steps={2 * args.steps}"]
    if args.data:
        overrides += [f"dataset.parquet_paths={json.dumps(args.data)}", "mock_batches=null", "data=null"]
    if args.subject.endswith((".json", ".yaml", ".yml")):
        return resolve_run_config(spec_path=args.subject, overrides=overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps({"run_id": "check", "base_dir": os.getcwd(), "trainer": args.subject}))
        return resolve_run_config(spec_path=path, overrides=overrides, environ={})


def _subject(config: RunConfig, steps: int) -> Subject:
    """Collect the class of a job and the batches for its training."""
    # Imported here: these load Lightning, and a refused command should not have to wait for that.
    from ..check.batches import job_batches
    from ..check.plain_loop import plain_context
    from ..check.subject import Subject
    from ..job.lightning_objects import make_data
    from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path, optional_hook

    ctx = dataclasses.replace(plain_context(config), device="cpu")
    folders = [config.spec_dir, Path.cwd()]
    with on_sys_path(folders), contextlib.ExitStack() as stack:  # the job's `collate` may be in the user's code
        _, batches = job_batches(config, None, ctx, stack)
        if batches is None:
            with contextlib.suppress(ContractError):  # the checks report it
                if optional_hook(target := find_trainer(config.trainer), "train_loader") is not None:
                    trainer = make_trainer(target)
                    trainer.setup(ctx)
                    _, batches = job_batches(config, trainer, ctx, stack)
        read = list(itertools.islice(batches or (), 2 * steps))
    has_loader = batches is not None and config.mock_batches is None
    return Subject(
        import_path=config.trainer,
        batches=tuple(itertools.islice(itertools.cycle(read), 2 * steps)),
        steps=steps,
        search_path=tuple(map(str, folders)),
        hyperparams=config.hyperparams,
        make_data=functools.partial(make_data, config) if has_loader else None,
        precision=str(config.lightning.get("precision") or "32-true"),
    )
