"""``genlight fit``, ``validate``, ``test`` and ``predict``: LightningCLI with genlight's defaults."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import yaml
from jsonargparse import get_loader, set_loader, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

from ...callbacks.checkpoint.format.record import CheckpointRecord
from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.checkpoint.selection import find_checkpoint, list_checkpoints
from ...callbacks.job_progress import JobProgress
from ...callbacks.lightning_internals import trains_in_copies
from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import StopSources
from ...callbacks.stop.stop_requests import StopRequests
from ..cluster.job_context import is_rank_zero
from ..cluster.placement import placed_by_launcher, placement_fault
from ..contract.exceptions import EventLogError, GenlightError, MonitorError, UsageError
from ..job.parser_errors import UnusableValueError, root_cause, shortened
from ..module.module import ContractModule
from ..plumbing.durable import write_bytes_durably
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.redaction import secrets_in, without_secrets
from ..plumbing.text import as_list
from ..run.fit import continue_runs, fit, join
from ..run.folder import directory_fault, lock_directory
from ..run.report import is_input_error, show_results, shown_path
from ..run.session import Completion, FollowerSession, Session
from ..run.start import ExitHints, move_checkpoints_aside, newest_start, overlapping, refuse_to_overwrite
from .parser import refuse, suggest_name

log = logging.getLogger(__name__)

_WORDS_OF_LIGHTNING = ("best", "hpc", "last")
"""Words that ``--ckpt_path`` accepts in place of a path."""
_FIT = ExitHints(
    resume="continue from them with `--resume auto`",
    start_over="move them aside and start at step 0 with `--resume never`",
    other_folder="choose another `dirpath`",
)
_EVALUATION = ExitHints(start_over="name another by `--ckpt_path`")
_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)

# The fields of a feed's options have their docstrings below them.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


_load_yaml = get_loader("yaml")


def _load_configuration(text: str) -> Any:
    """Load a YAML text.

    Raises:
        yaml.YAMLError: It has a key twice, is nested too deeply, or is a job, whose ``trainer`` is the name of a class.
    """
    try:
        value = _load_yaml(text)
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    if isinstance(value, dict) and "run_id" in value and isinstance(value.get("trainer"), str):
        raise yaml.YAMLError("it is a job; run it with `genlight run JOB.json`")
    return value


def _refuse_repeated_keys(tree: yaml.Node | None) -> None:
    """Refuse a mapping with one key twice, of which YAML would silently take the last value."""
    waiting, seen = [tree], set[int]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:  # an alias is the node of its anchor
            continue
        seen.add(id(node))
        names = set[str]()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in names and key.value != "<<":
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} appears twice", problem_mark=key.start_mark)
            names.add(str(key.value))
        waiting += itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value


set_loader("yaml", _load_configuration, exceptions=(yaml.YAMLError,))


def checkpoints_of(trainer: pl.Trainer) -> Path | None:
    """Return the folder of the `Checkpoint` callback; None without one, or if this run saves no checkpoints."""
    savers = [] if getattr(trainer, "fast_dev_run", False) else savers_of(trainer)
    return next((saver.dirpath or Path(trainer.default_root_dir) / "checkpoints" for saver in savers), None)


class SaveAttemptConfig(SaveConfigCallback):
    """Writes ``config-<attempt>.yaml`` next to the checkpoints; without checkpoints, into the logger's folder.

    Only a fit is an attempt; ``validate``, ``test`` and ``predict`` write none. Secrets are omitted.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self.already_saved:
            return
        self.already_saved = True
        folder = checkpoints_of(trainer) or trainer.log_dir  # a collective: `log_dir` is broadcast to all ranks
        if not trainer.is_global_zero or folder is None or "://" in str(folder):
            return
        text = yaml.safe_dump(without_secrets(yaml.safe_load(self.parser.dump(self.config))), sort_keys=False)
        if fault := directory_fault("trainer.default_root_dir", Path(folder), "Choose another."):
            raise UsageError(fault)
        paths = (Path(folder, f"config-{attempt}.yaml") for attempt in itertools.count(1))
        write_bytes_durably(next(path for path in paths if not os.path.lexists(path)), text.encode())


class _Parser(LightningArgumentParser):
    """LightningCLI's parser with shorter errors, which suggest the nearest name for a misspelled one."""

    @override
    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().parse_path(cfg_path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error(f"The configuration {str(cfg_path)!r} is not text: {error}")

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and end the process with 2, as argparse does."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser, message = getattr(ex, "subcommand_parser", None) or self, shortened(message)
        names_file = message.startswith("unrecognized arguments: ") and message.endswith((".json", ".yaml", ".yml"))
        refuse(parser, message, ". Name a configuration by --config" if names_file else suggest_name(parser, message))


class GenlightCLI(LightningCLI):
    """LightningCLI with durable checkpoints, clean stops and automatic resume.

    Additions to LightningCLI: every run has a `StopRequests` callback and writes through `DurableCheckpointIO`, and
    ``--resume auto`` continues from the newest complete checkpoint of the `Checkpoint` callback, if there is one.
    """

    def __init__(self, arguments: Sequence[str], session: Session) -> None:
        self._session = session
        self._arguments = arguments
        self._resumed_step: int | None = None
        self.completion: Completion | None = None
        """Outcome of a fit; None before its end."""
        super().__init__(
            pl.LightningModule,
            None,  # a model may bring its own loaders
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SaveAttemptConfig,
            trainer_defaults={
                # Not an instance, because jsonargparse copies defaults, and an instance holds a lock.
                "plugins": [{"class_path": "genlight.callbacks.DurableCheckpointIO"}],
                "callbacks": [StopRequests()],
            },
            seed_everything_default=False,
            parser_kwargs={"prog": "genlight"},
            parser_class=_Parser,
            args=list(arguments),
        )

    def __getstate__(self) -> dict[str, Any]:
        # Spawned processes get a copy of the parser, and with it of this object; the session stays here.
        return {name: value for name, value in vars(self).items() if name != "_session"}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--resume",
            choices=["auto", "never"],
            default=None,
            help="auto: continue from the newest complete checkpoint of the callback genlight.callbacks.Checkpoint, or "
            "start at step 0 if there is none; never: move its checkpoints aside and start at step 0. Without this "
            "option a fit refuses to start if there are checkpoints. For validate, test and predict, auto takes the "
            "newest",
        )

    @override
    def instantiate_classes(self) -> None:
        self._session.secrets = secrets_in(self.config.as_dict())
        root = self.config[str(self.subcommand)].trainer.default_root_dir or os.curdir
        self._session.folder = None if "://" in root else Path(root)
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            cause = root_cause(error)
            if not isinstance(cause, GenlightError | UnusableValueError) and not is_input_error(cause):
                raise cause from None  # Drop jsonargparse's long errors about it.
            raise UsageError(str(cause)) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        settings = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        shows_progress = any(isinstance(each, ProgressBar | JobProgress) for each in as_list(settings.get("callbacks")))
        if self.subcommand == "fit" and settings.get("enable_progress_bar") is None and not shows_progress:
            kwargs["enable_progress_bar"] = False  # Lightning's bar counts epochs; a trainer class has none
            self.trainer_defaults["callbacks"] = [*self.trainer_defaults["callbacks"], JobProgress()]
        trainer = super().instantiate_trainer(**{**kwargs, **placed_by_launcher({**settings, **kwargs})})
        fault = placement_fault(trainer)
        if fault is not None:
            raise UsageError(fault)
        return trainer

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        session, checkpoints = self._session, checkpoints_of(self.trainer)
        if subcommand == "fit":
            session.place(checkpoints or session.folder, checkpoints)
            self._set_resume_hint(checkpoints)
        with redacted_logs(session.secrets):
            try:
                super()._run_subcommand(subcommand)
            except MonitorError:
                raise
            except (ValueError, MisconfigurationException, *_WRONG_PATH) as error:
                if not is_input_error(error):
                    raise
                raise UsageError(_text_of_error(error)) from error
            except EventLogError as error:
                if self.trainer.global_step:
                    raise
                raise UsageError(f"{error}; choose another `path` for the event log") from error

    def _set_resume_hint(self, checkpoints: Path | None) -> None:
        session = self._session
        if checkpoints is None:
            session.resume_hint = (
                "With the callback genlight.callbacks.Checkpoint there would be a checkpoint to resume."
            )
            return
        words = ["genlight", *self._arguments]
        # If an option appears twice, the last one counts.
        words += ["--ckpt_path", "null"] if self.config["fit"].get("ckpt_path") is not None else []
        words += ["--resume", "auto"] if self.config["fit"]["resume"] != "auto" else []
        session.resume_hint = f"To continue:\n  {shlex.join(words)}"

    @override
    def _parse_ckpt_path(self) -> None:
        # LightningCLI would unpickle the checkpoint to read its hyperparameters; our checkpoints are not pickles.
        return

    def before_fit(self) -> None:
        """Choose the checkpoint to resume from, and refuse to overwrite others."""
        self._session.stop.raise_if_signalled()
        directory = self._session.checkpoints_dir
        if directory is not None and self.trainer.is_global_zero:  # before anything reads the directory
            if fault := directory_fault("dirpath", directory, "Choose another."):
                raise UsageError(fault)
            self._session.holds.callback(lock_directory(directory, "genlight fit").release)
        if self._start_from_checkpoint() or directory is None:
            return
        if self.config["fit"]["resume"] == "never":
            for saver in savers_of(self.trainer):
                saver.replace_existing = True  # also a file that is no checkpoint, but has the name of one
            if self.trainer.is_global_zero:  # otherwise a later `--resume auto` would continue another training
                move_checkpoints_aside(directory)
        else:
            refuse_to_overwrite(directory, _FIT)

    def before_validate(self) -> None:
        """Choose the checkpoint to evaluate or predict with."""
        if self._start_from_checkpoint():
            return
        if self._resumes:
            raise UsageError(
                f"there is no checkpoint in {str(checkpoints_of(self.trainer))!r}; name one by --ckpt_path"
            )
        self._say("using the newly built model; to use a checkpoint, add --ckpt_path or --resume auto")

    before_test = before_validate

    def before_predict(self) -> None:
        """Refuse a trainer class, since it cannot predict; otherwise like `before_validate`."""
        if isinstance(self.model, ContractModule):
            name = type(self.model.plugin).__qualname__
            raise UsageError(f"{name} is a trainer class and cannot predict; `predict` takes a LightningModule")
        self.before_validate()

    def fit(self, model: pl.LightningModule, **arguments: Any) -> None:
        """Train; called by LightningCLI.

        Raises:
            TrainingCanceled: The run was stopped.
        """
        session, trainer = self._session, self.trainer
        join(session, trainer, model)
        if session.checkpoints_dir is not None and session.is_rank_zero:
            resumes = self._resumed_step is not None or self._resumes
            continue_runs(trainer, session.checkpoints_dir, resumes=resumes)
        try:
            fit(session, trainer, model, **arguments)
        except SystemExit as error:  # raised by the user's code: the process ends with its code
            session.fail(error)
            raise

    def after_fit(self) -> None:
        """Set `completion`. The final checkpoint is the newest one up to the last step of this training."""
        trainer, directory = self.trainer, self._session.checkpoints_dir
        listing = [] if directory is None or not trainer.is_global_zero else list_checkpoints(directory)
        records = [listed.record for listed in listing if listed.record is not None]
        step = getattr(self.model, "completed_steps", trainer.global_step)
        if records and trains_in_copies(trainer):  # this process does not know the steps of the copies
            step = max(records, key=lambda record: record.created_at_ms).step
        stopped = getattr(self.model, "stopped", None) or ("should_stop" if trainer.should_stop else None)
        # Later checkpoints belong to another fit, if this one continued from an older checkpoint.
        newest = next((record for record in reversed(records) if record.step <= step), None)
        self.completion = Completion.of_record(newest, step, stopped)

    def show_results(self) -> None:
        """Show how a training ended, and the paths of its results."""
        completion, session = self.completion, self._session
        if completion is None or not session.is_rank_zero or getattr(self.trainer, "fast_dev_run", False):
            return
        ended, events = f"fit {completion}", None if session.event_log is None else session.event_log.path
        if completion.step == self._resumed_step:
            ended = f"the fit had already completed at step {completion.step}; there was nothing to train"
        places = {"final checkpoint": completion.final_checkpoint, "checkpoints": session.checkpoints_dir}
        show_results(ended, {**places, "events": events})

    @property
    def _resumes(self) -> bool:
        return bool(self.config[str(self.subcommand)]["resume"] == "auto")

    def _start_from_checkpoint(self) -> bool:
        """Make the subcommand start from the named or the newest complete checkpoint. Return False if there is none.

        Raises:
            UsageError: There is no such checkpoint, it cannot be read, or the options contradict each other.
            StartupContractError: There are checkpoints, and none is complete.
        """
        settings, directory = self.config[str(self.subcommand)], checkpoints_of(self.trainer)
        path, doing = settings.get("ckpt_path"), "continuing after" if self.subcommand == "fit" else "using"
        if path is not None and settings["resume"] is not None:
            raise UsageError("--ckpt_path and --resume contradict each other; remove one of them")
        try:
            if path is not None:
                path = str(directory) if path == "last" and directory is not None else path
                if path not in _WORDS_OF_LIGHTNING and "://" not in path:
                    path = str(find_checkpoint(path))
                self._say("%s the checkpoint %s", doing, path)
            elif self._resumes and (newest := self._newest(directory)) is not None:
                path, self._resumed_step = str(newest.path), newest.step
                self._say("%s step %d, from %s", doing, newest.step, shown_path(newest.path))
        except FileNotFoundError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            raise UsageError(f"{_text_of_error(error)}; let this user read it, or move it away") from error
        self.config_init[str(self.subcommand)]["ckpt_path"] = path
        return path is not None

    def _newest(self, directory: Path | None) -> CheckpointRecord | None:
        if directory is None:
            raise UsageError("--resume auto needs the callback genlight.callbacks.Checkpoint in the configuration")
        records = [each.record for each in list_checkpoints(directory) if each.record is not None]
        if any(record.is_old and record.final for record in records):  # it has no step to continue from
            raise UsageError(
                f"{str(directory)!r} has the end of a run of an older runtime: there is nothing to train. Name a "
                "checkpoint by --ckpt_path, or choose another `dirpath`."
            )
        start = newest_start(directory, _FIT if self.subcommand == "fit" else _EVALUATION, knows_types=True)
        if self.subcommand == "fit" and any(saver.overlap for saver in savers_of(self.trainer)):
            start = overlapping(start, directory, knows_types=True)
        for warning in start.warnings:
            log.warning(warning)
        return start.record

    def _say(self, message: str, *values: object) -> None:
        if self.trainer.is_global_zero:
            log.info(message, *values)


def run_lightning_cli(arguments: Sequence[str], signals: StopSignals) -> int:
    """Run one of LightningCLI's subcommands and return genlight's exit code for it.

    Args:
        arguments: Arguments of the command line.
        signals: Signals that stop a fit; their handlers are already installed.
    """
    if os.getcwd() not in sys.path:  # for a console script, Python does not add the working directory
        sys.path.insert(0, os.getcwd())
    session = (Session if is_rank_zero() else FollowerSession)(stop=StopSources(signals=signals))
    with session, redacted_logs(()):
        try:
            cli = GenlightCLI(arguments, session)
            code = session.complete(cli.completion)
            cli.show_results()
            return code
        except (UsageError, MisconfigurationException) as error:
            return session.fail(UsageError(str(error)))  # its message is enough, without a traceback
        except Exception as error:  # noqa: BLE001 - the session reports every error
            return session.fail(error)


def _text_of_error(error: Exception) -> str:
    """Return the text of an error, without the error number if it is about a path."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error).strip()


def _as_text(dumper: yaml.SafeDumper, interval: Interval) -> yaml.ScalarNode:
    return dumper.represent_str(interval.value)


# The default of an argument of Lightning's `Timer`. Without this, LightningCLI cannot save the configuration.
yaml.SafeDumper.add_representer(Interval, _as_text)
