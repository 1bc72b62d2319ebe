"""``genlight fit``, ``validate``, ``test`` and ``predict``: LightningCLI with genlight's defaults."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from ...callbacks.checkpoint.checkpoint import Checkpoint
from ...callbacks.checkpoint.ownership import checkpoint_files
from ...callbacks.hook.events import callbacks_of
from ...callbacks.monitor_errors import monitor_error
from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import StopSources
from ...callbacks.stop.stop_requests import StopRequests
from ..cluster.placement import placed_by_launcher
from ..cluster.slurm_environment import placement_fault
from ..contract.exceptions import EventLogError, GenlightError, RankFailed, TrainingCanceled
from ..job.parser_errors import UnusableValueError, is_about_what_was_given, root_cause
from ..module import alias
from ..module.module import ContractModule
from ..plumbing.failures import EXIT_COMPLETED, EXIT_STARTUP, describe_failure, stop_behind_lost_worker
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.redaction import secrets_in
from ..run.artifact_dirs import directory_fault
from ..run.artifacts_lock import lock_directory
from ..run.other_weights import about_other_weights
from ..run.ranks.child_processes import RankProcesses
from ..run.ranks.paused_ranks import watching_paused_ranks
from ..run.ranks.rendezvous_watch import watching_rendezvous
from ..run.resume import move_checkpoints_aside
from .fit_checkpoints import WORDS_OF_LIGHTNING, named_checkpoint, newest_checkpoint, refuse_older_end
from .fit_config import SaveAttemptConfig, checkpoints_of
from .fit_failures import FailureReport, UnusableConfigurationError, outlast_rank_zero, text_of_error
from .fit_results import show_fit_results
from .fit_tracking import continue_tracking
from .parser import CommandParser

__all__ = ["GenlightCLI", "run_lightning_cli"]

log = logging.getLogger(__name__)

_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class _Parser(CommandParser, LightningArgumentParser):
    """LightningCLI's parser, with our errors."""


class GenlightCLI(LightningCLI):
    """LightningCLI whose checkpoints are durable, whose runs stop cleanly and resume by themselves.

    Beside LightningCLI's own: every run has a `StopRequests` callback and writes through `DurableCheckpointIO`, and
    ``--resume auto`` goes on from the newest whole checkpoint of the `Checkpoint` callback, if there is one.
    """

    def __init__(self, arguments: Sequence[str], signals: StopSignals, report: FailureReport) -> None:
        self._signals = signals
        self._report = report
        self._resumed_step: int | None = None
        super().__init__(
            pl.LightningModule,
            None,  # a model may bring its own loaders
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SaveAttemptConfig,
            trainer_defaults={
                # By its path: jsonargparse copies defaults, and an instance holds a lock.
                "plugins": [{"class_path": "genlight.callbacks.DurableCheckpointIO"}],
                "callbacks": [StopRequests()],
            },
            seed_everything_default=False,
            parser_class=_Parser,
            # LightningCLI warns of arguments beside those of the process, even where they are the same.
            args=None if list(arguments) == sys.argv[1:] else list(arguments),
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--resume",
            choices=["auto", "never"],
            default=None,
            help="auto: go on from the newest whole checkpoint, or start anew where there is none; never: move earlier "
            "checkpoints aside and start anew; without it a run does not start where the callback "
            "genlight.callbacks.Checkpoint left checkpoints. For validate, test and predict, auto takes the newest "
            "whole checkpoint",
        )

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":  # Lightning has another `--verbose` for the others
            parser.add_argument(
                "--verbose", action="store_true", help="show the whole traceback of an error in the trainer class"
            )
        return parser

    @override
    def instantiate_classes(self) -> None:
        settings = self.config[str(self.subcommand)]
        self._report.secrets = secrets_in(self.config.as_dict())
        root = settings.trainer.default_root_dir or os.curdir
        shows_all = self.subcommand == "fit" and settings.verbose
        self._report.folder = None if shows_all or "://" in root else Path(root)
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            cause = root_cause(error)
            if not isinstance(cause, GenlightError | UnusableValueError) and not is_about_what_was_given(cause):
                raise cause from None  # Without jsonargparse's own errors about it, which are long.
            raise UnusableConfigurationError(str(cause)) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        placed = placed_by_launcher({**self._get(self.config_init, "trainer", default={}), **kwargs})
        trainer = super().instantiate_trainer(**{**kwargs, **placed})
        fault = placement_fault(trainer)
        if fault is not None:
            raise UnusableConfigurationError(fault)
        return trainer

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        checkpoints = checkpoints_of(self.trainer)
        self._report.saves = checkpoints is not None
        if self._report.folder is not None:
            self._report.folder = checkpoints or self._report.folder
        with redacted_logs(self._report.secrets):
            try:
                self._run_and_tell(subcommand)
            finally:
                if getattr(self.model, "failed_step", self.trainer.global_step) > 0:
                    self._report.stage = "train-step"

    def _run_and_tell(self, subcommand: str) -> None:
        try:
            with contextlib.ExitStack() as self._held:
                super()._run_subcommand(subcommand)
        except (ValueError, MisconfigurationException, *_WRONG_PATH) as error:
            if about_monitor := monitor_error(error):
                raise about_monitor from error
            if not is_about_what_was_given(error):
                raise
            raise UnusableConfigurationError(text_of_error(error)) from error
        except RuntimeError as error:
            if about_monitor := monitor_error(error):
                raise about_monitor from error
            raise
        except EventLogError as error:
            if self.trainer.global_step:
                raise
            raise UnusableConfigurationError(f"{error}; choose another `path` for the event log") from error

    @override
    def _parse_ckpt_path(self) -> None:
        # LightningCLI would unpickle the checkpoint to take over hyperparameters that it holds; ours are not pickles.
        return

    def before_fit(self) -> None:
        """Choose the checkpoint to resume from, where that was left to us, and overwrite none silently."""
        StopSources(signals=self._signals).raise_if_signalled()
        settings = self.config["fit"]
        for limit in ("max_steps", "max_epochs", "limit_train_batches"):
            if getattr(self.trainer, limit) == 0 and self.trainer.is_global_zero:
                log.warning("`trainer.%s` is 0: no step is trained", limit)
        self._refuse_unwritable_places()
        directory = checkpoints_of(self.trainer)
        if directory is not None and self.trainer.is_global_zero:  # before it is looked at
            self._held.callback(lock_directory(directory, "genlight fit").release)
        if self._takes_named("going on after"):
            return
        if settings["resume"] == "auto":
            refuse_older_end(directory)
            if not self._take_newest("going on after") and directory is not None and checkpoint_files(directory):
                raise UnusableConfigurationError(
                    f"no checkpoint in {str(directory)!r} is whole. Restore one, start at step 0 with "
                    "`--resume never`, which moves them aside, or choose another `dirpath`."
                )
        elif settings["resume"] == "never":
            for callback in callbacks_of(self.trainer):
                if isinstance(callback, Checkpoint):
                    callback.replace_existing = True  # what is not a checkpoint, but has a name that one may get
                    self._move_aside(callback.dirpath or Path(self.trainer.default_root_dir) / "checkpoints")
        elif directory is not None and checkpoint_files(directory):
            raise UnusableConfigurationError(
                f"{str(directory)!r} holds checkpoints already. Go on with `--resume auto`, move them aside with "
                "`--resume never`, or choose another `dirpath`."
            )

    def _move_aside(self, directory: Path) -> None:
        """Else a start with ``--resume auto`` after this fit would find them, and go on from another training."""
        moved = move_checkpoints_aside(directory) if self.trainer.is_global_zero else None
        if moved is not None:
            log.info("moved earlier checkpoints to %s", moved)

    def _refuse_unwritable_places(self) -> None:
        """Before anything is trained that could not be kept."""
        if not self.trainer.is_global_zero:
            return
        places: dict[str, Path | None] = {"dirpath": checkpoints_of(self.trainer)}
        root = self.trainer.default_root_dir
        if not self.trainer.loggers and "://" not in root:  # where the configuration is written then
            places["trainer.default_root_dir"] = Path(root)
        faults = [directory_fault(name, path, "Choose another.") for name, path in places.items() if path is not None]
        if any(faults):
            raise UnusableConfigurationError("\n".join(filter(None, faults)))

    def before_validate(self) -> None:
        """Choose the checkpoint to evaluate, where that was left to us."""
        self._choose_weights("evaluating")

    def before_test(self) -> None:
        """Choose the checkpoint to evaluate, where that was left to us."""
        self._choose_weights("evaluating")

    def before_predict(self) -> None:
        """Choose the checkpoint to predict with, where that was left to us."""
        if isinstance(self.model, ContractModule):
            raise UnusableConfigurationError(
                "a trainer class has no predictions; `generate_sample` makes samples of it in a job, and "
                "`ContractModule.load_from_checkpoint` gives the trained module to a program of yours"
            )
        if not any(isinstance(callback, BasePredictionWriter) for callback in callbacks_of(self.trainer)):
            self._say("the predictions are not written; for that add a subclass of Lightning's BasePredictionWriter")
        self._choose_weights("predicting with")

    def _choose_weights(self, doing: str) -> None:
        if self._takes_named(doing):
            return
        if self.config[str(self.subcommand)]["resume"] != "auto":
            self._say("%s the model as it is built; for a checkpoint use --ckpt_path, or --resume auto", doing)
        else:
            self._require_newest(doing)

    def fit(self, **arguments: Any) -> None:
        """Train; a failure that a stop signal caused is that stop.

        Raises:
            TrainingCanceled: The run was stopped.
        """
        signals = self._signals
        stop = StopSources(signals=signals)
        for callback in callbacks_of(self.trainer):
            if isinstance(callback, StopRequests):  # ours, and maybe one of the configuration's
                callback.share(stop)
        if self.trainer.is_global_zero:
            signals.what_next = (
                "the run saves a checkpoint after the current step, and stops"
                if self._report.saves
                else "the run stops after the current step"
            )
        children = RankProcesses(self.trainer)
        signals.before_exit = children.kill_at_once
        with (
            watching_rendezvous(self.trainer, stop.raise_if_stopped, self._end_now),
            watching_paused_ranks(children.ids, stop.is_stopping, self._end_failed),
        ):
            try:
                continue_tracking(self.trainer, self.model, self._resumed_step, resume=self.config["fit"]["resume"])
                self.trainer.fit(**arguments)
            except RuntimeError as error:
                cause = stop_behind_lost_worker(error, signals.reason) or about_other_weights(error)
                if cause is None:
                    raise
                raise cause from error
            except TrainingCanceled:
                outlast_rank_zero(self.trainer)
                raise
            finally:
                signals.before_exit = lambda: None
                signals.what_next = ""

    def after_fit(self) -> None:
        """Say how the training ended, and where its results are."""
        show_fit_results(self.trainer, self.model, self._resumed_step)

    def _end_now(self, stop: TrainingCanceled) -> None:
        code = self._report.tell_stop(stop)
        RankProcesses(self.trainer).kill()
        os._exit(code)

    def _end_failed(self, error: RankFailed) -> None:
        log.error("%s", error)
        RankProcesses(self.trainer).kill()
        os._exit(describe_failure(error, has_checkpoint=False).exit_code)

    def _takes_named(self, doing: str) -> bool:
        """Whether ``--ckpt_path`` names a checkpoint; ``last`` is the newest whole one, a folder the newest in it."""
        given, resume = (self.config[str(self.subcommand)].get(name) for name in ("ckpt_path", "resume"))
        if given is None:
            return False
        if resume == "never":
            raise UnusableConfigurationError("--ckpt_path and --resume never contradict each other; leave one out")
        if given == "last" and checkpoints_of(self.trainer) is not None:
            self._require_newest(doing)
            return True
        found = named_checkpoint(given)
        if found is not None:
            self._start_from(found)
        if found is not None or given in WORDS_OF_LIGHTNING or "://" in given or os.path.exists(given):
            self._say("%s the checkpoint %s", doing, given if found is None or os.path.isfile(given) else found)
        return True

    def _require_newest(self, doing: str) -> None:
        if not self._take_newest(doing):
            raise UnusableConfigurationError(
                f"{str(checkpoints_of(self.trainer))!r} holds no whole checkpoint. Name one by `--ckpt_path`."
            )

    def _take_newest(self, doing: str) -> bool:
        """Have the subcommand start from the newest whole checkpoint, and say so; whether there is one."""
        directory = checkpoints_of(self.trainer)
        if directory is None:
            raise UnusableConfigurationError(
                "--resume auto needs the callback genlight.callbacks.Checkpoint in the configuration"
            )
        record, warnings = newest_checkpoint(directory)
        for warning in warnings:
            log.warning(warning)
        if record is None:
            return False
        self._say("%s step %d, from %s", doing, record.step, directory / record.path.name)
        self._resumed_step = record.step
        self._start_from(record.path)
        return True

    def _start_from(self, record: Path) -> None:
        self.config_init[str(self.subcommand)]["ckpt_path"] = str(record)

    def _say(self, message: str, *values: object) -> None:
        if self.trainer.is_global_zero:
            log.info(message, *values)


def run_lightning_cli(arguments: Sequence[str], signals: StopSignals) -> int:
    """Run one of LightningCLI's subcommands and return genlight's exit code for it.

    Args:
        arguments: Those of the command line.
        signals: Heeded by a fit; they are handled already.
    """
    alias.install()
    if os.getcwd() not in sys.path:  # a console script does not see the folder it is called in
        sys.path.insert(0, os.getcwd())
    report = FailureReport()
    with redacted_logs(()):
        try:
            GenlightCLI(arguments, signals, report)
        except TrainingCanceled as error:
            return report.tell_stop(error)
        except (UnusableConfigurationError, MisconfigurationException) as error:
            log.error("%s", error)  # noqa: TRY400 - its message says all
            return EXIT_STARTUP
        except Exception as error:  # noqa: BLE001 - whatever ends it is told
            return report.tell(error)
    return EXIT_COMPLETED


def _as_text(dumper: yaml.SafeDumper, interval: Interval) -> yaml.ScalarNode:
    return dumper.represent_str(interval.value)


# The default of an argument of Lightning's `Timer`, which LightningCLI could not write into the configuration it saves.
yaml.SafeDumper.add_representer(Interval, _as_text)
