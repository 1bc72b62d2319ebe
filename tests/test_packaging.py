"""The built distributions hold every tracked file of the three packages, and no bare top-level module."""

import compileall
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapter", "callbacks", "reporters")

pytestmark = pytest.mark.slow


def tracked(*folders):
    """Files that git knows and that are there, below these folders."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("the tests do not run from a git checkout")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The tracked files as they are now, away from what else lies in the working tree."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        else:
            target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_the_wheel_holds_every_tracked_file_of_the_packages_under_genlight_and_no_other(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}

    moved = {
        "genlight/adapter/cli/namespace_main.py": "genlight/__main__.py",
        "genlight/adapter/runner/slurm_runner.py": "slurm/runner.py",
        "genlight/adapter/compat/gen_worker_trainer.py": "gen_worker/trainer.py",
    }
    packaged = {f"genlight/{name}" for name in tracked(*PACKAGES)}
    stubs = "genlight/adapter/stubs/"
    assert names == {moved.get(name, name).removeprefix(stubs) for name in packaged}
    assert "gen_worker-stubs/trainer/__init__.pyi" in names
    assert {f"genlight/{package}/py.typed" for package in PACKAGES} <= names
    assert "genlight/__init__.py" not in names, "genlight is a namespace"


def test_the_source_distribution_holds_packages_tests_and_examples(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames() if not name.endswith("/")}

    assert tracked(*PACKAGES, "tests", "examples") <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert not [name for name in names if name.startswith((".tree", ".venv")) or "__pycache__" in name]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder in which the wheel is installed, without what it depends on."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, built[1]],
        check=True,
        capture_output=True,
    )
    return site


def run_script(script, site, folder):
    environ = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("form", ["with_source", "without_source"])
def test_an_installation_has_every_name_and_the_old_import_path(installed, tmp_path, form):
    site = shutil.copytree(installed, tmp_path / "site")
    if form == "without_source":
        compileall.compile_dir(site, quiet=1, legacy=True)
        for path in site.rglob("*.py"):
            path.unlink()
    script = (
        "from gen_worker.trainer.contracts import StepResult\n"
        "import gen_worker.trainer, genlight.adapter, genlight.callbacks, genlight.reporters\n"
        "for package in (genlight.adapter, genlight.callbacks, genlight.reporters, gen_worker.trainer):\n"
        f"    assert not package.__path__ or package.__path__[0].startswith({str(site)!r}), package.__path__\n"
        "    assert all(getattr(package, name) is not None for name in package.__all__)\n"
        "assert StepResult is genlight.adapter.StepResult\n"
        "import sys\n"
        "assert not {'adapter', 'callbacks', 'reporters'} & set(sys.modules), 'bare names'\n"
    )
    done = run_script(script, site, tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_script("from genlight.adapter.cli.command_line import main; main([])", site, tmp_path)
    assert "usage: genlight" in done.stdout, done.stderr
