"""The binding of a trainer class, a job and a feed to PyTorch Lightning.

Names are resolved when they are first used (PEP 562), so that importing the package loads neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..reporters.events.reader import read_events
    from .contract.exceptions import (
        AuthError,
        BrokenCheckpointError,
        CheckpointError,
        ContractError,
        EventLogError,
        GenlightError,
        HookOrderError,
        InputError,
        RankFailed,
        ReplicaDriftError,
        StartupContractError,
        TrainingCanceled,
        TrainingHung,
        UnstorableStateError,
        UnwrittenCheckpointError,
        UploadError,
    )
    from .contract.run_state import RunState
    from .contract.types import (
        TRAINER_API_VERSION,
        ArrowFeedConfig,
        ArtifactUploader,
        ArtifactWriter,
        BatchSource,
        DownloadedInputs,
        InputDownloader,
        JobLifecycleClient,
        LifecycleLease,
        ModelRuntimeConfig,
        ModelRuntimeLoader,
        ResolveClient,
        ResolvedRef,
        StepContext,
        StepControlHints,
        StepResult,
        TrainerAuthContext,
        TrainerPlugin,
        TrainingJobSpec,
        TrainingReporter,
    )
    from .feed import ArrowDataModule, ArrowFeed, ParquetArrowBatchFeeder
    from .feed.mock import MockDataModule
    from .helpers import (
        OptimizerBundle,
        build_default_adamw_bundle,
        load_trainable_module_checkpoint,
        save_trainable_module_checkpoint,
        seed_everything,
        to_float_scalar,
    )
    from .inputs import load_components
    from .module.module import ContractModule
    from .module.plugin_loading import load_trainer_plugin
    from .run.control_plane import HttpLifecycleClient
    from .run.run import RunOptions, run_job, run_training_runtime_from_env
    from .training_loop import run_training_loop
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "..reporters.events.reader": ("read_events",),
            ".contract.types": (
                "TRAINER_API_VERSION",
                "ArrowFeedConfig",
                "ArtifactUploader",
                "ArtifactWriter",
                "BatchSource",
                "DownloadedInputs",
                "InputDownloader",
                "JobLifecycleClient",
                "LifecycleLease",
                "ModelRuntimeConfig",
                "ModelRuntimeLoader",
                "ResolveClient",
                "ResolvedRef",
                "StepContext",
                "StepControlHints",
                "StepResult",
                "TrainerAuthContext",
                "TrainerPlugin",
                "TrainingJobSpec",
                "TrainingReporter",
            ),
            ".contract.exceptions": (
                "AuthError",
                "BrokenCheckpointError",
                "CheckpointError",
                "ContractError",
                "EventLogError",
                "GenlightError",
                "HookOrderError",
                "InputError",
                "RankFailed",
                "ReplicaDriftError",
                "StartupContractError",
                "TrainingCanceled",
                "TrainingHung",
                "UnstorableStateError",
                "UnwrittenCheckpointError",
                "UploadError",
            ),
            ".feed": ("ArrowDataModule", "ArrowFeed", "ParquetArrowBatchFeeder"),
            ".helpers": (
                "OptimizerBundle",
                "build_default_adamw_bundle",
                "load_trainable_module_checkpoint",
                "save_trainable_module_checkpoint",
                "seed_everything",
                "to_float_scalar",
            ),
            ".inputs": ("load_components",),
            ".run.control_plane": ("HttpLifecycleClient",),
            ".module.plugin_loading": ("load_trainer_plugin",),
            ".feed.mock": ("MockDataModule",),
            ".module.module": ("ContractModule",),
            ".run.run": ("RunOptions", "run_job", "run_training_runtime_from_env"),
            ".contract.run_state": ("RunState",),
            ".training_loop": ("run_training_loop",),
        },
    )

__all__ = [
    "TRAINER_API_VERSION",
    "ArrowDataModule",
    "ArrowFeed",
    "ArrowFeedConfig",
    "ArtifactUploader",
    "ArtifactWriter",
    "AuthError",
    "BatchSource",
    "BrokenCheckpointError",
    "CheckpointError",
    "ContractError",
    "ContractModule",
    "DownloadedInputs",
    "EventLogError",
    "GenlightError",
    "HookOrderError",
    "HttpLifecycleClient",
    "InputDownloader",
    "InputError",
    "JobLifecycleClient",
    "LifecycleLease",
    "MockDataModule",
    "ModelRuntimeConfig",
    "ModelRuntimeLoader",
    "OptimizerBundle",
    "ParquetArrowBatchFeeder",
    "RankFailed",
    "ReplicaDriftError",
    "ResolveClient",
    "ResolvedRef",
    "RunOptions",
    "RunState",
    "StartupContractError",
    "StepContext",
    "StepControlHints",
    "StepResult",
    "TrainerAuthContext",
    "TrainerPlugin",
    "TrainingCanceled",
    "TrainingHung",
    "TrainingJobSpec",
    "TrainingReporter",
    "UnstorableStateError",
    "UnwrittenCheckpointError",
    "UploadError",
    "build_default_adamw_bundle",
    "load_components",
    "load_trainable_module_checkpoint",
    "load_trainer_plugin",
    "read_events",
    "run_job",
    "run_training_loop",
    "run_training_runtime_from_env",
    "save_trainable_module_checkpoint",
    "seed_everything",
    "to_float_scalar",
]
