"""The commands of ``genlight``, and how to load them.

Each command is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``. Declaring arguments loads
neither torch nor Lightning, so that ``--help``, listings and shell completion answer at once. ``fit``, ``validate``,
``test`` and ``predict`` are subcommands of LightningCLI, which parses their arguments itself.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any

from ...callbacks.stop.signals import StopSignals
from ..cluster.job_context import is_rank_zero, rank_errors
from ..contract.exceptions import BrokenCheckpointError, EventLogError, GenlightError
from ..plumbing.failures import EXIT_FAILED, text_of_error
from ..plumbing.imports import unsupported_system
from ..plumbing.text import reference
from . import INTERRUPTED
from .parser import CommandParser
from .terminal import (
    VisibleFormatter,
    escape_unencodable,
    exit_on_broken_pipe,
    fill_closed_descriptors,
    ignoring_broken_pipe,
    print_error,
)

ANYWHERE = ("checkpoints", "events", "init", "path")
"""The commands that work on every operating system, because they only read and write files."""

COMMANDS = {
    "init": "start a project: a new folder with a trainer class, a job and data",
    "doctor": "find the mistakes in a job without training",
    "run": "run a job, from a file or from the environment",
    "slurm": "submit a job to Slurm, print its batch script, or wait for its end",
    "fit": "train",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "predict, for LightningModules of your own",
    "ls": "list runs with state, step, speed, loss and best score",
    "watch": "watch runs live in the terminal",
    "serve": "show runs live in a browser",
    "report": "write runs into one HTML file",
    "diff": "show what differs between two runs",
    "events": "show, follow, check or export an event log",
    "stop": "stop a run after a checkpoint",
    "checkpoints": "list, verify, show or export checkpoints",
    "path": "print the path of the newest checkpoint, or of the best",
    "uploads": "list or retry what could not be uploaded",
    "check": "check a trainer class: exact resume, several ranks, half precision",
    "prove": "rehearse kills, stops and damaged checkpoints with a job",
    "replay": "replay the steps of a run bit for bit, and show what happened in one of them",
    "bisect": "find the first step and value in which two runs differ",
    "compare": "compare a job's training with a plain Python loop, step by step",
}
_HEADINGS = {
    "init": "train",
    "fit": "with a LightningCLI configuration",
    "ls": "see runs",
    "stop": "manage runs",
    "check": "test a trainer class",
}
"""Headings of groups in the help, by the first command of each."""
LIGHTNING_COMMANDS = ("fit", "validate", "test", "predict")

_EXTRAS = {"uvicorn": "serve", "starlette": "serve", "textual": "watch", "plotext": "watch"}
"""The extra of genlight that a package belongs to."""

_CHATTY_LOGGERS = (
    # Not their parents: Lightning sets the level of the parents later, when it is imported.
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
    "httpx2",
)

_NOT_FOR_USERS = (
    "LightningCLI's args parameter is intended to run.*",
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    "Using ModelCheckpoint with manual optimization.*",
    ".*treespec, LeafSpec.*",
    "Checkpoint directory .* exists and is not empty.*",
    "The `srun` command is available on your system but is not used.*",
)
"""Warnings of Lightning and torch about each other, or about decisions of the trainer class."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after the program's name; None takes ``sys.argv``.

    Returns:
        The exit code: 0 completed, 1 failed, 2 startup or usage, 3 ended by `on_nonfinite`, 75 stopped but resumable,
        130 on Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    fill_closed_descriptors()
    escape_unencodable()
    prints = any(word.partition("=")[0] == "--print_config" for word in words)
    trains = bool(words) and words[0] in ("run", *LIGHTNING_COMMANDS) and not prints
    code = 0
    with ignoring_broken_pipe() if trains else exit_on_broken_pipe():
        try:
            code = _run(words)
        except KeyboardInterrupt:
            code = INTERRUPTED
    return code


def _run(words: list[str]) -> int:
    """Run one command and return its exit code; an error that a user can correct is printed without a traceback."""
    _configure_messages()
    name = words[0] if words else ""
    fault = unsupported_system(f"genlight {name}") if name in COMMANDS and name not in ANYWHERE else None
    if fault:
        return print_error("", f"{fault} These commands work here: {', '.join(ANYWHERE)}.")
    if name in LIGHTNING_COMMANDS:
        faults = rank_errors(os.environ)
        return print_error("", "\n".join(faults)) if faults else _run_lightning(words)
    if name not in COMMANDS:
        parser = program_parser()
        parser.parse_args(words)
        parser.print_help()
        return 0
    parser = command_parser(name)
    arguments = parser.parse_args(words[1:])
    try:
        code: int = _module_of(name).run(arguments)
    except (BrokenCheckpointError, EventLogError) as error:
        return print_error(name, error, EXIT_FAILED)
    except GenlightError as error:
        return print_error(name, error)
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get(error.name or "")) is None:
            raise
        return print_error(name, f"{error.name} is not installed: {_install_command(extra)}")
    except OSError as error:
        if error.errno is None:  # raised by genlight, with a complete message
            return print_error(name, error)
        if error.filename is None:  # an error of the output, which `main` handles
            raise
        return print_error(name, f"{text_of_error(error)}; name a path that can be used")
    return code


def _install_command(extra: str) -> str:
    """Return a pip command that names the packages of an extra, because no package index has genlight."""
    requires = (required.partition(";") for required in metadata.requires("genlight") or ())
    named = [f"'{package.strip()}'" for package, _, marker in requires if re.search(rf"extra == .{extra}\b", marker)]
    return f"pip install {' '.join(named)}"


def _run_lightning(words: list[str]) -> int:
    with contextlib.ExitStack() as stack:
        if words[0] == "fit":
            signals = StopSignals.handling() or stack.enter_context(StopSignals().installed())
            signals.say("the fit stops before it trains" if is_rank_zero() else "")
        from .lightning_cli import EndedError, GenlightCLI  # takes seconds

        try:
            GenlightCLI(args=words, seed_everything_default=False, parser_kwargs={"prog": "genlight"})
        except EndedError as end:
            return int(end.code or 0)
    return 0


def completion_parser() -> CommandParser:
    """Create a parser with the arguments of all commands except LightningCLI's, for ``shtab``."""
    parser = CommandParser("genlight")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name not in LIGHTNING_COMMANDS:
            _module_of(name).add_arguments(command)
    return parser


def program_parser() -> CommandParser:
    """Create the parser of the program, with the names of all commands."""
    parser = CommandParser("genlight", description=_overview())
    parser.usage = "genlight COMMAND ..."
    parser.see_also = f"reference: {reference('all-commands')}"
    parser.add_argument("--version", action="version", version=version_text(), help="show the versions and exit")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _overview() -> str:
    lines = ["Trains PyTorch models on Lightning. `genlight COMMAND --help` explains a command."]
    for name, summary in COMMANDS.items():
        lines += ["", f"{_HEADINGS[name]}:"] if name in _HEADINGS else []
        lines.append(f"  {name:<13}{summary}")
    return "\n".join(lines)


def command_parser(name: str) -> CommandParser:
    """Create the parser of one command; the modules of other commands are not imported."""
    command = _module_of(name)
    parser = CommandParser(f"genlight {name}", description=command.__doc__.replace("``", "`"))
    command.add_arguments(parser)
    if name in ("init", "run", "doctor"):
        parser.see_also = f"every key of a job: {reference('a-jobs-keys')}"
    elif name in ("check", "compare"):
        parser.see_also = f"every hook of a trainer class: {reference('the-hooks')}"
    return parser


def _module_of(name: str) -> Any:
    return import_module(f".{name}", __package__)


def version_text() -> str:
    """Return the versions of genlight, Lightning, torch and Python."""
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("lightning", "torch"))
    return f"genlight {metadata.version('genlight')} ({packages}, python {sys.version.split()[0]})"


class _StandardError(logging.StreamHandler[Any]):
    """Writes to the current ``sys.stderr``: a progress bar replaces it to print lines above the bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # `StreamHandler.__init__` would keep the present stream

    @property
    def stream(self) -> Any:
        """Standard error."""
        return sys.stderr


def _configure_messages() -> None:
    """Send our messages to standard error, and hide warnings of Lightning on which a user cannot act."""
    if not logging.getLogger().handlers:
        handler = _StandardError()
        handler.setFormatter(VisibleFormatter())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        # Lightning gives this logger its own handler to standard error, so each message would appear twice.
        logging.getLogger("lightning").propagate = False
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message=text)
