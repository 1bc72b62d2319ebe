"""The sbatch script of a job: one srun, and a requeue where the run was stopped and can go on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GPUS", "BatchScript"]

WAIT_S = 600
"""How long after the first task has ended srun ends the others; ranks that lose one end by themselves, and rank 0 stays
to report and to upload."""
GPUS = re.compile(r"(?:[\w.-]+:)?(?P<count>[1-9]\d{0,3})", re.ASCII)
"""GPUs of a node, with their type where the cluster has several."""


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


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """A script: the resources that it asks Slurm for, and the command that it starts; `text` is the script.

    Raises:
        ValueError: A string cannot stand in a directive, or a setting needs another one; every fault is listed. Numbers
            are for sbatch to judge.
    """

    name: str
    """Of the job, as the queue shows it; without blanks."""
    job: Path
    """The job spec, which all nodes see at this path."""
    artifacts: Path
    """The run's folder, which all nodes share."""
    events: Path
    """The run's event log, whose last line says why a run stopped."""
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: str | None = None
    """A number, with a type before it where the cluster has several: ``8``, ``h100:8``."""
    cpus_per_task: int | None = None
    grace_s: int = 120
    """How long before the end of its time the job gets SIGTERM."""
    requeues: bool = True
    requeue_after: tuple[str, ...] = ("preempted", "timeout")
    """Reasons of a stop after which the job is put back into the queue."""
    set_up: Sequence[str] = ()
    """Lines that prepare the environment, such as ``module load cuda``, run in the script before srun."""
    container: str | None = None
    """An image, which every task runs in by Slurm's ``--container-image`` (pyxis)."""
    mounts: Sequence[str] = ()
    """Folders of the node that the container sees, as ``/from:/to``."""
    program: str = "genlight"
    """The command on the nodes."""
    overrides: Sequence[str] = ()
    """``--set`` of every task."""
    extra: Sequence[str] = ()
    """Further options of sbatch without their dashes, such as ``partition=gpu`` or ``exclusive``; they win over those
    above."""

    def __post_init__(self) -> None:
        faults = [
            f"Invalid option of sbatch. Expected NAME=VALUE or NAME without blanks, but received {text!r}."
            for text in self.extra
            if not re.fullmatch(r"[a-z][a-z-]*(=[!-~]+)?", text)
        ]
        if self.gpus_per_node is not None and not GPUS.fullmatch(self.gpus_per_node):
            given = self.gpus_per_node
            faults.append(f"Invalid `gpus_per_node`. Expected a number such as 8 or h100:8, but received {given!r}.")
        if self.mounts and self.container is None:
            faults.append("`mounts` has no effect without `container`.")
        if faults:
            raise ValueError("\n".join(faults))

    def text(self) -> str:
        """The script."""
        settings = ("resume_from_latest=true", *self.overrides, f"artifacts_dir={self.artifacts}")
        words = [self.program, "run", str(self.job), *(word for each in settings for word in ("--set", each))]
        options = ["srun", "--kill-on-bad-exit=0", f"--wait={WAIT_S}"]
        if self.cpus_per_task is not None:
            options.append(f"--cpus-per-task={self.cpus_per_task}")  # which srun does not take from sbatch
        if self.container is not None:
            options.append(f"--container-image={shlex.quote(self.container)}")
            options += [f"--container-mounts={shlex.quote(','.join(self.mounts))}"] if self.mounts else []
        script = _RUN + (_REQUEUE if self.requeues else "")
        filled = script.format(
            set_up="\n".join(self.set_up),
            grace_s=self.grace_s,
            events=shlex.quote(str(self.events)),
            srun=" ".join(options),
            run=shlex.join(words),
            reasons="|".join(self.requeue_after),
        )
        return "\n".join([*self._directives(), "", filled]) + _END

    def _directives(self) -> list[str]:
        options = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_task,
            "output": self.job.parent / f"{self.name}-%j.out",
            "open-mode": "append",
            "signal": f"TERM@{self.grace_s}",
        }
        given = [f"#SBATCH --{name}={_directive(value)}" for name, value in options.items() if value is not None]
        requeue = "#SBATCH --requeue" if self.requeues else "#SBATCH --no-requeue"
        return ["#!/bin/bash", *given, requeue, *(f"#SBATCH --{option}" for option in self.extra)]


def _directive(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text else text
