"""Records of a run: its event log and Lightning logger (`events`), `telemetry`, and `uploads`.

None of them depends on a training loop. Names are resolved when they are first used (PEP 562), so that reading an event
log loads neither torch nor Lightning. May import the cluster, the plumbing and the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..adapter.plumbing.imports import lazy_exports

if TYPE_CHECKING:
    from .events.event import event_schema as event_schema
    from .events.event_log import EventLog as EventLog
    from .events.event_logger import EventLogger as EventLogger, RecordEvents as RecordEvents
    from .events.reader import follow as follow, read_events as read_events, read_metrics as read_metrics
    from .events.validation import Violation as Violation, validate_events as validate_events
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
