"""Start a project: a new folder with a trainer class, its job and a little data, ready to run.

Exit codes: 0 written, 2 usage.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path

from ..contract.exceptions import UsageError
from .terminal import say

_DATA_SCRIPT = "make_data.py"
_TEMPLATES = ("README.md", "job.json", _DATA_SCRIPT, "my_trainer.py")
"""Listed by name, since editors may leave other files next to them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("directory", metavar="DIR", help="the folder to write; it must be new or empty")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0.

    Raises:
        UsageError: The folder is not empty; nothing has been written.
    """
    folder = Path(args.directory)
    if not args.directory.strip():
        raise UsageError("the name of the folder is empty; name a new one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; name a new one")
    templates = resources.files(__package__) / "project"
    files = {path.name: path.read_text(encoding="utf-8") for path in templates.iterdir() if path.name in _TEMPLATES}
    files["job.schema.json"] = (resources.files("genlight.adapter.job") / "job.schema.json").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, str(folder / _DATA_SCRIPT)], check=True)
    say(f"wrote {args.directory}: {', '.join(sorted([*files, 'rows.parquet']))}")
    say(f"next: genlight run {shlex.quote(str(folder / 'job.json'))}")
    return 0
