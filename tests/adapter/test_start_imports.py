"""Modules that a process loads before it can train, and that a run loads before its first step."""

import gc
import json
import random
import subprocess
import sys

import pytest

from genlight.adapter.cli.command_line import COMMANDS, LIGHTNING_COMMANDS
from genlight.adapter.plumbing.imports import collect_as_usual, collect_rarely

pytestmark = pytest.mark.promise(name="speed")

NEVER_BEFORE_THE_FIRST_STEP = {
    "huggingface_hub": "nothing is fetched",
    "fsspec.implementations.http": "nothing is fetched",
    "aiohttp": "nothing is fetched",
    "lightning.pytorch.cli": "only genlight fit is LightningCLI",
    "tensorboard": "no such logger is asked for",
    "torch.utils.tensorboard": "no such logger is asked for",
    "torch._inductor.compile_fx": "nothing is compiled",
    "wandb": "no such logger is asked for",
    "matplotlib": "nothing is drawn",
    "pandas": "no such data",
    "pyarrow": "no such data",
    "sklearn": "no such model",
    "torchvision": "no such model",
    "transformers": "no such model",
    "IPython": "no notebook",
}

TRAINER = """
import gc, json, os, random, sys
import torch
import rich.style
AT_IMPORT = random.random()

class Looks:
    def setup(self, ctx): ...
    def configure(self, ctx):
        model = torch.nn.Linear(1, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    def prepare_batch(self, raw, state, ctx): return raw
    def train_step(self, batch, state, ctx):
        with open("loaded.json", "w") as file:
            drawn = random.random()
            found = {"thresholds": gc.get_threshold(), "drawn": [AT_IMPORT, drawn]}
            json.dump({"modules": sorted(sys.modules), **found}, file)
        from genlight.adapter import StepResult
        return StepResult(metrics={"loss": 1.0})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""


SEED = 3

WITHOUT_TORCH = """
import atexit, sys
from genlight.adapter.cli import main
heavy = ("torch", "lightning", "numpy", "pyarrow", "huggingface_hub", "scipy", "textual", "starlette", "uvicorn")
atexit.register(lambda: print("heavy:", [name for name in heavy if name in sys.modules]))
sys.exit(main())
"""


def python(code, folder, *arguments):
    """Run `code` in a new process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=folder, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder with a job that has run, a job that cannot, and the modules that were loaded in the first step."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "looks.py").write_text(TRAINER)
    job = {"run_id": "r", "trainer": "looks:Looks", "max_steps": 1, "mock_batches": [1], "resume_from_latest": True}
    job["seed"] = SEED
    (folder / "job.json").write_text(json.dumps({**job, "lightning": {"accelerator": "cpu"}}))
    (folder / "plain.py").write_text(TRAINER.replace("import torch", ""))
    (folder / "bad.json").write_text(json.dumps({**job, "trainer": "plain:Looks", "metric_every": -1}))
    done = python("import sys; from genlight.adapter.cli import main; sys.exit(main())", folder, "run", "job.json")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_loads_nothing_before_its_first_step_that_it_does_not_use(run_folder):
    """Torch and Lightning are slow to load; nothing else that is slow is loaded for one step."""
    loaded = set(json.loads((run_folder / "loaded.json").read_text())["modules"])
    assert {"torch", "lightning.pytorch"} <= loaded
    assert {name: why for name, why in NEVER_BEFORE_THE_FIRST_STEP.items() if name in loaded} == {}


def test_garbage_is_collected_as_usual_when_the_trainer_is_made(run_folder):
    code = "import gc, json; print(json.dumps(gc.get_threshold()))"
    usual = json.loads(python(code, run_folder).stdout)
    assert json.loads((run_folder / "loaded.json").read_text())["thresholds"] == usual


@pytest.mark.promise(name="resume")
def test_modules_that_draw_while_they_are_imported_change_no_seeded_number(run_folder):
    """rich, which Lightning imports, draws from Python's generator; a replay in a warm process would not."""
    drawn = json.loads((run_folder / "loaded.json").read_text())["drawn"]
    assert drawn == [random.Random(SEED).random()] * 2


@pytest.mark.parametrize("chosen", [(0, 10, 10), (5000, 20, 20)])
def test_thresholds_that_a_module_sets_while_it_is_imported_stay(chosen):
    before = gc.get_threshold()
    try:
        collect_rarely()
        assert gc.get_threshold() != before
        gc.set_threshold(*chosen)
        collect_as_usual()
        assert gc.get_threshold() == chosen
        collect_rarely()  # a second start in a process whose thresholds somebody chose
        assert gc.get_threshold() == chosen
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        *((f"{name} --help", 0) for name in COMMANDS if name not in LIGHTNING_COMMANDS),
        ("trian", 2),
        ("run bad.json", 2),
        ("run none.json", 2),
        ("checkpoints export none --to x.safetensors", 2),
        ("doctor bad.json", 2),
        ("check", 2),
        ("check bad.json", 2),
        ("run job.json", 0),
        ("events runs/r", 0),
        ("events runs/r --check", 0),
        ("checkpoints list runs/r", 0),
        ("checkpoints verify runs/r", 0),
        ("checkpoints show runs/r/checkpoints/final", 0),
        ("uploads list runs/r", 0),
        ("diff runs/r runs/r", 0),
        ("ls runs", 0),
        ("stop runs/r", 0),
        ("path runs/r", 0),
    ],
)
def test_a_command_that_trains_nothing_loads_neither_torch_nor_lightning(run_folder, arguments, code):
    """Help, refusals, listings and the re-run of a finished job answer at once."""
    done = python(WITHOUT_TORCH, run_folder, *arguments.split())

    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
