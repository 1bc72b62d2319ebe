"""List, verify, show or export the checkpoints of a run.

Exit codes: 0 done, 1 a checkpoint is broken, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ...callbacks.checkpoint.contents import read_header, sliced_tensors
from ...callbacks.checkpoint.format.record import (
    CheckpointRecord,
    name_of,
    read_record,
    record_path,
    tensor_file,
)
from ...callbacks.checkpoint.format.tensor_files import RAW, TORCH_TYPES, rank_of
from ...callbacks.checkpoint.selection import (
    Listed,
    best_first,
    find_checkpoint,
    folder_of_checkpoints,
    list_checkpoints,
    monitored,
)
from ...callbacks.checkpoint.storage.files import missing_file, verify_files
from ..contract.exceptions import BrokenCheckpointError, CheckpointError
from ..plumbing.text import printable, size_text
from .terminal import aligned, complain, say

__all__ = ["add_arguments", "run"]

_SOUND, _BROKEN = 0, 1
_SHOWN_TENSORS = 40
_NOTHING = "no checkpoint in {}; name a run's directory, its checkpoints, or one of them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("action", choices=("list", "verify", "show", "export"))
    parser.add_argument("path", metavar="PATH", help="checkpoint (its .json or its name), or a folder of checkpoints")
    parser.add_argument("--json", action="store_true", help="list, verify, show: JSON, for other programs")
    parser.add_argument(
        "--to",
        metavar="TARGET",
        help="export: FILE.safetensors (weights alone), FILE.ckpt (Lightning's format), or FOLDER of a Hugging Face "
        "model, which from_pretrained loads",
    )
    parser.add_argument("--force", action="store_true", help="export: replace what is there")
    parser.add_argument(
        "--strip-prefix", default="", metavar="PREFIX", help="export: only weights with this prefix, and without it"
    )
    parser.add_argument(
        "--base",
        metavar="FILE",
        help="export: safetensors file, or checkpoint, with the tensors that this one leaves out (weights='trained')",
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code.

    0 when all is well, 1 when a checkpoint is broken, 2 for arguments that cannot be used.
    """
    try:
        if args.action == "list":
            return _list(Path(args.path), as_json=args.json)
        if args.action == "verify":
            return _verify(Path(args.path), as_json=args.json)
        if args.action == "show":
            return _show(read_record(find_checkpoint(args.path)), as_json=args.json)
        return _export(args)
    except BrokenCheckpointError as error:
        return complain("checkpoints", str(error), _BROKEN)
    except (FileNotFoundError, NotADirectoryError) as error:
        if error.filename is None:
            return complain("checkpoints", str(error))
        if not str(error.filename).startswith(os.path.abspath(args.path)):  # It is about where to export to.
            raise
        problem = f"{args.path} is not a checkpoint" if Path(args.path).exists() else f"there is nothing at {args.path}"
        return complain("checkpoints", f"{problem}; name a run's directory or a checkpoint")
    except CheckpointError as error:
        return complain("checkpoints", str(error))


def _listed(path: Path) -> list[Listed]:
    folder = folder_of_checkpoints(path)
    if folder is not None:
        return list_checkpoints(folder)
    record = record_path(path)
    try:
        return [Listed(record, read_record(record))]
    except BrokenCheckpointError as error:
        return [Listed(record, None, error.reason)]


_NOT_FINITE = "weights NOT finite"


def _list(path: Path, *, as_json: bool) -> int:
    found = _listed(path)
    records = [listed.record for listed in found if listed.record is not None]
    monitor, mode = monitored(records)
    best = next(iter(best_first(records, monitor, mode)), None) if mode is not None else None
    rows = [_row(listed, is_best=best is not None and listed.record is best) for listed in found]
    if not rows:
        return complain("checkpoints", _NOTHING.format(path), _SOUND)
    if as_json:
        say(*map(json.dumps, rows))
        return _SOUND
    header = {"name": "NAME", "step": "STEP", "size": "SIZE", "saved": "SAVED", "run_id": "RUN", "note": ""}
    texts = [header, *({**row, "size": size_text(row["size"])} for row in rows)]
    say(*aligned([[printable(text[key]) for key in header] for text in texts]))
    return _SOUND


def _row(listed: Listed, *, is_best: bool) -> dict[str, Any]:
    """One line of a listing; no file of the checkpoint is read."""
    record = listed.record
    name = name_of(listed.path)
    if record is None:
        return {"name": name, "step": "", "size": 0, "saved": "", "run_id": "", "note": f"broken: {listed.problem}"}
    return {
        "name": name,
        "step": record.step,
        "size": record.size_bytes,
        "saved": _time(record),
        "run_id": record.run_id,
        "note": _note(record, is_best=is_best),
        "best": is_best,
    }


def _note(record: CheckpointRecord, *, is_best: bool) -> str:
    problem = missing_file(record)
    if problem:
        return f"broken: {problem}"
    notes = [f"{name}={value:g}" for name, value in record.metrics.items() if value is not None]
    bad = [_NOT_FINITE] if record.finite_weights is False else []
    facts = {"older runtime": record.is_old, "final": record.final, "best": is_best}
    return ", ".join([*(name for name, holds in facts.items() if holds), *bad, *notes])


def _verify(path: Path, *, as_json: bool) -> int:
    found = _listed(path)
    outcomes = [_verdict(listed) for listed in found]
    if not outcomes:
        return complain("checkpoints", _NOTHING.format(path))
    if as_json:
        finite = [None if listed.record is None else listed.record.finite_weights for listed in found]
        for (name, problem, _), known in zip(outcomes, finite, strict=True):
            say(json.dumps({"name": name, "problem": problem, "finite_weights": known}))
    else:
        say(*(f"{name}: {f'broken: {problem}' if problem else summary}" for name, problem, summary in outcomes))
    return _BROKEN if any(problem for _, problem, _ in outcomes) else _SOUND


def _verdict(listed: Listed) -> tuple[str, str, str]:
    """Name, problem (empty if whole), and what was proven."""
    name = name_of(listed.path)
    if listed.record is None:
        return name, listed.problem, ""
    try:
        verify_files(listed.record)
    except BrokenCheckpointError as error:
        return name, error.reason, ""
    if listed.record.is_old:
        return name, "", "readable (an older runtime's record has no digests)"
    known = {True: ", weights finite", False: f", {_NOT_FINITE}", None: ""}[listed.record.finite_weights]
    count = len(listed.record.left_out)
    known += f", {count:,} tensors left out, which the class has to build" if count else ""
    return name, "", f"whole ({len(listed.record.files)} files, {size_text(listed.record.size_bytes)}{known})"


def _show(record: CheckpointRecord, *, as_json: bool) -> int:
    tensors = _tensors(record)
    if as_json:
        facts = {name: getattr(record, name) for name in _FACTS} | {"state": record.state, "tensors": tensors}
        say(json.dumps(facts))
        return _SOUND
    lines = [f"{record.name}  ({record.path})", ""]
    facts = {name: getattr(record, name) for name in _FACTS if name != "metadata" and _is_known(record, name)}
    facts |= {name: _origin(name, value) for name, value in record.metadata.items() if name not in facts}
    lines += [f"  {printable(name):<20}{_text(value)}" for name, value in facts.items()]
    lines += ["", "  files"]
    lines += [f"    {size_text(entry.size):>10}  {entry.xxh3_128}  {entry.path}" for entry in record.files]
    lines += ["", f"  tensors ({len(tensors)})"]
    lines += [f"    {dtype:<6}{shape!s:<24}{name}" for name, (dtype, shape) in list(tensors.items())[:_SHOWN_TENSORS]]
    lines += [f"    … and {len(tensors) - _SHOWN_TENSORS} more"] if len(tensors) > _SHOWN_TENSORS else []
    lines += ["", "  state", *_outline(record.state, "    ")]
    say(*lines)
    return _SOUND


_FACTS = (
    "step",
    "run_id",
    "attempt",
    "final",
    "max_steps",
    "spec_digest",
    "elapsed_s",
    "world_size",
    "metrics",
    "versions",
    "trainer_checkpoint",
    "finite_weights",
    "metadata",
)


def _origin(name: str, value: Any) -> Any:
    """A fact of how the run came to be; a long list only by its length."""
    return f"{len(value)} (`--json` lists them)" if name == "packages" and isinstance(value, Mapping) else value


def _is_known(record: CheckpointRecord, fact: str) -> bool:
    value = getattr(record, fact)
    return value is not None if fact == "finite_weights" else bool(value)


def _tensors(record: CheckpointRecord) -> dict[str, tuple[str, list[int]]]:
    """Element type and shape of every tensor, from headers and indices alone; one that was saved in slices is whole."""
    found = {}
    for entry in record.files:
        name = record.file_name(entry)
        if rank_of(name) is not None or not name.endswith(".safetensors"):
            continue
        for key, stored in read_header(record, entry).items():
            found[f"{tensor_file(name)}:{key}"] = (stored.dtype, list(stored.shape))
    for sliced in sliced_tensors(record):
        found[f"{sliced.file}:{sliced.key}"] = (TORCH_TYPES.get(sliced.dtype, RAW), list(sliced.shape))
    found |= {f"left out:{left.key}": (left.dtype, list(left.shape)) for left in record.left_out}
    return found


def _outline(state: Any, indent: str) -> list[str]:
    """The first level of the trainer's payload."""
    if not isinstance(state, Mapping) or not state:
        return [f"{indent}{_text(state)}"]
    return [f"{indent}{key}: {_text(value)}" for key, value in state.items()]


def _text(value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value, default=dict))
    return text if len(text) <= 100 else f"{text[:97]}…"


def _export(args: argparse.Namespace) -> int:
    path, target = find_checkpoint(args.path), Path(args.to or "")
    is_file = target.suffix in (".safetensors", ".ckpt")
    is_other_file = target.suffix[1:].isalpha() or target.is_file()  # a folder may be llama-3.1
    if not args.to or (is_other_file and not is_file):
        text = "export needs --to FILE.safetensors or --to FILE.ckpt, or --to FOLDER for a Hugging Face model"
        return complain("checkpoints", text)
    if target.suffix == ".ckpt" and args.strip_prefix:
        return complain("checkpoints", "--strip-prefix is for FILE.safetensors or FOLDER; leave it out")
    if is_file and os.path.lexists(target) and not args.force:
        return _is_there(target)
    # Only an export needs torch, whose import takes longer than any other action.
    from ...callbacks.checkpoint.export import export_lightning, export_pretrained, export_safetensors, read_base

    base = read_base(args.base) if args.base else None
    if target.suffix == ".ckpt":
        written = export_lightning(path, target, base=base)
    elif is_file:
        written = export_safetensors(path, target, strip_prefix=args.strip_prefix, base=base)
    else:
        try:
            written = export_pretrained(path, target, strip_prefix=args.strip_prefix, base=base, replace=args.force)
        except FileExistsError as error:
            return _is_there(error.filename)
    say(written)
    return _SOUND


def _is_there(path: str | Path) -> int:
    return complain("checkpoints", f"{path} is there; name another place, or replace it by --force")


def _time(record: CheckpointRecord) -> str:
    if not record.created_at_ms:
        return ""
    return datetime.fromtimestamp(record.created_at_ms / 1000).astimezone().isoformat(" ", "seconds")
