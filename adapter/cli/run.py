"""Run a job from its spec, or from the environment of an orchestrated container.

Exit codes: 0 completed, 1 failed, 2 startup or usage, 3 ended by `on_nonfinite`, 75 stopped but resumable.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from .parser import CommandParser, add_overrides
from .terminal import complain

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    if isinstance(parser, CommandParser):
        parser.below_options = _keys_of_a_job
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB.json",
        help="the job spec, - for standard input; without it TRAINER_JOB_SPEC_PATH names one",
    )
    add_overrides(
        parser, "override a setting of the job, such as max_steps=100 or hyperparams.lr=0.001; may be repeated"
    )
    parser.add_argument(
        "--print_config",
        nargs="?",  # jsonargparse hands an option of this name an empty value
        metavar="",
        help="print the LightningCLI configuration of the job, for genlight fit",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="move artifacts of earlier runs aside and start from scratch"
    )
    parser.add_argument(
        "--allow-changed", action="store_true", help="resume although the job is not the one of the checkpoint"
    )
    parser.add_argument(
        "--reset",
        action="append",
        default=[],
        metavar="SETTING",
        help="on a resume, take lr, weight_decay, another setting of optimizers, schedule or scaler from the class "
        "instead of the checkpoint; may be repeated, and stands for `resume.keep` of the job",
    )
    parser.add_argument(
        "--shadow",
        type=int,
        default=None,
        metavar="N",
        help="compare the first N steps with a copy of the class in a plain loop; a difference ends the run with 1",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show the whole traceback of an error in the trainer class"
    )


def _keys_of_a_job() -> str:
    from ..job.reference import job_outline

    return job_outline()


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code."""
    from ..run.run import RunOptions, run_job

    if args.shadow is not None and args.shadow < 1:
        return complain("run", f"Invalid `--shadow`. Expected a number >= 1, but received {args.shadow}.")

    overrides = [*args.set, *([f"resume.keep={json.dumps(args.reset)}"] if args.reset else [])]
    options = RunOptions(
        spec_path=args.job,
        overrides=overrides,
        fresh=args.fresh,
        allow_changed=args.allow_changed,
        shadow=args.shadow or 0,
        verbose=args.verbose,
        began_with_process=True,
    )
    return run_job(options) if args.print_config is None else _print_config(options.spec_path, overrides)


def _print_config(spec_path: str | os.PathLike[str] | None, overrides: list[str]) -> int:
    import yaml

    from ..contract.exceptions import StartupContractError
    from ..job.config import resolve_run_config
    from ..plumbing.failures import EXIT_COMPLETED
    from ..plumbing.redaction import without_secrets

    try:
        config = resolve_run_config(spec_path=spec_path, overrides=overrides)
    except StartupContractError as error:
        return complain("run", error)
    for warning in config.warnings:
        complain("run", warning)
    from ..job.lightning_config import lightning_config  # loads Lightning

    described = lightning_config(config)
    shown = without_secrets(described)
    if shown != described:
        complain("run", "credentials are left out; put them where <hidden> stands, or into the URLs")
    sys.stdout.write(yaml.safe_dump(shown, sort_keys=False))
    return EXIT_COMPLETED
