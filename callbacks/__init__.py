"""Lightning callbacks for training jobs; each also works by itself in any ``Trainer(callbacks=[…])``.

- reports: `log_metrics`, `logged_steps`, `telemetry`, `job_progress`, `profile_steps`, `train_job_status`
- files: `checkpoint`, `write_samples`, `upload_artifacts`
- decisions: `stop`, `early_stopping`, `evaluation`
- checks: `health`, `finite`, `replica_guard`, `watch_hangs`, `witness`
- other styles of callbacks: `other_styles`, `trainer_hooks`, `compat`, `hugging_face`
- shared code: `hook`, `lightning_internals`, `optimizer_state`, `rank_channel`

Names are resolved when they are first used (PEP 562), so that code which lists and verifies checkpoints loads neither
torch nor Lightning. May import the reporters, the cluster, the plumbing and the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..adapter.plumbing.imports import lazy_exports

if TYPE_CHECKING:
    from .checkpoint.plugins import DurableCheckpointIO as DurableCheckpointIO
    from .checkpoint.policy import Checkpoint as Checkpoint
    from .early_stopping import EarlyStopping as EarlyStopping
    from .evaluation.evaluate import Evaluate as Evaluate
    from .evaluation.evaluate_command import EvaluateCommand as EvaluateCommand
    from .health.diagnosis import Diagnosis as Diagnosis, WatchNonfinite as WatchNonfinite
    from .health.recover import Recover as Recover
    from .hook.hook import Hook as Hook
    from .job_progress import JobProgress as JobProgress
    from .log_metrics import LogMetrics as LogMetrics
    from .profile_steps import ProfileSteps as ProfileSteps
    from .replica_guard import ReplicaGuard as ReplicaGuard
    from .stop.stop_requests import StopRequests as StopRequests
    from .telemetry import Goodput as Goodput, Heartbeat as Heartbeat, SystemMonitor as SystemMonitor
    from .train_job_status import TrainJobStatus as TrainJobStatus
    from .trainer_hooks import (
        CheckpointHook as CheckpointHook,
        EvaluationHook as EvaluationHook,
        MetricsHook as MetricsHook,
        TrainerHook as TrainerHook,
        TrainerHookAdapter as TrainerHookAdapter,
        TrainerState as TrainerState,
    )
    from .upload_artifacts import UploadArtifacts as UploadArtifacts
    from .watch_hangs import WatchHangs as WatchHangs
    from .write_samples import WriteSamples as WriteSamples
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
