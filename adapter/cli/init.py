"""Start a project: a folder with a trainer class, its job and a little data, which runs at once.

Exit codes: 0 written, 2 usage.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path

from .terminal import complain, say

__all__ = ["add_arguments", "run"]

WRITTEN, USAGE = 0, 2
_DATA_SCRIPT = "make_data.py"


_TEMPLATES = ("README.md", "job.json", _DATA_SCRIPT, "my_trainer.py")
"""By name: an editor or a profiler may leave files of its own beside them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("directory", metavar="DIR", help="the folder to write; it must be new or empty")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code."""
    try:
        names = _write_project(args.directory)
    except ValueError as error:
        return complain("init", str(error))
    say(f"wrote {args.directory}: {', '.join(sorted(names))}")
    say(f"next: genlight run {shlex.quote(str(Path(args.directory, 'job.json')))}")
    return WRITTEN


def _write_project(directory: str) -> list[str]:
    """The names of the files that were written.

    Raises:
        ValueError: The folder is not empty; nothing has been written.
    """
    folder = Path(directory)
    if not directory.strip():
        raise ValueError("the name of the folder is empty; name a new one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; name a new one")
    templates = resources.files(__package__) / "project"
    files = {path.name: path.read_text(encoding="utf-8") for path in templates.iterdir() if path.name in _TEMPLATES}
    files["job.schema.json"] = (resources.files("genlight.adapter.job") / "job.schema.json").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, str(folder / _DATA_SCRIPT)], check=True)
    return [*files, "rows.parquet"]
