"""Runtime concerns of a training job as Lightning callbacks; each works alone in any ``Trainer(callbacks=[…])``.

Names are resolved when they are first used (PEP 562): what lists and verifies checkpoints loads neither torch nor
Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..adapter.plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .checkpoint.checkpoint import Checkpoint
    from .checkpoint.checkpoint_io import DurableCheckpointIO
    from .evaluate import Evaluate
    from .hook.hook import Hook
    from .job_progress import JobProgress
    from .log_metrics import LogMetrics
    from .record_events import RecordEvents
    from .replica_guard import ReplicaGuard
    from .stop.stop_requests import StopRequests
    from .upload_artifacts import UploadArtifacts
    from .watch_hangs import WatchHangs
    from .watch_nonfinite import WatchNonfinite
    from .write_samples import WriteSamples
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".checkpoint.checkpoint": ("Checkpoint",),
            ".checkpoint.checkpoint_io": ("DurableCheckpointIO",),
            ".evaluate": ("Evaluate",),
            ".hook.hook": ("Hook",),
            ".job_progress": ("JobProgress",),
            ".log_metrics": ("LogMetrics",),
            ".record_events": ("RecordEvents",),
            ".replica_guard": ("ReplicaGuard",),
            ".stop.stop_requests": ("StopRequests",),
            ".upload_artifacts": ("UploadArtifacts",),
            ".watch_hangs": ("WatchHangs",),
            ".watch_nonfinite": ("WatchNonfinite",),
            ".write_samples": ("WriteSamples",),
        },
    )

__all__ = [
    "Checkpoint",
    "DurableCheckpointIO",
    "Evaluate",
    "Hook",
    "JobProgress",
    "LogMetrics",
    "RecordEvents",
    "UploadArtifacts",
    "ReplicaGuard",
    "StopRequests",
    "WatchHangs",
    "WatchNonfinite",
    "WriteSamples",
]
