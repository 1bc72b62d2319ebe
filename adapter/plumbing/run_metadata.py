"""The origin of a run, for records and event logs: code, packages, host, command line.

Nothing here starts more than one process, which is git, and a machine without git is not an error. The command line is
free of secrets: of those that are known, of values under secret names, and of values of the environment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .redaction import HIDDEN, hide_environment, hide_secrets, is_secret_name, secrets_of_module

__all__ = [
    "command_line",
    "git_state",
    "installed_packages",
    "metadata_of_module",
    "project_folder",
    "run_metadata",
    "source_digest",
]

GIT_SECONDS = 2.0
"""How long git may take. The state of a working tree on a slow network disk is not worth more."""
LONGEST_COMMAND = 8192
"""Characters of the command line that are kept."""

_STATUS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch")
_OPTION = re.compile(r"--?([^=]+)(?:=(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"([\w.\-\[\]]+)=(.*)", re.DOTALL)
_DIST_INFO = ".dist-info"


def run_metadata(
    project: str | os.PathLike[str],
    *,
    secrets: Iterable[str | None] = (),
    tags: Sequence[str] = (),
    notes: str = "",
    hosted: object = None,
) -> dict[str, Any]:
    """The facts about this process as a JSON object; what is not known is left out.

    ``command`` (text), ``git`` (``commit``, ``dirty``), ``host``, ``packages`` (versions by name), ``source`` (a digest
    of the file of the class), and ``tags`` and ``notes`` as they were given.

    Args:
        project: The folder of the user's code, whose git state is read.
        secrets: What no text may show.
        tags: Words to find the run by.
        notes: What the user wrote about the run.
        hosted: What is trained, an object of a class.
    """
    known = tuple(secrets)
    found: dict[str, Any] = {
        "command": command_line(secrets=known),
        "git": git_state(os.path.realpath(project)),
        "host": socket.gethostname(),
        "notes": hide_secrets(notes, secrets=known),
        "packages": installed_packages(),
        "source": source_digest(hosted),
        "tags": [hide_secrets(tag, secrets=known) for tag in tags],
    }
    return {name: value for name, value in found.items() if value}


def metadata_of_module(module: object) -> dict[str, Any]:
    """`run_metadata` of a fit of a LightningModule, or of the trainer class that one hosts."""
    hosted = getattr(module, "plugin", module)
    return run_metadata(project_folder(hosted), secrets=secrets_of_module(module), hosted=hosted)


def project_folder(hosted: object) -> Path:
    """The folder of the file that defines the class of `hosted`; the working directory for an installed class."""
    source = _source_of(hosted)
    folder = Path.cwd() if source is None else source.absolute().parent
    return Path.cwd() if "site-packages" in folder.parts else folder


def source_digest(hosted: object) -> str | None:
    """``sha256:`` and 16 digits of the file that defines the class of `hosted`; None where there is none to read.

    It tells two states of a working tree apart that git has both as uncommitted.
    """
    source = _source_of(hosted)
    try:
        return None if source is None else f"sha256:{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    except OSError:
        return None


def _source_of(hosted: object) -> Path | None:
    source = getattr(sys.modules.get(type(hosted).__module__), "__file__", None)
    return None if source is None else Path(source)


@functools.cache
def git_state(folder: str) -> dict[str, Any] | None:
    """Commit and state of the working tree that `folder` is in; None where git does not say.

    ``dirty`` is whether tracked files differ from the commit; files that git does not know do not count.
    """
    command = ("git", "-C", folder, *_STATUS, "--untracked-files=no")
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    commit = next((line.rpartition(" ")[2] for line in lines if line.startswith("# branch.oid ")), "")
    if done.returncode or not re.fullmatch("[0-9a-f]{40,64}", commit):  # "(initial)" before the first commit
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


@functools.cache
def installed_packages() -> Mapping[str, str]:
    """Version of every installed distribution, by name.

    From the names of their folders, ``NAME-VERSION.dist-info``, as the specification "Recording installed projects"
    has them: reading each one's metadata takes a hundred times as long. The first on ``sys.path`` is what is imported.
    """
    found: dict[str, str] = {}
    for place in reversed(sys.path):
        with contextlib.suppress(OSError):  # a path that does not exist, or a ZIP archive
            for name in os.listdir(place or os.curdir):
                project, dash, version = name.removesuffix(_DIST_INFO).partition("-")
                if dash and name.endswith(_DIST_INFO):
                    found[project.replace("_", "-")] = version
    return dict(sorted(found.items()))


def command_line(arguments: Sequence[str] | None = None, *, secrets: Iterable[str | None] = ()) -> str:
    """The command by which this process was started, quoted for a shell, without secrets.

    Args:
        arguments: The program and what it was given; None takes those of this process.
        secrets: What no text may show.
    """
    program, *given = [_program(), *sys.argv[1:]] if arguments is None else arguments
    text = f"{program} {shlex.join(_without_secret_values(given))}".rstrip()
    shown = hide_environment(text, secrets=secrets)
    return shown if len(shown) <= LONGEST_COMMAND else f"{shown[:LONGEST_COMMAND]}…"


def _program() -> str:
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return f"python -m {name.removesuffix('.__main__')}"
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"


def _without_secret_values(arguments: Iterable[str]) -> Iterator[str]:
    """`arguments` with the values hidden that follow a secret name: ``--api-key X``, ``a.token=X``."""
    is_secret = False
    for argument in arguments:
        option, assignment = _OPTION.fullmatch(argument), _ASSIGNMENT.fullmatch(argument)
        named = option or assignment
        if is_secret and option is None:
            yield HIDDEN
            is_secret = False
        elif named is not None and named[2] is not None:
            yield f"{argument[: named.start(2)]}{HIDDEN}" if _is_secret(named[1]) else argument
            is_secret = False
        else:
            yield argument
            is_secret = option is not None and _is_secret(option[1])


def _is_secret(name: str) -> bool:
    return is_secret_name(name.rpartition(".")[2])
