"""LightningCLI with genlight's defaults, for ``genlight fit``, ``validate``, ``test``, ``predict`` and users' programs.

`lightning_start` chooses the checkpoint to start from. Importing this module changes jsonargparse for the process,
because jsonargparse has no settings for a single parser.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shlex
import sys
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

from ...callbacks.checkpoint.listing import list_checkpoints
from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.checkpoint.selection import newest_complete
from ...callbacks.job_progress import JobProgress
from ...callbacks.lightning_internals import trains_in_copies
from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import StopSources
from ...callbacks.stop.stop_requests import StopRequests
from ..cluster.job_context import is_rank_zero, rank_errors
from ..cluster.placement import launcher_arguments, placement_fault
from ..contract.exceptions import GenlightError, UsageError
from ..job.parser_errors import UnusableValueError, root_cause, shorten_error
from ..module.module import ContractModule
from ..plumbing.durable import write_bytes_durably
from ..plumbing.failures import is_input_error, stop_reason, text_of_error
from ..plumbing.imports import collect_as_usual
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.redaction import secrets_in, without_secrets
from ..plumbing.text import as_list
from ..run.fit import continue_runs, fit, join
from ..run.folder import directory_fault
from ..run.report import show_results
from ..run.session import Completion, FollowerSession, Session
from .lightning_start import SaveOnStop, begin_fit, checkpoints_of, find_start, hold_folder, save_on_stop, say
from .parser import refuse, suggest_name
from .terminal import print_error

log = logging.getLogger(__name__)

# Read docstrings that are below a field, as in the feed's options.
set_parsing_settings(docstring_parse_attribute_docstrings=True)
# The default of an argument of Lightning's `Timer`. Without this, LightningCLI cannot save the configuration.
yaml.SafeDumper.add_representer(Interval, lambda dumper, interval: dumper.represent_str(interval.value))

_load_yaml = get_loader("yaml")


def _load_configuration(text: str) -> Any:
    """Load a YAML text.

    Raises:
        yaml.YAMLError: A mapping has a key twice, of which YAML would silently take the last value.
    """
    value, waiting = _load_yaml(text), [yaml.compose(text, Loader=yaml.SafeLoader)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            names = set[str]()
            for key, _ in node.value:
                if key.value in names and key.value != "<<":  # several mappings may be merged
                    problem = f"the key {key.value!r} appears twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                names.add(str(key.value))
            waiting += [each for _, each in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
    return value


set_loader("yaml", _load_configuration, exceptions=(yaml.YAMLError,))


class GenlightParser(LightningArgumentParser):
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
        parser, message = getattr(ex, "subcommand_parser", None) or self, shorten_error(message)
        suggestion = suggest_name(parser, message)
        if message.startswith("unrecognized arguments: ") and message.endswith((".json", ".yaml", ".yml")):
            suggestion = ". Name a configuration by --config"
        elif message.startswith('Parser key "trainer":\nUnable to load config'):  # in a job, `trainer` names a class
            suggestion = "\nIf the configuration is a job, start it with `genlight run`"
        refuse(parser, message, suggestion)


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


class EndedError(SystemExit):
    """A subcommand failed or was stopped, and has reported it. The code is genlight's exit code."""


class GenlightCLI(LightningCLI):
    """LightningCLI with durable checkpoints, clean stops and automatic resume.

    ``GenlightCLI(MyModule, MyDataModule)`` takes the arguments of LightningCLI, and a subclass may override the same
    methods. Every run has a `StopRequests` callback and writes through `DurableCheckpointIO`. A stop (SIGTERM, Ctrl-C)
    saves a checkpoint after the current step: by genlight's `Checkpoint` callback, or next to the files of Lightning's
    `ModelCheckpoint`; without either, a warning says at the start that nothing will be saved. ``--resume auto``
    continues from the newest complete checkpoint, if there is one.

    The program ends with genlight's exit codes: 75 after a stop, 1 after a failure, 2 for a mistake in the
    configuration. After a subcommand that ended as planned, the constructor returns.

    Args:
        model_class: As for LightningCLI; None lets the configuration name any class.
        datamodule_class: As for LightningCLI.
        save_config_callback: As for LightningCLI; the default writes ``config-<attempt>.yaml`` next to the checkpoints.
        trainer_defaults: As for LightningCLI; genlight's callbacks and plugin are added.
        parser_class: As for LightningCLI.
        settings: Further arguments of LightningCLI.

    Raises:
        SystemExit: With the exit code, if a subcommand did not end as planned.
    """

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveAttemptConfig,
        *,
        trainer_defaults: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = GenlightParser,
        **settings: Any,
    ) -> None:
        if faults := rank_errors(os.environ):
            raise EndedError(print_error("", "\n".join(faults)))
        if os.getcwd() not in sys.path:  # for a console script, Python does not add the working directory
            sys.path.insert(0, os.getcwd())
        arguments = settings.get("args")
        words = sys.argv[1:] if arguments is None else arguments if isinstance(arguments, list | tuple) else None
        prog = settings.get("parser_kwargs", {}).get("prog")
        self._command = None if words is None else [*([prog] if prog else ["python", sys.argv[0]]), *words]
        """The command line of this process; None if a program gave the arguments as an object."""
        self._resumed_step: int | None = None
        self._completion: Completion | None = None
        defaults = dict(trainer_defaults or {})
        # Not an instance, because jsonargparse copies defaults, and an instance holds a lock.
        defaults.setdefault("plugins", [{"class_path": "genlight.callbacks.DurableCheckpointIO"}])
        defaults["callbacks"] = [*as_list(defaults.get("callbacks")), StopRequests()]
        collect_as_usual()  # the large imports are done
        with contextlib.ExitStack() as stack:
            # A validation or a test ends on a signal as usual.
            trains = "fit" in (words or ["fit"])
            signals = StopSignals.handling() or StopSignals()
            if trains and not signals.are_handled:
                stack.enter_context(signals.installed())
            self._session = (Session if is_rank_zero() else FollowerSession)(
                stop=StopSources(signals=signals), refuse=lambda error: UsageError(text_of_error(error))
            )
            stack.enter_context(self._session)
            stack.enter_context(redacted_logs(()))
            try:
                super().__init__(
                    model_class,
                    datamodule_class,
                    save_config_callback,
                    trainer_defaults=defaults,
                    parser_class=parser_class,
                    **settings,
                )
                code = self._session.complete(self._completion)
                self._show_results()
            except Exception as error:  # noqa: BLE001 - the session reports every error
                code = self._session.fail(error)
        if code:
            raise EndedError(code)

    def __getstate__(self) -> dict[str, Any]:
        # The parser refers to this object, and spawned processes get a copy of the parser. The session stays here.
        return {name: value for name, value in vars(self).items() if name != "_session"}

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
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
        root = self._settings.trainer.default_root_dir or os.curdir
        self._session.folder = None if "://" in root else Path(root)
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            cause = root_cause(error)
            if not isinstance(cause, GenlightError | UnusableValueError) and not is_input_error(cause):
                raise cause from None  # without jsonargparse's long messages
            raise UsageError(str(cause)) from error

    @property
    def _settings(self) -> Any:
        """The arguments of the subcommand; with ``run=False``, all arguments."""
        return self.config if self.subcommand is None else self.config[self.subcommand]

    @property
    def _resumes(self) -> bool:
        return bool(self._settings["resume"] == "auto")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        settings = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        shows_progress = any(isinstance(each, ProgressBar | JobProgress) for each in as_list(settings.get("callbacks")))
        if self.subcommand == "fit" and settings.get("enable_progress_bar") is None and not shows_progress:
            kwargs["enable_progress_bar"] = False  # Lightning's bar counts epochs; a trainer class has none
            self.trainer_defaults["callbacks"] = [*self.trainer_defaults["callbacks"], JobProgress()]
        trainer = super().instantiate_trainer(**{**kwargs, **launcher_arguments({**settings, **kwargs})})
        if (fault := placement_fault(trainer)) is not None:
            raise UsageError(fault)
        return trainer

    @override
    def _parse_ckpt_path(self) -> None:
        # LightningCLI would unpickle the checkpoint to read its hyperparameters; our checkpoints are not pickles.
        return

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        session, checkpoints = self._session, checkpoints_of(self.trainer)
        if subcommand == "fit":
            session.place(checkpoints or session.folder, checkpoints)
            self._prepare_stop(checkpoints)
        with redacted_logs(session.secrets):
            self._choose_start(subcommand)
            super()._run_subcommand(subcommand)
            if subcommand == "fit":
                self._note_completion()

    def _prepare_stop(self, checkpoints: Path | None) -> None:
        """Have a stop save a checkpoint, or warn that it will not; set the session's `resume_hint`."""
        session = self._session
        if fault := save_on_stop(self.trainer):
            text = "a stop will save nothing, because %s; add the callback genlight.callbacks.Checkpoint"
            say(self.trainer, text, fault, level=logging.WARNING)
        if checkpoints is None:
            session.resume_hint = (
                "With the callback genlight.callbacks.Checkpoint there would be a checkpoint to resume."
            )
            return
        words = ["--ckpt_path", "null"] if self._settings.get("ckpt_path") is not None else []
        self._hint_at(*words, *([] if self._resumes else ["--resume", "auto"]))

    def _hint_at(self, *words: str) -> None:
        if self._command is not None:  # if an option appears twice, the last one counts
            self._session.resume_hint = f"To continue:\n  {shlex.join([*self._command, *words])}"

    def _choose_start(self, subcommand: str) -> None:
        """Make the subcommand start from the named or the newest checkpoint, and refuse to overwrite others."""
        is_fit, trainer, session = subcommand == "fit", self.trainer, self._session
        if is_fit:
            session.stop.raise_if_signalled()
            hold_folder(session)
        elif subcommand == "predict" and isinstance(self.model, ContractModule):
            name = type(self.model.plugin).__qualname__
            raise UsageError(f"{name} is a trainer class and cannot predict; `predict` takes a LightningModule")
        path, start = find_start(trainer, self._settings, is_fit=is_fit)
        self._resumed_step = None if start is None or start.record is None else start.record.step
        self.config_init[subcommand]["ckpt_path"] = path
        if is_fit:
            begin_fit(session, trainer, start, self._settings)
        elif path is None and self._resumes:
            raise UsageError(f"there is no checkpoint in {str(checkpoints_of(trainer))!r}; name one by --ckpt_path")
        elif path is None:
            say(trainer, "using the newly built model; to use a checkpoint, add --ckpt_path or --resume auto")

    def fit(self, model: pl.LightningModule, **arguments: Any) -> None:
        """Train; called by LightningCLI.

        Raises:
            TrainingCanceled: The run was stopped.
        """
        session, trainer = self._session, self.trainer
        join(session, trainer, model)
        if session.checkpoints_dir is not None and session.is_rank_zero:
            resumes = self._resumed_step is not None or self._resumes
            continue_runs(trainer, session.checkpoints_dir, resumes=resumes, versions=False)
        try:
            fit(session, trainer, model, **arguments)
        except BaseException as error:
            for saver in savers_of(trainer) if stop_reason(error) else ():
                if isinstance(saver, SaveOnStop) and (newest := newest_complete(saver.directory)) is not None:
                    session.checkpoints_dir = saver.directory
                    self._hint_at(*([] if self._resumes else ["--ckpt_path", str(newest.path)]))
            if isinstance(error, SystemExit):  # raised by the user's code
                raise EndedError(session.fail(error)) from error
            raise

    def _note_completion(self) -> None:
        """Note the outcome. The final checkpoint is the newest one up to the last step of this training."""
        trainer, directory = self.trainer, self._session.checkpoints_dir
        listing = [] if directory is None or not trainer.is_global_zero else list_checkpoints(directory)
        records = [listed.record for listed in listing if listed.record is not None]
        step = getattr(self.model, "completed_steps", trainer.global_step)
        if records and trains_in_copies(trainer):  # spawned copies trained, and this process does not know their step
            step = max(records, key=lambda record: record.created_at_ms).step
        stopped = getattr(self.model, "stopped", None) or ("should_stop" if trainer.should_stop else None)
        # Later checkpoints belong to another fit, if this one continued from an older checkpoint.
        newest = next((record for record in reversed(records) if record.step <= step), None)
        self._completion = Completion.of_record(newest, step, stopped)

    def _show_results(self) -> None:
        """Show how a training ended, and the paths of its results."""
        completion, session = self._completion, self._session
        if completion is None or not session.is_rank_zero or getattr(self.trainer, "fast_dev_run", False):
            return
        ended, events = f"fit {completion}", None if session.event_log is None else session.event_log.path
        if completion.step == self._resumed_step:
            ended = f"the fit had already completed at step {completion.step}; there was nothing to train"
        places = {"final checkpoint": completion.final_checkpoint, "checkpoints": session.checkpoints_dir}
        show_results(ended, {**places, "events": events})
