"""List or retry the pending uploads of a run. To give up on them, remove the folder `uploads` of the run.

A retry takes its destinations from `--job`, `--set` or the environment, and never from the folder of the run.

Exit codes: 0 listed, or nothing is left; 1 something could not be delivered; 2 usage.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...reporters.uploads.config import ENDPOINT, FILE_STORE, QUEUE_DIRECTORY, UploadConfig
from ...reporters.uploads.queue import LOCK, Entry, read_entries
from ..contract.exceptions import UsageError
from ..job.config import RunConfig, read_run_config
from ..job.sources import JOB_VARIABLE
from ..plumbing.redaction import redact
from ..plumbing.text import size_text
from .parser import add_json, add_overrides
from .terminal import align_columns, print_error, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("action", choices=("list", "retry"))
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    add_json(parser, "list: print JSON, one object a line")
    parser.add_argument("--job", metavar="JOB.json", help="retry: job with the token and the URLs")
    add_overrides(parser, "upload_deadline_seconds=600 or checkpoints_dir=DIR")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, or 1 if something could not be delivered.

    Raises:
        UsageError: There is no such run, or no destination.
        UploadError: The queue cannot be read.
    """
    folder = Path(args.run)
    queue = folder / QUEUE_DIRECTORY if (folder / QUEUE_DIRECTORY).is_dir() else folder
    if not queue.is_dir():
        problem = f"{queue} is not a directory" if queue.exists() else f"there is no directory {queue}"
        raise UsageError(f"{problem}; name the folder of a run")
    if not (queue / LOCK).exists():
        return print_error("uploads", f"nothing is waiting: {queue} has no upload queue", 0)
    entries = read_entries(queue)
    if args.action == "retry":
        return _retry(args, queue, entries)
    rows = [_facts(entry, queue.parent) for entry in entries]
    if args.json:
        say_json(rows)
    else:
        names = ("kind", "step", "size_bytes", "state", "name")
        say(
            *align_columns(
                [[size_text(row[name]) if name == "size_bytes" else row[name] for name in names] for row in rows]
            )
        )
        say(f"{len(rows)} waiting" if rows else "nothing is waiting")
    return 0


def _facts(entry: Entry, root: Path) -> dict[str, Any]:
    """Return the facts about a waiting upload, as JSON."""
    facts: dict[str, Any] = {"seq": entry.seq, "kind": entry.kind, "step": entry.step, "name": "", "size_bytes": 0}
    facts["state"] = f"refused ({entry.reason})" if entry.refused else "waiting"
    if entry.files:
        facts["name"] = str(root / entry.local_path)
        facts["size_bytes"] = sum(file.size_bytes for file in entry.files)
        facts["files"], facts["files_sent"] = len(entry.files), sum(part.startswith("put:") for part in entry.parts)
    elif entry.kind == "metrics":
        metrics = entry.payload.get("metrics")
        facts["name"] = ", ".join(sorted(metrics)) if isinstance(metrics, dict) else ""
    else:
        facts["name"] = str(entry.payload.get("status", ""))
    return facts


def _retry(args: argparse.Namespace, queue: Path, entries: Sequence[Entry]) -> int:
    """Try to deliver the waiting uploads, run by run; return the exit code."""
    from ...reporters.uploads import Uploader

    for run_id in dict.fromkeys(entry.run_id for entry in entries):
        config = _config(args, queue, [entry for entry in entries if entry.run_id == run_id])
        try:
            uploader = Uploader(config, keep_terminal=True)
        except ValueError as error:
            raise UsageError(str(error)) from None
        with uploader:
            failure = uploader.settle(progress=_show_progress) or uploader.deliver_waiting_terminal()
        if failure is not None:
            print_error("uploads", str(failure))
    left = len(read_entries(queue))
    say(f"{len(entries) - left} delivered, {left} left")
    return 1 if left else 0


def _config(args: argparse.Namespace, queue: Path, entries: Sequence[Entry]) -> UploadConfig:
    """Return the settings of command line, environment and job for the run of `entries`.

    The queue does not choose the destinations: its folder may have come from somebody else.

    Raises:
        UsageError: A destination is missing; an entry for it would wait forever.
    """
    settings = _settings(args)
    folders = ("checkpoints_dir", "samples_dir")
    config = settings.upload_config(
        run_id=entries[0].run_id,
        owner=settings.owner or next((entry.owner for entry in entries if entry.owner), ""),
        queue_dir=queue,
        roots=tuple(getattr(settings, name) for name in folders if settings.source_of(name) != "default"),
    )
    missing = {
        _option(entry, name) for entry in entries for name in set(entry.to) - set(config.destinations(entry.kind))
    }
    if missing:
        raise UsageError(
            f"Destinations of waiting uploads are missing. Set {', '.join(sorted(missing))}, or name the job by --job; "
            "a target in a run's folder is not used."
        )
    return config


def _option(entry: Entry, destination: str) -> str:
    """Return the variables or the setting for a destination of `entry`."""
    if destination == FILE_STORE:
        return "TENSORHUB_URL and TRAINER_CAPABILITY_TOKEN"
    is_endpoint = destination == ENDPOINT
    return f"TRAINER_UPLOAD_{entry.kind.upper()}_URL" if is_endpoint else f"`uploads.targets` with {destination}"


def _settings(args: argparse.Namespace) -> RunConfig:
    config, errors = read_run_config(spec_path=args.job, overrides=args.set, complete=False)
    needs_job = args.job is not None or bool(os.environ.get(JOB_VARIABLE, "").strip())
    faults = [error.text for error in errors.found if needs_job or error.code != "startup.missing_job_spec_path"]
    if faults:
        raise UsageError(redact("; ".join(faults), config.secrets))
    return config


def _show_progress(line: str) -> None:
    print_error("uploads", line)
