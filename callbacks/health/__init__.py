"""The health of training: what is noticed, the rules that judge it, and the callbacks that act.

`WatchNonfinite` warns or stops where values are no longer finite; `Diagnosis` reports faults; `Recover` skips updates,
lowers the rate and rolls back. May import what `callbacks` may, `checkpoint` included.
"""
