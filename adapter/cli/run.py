"""Run a job, from a file or from the environment.

Exit codes: 0 completed, 1 failed, 2 startup or usage, 3 ended by `on_nonfinite`, 75 stopped but resumable.
"""

from __future__ import annotations

import argparse
import json

from .parser import add_overrides, at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB.json",
        help="the job, - for standard input; by default the one that TRAINER_JOB_SPEC_PATH names",
    )
    add_overrides(parser)
    parser.add_argument("--fresh", action="store_true", help="move earlier results aside and start at step 0")
    parser.add_argument(
        "--allow-changed", action="store_true", help="resume although the job has changed since the checkpoint"
    )
    parser.add_argument(
        "--restarts",
        type=at_least(0),
        default=0,
        metavar="N",
        help="continue from the newest checkpoint, at most N times, after a rank was killed or preempted",
    )
    parser.add_argument(
        "--reset",
        action="append",
        default=[],
        metavar="SETTING",
        help="when resuming, do not restore this setting from the checkpoint, but use what `configure` of the class "
        "sets: lr, weight_decay or another setting of optimizers, or schedule, or scaler; may be repeated; replaces "
        "the list `resume.keep` of the job",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..run.run import RunOptions, run_job

    overrides = [*args.set, *([f"resume.keep={json.dumps(args.reset)}"] if args.reset else [])]
    options = RunOptions(
        spec_path=args.job,
        overrides=overrides,
        fresh=args.fresh,
        allow_changed=args.allow_changed,
        began_with_process=True,
    )
    if args.restarts:
        from ..run.restarts import run_with_restarts

        return run_with_restarts(options, args.restarts)
    return run_job(options)
