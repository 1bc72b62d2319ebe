"""Runs of W&B and MLflow that go on after a resume: their identity, and the rows that they hold already.

May import the rest of `callbacks`, and `reporters`. This file itself imports neither torch nor Lightning.
"""

RUNS_FILE = "tracking.json"
"""Which run of W&B or MLflow each logger has, in the folder of the run's metrics."""
