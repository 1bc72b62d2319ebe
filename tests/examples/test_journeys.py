"""The trainings of the guides and examples continue bit for bit after Ctrl-C, SIGTERM and SIGKILL."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from genlight.callbacks.checkpoint import load, newest_valid
from support.forked import Forked
from support.snippets import blocks

EXAMPLES = Path(__file__).parents[2] / "examples"
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


@dataclass(frozen=True)
class Journey:
    """A guide or a folder of the examples, with the command that trains it for 12 steps and saves every two."""

    source: str
    run: str
    before: str = ""
    """A command that makes its data."""
    needs_packages: bool = False


_SHORT = "--set artifacts_dir=run --set max_steps=12 --set checkpoint_every=2 --set lightning.accelerator=cpu"
_CLI = "main.py fit --config main.yaml --resume auto --trainer.max_steps 12"
JOURNEYS = {
    "gpt": Journey("gpt", f"run job.json {_SHORT} --set sample_every=5 --set validate.every_n_steps=5", "prepare.py"),
    "lightning project": Journey("guides/lightning_project.md", _CLI),
    "containers": Journey("guides/containers.md", f"run job.json {_SHORT}", "make_rows.py"),
    "lora": Journey("guides/lora.md", f"run lora.json {_SHORT} --set checkpoints.weights=all", needs_packages=True),
    "diffusion": Journey("diffusion", f"run job.json {_SHORT} --set sample_every=5"),
}


def lay_out(journey: Journey, folder: Path) -> Path:
    """Write the files of a journey below `folder`; return the folder of its commands."""
    source, target = EXAMPLES / journey.source, folder / "journey" / Path(journey.source).stem
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("runs"))
        shutil.copytree(EXAMPLES / "digits", target.parent / "digits", ignore=shutil.ignore_patterns("runs"))
    else:
        target.mkdir(parents=True)
        for _, title, text in blocks(source):
            if title:
                (target / title).write_text(text.replace("every_n_steps: 20", "every_n_steps: 2"))
    (target / "start.py").write_text(START)
    return target


@pytest.mark.parametrize("name", JOURNEYS)
def test_an_interrupted_journey_ends_with_the_same_weights(name, tmp_path):
    """One run is ended in each of the three ways in turn, so it continues three times."""
    journey = JOURNEYS[name]
    if journey.needs_packages and not PACKAGES.is_dir():
        pytest.skip("`make` installs the packages of the guides into .venv/guides")
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if journey.needs_packages:
        environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), environ.get("PYTHONPATH", "")])
    log = tmp_path / "log"
    whole, killed = (lay_out(journey, tmp_path / each) for each in ("whole", "killed"))

    def run(target: Path, command: str, killed_by: signal.Signals | None = None) -> int:
        variables = {} if killed_by is None else {"KILLED_BY": str(int(killed_by))}
        start = Forked(str(target / "start.py"), *command.split(), environ=environ | variables, folder=target, log=log)
        return start.wait(300)

    def weights(target: Path) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = load(target / "run/checkpoints/final")["state_dict"]
        return found

    for target in (whole, killed):
        assert not journey.before or run(target, journey.before) == 0, log.read_text()
    assert run(whole, journey.run) == 0, log.read_text()
    for times, killed_by in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)):
        assert run(killed, journey.run, killed_by) == (-9 if killed_by is signal.SIGKILL else 75), log.read_text()
        assert not (killed / "run/checkpoints" / "final.json").exists(), killed_by
        newest, _ = newest_valid(killed / "run/checkpoints")
        assert newest is not None
        assert newest.step >= min(3 * times + 3, 6), "it began anew"
    assert run(killed, journey.run) == 0, log.read_text()
    expected, found = weights(whole), weights(killed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], expected[each]) for each in expected), name
