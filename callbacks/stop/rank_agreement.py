"""How ranks agree on a number while they train, without waiting for each other in every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...adapter.plumbing.devices import host_group

__all__ = ["Agreement"]

ROUND_S = 0.05
"""About how far apart rounds are: one costs some 0.3 ms, as much as a step of a small model."""
MOST_STEPS = 32
"""How many steps apart they are at most, for a run whose steps become slow from one to the next."""


class Agreement:
    """The largest of the numbers that ranks say, asked for after every so many steps.

    A round is an asynchronous all-reduce that begins at the end of one step and is read at the end of the next, by when
    the other ranks have usually come as far. With its number each rank says after how many steps it would begin the
    next round, by its own clock, and the smallest counts. So all begin it after the same step, whatever their clocks
    and speeds are. The first round comes after the first step; from one to the next their distance at most doubles.

    Args:
        group: Where a round takes place; None makes a group of all ranks, which all must do at the same time.
        clock: Seconds since any moment.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        # Of gloo and of its own: numbers stay in host memory and no device is waited for.
        self._group = host_group() if group is None else group
        self._clock = clock
        self._numbers = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._work: dist.Work | None = None
        self._is_over = False
        self._distance = self._steps_left = 1
        self._began_at = clock()
        self.took_s = 0.0
        """From the beginning of the last round until it was read."""

    def now(self, number: int) -> int:
        """Agree on the numbers of this moment; waits for all ranks."""
        self._begin(number, trains=True)
        agreed = self._read()
        self._distance = self._steps_left = 1
        self.took_s = 0.0  # ranks do not start at the same time
        return agreed

    def after_step(self, say: Callable[[], int]) -> int:
        """At the end of each step: what was agreed on, where a round is read here; else 0.

        Args:
            say: Gives the number of this rank; called where a round begins. Once another number than 0 was agreed on,
                none does any longer.
        """
        self._steps_left -= 1
        if self._steps_left > 0:
            return 0
        agreed = 0 if self._work is None else self._read()
        if self._steps_left == 0 and not self._is_over:
            self._begin(say(), trains=True)
        return agreed

    def leave(self) -> None:
        """Take part in rounds until no rank trains any longer; those that still do would wait for this one."""
        while not self._is_over:
            if self._work is None:
                self._begin(0, trains=False)
            self._read()

    def _begin(self, number: int, *, trains: bool) -> None:
        self._numbers = torch.tensor([number, -self._wanted_distance(), trains], device="cpu")
        self._work = self._group.allreduce([self._numbers], dist.ReduceOp.MAX)
        self._steps_left = 1

    def _read(self) -> int:
        assert self._work is not None
        self._work.wait()
        self._work = None
        self.took_s = self._clock() - self._began_at
        agreed, negative_distance, someone_trains = self._numbers.tolist()
        self._distance = -negative_distance
        self._steps_left = self._distance - 1
        self._is_over = agreed != 0 or not someone_trains
        return int(agreed)

    def _wanted_distance(self) -> int:
        """How many steps fit between two rounds, at the speed since the last one."""
        before, self._began_at = self._began_at, self._clock()
        return steps_within(ROUND_S, steps=self._distance, took_s=self._began_at - before, most=MOST_STEPS)


def steps_within(seconds: float, *, steps: int, took_s: float, most: int) -> int:
    """How many steps fit into so many seconds at the pace of the last `steps`: from 1 to `most`, and to twice `steps`.

    What is done by the clock is so done by the step, without a look at the clock in each. A pace that slows down is
    noticed after that many steps.
    """
    most = max(1, min(2 * steps, most))
    return most if took_s * most <= seconds * steps else max(1, math.ceil(seconds * steps / took_s))
