"""Keep the witness of this rank while a run trains, and compare the steps that a resumed run repeats.

A run that was killed repeats the steps after its newest checkpoint. The killed attempt has written entries for some of
these steps: for the first steps after each checkpoint, then at the cadence of metrics, and more rarely the longer ago
the checkpoint was. Only the number of a step, and the step of the checkpoint before it, decide whether it has an entry,
so that all ranks and all attempts have entries for the same steps. A repeated step must have the same entry.
"""

from __future__ import annotations

import bisect
import logging
import secrets
import socket
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from ...reporters.events.run_metadata import PACKAGES_OF_NUMBERS, installed_packages, numerics
from ..checkpoint.format.record import digest_of
from ..hook.cadence import next_multiple
from ..hook.events import callbacks_of, hosted_by, run_state_of
from ..log_metrics import LogMetrics
from ..rank_channel import Channel
from .entry import (
    Entry,
    Header,
    Key,
    Proof,
    Recorded,
    StepDifference,
    WitnessFile,
    compare,
    file_of_rank,
    limit_between,
    read_witness,
    summarize,
)
from .recording import Reading, Sources, read_batch

log = logging.getLogger(__name__)

FIRST_STEPS = 10
"""Steps after the start and after each checkpoint that have an entry, whatever the cadence."""
LEAST_CADENCE = 10
"""Minimum cadence of entries, which cost more than metrics: a shorter cadence of metrics is multiplied up to this."""
_KEPT_CHECKPOINTS = 2
"""The entries after this many of the newest checkpoints are kept: a resume may fall back to the oldest of these."""
_DENSE_ENTRIES = 32
"""Number of entries after a checkpoint with the first distance between them. Then this distance doubles, and again each
time that the distance to the checkpoint has doubled.

So steps of any length take at most 1% longer, and the file stays small. The distance between two entries is at most a
sixteenth of the distance to the checkpoint."""


class Witness:
    """The witness of this rank. All ranks create theirs, and call its methods, at the same steps.

    Args:
        trainer: The trainer, about to train its first step.
        directory: The folder of checkpoints.
        run: Identity of the training, from its checkpoint; empty for a new training.
        channel: The channel by which the ranks agree on a difference.
    """

    def __init__(self, trainer: pl.Trainer, directory: Path, run: str, channel: Channel) -> None:
        self.run: str = channel.share(run or secrets.token_hex(8))
        self.next_step = 0
        """The step at which `observe` has something to do next."""
        self._channel = channel
        self._every = witness_cadence(trainer)
        self._start = trainer.global_step
        self._saves = deque([self._start], maxlen=_KEPT_CHECKPOINTS + 1)
        self._pending: deque[Reading] = deque()
        self._sources: Sources | None = None
        self._is_unreadable = False
        path = file_of_rank(directory, trainer.global_rank)
        recorded = _read(path, self.run) if run else None
        before = {} if recorded is None else recorded.header.attempts
        self._attempt = max(before, default=0) + 1
        self._facts = {**before, self._attempt: facts_of_attempt(trainer)}
        self._limits = ""
        self._expected = self._comparable_entries(recorded)
        steps = sorted({key[0] for key in self._expected})
        # All ranks must exchange results at the same steps, but a kill may leave one with fewer entries.
        all_steps = channel.gather_everywhere(steps) if run else []
        self._steps = sorted({step for steps_of_rank in all_steps for step in steps_of_rank})
        self._equal: set[int] = set()
        self._difference: StepDifference | None = None
        header = Header(self.run, trainer.global_rank, self._facts)
        self._file = WitnessFile(path, header, {} if recorded is None else recorded.entries)
        self._plan_next_step(self._start)

    @property
    def is_comparing(self) -> bool:
        """Whether there are steps left to compare with an earlier attempt."""
        return bool(self._steps)

    def _comparable_entries(self, recorded: Recorded | None) -> dict[Key, Entry]:
        """Return the entries of the steps that this attempt repeats, if they can be compared; note the limits."""
        entries = {} if recorded is None else {k: e for k, e in recorded.entries.items() if k[0] >= self._start}
        if not entries:
            return {}
        before, now = self._facts.get(next(reversed(entries.values())).attempt, {}), self._facts[self._attempt]
        can_compare, self._limits = limit_between(before, now)
        if not can_compare and self._channel.rank == 0:
            log.info("Repeated steps are not compared with the earlier attempt: %s", self._limits)
        return entries if can_compare else {}

    def observe(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> Proof | None:
        """Note the batch that was trained last if it is due. Collective while `is_comparing`.

        Returns:
            The result of the comparison, once: at the first difference, or after the last repeated step.
        """
        step = trainer.global_step
        key = step, trainer.current_epoch, index
        cadence = self._cadence(step)
        is_at_cadence = cadence > 0 and step % cadence == 0
        if is_at_cadence or step <= self._saves[-1] + FIRST_STEPS or key in self._expected:
            self._read(trainer, module, outputs, batch, key)
        if self._pending:
            self._settle(waits=False)
        proof = None
        if self._steps:
            proof = self._exchange(step, is_last=run_state_of(trainer).stop_reason is not None)
        self._plan_next_step(step)
        return proof

    def _read(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, key: Key) -> None:
        """Take the digests of the batch that was trained last."""
        if self._is_unreadable:
            return
        try:
            if self._sources is None:
                self._sources = Sources.find(trainer, module)
            self._pending.append(read_batch(trainer, outputs, batch, key, self._attempt, self._sources))
        except Exception as error:  # noqa: BLE001 - batches and generators are objects of users, and may raise anything
            self._is_unreadable = True
            log.warning("This attempt keeps no further witness: batch %d cannot be read: %r", key[2], error)

    def _cadence(self, step: int) -> int:
        """Return the steps between entries at `step`: `_every`, or a multiple of it far from the last checkpoint."""
        dense = self._every * _DENSE_ENTRIES
        behind = step - self._saves[-1]
        return self._every << (behind // dense).bit_length() if behind >= dense > 0 else self._every

    def _plan_next_step(self, step: int) -> None:
        """Set `next_step` after an observation of `step`."""
        if self._pending or step < self._saves[-1] + FIRST_STEPS:
            self.next_step = step + 1
            return
        self.next_step = next_multiple(step, self._cadence(step))
        at = bisect.bisect_right(self._steps, step)
        if at < len(self._steps):
            self.next_step = min(self.next_step, self._steps[at])

    def _settle(self, *, waits: bool) -> None:
        """Write and compare the readings whose values have arrived."""
        while self._pending and (waits or self._pending[0].is_there()):
            entry = self._pending.popleft().entry()
            self._file.append(entry)
            earlier = self._expected.pop(entry.key, None)
            if earlier is None or self._difference is not None:
                continue
            self._difference = compare(earlier, entry, rank=self._channel.rank, facts=self._facts)
            if self._difference is None:
                self._equal.add(entry.step)

    def _exchange(self, step: int, *, is_last: bool) -> Proof | None:
        """Return the result if a rank has found a difference, or if `step` is the last to compare; otherwise None."""
        is_last = is_last or step >= self._steps[-1]
        if is_last:
            self._settle(waits=True)
        elif step not in self._steps:
            return None
        if not is_last:
            worst, work = self._channel.start_largest(int(self._difference is not None))
            if work is not None:
                work.wait()
            if not int(worst):
                return None
        return self.conclude()

    def conclude(self) -> Proof | None:
        """Return the result of all ranks, and compare nothing from now on. Collective."""
        self._settle(waits=True)
        proof = summarize(self._channel.gather_everywhere((sorted(self._equal), self._difference)), self._limits)
        self._steps, self._expected = [], {}
        return proof

    def note_save(self, step: int, *, forgets: bool) -> None:
        """Note that a checkpoint of `step` was begun; the first steps after it get entries.

        Args:
            step: Its completed steps.
            forgets: Whether to remove the entries before the last two checkpoints. A run that keeps all checkpoints
                keeps all entries, because a replay needs them.
        """
        if step != self._saves[-1]:
            self._saves.append(step)
        self._sources, self.next_step = None, 0
        if forgets and len(self._saves) > _KEPT_CHECKPOINTS:
            self._file.drop(before=self._saves[0])

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, to which the run was rolled back, and compare no more. Called on all ranks."""
        self._pending.clear()
        self._steps, self._expected, self.next_step = [], {}, 0
        self._saves = deque([step], maxlen=_KEPT_CHECKPOINTS + 1)
        self._file.drop(after=step)

    def close(self) -> None:
        """Write the entries whose values have arrived, and close the file."""
        self._settle(waits=False)
        self._file.close()


def witness_cadence(trainer: pl.Trainer) -> int:
    """Return the number of steps between entries, a multiple of the cadence of metrics; 0 if there are no metrics.

    Metrics have the cadence of `LogMetrics`, if the trainer has one, otherwise Lightning's ``log_every_n_steps``.
    """
    cadences = (callback.every_n_steps for callback in callbacks_of(trainer) if isinstance(callback, LogMetrics))
    every: int = next(cadences, getattr(trainer, "log_every_n_steps", 0))
    return every * max(1, -(-LEAST_CADENCE // every)) if every else 0


def _read(path: Path, run: str) -> Recorded | None:
    """Return the witness of `run` at `path`. Warn of any other file there: the new witness will replace it."""
    try:
        recorded = read_witness(path)
    except OSError:  # `WitnessFile` cannot open it either, and warns
        return None
    except (ValueError, RecursionError) as error:
        log.warning("Repeated steps are not compared with an earlier attempt: %s: %s", path, error)
        return None
    if recorded is None:
        return None
    if recorded.header.run != run:
        log.warning("Repeated steps are not compared with an earlier attempt: %s is of another training", path)
        return None
    if recorded.is_torn:
        log.warning("The end of %s is torn; only the steps before it are compared with the earlier attempt", path)
    return recorded


def facts_of_attempt(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the facts that may change the exact numbers of an attempt, named as in the ``started`` event."""
    versions = installed_packages()
    hosted = hosted_by(trainer.lightning_module)
    settings = None if hosted is None else hosted.state.built_settings
    return {
        "numerics": numerics(),
        "packages": {name: versions[name] for name in PACKAGES_OF_NUMBERS if name in versions},
        "host": socket.gethostname(),
        "device": trainer.strategy.root_device.type,
        "ranks": trainer.world_size,
        "built": settings and digest_of(repr(settings.record()).encode()),
        "kept": settings and settings.kept,
    }
