"""An attempt on a rank other than rank zero: it trains along, and leaves every report to rank zero."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping

from ...callbacks.stop.signals import StopSignals, exit_on_signal
from ..contract.exceptions import RankFailed, TrainingCanceled
from ..job.config import RunConfig
from ..plumbing.failures import EXIT_COMPLETED, EXIT_FAILED, EXIT_STOPPED, describe_failure
from .outcome import log_failure
from .progress import Progress
from .ranks.failure_notes import RankFailures
from .ranks.paused_ranks import watching_paused_ranks
from .ranks.presence import present
from .ranks.rank_zero_exit import exit_code_of_rank_zero, wait_for_rank_zero
from .ranks.rank_zero_watch import RankZero, rank_zero_is_gone, rank_zero_process
from .ranks.this_rank import this_rank
from .traceback_report import FAILURES_DIRECTORY
from .training import Training, stop_sources

__all__ = ["Follower"]

log = logging.getLogger(__name__)

REPORTED_WITHIN_S = 60.0
"""How much longer than its uploads may take rank zero's end is waited for, where it cannot be seen."""


class Follower:
    """One attempt of a rank that follows rank zero.

    Args:
        config: The run.
        signals: Those of this process.
        environ: Environment whose values must not be shown; None takes the process's own.
        verbose: Log the whole traceback of an error of the user's code.
    """

    def __init__(
        self,
        config: RunConfig,
        signals: StopSignals,
        environ: Mapping[str, str] | None = None,
        *,
        verbose: bool = False,
    ) -> None:
        self._config = config
        self._environ = environ
        self._tracebacks = None if verbose else config.artifacts_dir / FAILURES_DIRECTORY
        self._stop = stop_sources(config, signals)
        self._progress = Progress()
        self._rank_zero = RankZero(config.artifacts_dir)

    def run(self, *, allow_changed: bool, shadow: int = 0) -> tuple[int, BaseException | None]:
        """Train along; returns the exit code, which is that of rank zero where all ends as planned or by a stop.

        With it comes what ended the rank, None where it completed or was stopped.
        """
        training = Training(self._config, self._stop, self._progress, None, self._end_now)
        self._rank_zero.watch(self._end_with_rank_zero)
        try:
            with (
                self._shown_to_rank_zero(),
                watching_paused_ranks(rank_zero_process, self._stop.is_stopping, _leave),
            ):
                training.run(allow_changed=allow_changed, shadow=shadow)
        except TrainingCanceled as error:
            self._rank_zero.end_watch()
            if not self._stop.is_agreed:  # rank zero may not be there at all
                return self._tell_rank_zero(error), None
            return self._exit_code_after(stopped=True), None
        except BaseException as error:  # noqa: BLE001 - rank 0 reports it
            return self._tell_rank_zero(error), error
        finally:
            self._rank_zero.end_watch()
        has_trained = self._stop.run_state is not None
        return self._exit_code_after(stopped=False) if has_trained else EXIT_COMPLETED, None

    def _exit_code_after(self, *, stopped: bool) -> int:
        """Wait for rank zero, which still settles and reports, and end as it did."""
        exit_on_signal(EXIT_STOPPED)  # this rank is done, and the next start finds what rank zero has left
        code = wait_for_rank_zero(
            self._config.artifacts_dir,
            is_gone=self._rank_zero.is_gone,
            within_s=self._config.upload_deadline_s + REPORTED_WITHIN_S,
        )
        if code is not None:
            return code
        if stopped:
            return EXIT_STOPPED
        # Where it was killed after this rank had trained, the run is not known to be whole.
        return EXIT_FAILED if self._rank_zero.is_gone() else EXIT_COMPLETED

    def _end_with_rank_zero(self) -> None:
        code = exit_code_of_rank_zero(self._config.artifacts_dir)
        os._exit(EXIT_FAILED if code is None else code)

    def _shown_to_rank_zero(self) -> contextlib.AbstractContextManager[None]:
        # It sees the processes that it has started itself.
        return contextlib.nullcontext() if rank_zero_process() else present(self._config.artifacts_dir, this_rank())

    def _end_now(self, error: Exception) -> None:
        os._exit(self._tell_rank_zero(error))

    def _tell_rank_zero(self, error: BaseException) -> int:
        """Leave a note of what ended this rank, and stay until it was read: a launcher ends the rest when one leaves.

        Returns:
            The exit code.
        """
        config = self._config
        failure = describe_failure(
            error, stage=self._progress.stage, has_checkpoint=False, secrets=config.secrets, environ=self._environ
        )
        log_failure(error, failure, secrets=config.secrets, environ=self._environ, tracebacks=self._tracebacks)
        if rank_zero_is_gone():  # The next attempt must not take this for a failure of its own.
            return failure.exit_code
        ranks = RankFailures(config.artifacts_dir, expects_ranks=True)
        ranks.note(this_rank(), failure)
        ranks.wait_until_reported()
        return failure.exit_code


def _leave(error: RankFailed) -> None:
    log.error("%s, so this rank ends as well", error)
    os._exit(EXIT_FAILED)
