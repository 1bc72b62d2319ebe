"""Recovery from faults in training: the rungs of a ladder, the roll-back, and the callback that climbs.

May import what `callbacks` may, `checkpoint` and `diagnosis` included.
"""
