"""The checkpoint from which a subcommand of `GenlightCLI` starts, and the folder in which a fit saves."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import xxhash
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from typing_extensions import override

from ...callbacks.checkpoint.listing import list_checkpoints
from ...callbacks.checkpoint.loading import read_ahead
from ...callbacks.checkpoint.policy import Checkpoint, savers_of
from ...callbacks.checkpoint.selection import find_checkpoint
from ...callbacks.hook.events import callbacks_of
from ..contract.exceptions import UsageError
from ..plumbing.failures import text_of_error
from ..run.deaths import forget_deaths
from ..run.folder import directory_fault, lock_directory
from ..run.report import shown_path
from ..run.session import Session
from ..run.start import (
    ExitHints,
    Start,
    before_deaths,
    move_checkpoints_aside,
    newest_start,
    overlapping,
    refuse_to_overwrite,
)

log = logging.getLogger(__name__)

_WORDS_OF_LIGHTNING = ("best", "hpc", "last")
"""Words that ``--ckpt_path`` accepts in place of a path."""
_FIT = ExitHints(
    resume="continue from them with `--resume auto`",
    start_over="move them aside and start at step 0 with `--resume never`",
    other_folder="choose another `dirpath`",
)
_EVALUATION = ExitHints(start_over="name another by `--ckpt_path`")


class SaveOnStop(Checkpoint):
    """Saves only when the run stops, next to the files of Lightning's `ModelCheckpoint`.

    A fit without a `Checkpoint` callback gets this one; otherwise a stop would lose the steps since the last file of
    `ModelCheckpoint`.
    """

    saves_anything = True

    def __init__(self) -> None:
        super().__init__(save_final=False)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":  # Lightning has chosen the folder by now
            self.dirpath = folder_of_others(trainer)
        super().setup(trainer, pl_module, stage)


def folder_of_others(trainer: pl.Trainer) -> Path | None:
    """Return the folder of Lightning's `ModelCheckpoint` on this machine; None if there is none, or not yet."""
    others = (each for each in callbacks_of(trainer) if isinstance(each, ModelCheckpoint))
    return next((Path(each.dirpath) for each in others if each.dirpath and "://" not in str(each.dirpath)), None)


def save_on_stop(trainer: pl.Trainer) -> str | None:
    """Add `SaveOnStop` to `trainer` if it needs one; return why a stop saves nothing, or None."""
    if checkpoints_of(trainer) is not None:
        return None
    others = [each for each in callbacks_of(trainer) if isinstance(each, ModelCheckpoint)]
    if getattr(trainer, "fast_dev_run", False) or not others:
        return "there is no checkpoint callback"
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        return f"{type(trainer.strategy).__name__} has its own format of checkpoints"
    if "://" in str(trainer.default_root_dir):
        return "`default_root_dir` is not on this machine"
    trainer.callbacks.append(SaveOnStop())  # type: ignore[attr-defined]
    return None


def checkpoints_of(trainer: pl.Trainer) -> Path | None:
    """Return the folder of the `Checkpoint` callback; None without one, or if this run saves no checkpoints."""
    savers = [] if getattr(trainer, "fast_dev_run", False) else savers_of(trainer)
    own = (saver for saver in savers if not isinstance(saver, SaveOnStop))
    return next((saver.dirpath or Path(trainer.default_root_dir) / "checkpoints" for saver in own), None)


def begin_fit(session: Session, trainer: pl.Trainer, start: Start | None, settings: Mapping[str, Any]) -> None:
    """Refuse to overwrite checkpoints in the folder of this fit, and note that the fit begins.

    Args:
        session: Knows the folder of checkpoints.
        trainer: The trainer of the fit.
        start: As `find_start` returns it.
        settings: As for `find_start`. With ``--resume never`` existing checkpoints are moved aside.

    Raises:
        StartupContractError: The folder holds checkpoints.
    """
    directory = session.checkpoints_dir
    if directory is None:
        return
    if start is None and session.is_rank_zero:  # the user has chosen where to begin, so earlier deaths do not count
        forget_deaths(directory)
    if settings["resume"] == "never":
        for saver in savers_of(trainer):
            saver.replace_existing = True  # a file that is no checkpoint, but has the name of one, is not moved aside
        if trainer.is_global_zero:  # otherwise a later `--resume auto` would continue another training
            move_checkpoints_aside(directory)
    elif start is not None and start.record is None:
        refuse_to_overwrite(directory, _FIT)
    if start is not None or settings["resume"] == "never":
        session.begin(start or Start(), job_of_fit(settings))


def job_of_fit(settings: Mapping[str, Any]) -> str:
    """Return a digest of the arguments of a fit, except for those that say where it begins."""
    others = {name: value for name, value in settings.items() if name not in ("ckpt_path", "resume", "config")}
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(others))  # addresses of objects differ in each process
    return xxhash.xxh3_128_hexdigest(text.encode())


def hold_folder(session: Session) -> None:
    """Lock the folder of checkpoints until the end of the session, before anything reads it.

    Raises:
        UsageError: The folder cannot be used.
    """
    directory = session.checkpoints_dir
    if directory is not None and session.is_rank_zero:
        if fault := directory_fault("dirpath", directory, "Choose another."):
            raise UsageError(fault)
        session.holds.callback(lock_directory(directory, "genlight fit").release)


def find_start(trainer: pl.Trainer, settings: Mapping[str, Any], *, is_fit: bool) -> tuple[str | None, Start | None]:
    """Return the path of the checkpoint to start from, if any, and the `Start` that was decided here.

    With ``--ckpt_path`` or ``--resume never`` the user has decided, and the `Start` is None.

    Args:
        trainer: The trainer.
        settings: Arguments of the subcommand, with ``ckpt_path`` and ``resume``.
        is_fit: Whether the subcommand is ``fit``.

    Raises:
        UsageError: There is no such checkpoint, it cannot be read, or the options contradict each other.
        StartupContractError: There are checkpoints, and none is complete.
        RepeatedDeathError: Attempts of this fit were killed in the same step again and again.
    """
    path, resume = settings.get("ckpt_path"), settings["resume"]
    directory, doing = checkpoints_of(trainer), "continuing after" if is_fit else "using"
    if path is not None and resume is not None:
        raise UsageError("--ckpt_path and --resume contradict each other; remove one of them")
    try:
        if path is not None:
            path = str(directory) if path == "last" and directory is not None else path
            if path not in _WORDS_OF_LIGHTNING and "://" not in path:
                path = str(find_checkpoint(path))
            say(trainer, "%s the checkpoint %s", doing, path)
        if path is not None or resume == "never":
            return path, None
        start = Start()
        if resume == "auto":
            start = _newest(trainer, directory or folder_of_others(trainer), is_fit=is_fit)
        if is_fit and directory is not None:
            start = before_deaths(start, directory, directory, _FIT, job=job_of_fit(settings), knows_types=True)
    except PermissionError as error:
        raise UsageError(f"{text_of_error(error)}; let this user read it, or move it away") from error
    for saver in savers_of(trainer):
        saver.takes_newest = is_fit and start.is_newest
    for warning in start.warnings:
        log.warning(warning)
    if start.record is None:
        return None, start
    say(trainer, "%s step %d, from %s", doing, start.record.step, shown_path(start.record.path))
    return str(start.record.path), start


def _newest(trainer: pl.Trainer, directory: Path | None, *, is_fit: bool) -> Start:
    """Return the start for ``--resume auto``."""
    if directory is None:
        raise UsageError(
            "--resume auto needs the callback genlight.callbacks.Checkpoint in the configuration, or Lightning's "
            "ModelCheckpoint with a `dirpath`"
        )
    records = [each.record for each in list_checkpoints(directory) if each.record is not None]
    if any(record.is_old and record.final for record in records):  # it has no step to continue from
        raise UsageError(
            f"{str(directory)!r} has the final checkpoint of an older runtime: there is nothing to train. Name a "
            "checkpoint by --ckpt_path, or choose another `dirpath`."
        )
    start = newest_start(directory, _FIT if is_fit else _EVALUATION, knows_types=True, prove=read_ahead)
    if is_fit and any(saver.overlap for saver in savers_of(trainer)):
        start = overlapping(start, directory, knows_types=True)
    return start


def say(trainer: pl.Trainer, message: str, *values: object, level: int = logging.INFO) -> None:
    """Log a message on rank zero."""
    if trainer.is_global_zero:
        log.log(level, message, *values)
