"""Run a job on a Slurm cluster.

`render` prints the sbatch script, `submit` hands it to sbatch and prints the id, and `wait` waits for the end of that
id. A job that is preempted, or reaches its time limit, saves a checkpoint and is put back into the queue, where the
same command continues it. `genlight ls` shows how far the run is.

Exit codes: 0 done, 1 Slurm refused, or the job that was waited for failed, 2 usage.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from ..cluster.job_context import JobContext
from ..contract.exceptions import UsageError
from ..job.config import RunConfig, resolve_run_config
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.safe_open import PRIVATE_FILE
from ..runner.contexts import CompletedContext, emit
from ..runner.transport import read_pickle, travelling
from .parser import add_overrides
from .terminal import complain, say

__all__ = ["add_arguments", "run"]

_GPUS = re.compile(r"(?:[\w.-]+:)?(?P<count>[1-9]\d{0,3})", re.ASCII)
"""GPUs of a node, with their type where the cluster has several."""
_OPTION = re.compile(r"[a-z][a-z-]*(=[!-~]+)?")
SRUN_WAIT_S = 600
"""How long after the first task has ended srun ends the others; ranks that lose one end by themselves, and rank 0 stays
to report and to upload."""
_RUN = """\
trap : TERM USR1  # the signals are for the tasks; this script waits for them
{set_up}
export TRAINER_STOP_GRACE_SECONDS={grace_s}
if [ -z "${{SLURM_JOB_END_TIME:-}}" ]; then  # before Slurm 23
  end=$(squeue --noheader --job "$SLURM_JOB_ID" --format %e | grep --max-count 1 T)
  [ -n "$end" ] && export SLURM_JOB_END_TIME=$(date --date "$end" +%s)
fi
events={events}
saved() {{ grep -s '"event":"checkpoint"' "$events" | wc -l; }}
before=$(saved) again=no

{srun} \\
  {run}
code=$?
"""
_REQUEUE = """\
[ $code -eq 75 ] && tail -n 1 "$events" | grep -Eq '"category":"({reasons})"' && again=yes  # stopped, and can go on
[ $code -ge 128 ] && [ "$(saved)" -gt "$before" ] && again=yes  # a task was killed: its node died, say
[ $again = yes ] && scontrol requeue "$SLURM_JOB_ID"
"""
_END = "exit $code  # 75: with RequeueExit=75 in slurm.conf the job is requeued without scontrol, too\n"
WAIT_POLL_S = 2.0
_STATE = re.compile(r".*?\bJobState=(?P<state>[A-Z_]+).*?\bExitCode=(?P<code>\d+):(?P<signal>\d+)", re.DOTALL)
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)
"""Final states of a job; see JOB STATE CODES in squeue(1)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("action", choices=("render", "submit", "wait"))
    parser.add_argument("path", metavar="JOB.json|ID", help="the job; wait: the id that submit printed")
    add_overrides(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes")
    parser.add_argument("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of each node, with one task for each")
    parser.add_argument("--tasks-per-node", type=int, metavar="N", help="default: one for each GPU, else 1")
    parser.add_argument("--cpus-per-task", type=int, metavar="N", help="CPU cores of each task")
    parser.add_argument(
        "--sbatch",
        dest="extra",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="any option of sbatch, such as partition=gpu, time=1-00:00:00, mem=200G or exclusive; may be repeated",
    )
    parser.add_argument(
        "--grace", dest="grace_s", type=int, default=120, metavar="SECONDS", help="time from SIGTERM to the end"
    )
    parser.add_argument("--no-requeue", action="store_true", help="end when preempted, or at the time limit")
    parser.add_argument(
        "--setup", dest="set_up", action="append", default=[], metavar="LINE", help="shell line before the run"
    )
    parser.add_argument("--container", metavar="IMAGE", help="image for srun's --container-image (pyxis)")
    parser.add_argument(
        "--mount", dest="mounts", action="append", default=[], metavar="FROM:TO", help="mount of that container"
    )
    parser.add_argument(
        "--callbacks-file", type=Path, metavar="FILE", help="wait: pickled callbacks whose `on_completed_ctx` is called"
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0, or 1 where Slurm refuses or the job failed.

    Raises:
        StartupContractError: The job cannot be used.
        UsageError: An argument cannot be used.
    """
    try:
        if args.action == "wait":
            return _wait(args.path, args.callbacks_file)
        config = _config(args)
        script = _script(args, config)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.action == "submit":
        return _submit(script, config.artifacts_dir)
    sys.stdout.write(script)
    return 0


def _config(args: argparse.Namespace) -> RunConfig:
    """The job, where a script can run it.

    Raises:
        StartupContractError: The job cannot be used.
        UsageError: Arguments cannot stand in a directive, or one needs another; every fault is listed. Numbers are for
            sbatch to judge.
    """
    faults = [
        f"Invalid option of sbatch. Expected NAME=VALUE or NAME without blanks, but received {text!r}."
        for text in args.extra
        if not _OPTION.fullmatch(text)
    ]
    if args.gpus_per_node is not None and not _GPUS.fullmatch(args.gpus_per_node):
        given = args.gpus_per_node
        faults.append(f"Invalid `--gpus-per-node`. Expected a number such as 8 or h100:8, but received {given!r}.")
    if args.mounts and args.container is None:
        faults.append("`--mount` has no effect without `--container`.")
    if faults:
        raise UsageError("\n".join(faults))
    config = resolve_run_config(spec_path=args.path, overrides=args.set)
    if config.capability_token is not None and config.source_of("capability_token") == "--set":
        raise UsageError("the script would show the token; set TRAINER_CAPABILITY_TOKEN in the environment instead")
    if not args.no_requeue and (config.resume_checkpoint_path or config.inputs.resume_checkpoint_ref):
        raise UsageError(
            "the job names a checkpoint to resume from, and every start of a requeued job would begin there anew; "
            "leave it out, or give --no-requeue"
        )
    return config


def _script(args: argparse.Namespace, config: RunConfig) -> str:
    """The sbatch script of a job: one srun, and a requeue where the run was stopped and can go on."""
    has_own_limit = config.max_runtime_seconds > 0  # which a requeue would not keep
    # This installation's own command, which the nodes are taken to share where nothing prepares another one.
    program = Path(sys.prefix) / "bin" / "genlight"
    is_shared = program.exists() and not args.container and not args.set_up
    settings = ("resume_from_latest=true", *args.set, f"artifacts_dir={config.artifacts_dir}")
    words = [str(program) if is_shared else "genlight", "run", str(config.spec_path)]
    words += [word for each in settings for word in ("--set", each)]
    srun = ["srun", "--kill-on-bad-exit=0", f"--wait={SRUN_WAIT_S}"]
    if args.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={args.cpus_per_task}")  # which srun does not take from sbatch
    if args.container is not None:
        srun.append(f"--container-image={shlex.quote(args.container)}")
        srun += [f"--container-mounts={shlex.quote(','.join(args.mounts))}"] if args.mounts else []
    filled = (_RUN + ("" if args.no_requeue else _REQUEUE)).format(
        set_up="\n".join(args.set_up),
        grace_s=args.grace_s,
        events=shlex.quote(str(config.events_path)),
        srun=" ".join(srun),
        run=shlex.join(words),
        reasons="preempted" if has_own_limit else "preempted|timeout",
    )
    return "\n".join([*_directives(args, config), "", filled]) + _END


def _directives(args: argparse.Namespace, config: RunConfig) -> list[str]:
    name = re.sub(r"[^\w.-]", "-", config.run_id, flags=re.ASCII)
    gpus = _GPUS.fullmatch(args.gpus_per_node or "")
    tasks = 1 if gpus is None else int(gpus["count"])
    options = {
        "job-name": name,
        "nodes": args.nodes,
        "ntasks-per-node": tasks if args.tasks_per_node is None else args.tasks_per_node,
        "gpus-per-node": args.gpus_per_node,
        "cpus-per-task": args.cpus_per_task,
        "output": config.spec_path.parent / f"{name}-%j.out",
        "open-mode": "append",
        "signal": f"TERM@{args.grace_s}",
    }
    given = [f"#SBATCH --{option}={_directive(value)}" for option, value in options.items() if value is not None]
    requeue = "#SBATCH --no-requeue" if args.no_requeue else "#SBATCH --requeue"
    # The user's own come last, and win.
    return ["#!/bin/bash", *given, requeue, *(f"#SBATCH --{option}" for option in args.extra)]


def _directive(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text else text


def _submit(script: str, artifacts: Path) -> int:
    make_directory(artifacts)
    path = artifacts / "slurm_job.sh"
    write_bytes_durably(path, script.encode(), mode=PRIVATE_FILE)
    done = _slurm("sbatch", "--parsable", str(path))
    if done.returncode:
        return complain("slurm", done.stderr.strip(), 1)
    say(done.stdout.strip().partition(";")[0])  # of a federation the cluster follows
    return 0


def _wait(job_id: str, callbacks_file: Path | None) -> int:
    """Wait until Slurm says that the job has ended, say how, and call the callbacks.

    Raises:
        ValueError: The file holds no callbacks.
        OSError: The file cannot be read, or others could have written it.
    """
    callbacks = [] if callbacks_file is None else travelling(read_pickle(callbacks_file))
    began = time.time()
    while (ended := _ending(job_id)) is None:
        time.sleep(WAIT_POLL_S)
    state, code = ended
    say(f"{job_id} {state}, exit code {code}")
    succeeded = state == "COMPLETED"
    context = CompletedContext(
        job_context=JobContext(job_id=job_id),
        status="success" if succeeded else "failure",
        exit_code=code,
        error_type=None if succeeded else state,
        duration=time.time() - began,
        emitted_by="client",
    )
    emit(callbacks, "on_completed_ctx", context)
    return 0 if succeeded else 1


def _ending(job_id: str) -> tuple[str, int] | None:
    """The state in which a job ended, such as COMPLETED or TIMEOUT, and its exit code; None while it has not.

    Raises:
        UsageError: slurmctld does not know the job; it forgets one some minutes after its end (``MinJobAge``).
    """
    shown = _slurm("scontrol", "show", "job", "--oneliner", job_id)
    match = _STATE.search(shown.stdout)
    if match is None:
        reason = shown.stderr.strip() or "no state was shown"
        raise UsageError(f"Slurm does not know job {job_id} (any more): {reason}. See `sacct --jobs {job_id}`")
    code, signal = int(match["code"]), int(match["signal"])
    return (match["state"], 128 + signal if signal else code) if match["state"] in _ENDED else None


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not installed; run this on a login node of the cluster") from None
