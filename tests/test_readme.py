"""Every snippet of the READMEs runs, in the order in which a reader meets them."""

import re
from pathlib import Path

import pytest

from support.snippets import blocks, run_snippets

ROOT = Path(__file__).parent.parent

READMES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("", "adapter", "callbacks", "reporters")
    for path in (ROOT / folder).glob("*.md" if folder in ("adapter", "callbacks") else "README.md")
)
GUIDES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.md"))
RUN_AT_LEAST = {"README.md": 12, "adapter/README.md": 5, "adapter/jobs.md": 8}
"""Commands that a reader of a README runs."""


def test_the_two_commands_for_a_fresh_machine_are_make_targets() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [
        line.split()[1]
        for _, _, text in blocks(ROOT / "README.md")
        for line in text.splitlines()
        if line.startswith("make ")
    ]
    assert commands == ["demo", "test"]
    assert set(commands) <= set(targets)


def test_nothing_says_to_install_genlight_from_an_index() -> None:
    """No index has it, so whoever registered the name there would get those installs."""
    folders = ("adapter", "callbacks", "reporters", "examples")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".ipynb")
    ]
    said = re.compile(r"pip install [^\n`]*(?<![\w/.-])genlight(?![\w/.-])")
    assert [str(path) for path in (*files, ROOT / "README.md") if said.search(path.read_text())] == []


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES)
def test_every_snippet_runs(readme: str, tmp_path: Path) -> None:
    """Files are written under their titles, Python files are run, and commands exit with 0.

    A repeated title appends to its file; a Python file that imports Lightning runs at its place.
    """
    assert run_snippets(ROOT / readme, tmp_path) >= RUN_AT_LEAST.get(readme, 0)


def test_the_costs_of_a_step_are_those_of_the_results() -> None:
    """Every figure of the README's table is the one of the row in the results."""
    results = (ROOT / "examples/benchmarks/RESULTS.md").read_text()
    rows = dict(
        re.findall(r"^\| ([^|]+?) \| (-?[\d.]+) \(", results.partition("\nThe standard set is")[0], re.MULTILINE)
    )
    table = re.compile(r"^\| (genlight, all standard callbacks \|.*) \|\n\|[-|]+\|\n\| (.*) \|$", re.MULTILINE)
    ((names, costs),) = table.findall((ROOT / "README.md").read_text())
    shown = dict(zip(names.split(" | "), costs.split(" | "), strict=True))
    both = [rows[f"Lightning, {kind} optimization"] for kind in ("manual", "automatic")]
    assert shown == {
        "genlight, all standard callbacks": f"{rows['genlight, standard set, events every 10 steps']} µs",
        "Fabric": f"{rows['Fabric']} µs",
        "TorchTNT": f"{rows['TorchTNT']} µs",
        "accelerate": f"{rows['accelerate']} µs",
        "Lightning, manual / automatic": f"{' / '.join(both)} µs",
        "Hugging Face Trainer": f"{rows['Hugging Face Trainer']} µs",
    }


def section(readme: str, title: str) -> str:
    _, found, rest = (ROOT / readme).read_text().partition(f"\n## {title}\n")
    assert found, f"{readme} has no section {title!r}"
    return rest.partition("\n## ")[0]


def test_every_documented_variable_is_read_and_every_read_variable_documented() -> None:
    """The table of variables is the list that the code has."""
    from genlight.adapter.job.sources import JOB_VARIABLE, VARIABLES

    text = section("adapter/job_reference.md", "Variables")
    documented = set(re.findall(r"`((?:TRAINER|TENSORHUB)_\w+)`", text))
    documented |= {f"TRAINER_UPLOAD{suffix}" for suffix in re.findall(r"`(_\w+_URL)`", text)}
    assert documented == {JOB_VARIABLE, *VARIABLES}


def test_every_command_is_documented() -> None:
    from genlight.adapter.cli.command_line import COMMANDS

    rows = re.findall(r"^\| (`.*?) \|", section("adapter/commands.md", "All commands"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*COMMANDS}


def test_the_table_of_exit_codes_is_what_the_code_has() -> None:
    from genlight.adapter.plumbing import failures

    codes = section("adapter/job_reference.md", "Exit codes")
    listed = {int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", codes, re.MULTILINE) for code in cell.split(",")}
    ends = {code for name, code in vars(failures).items() if name.startswith("EXIT_")}
    assert listed == ends | {130, 138, 143}


@pytest.mark.parametrize("readme", [*READMES, *GUIDES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_every_link_leads_somewhere(readme: str) -> None:
    """A link leads to a file of the repository, and to one of its headings."""
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
