"""List or retry what a run could not deliver. Who gives up on it removes the folder `uploads` of the run.

Exit codes: 0 nothing is left, or it was listed, 1 something could not be delivered, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...reporters.uploads.config import ENDPOINT, FILE_STORE, QUEUE_DIRECTORY, UploadConfig
from ...reporters.uploads.queue import LOCK, Entry, read_entries
from ..contract.exceptions import StartupContractError, UploadError
from ..job.config import RunConfig, read_run_config
from ..job.sources import JOB_VARIABLE
from ..plumbing.redaction import redact
from ..run.uploads import upload_config
from .terminal import complain, say

__all__ = ["add_arguments", "run"]

_DELIVERED, _LEFT = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("action", choices=("list", "retry"))
    parser.add_argument("run_dir", metavar="RUN_DIR", help="artifacts directory of a run")
    parser.add_argument("--json", action="store_true", help="list: one JSON object a line, for other programs")
    parser.add_argument(
        "--job", metavar="FILE", help="retry: job spec with token and URLs, where no TRAINER_… variable sets them"
    )
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS", help="retry: how long to try")
    parser.add_argument("--target", action="append", metavar="URL", help="retry: send checkpoints and samples here too")
    parser.add_argument(
        "--root", action="append", metavar="DIR", help="retry: take files from below DIR too, not only RUN_DIR"
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code.

    0 when nothing is left (or was listed), 1 when something could not be delivered, 2 for arguments that
    cannot be used.
    """
    queue = _queue_of(Path(args.run_dir))
    if not queue.is_dir():
        problem = f"{queue} is not a directory" if queue.exists() else f"there is no directory {queue}"
        return complain("uploads", f"{problem}; name the artifacts directory of a run")
    if not (queue / LOCK).exists():
        return complain("uploads", f"nothing is waiting: {queue} has no upload queue", _DELIVERED)
    try:
        entries = read_entries(queue)
    except UploadError as error:
        return complain("uploads", str(error))
    if args.action == "retry":
        return _retry(args, queue, entries)
    _list(entries, queue.parent, as_json=args.json)
    return _DELIVERED


def _queue_of(run_dir: Path) -> Path:
    """The queue of the run at `run_dir`, which may be the queue itself."""
    inside = run_dir / QUEUE_DIRECTORY
    return inside if inside.is_dir() else run_dir


def _list(entries: Sequence[Entry], root: Path, *, as_json: bool) -> None:
    for entry in entries:
        facts = _facts(entry, root)
        if as_json:
            say(json.dumps(facts, sort_keys=True))
        else:
            say(f"{facts['kind']:<10}  step {facts['step']:<9}  {facts['size_bytes']:>13,} B  {facts['state']}"
                 f"  {facts['name']}")  # fmt: skip
    if not as_json:
        say(f"{len(entries)} waiting" if entries else "nothing is waiting")


def _facts(entry: Entry, root: Path) -> dict[str, Any]:
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
    from ...reporters.uploads.uploader import Uploader

    for run_id in dict.fromkeys(entry.run_id for entry in entries):
        try:
            config = _config(args, queue, [entry for entry in entries if entry.run_id == run_id])
            uploader = Uploader(config, keep_terminal=True)
        except (UploadError, StartupContractError, ValueError) as error:
            return complain("uploads", str(error))
        with uploader:
            failure = uploader.settle(progress=_show_progress) or uploader.deliver_waiting_terminal()
        if failure is not None:
            complain("uploads", str(failure), _LEFT)
    left = len(read_entries(queue))
    say(f"{len(entries) - left} delivered, {left} left")
    return _LEFT if left else _DELIVERED


def _config(args: argparse.Namespace, queue: Path, entries: Sequence[Entry]) -> UploadConfig:
    """Settings of the environment, else of the job spec; whose run it is, its `entries` know.

    Where to send what waits, the queue does not decide: it may have come with a folder from elsewhere.

    Raises:
        UploadError: A destination is missing, without which an entry would wait for ever.
    """
    settings = _settings(args.job)
    places = (settings.checkpoints_dir, settings.samples_dir)
    chosen = settings.source_of("checkpoints_dir"), settings.source_of("samples_dir")
    config = upload_config(
        settings,
        run_id=entries[0].run_id,
        owner=settings.owner or next((entry.owner for entry in entries if entry.owner), ""),
        queue_dir=queue,
        targets=tuple(dict.fromkeys((*settings.uploads.targets, *(args.target or ())))),
        roots=(*(args.root or ()), *(place for place, of in zip(places, chosen, strict=True) if of != "default")),
        deadline_s=args.deadline,
    )
    missing = {
        _option(entry, name) for entry in entries for name in set(entry.to) - set(config.destinations(entry.kind))
    }
    if missing:
        raise UploadError(
            f"Destinations of what waits are missing. Give {', '.join(sorted(missing))}; a target in a run's folder is "
            "not followed."
        )
    return config


def _option(entry: Entry, destination: str) -> str:
    """The variable or option that gives a destination of `entry`."""
    if destination == FILE_STORE:
        return "TENSORHUB_URL and TRAINER_CAPABILITY_TOKEN"
    return f"TRAINER_UPLOAD_{entry.kind.upper()}_URL" if destination == ENDPOINT else f"--target {destination}"


def _settings(job: str | None) -> RunConfig:
    """The settings of uploads in the environment and, where one is named, in a job file.

    Raises:
        UploadError: With everything in them that cannot be used.
    """
    config, errors = read_run_config(spec_path=job, complete=False)
    names_job = job is not None or bool(os.environ.get(JOB_VARIABLE, "").strip())
    found = [error for error in errors.found if names_job or error.code != "startup.missing_job_spec_path"]
    if found:
        raise UploadError(redact("; ".join(error.text for error in found), config.secrets))
    return config


def _show_progress(line: str) -> None:
    complain("uploads", line)
