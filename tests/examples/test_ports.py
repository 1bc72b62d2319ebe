"""The trainings of the page on ports go on bit for bit after Ctrl-C, SIGTERM and SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from genlight.callbacks.checkpoint import load
from support.snippets import blocks

PAGE = Path(__file__).parents[2] / "examples" / "guides" / "ports.md"
PACKAGES = Path(sys.prefix) / "guides"
KILLER = """
import os
import signal

from torch.optim.optimizer import register_optimizer_step_post_hook

updates = 0


def after(*_):
    global updates
    updates += 1
    if updates == 7:
        os.kill(os.getpid(), int(os.environ["KILLED_BY"]))


register_optimizer_step_post_hook(after)
"""
JOB = "import sys; from genlight.adapter.cli import main; sys.exit(main(sys.argv[1:]))"
SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load(folder / "final")["state_dict"]
    return found


@pytest.mark.parametrize("port", ["char_gpt", "project", "llama"])
def test_a_port_goes_on_as_if_never_interrupted(port, tmp_path):
    if port == "llama" and not PACKAGES.is_dir():
        pytest.skip("`make` installs the packages of the guides into .venv/guides")
    for _, title, text in blocks(PAGE):
        if title.startswith(port):
            (tmp_path / title).write_text(text)
    (tmp_path / "killer.py").write_text(KILLER)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if port == "llama":
        environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), environ.get("PYTHONPATH", "")])

    def run(name: str, killed_by: signal.Signals | None = None) -> int:
        code = SCRIPT if port == "project" else JOB
        arguments = ["project.py", name] if port == "project" else ["run", f"{port}.json", "--set", f"run_id={name}"]
        if killed_by is not None:
            environ["KILLED_BY"] = str(int(killed_by))
            code = f"import killer; {code}"
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert killed_by is not None or done.returncode == 0, done.stderr
        return done.returncode

    def folder(name: str) -> Path:
        return tmp_path / name if port == "project" else tmp_path / "runs" / name / "checkpoints"

    run("whole")
    expected = weights(folder("whole"))
    for killed_by in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        name = killed_by.name.lower()
        assert run(name, killed_by) != 0
        assert not (folder(name) / "final.json").exists()
        run(name)
        found = weights(folder(name))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], expected[each]) for each in expected), (port, killed_by)
