"""The trainings of the page on ports continue bit for bit after Ctrl-C, SIGTERM and SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from genlight.callbacks.checkpoint import load, newest_valid
from support.forked import Forked
from support.snippets import blocks

PAGE = Path(__file__).parents[2] / "examples" / "guides" / "ports.md"
PACKAGES = Path(sys.prefix) / "guides"
START = """
import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

updates = 0


def after(*_):
    global updates
    updates += 1
    if updates == 3:
        os.kill(os.getpid(), int(os.environ["KILLED_BY"]))


if "KILLED_BY" in os.environ:
    register_optimizer_step_post_hook(after)
if sys.argv[1].endswith(".py"):
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    from genlight.adapter.cli import main

    sys.exit(main(sys.argv[1:]))
"""

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.slow, pytest.mark.timeout(1800)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load(folder / "final")["state_dict"]
    return found


@pytest.mark.parametrize("port", ["char_gpt", "project", "llama"])
def test_an_interrupted_port_ends_with_the_same_weights(port, tmp_path):
    """One run is ended in each of the three ways in turn, so it continues three times."""
    if port == "llama" and not PACKAGES.is_dir():
        pytest.skip("`make` installs the packages of the guides into .venv/guides")
    for _, title, text in blocks(PAGE):
        if title.startswith(port):
            (tmp_path / title).write_text(text)
    (tmp_path / "start.py").write_text(START)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if port == "llama":
        environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), environ.get("PYTHONPATH", "")])
    log = tmp_path / "log"

    def run(name: str, killed_by: signal.Signals | None = None) -> int:
        arguments = ["project.py", name] if port == "project" else ["run", f"{port}.json", "--set", f"run_id={name}"]
        variables = {} if killed_by is None else {"KILLED_BY": str(int(killed_by))}
        started = Forked(str(tmp_path / "start.py"), *arguments, environ=environ | variables, folder=tmp_path, log=log)
        return started.wait(300)

    def folder(name: str) -> Path:
        return tmp_path / name if port == "project" else tmp_path / "runs" / name / "checkpoints"

    assert run("whole") == 0, log.read_text()
    for times, killed_by in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)):
        assert run("killed", killed_by) != 0
        assert not (folder("killed") / "final.json").exists(), killed_by
        newest, _ = newest_valid(folder("killed"))
        assert newest is not None
        assert newest.step >= min(3 * times + 3, 6), "it began anew"
    assert run("killed") == 0, log.read_text()
    expected, found = weights(folder("whole")), weights(folder("killed"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], expected[each]) for each in expected), port
