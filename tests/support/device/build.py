"""Builds the extension for the torch that is installed, once for each state of its source."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")
OPTIONS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-unknown-pragmas",
    "-DTORCH_EXTENSION_NAME=_sim",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
)
LIBRARIES = ("torch_python", "torch_cpu", "torch", "c10")


class BuildError(Exception):
    """The extension cannot be built here; says why."""


@functools.cache
def build() -> Path:
    """Return the extension's file; build it if necessary, in one process while others wait.

    Raises:
        BuildError: There is no compiler, or it refuses the source.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise BuildError(f"the sim device needs a C++ compiler, and there is no {COMPILER}")
    folder = _cache() / _key(compiler)
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"_sim{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                os.replace(_compile(compiler, Path(scratch)), built)
    return built


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "genlight-tests"


def _key(compiler: str) -> str:
    import torch

    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = [file.read_bytes() for file in sorted(SOURCE.glob("*.[ch]*"))]
    parts += [torch.__version__.encode(), torch.__file__.encode(), version, " ".join(OPTIONS).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _compile(compiler: str, folder: Path) -> Path:
    import torch

    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    include = [word for each in includes for word in ("-isystem", str(each))]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        _run([compiler, *OPTIONS, *include, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sorted(SOURCE.glob("*.cpp"))))
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
    _run([compiler, "-shared", *objects, *libraries, "-o", str(folder / "linked.so")])
    return folder / "linked.so"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"the sim device cannot be built: {' '.join(command)}\n{done.stderr[-4000:]}")
