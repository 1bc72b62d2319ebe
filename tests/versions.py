"""Run tests under other releases of torch and Python, and write down what passed.

``python tests/versions.py TESTS…``, from the root of the project: the lowest and the newest release of torch that is
supported, and the later releases of Python that this machine has. It installs them into ``.versions/``, several
gigabytes, and writes the table of CONTRIBUTING.md. With ``--torch RELEASE`` or ``--python RELEASE`` only that row is
written.
"""

import argparse
import datetime as dt
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
INSTALLED = ROOT / ".versions"
BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->"
HEAD = "| Python | torch | date | passed | failed | skipped |\n| --- | --- | --- | --- | --- | --- |\n"
RELEASES_OF_PYTHON = ("3.12", "3.13")
SHOW = "import platform, torch; print(platform.python_version(), torch.__version__.partition('+')[0])"


def releases_of_torch() -> list[str]:
    """Return the lowest release that pyproject.toml allows, and the newest that is declared as tested."""
    from genlight.callbacks.lightning_internals import NEWEST_TORCH

    lowest = re.search(r'"torch>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert lowest is not None
    return [lowest[1], NEWEST_TORCH]


def with_torch(release: str) -> tuple[str, dict[str, str]]:
    """Return this Python and an environment with a release of torch; install the release if it is absent."""
    folder = INSTALLED / f"torch-{release}"
    if not (folder / "torch").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), f"torch=={release}.*"]
        subprocess.run(command, check=True)
    return sys.executable, {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def with_python(release: str) -> tuple[str, dict[str, str]] | None:
    """Return the Python of an environment with everything that the tests need; None without that release.

    torch is the newest that an index offers: the pinned one may be a build for one release of Python only.
    """
    python = INSTALLED / f"python-{release}" / "bin" / "python"
    if not python.exists():
        base = shutil.which(f"python{release}")
        if base is None:
            print(f"python{release} is not on the PATH: its row stays as it is")
            return None
        subprocess.run([base, "-m", "venv", str(python.parents[1])], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        pinned = [
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")
        ]
        constraints = INSTALLED / "constraints-without-torch.txt"
        constraints.write_text("\n".join(pinned) + "\n")
        subprocess.run([*install, "--upgrade", "pip"], check=True)
        project = ["--editable", ".[tensorboard,completion]", "--group", "dev"]
        subprocess.run([*install, "--constraint", str(constraints), *project], cwd=ROOT, check=True)
    return str(python), {}


def measure(python: str, environ: dict[str, str], tests: list[str]) -> str:
    """Run the tests and return the row of the table for the releases that `python` finds in `environ`."""
    environ = {**os.environ, **environ}
    found = subprocess.run([python, "-c", SHOW], env=environ, capture_output=True, text=True, check=True).stdout.split()
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout[-20_000:])
    return row(*found, dt.datetime.now(dt.UTC).date(), done.stdout)


def row(python: str, torch: str, date: dt.date, output: str) -> str:
    """Return the row of the table for the last line of pytest."""
    last = output.strip().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return f"| {python} | {torch} | {date} | {counts.get('passed', 0)} | {failed} | {counts.get('skipped', 0)} |\n"


def written(page: str, rows: Iterable[str]) -> str:
    """Return the page with `rows` instead of the rows of the same releases, in order."""

    def releases(line: str) -> tuple[str, ...]:
        return tuple(cell.strip() for cell in line.split("|")[1:3])

    def in_order(key: tuple[str, ...]) -> list[list[int]]:
        return [[int(part) for part in release.split(".")] for release in key]

    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    kept = {releases(line): line for line in (*table.splitlines(keepends=True)[2:], *rows) if line.startswith("|")}
    return before + BEGIN + HEAD + "".join(kept[key] for key in sorted(kept, key=in_order)) + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="only this release of torch, such as 2.9")
    parser.add_argument("--python", help="only this release of Python, such as 3.12")
    parser.add_argument("tests", nargs="+")
    chosen = parser.parse_args()
    is_all = not (chosen.torch or chosen.python)
    for release in releases_of_torch() if is_all else filter(None, [chosen.torch]):
        PAGE.write_text(written(PAGE.read_text(), [measure(*with_torch(release), chosen.tests)]))
    for release in RELEASES_OF_PYTHON if is_all else filter(None, [chosen.python]):
        if (found := with_python(release)) is not None:
            PAGE.write_text(written(PAGE.read_text(), [measure(*found, chosen.tests)]))


if __name__ == "__main__":
    main()
