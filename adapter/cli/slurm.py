"""Run a job on a Slurm cluster.

`render` prints the sbatch script, `submit` hands it to sbatch and prints the id, and `wait` waits for the end of that
id. A job that is preempted, or reaches its time limit, saves a checkpoint and is put back into the queue, where the
same command continues it. `genlight ls` shows how far the run is.

Exit codes: 0 done, 1 Slurm refused, or the job that was waited for failed, 2 usage.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from ..cluster.batch_script import GPUS, BatchScript
from ..cluster.job_context import JobContext
from ..job.config import resolve_run_config
from ..plumbing.durable import write_bytes_durably
from ..plumbing.safe_open import PRIVATE_FILE, make_directory
from ..runner.contexts import CompletedContext, emit
from ..runner.transport import read_pickle, travelling
from .parser import UsageError, add_overrides
from .terminal import complain, say

__all__ = ["add_arguments", "run"]

_OF_THE_SCRIPT = ("nodes", "gpus_per_node", "cpus_per_task", "grace_s", "set_up", "container", "mounts", "extra")
"""Arguments that are passed to the script unchanged."""
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
        script = _batch_script(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.action == "submit":
        return _submit(script)
    sys.stdout.write(script.text())
    return 0


def _batch_script(args: argparse.Namespace) -> BatchScript:
    config = resolve_run_config(spec_path=args.path, overrides=args.set)
    if config.capability_token is not None and config.source_of("capability_token") == "--set":
        raise UsageError("the script would show the token; set TRAINER_CAPABILITY_TOKEN in the environment instead")
    requeues = not args.no_requeue
    if requeues and (config.resume_checkpoint_path or config.inputs.resume_checkpoint_ref):
        raise UsageError(
            "the job names a checkpoint to resume from, and every start of a requeued job would begin there anew; "
            "leave it out, or give --no-requeue"
        )
    has_own_limit = config.max_runtime_seconds > 0  # which a requeue would not keep
    gpus = GPUS.fullmatch(args.gpus_per_node or "")  # a text that does not match is refused by the script
    tasks = args.tasks_per_node
    # This installation's own command, which the nodes are taken to share where nothing prepares another one.
    program = Path(sys.prefix) / "bin" / "genlight"
    is_shared = program.exists() and not args.container and not args.set_up
    return BatchScript(
        name=re.sub(r"[^\w.-]", "-", config.run_id, flags=re.ASCII),
        job=config.spec_path,
        artifacts=config.artifacts_dir,
        events=config.events_path,
        tasks_per_node=(1 if gpus is None else int(gpus["count"])) if tasks is None else tasks,
        requeues=requeues,
        requeue_after=("preempted",) if has_own_limit else ("preempted", "timeout"),
        program=str(program) if is_shared else "genlight",
        overrides=args.set,
        **{name: getattr(args, name) for name in _OF_THE_SCRIPT},
    )


def _submit(script: BatchScript) -> int:
    make_directory(script.artifacts)
    path = script.artifacts / "slurm_job.sh"
    write_bytes_durably(path, script.text().encode(), mode=PRIVATE_FILE)
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
