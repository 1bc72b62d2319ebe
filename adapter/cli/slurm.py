"""Run a job, or any function, on a Slurm cluster.

`render` prints the sbatch script; `submit` hands it to sbatch and prints the id of the job. With `--sbatch wait`,
`submit` also waits for its end. A job that is preempted, or reaches its time limit, saves a checkpoint and returns to
the queue; the next start continues it. `genlight ls` shows the progress of the run. Each task of an array is a separate
run.

For `module:function`, the script calls `python -m genlight.adapter.runner`. The runner writes the result into a new
folder.

Exit codes: 0 done; 1 Slurm refused or could not be reached, or the job failed while submit waited for it; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..cluster.job_context import JobContext
from ..contract.exceptions import UsageError
from ..job.config import RunConfig, resolve_run_config
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.safe_open import PRIVATE_FILE
from ..runner.contexts import CompletedContext, emit
from ..runner.transport import FunctionFailedError, callbacks_for_runner, read_pickle, read_result, write_pickle
from .parser import add_overrides
from .terminal import say, visible

_GPUS = re.compile(r"(?:[\w.-]+:)?(?P<count>[1-9]\d{0,3})", re.ASCII)
"""Matches the GPUs of a node, such as 8, or h100:8 if the cluster has several types."""
_FUNCTION = re.compile(r"(?P<module>[^\W\d][\w.]*):(?P<function>[^\W\d][\w.]*)")
SRUN_WAIT_S = 600
"""Seconds after the end of the first task until srun ends the others. After the loss of a rank the others end by
themselves, and rank 0 stays to report and to upload."""
_START = """\
trap : TERM USR1  # the signals are for the tasks; this script waits for them
{set_up}
task=${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}
"""
_RUN = """\
job=$SLURM_JOB_ID
[ -n "$task" ] && job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID  # one task has the number of the whole array
{array_guard}export TRAINER_STOP_GRACE_SECONDS={grace_s}
if [ -z "${{SLURM_JOB_END_TIME:-}}" ]; then  # before Slurm 23
  end=$(squeue --noheader --job "$job" --format %e | grep --max-count 1 T)
  [ -n "$end" ] && export SLURM_JOB_END_TIME=$(date --date "$end" +%s)
fi
events={events}
saved() {{ grep -s '"event":"checkpoint"' "$events" | wc -l; }}
before=$(saved) again=no
run=({run})
[ -n "$task" ] && run+=(--set {run_id}"$task")  # each task of an array is a separate run
[ -n "${{PY_EXEC:-}}" ] && run=("$PY_EXEC" -m genlight "${{run[@]:1}}")

{srun} "${{run[@]}}"
code=$?
"""
_REQUEUE = """\
[ $code -eq 75 ] && tail -n 1 "$events" | grep -Eq '"category":"({reasons})"' && again=yes  # stopped, and can continue
[ $code -ge 128 ] && [ "$(saved)" -gt "$before" ] && again=yes  # a task was killed: its node died, say
if [ $again = yes ]; then  # also if the controller does not answer just now
  for _ in {{1..60}}; do scontrol requeue "$job" && break; sleep 5; done
fi
"""
_END = "exit $code  # 75: with RequeueExit=75 in slurm.conf the job is requeued without scontrol, too\n"
_CALL = """\

{srun} "${{PY_EXEC:-{python}}}" {call} --output-file {result}"$task".{form}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("action", choices=("render", "submit"))
    parser.add_argument("path", metavar="JOB.json|module:function", help="the job or function")
    add_overrides(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes")
    parser.add_argument(
        "--gpus-per-node", type=_gpus, metavar="[TYPE:]N", help="GPUs of each node, with one task for each"
    )
    parser.add_argument("--tasks-per-node", type=int, metavar="N", help="default: one for each GPU, otherwise 1")
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
        "--callbacks-file",
        type=Path,
        metavar="FILE",
        help="pickled callbacks: the runner of a function calls them; a submit that waits calls their "
        "`on_completed_ctx`",
    )
    parser.add_argument(
        "--args",
        nargs="*",
        default=[],
        metavar="VALUE",
        help="positional arguments of a function, as JSON or text; --set NAME=VALUE gives a keyword argument",
    )
    parser.add_argument("--result", choices=("json", "pickle"), default="pickle", help="form of a function's result")


def _gpus(text: str) -> str:
    if not _GPUS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a number such as 8 or h100:8, but received {text!r}")
    return text


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, or 1 if Slurm refuses or the job failed.

    Raises:
        StartupContractError: The job cannot be used.
        UsageError: An argument cannot be used.
    """
    try:
        target = _FUNCTION.fullmatch(args.path)
        if target is not None and not Path(args.path).exists():
            return _function(args, target["module"], target["function"])
        config = _config(args)
        script = _script(args, config)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.action == "submit":
        return int(_submit(script, config.artifacts_dir)[1] != 0)
    sys.stdout.write(script)
    return 0


def _config(args: argparse.Namespace) -> RunConfig:
    """Read the job, and refuse settings that a script cannot use.

    Raises:
        StartupContractError: The job cannot be used.
        UsageError: A setting of the job does not fit a script.
    """
    config = resolve_run_config(spec_path=args.path, overrides=args.set)
    if config.capability_token is not None and config.source_of("capability_token") == "--set":
        raise UsageError("the script would show the token; set TRAINER_CAPABILITY_TOKEN in the environment instead")
    if not args.no_requeue and (config.resume_checkpoint_path or config.inputs.resume_checkpoint_ref):
        raise UsageError(
            "the job names a checkpoint to resume from, and every start of a requeued job would begin there again; "
            "remove it from the job, or give --no-requeue"
        )
    is_array = any(option.startswith("array=") for option in args.extra) or "SBATCH_ARRAY_INX" in os.environ
    if is_array and (fault := _shared_by_tasks(config)):
        raise UsageError(fault)
    if args.args:
        raise UsageError("`--args` has no effect on a job; it is for `genlight slurm submit module:function`")
    return config


def _shared_by_tasks(config: RunConfig) -> str | None:
    """Return why the tasks of an array cannot be runs with separate folders; None if they can."""
    names = ("checkpoints_dir", "samples_dir", "metrics_dir", "events_path")
    shared = [name for name in names if config.artifacts_dir not in getattr(config, name).parents]
    if not shared:
        return None
    return f"the tasks of an array would share {', '.join(shared)}, outside of artifacts_dir; set only artifacts_dir"


def _script(args: argparse.Namespace, config: RunConfig) -> str:
    """Return the sbatch script of a job: one srun, and a requeue if the run was stopped and can continue."""
    # Do not requeue after a timeout: `max_runtime_seconds` would count from 0 again, so the run would not end.
    has_own_limit = config.max_runtime_seconds > 0
    # Use the command of this installation, on the assumption that the nodes share it, unless --container or --setup
    # provides another.
    program = Path(sys.prefix) / "bin" / "genlight"
    is_shared = program.exists() and not args.container and not args.set_up
    words = [str(program) if is_shared else "genlight", "run", str(config.spec_path)]
    words += [word for each in ("resume_from_latest=true", *args.set) for word in ("--set", each)]
    artifacts, events = f"artifacts_dir={config.artifacts_dir}", shlex.quote(str(config.events_path))
    if (fault := _shared_by_tasks(config)) is None:
        below = config.events_path.relative_to(config.artifacts_dir)
        events = f'{shlex.quote(str(config.artifacts_dir))}"$task"/{shlex.quote(str(below))}'
    filled = (_START + _RUN + ("" if args.no_requeue else _REQUEUE)).format(
        set_up="\n".join(args.set_up),
        array_guard=f'[ -n "$task" ] && echo {shlex.quote(fault)} >&2 && exit 2\n' if fault else "",
        grace_s=args.grace_s,
        events=events,
        srun=_srun(args),
        run=f'{shlex.join(words)} --set {shlex.quote(artifacts)}"$task"',
        run_id=shlex.quote(f"run_id={config.run_id}"),
        reasons="preempted" if has_own_limit else "preempted|timeout",
    )
    return "\n".join([*_directives(args, config.run_id, config.spec_path.parent), "", filled]) + _END


def _srun(args: argparse.Namespace) -> str:
    srun = ["srun", "--kill-on-bad-exit=0", f"--wait={SRUN_WAIT_S}"]
    if args.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={args.cpus_per_task}")  # srun does not take it from sbatch
    srun += [f"--container-image={args.container}"] if args.container is not None else []
    srun += [f"--container-mounts={','.join(args.mounts)}"] if args.mounts else []
    return shlex.join(srun)


def _function(args: argparse.Namespace, module: str, function: str) -> int:
    """Print or submit the script that calls a function; its files, the log and the result share a new folder.

    Raises:
        UsageError: A keyword argument has no value.
    """
    pairs = [text.partition("=") for text in args.set]
    if unusable := [name for name, equals, _ in pairs if not (equals and name.isidentifier())]:
        raise UsageError(f"Invalid keyword argument. Expected --set NAME=VALUE, but received {unusable[0]!r}.")
    folder = Path.cwd() / f"{function}-{secrets.token_hex(4)}"
    files = {
        "args": [_value(text) for text in args.args],
        "kwargs": {name: _value(text) for name, _, text in pairs},
        "callbacks": [],
    }
    paths = {name: folder / f"{name}.pickle64" for name in files}
    if args.callbacks_file is not None:
        paths["callbacks"] = args.callbacks_file.absolute()
        del files["callbacks"]
    call = ["-m", "genlight.adapter.runner", "--module", module, "--function", function, "--result", args.result]
    call += ["--job-dir", str(folder), "--pre-submission-id", folder.name]
    call += [word for name, path in paths.items() for word in (f"--{name}-file", str(path))]
    is_shared = not args.container and not args.set_up
    filled = (_START + _CALL).format(
        set_up="\n".join(args.set_up),
        srun=_srun(args),
        python=sys.executable if is_shared else "python",
        call=shlex.join(call),
        result=shlex.quote(str(folder / "result")),
        form=args.result,
    )
    script = "\n".join([*_directives(args, function, folder), "", filled])
    if args.action == "render":
        sys.stdout.write(script)
        return 0
    make_directory(folder)
    for name, value in files.items():
        write_pickle(paths[name], value)
    result = folder / f"result.{args.result}"
    sys.stderr.write(visible(f"result: {result}") + "\n")
    waits, began = "wait" in args.extra, time.time()
    callbacks = callbacks_for_runner(read_pickle(paths["callbacks"])) if waits else []
    job_id, code = _submit(script, folder)
    if waits and job_id:
        emit(callbacks, "on_completed_ctx", _outcome(job_id, code, result, time.time() - began))
    return int(code != 0)


def _outcome(job_id: str, code: int, result: Path, duration: float) -> CompletedContext:
    """Return how a function's job ended, and show the failure that the runner wrote next to the result, if any."""
    failure = None
    try:
        read_result(result)
    except FunctionFailedError as error:
        failure = error
        sys.stderr.write(visible(error) + "\n")
    except (OSError, ValueError):  # an array has a result for each task; a killed job has none
        pass
    return CompletedContext(
        job_context=JobContext(job_id=job_id),
        status="failure" if code else "success",
        exit_code=code,
        error_type=None if failure is None else failure.error_type,
        error_message=None if failure is None else failure.error_message,
        duration=duration,
        emitted_by="client",
    )


def _value(text: str) -> Any:
    """Return an argument of a function: the value if `text` is JSON, otherwise `text`."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _directives(args: argparse.Namespace, name: str, folder: Path) -> list[str]:
    """Return the first lines of a script, with options of sbatch."""
    name = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)
    gpus = _GPUS.fullmatch(args.gpus_per_node or "")
    tasks = 1 if gpus is None else int(gpus["count"])
    options = {
        "job-name": name,
        "nodes": args.nodes,
        "ntasks-per-node": tasks if args.tasks_per_node is None else args.tasks_per_node,
        "gpus-per-node": args.gpus_per_node,
        "cpus-per-task": args.cpus_per_task,
        "output": folder / f"{name}-%j.out",
        "open-mode": "append",
        "signal": f"TERM@{args.grace_s}",
    }
    ours = [f"#SBATCH --{option}={_directive(value)}" for option, value in options.items() if value is not None]
    requeue = "#SBATCH --no-requeue" if args.no_requeue else "#SBATCH --requeue"
    # The user's directives come last, and override ours.
    return ["#!/bin/bash", *ours, requeue, *(f"#SBATCH --{option}" for option in args.extra)]


def _directive(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text else text


def _submit(script: str, folder: Path) -> tuple[str, int]:
    """Write the script into `folder` and hand it to sbatch, whose errors go to standard error.

    Returns:
        The printed id of the job, and the exit code of sbatch or, with ``--sbatch wait``, of the job.
    """
    make_directory(folder)
    path = folder / "slurm_job.sh"
    write_bytes_durably(path, script.encode(), mode=PRIVATE_FILE)
    try:
        with subprocess.Popen(["sbatch", "--parsable", str(path)], stdout=subprocess.PIPE, text=True) as sbatch:
            assert sbatch.stdout is not None
            job_id = sbatch.stdout.readline().strip().partition(";")[0]  # in a federation, the cluster follows the id
            if job_id:
                say(job_id)
    except FileNotFoundError:
        raise UsageError("sbatch is not installed; run this on a login node of the cluster") from None
    return job_id, sbatch.returncode
