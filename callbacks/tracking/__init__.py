"""Runs of W&B and MLflow that go on after a resume: their identity, and the rows that they hold already.

May import the rest of `callbacks`, and `reporters`. This file itself imports neither torch nor Lightning.
"""

RUNS_FILE = "tracking.jsonl"
"""Which run of W&B or MLflow each logger has: one line, in the folder of a job's metrics or of a fit's checkpoints.

Not ``.json``, which would be looked at as the record of a checkpoint.
"""
