"""Differences between runs, for pages and `genlight diff`: configuration, data, code, versions, results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..job.config import read_job
from ..job.identity import leaves
from .summary import RunSummary

About = Literal["configuration", "data", "code", "versions", "results"]
_ORDER: tuple[About, ...] = ("configuration", "data", "code", "versions", "results")
_DATA_KEYS = ("data", "dataset", "inputs", "mock_batches")
"""Keys of a job that describe its data."""
_FIRST_PACKAGES = ("genlight", "lightning", "torch", "numpy", "pyarrow")
_LONGEST_VALUE = 400
"""Maximum length of a displayed value, in characters. Longer values are shown as their length and digest."""


@dataclass(frozen=True)
class ChangedFact:
    """A fact that is not the same in all runs.

    Attributes:
        about: The kind of fact.
        name: Its name; for a setting, the dotted name.
        values: The value in each run; None if a run has none.
    """

    about: About
    name: str
    values: tuple[Any, ...]


def facts_of_run(summary: RunSummary) -> dict[str, Any]:
    """Return the facts of a run to compare, as JSON: its summary, ``metadata``, ``packages`` and ``job``.

    ``job`` has the settings of its ``job.json`` by dotted name, or is None if there is no such file.
    """
    metadata = {name: value for name, value in summary.metadata.items() if name != "packages"}
    packages, job = summary.metadata.get("packages"), read_job(summary.path)
    return {
        **summary.as_json(),
        "metadata": metadata,
        "packages": packages if isinstance(packages, dict) else {},
        "job": None if job is None else {name: _short(value) for name, value in leaves(job)},
    }


def differences(runs: Sequence[Mapping[str, Any]]) -> list[ChangedFact]:
    """Return the differences between runs. `runs` are results of `facts_of_run`.

    If every run has a ``job.json``, all settings are compared. Otherwise the settings in the logs are compared. A log
    lacks many settings, among them every hyperparameter that is a string.
    """
    has_jobs = all(run["job"] is not None for run in runs)
    facts = [dict(_facts(run, has_jobs=has_jobs)) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    rows = [ChangedFact(*name, tuple(each.get(name) for each in facts)) for name in names]
    changed = [row for row in rows if any(value != row.values[0] for value in row.values[1:])]
    return sorted(changed, key=lambda row: _ORDER.index(row.about))


def _facts(run: Mapping[str, Any], *, has_jobs: bool) -> Iterator[tuple[tuple[About, str], Any]]:
    """Yield the facts of a run that are compared, by kind and name."""
    metadata, packages = run["metadata"], run["packages"]
    job = run["job"] if has_jobs else metadata.get("job")
    for name, value in (job if isinstance(job, dict) else {}).items():
        if name != "run_id":
            yield ("data" if name.split(".")[0] in _DATA_KEYS else "configuration", name), value
    if not has_jobs:
        yield ("configuration", "seed"), metadata.get("seed")
    git = metadata.get("git")
    yield ("code", "commit"), git.get("commit") if isinstance(git, dict) else None
    yield ("code", "uncommitted changes"), git.get("dirty") if isinstance(git, dict) else None
    yield ("code", "source of the class"), metadata.get("source")
    yield ("versions", "host"), run["host"]
    for name in (*_FIRST_PACKAGES, *packages):
        yield ("versions", name), packages.get(name)
    numerics = metadata.get("numerics")
    for name, value in (numerics if isinstance(numerics, dict) else {}).items():
        yield ("versions", name), value
    score = run["score"] or {}
    yield ("results", "state"), run["state"]
    yield ("results", "steps"), run["step"]
    yield ("results", "last loss"), run["loss"]
    if score:
        yield ("results", f"best {score['name']}"), score["value"]


def _short(value: Any) -> Any:
    text = json.dumps(value)
    if not isinstance(value, list | str) or len(text) <= _LONGEST_VALUE:
        return value
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{len(value):,} {'characters' if isinstance(value, str) else 'entries'}, sha256:{digest}"
