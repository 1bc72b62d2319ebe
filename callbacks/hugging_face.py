"""For Hugging Face's ``Trainer`` and TRL's: stops with exit code 75, complete checkpoints, and the event log.

Requires transformers. Their trainer trains and saves as usual; this callback decides when to stop, and which
checkpoints count.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..adapter.contract.exceptions import TrainingCanceled
from ..adapter.plumbing.durable import fsync_directory, fsync_file, write_bytes_durably
from ..adapter.plumbing.failures import describe_failure
from ..adapter.plumbing.redaction import safe_str
from ..adapter.plumbing.safe_open import read_own
from ..reporters.events.event import RESUMED_METRIC
from ..reporters.events.event_log import EventLog
from .checkpoint.storage import hash_file
from .rank_channel import Channel
from .stop.signals import StopSignals
from .stop.sources import StopSources
from .stop.stop_requests import STOP_REASONS_BY_CODE, Agreement

log = logging.getLogger(__name__)

_MARK = "genlight.json"
"""Last file of a checkpoint, with the sizes and digests of its other files; without it, a checkpoint does not count."""
_LARGEST_MARK = 16 << 20
_NAMES = {"loss": "train/loss", "learning_rate": "train/lr", "grad_norm": "train/grad_norm"}


class GenlightCallback(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed
    """Stops a Hugging Face ``Trainer`` after a checkpoint, and tells complete checkpoints from others.

    ``callback.train(trainer)`` takes the place of ``trainer.train()``. It continues from the newest complete checkpoint
    of ``output_dir``, after proving its files by their digests. SIGTERM, SIGUSR1, Ctrl-C, the cancel file and a time
    limit end the training after the current step and its checkpoint, with exit code 75, on all ranks after the same
    step. ``events.jsonl`` in ``output_dir`` has the metrics, checkpoints and ends of all attempts.

    A checkpoint counts once its files are durable and its ``genlight.json`` names them all. Other checkpoints stay
    untouched, and a warning names them. To continue from a checkpoint that was saved without this callback, pass it to
    ``trainer.train`` once.

    Args:
        cancel_file: As for `StopRequests`.
        max_runtime_s: As for `StopRequests`.
    """

    def __init__(
        self, cancel_file: str | os.PathLike[str] | None = None, *, max_runtime_s: float | None = None
    ) -> None:
        self._stop = StopSources(cancel_file, max_runtime_s=max_runtime_s)
        self._agreement: Agreement | None = None
        self._channel = Channel(alone=True)
        self._log: EventLog | None = None
        self._reason: str | None = None

    def train(self, trainer: Any, **arguments: Any) -> Any:
        """Train `trainer`, which must have this callback, and return the result of its ``train(**arguments)``.

        Raises:
            SystemExit: The training was stopped; the code is 75.
            ValueError: `trainer` lacks this callback.
        """
        if self not in trainer.callback_handler.callbacks:
            raise ValueError("Invalid `trainer`. Expected one with this object in `callbacks`.")
        signals = StopSignals.handling()
        with (StopSignals() if signals is None else signals).installed() as self._stop.signals:
            try:
                if "resume_from_checkpoint" not in arguments:
                    newest = newest_complete(trainer.args.output_dir)
                    arguments["resume_from_checkpoint"] = None if newest is None else str(newest)
                result = trainer.train(**arguments)
                self._end(trainer, None)
            except BaseException as error:
                self._end(trainer, error)
                raise
        if self._reason is not None:
            raise SystemExit(describe_failure(TrainingCanceled(self._reason), has_checkpoint=True).exit_code)
        return result

    def _end(self, trainer: Any, error: BaseException | None) -> None:
        """Write the terminal event of the attempt."""
        if self._log is None:
            return
        step, directory = trainer.state.global_step, Path(trainer.args.output_dir)
        with self._log as events:
            ended = error if self._reason is None else TrainingCanceled(self._reason)
            if ended is not None:
                has_checkpoint = newest_complete(directory, warns=False) is not None
                events.record_failure(describe_failure(ended, has_checkpoint=has_checkpoint), step)
            else:
                events.completed(step=step, final_checkpoint=newest_complete(directory, warns=False))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the attempt."""
        self._reason, self._channel, self._log = None, Channel(), None
        self._agreement = Agreement() if self._channel.size > 1 else None
        if state.is_world_process_zero:
            self._log = EventLog(Path(args.output_dir) / "events.jsonl", run_id=Path(args.output_dir).resolve().name)
            self._log.started()
            if state.global_step:
                self._log.metric(name=RESUMED_METRIC, value=state.global_step, step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Have the trainer save and stop if all ranks agree on a stop."""
        reason: str | None = self._stop.reason()
        if self._agreement is not None:
            code = self._agreement.after_step(state.global_step, lambda: STOP_REASONS_BY_CODE.index(reason))
            reason = STOP_REASONS_BY_CODE[code]
        if reason is not None:
            self._reason, control.should_save, control.should_training_stop = reason, True, True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the checkpoint of this step durable, then mark it as complete."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._channel.gather_everywhere(None)  # wait until every rank has written its files
        if state.is_world_process_zero:
            _mark_complete(folder)
            if self._log is not None:
                self._log.checkpoint(path=folder, step=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Write numbers to the event log."""
        if self._log is not None and self._log.takes_metrics_of(state.global_step):
            values = {_NAMES.get(name, name.replace("eval_", "eval/", 1)): each for name, each in (logs or {}).items()}
            numbers = {name: each for name, each in values.items() if isinstance(each, int | float) and name != "epoch"}
            self._log.metrics(numbers, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the agreement on stops; otherwise ranks that still train would wait for this one."""
        if self._agreement is not None:
            self._agreement.leave()


def newest_complete(output_dir: str | os.PathLike[str], *, warns: bool = True) -> Path | None:
    """Return the newest complete checkpoint in the ``output_dir`` of a Hugging Face trainer; None if there is none.

    Args:
        output_dir: The folder.
        warns: Whether to log why newer ones are skipped.
    """
    folders = [each for each in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if each.name[11:].isdecimal()]
    for folder in sorted(folders, key=lambda each: int(each.name[11:]), reverse=True):
        fault = _fault(folder)
        if fault is None:
            return folder
        if warns:
            log.warning("%s is skipped: %s", folder, fault)
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / _MARK)


def _mark_complete(folder: Path) -> None:
    """Make the files of a checkpoint durable, then write `_MARK`."""
    entries: dict[str, tuple[int, str]] = {}
    for path in _files(folder):
        fsync_file(path)
        entries[path.relative_to(folder).as_posix()] = hash_file(path)
    for each in {path.parent for path in _files(folder)}:
        fsync_directory(each)
    write_bytes_durably(folder / _MARK, msgspec.json.encode(entries))
    fsync_directory(folder.parent)


def _fault(folder: Path) -> str | None:
    """Return why the checkpoint in `folder` does not count, or None."""
    try:
        entries = msgspec.json.decode(read_own(folder / _MARK, limit=_LARGEST_MARK), type=dict[str, tuple[int, str]])
        changed = [name for name, entry in entries.items() if hash_file(folder / name) != entry]
    except FileNotFoundError as error:
        name = os.path.basename(os.fsdecode(error.filename or _MARK))
        return f"it has no {name}: its save or its removal was interrupted, or it was saved without genlight"
    except (OSError, ValueError) as error:
        return safe_str(error)
    return f"{changed[0]} is not the file that was saved" if changed else None
