"""Detect training that makes no progress, and write the stacks of all threads."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
from typing_extensions import override

from ..adapter.contract.exceptions import TrainingHungError
from ..adapter.plumbing.durable import create_file, make_directory
from ..adapter.plumbing.threads import started
from .hook.cadence import positive
from .hook.hook import Hook, RunContext

log = logging.getLogger(__name__)

EXIT_HUNG = 1
CHECKS_PER_LIMIT = 10
MAX_PAUSE_S = 5.0
OTHERS_TIMEOUT_S = 2 * MAX_PAUSE_S
"""Seconds that a rank waits for the files of the others before it ends the run, which kills them."""
OTHERS_POLL_S = 0.1
WORK_FRESH_S = 6 * MAX_PAUSE_S
"""Seconds for which another rank counts as working after it touched its file: clocks differ, file systems are slow."""
SMOOTHING = 0.9
"""Weight of earlier steps in the running mean of step times."""


class WatchHangs(Hook):
    """Dumps the stacks of all threads when no step finishes for a multiple of the usual step time.

    Every rank watches itself from a thread that reads the loop's own counters, so it adds nothing to a step. Each hang
    writes one file, ``rank-<rank>-<number>.txt``; if a step finishes after all, the watch starts again. Validation
    batches count as progress. Before the first step, for example during compilation, only `floor_s` applies.

    An evaluation, a rollout, a checkpoint, samples and a pause that a step asked for may take longer than steps. Their
    limit is `work_limit_s` or `factor` times the longest of the same kind so far, whichever is longer. It also holds
    for the other ranks, which wait meanwhile, if all ranks share the folder of the files.

    With `end_run` the process ends as well. An exception cannot be raised in a thread that waits inside a collective or
    a driver, so the watching thread reports the failure itself (if the run has set ``on_hang``) and calls ``os._exit``.
    A restart continues from the last durable checkpoint. The report names the files of all ranks, and the ranks without
    a file: a rank that is lost or paused may be the one that the others wait for.

    Args:
        directory: Folder for the files; None means ``<default_root_dir>/hangs``.
        factor: A step that takes this many times the usual duration counts as a hang.
        floor_s: Shortest duration that counts as a hang, in seconds.
        work_limit_s: The same for an evaluation, a rollout, a checkpoint, samples or a pause, in place of `floor_s`.
        end_run: Whether a hang ends the run.

    Raises:
        ValueError: `factor`, `floor_s` or `work_limit_s` is not above 0.
        ThreadLimitError: The watching thread could not start; this ends the run at the start of training.
    """

    critical = True  # fail at the start rather than leave a hang unnoticed
    ranks: Literal["zero", "all"] = "all"
    _of_this_process = frozenset({"_stopped"})
    _stopped: threading.Event | None = None

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        factor: float = 20.0,
        floor_s: float = 300.0,
        work_limit_s: float = 3600.0,
        end_run: bool = False,
    ) -> None:
        self.directory = None if directory is None else Path(directory)
        self.factor = positive("factor", factor)
        self.floor_s = positive("floor_s", floor_s)
        self.work_limit_s = positive("work_limit_s", work_limit_s)
        self.end_run = end_run
        self.on_hang: Callable[[Exception], None] | None = None
        """Called in the watching thread with a hang that ends the run; may end the process itself."""
        self._count = 0
        self._work: tuple[str, float] | None = None
        self._work_ended_s = 0.0
        self._longest: dict[str, float] = {}

    @override
    def join_run(self, run: RunContext) -> None:
        self.on_hang = run.end_now

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        directory = self.directory or Path(trainer.default_root_dir) / "hangs"
        self._stopped = threading.Event()
        arguments = (_batches_of(trainer), directory.absolute(), trainer.global_rank, trainer.world_size, self._stopped)
        started(threading.Thread(target=self._watch, args=arguments, name="genlight-hangs", daemon=True))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()
        super().on_exception(trainer, pl_module, exception)

    @override
    def on_hold_up(self, trainer: pl.Trainer, pl_module: pl.LightningModule, what: str | None) -> None:
        now = time.monotonic()
        if self._work is not None:
            name, began_s = self._work
            self._longest[name] = max(now - began_s, self._longest.get(name, 0.0))
            self._work_ended_s = now
        self._work = None if what is None else (what, now)

    def _stop(self) -> None:
        if self._stopped is not None:
            self._stopped.set()

    def _watch(
        self, batches: Callable[[], int], directory: Path, rank: int, ranks: int, stopped: threading.Event
    ) -> None:
        """Check in a thread that steps are finished, until `stopped` is set."""
        began_s = time.time()
        usual_s, reported, seen, seen_at_s = 0.0, False, batches(), time.monotonic()
        others = [_work_file(directory, other) for other in range(ranks) if other != rank]
        while True:
            limit_s = max(self.floor_s, self.factor * usual_s)
            if stopped.wait(min(limit_s / CHECKS_PER_LIMIT, MAX_PAUSE_S)):
                _work_file(directory, rank).unlink(missing_ok=True)
                return
            now, newest, work = time.monotonic(), batches(), self._work
            since_s = max(seen_at_s, self._work_ended_s) if work is None else work[1]
            if newest != seen:
                # The difference may be negative, because Lightning counts from 0 again in each validation.
                step_s = max(now - since_s, 0.0) / max(1, newest - seen)
                usual_s = SMOOTHING * usual_s + (1 - SMOOTHING) * step_s if usual_s else step_s
                seen, seen_at_s, reported = newest, now, False
                continue
            if work is not None:
                limit_s = max(self.work_limit_s, self.factor * self._longest.get(work[0], 0.0))
                if others and now - since_s < limit_s:
                    _touch(_work_file(directory, rank))
            elif any(map(_is_fresh, others)):
                seen_at_s = now  # this rank waits for the work of another
                continue
            if now - since_s >= limit_s and not reported:
                reported = True
                self._report(directory, rank, ranks, now - since_s, began_s)

    def _report(self, directory: Path, rank: int, ranks: int, seconds: float, began_s: float) -> None:
        """Write the stacks of all threads and warn; with `end_run`, end the process."""
        self._count += 1
        path = directory / f"rank-{rank}-{self._count}.txt"
        try:
            make_directory(directory, shared=None)
            temporary = path.with_suffix(".part")
            temporary.unlink(missing_ok=True)
            create_file(temporary)
            with temporary.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            temporary.rename(path)
        except OSError as error:
            log.error("cannot write the stacks to %s: %s", path, error.strerror)  # noqa: TRY400
        log.warning("%s", TrainingHungError(rank, seconds, path))
        if self.end_run:
            try:
                others = _stacks_of_others(directory, rank, ranks, began_s)
                written = [file for file in others.values() if file is not None]
                silent = [other for other, file in others.items() if file is None]
                if self.on_hang is not None:
                    self.on_hang(TrainingHungError(rank, seconds, path, *written, silent=silent))
            finally:
                os._exit(EXIT_HUNG)


def _work_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.works"


def _touch(path: Path) -> None:
    """Tell the other ranks that this one is busy with work that they wait for."""
    with contextlib.suppress(OSError):  # without this file the others apply the limit of a step
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def _is_fresh(path: Path) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) < WORK_FRESH_S
    except OSError:
        return False


def _batches_of(trainer: pl.Trainer) -> Callable[[], int]:
    """Return a function that returns the number of batches trained and validated so far."""
    epoch_loop = trainer.fit_loop.epoch_loop
    trained, validated = epoch_loop.batch_progress.total, epoch_loop.val_loop.batch_progress.total
    return lambda: trained.completed + validated.completed


def _stacks_of_others(directory: Path, rank: int, ranks: int, began_s: float) -> dict[int, Path | None]:
    """Return the newest file of each other rank, or None. Waits, because ranks notice one hang at different times."""
    end = time.monotonic() + OTHERS_TIMEOUT_S
    others = [other for other in range(ranks) if other != rank]
    while True:
        newest = {other: _newest(directory.glob(f"rank-{other}-*.txt"), began_s) for other in others}
        if None not in newest.values() or time.monotonic() >= end:
            return newest
        time.sleep(OTHERS_POLL_S)


def _newest(paths: Iterable[Path], began_s: float) -> Path | None:
    written = [(path.stat().st_mtime, path) for path in paths]
    return max((entry for entry in written if entry[0] >= began_s), default=(0.0, None))[1]
