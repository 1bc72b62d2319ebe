"""Every snippet of the READMEs runs, in the order in which a reader meets them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


READMES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("", "adapter", "callbacks", "reporters")
    for path in (ROOT / folder).glob("README.md")
)
RUN_AT_LEAST = {"README.md": 12, "adapter/README.md": 5}
"""Commands that a reader of a README runs."""


def blocks(readme: str = "README.md") -> list[tuple[str, str, str]]:
    """Language, file name and text of each fenced block."""
    return FENCE.findall((ROOT / readme).read_text())


def test_the_two_commands_for_a_fresh_machine_are_make_targets() -> None:
    """`make demo` and `make test` exist."""
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.split()[1] for _, _, text in blocks() for line in text.splitlines() if line.startswith("make ")]
    assert commands == ["demo", "test"]
    assert set(commands) <= set(targets)


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES)
def test_every_snippet_runs(readme: str, tmp_path: Path) -> None:
    """Files are written under their titles, Python files are run, and commands exit with 0.

    A title that comes again goes on with its file; a Python file of Lightning's own runs where it stands.
    """
    ran = 0
    written: set[str] = set()
    for language, title, text in blocks(readme):
        if title:
            with (tmp_path / title).open("a" if title in written else "w") as file:
                file.write(f"\n{text}" if title in written else text)
            written.add(title)
            if language == "python" and "import lightning" in text:
                run(tmp_path, [sys.executable, title])
                ran += 1
        elif language == "sh":
            for command in commands(text):
                run(tmp_path, command)
                ran += 1
        else:
            assert language in ("text", "bash"), f"a {language} block without a title is run by nothing:\n{text}"
    assert ran >= RUN_AT_LEAST.get(readme, 0)


def commands(text: str) -> list[list[str]]:
    """What a block of shell lines has this interpreter do."""
    programs = {"genlight": ["-m", "genlight.adapter.cli"], "python": []}
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    return [[sys.executable, *programs[words[0]], *words[1:]] for words in lines if words and words[0] in programs]


def run(folder: Path, command: list[str]) -> None:
    """Run a command in `folder`; its output is shown when it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


REFERENCE = "adapter/README.md"


def section(readme: str, title: str) -> str:
    """The text below a heading of the second level."""
    _, found, rest = (ROOT / readme).read_text().partition(f"\n## {title}\n")
    assert found, f"{readme} has no section {title!r}"
    return rest.partition("\n## ")[0]


def test_every_documented_variable_is_read_and_every_read_variable_documented() -> None:
    """The table of variables is the list that the code has."""
    from genlight.adapter.job.environment import VARIABLES

    text = section(REFERENCE, "Variables")
    documented = set(re.findall(r"`((?:TRAINER|TENSORHUB)_\w+)`", text))
    documented |= {f"TRAINER_UPLOAD{suffix}" for suffix in re.findall(r"`(_\w+_URL)`", text)}
    assert documented == {variable.name for variable in VARIABLES}


def test_every_command_is_documented() -> None:
    """The table of commands is what the program offers."""
    from genlight.adapter.cli.command_line import COMMANDS, LIGHTNING_COMMANDS

    rows = re.findall(r"^\| (`.*?) \|", section(REFERENCE, "Commands"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*COMMANDS, *LIGHTNING_COMMANDS}


def test_the_table_of_exit_codes_is_what_the_code_has() -> None:
    """Every code that a run ends with."""
    from genlight.adapter.plumbing import failures

    codes = section(REFERENCE, "Exit codes")
    listed = {int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", codes, re.MULTILINE) for code in cell.split(",")}
    ends = {failures.EXIT_COMPLETED, failures.EXIT_FAILED, failures.EXIT_STARTUP, failures.EXIT_STOPPED}
    assert listed == ends | {130, 138, 143}


@pytest.mark.parametrize("readme", [*READMES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_every_link_leads_somewhere(readme: str) -> None:
    """To a file of the repository, and to a heading that it has."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / readme).read_text(), flags=re.MULTILINE | re.DOTALL)
    for path, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if path.startswith("http"):
            continue
        target = ((ROOT / readme).parent / path) if path else ROOT / readme
        assert target.exists(), f"{readme} links to {path}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{readme} links to #{anchor} of {target.name}, which has no such heading"
