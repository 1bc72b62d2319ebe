"""Every callback refuses an invalid cadence or time in its constructor."""

from __future__ import annotations

import math

import pytest

from genlight import callbacks

OTHERS = {"EvaluateCommand": {"command": "true"}, "WriteSamples": {"directory": "samples"}}
CADENCES = [
    ("Diagnosis", "check_interval"),
    ("Heartbeat", "interval_steps"),
    *(
        (name, "every_n_steps")
        for name in ("Checkpoint", "Evaluate", "EvaluateCommand", "LogMetrics", "ReplicaGuard", "WatchNonfinite")
    ),
    ("WriteSamples", "every_n_steps"),
]
TIMES = [
    ("EvaluateCommand", "time_limit_s"),
    ("Goodput", "every_s"),
    ("JobProgress", "line_every_s"),
    ("SystemMonitor", "every_s"),
    *(("WatchHangs", name) for name in ("factor", "floor_s", "work_limit_s")),
]


def refuses(name, argument, value):
    with pytest.raises((ValueError, TypeError), match=argument if not isinstance(value, str) else "."):
        getattr(callbacks, name)(**{**OTHERS.get(name, {}), argument: value})


@pytest.mark.parametrize("value", [-1, math.nan, 2.5, "10", True])
@pytest.mark.parametrize(("name", "argument"), CADENCES)
def test_a_cadence_that_is_not_an_integer_of_at_least_0_is_refused(name, argument, value):
    refuses(name, argument, value)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        *((*time, value) for time in TIMES for value in (0, -1.0, math.nan)),
        *(("StopRequests", "max_runtime_s", value) for value in (-1.0, math.nan)),
        ("SystemMonitor", "every_s", math.inf),
    ],
)
def test_a_time_that_makes_no_sense_is_refused(name, argument, value):
    refuses(name, argument, value)
