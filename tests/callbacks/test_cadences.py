"""A cadence or a time that makes no sense is refused where it is given, by every callback."""

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


@pytest.mark.parametrize("given", [-1, math.nan, 2.5, "10", True])
@pytest.mark.parametrize("name", CADENCES)
def test_a_cadence_that_is_not_a_whole_number_from_0_on_is_refused(name, given):
    argument, others = CADENCES[name]
    with pytest.raises((ValueError, TypeError), match=argument if not isinstance(given, str) else "."):
        getattr(callbacks, name)(**{**others, argument: given})


@pytest.mark.parametrize("given", [-1.0, math.nan])
@pytest.mark.parametrize("name", TIMES)
def test_a_time_that_is_negative_or_nan_is_refused(name, given):
    argument, others = TIMES[name]
    with pytest.raises(ValueError, match=argument):
        getattr(callbacks, name)(**{**others, argument: given})
