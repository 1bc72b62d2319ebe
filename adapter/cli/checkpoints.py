"""List, verify, show or export the checkpoints of a run.

`verify` compares the files of each checkpoint with their digests. `export` writes one checkpoint for other tools.

Exit codes: 0 done, 1 a checkpoint is broken, 2 usage.
"""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from ...callbacks.checkpoint.contents import read_header, sliced_tensors
from ...callbacks.checkpoint.format.headers import RAW, TORCH_TYPES
from ...callbacks.checkpoint.format.record import CheckpointRecord, read_record
from ...callbacks.checkpoint.format.slice_index import rank_of
from ...callbacks.checkpoint.listing import Listed
from ...callbacks.checkpoint.memory_tier import list_tiers
from ...callbacks.checkpoint.selection import best_first, find_checkpoint, folder_of_checkpoints, monitored
from ..contract.exceptions import UsageError
from ..plumbing.text import size_text
from ..view.checkpoints import checkpoint_facts
from .parser import add_json
from .terminal import align_columns, brief, print_error, say, say_json

_SHOWN_ENTRIES = 40
_FACTS = (
    *("step", "run_id", "attempt", "final", "max_steps", "spec_digest", "elapsed_s", "world_size", "finite_weights"),
    *("metrics", "trainer_checkpoint", "versions", "metadata"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("action", choices=("list", "verify", "show", "export"))
    parser.add_argument(
        "path",
        metavar="PATH",
        help="folder of a run or of checkpoints, or one checkpoint; show and export take the newest of a folder",
    )
    add_json(parser, "list, verify, show: print JSON, one object a line")
    parser.add_argument(
        "--to",
        metavar="TARGET",
        help="export: FILE.safetensors for the weights, FILE.ckpt for Lightning, or a FOLDER for `from_pretrained` of "
        "a Hugging Face model",
    )
    parser.add_argument("--force", action="store_true", help="export: replace what exists")
    parser.add_argument(
        "--strip-prefix",
        default="",
        metavar="PREFIX",
        help="export: only weights whose names begin with this prefix, which is removed",
    )
    parser.add_argument(
        "--base",
        metavar="FILE",
        help="export: safetensors file or checkpoint that supplies the frozen weights which the exported checkpoint "
        'omits (saved with `weights="trained"`)',
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="export to a FOLDER: merge the adapter of a PEFT model into its weights; needs transformers and peft",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, or 1 if a checkpoint is broken.

    Raises:
        UsageError: ``--to`` is missing, exists already, or does not fit the other options.
        CheckpointError: A checkpoint is broken, or cannot be exported.
        FileNotFoundError: There is no checkpoint.
    """
    if args.action in ("list", "verify"):
        return _list(args)
    record = find_checkpoint(args.path)
    if args.action == "show":
        _show(read_record(record), as_json=args.json)
    else:
        _export(record, args)
    return 0


def _list(args: argparse.Namespace) -> int:
    proves = args.action == "verify"
    if not (checkpoints := _list_path(args.path)):
        text = f"no checkpoint in {args.path}; name the folder of a run, its checkpoints, or one of them"
        return print_error("checkpoints", text, 2 if proves else 0)
    records = [each.record for each in checkpoints if each.record is not None]
    monitor, mode = monitored(records)
    best = best_first(records, monitor, mode)[:1] if mode is not None else []
    rows = [{**checkpoint_facts(each, proves=proves), "best": each.record in best} for each in checkpoints]
    if args.json:
        say_json(rows)
    else:
        say(*align_columns([("NAME", "STEP", "SIZE", "SAVED", "RUN", "STATE"), *map(_cells, rows)]))
    return 1 if proves and any(row["problem"] for row in rows) else 0


def _list_path(path: str) -> list[Listed]:
    if (folder := folder_of_checkpoints(path)) is not None:
        return list_tiers(folder)
    return [Listed(find_checkpoint(path))]


def _cells(row: Mapping[str, Any]) -> list[object]:
    """Return the cells of a row of the listing."""
    saved = datetime.fromtimestamp(row["saved_ms"] / 1000).astimezone() if row["saved_ms"] else None
    notes = [row["state"], *(["best"] if row["best"] else [])]
    notes += [f"{name}={value:g}" for name, value in row["scores"].items() if value is not None]
    return [
        row["name"],
        "" if row["step"] is None else row["step"],
        size_text(row["size"]),
        "" if saved is None else saved.isoformat(" ", "seconds"),
        row["run_id"],
        ", ".join(notes),
    ]


def _show(record: CheckpointRecord, *, as_json: bool) -> None:
    """Print the facts about a checkpoint, and the tensors that it holds."""
    facts = {name: getattr(record, name) for name in _FACTS}
    facts["files"] = {entry.path: (entry.size, entry.xxh3_128) for entry in record.files}
    facts |= {"tensors": _tensors(record), "state": record.state}
    if as_json:
        say_json([facts])
        return
    say(f"{record.name}  ({record.path})")
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            say(f"{name}:", *(f"  {key}: {brief(each)}" for key, each in islice(value.items(), _SHOWN_ENTRIES)))
            if len(value) > _SHOWN_ENTRIES:
                say(f"  … and {len(value) - _SHOWN_ENTRIES} more; --json shows all")
        elif value not in (None, "", {}):
            say(f"{name}: {brief(value)}")


def _tensors(record: CheckpointRecord) -> dict[str, tuple[str, list[int]]]:
    """Return element type and complete shape of every tensor, sliced or not; only headers and indices are read."""
    tensors = {}
    for entry in record.files:
        name = record.file_name(entry)
        if rank_of(name) is not None or not name.endswith(".safetensors"):
            continue
        for key, stored in read_header(record, entry).items():
            tensors[f"{record.tensor_file(entry)}:{key}"] = (stored.dtype, list(stored.shape))
    for sliced in sliced_tensors(record):
        tensors[f"{sliced.file}:{sliced.key}"] = (TORCH_TYPES.get(sliced.dtype, RAW), list(sliced.shape))
    tensors |= {f"omitted:{left.key}": (left.dtype, list(left.shape)) for left in record.left_out}
    return tensors


def _export(record: Path, args: argparse.Namespace) -> None:
    """Write a checkpoint to the path of ``--to``, in the format that its suffix names."""
    if not args.to:
        raise UsageError("export needs --to FILE.safetensors, --to FILE.ckpt, or --to FOLDER for a Hugging Face model")
    target = Path(args.to)
    if target.suffix == ".ckpt" and args.strip_prefix:
        raise UsageError("--strip-prefix is for FILE.safetensors or FOLDER; remove it")
    if args.merge and target.suffix in (".ckpt", ".safetensors"):
        raise UsageError(
            "--merge needs --to FOLDER: only a folder can hold the `config.json` that `from_pretrained` needs next to "
            "the merged weights"
        )
    try:
        if target.suffix in (".ckpt", ".safetensors") and os.path.lexists(target) and not args.force:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        # Only an export needs torch. Its import is slow, so `list`, `verify` and `show` do without it.
        from ...callbacks.checkpoint.export import export_lightning, export_pretrained, export_safetensors, read_base

        base = read_base(args.base) if args.base else None
        if target.suffix == ".ckpt":
            written = export_lightning(record, target, base=base)
        elif target.suffix == ".safetensors":
            written = export_safetensors(record, target, strip_prefix=args.strip_prefix, base=base)
        else:
            written = export_pretrained(
                record, target, strip_prefix=args.strip_prefix, base=base, merge=args.merge, replace=args.force
            )
    except FileExistsError as error:
        raise UsageError(f"{error.filename} exists; name another place, or replace it by --force") from None
    say(written)
