"""Start a project: a folder with a trainer class, its job and a little data, which runs at once.

Exit codes: 0 written, 2 usage.
"""

from __future__ import annotations

import argparse
import ast
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..contract.exceptions import InputError
from .terminal import complain, say

__all__ = ["add_arguments", "run"]

WRITTEN, USAGE = 0, 2
_DATA_SCRIPT, _SAMPLE_TRAINER = "make_data.py", "my_trainer.py"


_TEMPLATES = ("README.md", "job.json", "make_data.py", "my_trainer.py")
"""By name: an editor or a profiler may leave files of its own beside them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("directory", metavar="DIR", help="the folder to write; it must be new or empty")
    parser.add_argument(
        "--from", metavar="FILE.py[:CLASS]", help="start from this trainer class; its file is copied into the folder"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="a Parquet file to train on, or a folder of them; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code."""
    try:
        names = _write_project(args.directory, getattr(args, "from"), args.data)
    except ValueError as error:
        return complain("init", str(error))
    say(f"wrote {args.directory}: {', '.join(sorted(names))}")
    if getattr(args, "from") and not args.data:
        say(
            f"rows.parquet has the columns a, b and y; if the class reads others, change {_DATA_SCRIPT}, or begin "
            "again with --data FILE.parquet"
        )
    say(f"next: genlight run {shlex.quote(str(Path(args.directory, 'job.json')))}")
    return WRITTEN


def _write_project(directory: str, source: str | None, data: Sequence[str]) -> list[str]:
    """The names of the files that were written.

    Raises:
        ValueError: The folder is not empty, or the trainer or the data cannot be used; nothing has been written.
    """
    folder = Path(directory)
    if not directory.strip():
        raise ValueError("the name of the folder is empty; name a new one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; name a new one")
    templates = resources.files(__package__) / "project"
    files = {path.name: path.read_text(encoding="utf-8") for path in templates.iterdir() if path.name in _TEMPLATES}
    files["job.schema.json"] = (resources.files("genlight.adapter.job") / "job.schema.json").read_text(encoding="utf-8")
    job = json.loads(files["job.json"])
    if source is not None:
        trainer, name, text = _own_trainer(source)
        del files[_SAMPLE_TRAINER]
        if name in files:
            raise ValueError(f"{source} has the name of a file that this command writes; rename it first")
        files[name] = text
        files["README.md"] = files["README.md"].replace(_SAMPLE_TRAINER, name)
        job["trainer"], job["hyperparams"] = trainer, {}
        del job["validate"]
    if data:
        job["dataset"]["parquet_paths"] = [str(path) for path in _readable(data)]
        del files[_DATA_SCRIPT]
        kept = [line for line in files["README.md"].splitlines(keepends=True) if _DATA_SCRIPT not in line]
        files["README.md"] = "".join(kept)
    files["job.json"] = _job_text(job)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if data:
        return list(files)
    subprocess.run([sys.executable, str(folder / _DATA_SCRIPT)], check=True)
    return [*files, "rows.parquet"]


def _job_text(job: dict[str, Any]) -> str:
    """One key a line, as a person would write it."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in job.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _readable(data: Sequence[str]) -> list[Path]:
    """The data as absolute paths.

    Raises:
        ValueError: A path leads to nothing that a job can train on; all of them are named.
    """
    missing = [path for path in data if not Path(path).exists()]
    if missing:
        raise ValueError("; ".join(f"--data {path}: there is no such file" for path in missing))
    from ..feed import ArrowFeed  # loads pyarrow

    paths = [Path(path).resolve() for path in data]
    feed = ArrowFeed([str(path) for path in paths])
    try:
        feed.check()
    except InputError as error:
        raise ValueError(f"--data: {error}") from error
    finally:
        feed.close()
    return paths


def _own_trainer(source: str) -> tuple[str, str, str]:
    """Import path, file name and text of the trainer class that ``--from`` names. Its file is read, not imported.

    Raises:
        ValueError: The file cannot be read or imported under its name, or does not say which class is meant.
    """
    place, colon, wanted = source.rpartition(":")
    path = Path(place if colon else source)
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(f"--from {source}: expected a Python file whose name can be imported, such as trainer.py")
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
    except OSError as error:
        raise ValueError(f"--from {source}: {error.strerror}") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"--from {source}: not a Python file: {error}") from error
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = [cls.name for cls in classes if cls.name == wanted or (not colon and _trains(cls))]
    if len(found) != 1:
        names = ", ".join(cls.name for cls in classes) or "none"
        raise ValueError(
            f"--from {source}: {'there is no such class' if colon else 'expected one class with a method train_step'}; "
            f"classes in it: {names}. Name one as {path}:CLASS"
        )
    return f"{path.stem}:{found[0]}", path.name, text


def _trains(cls: ast.ClassDef) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "train_step" for node in cls.body)
