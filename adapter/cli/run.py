"""Run a job, from a file or from the environment.

Exit codes: 0 completed, 1 failed, 2 startup or usage, 3 ended by `on_nonfinite`, 75 stopped but resumable.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap

from .parser import CommandParser, add_overrides

__all__ = ["add_arguments", "run"]

_INDENT = 26
"""Column at which the help says what a key of a job is for."""


def add_arguments(parser: CommandParser) -> None:
    """Declare what the command takes."""
    parser.below_options = _keys_of_a_job
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB.json",
        help="the job, - for standard input; without it TRAINER_JOB_SPEC_PATH names one",
    )
    add_overrides(parser)
    parser.add_argument("--fresh", action="store_true", help="move earlier results aside and start at step 0")
    parser.add_argument(
        "--allow-changed", action="store_true", help="resume although the job is not the one of the checkpoint"
    )
    parser.add_argument(
        "--reset",
        action="append",
        default=[],
        metavar="SETTING",
        help="when resuming, take this setting from the class instead of the checkpoint: lr, weight_decay or another "
        "one of optimizers, schedule or scaler; may be repeated; the same as `resume.keep` of the job",
    )


def _keys_of_a_job() -> str:
    """The keys of a job in groups, each with the first sentence of its description, for a terminal of 80 columns."""
    from ..job.spec import JobSpec
    from ..plumbing.settings import keys_of

    lines = ["keys of a job"]
    for name, key in keys_of(JobSpec).items():
        lines += ["", f"{key.group}:"] if key.group else []
        sentence = re.split(r"[.;:](?:\s|$)", key.description, maxsplit=1)[0].replace("`", "")
        lines += _wrapped(sentence, f"  {name}".ljust(_INDENT))
        lines += _wrapped(", ".join(keys_of(key.block)), " " * _INDENT) if key.block is not None else []
    return "\n".join(lines)


def _wrapped(text: str, begin: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=begin, subsequent_indent=" " * _INDENT, break_on_hyphens=False)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code."""
    from ..run.run import RunOptions, run_job

    overrides = [*args.set, *([f"resume.keep={json.dumps(args.reset)}"] if args.reset else [])]
    options = RunOptions(
        spec_path=args.job,
        overrides=overrides,
        fresh=args.fresh,
        allow_changed=args.allow_changed,
        began_with_process=True,
    )
    return run_job(options)
