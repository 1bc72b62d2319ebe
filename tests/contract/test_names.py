"""Every name and module of the older runtime's import path, and loading a trainer by its path."""

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genlight.adapter
from genlight.adapter import StepContext, TrainerPathError, compat, load_trainer_plugin
from genlight.adapter.contract.types import REQUIRED_HOOKS
from genlight.adapter.module.plugin_loading import missing_hooks, optional_hook
from support.messages import refusal

pytestmark = pytest.mark.promise(name="old names")

OLD = {
    "": """
        ArtifactUploader ArtifactWriter DownloadedInputs InputDownloader JobLifecycleClient LifecycleLease
        ModelRuntimeConfig ModelRuntimeLoader OptimizerBundle build_default_adamw_bundle PreparedBatchT RawBatchT StateT
        ResolveClient ResolvedRef StepControlHints StepContext StepResult TrainerAuthContext TrainerEndpointContract
        TrainerPlugin TrainingCanceled TrainingJobSpec TrainingReporter load_trainer_plugin
        load_trainable_module_checkpoint read_subprocess_contract run_training_runtime_from_env
        save_trainable_module_checkpoint seed_everything to_float_scalar TrainerSubprocessContractV1
        write_subprocess_contract run_training_loop
    """,
    ".api": "load_trainer_plugin",
    ".arrow_feed": "ArrowBatchFeeder ArrowFeedConfig ParquetArrowBatchFeeder",
    ".artifacts": "ArtifactWriter",
    ".authz": "TrainerAuthContext",
    ".checkpointing": "load_trainable_module_checkpoint save_trainable_module_checkpoint",
    ".contracts": """
        BatchProvider CheckpointingTrainerPlugin PreparedBatchT RawBatchT StateT StepControlHints StepContext StepResult
        TrainerEndpointContract TrainerPlugin TrainingJobSpec TrainingReporter
    """,
    ".helpers": "OptimizerBundle build_default_adamw_bundle seed_everything to_float_scalar",
    ".helpers.optim": "OptimizerBundle build_default_adamw_bundle",
    ".helpers.repro": "seed_everything",
    ".helpers.scalar": "to_float_scalar",
    ".inputs": "DownloadedInputs InputDownloader ModelRefDownloader",
    ".job_lifecycle": "JobLifecycleClient LifecycleLease",
    ".loop": "TrainingCanceled run_training_loop",
    ".model_runtime": "ModelRuntimeConfig ModelRuntimeLoader",
    ".orchestrated": "ArtifactUploadError InputMaterializationError StartupContractError is_truthy",
    ".reporting": "ReporterEvent",
    ".resolve": "ResolveClient ResolvedRef",
    ".runtime": "run_training_runtime_from_env",
    ".subprocess_contract": "TrainerSubprocessContractV1 read_subprocess_contract write_subprocess_contract",
    ".uploader": "ArtifactUploader ArtifactUploadError",
}
"""Public names by module, as the older package had them."""

PAIRS = [(module, name) for module, names in OLD.items() for name in names.split()]


@pytest.fixture(autouse=True)
def _alias() -> Iterator[None]:
    """The alias, made only for this test."""
    forget()
    compat.install()
    yield
    forget()


def forget() -> None:
    """No module of that path."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "gen_worker"]:
        del sys.modules[name]


@pytest.mark.parametrize(("module", "name"), PAIRS, ids=[f"{module}.{name}" for module, name in PAIRS])
def test_a_name_is_importable_from_the_module_that_had_it(module: str, name: str) -> None:
    """The import is `from … import …`; names of `genlight.adapter` are the same objects."""
    namespace: dict[str, Any] = {}
    exec(f"from gen_worker.trainer{module} import {name} as it", namespace)
    assert namespace["it"] is not None
    if name in genlight.adapter.__all__ and name != "run_training_runtime_from_env":
        assert namespace["it"] is getattr(genlight.adapter, name)
    assert name in importlib.import_module(f"gen_worker.trainer{module}").__all__


GENERIC = '''
from dataclasses import dataclass
from typing import Any

from gen_worker.trainer.contracts import (
    CheckpointingTrainerPlugin, PreparedBatchT, RawBatchT, StateT, StepContext, StepResult, TrainerEndpointContract,
    TrainerPlugin,
)


@dataclass
class State:
    steps: int = 0


class Base(TrainerEndpointContract[StateT, RawBatchT, PreparedBatchT]):
    """A generic of the project's own."""

    def setup(self, ctx: StepContext) -> None: ...

    def prepare_batch(self, raw_batch, state, ctx):
        return raw_batch

    def state_dict(self, state):
        return {}

    def load_state_dict(self, state, payload, ctx): ...


class Typed(Base[State, dict[str, Any], int]):
    def configure(self, ctx: StepContext) -> State:
        return State()

    def train_step(self, batch: int, state: State, ctx: StepContext) -> StepResult:
        state.steps += 1
        return StepResult(metrics={"loss": 1.0 / state.steps})


class WithFiles(Typed, CheckpointingTrainerPlugin):
    def save_checkpoint(self, *, state, step, output_dir, final, ctx):
        return None
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module and gives its name."""

    def write(source: str) -> str:
        name = f"contract_names_{abs(hash(str(tmp_path)))}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def test_a_class_that_inherits_from_the_generic_base_is_a_trainer(module: Any) -> None:
    """Only the module is named; the class is found because no other one has every hook."""
    name = module(GENERIC.partition("class WithFiles")[0])
    assert type(load_trainer_plugin(name)).__name__ == "Typed"


@pytest.mark.parametrize(
    ("cls", "missing", "optional"),
    [("Base", ["configure", "train_step"], []), ("Typed", [], []), ("WithFiles", [], ["save_checkpoint"])],
)
def test_a_hook_that_only_a_protocol_has_counts_as_missing(
    module: Any, cls: str, missing: list[str], optional: list[str]
) -> None:
    """Inherited ones do nothing: a class without `train_step` would not train, one without files has no such hooks."""
    target = getattr(importlib.import_module(module(GENERIC)), cls)
    assert missing_hooks(target) == missing
    hooks = ("save_checkpoint", "load_checkpoint", "rollout", "evaluate")
    assert [hook for hook in hooks if optional_hook(target, hook) is not None] == optional


def test_a_class_that_inherits_from_the_generic_base_trains_and_resumes(project: Any) -> None:
    """The class has no files: the base only declares the hooks for them."""
    source = GENERIC + "\n\nTrainer = Typed\n"
    assert project.run(source, max_steps=2, checkpoint_every=1) == 0
    assert project.run(source, max_steps=3, resume_from_latest=True) == 0
    assert (project.events[-1]["event"], project.events[-1]["step"]) == ("completed", 3)


@pytest.mark.parametrize("path", ["{module}", "{module}:Absent", ""])
def test_a_path_that_does_not_lead_to_one_trainer_is_a_type_error_and_a_value_error(module: Any, path: str) -> None:
    """The older runtime raised the one for classes and the other for paths; callers catch either."""
    with pytest.raises(TrainerPathError) as raised:
        load_trainer_plugin(path.format(module=module(GENERIC)))
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ValueError)


def test_a_subprocess_contract_survives_its_file(tmp_path: Path) -> None:
    from gen_worker.trainer.subprocess_contract import (  # type: ignore[import-not-found]
        TrainerSubprocessContractV1,
        read_subprocess_contract,
        write_subprocess_contract,
    )

    contract = TrainerSubprocessContractV1(trainer_plugin="m:C", job_spec_path="/j.json", extra_env={"A": "1"})
    write_subprocess_contract(tmp_path / "new" / "c.json", contract)
    assert read_subprocess_contract(tmp_path / "new" / "c.json") == contract
    with refusal(ValueError):
        TrainerSubprocessContractV1(trainer_plugin="m:C")
    with refusal(ValueError):
        TrainerSubprocessContractV1.from_json({"contract_version": "v2"})
    (tmp_path / "list.json").write_text("[]")
    with refusal(ValueError):
        read_subprocess_contract(tmp_path / "list.json")


REFERENCE = (Path(genlight.adapter.__file__).parent / "README.md").read_text()
OLD_NAMES = (Path(genlight.adapter.__file__).parent / "old_names.md").read_text()
NAMED = sorted(
    {
        name
        for row in OLD_NAMES.partition("## Names")[2].partition("## Behavior")[0].splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
)
"""Names in the first column of the reference's table."""


def test_a_name_that_the_reference_calls_the_same_is_the_object_of_genlight() -> None:
    module = importlib.import_module("gen_worker.trainer")
    rows = [row.split("|") for row in OLD_NAMES.splitlines() if row.startswith("| `")]
    same = {name for row in rows if row[2].strip() == "same" for name in re.findall(r"`(\w+)`", row[1])} & set(NAMED)
    assert len(same) > 20
    assert all(getattr(module, name) is getattr(genlight.adapter, name) for name in same)


def test_the_reference_has_every_name_and_module_of_the_older_path() -> None:
    assert set(NAMED) == {name for _, name in PAIRS}
    listed = OLD_NAMES.partition("# The old contract")[2].partition("## Names")[0]
    assert set(compat.MODULES) <= set(re.findall(r"`([\w.]+)`", listed))
    assert {module.removeprefix(".") for module in OLD if module} <= set(compat.MODULES)


def test_the_reference_describes_every_hook_and_every_field_of_the_context() -> None:
    hooks = [
        *REQUIRED_HOOKS,
        "save_checkpoint",
        "load_checkpoint",
        "generate_sample",
        "evaluate",
        "rollout",
        "trainer_hooks",
    ]
    sections = re.findall(r"^### (\w+)$", REFERENCE.partition("## StepContext")[0], re.MULTILINE)
    assert sorted(sections) == sorted(hooks)
    rows = REFERENCE.partition("## StepContext")[2].partition("###")[0]
    cells = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    fields = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(fields) == sorted(["step", *(field.name for field in dataclasses.fields(StepContext))])
