"""Rehearse a bad night with a job: kills, stops, damaged checkpoints and a full disk, in real processes.

Every rehearsal runs a few steps of the job in a scratch folder, breaks it, starts it again, and compares rows,
random numbers, losses and the final state with a run without a fault. Nothing is uploaded. The results are written to
`proof.json` in the folder of the job's run. `genlight check` tests only the class, within one process and in seconds.

Exit codes: 0 everything held; 1 a rehearsal failed; 2 wrong usage, or the job cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.exceptions import UsageError
from .parser import add_json, add_overrides, at_least
from .terminal import say_finding, say_json

if TYPE_CHECKING:
    from ..job.config import RunConfig
    from ..prove.rehearsal import Scene


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("job", metavar="JOB.json", help="the job")
    # At least 9: faults occur in the second step of a third, and a checkpoint is saved after its last, later step.
    parser.add_argument(
        "--steps", type=at_least(9), default=12, help="steps of each rehearsal; it saves a checkpoint after each third"
    )
    parser.add_argument(
        "--minutes", type=at_least(0, float), default=15.0, help="minutes for all rehearsals; the rest is skipped"
    )
    parser.add_argument("--ranks", type=at_least(1), help="number of processes; the job's own by default")
    parser.add_argument(
        "--keep", metavar="FOLDER", type=Path, help="a new folder that keeps the files of the rehearsals"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="REHEARSAL",
        help="only this one, such as `kill` or `full disk`; may be repeated",
    )
    add_overrides(parser)
    add_json(parser, "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0 if everything held, 1 if a rehearsal failed.

    Raises:
        StartupContractError: The job cannot be used.
        UsageError: The folder of ``--keep`` exists.
    """
    from ..job.config import resolve_run_config
    from ..module.plugin_loading import find_trainer, on_sys_path
    from ..prove.prove import prove
    from ..run.proof import write_proof
    from ..run.training import check_plugin

    config = resolve_run_config(spec_path=args.job, overrides=args.set)
    with on_sys_path([config.spec_dir, Path.cwd()]):
        target = find_trainer(config.trainer)
        check_plugin(config, target)
    scene, findings, interrupted = _scene(args, config), [], threading.Event()
    with contextlib.ExitStack() as stack:
        folder = _scratch(args.keep, stack)
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: interrupted.set()))
        for finding in prove(
            scene, folder, minutes=args.minutes, only=args.only, keep=args.keep is not None, interrupted=interrupted
        ):
            findings.append(finding)
            if not args.json:
                say_finding(finding)
    results: list[dict[str, Any]] = [asdict(finding) for finding in findings]
    write_proof(config, target, results, steps=scene.steps, ranks=scene.ranks)
    if args.json:
        say_json([{"findings": results}])
    return int(any(finding.level == "fail" for finding in findings))


def _scene(args: argparse.Namespace, config: RunConfig) -> Scene:
    """Return the job with the changes for a rehearsal: fewer steps, and a checkpoint after each third of them."""
    from ..prove.rehearsal import Scene

    own = config.lightning.get("callbacks") or []
    return Scene(
        job=Path(args.job).absolute(),
        overrides=tuple(args.set),
        lightning_callbacks=tuple(own if isinstance(own, list) else [own]),
        steps=args.steps,
        every_n_steps=args.steps // 3,
        ranks=args.ranks,
        seed=0 if config.seed is None else None,
    )


def _scratch(keep: Path | None, stack: contextlib.ExitStack) -> Path:
    """Return an empty folder for the rehearsals; `stack` removes it unless it is `keep`.

    Raises:
        UsageError: `keep` exists already.
    """
    if keep is None:
        scratch = tempfile.TemporaryDirectory(prefix="genlight-prove-", ignore_cleanup_errors=True)
        return Path(stack.enter_context(scratch))
    try:
        keep.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{keep} exists; name a new folder for --keep") from None
    return keep.absolute()
