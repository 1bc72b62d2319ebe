"""``genlight fit``, ``validate``, ``test`` and ``predict``: LightningCLI with genlight's defaults."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import yaml
from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BasePredictionWriter, ProgressBar
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

from ...callbacks.checkpoint.format.record import FINAL_NAME
from ...callbacks.checkpoint.policy import Checkpoint, savers_of
from ...callbacks.checkpoint.selection import find_checkpoint, find_final, newest_valid
from ...callbacks.checkpoint.storage.commit import checkpoint_files
from ...callbacks.hook.events import callbacks_of
from ...callbacks.job_progress import JobProgress
from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import StopSources
from ...callbacks.stop.stop_requests import StopRequests
from ...callbacks.write_samples import WriteSamples
from ...reporters.events.event_logger import EventLogger
from ..cluster.placement import placed_by_launcher
from ..cluster.slurm_environment import placement_fault
from ..contract.exceptions import BrokenCheckpointError, EventLogError, GenlightError, MonitorError
from ..job.parser_errors import UnusableValueError, is_about_what_was_given, root_cause, shortened
from ..module.module import ContractModule
from ..plumbing.failures import EXIT_STARTUP
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.redaction import secrets_in, without_secrets
from ..plumbing.text import as_list
from ..run.artifact_dirs import directory_fault
from ..run.artifacts_lock import lock_directory
from ..run.fit import fit, join
from ..run.ranks.this_rank import is_rank_zero
from ..run.results import show_results
from ..run.resume import move_checkpoints_aside
from ..run.session import FollowerSession, Session
from ..run.tracking import continue_runs
from .config_files import config_file_fault
from .parser import offered_name, refuse

__all__ = [
    "ConfiguredFit",
    "GenlightCLI",
    "UnusableConfigurationError",
    "checkpoints_of",
    "parse_configuration",
    "run_lightning_cli",
]

# The options of a feed have their texts below each field.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

log = logging.getLogger(__name__)

_WORDS_OF_LIGHTNING = ("best", "hpc", "last")
"""Words that ``--ckpt_path`` takes besides a path."""
_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class UnusableConfigurationError(Exception):
    """A configuration asks for what it cannot have."""


def checkpoints_of(trainer: pl.Trainer) -> Path | None:
    """Where the `Checkpoint` callback keeps them; None without one, or where this run writes none."""
    callback = next(iter(savers_of(trainer)), None)
    return None if callback is None or getattr(trainer, "fast_dev_run", False) else _folder_of(callback, trainer)


def _folder_of(callback: Checkpoint, trainer: pl.Trainer) -> Path:
    return callback.dirpath or Path(trainer.default_root_dir) / "checkpoints"


class SaveAttemptConfig(SaveConfigCallback):
    """Writes ``config-<attempt>.yaml`` where the checkpoints are, without them to the logger's folder.

    Only a fit is an attempt; ``validate``, ``test`` and ``predict`` write none. Secrets are left out.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self.already_saved:
            return
        self.already_saved = True
        folder = checkpoints_of(trainer) or trainer.log_dir  # which is broadcast, so every rank asks for it
        if not trainer.is_global_zero or folder is None or "://" in str(folder):
            return
        text = yaml.safe_dump(without_secrets(yaml.safe_load(self.parser.dump(self.config))), sort_keys=False)
        os.makedirs(folder, exist_ok=True)
        for attempt in itertools.count(1):
            with (
                contextlib.suppress(FileExistsError),
                open(os.path.join(folder, f"config-{attempt}.yaml"), "x", encoding="utf-8") as file,
            ):
                file.write(text)
                return


class _Parser(LightningArgumentParser):
    """LightningCLI's parser, whose errors are shorter and offer the nearest name for a misspelled one."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and end the process with 2, as argparse does."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser, message = getattr(ex, "subcommand_parser", None) or self, shortened(message)
        refuse(parser, message, offered_name(parser, message))


class GenlightCLI(LightningCLI):
    """LightningCLI whose checkpoints are durable, whose runs stop cleanly and resume by themselves.

    Beside LightningCLI's own: every run has a `StopRequests` callback and writes through `DurableCheckpointIO`, and
    ``--resume auto`` goes on from the newest whole checkpoint of the `Checkpoint` callback, if there is one.
    """

    def __init__(self, arguments: Sequence[str], session: Session) -> None:
        self._session = session
        self._arguments = arguments
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
        self._session.secrets = secrets_in(self.config.as_dict())
        self._session.verbose = self.subcommand == "fit" and settings.verbose
        root = settings.trainer.default_root_dir or os.curdir
        self._session.folder = None if "://" in root else Path(root)
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            cause = root_cause(error)
            if not isinstance(cause, GenlightError | UnusableValueError) and not is_about_what_was_given(cause):
                raise cause from None  # Without jsonargparse's own errors about it, which are long.
            raise UnusableConfigurationError(str(cause)) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        settings = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        if self.subcommand == "fit" and settings.get("enable_progress_bar") is None and not _shows_progress(settings):
            kwargs["enable_progress_bar"] = False  # Lightning's counts epochs of a class that has none
            self.trainer_defaults["callbacks"] = [*self.trainer_defaults["callbacks"], JobProgress()]
        placed = placed_by_launcher({**settings, **kwargs})
        trainer = super().instantiate_trainer(**{**kwargs, **placed})
        fault = placement_fault(trainer)
        if fault is not None:
            raise UnusableConfigurationError(fault)
        return trainer

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        session, checkpoints = self._session, checkpoints_of(self.trainer)
        session.count_steps = lambda: int(getattr(self.model, "failed_step", self.trainer.global_step))
        if subcommand == "fit":
            session.place(checkpoints or session.folder, checkpoints)
            if checkpoints is None:
                session.way_on = lambda: "genlight.callbacks.Checkpoint would have saved a checkpoint to go on from"
            else:
                given = _without(self._arguments, "--resume", "--ckpt_path")
                session.way_on = lambda: "start again with --resume auto to go on"
                session.next_command = shlex.join(["genlight", *given, "--resume", "auto"])
        with redacted_logs(session.secrets):
            try:
                super()._run_subcommand(subcommand)
            except MonitorError:
                raise
            except (ValueError, MisconfigurationException, *_WRONG_PATH) as error:
                if not is_about_what_was_given(error):
                    raise
                raise UnusableConfigurationError(_text_of_error(error)) from error
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
        self._session.stop.raise_if_signalled()
        settings = self.config["fit"]
        for limit in ("max_steps", "max_epochs", "limit_train_batches"):
            if getattr(self.trainer, limit) == 0 and self.trainer.is_global_zero:
                log.warning("`trainer.%s` is 0: no step is trained", limit)
        self._refuse_unwritable_places()
        directory = checkpoints_of(self.trainer)
        if directory is not None and self.trainer.is_global_zero:  # before it is looked at
            self._session.on_exit(lock_directory(directory, "genlight fit").release)
        if self._takes_named("going on after"):
            return
        if settings["resume"] == "auto":
            _refuse_older_end(directory)
            if not self._take_newest("going on after") and directory is not None and checkpoint_files(directory):
                raise UnusableConfigurationError(
                    f"no checkpoint in {str(directory)!r} is whole. Restore one, start at step 0 with "
                    "`--resume never`, which moves them aside, or choose another `dirpath`."
                )
        elif settings["resume"] == "never":
            for saver in savers_of(self.trainer):
                saver.replace_existing = True  # what is not a checkpoint, but has a name that one may get
                if self.trainer.is_global_zero:  # else a later `--resume auto` would go on from another training
                    move_checkpoints_aside(_folder_of(saver, self.trainer))
        elif directory is not None and checkpoint_files(directory):
            raise UnusableConfigurationError(
                f"{str(directory)!r} holds checkpoints already. Go on with `--resume auto`, move them aside with "
                "`--resume never`, or choose another `dirpath`."
            )

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

    def fit(self, model: pl.LightningModule, **arguments: Any) -> None:
        """Train; called by LightningCLI.

        Raises:
            TrainingCanceled: The run was stopped.
        """
        session, trainer = self._session, self.trainer
        join(session, trainer, model)
        if session.checkpoints_dir is not None and session.is_rank_zero:
            resumes = self._resumed_step is not None or self.config["fit"]["resume"] == "auto"
            continue_runs(trainer, session.checkpoints_dir, resumes=resumes)
        fit(session, trainer, model, **arguments)

    def after_fit(self) -> None:
        """Say how the training ended, and where its results are."""
        trainer, directory = self.trainer, self._session.checkpoints_dir
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        logs: dict[str, Path] = {}
        for logger in trainer.loggers:
            if isinstance(logger, EventLogger):
                logs["events"] = logger.path
            elif logger.log_dir is not None:
                logs[logger.name or type(logger).__name__] = Path(logger.log_dir)
        steps = getattr(self.model, "completed_steps", trainer.global_step)
        stopped = getattr(self.model, "stopped", None)
        ended = f"fit completed at step {steps}" + (f" ({stopped})" if stopped else "")
        if steps == self._resumed_step:
            ended = f"the fit had completed at step {steps} before; there was nothing to train"
        show_results(
            ended,
            final=None if directory is None else directory / f"{FINAL_NAME}.json",
            checkpoints=directory,
            samples=next((c.directory for c in callbacks_of(trainer) if isinstance(c, WriteSamples)), None),
            logs=logs,
        )

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
        found = _named_checkpoint(given)
        if found is not None:
            self._start_from(found)
        if found is not None or given in _WORDS_OF_LIGHTNING or "://" in given or os.path.exists(given):
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
        try:
            record, warnings = newest_valid(directory, knows_types=True)
        except OSError as error:
            raise _unreadable(error) from error
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


class ConfiguredFit(GenlightCLI):
    """A fit whose configuration was read, and whose objects are not made."""

    @override
    def instantiate_classes(self) -> None:
        """Nothing: a model may take long to build."""

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is trained."""

    def arguments_of(self, block: str) -> tuple[str, dict[str, Any]]:
        """The name of the class of ``model`` or ``data``, and its arguments; empty where there is none."""
        described = self.config[str(self.subcommand)].get(block)
        described = {} if described is None else described.as_dict()
        name = described.get("class_path", "").rpartition(".")[2]
        return name, {**described.get("init_args", {}), **described.get("dict_kwargs", {})}


def run_lightning_cli(arguments: Sequence[str], signals: StopSignals) -> int:
    """Run one of LightningCLI's subcommands and return genlight's exit code for it.

    Args:
        arguments: Those of the command line.
        signals: Heeded by a fit; they are handled already.
    """
    with fit_session(signals) as session, redacted_logs(()):
        try:
            GenlightCLI(arguments, session)
            return session.complete()
        except (UnusableConfigurationError, MisconfigurationException) as error:
            log.error("%s", error)  # noqa: TRY400 - its message says all
            return EXIT_STARTUP
        except Exception as error:  # noqa: BLE001 - whatever ends it is reported
            return session.fail(error)


def parse_configuration(path: str) -> ConfiguredFit:
    """Read the configuration of a fit; nothing is built.

    Raises:
        UnusableConfigurationError: It cannot be read, or is not one.
    """
    words = ["fit", "--config", path]
    fault = config_file_fault(words)
    if fault is not None:
        raise UnusableConfigurationError(fault)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run")
            return ConfiguredFit(words, fit_session(StopSignals()))
    except SystemExit as error:  # argparse's way to refuse
        text = said.getvalue().rpartition("error: ")[2].strip()
        raise UnusableConfigurationError(text) from error


def fit_session(signals: StopSignals) -> Session:
    """The session of a fit, whose callbacks keep its log and its uploads; user code can be imported from now on."""
    from ..compat import install  # which makes the alias

    install()
    if os.getcwd() not in sys.path:  # a console script does not see the folder it is called in
        sys.path.insert(0, os.getcwd())
    session = (Session if is_rank_zero() else FollowerSession)(StopSources(signals=signals))
    session.reports_at_once = False
    return session


def _shows_progress(settings: Mapping[str, Any]) -> bool:
    """Whether the callbacks of a configuration show the progress of a fit."""
    return any(isinstance(each, ProgressBar | JobProgress) for each in as_list(settings.get("callbacks")))


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """`arguments` without `options` and their values."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if not skips and argument.partition("=")[0] not in options:
            kept.append(argument)
        skips = not skips and argument in options
    return kept


def _named_checkpoint(given: str) -> Path | None:
    """The record that `given` means; None where Lightning may know what to do with it, or says that it does not."""
    if given in _WORDS_OF_LIGHTNING:
        return None
    try:
        return find_checkpoint(given)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(error) from error


def _refuse_older_end(directory: Path | None) -> None:
    """Refuse the end of a run of an older runtime, which tells no step: what comes after it cannot be counted."""
    with contextlib.suppress(BrokenCheckpointError, OSError):  # which the look for the newest tells
        final = None if directory is None else find_final(directory)
        if final is not None and final.is_old:
            raise UnusableConfigurationError(
                f"{str(final.path)!r} is the end of a run of an older runtime: there is nothing to train. Name the "
                "checkpoint to go on from by `--ckpt_path`, or choose another `dirpath`."
            )


def _unreadable(error: OSError) -> UnusableConfigurationError:
    return UnusableConfigurationError(f"{_text_of_error(error)}; let this user read it, or move it away")


def _text_of_error(error: Exception) -> str:
    """The text of an error, without the system's number where it is about a path."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error).strip()


def _as_text(dumper: yaml.SafeDumper, interval: Interval) -> yaml.ScalarNode:
    return dumper.represent_str(interval.value)


# The default of an argument of Lightning's `Timer`, which LightningCLI could not write into the configuration it saves.
yaml.SafeDumper.add_representer(Interval, _as_text)
