"""Evaluation while training: by the trainer class, or by a command that scores checkpoints.

`evaluate` has the callback `Evaluate`, `evaluate_command` the callback `EvaluateCommand`.

May import the rest of `callbacks`, and everything that `callbacks` may import.
"""
