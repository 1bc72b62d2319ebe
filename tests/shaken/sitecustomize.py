"""Slow down disks, and let threads start late and switch at odd times; every Python with this folder imports it.

Chances are drawn from a separate generator, so the tests' random numbers do not change.
"""

import os
import random
import sys
import threading
import time

_random = random.Random()
_sleep = time.sleep


def _slow(name, share, most_s):
    """Let a share of the calls of ``os.<name>`` wait for up to `most_s` seconds, most of them much shorter."""
    real = getattr(os, name)

    def slow(*args, **kwargs):
        if _random.random() < share:
            _sleep(_random.random() ** 3 * most_s)
        return real(*args, **kwargs)

    slow.__name__ = name
    setattr(os, name, slow)


def _start_late(self, run=threading.Thread.run):
    _sleep(_random.random() ** 4 * 0.5)
    run(self)


for _name in ("fsync", "fdatasync", "replace", "rename", "link"):
    _slow(_name, 0.5, 0.25)
for _name in ("open", "write", "unlink"):
    _slow(_name, 0.02, 0.1)
threading.Thread.run = _start_late
sys.setswitchinterval(_random.choice([1e-6, 1e-5, 0.005, 0.05]))
