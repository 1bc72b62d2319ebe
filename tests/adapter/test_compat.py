"""``gen_worker.trainer`` is importable where the real package is not, and stays out of the way where it is."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import genlight.adapter
from genlight.adapter import compat

MODULES_OF_THE_CONTRACT = [
    *("api", "contracts", "loop", "runtime", "orchestrated", "job_lifecycle", "authz", "resolve", "inputs"),
    *("arrow_feed", "model_runtime", "artifacts", "uploader", "reporting", "checkpointing", "helpers"),
    *("helpers.optim", "helpers.repro", "helpers.scalar", "subprocess_contract"),
]


@pytest.fixture
def clean():
    """No ``gen_worker`` in this process, before and after."""
    forget()
    yield
    forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "gen_worker"]:
        del sys.modules[name]


def test_importing_the_module_is_enough_in_a_fresh_interpreter():
    script = (
        "import genlight.adapter\n"
        "import sys; assert 'gen_worker' not in sys.modules\n"
        "import genlight.adapter.compat\n"
        "from gen_worker.trainer import StepResult\n"
        "assert StepResult is genlight.adapter.StepResult\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_loading_a_trainer_leaves_the_alias_to_the_moment_when_its_folder_is_on_the_path():
    """A job's folder may hold the real package, which an alias that was made before would hide."""
    script = (
        "import sys\n"
        "import genlight.adapter.module.plugin_loading, genlight.adapter.cli.command_line\n"
        "assert 'gen_worker' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_of_the_adapter_is_offered_by_every_module(clean):
    compat.install()

    for part in ("", *(f".{name}" for name in MODULES_OF_THE_CONTRACT)):
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

    with pytest.raises(ImportError, match=r"cannot import name 'StepResutl' from 'gen_worker.trainer'"):
        exec("from gen_worker.trainer import StepResutl")
    with pytest.raises(ModuleNotFoundError, match=r"gen_worker.trainer.absent"):
        importlib.import_module("gen_worker.trainer.absent")
    with pytest.raises(AttributeError, match=r"module 'gen_worker.trainer.api' has no attribute 'absent'"):
        sys.modules["gen_worker.trainer.api"].absent


def test_a_second_installation_changes_nothing(clean):
    compat.install()
    first = sys.modules["gen_worker.trainer"]

    compat.install()

    assert sys.modules["gen_worker.trainer"] is first


def test_the_real_package_is_left_alone(clean, tmp_path, monkeypatch):
    package = tmp_path / "gen_worker" / "trainer"
    package.mkdir(parents=True)
    (tmp_path / "gen_worker" / "__init__.py").touch()
    (package / "__init__.py").write_text("StepResult = 'the real one'")
    monkeypatch.syspath_prepend(str(tmp_path))

    compat.install()

    assert importlib.import_module("gen_worker.trainer").StepResult == "the real one"


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


def test_types_come_without_torch_and_lightning():
    script = (
        "import sys; from genlight.adapter import compat; compat.install()\n"
        "from gen_worker.trainer import StepContext, StepResult, TrainingJobSpec, load_trainer_plugin\n"
        "from gen_worker.trainer.reporting import TrainingReporter\n"
        "assert not {'torch', 'lightning'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.fixture
def without_worldflux():
    """No ``worldflux`` in this process, before and after."""

    def forget_worldflux():
        for name in [name for name in sys.modules if name.partition(".")[0] == "worldflux"]:
            del sys.modules[name]

    forget_worldflux()
    yield
    forget_worldflux()


def test_telemetry_is_importable_under_the_path_that_existing_code_uses(without_worldflux):
    compat.install()
    namespace = {}

    exec("from worldflux.telemetry.wasr import make_run_id, read_events, write_event", namespace)
    exec("import worldflux.telemetry.wasr", namespace)

    from genlight.reporters import telemetry

    assert all(namespace[name] is getattr(telemetry, name) for name in ("make_run_id", "read_events", "write_event"))
    with pytest.raises(ImportError, match=r"cannot import name 'absent' from 'worldflux\.telemetry\.wasr'"):
        exec("from worldflux.telemetry.wasr import absent")


def test_callbacks_are_importable_under_the_path_that_existing_code_uses(without_worldflux):
    compat.install()
    namespace = {}

    exec("from worldflux.training.callbacks import Callback, CallbackList, HeartbeatCallback", namespace)
    exec("from worldflux.training import Callback, EvalCallback, TrainingReportCallback", namespace)

    from genlight.callbacks import compat as six_hooks

    assert all(
        namespace[name] is getattr(six_hooks, name) for name in ("Callback", "CallbackList", "HeartbeatCallback")
    )


def test_the_real_worldflux_is_left_alone(without_worldflux, tmp_path, monkeypatch):
    (tmp_path / "worldflux").mkdir()
    (tmp_path / "worldflux" / "__init__.py").write_text("real = True")
    monkeypatch.syspath_prepend(str(tmp_path))

    compat.install()

    assert importlib.import_module("worldflux").real
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("worldflux.telemetry")
