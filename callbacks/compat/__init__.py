"""The six-hook style: callbacks that receive the trainer at the beginning and end of training, of epochs and of steps.

`callback_list` has the callbacks and the list that runs them, `trainer_view` the trainer that they receive.
Names are resolved when they are first used (PEP 562). May import all callbacks, the reporters, the plumbing and the
contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...adapter.plumbing.imports import lazy_exports

if TYPE_CHECKING:
    from .callback_list import (
        Callback as Callback,
        CallbackList as CallbackList,
        CheckpointCallback as CheckpointCallback,
        DiagnosisCallback as DiagnosisCallback,
        EarlyStoppingCallback as EarlyStoppingCallback,
        EvalCallback as EvalCallback,
        HeartbeatCallback as HeartbeatCallback,
        LoggingCallback as LoggingCallback,
        ProgressCallback as ProgressCallback,
        TrainingReportCallback as TrainingReportCallback,
    )
    from .trainer_view import (
        TrainerView as TrainerView,
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
