"""``gen_worker.trainer`` is importable if the real package is not installed, and hides nothing if it is."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import genlight.adapter
from genlight.adapter import compat
from support.messages import refusal

pytestmark = pytest.mark.promise(name="old names")


@pytest.fixture
def clean():
    """No stand-in in this process, before and after."""
    forget()
    yield
    forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] in ("gen_worker", "worldflux")]:
        del sys.modules[name]


WAYS = {
    "plain_python": ("", "gen_worker.trainer", "StepResult"),
    "a_module_of_it": ("", "gen_worker.trainer.contracts", "StepContext"),
    "the_adapter": ("import genlight.adapter\n", "gen_worker.trainer.helpers.optim", "OptimizerBundle"),
    "telemetry": ("import genlight.adapter\n", "worldflux.telemetry.wasr", "make_run_id"),
    "callbacks_after_reporters": ("import genlight.reporters\n", "worldflux.training.callbacks", "Callback"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fresh_interpreter_has_the_old_paths_after_any_import_of_genlight(way):
    first, module, name = WAYS[way]
    script = f"{first}import sys\nassert not [n for n in sys.modules if n.startswith(('gen_worker', 'worldflux'))]\n"
    script += f"from {module} import {name}\nassert {name}.__module__.startswith('genlight.'), {name}.__module__\n"
    subprocess.run([sys.executable, "-c", script], check=True)


def install_real(folder, layout):
    """The real package; with ``installed`` it is in the same folder as our files."""
    package = folder / "gen_worker"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "trainer").mkdir()
    (package / "trainer" / "__init__.py").write_text("StepResult = 'the real one'")
    if layout == "installed":
        shutil.copy(Path(compat.__file__).with_name("gen_worker_trainer.py"), package / "trainer.py")


@pytest.mark.parametrize("layout", ["first", "last", "installed"])
def test_the_real_package_wins_wherever_it_lies(tmp_path, layout):
    install_real(tmp_path, layout)
    add = f"sys.path.append({str(tmp_path)!r})" if layout == "last" else f"sys.path.insert(0, {str(tmp_path)!r})"
    script = f"import sys; {add}; import genlight.adapter; from gen_worker.trainer import StepResult; print(StepResult)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "the real one\n"


def test_a_real_package_on_a_path_that_is_added_later_wins(clean, tmp_path, monkeypatch):
    """A job's folder may contain it, and comes on the path long after genlight was imported."""
    compat.install()
    install_real(tmp_path, "first")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("gen_worker.trainer").StepResult == "the real one"


def test_every_public_name_of_the_adapter_is_offered_by_every_module(clean):
    compat.install()

    for part in ("", *(f".{name}" for name in compat.MODULES)):
        assert set(genlight.adapter.__all__) <= set(importlib.import_module(f"gen_worker.trainer{part}").__all__)


def test_every_way_to_write_the_import_works(clean):
    compat.install()
    namespace = {}

    exec(
        "import gen_worker\n"
        "import gen_worker.trainer.api as api\n"
        "from gen_worker import trainer\n"
        "from gen_worker.trainer import StepResult, contracts\n"
        "from gen_worker.trainer.contracts import StepContext\n"
        "assert gen_worker.trainer.api is api is trainer.api\n",
        namespace,
    )

    assert namespace["StepContext"] is genlight.adapter.StepContext
    assert namespace["contracts"] is sys.modules["gen_worker.trainer.contracts"]


def test_a_name_that_does_not_exist_is_an_import_error_that_says_so(clean):
    compat.install()

    with refusal(ImportError):
        exec("from gen_worker.trainer import StepResutl")
    with refusal(ModuleNotFoundError):
        importlib.import_module("gen_worker.trainer.absent")
    with refusal(AttributeError):
        importlib.import_module("gen_worker.trainer").api.absent


def test_a_second_installation_changes_nothing(clean):
    before = list(sys.meta_path)
    compat.install()
    assert sys.meta_path == before


def test_a_real_package_without_trainer_keeps_its_other_parts(clean, tmp_path, monkeypatch):
    package = tmp_path / "gen_worker"
    package.mkdir()
    (package / "__init__.py").write_text("real = True")
    (package / "other.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))

    compat.install()

    real = importlib.import_module("gen_worker")
    assert real.real
    assert importlib.import_module("gen_worker.other").x == 1
    assert importlib.import_module("gen_worker.trainer").StepResult is genlight.adapter.StepResult
    assert real.trainer is sys.modules["gen_worker.trainer"]


def test_the_real_worldflux_is_unchanged(clean, tmp_path, monkeypatch):
    (tmp_path / "worldflux").mkdir()
    (tmp_path / "worldflux" / "__init__.py").write_text("real = True")
    monkeypatch.syspath_prepend(str(tmp_path))

    compat.install()

    assert importlib.import_module("worldflux").real
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("worldflux.telemetry")
