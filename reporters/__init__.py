"""Writers of what happened: event log, Lightning logger, uploads. They know no Lightning loop.

Names are resolved when they are first used (PEP 562), so that reading an event log loads neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .event_log import EventLog
    from .event_logger import EventLogger
    from .event_reader import follow, read_events
    from .event_schema import event_schema
    from .event_validation import Violation, validate_events

_HOME = {
    "EventLog": "event_log",
    "EventLogger": "event_logger",
    "Violation": "event_validation",
    "event_schema": "event_schema",
    "follow": "event_reader",
    "read_events": "event_reader",
    "validate_events": "event_validation",
}

__all__ = [
    "EventLog",
    "EventLogger",
    "Violation",
    "event_schema",
    "follow",
    "read_events",
    "validate_events",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
