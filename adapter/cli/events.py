"""Show, follow, check or export the event log of a run.

Exit codes: 0 done; 1 the log violates its format, or a line cannot be read; 2 usage.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ...reporters.events.goodput import PARTS, account_of
from ...reporters.events.reader import follow, log_of_run, read_events, read_metrics
from ...reporters.events.validation import iter_violations
from ..contract.exceptions import UsageError
from .parser import add_json
from .terminal import brief, print_error, say, say_json

_OMITTED = ("event", "job", "metadata", "packages", "schema_version", "seq", "step", "timestamp_ms")
"""Fields that appear elsewhere in a line, or are too long for it."""

_VIOLATIONS_AT_ONCE = 1000
"""Number of violations written at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("path", metavar="RUN", help="folder of a run, or its event log")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--follow", action="store_true", help="show events as they come, until the run ends")
    action.add_argument("--check", action="store_true", help="list every violation of the format; exit code 1 if any")
    action.add_argument("--goodput", action="store_true", help="show how all attempts spent their time")
    action.add_argument("--metrics", action="store_true", help="write the metrics as a table to standard output")
    parser.add_argument("--format", choices=("csv", "parquet"), default="csv", help="format of that table")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, or 1 if ``--check`` finds a violation of the format.

    Raises:
        UsageError: There is no log, or it has nothing to show.
        EventLogError: A line of the log cannot be read.
    """
    path = log_of_run(args.path)
    if not args.follow and not path.is_file():
        raise UsageError(f"no event log at {path}; name the folder of a run, or its event log")
    if args.check:
        return _check(path, as_json=args.json)
    if args.goodput:
        _goodput(path, as_json=args.json)
    elif args.metrics:
        _metrics(path, args.format)
    else:
        _show(path, args)
    return 0


def _check(path: Path, *, as_json: bool) -> int:
    count, violations = 0, iter_violations(path)
    while some := list(islice(violations, _VIOLATIONS_AT_ONCE)):
        count += len(some)
        say_json(map(asdict, some)) if as_json else say(*some)
    if not as_json:
        counted = f"{count} violations" if count != 1 else "1 violation"
        say(f"{path}: {counted}" if count else f"sound: {sum(1 for _ in read_events(path))} events")
    return 1 if count else 0


def _goodput(path: Path, *, as_json: bool) -> None:
    if (account := account_of(path)) is None:
        raise UsageError(f"{path} has no attempt that started, so there is no time to account for")
    if as_json:
        say_json([{**asdict(account), "goodput": account.goodput}])
        return
    attempts = f"{account.attempts} attempts" if account.attempts != 1 else "1 attempt"
    say(f"{account.wall_s:,.1f} s in {attempts}; {account.goodput:.1%} of it were steps whose work was kept")
    if not account.is_measured:
        say("no attempt was long enough to measure its parts")
        return
    for part, seconds in account.seconds.items():
        if seconds:
            share = seconds / account.wall_s if account.wall_s else 0.0
            say(f"{seconds:12,.1f} s {share:7.1%}  {part:<11} {PARTS.get(part, '')}".rstrip())


def _metrics(path: Path, form: str) -> None:
    from pyarrow import csv, parquet

    if form == "parquet" and sys.stdout.isatty():
        raise UsageError("a terminal cannot show Parquet; send it to a file, as in `> metrics.parquet`")
    table = read_metrics(path)
    sys.stdout.flush()
    if form == "parquet":
        parquet.write_table(table, sys.stdout.buffer)
    elif sys.stdout.isatty():  # names come from a file, and must not control the terminal
        buffer = io.BytesIO()
        csv.write_csv(table, buffer)
        say(*buffer.getvalue().decode().splitlines())
    else:
        csv.write_csv(table, sys.stdout.buffer)


def _show(path: Path, args: argparse.Namespace) -> None:
    """Print the events of a log, or with ``--follow`` also those to come."""
    if args.follow and not path.exists():
        print_error("events", f"waiting for {path}")
    events = follow(path) if args.follow else read_events(path)
    if args.json:
        say_json(events)
        return
    # With --follow each metric is shown at once, because another of the same step may not come.
    for group in ([event] for event in events) if args.follow else _by_step(events):
        say(_line(group))


def _by_step(events: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group the events: consecutive metrics of one step form a group; every other event is a group by itself."""

    def key(numbered: tuple[int, dict[str, Any]]) -> tuple[Any, ...]:
        number, event = numbered
        return ("metric", event.get("run_id"), event.get("step")) if event.get("event") == "metric" else (number,)

    for _, group in groupby(enumerate(events), key):
        yield [event for _, event in group]


def _line(events: list[dict[str, Any]]) -> str:
    """Return one line of the display. Any field may be missing, so that a broken log can still be shown."""
    first = events[0]
    if first.get("event") == "metric":
        details = "  ".join(_metric(event) for event in events)
    else:
        metadata = first.get("metadata")
        facts = {**first, **(metadata if isinstance(metadata, Mapping) else {})}
        details = "  ".join(f"{name}={brief(value)}" for name, value in facts.items() if name not in _OMITTED)
    step = str(first.get("step", ""))
    return f"{_clock(first.get('timestamp_ms'))}  {first.get('event')!s:<11}{step:<9}{details}".rstrip()


def _metric(event: Mapping[str, Any]) -> str:
    value = event.get("value")
    shown = event.get("value_text") if value is None else f"{value:.6g}" if isinstance(value, float) else value
    return f"{brief(event.get('name'))} {shown}"


def _clock(timestamp_ms: object) -> str:
    try:
        moment = datetime.fromtimestamp(float(str(timestamp_ms)) / 1000).astimezone()
    except (OverflowError, OSError, ValueError):
        return "?" * 19
    return moment.strftime("%Y-%m-%d %H:%M:%S")
