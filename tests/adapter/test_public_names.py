"""The public names, and the cost of importing them."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import genlight.adapter
import genlight.adapter.helpers
import genlight.callbacks
import genlight.callbacks.checkpoint
import genlight.reporters
import genlight.reporters.uploads

PACKAGES = (genlight.adapter, genlight.callbacks, genlight.reporters)
LAZY = (*PACKAGES, genlight.callbacks.checkpoint, genlight.reporters.uploads)

# Whoever changes a list below changes what users import: say so in the changelog.
PUBLIC = {
    "genlight.adapter": """
        TRAINER_API_VERSION ArrowDataModule ArrowFeed ArtifactUploader ArtifactWriter AuthError BatchSource
        BrokenCheckpointError CheckpointError CompletedContext ContractError ContractModule EvaluationError
        EventLogError FSDP2Strategy FunctionDataModule GenlightError GenlightCLI HookOrderError InputError
        JobContext Minibatches
        MonitorError NonfiniteError
        OptimizerBundle RankFailedError RecoveryError ReplayBuffer ReplayFeed ReplayWriterError ReplicaDriftError
        ResumeDifferenceError
        RunBeginContext RunEndContext RunOptions RunState StartupContractError
        StepContext StepControlHints StepResult ThreadLimitError TrainerAuthContext TrainerPathError TrainerPlugin
        TrainingCanceled
        TrainingHungError TrainingJobSpec TrainingReporter UnstorableStateError UnwrittenCheckpointError UploadError
        build_default_adamw_bundle current_job_context load_components load_trainable_module_checkpoint
        load_trainer_plugin read_events run_job run_training_loop run_training_runtime_from_env
        save_trainable_module_checkpoint seed_everything to_float_scalar
    """,
    "genlight.callbacks": """
        Checkpoint CheckpointHook Diagnosis DurableCheckpointIO EarlyStopping
        Evaluate EvaluateCommand EvaluationHook Goodput Heartbeat Hook
        JobProgress LogMetrics MetricsHook ProfileSteps Recover ReplicaGuard StopRequests SystemMonitor TrainJobStatus
        TrainerHook TrainerHookAdapter TrainerState UploadArtifacts WatchHangs WatchNonfinite WriteSamples
    """,
    "genlight.reporters": """
        EventLog EventLogger RecordEvents Violation event_schema follow read_events read_metrics validate_events
    """,
}

LIGHT = (
    "genlight.adapter",
    "genlight.adapter.cli",
    "genlight.adapter.cli.command_line",
    "genlight.adapter.cli.events",
    "genlight.adapter.cli.run",
    "genlight.adapter.cli.uploads",
    "genlight.adapter.cluster.job_context",
    "genlight.adapter.compat",
    "genlight.adapter.runner",
    "genlight.adapter.runner.__main__",
    "genlight.adapter.contract.types",
    "genlight.adapter.contract.exceptions",
    "genlight.adapter.plumbing.failures",
    "genlight.adapter.job.spec",
    "genlight.adapter.module.plugin_loading",
    "genlight.adapter.run.start",
    "genlight.adapter.run.run",
    "genlight.adapter.job.config",
    "genlight.callbacks",
    "genlight.callbacks.checkpoint",
    "genlight.callbacks.checkpoint.format.record",
    "genlight.callbacks.checkpoint.selection",
    "genlight.callbacks.checkpoint.storage",
    "genlight.callbacks.stop.signals",
    "genlight.reporters",
    "genlight.adapter.plumbing.durable",
    "genlight.reporters.events.event_log",
    "genlight.reporters.events.reader",
    "genlight.reporters.events.validation",
    "genlight.adapter.plumbing.imports",
    "genlight.adapter.plumbing.redaction",
    "genlight.adapter.plumbing.urls",
)
"""Commands that answer without torch: help, spec checks, listings, a finished job."""


def run_python(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_public_names_are_exactly_these(package):
    assert sorted(package.__all__) == sorted(PUBLIC[package.__name__].split())


def test_names_of_the_contract_are_importable_but_not_listed():
    """Protocols of an orchestrator, and names that existing configurations and classes use."""
    for name in genlight.adapter.__contract__:
        assert getattr(genlight.adapter, name) is not None
        assert name not in genlight.adapter.__all__


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_dir_shows_only_public_names(package):
    """Notebooks and shells use it for completion."""
    assert [name for name in dir(package) if not name.startswith("__")] == package.__all__


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_a_name_that_is_not_public_is_an_attribute_error_that_says_so(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Absent'"):
        package.Absent


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_are_resolved_lazily_and_nothing_that_hides_a_misspelled_one(package):
    tree = ast.parse(Path(package.__file__).read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {("." * node.level + node.module, alias.name) for node in guarded.body for alias in node.names}
    assert all(getattr(package, name) is not None for _, name in seen)
    assert {name for _, name in seen} == {*package.__all__, *getattr(package, "__contract__", ())}
    assert not any(isinstance(node, ast.FunctionDef) for node in tree.body)


def test_commands_that_do_not_train_load_neither_torch_nor_lightning():
    script = "import importlib, sys\n" + "\n".join(
        f"importlib.import_module({name!r})\n"
        f"heavy = {{'torch', 'lightning', 'pyarrow', 'numpy'}} & set(sys.modules)\n"
        f"heavy -= {{'numpy', 'pyarrow'}}\n"
        f"assert not heavy, ({name!r}, heavy)"
        for name in LIGHT
    )

    done = run_python(script)

    assert done.returncode == 0, done.stderr


def test_checks_of_urls_and_secrets_load_no_http_client():
    done = run_python(
        "import sys, genlight.adapter.plumbing.urls, genlight.adapter.plumbing.redaction, genlight.adapter.job.config\n"
        "assert not {'httpx2', 'idna', 'ssl'} & set(sys.modules), set(sys.modules)"
    )

    assert done.returncode == 0, done.stderr


def test_names_of_the_vocabulary_load_neither_torch_nor_lightning():
    heavy = {
        "ContractModule",
        "run_training_loop",
        "ArrowDataModule",
        "FunctionDataModule",
        "Minibatches",
        "OptimizerBundle",
        "ReplayBuffer",
        "ReplayFeed",
        "FSDP2Strategy",
        "GenlightCLI",
    }
    heavy |= set(genlight.adapter.helpers.__all__)
    light = sorted(set(genlight.adapter.__all__) - heavy - {"ArrowFeed", "load_components"})

    done = run_python(
        f"import sys; from genlight.adapter import {', '.join(light)}\n"
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_no_import_of_genlight_makes_a_second_copy_under_a_bare_name():
    modules = [
        ".".join(("genlight", *path.relative_to(root.parent).with_suffix("").parts)).removesuffix(".__init__")
        for root in (Path(package.__file__).parent for package in PACKAGES)
        for path in sorted(root.rglob("*.py"))
        # templates are no modules, and one module needs transformers
        if path.name not in ("__main__.py", "hugging_face.py") and path.parent.name != "project"
    ]
    script = "\n".join(["import importlib, sys", *(f"importlib.import_module({name!r})" for name in modules)])
    script += (
        "\nbare = [name for name in sys.modules if name.partition('.')[0] in ('adapter', 'callbacks', 'reporters')]"
        "\nassert not bare, bare"
    )

    done = run_python(script)

    assert len(modules) > 80
    assert done.returncode == 0, done.stderr


def test_pytest_makes_no_second_copy_under_a_bare_name():
    """A second copy answers imports of ``gen_worker`` too, with classes of its own."""
    bare = [name for name in sys.modules if name.partition(".")[0] in ("adapter", "callbacks", "reporters")]
    assert bare == []


def test_the_version_is_that_of_the_distribution():
    import genlight.adapter
    from genlight.adapter.cli.command_line import version_text

    assert genlight.adapter.__version__ == importlib.metadata.version("genlight")
    assert f"genlight {importlib.metadata.version('genlight')} " in version_text()
