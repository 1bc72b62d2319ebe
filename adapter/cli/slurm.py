"""Run a job on a Slurm cluster: render its sbatch script, submit it, and see or end what was submitted.

``render`` prints the script, ``submit`` hands it to sbatch and prints the id; ``status`` and ``cancel`` take the run's
folder. A job that is preempted or comes to the end of its time saves a checkpoint and is put back into the queue, where
the same command goes on from it. Exit codes: 0 done, 1 Slurm refused, 2 usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from ...reporters.events.reader import read_events
from ..cluster.batch_script import GPUS, BatchScript
from ..contract.exceptions import StartupContractError
from ..job.config import resolve_run_config
from ..plumbing.durable import write_bytes_durably
from ..plumbing.failures import EXIT_COMPLETED, EXIT_FAILED
from ..plumbing.safe_open import PRIVATE_FILE, make_directory, read_own
from .parser import add_overrides
from .terminal import complain, say

__all__ = ["add_arguments", "run"]

RECORD = "slurm_job.json"
LONGEST_RECORD_BYTES = 1 << 16


class Submitted(msgspec.Struct, frozen=True):
    """What ``submit`` leaves in the run's folder."""

    job_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}$")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("action", choices=("render", "submit", "status", "cancel"))
    parser.add_argument("path", metavar="JOB.json|RUN_DIR", help="the job spec; status, cancel: the run's folder")
    add_overrides(parser, "override a setting of the job, as in genlight run")
    parser.add_argument(
        "--array",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="one task for each value, with a run id and a folder of its own; may be repeated: every combination",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes")
    parser.add_argument("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of each node, one task for each")
    parser.add_argument("--tasks-per-node", type=int, metavar="N", help="default: one for each GPU, else 1")
    parser.add_argument("--cpus-per-task", type=int, metavar="N", help="CPU cores of each task")
    parser.add_argument("--mem", metavar="SIZE", help="memory of each node, such as 200G")
    parser.add_argument("--time", metavar="D-HH:MM:SS", help="limit; a run that comes to it goes on when requeued")
    for name in ("partition", "account", "qos"):
        parser.add_argument(f"--{name}", metavar="NAME", help=f"as of sbatch --{name}")
    parser.add_argument("--grace", type=int, default=120, metavar="SECONDS", help="time between SIGTERM and the end")
    parser.add_argument("--no-requeue", action="store_true", help="end when preempted, or at the end of the time")
    parser.add_argument("--output", metavar="FILE", help="default: JOBNAME-JOBID.out in the folder of the job spec")
    parser.add_argument("--setup", action="append", default=[], metavar="LINE", help="shell line before the run")
    parser.add_argument("--container", metavar="IMAGE", help="image for srun's --container-image (pyxis)")
    parser.add_argument("--mount", action="append", default=[], metavar="FROM:TO", help="mount of that container")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="--OPTION=VALUE", help="further option of sbatch"
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0, 1 where Slurm refuses, 2 for what cannot be used."""
    try:
        if args.action in ("status", "cancel"):
            submitted = _submitted(Path(args.path))
            return (
                _status(submitted, Path(args.path)) if args.action == "status" else _call("scancel", submitted.job_id)
            )
        script = batch_script(args)
    except (StartupContractError, ValueError) as error:
        return complain("slurm", str(error))
    if args.action == "render":
        sys.stdout.write(script.text())
        return EXIT_COMPLETED
    try:
        return _submit(script)
    except ValueError as error:
        return complain("slurm", str(error))


def batch_script(args: argparse.Namespace) -> BatchScript:
    """The script that the arguments of ``render`` and ``submit`` ask for.

    Raises:
        StartupContractError: The job cannot be used.
        ValueError: An argument cannot be used.
    """
    config = resolve_run_config(spec_path=args.path, overrides=args.set)
    sweep = list(_sweep(args.array, config.run_id))
    for settings in sweep:
        resolve_run_config(spec_path=args.path, overrides=[*args.set, *settings])
    if config.token is not None and config.source_of("capability_token") == "--set":
        raise ValueError("the script would show the token; set TRAINER_CAPABILITY_TOKEN in the environment instead")
    requeues = not args.no_requeue
    if requeues and (config.resume_checkpoint_path or config.inputs.resume_checkpoint_ref):
        raise ValueError(
            "the job names a checkpoint to resume from, and every start of a requeued job would begin there anew; "
            "leave it out, or give --no-requeue"
        )
    has_own_limit = config.max_runtime_s is not None  # which a requeue would not keep
    return BatchScript(
        name=re.sub(r"[^\w.-]", "-", config.run_id, flags=re.ASCII),
        job=config.spec_path,
        artifacts=config.artifacts_dir,
        events=Path(os.path.relpath(config.events_path, config.artifacts_dir)) if sweep else config.events_path,
        nodes=args.nodes,
        tasks_per_node=_count(args.gpus_per_node) if args.tasks_per_node is None else args.tasks_per_node,
        gpus_per_node=args.gpus_per_node,
        cpus_per_task=args.cpus_per_task,
        memory=args.mem,
        time=args.time,
        partition=args.partition,
        account=args.account,
        qos=args.qos,
        grace_s=args.grace,
        requeues=requeues,
        requeue_after=("preempted",) if has_own_limit else ("preempted", "timeout"),
        output=args.output,
        program=_program() if not args.container and not args.setup else "genlight",
        set_up=args.setup,
        container=args.container,
        mounts=args.mount,
        overrides=args.set,
        array=sweep,
        extra=args.sbatch,
    )


def _program() -> str:
    """This installation's own command, which the nodes are taken to share where nothing prepares another one."""
    path = Path(sys.prefix) / "bin" / "genlight"
    return str(path) if path.exists() else "genlight"


def _count(gpus: str | None) -> int:
    """GPUs of a node, of which each has a task; 1 where there is none, and where the text is refused later."""
    match = GPUS.fullmatch(gpus or "")
    return 1 if match is None else int(match["count"])


def _sweep(arrays: Iterable[str], run_id: str) -> Iterable[list[str]]:
    """The settings of each task: every combination of the values, and a run id of its own."""
    axes = []
    for text in arrays:
        key, equals, values = text.partition("=")
        if not key or not equals or not values:
            raise ValueError(f"Invalid `array`. Expected KEY=V1,V2, but received {text!r}.")
        axes.append([f"{key}={value}" for value in _values(values)])
    if axes:
        for index, settings in enumerate(itertools.product(*axes)):
            yield [*settings, f"run_id={run_id}-{index}"]


def _values(text: str) -> list[str]:
    """Values between commas, or of a JSON list, where they have commas of their own."""
    if text.startswith("["):
        try:
            return [json.dumps(value) for value in json.loads(text)]
        except ValueError:
            raise ValueError(f"Invalid `array`. {text!r} begins as a JSON list and is none.") from None
    return text.split(",")


def _submit(script: BatchScript) -> int:
    make_directory(script.artifacts)
    path = script.artifacts / "slurm_job.sh"
    write_bytes_durably(path, script.text().encode(), mode=PRIVATE_FILE)
    done = _slurm("sbatch", "--parsable", str(path))
    if done.returncode:
        return complain("slurm", done.stderr.strip(), EXIT_FAILED)
    job_id = done.stdout.strip().partition(";")[0]  # of a federation the cluster follows
    write_bytes_durably(script.artifacts / RECORD, msgspec.json.encode(Submitted(job_id)), mode=PRIVATE_FILE)
    say(job_id)
    return EXIT_COMPLETED


def _submitted(folder: Path) -> Submitted:
    try:
        return msgspec.json.decode(read_own(folder / RECORD, limit=LONGEST_RECORD_BYTES), type=Submitted)
    except FileNotFoundError:
        raise ValueError(f"{folder}: nothing was submitted from here; give the run's folder") from None
    except ValueError as error:
        raise ValueError(f"{folder / RECORD}: {error}") from None


def _status(submitted: Submitted, folder: Path) -> int:
    """What the queue says, and how far the run has come."""
    shown = _slurm("squeue", "--noheader", "--job", submitted.job_id, "--format", "%i %T %M of %l on %N %r")
    queued = shown.stdout.strip() if shown.returncode == 0 else ""
    say(queued or f"{submitted.job_id} is not in the queue")
    for path in sorted({*folder.glob("metrics/events.jsonl"), *folder.glob("*/metrics/events.jsonl")}):
        events = list(read_events(path))
        if events:
            last = events[-1]
            where = "" if path.parent.parent == folder else f"{path.parent.parent.name}: "
            words = [f"{name} {last[name]}" for name in ("step", "category") if last.get(name) is not None]
            say(f"{where}attempt {_attempts(events)}, {', '.join([str(last['event']), *words])}")
    return EXIT_COMPLETED


def _attempts(events: Iterable[dict[str, object]]) -> int:
    return sum(event["event"] == "started" for event in events)


def _call(*command: str) -> int:
    done = _slurm(*command)
    return complain("slurm", done.stderr.strip(), EXIT_FAILED) if done.returncode else EXIT_COMPLETED


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError(f"{command[0]} is not installed; run this on a login node of the cluster") from None
