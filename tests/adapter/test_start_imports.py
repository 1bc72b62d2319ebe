"""What a process loads before it has anything to train with, and what a run loads before its first step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NEVER_BEFORE_THE_FIRST_STEP = {
    "scipy.signal": "torchmetrics wants an old name of it",
    "scipy.stats": "comes with scipy.signal",
    "pyarrow": "the batches of this job are in its spec",
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
    "sklearn": "no such model",
    "torchvision": "no such model",
    "transformers": "no such model",
    "IPython": "no notebook",
}

TRAINER = """
import json, os, sys
import torch

class Looks:
    def setup(self, ctx): ...
    def configure(self, ctx):
        model = torch.nn.Linear(1, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    def prepare_batch(self, raw, state, ctx): return raw
    def train_step(self, batch, state, ctx):
        with open("loaded.json", "w") as file:
            json.dump(sorted(sys.modules), file)
        from genlight.adapter import StepResult
        return StepResult(metrics={"loss": 1.0})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""


def python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=folder, timeout=120, check=False
    )


def test_a_run_loads_nothing_before_its_first_step_that_it_does_not_use(tmp_path: Path) -> None:
    """Torch and Lightning take their time; nothing else heavy is loaded to make one step."""
    (tmp_path / "looks.py").write_text(TRAINER)
    job = {"run_id": "r", "trainer": "looks:Looks", "max_steps": 1, "mock_batches": [1]}
    (tmp_path / "job.json").write_text(json.dumps({**job, "lightning": {"accelerator": "cpu"}}))

    done = python("import sys; from genlight.adapter.cli import main; sys.exit(main())", tmp_path, "run", "job.json")

    assert done.returncode == 0, done.stderr
    loaded = set(json.loads((tmp_path / "loaded.json").read_text()))
    assert {"torch", "lightning.pytorch"} <= loaded
    assert {name: why for name, why in NEVER_BEFORE_THE_FIRST_STEP.items() if name in loaded} == {}


def test_scipy_is_whole_for_whoever_uses_it_after_lightning(tmp_path: Path) -> None:
    """Lightning comes without it, and nobody can tell afterwards."""
    pytest.importorskip("scipy")
    code = """
import sys
from genlight.adapter.lightning_import import import_lightning
import_lightning()
assert "lightning.pytorch" in sys.modules and "torchmetrics" in sys.modules
assert "scipy.signal" not in sys.modules
import scipy.signal
from scipy.signal.windows import hann
assert type(scipy.signal).__name__ == "module" and len(hann(3)) == 3
assert list(scipy.signal.lfilter([1.0], [1.0], [1.0, 2.0])) == [1.0, 2.0]
"""
    done = python(code, tmp_path)

    assert done.returncode == 0, done.stderr


SCIPY = """
import importlib
def __getattr__(name):
    return importlib.import_module(f"scipy.{name}")
"""
MEANWHILE = """
import inspect, sys
from genlight.adapter.lightning_import import postponed_scipy_signal
with postponed_scipy_signal():
    import scipy.signal
    assert hasattr(scipy.signal, "hamming")
    print("loaded" if "scipy.signal.loaded" in sys.modules else "postponed", end=" ")
    {use}
    print("loaded" if "scipy.signal.loaded" in sys.modules else "postponed")
import scipy.signal
assert scipy.signal.lfilter() == "filtered"
"""


@pytest.fixture
def scipy_like(tmp_path: Path) -> Path:
    """A folder with a package that is laid out like SciPy, which says when it is loaded."""
    (tmp_path / "scipy" / "signal").mkdir(parents=True)
    (tmp_path / "scipy" / "__init__.py").write_text(SCIPY)
    (tmp_path / "scipy" / "signal" / "__init__.py").write_text(
        "from . import loaded\ndef lfilter(): return 'filtered'\ndef hamming(): return 'window'\n"
    )
    (tmp_path / "scipy" / "signal" / "loaded.py").write_text("")
    (tmp_path / "scipy" / "signal" / "windows.py").write_text("def hann(): return 'window'\n")
    return tmp_path


@pytest.mark.parametrize(
    ("use", "state"),
    [
        ("pass", "postponed postponed"),
        ("inspect.stack()", "postponed postponed"),
        ("assert scipy.signal.lfilter() == 'filtered'", "postponed loaded"),
        ("from scipy.signal import lfilter; assert lfilter() == 'filtered'", "postponed loaded"),
        ("from scipy.signal.windows import hann; assert hann() == 'window'", "postponed loaded"),
    ],
    ids=["unused", "looked over", "used", "imported from", "part imported"],
)
def test_whoever_uses_scipy_while_it_is_postponed_gets_the_real_one(scipy_like: Path, use: str, state: str) -> None:
    """As another thread might, while this one imports Lightning."""
    done = python(MEANWHILE.replace("{use}", use), scipy_like)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == state


@pytest.mark.parametrize("reason", ["a scipy that loads its parts at once", "the package that wants the old name"])
def test_scipy_is_not_postponed_where_that_would_be_noticed(scipy_like: Path, reason: str) -> None:
    """Then it is loaded as it always was."""
    if reason.startswith("a scipy"):
        (scipy_like / "scipy" / "__init__.py").write_text("")
    else:
        (scipy_like / "srmrpy.py").write_text("")

    done = python(MEANWHILE.replace("{use}", "pass"), scipy_like)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "loaded loaded"
