"""Runs what depends on torch under the lowest and the newest release that is supported, and writes down what passed.

``python tests/versions.py TESTS…``, from the root of the project: installs each release into ``.versions/``, several
gigabytes, and writes the table of CONTRIBUTING.md. With ``--only RELEASE`` that row alone is written anew.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->"
HEAD = "| torch | date | passed | failed | skipped |\n| --- | --- | --- | --- | --- |\n"


def releases() -> list[str]:
    """The lowest release that pyproject.toml takes, and the newest that is said to be tested."""
    from genlight.callbacks.lightning_internals import NEWEST_TORCH

    lowest = re.search(r'"torch>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert lowest is not None
    return [lowest[1], NEWEST_TORCH]


def measure(release: str, tests: list[str]) -> str:
    """The row of a release."""
    folder = ROOT / ".versions" / f"torch-{release}"
    if not (folder / "torch").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), f"torch=={release}.*"]
        subprocess.run(command, check=True)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    shown = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout[-20_000:])
    return row(shown.stdout.strip().partition("+")[0], dt.datetime.now(dt.UTC).date(), done.stdout)


def row(release: str, date: dt.date, output: str) -> str:
    """What the last line of pytest says, as a row of the table."""
    last = output.strip().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return f"| {release} | {date} | {counts.get('passed', 0)} | {failed} | {counts.get('skipped', 0)} |\n"


def written(page: str, rows: list[str]) -> str:
    """The page with new rows in the place of those of the same releases, by release."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    kept = {line.split("|")[1].strip(): line for line in table.splitlines(keepends=True)[2:] if line.startswith("|")}
    kept |= {line.split("|")[1].strip(): line for line in rows}
    ordered = sorted(kept, key=lambda release: [int(part) for part in release.split(".")])
    return before + BEGIN + HEAD + "".join(kept[release] for release in ordered) + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one release, such as 2.9")
    parser.add_argument("tests", nargs="+")
    chosen = parser.parse_args()
    for release in [chosen.only] if chosen.only else releases():
        PAGE.write_text(written(PAGE.read_text(), [measure(release, chosen.tests)]))


if __name__ == "__main__":
    main()
