"""Telemetry events of a run: one id for all of them, and a file that cannot be written ends nothing."""

from __future__ import annotations

import logging
import os
from typing import Any

import lightning.pytorch as pl

from ...adapter.contract.exceptions import EventLogError
from ...reporters.telemetry import make_run_id, write_event
from ..hook.events import run_state_of

log = logging.getLogger(__name__)


def run_id_of(trainer: pl.Trainer) -> str:
    """Return the id that all callbacks of a run share; generated once if the run has none, and kept by checkpoints."""
    state = run_state_of(trainer)
    state.run_id = state.run_id or make_run_id()
    return state.run_id


class RunEvents:
    """Writes telemetry events of one scenario; warns when the first one cannot be written.

    Args:
        scenario: Name of the scenario.
        path: The file; None means `reporters.telemetry.telemetry_path`.
    """

    def __init__(self, scenario: str, path: str | os.PathLike[str] | None) -> None:
        self.scenario = scenario
        self.path = path
        self._has_warned = False

    def write(self, trainer: pl.Trainer, **fields: Any) -> None:
        """Write one event; see `reporters.telemetry.write_event` for the fields."""
        step, epoch = trainer.global_step, trainer.current_epoch
        try:
            write_event(
                scenario=self.scenario, run_id=run_id_of(trainer), step=step, epoch=epoch, path=self.path, **fields
            )
        except EventLogError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("telemetry is not written, and training goes on without it: %s", error)
