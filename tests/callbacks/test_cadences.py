"""Every callback refuses an invalid cadence or time in its constructor."""

from __future__ import annotations

import math

import pytest

from genlight import callbacks

CADENCES = {
    "Checkpoint": ("every_n_steps", {}),
    "Diagnosis": ("check_interval", {}),
    "Evaluate": ("every_n_steps", {}),
    "EvaluateCommand": ("every_n_steps", {"command": "true"}),
    "Heartbeat": ("interval_steps", {}),
    "LogMetrics": ("every_n_steps", {}),
    "ReplicaGuard": ("every_n_steps", {}),
    "WatchNonfinite": ("every_n_steps", {}),
    "WriteSamples": ("every_n_steps", {"directory": "samples"}),
}
TIMES = {
    "EvaluateCommand": ("time_limit_s", {"command": "true"}),
    "Goodput": ("every_s", {}),
    "JobProgress": ("line_every_s", {}),
    "StopRequests": ("max_runtime_s", {}),
    "SystemMonitor": ("every_s", {}),
}


@pytest.mark.parametrize("value", [-1, math.nan, 2.5, "10", True])
@pytest.mark.parametrize("name", CADENCES)
def test_a_cadence_that_is_not_an_integer_of_at_least_0_is_refused(name, value):
    argument, others = CADENCES[name]
    with pytest.raises((ValueError, TypeError), match=argument if not isinstance(value, str) else "."):
        getattr(callbacks, name)(**{**others, argument: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in TIMES for value in (-1.0, math.nan)),
        *((name, 0) for name in ("Goodput", "JobProgress", "SystemMonitor")),
        ("SystemMonitor", math.inf),
    ],
)
def test_a_time_that_makes_no_sense_is_refused(name, value):
    argument, others = TIMES[name]
    with pytest.raises(ValueError, match=argument):
        getattr(callbacks, name)(**{**others, argument: value})
