"""Summary of a run from its folder: state, progress, loss, best score, device time and cost.

`log_search` reads its event log, so that a thousand long logs are listed quickly.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ...callbacks.checkpoint.format.record import CheckpointRecord
from ...callbacks.checkpoint.selection import best_first, monitored
from ...reporters.events.event import STOP_REASONS, Completed, Event, Failed, Metric
from ...reporters.events.reader import log_of_run
from ...reporters.uploads.queue import count_waiting
from ..plumbing.file_lock import is_held
from ..plumbing.safe_open import open_regular
from ..run.folder import LOCK_NAME, last_holder
from .checkpoints import checkpoints_of_run
from .log_search import Search, Searches, job_of, last_step_of, metadata_of, read_tail, search_log, sketch

State = Literal["running", "stopped", "completed", "failed", "lost"]

DEEPEST = 4
"""Maximum depth of the search for runs."""
SILENT_S = 300.0
"""Seconds without activity after which a run whose lock cannot be checked counts as lost."""
SILENT_GAPS = 10.0
"""The same limit, as a multiple of the longest gap between the run's last events; the larger limit counts."""
_CLOCK_MARGIN_MS = 2000
"""A lock taken this much later than the last event belongs to the next attempt."""


@dataclass(frozen=True)
class RunSummary:
    """The summary of one run, for a listing.

    Attributes:
        path: The run's folder.
        log: Its event log, which may be absent.
        run_id: Its id; the folder's name if there is none.
        state: ``lost`` if the log has no end of the newest attempt, and its process no longer exists.
        detail: How the last attempt that trained ended, from its event; empty if it has not ended.
        later_failure: Error of a later start that trained nothing, or of a later evaluation; empty if there is none.
        resumable: Whether a restart is expected to continue the run.
        step: Completed steps.
        max_steps: Step limit; None if unknown.
        last_step: Expected last step, less than `max_steps` if the data end earlier; None if unknown.
        ranks: Number of processes; None if unknown.
        attempts: Number of attempts; 0 before the first.
        started_at_ms: When the newest attempt started, in milliseconds since 1970; None before the first attempt.
        alive_at_ms: Time of its last activity.
        steps_per_s: Speed over the last steps of the newest attempt; None if too few are logged.
        loss: The last loss; may be nan.
        score: Name and value of the best score among the remaining checkpoints; None if the job has no `monitor`.
        size_bytes: Size of all its files.
        waiting_uploads: Number of uploads that are not delivered yet.
        checkpoint_ms: When the newest checkpoint was saved, in milliseconds since 1970; None if there is none.
        losses: A few values of the loss from all over the run, by ascending step.
        device_hours: Hours of all attempts, times their number of processes; None before the first attempt.
        cost: Device hours times the job's `price_per_device_hour`; None without a price.
        attempt_goodput: Share of the newest attempt's time that was spent on training steps; None if not reported yet.
        host: Host of the newest attempt.
        proof: Comparison of the steps that the newest attempt repeated after a restart with their first time: ``level``
            (``ok`` or ``warn``), ``step`` and ``text``; None if it repeated none.
        metadata: Metadata of the newest attempt that trains: machine, code and job.
    """

    path: Path
    log: Path
    run_id: str
    state: State
    detail: str = ""
    later_failure: str = ""
    resumable: bool = False
    step: int = 0
    max_steps: int | None = None
    last_step: int | None = None
    ranks: int | None = None
    attempts: int = 0
    started_at_ms: int | None = None
    alive_at_ms: int = 0
    steps_per_s: float | None = None
    loss: float | None = None
    score: tuple[str, float] | None = None
    size_bytes: int = 0
    waiting_uploads: int = 0
    checkpoint_ms: int | None = None
    losses: tuple[float, ...] = ()
    device_hours: float | None = None
    cost: float | None = None
    attempt_goodput: float | None = None
    host: str = ""
    proof: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the current speed; None if that is not known, or the run has ended."""
        if self.state != "running" or not self.steps_per_s or self.last_step is None:
            return None
        return max(self.last_step - self.step, 0) / self.steps_per_s

    @property
    def ending(self) -> str:
        """`detail` and `later_failure` in one line."""
        later = f"a later start failed: {self.later_failure}" if self.later_failure else ""
        return "; ".join(filter(None, [self.detail, later]))

    @property
    def words(self) -> list[str]:
        """Sentences that say what happened, and what to do next."""
        return self._words() if self.proof is None else [*self._words(), f"Resumed: {self.proof['text']}."]

    def _words(self) -> list[str]:
        of = f" of {self.max_steps}" if self.max_steps else ""
        at = f"at step {self.step}{of}"
        command = self.metadata.get("command")
        again = f"Start it again to continue: {command}" if command else "Start it again to continue."
        later = [f"A later start failed: {self.later_failure}"] if self.later_failure else []
        if self.state == "running":
            return [f"It is running, {at}."]
        if self.state == "completed":
            return [f"It completed {at}{f', {self.detail}' if self.detail else ''}.", *later]
        if self.state == "stopped":
            return [f"It was stopped ({self.detail}) {at}.", *later, *([again] if self.resumable else [])]
        if self.state == "lost":
            repeated = "The steps after its last checkpoint will be repeated."
            return [f"It was lost {at}: {self.detail}. {repeated}", *later, again]
        return [f"It failed {at}: {self.detail}", *later, "Correct what the error names, then start it again."]

    def as_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object without non-finite numbers."""
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("log", "metadata")}
        return facts | {
            "path": str(self.path),
            "loss": self.loss if self.loss is None or abs(self.loss) < float("inf") else str(self.loss),
            "score": None if self.score is None else {"name": self.score[0], "value": self.score[1]},
            "left_s": self.left_s,
            "ending": self.ending,
        }


COUNTED = ("score", "size_bytes", "waiting_uploads", "checkpoint_ms", "losses")
"""Fields that `summary_of` fills only if `counts` is true."""
_RESTART_WORDS = {"ok": "same bits", "warn": "differs"}


def figures_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Return figures of a run (from `RunSummary.as_json`) as texts for a table."""
    of = f"/{run['max_steps']}" if run["max_steps"] else ""
    loss, speed, hours, cost = run["loss"], run["steps_per_s"], run["device_hours"], run["cost"]
    return {
        "steps": f"{run['step']}{of}",
        "speed": "" if speed is None else f"{speed:.3g}/s",
        "loss": "" if loss is None else f"{loss:.4g}" if isinstance(loss, float) else str(loss),
        "hours": "" if hours is None else f"{hours:,.2f}",
        "cost": "" if cost is None else f"{cost:,.2f}",
        "uploads": f"{run['waiting_uploads']} wait" if run["waiting_uploads"] else "",
        "restart": "" if run["proof"] is None else _RESTART_WORDS.get(run["proof"]["level"], ""),
    }


PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_AGE, _SPEED = "checkpoint_age_seconds", "steps_per_second"
_SCRAPED = {
    "step": ("step", "Completed steps."),
    "max_steps": ("max_steps", "Steps to train."),
    _SPEED: ("steps_per_s", "Speed of a running run."),
    "loss": ("loss", "The last loss."),
    _AGE: ("checkpoint_ms", "Time since a running run saved its newest checkpoint."),
    "uploads_waiting": ("waiting_uploads", "Uploads that are not delivered yet."),
    "goodput_ratio": ("attempt_goodput", "Share of the newest attempt's time that was spent on training steps."),
    "device_hours": ("device_hours", "Hours of all attempts, times their number of processes."),
    "cost": ("cost", "Device hours times the price_per_device_hour of the job."),
}
"""Field of `RunSummary.as_json` and meaning of each figure for Prometheus."""


def exposition(runs: Iterable[Mapping[str, Any]], now_ms: int) -> str:
    """Return the figures of runs for a scrape by Prometheus; a figure that a run does not have is absent.

    Args:
        runs: Runs as in `RunSummary.as_json`, each with its ``address``.
        now_ms: The time, in milliseconds since 1970.
    """
    # JSON escapes the characters that must be escaped in a label: quotes, backslashes and line breaks.
    listed = [(json.dumps(run["address"], ensure_ascii=False), run) for run in runs]
    lines = ["# HELP genlight_run_state Whether the run is in this state.", "# TYPE genlight_run_state gauge"]
    for label, run in listed:
        for state in get_args(State):
            lines += [f'genlight_run_state{{run={label},state="{state}"}} {int(run["state"] == state)}']
    for name, (field_name, meaning) in _SCRAPED.items():
        lines += [f"# HELP genlight_run_{name} {meaning}", f"# TYPE genlight_run_{name} gauge"]
        for label, run in listed:
            value = run[field_name]
            if value is not None and (run["state"] == "running" or name not in (_AGE, _SPEED)):
                value = (now_ms - value) / 1000 if name == _AGE else value
                lines.append(f"genlight_run_{name}{{run={label}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def is_run(folder: Path) -> bool:
    """Return whether `folder` belongs to a run: it has an event log, or a lock and checkpoints."""
    if log_of_run(folder) != folder:
        return True
    return (folder / LOCK_NAME).is_file() and (folder / "checkpoints").is_dir()


def find_runs(folder: Path, *, depth: int = DEEPEST) -> list[Path]:
    """Return the folders of runs at and below `folder`, by name; links are not followed."""
    if is_run(folder):
        return [folder]
    if depth == 0:
        return []
    try:
        with os.scandir(folder) as entries:
            below = [
                Path(entry.path)
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:  # the folder of another user
        return []
    return [run for each in sorted(below) for run in find_runs(each, depth=depth - 1)]


def summary_of(
    folder: Path, *, now_ms: int | None = None, counts: bool = True, searches: Searches | None = None
) -> RunSummary:
    """Return the summary of the run in `folder`.

    Args:
        folder: A folder from `find_runs`.
        now_ms: The time, in milliseconds since 1970; None means now.
        counts: Whether to fill the fields in `COUNTED` as well. It takes longer than the rest.
        searches: The search of each log so far, for callers that read logs repeatedly.
    """
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    log = log_of_run(folder)
    tail, search, later_failure, losses = _read(log, {} if searches is None else searches, counts=counts)
    started, proof = search.started, search.proof
    holder = last_holder(folder)
    end = next((event for event in reversed(tail) if not isinstance(event, Metric)), None)
    end = end if isinstance(end, Completed | Failed) else None
    listed = checkpoints_of_run(folder) if counts else []
    checkpoints = [each.record for each in listed if each.record is not None]
    metadata = metadata_of(started)
    max_steps = job_of(metadata).get("max_steps")
    if not isinstance(max_steps, int):
        max_steps = next((record.max_steps for record in reversed(checkpoints) if record.max_steps), None)
    newest = tail[-1] if tail else started
    signs = [newest.timestamp_ms if newest is not None else 0, modified_ms(log), modified_ms(folder / LOCK_NAME)]
    state, detail = _state(folder, log, end, tail, max(signs), now_ms, holder, metadata)
    attempt = started.attempt if started is not None and isinstance(started.attempt, int) else 1
    spent = search.end_attempt(now_ms if state == "running" else search.last_ms)
    host = metadata.get("host") or holder.get("host") or ""
    run_id = newest.run_id if newest is not None else holder.get("run_id")
    return RunSummary(
        path=folder,
        log=log,
        run_id=str(run_id or folder.name),
        state=state,
        detail=detail,
        later_failure="" if state == "running" else later_failure,
        resumable=isinstance(end, Failed) and end.resumable is True,
        step=max([0, *(record.step for record in checkpoints[-1:])]) if newest is None else last_step_of(tail),
        max_steps=max_steps,
        last_step=metadata.get("last_step"),
        ranks=metadata.get("ranks") or next((record.world_size for record in reversed(checkpoints)), None),
        attempts=0 if started is None else attempt,
        started_at_ms=None if started is None else started.timestamp_ms,
        alive_at_ms=max(signs),
        steps_per_s=_speed(tail),
        loss=None if (loss := _newest_loss(tail)) is None else loss.number,
        score=_best_score(checkpoints),
        size_bytes=_size(folder) if counts else 0,
        waiting_uploads=count_waiting(folder) if counts else 0,
        checkpoint_ms=max((record.created_at_ms for record in checkpoints), default=None),
        losses=tuple(losses),
        device_hours=None if search.newest is None else round(spent.device_s / 3600, 4),
        cost=None if spent.cost is None else round(spent.cost, 4),
        attempt_goodput=search.goodput,
        host=str(host),
        proof=None if proof is None else {"level": proof.level, "step": proof.step, "text": proof.text},
        metadata=metadata,
    )


def _read(log: Path, searches: Searches, *, counts: bool) -> tuple[list[Event], Search, str, list[float]]:
    """Return the last events of the newest attempt that trained, a search, the error of a later start, and losses.

    All are empty if the log is absent or unreadable.
    """
    try:
        descriptor = open_regular(log)
    except OSError:
        return [], Search(), "", []
    try:
        events, later_failure = read_tail(descriptor)
        loss = _newest_loss(events)
        name = "train/loss" if loss is None else loss.name  # an attempt that has just begun has no loss yet
        losses = sketch(descriptor, name) if counts else []
        return events, search_log(descriptor, searches), later_failure, losses
    finally:
        os.close(descriptor)


def _state(
    folder: Path,
    log: Path,
    end: Completed | Failed | None,
    tail: list[Event],
    alive_at_ms: int,
    now_ms: int,
    holder: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> tuple[State, str]:
    """Return the state of a run and the reason for it, as in `RunSummary.detail`."""
    lock = folder / LOCK_NAME
    is_live = is_held(lock) or is_held(log) or is_held(folder / "checkpoints" / LOCK_NAME)
    has_newer_attempt = end is not None and is_live and modified_ms(lock) > end.timestamp_ms + _CLOCK_MARGIN_MS
    if end is not None and not has_newer_attempt:
        if isinstance(end, Completed):
            return "completed", f"stopped by {end.stopped}" if isinstance(end.stopped, str) else ""
        return ("stopped" if end.error in STOP_REASONS else "failed"), end.error
    if is_live:
        return "running", ""
    here = socket.gethostname()
    host = holder.get("host") or metadata.get("host") or here
    can_see_locks = os.access(lock, os.R_OK) or os.access(log, os.R_OK)
    if host == here and can_see_locks:
        return "lost", f"its process on {host} no longer exists"
    # Some file systems do not show locks of other hosts, so only a long silence shows that the process is gone.
    moments = [event.timestamp_ms for event in tail]
    longest_gap_s = max((b - a for a, b in itertools.pairwise(moments)), default=0) / 1000
    silent_s = (now_ms - alive_at_ms) / 1000
    if silent_s > max(SILENT_S, SILENT_GAPS * longest_gap_s):
        return "lost", f"no activity from {host} for {silent_s:,.0f} s"
    return "running", ""


def _speed(tail: list[Event]) -> float | None:
    """Return the steps per second over the tail of one attempt."""
    metrics = [event for event in tail if isinstance(event, Metric)]
    if not metrics or metrics[-1].timestamp_ms <= metrics[0].timestamp_ms or metrics[-1].step <= metrics[0].step:
        return None
    return (metrics[-1].step - metrics[0].step) / (metrics[-1].timestamp_ms - metrics[0].timestamp_ms) * 1000


def _newest_loss(events: list[Event]) -> Metric | None:
    """Return the last ``train/loss``, or the last metric whose name ends in ``loss``."""
    losses = [event for event in events if isinstance(event, Metric) and event.name.endswith("loss")]
    named = [event for event in losses if event.name == "train/loss"]
    return next(reversed(named or losses), None)


def _best_score(records: list[CheckpointRecord]) -> tuple[str, float] | None:
    """Return the best score among checkpoints, by the job's ``monitor`` and ``mode``; None without a monitor."""
    monitor, mode = monitored(records)
    best = [] if monitor is None or mode is None else best_first(records, monitor, mode)
    value = best[0].metrics[str(monitor)] if best else None
    return None if value is None else (str(monitor), value)


def _size(folder: Path) -> int:
    """Return the size of all files; hard links count once, symbolic links are not followed."""
    seen: dict[tuple[int, int], int] = {}
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                status = os.lstat(os.path.join(where, name))
                seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


def modified_ms(path: Path) -> int:
    """Return the time of the last change of a file, in milliseconds since 1970; 0 if it does not exist."""
    try:
        return int(path.stat().st_mtime * 1000)
    except OSError:
        return 0
