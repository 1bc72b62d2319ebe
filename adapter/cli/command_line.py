"""The commands of ``genlight`` and how they are found.

Each command is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``. Declaring arguments loads
neither torch nor Lightning, so that ``--help``, listings and shell completion answer at once. ``fit``, ``validate``,
``test`` and ``predict`` are LightningCLI's own subcommands and are handed to it as they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any

from jsonargparse import set_parsing_settings

from ...callbacks.stop.signals import StopSignals
from ..job.environment import rank_errors
from ..plumbing.operating_system import unsupported_system
from ..plumbing.reference_page import reference
from ..run.ranks.this_rank import is_rank_zero
from . import INTERRUPTED
from .config_files import config_file_fault
from .parser import CommandParser
from .terminal import complain, fill_closed_descriptors, for_any_character, outliving_readers, until_the_reader_leaves

__all__ = ["main"]


ANYWHERE = ("checkpoints", "events", "init")
"""Commands that only read and write files, on every operating system."""

COMMANDS = {
    "init": "start a project: a folder with a trainer class, a job and data, which runs at once",
    "run": "run a job, from its file or from the environment",
    "fit": "train from a LightningCLI configuration",
    "validate": "validate from a LightningCLI configuration",
    "test": "test from a LightningCLI configuration",
    "predict": "predict from a LightningCLI configuration",
    "ls": "list runs: state, step, speed, loss, best score",
    "report": "write what happened in runs as one HTML file",
    "stop": "ask a run to stop after a checkpoint, and wait for it",
    "doctor": "find the mistakes of a job, or of a configuration, without training",
    "check": "check a trainer class: exact resume, several ranks, half precision",
    "compare": "compare a job's training with a plain Python loop of its class, step by step",
    "checkpoints": "list, verify, show or export checkpoints",
    "events": "show, follow or check an event log",
    "uploads": "list, retry or export what is still to be uploaded",
    "slurm": "render or submit the sbatch script of a job; see or end what was submitted",
}
LIGHTNING_COMMANDS = ("fit", "validate", "test", "predict")
"""Those that LightningCLI has, which parses their arguments itself."""

_CHATTY_LOGGERS = (
    # Not their parents: Lightning sets the level of those when it is imported, which is later.
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
    "httpx2",
)

_NOT_FOR_USERS = (
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    "The .srun. command is available on your system but is not used.*",
    "Using ModelCheckpoint with manual optimization.*",
    ".*treespec, LeafSpec.*",
    "Checkpoint directory .* exists and is not empty.*",
    "The `srun` command is available on your system but is not used.*",
)
"""Warnings of Lightning and torch about each other, or about what a trainer class decides."""

COMPLETION = "print_completion"
"""jsonargparse's own argument; of its shells those that begin with ``shtab-`` need shtab."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after the program's name; None takes the process's own.

    Returns:
        The exit code: 0 completed, 1 failed, 2 startup or usage, 3 ended by `on_nonfinite`, 75 stopped but resumable,
        130 on Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    fill_closed_descriptors()
    for_any_character()
    prints = any(word.partition("=")[0] == "--print_config" for word in words)
    trains = bool(words) and words[0] in ("run", *LIGHTNING_COMMANDS) and not prints
    code = 0
    with outliving_readers() if trains else until_the_reader_leaves():
        try:
            code = _run(words)
        except KeyboardInterrupt:
            code = INTERRUPTED
    return code


def _run(words: list[str]) -> int:
    _configure_messages()
    needs_linux = words and words[0] in COMMANDS and words[0] not in ANYWHERE
    fault = unsupported_system(f"genlight {words[0]}") if needs_linux else None
    if fault:
        return complain("", f"{fault} These commands work here: {', '.join(ANYWHERE)}.")
    if words and words[0] in LIGHTNING_COMMANDS:
        faults = [*filter(None, [config_file_fault(words)]), *rank_errors(os.environ)]
        if faults:
            return max(complain("", fault) for fault in faults)
        return _run_lightning(words)
    parser = build_parser(words)
    parsed = parser.parse_args(words)
    if parsed.subcommand is None:
        parser.print_help()
        return 0
    command = import_module(f".{parsed.subcommand}", __package__)
    try:
        code: int = command.run(getattr(parsed, parsed.subcommand))
    except OSError as error:
        if error.filename is None:  # Of the output, which is looked after where that is.
            raise
        path = os.fsdecode(error.filename)
        return complain(parsed.subcommand, f"{path}: {error.strerror}; name a path that can be used")
    return code


def _run_lightning(words: list[str]) -> int:
    with contextlib.ExitStack() as stack:
        signals = StopSignals()
        if words[0] == "fit":
            stack.enter_context(signals.installed())
            signals.what_next = "the fit stops before it trains" if is_rank_zero() else ""
        from .lightning_cli import run_lightning_cli  # takes seconds

        return run_lightning_cli(words, signals)


def build_parser(words: Sequence[str] = ()) -> CommandParser:
    """The parser of all commands.

    Args:
        words: What is to be parsed. Only the command that it names declares its arguments, since that loads what the
            command stands on; for a completion script all do.
    """
    set_parsing_settings(add_print_completion_argument=True)
    parser = CommandParser(prog="genlight", description="Runs trainer classes on PyTorch Lightning.")
    parser.see_also = f"reference: {reference('all-commands')}"
    parser.add_argument("--version", action="version", version=version_text())
    commands = parser.add_subcommands(required=False)
    for name, summary in COMMANDS.items():
        declares = any(word in (name, f"--{COMPLETION}") or word.startswith(f"--{COMPLETION}=") for word in words)
        commands.add_subcommand(name, _command_parser(name, declares=declares), help=summary)
    return parser


def _command_parser(name: str, *, declares: bool) -> CommandParser:
    if not declares or name in LIGHTNING_COMMANDS:
        return CommandParser(description=COMMANDS[name])
    command: Any = import_module(f".{name}", __package__)
    parser = CommandParser(description=getattr(command, "HELP", command.__doc__).replace("``", "`"))
    command.add_arguments(parser)
    if name in ("init", "run", "doctor"):
        parser.see_also = f"every key of a job: {reference('a-jobs-keys')}"
    elif name in ("check", "compare"):
        parser.see_also = f"every hook of a trainer class: {reference('the-hooks')}"
    return parser


def version_text() -> str:
    """Genlight's version, and those of what it stands on."""
    stands_on = ", ".join(f"{name} {metadata.version(name)}" for name in ("lightning", "torch"))
    return f"genlight {metadata.version('genlight')} ({stands_on}, python {sys.version.split()[0]})"


def _configure_messages() -> None:
    """Our messages to standard error; of Lightning's, warnings that a user can act on."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
        # It has a handler to standard error of its own, and each message would come twice.
        logging.getLogger("lightning").propagate = False
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message=text)
