"""Runs the snippets of a Markdown page as its reader would."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support.forked import Forked

_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, file name and text of each fenced block."""
    return _FENCE.findall(page.read_text())


def run_snippets(page: Path, folder: Path, *, environ: Mapping[str, str] | None = None) -> int:
    """Write the files of `page` into `folder` and run its commands there; return how many were run.

    Files are written under their titles; a repeated title appends to its file. A Python file of Lightning's
    own that no command names runs where it stands.

    Raises:
        AssertionError: A command fails, or nothing runs a block; holds the output.
    """
    ran = 0
    written: set[str] = set()
    shell = "".join(text for language, _, text in blocks(page) if language == "sh")
    for language, title, text in blocks(page):
        if title:
            with (folder / title).open("a" if title in written else "w") as file:
                file.write(f"\n{text}" if title in written else text)
            written.add(title)
            if language == "python" and "import lightning" in text and title not in shell:
                _run(folder, [sys.executable, title], environ)
                ran += 1
        elif language == "sh":
            for command in _commands(text):
                _run(folder, command, environ)
                ran += 1
        else:
            assert language in ("text", "bash"), f"a {language} block without a title is run by nothing:\n{text}"
    return ran


def _commands(text: str) -> list[list[str]]:
    """Return the commands of this interpreter for a block of shell lines."""
    programs = {"genlight": ["-m", "genlight.adapter.cli"], "python": []}
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    return [[sys.executable, *programs[words[0]], *words[1:]] for words in lines if words and words[0] in programs]


def _run(folder: Path, command: list[str], environ: Mapping[str, str] | None) -> None:
    code, said = _ended(folder, command[1:], os.environ if environ is None else environ)
    assert code == 0, f"{command}\n{said}"


def _ended(folder: Path, arguments: list[str], environ: Mapping[str, str], timeout_s: float = 240) -> tuple[int, str]:
    """Run ``python ARGUMENTS…``; return its exit code and output."""
    if environ.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):  # other packages than in the fork server
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout_s)
        return done.returncode, done.stdout + done.stderr
    program, *rest = arguments[1:] if arguments[0] == "-m" else arguments
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        process = Forked(program, *rest, environ=environ, folder=folder, log=Path(log.name))
        try:
            return process.wait(timeout_s), log.read()
        finally:
            process.kill_session()
