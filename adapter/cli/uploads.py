"""List or retry what a run could not upload. To give up on it, remove the folder `uploads` of the run.

A retry sends to where `--job`, `--set` or the environment say, and never to where the folder of the run says.

Exit codes: 0 nothing is left, or it was listed, 1 something could not be delivered, 2 usage.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...reporters.uploads.config import QUEUE_DIRECTORY, UploadConfig
from ...reporters.uploads.queue import ABOUT, Artifact, Description, Entry, read_description, read_entries
from ...reporters.uploads.targets import open_target
from ..job.config import RunConfig, read_run_config
from ..job.sources import JOB_VARIABLE
from ..plumbing.redaction import redact
from ..plumbing.text import size_text
from ..plumbing.urls import safe_url
from .parser import UsageError, add_json, add_overrides
from .terminal import aligned, complain, say, say_json

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("action", choices=("list", "retry"))
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    add_json(parser, "list: print JSON, one object a line")
    parser.add_argument("--job", metavar="JOB.json", help="retry: job with the token and the URLs")
    add_overrides(parser, "upload_deadline_seconds=600 or checkpoints_dir=DIR")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0, or 1 where something could not be delivered.

    Raises:
        UsageError: There is no such run, or no destination.
        UploadError: The queue cannot be read.
    """
    folder = Path(args.run)
    queue = folder / QUEUE_DIRECTORY if (folder / QUEUE_DIRECTORY).is_dir() else folder
    if not queue.is_dir():
        problem = f"{queue} is not a directory" if queue.exists() else f"there is no directory {queue}"
        raise UsageError(f"{problem}; name the folder of a run")
    if not (queue / ABOUT).exists():
        return complain("uploads", f"nothing is waiting: {queue} has no upload queue", 0)
    about, entries = read_description(queue), read_entries(queue)
    if args.action == "retry":
        return _retry(args, queue, about, entries)
    rows = [_facts(entry, queue.parent) for entry in entries]
    if args.json:
        say_json(rows)
    else:
        names = ("kind", "step", "size_bytes", "state", "name")
        say(*aligned([[size_text(row[name]) if name == "size_bytes" else row[name] for name in names] for row in rows]))
        say(f"{len(rows)} waiting" if rows else "nothing is waiting")
    return 0


def _facts(entry: Entry, root: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"seq": entry.seq, "kind": entry.kind, "step": entry.step, "name": "", "size_bytes": 0}
    facts["state"] = f"refused ({entry.failure})" if entry.failure else "waiting"
    if entry.kind in ("checkpoint", "sample"):
        artifact: Artifact = entry.body
        facts["name"] = str(root / artifact.local_path)
        facts["size_bytes"] = sum(file.size_bytes for file in artifact.files)
        facts["files"], facts["files_sent"] = len(artifact.files), sum(part.startswith("put:") for part in entry.parts)
        if any(not file.location(root).exists() for file in artifact.files):
            facts["state"] = "lost (files are gone)"
    elif entry.kind == "metrics":
        metrics = entry.body.payload.get("metrics")
        facts["name"] = ", ".join(sorted(metrics)) if isinstance(metrics, dict) else ""
    else:
        facts["name"] = str(entry.body.payload.get("status", ""))
    return facts


def _retry(args: argparse.Namespace, queue: Path, about: Description, entries: Sequence[Entry]) -> int:
    from ...reporters.uploads.uploader import Uploader

    try:
        config = _config(args, queue, about)
        _require_destinations(config, about, entries)
        uploader = Uploader(config, keep_terminal=True)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with uploader:
        result = uploader.settle(progress=_show_progress)
        if result.ok:
            result = uploader.deliver_waiting_terminal()
    for item in result.undelivered:
        complain("uploads", str(item))
    left = len(read_entries(queue))
    say(f"{len(entries) - left} delivered, {left} left")
    return 1 if left else 0


def _config(args: argparse.Namespace, queue: Path, about: Description) -> UploadConfig:
    """The settings of command line, environment and job, for the run that the queue belongs to.

    Where to send what waits, the queue does not decide: it may have come with a folder from elsewhere.
    """
    settings = _settings(args)
    folders = ("checkpoints_dir", "samples_dir")
    return settings.upload_config(
        run_id=about.run_id,
        owner=settings.owner or about.owner,
        queue_dir=queue,
        roots=tuple(getattr(settings, name) for name in folders if settings.source_of(name) != "default"),
    )


def _settings(args: argparse.Namespace) -> RunConfig:
    config, errors = read_run_config(spec_path=args.job, overrides=args.set, complete=False)
    needs_job = args.job is not None or bool(os.environ.get(JOB_VARIABLE, "").strip())
    faults = [error.text for error in errors.found if needs_job or error.code != "startup.missing_job_spec_path"]
    if faults:
        raise UsageError(redact("; ".join(faults), config.secrets))
    return config


def _require_destinations(config: UploadConfig, about: Description, entries: Sequence[Entry]) -> None:
    """Refuse entries without a destination, and checkpoints without the file store of their run."""
    kinds = {entry.kind for entry in entries}
    missing = [f"TRAINER_UPLOAD_{kind.upper()}_URL" for kind in sorted(kinds) if not config.wants(kind)]
    if about.stores_files and kinds & {"checkpoint", "sample"} and not config.stores_files():
        missing += ["TENSORHUB_URL", "TRAINER_CAPABILITY_TOKEN"]
    if missing:
        raise UsageError(f"There is no destination for what waits. Set {', '.join(missing)}, or name the job by --job.")
    lacking = [name for name in about.targets if name not in {open_target(url).name for url in config.targets}]
    if lacking and kinds & {"checkpoint", "sample"}:
        raise UsageError(
            f"The run also sent its files to {', '.join(map(safe_url, lacking))}. Name the job that says so by --job, "
            "or --set uploads.targets='[\"URL\"]'; a target in a run's folder is not followed."
        )


def _show_progress(line: str) -> None:
    complain("uploads", line)
