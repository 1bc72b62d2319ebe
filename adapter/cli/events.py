"""Show, follow or check the event log of a run.

Exit codes: 0 done, 1 the log breaks its rules, 2 usage.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ...reporters.events.goodput import PARTS, account_of
from ...reporters.events.reader import follow, log_of_run, read_events, read_metrics
from ...reporters.events.validation import iter_violations
from ..contract.exceptions import EventLogError
from ..plumbing.text import printable
from .terminal import complain, say

__all__ = ["add_arguments", "run"]

_SOUND, _BROKEN = 0, 1
_PIECE_BYTES = 1 << 20
_STYLES = {
    "started": "bold cyan",
    "metric": "",
    "checkpoint": "blue",
    "sample": "magenta",
    "completed": "bold green",
    "failed": "bold red",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("file", metavar="FILE", help="event log, or the artifacts directory of a run")
    parser.add_argument("--follow", action="store_true", help="show events as they come, until the run ends")
    parser.add_argument("--check", action="store_true", help="list every violation of the format; exit code 1 if any")
    parser.add_argument("--goodput", action="store_true", help="where the time of the run went, over all attempts")
    parser.add_argument("--metrics", action="store_true", help="write the metrics as a table to standard output")
    parser.add_argument("--format", choices=("csv", "parquet"), default="csv", help="of that table")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for other programs")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code.

    0 when all went well, 1 for a log that breaks its rules, 2 for arguments that cannot be used.
    """
    path = log_of_run(args.file)
    try:
        option = next((name for name in ("check", "goodput", "metrics") if getattr(args, name)), None)
        if option is not None and args.follow:
            return complain("events", f"--{option} reads a log to its end: leave out --follow")
        if not args.follow and not path.is_file():
            return complain("events", f"no event log at {path}; name the file, or the artifacts directory of a run")
        if args.goodput:
            return _goodput(path, as_json=args.json)
        if args.metrics:
            return _metrics(path, args.format)
        return _check(path, as_json=args.json) if args.check else _show(path, args)
    except EventLogError as error:
        return complain("events", str(error), _BROKEN)


def _check(path: Path, *, as_json: bool) -> int:
    count = 0
    for violation in iter_violations(path):
        count += 1
        say(json.dumps(asdict(violation)) if as_json else violation)
    if not as_json:
        counted = f"{count} violations" if count != 1 else "1 violation"
        say(f"{path}: {counted}" if count else f"sound: {_extent(path)}")
    return _BROKEN if count else _SOUND


def _goodput(path: Path, *, as_json: bool) -> int:
    account = account_of(path)
    if account is None:
        return complain("events", f"{path} has no attempt that started, so no time to account for")
    if as_json:
        say(json.dumps({**asdict(account), "goodput": account.goodput}))
        return _SOUND
    attempts = f"{account.attempts} attempts" if account.attempts != 1 else "1 attempt"
    say(f"{account.wall_s:,.1f} s in {attempts}; {account.goodput:.1%} of it were steps whose work was kept")
    if not account.is_measured:
        say("no attempt was long enough to say what it spent its time on")
        return _SOUND
    for part, seconds in account.seconds.items():
        if seconds:
            share = seconds / account.wall_s if account.wall_s else 0.0
            say(f"{seconds:12,.1f} s {share:7.1%}  {part:<11} {PARTS.get(part, '')}".rstrip())
    return _SOUND


def _metrics(path: Path, form: str) -> int:
    from pyarrow import csv, parquet

    if form == "parquet" and sys.stdout.isatty():
        return complain("events", "Parquet is not for a terminal: send it to a file, as in `> metrics.parquet`")
    table = read_metrics(path)
    sys.stdout.flush()
    if form == "parquet":
        parquet.write_table(table, sys.stdout.buffer)
    elif sys.stdout.isatty():  # names come from a file, and must not command the terminal
        buffer = io.BytesIO()
        csv.write_csv(table, buffer)
        say(*buffer.getvalue().decode().splitlines())
    else:
        csv.write_csv(table, sys.stdout.buffer)
    return _SOUND


def _extent(path: Path) -> str:
    """How much was found sound: a file without one whole line breaks no rule, and is hardly what was meant."""
    lines, torn_bytes = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            newest = piece.rfind(b"\n")
            lines += piece.count(b"\n")
            torn_bytes = len(piece) - newest - 1 if newest >= 0 else torn_bytes + len(piece)
    events = f"{lines} events" if lines != 1 else "1 event"
    return f"{events}, and a torn last line of {torn_bytes} bytes" if torn_bytes else events


def _show(path: Path, args: argparse.Namespace) -> int:
    if args.follow and not path.exists():
        complain("events", f"waiting for {path}")
    events = follow(path) if args.follow else read_events(path)
    if args.json:
        for event in events:
            say(json.dumps(event, sort_keys=True, separators=(",", ":")))
        return _SOUND
    console = _Console(highlight=False, soft_wrap=True)
    # A follower shows each metric at once; it cannot know whether another of the same step will come.
    for group in ([event] for event in events) if args.follow else _by_step(events):
        console.print(_line(group))
    return _SOUND


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line, where rich would end the process."""
        raise BrokenPipeError


def _by_step(events: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The events, neighbouring metrics of one step together."""

    def key(numbered: tuple[int, dict[str, Any]]) -> tuple[Any, ...]:
        number, event = numbered
        return ("metric", event.get("run_id"), event.get("step")) if event.get("event") == "metric" else (number,)

    for _, group in groupby(enumerate(events), key):
        yield [event for _, event in group]


def _line(events: list[dict[str, Any]]) -> Text:
    """One line of the display; trusts no field to be there, so that a broken log can still be looked at."""
    first = events[0]
    kind = str(first.get("event"))
    line = Text()
    line.append(f"{_clock(first.get('timestamp_ms'))}  ", style="dim")
    line.append(f"{printable(kind):<11}", style=_STYLES.get(kind, "red"))
    line.append(f"{_step(first):<9}", style="dim")
    if kind == "metric":
        line.append("  ".join(_metric(event) for event in events))
    else:
        line.append(_details(kind, first), style="red" if kind == "failed" else "")
    return line


def _step(event: Mapping[str, Any]) -> str:
    return f" {printable(event['step'])} " if "step" in event else ""


def _metric(event: Mapping[str, Any]) -> str:
    value = event.get("value")
    shown = event.get("value_text") if value is None else f"{value:.6g}" if isinstance(value, float) else value
    return f"{printable(event.get('name'))} {printable(shown)}"


def _details(kind: str, event: Mapping[str, Any]) -> str:
    if kind == "started":
        attempt = f", attempt {event['attempt']}" if "attempt" in event else ""
        return printable(", ".join([f"run {event.get('run_id')}{attempt}", *_origin(event.get("metadata"))]))
    if kind == "completed":
        stopped = f"stopped by {event['stopped']}" if "stopped" in event else ""
        return printable(", ".join(filter(None, [event.get("final_checkpoint"), stopped])))
    if kind == "failed":
        return printable(f"{event.get('error')}{' (resumable)' if event.get('resumable') else ''}")
    return printable(event.get("path", ""))


def _origin(metadata: object) -> list[str]:
    """Where an attempt came from, in a few words."""
    if not isinstance(metadata, Mapping):
        return []
    git, tags = metadata.get("git"), metadata.get("tags")
    commit = str(git.get("commit"))[:12] if isinstance(git, Mapping) else ""
    changed = ", with changes" if isinstance(git, Mapping) and git.get("dirty") else ""
    return [
        *([f"commit {commit}{changed}"] if commit else []),
        *([f"on {metadata['host']}"] if "host" in metadata else []),
        *([f"tags {' '.join(map(str, tags))}"] if isinstance(tags, list) and tags else []),
        *([str(metadata["notes"])] if "notes" in metadata else []),
    ]


def _clock(timestamp_ms: object) -> str:
    if not isinstance(timestamp_ms, (int, float)):
        return "?" * 19
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000).astimezone()
    except (OverflowError, OSError, ValueError):
        return "?" * 19
    return moment.strftime("%Y-%m-%d %H:%M:%S")
