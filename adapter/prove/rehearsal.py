"""One rehearsal: attempts of the user's job in a scratch folder, in real processes, until the run has completed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...callbacks.checkpoint import CheckpointRecord, list_checkpoints
from ..job.sources import VARIABLES
from .evidence import Evidence, read_evidence
from .faults import Fault, Faults

_NOT_REHEARSED = frozenset(
    {"artifacts_dir", "checkpoints_dir", "samples_dir", "metrics_dir", "events_path", "canceled"}
)
_NOT_REHEARSED |= {"cancel_file_path", "max_runtime_seconds", "orchestrated", "capability_token", "file_store_url"}
"""Settings whose environment variables are removed for a rehearsal, in addition to the variables of uploads."""
WITHOUT_EFFECTS = (
    "uploads=null",
    "capability_token=null",
    "orchestrated=false",
    "cancel_file_path=null",
    "max_runtime_seconds=0",
    "lightning.logger=false",
)
"""Overrides of a job that must send nothing anywhere, and that must not be stopped from outside."""
_TAIL_LINES = 12
POLL_S = 0.2
"""Seconds between two checks for an interruption of the rehearsal."""
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for an attempt that has run out of time."""


class OutOfTime(Exception):
    """An attempt took longer than its limit."""


@dataclass(frozen=True)
class Attempt:
    """One start of the job."""

    code: int
    """Exit code of rank 0, negative for a signal."""
    seconds: float
    output: str
    """The end of its output."""


@dataclass(frozen=True)
class Scene:
    """The job, and its settings in every rehearsal."""

    job: Path
    overrides: tuple[str, ...]
    """The user's own ``--set`` options."""
    lightning_callbacks: tuple[Any, ...]
    """The job's own `lightning.callbacks`; a rehearsal adds its faults to them."""
    steps: int
    every_n_steps: int
    """Steps between checkpoints."""
    ranks: int | None = None
    """Number of processes; None leaves the job's."""
    seed: int | None = None
    """Seed for a job that has none, because runs with other random numbers cannot be compared."""


@dataclass
class Rehearsal:
    """A run of the job in its own folder."""

    scene: Scene
    folder: Path
    faults: Sequence[Fault] = ()
    settings: tuple[str, ...] = ()
    """Further settings, each as for ``--set``."""
    limit_s: float = 600.0
    """Seconds after which an attempt is ended."""
    interrupted: threading.Event = field(default_factory=threading.Event)
    """Ends the attempt once it is set. If a signal handler raised instead, it could lose a process that has just been
    started."""
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "run" / "checkpoints"

    def records(self) -> list[CheckpointRecord]:
        """Return the records of its checkpoints that can be read, oldest first."""
        return [each.record for each in list_checkpoints(self.checkpoints) if each.record is not None]

    def start(self, *, ranks: int | None = None) -> Attempt:
        """Start the job in its folder, or start it again there, and wait for its end.

        Raises:
            OutOfTime: It did not end within `limit_s`; it was ended.
            KeyboardInterrupt: `interrupted` was set; it was ended.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        began, output = time.monotonic(), self.folder / f"attempt-{len(self.attempts) + 1}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "genlight", "run", str(self.scene.job), *self._options(ranks)],
                env=environment_of_rehearsal(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all its ranks can be killed at once
            )
            try:
                code = self._wait(process, began + self.limit_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
                raise OutOfTime(f"no end within {self.limit_s:.0f} s\n{_tail(output)}") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        attempt = Attempt(code, time.monotonic() - began, _tail(output))
        self.attempts.append(attempt)
        return attempt

    def _wait(self, process: subprocess.Popen[bytes], until: float) -> int:
        """Return the exit code of the process; raise if it has not ended by `until`, or if `interrupted` is set."""
        while not self.interrupted.is_set():
            try:
                return process.wait(min(POLL_S, max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= until:
                    raise
        raise KeyboardInterrupt

    def evidence(self) -> Evidence:
        """Read the results of the completed run, as `read_evidence` does."""
        run = self.folder / "run"
        return read_evidence(self.checkpoints, run / "metrics" / "events.jsonl")

    def _options(self, ranks: int | None) -> list[str]:
        """Return the options of ``genlight run`` for an attempt."""
        scene, of_faults = self.scene, [asdict(fault) for fault in self.faults]
        breaks = {
            "class_path": f"{Faults.__module__}.{Faults.__qualname__}",
            "init_args": {"folder": str(self.folder), "checkpoints": str(self.checkpoints), "faults": of_faults},
        }
        ranks = ranks or scene.ranks
        settings = (
            *scene.overrides,
            *WITHOUT_EFFECTS,
            f"artifacts_dir={self.folder / 'run'}",
            "resume_from_latest=true",
            "metric_every=1",
            f"max_steps={scene.steps}",
            f"checkpoint_every={scene.every_n_steps}",
            "checkpoints.keep_last=0",
            # Checkpoints are read without the class, which could otherwise supply frozen weights.
            "checkpoints.weights=all",
            f"lightning.callbacks={json.dumps([*scene.lightning_callbacks, breaks])}",
            *([f"lightning.devices={ranks}"] if ranks else []),
            *([f"seed={scene.seed}"] if scene.seed is not None else []),
            *self.settings,
        )
        return [word for setting in settings for word in ("--set", setting)]


def environment_of_rehearsal(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that would send results away or put them elsewhere."""
    dropped = {
        variable for variable, name in VARIABLES.items() if name in _NOT_REHEARSED or name.startswith("uploads.")
    }
    return {name: value for name, value in environ.items() if name not in dropped}


def _tail(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
