"""The table of releases has the results of pytest, and an untested release is recognized."""

import datetime as dt
import re
import tomllib

import pytest
import versions
from packaging.requirements import Requirement

from genlight.callbacks import lightning_internals


def test_a_new_row_takes_the_place_of_the_old_one_of_its_releases():
    old = "| 3.11.7 | 2.15.0 | 2026-01-01 | 1 | 2 | 3 |\n"
    page = f"before\n{versions.BEGIN}{versions.HEAD}{old}{versions.END}\nafter\n"
    date = dt.date(2026, 2, 3)
    newest = versions.row("3.11.7", "2.15.0", date, "...\n1 failed, 20 passed, 4 skipped, 9 deselected in 3.00s\n")
    lowest = versions.row("3.11.7", "2.9.1", date, "30 passed, 1 error in 1.00s")
    other = versions.row("3.12.1", "2.9.1", date, "30 passed in 1.00s")

    assert newest == "| 3.11.7 | 2.15.0 | 2026-02-03 | 20 | 1 | 4 |\n"
    assert lowest == "| 3.11.7 | 2.9.1 | 2026-02-03 | 30 | 1 | 0 |\n"
    table = f"{versions.BEGIN}{versions.HEAD}{lowest}{newest}{other}{versions.END}"
    assert versions.written(page, [other, newest, lowest]) == f"before\n{table}\nafter\n"


@pytest.mark.parametrize(("installed", "untested"), [("2.9.1", False), ("2.15.3+cu132", False), ("2.16.0a0", True)])
def test_a_release_after_the_newest_tested_one_is_known(monkeypatch, installed, untested):
    monkeypatch.setattr(lightning_internals, "version", lambda package: installed)
    monkeypatch.setattr(lightning_internals, "NEWEST_TORCH", "2.15")

    assert lightning_internals.is_untested_torch() == untested


def pinned(file):
    """Version of each package that a file of requirements names."""
    return dict(re.findall(r"^([\w.-]+)==([^\s\\]+)", (versions.ROOT / file).read_text(), re.MULTILINE))


def test_every_file_that_make_installs_but_torch_has_a_hash():
    found = re.split(r"^(?=\w)", (versions.ROOT / "hashes.txt").read_text(), flags=re.MULTILINE)[1:]
    assert [entry.split()[0] for entry in found if "--hash=sha256:" not in entry] == []
    without_torch = {name.lower().replace("_", "-"): v for name, v in pinned("constraints.txt").items()}
    assert without_torch.pop("torch")
    assert {name.lower(): version for name, version in pinned("hashes.txt").items()} == without_torch


def test_the_constraints_name_everything_that_the_project_asks_for():
    project = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    constraints = {name.lower().replace("_", "-"): v for name, v in pinned("constraints.txt").items()}
    for required in map(Requirement, [*wanted, *extras["tensorboard"], *extras["completion"]]):
        assert required.specifier.contains(constraints[required.name.lower().replace("_", "-")]), required


@pytest.mark.parametrize("file", ["guides", "ray", "rl"])
def test_guides_are_installed_within_the_constraints(file):
    constraints = pinned("constraints.txt")
    found = pinned(f"examples/{file}/requirements.txt")
    assert {name: v for name, v in found.items() if constraints.get(name, v) != v} == {}
