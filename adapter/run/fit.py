"""Run the Lightning fit of a session: pass it to callbacks, continue the runs of loggers, and watch the other ranks.

If a strategy trains in copies of this process (``ddp_spawn``, ``ddp_fork``), the session stays here. In the copies,
callbacks and loggers keep their own log and uploads, as under a plain Trainer.

On several nodes, `NodeCheck` refuses a run whose nodes have different folders or code, before anything is trained.

This module imports Lightning, so import it only once there is something to train.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import platform
import secrets
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
import torch.distributed as dist
import xxhash
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from typing_extensions import override

from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.hook.hook import join_run
from ...callbacks.lightning_internals import set_run_of_logger, trains_in_copies
from ...callbacks.logged_steps import keep_logged_steps, log_each_step_once
from ...callbacks.rank_channel import Channel
from ...reporters.events.event_log import EventLog
from ...reporters.events.event_logger import has_stock_checkpoint
from ..cluster.job_context import host_name
from ..contract.exceptions import StartupContractError
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.redaction import safe_str, without_secrets
from ..plumbing.safe_open import PRIVATE_FILE, read_own
from .deaths import StepNote, forget_beginning, forget_deaths, note_deaths
from .rank_files import FOLDER
from .ranks import (
    POLL_S,
    STORE,
    RankProcesses,
    RankZero,
    failed_ranks,
    kill_paused,
    paused_ranks,
    stopped_before_meeting,
    warn_of_absent_ranks,
)
from .report import explain_memory
from .session import Session
from .start import RUNS_FILE, Start

log = logging.getLogger(__name__)

LARGEST_BYTES = 1 << 20
NODE_PACKAGES = ("genlight", "torch", "lightning", "numpy", "pyarrow", "safetensors")
_stores: list[Any] = []
"""The store in which the ranks meet. It must live as long as the process group."""
FOLDER_PATIENCE_S = 10.0
"""How long a network file system may take to show a new file on another node."""


def join(session: Session, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Hand the session to the callbacks and loggers of `trainer`, and let it follow the training of `module`.

    Loggers get hyperparameters without secrets, whatever the class of `module`.
    """
    for logger in trainer.loggers:
        logger.log_hyperparams = functools.partial(_log_hyperparams, logger)  # type: ignore[method-assign]
    session.stop.run_state = run_state_of(trainer)
    session.explain_further = functools.partial(explain_memory, trainer=trainer, module=module, run=session.folder)
    session.count_steps = lambda: int(getattr(module, "failed_step", trainer.global_step))
    if not trains_in_copies(trainer):
        join_run(trainer, session)
    session.has_other_checkpoint = functools.partial(has_stock_checkpoint, trainer)
    session.before_report += [functools.partial(saver.report_durable, trainer) for saver in savers_of(trainer)]


def _log_hyperparams(logger: Logger, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
    public = without_secrets(vars(params) if isinstance(params, Namespace) else params)
    type(logger).log_hyperparams(logger, public, *args, **kwargs)


def fit(session: Session, trainer: pl.Trainer, module: pl.LightningModule, **arguments: Any) -> None:
    """Train `module`, and end the attempt if another rank fails.

    Args:
        session: The session, which the callbacks have joined.
        trainer: The Lightning trainer.
        module: The module to train.
        **arguments: Further arguments of ``Trainer.fit``.

    Raises:
        TrainingCanceled: The training was stopped.
        BaseException: Whatever else ended the training; `Session.fail` explains it.
    """
    if session.is_rank_zero:
        saves = "saves a checkpoint after the current step, and stops"
        stops = "stops after the current step"
        session.stop.signals.what_next = f"the run {stops if session.checkpoints_dir is None else saves}"
        if not trains_in_copies(trainer):
            keep_logged_steps(trainer)
    if (start := session.start) is not None and session.folder is not None:
        if trains_in_copies(trainer):  # steps of copies are not noted
            forget_beginning(session.folder)
        else:
            callbacks_of(trainer).append(NoteStep(session.folder, session.job, start))
    try:
        with _watched_ranks(session, trainer):
            trainer.fit(module, **arguments)
    finally:
        session.stop.signals.what_next = ""
    if session.start is not None and session.folder is not None and session.is_rank_zero:
        forget_deaths(session.folder)


@contextlib.contextmanager
def _watched_ranks(session: Session, trainer: pl.Trainer) -> Iterator[None]:
    """End the attempt when another rank fails, even while this one hangs in a collective."""
    if trainer.world_size == 1 or trains_in_copies(trainer):
        yield
        return
    processes = session.processes = RankProcesses(trainer)
    session.stop.signals.before_exit = processes.kill
    files = session.rank_files if session.is_rank_zero else None
    absent = warn_of_absent_ranks(trainer.global_rank, trainer.world_size)
    checks = [stopped_before_meeting(session.stop), failed_ranks(files, processes), absent]
    if files is not None:
        session.watch.pause = files.await_exit
        checks.append(paused_ranks(lambda: files.processes, session.stop))
        session.before_exit.append(lambda: kill_paused(files.processes))
    session.before_exit.append(processes.kill)
    announcement = RankZero.announce() if session.is_rank_zero else contextlib.nullcontext()
    try:
        with session.watch.looking(*checks), announcement, _store_on_loopback(trainer):
            yield
    finally:
        session.stop.signals.before_exit = lambda: None


@contextlib.contextmanager
def _store_on_loopback(trainer: pl.Trainer) -> Iterator[None]:
    """Let the ranks that Lightning starts on one machine meet in a store that no other machine can reach.

    The store that torch opens listens at every address, and anybody may read and write it. A torchrun agent announces
    its own store by two variables. Rank zero sets the same variables here, and the other ranks inherit them. Under a
    supervisor (`restarts.py`), rank zero opens the store at the port that the supervisor hands over in `STORE`.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    is_elsewhere = trainer.num_nodes > 1 or dist.is_initialized()
    supervised = os.environ.pop(STORE, None)
    if supervised is not None and isinstance(environment, LightningEnvironment):  # the supervisor set the variables
        _open_store(environment, int(supervised))
        yield
        return
    if is_elsewhere or not isinstance(environment, LightningEnvironment) or environment.creates_processes_externally:
        yield
        return
    try:
        listener = socket.create_server((environment.main_address, environment.main_port))
    except OSError:  # torch will raise the same error, and `explain` recognizes it
        yield
        return
    _open_store(environment, listener.detach())
    variables = {"TORCHELASTIC_USE_AGENT_STORE": str(True), "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _open_store(environment: LightningEnvironment, listener: int) -> None:
    address, port = environment.main_address, environment.main_port
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener
    )
    _stores[:] = [store]


def continue_runs(trainer: pl.Trainer, directory: Path, *, resumes: bool, versions: bool) -> None:
    """Create or find the runs of the trainer's loggers. Call it on rank zero, before the fit.

    If the training resumes, each logger continues its earlier run, and logs each step once.

    Args:
        trainer: The trainer. Loggers of classes that genlight does not know are not touched.
        directory: The folder of `RUNS_FILE`, which records the run of each logger.
        resumes: Whether loggers continue their earlier runs instead of starting new ones.
        versions: Whether loggers that write files also continue, in the folder of their earlier ``version``. Under
            LightningCLI other parts of the program may write files there and refuse to replace them.
    """
    has_files = versions and not trains_in_copies(trainer)  # `fit` does not correct files that copies write
    kinds = (WandbLogger, MLFlowLogger, *((CSVLogger, TensorBoardLogger) if has_files else ()))
    tracked = [logger for logger in trainer.loggers if isinstance(logger, kinds)]
    if not tracked:
        return
    make_directory(directory, shared=None)
    path = directory / RUNS_FILE
    earlier, runs = _read(path) if resumes else {}, {}
    for index, logger in enumerate(tracked):
        name = f"{type(logger).__name__}-{index}"
        if name in earlier and set_run_of_logger(logger, earlier[name]):
            try:
                _run_of(logger)
            except Exception as error:  # noqa: BLE001  # the error classes live in the backend's package
                log.warning(
                    "%s begins a new run, since it cannot continue %s: %s", name, earlier[name], safe_str(error)
                )
                set_run_of_logger(logger, None)
        run = runs[name] = _run_of(logger)
        if isinstance(logger, WandbLogger | MLFlowLogger):
            log_each_step_once(logger, directory / f"logged-{name}.json", run, resumes=earlier.get(name) == run)
    write_bytes_durably(path, msgspec.json.encode(runs) + b"\n", mode=PRIVATE_FILE)


def _read(path: Path) -> dict[str, str]:
    """Return the earlier run of each logger, by name; empty if the file is absent or unreadable."""
    try:
        return msgspec.json.decode(read_own(path, limit=LARGEST_BYTES), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("loggers begin new runs, because %s cannot be read: %s", path, safe_str(error))
        return {}


def _run_of(logger: Any) -> str:
    """Return the id of the logger's run. Accessing the run creates it or finds it on the server."""
    if isinstance(logger, CSVLogger | TensorBoardLogger):
        return logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    run = logger.experiment
    return str(logger.run_id if isinstance(logger, MLFlowLogger) else run.id)


class NoteStep(pl.Callback):
    """Notes each step when it begins, so that the next attempt knows in which one this process was killed.

    Args:
        folder: The run's folder.
        job: Digest of the job.
        start: How this attempt starts.
    """

    def __init__(self, folder: Path, job: str, start: Start) -> None:
        self._folder, self._job, self._start = folder, job, start
        self._note: StepNote | None = None
        self._deadly = {death.where for death in start.deaths}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder, record = self._folder, 0 if self._start.record is None else self._start.record.step
        if trainer.is_global_zero:  # the ranks have met, so each has read the notes
            note_deaths(folder, self._start.deaths)
        went_back = self._start.went_back
        try:
            self._note = StepNote(folder, trainer.global_rank, job=self._job, record=record, went_back=went_back)
        except OSError as error:
            log.warning("a repeated death in one step would not be noticed: %s", error)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._note is None:
            return
        place = trainer.global_step + 1, trainer.current_epoch, batch_idx
        if self._deadly and place in self._deadly:
            from ..check.batches import describe_batch  # loads pyarrow

            self._note.name_rows(describe_batch(batch))
        self._note.begin(*place)


class RestartTimes(pl.Callback):
    """Logs as metrics how long each part of a restart took, from the death of a rank to the first new batch.

    Args:
        event_log: The open log.
        times: The supervisor's `TIMES`.
    """

    def __init__(self, event_log: EventLog, times: str) -> None:
        self._event_log = event_log
        self._times: dict[str, float] = {**json.loads(times), "prepared": time.time()}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._times.setdefault("met", time.time())

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._times.setdefault("loaded", time.time())

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        if not self._times:
            return
        times = [*self._times.values(), time.time()]
        parts = ("end", "fork", "prepare", "meet", "load", "first_batch")
        seconds = (later - earlier for earlier, later in itertools.pairwise(times))
        metrics = {f"restart/{part}_s": part_s for part, part_s in zip(parts, seconds, strict=True)}
        self._event_log.metrics(metrics | {"restart/seconds": times[-1] - times[0]}, step=trainer.global_step)
        self._times.clear()


class NodeCheck(pl.Callback):
    """Refuses a run on several nodes that do not share its folder, or whose packages or code differ.

    Without a shared folder each node would write its part of a checkpoint into a folder that the others cannot see.

    Args:
        folder: The run's folder.
        plugin: The trainer class, or an instance of it.
    """

    def __init__(self, folder: Path, plugin: Any) -> None:
        self.folder = folder / FOLDER
        self.plugin = plugin

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare the nodes, on all ranks at the same time.

        Raises:
            StartupContractError: Nodes differ. Raised on every rank; the message lists differences and hosts.
        """
        if stage != "fit" or trainer.num_nodes == 1:
            return
        channel = Channel()
        path = self.folder / channel.share(f"seen-by-all-{secrets.token_hex(8)}")
        if channel.rank == 0:
            make_directory(self.folder)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
        channel.share(None)  # now the file exists
        folder = "shared" if _appears(path) else f"another one ({self.folder.parent})"
        facts = channel.gather_everywhere((host_name(), {"the run's folder": folder, **_installed(self.plugin)}))
        if channel.rank == 0:
            path.unlink()
        if faults := node_faults(facts):
            way_out = "All nodes need the same folder, packages and code, at the same path"
            raise StartupContractError("startup.invalid_artifact_paths", f"{'; '.join(faults)}. {way_out}.")


def node_faults(facts: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return one sentence for each fact that differs from the first node's. `facts` has host and facts of each rank."""
    first, here = facts[0]
    faults = [
        f"{name} is {there.get(name)} on {host}, and {here.get(name)} on {first}"
        for host, there in facts
        for name in {**here, **there}
        if there.get(name) != here.get(name)
    ]
    return list(dict.fromkeys(faults))  # all ranks of a node report the same


def _appears(path: Path) -> bool:
    end = time.monotonic() + FOLDER_PATIENCE_S
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True


def _installed(plugin: Any) -> dict[str, str]:
    cls = plugin if isinstance(plugin, type) else type(plugin)
    files = {getattr(sys.modules.get(base.__module__), "__file__", None) for base in cls.__mro__}
    code = {os.path.basename(file): xxhash.xxh3_64_hexdigest(Path(file).read_bytes()) for file in files if file}
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in NODE_PACKAGES}, **code}
