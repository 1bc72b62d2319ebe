"""The origin of a run, for records and event logs: code, packages, host, command line.

The only process that this module starts is git; without git, the facts about the commit are absent. From the command
line, known secrets, values with secret names and values of environment variables are removed.
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

PACKAGES_OF_NUMBERS = ("genlight", "torch", "lightning", "numpy")
"""Packages whose versions may affect the exact numbers."""

GIT_SECONDS = 2.0
"""Time limit for git, which may be slow on a network disk; the commit is not worth a longer wait."""
LONGEST_COMMAND = 8192
"""Maximum length of the stored command line, in characters."""

_STATUS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch")


def run_metadata(
    hosted: object = None,
    *,
    project: Path | None = None,
    secrets: Iterable[str | None] = (),
    tags: Sequence[str] = (),
    notes: str = "",
) -> dict[str, Any]:
    """Return the facts about this process as a JSON object; unknown facts are absent.

    The keys are ``command`` (text), ``git`` (``commit``, ``dirty``), ``host``, ``packages`` (versions by name),
    ``source`` (a digest of the file of the class, to distinguish two uncommitted states of a working tree), ``tags``
    and ``notes``.

    Args:
        hosted: The object that is trained. ``git`` describes the folder of its class.
        project: The folder that ``git`` describes if the class is installed or `hosted` is None; None means the working
            directory.
        secrets: Values to remove from every text.
        tags: Words to find the run by.
        notes: The user's notes on the run.
    """
    known = tuple(secrets)
    source = _file_of_module(type(hosted).__module__)
    is_own = source.is_file() and "site-packages" not in source.parts
    found: dict[str, Any] = {
        "command": command_line(secrets=known),
        "git": git_state(os.path.realpath(source.parent if is_own else project or Path.cwd())),
        "host": socket.gethostname(),
        "notes": hide_secrets(notes, secrets=known),
        "packages": installed_packages(),
        "source": source_digest(type(hosted).__module__),
        "tags": [hide_secrets(tag, secrets=known) for tag in tags],
    }
    return {name: value for name, value in found.items() if value}


def source_digest(module: str) -> str | None:
    """Return a digest of the file of an imported module, ``sha256:`` and 16 digits; None if it has no file."""
    source = _file_of_module(module)
    return f"sha256:{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}" if source.is_file() else None


def _file_of_module(module: str) -> Path:
    return Path(getattr(sys.modules.get(module), "__file__", None) or "").absolute()


def numerics() -> dict[str, Any]:
    """Return the settings of this process that affect the exact numbers; those of torch only if it is imported."""
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
            # torch raises when the older TF32 settings are read after the newer ones were set.
            with contextlib.suppress(RuntimeError, AttributeError):
                found[name] = read()
    return {name: value for name, value in found.items() if value is not None}


def changed_numerics(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each difference in ``numerics`` and packages between the ``metadata`` of two attempts."""

    def facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
        packages = metadata.get("packages", {})
        return {**metadata["numerics"], **{name: packages.get(name) for name in PACKAGES_OF_NUMBERS}}

    if "numerics" not in before or "numerics" not in now:  # written by an older release
        return []
    old, new = facts(before), facts(now)
    return [
        f"{name} is {new.get(name)}, was {old.get(name)}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def metadata_of_module(module: object) -> dict[str, Any]:
    """Return `run_metadata` for a LightningModule, or for the trainer class that it hosts."""
    return run_metadata(getattr(module, "plugin", module), secrets=secrets_of_module(module))


@functools.cache
def git_state(folder: str) -> dict[str, Any] | None:
    """Return the commit and state of the working tree that contains `folder`; None if git reports none.

    ``dirty`` is whether tracked files differ from the commit; untracked files do not count.
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
    """Return the version of every installed distribution, by name.

    They come from the names of the folders, ``NAME-VERSION.dist-info`` (specification "Recording installed projects"),
    because reading the metadata files takes a hundred times as long. If two versions are installed, the first on
    ``sys.path`` counts, as for an import.
    """
    folders = (folder for place in reversed(sys.path) for folder in Path(place).glob("*-*.dist-info"))
    found = {name.replace("_", "-"): version for name, _, version in (folder.stem.partition("-") for folder in folders)}
    return dict(sorted(found.items()))


def command_line(arguments: Sequence[str] | None = None, *, secrets: Iterable[str | None] = ()) -> str:
    """Return the command that started this process, quoted for a shell, without secrets.

    Args:
        arguments: The program and its arguments; None means ``sys.argv``.
        secrets: Values to hide.
    """
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = Path(sys.argv[0]).name if module is None else f"python -m {module.name.removesuffix('.__main__')}"
    program, *rest = [program, *sys.argv[1:]] if arguments is None else arguments
    hidden = [_hide_value(before, argument) for before, argument in pairwise(["", *rest])]
    return shortened(hide_environment(f"{program} {shlex.join(hidden)}".rstrip(), secrets=secrets), LONGEST_COMMAND)


def _hide_value(before: str, argument: str) -> str:
    """Return `argument` without a secret value: ``X`` in ``a.token=X``, or ``X`` if ``--api-key`` comes `before`."""
    name, sign, _ = argument.partition("=")
    if sign and is_secret_name(name):
        return f"{name}={HIDDEN}"
    is_value = before.startswith("-") and "=" not in before and not argument.startswith("-")
    return HIDDEN if is_value and is_secret_name(before) else argument
