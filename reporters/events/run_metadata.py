"""The origin of a run, for records and event logs: code, packages, host, command line.

Nothing here starts more than one process, which is git, and a machine without git is not an error. The command line is
free of secrets: of those that are known, of values under secret names, and of values of the environment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...adapter.plumbing.redaction import HIDDEN, hide_environment, hide_secrets, is_secret_name, secrets_of_module
from ...adapter.plumbing.text import shortened

__all__ = [
    "changed_numerics",
    "command_line",
    "git_state",
    "installed_packages",
    "metadata_of_module",
    "numerics",
    "run_metadata",
]

PACKAGES_OF_NUMBERS = ("genlight", "torch", "lightning", "numpy")
"""Packages whose versions may decide bits."""

GIT_SECONDS = 2.0
"""How long git may take. The state of a working tree on a slow network disk is not worth more."""
LONGEST_COMMAND = 8192
"""Characters of the command line that are kept."""

_STATUS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch")


def run_metadata(
    hosted: object = None,
    *,
    project: Path | None = None,
    secrets: Iterable[str | None] = (),
    tags: Sequence[str] = (),
    notes: str = "",
) -> dict[str, Any]:
    """The facts about this process as a JSON object; what is not known is left out.

    ``command`` (text), ``git`` (``commit``, ``dirty``), ``host``, ``packages`` (versions by name), ``source`` (a digest
    of the file of the class, which tells two states of a working tree apart that git has both as uncommitted), and
    ``tags`` and ``notes`` as they were given.

    Args:
        hosted: What is trained, an object of a class; git is asked about the folder of its file.
        project: The folder that git is asked about where the class is an installed one or there is none; None takes the
            working directory.
        secrets: What no text may show.
        tags: Words to find the run by.
        notes: What the user wrote about the run.
    """
    known = tuple(secrets)
    source = Path(getattr(sys.modules.get(type(hosted).__module__), "__file__", None) or "").absolute()
    is_own = source.is_file() and "site-packages" not in source.parts
    found: dict[str, Any] = {
        "command": command_line(secrets=known),
        "git": git_state(os.path.realpath(source.parent if is_own else project or Path.cwd())),
        "host": socket.gethostname(),
        "notes": hide_secrets(notes, secrets=known),
        "packages": installed_packages(),
        "source": f"sha256:{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}" if source.is_file() else None,
        "tags": [hide_secrets(tag, secrets=known) for tag in tags],
    }
    return {name: value for name, value in found.items() if value}


def numerics() -> dict[str, Any]:
    """The settings of this process that decide the bits of a training, as far as they are known."""
    found: dict[str, Any] = {"python": platform.python_version()}
    torch = sys.modules.get("torch")
    if torch is None:
        return found
    backends = torch.backends
    reads: dict[str, Callable[[], Any]] = {
        "threads": torch.get_num_threads,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "matmul_precision": torch.get_float32_matmul_precision,
        "tf32_matmul": lambda: backends.cuda.matmul.allow_tf32,
        "tf32_convolutions": lambda: backends.cudnn.allow_tf32,
        "cudnn_benchmark": lambda: backends.cudnn.benchmark,
        "cudnn_deterministic": lambda: backends.cudnn.deterministic,
        "cudnn": lambda: backends.cudnn.version() if torch.cuda.is_initialized() else None,
        "cuda": lambda: torch.version.cuda,
        "device": lambda: torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, read in reads.items():
            # Torch refuses to read the older settings of TF32 once its newer ones were set.
            with contextlib.suppress(RuntimeError, AttributeError):
                found[name] = read()
    return {name: value for name, value in found.items() if value is not None}


def changed_numerics(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Whatever decides bits and differs between the ``metadata`` of two attempts, a phrase each."""

    def facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
        packages = metadata.get("packages", {})
        return {**metadata["numerics"], **{name: packages.get(name) for name in PACKAGES_OF_NUMBERS}}

    if "numerics" not in before or "numerics" not in now:  # an older release did not know
        return []
    old, new = facts(before), facts(now)
    return [
        f"{name} is {new.get(name)}, was {old.get(name)}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def metadata_of_module(module: object) -> dict[str, Any]:
    """`run_metadata` of a fit of a LightningModule, or of the trainer class that one hosts."""
    return run_metadata(getattr(module, "plugin", module), secrets=secrets_of_module(module))


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
    text = done.stdout.decode("utf-8", "replace")
    commit = re.search("^# branch.oid ([0-9a-f]{40,64})$", text, re.MULTILINE)  # "(initial)" before the first commit
    if done.returncode or commit is None:
        return None
    return {"commit": commit[1], "dirty": re.search("^[^#]", text, re.MULTILINE) is not None}


@functools.cache
def installed_packages() -> Mapping[str, str]:
    """Version of every installed distribution, by name.

    From the names of their folders, ``NAME-VERSION.dist-info``, as the specification "Recording installed projects"
    has them: reading each one's metadata takes a hundred times as long. The first on ``sys.path`` is what is imported.
    """
    folders = (folder for place in reversed(sys.path) for folder in Path(place).glob("*-*.dist-info"))
    found = {name.replace("_", "-"): version for name, _, version in (folder.stem.partition("-") for folder in folders)}
    return dict(sorted(found.items()))


def command_line(arguments: Sequence[str] | None = None, *, secrets: Iterable[str | None] = ()) -> str:
    """The command by which this process was started, quoted for a shell, without secrets.

    Args:
        arguments: The program and what it was given; None takes those of this process.
        secrets: What no text may show.
    """
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = Path(sys.argv[0]).name if module is None else f"python -m {module.name.removesuffix('.__main__')}"
    program, *given = [program, *sys.argv[1:]] if arguments is None else arguments
    hidden = [_without_secret(before, argument) for before, argument in pairwise(["", *given])]
    return shortened(hide_environment(f"{program} {shlex.join(hidden)}".rstrip(), secrets=secrets), LONGEST_COMMAND)


def _without_secret(before: str, argument: str) -> str:
    """`argument` with the value hidden that follows a secret name: ``a.token=X``, or ``X`` after ``--api-key``."""
    name, sign, _ = argument.partition("=")
    if sign and is_secret_name(name):
        return f"{name}={HIDDEN}"
    is_value = before.startswith("-") and "=" not in before and not argument.startswith("-")
    return HIDDEN if is_value and is_secret_name(before) else argument
