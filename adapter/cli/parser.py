"""An argument parser whose errors suggest the nearest name, and arguments that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from typing_extensions import override

from ..plumbing.text import nearest
from .terminal import visible

Number = TypeVar("Number", int, float)

LONGEST_USAGE = 10
"""Maximum lines of a usage that is printed above an error; the forty lines of `genlight fit` would hide the error."""

_MEANT = {
    **dict.fromkeys(("train", "start", "resume", "launch", "execute"), "run"),
    **dict.fromkeys(("submit", "sbatch", "srun"), "slurm"),
    **dict.fromkeys(("list", "ps", "status"), "ls"),
    **dict.fromkeys(("cancel", "kill", "abort"), "stop"),
    **dict.fromkeys(("logs", "log", "tail"), "events"),
    **dict.fromkeys(("eval", "evaluate"), "validate"),
    **dict.fromkeys(("new", "create"), "init"),
}
"""Our commands by the names of similar commands in other tools."""
_UNKNOWN = re.compile(r"unrecognized arguments: (?:.* )?(?P<word>--?\w[\w-]*)")
_CHOICE = re.compile(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<choices>.*)\)")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows non-empty defaults, and keeps paragraphs and the lines of a list."""

    @override
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help

    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(part if "\n  " in part else fill(part, width, indent) for part in paragraphs)


class CommandParser(argparse.ArgumentParser):
    """Suggests the nearest name for a misspelled one."""

    see_also: str = ""
    """Last line of the help. It is not wrapped, so that a path in it can be copied."""

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        super().__init__(prog, formatter_class=_HelpFormatter, allow_abbrev=False, **settings)

    @override
    def format_help(self) -> str:
        """Return the help text, with `see_also` below it."""
        text = super().format_help()
        return f"{text}\n{self.see_also}\n" if self.see_also else text

    @override
    def error(self, message: str) -> NoReturn:
        refuse(self, message, suggest_name(self, message))


def refuse(parser: argparse.ArgumentParser, message: str, suggestion: str) -> NoReturn:
    """Print an error and a suggestion, and end the process with 2, as argparse does."""
    usage = parser.format_usage()
    program = parser.prog.replace(" [options]", "")
    sys.stderr.write(usage if usage.count("\n") <= LONGEST_USAGE else "")
    sys.stderr.write(f"tip: For details of accepted options run: {program} --help\n")
    sys.stderr.write(f"error: {visible(message)}{suggestion}\n")
    sys.exit(2)


def suggest_name(parser: argparse.ArgumentParser, message: str) -> str:
    """Return a sentence with the name nearest to a misspelled option or choice; empty if none is near."""
    choice, unknown = _CHOICE.search(message), _UNKNOWN.search(message)
    if choice is not None and (command := _MEANT.get(choice["word"].lower())) in re.findall(r"\w+", choice["choices"]):
        suggestion = f" Did you mean `{command}`?"
    elif choice is not None:
        suggestion = nearest(choice["word"], re.findall(r"[\w-]+", choice["choices"]), alike=0.6)
    elif unknown is not None:
        options = [option for action in parser._actions for option in action.option_strings]
        suggestion = nearest(unknown["word"], options)
    else:
        return ""
    return f".{suggestion}" if suggestion else ""


def add_overrides(parser: argparse.ArgumentParser, examples: str = "max_steps=100 or hyperparams.lr=0.001") -> None:
    """Declare ``--set``, which overrides settings of the job."""
    help_text = f"override a setting of the job, such as {examples}; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help_text)


def add_json(parser: argparse.ArgumentParser, help_text: str = "print JSON, one object a line") -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help=help_text)


def at_least(least: int, kind: type[Number] = int) -> Callable[[str], Number]:
    """Return an argument type: finite numbers of at least `least`."""

    def convert(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if least <= kind(text) < math.inf:
                return kind(text)
        raise argparse.ArgumentTypeError(f"expected a number >= {least}, but received {text}")

    return convert


def run_folder(text: str) -> Path:
    """Convert an argument to the folder of a run."""
    from ..view.summary import is_run

    folder = Path(text)
    if not folder.is_dir() or not is_run(folder):
        raise argparse.ArgumentTypeError(
            f"{text} is not the folder of a run; `genlight ls` lists the runs below a folder"
        )
    return folder


def folder_of_runs(text: str) -> Path:
    """Convert an argument to a folder with runs below it."""
    folder = Path(text)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise argparse.ArgumentTypeError(f"{text} {problem}; name a folder with runs below it")
    return folder
