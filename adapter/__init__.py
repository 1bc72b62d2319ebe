"""The binding of a trainer class, a job and a feed to PyTorch Lightning.

`training_loop.py` trains for a caller with its own reporter, and `ray.py` in the workers of Ray Train. CONTRIBUTING.md
lists the folders.

Names are resolved when they are first used (PEP 562), so that importing the package loads neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import compat as compat  # so that `gen_worker.trainer` and the modules of `worldflux` can be imported
from .plumbing.imports import lazy_exports

__version__: str
"""Version of the installed distribution, looked up when it is first used."""

__contract__ = (
    *("ArrowFeedConfig", "DownloadedInputs", "InputDownloader", "JobLifecycleClient", "LifecycleLease"),
    *("ModelRuntimeConfig", "ModelRuntimeLoader", "ParquetArrowBatchFeeder", "ResolveClient", "ResolvedRef"),
    *("MockDataModule", "SlurmEnvironment", "bind_job_context", "build_job_context", "expand_hostlist"),
)
"""Names for orchestrators, schedulers and existing trainer classes; they can be imported, but `__all__` lacks them."""

if TYPE_CHECKING:
    from ..reporters.events.reader import read_events as read_events
    from .cli.lightning_cli import GenlightCLI as GenlightCLI
    from .cluster.job_context import (
        JobContext as JobContext,
        build_job_context as build_job_context,
        current_job_context as current_job_context,
        expand_hostlist as expand_hostlist,
    )
    from .cluster.placement import SlurmEnvironment as SlurmEnvironment
    from .contract.exceptions import (
        AuthError as AuthError,
        BrokenCheckpointError as BrokenCheckpointError,
        CheckpointError as CheckpointError,
        ContractError as ContractError,
        EvaluationError as EvaluationError,
        EventLogError as EventLogError,
        GenlightError as GenlightError,
        HookOrderError as HookOrderError,
        InputError as InputError,
        MonitorError as MonitorError,
        NonfiniteError as NonfiniteError,
        RankFailedError as RankFailedError,
        RecoveryError as RecoveryError,
        ReplayWriterError as ReplayWriterError,
        ReplicaDriftError as ReplicaDriftError,
        ResumeDifferenceError as ResumeDifferenceError,
        StartupContractError as StartupContractError,
        ThreadLimitError as ThreadLimitError,
        TrainerPathError as TrainerPathError,
        TrainingCanceled as TrainingCanceled,
        TrainingHungError as TrainingHungError,
        UnstorableStateError as UnstorableStateError,
        UnwrittenCheckpointError as UnwrittenCheckpointError,
        UploadError as UploadError,
    )
    from .contract.types import (
        TRAINER_API_VERSION as TRAINER_API_VERSION,
        ArrowFeedConfig as ArrowFeedConfig,
        ArtifactUploader as ArtifactUploader,
        ArtifactWriter as ArtifactWriter,
        BatchSource as BatchSource,
        DownloadedInputs as DownloadedInputs,
        InputDownloader as InputDownloader,
        JobLifecycleClient as JobLifecycleClient,
        LifecycleLease as LifecycleLease,
        ModelRuntimeConfig as ModelRuntimeConfig,
        ModelRuntimeLoader as ModelRuntimeLoader,
        ResolveClient as ResolveClient,
        ResolvedRef as ResolvedRef,
        RunState as RunState,
        StepContext as StepContext,
        StepControlHints as StepControlHints,
        StepResult as StepResult,
        TrainerAuthContext as TrainerAuthContext,
        TrainerPlugin as TrainerPlugin,
        TrainingJobSpec as TrainingJobSpec,
        TrainingReporter as TrainingReporter,
    )
    from .feed.arrow_feed import ArrowFeed as ArrowFeed, ParquetArrowBatchFeeder as ParquetArrowBatchFeeder
    from .feed.data_module import (
        ArrowDataModule as ArrowDataModule,
        FunctionDataModule as FunctionDataModule,
        MockDataModule as MockDataModule,
    )
    from .feed.experience import (
        Minibatches as Minibatches,
        ReplayBuffer as ReplayBuffer,
        ReplayFeed as ReplayFeed,
    )
    from .gradients.fsdp.strategy import FSDP2Strategy as FSDP2Strategy
    from .helpers import (
        OptimizerBundle as OptimizerBundle,
        build_default_adamw_bundle as build_default_adamw_bundle,
        load_trainable_module_checkpoint as load_trainable_module_checkpoint,
        save_trainable_module_checkpoint as save_trainable_module_checkpoint,
        seed_everything as seed_everything,
        to_float_scalar as to_float_scalar,
    )
    from .helpers.components import load_components as load_components
    from .module.module import ContractModule as ContractModule
    from .module.plugin_loading import load_trainer_plugin as load_trainer_plugin
    from .run.run import (
        RunOptions as RunOptions,
        run_job as run_job,
        run_training_runtime_from_env as run_training_runtime_from_env,
    )
    from .runner.contexts import (
        CompletedContext as CompletedContext,
        RunBeginContext as RunBeginContext,
        RunEndContext as RunEndContext,
        bind_job_context as bind_job_context,
    )
    from .training_loop import run_training_loop as run_training_loop
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __contract__)
