"""Writers of what happened: event log, Lightning logger, uploads. They know no Lightning loop.

Names are resolved when they are first used (PEP 562), so that reading an event log loads neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..adapter.plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .events.event_log import EventLog as EventLog
    from .events.event_logger import EventLogger as EventLogger
    from .events.reader import follow as follow, read_events as read_events
    from .events.schema import event_schema as event_schema
    from .events.validation import Violation as Violation, validate_events as validate_events
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            ".events.event_log": ("EventLog",),
            ".events.event_logger": ("EventLogger",),
            ".events.reader": ("follow", "read_events"),
            ".events.schema": ("event_schema",),
            ".events.validation": ("Violation", "validate_events"),
        },
    )
