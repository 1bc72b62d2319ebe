"""Writers of what happened: event log, Lightning logger, uploads. They know no Lightning loop.

Names are resolved when they are first used (PEP 562), so that reading an event log loads neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .event_log import EventLog
    from .event_logger import EventLogger
    from .event_reader import follow, read_events
    from .event_schema import event_schema
    from .event_validation import Violation, validate_events
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".event_log": ("EventLog",),
            ".event_logger": ("EventLogger",),
            ".event_reader": ("follow", "read_events"),
            ".event_schema": ("event_schema",),
            ".event_validation": ("Violation", "validate_events"),
        },
    )

__all__ = [
    "EventLog",
    "EventLogger",
    "Violation",
    "event_schema",
    "follow",
    "read_events",
    "validate_events",
]
