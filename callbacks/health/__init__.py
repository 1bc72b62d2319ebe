"""The health of training: readings of a step, the rules that judge them, and the callbacks that act.

`WatchNonfinite` warns or stops if values are no longer finite; `Diagnosis` reports faults; `Recover` skips updates,
lowers the rate and rolls back. This package may import everything that `callbacks` may, including `checkpoint`.
"""
