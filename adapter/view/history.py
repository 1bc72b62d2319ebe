"""All details of a run, for pages and the terminal view.

Curves, attempts, findings and events come from one pass over the log; checkpoints and samples, from the run's folder.
"""

from __future__ import annotations

import base64
import codecs
import csv
import itertools
import json
import math
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...callbacks.checkpoint.listing import Listed
from ...reporters.events.event import ROLLED_BACK_METRIC, Completed, Event, Failed, Finding, Metric
from ...reporters.events.goodput import Ledger
from ...reporters.events.json_lines import Position
from ...reporters.events.reader import Attempts, log_of_run, typed_events
from ..contract.exceptions import EventLogError
from ..plumbing.safe_open import UnsafeFileError, read_beginning, read_regular
from .checkpoints import checkpoint_facts, checkpoints_of_run
from .differences import facts_of_run
from .log_search import Searches
from .summary import RunSummary, summary_of

FAULT_PREFIX = "diagnosis/"
MOST_EVENTS = 2000
MOST_CURVES = 400
MOST_KEPT = 1 << 15
"""Number of points at which a curve is thinned to a quarter."""
LARGEST_RECORD = 1 << 20
LARGEST_MEDIA = 600_000
"""Maximum size of a picture or a recording that is put into a page, in bytes."""
BEGINNING_BYTES = 4000
"""Number of bytes read from the beginning of a file: enough to recognize its kind, and all that is shown of a text."""
LONGEST_TEXT = 2000
_MEDIA = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "audio/wav": re.compile(rb"RIFF....WAVE", re.DOTALL),
    "audio/ogg": re.compile(rb"OggS"),
    "audio/flac": re.compile(rb"fLaC"),
    "audio/mpeg": re.compile(rb"ID3|\xff[\xf2\xf3\xfb]"),
}
"""Kinds of files that a page shows or plays, by their first bytes."""
_TABLES = {".csv": ",", ".tsv": "\t"}
MOST_ROWS = 20
"""Maximum number of rows of a table that are shown, not counting its header, and of columns."""
_REQUEST = frozenset({"name", "task", "prompt", "negative_prompt", "instruction", "source_image", "seed", "run_id"})
_NOT_RETURNED = _REQUEST | {"step", "files"}
"""Keys of a sample's record that its generator did not return."""


class Curve:
    """The points of one metric, in the order in which they were logged.

    Attributes:
        first_nonfinite: Step and value of the first value that is not finite; None if all are finite.
    """

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.times_ms: array[int] = array("q")
        self.values: array[float] = array("d")
        self.first_nonfinite: tuple[int, float] | None = None

    def add(self, step: int, time_ms: int, value: float) -> None:
        """Append a point."""
        if not math.isfinite(value) and self.first_nonfinite is None:
            self.first_nonfinite = step, value
        self.steps.append(step)
        self.times_ms.append(time_ms)
        self.values.append(value)
        if len(self.values) >= MOST_KEPT:
            self._keep(thin_curve(np.array(self.steps), np.array(self.values), MOST_KEPT // 4))

    def remove_after(self, step: int) -> None:
        """Remove the points after `step`: a restart or a roll-back trains these steps again."""
        kept = np.array(self.steps) <= step
        if not kept.all():
            self._keep(np.flatnonzero(kept))

    def points(self, most: int) -> dict[str, list[Any]]:
        """Return at most `most` points: ``steps``, ``times`` (ms since 1970), ``values`` (null if not finite)."""
        at = thin_curve(np.array(self.steps), np.array(self.values), most)
        values = [self.values[index] for index in at]
        return {
            "steps": [self.steps[index] for index in at],
            "times": [self.times_ms[index] for index in at],
            "values": [float(f"{value:.6g}") if math.isfinite(value) else None for value in values],
        }

    def _keep(self, at: NDArray[np.intp]) -> None:
        for name in ("steps", "times_ms", "values"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, np.array(column)[at].tobytes()))


def thin_curve(steps: NDArray[np.int64], values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Return at most `most` indices of a curve, in order: first, last, and both extremes of each interval of steps.

    The intervals have equal numbers of steps instead of points: `Curve.add` thins a long curve repeatedly, so its
    beginning has fewer points per step than its end.
    """
    if len(values) <= most:
        return np.arange(len(values))
    intervals = max((most - 2) // 2, 1)
    ascending = np.maximum.accumulate(steps)
    bounds = np.searchsorted(ascending, np.linspace(ascending[0], ascending[-1] + 1, intervals + 1))
    low, high = np.where(np.isfinite(values), values, np.inf), np.where(np.isfinite(values), values, -np.inf)
    kept = {0, len(values) - 1}
    for begin, end in itertools.pairwise(bounds.tolist()):
        if begin < end:
            kept |= {begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())}
    return np.array(sorted(kept))


@dataclass
class Budget:
    """The limits of a page for one run.

    Attributes:
        points: Points of all curves together.
        media_bytes: Bytes of pictures and recordings. Divided by the number of samples, this is the largest picture or
            recording that is put into the page.
        sample_steps: Number of steps whose samples are shown.
        address_of: Returns the address from which a page loads a picture or a recording, given its path in the run's
            folder. None puts their bytes into the page.
    """

    points: int = 40_000
    media_bytes: int = 1_500_000
    sample_steps: int = 60
    address_of: Callable[[str], str] | None = None


@dataclass
class History:
    """The content of a run's log; `as_json` adds the content of its folder."""

    summary: RunSummary
    curves: dict[str, Curve] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    ledger: Ledger = field(default_factory=Ledger)
    findings: list[dict[str, Any]] = field(default_factory=list)
    left_out_events: int = 0
    """Number of events that `events` no longer holds, because it keeps only the newest."""
    left_out_curves: int = 0
    """Number of points without a curve, because there are `MOST_CURVES` curves of other metrics."""
    _attempts: Attempts = field(default_factory=Attempts)
    _faults: dict[str, int] = field(default_factory=dict)
    """The faults reported by `Diagnosis` that have not ended: the first step of each, by kind."""
    _position: Position = field(default_factory=Position)
    _is_broken: bool = False

    @property
    def is_current(self) -> bool:
        """Whether the run still has the same log file, so that `read_new` can continue to read it."""
        log = log_of_run(self.summary.path)
        return log == self.summary.log and self._position.is_of(log)

    def read_new(self) -> None:
        """Read the lines that were added to the log. A broken line becomes a finding, and nothing after it is read."""
        if self._is_broken:
            return
        try:
            for event in typed_events(self.summary.log, strict=False, position=self._position):
                self.take(event)
        except EventLogError as error:
            self._is_broken = True
            self._add_finding("fail", None, str(error))

    def take(self, event: Event) -> None:
        """Add the next event of the log."""
        self.ledger.take(event)
        if (undone_after := self._attempts.take(event)) is not None:
            for curve in self.curves.values():
                curve.remove_after(undone_after)
        if isinstance(event, Metric):
            self._take_metric(event)
            return
        if isinstance(event, Finding):
            self._add_finding(event.level, event.step, event.text)
        if isinstance(event, Failed):
            remedy = "start it again to continue" if event.resumable is True else ""
            level = "stop" if event.error == event.category else "fail"  # for a stop, both are its reason
            self._add_finding(level, event.step, event.error, remedy)
        if isinstance(event, Completed) and event.finite is False:
            text = "the final weights are not finite (nan or infinite)"
            self._add_finding("fail", event.step, text, "lower the rate")
        self.left_out_events += len(self.events) == MOST_EVENTS
        self.events.append(_as_json(event))

    def as_json(self, budget: Budget) -> dict[str, Any]:
        """Return the run for a page, within the limits of `budget`."""
        summary, listed = self.summary, [_checkpoint(each) for each in checkpoints_of_run(self.summary.path)]
        most = max(min(budget.points // max(len(self.curves), 1), 2000), 4)
        findings = [*self.findings]
        for name, curve in self.curves.items():
            if curve.first_nonfinite is not None:
                step, value = curve.first_nonfinite
                findings.append(_finding("fail", step, f"{name} was {value} for the first time", "see `on_nonfinite`"))
        for kind, step in self._faults.items():
            findings.append(_finding("warn", step, f"{kind.replace('_', ' ')} from step {step} on"))
        broken = [row for row in listed if row["state"].startswith("broken")]
        findings += [_finding("fail", row["step"], f"{row['name']}: {row['state']}", row["show"]) for row in broken]
        account = self.ledger.account()
        return {
            **facts_of_run(summary),
            "words": summary.words,
            "curves": {name: curve.points(most) for name, curve in self.curves.items()},
            "spans": [] if account is None else [_attempt(span) for span in account.spans],
            "parts": {} if account is None else {n: s for n, s in account.seconds.items() if s > 0},
            "goodput": None if account is None else account.goodput,
            "checkpoints": listed,
            "samples": list(_samples(summary.path, budget)),
            "findings": sorted(findings, key=lambda each: each["step"] or 0),
            "events": list(self.events),
            "left_out": {"events": self.left_out_events, "curves": self.left_out_curves},
        }

    def _take_metric(self, event: Metric) -> None:
        """Add a point to its curve, and note a roll-back or a fault that it reports."""
        if event.name == ROLLED_BACK_METRIC and math.isfinite(event.number):
            self._add_finding("warn", event.step, f"rolled back to step {event.number:.0f}")
        if event.name.startswith(FAULT_PREFIX):
            self._take_fault(event.name.removeprefix(FAULT_PREFIX), event)
        if (curve := self.curves.get(event.name)) is None:
            if len(self.curves) >= MOST_CURVES:
                self.left_out_curves += 1
                return
            curve = self.curves[event.name] = Curve()
        curve.add(event.step, event.timestamp_ms, event.number)

    def _take_fault(self, kind: str, event: Metric) -> None:
        if event.number == 1:
            self._faults.setdefault(kind, event.step)
        elif kind in self._faults:
            began = self._faults.pop(kind)
            self._add_finding("warn", began, f"{kind.replace('_', ' ')} from step {began} to {event.step}")

    def _add_finding(self, level: str, step: int | None, text: str, remedy: str = "") -> None:
        self.findings.append(_finding(level, step, text, remedy))


def history_of(folder: Path, before: History | None = None, searches: Searches | None = None) -> History:
    """Read the run in `folder`, in bounded memory.

    Args:
        folder: Folder of a run.
        before: The history from an earlier call. If the log is still the same file, only new lines are read.
        searches: See `summary_of`.
    """
    if before is None or not before.is_current:
        history = History(summary_of(folder, searches=searches))
    else:
        history, before.summary = before, summary_of(folder, searches=searches)
    history.read_new()
    return history


def _finding(level: str, step: int | None, text: str, remedy: str = "") -> dict[str, Any]:
    return {"level": level, "step": step, "text": text[:LONGEST_TEXT], "remedy": remedy}


def _as_json(event: Event) -> dict[str, Any]:
    fields = msgspec.to_builtins(event)
    for name in ("schema_version", "run_id", "seq", "metadata"):
        fields.pop(name, None)
    return {name: value[:LONGEST_TEXT] if isinstance(value, str) else value for name, value in fields.items()}


def _attempt(span: Any) -> dict[str, Any]:
    seconds = {name: spent for name, spent in span.seconds.items() if spent > 0}
    return {**msgspec.to_builtins(span), "seconds": seconds}


def _checkpoint(listed: Listed) -> dict[str, Any]:
    """Return the facts about a checkpoint, with the commands that show and export it."""
    facts, path = checkpoint_facts(listed), listed.path
    to = f"{facts['name']}.safetensors"
    export = f"genlight checkpoints export {path} --to {to}" if listed.record is not None else ""
    return {**facts, "show": f"genlight checkpoints show {path}", "export": export}


def _samples(folder: Path, budget: Budget) -> Iterator[dict[str, Any]]:
    """Yield the samples, oldest first. If too many steps have samples, yield those of evenly spaced steps."""
    samples = folder / "samples"
    records = [path for path in sorted(samples.glob("step-*.json")) if not path.is_symlink()]
    by_step: dict[str, list[Path]] = {}
    for path in records:
        by_step.setdefault(path.stem.split("-")[1], []).append(path)
    steps = list(by_step)
    if len(steps) > budget.sample_steps:
        last = len(steps) - 1
        steps = [steps[round(index * last / (budget.sample_steps - 1))] for index in range(budget.sample_steps)]
    share = replace(budget, media_bytes=budget.media_bytes // max(sum(len(by_step[step]) for step in steps), 1))
    for step in steps:
        for path in by_step[step]:
            try:
                record = json.loads(read_regular(path, limit=LARGEST_RECORD))
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                named = record.get("files")
                names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
                yield {
                    "step": record.get("step"),
                    "name": str(record.get("name") or path.stem)[:LONGEST_TEXT],
                    "prompt": str(record.get("prompt") or "")[:LONGEST_TEXT],
                    "returned": {
                        name[:LONGEST_TEXT]: _brief(record[name]) for name in record if name not in _NOT_RETURNED
                    },
                    "files": [_file(samples, name, share) for name in names[:8]],
                }


def _brief(value: Any) -> str | float:
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST_TEXT]


def _file(samples: Path, name: str, budget: Budget) -> dict[str, Any]:
    """Return a file of a sample: a picture or a recording, a text, a table, or the reason why it is not shown."""
    path, shown = samples / name, {"name": name[:LONGEST_TEXT]}
    if not path.resolve().is_relative_to(samples.resolve()):
        return {**shown, "note": "it is outside the run's samples"}
    try:
        size, beginning = path.stat().st_size, read_beginning(path, BEGINNING_BYTES)
        if (kind := media_kind(beginning)) is None:
            return {**shown, **_text(path, beginning, size)}
        if budget.address_of is not None:
            return {**shown, "kind": kind, "source": budget.address_of(f"{samples.name}/{name}")}
        content = read_regular(path, limit=LARGEST_MEDIA)
    except UnsafeFileError as error:
        return {**shown, "note": f"not shown: {error.strerror}"}
    except OSError as error:
        return {**shown, "note": error.strerror or "it cannot be read"}
    if size > budget.media_bytes:
        return {**shown, "note": f"{size:,} bytes: too large for this page, see {path}"}
    return {**shown, "kind": kind, "source": f"data:{kind};base64,{base64.b64encode(content).decode()}"}


def _text(path: Path, beginning: bytes, size: int) -> dict[str, Any]:
    """Return the beginning of a text or the first rows of a table; a note for any other file."""
    rest = max(size - len(beginning), 0)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(beginning, final=not rest)
    except UnicodeDecodeError:
        text = "\0"  # not printable, so the check below rejects it
    if not all(each.isprintable() or each in "\t\r\n" for each in text):
        return {"note": f"neither a picture nor a text, {size:,} bytes"}
    more = {"note": f"{rest:,} more bytes are not shown"} if rest > 0 else {}
    if (delimiter := _TABLES.get(path.suffix.lower())) is None:
        return {"text": text, **more}
    lines = text.splitlines()[: -1 if rest > 0 else None]
    rows = [row[:MOST_ROWS] for row in itertools.islice(csv.reader(lines, delimiter=delimiter), MOST_ROWS + 1)]
    more = {"note": f"only the first {MOST_ROWS} rows are shown"} if rest > 0 or len(lines) > len(rows) else {}
    return {"table": rows, **more}


def media_kind(content: bytes) -> str | None:
    """Return the media type of a picture or a recording, by its first bytes.

    Return None for any other file, such as HTML, because a browser might run scripts in it.
    """
    return next((kind for kind, beginning in _MEDIA.items() if beginning.match(content)), None)
