"""Runtime concerns of a training job as Lightning callbacks; each works alone in any ``Trainer(callbacks=[…])``.

Names are resolved when they are first used (PEP 562): what lists and verifies checkpoints loads neither torch nor
Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.checkpoint import Checkpoint
    from .checkpoint.checkpoint_io import DurableCheckpointIO
    from .evaluate import Evaluate
    from .hook import Hook
    from .job_progress import JobProgress
    from .log_metrics import LogMetrics
    from .record_events import RecordEvents
    from .replica_guard import ReplicaGuard
    from .stop_requests import StopRequests
    from .upload_artifacts import UploadArtifacts
    from .watch_hangs import WatchHangs
    from .write_samples import WriteSamples

_HOME = {
    "Checkpoint": "checkpoint.checkpoint",
    "DurableCheckpointIO": "checkpoint.checkpoint_io",
    "Evaluate": "evaluate",
    "Hook": "hook",
    "JobProgress": "job_progress",
    "LogMetrics": "log_metrics",
    "RecordEvents": "record_events",
    "UploadArtifacts": "upload_artifacts",
    "ReplicaGuard": "replica_guard",
    "StopRequests": "stop_requests",
    "WatchHangs": "watch_hangs",
    "WriteSamples": "write_samples",
}

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
    "WriteSamples",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
